"""The story that `floodmark demo` tells, over the public API: two servers, Spark between them, a lost change.

The people of both sites write to each other: a message is a record of `messages`, where the last write wins,
and each recipient has a counter in `unread`.  Each step shows what it does, and checks what it claims.
"""

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count, islice
from pathlib import Path
from shlex import quote
from threading import Event, Thread
from typing import Any, Final

import msgspec

from floodmark import FloodmarkError
from floodmark.cli.demo.servers import DemoServer
from floodmark.cli.demo.stage import Stage
from floodmark.cli.render.output import Output, Part
from floodmark.cli.render.text import align, json_bytes, show_bytes, show_lag
from floodmark.cli.render.verification import print_verification
from floodmark.clock import monotonic_ms
from floodmark.host.statistics import LinkStatistics
from floodmark.model.errors import LinkStalled
from floodmark.replication.topology import Topology, parse_topology
from floodmark.spark import SparkOptions, open_session
from floodmark.spark.jobs import VerifySummary, replicate_topology, site_addresses, verify
from floodmark.spark.session import end_java

MESSAGES: Final = "messages"
UNREAD: Final = "unread"
DRAFTS: Final = "drafts"
PEOPLE: Final = {"oslo": ("ada", "alan", "barbara"), "rome": ("grace", "hedy", "john")}
EVERYBODY: Final = tuple(name for names in PEOPLE.values() for name in names)
LOST_KEY: Final = b"ada+grace/invitation"
LOST_VALUE: Final = b'{"from":"ada","text":"dinner at eight?"}'
TOPOLOGY_FILE: Final = "topology.toml"
TRAFFIC_SECONDS: Final = 12
BEFORE_LOSS_SECONDS: Final = 2
WAIT_SECONDS_MAX: Final = 240.0
LOOK_SECONDS: Final = 0.25
MESSAGES_A_TICK: Final = 80
TICK_SECONDS: Final = 0.1
DRAFTS_MIN: Final = 3_000
BATCH: Final = 50


