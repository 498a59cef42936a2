"""Random histories with prepared writes, against a plain model: as if each commit had come in its turn.

The model keeps what was written and at which version, and does it all again in order of versions.  That is
what the engine must hold in the end, however late a prepared write was committed, and no reader may have been
told otherwise at any time.

Writers of atomic batches prepare and commit one partition after another, repeat steps, and die.  Partitions
settle what they left by asking each other, and all of them must come to the same end.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from random import Random
from typing import NamedTuple

import pytest
from tests.site.support import START_MS, HookedEngine, node_of, open_memory
from tests.sizes import only

from floodmark.codec.changelog import CommitRow, decode_row, encode_log_key
from floodmark.codec.ordered import decode_version, encode_namespace, encode_prefix
from floodmark.codec.stamps import find_origins
from floodmark.codec.states import decode_state, encode_state, live_value
from floodmark.codec.values import HAS_ORIGIN, TOMBSTONE, encode_value, mark_batch
from floodmark.engine import Row, WriteRow
from floodmark.merge.counter import add_to_counter
from floodmark.merge.fields import put_fields, update_fields
from floodmark.merge.policies import MergePolicy
from floodmark.merge.states import Written, delete_record, merge_states, stamp_state, write_state
from floodmark.model.batch import mint_batch
from floodmark.model.change import Heartbeat, Stamp, Sums, Tally
from floodmark.model.errors import InvalidArgument, TransactionEnded
from floodmark.model.limits import BATCH_AGE_MS_MAX
from floodmark.model.partition import Decision, Fate
from floodmark.model.ranges import KeyRange
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition import LocalPartition, Node, TailEntry, version_of
from floodmark.partition.commit import inserting
from floodmark.partition.commit.inserting import Correction, Insertion
from floodmark.partition.commit.merging import is_state, mark_like, stamp_of
from floodmark.partition.commit.tail import LiveTail
from floodmark.partition.families import DATA, LOG
from floodmark.partition.node import ended_batches, forget_batches
from floodmark.partition.prepared import settling
from floodmark.partition.prepared import steps as preparing
from floodmark.partition.prepared.outcomes import BatchOutcome, read_outcomes, store_outcome
from floodmark.partition.prepared.steps import AbortPrepared
from floodmark.partition.prepared.writes import PreparedWrites, _Index
from floodmark.site import Site
from floodmark.testing.clock import SimulatedTime

HERE, THERE = 7, (3, 9)
PLAIN, FIELDS, COUNTERS = (encode_namespace(number) for number in (1, 2, 3))
KEYS = [namespace + key for namespace in (PLAIN, FIELDS, COUNTERS) for key in (b"a", b"m", b"z")]
LARGE = b"x" * 5_000
STEPS = 120
SEEDS_MAX = 60


class Event(NamedTuple):
    """Something that was written to a key; a copy brings its stamp along."""

    version: Version
    key: bytes
    value: bytes
    copied: bool


def replay(
    events: list[Event],
) -> tuple[dict[tuple[bytes, Version], bytes], dict[tuple[Version, bytes], bytes]]:
    """What is stored by key and version, and logged by version and key, if all comes in order of versions."""
    stored: dict[tuple[bytes, Version], bytes] = {}
    logged: dict[tuple[Version, bytes], bytes] = {}
    newest: dict[bytes, tuple[Stamp, bytes]] = {}
    for version, key, value, copied in sorted(events):
        _, current = newest.get(key, (None, None))
        own = Stamp(version, HERE)
        if not is_state(value):
            stamp = decode_origin(value) if copied else own
            if key in newest and stamp <= newest[key][0]:
                continue
            became = entry = value
        elif copied:
            became, entry, stamp = merge_states(current, value, own=own), value, own
            if became is current:
                continue
        else:
            entry, became = write_state(current, value, version, HERE)
            stamp = own
        entry, became = mark_like(value, Written(entry, became))
        newest[key] = stamp, became
        stored[key, version], logged[version, key] = became, entry
    return stored, logged


def decode_origin(value: bytes) -> Stamp:
    return Stamp(int.from_bytes(value[-10:-2], "big"), value[-2])


class Batch:
    """An atomic batch: what it writes to each partition, and how it ended, if it has."""

    def __init__(self, parts: list[dict[bytes, bytes]], *, copied: bool) -> None:
        self.parts = parts
        self.copied = copied
        self.siblings = [min(part) for part in parts]
        self.prepared: dict[bytes, Version] = {}
        self.fate: Fate | None = None


class World:
    """A site, what was written to it, and what it has told."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.time = SimulatedTime(START_MS)
        self.engine = HookedEngine()
        self.events: list[Event] = []
        self.unsynced: list[Event] = []
        self.open: dict[str, list[tuple[Version, dict[bytes, bytes]]]] = {}
        self.fates: dict[str, Fate] = {}
        self.batches: dict[str, Batch] = {}
        # Those whose writers live.
        self.writing: list[str] = []
        self.snapshots: dict[tuple[bytes, Version], bytes | None] = {}
        self.announced: Version = 0
        self.log: dict[tuple[Version, bytes], bytes] = {}
        self.beats: list[Heartbeat] = []
        self.numbers = 0
        self._stack = ExitStack()
        self._open_site()
        # Every other history begins with several partitions.
        for key in (FIELDS, COUNTERS + b"m") if seed % 2 else ():
            self.node.reshaping.split(key)

    def _open_site(self) -> None:
        self.site: Site = open_memory(self.engine, self.time)
        if not self.site.namespaces():
            kinds: dict[str, MergePolicy] = {"plain": "last_write", "fields": "fields", "counters": "counter"}
            for name, merge in kinds.items():
                self.site.create_namespace(name, merge=merge)
        self.node: Node = node_of(self.site)
        self.node.settle_by(self.decide, self.settle_batch)
        self._stack.enter_context(self.node.committer.tail.following(lambda: self.node.clock.latest))
        self.beats = []

    def close(self) -> None:
        self._stack.close()
        self.site.close()

    def partition(self, key: bytes) -> LocalPartition:
        return self.node.map.route(key)

    # What happens

    def step(self) -> None:
        chance = self.chance
        acts = {
            self.write: 6, self.apply: 6, self.prepare: 5, self.finish: 4, self.ask: 4, self.snapshot: 1,
            self.compare: 0.5, self.heartbeat: 1, self.restart: 0.4, self.split: 0.2, self.merge: 0.2,
            self.begin_batch: 3, self.write_batch: 16, self.ask_batch: 1, self.forget: 1, self.wait: 0.3,
        }  # fmt: skip
        chance.choices(list(acts), list(acts.values()))[0]()
        self.time.advance(chance.choice([0, 0, 1, 300]))

    def wait(self) -> None:
        """So long that no batch that was begun can be prepared."""
        self.time.advance(BATCH_AGE_MS_MAX + 1)

    def value_for(self, key: bytes) -> bytes:
        """Something that a writer may write to a key."""
        chance = self.chance
        number = chance.randrange(100)
        if key.startswith(PLAIN):
            return chance.choice(
                [encode_value(b"%d" % number), TOMBSTONE, encode_value(LARGE + b"%d" % number)]
            )
        if key.startswith(COUNTERS):
            return chance.choice([add_to_counter(number), add_to_counter(-number), delete_record("counter")])
        written = b'{"%s": %d}' % (chance.choice([b"x", b"y"]), number)
        return chance.choice([update_fields(written), put_fields(written), delete_record("fields")])

    def some(self, keys: list[bytes]) -> dict[bytes, bytes]:
        chosen = self.chance.sample(keys, self.chance.randint(1, min(3, len(keys))))
        return {key: self.value_for(key) for key in sorted(chosen)}

    def write(self) -> None:
        durable = self.chance.random() < 0.5
        namespace = self.chance.choice([PLAIN, FIELDS, COUNTERS])
        for partition, keys in self.by_partition(namespace):
            writes = self.some(keys)
            put = partition.put if namespace == PLAIN else partition.merge
            self.enter(put(list(writes), list(writes.values()), durable=durable), writes, durable=durable)

    def apply(self) -> None:
        """Copies with stamps of just now, or from before everything that is open."""
        durable = self.chance.random() < 0.5
        namespace = self.chance.choice([PLAIN, FIELDS, COUNTERS])
        now = self.node.committer.now()
        stamp = Stamp(now - self.chance.choice([0, 3, 10, 1 << 18, 400 << 18]), self.chance.choice(THERE))
        for partition, keys in self.by_partition(namespace):
            copies = {key: copy_of(self.value_for(key), stamp) for key in self.some(keys)}
            version = partition.apply(list(copies), list(copies.values()), durable=durable)
            self.enter(version, copies, durable=durable, copied=True)

    def by_partition(self, namespace: bytes) -> Iterator[tuple[LocalPartition, list[bytes]]]:
        groups: dict[int, list[bytes]] = defaultdict(list)
        for key in KEYS:
            if key.startswith(namespace):
                groups[self.partition(key).id].append(key)
        keys = self.chance.choice(list(groups.values()))
        yield self.partition(keys[0]), keys

    def enter(
        self, version: Version, writes: dict[bytes, bytes], *, durable: bool, copied: bool = False
    ) -> None:
        if version:
            events = [Event(version, key, value, copied) for key, value in writes.items()]
            self.events += events
            self.unsynced = [] if durable else self.unsynced + events

    def prepare(self) -> None:
        """Of one partition, or of two."""
        self.numbers += 1
        transaction = f"t{self.numbers}"
        ids = sorted({self.partition(key).id for key in KEYS})
        for partition_id in self.chance.sample(ids, min(len(ids), self.chance.randint(1, 2))):
            keys = [key for key in KEYS if self.partition(key).id == partition_id]
            writes = self.some(keys)
            partition = self.partition(keys[0])
            version = partition.prepare(transaction, list(writes), list(writes.values()))
            assert partition.prepare(transaction, list(writes), list(writes.values())) == version
            assert version > self.announced
            self.open.setdefault(transaction, []).append((version, writes))
            self.unsynced = []

    def decide(self, transaction: str) -> Fate:
        """The settler: a transaction is decided at the latest when its fate is asked for."""
        if transaction not in self.fates:
            highest = max(version for version, _ in self.open[transaction])
            later = self.node.committer.now()
            self.fates[transaction] = self.chance.choice(
                [Fate(Decision.ABORT), Fate(Decision.COMMIT, highest), Fate(Decision.COMMIT, later)]
            )
            if self.fates[transaction].decision is Decision.COMMIT:
                self.events += [
                    Event(self.fates[transaction].version, key, value, False)
                    for _, writes in self.open[transaction]
                    for key, value in writes.items()
                ]
        return self.fates[transaction]

    # Atomic batches

    def begin_batch(self) -> None:
        """A batch of new values, or of one source commit."""
        partitions = {self.partition(key).id for key in KEYS}
        parts = [
            self.some([key for key in KEYS if self.partition(key).id == number])
            for number in self.chance.sample(sorted(partitions), self.chance.randint(1, len(partitions)))
        ]
        copied = self.chance.random() < 0.4
        if copied:
            stamp = Stamp(self.node.committer.now() - self.chance.choice([0, 10, 400 << 18]), THERE[0])
            parts = [{key: copy_of(value, stamp) for key, value in part.items()} for part in parts]
        batch = mint_batch(self.time())
        self.batches[batch] = Batch(parts, copied=copied)
        self.writing.append(batch)

    def write_batch(self) -> None:
        """The next step of a writer, or once more an earlier one; then it may die."""
        if not self.writing:
            return
        batch = self.chance.choice(self.writing)
        known = self.batches[batch]
        key, part = self.chance.choice(list(zip(known.siblings, known.parts, strict=True)))
        if len(known.prepared) == len(known.parts):
            version = max(known.prepared.values())
            self.end_batch(batch, Fate(Decision.COMMIT, version))
            self.partition(key).commit_prepared(batch, version)
        else:
            self.prepare_batch(batch, key, part)
        if self.chance.random() < 0.04 and batch in self.writing:
            self.writing.remove(batch)

    def prepare_batch(self, batch: str, key: bytes, part: dict[bytes, bytes]) -> None:
        known, partition = self.batches[batch], self.partition(key)
        try:
            version = partition.prepare(batch, list(part), list(part.values()), known.siblings)
        except TransactionEnded:
            # Refused, or too old: then to ask refuses it.  From then on the writer may abort it.
            fate = partition.ask_prepared(batch, key)
            assert fate == Fate(Decision.ABORT)
            self.end_batch(batch, fate)
            for sibling in known.siblings:
                self.partition(sibling).abort_prepared(batch, sibling)
            self.writing.remove(batch)
        except InvalidArgument:
            # The partition was split.
            self.writing.remove(batch)
        else:
            assert known.prepared.setdefault(key, version) == version

    def ask_batch(self) -> None:
        """Ask for any batch, as the partition of a sibling does."""
        if self.batches:
            batch = self.chance.choice(list(self.batches))
            if self.is_remembered(batch):
                self.settle_batch(batch, self.batches[batch].siblings)

    def is_remembered(self, batch: str) -> bool:
        return any(batch == each for each, *_ in read_outcomes(self.engine, VERSION_MAX >> 20))

    def settle_batch(self, batch: str, siblings: Sequence[bytes]) -> Fate:
        fates = [self.partition(key).ask_prepared(batch, key) for key in siblings]
        decided = [fate for fate in fates if fate.decision is not Decision.UNDECIDED]
        fate = decided[0] if decided else Fate(Decision.COMMIT, max(fate.version for fate in fates))
        assert set(decided) <= {fate}, "partitions differ about the end of a batch"
        self.end_batch(batch, fate)
        return fate

    def end_batch(self, batch: str, fate: Fate) -> None:
        known = self.batches[batch]
        assert known.fate in (None, fate), "a batch has come to two ends"
        if known.fate is None and fate.decision is Decision.COMMIT:
            self.events += [
                Event(fate.version, key, mark_batch(value), known.copied)
                for part in known.parts
                for key, value in part.items()
            ]
        known.fate = fate

    def forget(self) -> None:
        """Forget what became of old batches, when no partition has them prepared any more."""
        forgotten = [
            (batch, key)
            for batch, key, outcome in ended_batches(self.node, 2 * BATCH_AGE_MS_MAX)
            if all(self.partition(each).ended_prepared([batch], [each])[0] for each in outcome.siblings)
        ]
        forget_batches(self.node, forgotten)

    def finish(self) -> None:
        waiting = [write.transaction for write in self.node.committer.prepared.all()]
        if waiting := [each for each in waiting if each in self.open]:
            self.finish_one(self.chance.choice(waiting))

    def finish_one(self, transaction: str) -> None:
        decision, version = self.decide(transaction)
        for partition in self.node.map.partitions:
            for again in range(2):
                if decision is Decision.COMMIT:
                    done = partition.commit_prepared(transaction, version)
                else:
                    done = partition.abort_prepared(transaction)
                assert not (again and done)
                if done:
                    self.unsynced = []

    def compare(self) -> None:
        """Compare and set decides by what was committed, so nothing is prepared on its key afterwards."""
        key = self.chance.choice([key for key in KEYS if key.startswith(PLAIN)])
        partition = self.partition(key)
        partition.settle_prepared()
        value = encode_value(b"set")
        version = partition.compare_and_set(key, partition.get(key), value, durable=True)
        self.enter(version, {key: value}, durable=True)

    def ask(self) -> None:
        """Hear what is resolved, and take in all changes up to there, by the tail and by the log."""
        resolved = self.node.resolved_version()
        for partition in self.node.map.partitions:
            own = partition.resolved_version()
            writes = self.node.committer.prepared.within(partition.range)
            assert all(resolved <= own < write.version for write in writes)
        assert resolved >= self.announced
        entries = self.node.committer.tail.between(self.announced, resolved)
        seen = dict(self.read_log(self.announced, resolved))
        if entries is not None:
            tailed = {
                (entry.version, key): value
                for entry in entries
                for key, value in zip(entry.keys, entry.values, strict=True)
            }
            assert tailed == seen, "the tail and the log differ"
            assert [entry.version for entry in entries] == sorted(entry.version for entry in entries)
        self.log |= seen
        self.announced = resolved

    def snapshot(self) -> None:
        key, at = self.chance.choice(KEYS), self.node.committer.read_version()
        self.snapshots[key, at] = self.partition(key).get(key, at)

    def heartbeat(self) -> None:
        self.beats.append(self.node.heartbeat())
        self.unsynced = []

    def restart(self) -> None:
        """A power cut, which may take what was not synced."""
        self._stack.close()
        self.engine = self.engine.crashed(self.chance.randint(0, self.engine.unsynced))
        before, self.unsynced = self.unsynced, []
        self._open_site()
        for event in before:
            log_ids = [log.id for log in self.node.logs]
            if not any(self.engine.get(LOG, encode_log_key(log, event.version)) for log in log_ids):
                self.events.remove(event)
                # A snapshot may have seen what was lost.
                for key, at in [seen for seen in self.snapshots if seen[0] == event.key]:
                    if at >= event.version:
                        del self.snapshots[key, at]

    def split(self) -> None:
        key = self.chance.choice([key for key in KEYS if key[3:] != b"a"])
        if self.partition(key).range.start != key:
            self.node.reshaping.split(key)
            self.unsynced = []

    def merge(self) -> None:
        if len(self.node.map.partitions) > 1:
            left, right, *_ = self.node.map.partitions
            self.node.reshaping.merge(left.id, right.id)
            self.unsynced = []

    # What must hold

    def read_log(self, since: Version, until: Version) -> Iterator[tuple[tuple[Version, bytes], bytes]]:
        for line in chain.from_iterable(self.node.read_log(since, until, KeyRange())):
            version, row = version_of(line), decode_row(version_of(line), line[1])
            if isinstance(row, CommitRow):
                for key, value in zip(row.keys, row.values, strict=True):
                    whole = self.node.look_up_value(key, version) if value is None else value
                    yield (version, key), whole

    def read_stored(self) -> dict[tuple[bytes, Version], bytes]:
        by_prefix = {encode_prefix(key): key for key in KEYS}
        rows = self.engine.scan(DATA, b"", None, rows_max=10**6, bytes_max=10**9)
        return {
            (by_prefix[engine_key[:-8]], decode_version(engine_key)): value
            for engine_key, value in rows
            if engine_key[:-8] in by_prefix
        }

    def check_end(self) -> None:
        """End what is open; then all that was told must be what is there, and that what the model says."""
        for transaction in list(self.open):
            self.finish_one(transaction)
        for partition in self.node.map.partitions:
            partition.settle_prepared()
        assert not self.node.committer.prepared.all()
        self.heartbeat()
        self.ask()
        stored, logged = replay(self.events)
        assert self.read_stored() == stored
        assert dict(self.read_log(0, VERSION_MAX)) == logged
        assert self.log == logged, "a reader of changes has got something else than there is"
        for (key, at), value in self.snapshots.items():
            assert self.partition(key).get(key, at) == value, "a snapshot has changed"
            newest = max((version for held, version in stored if held == key and version <= at), default=0)
            there = live_value(stored[key, newest], at >> 18) if newest else None
            assert there == value
        self.check_beats(logged)

    def check_beats(self, logged: dict[tuple[Version, bytes], bytes]) -> None:
        sealed = [log.sealed_at for log in self.node.logs if log.sealed_at is not None]
        for beat in self.beats:
            # What a log that was sealed had not told, it told by itself.
            if not beat.since or any(beat.since < at <= beat.through for at in sealed):
                continue
            expected: dict[int, Sums] = {}
            for (version, key), value in logged.items():
                if beat.since < version <= beat.through:
                    ((_, _, changes, digest, own),) = Correction(version, key, None, value).tallies(HERE)
                    tally, namespace = Tally(changes, digest), int.from_bytes(key[:3], "big")
                    added = Sums(tally if own else Tally(), tally)
                    expected[namespace] = expected.get(namespace, Sums()).plus(added)
            counted = {namespace: sums for namespace, sums in beat.sums.items() if sums.all.changes}
            assert counted == expected, "a heartbeat has counted something else than there is"


