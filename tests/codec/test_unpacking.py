"""Rows of the change log taken apart at once: the same changes as row by row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.codec.changelog import (
    CommitRow,
    decode_commits,
    decode_row,
    encode_commit,
    encode_heartbeat,
    encode_single,
)
from floodmark.model.change import Heartbeat
from floodmark.model.limits import LOG_INLINE_VALUE_BYTES_MAX

LARGE = bytes(LOG_INLINE_VALUE_BYTES_MAX + 1)
BEAT = encode_heartbeat(Heartbeat(version=9, node=0, wall_ms=1, since=2, through=3, watermark={}, sums={}))

commits = st.dictionaries(st.binary(max_size=9), st.binary(min_size=1, max_size=9), min_size=1, max_size=9)


@given(st.lists(commits, min_size=1, max_size=9))
def test_changes_of_rows_are_those_of_each_row(commits: list[dict[bytes, bytes]]) -> None:
    rows = [row for commit in commits for row in encode_commit(list(commit), list(commit.values()))]
    found = decode_commits(rows)
    assert found is not None
    decoded = [decode_row(7, row) for row in rows]
    assert all(isinstance(row, CommitRow) for row in decoded)
    assert found.counts.tolist() == [len(commit) for commit in commits]
    assert found.keys.to_pylist() == [key for commit in commits for key in commit]
    values = [value for commit in commits for value in commit.values()]
    assert found.values.to_pylist() == values
    assert found.flags.tolist() == [value[-1] for value in values]


PLAIN = encode_single(b"key", b"value\x00")
SEVERAL = encode_commit([b"a", b"b"], [b"1\x00", b"22\x00"])[0]
ALONE = {
    "heartbeat": BEAT,
    "large value": encode_single(b"key", LARGE),
    "a large value among others": encode_commit([b"a", b"b"], [LARGE, b"1\x00"])[0],
    "empty value": encode_single(b"key", b""),
    "no changes": b"\x01" + bytes(4),
    "unknown kind": b"\x09" + PLAIN[1:],
    "empty": b"",
    "only a kind": b"\x01",
    "too short": PLAIN[:-1],
    "too short for its lengths": PLAIN[:7],
    "too long": PLAIN + b"\x00",
    "lengths that belong to the row behind": SEVERAL[:1] + b"\x03" + SEVERAL[2:],
    "a count beyond everything": b"\x01\xff\xff\xff\xff" + SEVERAL[5:],
}


@pytest.mark.parametrize("row", ALONE.values(), ids=ALONE)
def test_row_that_has_to_be_looked_at_by_itself_is_found_among_others(row: bytes) -> None:
    for rows in ([row], [row, PLAIN], [PLAIN, row], [SEVERAL, row, SEVERAL]):
        assert decode_commits(rows) is None
    assert decode_commits([PLAIN, SEVERAL]) is not None
    assert decode_commits([]) is None
