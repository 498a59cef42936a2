"""Readers that wait: a commit wakes those whose keys it wrote, and one of them looks out for the others."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.cluster import Cluster, put
from tests.feed.support import World, open_world, request_of
from tests.site.support import host_of, node_of
from tests.waiting import HANG_SECONDS, run_threads

from floodmark.model.ranges import KeyRange
from floodmark.partition.following import Follower, Followers
from floodmark.site import Namespace


@pytest.fixture
def world() -> Iterator[World]:
    with open_world() as world:
        # A tail is kept while somebody follows.
        batches = host_of(world.site).changes(request_of(world.site, "users", follow=True))
        next(batches)
        yield world


@pytest.fixture
def followers(world: World) -> Followers:
    return node_of(world.site).committer.followers


def keys_of(world: World, namespace: str, start: bytes = b"", end: bytes | None = None) -> KeyRange:
    whole = request_of(world.site, namespace).keys
    prefix = whole.start
    return KeyRange(prefix + start, whole.end if end is None else prefix + end)


def wait(followers: Followers, follower: Follower) -> None:
    followers.wait(follower, HANG_SECONDS, 0)


def test_a_commit_wakes_the_readers_of_its_keys_and_no_others(world: World, followers: Followers) -> None:
    orders = world.site.create_namespace("orders")
    with ExitStack() as stack:

        def join(keys: KeyRange) -> Follower:
            return stack.enter_context(followers.joining(keys))

        everything = join(KeyRange())
        users = join(keys_of(world, "users"))
        below, above = join(keys_of(world, "users", b"a", b"m")), join(keys_of(world, "users", b"m"))
        others = [join(keys_of(world, "orders")) for _ in range(50)]
        all_of_them = [everything, users, below, above, *others]

        def woken_by(namespace: Namespace, *keys: bytes) -> list[Follower]:
            followers._search()
            for follower in all_of_them:
                follower.expect()
            namespace.put_many(dict.fromkeys(keys, b"1"))
            wait(followers, everything)
            return [follower for follower in all_of_them if follower.is_woken()]

        assert woken_by(world.users, b"ada") == [everything, users, below]
        assert woken_by(world.users, b"m") == [everything, users, above]
        assert woken_by(world.users, b"ada", b"bob", b"zoe") == [everything, users, below, above]
        assert woken_by(orders, b"ada") == [everything, *others]


def test_a_reader_that_is_not_woken_need_not_read_what_others_wrote(
    world: World, followers: Followers
) -> None:
    world.site.create_namespace("orders")
    with followers.joining(keys_of(world, "orders")) as reader:
        followers._search()
        reader.expect()
        written = world.users.put(b"ada", b"1")
        assert followers.wait(reader, 0, 0) >= written
        reader.wake()
        assert followers.wait(reader, 0, 0) == 0


def test_a_reader_at_one_of_several_nodes_passes_nothing_that_it_has_not_read() -> None:
    # Another node may hold the site's resolved version back, and with it what the reader was given.
    node = Cluster().nodes[0]
    followers = node.node.committer.followers
    with followers.joining(KeyRange()) as reader, followers.joining(KeyRange()) as followers._lookout:
        put(node, b"1")
        followers._search()
        reader.expect()
        assert followers.wait(reader, 0, 0) == 0


def test_what_is_not_known_any_more_wakes_all(world: World, followers: Followers) -> None:
    world.site.create_namespace("orders")
    with (
        followers.joining(keys_of(world, "users")) as users,
        followers.joining(keys_of(world, "orders")) as orders,
    ):
        followers._search()
        node = node_of(world.site)
        with node.storage.settled():
            node.committer.tail.reset(node.clock.latest)
        world.users.put(b"ada", b"1")
        wait(followers, users)
        assert orders.is_woken()


def test_a_commit_between_reading_and_waiting_is_not_missed(world: World, followers: Followers) -> None:
    with followers.joining(keys_of(world, "users")) as follower:
        follower.expect()
        world.users.put(b"ada", b"1")
        wait(followers, follower)
        assert follower.is_woken()


def test_a_lookout_that_leaves_appoints_another(world: World, followers: Followers) -> None:
    """With more patience than the test has, only a lookout explains that the second reader is woken."""
    orders = world.site.create_namespace("orders")
    with (
        followers.joining(keys_of(world, "users")) as first,
        followers.joining(keys_of(world, "orders")) as second,
    ):
        followers._search()
        for follower in (first, second):
            follower.expect()

        def write() -> None:
            while len(followers._waiting) < 2:
                pass
            world.users.put(b"ada", b"1")
            while first in followers._waiting:
                pass
            orders.put(b"1", b"1")

        run_threads(lambda: wait(followers, first), lambda: wait(followers, second), write)
        assert first.is_woken()
        assert second.is_woken()
        assert not followers.is_watched


def test_closing_wakes_all(world: World, followers: Followers) -> None:
    with followers.joining(keys_of(world, "users")) as follower:
        followers._search()
        follower.expect()

        def close() -> None:
            while not followers.is_watched:
                pass
            world.site.close()

        run_threads(lambda: wait(followers, follower), close)
        assert follower.is_woken()


def test_many_readers_look_around_less_often(
    world: World, followers: Followers, monkeypatch: pytest.MonkeyPatch
) -> None:
    rested: list[float] = []

    def rest(self: Follower, timeout_seconds: float) -> None:
        rested.append(timeout_seconds)
        self.wake()

    monkeypatch.setattr(Follower, "rest", rest)
    with ExitStack() as stack:
        for _ in range(500):
            follower = stack.enter_context(followers.joining(keys_of(world, "users")))
        followers._lookout = stack.enter_context(followers.joining(keys_of(world, "users")))
        followers.wait(follower, 0.2, 0)
        followers._lookout = None
    assert 1 < rested[0] < 3