def copy_of(value: bytes, stamp: Stamp) -> bytes:
    """What another site wrote, as it arrives here."""
    if not is_state(value):
        return encode_value(value[:-1], None, value == TOMBSTONE, origin=stamp)
    return encode_state(decode_state(stamp_state(value, None, stamp.version, stamp.site)), stamp)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "ASK_SECONDS", 0.0)


def run(seed: int) -> None:
    world = World(seed)
    for _ in range(STEPS):
        world.step()
    world.check_end()
    world.close()


@pytest.mark.parametrize("seed", only(range(5), range(40)))
def test_commits_at_any_time_are_as_if_in_order_of_versions(seed: int) -> None:
    run(seed)


# Canaries: with one of the rules left out, the same histories must show it.


def append_only(tail: LiveTail, inserted: TailEntry, _: object) -> None:
    tail.add(*inserted)


def refuse_in_words(_: AbortPrepared) -> Sequence[WriteRow]:
    return ()


def forget_commits(batch: str, key: bytes, outcome: BatchOutcome | None) -> WriteRow:
    kept = outcome is None or outcome.decision is not Decision.COMMIT
    return store_outcome(batch, key, outcome if kept else None)


def lose_to_any(insertion: Insertion, key: bytes, prefix: bytes, value: bytes, newest: Row | None) -> None:
    """A copy is compared with the newest record of all."""
    is_copy = value[-1] & HAS_ORIGIN and not is_state(value)
    if not is_copy or stamp_of(newest, HERE) < find_origins([value])[0]:
        INSERT(insertion, key, prefix, value, newest)


