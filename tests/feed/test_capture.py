"""Change capture over simulated sites: every change is called back once, whatever is read from where.

Sites write, copy each other's changes partition by partition and so out of order, keep the winner, and say
in heartbeats what they have.  A client reads their feeds with rewinds, switches, restarts and callbacks
that fail.  Planted faults show that the checks can fail.
"""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sizes import SEARCH, scaled

from floodmark.feed.reading import capture as capture_module
from floodmark.feed.reading.capture import SPANS_MAX, CaptureState, ChangeCapture, Span
from floodmark.model.change import Change, ChangeType, Heartbeat, Resolved, Stamp
from floodmark.model.errors import InvalidArgument
from floodmark.model.version import Version

NAMESPACES = ("users", "orders")
KEYS = (b"a", b"b", b"c", b"d", b"e", b"f")
PARTITIONS = 2

Item = Change | Heartbeat | Resolved
Identity = tuple[str, bytes, Stamp]


def names(site_id: int) -> dict[int, str]:
    """Each site has ids of its own."""
    return {10 * site_id + index: name for index, name in enumerate(NAMESPACES)}


def change_of(version: Version, stamp: Stamp, key: bytes, namespace: str = "users") -> Change:
    value = b"%d@%d" % (stamp.version, stamp.site)
    return Change(namespace, key, value, ChangeType.UPSERT, version, stamp, key[0] % PARTITIONS)


def heartbeat_of(site_id: int, version: Version, marks: dict[str, dict[int, Version]]) -> Heartbeat:
    watermark = {namespace: dict(marks.get(name, {})) for namespace, name in names(site_id).items()}
    return Heartbeat(version, 0, 0, 0, through=version - 1, watermark=watermark, sums={})


def identity(change: Change) -> Identity:
    return change.namespace, change.key, change.stamp


class ModelSite:
    """A site: a clock, the winners, the log that feeds read, and what is on its way from other sites."""

    def __init__(self, site_id: int, others: Sequence[int]) -> None:
        self.id = site_id
        self.clock: Version = 0
        self.log: list[Change | Heartbeat] = []
        self.winners: dict[tuple[str, bytes], Stamp] = {}
        self.marks: dict[str, dict[int, Version]] = {name: dict.fromkeys(others, 0) for name in NAMESPACES}
        self.arriving: dict[tuple[int, int], deque[Change]] = {
            (other, partition): deque() for other in others for partition in range(PARTITIONS)
        }

    def tick(self, observed: Version = 0) -> Version:
        self.clock = max(self.clock, observed) + 1
        return self.clock

    def store(self, change: Change) -> None:
        self.winners[change.namespace, change.key] = change.stamp
        self.log.append(change)

    def apply_next(self, source: int, partition: int) -> None:
        """Commit the next change of another site in one partition, unless a newer one is there."""
        line = self.arriving[source, partition]
        if line:
            change = line.popleft()
            version = self.tick(change.stamp.version)
            if change.stamp > self.winners.get((change.namespace, change.key), Stamp(0, 0)):
                self.store(msgspec.structs.replace(change, version=version))

    def announce(self, source: "ModelSite") -> None:
        """Move the watermark for a source to what is in, whatever is still on its way."""
        waiting = [*self.arriving[source.id, 0], *self.arriving[source.id, 1]]
        for name, marks in self.marks.items():
            versions = [change.stamp.version for change in waiting if change.namespace == name]
            marks[source.id] = min(versions) - 1 if versions else source.clock

    def heartbeat(self) -> None:
        self.log.append(heartbeat_of(self.id, self.tick(), self.marks))


class World:
    """A few sites, each of which copies from each other."""

    def __init__(self, count: int) -> None:
        ids = range(1, count + 1)
        self.sites = {site: ModelSite(site, [other for other in ids if other != site]) for site in ids}

    def write(self, site: ModelSite, namespaces: Sequence[str], keys: Sequence[bytes], pause: int) -> None:
        """One commit; its changes come in the order of namespace ids, which is not that of names."""
        version = site.tick(site.clock + pause)
        for namespace, key in product(namespaces, keys):
            change = change_of(version, Stamp(version, site.id), key, namespace)
            site.store(change)
            for other in self.sites.values():
                if other is not site:
                    other.arriving[site.id, change.partition].append(change)

    def settle(self) -> None:
        """Let everything arrive, and every site say so."""
        for target in self.sites.values():
            for (source, partition), line in target.arriving.items():
                while line:
                    target.apply_next(source, partition)
        for target in self.sites.values():
            for source, _ in target.arriving:
                target.announce(self.sites[source])
            target.heartbeat()


