"""Partitions that split and merge under remote clients: they follow, and nothing is lost or doubled."""

from random import Random
from threading import Event

import pytest
from tests.server.support import connected, in_threads, qualify, stored

from floodmark.model.errors import PartitionMoved, Terminal
from floodmark.model.partition import PutStream
from floodmark.model.ranges import KeyRange
from floodmark.server import Server
from floodmark.site import Namespace, Site

WRITERS = 4
STEPS = 60


def test_an_old_map_is_refused_and_followed(remote: Site, site: Site, users: Namespace) -> None:
    users.put_many({b"a": b"1", b"m": b"2", b"z": b"3"})
    old = remote.host.router.maps.map.partitions[0]
    site.split("users", b"m")
    key = qualify(users, b"a")
    for use in (
        lambda: old.get(key),
        lambda: old.put([key], [stored(b"x")], durable=True),
        lambda: list(old.scan(KeyRange(b"\x00\x00\x01", b"\x00\x00\x02"), remote.now())),
        old.resolved_version,
    ):
        with pytest.raises(PartitionMoved):
            use()
    assert users.get(b"a") == b"1"
    assert users.get_many([b"a", b"m", b"z"]) == [b"1", b"2", b"3"]
    assert len(remote.host.router.maps.map.partitions) == 2
    left, right = (partition.id for partition in remote.host.router.maps.map.partitions)
    site.merge(left, right)
    assert [key for key, _ in users.scan()] == [b"a", b"m", b"z"]
    assert users.put_many({b"a": b"4", b"z": b"5"}) > 0


def test_a_key_of_another_partition_is_refused(remote: Site, users: Namespace) -> None:
    remote.split("users", b"m")
    remote.host.router.maps.refresh()
    left = remote.host.router.maps.map.partitions[0]
    with pytest.raises(PartitionMoved, match="does not hold"):
        left.put([qualify(users, b"z")], [stored(b"x")], durable=True)
    with pytest.raises(PartitionMoved, match="does not hold"):
        list(left.scan(KeyRange(b"\x00\x00\x01", b"\x00\x00\x02"), remote.now()))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_writers_and_readers_go_on_through_splits_and_merges(
    server: Server, remote: Site, users: Namespace, seed: int
) -> None:
    done = Event()

    def write(number: int) -> dict[bytes, bytes]:
        chance, written = Random(f"{seed}/{number}"), dict[bytes, bytes]()
        with connected(server) as site:
            mine = site.namespace("users")
            stream = site.host.write_stream(PutStream(True))
            for step in range(STEPS):
                rows = {b"%03d-%d" % (chance.randrange(1_000), number): b"%d" % step for _ in range(10)}
                if step % 3 == 0:
                    mine.put_many(rows)
                elif step % 3 == 1:
                    stream.send({qualify(mine, key): stored(value) for key, value in rows.items()}).result(60)
                else:
                    for key, value in rows.items():
                        mine.put(key, value)
                written |= rows
                assert mine.get_many(list(rows)) == list(rows.values())
            stream.close()
        return written

    def read() -> dict[bytes, bytes]:
        with connected(server) as site:
            mine = site.namespace("users")
            while not done.is_set():
                version = site.now()
                rows = list(mine.scan(at=version))
                assert rows == sorted(dict(rows).items())
                assert list(mine.scan(at=version, reverse=True)) == rows[::-1]
        return {}

    def reshape() -> dict[bytes, bytes]:
        chance = Random(seed)
        while not done.is_set():
            partitions = remote.partitions()
            try:
                if len(partitions) < 6 and chance.random() < 0.6:
                    remote.split("users", b"%03d" % chance.randrange(1_000))
                elif len(partitions) > 1:
                    place = chance.randrange(len(partitions) - 1)
                    remote.merge(partitions[place].id, partitions[place + 1].id)
            except Terminal:
                pass
        return {}

    def work(number: int) -> dict[bytes, bytes]:
        if number == WRITERS:
            return read()
        if number > WRITERS:
            return reshape()
        try:
            return write(number)
        finally:
            finished.append(number)
            if len(finished) == WRITERS:
                done.set()

    finished: list[int] = []
    results = in_threads(work, WRITERS + 2)
    expected = {key: value for written in results for key, value in written.items()}
    assert dict(users.scan()) == expected
    state: dict[bytes, bytes | None] = {}
    for change in remote.changes("users"):
        state[change.key] = change.value
    assert state == expected