INSERT = Insertion._add


def keep(_below: object, _before: object, _version: Version, stored: bytes, logged: bytes, _: int) -> Written:
    return Written(logged, stored)


@pytest.mark.parametrize(
    ("place", "name", "planted"),
    [
        (inserting, "_rows_above", lambda *_: iter(())),
        (inserting, "_redo", keep),
        (inserting, "_count_again", lambda *arguments: arguments[3]),
        (preparing, "_correct", lambda *_: True),
        (_Index, "floor", None),
        (PreparedWrites, "load", lambda _: None),
        (AbortPrepared, "_refuse", refuse_in_words),
        (preparing, "store_outcome", forget_commits),
        (Insertion, "_add", lose_to_any),
        (inserting, "mark_like", lambda _, written: written),
        (LiveTail, "insert", append_only),
        (LiveTail, "insert", lambda *_: None),
    ],
    ids=[
        *("nothing above", "all stays", "old totals", "old sums", "no floor", "not loaded"),
        *("refusal in words", "outcome dropped", "beaten above", "no mark", "tail", "no tail"),
    ],
)
def test_model_finds_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str, planted: object
) -> None:
    monkeypatch.setattr(place, name, planted)
    for seed in range(SEEDS_MAX):
        try:
            run(seed)
        except AssertionError:
            return
    pytest.fail("a fault was planted, and nothing showed it")