class DemoPair:
    """Two sites, the people who write at them, and the links between them; `ending` ends it all."""

    def __init__(self, home: Path, ending: ExitStack) -> None:
        self.home = home
        self.servers = {name: DemoServer(name, home) for name in PEOPLE}
        self.sent: Counter[str] = Counter()
        self.topology: Topology | None = None
        self._ending = ending
        self._session: Any = None
        self._numbers = {name: count() for name in PEOPLE}
        self._links, self._people = DemoThreads(), DemoThreads()
        for server in self.servers.values():
            ending.callback(server.stop)

    def spark(self) -> Any:
        """A session on this machine, which is started when it is first asked for."""
        if self._session is None:
            scratch = (self.home / "spark").resolve()
            scratch.mkdir()
            self._ending.callback(shutil.rmtree, scratch, ignore_errors=True)
            self._ending.callback(end_java, WAIT_SECONDS_MAX)
            opening = open_session(spark_options(scratch), name="floodmark demo")
            self._session = self._ending.enter_context(opening)
            # Workers whose query is ended complain on stderr, in the middle of what is shown.
            system = self._session.sparkContext._jvm.java.lang.System
            self._ending.callback(system.setErr, system.err)
            log = self._session.sparkContext._jvm.java.io.PrintStream(str(self.home / "spark.log"))
            system.setErr(log)
            self._ending.callback(self._links.stop)
        return self._session

    def start_links(self, transform: Callable[[Any], Any] | None = None) -> None:
        """Replicate in both directions; return when a heartbeat has come over each link."""
        topology, spark = self.topology, self.spark()
        assert topology is not None
        self._links.stop()
        before = self.heartbeats()
        self._links.run(
            lambda stop: replicate_topology(
                topology, site_addresses(topology), spark=spark, stop=stop, transform=transform
            )
        )
        self.wait(lambda: self.have_beaten(before, 1))

    def start_people(self) -> None:
        """Let the people of both sites write, at a steady rate."""
        for name in PEOPLE:
            self._people.run(partial(self._write, name))
        self._ending.callback(self._people.stop)

    def stop_people(self) -> None:
        """Return when all that was written is acknowledged, has arrived, and heartbeats have checked it."""
        self._people.stop()
        goal = {name: server.site.resolved_version() for name, server in self.servers.items()}
        self.wait(lambda: all(entry.through >= goal[entry.source] for entry in self.entries()))
        before = self.heartbeats()
        # One of two heartbeats covers everything before.
        self.wait(lambda: self.have_beaten(before, 2))

    def _write(self, name: str, stop: Event) -> None:
        site = self.servers[name].site
        with site.namespace(MESSAGES).writer() as messages, site.namespace(UNREAD).writer() as unread:
            while not stop.wait(TICK_SECONDS):
                sent: Counter[str] = Counter()
                for number in islice(self._numbers[name], MESSAGES_A_TICK):
                    sender = PEOPLE[name][number % len(PEOPLE[name])]
                    recipient = EVERYBODY[number % len(EVERYBODY)]
                    key = f"{sender}+{recipient}/{number:06}-{name}"
                    messages.put(key.encode(), message(sender, f"message {number} from {name}"))
                    unread.add(recipient.encode(), 1)
                    sent[recipient] += 1
                messages.flush()
                unread.flush()
                self.sent.update(sent)

    def entries(self) -> list[LinkStatistics]:
        """What the sites tell of their links: one entry for each source and namespace."""
        self.require_well()
        return [link for server in self.servers.values() for link in server.site.replication().links]

    def heartbeats(self) -> list[int]:
        """How many heartbeats have come, of each entry."""
        return [
            entry.intervals_checked + entry.intervals_unchecked + entry.intervals_wrong
            for entry in self.entries()
        ]

    def have_beaten(self, before: list[int], times: int) -> bool:
        """Whether so many heartbeats have come over each link since."""
        return all(now >= then + times for then, now in zip(before, self.heartbeats(), strict=True))

    def wait(self, condition: Callable[[], bool], seconds: float = WAIT_SECONDS_MAX) -> int:
        """Wait until a condition holds; how many milliseconds it took."""
        began_ms = monotonic_ms()
        while not condition():
            if monotonic_ms() - began_ms > seconds * 1000:
                stalled = next((entry.stalled for entry in self.entries() if entry.stalled), None)
                raise LinkStalled(
                    f"nothing has come of it in {seconds:.0f} s; "
                    f"{stalled or 'no reason was reported, so try again when the machine is less busy'}"
                )
            Event().wait(LOOK_SECONDS)
        return monotonic_ms() - began_ms

    def require_well(self) -> None:
        """Raise the error of a server, of the links or of the people."""
        for server in self.servers.values():
            server.require_running()
        self._links.require_well()
        self._people.require_well()


class DemoThreads:
    """Functions in daemon threads, which end when they are told to."""

    def __init__(self) -> None:
        self._stop = Event()
        self._outcomes: list[Future[object]] = []

    def run(self, work: Callable[[Event], object]) -> None:
        """Start a function, and pass it the event that tells it to end."""
        outcome: Future[object] = Future()
        self._outcomes.append(outcome)

        def follow() -> None:
            try:
                outcome.set_result(work(self._stop))
            except Exception as error:
                outcome.set_exception(error)

        Thread(target=follow, daemon=True).start()

    def stop(self) -> None:
        """Return when all functions have ended; raise the error of one that failed."""
        self._stop.set()
        outcomes, self._outcomes = self._outcomes, []
        for outcome in outcomes:
            outcome.result(WAIT_SECONDS_MAX)
        self._stop = Event()

    def require_well(self) -> None:
        """Raise the error of a function that failed."""
        for outcome in self._outcomes:
            if outcome.done():
                outcome.result()


def spark_options(scratch: Path) -> SparkOptions:
    """Spark on two cores, with its files in one directory, and a Java that starts fast."""
    java = f'-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData "-Djava.io.tmpdir={scratch}"'
    conf = {
        "spark.driver.extraJavaOptions": java,
        "spark.local.dir": str(scratch),
        "spark.sql.shuffle.partitions": "2",
    }
    return SparkOptions(master="local[2]", conf=conf)


def message(sender: str, text: str) -> bytes:
    """A message as it is stored."""
    return msgspec.json.encode({"from": sender, "text": text})


# The steps


