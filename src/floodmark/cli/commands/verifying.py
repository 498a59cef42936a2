"""verify: whether sites agree, and which keys differ; its summary for people, programs and Prometheus."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from prometheus_client import Metric

from floodmark.cli.arguments import given
from floodmark.cli.commands.topology import read_topology
from floodmark.cli.failures import DONE, FINDING, UNKNOWN, Usage
from floodmark.cli.jobs import JOBS, SparkChoice, load, reach, shared_credentials, spark_job
from floodmark.cli.monitoring import CommandPage, MetricsOptions, serving_page
from floodmark.cli.render.output import Column, Output, note, plain
from floodmark.cli.render.text import show_count, show_time
from floodmark.clock import TimeSource, monotonic_ms
from floodmark.divergence.comparing import Drift, DriftSide
from floodmark.divergence.histories import Difference, DifferenceKind
from floodmark.divergence.outcome import Outcome
from floodmark.divergence.rules import Verdict
from floodmark.model.change import Stamp
from floodmark.model.text import show_bytes
from floodmark.server import metrics

if TYPE_CHECKING:
    from collections.abc import Generator

    from floodmark.spark.jobs import PairSummary, VerifySummary

SITES_MIN: Final = 2
EXIT_CODES: Final = {Outcome.AGREE: DONE, Outcome.DRIFT: FINDING, Outcome.UNKNOWN: UNKNOWN}

_STYLES: Final = {Outcome.AGREE: "green", Outcome.DRIFT: "bold red", Outcome.UNKNOWN: "magenta"}


def _show_missing(pair: "PairSummary") -> str:
    """How many keys are missing at which of the two sites."""
    found = ((pair.missing_left, pair.left), (pair.missing_right, pair.right))
    return ", ".join(f"{count:,} at {site}" for count, site in found if count) or "0"


_COLUMNS: Final[dict[str, Column["PairSummary"]]] = {
    "namespace": "namespace",
    "left": "left",
    "right": "right",
    "compared": "compared",
    "agree": "agree",
    "lag": "lag",
    "differ": "value_mismatch",
    "missing": _show_missing,
}


@dataclass(frozen=True, kw_only=True)
class OnceOptions:
    """The options of a single pass."""

    repair: Annotated[bool, "Rewrite each drifted key with the record that should have won."] = False
    history: Annotated[
        bool, "Also compare the change logs, to find lost changes that were overwritten later."
    ] = False
    report: Annotated[str | None, "DIRECTORY", "Write a row for each drifted key, as Parquet."] = None


@dataclass(frozen=True, kw_only=True)
class WatchOptions(MetricsOptions):
    """The options of passes that go on until Ctrl-C."""

    watch: Annotated[bool, "Repeat and compare only changed keys, until Ctrl-C."] = False
    every: Annotated[
        timedelta | None, "DURATION", "With --watch: the pause between two passes.", {"show_default": "10s"}
    ] = None
    whole_every: Annotated[
        timedelta | None,
        "DURATION",
        "With --watch: how often all keys are compared.",
        {"show_default": "24h"},
    ] = None

    def check(self, once: OnceOptions) -> None:
        """Refuse options that exclude each other."""
        if self.watch and once != OnceOptions():
            raise Usage(
                "--watch only looks; --repair, --history and --report belong to a single pass",
                "floodmark verify SITE SITE --repair",
            )
        if any((self.every, self.whole_every, self.metrics)) and not self.watch:
            raise Usage("--every, --whole-every and --metrics belong to --watch", "floodmark verify --help")


def verify(
    output: Output,
    once: OnceOptions,
    watching: WatchOptions,
    spark: SparkChoice,
    locations: Annotated[
        list[str] | None,
        typer.Argument(metavar="SITE", help="Sites: their directories, or their servers' URLs."),
    ] = None,
    topology: Annotated[Path | None, "FILE", "Compare all sites of a topology, in TOML."] = None,
    namespace: Annotated[
        list[str] | None,
        "NAMESPACE",
        "May be given several times; all shared namespaces by default.",
    ] = None,
    sample: Annotated[int, "N", "Print at most N drifted keys.", {"min": 0}] = 20,
    max_lag: Annotated[
        timedelta | None,
        "DURATION",
        "Report 2, could not tell, if a site has heard nothing of another for longer than this.",
        {"show_default": "60s"},
    ] = None,
) -> None:
    """Say whether sites agree, and which keys have drifted apart.

    Compares every record, by digests, while writes continue. A change that has not arrived yet
    counts as lag and is never reported as drift: a key has drifted if each site has received all
    changes that the other's record is made of, and the two records still differ.

    --repair rewrites such a key with the record that should have won, under its original stamp. A
    key that changed since it was compared is left alone, and compared again.

    The exit code is 0 if the sites agree, 1 if they have drifted apart, and 2 if verify could not
    tell: a site does not answer, does not share the namespace, or replication does not run.
    With --watch it is the exit code of the last pass.

    Examples:
      floodmark verify grpc://oslo:7100 grpc://rome:7100
      floodmark verify data/oslo data/rome --namespace users --report reports/users
      floodmark verify --topology topology.toml --repair
      floodmark verify --topology topology.toml --watch --every 30s --metrics 127.0.0.1:9100
    """
    named = locations or []
    if (topology is None) == (not named) or 0 < len(named) < SITES_MIN:
        raise Usage("name two sites or more, or a topology", "floodmark verify --help")
    watching.check(once)
    members = None if topology is None else read_topology(topology)
    asked: dict[str, Any] = {"sample": sample, **given(max_lag=max_lag)}
    output.flushes = watching.watch
    found, doubts = VerifyMetrics(), list[str]()
    with serving_page(found, watching), reach(*named, doubts=doubts) as reached:
        if doubts and len(reached) < SITES_MIN:
            summary = load(JOBS).VerifySummary(sites=[], pairs=[], doubts=doubts)
            print_verification(output, summary)
            raise typer.Exit(EXIT_CODES[summary.outcome])
        with _telling_of_repairs(once.repair), spark_job(spark, "verify") as job:
            addresses = reached
            if members is not None:
                addresses = list(job.functions.site_addresses(members, **shared_credentials()).values())
            if watching.watch:
                asked |= given(every=watching.every, whole_every=watching.whole_every, stop=job.stop)
                passes = job.run("watch", addresses, namespace, **asked)
                outcome = _watch(passes, output, found, job.stop, doubts)
            else:
                summary = _with(doubts, job.run("verify", addresses, namespace, **asked, **vars(once)))
                outcome = summary.outcome
    if not watching.watch:
        print_verification(output, summary)
    raise typer.Exit(EXIT_CODES[outcome])


@contextmanager
def _telling_of_repairs(repair: bool) -> Iterator[None]:
    """Warn of keys that a repair may have changed before a signal ended it."""
    try:
        yield
    except typer.Exit:
        if repair:
            note("some keys may have been repaired already; verify again to see which are left")
        raise


def _with(doubts: list[str], summary: "VerifySummary") -> "VerifySummary":
    """A summary with the doubts about sites that could not be opened."""
    return msgspec.structs.replace(summary, doubts=[*doubts, *summary.doubts])


def _watch(
    passes: "Generator[VerifySummary, None, None]",
    output: Output,
    found: "VerifyMetrics",
    stop: Event,
    doubts: list[str],
) -> Outcome:
    """Print pass after pass; returns the outcome of the last complete one."""
    outcome = None
    try:
        with closing(passes):
            for summary in (_with(doubts, each) for each in passes):
                found.add(summary)
                print_verification(output, summary)
                outcome = summary.outcome
    except Exception:
        if outcome is None or not stop.is_set():
            raise
    return outcome or Outcome.UNKNOWN


# For people and programs


def print_verification(output: Output, summary: "VerifySummary") -> None:
    """Print the summary of a comparison."""
    if output.json:
        output.object(_fields(summary))
        return
    if summary.pairs:
        output.rows(summary.pairs, _COLUMNS)
    sample = [f"{found.namespace}  {_describe_drift(found.drift)}" for found in summary.sample]
    _print_some(output, "drift  ", sample, summary.drift if sample else 0)
    past = [f"{found.namespace}  {_describe_difference(found.difference)}" for found in summary.differences]
    _print_some(output, "past   ", past, summary.differences_found)
    if (repair := summary.repair) is not None:
        counts = f"{show_count(repair.repaired, 'key')} repaired, {repair.changed_meanwhile:,} had changed"
        output.line(("repair ", "green"), f"{counts} meanwhile, {repair.impossible:,} cannot be repaired")
        for problem in repair.problems:
            output.line(("repair ", "yellow"), problem)
    for doubt in summary.doubts:
        output.line(("unsure ", "magenta"), doubt)
    if summary.report is not None:
        output.line(f"every key that has drifted is a row in {summary.report}")
    output.line((_conclude(summary), _STYLES[summary.outcome]))


def _print_some(output: Output, what: str, lines: Sequence[str], total: int) -> None:
    for line in lines:
        output.line((what, "red"), line)
    if total > len(lines):
        output.line((what, "red"), f"and {total - len(lines):,} more")


def _fields(summary: "VerifySummary") -> dict[str, object]:
    def of_pairs(pairs: Sequence["PairSummary"]) -> list[dict[str, object]]:
        return [{**plain(pair), "drift": pair.drift} for pair in pairs]

    return {
        "outcome": str(summary.outcome),
        **plain(summary),
        "pairs": of_pairs(summary.pairs),
        "left": of_pairs(summary.left),
        "sample": [
            {
                "namespace": found.namespace,
                **plain(found.drift),
                "left": _side_fields(found.drift.left),
                "right": _side_fields(found.drift.right),
            }
            for found in summary.sample
        ],
        "differences": [
            {"namespace": found.namespace, **plain(found.difference)} for found in summary.differences
        ],
    }


def _side_fields(side: DriftSide) -> dict[str, object]:
    return {
        **plain(side),
        "mark": {str(site): str(version) for site, version in side.mark.items()},
        "digest": None if side.digest is None else f"{side.digest:016x}",
    }


def _describe_drift(drift: Drift) -> str:
    what = f"{show_bytes(drift.key)}{_describe_part(drift)}"
    left, right = drift.left, drift.right
    if drift.verdict is Verdict.VALUE_MISMATCH:
        if left.stamp is not None and left.stamp == right.stamp:
            once = f"though it was {_describe_stamp(left.stamp)} once"
            return f"{what} is not the same at {left.site} and {right.site}, {once}"
        said = "differs"
    else:
        said = f"is missing at {left.site if drift.verdict is Verdict.MISSING_LEFT else right.site}"
    return f"{what} {said}: {_describe_side(left)}, {_describe_side(right)}"


def _describe_part(drift: Drift) -> str:
    if drift.part is None:
        return ""
    return f" (field {drift.part})" if isinstance(drift.part, str) else f" (count of site {drift.part})"


def _describe_side(side: DriftSide) -> str:
    if side.stamp is None:
        return f"{side.site} has nothing"
    what = "deleted" if side.deleted else "written"
    return f"{side.site} has what was {what} at {show_time(side.stamp.version)} by site {side.stamp.site}"


def _describe_stamp(stamp: Stamp) -> str:
    return f"written at {show_time(stamp.version)} by site {stamp.site}"


def _describe_difference(difference: Difference) -> str:
    when = _describe_stamp(difference.stamp)
    if difference.kind is DifferenceKind.LOST:
        return f"{show_bytes(difference.key)} was lost on its way to {difference.other}: {when}"
    return (
        f"{show_bytes(difference.key)} is another at {difference.other} than at {difference.holder}: {when}"
    )


def _conclude(summary: "VerifySummary") -> str:
    match summary.outcome:
        case Outcome.AGREE if summary.repair is not None and summary.repair.repaired:
            return "the sites agree again"
        case Outcome.AGREE:
            under_way = f"; {show_count(summary.lag, 'change')} under way" if summary.lag else ""
            return f"the sites agree{under_way}"
        case Outcome.DRIFT if not summary.drift_left:
            return "the sites agree now, but some changes had been lost and later written over"
        case Outcome.DRIFT:
            return "the sites have drifted apart"
        case Outcome.UNKNOWN:
            return "unknown: not all sites could be compared"


# For Prometheus


class VerifyMetrics(CommandPage):
    """The findings of `verify --watch`: of the last pass, and totals."""

    def __init__(self, time_source: TimeSource = monotonic_ms) -> None:
        self._time_source = time_source
        self._lock = Lock()
        self.last: VerifySummary | None = None
        self.passes = {"whole": 0, "changed": 0}
        self._whole_at_ms: int | None = None
        self._compared: dict[tuple[str, ...], int] = {}
        super().__init__()

    def add(self, summary: "VerifySummary") -> None:
        """Add the summary of a pass."""
        with self._lock:
            self.last = summary
            self.passes["whole" if summary.whole else "changed"] += 1
            if summary.whole and summary.pairs and not summary.doubts:
                self._whole_at_ms = self._time_source()
            for pair in summary.pairs:
                labels = _labels(pair)
                self._compared[labels] = self._compared.get(labels, 0) + pair.compared

    @property
    def whole_age_ms(self) -> int | None:
        """The time since the last pass over everything that left no doubt."""
        return None if self._whole_at_ms is None else self._time_source() - self._whole_at_ms

    def why_not_ready(self) -> str | None:
        return "the first pass is under way" if self.last is None else None

    def find_alarms(self) -> list[str]:
        """The alarms: drift and doubts of the last pass."""
        last = self.last
        if last is None:
            return []
        drifted = [
            f"{pair.namespace}: {pair.left} and {pair.right} have drifted apart in {pair.drift:,} keys"
            for pair in last.pairs
            if pair.drift
        ]
        return [*drifted, *last.doubts]

    def collect(self) -> Iterator[Metric]:
        """The families of one rendering; the registry calls it."""
        with self._lock:
            pairs = [] if self.last is None else self.last.pairs
            yield from metrics.VERIFY.families([((), self)])
            yield from metrics.VERIFY_COMPARED.families(self._compared.items())
            yield from metrics.VERIFY_PAIR.families((_labels(pair), pair) for pair in pairs)


def _labels(pair: "PairSummary") -> tuple[str, ...]:
    return pair.namespace, pair.left, pair.right
