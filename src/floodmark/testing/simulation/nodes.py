"""One site of one to three nodes on a shared engine, in one thread under one seed.

The nodes are real (`partition/membership.py`).  Each engine call of a node may be interrupted: other nodes
run, beat, take over and write for some seconds, and then the first one continues at the same place, like a
process that was suspended or cut off.  Clients call old incarnations as well as new ones.  A harsh world
interrupts nodes for longer, and only during calls of clients, and writes fail with or without having
happened.

Checked as it goes: a change lies above all that was announced for its key (promise 3) and above earlier
versions of it (2), a sealed log stays as it is (4), a feed tells exactly what was written (4), the heartbeats
of the site count exactly that, a feed behind trimmed logs fails and skips nothing (5), a read of the newest
state holds what was acknowledged before the call, and what was acknowledged is there in the end (1).  Of
atomic batches, see `node_batches.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import count
from random import Random
from typing import Any, Final, TypeVar
from unittest.mock import patch

import msgspec

from floodmark.codec.changelog import CommitRow, decode_log_key, decode_row
from floodmark.codec.ordered import VERSION_BYTES, decode_version, encode_prefix
from floodmark.codec.values import encode_value
from floodmark.engine import Guard, MemoryEngine, Row, WriteRow
from floodmark.model.change import Heartbeat
from floodmark.model.errors import FloodmarkError, NodeFenced, OutcomeUnknown, StorageFailed, VersionCollected
from floodmark.model.partition import Decision, Fate
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.partition import FAMILIES, Node
from floodmark.partition.beating import NODE
from floodmark.partition.families import CATALOG, DATA, FENCE, LOG, LOGS, META
from floodmark.partition.fencing import numbered
from floodmark.partition.layout import LogRow, load_partitions
from floodmark.partition.membership import BEAT_MS, SharedNode, claim
from floodmark.partition.prepared import settling
from floodmark.partition.prepared.writes import PREPARED
from floodmark.partition.read.changelog import version_of
from floodmark.testing.clock import SimulatedTime
from floodmark.testing.simulation.faults import plant
from floodmark.testing.simulation.history import Key, Violation
from floodmark.testing.simulation.node_batches import CallerDied, NodeBatches
from floodmark.testing.simulation.node_faults import NODE_FAULTS, TRANSACTION_FAULTS
from floodmark.testing.simulation.node_transactions import KEYS as TRANSACTION_KEYS
from floodmark.testing.simulation.node_transactions import NodeTransactions, is_coordinated

STEPS: Final = 150
PAUSES_MAX: Final = 80
HARSH_MS: Final = 15_000
PARTITIONS_MAX: Final = 4
KEYS: Final = tuple(b"\x00\x00\x01key-%d" % number for number in range(4))
ALL_KEYS: Final = (*KEYS, *TRANSACTION_KEYS)
NAMES: Final = CATALOG + b"all"
SITE: Final = "oslo"

Result = TypeVar("Result")


def tick(node: SharedNode) -> None:
    """`beat` and `watch`, once."""
    if node._is_up:
        with suppress(NodeFenced):
            node.beat()
    node.watch()


class SharedMemory(MemoryEngine):
    """The engine of all nodes.  A call may be interrupted before and after it takes effect."""

    def __init__(self, world: "NodesWorld") -> None:
        super().__init__(FAMILIES)
        self._world = world

    def get(self, family: str, key: bytes) -> bytes | None:
        return self._interrupted(lambda: MemoryEngine.get(self, family, key))

    def ceiling(self, family: str, key: bytes, prefix: bytes = b"") -> Row | None:
        return self._interrupted(lambda: MemoryEngine.ceiling(self, family, key, prefix))

    def scan(self, family: str, start: bytes, end: bytes | None, **limits: Any) -> list[Row]:
        return self._interrupted(lambda: MemoryEngine.scan(self, family, start, end, **limits))

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        batch = list(rows)

        def apply() -> bool:
            written = MemoryEngine.write(self, batch, guards)
            if written:
                self._world.record.add(batch)
            return written

        seals = any(map(_is_seal, batch))
        return self._interrupted(lambda: self._fail_sometimes(apply), seals=seals)

    def sync(self) -> None:
        self._interrupted(lambda: MemoryEngine.sync(self))

    def _fail_sometimes(self, write: Callable[[], bool]) -> bool:
        """A write of the shared engine, which may fail before or after it takes effect."""
        if not self._world.busy or self._world.faults.random() >= self._world.fault_rate:
            return write()
        kind = self._world.faults.choice(("refused", "lost", "unanswered"))
        if kind == "refused":
            raise StorageFailed("the simulated disk refused a write; try again")
        if kind == "unanswered":
            write()
        raise OutcomeUnknown("the simulated disk did not answer")

    def _interrupted(self, operation: Callable[[], Result], *, seals: bool = False) -> Result:
        self._world.pause(seals=seals)
        result = operation()
        self._world.pause(seals=seals)
        return result


def _is_seal(row: WriteRow) -> bool:
    family, key, value = row
    return (
        family == META
        and key.startswith(LOGS)
        and value is not None
        and msgspec.json.decode(value, type=LogRow).sealed_at is not None
    )


class NodeHistory:
    """All writes, announced versions and acknowledgements, which it checks."""

    def __init__(self, note: Callable[[bytes, Version, bytes | None], None]) -> None:
        # Called for each record that is stored or removed.
        self._note = note
        self.versions: dict[bytes, set[Version]] = {key: set() for key in ALL_KEYS}
        self.announced: dict[bytes, Version] = dict.fromkeys(ALL_KEYS, 0)
        self.acknowledged: dict[bytes, list[Version]] = {key: [] for key in ALL_KEYS}
        self.names: set[int] = set()
        self.beats: list[Heartbeat] = []
        self._sealed: dict[int, Version] = {}
        self._prefixes = {encode_prefix(key): key for key in ALL_KEYS}

    def add(self, batch: Sequence[WriteRow]) -> None:
        """Check the rows of a write that happened."""
        prepared = any(family == META and key.startswith(PREPARED) for family, key, _ in batch)
        for family, key, value in batch:
            if family == DATA:
                self._add_record(self._prefixes[key[:-VERSION_BYTES]], decode_version(key), value, prepared)
            elif family == LOG and value is not None:
                log, version, _ = decode_log_key(key)
                if log in self._sealed:
                    raise Violation("4", SITE, f"the sealed log {log} was written", version=version)
                if log == NODE:
                    self._add_beat(decode_row(version, value))
        for family, key, value in batch:
            if family == META and key.startswith(LOGS) and value is not None:
                row = msgspec.json.decode(value, type=LogRow)
                if row.sealed_at is not None:
                    self._sealed[row.id] = row.sealed_at

    def _add_record(self, key: bytes, version: Version, value: bytes | None, prepared: bool) -> None:
        if version <= self.announced[key]:
            raise _violation("3", "was written where all was resolved", key, version)
        self._note(key, version, value)
        if value is None:
            self.versions[key].discard(version)
            return
        if not prepared and version <= max(self.versions[key], default=0):
            raise _violation("2", "went back", key, version)
        self.versions[key].add(version)

    def _add_beat(self, beat: CommitRow | Heartbeat) -> None:
        """Check a heartbeat of the site, as each reader does: it counts the changes of the next interval."""
        assert isinstance(beat, Heartbeat)
        last, self.beats = self.beats[-1:], [*self.beats, beat]
        if any(beat.since not in (0, each.through) or beat.through < each.through for each in last):
            raise Violation(
                "heartbeats", SITE, "a heartbeat does not go on where the last ended", version=beat.version
            )
        written = self.between(beat.since, beat.through)
        told = sum(sums.all.changes for sums in beat.sums.values())
        if beat.since and told != len(written):
            finding = f"a heartbeat tells {told} of {len(written)} changes in {beat.since}..{beat.through}"
            raise Violation("heartbeats", SITE, finding, version=beat.version)
        self.announce(KeyRange(), beat.through)

    def announce(self, keys: KeyRange, version: Version) -> None:
        """Record a version that a partition has announced as resolved."""
        for key in ALL_KEYS:
            if keys.contains(key):
                self.announced[key] = max(version, self.announced[key])

    def between(self, since: Version, until: Version) -> list[tuple[Version, bytes]]:
        """The changes in `(since, until]`."""
        return sorted(
            (version, key)
            for key, versions in self.versions.items()
            for version in versions
            if since < version <= until
        )


class Member:
    """A node with its clock, its catalog, and the incarnations that clients still know."""

    def __init__(self, world: "NodesWorld", number: int) -> None:
        self.number = number
        self.offset_ms = world.random.randint(-200, 200)
        self.due_ms = 0
        self.lives: list[Node] = []
        self.names: list[int] = []
        # The operation in which its present incarnation is interrupted.
        self.doing = ""
        self._world = world
        self.shared: SharedNode | None = None

    def start(self) -> None:
        """Run a new process for the node; an old one goes on if clients call it."""
        world = self._world
        claim(world.engine, self.number, lambda seconds: world.pass_time(round(seconds * 1_000)))
        self.shared = SharedNode(
            world.engine,
            self.number,
            1,
            time_source=lambda: world.time() + self.offset_ms,
            elapsed_source=world.time,
            on_start=self._enter,
        )

    def _enter(self, shared: SharedNode) -> None:
        shared.node.settle_by(self._world.settle, partial(self._world.batches.settle, shared.node))
        self.lives.append(shared.node)
        engine = shared.engine

        def load() -> None:
            stored = engine.get(META, NAMES)
            self.names = [] if stored is None else msgspec.json.decode(stored, type=list[int])

        engine.load_catalog = load
        engine.reload_catalog()


class NodesWorld:
    """A run of one seed."""

    def __init__(self, seed: int, *, harsh: bool = False, transactions: bool = False) -> None:
        self.random = Random(f"nodes {seed}")
        # How many of those that call each other may be interrupted: a client, a coordinator, a partition.
        self.depth_max = 3 if transactions else 2
        self._harsh = harsh
        self.faults = Random(f"disk {seed}")
        self.fault_rate = self.faults.choice((0.0, 0.003, 0.01, 0.05)) if harsh else 0.0
        # In the middle of what nodes were taken over.
        self.taken_over = Counter[str]()
        self.time = SimulatedTime()
        self.batches = NodeBatches(self, KEYS)
        self.transactions = NodeTransactions(self, self.batches, KEYS)
        self.record = NodeHistory(self.batches.add)
        self.engine = SharedMemory(self)
        self.members = [Member(self, number + 1) for number in range(self.random.choice((1, 2, 2, 3, 3)))]
        self._pauses = self.random.choice((0.0, 0.01, 0.03, 0.1))
        self._pauses_left = PAUSES_MAX
        self.busy: list[Member] = []
        self.numbers = count(1)
        self._decided: dict[str, Fate] = {}
        self._prepared: dict[str, Version] = {}
        self._position: Version = 0
        # The position of a feed that no safe point protects.
        self._late_position: Version = 0
        actions: dict[Callable[[Member], None], float] = {
            self._put: 10,
            self._prepare: 3,
            self.batches.write: 4,
            self.batches.read: 4,
            self.batches.forget: 1,
            self._read: 8,
            self._announce: 5,
            self._follow: 4,
            self._follow_late: 2,
            self._trim: 2,
            self._heartbeat: 3,
            self._reshape: 4,
            self._move: 3,
            self._rename: 3,
            self._give_keeper: 1,
            self._crash: 0.5,
            self._jump: 0.5,
        }
        # Where partitions are cut.
        self._cuts: Sequence[bytes] = KEYS
        if transactions:
            self._cuts = ALL_KEYS
            actions |= {self.transactions.run: 30, self.transactions.sweep: 2, self.transactions.restart: 1}
            actions |= {self._move: 9, self._jump: 0.1}
        self._actions = list(actions)
        self._weights = [weight * self.random.choice((0.2, 1, 1, 3)) for weight in actions.values()]

    # A wait of the only thread ends no open batch.
    @patch.object(settling, "ASK_SECONDS", 0)
    def run(self, steps: int = STEPS) -> None:
        """Run some steps, and check everything at the end."""
        for member in self.members:
            self._call(member, lambda member: member.start())
        if self._cuts is ALL_KEYS:
            for action in (*[self._reshape] * PARTITIONS_MAX, *[self._move] * PARTITIONS_MAX):
                self._call(self.members[0], action)
        for _ in range(steps):
            self._step()
        self._pauses = self.fault_rate = 0.0
        for member in self.members:
            member.offset_ms = 0
        self.batches.calm = True
        for _ in range(30):
            self.pass_time(BEAT_MS)
        self.transactions.end()
        # The second time by a new map.
        for member in (*self.members, *self.members):
            self._call(member, lambda member: self.batches.beat(member.lives[-1]))
        self._follow(self.members[0])
        self.transactions.judge(SITE)
        self._judge()

    # Time

    def pause(self, *, seals: bool = False) -> None:
        """Perhaps interrupt the running node, for long enough to be declared dead."""
        if not 0 < len(self.busy) <= self.depth_max or not self._pauses_left:
            return
        member = self.busy[-1]
        doing = member.doing
        if (doing or not self._harsh) and self.random.random() < self._pauses:
            self._pauses_left -= 1
            fence = _fence_of(self.engine, member)
            longest_ms = HARSH_MS if self._harsh else self.random.choice((10, 1_000, 9_000))
            for _ in range(self.random.randint(1, 10)):
                self.pass_time(self.random.randint(0, longest_ms // 5))
                self.act()
            if doing and _fence_of(self.engine, member) != fence:
                self.taken_over.update([doing, "seal"] if seals else [doing])

    def _step(self) -> None:
        self.pass_time(self.random.choice((1, 50, 300, 1_000)))
        self.act()

    def pass_time(self, milliseconds: int) -> None:
        """Advance the time of all; nodes that are not interrupted beat and watch."""
        self.time.advance(milliseconds)
        for member in self.members:
            if member not in self.busy and member.due_ms <= self.time():
                late_ms = 6_000 if self.random.random() < 0.02 and self._pauses else 0
                member.due_ms = self.time() + BEAT_MS + late_ms
                self._call(member, self._tick)

    def act(self) -> None:
        """Run an action at a node that is not interrupted."""
        free = [member for member in self.members if member not in self.busy]
        if free:
            action = self.random.choices(self._actions, self._weights)[0]
            self._call(self.random.choice(free), action)

    def _call(self, member: Member, action: Callable[[Member], None]) -> None:
        self.busy.append(member)
        member.doing = ""
        try:
            with suppress(FloodmarkError, CallerDied):
                action(member)
        finally:
            self.busy.pop()

    # Actions

    def _tick(self, member: Member) -> None:
        if member.shared is None:
            member.start()
        else:
            tick(member.shared)

    def any_life(self, member: Member, doing: str = "") -> Node:
        """Usually the present incarnation, sometimes the one before it."""
        node = self.random.choice(member.lives[-2:] if self.random.random() < 0.3 else member.lives[-1:])
        member.doing = doing if node is member.lives[-1] else ""
        return node

    def _put(self, member: Member) -> None:
        if member.lives:
            key, value = self.random.choice(KEYS), b"%d" % next(self.numbers)
            with self.transactions.observe({key: value}):
                node = self.any_life(member, "round")
                version = node.map.route(key).put([key], [encode_value(value)], durable=True)
            self.record.acknowledged[key].append(version)

    def _prepare(self, member: Member) -> None:
        if member.lives:
            key, name = self.random.choice(KEYS), f"t{next(self.numbers)}"
            partition = self.any_life(member, "prepare").map.route(key)
            self._prepared[name] = partition.prepare(name, [key], [encode_value(name.encode())])
            member.doing = ""
            self.pass_time(self.random.choice((0, 500, 3_000)))
            fate = self.settle(name)
            if partition.commit_prepared(name, fate.version):
                self.record.acknowledged[key].append(fate.version)

    def settle(self, transaction: str) -> Fate:
        """The coordinator: a transaction of one prepare commits if that was answered."""
        if is_coordinated(transaction):
            return self.transactions.settle(transaction)
        version = self._prepared.get(transaction)
        fate = Fate(Decision.ABORT) if version is None else Fate(Decision.COMMIT, version)
        return self._decided.setdefault(transaction, fate)

    def _read(self, member: Member) -> None:
        if member.lives:
            key, node = self.random.choice(KEYS), self.any_life(member)
            expected = max(self.record.acknowledged[key], default=0)
            partition = node.map.route(key)
            found = partition.find(key, node.committer.read_version())
            if expected > (0 if found is None else found.version):
                raise _violation("newest", "was acknowledged, and a later read missed it", key, expected)

    def _announce(self, member: Member) -> None:
        if member.lives:
            partition = self.any_life(member).map.route(self.random.choice(KEYS))
            self.record.announce(partition.range, partition.resolved_version())

    def _follow(self, member: Member) -> None:
        """Read the changes up to the resolved version of the site: the minimum over all partitions."""
        if not member.lives:
            return
        since, resolved = self._position, list[Version]()

        def ask(owner: Member) -> None:
            served = [each for node in owner.lives[-1:] for each in node.map.partitions if each.id == row.id]
            resolved.append(served[0].resolved_version() if served else 0)
            self.record.announce(row.range, resolved[-1])

        rows = load_partitions(self.engine)
        for row in rows:
            owner = self.members[row.node - 1]
            if owner is member:
                ask(owner)
            elif owner not in self.busy:
                self._call(owner, ask)
        if len(resolved) < len(rows):
            return
        until = max(since, min(resolved))
        self._read_changes("4", self.any_life(member), since, until)
        self._position = max(until, self._position)

    def _read_changes(self, promise: str, node: Node, since: Version, until: Version) -> None:
        """Read the changes in `(since, until]`, all resolved, and compare them with those written."""
        told: list[tuple[Version, bytes]] = []
        for page in node.read_log(since, until, KeyRange()):
            for line in page:
                row_of_log = decode_row(version_of(line), line[1])
                if isinstance(row_of_log, CommitRow):
                    told += [(version_of(line), key) for key in row_of_log.keys]
        for version, key in set(told).symmetric_difference(self.record.between(since, until)):
            raise _violation(promise, "was written and not told, or the other way round", key, version)

    def _follow_late(self, member: Member) -> None:
        """Advance a feed that is far behind to the position of another; it may have to begin anew."""
        if member.lives:
            since, until = self._late_position, self._position
            try:
                self._read_changes("5", self.any_life(member), since, until)
                self._late_position = self.random.choice((since, until))
            except VersionCollected:
                self._late_position = until

    def _trim(self, member: Member) -> None:
        """Trim the logs, as a keeper does, where the feed with a safe point has read them."""
        if member.lives:
            self.any_life(member).trim_logs(self.random.choice((self._position, self._late_position)))

    def _heartbeat(self, member: Member) -> None:
        if member.lives:
            self.batches.beat(self.any_life(member, "heartbeat"))

    def _reshape(self, member: Member) -> None:
        if member.lives:
            node = self.any_life(member, "split")
            partitions = node.map.partitions
            if len(partitions) < PARTITIONS_MAX:
                node.reshaping.split(self.random.choice(self._cuts))
            elif len(partitions) > 1:
                member.doing = member.doing and "merge"
                place = self.random.randrange(len(partitions) - 1)
                node.reshaping.merge(partitions[place].id, partitions[place + 1].id)

    def _move(self, member: Member) -> None:
        if member.lives:
            node = self.any_life(member, "move")
            partition = node.map.route(self.random.choice(self._cuts))
            node.reshaping.move(partition.id, self.random.choice(self.members).number)

    def _rename(self, member: Member) -> None:
        """Change the catalog from its state in memory, as a keeper does."""
        if member.shared is not None and member.shared.engine.keeper is not None:
            number, engine = next(self.numbers), member.shared.engine
            names = [*member.names, number]
            if engine.write([(META, NAMES, msgspec.json.encode(names))]):
                member.names = names
                self.record.names.add(number)

    def _give_keeper(self, member: Member) -> None:
        if member.shared is not None and member.shared.engine.keeper is None:
            member.shared.take_keeper()

    def _crash(self, member: Member) -> None:
        member.shared = None
        member.due_ms = self.time() + self.random.choice((0, 2_000, 9_000))

    def _jump(self, member: Member) -> None:
        member.offset_ms = self.random.choice((0, -200, 200, -3_000, 3_000))

    def _judge(self) -> None:
        self.batches.judge(SITE)
        for key, versions in self.record.acknowledged.items():
            for version in versions:
                if version not in self.record.versions[key]:
                    raise _violation("1", "was acknowledged, and is not there", key, version)
        stored = self.engine.get(META, NAMES)
        names = set() if stored is None else set(msgspec.json.decode(stored, type=list[int]))
        if not self.record.names <= names:
            raise Violation("1", SITE, "a change of the catalog was acknowledged, and is not there")


def _fence_of(engine: MemoryEngine, member: Member) -> bytes | None:
    return MemoryEngine.get(engine, META, numbered(FENCE, member.number))


def _violation(promise: str, finding: str, key: bytes, version: Version) -> Violation:
    named = Key("users", key[3:])
    return Violation(promise, SITE, f"{named} {finding}", keys=[named], version=version)


def run_nodes(
    seed: int,
    *,
    steps: int = STEPS,
    fault: str | None = None,
    harsh: bool = False,
    transactions: bool = False,
) -> Violation | None:
    """Run one seed, perhaps with a planted fault, in a harsh world or with transactions.

    Returns the violation of a promise, or None.
    """
    try:
        with nullcontext() if fault is None else plant(fault, {**NODE_FAULTS, **TRANSACTION_FAULTS}):
            NodesWorld(seed, harsh=harsh, transactions=transactions).run(steps)
    except Violation as violation:
        return violation
    return None