def serve_two_sites(stage: Stage, pair: DemoPair) -> None:
    """Two processes, one topology."""
    stage.begin("serve", "Two sites, each a server process of its own")
    lines = ["epoch = 1"]
    with stage.working("starting two servers"):
        for name, server in pair.servers.items():
            server.start()
            lines += ["", f"[sites.{name}]", f"id = {server.site.id}", f'url = "{server.url}"']
    lines += ["", f"[namespaces.{MESSAGES}]", "", f"[namespaces.{UNREAD}]", 'merge = "counter"', ""]
    (pair.home / TOPOLOGY_FILE).write_text("\n".join(lines), "utf-8")
    pair.topology = parse_topology("\n".join(lines))
    for server in pair.servers.values():
        stage.command(f"floodmark serve {server.name} --site {server.name} --listen {server.listen}")
        server.site.set_topology(pair.topology)
    shared = (MESSAGES, "bold"), ", where the last write wins, and ", (UNREAD, "bold"), ", counters"
    stage.say("they share ", *shared)
    found = [server.site.topology() for server in pair.servers.values()]
    stage.check("both follow one topology", found == [pair.topology, pair.topology])
    stage.sum_up("two servers that share two namespaces")


def survive_a_kill(stage: Stage, pair: DemoPair) -> None:
    """kill -9 in the middle of writing, and a look at what is left."""
    stage.begin("crash", "A server is killed while it takes writes")
    oslo, acknowledged = pair.servers["oslo"], Counter[str]()

    def write(_stop: Event) -> None:
        namespace = oslo.site.create_namespace(DRAFTS)
        with suppress(FloodmarkError):  # the server is gone
            for first in count(0, BATCH):
                namespace.put_many(dict(map(_draft, range(first, first + BATCH))))
                acknowledged[DRAFTS] += BATCH

    with stage.working("writing until the server is gone"):
        writing = DemoThreads()
        writing.run(write)
        pair.wait(lambda: acknowledged[DRAFTS] >= DRAFTS_MIN)
        assert oslo.process is not None
        stage.command(f"kill -9 {oslo.process.pid}")
        oslo.stop(kill=True)
        writing.stop()
        began_ms = monotonic_ms()
        oslo.start()
        back_ms = monotonic_ms() - began_ms
    written = acknowledged[DRAFTS]
    drafts = dict(oslo.site.namespace(DRAFTS).scan())
    kept = sum(drafts.get(key) == value for key, value in map(_draft, range(written)))
    stage.say(f"{written:,} writes were acknowledged; started again, it answers after {show_lag(back_ms)}")
    stage.check(f"all {written:,} are there", 0 < written == kept)
    whole = drafts == dict(map(_draft, range(len(drafts)))) and len(drafts) % BATCH == 0
    stage.check("and no commit is there in part", whole)
    stage.sum_up(
        f"{kept:,} of {written:,} acknowledged writes survived kill -9", acknowledged=written, kept=kept
    )


def copy_both_ways(stage: Stage, pair: DemoPair) -> None:
    """A steady load at both sites, until all of it has arrived at the other."""
    stage.begin("copy", "People at both sites write to each other, and Spark copies both ways")
    stage.command(f"floodmark replicate --topology {TOPOLOGY_FILE}")
    with stage.working("Spark starts, and the first heartbeats are on their way"):
        pair.start_links()
    with stage.working("people at both sites write, until all has arrived"):
        pair.start_people()
        Event().wait(TRAFFIC_SECONDS)
        pair.stop_people()
    show_links(stage, pair)
    entries, sent = pair.entries(), pair.sent.total()
    lag_p50 = max(entry.lag_ms_p50 or 0 for entry in entries)
    lag_p99 = max(entry.lag_ms_p99 or 0 for entry in entries)
    checked = sum(entry.intervals_checked for entry in entries)
    stage.check(
        f"{checked} heartbeats came through, and vouch that no change was lost",
        checked > 0 and not any(entry.intervals_wrong for entry in entries),
    )
    check_unread(stage, pair)
    stage.sum_up(
        f"{sent:,} messages in both directions; lag p50 {show_lag(lag_p50)}, p99 {show_lag(lag_p99)}",
        messages=sent,
        lag_ms_p50=lag_p50,
        lag_ms_p99=lag_p99,
        heartbeats_checked=checked,
    )


def show_links(stage: Stage, pair: DemoPair) -> None:
    """What each site tells of what came to it."""
    Quoted(stage).rows(
        pair.entries(),
        {
            "from": "source",
            "namespace": "namespace",
            "copied": "changes",
            "lag p50": "lag_ms_p50",
            "lag p99": "lag_ms_p99",
            "backlog": "backlog_ms",
            "checked": "intervals_checked",
            "wrong": "intervals_wrong",
        },
    )


