"""The fence of a node that shares its engine with others: no write of a node that was replaced happens.

Each node has an incarnation number in the engine, its fence.  The node raises it when it starts, and another
node raises it to declare the node dead.  Every write is guarded by the fence, inside the engine's own batch,
so a node that was cut off, suspended or slow cannot write once another has taken over.

| key              | value                                                                            |
|------------------|----------------------------------------------------------------------------------|
| `fence/<node>`   | the incarnation number                                                           |
| `ceiling/<node>` | the version above which the node neither stamps nor announces: its clock's bound |
| `beat/<node>`    | a counter, the node's wall time, its url and its load, once a second             |
| `keeper`         | node and incarnation that may write what concerns the whole site, and a term     |

**Site-wide rows.**  Metadata rows that no partition owns (catalog, feeds, subscriptions, topology, positions
of links, safe points, retention) and all ledgers (the logs of transactions) belong to the keeper.  The engine
of a node finds them by family and key and adds the keeper's guard, so no caller can forget it.  Garbage
collection removes records of all nodes: it passes the keeper's guard itself (`keeper_guards`).

**The catalog's epoch.**  A change of a namespace or of the topology raises it, and every write of records is
guarded by the epoch that the node has loaded: no node writes by settings that were changed.  A round that
this guard refuses was not written; the node loads the catalog and runs the round again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

import msgspec

from floodmark.engine import Engine, Guard, Row, Write, WriteRow, durable_writes
from floodmark.model.errors import CatalogChanged, FloodmarkError, NodeFenced, NotKeeper
from floodmark.model.version import Version
from floodmark.partition.conflicts import CONFLICTS
from floodmark.partition.families import (
    BEAT,
    CATALOG,
    CATALOG_EPOCH,
    CEILING,
    DATA,
    EXPIRING,
    EXPIRING_INDEXED,
    FENCE,
    INCARNATION,
    KEEPER,
    LEDGER,
    LOGS,
    META,
    NEXT_ID,
    PARTITIONS,
    TOPOLOGY,
)
from floodmark.partition.layout import read_metadata
from floodmark.partition.prepared.outcomes import BATCHES
from floodmark.partition.prepared.writes import PREPARED

# The rows that nodes write for themselves and their partitions; all other metadata belongs to the keeper.
_OF_NODES: Final = (
    *(BEAT, CEILING, EXPIRING, EXPIRING_INDEXED, FENCE, KEEPER, LOGS),
    *(BATCHES, CONFLICTS, NEXT_ID, PARTITIONS, PREPARED),
)
_RAISING: Final = (CATALOG, INCARNATION, TOPOLOGY)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Keeper(msgspec.Struct, frozen=True):
    """The holder of the keeper's lease.  Two leases of one incarnation differ in their terms."""

    node: int
    incarnation: int
    term: int


def numbered(prefix: bytes, node: int) -> bytes:
    """The key of a node's own row."""
    return prefix + node.to_bytes(1, "big")


def encode_number(number: int) -> bytes:
    """Encode a number for a row of the metadata."""
    return number.to_bytes(8, "big")


def load_number(engine: Engine, key: bytes) -> int:
    """A stored number; 0 if there is none."""
    stored = engine.get(META, key)
    return 0 if stored is None else int.from_bytes(stored, "big")


def highest_ceiling(engine: Engine) -> Version:
    """A version above which no node has stamped or announced anything."""
    return max((int.from_bytes(stored, "big") for _, stored in read_metadata(engine, CEILING)), default=0)


def fence_guard(node: int, incarnation: int) -> Guard:
    """Holds while a node's fence is that of an incarnation; 0 stands for a node that never started."""
    return Guard(META, numbered(FENCE, node), encode_number(incarnation) if incarnation else None)


def load_keeper(engine: Engine) -> Keeper | None:
    """The holder of the keeper's lease, alive or dead."""
    stored = engine.get(META, KEEPER)
    return None if stored is None else msgspec.json.decode(stored, type=Keeper)


def keeper_guard(keeper: Keeper | None) -> Guard:
    """Holds while the lease is as it was read."""
    return Guard(META, KEEPER, None if keeper is None else msgspec.json.encode(keeper))


class NodeLease(Protocol):
    """The lease under which a node may answer reads of the newest state."""

    def require(self) -> None:
        """Raise `NodeFenced` if the node has not written its beat for too long."""
        ...


