"""Change-log rows: what was packed comes back, and a damaged row is told, never misread by accident."""

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from floodmark.codec.changelog import (
    CommitRow,
    decode_log_key,
    decode_row,
    encode_commit,
    encode_heartbeat,
    encode_log_key,
    encode_log_range,
    encode_single,
)
from floodmark.model.change import Heartbeat, Sums, Tally
from floodmark.model.errors import Corruption
from floodmark.model.limits import (
    COMMIT_BYTES_MAX,
    KEY_BYTES_MAX,
    LOG_INLINE_VALUE_BYTES_MAX,
    LOG_ROW_BYTES_MAX,
)
from floodmark.model.version import VERSION_MAX, Version

VERSION = 411225436913926252
INLINE = bytes(LOG_INLINE_VALUE_BYTES_MAX)
LARGE = bytes(LOG_INLINE_VALUE_BYTES_MAX + 1)

KEYS = st.binary(min_size=4, max_size=24)
VALUES = st.binary(min_size=1, max_size=30) | st.sampled_from([INLINE, LARGE])
U64 = st.integers(0, VERSION_MAX)
NAMESPACES = st.integers(0, (1 << 24) - 1)
TALLIES = st.builds(Tally, st.integers(0, (1 << 32) - 1), U64)
HEARTBEATS = st.builds(
    Heartbeat,
    version=st.integers(1, VERSION_MAX),
    node=st.integers(0, 63),
    wall_ms=U64,
    since=U64,
    through=U64,
    watermark=st.dictionaries(
        NAMESPACES, st.dictionaries(st.integers(1, 255), U64, min_size=1, max_size=3), max_size=3
    ),
    sums=st.dictionaries(NAMESPACES, st.builds(Sums, TALLIES, TALLIES), max_size=3),
    log=st.none() | st.integers(0, (1 << 32) - 2),
)


def decode_commit(row: bytes) -> CommitRow:
    decoded = decode_row(VERSION, row)
    assert isinstance(decoded, CommitRow)
    return decoded


def in_log(value: bytes) -> bytes | None:
    """What a row says of a value: itself, or None for "look it up"."""
    return value if len(value) <= LOG_INLINE_VALUE_BYTES_MAX else None


def flip(row: bytes, bit: int) -> bytes:
    flipped = bytearray(row)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


# Commits


def test_commit_row_is_as_drawn() -> None:
    (row,) = encode_commit([b"\0\0\1a", b"\0\0\1bc"], [b"x\0", LARGE])
    assert row.hex(" ", 4) == bytes.fromhex(
        "01 02000000 0400 0500 02000000 ffffffff 00000161 0000016263 7800"
    ).hex(" ", 4)


@given(st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=20))
def test_commit_survives_a_round_trip(pairs: list[tuple[bytes, bytes]]) -> None:
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    (row,) = encode_commit(keys, values)
    assert decode_commit(row) == CommitRow(keys, [in_log(value) for value in values])


@given(KEYS, VALUES)
@example(b"\0\0\1a", INLINE)
@example(b"\0\0\1a", LARGE)
@example(b"\0\0\1" + bytes(KEY_BYTES_MAX), b"\0")
def test_row_of_a_single_key_equals_that_of_a_commit_of_one(key: bytes, value: bytes) -> None:
    assert [encode_single(key, value)] == encode_commit([key], [value])
    assert decode_commit(encode_single(key, value)) == CommitRow([key], [in_log(value)])


@given(
    st.lists(
        st.tuples(
            st.integers(1, 250),
            st.sampled_from([4, 11, 3 + KEY_BYTES_MAX]),
            st.sampled_from([1, 4095, 4096, 4097, 1 << 20]),
        ),
        min_size=1,
        max_size=5,
    )
)
@example([(256, 3 + KEY_BYTES_MAX, 1)])
@example([(1, 4, 1), (255, 4, 4096), (1, 4, 4096), (1, 4, 4096)])
def test_commit_of_any_size_is_cut_into_rows_that_give_it_back(runs: list[tuple[int, int, int]]) -> None:
    blank = bytes(1 << 20)
    keys = [index.to_bytes(4, "big") + blank[4:length] for index, (_, length, _) in enumerate(_flat(runs))]
    values = [blank[:length] for _, _, length in _flat(runs)]
    rows = encode_commit(keys, values)
    decoded = [decode_commit(row) for row in rows]
    assert [key for row in decoded for key in row.keys] == keys
    assert [value for row in decoded for value in row.values] == [in_log(value) for value in values]
    assert all(row.keys for row in decoded)
    assert max(map(_payload, decoded)) <= LOG_ROW_BYTES_MAX
    # No row could have taken in the first change of the next one.
    for row, following in pairwise(decoded):
        first = CommitRow(following.keys[:1], following.values[:1])
        assert _payload(row) + _payload(first) > LOG_ROW_BYTES_MAX


