"""Writes the golden site: a small directory in today's format that every later Floodmark must read.

    python -m tests.golden.make_site            (from the root of the checkout)

It replaces `format-N/` and `format-N.json` beside this file, where N is the format of this Floodmark.
The JSON is what was asked for, kept by a plain list while the site was written; nothing in it was read
back from the site.  A format that was released is never written again: add the next one instead.
"""

import json
import shutil
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NotRequired, TypedDict

from tests.coordinating import begin_for_client

import floodmark
from floodmark import Namespace, Site, Stamp, SubscriptionOptions
from floodmark.codec.states import CounterEntry, CounterState, Field, FieldsState, State, encode_state
from floodmark.host.transaction_port import BatchUpdate, LogKind
from floodmark.merge.policies import MergePolicy
from floodmark.model.format import FORMAT
from floodmark.model.partition import ApplyStream
from floodmark.replication.applied import Applied
from floodmark.replication.step import LinkStep, NamespaceStep
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.site.transaction import Transaction

HERE: Final = Path(__file__).resolve().parent
BEGIN_MS: Final = 1_700_000_000_000
RETENTION: Final = timedelta(hours=1)
OPEN_FOR: Final = timedelta(hours=24)
LARGE: Final = b"a line of the large value\n" * 400
ROME: Final = 2
TOPOLOGY: Final = Topology(
    epoch=3,
    sites={"oslo": MemberSite(id=7), "rome": MemberSite(id=ROME, url="grpc://rome:7100")},
    namespaces={"profiles": SharedNamespace(merge="fields"), "counts": SharedNamespace(merge="counter")},
)

# RocksDB's diary, and files that belong to a process; the rest is the site.
LEFT_OUT: Final = ("LOG", "LOG.old.*", "LOCK", "owner")


class Write(TypedDict):
    """One change as it was asked for; bytes in hexadecimal, `value` None for a delete.

    Of a record that is merged `value` is the whole record after the change, and `fades` what is left of it
    when some of its fields have expired, and when that is (unix seconds).  `origin` is the stamp of a change
    of another site.
    """

    version: int
    namespace: str
    key: str
    value: str | None
    expires_at: int | None
    partition: int
    origin: NotRequired[tuple[int, int]]
    fades: NotRequired[tuple[int, str]]
    batch: NotRequired[int]


class Content(TypedDict):
    """All that the golden site must hold."""

    site: str
    site_id: int
    format: int
    end_ms: int
    settings: dict[str, dict[str, float | str | None]]
    partitions: list[tuple[int, str, str | None]]
    safe_points: list[tuple[str, int, int, int | None]]
    collected: int
    heartbeats: int
    seals: int
    writes: list[Write]
    epoch: NotRequired[int]
    watermarks: NotRequired[dict[str, dict[str, int]]]
    open_transactions: NotRequired[list[str]]
    # By subscription, the versions that it got and did not acknowledge.
    unacknowledged: NotRequired[dict[str, list[int]]]
    # The ids of namespaces, and those under which their records stand where these are others.
    ids: NotRequired[dict[str, int]]
    physical: NotRequired[dict[str, int]]


