"""What the tests of backup and restore share: data of every sort, and what it must look like afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from floodmark.codec.ordered import qualify_range
from floodmark.codec.records import split_values
from floodmark.model.version import Version
from floodmark.site import Namespace, Site
from floodmark.site.address import SiteAddress
from floodmark.spark.jobs.backups.manifest import Manifest


class Kept(NamedTuple):
    """What a site holds under a key, dead or alive, without where and when it was committed there."""

    value: bytes
    deleted: bool
    expires_at: int | None
    origin: tuple[int, Version]


def address_of(url: str) -> SiteAddress:
    return SiteAddress(location=url)


def fill(users: Namespace, keys: int = 300) -> None:
    """Records of every sort: live, overwritten, deleted, and with a time to live."""
    users.put_many((b"%05d" % number, b"first %d" % number) for number in range(keys))
    users.put_many((b"%05d" % number, b"second %d" % number) for number in range(0, keys, 3))
    for number in range(0, keys, 10):
        users.delete(b"%05d" % number)
    for number in range(1, keys, 50):
        users.put(b"%05d" % number, b"soon gone", ttl=timedelta(days=1))
    users.put(b"empty", b"")
    users.put(b"\x00\xff", bytes(range(256)))


def contents(site: Site, namespace: str, at: Version | None = None) -> dict[bytes, Kept]:
    """Everything that a namespace holds, tombstones and expired records included."""
    host = site.host
    row = host.namespaces.find_namespace(namespace)
    keys = qualify_range(row.id)
    version = host.versions.read_version() if at is None else at
    found: dict[bytes, Kept] = {}
    for batch in site.host.router.scan_records(keys, version, dead=True):
        stored = split_values(batch.column("value"))
        columns = zip(
            batch.column("key").to_pylist(),
            batch.column("version").to_pylist(),
            *map(_to_list, stored),
            strict=True,
        )
        for key, commit, value, deleted, expires_at, origin_site, origin_version, _ in columns:
            own = site.id, commit
            origin = own if origin_site is None else (origin_site, origin_version)
            found[key] = Kept(value, deleted, expires_at, origin)
    return found


def _to_list(column: pyarrow.Array) -> list[Any]:
    listed: list[Any] = column.to_pylist()
    return listed


def held_for(site: Site, prefix: str) -> dict[str, Version]:
    """The safe points of jobs of one kind; Spark's readers have some of their own for a while."""
    return {point.name: point.version for point in site.safe_points() if point.name.startswith(prefix)}


def stored_rows(target: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """The rows of a part, read without Spark."""
    tables = [pyarrow.parquet.read_table(target / manifest.part / file.name) for file in manifest.files]
    rows: list[dict[str, Any]] = pyarrow.concat_tables(tables).to_pylist()
    return rows


def stored_contents(target: Path, manifest: Manifest) -> dict[bytes, Kept]:
    """What a full part holds, in the form of `contents`."""
    rows = stored_rows(target, manifest)
    found = {
        row["key"]: Kept(
            row["value"] or b"",
            row["_change_type"] == "delete",
            None if row["_expires_at"] is None else int(row["_expires_at"].timestamp()),
            (row["_origin_site"], row["_origin_version"]),
        )
        for row in rows
    }
    assert len(found) == len(rows), "a key is twice in the part"
    return found


@contextmanager
def writing(users: Namespace, keys: int = 300) -> Iterator[None]:
    """Somebody who overwrites, deletes and adds as fast as it goes, until the block ends."""
    ended = Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for number in count():
                if ended.is_set():
                    return
                users.put(b"%05d" % (number * 7 % keys), b"busy %d" % number)
                users.put_many([(b"new %05d" % number, b"x"), (b"%05d" % (number * 11 % keys), b"y")])
                users.delete(b"%05d" % (number * 13 % keys))
                ended.wait(0.01)
        except BaseException as failure:
            failures.append(failure)

    writer = Thread(target=write, name="writer")
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()
    assert not failures
