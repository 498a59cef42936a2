"""Every border at once: rows, pages and batches of a few bytes, over random histories.

A commit then goes over several rows, a page ends within a commit, a batch ends within a page, and the
log is trimmed under the reader at any version.
"""

from datetime import timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.feed.support import Follower, World, open_world, raw_changes, read_batches, tiny_pages
from tests.site.support import node_of

from floodmark.model.change import Change, Heartbeat, Resolved
from floodmark.model.errors import PartitionNotFound
from floodmark.model.version import Version

KEYS = [b"key-%02d" % index for index in range(16)]
LOG_RETENTION = timedelta(minutes=1)

Step = tuple[str, int, int]

steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "many", "many", "delete", "range", "async", "split", "merge", "beat"]),
        st.integers(0, len(KEYS) - 1),
        st.integers(1, len(KEYS)),
    ),
    min_size=1,
    max_size=20,
)


def take_step(world: World, step: Step, number: int) -> None:
    kind, first, count = step
    users, key, value = world.users, KEYS[first], b"%d" % number * (1 + count % 4)
    if kind == "put":
        users.put(key, value)
    elif kind == "async":
        users.put(key, value, durability="async")
    elif kind == "many":
        users.put_many(dict.fromkeys(KEYS[first : first + count], value))
    elif kind == "delete":
        users.delete(key)
    elif kind == "range":
        users.delete_range(key)
    elif kind == "beat":
        world.site.heartbeat()
    elif kind == "split":
        try:
            world.site.split("users", key)
        except PartitionNotFound:
            assert any(partition.range.start.endswith(key) for partition in world.site.partitions())
    else:
        partitions = world.site.partitions()
        if len(partitions) > 1:
            left = first % (len(partitions) - 1)
            world.site.merge(partitions[left].id, partitions[left + 1].id)


def build(world: World, history: list[Step]) -> Version:
    for number, step in enumerate(history):
        take_step(world, step, number)
    world.site.sync()
    return world.site.resolved_version()


@given(
    history=steps,
    before_images=st.booleans(),
    heartbeats=st.booleans(),
    prefix=st.sampled_from([b"", b"key-0"]),
)
def test_stream_can_be_resumed_at_each_of_its_markers(
    history: list[Step], before_images: bool, heartbeats: bool, prefix: bytes
) -> None:
    with tiny_pages(), open_world() as world:
        end = build(world, history)
        scope: dict[str, Any] = {"prefix": prefix, "before_images": before_images, "heartbeats": heartbeats}

        def read(since: Version) -> list[Any]:
            return list(world.site.changes("users", since=since, until=end, resolved_markers=True, **scope))

        items = read(0)
        content = [item for item in items if not isinstance(item, Resolved)]
        assert [item.version for item in content] == sorted(item.version for item in content)
        for place, item in enumerate(items):
            if isinstance(item, Resolved):
                before = [other for other in items[:place] if not isinstance(other, Resolved)]
                after = [other for other in read(item.version) if not isinstance(other, Resolved)]
                assert before + after == content
        assert isinstance(items[-1], Resolved)
        assert items[-1].version == end


@given(
    history=steps,
    before_images=st.booleans(),
    prefix=st.sampled_from([b"", b"key-0"]),
    trims=st.lists(st.tuples(st.integers(0, 12), st.floats(0, 1)), min_size=1, max_size=3),
)
def test_log_may_be_trimmed_anywhere_under_a_reader(
    history: list[Step], before_images: bool, prefix: bytes, trims: list[tuple[int, float]]
) -> None:
    """The reader takes some items, the log loses its beginning up to some commit, and so on."""
    with tiny_pages(), open_world(LOG_RETENTION) as world:
        end = build(world, history)
        scope: dict[str, Any] = {"prefix": prefix, "before_images": before_images}
        whole = list(world.site.changes("users", until=end, **scope))
        versions = sorted({change.version for change in world.site.changes("users", until=end)}) or [end]
        stream = world.site.changes("users", until=end, **scope)
        found: list[Change] = []
        for taken, share in trims:
            found += [change for _, change in zip(range(taken), stream, strict=False)]
            node_of(world.site).trim_logs(versions[int(share * (len(versions) - 1))])
        found += stream
        assert [place_of(change) for change in found] == [place_of(change) for change in whole]


def place_of(change: Change) -> tuple[Any, ...]:
    """All of a change but its partition, of which a scan only knows the present one."""
    return change.version, change.key, change.value, change.type, change.stamp, change.expires_at


@given(history=steps, looks=st.sets(st.integers(0, 19)), bytes_max=st.sampled_from([1, 900, 4000]))
def test_follower_changes_between_tail_and_log_without_a_seam(
    history: list[Step], looks: set[int], bytes_max: int
) -> None:
    with tiny_pages(), open_world() as world:
        node_of(world.site).committer.tail._bytes_max = bytes_max
        follower = Follower(world.site, "users", before_images=True)
        beats = Follower(world.site, "users", heartbeats=True)
        for number, step in enumerate(history):
            take_step(world, step, number)
            if number in looks:
                follower.catch_up()
                beats.catch_up()
        world.site.sync()
        follower.catch_up()
        beats.catch_up()
        end = world.site.now()
        assert follower.changes == list(world.site.changes("users", until=end, before_images=True))
        content = list(world.site.changes("users", until=end, heartbeats=True))
        assert beats.changes == [item for item in content if isinstance(item, Change)]
        assert beats.heartbeats == [item for item in content if isinstance(item, Heartbeat)]


@given(history=steps)
def test_tiny_pages_change_nothing(history: list[Step]) -> None:
    """The canary of the others: what is compared above is also what ordinary pages give."""
    with open_world() as world:
        with tiny_pages():
            end = build(world, history)
            batches = read_batches(world.site, "users", until=end)
        expected = raw_changes(read_batches(world.site, "users", until=end))
        assert raw_changes(batches) == expected
        assert len(batches) > 1 or len(expected) < 9