def check_unread(stage: Stage, pair: DemoPair) -> None:
    """Claim that the counters of both sites are exact."""
    keys = [person.encode() for person in EVERYBODY]
    shown = {
        name: [int(value or 0) for value in server.site.namespace(UNREAD).get_many(keys)]
        for name, server in pair.servers.items()
    }
    totals = ", ".join(f"{sum(counts):,} at {name}" for name, counts in shown.items())
    right = all(counts == [pair.sent[person] for person in EVERYBODY] for counts in shown.values())
    stage.check(f"unread, person by person: {totals}, {pair.sent.total():,} in truth", right)


def agree(stage: Stage, pair: DemoPair) -> None:
    """Sites that have exchanged everything hold the same."""
    stage.begin("verify", "Do the sites agree? Every key is compared")
    found = compare(stage, pair)
    compared = check_agreement(stage, found)
    messages = sum(each.compared for each in found.pairs if each.namespace == MESSAGES)
    stage.check("all messages that were sent are among them", messages == pair.sent.total())
    stage.sum_up(
        f"{compared:,} keys compared in {found.seconds:.1f} s: the sites agree",
        compared=compared,
        seconds=round(found.seconds, 1),
    )


def lose_a_change(stage: Stage, pair: DemoPair) -> None:
    """A faulty stage between the sites drops one row, and the next heartbeat does not add up."""
    stage.begin("loss", "One message is silently dropped on its way from oslo to rome")
    oslo, rome = (server.site for server in pair.servers.values())
    with stage.working("the links start again, with a faulty stage in their middle"):
        pair.start_links(drop_lost)
    with stage.working("ada has invited grace, and the invitation is on its way"):
        pair.start_people()
        Event().wait(BEFORE_LOSS_SECONDS)
        oslo.namespace(MESSAGES).put(LOST_KEY, LOST_VALUE)
        oslo.namespace(UNREAD).add(b"grace")
        pair.sent["grace"] += 1
        named_ms = pair.wait(lambda: any(entry.findings for entry in pair.entries()))
    (finding, *others) = [finding for entry in pair.entries() for finding in entry.findings]
    stage.say(f"oslo acknowledged {show_bytes(LOST_KEY)}, and it never came to rome; no call has failed")
    stage.say(("rome: ", "dim"), (f"from oslo, {finding}", "red"))
    values = [site.namespace(MESSAGES).get(LOST_KEY) for site in (oslo, rome)]
    stage.check("rome lacks it, and no call reported it", values == [LOST_VALUE, None])
    stage.check(f"the next heartbeat names the loss, {show_lag(named_ms)} after the write", not others)
    stage.sum_up(
        f"1 change dropped on its way without an error, and missed {show_lag(named_ms)} later",
        named_ms=named_ms,
        finding=finding,
    )


def drop_lost(rows: Any) -> Any:
    """The faulty stage: all rows but one."""
    return rows.where(f"key IS NULL OR key != X'{LOST_KEY.hex()}'")


def find_the_loss(stage: Stage, pair: DemoPair) -> None:
    """The lost key is found, and nothing else, though others are written and copied meanwhile."""
    stage.begin("find", "verify finds what is lost, while people go on writing")
    sent_before = pair.sent.total()
    found = compare(stage, pair)
    sent = pair.sent.total() - sent_before
    keys = [each.drift.key for each in found.sample]
    stage.check("exactly the lost message is found", found.drift == 1 and keys == [LOST_KEY])
    stage.check(f"{sent:,} messages were sent meanwhile, and none of them is reported", sent > 0)
    stage.sum_up(
        f"verify found exactly this key, while {found.lag:,} others were under way",
        drift=found.drift,
        lag=found.lag,
        seconds=round(found.seconds, 1),
    )


def mend(stage: Stage, pair: DemoPair) -> None:
    """The message gets to rome with its own stamp; then the sites agree again."""
    stage.begin("repair", "repair mends it, and the sites agree again")
    mended = compare(stage, pair, repair=True)
    repaired = 0 if mended.repair is None else mended.repair.repaired
    stage.check("one key was repaired", repaired == 1)
    there, here = (server.site.namespace(MESSAGES).record(LOST_KEY) for server in pair.servers.values())
    stage.check(
        "rome has the message, with the stamp that it got in oslo",
        there is not None and here is not None and here.value == LOST_VALUE and here.stamp == there.stamp,
    )
    with stage.working("the people have stopped; the last changes are on their way"):
        pair.stop_people()
    compared = check_agreement(stage, compare(stage, pair))
    check_unread(stage, pair)
    stage.sum_up(f"1 key repaired, and the sites agree on all {compared:,} keys", repaired=repaired)


