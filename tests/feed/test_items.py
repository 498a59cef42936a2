"""From batches to changes: every kind of stored record becomes the change that a user expects."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import PLAIN, TOMBSTONE, encode_value
from floodmark.feed.reading.items import Decoder
from floodmark.model.change import Change, ChangeType, Heartbeat, Resolved, Stamp
from floodmark.model.errors import Corruption
from floodmark.model.stream import ChangeBatch
from floodmark.model.version import Version

HERE = 7
NOW_S = 1_000
NAMES = {1: "users", 2: "orders", 258: "far"}

Row = tuple[Version, int, bytes, bytes]


class Names:
    """The names of namespaces, and how often somebody asked for them."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = dict(names)
        self.asked = 0

    def __call__(self) -> Mapping[int, str]:
        self.asked += 1
        return self.names


def decoder(names: Names | None = None) -> Decoder:
    return Decoder(HERE, names or Names(NAMES), lambda: NOW_S * 1000)


def key_of(user_key: bytes, namespace: int = 1) -> bytes:
    return encode_namespace(namespace) + user_key


def batch_of(
    rows: Sequence[Row],
    *,
    through: Version = 100,
    befores: Sequence[bytes | None] | None = None,
    heartbeats: Sequence[Heartbeat] = (),
) -> ChangeBatch:
    return ChangeBatch(
        through=through,
        versions=[row[0] for row in rows],
        partitions=[row[1] for row in rows],
        keys=[row[2] for row in rows],
        values=[row[3] for row in rows],
        befores=befores,
        heartbeats=heartbeats,
    )


def heartbeat(version: Version, log: int | None = None) -> Heartbeat:
    return Heartbeat(
        version=version, node=0, wall_ms=0, since=0, through=version, watermark={}, sums={}, log=log
    )


def upsert(version: Version, key: bytes, value: bytes, **more: Any) -> Change:
    stamp = more.pop("stamp", Stamp(version, HERE))
    name = more.pop("namespace", "users")
    return Change(name, key, value, ChangeType.UPSERT, version, stamp, 5, **more)


def delete(version: Version, key: bytes, **more: Any) -> Change:
    stamp = more.pop("stamp", Stamp(version, HERE))
    return Change("users", key, None, ChangeType.DELETE, version, stamp, 5, **more)


