"""Rows as columns: round trips, and batches that hold something else than they say."""

from typing import TypeVar

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from floodmark.columns.pairs import PAIRS, Pairs
from floodmark.model.change import Heartbeat, Sums, Tally
from floodmark.model.errors import InvalidArgument, WireMismatch
from floodmark.model.stream import ChangeBatch, Way
from floodmark.model.version import VERSION_MAX
from floodmark.wire.columns import (
    changes_schema,
    decode_changes,
    decode_columns,
    decode_pairs,
    encode_changes,
    encode_pairs,
    encode_rows,
    require_pairs,
)

Item = TypeVar("Item")

VALUES = st.binary(max_size=30)
HEARTBEAT = Heartbeat(
    version=VERSION_MAX,
    node=0,
    wall_ms=1,
    since=2,
    through=3,
    watermark={1: {7: VERSION_MAX}},
    sums={1: Sums(Tally(1, VERSION_MAX), Tally(2, 3))},
)


@given(st.lists(st.tuples(VALUES, VALUES)))
def test_pairs_come_back(pairs: list[tuple[bytes, bytes]]) -> None:
    for bytes_max in (1, 100, 1_000_000):
        messages = encode_pairs(pairs, bytes_max=bytes_max)
        assert [pair for message in messages for pair in decode_pairs(message)] == pairs


@given(st.dictionaries(VALUES, VALUES))
def test_rows_come_back(rows: dict[bytes, bytes]) -> None:
    batch = encode_rows(rows)
    require_pairs(batch)
    assert decode_columns(batch) == (list(rows), list(rows.values()))


@given(st.dictionaries(VALUES, VALUES))
def test_columns_come_back_as_they_are(rows: dict[bytes, bytes]) -> None:
    columns = [pyarrow.array(column, pyarrow.binary()) for column in (list(rows), list(rows.values()))]
    batch = encode_rows(Pairs.sort(*columns))
    require_pairs(batch)
    assert batch.equals(encode_rows(dict(sorted(rows.items()))))


def test_of_a_key_that_stands_twice_in_columns_the_last_value_is_sent() -> None:
    pairs = Pairs.sort(pyarrow.array([b"b", b"a", b"b"]), pyarrow.array([b"1", b"2", b"3"]))
    assert decode_pairs(encode_rows(pairs)) == [(b"a", b"2"), (b"b", b"3")]


@given(
    st.lists(st.tuples(st.integers(0, VERSION_MAX), st.integers(0, 2**32 - 1))),
    st.data(),
    st.booleans(),
)
def test_changes_come_back(places: list[tuple[int, int]], data: st.DataObject, with_before: bool) -> None:
    def column(items: st.SearchStrategy[Item]) -> list[Item]:
        return data.draw(st.lists(items, min_size=len(places), max_size=len(places)))

    batch = ChangeBatch(
        through=VERSION_MAX,
        way=Way.TAIL,
        versions=[version for version, _ in places],
        partitions=[partition for _, partition in places],
        keys=column(VALUES),
        values=column(VALUES),
        befores=column(st.none() | VALUES) if with_before else None,
        heartbeats=[HEARTBEAT],
    )
    ((encoded, metadata),) = encode_changes(batch, since=1, before_images=with_before, bytes_max=1_000_000)
    assert encoded.schema.equals(changes_schema(before_images=with_before))
    assert decode_changes(encoded, metadata) == batch


@pytest.mark.parametrize("rows", [0, 1, 2, 99, 100])
@pytest.mark.parametrize("bytes_max", [1, 1_000, 10_000_000])
def test_a_batch_is_cut_into_messages(rows: int, bytes_max: int) -> None:
    keys = [b"%03d" % number for number in range(rows)]
    beats = [replace(HEARTBEAT, version=9)]
    batch = ChangeBatch(
        through=9, versions=[8] * rows, partitions=[1] * rows, keys=keys, values=keys, heartbeats=beats
    )
    encoded = encode_changes(batch, since=3, before_images=False, bytes_max=bytes_max)
    messages = [decode_changes(*message) for message in encoded]
    assert [key for message in messages for key in message.keys] == keys
    assert [message.through for message in messages] == [7] * (len(messages) - 1) + [9]
    assert [list(message.heartbeats) for message in messages[:-1]] == [[]] * (len(messages) - 1)
    assert messages[-1].heartbeats == beats
    if bytes_max == 1:
        assert len(messages) == max(1, rows)


def test_a_message_says_through_which_version_commits_are_whole() -> None:
    versions, beats = [4, 5, 5, 7, 7, 8], [replace(HEARTBEAT, version=version) for version in (6, 9)]
    keys = [b"%d" % number for number in range(len(versions))]
    batch = ChangeBatch(
        through=9, versions=versions, partitions=[1] * 6, keys=keys, values=keys, heartbeats=beats
    )
    encoded = encode_changes(batch, since=3, before_images=False, bytes_max=1)
    messages = [decode_changes(*message) for message in encoded]
    assert [message.through for message in messages] == [4, 4, 5, 6, 7, 9]
    told = [[beat.version for beat in message.heartbeats] for message in messages]
    assert told == [[], [], [], [6], [], [9]]


def test_a_message_without_changes_has_the_columns_of_its_stream() -> None:
    ((encoded, _),) = encode_changes(ChangeBatch(through=1), since=0, before_images=True)
    assert encoded.schema.equals(changes_schema(before_images=True))


def test_metadata_of_something_else_is_a_mismatch() -> None:
    ((encoded, _),) = encode_changes(ChangeBatch(through=1), since=0, before_images=False)
    for metadata in (b"", b"\xc1", b"\x01"):
        with pytest.raises(WireMismatch, match="same release"):
            decode_changes(encoded, metadata)


def test_offsets_outside_the_data_are_found_before_anyone_follows_them() -> None:
    # The first and the last are right, which is all that a quick look sees.
    offsets = pyarrow.py_buffer(b"".join(offset.to_bytes(4, "little") for offset in (0, 1_000_000, 3)))
    wild = pyarrow.Array.from_buffers(pyarrow.binary(), 2, [None, offsets, pyarrow.py_buffer(b"abc")])
    sound = pyarrow.array([b"x", b"y"])
    for columns in ([wild, sound], [sound, wild]):
        batch = pyarrow.RecordBatch.from_arrays(columns, schema=PAIRS)
        with pytest.raises(InvalidArgument, match="damaged"):
            require_pairs(batch)


def test_nulls_are_refused() -> None:
    batch = pyarrow.RecordBatch.from_arrays(
        [pyarrow.array([b"k"]), pyarrow.array([None], pyarrow.binary())], schema=PAIRS
    )
    with pytest.raises(InvalidArgument):
        require_pairs(batch)


@pytest.mark.parametrize(
    "schema",
    [
        pyarrow.schema([]),
        pyarrow.schema([("key", pyarrow.binary()), ("value", pyarrow.binary())]),
        pyarrow.schema([("key", pyarrow.string()), ("value", pyarrow.string())]),
        PAIRS.append(pyarrow.field("more", pyarrow.binary())),
    ],
)
def test_other_columns_are_refused(schema: pyarrow.Schema) -> None:
    columns = [pyarrow.array([], field.type) for field in schema]
    with pytest.raises(InvalidArgument, match="two columns"):
        require_pairs(pyarrow.RecordBatch.from_arrays(columns, schema=schema))