class CallbackFailed(Exception):
    """What a callback raises in these tests."""


class Client:
    """Reads feeds through a capture, and remembers what it was fed and what was called back."""

    def __init__(self, world: World, capture_class: type[ChangeCapture]) -> None:
        self.capture_class = capture_class
        self.called: list[Identity] = []
        self.fed: set[Identity] = set()
        self.failing = False
        self.capture = capture_class(self.call_back, names)
        self.site = world.sites[1]
        self.first = self.place = 0

    def call_back(self, change: Change) -> None:
        if self.failing:
            self.failing = False
            raise CallbackFailed
        self.called.append(identity(change))

    def begin(self, site: ModelSite, since: Version) -> None:
        self.capture.begin(site.id, since)
        self.site = site
        self.first = self.place = sum(item.version <= since for item in site.log)

    def has_part_of(self, site: ModelSite, version: Version) -> bool:
        """Whether the last commit that was read is this one, and more of it is to come."""
        around = site.log[self.place - 1 : self.place + 1] if self.place and site is self.site else []
        return len(around) == 2 and all(item.version == version for item in around)

    def go_on(self) -> None:
        self.begin(self.site, self.capture.since(self.site.id))

    def read(self, count: int) -> None:
        for item in self.site.log[self.place : self.place + count]:
            if not self.feed(item):
                return
            self.place += 1

    def repeat(self, count: int) -> None:
        """Be fed again what this feed has brought last."""
        for item in self.site.log[max(self.first, self.place - count) : self.place]:
            assert self.feed(item)

    def feed(self, item: Item) -> bool:
        """Whether the item was taken; if not, the feed has begun again."""
        state = self.capture.state() if self.failing else None
        try:
            self.capture.accept(self.site.id, item)
        except CallbackFailed:
            assert self.capture.state() == state, "a callback that failed has changed the state"
            self.go_on()
            return False
        if isinstance(item, Change):
            self.fed.add(identity(item))
        return True

    def restart(self) -> None:
        state = msgspec.json.decode(msgspec.json.encode(self.capture.state()), type=CaptureState)
        assert state == self.capture.state()
        self.capture = self.capture_class(self.call_back, names, state)
        self.go_on()


Step = tuple[str, int, int, int]

# What the sites do comes as often as what the client does.
SITES_DO = ["write", "write", "write", "arrive", "arrive", "arrive", "announce", "beat"]
CLIENT_DOES = ["read", "read", "read", "rewind", "switch", "repeat", "restart", "fail"]

small = st.integers(0, 5)
steps = st.lists(
    st.tuples(st.sampled_from(SITES_DO + CLIENT_DOES), small, small, small), min_size=10, max_size=120
)


def take_step(world: World, client: Client, step: Step, *, reckless: bool) -> None:
    """One step of the sites or of the client; a reckless client begins anywhere, also too late."""
    kind, first, second, third = step
    sites = list(world.sites.values())
    site = sites[first % len(sites)]
    other = sites[(first + 1 + second % (len(sites) - 1)) % len(sites)]
    if kind == "write":
        keys = KEYS[second : second + 1 + third % 3]
        world.write(site, NAMESPACES[third % 2 :], keys, pause=third * 2)
    elif kind == "arrive":
        for _ in range(1 + third):
            site.apply_next(other.id, third % PARTITIONS)
    elif kind == "announce":
        site.announce(other)
    elif kind == "beat":
        site.heartbeat()
    elif kind == "read":
        client.read(1 + first + 3 * second)
    elif kind == "repeat":
        client.repeat(second)
    elif kind == "restart":
        client.restart()
    elif kind == "fail":
        client.failing = True
    else:
        target = site if kind == "switch" else client.site
        since = 4 * second + third if reckless else client.capture.since(target.id) - 2 * second
        # A client that begins at the last version that it read says that it has all of that commit.
        client.begin(target, max(0, since - client.has_part_of(target, since)))


