"""A node that shares its engine: it registers, beats, watches the others, and restarts when fenced.

A node beats once a second.  It answers reads of the newest state only while its last beat *began* less than
three seconds ago, and it is declared dead by another node that has seen the same beat for five seconds of its
own monotonic time.  No two clocks are compared for this.  A wrong declaration costs a restart, never data.

This module starts no threads: those of its caller call `SharedNode.beat` and `SharedNode.watch` once a
second.
"""

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from floodmark.clock import HybridClock, TimeSource
from floodmark.clock.hybrid import SKEW_MS_MAX as CLOCK_SKEW_MS_MAX
from floodmark.engine import Engine, Guard
from floodmark.model.errors import ClockSkew, FloodmarkError, InvalidOption, NodeFenced, SiteLocked
from floodmark.model.limits import NODE_LEASE_MS_MAX, NODE_SILENT_MS_MAX, NODE_SKEW_MS_MAX, NODES_MAX
from floodmark.model.version import Version
from floodmark.partition.commit.entering import Entrance
from floodmark.partition.families import BEAT, CEILING, DRAINED, FENCE, KEEPER, META
from floodmark.partition.fencing import (
    FencedEngine,
    Keeper,
    LeasedEngine,
    encode_number,
    fence_guard,
    keeper_guard,
    load_keeper,
    load_number,
    numbered,
)
from floodmark.partition.generations import GenerationsEngine, Table
from floodmark.partition.layout import read_metadata
from floodmark.partition.node import ClosedMap, EngineBound, Node, resolved_versions
from floodmark.partition.takeover import pass_ceiling, take_over

BEAT_MS: Final = 1_000
LEASE_MS: Final = NODE_LEASE_MS_MAX
DEAD_MS: Final = NODE_SILENT_MS_MAX
SKEW_MS_MAX: Final = NODE_SKEW_MS_MAX
REGISTER_ATTEMPTS_MAX: Final = 10
AGES_MS: Final = 1 << 40
# How often, and at which interval, a process checks whether another runs under its number.  Together they
# last as long as a lease: a process whose beats have stopped answers no more reads by then.
CLAIM_LOOKS: Final = 6
CLAIM_LOOK_SECONDS: Final = LEASE_MS / 1_000 / CLAIM_LOOKS

_log = logging.getLogger("floodmark.partition")


class Beat(msgspec.Struct, frozen=True):
    """The row that a node writes once a second, for the other nodes to read."""

    counter: int
    wall_ms: int
    url: str = ""
    # Changes written since the previous beat.
    load: int = 0
    # The oldest version that readers at this node need, by namespace; 0 stands for all namespaces.
    held: dict[int, Version] = {}
    # When this incarnation began.
    since_ms: int = 0
    # How long the write of the previous beat took; None if unknown, or if this beat is the first.
    took_ms: int | None = None


_decode_beat: Final = msgspec.json.Decoder(Beat).decode


class _Seen(msgspec.Struct, frozen=True):
    """A beat of another node, and the span of this node's monotonic time in which it was written.

    `read` pairs a wall time of the other node with a monotonic time of this node, after which it was read.
    """

    beat: Beat
    after_ms: int
    by_ms: int
    read: tuple[int, int] | None = None

    def followed_by(self, beat: Beat, after_ms: int, by_ms: int) -> "_Seen":
        """The next beat.  Its `took_ms` bounds the moment at which the other node read this beat's time."""
        read = self.read
        if beat.took_ms is not None and beat.counter == self.beat.counter + 1:
            read = self.beat.wall_ms, self.after_ms - beat.took_ms
        return _Seen(beat, after_ms, by_ms, read)


def load_beats(engine: Engine) -> dict[int, Beat]:
    """The last beat of each node."""
    return {node: _decode_beat(stored) for node, stored in _stored_beats(engine).items()}


def _stored_beats(engine: Engine) -> dict[int, bytes]:
    return {int.from_bytes(key[len(BEAT) :], "big"): stored for key, stored in read_metadata(engine, BEAT)}