def _flat(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [run for run in runs for _ in range(run[0])]


def _payload(row: CommitRow) -> int:
    return sum(map(len, row.keys)) + sum(len(value) for value in row.values if value is not None)


def test_largest_commit_has_few_enough_chunks_for_the_two_bytes_that_number_them() -> None:
    pair_bytes = LOG_INLINE_VALUE_BYTES_MAX + 4
    count = COMMIT_BYTES_MAX // pair_bytes
    rows = encode_commit([index.to_bytes(4, "big") for index in range(count)], [INLINE] * count)
    assert 64 <= len(rows) < 1 << 16


def test_large_values_make_no_row_large() -> None:
    rows = encode_commit([index.to_bytes(4, "big") for index in range(60)], [bytes(1 << 20)] * 60)
    assert len(rows) == 1
    assert len(rows[0]) < 1000


# Heartbeats


SMALL = Heartbeat(
    version=VERSION,
    node=3,
    wall_ms=(VERSION >> 18) + 1,
    since=VERSION - 64,
    through=VERSION,
    watermark={1: {7: VERSION - 2, 8: VERSION + 300}, 3: {7: VERSION - 2}},
    sums={1: Sums(Tally(2, 3), Tally(4, 5))},
    log=127,
)


def test_heartbeat_row_is_as_drawn() -> None:
    drawn = (
        "03 03" + VERSION.to_bytes(8, "little").hex() + "02 7f 8001"
        "02  07 02  01 03  02 00  08 01  01 d804"
        "01  000001 02000000 0300000000000000 04000000 0500000000000000"
    )
    assert encode_heartbeat(SMALL) == bytes.fromhex(drawn)


def test_heartbeat_row_of_the_older_kind_is_read_as_it_was_drawn() -> None:
    drawn = (
        "02 03 ffffffff 0100000000000000 0200000000000000 0500000000000000"
        "01000000 000001 07 0600000000000000"
        "01000000 000001 02000000 0300000000000000 04000000 0500000000000000"
    )
    assert decode_row(VERSION, bytes.fromhex(drawn)) == Heartbeat(
        version=VERSION,
        node=3,
        wall_ms=1,
        since=2,
        through=5,
        watermark={1: {7: 6}},
        sums={1: Sums(Tally(2, 3), Tally(4, 5))},
    )


@pytest.mark.parametrize("apart_ms", [0, 700])
def test_idle_heartbeat_of_three_namespaces_at_three_sites_takes_less_than_100_bytes(apart_ms: int) -> None:
    """With its key.  The marks lie up to two seconds back, at one version a site or at one each."""
    second = 1000 << 18
    watermark = {
        namespace: {
            site: VERSION - second - (site * 3 + namespace) * (apart_ms << 18) // 9 for site in range(3)
        }
        for namespace in (1, 2, 300)
    }
    heartbeat = Heartbeat(
        version=VERSION + 1,
        node=0,
        wall_ms=VERSION >> 18,
        since=VERSION - second,
        through=VERSION,
        watermark=watermark,
        sums={},
    )
    row = encode_heartbeat(heartbeat)
    assert len(encode_log_key(0, VERSION + 1)) + len(row) < 100
    assert decode_row(VERSION + 1, row) == heartbeat


@given(HEARTBEATS)
def test_heartbeat_survives_a_round_trip(heartbeat: Heartbeat) -> None:
    assert decode_row(heartbeat.version, encode_heartbeat(heartbeat)) == heartbeat


def test_heartbeat_can_name_every_namespace_that_a_site_may_have() -> None:
    """More namespaces than two bytes count are allowed, so a heartbeat must hold their sums."""
    busy = {namespace: Sums(Tally(1, 1), Tally(1, 1)) for namespace in range(1, (1 << 16) + 2)}
    heartbeat = Heartbeat(version=VERSION, node=0, wall_ms=1, since=0, through=1, watermark={}, sums=busy)
    assert decode_row(VERSION, encode_heartbeat(heartbeat)) == heartbeat


# Damage

SMALL_COMMIT = encode_commit([b"\0\0\1a", b"\0\0\1bc", b"\0\0\1d"], [b"x\0", LARGE, b"\2"])[0]
COMMIT_LENGTHS_END = 1 + 4 + 3 * 2 + 3 * 4
SMALL_HEARTBEAT = encode_heartbeat(SMALL)
WIDE_HEARTBEAT = bytes.fromhex(
    "02 00 ffffffff 0100000000000000 0200000000000000 0300000000000000 03000000"
    "000001 07 0600000000000000 000001 08 0900000000000000 000002 07 0100000000000000 02000000"
    "000001 02000000 0300000000000000 04000000 0500000000000000"
    "000002 00000000 0000000000000000 00000000 0000000000000000"
)
WIDE_COUNTS = [*range(30, 34), *range(34 + 3 * 12, 38 + 3 * 12)]
ROWS = pytest.mark.parametrize(
    "row", [SMALL_COMMIT, SMALL_HEARTBEAT, WIDE_HEARTBEAT], ids=["commit", "heartbeat", "wide heartbeat"]
)


@ROWS
def test_row_cut_short_anywhere_is_refused(row: bytes) -> None:
    for length in range(len(row)):
        with pytest.raises(Corruption):
            decode_row(VERSION, row[:length])


@ROWS
def test_row_with_something_behind_it_is_refused(row: bytes) -> None:
    with pytest.raises(Corruption):
        decode_row(VERSION, row + b"\0")


def test_bit_flipped_in_the_kind_or_the_lengths_of_a_commit_is_refused() -> None:
    for bit in range(COMMIT_LENGTHS_END * 8):
        with pytest.raises(Corruption):
            decode_row(VERSION, flip(SMALL_COMMIT, bit))


def test_bit_flipped_in_the_kind_or_the_counts_of_a_wide_heartbeat_is_refused() -> None:
    for byte in [0, *WIDE_COUNTS]:
        for bit in range(8):
            with pytest.raises(Corruption):
                decode_row(VERSION, flip(WIDE_HEARTBEAT, byte * 8 + bit))


@ROWS
def test_bit_flipped_anywhere_is_refused_or_seen_and_never_another_exception(row: bytes) -> None:
    """Rows carry no checksum of their own (the engine's blocks do), so content cannot be refused here."""
    whole = decode_row(VERSION, row)
    for bit in range(len(row) * 8):
        with suppress(Corruption):
            assert decode_row(VERSION, flip(row, bit)) != whole


@given(st.sampled_from([b"", b"\1", b"\2", b"\3", b"\4"]), st.binary(max_size=90))
@example(b"\1", b"\xff\xff\xff\xff")
@example(b"\1", b"\xff\xff\xff\x7f" + bytes(80))
def test_any_bytes_decode_or_are_refused_as_corrupt(kind: bytes, rest: bytes) -> None:
    with suppress(Corruption):
        decode_row(VERSION, kind + rest)


# Keys of rows


def test_log_key_is_as_drawn() -> None:
    assert encode_log_key(7, 258, 3).hex() == "00000007" + "0000000000000102" + "0003"


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 255, 256, (1 << 32) - 1]),
            st.sampled_from([1, 255, 256, VERSION_MAX]) | U64,
            st.integers(0, 300),
        ),
        max_size=20,
    )
)
def test_log_keys_sort_by_log_then_version_then_chunk(keys: list[tuple[int, Version, int]]) -> None:
    encoded = [encode_log_key(*key) for key in keys]
    assert [decode_log_key(key) for key in sorted(encoded)] == sorted(keys)


@pytest.mark.parametrize("key", [b"", bytes(13), bytes(15)])
def test_log_key_of_wrong_length_is_refused(key: bytes) -> None:
    with pytest.raises(Corruption, match="14 bytes"):
        decode_log_key(key)


BOUNDS = st.sampled_from([0, 1, 2, VERSION_MAX - 1, VERSION_MAX]) | U64


@given(
    st.sampled_from([0, 5, (1 << 32) - 2]),
    BOUNDS,
    BOUNDS,
    st.sampled_from([-1, 0, 1]),
    BOUNDS,
    st.sampled_from([0, 1, 65535]),
)
@example(5, VERSION_MAX, VERSION_MAX, 0, VERSION_MAX, 0)
def test_log_range_holds_exactly_the_rows_above_since_and_up_to_until(
    log: int, since: Version, until: Version, neighbour: int, version: Version, chunk: int
) -> None:
    if log + neighbour < 0:
        return
    start, end = encode_log_range(log, since, until)
    inside = start <= encode_log_key(log + neighbour, version, chunk) < end
    assert inside == (neighbour == 0 and since < version <= until)