def run(count: int, history: Sequence[Step], capture_class: type[ChangeCapture], *, reckless: bool) -> None:
    """Play a history, and check what was called back."""
    client = Client(world := World(count), capture_class)
    client.begin(client.site, history[0][1] if reckless else 0)
    for step in history:
        take_step(world, client, step, reckless=reckless)
    world.settle()
    client.failing = False
    if not reckless:
        client.begin(world.sites[count], client.capture.since(count))
    client.read(len(client.site.log))
    assert_called_back(client, all_winners=not reckless)


def assert_called_back(client: Client, *, all_winners: bool) -> None:
    """Nothing twice, and whatever was fed is called back or superseded by what was."""
    repeated = [change for change, count in Counter(client.called).items() if count > 1]
    assert not repeated, f"called back twice: {repeated}"
    highest: dict[tuple[str, bytes], Stamp] = {}
    for namespace, key, stamp in client.called:
        highest[namespace, key] = max(stamp, highest.get((namespace, key), stamp))
    lost = [
        change
        for change in sorted(client.fed - set(client.called))
        if change[2] >= highest.get((change[0], change[1]), change[2])
    ]
    assert not lost, f"fed and never called back: {lost}"
    if all_winners:
        assert highest == client.site.winners, "a winner is missing"


def check(capture_class: type[ChangeCapture], examples: settings, *, reckless: bool) -> None:
    @examples
    @given(st.integers(2, 4), steps)
    def histories(count: int, history: list[Step]) -> None:
        run(count, history, capture_class, reckless=reckless)

    histories()


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.parametrize("reckless", [False, True], ids=["begins as told", "begins anywhere"])
def test_a_client_is_called_back_once_for_each_change(reckless: bool, times: int) -> None:
    check(ChangeCapture, scaled(times), reckless=reckless)


# Planted faults


class ChangeByChange(ChangeCapture):
    """Takes the stamp of each change for a watermark, as if stamps arrived in order."""

    def _accept_change(self, reading: capture_module._Reading, change: Change) -> bool:
        called = super()._accept_change(reading, change)
        origin = change.namespace, change.stamp.site
        reading.marks[origin] = max(change.stamp.version, reading.marks.get(origin, 0))
        return called


class FaceValue(ChangeCapture):
    """Believes a heartbeat also about what lies before the place where reading began."""

    def begin(self, site_id: int, since: Version, *, held: bool = False) -> None:
        super().begin(site_id, since, held=True)


class Forgetful(ChangeCapture):
    """Forgets all stamps at a heartbeat, also those that it does not cover."""

    def _learn(self, reading: capture_module._Reading, heartbeat: Heartbeat) -> None:
        super()._learn(reading, heartbeat)
        reading.seen.clear()


class OneFeed(ChangeCapture):
    """Knows versions only."""

    def _had_before(self, seen: capture_module.Seen) -> bool:
        return False


class WholeCommits(ChangeCapture):
    """Takes a commit as accepted when the first of its changes is."""

    def _accept_change(self, reading: capture_module._Reading, change: Change) -> bool:
        called = super()._accept_change(reading, change)
        reading.through = reading.position
        return called


@pytest.mark.parametrize(
    ("fault", "reckless", "finding"),
    [
        (ChangeByChange, False, "called back|winner is missing"),
        (FaceValue, True, "never called back"),
        (Forgetful, False, "called back twice"),
        (OneFeed, False, "called back twice"),
        (WholeCommits, False, "never called back|winner is missing"),
    ],
)
def test_the_check_finds_a_planted_fault(fault: type[ChangeCapture], reckless: bool, finding: str) -> None:
    with pytest.raises(AssertionError, match=finding):
        check(fault, SEARCH, reckless=reckless)


# One rule at a time


