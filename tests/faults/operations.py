"""Every kind of write, as one line of a table.

All run on the same site: three partitions, some history, a dropped namespace, safe points, a heartbeat,
and a tail of writes that were acknowledged without waiting for the disk.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from tests.faults.observation import HOUR_MS

from floodmark.codec.values import encode_value
from floodmark.model import Version
from floodmark.model.change import Stamp
from floodmark.model.limits import SITE_IDS_MAX
from floodmark.model.record import Repair
from floodmark.site import Namespace, Site
from floodmark.testing import SimulatedTime

RETENTION: Final = timedelta(hours=1)
LARGE: Final = b"L" * 5_000


def nothing(site: Site, time: SimulatedTime) -> None:
    """No preparation."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Something that users do, and what may be asked of it.

    One that is not `atomic` goes in several commits, and a failure may leave the first of them; one
    that is not `durable` may return before it is on disk; one that `writes` nothing can only fail to read.
    """

    run: Callable[[Site], object]
    prepare: Callable[[Site, SimulatedTime], None] = nothing
    atomic: bool = True
    durable: bool = True
    writes: bool = True


def users(site: Site) -> Namespace:
    """The namespace that the operations work on."""
    return site.namespace("users")


def let_history_age(site: Site, time: SimulatedTime) -> None:
    """Give garbage collection something to do: all that was written before is past its retention."""
    site.release_safe_point("held")
    time.advance(2 * HOUR_MS)
    users(site).put(b"b", b"young")


def merge_first_two(site: Site) -> int:
    """Join the first two partitions."""
    left, right, *_ = site.partitions()
    return site.merge(left.id, right.id)


def write_merged(site: Site, _: SimulatedTime) -> None:
    """Give operations on merged records something to merge into."""
    people = site.create_namespace("people", merge="fields", retention=RETENTION)
    visits = site.create_namespace("visits", merge="counter", retention=RETENTION)
    people.put_many({key: {"name": "old", "city": "old"} for key in (b"a", b"b", b"c")})
    people.update(b"a", {"city": "Oslo"})
    visits.add(b"a", 2)
    visits.add(b"a", 3)


def repair(site: Site, *keys: bytes) -> list[bool]:
    """Put records right, as one does who has seen what other sites hold."""
    host = site.host
    found = host.verification.find_records("users", list(keys), host.versions.read_version(), True)
    versions = [0 if record is None else record.version for record in found]
    stored = encode_value(b"repaired", origin=Stamp(max(versions), SITE_IDS_MAX))
    repairs = [Repair(key, seen, stored) for key, seen in zip(keys, versions, strict=True)]
    return host.verification.repair_records("users", repairs)


def write_history(site: Site) -> list[tuple[str, bytes, bytes | None, Version]]:
    """Make the site that all operations start from; the writes that it acknowledged as durable."""
    acknowledged: list[tuple[str, bytes, bytes | None, Version]] = []

    def put(namespace: Namespace, key: bytes, value: bytes) -> None:
        acknowledged.append((namespace.name, key, value, namespace.put(key, value)))

    dropped = site.create_namespace("dropped", retention=RETENTION)
    people = site.create_namespace("users", retention=RETENTION)
    other = site.create_namespace("other", retention=RETENTION)
    put(dropped, b"a", b"gone")
    for key in (b"a", b"c", b"i", b"m", b"x"):
        put(people, key, b"old")
    site.split("users", b"h")
    site.split("users", b"p")
    for key in (b"a", b"i", b"x"):
        put(people, key, b"first-" + key)
    acknowledged.append(("users", b"c", None, people.delete(b"c")))
    put(other, b"a", b"other")
    site.drop_namespace("dropped")
    site.hold_safe_point("held", site.now())
    site.hold_safe_point("short", site.now(), lifetime=timedelta(minutes=1))
    site.heartbeat()
    put(people, b"m", b"second")
    return acknowledged


TAIL_WRITES: Final[list[Callable[[Site], object]]] = [
    lambda site: users(site).put(b"d", b"tail-1", durability="async"),
    lambda site: users(site).put_many({b"j": b"tail-2", b"k": b"tail-2"}, durability="async"),
    lambda site: site.namespace("other").put(b"b", b"tail-3", durability="async"),
]
TAIL: Final = len(TAIL_WRITES)


def write_tail(site: Site, tail: int) -> None:
    """Writes that nobody has synced: they may be lost, but only from the end."""
    for write in TAIL_WRITES[:tail]:
        write(site)


OPERATIONS: Final[dict[str, Operation]] = {
    "put": Operation(run=lambda site: users(site).put(b"i", b"new")),
    "put async": Operation(run=lambda site: users(site).put(b"i", b"new", durability="async"), durable=False),
    "put of a large value": Operation(run=lambda site: users(site).put(b"i", LARGE)),
    "put_many in one partition": Operation(
        run=lambda site: users(site).put_many({b"a": b"new", b"b": b"new", b"d": b"new"})
    ),
    "put_many in three partitions": Operation(
        run=lambda site: users(site).put_many({b"a": b"new", b"b": b"new", b"i": b"new", b"x": b"new"}),
        atomic=False,
    ),
    "delete": Operation(run=lambda site: users(site).delete(b"a")),
    "delete_range in one partition": Operation(run=lambda site: users(site).delete_range(b"", b"h")),
    "delete_range in three partitions": Operation(run=lambda site: users(site).delete_range(), atomic=False),
    "compare_and_set": Operation(run=lambda site: users(site).compare_and_set(b"m", b"second", b"new")),
    "compare_and_set that is refused": Operation(
        run=lambda site: users(site).compare_and_set(b"m", b"wrong", b"new"), durable=False, writes=False
    ),
    "update": Operation(
        run=lambda site: site.namespace("people").update(b"a", {"name": "new", "city": None}),
        prepare=write_merged,
    ),
    "update of a large field, async": Operation(
        run=lambda site: site.namespace("people").update(b"a", {"text": LARGE.decode()}, durability="async"),
        prepare=write_merged,
        durable=False,
    ),
    "put_many of fields": Operation(
        run=lambda site: site.namespace("people").put_many({b"a": {"name": "new"}, b"d": {"name": "new"}}),
        prepare=write_merged,
    ),
    "delete_range of fields": Operation(
        run=lambda site: site.namespace("people").delete_range(), prepare=write_merged
    ),
    "compare_and_set of fields": Operation(
        run=lambda site: site.namespace("people").compare_and_set(
            b"b", b'{"city":"old","name":"old"}', {"name": "new"}
        ),
        prepare=write_merged,
    ),
    "add": Operation(run=lambda site: site.namespace("visits").add(b"a", 7), prepare=write_merged),
    "repair in one partition": Operation(run=lambda site: repair(site, b"a", b"b", b"c")),
    "repair in three partitions": Operation(run=lambda site: repair(site, b"a", b"i", b"x"), atomic=False),
    "create_namespace": Operation(run=lambda site: site.create_namespace("fresh")),
    "drop_namespace": Operation(run=lambda site: site.drop_namespace("users")),
    "update_namespace": Operation(
        run=lambda site: site.update_namespace("users", retention=timedelta(hours=2))
    ),
    "split": Operation(run=lambda site: site.split("users", b"j")),
    "merge": Operation(run=merge_first_two),
    "heartbeat": Operation(run=lambda site: site.heartbeat()),
    "hold_safe_point": Operation(run=lambda site: site.hold_safe_point("reader", 1 << 60)),
    "move a safe point": Operation(run=lambda site: site.hold_safe_point("held", 1 << 60)),
    "release_safe_point": Operation(run=lambda site: site.release_safe_point("held")),
    "collect_garbage": Operation(run=lambda site: site.collect_garbage(), prepare=let_history_age),
    "sync": Operation(run=lambda site: site.sync()),
    "changes": Operation(run=lambda site: deque(site.changes(), maxlen=0)),
    "close": Operation(run=lambda site: site.close()),
}