class Author:
    """Writes to a site and keeps its own account of it.  A second passes before each step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_ms = BEGIN_MS
        self.writes: list[Write] = []
        self.settings: dict[str, dict[str, float | str | None]] = {}
        self.safe_points: list[tuple[str, int, int, int | None]] = []
        # Namespace ids and partition ranges as this account has them, in order of keys.
        self.ids: dict[str, int] = {}
        self.physical: dict[str, int] = {}
        self.next_id = 1
        self.partitions: list[tuple[int, str, str | None]] = []
        self.heartbeats = self.seals = 0
        self.watermarks: dict[str, dict[str, int]] = {}
        self.site: Site = self.open()

    def open(self) -> Site:
        return floodmark.open(
            self.path, site="oslo", site_id=7, background=False, time_source=lambda: self.now_ms
        )

    def reopen(self) -> None:
        """Close and open again, which moves what is in RocksDB's log into its tables."""
        self.site.close()
        self.site = self.open()

    def pass_time(self, seconds: int = 1) -> None:
        self.now_ms += seconds * 1000

    def create(self, name: str, ttl: timedelta | None, merge: MergePolicy = "last_write") -> None:
        self.pass_time()
        self.site.create_namespace(name, merge=merge, ttl=ttl, retention=RETENTION)
        self.ids[name] = self.next_id
        self.next_id += 1
        self.settings[name] = {
            "merge": merge,
            "ttl_seconds": None if ttl is None else ttl.total_seconds(),
            "retention_seconds": RETENTION.total_seconds(),
        }

    def put(
        self, name: str, pairs: dict[bytes, bytes | None], ttl: int | None = None, **options: Any
    ) -> None:
        """Put or delete keys of one partition, as one commit."""
        self.pass_time()
        space = self.site.namespace(name)
        version = self._put(space, pairs, ttl, options)
        lifetime = ttl if ttl is not None else self.settings[name]["ttl_seconds"]
        expires_at = None if lifetime is None else self.now_ms // 1000 + int(float(lifetime))
        for key, value in sorted(pairs.items()):
            self.note(name, key, version, value, None if value is None else expires_at)

    def publish(self, name: str, pairs: dict[bytes, bytes]) -> None:
        """Replace a namespace, as of the last write; its records get an id of their own, and that version."""
        self.pass_time()
        base = self.writes[-1]["version"]
        self.site.generations.publish(name, pairs, base=base, keep=0, publisher="author")
        self.physical[name] = self.next_id
        self.next_id += 1
        self.writes = [write for write in self.writes if write["namespace"] != name]
        for key, value in pairs.items():
            self.note(name, key, base, value)

    def note(
        self, name: str, key: bytes, version: int, value: bytes | None, expires_at: int | None = None
    ) -> Write:
        write: Write = {
            "version": version,
            "namespace": name,
            "key": key.hex(),
            "value": None if value is None else value.hex(),
            "expires_at": expires_at,
            "partition": self.partition_of(name, key),
        }
        self.writes.append(write)
        return write

    def copy(self, name: str, key: bytes, stamp: int, state: State, value: bytes) -> None:
        """Take a change of another site in, and note that the link has come so far."""
        self.pass_time()
        qualified = self.ids[name].to_bytes(3, "big") + key
        stored = encode_state(state, Stamp(stamp, ROME))
        stream = self.site.host.write_stream(ApplyStream(True))
        version = stream.send({qualified: stored}).result()
        self.note(name, key, version, value)["origin"] = stamp, ROME
        since = self.watermarks.setdefault(name, {}).get(str(ROME), 0)
        part = NamespaceStep(
            name=name, source_id=1, target_id=self.ids[name], since=since, start=stamp - 1, until=stamp
        )
        step = LinkStep(source="rome", source_id=ROME, namespaces=(part,))
        self.site.host.replication.advance_link(step, Applied())
        self.watermarks[name][str(ROME)] = stamp

    def _put(
        self, space: Namespace, pairs: dict[bytes, bytes | None], ttl: int | None, options: dict[str, Any]
    ) -> int:
        if len(pairs) == 1:
            ((key, value),) = pairs.items()
            if value is None:
                return space.delete(key, **options)
            return space.put(key, value, ttl=ttl, **options)
        return space.put_many({key: value for key, value in pairs.items() if value is not None}, ttl=ttl)

    def partition_of(self, name: str, key: bytes) -> int:
        qualified = (self.ids[name].to_bytes(3, "big") + key).hex()
        return next(
            number
            for number, start, end in self.partitions
            if start <= qualified and (end is None or qualified < end)
        )

    def split(self, name: str, key: bytes) -> None:
        self.pass_time()
        cut = (self.ids[name].to_bytes(3, "big") + key).hex()
        old = self.partition_of(name, key)
        left, right = self.site.split(name, key)
        index = [number for number, _, _ in self.partitions].index(old)
        _, start, end = self.partitions[index]
        self.partitions[index : index + 1] = [(left, start, cut), (right, cut, end)]
        self.seals += 1

    def merge(self, index: int) -> None:
        self.pass_time()
        (left, start, _), (right, _, end) = self.partitions[index : index + 2]
        self.partitions[index : index + 2] = [(self.site.merge(left, right), start, end)]
        self.seals += 2

    def heartbeat(self) -> None:
        self.pass_time()
        self.site.heartbeat()
        self.heartbeats += 1

    def hold(self, point: str, version: int, namespace: str | None) -> None:
        self.pass_time()
        lifetime = timedelta(days=36_500)
        self.site.hold_safe_point(point, version, lifetime=lifetime, namespace=namespace)
        expires_at_ms = self.now_ms + lifetime // timedelta(milliseconds=1)
        self.safe_points.append(
            (point, version, expires_at_ms, None if namespace is None else self.ids[namespace])
        )


