"""Subscriptions as consumer groups: XGROUP, XREADGROUP, XACK, XPENDING and XAUTOCLAIM.

The server consumes the subscription, and divides its deliveries between the consumers of the group.  An
acknowledgement is stored before it is answered.  Only the server's memory holds which consumer has a
delivery: after a restart, all unacknowledged changes are delivered as new ones.  Values are read again and
not kept, because a subscription may have thousands of unacknowledged changes.

The name of a subscription is unique in its site, and that of a group in its stream.  So the subscription of a
group has the group's name, or `<namespace>.<group>` if another namespace has a subscription of that name.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Lock
from typing import Any, Final, NamedTuple

from floodmark.clock import monotonic_ms
from floodmark.feed.subscription.acknowledgement import ChangePosition
from floodmark.feed.subscription.consumer import Subscription, SubscriptionOptions
from floodmark.feed.subscription.subscriptions import SubscriptionRow
from floodmark.model.access import Role
from floodmark.model.errors import FloodmarkError
from floodmark.model.limits import PAGE_ROWS_MAX, RESP_GROUPS_MAX
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import OnGeneration
from floodmark.server.resp.records import Space
from floodmark.server.resp.scans import (
    FIRST,
    LAST,
    EntryId,
    block,
    parse_id,
    read_entries,
    read_stream_options,
    render_entry,
    stream_space,
    take_entries,
)
from floodmark.server.resp.session import Session
from floodmark.server.resp.table import SYNTAX, TABLE, Arguments, CommandError, integer, read_options, word
from floodmark.site.site import Site
from floodmark.wire.resp import OK

HOLDER: Final = "resp"
AUTOCLAIM_COUNT: Final = 100


class PendingDelivery(NamedTuple):
    """A delivery that is not acknowledged yet."""

    consumer: bytes
    delivered_at_ms: int
    deliveries: int


class ConsumerGroup:
    """A subscription that the server consumes for a group.  Callers hold its lock."""

    def __init__(self, site: Site, row: SubscriptionRow, holder: str, on_generation: OnGeneration) -> None:
        spec = row.spec
        self.lock = Lock()
        self.pending: dict[EntryId, PendingDelivery] = {}
        self.subscription: Subscription = site.subscribe(
            spec.name,
            spec.namespace,
            start_key=spec.keys.start,
            end_key=spec.keys.end,
            holder=holder,
            unacked_max=spec.unacked_max,
            on_generation=on_generation,
            options=SubscriptionOptions(follow=False),
        )
        self.on_generation = on_generation
        self._unacked_max = spec.unacked_max

    def deliver(self, consumer: bytes, count: int, *, keeps: bool) -> list[Any]:
        """The next entries.  With `keeps` they are pending at the consumer, else acknowledged at once."""
        room = self._unacked_max - len(self.pending)
        if room <= 0:
            raise CommandError("TRYAGAIN the group has too many unacknowledged entries; XACK some first")
        entries: list[Any] = []
        for delivery in take_entries(iter(self.subscription), min(count, room)):
            entry = EntryId(delivery.position.version, delivery.position.index)
            if keeps:
                self.pending[entry] = PendingDelivery(consumer, monotonic_ms(), 1)
            else:
                delivery.acknowledge()
            entries.append(render_entry(entry, delivery.change))
        return entries

    def acknowledge(self, entries: Iterable[EntryId]) -> int:
        """Acknowledge entries, durably; returns how many of them were pending."""
        found = {entry for entry in entries if entry in self.pending}
        for entry in found:
            self.subscription.acknowledge(ChangePosition(entry.version, entry.number))
        if found:
            self.subscription.flush()
        for entry in found:
            del self.pending[entry]
        return len(found)

    def hand_over(self, entries: Iterable[EntryId], consumer: bytes, *, delivers: bool = True) -> None:
        """Assign pending entries to a consumer; with `delivers`, count this as a delivery."""
        for entry in entries:
            deliveries = self.pending[entry].deliveries + delivers
            self.pending[entry] = PendingDelivery(consumer, monotonic_ms(), deliveries)

    def find(self, start: EntryId, end: EntryId, wanted: Callable[[PendingDelivery], bool]) -> list[EntryId]:
        """The ids of the wanted pending entries from one id to another, in order."""
        found = (entry for entry, held in self.pending.items() if start <= entry <= end and wanted(held))
        return sorted(found)


class Groups:
    """The groups that the server consumes."""

    def __init__(self, site: Site, node: int) -> None:
        self._site = site
        # Holders of one name take a subscription over from each other; nodes must not.
        self._holder = f"{HOLDER}-{node}" if node else HOLDER
        self._open: dict[tuple[str, str], ConsumerGroup] = {}
        self._lock = Lock()

    def use(
        self,
        space: Space,
        name: str,
        act: Callable[[ConsumerGroup], Any],
        chosen: OnGeneration | None = None,
    ) -> Any:
        """Act on a group under its lock.  An error closes it, as its lease may be lost; a later call reopens.

        `chosen` is what a newly opened group does where a data set was published; by default, what its
        subscription says.
        """
        with self._lock:
            group = self._open.get((space.name, name))
            if group is None:
                if len(self._open) >= RESP_GROUPS_MAX:
                    raise CommandError(f"ERR this server consumes {RESP_GROUPS_MAX} groups already")
                group = self._open[space.name, name] = self._find(space, name, chosen)
        try:
            with group.lock:
                return act(group)
        except FloodmarkError:
            with self._lock:
                self._open.pop((space.name, name), None)
            with suppress(FloodmarkError):
                group.subscription.close()
            raise

    def _find(self, space: Space, name: str, chosen: OnGeneration | None) -> ConsumerGroup:
        row = find_subscription(self._site, space, name)[1]
        if row is None:
            raise CommandError(f"NOGROUP No such key 'changes:{space.name}' or consumer group '{name[:64]}'")
        begins = row.snapshot or 0
        is_live = bool(row.live) and row.live[0].version <= begins
        if row.spec.keys != KeyRange() or row.through < begins or is_live:
            raise CommandError(
                f"ERR subscription {row.name!r} reads a part of the keys, or has not finished the snapshot "
                "that it begins with; consume it with floodmark"
            )
        return ConsumerGroup(self._site, row, self._holder, chosen or row.spec.on_generation)

    def close(self) -> None:
        """Release all subscriptions."""
        with self._lock:
            groups, self._open = [*self._open.values()], {}
        for group in groups:
            with suppress(FloodmarkError):
                group.subscription.close()


def find_subscription(site: Site, space: Space, group: str) -> tuple[str, SubscriptionRow | None]:
    """The subscription of a group: its name, and its row if it exists."""
    rows = {row.name: row for row in site.host.subscriptions.list()}
    names = group, f"{space.name}.{group}"
    own = next((rows[name] for name in names if name in rows and rows[name].namespace == space.name), None)
    return names[group in rows] if own is None else own.name, own


def _use(session: Session, stream: bytes, group: bytes, act: Callable[[ConsumerGroup, Space], Any]) -> Any:
    space = stream_space(session, stream, Role.WRITE)
    name = group.decode(errors="replace")
    return session.door.groups.use(space, name, lambda found: act(found, space), session.chosen)


def _read_pending(
    session: Session, space: Space, entries: list[EntryId], on_generation: OnGeneration
) -> list[Any]:
    """The contents of pending entries, in order."""
    wanted = {*entries}
    if not wanted:
        return []
    between = read_entries(session, space, entries[0], entries[-1], on_generation)
    return [entry for number, entry in between if number in wanted]


@TABLE.slow(
    "XGROUP",
    -5,
    "differs: `XGROUP CREATE changes:<namespace> group id|$` makes a subscription that begins behind "
    "the commit of the id; others are refused",
    role=Role.WRITE,
)
def create_group(session: Session, arguments: Arguments) -> object:
    if word(arguments[1]) != b"CREATE" or [word(option) for option in arguments[5:]] not in (
        [],
        [b"MKSTREAM"],
    ):
        raise CommandError("ERR only XGROUP CREATE is here; floodmark subscription administers the rest")
    space = stream_space(session, arguments[2], Role.WRITE)
    site = session.door.spaces.site
    name, row = find_subscription(site, space, arguments[3].decode(errors="replace"))
    if row is not None:
        raise CommandError("BUSYGROUP Consumer Group name already exists")
    start: Any = "end"
    if arguments[4] != b"$":
        start = parse_id(arguments[4], 0).version or "beginning"
    options = SubscriptionOptions(follow=False, background=False)
    site.subscribe(
        name,
        space.name,
        start=start,
        holder=HOLDER,
        on_generation=session.on_generation,
        options=options,
    ).close()
    return OK


@TABLE.slow(
    "XREADGROUP",
    -7,
    "differs: of one stream `changes:<namespace>`; after a restart of the server, unacknowledged entries are "
    "delivered as new ones",
    role=Role.WRITE,
)
def read_group(session: Session, arguments: Arguments) -> object:
    if word(arguments[1]) != b"GROUP":
        raise CommandError(SYNTAX)
    group, consumer = arguments[2:4]
    options, names = read_stream_options(arguments[4:], (b"NOACK",))
    if len(names) != 2:
        raise CommandError("ERR XREADGROUP reads one stream at a time here, with an ID or '>'")
    stream, since = names
    keeps = b"NOACK" not in options
    count = max(1, min(integer(options.get(b"COUNT", b"%d" % PAGE_ROWS_MAX)), PAGE_ROWS_MAX))

    def reply(entries: list[Any]) -> object:
        return {stream: entries} if session.protocol == 3 else [[stream, entries]]

    def read_new() -> object:
        entries = _use(session, stream, group, lambda found, _: found.deliver(consumer, count, keeps=keeps))
        return reply(entries) if entries else None

    if since == b">":
        return block(read_new, options.get(b"BLOCK"))
    given = parse_id(since, 0)
    start = EntryId(given.version, given.number + 1) if given > FIRST else FIRST

    def read_own(found: ConsumerGroup, space: Space) -> list[Any]:
        entries = found.find(start, LAST, lambda held: held.consumer == consumer)[:count]
        found.hand_over(entries, consumer)
        return _read_pending(session, space, entries, found.on_generation)

    return reply(_use(session, stream, group, read_own))


@TABLE.slow("XACK", -4, "differs: an unknown stream or group is an error", role=Role.WRITE)
def acknowledge(session: Session, arguments: Arguments) -> object:
    entries = [parse_id(argument, 0) for argument in arguments[3:]]
    return _use(session, arguments[1], arguments[2], lambda group, _: group.acknowledge(entries))


@TABLE.slow("XPENDING", -3, "differs: knows the deliveries since the server was started", role=Role.WRITE)
def show_pending(session: Session, arguments: Arguments) -> object:
    rest = [*arguments[3:]]
    idle_ms = 0
    if len(rest) > 2 and word(rest[0]) == b"IDLE":
        idle_ms = integer(rest[1])
        rest = rest[2:]
    if not rest and not idle_ms:
        return _use(session, arguments[1], arguments[2], lambda group, _: _summarise(group))
    if len(rest) not in (3, 4):
        raise CommandError(SYNTAX)
    start = FIRST if rest[0] == b"-" else parse_id(rest[0], 0)
    end = LAST if rest[1] == b"+" else parse_id(rest[1], LAST.number)
    count = max(0, min(integer(rest[2]), PAGE_ROWS_MAX))

    def show(group: ConsumerGroup, _: Space) -> object:
        now_ms = monotonic_ms()
        found = group.find(
            start,
            end,
            lambda held: now_ms - held.delivered_at_ms >= idle_ms and rest[3:] in ([], [held.consumer]),
        )
        return [
            [str(entry), held.consumer, now_ms - held.delivered_at_ms, held.deliveries]
            for entry in found[:count]
            for held in (group.pending[entry],)
        ]

    return _use(session, arguments[1], arguments[2], show)


def _summarise(group: ConsumerGroup) -> list[Any]:
    if not group.pending:
        return [0, None, None, None]
    counts = Counter(held.consumer for held in group.pending.values())
    consumers = [[name, b"%d" % count] for name, count in sorted(counts.items())]
    return [len(group.pending), str(min(group.pending)), str(max(group.pending)), consumers]


@TABLE.slow("XAUTOCLAIM", -6, "differs: knows the deliveries since the server was started", role=Role.WRITE)
def claim(session: Session, arguments: Arguments) -> object:
    _, stream, group, consumer, idle, first = arguments[:6]
    idle_ms = integer(idle, "ERR Invalid min-idle-time argument for XAUTOCLAIM")
    start = FIRST if first == b"-" else parse_id(first, 0)
    options = read_options(arguments[6:], (b"COUNT",), (b"JUSTID",))
    only_ids = b"JUSTID" in options
    count = integer(options.get(b"COUNT", b"%d" % AUTOCLAIM_COUNT), "ERR COUNT must be > 0")
    if count < 1:
        raise CommandError("ERR COUNT must be > 0")
    count = min(count, PAGE_ROWS_MAX)

    def take(found: ConsumerGroup, space: Space) -> object:
        now_ms = monotonic_ms()
        entries = found.find(start, LAST, lambda held: now_ms - held.delivered_at_ms >= idle_ms)
        following = str(entries[count] if len(entries) > count else FIRST)
        entries = entries[:count]
        if only_ids:
            shown: list[Any] = [str(entry) for entry in entries]
        else:
            shown = _read_pending(session, space, entries, found.on_generation)
        found.hand_over(entries, consumer, delivers=not only_ids)
        return [following, shown, []]

    return _use(session, stream, group, take)