class Listener:
    """A capture, and the keys that it has called back."""

    def __init__(self, capture_class: type[ChangeCapture] = ChangeCapture) -> None:
        self.keys: list[bytes] = []
        self.failing = False
        self.capture = capture_class(self.call_back, names)

    def call_back(self, change: Change) -> None:
        if self.failing:
            raise CallbackFailed
        self.keys.append(change.key)

    def read(self, site_id: int, since: Version, *items: Item, held: bool = False) -> list[bytes]:
        """Begin a feed and take its items; the keys that were called back now."""
        before = len(self.keys)
        self.capture.begin(site_id, since, held=held)
        for item in items:
            self.capture.accept(site_id, item)
        return self.keys[before:]

    def fail(self, site_id: int, item: Item) -> None:
        """Let the callback fail for an item."""
        self.failing = True
        with pytest.raises(CallbackFailed):
            self.capture.accept(site_id, item)
        self.failing = False


# Two changes of site 3 that reached site 1 in the wrong order, through different partitions.
EARLY, LATE = Stamp(10, 3), Stamp(20, 3)
AT_SITE_1 = [change_of(21, LATE, b"late"), change_of(22, EARLY, b"early")]
AT_SITE_2 = [change_of(31, EARLY, b"early"), change_of(32, LATE, b"late")]


def test_watermarks_that_follow_each_change_lose_what_arrives_out_of_order() -> None:
    faulty, ours = Listener(ChangeByChange), Listener()
    for listener in (faulty, ours):
        assert listener.read(1, 0, AT_SITE_1[0]) == [b"late"]
    assert faulty.read(2, 0, *AT_SITE_2) == []
    assert ours.read(2, 0, *AT_SITE_2) == [b"early"]


def test_a_heartbeat_is_believed_about_what_was_read_or_held_and_nothing_before() -> None:
    everything = heartbeat_of(1, 23, {"users": {3: 20}})
    whole, part, held = Listener(), Listener(), Listener()
    assert whole.read(1, 0, *AT_SITE_1, everything) == [b"late", b"early"]
    assert part.read(1, 21, AT_SITE_1[1], everything) == [b"early"]
    assert held.read(1, 21, AT_SITE_1[1], everything, held=True) == [b"early"]
    assert [each.read(2, 0, *AT_SITE_2) for each in (whole, part, held)] == [[], [b"late"], []]


def test_spans_of_feeds_that_overlap_become_one() -> None:
    listener = Listener()
    listener.read(1, 0, heartbeat_of(1, 59, {name: {3: 55} for name in NAMESPACES}))
    listener.read(1, 59, heartbeat_of(1, 60, {name: {3: 50} for name in NAMESPACES}))
    assert listener.capture.since(1) == 60
    assert listener.capture.since(2) == 55
    listener.read(2, 55, heartbeat_of(2, 90, {name: {1: 70, 3: 80} for name in NAMESPACES}))
    listener.capture.begin(3, 0)
    had = {had.site: had.spans for had in listener.capture.state().had if had.namespace == "users"}
    assert had == {1: (Span(0, 70),), 2: (Span(55, 89),), 3: (Span(0, 80),)}
    assert listener.capture.since(1) == 70
    assert listener.capture.since(1, removed=[1]) == 80


@pytest.mark.parametrize("orders", [{2: 40, 3: 0}, {2: 40}, {}])
def test_an_origin_of_which_nothing_was_had_counts_when_another_site_is_read(orders: dict[int, int]) -> None:
    listener = Listener()
    listener.read(1, 0, heartbeat_of(1, 50, {"users": {2: 40, 3: 40}, "orders": orders}))
    assert listener.capture.since(2) == 0
    listener.capture.begin(2, 0)
    assert listener.capture.since(3) == 0


def test_of_a_heartbeat_counts_only_what_is_about_the_whole_site_and_known_namespaces() -> None:
    listener = Listener()
    heartbeat = heartbeat_of(1, 23, {"users": {3: 20}})
    listener.read(1, 0, AT_SITE_1[0], msgspec.structs.replace(heartbeat, log=7))
    assert listener.capture.since(2) == 0
    listener.read(1, 0, msgspec.structs.replace(heartbeat, watermark={999: {3: 20}}))
    assert listener.read(2, 0, *AT_SITE_2) == [b"early"]


def test_a_stamp_that_was_drawn_long_before_its_commit_is_called_back() -> None:
    drawn = change_of(30, Stamp(5, 1), b"from a stream")
    listener = Listener()
    assert listener.read(1, 0, heartbeat_of(1, 20, {}), drawn, drawn) == [b"from a stream"]
    assert listener.read(1, 0, heartbeat_of(1, 20, {}), drawn) == []


