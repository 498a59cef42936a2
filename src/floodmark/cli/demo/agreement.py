"""Verify: both sites compared key by key, also while people write; and the repair of what differs."""

from collections.abc import Iterable, Sequence

from floodmark.cli.demo.copying import check_unread
from floodmark.cli.demo.losing import LOST_KEY, LOST_VALUE
from floodmark.cli.demo.messaging import MESSAGES
from floodmark.cli.demo.pair import Pair, Settling
from floodmark.cli.demo.stage import Stage, wait_until
from floodmark.cli.demo.watching import WAIT_SECONDS_MAX
from floodmark.cli.render.output import Output, Part
from floodmark.cli.render.verification import print_verification
from floodmark.divergence.outcome import Outcome
from floodmark.spark.jobs import VerifySummary, site_addresses, verify


def agree(stage: Stage, pair: Pair) -> None:
    """Sites that have exchanged everything hold the same."""
    stage.begin("verify", "Do the sites agree? Every key is compared")
    found = _compare(stage, pair)
    compared = sum(each.compared for each in found.pairs)
    stage.check(f"all {compared:,} keys agree", found.outcome is Outcome.AGREE and found.lag == 0)
    stage.check("all messages that were sent are among them", _compared(found, MESSAGES) == pair.truth.sent)
    stage.sum_up(
        f"{compared:,} keys compared in {found.seconds:.1f} s: the sites agree",
        compared=compared,
        seconds=round(found.seconds, 1),
    )


def find_the_loss(stage: Stage, pair: Pair) -> None:
    """The lost key is found, and nothing else, though others are written and copied meanwhile."""
    stage.begin("find", "verify finds what is lost, while people go on writing")
    sent_before = pair.truth.sent
    found = _compare(stage, pair)
    sent = pair.truth.sent - sent_before
    keys = [each.drift.key for each in found.sample]
    stage.check("exactly the lost message is found", found.drift == 1 and keys == [LOST_KEY])
    stage.check(f"{sent:,} messages were sent meanwhile, and none of them is reported", sent > 0)
    stage.sum_up(
        f"verify found exactly this key, while {found.lag:,} others were under way",
        drift=found.drift,
        lag=found.lag,
        seconds=round(found.seconds, 1),
    )


def mend(stage: Stage, pair: Pair) -> None:
    """The message gets to rome with its own stamp; then the sites agree again."""
    stage.begin("repair", "repair mends it, and the sites agree again")
    mended = _compare(stage, pair, repair=True)
    done = mended.repair
    oslo, rome = (server.site.namespace(MESSAGES) for server in pair.servers.values())
    stage.check("one key was repaired", done is not None and done.repaired == 1)
    there, here = oslo.record(LOST_KEY), rome.record(LOST_KEY)
    stage.check(
        "rome has the message, with the stamp that it got in oslo",
        there is not None and here is not None and here.value == LOST_VALUE and here.stamp == there.stamp,
    )
    with stage.working("nobody writes any more; the last changes are on their way"):
        pair.stop_people()
        wait_until(Settling(pair), WAIT_SECONDS_MAX)
    again = _compare(stage, pair)
    compared = sum(each.compared for each in again.pairs)
    stage.check(f"all {compared:,} keys agree", again.outcome is Outcome.AGREE and again.lag == 0)
    check_unread(stage, pair)
    stage.sum_up(
        f"1 key repaired, and the sites agree on all {compared:,} keys",
        repaired=0 if done is None else done.repaired,
        seconds=round(mended.seconds, 1),
    )


def _compare(stage: Stage, pair: Pair, *, repair: bool = False) -> VerifySummary:
    """What `floodmark verify` finds, and what it prints."""
    stage.command("floodmark verify", *pair.urls, *(["--repair"] if repair else []))
    assert pair.topology is not None
    with stage.working("comparing"):
        found = verify(list(site_addresses(pair.topology).values()), repair=repair, spark=pair.spark.session)
    print_verification(_Quoted(stage), found)
    return found


class _Quoted(Output):
    """What a command prints, as part of a step."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(json=False)
        self._stage = stage

    def line(self, *parts: Part) -> None:
        self._stage.say(*parts)

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        self._stage.table(header, rows)


def _compared(found: VerifySummary, namespace: str) -> int:
    return sum(each.compared for each in found.pairs if each.namespace == namespace)
