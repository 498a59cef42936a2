"""The first steps: two servers that share namespaces, and one of them killed while it takes writes."""

from itertools import count
from threading import Thread
from typing import Final

from floodmark.cli.demo.messaging import MESSAGES, UNREAD
from floodmark.cli.demo.pair import Pair
from floodmark.cli.demo.servers import Server
from floodmark.cli.demo.stage import Stage, wait_until
from floodmark.clock import monotonic_ms
from floodmark.model.errors import FloodmarkError

DRAFTS: Final = "drafts"
ACKNOWLEDGED_MIN: Final = 3_000
BATCH: Final = 50
WAIT_SECONDS_MAX: Final = 20.0


def serve_two_sites(stage: Stage, pair: Pair) -> None:
    """Two processes, one topology."""
    stage.begin("serve", "Two sites, each a server process of its own")
    began_ms = monotonic_ms()
    with stage.working("starting two servers"):
        for server in pair.servers.values():
            server.begin()
        for server in pair.servers.values():
            server.connect()
    ready_ms = monotonic_ms() - began_ms
    for server in pair.servers.values():
        stage.command(f"floodmark serve {server.name} --site {server.name} --listen {server.listen}")
    pair.share()
    stage.say(
        "they share ", (MESSAGES, "bold"), ", where the last write wins, and ", (UNREAD, "bold"), ", counters"
    )
    shared = [server.site.topology() for server in pair.servers.values()]
    stage.check("both follow one topology", None not in shared and shared[0] == shared[1])
    stage.sum_up(f"two servers, ready in {ready_ms / 1000:.1f} s", ready_ms=ready_ms)


def survive_a_kill(stage: Stage, pair: Pair) -> None:
    """kill -9 in the middle of writing, and a look at what is left."""
    stage.begin("crash", "A server is killed while it takes writes")
    oslo = pair.servers["oslo"]
    with stage.working("writing until the server is gone"):
        oslo.site.create_namespace(DRAFTS)
        writing = _Writing(oslo)
        wait_until(lambda: writing.acknowledged >= ACKNOWLEDGED_MIN, WAIT_SECONDS_MAX)
        stage.command(f"kill -9 {oslo.process_id}")
        oslo.kill()
        acknowledged = writing.end()
        began_ms = monotonic_ms()
        oslo.begin()
        oslo.connect()
    back_ms = monotonic_ms() - began_ms
    drafts = dict(oslo.site.namespace(DRAFTS).scan())
    kept = sum(drafts.get(_key(number)) == _value(number) for number in range(acknowledged))
    stage.say(
        f"{acknowledged:,} writes were acknowledged; started again, it answers after {back_ms / 1000:.1f} s"
    )
    stage.check(f"all {acknowledged:,} are there", 0 < acknowledged == kept)
    whole = set(drafts) == {_key(number) for number in range(len(drafts))} and len(drafts) % BATCH == 0
    stage.check("and no commit is there in part", whole)
    stage.sum_up(
        f"{kept:,} of {acknowledged:,} acknowledged writes survived kill -9",
        acknowledged=acknowledged,
        kept=kept,
        back_ms=back_ms,
    )


class _Writing:
    """Writes, in commits of some records, until the server is gone."""

    def __init__(self, server: Server) -> None:
        self.acknowledged = 0
        self._drafts = server.site.namespace(DRAFTS)
        self._thread = Thread(target=self._run, name="drafts", daemon=True)
        self._thread.start()

    def end(self) -> int:
        """How many writes were acknowledged, now that the server is gone."""
        self._thread.join(WAIT_SECONDS_MAX)
        return self.acknowledged

    def _run(self) -> None:
        try:
            for first in count(0, BATCH):
                numbers = range(first, first + BATCH)
                self._drafts.put_many({_key(number): _value(number) for number in numbers})
                self.acknowledged += BATCH
        except FloodmarkError:
            # The server is gone.
            return


def _key(number: int) -> bytes:
    return b"draft-%06d" % number


def _value(number: int) -> bytes:
    return b"draft %d" % number
