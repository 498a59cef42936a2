"""Floodmark behind the protocol of its peers, the turns of all sides, and the table of results.

A site is measured embedded in this process, and served by its own `floodmark serve` process on loopback, with
the same calls in both.  The sides do each measurement in turn, and the side that begins rotates.  A section
of a benchmark is printed when it is done; if one fails, its error is printed and the others still run.
"""

import argparse
import json
import signal
import sys
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from time import monotonic, perf_counter
from types import FrameType
from typing import Any, Final, TypeAlias, TypeVar

from benchmarks.harness import NAMESPACE, Measure, Target, describe_machine, tell
from benchmarks.peers.base import (
    ANSWER_SECONDS_MAX,
    LOOPBACK,
    Pair,
    Peer,
    PeerFailed,
    Server,
    Write,
    find_program,
    free_port,
    scratch_directory,
    server_process,
)

import floodmark
from floodmark import Change, Namespace, Site
from floodmark.engine import Guard, WriteRow
from floodmark.engine.rocks import RocksEngine
from floodmark.feed import Item
from floodmark.model.errors import Unreachable
from floodmark.model.stream import ChangesRequest
from floodmark.partition import FAMILIES, FILTERED_BYTES
from floodmark.partition.families import LOG
from floodmark.server import hash_token
from floodmark.site import open_engine
from floodmark.site.connecting import connect

EMBEDDED: Final = "floodmark in process"
SERVED: Final = "floodmark over the wire"
SITE: Final = "bench"

# Limit for one measurement of one side; loading a million records durably is the longest.
MEASUREMENT_SECONDS_MAX: Final = 1_800.0
QUICK_RECORDS: Final = 20_000
QUICK_REPETITIONS: Final = 2

Sample = TypeVar("Sample")


# Floodmark


class SiteServer(ABC):
    """The `Server` protocol of the peers, by the calls that users make of a site."""

    @abstractmethod
    def opened(self) -> AbstractContextManager[Site]:
        """Yields the site of one client."""

    def facts(self) -> Mapping[str, str]:
        with self.opened():
            return {"version": version("floodmark"), "durability": "fsync"}

    def load(self, records: Sequence[Pair], batch: int) -> None:
        with self.opened() as site, site.namespace(NAMESPACE).writer(batch_records=batch) as writer:
            for key, value in records:
                writer.put(key, value)

    def fill(self, records: Sequence[Pair], batch: int) -> None:
        self.load(records, batch)

    @contextmanager
    def writer(self) -> Iterator[Write]:
        with self.opened() as site:
            namespace = site.namespace(NAMESPACE)

            def write(records: Sequence[Pair]) -> None:
                namespace.put_many(records)

            yield write

    def catch_up(self, count: int) -> int:
        with self.opened() as site:
            return sum(1 for _ in islice(site.changes(NAMESPACE), count))

    def catch_up_columns(self, count: int) -> int:
        """`catch_up` on columns of stored bytes, as sinks and Spark read them."""
        seen = 0
        with self.opened() as site:
            for batch in site.host.changes(ChangesRequest()):
                seen += len(batch.keys)
                if seen >= count:
                    break
        return seen

    @contextmanager
    def tail(self) -> Iterator[Iterator[Sequence[Pair]]]:
        with self.opened() as site:
            # Resolved markers arrive even without writes, so that `groups_of` can notice a timeout.
            items: Any = site.changes(NAMESPACE, since="now", follow=True, resolved_markers=True)
            with closing(items):
                yield groups_of(items)

    @contextmanager
    def client(self) -> Iterator["SiteClient"]:
        with self.opened() as site:
            yield SiteClient(site.namespace(NAMESPACE))

    def scan(self) -> int:
        """Read all rows in order; returns their number."""
        with self.opened() as site:
            return sum(1 for _ in site.namespace(NAMESPACE).scan())