def compare(stage: Stage, pair: DemoPair, *, repair: bool = False) -> VerifySummary:
    """Compare the sites as `floodmark verify` does, and show what it shows."""
    urls = [server.url for server in pair.servers.values()]
    stage.command("floodmark verify", *urls, *(["--repair"] if repair else []))
    assert pair.topology is not None
    with stage.working("comparing"):
        found = verify(list(site_addresses(pair.topology).values()), repair=repair, spark=pair.spark())
    print_verification(Quoted(stage), found)
    return found


def check_agreement(stage: Stage, found: VerifySummary) -> int:
    """Claim that all keys agree; how many were compared."""
    compared = sum(each.compared for each in found.pairs)
    stage.check(f"all {compared:,} keys agree", found.outcome == "agree" and found.lag == 0)
    return compared


class Quoted(Output):
    """What a command prints, as part of a step."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(json=False)
        self.is_terminal = False
        self._stage = stage

    def line(self, *parts: Part) -> None:
        """A line of the step."""
        self._stage.say(*parts)


def _draft(number: int) -> tuple[bytes, bytes]:
    return b"draft-%06d" % number, b"draft %d" % number


STEPS: Final[list[Callable[[Stage, DemoPair], None]]] = [
    serve_two_sites,
    survive_a_kill,
    copy_both_ways,
    agree,
    lose_a_change,
    find_the_loss,
    mend,
]


def perform(stage: Stage, home: Path, *, kept: bool) -> dict[str, object]:
    """Run the steps in a directory; the account of it."""
    home.mkdir(parents=True, exist_ok=True)
    stage.heading("Floodmark", "  two sites, Spark between them, and every claim checked")
    began_ms = monotonic_ms()
    with _ending_on_signals(stage), ExitStack() as ending:
        pair = DemoPair(home, ending)
        for step in STEPS:
            pair.require_well()
            step(stage, pair)
    seconds = (monotonic_ms() - began_ms) / 1000
    stage.heading("Summary")
    for done in stage.steps:
        stage.say(done.outcome, mark=stage.mark(done.passed))
    held = [check.passed for done in stage.steps for check in done.checks]
    style = "bold green" if stage.passed else "bold red"
    stage.say((f"{sum(held)} of {len(held)} checks held, in {seconds:.0f} s", style))
    stage.heading("Try next")
    for line in align(_next_for_kept(pair) if kept else _NEXT):
        stage.say(line)
    return {
        "passed": stage.passed,
        "seconds": round(seconds, 1),
        **json_bytes("directory", os.fsencode(home) if kept else None),
        "steps": [done.account() for done in stage.steps],
    }


@contextmanager
def _ending_on_signals(stage: Stage) -> Iterator[None]:
    """Let SIGTERM and SIGHUP do what Ctrl-C does, so that the servers end with the demo."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        stage.say(("ended the servers and Spark", "dim"))
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_NEXT: Final = [
    ("floodmark demo --directory demo-sites", "once more, and keep the sites"),
    ("floodmark replicate --help", "sites of your own"),
    ("floodmark verify --help", "a proof that they agree"),
    ("floodmark --help", "all commands"),
]


def _next_for_kept(pair: DemoPair) -> list[tuple[str, str]]:
    home, (oslo, rome) = quote(str(pair.home)), pair.servers.values()
    return [
        (f"floodmark status {home}/rome", "the state of a site, and what came to it"),
        (f"floodmark scan {home}/rome {MESSAGES} --prefix ada+grace/ --limit 5", "a conversation"),
        (f"floodmark serve {home}/oslo --listen {oslo.listen} &", "serve the sites again,"),
        (f"floodmark serve {home}/rome --listen {rome.listen} &", "where the topology says that they are"),
        (f"floodmark replicate --topology {home}/{TOPOLOGY_FILE} &", "replicate between them"),
        (f"floodmark put {oslo.url} {MESSAGES} ada+john/1 hello", "write here,"),
        (f"floodmark get {rome.url} {MESSAGES} ada+john/1", "read there"),
        (f"floodmark verify {oslo.url} {rome.url}", "and see that they agree"),
    ]
