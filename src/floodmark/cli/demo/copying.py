"""Messages at both sites, copied both ways until each has all of them, and counts that must be right."""

from typing import Final

from floodmark.cli.demo.messaging import EVERYBODY, UNREAD
from floodmark.cli.demo.pair import TOPOLOGY_FILE, Pair, Settling
from floodmark.cli.demo.stage import Stage
from floodmark.cli.demo.watching import Watch
from floodmark.cli.render.text import show_lag

TRAFFIC_SECONDS: Final = 12


def begin_to_copy(stage: Stage, pair: Pair) -> None:
    """Start Spark and the links beside what is shown next."""
    stage.command(f"floodmark replicate --topology {TOPOLOGY_FILE}")
    pair.spark.begin()
    pair.start_links()


def copy_both_ways(stage: Stage, pair: Pair) -> None:
    """A steady load at both sites, until all of it has arrived at the other."""
    stage.begin("copy", "People at both sites write to each other, and Spark copies both ways")
    with stage.working("Spark starts, and the first heartbeats are on their way"):
        pair.wait_for_links()
    with Watch(stage, pair) as watch:
        pair.start_people()
        watch.run_for(TRAFFIC_SECONDS, "messages are sent at both sites, and read")
        pair.stop_people()
        settled_ms = watch.wait(Settling(pair), "nobody writes any more; the last changes are on their way")
    links, sent = watch.board.links, pair.truth.sent
    lag_p50 = max(link.lag_ms_p50 or 0 for link in links)
    lag_p99 = max(link.lag_ms_p99 or 0 for link in links)
    checked = sum(link.checked for link in links)
    stage.gap()
    stage.check(
        f"{checked} heartbeats came through, and vouch that no change was lost",
        checked > 0 and all(link.wrong == 0 for link in links),
    )
    unread = check_unread(stage, pair)
    stage.sum_up(
        f"{sent:,} messages in both directions; lag p50 {show_lag(lag_p50)}, p99 {show_lag(lag_p99)}",
        messages=sent,
        unread=unread,
        lag_ms_p50=lag_p50,
        lag_ms_p99=lag_p99,
        settled_ms=settled_ms,
        heartbeats_checked=checked,
    )


def check_unread(stage: Stage, pair: Pair) -> int:
    """Whether the counters of both sites tell the truth about everybody; how many messages are unread."""
    truth = pair.truth.unread()
    total = sum(truth.values())
    shown = {name: _unread_at(pair, name) for name in pair.servers}
    right = all(counts == truth for counts in shown.values())
    totals = ", ".join(f"{sum(counts.values()):,} at {name}" for name, counts in shown.items())
    stage.check(f"unread, person by person: {totals}, {total:,} in truth", right)
    return total


def _unread_at(pair: Pair, name: str) -> dict[str, int]:
    counters = pair.servers[name].site.namespace(UNREAD)
    shown = counters.get_many([person.encode() for person in EVERYBODY])
    return {person: int(value or 0) for person, value in zip(EVERYBODY, shown, strict=True)}
