"""Stored values that are made as columns are the same, byte by byte, as those that are made one by one."""

import pyarrow
from hypothesis import given
from hypothesis import strategies as st

from floodmark.codec.records import join_values, qualify_keys, split_values
from floodmark.codec.values import encode_value
from floodmark.model.change import Stamp

values = st.binary(max_size=20)
expiries = st.none() | st.integers(0, (1 << 62) - 1)
versions = st.integers(1, (1 << 63) - 1)
sites = st.integers(1, 255)


@given(st.lists(st.tuples(values, expiries, st.booleans(), versions, sites)), st.booleans())
def test_columns_are_encoded_as_single_values_are(
    rows: list[tuple[bytes, int | None, bool, int, int]], with_origin: bool
) -> None:
    stored = join_values(
        pyarrow.array([value for value, *_ in rows], pyarrow.binary()),
        expires_at=pyarrow.array([row[1] for row in rows], pyarrow.int64()),
        deleted=pyarrow.array([row[2] for row in rows], pyarrow.bool_()),
        origin_version=pyarrow.array([row[3] for row in rows], pyarrow.int64()) if with_origin else None,
        origin_site=pyarrow.array([row[4] for row in rows], pyarrow.int32()) if with_origin else None,
    )
    assert stored.to_pylist() == [
        encode_value(value, expiry, deleted, origin=Stamp(version, site) if with_origin else None)
        for value, expiry, deleted, version, site in rows
    ]
    if rows:
        again = split_values(stored)
        assert again.values.to_pylist() == [value for value, *_ in rows]
        assert again.expires_at.to_pylist() == [row[1] for row in rows]


def test_a_slice_of_a_column_is_encoded_like_a_column_of_its_own() -> None:
    column = pyarrow.array([b"a", b"bc", b"", b"d"])
    assert join_values(column.slice(1, 2)).to_pylist() == [b"bc\0", b"\0"]
    assert qualify_keys(258, column.slice(3)).to_pylist() == [b"\x00\x01\x02d"]