class EmbeddedServer(SiteServer):
    """A site of this process, which all clients share."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def opened(self) -> AbstractContextManager[Site]:
        return nullcontext(self.site)


@dataclass(frozen=True, kw_only=True)
class ServedSite(SiteServer):
    """The address of a server; each client has a connection of its own."""

    url: str
    # 0 if it does not serve RESP.
    resp_port: int = 0
    token: str | None = None

    def opened(self) -> AbstractContextManager[Site]:
        return connect(self.url, token=self.token)

    def create_namespace(self) -> None:
        with self.opened() as site:
            site.create_namespace(NAMESPACE)


class SiteClient:
    """Gets and puts; a put returns when it is on disk."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace

    def put(self, key: bytes, value: bytes) -> None:
        self._namespace.put(key, value)

    def get(self, key: bytes) -> bytes | None:
        return self._namespace.get(key)


def groups_of(items: Iterable[Item]) -> Iterator[Sequence[Pair]]:
    """The changes between resolved markers, as groups.  Raises PeerFailed if none arrives in time."""
    group: list[Pair] = []
    heard_at = monotonic()
    for item in items:
        if isinstance(item, Change):
            group.append((item.key, item.value or b""))
        elif group:
            yield group
            group = []
            heard_at = monotonic()
        elif monotonic() - heard_at > ANSWER_SECONDS_MAX:
            raise PeerFailed(f"no change came from Floodmark in {ANSWER_SECONDS_MAX:.0f} s")


def measure_columns(server: SiteServer, count: int) -> float:
    """Changes a second, read as columns."""
    begun = perf_counter()
    seen = server.catch_up_columns(count)
    seconds = perf_counter() - begun
    if seen < count:
        raise PeerFailed(f"the columns held {seen:,} changes of {count:,}")
    return seen / seconds


@contextmanager
def following(items: Any) -> Iterator[None]:
    """Consume a stream of changes in a thread while the context is open, and discard the items.

    The stream must yield an item now and then even without writes: otherwise the thread would not end.
    """
    stopped = False
    begun, ended = Event(), Event()

    def follow() -> None:
        try:
            next(items)
            begun.set()
            for _ in items:
                if stopped:
                    break
        finally:
            ended.set()

    with closing(items):
        Thread(target=follow, name="follower", daemon=True).start()
        if not begun.wait(ANSWER_SECONDS_MAX):
            raise PeerFailed(f"a follower saw nothing within {ANSWER_SECONDS_MAX:.0f} s")
        yield
        if ended.is_set():
            raise PeerFailed("a follower ended too early, so that nobody followed")
        stopped = True
        if not ended.wait(ANSWER_SECONDS_MAX):
            raise PeerFailed(f"a follower did not end within {ANSWER_SECONDS_MAX:.0f} s")


class LoglessEngine(RocksEngine):
    """RocksDB that drops the rows of the change log from each write."""

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        return super().write([row for row in rows if row[0] != LOG], guards)


@contextmanager
def stored_in(engine: type[RocksEngine], path: Path) -> Iterator[Namespace]:
    """A namespace of a new site on an engine of class `engine`."""
    stored = engine(path, FAMILIES, prefix_bytes=FILTERED_BYTES)
    with open_engine(stored, site=SITE, background=True) as site:
        yield site.create_namespace(NAMESPACE)


class Floodmark:
    """Floodmark as a peer that is always installed."""

    def is_installed(self) -> bool:
        return True

    def how_to_install(self) -> str:
        return "make setup"


class Embedded(Floodmark):
    """A site in a directory, opened by this process."""

    name = EMBEDDED

    @contextmanager
    def running(self, directory: Path) -> Iterator[Server]:
        with floodmark.open(directory / "embedded", site=SITE) as site:
            site.create_namespace(NAMESPACE)
            yield EmbeddedServer(site)


