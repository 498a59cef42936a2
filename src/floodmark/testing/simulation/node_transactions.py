"""Serializable transactions in the simulation of nodes, beside plain puts and atomic batches.

Clients, transactions, coordinators and the rules of read versions are the real ones; only calls are
simulated.  Clients are separate from the nodes: between any two calls of a client others run, and it may die.
The coordinator is at one of the nodes, is as slow as that node, and moves with its log to another one.

Checked in the end: what all transactions read and wrote is serializable, in real time (promise 7); no aborted
transaction has written; and no snapshot shows money that a transfer has lost or made.

**Real time.**  A transaction that asks for a read version sees all that was acknowledged before.  One that
only writes, or begins at a cached version, is ordered by the clocks of its nodes, and comes after the earlier
transactions of its client if it reads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast
from unittest.mock import patch

from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace
from floodmark.engine import MemoryEngine
from floodmark.host import asking
from floodmark.host.asking import OtherNodes
from floodmark.host.catalog import NamespaceRow
from floodmark.host.coordination import LocalTransactions, SiteParticipants
from floodmark.host.ports import PeerVersions
from floodmark.log import FAMILY, BatchSettings
from floodmark.model.errors import (
    Conflict,
    FloodmarkError,
    OutcomeUnknown,
    Retryable,
    TransactionTooOld,
    Unreachable,
)
from floodmark.model.partition import Decision, Fate
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.partition import Node
from floodmark.site.coordinated import Pace
from floodmark.site.namespace import open_namespace
from floodmark.site.read_versions import SLOW_ANSWER, ReadVersion
from floodmark.site.transacting import TransactionCalls
from floodmark.site.transaction import Transaction
from floodmark.testing.ledgers import EngineStore
from floodmark.testing.serializability import EVER, NotSerializable, Observed, check_serializable
from floodmark.testing.simulation.history import Violation
from floodmark.testing.simulation.node_batches import CalledMaps, NodeBatches
from floodmark.transaction import TransactionCoordinator

CLIENTS: Final = 3
BALANCE: Final = 10
TIMEOUT: Final = timedelta(seconds=4)
STALENESS_MAX: Final = timedelta(seconds=3)
USERS, COUNTS = (
    NamespaceRow(id=number, name=name, merge=merge, ttl_ms=None, retention_ms=3_600_000, created_at=1)
    for number, name, merge in ((1, "users", "last_write"), (2, "counts", "counter"))
)
# Only transactions write to these: the sum of accounts is known, and most rows are absent at first.
ACCOUNTS: Final = tuple(b"account-%d" % number for number in range(3))
ROWS: Final = tuple(b"row-%d" % number for number in range(8))
COUNTERS: Final = (b"count-0", b"count-1")
ACCOUNT_RANGE: Final = KeyRange(b"account-", b"account.")
ROW_RANGE: Final = KeyRange(b"row-", b"row.")
KEYS: Final = (
    *(encode_namespace(USERS.id) + key for key in (*ACCOUNTS, *ROWS)),
    *(encode_namespace(COUNTS.id) + key for key in COUNTERS),
)
# The mark of an owner whose transactions outlive the process of a coordinator.
OWNER: Final = "c" * 16


class _NotEnough(Exception):
    """An account holds too little for a transfer."""


def is_coordinated(transaction: str) -> bool:
    """Whether a transaction was begun at a simulated coordinator."""
    return transaction.endswith(OWNER)


class SimulatedTransactions(LocalTransactions):
    """The transactions of the node that keeps the site, with one coordinator on a log of its own."""

    def __init__(self, owner: "NodeTransactions", member: Any) -> None:
        self.node = self._node = member.lives[-1]
        self.member = member
        self._router = owner.batches.router(member, CalledMaps(owner.batches, self.node))
        self._catalog: Any = SimpleNamespace(get={row.name: row for row in (USERS, COUNTS)}.get)
        self._nodes: Any = SimpleNamespace(require_keeper=self._require_open)
        self._is_closed = False
        world, no_subscriptions = owner.world, cast(Any, None)
        self._participants = SiteParticipants(self._router, no_subscriptions)
        coordinator = TransactionCoordinator(
            0,
            EngineStore(owner.ledger),
            self._participants,
            settings=BatchSettings(),
            mint=lambda: next(world.numbers),
            time_source=world.time,
            growing_ms=world.time,
            wait_seconds_max=0,
        )
        self.coordinators = {0: coordinator}

    def _require_open(self) -> None:
        if self._is_closed:
            raise Unreachable("another node keeps the site")

    def close(self) -> None:
        self._is_closed = True
        self.coordinators[0].close()


class CalledTransactions:
    """The transactions of the site as a client calls them, at the node that keeps the site."""

    def __init__(self, owner: "NodeTransactions") -> None:
        self._owner = owner

    def begin(self, timeout: timedelta, coordinator: int) -> Any:
        return self._call("begin", Unreachable, timeout, coordinator, owner=OWNER)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kind = OutcomeUnknown if name == "commit" else Unreachable
        return lambda *arguments: self._call(name, kind, *arguments)

    def _call(self, name: str, kind: type[FloodmarkError], *arguments: object, **options: object) -> Any:
        keeper, batches = self._owner.keeper(), self._owner.batches
        answer = batches.reach(keeper.member, lambda _: getattr(keeper, name)(*arguments, **options))
        if batches.is_lost():
            raise kind("the answer of the coordinator is lost")
        return answer


class ClientMaps(CalledMaps):
    """The map that a client has from a node."""

    def __init__(self, batches: NodeBatches, member: Any) -> None:
        super().__init__(batches, batches.world.any_life(member))
        self._member = member

    def refresh(self) -> None:
        self._batches.reach(self._member, lambda node: node.refresh())
        self._node = self._member.lives[-1]


class Client(TransactionCalls):
    """A client, connected to one node, as long as nothing but conflicts happens to it."""

    _durable = True
    number = 0
    doing = ""

    def __init__(self, owner: "NodeTransactions", member: Any) -> None:
        world, batches = owner.world, owner.batches
        self._member = member
        self._owner = owner
        # What its next transaction that reads comes after.
        self.before: list[str] = []
        called: Any = SimpleNamespace(
            router=batches.router(member, ClientMaps(batches, member)),
            versions=SimpleNamespace(read_version=self._ask_version),
            transactions=CalledTransactions(owner),
            physical_ms=world.time,
            version_ms=world.time,
            reading=lambda *_: nullcontext(),
        )
        self._called = called
        self.users, self.counts = (open_namespace(row, called, durable=True) for row in (USERS, COUNTS))
        pace = Pace(
            time_seconds=lambda: world.time() / 1_000,
            sleep=lambda seconds: world.pass_time(round(seconds * 1_000)),
            random=world.random.random,
        )
        super().__init__(called, "fresh", SLOW_ANSWER, pace)

    @property
    def host(self) -> Any:
        return self._called

    def _ask_version(self) -> Version:
        """Ask the node for a read version; it asks the other nodes."""
        return self._owner.batches.reach(self._member, lambda _: self._owner.read_version(self._member))


@dataclass
class Noted:
    """A transaction that records its reads and writes."""

    client: Client
    transaction: Transaction
    name: bytes
    reads: dict[bytes, bytes | None] = field(default_factory=dict)
    ranges: list[tuple[KeyRange, dict[bytes, bytes]]] = field(default_factory=list)
    writes: dict[bytes, bytes] = field(default_factory=dict)
    adds: dict[bytes, int] = field(default_factory=dict)

    def get(self, *keys: bytes) -> list[bytes | None]:
        namespace = self.client.counts.stored if keys[0] in COUNTERS else self.client.users
        found = self.transaction.get_many(namespace, keys)
        stored = {key: value for key, value in zip(keys, found, strict=True) if key not in self.writes}
        self.reads.update(stored)
        return found

    def scan(self, keys: KeyRange) -> dict[bytes, bytes]:
        found = dict(self.transaction.scan(self.client.users, *keys))
        self.ranges.append((keys, found))
        return found

    def put(self, key: bytes, value: bytes) -> None:
        self.writes[key] = value
        self.transaction.put(self.client.users, key, value)


class Addition(NamedTuple):
    """The additions of a transaction to counters, and a value written elsewhere, to find its version."""

    name: str
    adds: Mapping[bytes, int]
    key: bytes
    value: bytes


def _balance(value: bytes | None) -> int:
    return BALANCE if value is None else int(value.split()[0])


class NodeTransactions:
    """The transactions of a world."""

    def __init__(self, world: Any, batches: NodeBatches, keys: Sequence[bytes]) -> None:
        self.world = world
        self.batches = batches
        self.ledger = MemoryEngine((FAMILY,))
        self._keys = [key[NAMESPACE_BYTES:] for key in keys]
        self._keeper: SimulatedTransactions | None = None
        self._clients: list[Client | None] = [None] * CLIENTS
        self._others: dict[Any, OtherNodes] = {}
        self._ticks = count()
        self._history: list[Observed] = []
        self._aborted: list[tuple[bytes, bytes]] = []
        self._additions: list[Addition] = []
        # In the order in which one transaction does several of them: ranges are read before writes.
        self._works = (
            self._audit,
            self._insert,
            self._append,
            self._read_two_write_one,
            self._transfer,
            self._count,
            self._only_write,
        )

    # The coordinator

    def keeper(self) -> SimulatedTransactions:
        """The transactions of the node that keeps the site; another one if it has died."""
        if self._keeper is None or self._keeper.node is not self._keeper.member.lives[-1]:
            self.restart(None)
        if self._keeper is None:
            raise Unreachable("no node keeps the site")
        return self._keeper

    def restart(self, _: Any) -> None:
        """Make another node keep the site, which recovers the log."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        living = [member for member in self.world.members if member.lives]
        if living:
            self._keeper = SimulatedTransactions(self, self.world.random.choice(living))

    def sweep(self, _: Any) -> None:
        """Abort transactions past their deadline, and send decisions to participants."""
        keeper = self.keeper()
        self.batches.reach(keeper.member, lambda _: keeper.sweep())

    def settle(self, transaction: str) -> Fate:
        """The decision for a partition that finds a prepared write, after a delay."""
        fate = self.keeper().fate(transaction)
        if fate.decision is Decision.UNDECIDED and not self.batches.leaves_open:
            self.world.pass_time(500)
            fate = self.keeper().fate(transaction)
            if fate.decision is Decision.UNDECIDED:
                raise Retryable(f"transaction {transaction} is not decided; try again")
        return fate

    def read_version(self, member: Any) -> Version:
        """The version at which a node lets transactions begin."""
        shared = member.shared
        if shared is None:
            raise Unreachable(f"node {member.number} does not answer")
        if shared not in self._others:
            peers: Any = SimpleNamespace(versions=self._versions_of, quick=None, ask_seconds=1)
            self._others[shared] = OtherNodes(shared, peers, self.world.time)
        waits = SimpleNamespace(wait=lambda seconds: self.world.pass_time(round(seconds * 1_000)))
        with patch.object(asking, "Event", lambda: waits):
            return self._others[shared].read_version()

    def _versions_of(self, number: int) -> PeerVersions:
        def ask(node: Node) -> PeerVersions:
            return PeerVersions(node.committer.read_version(), {})

        return self.batches.reach(self.world.members[number - 1], ask)

    # What clients do

    def run(self, member: Any) -> None:
        """Let a client run a transaction."""
        random, place = self.world.random, self.world.random.randrange(CLIENTS)
        client = self._clients[place]
        if client is None:
            if not member.lives:
                return
            client = Client(self, member)
        # While it works another client stands here, and the node goes on.
        self._clients[place] = None
        self.world.busy[-1] = client
        kind: ReadVersion = "cached" if random.random() < 0.3 else "fresh"
        transaction = client.transaction(timeout=TIMEOUT, read_version=kind, max_staleness=STALENESS_MAX)
        noted = Noted(client, transaction, b"t%d" % next(self.world.numbers))
        chosen = sorted(random.sample(range(len(self._works)), random.randint(1, 3)))
        began = next(self._ticks)
        ended: int | None = None
        try:
            with transaction:
                for number in chosen:
                    self._works[number](noted)
            ended = next(self._ticks)
        except (Conflict, TransactionTooOld, _NotEnough):
            ended = next(self._ticks)
            self._aborted += noted.writes.items()
            noted.writes = {}
        finally:
            self._note(noted, began if kind == "fresh" else EVER, ended)
        self._clients[place] = client

    def _note(self, noted: Noted, began: float, ended: int | None) -> None:
        client, name = noted.client, noted.name.decode()
        if noted.adds and noted.writes:
            self._additions.append(Addition(name, noted.adds, *next(iter(noted.writes.items()))))
        reads = bool(noted.reads or noted.ranges)
        after = client.before if reads else ()
        self._history.append(
            Observed(
                name, began if reads else EVER, ended, noted.reads, noted.ranges, noted.writes, tuple(after)
            )
        )
        client.before = [name] if reads else [*client.before, name]

    @contextmanager
    def observe(self, writes: Mapping[bytes, bytes]) -> Iterator[None]:
        """Record a plain write or a batch, by qualified keys."""
        plain = {key[NAMESPACE_BYTES:]: value for key, value in writes.items()}
        name, ended = f"write {next(iter(plain.values())).decode()}", None
        try:
            yield
            ended = next(self._ticks)
        finally:
            self._history.append(Observed(name, EVER, ended, writes=plain))

    def _append(self, noted: Noted) -> None:
        key = self.world.random.choice(self._keys)
        (found,) = noted.get(key)
        noted.put(key, b"%s %s" % (found or b"", noted.name))

    def _transfer(self, noted: Noted) -> None:
        giver, taker = self.world.random.sample(ACCOUNTS, 2)
        amount = self.world.random.randint(1, 5)
        given, taken = map(_balance, (*noted.get(giver), *noted.get(taker)))
        if given < amount:
            raise _NotEnough
        noted.put(giver, b"%d %s" % (given - amount, noted.name))
        noted.put(taker, b"%d %s" % (taken + amount, noted.name))

    def _insert(self, noted: Noted) -> None:
        """Add a row behind those that there are; any row when all are there."""
        found = noted.scan(ROW_RANGE)
        free = [key for key in ROWS if key not in found]
        noted.put(self.world.random.choice(free[:2] or ROWS), noted.name)

    def _audit(self, noted: Noted) -> None:
        found: Mapping[bytes, bytes | None]
        if self.world.random.random() < 0.5:
            found = noted.scan(ACCOUNT_RANGE)
        else:
            found = {key: noted.get(key)[0] for key in ACCOUNTS}
        total = sum(_balance(found.get(key)) for key in ACCOUNTS)
        if total != BALANCE * len(ACCOUNTS):
            raise Violation("7", "oslo", f"the accounts hold {total}: {found}")

    def _read_two_write_one(self, noted: Noted) -> None:
        pair = self.world.random.sample(self._keys, 2)
        for key in pair:
            noted.get(key)
        noted.put(pair[0], noted.name)

    def _count(self, noted: Noted) -> None:
        key = self.world.random.choice(COUNTERS)
        if self.world.random.random() < 0.5:
            noted.get(key)
        noted.adds[key] = self.world.random.randint(1, 9)
        noted.put(self.world.random.choice(self._keys), noted.name)
        noted.transaction.add(noted.client.counts, key, noted.adds[key])

    def _only_write(self, noted: Noted) -> None:
        for key in self.world.random.sample(self._keys, self.world.random.randint(1, 3)):
            noted.put(key, noted.name)

    # What was observed

    def end(self) -> None:
        """Bring all transactions to their end."""
        if self._keeper is not None:
            self.world.busy.append(self)
            self.sweep(None)
            self.world.busy.pop()

    def judge(self, site: str) -> None:
        """Check the history against the stored records."""
        if self._keeper is not None:
            self._keeper.close()
        orders = {
            key[NAMESPACE_BYTES:]: [held[version] for version in sorted(held)]
            for key, held in self.batches.history.items()
        }
        for key, value in self._aborted:
            if value in orders.get(key, ()):
                raise Violation("7", site, f"an aborted transaction has written {value!r} to {key!r}")
        self._resolve_additions(site)
        try:
            check_serializable(self._history, orders)
        except NotSerializable as error:
            raise Violation("7", site, str(error)) from error

    def _resolve_additions(self, site: str) -> None:
        """Compute the totals that transactions with additions to counters have written."""
        held = {key[NAMESPACE_BYTES:]: versions for key, versions in self.batches.history.items()}
        writes: dict[str, dict[bytes, bytes]] = {}
        totals = dict.fromkeys(COUNTERS, 0)
        for name, adds, key, value in self._additions:
            for version in (version for version, found in held.get(key, {}).items() if found == value):
                for counter, amount in adds.items():
                    totals[counter] += amount
                    writes.setdefault(name, {})[counter] = held.get(counter, {}).get(version, b"nothing")
        for counter, total in totals.items():
            found = int(max(held.get(counter, {}).items(), default=(0, b"0"))[1])
            if found != total:
                raise Violation("7", site, f"{total} was added to {counter!r}, which holds {found}")
        self._history = [
            replace(each, writes={**each.writes, **writes.get(each.name, {})}) for each in self._history
        ]
