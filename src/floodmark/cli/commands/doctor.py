"""doctor: check a site, and say what to do."""

from collections.abc import Sequence
from typing import Annotated, Final

import typer

import floodmark
from floodmark.cli.arguments import Location
from floodmark.cli.failures import DONE, FINDING, UNKNOWN
from floodmark.cli.opening import location_fields, open_site, require_site
from floodmark.cli.render.output import Output, plain
from floodmark.cli.render.progress import progress, tracked
from floodmark.cli.render.text import show_count
from floodmark.clock import TimeSource, system_time_ms
from floodmark.clock.hybrid import SKEW_MS_MAX
from floodmark.host.embedded import EmbeddedHost
from floodmark.host.examination import CheckResult, Examination, Severity, check_nodes
from floodmark.model.errors import (
    CannotOpen,
    ClockSkew,
    Corruption,
    FloodmarkError,
    FormatTooNew,
    NotASite,
    SiteLocked,
)
from floodmark.model.version import physical_ms
from floodmark.site.opening import open_accepting

_AFTER_LOSS: Final = (
    "before clients add to counters: compare the site with a peer, floodmark verify --repair, or restore the "
    "missing records from a backup (docs/operations/damage.md)"
)

_STYLES: Final = {
    Severity.OK: "green",
    Severity.WARNING: "yellow",
    Severity.PROBLEM: "bold red",
    Severity.UNKNOWN: "magenta",
}


def doctor(
    location: Location,
    output: Output,
    quick: Annotated[bool, "Do not read every record and every row of the change log."] = False,
    accept_loss: Annotated[
        bool, "Open a site although acknowledged writes are missing, and give these up."
    ] = False,
    accept_clock: Annotated[
        bool, "Accept this machine's clock at a site that refuses it because it jumped ahead."
    ] = False,
) -> None:
    """Check a site, and say what to do.

    Checks its format, clock, disk, lock, heartbeats, partitions, safe points, feeds and
    subscriptions, names what has held the resolved version back for more than two seconds, and
    reads every record and every row of the change log. Changes nothing, unless a loss or the
    clock is accepted. A server is examined while it serves; a large one may need floodmark
    --timeout 1h doctor.

    The exit code is 0 if the site is healthy, 1 if there is a finding, and 2 if the site could not
    be examined, as when another process has the directory open.

    Examples:
      floodmark doctor data/oslo
      floodmark doctor grpc://127.0.0.1:7100 --quick
      floodmark doctor data/oslo --accept-loss
      floodmark doctor data/oslo --accept-clock
    """
    findings = accept_losses(location) if accept_loss else []
    findings += accept_time(location) if accept_clock else []
    findings += examine_site(location, quick=quick)
    code = judge(findings)
    if output.json:
        shown = [plain(finding) for finding in findings]
        output.object({**location_fields(location), "healthy": code == DONE, "findings": shown})
    else:
        _print(output, findings)
    if code != DONE:
        raise typer.Exit(code)


def judge(findings: Sequence[CheckResult]) -> int:
    """The exit code: a problem or warning counts more than an unknown."""
    severities = {finding.severity for finding in findings}
    if severities & {Severity.PROBLEM, Severity.WARNING}:
        return FINDING
    return UNKNOWN if Severity.UNKNOWN in severities else DONE


def accept_losses(location: str) -> list[CheckResult]:
    """Open a site without the acknowledged writes that it has lost; returns findings that name them."""
    directory = require_site(location)
    try:
        floodmark.open(directory, background=False).close()
    except Corruption as error:
        missing = error.details.get("what")
        if missing is None:
            return []
        open_accepting(directory, loss=True).close()
        return [CheckResult("loss", Severity.WARNING, f"accepted: {missing}", _AFTER_LOSS)]
    except FloodmarkError:
        # The examination reports it.
        return []
    return [CheckResult("loss", Severity.OK, "no acknowledged write is known to be missing")]


