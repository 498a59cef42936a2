"""A server with many writes on their way delays read versions, and refuses calls when too many wait."""

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from threading import Event

import pytest
from tests.server.support import connected, intercept, serving
from tests.waiting import HANG_SECONDS, run_threads, wait_until

from floodmark import Transaction
from floodmark.model.errors import Conflict, Retryable
from floodmark.server import ServerOptions
from floodmark.server import admission as module
from floodmark.server.admission import DELAY_MS_MAX, Admission
from floodmark.server.counters import ServerMetrics

FLIGHT, RESP = ServerOptions(resp_listen=None), ServerOptions(resp_listen="127.0.0.1:0")


class Queue:
    """Writes of a server, whose number a test sets, and pauses that only a test sees."""

    def __init__(self) -> None:
        self.lengths = [0]
        self.slept: list[float] = []
        self.metrics = ServerMetrics([])
        self.admission = Admission(self.metrics, undelayed=10, sleep=self.sleep)
        self.admission.queues.append(lambda: self.lengths[0])

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.lengths) > 1:
            del self.lengths[0]

    def shown(self, name: str) -> dict[str, float]:
        """The samples of a metric, by their last label."""
        return shown(self.metrics, name)


def shown(metrics: ServerMetrics, name: str) -> dict[str, float]:
    """The samples of a metric, by their last label."""
    return {
        [*sample.labels.values()][-1]: sample.value
        for family in metrics.families("oslo")
        for sample in family.samples
        if sample.name == f"floodmark_{name}"
    }


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_read_versions_are_not_delayed_while_few_writes_are_on_their_way(queue: Queue) -> None:
    queue.lengths = [10]
    queue.admission.delay_read_version()
    assert queue.slept == []
    assert queue.shown("delayed_read_versions_total") == {"delayed": 0, "refused": 0}
    assert queue.shown("queued_writes") == {"oslo": 10}


def test_read_version_waits_until_the_queue_is_shorter(queue: Queue) -> None:
    queue.lengths = [11, 12, 11, 10]
    queue.admission.delay_read_version()
    assert queue.slept == [0.01, 0.02, 0.04]
    assert queue.shown("delayed_read_versions_total") == {"delayed": 1, "refused": 0}


def test_delay_has_an_end(queue: Queue) -> None:
    queue.lengths = [11]
    queue.admission.delay_read_version()
    assert sum(queue.slept) == pytest.approx(DELAY_MS_MAX / 1000)


def test_too_many_delayed_callers_are_refused(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_VERSIONS_DELAYED_MAX", 1)
    queue.lengths = [11, 10]

    def sleep_and_ask(seconds: float) -> None:
        with pytest.raises(Retryable, match="overloaded"):
            queue.admission.delay_read_version()
        queue.sleep(seconds)

    queue.admission._sleep = sleep_and_ask
    queue.admission.delay_read_version()
    assert queue.shown("delayed_read_versions_total") == {"delayed": 1, "refused": 1}
    queue.lengths, queue.admission._sleep = [11, 10], queue.sleep
    queue.admission.delay_read_version()


def test_number_of_writes_on_their_way_is_limited(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITES_QUEUED_MAX", 2)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(queue.admission.writing())
        assert queue.admission.queued() == 2
        with pytest.raises(Retryable, match="overloaded"):
            stack.enter_context(queue.admission.writing())
    assert queue.admission.queued() == 0


@pytest.mark.parametrize("options", [FLIGHT, RESP], ids=["Flight", "RESP"])
def test_a_transaction_waits_to_begin_until_the_writes_of_others_are_committed(
    options: ServerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = Event(), Event()

    def answer_late(answer: Callable[[], bytes]) -> bytes:
        begun.set()
        assert go.wait(HANG_SECONDS)
        return answer()

    with serving(options) as (_, server), connected(server) as client:
        visits, admission = client.create_namespace("visits", merge="counter"), server.service.admission
        assert intercept(server, "merge", answer_late) == (options is RESP)

        def finish(_: float) -> None:
            go.set()
            wait_until(lambda: not admission.queued(), "the write is still on its way")

        monkeypatch.setattr(admission, "_undelayed", 0)
        monkeypatch.setattr(admission, "_sleep", finish)

        def begin() -> None:
            assert begun.wait(HANG_SECONDS)
            with client.transaction() as transaction:
                assert transaction.get(visits, b"ada") is not None

        run_threads(lambda: visits.add(b"ada"), begin)
        assert shown(server.service.metrics, "delayed_read_versions_total")["delayed"] == 1


def test_answers_that_count_as_slow_can_be_set() -> None:
    with serving() as (_, server):
        for slow, cached in ((timedelta(0), 0), (timedelta(hours=1), 1)):
            with connected(server, read_version_cache=True, slow_read_version=slow) as client:
                users = client.create_namespace("users", exist_ok=True)
                for _ in range(2):
                    with client.transaction() as transaction:
                        transaction.get(users, b"ada")
                assert client.read_versions.cached == cached


@pytest.mark.parametrize("options", [FLIGHT, RESP], ids=["Flight", "RESP"])
def test_commits_and_conflicts_of_transactions_are_counted(options: ServerOptions) -> None:
    with serving(options) as (_, server), connected(server) as client:
        users = client.create_namespace("users")

        def commit(*, coordinator: int | None, conflicts: bool) -> None:
            with client.transaction(coordinator=coordinator) as transaction:
                transaction.get(users, b"ada")
                transaction.put(users, b"ada", b"1")
                if conflicts:
                    users.put(b"ada", b"2")

        for coordinator in (None, 0):
            commit(coordinator=coordinator, conflicts=False)
            with pytest.raises(Conflict):
                commit(coordinator=coordinator, conflicts=True)
        with client.atomic() as batch:
            batch.put(users, b"ada", b"3")
            batch.put(users, b"bob", b"3")
        metrics = server.service.metrics
        assert shown(metrics, "transaction_commits_total") == {"committed": 2, "conflict": 2}


@pytest.mark.parametrize("options", [FLIGHT, RESP], ids=["Flight", "RESP"])
def test_retries_ages_and_saved_calls_of_transactions_are_counted(options: ServerOptions) -> None:
    # A machine under load may answer late, and take longer than the default.
    unhurried = timedelta(hours=1)
    with (
        serving(options) as (_, server),
        connected(server, read_version_cache=True, slow_read_version=unhurried) as client,
    ):
        users = client.create_namespace("users")

        def work(transaction: Transaction) -> None:
            transaction.get(users, b"ada")
            transaction.put(users, b"ada", b"1")
            if transaction.attempt < 3:
                users.put(b"ada", b"2")

        client.run_transaction(work)
        client.run_transaction(lambda t: t.put(users, b"bob", t.get(users, b"ada")), max_staleness=unhurried)
        metrics = server.service.metrics
        assert shown(metrics, "transaction_commits_total") == {"committed": 2, "conflict": 2}
        assert metrics.transaction_commits() == {"committed": 2, "conflict": 2, "retried": 2}
        names = "transaction_retries_total", "saved_read_versions_total", "transaction_age_seconds_count"
        assert [shown(metrics, name)["oslo"] for name in names] == [2, 1, 4]