def claim(engine: Engine, wanted: int | None, wait: Callable[[float], object]) -> int:
    """Claim a number for a process that is about to register: the `wanted` one, or the lowest that is free.

    A number is taken while its beats continue.  If they have stopped, the lease of the process that had it
    has ended, and the claim raises its fence.  Raises SiteLocked if the wanted number is taken, or none is
    free.
    """
    if wanted is not None:
        require_number(wanted)
    while True:
        first = _stored_beats(engine)
        taken = _find_taken(engine, first, wanted, wait)
        free = [each for each in ([wanted] if wanted else range(1, NODES_MAX)) if each not in taken]
        if not free:
            raise SiteLocked(
                f"another process runs as node {wanted}; give each process a number of its own"
                if wanted
                else f"all {NODES_MAX - 1} numbers of nodes are in use; stop a node first",
                node=wanted,
            )
        node = free[0]
        last, incarnation = first.get(node), load_number(engine, numbered(FENCE, node))
        claimed = Beat(1 if last is None else _decode_beat(last).counter + 1, 0)
        rows = [
            (META, numbered(BEAT, node), msgspec.json.encode(claimed)),
            (META, numbered(FENCE, node), encode_number(incarnation + 1)),
        ]
        # Not if a beat was written after the last check: it may have begun a lease.
        if engine.write(rows, [Guard(META, numbered(BEAT, node), last), fence_guard(node, incarnation)]):
            return node


def _find_taken(
    engine: Engine, first: Mapping[int, bytes], wanted: int | None, wait: Callable[[float], object]
) -> set[int]:
    """The nodes whose beats have changed since `first`, among those with beats, or only the wanted one."""
    taken: set[int] = set()
    for _ in range(CLAIM_LOOKS):
        if not ({wanted} if wanted else first.keys()) & (first.keys() - taken):
            break
        wait(CLAIM_LOOK_SECONDS)
        taken |= {node for node, beat in _stored_beats(engine).items() if beat != first.get(node)}
    return taken


def require_number(node: int) -> None:
    """Raise InvalidOption unless `node` is a number that a node of a shared engine may have."""
    if type(node) is not int or not 0 < node < NODES_MAX:
        raise InvalidOption(f"a node's number lies between 1 and {NODES_MAX - 1}, and is not {node!r:.20}")


def drained_nodes(engine: Engine) -> set[int]:
    """The nodes that give their partitions away and get none; a node that has restarted is not drained."""
    marks = {int.from_bytes(key[len(DRAINED) :], "big"): mark for key, mark in read_metadata(engine, DRAINED)}
    return {node for node, mark in marks.items() if engine.get(META, numbered(FENCE, node)) == mark}


def register(engine: Engine, node: int, own: Container[int] | None = None) -> FencedEngine:
    """Begin an incarnation of a node: raise its fence, so that earlier ones cannot write any more.

    A process that had the number before passes the times at which its incarnations began as `own`.  Raises
    SiteLocked if the last beat is of another process, which has claimed the number since.
    """
    require_number(node)
    for _ in range(REGISTER_ATTEMPTS_MAX):
        before = load_number(engine, numbered(FENCE, node))
        last = engine.get(META, numbered(BEAT, node))
        if own is not None and last is not None and _decode_beat(last).since_ms not in own:
            raise SiteLocked(
                f"another process has started as node {node}; give each process a number of its own",
                node=node,
            )
        if raise_fence(engine, node, before, Guard(META, numbered(BEAT, node), last)):
            return FencedEngine(engine, node, before + 1)
    raise NodeFenced(
        f"node {node} could not start: other processes start with the same number, or declare it dead. Give "
        "each process a number of its own",
        node=node,
    )


def raise_fence(engine: Engine, node: int, incarnation: int, *guards: Guard) -> bool:
    """End an incarnation of a node; False if it had ended already, or a guard fails."""
    raised = [(META, numbered(FENCE, node), encode_number(incarnation + 1))]
    if not engine.write(raised, [fence_guard(node, incarnation), *guards]):
        return False
    engine.sync()
    return True