CASES: dict[str, tuple[bytes, Change]] = {
    "plain": (b"value" + PLAIN, upsert(9, b"key", b"value")),
    "empty": (PLAIN, upsert(9, b"key", b"")),
    "a value that ends like a tombstone": (TOMBSTONE + PLAIN, upsert(9, b"key", b"\x02")),
    "tombstone": (TOMBSTONE, delete(9, b"key")),
    "alive": (encode_value(b"1", NOW_S + 1), upsert(9, b"key", b"1", expires_at=NOW_S + 1)),
    "expired now": (encode_value(b"1", NOW_S), delete(9, b"key", expires_at=NOW_S)),
    "expired long ago": (encode_value(b"1", 1), delete(9, b"key", expires_at=1)),
    "foreign": (encode_value(b"1", origin=Stamp(4, 3)), upsert(9, b"key", b"1", stamp=Stamp(4, 3))),
    "foreign tombstone": (
        encode_value(b"", None, True, origin=Stamp(4, 3)),
        delete(9, b"key", stamp=Stamp(4, 3)),
    ),
    "foreign and expired": (
        encode_value(b"1", 5, origin=Stamp(4, 3)),
        delete(9, b"key", stamp=Stamp(4, 3), expires_at=5),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("company", [False, True], ids=["alone", "among plain ones"])
def test_stored_record_becomes_its_change(case: str, company: bool) -> None:
    """Batches of plain puts take a short way; one other record among them must not be led astray."""
    stored, expected = CASES[case]
    row: Row = (9, 5, key_of(b"key"), stored)
    plain: Row = (8, 5, key_of(b"plain"), b"p" + PLAIN)
    rows = [plain, row, plain] if company else [row]
    found = decoder().decode(batch_of(rows))
    beside = upsert(8, b"plain", b"p")
    assert found == ([beside, expected, beside] if company else [expected])


rows = st.lists(
    st.tuples(
        st.integers(1, 50),
        st.integers(64, 70),
        st.builds(key_of, st.binary(min_size=1, max_size=4), st.sampled_from([1, 2, 3, 258])),
        st.one_of(
            st.binary(max_size=3).map(lambda value: value + PLAIN),
            st.just(TOMBSTONE),
            st.builds(encode_value, st.binary(max_size=3), st.sampled_from([None, NOW_S, NOW_S + 9])),
            st.builds(
                lambda value, deleted: encode_value(value, None, deleted, origin=Stamp(2, 3)),
                st.binary(max_size=3),
                st.booleans(),
            ),
        ),
    ),
    max_size=8,
)


@given(rows=rows)
def test_batch_is_decoded_as_its_changes_one_by_one(rows: list[Row]) -> None:
    one_by_one = [change for row in rows for change in decoder().decode(batch_of([row]))]
    assert decoder().decode(batch_of(rows)) == one_by_one
    assert len(one_by_one) == sum(row[2][:3] != encode_namespace(3) for row in rows)


# Names


def test_change_of_an_unknown_namespace_is_left_out() -> None:
    names = Names(NAMES)
    decode = decoder(names).decode
    unknown: Row = (9, 5, key_of(b"key", 3), b"1" + PLAIN)
    known: Row = (9, 5, key_of(b"key", 2), b"1" + PLAIN)
    assert decode(batch_of([unknown])) == []
    assert [change.namespace for change in decode(batch_of([unknown, known, unknown]))] == ["orders"]
    assert names.asked <= 2, "one that is unknown stays unknown"


def test_names_are_asked_for_once_and_again_for_new_namespaces() -> None:
    names = Names({1: "users"})
    decode = decoder(names).decode
    for _ in range(5):
        assert len(decode(batch_of([(9, 5, key_of(b"key"), b"1" + PLAIN)]))) == 1
    assert names.asked == 1
    names.names[9] = "new"
    (change,) = decode(batch_of([(9, 5, key_of(b"key", 9), b"1" + PLAIN)]))
    assert change.namespace == "new"
    assert names.asked == 2


def test_name_stays_known_when_its_namespace_is_gone() -> None:
    names = Names({1: "users"})
    decode = decoder(names).decode
    decode(batch_of([(9, 5, key_of(b"key"), b"1" + PLAIN)]))
    names.names.clear()
    assert len(decode(batch_of([(10, 5, key_of(b"key"), b"1" + PLAIN)]))) == 1


# Before-images

BEFORE, AFTER = ChangeType.UPDATE_PREIMAGE, ChangeType.UPDATE_POSTIMAGE


@pytest.mark.parametrize(
    ("before", "stored", "expected"),
    [
        (None, b"new" + PLAIN, [(ChangeType.INSERT, b"new")]),
        (TOMBSTONE, b"new" + PLAIN, [(ChangeType.INSERT, b"new")]),
        (b"old" + PLAIN, b"new" + PLAIN, [(BEFORE, b"old"), (AFTER, b"new")]),
        (PLAIN, PLAIN, [(BEFORE, b""), (AFTER, b"")]),
        (b"old" + PLAIN, TOMBSTONE, [(ChangeType.DELETE, b"old")]),
        (None, TOMBSTONE, [(ChangeType.DELETE, None)]),
        (TOMBSTONE, TOMBSTONE, [(ChangeType.DELETE, None)]),
        (b"old" + PLAIN, encode_value(b"new", NOW_S), [(ChangeType.DELETE, b"old")]),
        (None, encode_value(b"new", NOW_S), [(ChangeType.DELETE, None)]),
    ],
)
def test_before_image_decides_the_kind(
    before: bytes | None, stored: bytes, expected: list[tuple[ChangeType, bytes | None]]
) -> None:
    batch = batch_of([(9, 5, key_of(b"key"), stored)], befores=[before])
    found = decoder().decode(batch)
    assert [(change.type, change.value) for change in found] == expected
    assert {(change.version, change.partition, change.key, change.stamp) for change in found} == {
        (9, 5, b"key", Stamp(9, HERE))
    }


def test_images_carry_the_stamp_of_the_change() -> None:
    batch = batch_of(
        [(9, 5, key_of(b"key"), encode_value(b"new", origin=Stamp(4, 3)))],
        befores=[encode_value(b"old", NOW_S + 5, origin=Stamp(2, 2))],
    )
    found = decoder().decode(batch)
    assert [change.stamp for change in found] == [Stamp(4, 3), Stamp(4, 3)]
    assert [change.expires_at for change in found] == [NOW_S + 5, None]


# Markers and heartbeats


def test_marker_comes_last_and_heartbeats_come_at_their_places() -> None:
    batch = batch_of(
        [(version, 5, key_of(b"key"), b"1" + PLAIN) for version in (3, 5, 5, 9)],
        heartbeats=[heartbeat(2), heartbeat(4), heartbeat(7), heartbeat(7, log=64), heartbeat(11)],
        through=12,
    )
    found = list(decoder().items(batch, resolved_markers=True))
    assert [item.version for item in found] == [2, 3, 4, 5, 5, 7, 7, 9, 11, 12]
    assert isinstance(found[-1], Resolved)
    assert sum(isinstance(item, Heartbeat) for item in found) == 5
    assert list(decoder().items(batch, resolved_markers=False)) == found[:-1]


# Damage


@pytest.mark.parametrize("stored", [b"", b"\x01", b"value\x80", b"\x04"])
@pytest.mark.parametrize("images", [False, True])
def test_damaged_record_names_the_key_and_the_version(stored: bytes, images: bool) -> None:
    batch = batch_of(
        [(8, 5, key_of(b"fine"), b"1" + PLAIN), (9, 5, key_of(b"broken"), stored)],
        befores=[None, None] if images else None,
    )
    with pytest.raises(Corruption) as found:
        list(decoder().decode(batch))
    assert "broken" in str(found.value)
    assert found.value.details["version"] == 9
