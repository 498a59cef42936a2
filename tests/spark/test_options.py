"""Options are read on the driver; what is wrong with one is said by its name, and no secret is repeated."""

from datetime import UTC, datetime

import pytest
from tests.spark.support_read import open_source

from floodmark.model.errors import InvalidOption
from floodmark.model.ranges import KeyRange
from floodmark.model.version import compose, physical_ms
from floodmark.spark.source.options import CHANGES, SNAPSHOT, Options, read_options, reads_changes

URL = "grpc://127.0.0.1:1"
BASE = {"path": URL, "namespace": "users"}


def test_case_of_names_does_not_matter() -> None:
    given = {"PATH": URL, "nameSpace": "users", "VERSIONASOF": "7", "Rows": "ALL"}
    options = read_options(given, SNAPSHOT)
    assert (options.address.location, options.namespace, options.at, options.rows) == (URL, "users", 7, "all")


def test_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InvalidOption, match=r"no option 'versonasof' here; did you mean versionAsOf\?"):
        read_options(BASE | {"versonasof": "1"}, SNAPSHOT)


def test_unknown_option_like_no_other_is_refused_with_all_of_them() -> None:
    with pytest.raises(InvalidOption, match="there are: endKey, metadata"):
        read_options(BASE | {"q": "1"}, SNAPSHOT)


@pytest.mark.parametrize("option", ["startingVersion", "endingTimestamp", "maxChangesPerTrigger"])
def test_option_of_changes_names_the_one_that_is_missing(option: str) -> None:
    with pytest.raises(InvalidOption, match=f"{option} is for changes; add .*readChangeFeed"):
        read_options(BASE | {option: "1"}, SNAPSHOT)


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("versionAsOf", "yesterday", "it is a version"),
        ("versionAsOf", "2026-01-01T00:00:00Z", "it is a version"),
        ("versionAsOf", "0", "up to 64 bits"),
        ("versionAsOf", str(1 << 64), "up to 64 bits"),
        ("timestampAsOf", "2026-01-01T00:00:00", "no time zone"),
        ("timestampAsOf", "1767225600", "not the number '1767225600'"),
        ("timestampAsOf", "1767225600.5", "not the number '1767225600.5'"),
        ("timestampAsOf", "-1", "not the number '-1'"),
        ("filterPushdown", "true", "startKey, endKey or prefix"),
        ("rows", "some", "one of live, all, digests"),
        ("metadata", "yes", "true or false"),
        ("minPartitions", "0", "a number of 1 or more"),
        ("minPartitions", "9" * 30, "a number of 1 or more"),
        ("valueFormat", "xml", "one of binary, string, json"),
        ("startKey", "0xzz", "not whole bytes of hexadecimal"),
        ("namespace", "a b", "cannot name a namespace"),
    ],
)
def test_option_that_cannot_be_read_is_named(option: str, text: str, said: str) -> None:
    with pytest.raises(InvalidOption, match=rf"{option}.*{said}") as caught:
        read_options(BASE | {option: text}, SNAPSHOT)
    assert caught.value.details["option"] == option


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("startingVersion", "first", "a version, earliest, latest or snapshot"),
        ("startingVersion", "18446744073709551617", "up to 64 bits"),
        ("endingVersion", "latest", "up to 64 bits"),
        ("endingVersion", str(1 << 64), "up to 64 bits"),
        ("startingTimestamp", "17", "a time such as"),
        ("endingTimestamp", "2026-01-01", "no time zone"),
        ("beforeImages", "maybe", "true or false"),
    ],
)
def test_option_of_changes_that_cannot_be_read_is_named(option: str, text: str, said: str) -> None:
    with pytest.raises(InvalidOption, match=rf"{option}.*{said}"):
        read_options(BASE | {option: text}, CHANGES)


@pytest.mark.parametrize(
    ("allowed", "options"),
    [
        (SNAPSHOT, {"versionAsOf": "1", "timestampAsOf": "2026-01-01T00:00:00Z"}),
        (CHANGES, {"startingVersion": "1", "startingTimestamp": "2026-01-01T00:00:00Z"}),
        (CHANGES, {"endingVersion": "1", "endingTimestamp": "2026-01-01T00:00:00Z"}),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    allowed: frozenset[str], options: dict[str, str]
) -> None:
    with pytest.raises(InvalidOption, match=" and ".join(options) + " exclude each other"):
        read_options(BASE | options, allowed)


def test_namespace_and_location_are_required() -> None:
    with pytest.raises(InvalidOption, match="no namespace is named"):
        read_options({"path": URL}, SNAPSHOT)
    with pytest.raises(InvalidOption, match="by its URL or its directory"):
        read_options({"namespace": "users"}, SNAPSHOT)


def test_keys_are_a_range_of_text_or_hexadecimal() -> None:
    assert Options({"startKey": "a", "endKey": "0x62ff"}, SNAPSHOT).keys() == KeyRange(b"a", b"b\xff")
    assert Options({"prefix": "user/"}, SNAPSHOT).keys() == KeyRange(b"user/", b"user0")
    with pytest.raises(InvalidOption, match=r"startKey, endKey and prefix: start .* lies behind end"):
        Options({"startKey": "b", "endKey": "a"}, SNAPSHOT).keys()


def test_start_is_inclusive_and_becomes_the_version_before() -> None:
    assert Options({"startingVersion": "8"}, CHANGES).start() == 7
    assert Options({"startingVersion": "0"}, CHANGES).start() == 0
    assert Options({"startingVersion": "Latest"}, CHANGES).start() == "latest"
    assert Options({}, CHANGES).start() == "earliest"


def test_times_take_in_the_whole_of_their_millisecond() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    text = {"startingTimestamp": moment.isoformat(), "endingTimestamp": moment.isoformat()}
    options = Options(text, CHANGES)
    start, end = options.start(), options.end()
    assert isinstance(start, int)
    assert end is not None
    first = compose(int(moment.timestamp() * 1000), 0)
    assert (start, physical_ms(end), physical_ms(end + 1) - physical_ms(end)) == (
        first - 1,
        physical_ms(first),
        1,
    )


def test_change_feed_is_told_from_a_snapshot() -> None:
    assert reads_changes({"ReadChangeFeed": "TRUE", "other": "1"})
    assert not reads_changes({"other": "1"})
    with pytest.raises(InvalidOption, match=r"readChangeFeed.*true or false"):
        reads_changes({"readchangefeed": "1"})


def test_schema_of_a_stream_takes_the_options_of_streams() -> None:
    schema = open_source(URL, readChangeFeed="true", maxChangesPerTrigger=5, safePointLifetime="1h").schema()
    assert schema.names[:3] == ["key", "value", "_change_type"]


def test_batch_of_changes_refuses_the_options_of_streams() -> None:
    with pytest.raises(InvalidOption, match="maxChangesPerTrigger"):
        read_options(BASE | {"maxChangesPerTrigger": "5"}, CHANGES)