class Served(Floodmark):
    """A site in a directory, served by its own process; with `tokens`, only to callers that present one."""

    name = SERVED

    def __init__(self, tokens: Sequence[str] = ()) -> None:
        self.tokens = tokens

    @contextmanager
    def running(self, directory: Path) -> Iterator[ServedSite]:
        program = find_program("floodmark")
        if program is None:
            raise PeerFailed(f"the floodmark command is not beside {sys.executable}: {self.how_to_install()}")
        home = directory / "served"
        home.mkdir()
        listen, resp_port = f"{LOOPBACK}:{free_port()}", free_port()
        command: list[str | Path] = [program, "serve", home / "site", "--site", SITE, "--listen", listen]
        command += ["--resp", f"{LOOPBACK}:{resp_port}", "--resp-namespace", NAMESPACE]
        if self.tokens:
            command += ["--access", self._write_access(home / "access.toml")]
        with server_process(self.name, command, home) as process:
            token = next(iter(self.tokens), None)
            server = ServedSite(url=f"grpc://{listen}", resp_port=resp_port, token=token)
            process.wait_until_ready(server.facts, (Unreachable,))
            server.create_namespace()
            yield server

    def _write_access(self, path: Path) -> Path:
        entries = [
            f'[[access]]\nname = "{token}"\nrole = "admin"\ntoken_sha256 = "{hash_token(token)}"\n'
            for token in self.tokens
        ]
        path.write_text("".join(entries), "utf-8")
        return path


# Turns


@contextmanager
def running(peers: Iterable[Peer], directory: Path) -> Iterator[dict[str, Server]]:
    """Run the servers of all peers at once; yields them by name."""
    with ExitStack() as stack:
        servers = {}
        for peer in peers:
            tell(f"starting {peer.name}")
            servers[peer.name] = stack.enter_context(peer.running(directory))
        yield servers


