"""The play: the steps in their order, and what is said before and after them."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Final

from floodmark.cli.demo.agreement import agree, find_the_loss, mend
from floodmark.cli.demo.copying import begin_to_copy, copy_both_ways
from floodmark.cli.demo.losing import lose_a_change
from floodmark.cli.demo.messaging import MESSAGES
from floodmark.cli.demo.pair import TOPOLOGY_FILE, Pair
from floodmark.cli.demo.serving import serve_two_sites, survive_a_kill
from floodmark.cli.demo.stage import Stage
from floodmark.cli.render.text import align, json_bytes
from floodmark.clock import monotonic_ms

STEPS: Final[list[Callable[[Stage, Pair], None]]] = [
    serve_two_sites,
    begin_to_copy,
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
    stage.open("Floodmark", "two sites, Spark between them, and every claim checked")
    began_ms = monotonic_ms()
    pair = Pair(home)
    with _ending_on_signals(), pair, _told_of_the_end(stage):
        for step in STEPS:
            pair.require_well()
            step(stage, pair)
    seconds = (monotonic_ms() - began_ms) / 1000
    _sum_up(stage, seconds)
    _tell_next(stage, pair, kept=kept)
    return {
        "passed": stage.passed,
        "seconds": round(seconds, 1),
        **json_bytes("directory", os.fsencode(home) if kept else None),
        "steps": [step.account() for step in stage.steps],
    }


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Let whoever ends the demo end its servers with it: other signals do what Ctrl-C does."""
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _told_of_the_end(stage: Stage) -> Iterator[None]:
    """Tell whoever presses Ctrl-C what comes of it: Spark, when it is just starting, takes its time."""
    try:
        yield
    except KeyboardInterrupt:
        stage.gap()
        stage.say(("ending the servers and Spark; Ctrl-C again leaves at once", "dim"))
        raise


def _sum_up(stage: Stage, seconds: float) -> None:
    stage.heading("Summary")
    for step in stage.steps:
        stage.say(step.outcome, mark=stage.mark(step.passed))
    checks = [check for step in stage.steps for check in step.checks]
    held = sum(check.passed for check in checks)
    style = "bold green" if stage.passed else "bold red"
    stage.say((f"{held} of {len(checks)} checks held, in {seconds:.0f} s", style))


def _tell_next(stage: Stage, pair: Pair, *, kept: bool) -> None:
    stage.heading("Try next")
    for line in align(_of_kept_sites(pair) if kept else _of_new_sites()):
        stage.say(line)


def _of_new_sites() -> list[tuple[str, str]]:
    return [
        ("floodmark demo --directory demo-sites", "once more, and keep the sites"),
        ("floodmark replicate --help", "sites of your own"),
        ("floodmark verify --help", "a proof that they agree"),
        ("floodmark --help", "all commands"),
    ]


def _of_kept_sites(pair: Pair) -> list[tuple[str, str]]:
    home, (oslo, rome) = quote(str(pair.home)), pair.servers.values()
    return [
        (f"floodmark status {home}/rome", "how a site is, and what came to it"),
        (f"floodmark scan {home}/rome {MESSAGES} --prefix ada+grace/ --limit 5", "a conversation"),
        (f"floodmark serve {home}/oslo --listen {oslo.listen} &", "serve the sites again,"),
        (f"floodmark serve {home}/rome --listen {rome.listen} &", "where the topology says that they are"),
        (f"floodmark replicate --topology {home}/{TOPOLOGY_FILE} &", "let them copy each other"),
        (f"floodmark put {oslo.url} {MESSAGES} ada+tim/1 hello", "write here,"),
        (f"floodmark get {rome.url} {MESSAGES} ada+tim/1", "read there"),
        (f"floodmark verify {oslo.url} {rome.url}", "and see that they agree"),
    ]
