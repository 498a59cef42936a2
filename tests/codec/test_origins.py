"""Origins that are added to whole columns stand where `encode_value` puts them, and digests agree."""

import numpy
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.codec.digest import digest_change
from floodmark.codec.records import MANY_RECORDS, add_origins, digest_records
from floodmark.codec.values import FIELDS, encode_value
from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption

SITE = 3

keys = st.binary(max_size=12)
values = st.binary(max_size=20)
expiries = st.none() | st.integers(0, (1 << 63) - 1)
bodies = st.none() | st.binary(max_size=300).map(lambda body: bytes([FIELDS]) + body)
versions = st.integers(1, (1 << 64) - 1)
Row = tuple[bytes, bytes, int | None, bool, bytes | None, int]
# A few records are looked at one by one, and many at once.
rows_of = st.builds(
    list.__mul__,
    st.lists(st.tuples(keys, values, expiries, st.booleans(), bodies, versions), max_size=8),
    st.sampled_from((1, MANY_RECORDS)),
)


def stored_of(row: Row, *, with_origin: bool) -> bytes:
    _, value, expires_at, deleted, stamps, version = row
    origin = Stamp(version, SITE) if with_origin else None
    return encode_value(value, expires_at, deleted, origin=origin, stamps=stamps)


def column_of(rows: list[Row], *, with_origin: bool) -> pyarrow.BinaryArray:
    return pyarrow.array([stored_of(row, with_origin=with_origin) for row in rows], pyarrow.binary())


@given(rows_of)
def test_origins_stand_where_the_encoding_of_one_record_puts_them(rows: list[Row]) -> None:
    stamps = numpy.array([row[-1] for row in rows], numpy.uint64)
    added = add_origins(column_of(rows, with_origin=False), stamps, SITE)
    assert added.equals(column_of(rows, with_origin=True))


@given(rows_of, st.integers(0, 8))
def test_records_that_have_their_origin_keep_it_among_those_that_get_one(rows: list[Row], every: int) -> None:
    has_origin = [every > 0 and number % every == 0 for number in range(len(rows))]
    stored = [stored_of(row, with_origin=has) for row, has in zip(rows, has_origin, strict=True)]
    versions = numpy.array(
        [7 if has else row[-1] for row, has in zip(rows, has_origin, strict=True)], numpy.uint64
    )
    added = add_origins(pyarrow.array(stored, pyarrow.binary()), versions, SITE)
    assert added.equals(column_of(rows, with_origin=True))


@given(rows_of, st.integers(0, 8))
def test_digests_are_those_that_the_source_gave_the_changes(rows: list[Row], start: int) -> None:
    records = column_of(rows, with_origin=True).slice(start)
    names = pyarrow.array([row[0] for row in rows], pyarrow.binary()).slice(start)
    assert digest_records(names, records).tolist() == [
        digest_change(row[-1], SITE, row[0], stored_of(row, with_origin=False)) for row in rows[start:]
    ]


@pytest.mark.parametrize("count", [1, MANY_RECORDS])
def test_what_is_not_a_record_is_refused(count: int) -> None:
    stamp = numpy.array([7] * count, numpy.uint64)
    key = pyarrow.array([b"ada"] * count)
    copied = encode_value(b"1", origin=Stamp(7, SITE))
    for broken in (b"", b"\x40", b"\x01", b"\x20", b"\x00\x00\x00\x09\x20"):
        with pytest.raises(Corruption):
            add_origins(pyarrow.array([broken] * count), stamp, SITE)
    for broken in (b"", b"\x00", b"short\x04", copied[:-1] + b"\x05"):
        with pytest.raises(Corruption):
            digest_records(key, pyarrow.array([broken] * count))
