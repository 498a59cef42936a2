"""What is no record never enters a partition, whichever way it comes, and nobody else is disturbed by it."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.server.support import connected, qualify, serving, stored, token_of, write_roles
from tests.waiting import HANG_SECONDS

from floodmark.codec.values import encode_value
from floodmark.host.transaction_port import NamespaceWrites
from floodmark.merge.counter import add_to_counter
from floodmark.merge.fields import put_fields
from floodmark.model.access import Role
from floodmark.model.change import Stamp
from floodmark.model.errors import InvalidArgument, InvalidKey, InvalidValue, NamespaceNotFound, WrongPolicy
from floodmark.model.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from floodmark.model.partition import (
    ApplyStream,
    LoadStream,
    MergeStream,
    PutStream,
    PutUnchangedStream,
    StreamCommand,
)
from floodmark.model.record import Repair
from floodmark.server import Server, ServerOptions
from floodmark.site import Namespace, Site

ORIGIN = Stamp(1, 9)

# One key and what is to be stored under it, sent by each way in.
Way = Callable[[Site, Namespace, bytes, bytes], object]


def _partition(site: Site) -> Any:
    return site.host.router.maps.map.partitions[0]


def _commit(site: Site, namespace: Namespace, key: bytes, value: bytes) -> object:
    transactions = site.host.transactions
    transaction = transactions.begin(timedelta(seconds=10), 0)
    return transactions.commit(transaction, [NamespaceWrites(namespace.name, namespace.id, {key: value})])


def _stream(command: StreamCommand) -> Way:
    def send(site: Site, namespace: Namespace, key: bytes, value: bytes) -> object:
        stream = site.host.write_stream(command)
        try:
            return stream.send({qualify(namespace, key): value}).result(HANG_SECONDS)
        finally:
            stream.close()

    return send


def _direct(method: str, *more: object) -> Way:
    def send(site: Site, namespace: Namespace, key: bytes, value: bytes) -> object:
        return getattr(_partition(site), method)([qualify(namespace, key)], [value], *more, durable=True)

    return send


def _compare(site: Site, namespace: Namespace, key: bytes, value: bytes) -> object:
    return _partition(site).compare_and_set(qualify(namespace, key), None, value, durable=True)


def _repair(site: Site, namespace: Namespace, key: bytes, value: bytes) -> object:
    return site.host.verification.repair_records(namespace.name, [Repair(key, 0, value)])


# Those that take new values, and those that take copies.
NEW: dict[str, Way] = {
    "put": _direct("put"),
    "put_unchanged": _direct("put_unchanged", 1),
    "compare_and_set": _compare,
    "commit": _commit,
    "stream": _stream(PutStream(True)),
    "unchanged stream": _stream(PutUnchangedStream(True, 1)),
}
COPIES: dict[str, Way] = {
    "apply": _direct("apply"),
    "load": _direct("load"),
    "repair": _repair,
    "apply stream": _stream(ApplyStream(True)),
    "load stream": _stream(LoadStream(True)),
}
STATES: dict[str, Way] = {
    "merge": _direct("merge"),
    "commit": _commit,
    "merge stream": _stream(MergeStream(True)),
}

NO_RECORDS = [b"", b"xx\x40", b"x\x01", b"x\x02", b"x\x20", b"x\x80", b"x\x05"]
TOO_LARGE = bytes(VALUE_BYTES_MAX + 1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Server]]:
    access = write_roles(Path(tmp_path_factory.mktemp("access")) / "access.toml")
    with serving(ServerOptions(access=access)) as (site, server):
        site.create_namespace("users").put(b"ada", b"countess")
        site.create_namespace("people", merge="fields")
        site.create_namespace("visits", merge="counter")
        yield site, server


@pytest.fixture
def local(served: tuple[Site, Server]) -> Site:
    return served[0]


@pytest.fixture(params=["remote", "local"])
def site(served: tuple[Site, Server], request: pytest.FixtureRequest) -> Iterator[Site]:
    local, server = served
    if request.param == "local":
        yield local
        return
    with connected(server, token=token_of(Role.ADMIN)) as site:
        yield site


@pytest.fixture(autouse=True)
def undisturbed(local: Site) -> Iterator[None]:
    """After each test all can be read: by key, by scan, and by those who follow the site."""
    yield
    for name in ("users", "people", "visits"):
        assert dict(local.namespace(name).scan()) == ({b"ada": b"countess"} if name == "users" else {})
    assert [change.key for change in local.changes()] == [b"ada"]


@pytest.mark.parametrize("way", NEW)
def test_what_is_no_record_is_refused(site: Site, way: str) -> None:
    users = site.namespace("users")
    for value in (
        *NO_RECORDS,
        stored(TOO_LARGE),
        encode_value(b"x", origin=ORIGIN),
        encode_value(b"", 1 << 63),
    ):
        with pytest.raises(InvalidValue):
            NEW[way](site, users, b"key", value)


@pytest.mark.parametrize("way", COPIES)
def test_what_is_no_copy_is_refused(site: Site, way: str) -> None:
    users = site.namespace("users")
    damaged = [b"x\x04", encode_value(b"x", origin=ORIGIN)[:-1] + b"\x44"]
    for value in (*NO_RECORDS, *damaged, stored(b"x"), encode_value(TOO_LARGE, origin=ORIGIN)):
        with pytest.raises(InvalidValue):
            COPIES[way](site, users, b"key", value)


@pytest.mark.parametrize("way", [*NEW, *COPIES])
def test_what_is_no_key_is_refused(site: Site, way: str) -> None:
    users = site.namespace("users")
    value = stored(b"x") if way in NEW else encode_value(b"x", origin=ORIGIN)
    for key in (b"", bytes(KEY_BYTES_MAX + 1)):
        with pytest.raises(InvalidKey):
            {**NEW, **COPIES}[way](site, users, key, value)


@pytest.mark.parametrize("way", NEW)
@pytest.mark.parametrize("name", ["people", "visits"])
def test_plain_values_are_refused_where_records_are_merged(site: Site, way: str, name: str) -> None:
    with pytest.raises(WrongPolicy):
        NEW[way](site, site.namespace(name), b"key", stored(b"x"))


@pytest.mark.parametrize("way", STATES)
def test_states_are_refused_where_they_do_not_belong(site: Site, way: str) -> None:
    for name, state in (
        ("users", add_to_counter(1)),
        ("users", put_fields(b"{}")),
        ("people", add_to_counter(1)),
        ("visits", put_fields(b"{}")),
    ):
        with pytest.raises(WrongPolicy):
            STATES[way](site, site.namespace(name), b"key", state)


def test_nothing_is_stored_in_part_when_several_partitions_are_written(site: Site) -> None:
    users = site.namespace("users")
    if len(site.partitions()) == 1:
        site.split("users", b"m")
    rows = {qualify(users, b"a"): stored(b"fine"), qualify(users, b"z"): b"xx\x40"}
    stream = site.host.write_stream(PutStream(True))
    try:
        with pytest.raises(InvalidValue):
            stream.send(rows).result(HANG_SECONDS)
    finally:
        stream.close()


def test_a_namespace_that_is_not_there_takes_nothing(local: Site) -> None:
    partition = _partition(local)
    with pytest.raises(NamespaceNotFound):
        partition.put([b"\x00\x00\x09key"], [stored(b"x")], durable=True)


def test_a_key_stands_once_in_a_commit(local: Site) -> None:
    key = qualify(local.namespace("users"), b"a")
    with pytest.raises(InvalidArgument):
        _partition(local).put([key, key], [stored(b"1"), stored(b"2")], durable=True)
