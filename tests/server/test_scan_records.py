"""Records over the wire: they go on where they were, are kept while they are read, and need the right to."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pyarrow
import pytest
from pyarrow import flight
from tests.server.support import (
    connected,
    connection_of,
    cut_streams,
    raw_client,
    raw_options,
    serving,
    token_of,
    write_roles,
)
from tests.waiting import wait_until

from floodmark.codec.columns import RECORDS, RECORDS_WITH_DIGESTS
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.records import split_values
from floodmark.model.access import Role
from floodmark.model.errors import (
    FloodmarkError,
    InvalidArgument,
    InvalidRange,
    NamespaceNotFound,
    NotAllowed,
    PartitionMoved,
    VersionCollected,
    VersionInFuture,
    WireMismatch,
)
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.version import Version
from floodmark.server import Server, ServerOptions
from floodmark.site import Namespace, Site
from floodmark.wire.columns import MESSAGE_BYTES_MAX, require_records
from floodmark.wire.messages import TICKET, RecordsTicket

# Enough that a stream is never done before it is cut.
ROWS = 12_000
VALUE = bytes(2_000)
CUTS = 3


def whole(namespace: Namespace) -> KeyRange:
    start = encode_namespace(namespace.id)
    return KeyRange(start, prefix_end(start))


def records(site: Site, namespace: Namespace, at: Version | None = None) -> Iterator[pyarrow.RecordBatch]:
    host = site.host
    version = host.versions.read_version() if at is None else at
    return host.router.scan_records(whole(namespace), version)


def send(site: Site, ticket: bytes) -> list[object]:
    """What a server answers to a ticket."""
    return list(connection_of(site).open_reader(ticket))


def keys_of(batches: Iterator[pyarrow.RecordBatch]) -> list[bytes]:
    return [key for batch in batches for key in batch.column("key").to_pylist()]


@pytest.fixture
def full(users: Namespace) -> Namespace:
    for start in range(0, ROWS, 2_000):
        users.put_many(
            {b"%05d" % number: VALUE for number in range(start, start + 2_000)}, durability="async"
        )
    return users


def test_records_go_on_behind_the_last_one_after_each_cut(
    server: Server, remote: Site, full: Namespace
) -> None:
    found: list[bytes] = []
    cuts = 0
    for batch in records(remote, full):
        found += batch.column("key").to_pylist()
        if cuts < CUTS:
            cuts += cut_streams(server)
    assert cuts == CUTS, "the stream was never cut: this proves nothing"
    assert found == [b"%05d" % number for number in range(ROWS)]


def test_records_are_the_same_as_in_the_servers_process(site: Site, remote: Site, full: Namespace) -> None:
    version = full.put(b"00000", b"later")
    here = pyarrow.Table.from_batches(list(records(site, full, version)), RECORDS)
    there = pyarrow.Table.from_batches(list(records(remote, full, version)), RECORDS)
    assert there.equals(here)
    assert there.num_rows == ROWS


def test_messages_are_smaller_than_pages(remote: Site, full: Namespace) -> None:
    sizes = [batch.nbytes for batch in records(remote, full)]
    assert max(sizes) < MESSAGE_BYTES_MAX + 2 * len(VALUE)
    assert sum(sizes) > ROWS * len(VALUE)


def test_what_is_being_read_is_not_collected(site: Site, remote: Site, server: Server) -> None:
    brief = remote.create_namespace("brief", retention=timedelta(0))
    first = brief.put_many({b"%05d" % number: VALUE for number in range(ROWS)}, durability="async")
    batches = records(remote, brief, first)
    found = split_values(next(batches).column("value")).values.to_pylist()
    for number in range(0, ROWS, 100):
        brief.put(b"%05d" % number, b"new", durability="async")
    site.sync()
    site.collect_garbage()
    for batch in batches:
        found += split_values(batch.column("value")).values.to_pylist()
    assert found == [VALUE] * ROWS
    wait_until(lambda: not server.service.places.count(), "the stream is still open")
    site.collect_garbage()
    with pytest.raises(VersionCollected):
        list(records(remote, brief, first))


def test_reader_that_pauses_is_cut_off_and_goes_on_where_it_was() -> None:
    with serving(ServerOptions(stall_seconds=0.2)) as (_, server), connected(server) as client:
        users = client.create_namespace("users")
        users.put_many({b"%05d" % number: VALUE for number in range(ROWS)}, durability="async")
        batches = records(client, users)
        first = next(batches).column("key").to_pylist()
        wait_until(lambda: not server.service.places.count(), "it was not cut off")
        assert first + keys_of(batches) == [b"%05d" % number for number in range(ROWS)]


def test_records_need_the_role_read_in_their_namespace(tmp_path: Path) -> None:
    access = write_roles(tmp_path / "access.toml", "mine", "other")
    with serving(ServerOptions(access=access)) as (site, server):
        mine, other = site.create_namespace("mine"), site.create_namespace("other")
        mine.put(b"ada", b"countess")
        version = other.put(b"bob", b"builder")
        with connected(server, token=token_of(Role.READ, "mine")) as client:
            assert keys_of(records(client, mine, version)) == [b"ada"]
            with pytest.raises(NotAllowed):
                list(records(client, other, version))


def test_tickets_that_are_right_but_for_one_thing_are_refused(
    site: Site, remote: Site, users: Namespace
) -> None:
    at = users.put(b"ada", b"countess")
    keys = whole(users)
    left, right = site.split("users", b"m")
    wrong: list[tuple[RecordsTicket, type[FloodmarkError]]] = [
        (RecordsTicket(left, KeyRange(b"", None), at), InvalidRange),
        (RecordsTicket(left, KeyRange(keys.start, None), at), InvalidRange),
        (RecordsTicket(left, KeyRange(keys.start, b"\x00\x00\x03"), at), InvalidRange),
        (RecordsTicket(left, KeyRange(b"\x00\x00\x09", b"\x00\x00\x0a"), at), NamespaceNotFound),
        (RecordsTicket(left, keys, at), PartitionMoved),
        (RecordsTicket(right + 10, keys, at), PartitionMoved),
        (RecordsTicket(left, KeyRange(keys.start, keys.start + b"m"), 0), FloodmarkError),
        (RecordsTicket(left, KeyRange(keys.start, keys.start + b"m"), at + 2**50), VersionInFuture),
    ]
    for ticket, kind in wrong:
        with pytest.raises(kind):
            send(remote, TICKET.encode_request(ticket))


def test_empty_range_has_no_records(server: Server, users: Namespace, remote: Site) -> None:
    at = users.put(b"ada", b"countess")
    start = whole(users).start
    partition = remote.host.router.maps.map.route(start)
    assert list(partition.scan_records(KeyRange(start, start), at)) == []
    body = TICKET.encode_request(
        RecordsTicket(partition.id, KeyRange(start, start), at, content=Content.DIGESTS)
    )
    stream = raw_client(server).do_get(flight.Ticket(body), raw_options())
    assert stream.schema.equals(RECORDS_WITH_DIGESTS)
    assert stream.read_all().num_rows == 0


def test_ticket_with_a_damaged_flag_is_refused(remote: Site) -> None:
    body = TICKET.encode_request(RecordsTicket(1, KeyRange(), 1, dead="yes"))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        send(remote, body)


def test_columns_of_another_release_are_refused() -> None:
    batch = pyarrow.RecordBatch.from_pylist([], schema=RECORDS_WITH_DIGESTS)
    require_records(batch, RECORDS_WITH_DIGESTS)
    with pytest.raises(WireMismatch, match="same release"):
        require_records(batch, RECORDS)


def test_records_are_counted_under_their_name(server: Server, users: Namespace) -> None:
    users.put(b"ada", b"countess")
    with connected(server) as client:
        assert keys_of(records(client, users)) == [b"ada"]
    metrics = server.service.metrics

    def counted() -> bool:
        samples = [sample for family in metrics.families("oslo") for sample in family.samples]
        return any(
            sample.labels.get("action") == "records" and sample.name == "floodmark_requests_total"
            for sample in samples
        )

    wait_until(counted, "it was not counted")