class Membership:
    """One incarnation of a node among the others: its beats, its lease, and the beats of the others."""

    def __init__(
        self, engine: FencedEngine, *, url: str, time_source: TimeSource, elapsed_source: TimeSource
    ) -> None:
        self._engine = engine
        self.url = url
        self._time_source = time_source
        self._elapsed_source = elapsed_source
        self.since_ms = time_source()
        self._began_ms: int | None = None
        self._took_ms: int | None = None
        last = load_beats(engine).get(engine.node)
        self._counter = 0 if last is None else last.counter
        self._looked_ms: int | None = None
        self._seen: dict[int, _Seen] = {}
        self._refusal: FloodmarkError | None = None

    def beat(self, load: int = 0, held: Mapping[int, Version] | None = None) -> None:
        """Write a beat, which gives this node a lease from the moment at which the call began."""
        began_ms = self._elapsed_source()
        self._counter += 1
        beat = Beat(
            self._counter,
            self._time_source(),
            self.url,
            load,
            dict(held or {}),
            self.since_ms,
            self._took_ms,
        )
        key = numbered(BEAT, self._engine.node)
        # Unknown if the write fails.
        self._took_ms = None
        self._engine.write([(META, key, msgspec.json.encode(beat))])
        self._took_ms = self._elapsed_source() - began_ms
        self._began_ms = began_ms

    def require(self) -> None:
        """Raise unless this node has a lease; call it after each read of the newest state."""
        if self._refusal is not None:
            raise self._refusal.again()
        began_ms = self._began_ms
        if self._engine.is_fenced:
            raise self._engine.fenced()
        if began_ms is None or self._elapsed_source() - began_ms >= LEASE_MS:
            raise NodeFenced(
                f"node {self._engine.node} could not beat for {LEASE_MS // 1_000} seconds, and "
                "another node may serve its partitions; ask for the partition map again",
                node=self._engine.node,
            )

    def look(self) -> list[int]:
        """Read the beats of the others; returns the nodes whose beats have not changed for `DEAD_MS`."""
        beats = load_beats(self._engine)
        # After the beats were read: a time that is too late only delays the declaration.
        now_ms = self._elapsed_source()
        if self._looked_ms is not None and now_ms - self._looked_ms >= LEASE_MS:
            # A node that could not read the beats has not seen that the others were silent.
            self._seen, self._looked_ms = {}, None
        # The first look does not show when the beats were written.
        after_ms = now_ms - AGES_MS if self._looked_ms is None else self._looked_ms
        self._looked_ms = now_ms
        beats.pop(self._engine.node, None)
        self._seen = {
            node: _Seen(beat, after_ms, now_ms)
            if (seen := self._seen.get(node)) is None
            else seen
            if seen.beat == beat
            else seen.followed_by(beat, after_ms, now_ms)
            for node, beat in beats.items()
        }
        return [node for node, seen in self._seen.items() if now_ms - seen.by_ms >= DEAD_MS]

    def living(self) -> dict[int, Beat]:
        """The other nodes whose beats have changed within a lease, with their last beats."""
        now_ms = self._elapsed_source()
        return {node: seen.beat for node, seen in self._seen.items() if now_ms - seen.by_ms < LEASE_MS}

    def beating(self) -> set[int]:
        """The other nodes that have beats, as of the last look; dead ones included."""
        return {*self._seen}

    def urls(self) -> dict[int, str]:
        """The URLs of all nodes that have one, by the last beats that were seen; dead ones included."""
        told = {node: seen.beat.url for node, seen in self._seen.items()}
        return {node: url for node, url in {**told, self._engine.node: self.url}.items() if url}

    def watch_clock(self) -> FloodmarkError | None:
        """Refuse to serve while this clock differs too much from most others; returns the refusal."""
        living = self.living()
        away = [offset for node in living if abs(offset := self._offset_ms(self._seen[node])) > SKEW_MS_MAX]
        self._refusal = None
        if 2 * len(away) > len(living):
            direction = "ahead of" if away[0] > 0 else "behind"
            self._refusal = ClockSkew(
                f"the clock of node {self._engine.node} is {abs(away[0])} ms {direction} other nodes; "
                f"at most {SKEW_MS_MAX} ms are tolerated. Set it right; the node then serves again by itself",
                ahead_ms=away[0],
            )
        return self._refusal

    def _offset_ms(self, seen: _Seen) -> int:
        """The least by which this clock is ahead of another node's; negative if it is behind."""
        now_ms = self._elapsed_source()
        wall_ms = self._time_source()
        behind_ms = min(0, wall_ms - (seen.beat.wall_ms + now_ms - seen.by_ms))
        if seen.read is None:
            return behind_ms
        read_ms, after_ms = seen.read
        return behind_ms + max(0, wall_ms - (read_ms + now_ms - after_ms))