def write_site(path: Path) -> Content:
    """Write the golden site into an empty directory; what it holds."""
    author = Author(path)
    (only,) = author.site.partitions()
    author.partitions = [(only.id, "", None)]
    author.create("users", None)
    author.create("sessions", timedelta(minutes=30))
    author.create("prices", None)
    _write_what_is_collected(author)
    collected = _collect(author)
    _write_before_the_splits(author)
    author.heartbeat()
    author.hold("everything", author.writes[-1]["version"], None)
    author.hold("reader", author.writes[-1]["version"], "users")
    author.split("users", b"user10")
    author.split("users", b"user05")
    author.put("users", {b"user01": b"left", b"user04": b"of both"})
    author.put("users", {b"user06": b"between the cuts"})
    author.merge(0)
    author.reopen()
    _write_after_the_splits(author)
    _share(author)
    _write_fields(author)
    _write_counters(author)
    _write_batch(author)
    author.heartbeat()
    author.put("users", {b"user19": b"the last one"}, durability="async")
    transactions = _leave_transactions_open(author)
    unacknowledged = _leave_unacknowledged(author)
    author.site.close()
    return {
        "site": "oslo",
        "site_id": 7,
        "format": FORMAT,
        "end_ms": author.now_ms,
        "settings": author.settings,
        "partitions": author.partitions,
        "safe_points": sorted(author.safe_points),
        "collected": collected,
        "heartbeats": author.heartbeats,
        "seals": author.seals,
        "writes": author.writes,
        "epoch": TOPOLOGY.epoch,
        "watermarks": author.watermarks,
        "open_transactions": transactions,
        "unacknowledged": unacknowledged,
        "ids": author.ids,
        "physical": author.physical,
    }


def _write_what_is_collected(author: Author) -> None:
    author.put("users", {b"old": b"first"})
    author.put("users", {b"old": b"second"})
    author.put("users", {b"doomed": b"will be deleted"})
    author.put("users", {b"doomed": None})
    author.put("prices", {b"kiwi": b"1"})
    author.publish("prices", {b"apple": b"2", b"pear": b"3"})
    author.put("sessions", {b"expired": b"token"}, ttl=5)


