"""A change gets lost without an error, and is missed: the heartbeat that follows it does not add up."""

from collections import Counter
from typing import Any, Final

from floodmark.cli.demo.messaging import MESSAGES, UNREAD, message
from floodmark.cli.demo.pair import Pair
from floodmark.cli.demo.stage import Stage
from floodmark.cli.demo.watching import Watch
from floodmark.cli.render.text import show_bytes, show_lag
from floodmark.clock import monotonic_ms
from floodmark.replication.reading import Kind

LOST_KEY: Final = b"ada+grace/invitation"
LOST_VALUE: Final = message("ada", "dinner at eight?")

BEFORE_SECONDS: Final = 2


def lose_a_change(stage: Stage, pair: Pair) -> None:
    """A faulty stage between the sites drops one row, while others pass."""
    stage.begin("loss", "One message is silently dropped on its way from oslo to rome")
    oslo, rome = pair.servers["oslo"].site.namespace(MESSAGES), pair.servers["rome"].site.namespace(MESSAGES)
    with stage.working("the links start again, with a faulty stage in their middle"):
        pair.start_links(drop_lost)
        pair.wait_for_links()
    with Watch(stage, pair) as watch:
        pair.start_people()
        watch.run_for(BEFORE_SECONDS, "messages are sent again")
        _invite(pair)
        sent_at_ms = monotonic_ms()
        watch.wait(lambda: bool(_findings(pair)), "ada has invited grace, and the invitation is on its way")
        named_ms = monotonic_ms() - sent_at_ms
    (finding, *others) = _findings(pair)
    stage.gap()
    stage.say(f"oslo acknowledged {show_bytes(LOST_KEY)}, and it never came to rome; no call has failed")
    stage.say(("rome: ", "dim"), (f"oslo {stage.arrow} rome, {finding}", "red"))
    stage.check(
        "rome lacks it, and nobody was told",
        oslo.get(LOST_KEY) == LOST_VALUE and rome.get(LOST_KEY) is None,
    )
    stage.check(f"the next heartbeat names the loss, {show_lag(named_ms)} after the write", not others)
    stage.sum_up(
        f"1 change dropped on its way without an error, and missed {show_lag(named_ms)} later",
        named_ms=named_ms,
        finding=finding,
    )


def drop_lost(rows: Any) -> Any:
    """The faulty stage: all rows but one."""
    return rows.where(f"NOT (kind = {Kind.CHANGE:d} AND key = X'{LOST_KEY.hex()}')")


def _invite(pair: Pair) -> None:
    site = pair.servers["oslo"].site
    site.namespace(MESSAGES).put(LOST_KEY, LOST_VALUE)
    site.namespace(UNREAD).add(b"grace")
    pair.truth.add(Counter(grace=1), Counter())


def _findings(pair: Pair) -> list[str]:
    return [finding for link in pair.look() for finding in link.findings]
