"""The story that `floodmark demo` tells, over the public API: two servers, Spark between them, a lost change.

The people of both sites write to each other: a message is a record of `messages`, where the last write wins,
and each recipient has a counter in `unread`.  Messages and counts are one atomic batch, and atomic reads at
both sites check it all the time.  Each step shows what it does, and checks what it claims.
"""

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path
from shlex import quote
from threading import Event, Timer
from typing import Any, Final

import pyarrow.compute

import floodmark
from floodmark.cli.demo.stage import Stage
from floodmark.clock import monotonic_ms
from floodmark.server import ServerOptions
from floodmark.server.console.opening import WatchedSite
from floodmark.server.console.served import ServedConsole
from floodmark.server.serving import open_console
from floodmark.spark import SiteAddress, SparkOptions, open_session
from floodmark.spark.jobs import VerifySummary, replicate_topology, site_addresses, verify

MESSAGES, UNREAD, DRAFTS = "messages", "unread", "drafts"
PEOPLE: Final = {"oslo": ("ada", "alan", "barbara"), "rome": ("grace", "hedy", "john")}
EVERYBODY: Final = PEOPLE["oslo"] + PEOPLE["rome"]
# The writers of batches of messages.
WRITERS: Final = (*PEOPLE, "ada")
LOST_KEY: Final = b"ada+grace/invitation"
LOST_VALUE: Final = b'{"from":"ada","text":"dinner at eight?"}'
TOPOLOGY_FILE: Final = "topology.toml"
TRAFFIC_SECONDS, BEFORE_LOSS_SECONDS = 12.0, 2.0
WAIT_SECONDS_MAX, LOOK_SECONDS = 240.0, 0.25
TICK_SECONDS, MESSAGES_A_TICK, READ_SECONDS = 0.1, 80, 0.05
DRAFTS_MIN, BATCH = 3_000, 50
COMMAND: Final = (sys.executable, "-m", "floodmark.cli")
# Spark on two cores, and a Java that starts fast.
JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
CONF: Final = {"spark.driver.extraJavaOptions": JAVA, "spark.sql.shuffle.partitions": "2"}
SPARK: Final = SparkOptions(master="local[2]", conf=CONF)