def accept_time(location: str) -> list[CheckResult]:
    """Make a site accept this machine's time; returns findings that say whether it had refused it."""
    directory = require_site(location)
    try:
        with floodmark.open(directory, background=False) as site:
            site.now()
    except ClockSkew as error:
        with open_accepting(directory, clock=True) as site:
            site.now()
        hours = int(str(error.details.get("ahead_ms", 0))) // 3_600_000
        message = f"accepted: this machine's time, {hours:,} hours after the last version"
        return [
            CheckResult("clock", Severity.WARNING, message, "check that it is right: there is no way back")
        ]
    except FloodmarkError:
        # The examination reports it.
        return []
    return [CheckResult("clock", Severity.OK, "this machine's time is believed")]


def examine_site(location: str, *, quick: bool) -> list[CheckResult]:
    """All findings about a site; damage that keeps it from being opened is a finding too."""
    try:
        with open_site(location) as site:
            return _examine_open(site, location, quick=quick)
    except SiteLocked as error:
        message = f"{location} is open in {error.details.get('owner')}, and nothing else could be checked"
        advice = "if it is a server, floodmark doctor grpc://HOST:PORT examines it; if not, stop it first"
        return [CheckResult("lock", Severity.UNKNOWN, message, advice)]
    except (FormatTooNew, Corruption) as error:
        return [CheckResult("format", Severity.PROBLEM, str(error))]
    except ClockSkew as error:
        return [CheckResult("clock", Severity.PROBLEM, str(error))]
    except CannotOpen as error:
        # A site that is not there is a mistake in the command; a site without its database is a finding.
        if error.details.get("missing") != "engine" and (
            not isinstance(error, NotASite) or error.details.get("missing")
        ):
            raise
        return [CheckResult("format", Severity.PROBLEM, str(error))]


def _examine_open(site: floodmark.Site, location: str, *, quick: bool) -> list[CheckResult]:
    host = site.host
    if isinstance(host, EmbeddedHost):
        lock = CheckResult("lock", Severity.OK, "no other process has the directory open")
        with tracked("examining the site") as track:
            examination = Examination(
                host, disk=host.disk, on_page=lambda what, rows, _: track(f"{what} read", rows)
            )
            return [lock, *examination.run(quick=quick)]
    lock = CheckResult("lock", Severity.OK, f"the server at {location} answers")
    clocks = compare_clocks(site, system_time_ms)
    with progress("the server examines the site"):
        return [lock, clocks, *check_nodes(host.node_port.nodes()), *host.verification.examine(quick)]


def compare_clocks(site: floodmark.Site, time_source: TimeSource) -> CheckResult:
    """Compare a server's time with this machine's, allowing for the time of the call."""
    before_ms = time_source()
    server_ms = physical_ms(site.now())
    after_ms = time_source()
    ahead_ms, behind_ms = server_ms - after_ms, before_ms - server_ms
    if max(ahead_ms, behind_ms) <= SKEW_MS_MAX:
        return CheckResult("clocks", Severity.OK, "the server's time and this machine's agree")
    how = f"{ahead_ms:,} ms ahead of" if ahead_ms > 0 else f"{behind_ms:,} ms behind"
    return CheckResult(
        "clocks",
        Severity.WARNING,
        f"the server's time is {how} this machine's",
        "synchronise the clocks of both machines; times given with --since and --at mean the server's",
    )


def _print(output: Output, findings: Sequence[CheckResult]) -> None:
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        severity = (f"{finding.severity:<9}", _STYLES[finding.severity])
        output.line(severity, f"{finding.check:<{width}}  {finding.message}")
        if finding.advice:
            output.line(" " * 9 + " " * width, ("  try: " + finding.advice, "dim"))
    counts = {
        severity: sum(finding.severity is severity for finding in findings)
        for severity in (Severity.PROBLEM, Severity.WARNING)
    }
    said = [show_count(count, severity) for severity, count in counts.items() if count]
    unknown = [finding for finding in findings if finding.severity is Severity.UNKNOWN]
    output.line(", ".join(said) or ("could not be told" if unknown else "healthy"))
