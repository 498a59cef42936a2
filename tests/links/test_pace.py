"""A link on which nothing changes costs little, and one with changes passes them on at once."""

import pytest

from floodmark.host.linking import HEARTBEAT_MS_MAX
from floodmark.links.planning import BEAT_MS, QUIET_BEAT_MS, QUIET_STEPS, LinkPace
from floodmark.model.version import compose
from floodmark.replication.step import LinkStep, NamespaceStep

BEGUN_MS = 1_800_000_000_000


def step(since_ms: int, until_ms: int, changes: int | None) -> LinkStep:
    since, until = (compose(BEGUN_MS + each, 0) for each in (since_ms, until_ms))
    namespace = NamespaceStep(name="users", source_id=1, target_id=1, since=since, until=until)
    return LinkStep(source="oslo", source_id=1, namespaces=(namespace,), changes=changes)


def run(pace: LinkPace, seconds: int, changes: int | None = 0) -> int:
    """How many steps are taken of a link that is planned ten times a second."""
    position_ms = taken = 0
    for now_ms in range(100, 1_000 * seconds + 1, 100):
        if pace.takes(step(position_ms, now_ms, changes)):
            position_ms, taken = now_ms, taken + 1
    return taken


def test_heartbeats_are_passed_on_each_second_at_first_and_less_often_where_nothing_changes() -> None:
    pace = LinkPace()
    assert run(pace, QUIET_STEPS) == QUIET_STEPS
    assert pace.is_quiet
    assert run(pace, 60) == 60_000 // QUIET_BEAT_MS == 15


@pytest.mark.parametrize("changes", [1, None])
def test_changes_are_passed_on_at_once_and_the_heartbeats_behind_them_soon(changes: int | None) -> None:
    pace = LinkPace()
    run(pace, 60)
    assert run(pace, 1, changes) == 10
    assert not pace.is_quiet
    assert run(pace, QUIET_STEPS) == QUIET_STEPS


def test_a_quiet_link_is_not_taken_for_a_silent_one() -> None:
    assert BEAT_MS < QUIET_BEAT_MS <= HEARTBEAT_MS_MAX // 2