def _collect(author: Author) -> int:
    author.pass_time(2 * 3600)
    author.site.collect_garbage()
    collected = (author.now_ms - RETENTION // timedelta(milliseconds=1)) << 18
    # Collecting writes the expiries that are due, under the stamps of their records.
    (expired,) = author.site.changes(since=collected)
    last = author.writes[-1]
    author.writes.append({**last, "version": expired.version, "origin": (last["version"], author.site.id)})
    return collected


def _write_before_the_splits(author: Author) -> None:
    author.put("users", {b"ada": b"countess"})
    author.put("users", {b"user%02d" % number: b"value %d" % number for number in range(20)})
    author.put("users", {b"large": LARGE})
    author.put("users", {b"several": b"small", b"large too": LARGE[:5000], b"empty": b""})
    author.put("users", {b"\x00": b"zero", b"eight by": b"8", b"\xff" * 9: b"nine"})
    author.put("users", {b"user03": None})
    author.put("sessions", {b"s1": b"thirty minutes"})
    author.put("sessions", {b"s2": b"three seconds", b"s3": b"too"}, ttl=3)


def _write_after_the_splits(author: Author) -> None:
    author.put("users", {b"ada": b"programmer"})
    author.put("users", {b"user10": b"right", b"user11": b"of the cut"})
    author.put("users", {b"user03": b"back again"})
    author.put("users", {b"large": LARGE[:-1]})
    author.put("sessions", {b"s1": None})
    author.put("sessions", {b"s4": b"a day"}, ttl=86_400)


def _share(author: Author) -> None:
    author.create("profiles", None, "fields")
    author.create("counts", None, "counter")
    author.pass_time()
    author.site.host.membership.set_topology(TOPOLOGY)


def _write_fields(author: Author) -> None:
    profiles = author.site.namespace("profiles")

    def note(key: bytes, version: int, value: bytes | None, expires_at: int | None = None) -> Write:
        author.pass_time()
        return author.note("profiles", key, version, value, expires_at)

    note(b"ada", profiles.put(b"ada", b'{"name": "Ada", "city":"Paris"}'), b'{"city":"Paris","name":"Ada"}')
    version = profiles.update(b"ada", b'{"city": null, "tags": [1,  2]}')
    note(b"ada", version, b'{"name":"Ada","tags":[1,  2]}')
    note(b"ada", profiles.delete_field(b"ada", "never there"), b'{"name":"Ada","tags":[1,  2]}')
    title = Field("title", b'"countess"', Stamp(author.now_ms << 18, ROME))
    value = b'{"name":"Ada","tags":[1,  2],"title":"countess"}'
    author.copy("profiles", b"ada", title.stamp.version, FieldsState(None, (title,)), value)
    expires_at = author.now_ms // 1000 + 3600
    fading = profiles.update(b"ada", {"session": "x1"}, ttl=3600)
    whole = b'{"name":"Ada","session":"x1","tags":[1,  2],"title":"countess"}'
    note(b"ada", fading, whole)["fades"] = expires_at, value.hex()
    expires_at = author.now_ms // 1000 + 2
    note(b"brief", profiles.put(b"brief", {"all": 1, "of it": 2}, ttl=2), b'{"all":1,"of it":2}', expires_at)
    note(b"gone", profiles.put(b"gone", {"a": "b"}), b'{"a":"b"}')
    note(b"gone", profiles.delete(b"gone"), None)


def _write_counters(author: Author) -> None:
    counts = author.site.namespace("counts")
    for key, number, total in ((b"home", 40, b"40"), (b"home", -3, b"37"), (b"deleted", 9, b"9")):
        author.pass_time()
        author.note("counts", key, counts.add(key, number), total)
    author.pass_time()
    author.note("counts", b"deleted", counts.delete(b"deleted"), None)
    entry = CounterEntry(ROME, author.now_ms << 18, 5)
    author.copy("counts", b"home", entry.version, CounterState(None, (entry,)), b"42")


def _write_batch(author: Author) -> None:
    """An atomic batch over three partitions."""
    author.pass_time()
    pairs: dict[bytes, bytes | None] = {b"user02": b"in a batch", b"user08": b"too", b"user15": b"as well"}
    with author.site.atomic() as batch:
        for key, value in pairs.items():
            batch.put(author.site.namespace("users"), key, value)
        pairs[b"user16"] = None
        batch.delete(author.site.namespace("users"), b"user16")
        batch.add(author.site.namespace("counts"), b"batched", 8)
    for key, value in pairs.items():
        author.note("users", key, batch.version, value)["batch"] = batch.version
    author.note("counts", b"batched", batch.version, b"8")["batch"] = batch.version


def _leave_transactions_open(author: Author) -> list[str]:
    """Two transactions that are open: in batched entries, with an acknowledgement, and in bare ones."""
    site = author.site
    options = SubscriptionOptions(follow=False, background=False)
    with site.subscribe(
        "indexer", "users", start=author.writes[-1]["version"] - 1, options=options
    ) as reader:
        batched = _begin(site)
        batched.acknowledge(next(reader))
    site.transactions.set_batching(LogKind.COORDINATOR, BatchUpdate(enabled=False))
    bare = _begin(site)
    _note_safe_point(author, "indexer")
    return [batched.id, bare.id]


def _begin(site: Site) -> Transaction:
    """A transaction as a server begins it for a caller: one of the site's own process ends with that."""
    return begin_for_client(site, OPEN_FOR, owner="f" * 16)


def _leave_unacknowledged(author: Author) -> dict[str, list[int]]:
    """A subscription that is not closed in order: its last acknowledgements are changes of its row."""
    written = [write["version"] for write in author.writes if write["namespace"] == "counts"]
    options = SubscriptionOptions(follow=False, background=False)
    reader = author.site.subscribe("counting", "counts", start=written[0] - 1, options=options)
    deliveries = list(reader)
    reader.flush()
    for number in (0, 2):
        author.pass_time()
        deliveries[number].acknowledge()
        reader.flush()
    _note_safe_point(author, "counting")
    return {"counting": [version for number, version in enumerate(written) if number not in (0, 2)]}


def _note_safe_point(author: Author, subscription: str) -> None:
    (held,) = [point for point in author.site.safe_points() if point.name == f"subscription/{subscription}"]
    author.safe_points.append((held.name, held.version, held.expires_at_ms, held.namespace))


def main() -> None:
    """Replace the golden site of this format."""
    target = HERE / f"format-{FORMAT}"
    with tempfile.TemporaryDirectory() as scratch:
        content = write_site(Path(scratch) / "site")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(Path(scratch) / "site", target, ignore=shutil.ignore_patterns(*LEFT_OUT))
    target.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    sys.stdout.write(f"{target}: {size:,} bytes\n")


if __name__ == "__main__":
    main()