class SharedNode:
    """A node that shares its engine, through all its incarnations; `node` is the present one."""

    def __init__(
        self,
        engine: Engine,
        number: int,
        site_id: int,
        *,
        time_source: TimeSource,
        elapsed_source: TimeSource,
        url: str = "",
        skew_ms_max: int = CLOCK_SKEW_MS_MAX,
        load_generations: Callable[[Engine], tuple[Table, Iterable[bytes]]] = lambda _: ({}, ()),
        on_start: Callable[["SharedNode"], None] = lambda _: None,
    ) -> None:
        self.number = number
        self.entrance = Entrance(engine.limits)
        self.incarnations = self.takeovers = 0
        # The versions that readers at this node need, which its beats contain.
        self.held: Callable[[], Mapping[int, Version]] = dict
        self._is_up = False
        # When the incarnations of this process began.
        self._own: set[int] = set()
        self._shared = engine
        self._site_id = site_id
        self._time_source = time_source
        self._elapsed_source = elapsed_source
        self._url = url
        self._skew_ms_max = skew_ms_max
        self._written = 0
        self._load_generations = load_generations
        # Called with each new incarnation.
        self._on_start = on_start
        self.start()

    def start(self) -> None:
        """Begin a new incarnation, and serve the partitions that the map gives to this node.

        If it fails, the last incarnation stays as it is, fenced, and the next `watch` tries again.
        """
        engine = register(self._shared, self.number, self._own or None)
        membership = Membership(
            engine, url=self._url, time_source=self._time_source, elapsed_source=self._elapsed_source
        )
        self._own.add(membership.since_ms)
        # Before the map is loaded: no other node declares this one dead while it starts.
        membership.beat()
        ceiling = EngineBound(engine, key=numbered(CEILING, self.number))
        clock = HybridClock(
            self._time_source,
            step=NODES_MAX,
            offset=self.number,
            skew_ms_max=self._skew_ms_max,
            upper_bound=ceiling,
        )
        reads = GenerationsEngine(LeasedEngine(engine, membership))
        generations = GenerationsEngine(engine, self._site_id, reads=reads)
        # After the engine has read the epoch of the catalog.
        generations.reload = lambda: generations.show(*self._load_generations(engine))
        generations.reload()
        engine.load_catalog = generations.reload
        node = Node(
            generations, clock, self._site_id, number=self.number, reads=reads, entrance=self.entrance
        )
        node.storage.keeper_guards = engine.keeper_guards
        node.storage.entrance.catch_up = partial(_catch_up, node, engine)
        self.engine, self.membership, self.clock, self.node = engine, membership, clock, node
        # Whether this incarnation has held the keeper's lease.
        self._has_kept = False
        self._written = 0
        self._on_start(self)
        self._is_up = True
        self.incarnations += 1
        _log.info("node %d serves as incarnation %d", self.number, engine.incarnation)

    @property
    def url(self) -> str:
        """Where clients and other nodes reach this node; empty if they cannot."""
        return self._url

    def advertise(self, url: str) -> None:
        """Write a beat with the URL of this node."""
        self._url = self.membership.url = url
        self.beat()

    def beat(self) -> None:
        """Write a beat.  Raises NodeFenced if another node has declared this one dead."""
        written = self.node.written()[0]
        load, self._written = max(0, written - self._written), written
        self.membership.beat(load, self.held())

    def watch(self) -> None:
        """Read the beats of the others, and take over from dead nodes.  A node that was fenced restarts."""
        if not self._is_up:
            self.start()
        try:
            if self.engine.is_fenced:
                raise self.engine.fenced()
            dead = {*self.membership.look(), *self._stopped()}
            refusal = self.membership.watch_clock()
            self.node.storage.refuse(refusal)
            self.node.refresh()
            if refusal is None and self._may_lead():
                for other in dead:
                    self.take_over(other)
                self._keep()
        except NodeFenced:
            _log.warning("node %d was fenced and starts again", self.number)
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Replace the present incarnation by another."""
        self._is_up = False
        retire(self.node, self.engine.fenced())
        self.start()

    def _stopped(self) -> set[int]:
        """The nodes that have left partitions or the keeper's lease, and removed their beats."""
        keeper = load_keeper(self._shared)
        owners = {row.node for row in self.node.rows} | ({keeper.node} if keeper is not None else set())
        return owners - self.membership.beating() - {self.number}

    def _may_lead(self) -> bool:
        """Whether this node may take over and keep: if it has a URL and is not drained, or is alone."""
        reachable = [node for node, beat in self.membership.living().items() if beat.url]
        is_drained = bool(reachable) and self.number in drained_nodes(self._shared)
        return (bool(self._url) and not is_drained) or not reachable

    def take_over(self, dead: int) -> None:
        """Declare a node dead, if that has not been done, and distribute its partitions."""
        keeper = load_keeper(self._shared)
        if not any(row.node == dead for row in self.node.rows) and (keeper is None or keeper.node != dead):
            return
        incarnation = load_number(self._shared, numbered(FENCE, dead))
        raised = encode_number(incarnation + 1)
        if self.engine.write([(META, numbered(FENCE, dead), raised)], [fence_guard(dead, incarnation)]):
            taken = take_over(self.node, dead, incarnation + 1, self._heirs())
            self.takeovers += 1
            _log.warning("node %d was declared dead; %d partitions have new owners", dead, taken)

    def _heirs(self) -> list[int]:
        """The other nodes that can be given partitions."""
        living, drained = self.membership.living(), drained_nodes(self._shared)
        return [node for node, beat in living.items() if (beat.url or not self._url) and node not in drained]

    # The keeper

    def take_keeper(self) -> bool:
        """Take the keeper's lease from its holder, dead or alive; False if another node was faster."""
        return self._take_keeper(load_keeper(self._shared))

    def _take_keeper(self, holder: Keeper | None) -> bool:
        if self._has_kept:
            # A new fence: work that this node began as keeper before must not continue under the new lease.
            self._begin_anew()
        term = 0 if holder is None else holder.term + 1
        keeper = Keeper(self.number, self.engine.incarnation, term)
        self.engine.keeper = None
        if not self.engine.write([(META, KEEPER, msgspec.json.encode(keeper))], [keeper_guard(holder)]):
            return False
        self.engine.sync()
        # This node loads what the last keeper has written before it writes itself, at higher versions.
        if holder is not None:
            pass_ceiling(self.clock, self._shared, holder.node)
        with self.node.storage.exclusive():
            self.engine.reload_catalog()
        self.engine.keeper = keeper
        self._has_kept = True
        return True

    def _keep(self) -> None:
        """Take the lease if its holder was fenced, or never was."""
        holder = load_keeper(self._shared)
        # The lease is this node's own if it was stored by a write that seemed to fail.
        is_lost = holder is not None and holder.node == self.number and holder != self.engine.keeper
        if (
            holder is None
            or is_lost
            or load_number(self._shared, numbered(FENCE, holder.node)) != holder.incarnation
        ):
            self._take_keeper(holder)

    def pass_ceilings(self) -> Sequence[Guard]:
        """Move the clock past every version that other nodes may have stamped or announced.

        Returns guards that hold until a ceiling changes; they include the nodes that have none yet.
        """
        keys = [numbered(CEILING, node) for node in range(NODES_MAX) if node != self.number]
        ceilings = self.engine.get_many(META, keys)
        self.clock.pass_version(max((int.from_bytes(each or b"", "big") for each in ceilings), default=0))
        return [Guard(META, *each) for each in zip(keys, ceilings, strict=True)]

    def resolved_versions(self) -> dict[int, Version]:
        """The resolved version of each partition that this node serves."""
        return resolved_versions(self.node)


def _catch_up(node: Node, engine: FencedEngine) -> None:
    """Load the catalog between two rounds, if it has changed."""
    if engine.is_catalog_changed():
        with node.storage.settled():
            engine.reload_catalog()


def retire(node: Node, refusal: FloodmarkError) -> None:
    """Stop serving, since another node has taken over; writes nothing."""
    serving, node.map = node.map.partitions, ClosedMap(refusal=refusal)
    for partition in serving:
        partition.retired = True
    node.storage.refuse(refusal)
    node.committer.prepared.release()
    node.committer.followers.wake_all()