class FencedEngine:
    """The engine of one incarnation of a node: each write is guarded by the node's fence.

    A write whose own guards fail raises: `NodeFenced`, `NotKeeper` or `CatalogChanged`.  Guards of the caller
    that fail make it return False, as with any engine.  `is_fenced` is set with the first `NodeFenced`.
    """

    def __init__(self, engine: Engine, node: int, incarnation: int) -> None:
        self.limits = engine.limits
        self.node = node
        self.incarnation = incarnation
        self.keeper: Keeper | None = None
        self.catalog_epoch = load_number(engine, CATALOG_EPOCH)
        self.is_fenced = False
        # Called in the turn, before `CatalogChanged` is raised.
        self.load_catalog: Callable[[], None] = lambda: None
        self.shared = engine
        self._write_durably = durable_writes(engine)
        self._fence = fence_guard(node, incarnation)

    def reload_catalog(self) -> None:
        """Load the catalog, and then set the epoch, which is read before it."""
        epoch = load_number(self.shared, CATALOG_EPOCH)
        self.load_catalog()
        # Not before: another thread would take the old catalog for the new one.
        self.catalog_epoch = epoch

    def is_catalog_changed(self) -> bool:
        """Whether another node has changed the catalog since this one has loaded it."""
        return load_number(self.shared, CATALOG_EPOCH) != self.catalog_epoch

    def keeper_guards(self) -> Sequence[Guard]:
        """The guards of a write of records that only the keeper may make; raises `NotKeeper`."""
        return (self._require_keeper(),)

    def require_keeper(self) -> None:
        """Raise `NotKeeper` unless this node holds the lease, as the engine has it now."""
        self._explain(self.keeper_guards())

    # Writes

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        return self.guarded(self.shared.write, rows, guards)

    def write_durably(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        return self.guarded(self._write_durably, rows, guards)

    def guarded(self, write: Write, rows: Iterable[WriteRow], guards: Sequence[Guard]) -> bool:
        """Write rows with the guards of the node as well as the caller's."""
        batch = list(rows)
        own = [self._fence]
        if any(_is_site_wide(family, key) for family, key, _ in batch):
            own.append(self._require_keeper())
        raises = any(family == META and key.startswith(_RAISING) for family, key, _ in batch)
        if raises or any(family == DATA for family, _, _ in batch):
            own.append(self._catalog_guard())
        if raises:
            batch.append((META, CATALOG_EPOCH, encode_number(self.catalog_epoch + 1)))
        if not write(batch, (*own, *guards)):
            self._explain((*own, *guards))
            return False
        self.catalog_epoch += raises
        return True

    def delete_range(self, family: str, start: bytes, end: bytes, guards: Sequence[Guard] = ()) -> bool:
        own = [self._fence]
        if family != META or _is_site_wide(family, start):
            own.append(self._require_keeper())
        if not self.shared.delete_range(family, start, end, (*own, *guards)):
            self._explain(own)
            return False
        return True

    def _catalog_guard(self) -> Guard:
        epoch = self.catalog_epoch
        return Guard(META, CATALOG_EPOCH, encode_number(epoch) if epoch else None)

    def _require_keeper(self) -> Guard:
        if self.keeper is None:
            raise _not_keeper(self.node, load_keeper(self.shared))
        return keeper_guard(self.keeper)

    def _explain(self, own: Sequence[Guard]) -> None:
        """Raise if a guard that the node added has failed: fence, keeper or catalog epoch.

        The fence can be checked after the write, because it never gets an old value back.
        """
        failed = [each.key for each in own if self.shared.get(each.family, each.key) != each.expected]
        if self._fence.key in failed:
            self.is_fenced = True
            raise self.fenced()
        if KEEPER in failed:
            self.keeper = None
            raise _not_keeper(self.node, load_keeper(self.shared))
        if CATALOG_EPOCH in failed:
            self.reload_catalog()
            raise CatalogChanged(
                "another node has changed a namespace meanwhile; nothing was written. Try again"
            )

    def fenced(self) -> NodeFenced:
        """The error of a node that was replaced."""
        return NodeFenced(
            f"node {self.node} was declared dead by another node, which serves its partitions now; nothing "
            "was written. Ask for the partition map again; the node starts anew by itself",
            node=self.node,
        )

    # Reads

    def get(self, family: str, key: bytes) -> bytes | None:
        return self.shared.get(family, key)

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        return self.shared.get_many(family, keys)

    def ceiling(self, family: str, key: bytes, prefix: bytes = b"") -> Row | None:
        return self.shared.ceiling(family, key, prefix)

    def ceilings(
        self, family: str, prefixes: Sequence[bytes], starts: Sequence[bytes] | None = None
    ) -> list[Row | None]:
        return self.shared.ceilings(family, prefixes, starts)

    def scan(
        self,
        family: str,
        start: bytes,
        end: bytes | None,
        *,
        rows_max: int,
        bytes_max: int,
        reverse: bool = False,
    ) -> list[Row]:
        return self.shared.scan(family, start, end, rows_max=rows_max, bytes_max=bytes_max, reverse=reverse)

    def sync(self) -> None:
        self.shared.sync()

    def recover(self) -> None:
        self.shared.recover()

    def sizes(self) -> Mapping[str, int]:
        return self.shared.sizes()

    def close(self) -> None:
        """Remove the node's beat, so that other nodes take over at once, and close the engine."""
        with suppress(FloodmarkError):
            self.write([(META, numbered(BEAT, self.node), None)])
        self.shared.close()


def _leased(
    read: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """A read that checks the lease before it returns."""

    @wraps(read)
    def leased(engine: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        found = read(engine, *args, **kwargs)
        engine.lease.require()
        return found

    return leased


class LeasedEngine(FencedEngine):
    """The engine as partitions read it: each read checks the lease before it returns."""

    def __init__(self, engine: FencedEngine, lease: NodeLease) -> None:
        super().__init__(engine, engine.node, engine.incarnation)
        self.lease = lease

    get = _leased(FencedEngine.get)
    get_many = _leased(FencedEngine.get_many)
    ceiling = _leased(FencedEngine.ceiling)
    ceilings = _leased(FencedEngine.ceilings)
    scan = _leased(FencedEngine.scan)


def _is_site_wide(family: str, key: bytes) -> bool:
    return family == LEDGER or (family == META and not key.startswith(_OF_NODES))


def _not_keeper(node: int, keeper: Keeper | None) -> NotKeeper:
    holder = "no node" if keeper is None else f"node {keeper.node}"
    return NotKeeper(
        f"node {node} does not keep the site: {holder} does. Nothing was written; send the call there",
        node=None if keeper is None else keeper.node,
    )
