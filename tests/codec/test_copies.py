"""Plain copies that are looked at all at once: the same stamps, sums and rows as one by one."""

from itertools import cycle
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.codec.changelog import encode_commit
from floodmark.codec.records import Copies, gather_copies
from floodmark.codec.stamps import digest_copies, find_origins, stamp_version
from floodmark.codec.values import TOMBSTONE, encode_value
from floodmark.model.change import Stamp
from floodmark.model.limits import LOG_INLINE_VALUE_BYTES_MAX, LOG_ROW_BYTES_MAX

# The site that the records are at.
HERE = 1
MANY = 64
KEY_BYTES = 19
OVERHEAD = len(encode_value(b"", origin=Stamp(1, 1)))

Rows = dict[bytes, bytes]


def copies_of(
    random: Random, count: int, key_sizes: list[int], value_sizes: list[int], namespace: bytes = b"\0\0\1"
) -> Rows:
    """Copies under random keys, in order of keys."""
    rows: Rows = {}
    while len(rows) < count:
        key = namespace + random.randbytes(random.choice(key_sizes))
        origin = Stamp(random.getrandbits(64) or 1, random.randint(2, 255))
        rows[key] = encode_value(random.randbytes(random.choice(value_sizes)), origin=origin)
    return dict(sorted(rows.items()))


def gather(rows: Rows) -> Copies | None:
    return gather_copies(list(rows), list(rows.values()), HERE)


def require_same(rows: Rows) -> None:
    """What is made of many at once must be what is made of each."""
    keys, records = list(rows), list(rows.values())
    copies = gather(rows)
    assert copies is not None
    assert copies.latest == stamp_version(max(find_origins(records)))
    assert copies.encode_rows() == encode_commit(keys, records)
    assert list(digest_copies(keys, records, HERE)) == [(keys[0][:3], len(keys), copies.digest(), False)]


sizes = st.lists(st.integers(0, 40), min_size=1, max_size=3)


@given(
    st.integers(0, 99), st.integers(MANY, 200), st.lists(st.integers(2, 40), min_size=1, max_size=3), sizes
)
def test_many_copies_are_what_each_is(seed: int, count: int, key_sizes: list[int], values: list[int]) -> None:
    require_same(copies_of(Random(seed), count, key_sizes, values))


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("sizes", [(100,), (100, 3000)], ids=["one length", "two lengths"])
def test_rows_of_the_change_log_end_where_they_are_full(extra: int, sizes: tuple[int, ...]) -> None:
    random, rows, left = Random(3), Rows(), LOG_ROW_BYTES_MAX + extra
    for size in cycle(sizes):
        left -= KEY_BYTES + OVERHEAD
        rows[b"\0\0\1%016d" % len(rows)] = encode_value(random.randbytes(size), origin=Stamp(7, 2))
        left -= size
        if left < max(sizes):
            break
    key, record = rows.popitem()
    rows[key] = encode_value(bytes(len(record) - OVERHEAD + left), origin=Stamp(7, 2))
    assert len(encode_commit(list(rows), list(rows.values()))) == 1 + (extra > 0)
    require_same(rows)
    require_same({b"\0\0\1" + bytes(16): encode_value(b"", origin=Stamp(7, 2)), **rows})


def test_longest_value_of_the_change_log_is_in_its_row() -> None:
    rows = copies_of(Random(1), MANY, [16], [LOG_INLINE_VALUE_BYTES_MAX - OVERHEAD])
    require_same(rows)
    require_same(copies_of(Random(2), 3 * MANY, [16], [0, LOG_INLINE_VALUE_BYTES_MAX - OVERHEAD]))


UNUSUAL = {
    "first written here": encode_value(b"1", origin=Stamp(7, HERE)),
    "without an origin": encode_value(b"1"),
    "expiring": encode_value(b"1", 99, origin=Stamp(7, 2)),
    "deleted": encode_value(b"", deleted=True, origin=Stamp(7, 2)),
    "deleted here": TOMBSTONE,
    "large": encode_value(bytes(LOG_INLINE_VALUE_BYTES_MAX), origin=Stamp(7, 2)),
    "damaged": b"short\x04",
    "empty": b"",
}


@pytest.mark.parametrize("place", [0, 40, -1])
@pytest.mark.parametrize("unusual", UNUSUAL.values(), ids=UNUSUAL)
def test_what_is_no_plain_copy_is_looked_at_one_by_one(unusual: bytes, place: int) -> None:
    rows = copies_of(Random(4), 2 * MANY, [16], [5])
    rows[list(rows)[place]] = unusual
    assert gather(rows) is None


def test_few_copies_and_those_of_several_namespaces_are_looked_at_one_by_one() -> None:
    random = Random(5)
    rows = copies_of(random, MANY, [16], [5])
    assert gather(rows) is not None
    assert gather({**rows, **copies_of(random, 1, [16], [5], b"\0\0\2")}) is None
    rows.popitem()
    assert gather(rows) is None
    assert gather_copies([], [], HERE) is None