class DemoServer:
    """`floodmark serve` of one site, from `start` to `stop`.  Started again, it keeps its port."""

    site: floodmark.Site
    process: subprocess.Popen[bytes] | None = None

    def __init__(self, name: str, home: Path, listen: str = "127.0.0.1:0") -> None:
        self.name, self.listen, self.url = name, listen, ""
        self._directory, self._log = home / name, home / f"{name}.log"

    def start(self) -> None:
        """Start the process, wait until it serves, and connect to it.  Ctrl-C reaches the demo alone."""
        words = ["serve", str(self._directory), "--site", self.name, "--listen", self.listen, "--json"]
        with self._log.open("wb") as log:
            self.process = process = subprocess.Popen(
                [*COMMAND, *words], stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        patience = Timer(WAIT_SECONDS_MAX, process.kill)
        patience.start()
        assert process.stdout is not None
        line = process.stdout.readline()
        patience.cancel()
        if not line:
            process.wait()
            said = " ".join(self._log.read_text("utf-8", "replace").split())[-300:]
            raise floodmark.Retryable(
                f"the server of {self.name} did not start on {self.listen}: {said}; run the demo again, "
                "it will take other ports"
            )
        ready = json.loads(line)
        self.listen, self.url = ready["address"], ready["url"]
        self.site = floodmark.connect(self.url)

    def stop(self, *, kill: bool = False) -> None:
        """End the process, with kill -9 if asked for or if it takes too long."""
        process, self.process = self.process, None
        if process is None:
            return
        if kill:
            process.kill()
        if self.url:
            self.site.close()
        process.terminate()
        try:
            process.communicate(timeout=WAIT_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


class DemoThreads:
    """Functions in threads, each of which ends when its event is set."""

    def __init__(self) -> None:
        self._pool, self._stop = ThreadPoolExecutor(), Event()
        self._running: list[Future[object]] = []

    def run(self, work: Callable[[Event], object]) -> None:
        """Start a function."""
        self._running.append(self._pool.submit(work, self._stop))

    def stop(self) -> None:
        """Stop all functions, and wait for them; raises the error of one that failed."""
        self._stop.set()
        ended, self._running, self._stop = self._running, [], Event()
        for each in ended:
            each.result(WAIT_SECONDS_MAX)

    def require_well(self) -> None:
        """Raise the error of a function that failed."""
        for each in self._running:
            if each.done():
                each.result()


class DemoPair:
    """Two sites, the people who write at them, and the links between them; `ending` stops all of them."""

    def __init__(self, home: Path, ending: ExitStack) -> None:
        self.home = home
        self.servers = {name: DemoServer(name, home) for name in PEOPLE}
        self.sent: Counter[str] = Counter()
        # Atomic reads, and those that found other counts than messages.
        self.reads: Counter[str] = Counter()
        self.people, self._links = DemoThreads(), DemoThreads()
        self._ending = ending
        self._numbers = {name: count() for name in PEOPLE}
        self._written: Counter[str] = Counter()
        for server in self.servers.values():
            ending.callback(server.stop)

    @cached_property
    def spark(self) -> Any:
        """A session on this machine."""
        session = self._ending.enter_context(open_session(SPARK))
        self._ending.callback(self._links.stop)
        return session

    def start_links(self, transform: Callable[[Any], Any] | None = None) -> None:
        """Replicate in both directions; return when both links have caught up."""
        self._links.stop()
        topology: Any = self.servers["oslo"].site.topology()
        replicate = partial(replicate_topology, topology, site_addresses(topology), spark=self.spark)
        self._links.run(lambda stop: replicate(stop=stop, transform=transform))
        self.wait_arrived()

    def start_people(self) -> None:
        """Start threads that write messages at both sites, at a steady rate, and check atomic reads."""
        for name in PEOPLE:
            self.people.run(partial(self._write, name))
            self.people.run(partial(self._read, name))
        self._ending.callback(self.people.stop)

    def _write(self, name: str, stop: Event) -> None:
        own = PEOPLE[name]
        while not stop.wait(TICK_SECONDS):
            messages, sent = {}, Counter[str]()
            for number in islice(self._numbers[name], MESSAGES_A_TICK):
                sender, recipient = own[number % len(own)], EVERYBODY[number % len(EVERYBODY)]
                message = {"from": sender, "text": f"message {number} from {name}"}
                messages[f"{sender}+{recipient}/{number:06}-{name}".encode()] = json.dumps(message).encode()
                sent[recipient] += 1
            self.send(name, name, messages, sent)

    def send(self, name: str, writer: str, messages: Mapping[bytes, bytes], sent: Counter[str]) -> None:
        """Write messages, the counts of their recipients, and how many the writer has sent, as one batch."""
        site = self.servers[name].site
        there, unread = site.namespace(MESSAGES), site.namespace(UNREAD)
        self._written[writer] += sent.total()
        with site.atomic() as batch:
            for key, message in messages.items():
                batch.put(there, key, message)
            for recipient, number in sent.items():
                batch.add(unread, recipient.encode(), number)
            batch.put(there, newest_key(writer), b"%d" % self._written[writer])
        self.sent.update(sent)

    def _read(self, name: str, stop: Event) -> None:
        """Compare the numbers of sent and of unread messages, which are equal in every atomic read."""
        site = self.servers[name].site
        newest = [(site.namespace(MESSAGES), newest_key(writer)) for writer in WRITERS]
        unread = [(site.namespace(UNREAD), person.encode()) for person in EVERYBODY]
        while not stop.wait(READ_SECONDS):
            found = [int(value or 0) for value in site.read_atomic([*newest, *unread])]
            self.reads["checked"] += 1
            self.reads["wrong"] += sum(found[: len(newest)]) != sum(found[len(newest) :])

    def stop_people(self) -> None:
        """Stop writing; return once all writes are acknowledged, replicated, and checked by heartbeats."""
        self.people.stop()
        self.wait_arrived()
        # The next heartbeat covers everything before.
        self.wait_arrived()

    def wait_arrived(self) -> None:
        """Wait until each site has received all changes that the other holds now."""
        goal = {name: server.site.now() for name, server in self.servers.items()}
        self.wait(lambda: all(link.through >= goal[link.source] for link in self.links()))

    def links(self) -> list[Any]:
        """The statistics of the links: one entry for each source and namespace."""
        self.require_well()
        return [link for server in self.servers.values() for link in server.site.replication().links]

    def wait(self, condition: Callable[[], bool]) -> float:
        """Wait until a condition holds; returns the seconds that it took."""
        began = _seconds()
        while not condition():
            if _seconds() - began > WAIT_SECONDS_MAX:
                stalled = next((link.stalled for link in self.links() if link.stalled), None)
                reason = stalled or "no reason was reported; try again when the machine is less busy"
                raise floodmark.Retryable(f"nothing has come of it in {WAIT_SECONDS_MAX:.0f} s: {reason}")
            Event().wait(LOOK_SECONDS)
        return _seconds() - began

    def require_well(self) -> None:
        """Raise the error of the links or of the people."""
        self._links.require_well()
        self.people.require_well()


# The steps


def serve_two_sites(stage: Stage, pair: DemoPair) -> None:
    """Two processes, one topology."""
    stage.begin("serve", "Two sites, each a server process of its own")
    lines = ["epoch = 1"]
    with stage.working("starting two servers"):
        for name, server in pair.servers.items():
            server.start()
            stage.command(f"floodmark serve {name} --site {name} --listen {server.listen}")
            lines += ["", f"[sites.{name}]", f"id = {server.site.id}", f'url = "{server.url}"']
    lines += ["", f"[namespaces.{MESSAGES}]", "", f"[namespaces.{UNREAD}]", 'merge = "counter"', ""]
    (pair.home / TOPOLOGY_FILE).write_text("\n".join(lines), "utf-8")
    for server in pair.servers.values():
        words = "topology", "set", server.url, TOPOLOGY_FILE
        stage.command("floodmark", *words)
        subprocess.run([*COMMAND, *words], cwd=pair.home, stdout=subprocess.DEVNULL, check=True)
    shared = (MESSAGES, "bold"), ", where the last write wins, and ", (UNREAD, "bold"), ", counters"
    stage.say("they share ", *shared)
    followed = [server.site.topology() for server in pair.servers.values()]
    stage.check("both follow one topology", None not in followed and followed[0] == followed[1])
    stage.sum_up("two servers that share two namespaces")


def survive_a_kill(stage: Stage, pair: DemoPair) -> None:
    """kill -9 in the middle of writing, and a look at what is left."""
    stage.begin("crash", "A server is killed while it takes writes")
    oslo, written = pair.servers["oslo"], 0

    def write(_stop: Event) -> None:
        nonlocal written
        namespace = oslo.site.create_namespace(DRAFTS)
        with suppress(floodmark.FloodmarkError):  # the server is gone
            for first in count(0, BATCH):
                namespace.put_many(dict(map(_draft, range(first, first + BATCH))))
                written = first + BATCH

    with stage.working("writing until the server is gone"):
        pair.people.run(write)
        pair.wait(lambda: written >= DRAFTS_MIN)
        assert oslo.process is not None
        stage.command(f"kill -9 {oslo.process.pid}")
        oslo.stop(kill=True)
        pair.people.stop()
        began = _seconds()
        oslo.start()
    stage.say(f"{written:,} writes were acknowledged; it is back after {_seconds() - began:.1f} s")
    drafts = dict(oslo.site.namespace(DRAFTS).scan())
    kept = sum(drafts.get(key) == value for key, value in map(_draft, range(written)))
    stage.check(f"all {written:,} are there", 0 < written == kept)
    whole = drafts == dict(map(_draft, range(len(drafts)))) and len(drafts) % BATCH == 0
    stage.check("and no commit is there in part", whole)
    survived = f"{kept:,} of {written:,} acknowledged writes survived kill -9"
    stage.sum_up(survived, acknowledged=written, kept=kept)


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
    links, sent = pair.links(), pair.sent.total()
    for link in links:
        stage.say(f"{link.changes:,} changes of {link.namespace} came from {link.source}")
    p50, p99 = (max(getattr(link, f"lag_ms_p{each}") or 0 for link in links) for each in (50, 99))
    checked = sum(link.intervals_checked for link in links)
    is_sound = checked > 0 and not any(link.intervals_wrong for link in links)
    stage.check(f"{checked} heartbeats came through, and vouch that no change was lost", is_sound)
    check_unread(stage, pair)
    figures = {"messages": sent, "lag_ms_p50": p50, "lag_ms_p99": p99, "heartbeats_checked": checked}
    figures |= {"reads_checked": pair.reads["checked"]}
    stage.sum_up(f"{sent:,} messages in both directions; lag p50 {p50:,} ms, p99 {p99:,} ms", **figures)


def check_unread(stage: Stage, pair: DemoPair) -> None:
    """Claim that the counters of both sites are exact."""
    keys = [person.encode() for person in EVERYBODY]
    shown = {
        name: [value or 0 for value in server.site.namespace(UNREAD).get_many(keys)]
        for name, server in pair.servers.items()
    }
    totals = ", ".join(f"{sum(counts):,} at {name}" for name, counts in shown.items())
    right = all(counts == [pair.sent[person] for person in EVERYBODY] for counts in shown.values())
    stage.check(f"unread, person by person: {totals}, {pair.sent.total():,} in truth", right)
    reads, wrong = pair.reads["checked"], pair.reads["wrong"]
    stage.check(
        f"{reads:,} atomic reads were checked: {wrong} found a count without its messages", reads > 0 == wrong
    )


def agree(stage: Stage, pair: DemoPair) -> None:
    """After all changes were exchanged, verify finds no difference."""
    stage.begin("verify", "Do the sites agree? Every key is compared")
    found = compare(stage, pair)
    compared = sum(each.compared for each in found.pairs)
    stage.check(f"all {compared:,} keys agree", found.outcome == "agree" and found.lag == 0)
    messages = sum(each.compared for each in found.pairs if each.namespace == MESSAGES)
    # Each site has one more key, with the number of messages that it has sent.
    stage.check("all messages that were sent are among them", messages == pair.sent.total() + len(PEOPLE))
    seconds = round(found.seconds, 1)
    agreed = f"{compared:,} keys compared in {seconds} s: the sites agree"
    stage.sum_up(agreed, compared=compared, seconds=seconds)


def lose_a_change(stage: Stage, pair: DemoPair) -> None:
    """A faulty stage between the sites drops one row, and the next heartbeat does not add up."""
    stage.begin("loss", "One message is silently dropped on its way from oslo to rome")
    oslo, rome = (server.site for server in pair.servers.values())
    with stage.working("the links start again, with a faulty stage in their middle"):
        pair.start_links(drop_lost)
    with stage.working("ada has invited grace, and the invitation is on its way"):
        pair.start_people()
        Event().wait(BEFORE_LOSS_SECONDS)
        pair.send("oslo", "ada", {LOST_KEY: LOST_VALUE}, Counter(grace=1))
        waited = pair.wait(lambda: any(link.findings for link in pair.links()))
    (finding, *others) = [finding for link in pair.links() for finding in link.findings]
    stage.say(f"oslo acknowledged {LOST_KEY.decode()}, and it never came to rome; no call has failed")
    stage.say(("rome: ", "dim"), (f"from oslo, {finding}", "red"))
    values = [site.namespace(MESSAGES).get(LOST_KEY) for site in (oslo, rome)]
    stage.check("rome lacks it, and no call reported it", values == [LOST_VALUE, None])
    stage.check(f"the next heartbeat names the loss, {waited:.1f} s after the write", not others)
    missed = f"1 change dropped on its way without an error, and missed {waited:.1f} s later"
    stage.sum_up(missed, named_ms=round(waited * 1000), finding=finding)


def drop_lost(rows: Any) -> Any:
    """The faulty stage: it drops one row."""
    return rows.filter(pyarrow.compute.not_equal(rows["key"], LOST_KEY))


def find_the_loss(stage: Stage, pair: DemoPair) -> None:
    """verify finds the lost key and no other, while others are written and replicated."""
    stage.begin("find", "verify finds what is lost, while people go on writing")
    sent_before = pair.sent.total()
    found = compare(stage, pair)
    sent = pair.sent.total() - sent_before
    keys = [each.drift.key for each in found.sample]
    stage.check("exactly the lost message is found", found.drift == 1 and keys == [LOST_KEY])
    stage.check(f"{sent:,} messages were sent meanwhile, and none of them is reported", sent > 0)
    result = f"verify found exactly this key, while {found.lag:,} others were under way"
    stage.sum_up(result, drift=found.drift, lag=found.lag, seconds=round(found.seconds, 1))


def mend(stage: Stage, pair: DemoPair) -> None:
    """The repair writes the message at rome under its own stamp; then the sites agree again."""
    stage.begin("repair", "repair mends it, and the sites agree again")
    mended = compare(stage, pair, repair=True)
    repaired = 0 if mended.repair is None else mended.repair.repaired
    stage.check("one key was repaired", repaired == 1)
    there, here = (server.site.namespace(MESSAGES).record(LOST_KEY) for server in pair.servers.values())
    same = there is not None and here is not None and here.value == LOST_VALUE and here.stamp == there.stamp
    stage.check("rome has the message, with the stamp that it got in oslo", same)
    with stage.working("the people have stopped; the last changes are on their way"):
        pair.stop_people()
    found = compare(stage, pair)
    stage.check("all keys agree", found.outcome == "agree" and found.lag == 0)
    check_unread(stage, pair)
    stage.sum_up("1 key repaired, and the sites agree on all keys again", repaired=repaired)


def compare(stage: Stage, pair: DemoPair, *, repair: bool = False) -> VerifySummary:
    """Compare the sites as `floodmark verify` does, and show what was found."""
    urls = [server.url for server in pair.servers.values()]
    stage.command("floodmark verify", *urls, *(["--repair"] if repair else []))
    with stage.working("comparing"):
        found = verify([SiteAddress(location=url) for url in urls], repair=repair, spark=pair.spark)
    for pair_found in found.pairs:
        counts = f"{pair_found.agree:,} agree, {pair_found.lag:,} are under way, {pair_found.drift:,} differ"
        stage.say(f"{pair_found.namespace}: {pair_found.compared:,} keys compared, {counts}")
    for each in found.sample:
        stage.say(("drift  ", "red"), f"{each.namespace}  {each.drift.key.decode()}  {each.drift.verdict}")
    return found


def _seconds() -> float:
    return monotonic_ms() / 1000


def newest_key(writer: str) -> bytes:
    """The key under which a writer stores the number of messages that it has sent."""
    return f"newest/{writer}".encode()


def _draft(number: int) -> tuple[bytes, bytes]:
    return b"draft-%06d" % number, b"draft %d" % number


STEPS: Final[list[Callable[[Stage, DemoPair], None]]] = [
    *(serve_two_sites, survive_a_kill, copy_both_ways, agree, lose_a_change, find_the_loss, mend)
]


def serve_demo_console(pair: DemoPair) -> ServedConsole:
    """The console of both sites; it stays open when one of them is killed."""

    def reach(server: DemoServer) -> Any:
        if server.process is None:
            raise floodmark.Unreachable(f"the server of {server.name} is not running")
        return server.site.host

    watched = [
        WatchedSite(server.name, server.url, partial(reach, server)) for server in pair.servers.values()
    ]
    return open_console(watched, ServerOptions(console_listen="127.0.0.1:0"))


def perform(stage: Stage, home: Path, *, kept: bool, console: bool = False) -> dict[str, object]:
    """Run the steps in a directory; returns their account as JSON fields."""
    home.mkdir(parents=True, exist_ok=True)
    stage.heading(("Floodmark", "bold"), "  two sites, Spark between them, and every claim checked")
    began = _seconds()
    with ExitStack() as ending:
        # So that the servers end with the demo.
        for number in (signal.SIGTERM, signal.SIGHUP):
            ending.callback(signal.signal, number, signal.signal(number, signal.default_int_handler))
        pair = DemoPair(home, ending)
        for step in STEPS:
            pair.require_well()
            step(stage, pair)
            if console and step is STEPS[0]:
                page = ending.enter_context(serve_demo_console(pair))
                stage.say("watch both on ", (page.url, "cyan"))
    seconds = _seconds() - began
    stage.heading(("Summary", "bold"))
    for done in stage.steps:
        stage.say(stage.mark(done.passed), f" {done.outcome}")
    held = [bool(check["passed"]) for done in stage.steps for check in done.checks]
    style = "bold green" if stage.passed else "bold red"
    stage.say((f"{sum(held)} of {len(held)} checks held, in {seconds:.0f} s", style))
    stage.heading(("Try next", "bold"))
    for line in _next(pair, kept=kept):
        stage.say(line)
    return {
        "passed": stage.passed,
        "seconds": round(seconds, 1),
        "directory": str(home) if kept else None,
        "steps": [asdict(done) for done in stage.steps],
    }


def _next(pair: DemoPair, *, kept: bool) -> list[str]:
    """Commands to try."""
    if not kept:
        return ["floodmark demo --directory demo-sites", "floodmark replicate --help", "floodmark --help"]
    home, (oslo, rome) = quote(str(pair.home)), pair.servers.values()
    return [
        f"floodmark scan {home}/rome {MESSAGES} --prefix ada+grace/ --limit 5",
        f"floodmark serve {home}/oslo --listen {oslo.listen} &",
        f"floodmark serve {home}/rome --listen {rome.listen} &",
        f"floodmark replicate --topology {home}/{TOPOLOGY_FILE} &",
        f"floodmark verify {oslo.url} {rome.url}",
    ]