def test_a_commit_that_was_read_in_part_is_finished() -> None:
    commit = [change_of(7, Stamp(7, 1), key) for key in (b"z", b"a", b"m")]
    listener = Listener()
    assert listener.read(1, 0, *commit[:2]) == [b"z", b"a"]
    assert listener.capture.since(1) == 6
    assert listener.read(1, 6, *commit) == [b"m"]
    listener.capture.accept(1, Resolved(9))
    assert listener.capture.since(1) == 9
    assert listener.read(1, 0, *commit, Resolved(9)) == []


def test_the_images_before_and_after_an_update_are_called_back_together() -> None:
    after = msgspec.structs.replace(change_of(7, Stamp(7, 1), b"k"), type=ChangeType.UPDATE_POSTIMAGE)
    before = msgspec.structs.replace(after, type=ChangeType.UPDATE_PREIMAGE)
    listener = Listener()
    assert listener.read(1, 0, before, after, before, after) == [b"k", b"k"]
    elsewhere = [msgspec.structs.replace(image, version=9) for image in (before, after)]
    assert listener.read(2, 0, *elsewhere) == []


def test_stamps_are_remembered_only_until_a_heartbeat_covers_them() -> None:
    listener = Listener()
    listener.capture.begin(1, 0)
    for version in range(1, 10_001):
        listener.capture.accept(1, change_of(2 * version, Stamp(2 * version, 1), b"%d" % version))
        if version % 100 == 0:
            listener.capture.accept(1, heartbeat_of(1, 2 * version + 1, {}))
            assert len(msgspec.json.encode(listener.capture.state())) < 500
    assert len(listener.keys) == 10_000


def test_a_client_that_skips_again_and_again_keeps_a_bounded_state_and_loses_nothing() -> None:
    listener = Listener()
    for number in range(100):
        listener.read(1, 10 * number, heartbeat_of(1, 10 * number + 2, {}))
    listener.capture.begin(2, 0)
    assert [len(had.spans) for had in listener.capture.state().had] == [SPANS_MAX] * len(NAMESPACES)
    assert listener.read(2, 0, change_of(2000, Stamp(5, 1), b"skipped")) == [b"skipped"]
    assert listener.read(2, 2000, change_of(2001, Stamp(991, 1), b"covered")) == []


def test_a_crash_before_the_state_was_stored_repeats_what_came_since() -> None:
    first = Listener()
    first.read(1, 0, AT_SITE_1[0])
    stored = first.capture.state()
    first.capture.accept(1, AT_SITE_1[1])
    second = Listener()
    second.capture = ChangeCapture(second.call_back, names, stored)
    assert second.read(1, second.capture.since(1), *AT_SITE_1) == [b"early"]


def test_a_change_whose_callback_failed_is_repeated_and_cannot_be_skipped() -> None:
    commit = [change_of(7, Stamp(7, 1), key) for key in (b"a", b"b", b"c")]
    listener = Listener()
    listener.read(1, 0)
    listener.fail(1, commit[0])
    assert listener.capture.accept(1, commit[0])
    listener.fail(1, commit[1])
    with pytest.raises(InvalidArgument, match=r"failed.*accept the failed one again"):
        listener.capture.accept(1, commit[2])
    # Begun again behind it, the feed does not vouch for it: it comes from another site.
    assert listener.read(1, 7, heartbeat_of(1, 8, {})) == []
    elsewhere = [msgspec.structs.replace(change, version=9) for change in commit]
    assert listener.read(2, 0, *elsewhere) == [b"b", b"c"]


def test_a_feed_must_be_begun() -> None:
    listener = Listener()
    with pytest.raises(InvalidArgument, match=r"call begin\(1, since\)"):
        listener.capture.accept(1, AT_SITE_1[0])
    listener.read(1, 0, AT_SITE_1[0])
    with pytest.raises(InvalidArgument, match=r"call begin\(2, since\)"):
        listener.capture.accept(2, AT_SITE_2[0])
    restored = ChangeCapture(listener.call_back, names, listener.capture.state())
    with pytest.raises(InvalidArgument, match=r"call begin\(1, since\)"):
        restored.accept(1, AT_SITE_1[1])
