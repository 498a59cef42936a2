"""A server that is away for a while is waited for, within a budget, and the wait is told."""

from datetime import timedelta

import pytest
from tests.server.support import restartable
from tests.spark.support_write import batches_of
from tests.spark.test_write import PAIRS

from floodmark.model.errors import OutcomeUnknown, Unreachable
from floodmark.model.version import Version
from floodmark.site import Site
from floodmark.site.address import SiteAddress
from floodmark.site.connecting import connect
from floodmark.spark.runtime.patience import PAUSES, ask_patiently
from floodmark.spark.source.stream import Query
from floodmark.spark.source.writing import open_stream_writer, write_rows


class Away:
    """A server that answers at some attempt."""

    def __init__(self, answers_at: int, error: Exception) -> None:
        self.asked = 0
        self._answers_at = answers_at
        self._error = error

    def ask(self) -> int:
        self.asked += 1
        if self.asked < self._answers_at:
            raise self._error
        return self.asked


@pytest.mark.parametrize("error", [Unreachable("no answer"), OutcomeUnknown("cut off")])
def test_it_is_asked_until_it_answers_and_a_longer_wait_is_told(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    waited: list[float] = []
    assert ask_patiently(Away(3, error).ask, wait=waited.append) == 3
    assert (waited, caplog.messages) == ([0.05, 0.1], [])
    assert ask_patiently(Away(9, error).ask, wait=waited.append) == 9
    assert caplog.messages == [f"asked again for 59 s: {error}"]


def test_the_wait_has_an_end_that_says_how_long_it_was() -> None:
    waited: list[float] = []
    with pytest.raises(Unreachable, match=r"no answer \(asked 22 times over 60 s\)") as caught:
        ask_patiently(Away(1_000, Unreachable("no answer", server="oslo")).ask, wait=waited.append)
    assert waited == list(PAUSES)
    assert caught.value.details == {"server": "oslo"}
    with pytest.raises(Unreachable, match=r"^no answer$"):
        ask_patiently(Away(1_000, Unreachable("no answer")).ask, pauses=())


def test_a_query_and_its_writer_begin_before_their_server_and_outlive_its_restart() -> None:
    with restartable() as (start, stop):
        url = start()
        with connect(url) as site:
            site.create_namespace("users")
        address = SiteAddress(location=url, timeout=timedelta(seconds=5))

        stop()
        query = Query(address, "users", timedelta(hours=1), wait=lambda _: start())
        query.close()

        stop()
        options = {"path": url, "namespace": "users"}
        writer = open_stream_writer(options, PAIRS, False, wait=lambda _: start())

        # The version of an epoch is drawn by a task, and by one that is run again.
        def draw(site: Site) -> Version:
            drawn.append(1)
            if len(drawn) == 1:
                raise OutcomeUnknown("the server was stopped meanwhile")
            return site.now()

        drawn: list[int] = []
        written = write_rows(writer._target, batches_of([(b"a", b"1")]), draw)
        assert (written.stored, len(drawn)) == (1, 2)
