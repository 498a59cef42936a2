"""The summary of verify: a table for people, an object for programs."""

from typing import TYPE_CHECKING, Final

from floodmark.cli.render.fields import plain
from floodmark.cli.render.output import Column, Output
from floodmark.cli.render.text import json_bytes, show_bytes, show_count, show_time
from floodmark.divergence.comparing import Drift, DriftSide
from floodmark.divergence.histories import Difference, DifferenceKind
from floodmark.divergence.outcome import Outcome
from floodmark.divergence.repairing import RepairSummary
from floodmark.divergence.rules import Verdict
from floodmark.model.change import Stamp

if TYPE_CHECKING:
    from floodmark.spark.jobs import PairSummary, VerifySummary

_COLUMNS: Final[dict[str, Column["PairSummary"]]] = {
    "namespace": "namespace",
    "left": "left",
    "right": "right",
    "compared": "compared",
    "agree": "agree",
    "lag": "lag",
    "differ": "value_mismatch",
    "missing left": "missing_left",
    "missing right": "missing_right",
}
_STYLES: Final = {Outcome.AGREE: "green", Outcome.DRIFT: "bold red", Outcome.UNKNOWN: "magenta"}


def print_verification(output: Output, summary: "VerifySummary") -> None:
    """Print the summary of a comparison."""
    if output.json:
        output.object(verify_fields(summary))
        return
    if summary.pairs:
        output.rows(summary.pairs, _COLUMNS)
    for found in summary.sample:
        output.line(("drift  ", "red"), f"{found.namespace}  {_describe_drift(found.drift)}")
    more = summary.drift - len(summary.sample)
    if summary.sample and more > 0:
        output.line(("drift  ", "red"), f"and {more:,} more")
    for past in summary.differences:
        output.line(("past   ", "red"), f"{past.namespace}  {_describe_difference(past.difference)}")
    if (unseen := summary.differences_found - len(summary.differences)) > 0:
        output.line(("past   ", "red"), f"and {unseen:,} more")
    if summary.repair is not None:
        _print_repair(output, summary.repair)
    for doubt in summary.doubts:
        output.line(("unsure ", "magenta"), doubt)
    if summary.report is not None:
        output.line(f"every key that has drifted is a row in {summary.report}")
    output.line((_conclude(summary), _STYLES[summary.outcome]))


def verify_fields(summary: "VerifySummary") -> dict[str, object]:
    """The summary of a comparison, for programs."""
    return {
        "outcome": str(summary.outcome),
        **plain(summary),
        "pairs": [{**plain(pair), "drift": pair.drift} for pair in summary.pairs],
        "left": [{**plain(pair), "drift": pair.drift} for pair in summary.left],
        "sample": [{"namespace": found.namespace, **_drift_fields(found.drift)} for found in summary.sample],
        "differences": [
            {"namespace": found.namespace, **plain(found.difference)} for found in summary.differences
        ],
    }


def _drift_fields(drift: Drift) -> dict[str, object]:
    return {
        **json_bytes("key", drift.key),
        "verdict": str(drift.verdict),
        "part": drift.part,
        "left": _side_fields(drift.left),
        "right": _side_fields(drift.right),
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


def _print_repair(output: Output, repair: RepairSummary) -> None:
    output.line(
        ("repair ", "green"),
        f"{show_count(repair.repaired, 'key')} repaired, {repair.changed_meanwhile:,} had changed meanwhile, "
        f"{repair.impossible:,} cannot be repaired",
    )
    for problem in repair.problems:
        output.line(("repair ", "yellow"), problem)


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