def in_turns(
    what: str, sides: Mapping[str, Callable[[], Sample]], repetitions: int
) -> dict[str, list[Sample]]:
    """Run each side's measurement once in each repetition, in turn; returns the samples of each side."""
    order = deque(sides)
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    for repetition in range(repetitions):
        tell(f"{what}: {repetition + 1} of {repetitions}")
        for name in order:
            with within(MEASUREMENT_SECONDS_MAX, f"{what}, {name}"):
                samples[name].append(sides[name]())
        order.rotate(-1)
    return samples


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Raise PeerFailed in the block after `seconds`.  Only for the main thread, which receives SIGALRM."""

    def give_up(_: int, __: FrameType | None) -> None:
        raise PeerFailed(f"{what} was not done within {seconds:,.0f} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Results


@dataclass(frozen=True, kw_only=True)
class Line:
    """The result of one side for one kind of work; `ratio` is to the median of the side named `against`."""

    work: str
    side: str
    unit: str
    measure: Measure
    ratio: float | None = None
    against: str = ""
    target: str = ""
    verdict: str = ""
    remark: str = ""


def line(
    work: str,
    side: str,
    unit: str,
    samples: Sequence[float],
    *,
    target: Target | None = None,
    against: tuple[str, Measure] | None = None,
    remark: str = "",
) -> Line:
    """A line whose target applies to its own median, not to the ratio."""
    measure = Measure.of(samples)
    return Line(
        work=work,
        side=side,
        unit=unit,
        measure=measure,
        ratio=None if against is None else measure.median / against[1].median,
        against="" if against is None else against[0],
        target="" if target is None else str(target),
        verdict="" if target is None else target.verdict(measure.median),
        remark=remark,
    )


def held(each: Line, target: Target) -> Line:
    """The line with a target that applies to its ratio."""
    assert each.ratio is not None
    return replace(each, target=str(target), verdict=target.verdict(each.ratio))


def best_peer(samples: Mapping[str, Sequence[float]], *, highest: bool = True) -> tuple[str, Measure] | None:
    """The name and measure of the best side that is not Floodmark, or None if there is none."""
    measures = {
        name: Measure.of(numbers) for name, numbers in samples.items() if not name.startswith("floodmark")
    }
    if not measures:
        return None
    choose = max if highest else min
    name = choose(measures, key=lambda name: measures[name].median)
    return name, measures[name]


def ahead(side: str, samples: Mapping[str, Sequence[float]]) -> Iterator[Line]:
    """A line that compares a side with the best peer; none if no peer was measured."""
    best = best_peer(samples)
    if best is not None:
        name, measure = best
        ratio = Measure.of(samples[side]).median / measure.median
        target = Target(limit=1, unit=f"x {name}", at_least=True)
        yield line("  ahead of every peer", side, f"x {name}", [ratio], target=target)


# Benchmarks


Section: TypeAlias = Callable[[Path, argparse.Namespace], Iterator[Line]]


def run_sections(options: argparse.Namespace, sections: Mapping[str, Section]) -> None:
    """Run the sections in order, each in its own directory; the process exits with 1 if one failed."""
    # SIGTERM raises SystemExit, so that the servers are stopped too.
    signal.signal(signal.SIGTERM, _exit)
    machine = {**describe_machine(), **{name: version(name) for name in ("floodmark", "pyarrow")}}
    print("\n".join(f"{name}: {text}" for name, text in machine.items()), flush=True)
    done: dict[str, list[Line]] = {}
    failed: dict[str, str] = {}
    for name in options.only or sections:
        lines = done.setdefault(name, [])
        try:
            with scratch_directory(options.directory) as directory:
                for each in sections[name](directory, options):
                    lines.append(each)
        except Exception as error:
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
        print(f"\n{render(lines)}", flush=True)
        if name in failed:
            print(f"{name}: FAILED, and is not complete: {failed[name]}", flush=True)
    if options.json is not None:
        data = {
            "machine": machine,
            "sections": {name: [asdict(each) for each in lines] for name, lines in done.items()},
            "failed": failed,
        }
        options.json.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
    sys.exit(bool(failed))


def run_timed(description: str | None, sections: Mapping[str, Section]) -> None:
    """Run a benchmark whose sections measure calls for `--seconds` at a time."""
    parser = base_parser(description, sections)
    parser.add_argument("--seconds", type=float, help="of calls in a turn; 5, with --quick 1")
    options = parse(parser)
    options.seconds = options.seconds or (1.0 if options.quick else 5.0)
    run_sections(options, sections)


def base_parser(description: str | None, sections: Iterable[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--records", type=int, help=f"1,000,000; with --quick {QUICK_RECORDS:,}")
    parser.add_argument("--repetitions", type=int, help=f"5; with --quick {QUICK_REPETITIONS}")
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures say little")
    parser.add_argument("--only", action="append", choices=list(sections), help="this section only")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results for machines, too")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    if options.records is None:
        options.records = QUICK_RECORDS if options.quick else 1_000_000
    if options.repetitions is None:
        options.repetitions = QUICK_REPETITIONS if options.quick else 5
    if options.records < 10_000 or options.repetitions < 1:
        parser.error("--records starts at 10,000 and --repetitions at 1")
    return options


def render(lines: Sequence[Line]) -> str:
    """The table, with the remarks below."""
    head = ("work", "side", "unit", "median", "min-max", "ratio", "target", "")
    rows = [head, *(_cells(each) for each in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    texts = [
        "  ".join(
            cell.rjust(width) if column in (3, 4) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    remarks = [f"{each.work.strip()}, {each.side}: {each.remark}" for each in lines if each.remark]
    return "\n".join([*texts, *remarks])


def _cells(each: Line) -> tuple[str, ...]:
    measure = each.measure
    spread = "" if measure.low == measure.high else f"{_number(measure.low)} - {_number(measure.high)}"
    ratio = "" if each.ratio is None else f"{each.ratio:.2f} x {each.against}"
    return each.work, each.side, each.unit, _number(measure.median), spread, ratio, each.target, each.verdict


def _number(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:,.2f}"


def _exit(signal_number: int, _: FrameType | None) -> None:
    sys.exit(128 + signal_number)
