"""Small worlds of sites that copy each other, for rules that must be right at every moment.

A site is a dictionary of versions; records, merging and the rule by which tombstones are collected are the
real ones.  Everything is interleaved: a step of a link applies changes one by one and is noted later, garbage
goes under the eyes of those who read, and whoever looks at two sites fixes the version of one, then of the
other, reads their keys in any order while the world goes on, and asks for the collected horizons at last.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from floodmark.codec.states import CounterState, FieldsState, decode_state
from floodmark.codec.thin import digest_record, thin_record
from floodmark.codec.values import decode_value, encode_value
from floodmark.divergence.histories import HistoryChange, part_stamps
from floodmark.divergence.rules import Evidence, Side, evidence_of
from floodmark.merge.counter import add_to_counter
from floodmark.merge.fields import delete_fields, put_fields, update_fields
from floodmark.merge.parts import prune_record
from floodmark.merge.states import delete_record, merge_states, write_state
from floodmark.model.change import Stamp
from floodmark.model.version import Version, physical_ms
from floodmark.replication.topology import MemberSite, settled_version

KEYS: Final = (b"last-0", b"last-1", b"fields-0", b"counter-0")
FIELDS: Final = ("city", "name")
SKEW_MS_MAX: Final = 300


class Change(NamedTuple):
    """What was first written at a site, as its log has it."""

    version: Version
    key: bytes
    logged: bytes


@dataclass
class Site:
    """One site: all versions of all keys, what it wrote, and how far it is with the others."""

    id: int
    skew_ms: int
    clock: Version = 0
    records: dict[bytes, list[tuple[Version, bytes]]] = field(default_factory=dict)
    log: list[Change] = field(default_factory=list)
    marks: dict[int, list[tuple[Version, Version]]] = field(default_factory=dict)
    heard: dict[int, dict[int, Version]] = field(default_factory=dict)
    journal: list[HistoryChange] = field(default_factory=list)
    horizon: Version = 0

    def tick(self, now_ms: int) -> Version:
        """A fresh version."""
        self.clock = max(self.clock + 1, (now_ms + self.skew_ms) << 18)
        return self.clock

    def find(self, key: bytes, at: Version) -> tuple[Version, bytes] | None:
        """The newest record at or below a version."""
        return next((each for each in reversed(self.records.get(key, [])) if each[0] <= at), None)

    def newest(self, key: bytes) -> bytes | None:
        """What is stored now."""
        found = self.find(key, self.clock)
        return None if found is None else found[1]

    def store(self, version: Version, stored: bytes, stamp: Stamp, change: Change) -> None:
        """Add a version of a key, by a change that was first written here or elsewhere."""
        self.records.setdefault(change.key, []).append((version, stored))
        parts = None if change.key.startswith(b"last") else part_stamps(decode_state(change.logged))
        digest = digest_record(change.logged)
        self.journal.append(HistoryChange(version, change.key, stamp, digest, parts=parts))

    def mark(self, at: Version) -> dict[int, Version]:
        """The watermark as of a version, without the site itself."""
        return {
            source: max((through for version, through in marks if version <= at), default=0)
            for source, marks in self.marks.items()
        }

    def write(self, version: Version, key: bytes, write: bytes) -> None:
        """Write something here: a record, or a state that waits for its stamps."""
        if key.startswith(b"last"):
            logged = stored = write
        else:
            logged, stored = write_state(self.newest(key), write, version, self.id)
        self.log.append(Change(version, key, logged))
        self.store(version, stored, Stamp(version, self.id), self.log[-1])

    def apply(self, now_ms: int, change: Change, origin: int) -> None:
        """Take in what was written elsewhere, where it wins."""
        self.clock = max(self.clock, change.version)
        stamp, current = Stamp(change.version, origin), self.newest(change.key)
        if not change.key.startswith(b"last"):
            version = self.tick(now_ms)
            joined = merge_states(current, change.logged, own=Stamp(version, self.id))
            if joined != current:
                self.store(version, joined, stamp, change)
        elif current is None or stamp > stamp_of(current, self.find(change.key, self.clock), self.id):
            record = decode_value(change.logged)
            copy = encode_value(record.value, record.expires_at, record.deleted, origin=stamp)
            self.store(self.tick(now_ms), copy, stamp, change)

    def collect(self, safe_point: Version, settled: Version) -> None:
        """Forget what is dead and settled, with all that is older."""
        for key, versions in self.records.items():
            found = self.find(key, safe_point)
            if found is None:
                continue
            record = decode_value(found[1])
            stamp = stamp_of(found[1], found, self.id).version
            if record.is_dead_at(physical_ms(safe_point)) and stamp <= settled:
                self.horizon = max(self.horizon, stamp)
                self.records[key] = [each for each in versions if each[0] > found[0]]
                continue
            pruned = prune_record(found[1], settled, physical_ms(safe_point))
            kept = found[1] if pruned is None else pruned.stored
            self.horizon = max(self.horizon, newest_forgotten(found[1], kept))
            self.records[key] = [(found[0], kept), *(each for each in versions if each[0] > found[0])]

    def side(self, key: bytes, at: Version, horizon: Version) -> Side:
        """What the site shows of a key as of a version."""
        found = self.find(key, at)
        return self.side_of(None if found is None else self.evidence(*found), at, horizon)

    def side_of(self, record: Evidence | None, at: Version, horizon: Version) -> Side:
        """The same for a record that was read before."""
        return Side(record, {**self.mark(at), self.id: at}, horizon, at)

    def evidence(self, version: Version, stored: bytes) -> Evidence:
        """What a record shows."""
        return evidence_of(version, self.id, *thin_record(stored))


def newest_forgotten(before: bytes, after: bytes) -> Version:
    """The highest stamp of a part that a record does not remember any more; 0 if there is none."""
    if before == after:
        return 0
    states = [decode_state(stored) for stored in (before, after)]
    parts = [
        {(each.name, each.stamp) for each in state.fields} if isinstance(state, FieldsState) else set()
        for state in states
    ]
    gone = [stamp.version for _, stamp in parts[0] - parts[1]]
    deleted = states[0].deleted
    return max([*gone, deleted.version if deleted is not None and deleted != states[1].deleted else 0])


def stamp_of(stored: bytes, found: tuple[Version, bytes] | None, site: int) -> Stamp:
    """The stamp of a stored record."""
    assert found is not None
    return decode_value(stored).origin or Stamp(found[0], site)


@dataclass
class Link:
    """Copies what was first written at one site to another, in steps that take their time."""

    source: Site
    target: Site
    waiting: list[Change] | None = None
    until: Version = 0
    told: dict[int, Version] = field(default_factory=dict)

    def go_on(self, random: Random, now_ms: int, lose: bool = False) -> bytes | None:
        """Plan a step, apply a change of it, or note it.  A lost change is never applied: its key."""
        if self.waiting is None:
            return self._plan(random, now_ms, lose)
        if self.waiting:
            self.target.apply(now_ms, self.waiting.pop(0), self.source.id)
        elif random.random() < 0.1:
            # Whoever drove the link is gone, and the next one begins the step again.
            self.waiting = None
        else:
            self.target.clock = max(self.target.clock, self.until)
            self.target.marks[self.source.id].append((self.target.tick(now_ms), self.until))
            self.target.heard[self.source.id] = self.told
            self.waiting = None
        return None

    def _plan(self, random: Random, now_ms: int, lose: bool) -> bytes | None:
        since = self.target.marks[self.source.id][-1][1]
        self.until = self.source.tick(now_ms)
        self.told = {**self.source.mark(self.until), self.source.id: self.until}
        self.waiting = [change for change in self.source.log if since < change.version <= self.until]
        if lose and self.waiting:
            return self.waiting.pop(random.randrange(len(self.waiting))).key
        return None


class Look(NamedTuple):
    """Two sites, as whoever compared them has seen them: what each shows of a key."""

    key: bytes
    left: Side
    right: Side
    hasty: tuple[Version, Version]
    """The horizons as they were before the records were read."""


class World:
    """Sites, links, and all that happens between them, under one seed."""

    def __init__(self, seed: int, losses: float = 0.0) -> None:
        self.random = random = Random(seed)
        self.losses = losses
        self.lost: list[bytes] = []
        self.now_ms = 1_000_000
        self.sites = [
            Site(number, random.randint(0, SKEW_MS_MAX)) for number in range(1, 1 + random.choice((2, 3, 3)))
        ]
        self.members = {site.id: MemberSite(id=site.id) for site in self.sites}
        for site in self.sites:
            site.marks = {other.id: [(0, 0)] for other in self.sites if other is not site}
            site.tick(self.now_ms)
        self.links = [Link(one, other) for one in self.sites for other in self.sites if one is not other]
        self.held: list[tuple[Site, Version]] = []
        self._number = 0
        # A world without haste shows more of what takes long, and one without writes more of what is left.
        self._weights = [random.choice((1, 4)), random.choice((3, 20)), random.choice((0, 2, 5))]

    def live(self, steps: int) -> None:
        """Let some things happen."""
        for _ in range(steps):
            self.now_ms += self.random.randint(0, 300)
            self.random.choices((self._write, self._copy, self._collect), self._weights)[0]()

    def looks(self) -> Iterator[Look]:
        """Compare two sites, while the world goes on."""
        left, right = self.random.sample(self.sites, 2)
        at: list[Version] = []
        for site in (left, right):
            at.append(site.tick(self.now_ms))
            self.held.append((site, at[-1]))
            self.live(self.random.choice((0, 0, 5, 40)))
        hasty = left.horizon, right.horizon
        self.live(self.random.choice((0, 3)))
        found: list[dict[bytes, Evidence | None]] = [{}, {}]
        places = [(place, key) for place in (0, 1) for key in KEYS]
        self.random.shuffle(places)
        for place, key in places:
            record = (left, right)[place].find(key, at[place])
            found[place][key] = None if record is None else (left, right)[place].evidence(*record)
            self.live(self.random.choice((0, 0, 0, 1, 4)))
        self.held = self.held[:-2]
        for key in KEYS:
            yield Look(
                key,
                left.side_of(found[0][key], at[0], left.horizon),
                right.side_of(found[1][key], at[1], right.horizon),
                hasty,
            )

    def drain(self) -> None:
        """Let everything arrive that is not lost, and time pass."""
        self.now_ms += 2 * SKEW_MS_MAX
        for link in self.links:
            goal = link.source.tick(self.now_ms)
            while link.target.marks[link.source.id][-1][1] < goal:
                link.go_on(self.random, self.now_ms)

    def _write(self) -> None:
        random, site, key = self.random, self.random.choice(self.sites), self.random.choice(KEYS)
        self._number += 1
        version = site.tick(self.now_ms)
        ttl = random.choice((1, 2, 4)) if random.random() < 0.3 else None
        expires_at = None if ttl is None else physical_ms(version) // 1000 + ttl
        site.write(version, key, self._choose(key, expires_at))

    def _choose(self, key: bytes, expires_at: int | None) -> bytes:
        random, text = self.random, b"%d" % self._number
        deletes = random.random() < 0.3
        if key.startswith(b"last"):
            return encode_value(b"", None, True) if deletes else encode_value(text, expires_at)
        if key.startswith(b"counter"):
            return delete_record("counter") if deletes else add_to_counter(random.randint(-2, 5))
        name = random.choice(FIELDS)
        if deletes:
            return random.choice((delete_record("fields"), delete_fields([name])))
        members = b'{"%s":%s}' % (name.encode(), text)
        if random.random() < 0.3:
            other = next(each for each in FIELDS if each != name)
            members = members[:-1] + b',"%s":null}' % other.encode()
        return random.choice((put_fields, update_fields))(members, expires_at)

    def _copy(self) -> None:
        lose = self.random.random() < self.losses
        lost = self.random.choice(self.links).go_on(self.random, self.now_ms, lose)
        if lost is not None:
            self.lost.append(lost)

    def _collect(self) -> None:
        site = self.random.choice(self.sites)
        held = [version for holder, version in self.held if holder is site]
        aged = (self.now_ms + site.skew_ms - self.random.choice((0, 500))) << 18
        watermarks = {site.id: site.mark(site.clock), **site.heard}
        site.collect(min([aged, site.clock, *held]), settled_version(site.id, self.members, watermarks))


def visible(site: Site, key: bytes, now_ms: int) -> object:
    """What a reader finds, with what it will find later: for a model, which compares no digests."""
    found = site.find(key, site.clock)
    if found is None or decode_value(found[1]).is_dead_at(now_ms):
        return None
    record = decode_value(found[1])
    if record.stamps is None:
        return record.value, record.expires_at
    state = decode_state(found[1])
    if isinstance(state, FieldsState):
        live = [each for each in state.fields if each.is_live_at(now_ms)]
        return [(each.name, each.text, each.expires_at) for each in live]
    assert isinstance(state, CounterState)
    return [(each.site, each.total) for each in state.entries]
