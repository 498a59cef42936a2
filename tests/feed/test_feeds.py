"""Feeds as types: what they refuse, how they are cut, and what is told about them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feed.support_feeds import spec

from floodmark.feed.leased import Lease
from floodmark.feed.named.feeds import (
    Feed,
    FeedSpec,
    FeedState,
    FeedUpdate,
    RangeProgress,
    SinkOptions,
    advance,
    cut_ranges,
    measure,
    recut,
)
from floodmark.feed.sinks.base import URI_CHARACTERS_MAX
from floodmark.model.errors import InvalidArgument, InvalidName, InvalidRange, InvalidVersion
from floodmark.model.limits import FEED_RANGES_MAX
from floodmark.model.ranges import KeyRange
from floodmark.model.version import VERSION_MAX, compose

NOW_MS = 1_700_000_000_000


def feed(ranges: list[RangeProgress], until: int | None = None, lease: Lease | None = None) -> Feed:
    return Feed(
        spec=spec(until=until),
        namespace_id=1,
        state=FeedState.NORMAL,
        ranges=ranges,
        created_at_ms=0,
        changed_at_ms=0,
        next_range=10,
        held_at_ms=0,
        lease=lease,
    )


# What is refused


@pytest.mark.parametrize(
    "option",
    [
        {"concurrency": 0},
        {"concurrency": 65},
        {"concurrency": True},
        {"batch_records": 0},
        {"batch_records": 1_000_001},
        {"backoff_ms": 0},
        {"backoff_ms": 60_001},
        {"backoff_ms": 1.5},
        {"rate_bytes_max": 0},
        {"rate_bytes_max": -1},
        {"linger_ms": -1},
        {"linger_ms": 3_600_001},
    ],
)
def test_options_are_checked_when_they_are_made(option: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(option))):
        SinkOptions(**option)


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ({"name": ""}, InvalidName),
        ({"name": "a/b"}, InvalidName),
        ({"name": "a b"}, InvalidName),
        ({"name": "x" * 129}, InvalidName),
        ({"since": -1}, InvalidVersion),
        ({"since": VERSION_MAX + 1}, InvalidVersion),
        ({"until": 5, "since": 5}, InvalidVersion),
        ({"until": 0}, InvalidVersion),
        ({"start_key": b"b", "end_key": b"a"}, InvalidRange),
        ({"start_key": b"b", "end_key": b"b"}, InvalidRange),
        ({"start_key": b"b", "prefix": b"a"}, InvalidRange),
        ({"end_key": b"a", "prefix": b"ab"}, InvalidRange),
        ({"start_key": "text"}, InvalidRange),
        ({"prefix": b"x" * 5_000}, InvalidRange),
        ({"ranges": 0}, InvalidArgument),
        ({"ranges": FEED_RANGES_MAX + 1}, InvalidArgument),
        ({"description": "x" * 1_001}, InvalidArgument),
        ({"sink": ""}, InvalidArgument),
        ({"sink": "no scheme"}, InvalidArgument),
        ({"sink": "blackhole:" + "x" * URI_CHARACTERS_MAX}, InvalidArgument),
        ({"options": {"concurrency": 1}}, InvalidArgument),
    ],
)
def test_a_specification_is_checked_when_it_is_made(
    setting: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        spec(**{"name": "copy", **setting})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "uri",
    [
        "kafka://ada:hunter2@bergen:7100/users",
        "kafka://hunter2@bergen:7100/users",
        "kafka://bergen:7100/users?token=hunter2",
        "kafka://broker/topic?sasl_password=hunter2",
        "s3://bucket/?secret_access_key=hunter2",
    ],
)
def test_a_secret_in_a_uri_is_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        spec(sink=uri)
    assert "hunter2" not in str(refusal.value)
    assert "file" in str(refusal.value)


def test_a_file_that_holds_a_secret_may_be_named() -> None:
    uri = "kafka+tls://bergen:7100/users?token_file=secret/token&tls_key_file=key.pem"
    assert spec(sink=uri).sink == uri


# What a specification says


@pytest.mark.parametrize(
    ("setting", "keys"),
    [
        ({}, KeyRange()),
        ({"start_key": b"b", "end_key": b"d"}, KeyRange(b"b", b"d")),
        ({"prefix": b"ab"}, KeyRange(b"ab", b"ac")),
        ({"prefix": b"\xff"}, KeyRange(b"\xff", None)),
        ({"prefix": b"ab", "start_key": b"abc"}, KeyRange(b"abc", b"ac")),
        ({"prefix": b"ab", "end_key": b"abx"}, KeyRange(b"ab", b"abx")),
    ],
)
def test_range_and_prefix_bound_the_keys_together(setting: dict[str, bytes], keys: KeyRange) -> None:
    assert msgspec.structs.replace(spec(), **setting).keys() == keys


def test_options_in_the_uri_become_the_options_of_the_feed() -> None:
    given = spec(sink="parquet:data/out?batch_records=5&compression=zstd&rate_bytes_max=100")
    normalized = given.normalized()
    assert normalized.sink == "parquet:data/out?compression=zstd"
    assert normalized.options == SinkOptions(batch_records=5, rate_bytes_max=100)
    assert normalized.normalized() == normalized


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "0", "9" * 30, "٣"])
def test_an_option_in_the_uri_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="concurrency"):
        spec(sink=f"blackhole:?concurrency={text}").normalized()


def test_an_update_changes_what_it_names_and_nothing_else() -> None:
    before = spec(until=9, description="old", options=SinkOptions(concurrency=3))
    assert FeedUpdate().apply(before) == before
    after = FeedUpdate(until=None, description="new").apply(before)
    assert after == msgspec.structs.replace(before, until=None, description="new")


@pytest.mark.parametrize(
    "setting",
    [
        {"sink": "kafka://a:b@c/d"},
        {"sink": 7},
        {"until": -1},
        {"until": "later"},
        {"description": 7},
        {"ranges": 0},
        {"ranges": "2"},
        {"options": {"concurrency": 2}},
    ],
)
def test_an_update_is_checked_when_it_is_made(setting: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        msgspec.structs.replace(FeedUpdate(), **setting)


def test_what_was_not_named_stays_unnamed_on_the_way() -> None:
    for update in (FeedUpdate(), FeedUpdate(until=None), FeedUpdate(sink="stdout:", ranges=4)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(update), type=FeedUpdate) == update


def test_a_feed_is_read_back_as_it_was_stored() -> None:
    stored = feed(
        [RangeProgress(id=1, keys=KeyRange(b"\x00\xff", None), checkpoint=5, resolved=6)],
        lease=Lease(holder="x", expires_at_ms=1, lifetime_ms=2),
    )
    assert msgspec.json.decode(msgspec.json.encode(stored), type=Feed) == stored


def test_a_stored_specification_that_is_not_valid_is_refused() -> None:
    bent = msgspec.json.encode(msgspec.structs.asdict(spec()) | {"ranges": 0})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(bent, type=FeedSpec)


# Ranges

KEYS = st.binary(max_size=2)


@st.composite
def tilings(draw: st.DrawFn) -> list[KeyRange]:
    cuts = sorted(draw(st.sets(KEYS.filter(bool), max_size=8)))
    return [KeyRange(start, end) for start, end in zip([b"", *cuts], [*cuts, None], strict=True)]


@st.composite
def key_ranges(draw: st.DrawFn) -> KeyRange:
    start = draw(KEYS)
    end = draw(st.none() | KEYS.filter(lambda key: key > start))
    return KeyRange(start, end)


@given(keys=key_ranges(), partitions=tilings(), count=st.integers(1, 6))
def test_a_range_is_cut_along_partitions_without_holes(
    keys: KeyRange, partitions: list[KeyRange], count: int
) -> None:
    parts = cut_ranges(keys, partitions, count)
    assert 1 <= len(parts) <= count
    assert [part.start for part in parts] == [keys.start, *[part.end for part in parts[:-1]]]
    assert parts[-1].end == keys.end
    starts = {partition.start for partition in partitions}
    assert all(part.start in starts for part in parts[1:])
    overlaps = [sum(partition.intersect(part) is not None for partition in partitions) for part in parts]
    assert max(overlaps) - min(overlaps) <= 1
    assert len(parts) == min(count, sum(overlaps))


@given(
    before=tilings(),
    after=tilings(),
    data=st.data(),
)
def test_cutting_anew_neither_skips_nor_moves_the_checkpoint(
    before: list[KeyRange], after: list[KeyRange], data: st.DataObject
) -> None:
    olds = [
        RangeProgress(id=number, keys=keys, checkpoint=data.draw(st.integers(1, 9)))
        for number, keys in enumerate(before, start=1)
    ]
    news = recut(olds, after, next_id=100)
    assert [part.keys for part in news] == after
    assert min(part.checkpoint for part in news) == min(part.checkpoint for part in olds)
    for new in news:
        for old in olds:
            if new.keys.intersect(old.keys) is not None:
                assert new.checkpoint <= old.checkpoint, "changes of the old range would be skipped"
    ids = [part.id for part in news]
    assert len(set(ids)) == len(ids)
    for new in news:
        if new.id < 100:
            assert new in olds, "an id was given to other keys"


def test_nothing_that_is_reported_moves_back() -> None:
    ranges = [
        RangeProgress(id=1, keys=KeyRange(b"", b"b"), checkpoint=5, resolved=7),
        RangeProgress(id=2, keys=KeyRange(b"b", None), checkpoint=5, resolved=5),
    ]
    reports = [
        RangeProgress(id=1, keys=KeyRange(b"", b"b"), checkpoint=4, resolved=9),
        RangeProgress(id=3, keys=KeyRange(), checkpoint=99, resolved=99),
    ]
    assert advance(ranges, reports) == [msgspec.structs.replace(ranges[0], resolved=9), ranges[1]]


# Statistics


def test_lags_are_told_against_the_site() -> None:
    ranges = [
        RangeProgress(id=1, keys=KeyRange(b"", b"b"), checkpoint=compose(NOW_MS - 3_000, 5)),
        RangeProgress(id=2, keys=KeyRange(b"b", None), checkpoint=compose(NOW_MS - 500, 0)),
    ]
    told = measure(feed(ranges), compose(NOW_MS - 200, 0), NOW_MS)
    assert (told.checkpoint_lag_ms, told.resolved_lag_ms) == (3_000, 200)
    assert told.checkpoint == ranges[0].checkpoint


def test_a_clock_that_runs_ahead_makes_no_negative_lag() -> None:
    ahead = compose(NOW_MS + 1_000, 0)
    told = measure(feed([RangeProgress(id=1, keys=KeyRange(), checkpoint=ahead)]), ahead, NOW_MS)
    assert (told.checkpoint_lag_ms, told.resolved_lag_ms) == (0, 0)


def test_a_feed_at_its_target_lags_behind_nothing() -> None:
    target = compose(NOW_MS - 9_000, 0)
    reached = feed([RangeProgress(id=1, keys=KeyRange(), checkpoint=target)], until=target)
    assert measure(reached, compose(NOW_MS, 0), NOW_MS).checkpoint_lag_ms == 0


def test_a_holder_is_shown_while_its_lease_lasts() -> None:
    held = feed(
        [RangeProgress(id=1, keys=KeyRange(), checkpoint=1)],
        lease=Lease(holder="runner", expires_at_ms=NOW_MS, lifetime_ms=1),
    )
    assert measure(held, 1, NOW_MS - 1).holder == "runner"
    assert measure(held, 1, NOW_MS).holder is None
