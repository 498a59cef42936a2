"""Copies that come in columns, few or many: each batch is taken in, or refused, as row by row."""

from collections.abc import Callable, Iterator, Sequence
from random import Random

import msgspec
import pyarrow
import pytest
from pyarrow import flight
from tests.server.support import qualify, raw_client, raw_options

from floodmark.codec.values import encode_value
from floodmark.columns.pairs import PAIRS
from floodmark.model.change import Change, Stamp
from floodmark.model.partition import ApplyStream
from floodmark.server import Server
from floodmark.site import Namespace, Site
from floodmark.wire import messages

Rows = list[tuple[bytes, bytes]]
Send = Callable[[Rows], tuple[int, dict[str, list[str]] | None]]


@pytest.fixture
def send(server: Server) -> Iterator[Send]:
    """Sends a batch as it is, and gives back its version, or an error."""
    command = messages.COMMAND.encode_request(ApplyStream(True))
    descriptor = flight.FlightDescriptor.for_command(command)
    writer, reader = raw_client(server).do_put(descriptor, PAIRS, raw_options(timeout=60))

    def send(rows: Rows) -> tuple[int, dict[str, list[str]] | None]:
        columns = [[key for key, _ in rows], [value for _, value in rows]]
        arrays = [pyarrow.array(column, pyarrow.binary()) for column in columns]
        writer.write_batch(pyarrow.RecordBatch.from_arrays(arrays, schema=PAIRS))
        version, error = msgspec.msgpack.decode(reader.read())
        return version, error

    yield send
    writer.close()


def copies(users: Namespace, count: int, value: bytes = b"1") -> Rows:
    origin = Stamp(users.put(b"first", b""), 3)
    return [(qualify(users, b"%05d" % number), encode_value(value, origin=origin)) for number in range(count)]


def taken_in(site: Site) -> dict[bytes, bytes | None]:
    changes = [change for change in site.changes("users") if isinstance(change, Change)]
    return {change.key: change.value for change in changes if change.key != b"first"}


@pytest.mark.parametrize("count", [1, 10, 255, 256, 1_000])
@pytest.mark.parametrize("order", ["in order", "backward", "shuffled"])
def test_copies_are_taken_in_whatever_their_order(
    send: Send, users: Namespace, remote: Site, count: int, order: str
) -> None:
    rows = copies(users, count)
    if order == "backward":
        rows.reverse()
    elif order == "shuffled":
        Random(1).shuffle(rows)
    version, error = send(rows)
    assert (version > 0, error) == (True, None)
    assert taken_in(remote) == {b"%05d" % number: b"1" for number in range(count)}
    assert send(rows) == (0, None), "the same again changes nothing"


def unusual(users: Namespace) -> dict[str, tuple[str, bytes, bytes]]:
    origin = Stamp(users.put(b"first", b""), 3)
    key, record = qualify(users, b"x"), encode_value(b"1", origin=origin)
    return {
        "key twice": ("InvalidArgument", qualify(users, b"00000"), record),
        "no key": ("InvalidKey", qualify(users, b""), record),
        "long key": ("InvalidKey", qualify(users, bytes(4097)), record),
        "no namespace": ("NamespaceNotFound", b"\xff\xff\xff" + b"x", record),
        "no record": ("InvalidValue", key, b""),
        "no origin": ("InvalidValue", key, encode_value(b"1")),
        "too short": ("InvalidValue", key, b"short\x04"),
        "unknown flags": ("InvalidValue", key, record[:-1] + b"\xc4"),
        "large": ("InvalidValue", key, encode_value(bytes((1 << 20) + 1), origin=origin)),
        "deleted and not empty": ("InvalidValue", key, encode_value(b"1", deleted=True, origin=origin)),
    }


@pytest.mark.parametrize("count", [1, 10, 500])
@pytest.mark.parametrize("ordered", [True, False], ids=["in order", "behind the others"])
def test_batch_with_one_wrong_row_is_refused_whole(
    send: Send, users: Namespace, remote: Site, count: int, ordered: bool
) -> None:
    for name, (kind, key, record) in unusual(users).items():
        rows = [*copies(users, count), (key, record)]
        version, error = send(sorted(rows) if ordered else rows)
        assert version == 0, name
        assert error is not None, name
        assert kind in error["kinds"], name
    assert not taken_in(remote)
    assert send(copies(users, count))[0] > 0


@pytest.mark.parametrize("count", [1, 500])
def test_unusual_records_are_taken_in_among_others(
    send: Send, users: Namespace, remote: Site, count: int
) -> None:
    origin = Stamp(users.put(b"first", b""), 3)
    records: Sequence[tuple[bytes, bytes]] = [
        (b"gone", encode_value(b"", deleted=True, origin=origin)),
        (b"kept", encode_value(b"for a while", 1 << 40, origin=origin)),
        (b"large", encode_value(bytes(100_000), origin=origin)),
    ]
    rows = copies(users, count) + [(qualify(users, key), record) for key, record in records]
    assert send(rows)[1] is None
    found = taken_in(remote)
    assert len(found) == count + len(records)
    assert (found[b"gone"], found[b"kept"], found[b"large"]) == (None, b"for a while", bytes(100_000))
