"""What users get wrong: refused by name, with advice, and without a trace in the site.

Each call is made on a small site; afterwards its content and its changes must be what they were.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from tests.clock.fakes import FakeTime
from tests.contracts.site.closing import NAMESPACE_CALLS, VIEW_CALLS
from tests.contracts.site.refusals import (
    DURABILITY_CALLS,
    KEY_CALLS,
    RANGE_CALLS,
    READS_AT,
    TTL_CALLS,
    VALUE_CALLS,
    Call,
)

from floodmark.clock.hybrid import READ_SKEW_MS_MAX
from floodmark.engine import MemoryEngine
from floodmark.model import errors
from floodmark.model.errors import FloodmarkError
from floodmark.model.limits import KEY_BYTES_MAX, MIB, VALUE_BYTES_MAX
from floodmark.model.version import compose
from floodmark.partition import FAMILIES
from floodmark.site import open_engine


def consume(result: object) -> None:
    """Read an iterator to its end: what is lazy must be refused as well."""
    if isinstance(result, Iterator):
        list(result)


class Bench:
    """A site with two namespaces and two partitions.  Typed loosely, for all that is wrong here."""

    def __init__(self) -> None:
        self.time = FakeTime()
        self.site: Any = open_engine(MemoryEngine(FAMILIES), site="oslo", site_id=7, time_source=self.time)
        self.users: Any = self.site.create_namespace("users", retention=timedelta(minutes=1))
        self.site.create_namespace("orders").put(b"1", b"book")
        self.first = self.users.put(b"ada", b"countess")
        self.users.put_many({b"bob": b"builder", b"zoe": b"zoologist"})
        self.users.put(b"ada", b"programmer", ttl=3600)
        self.users.delete(b"bob")
        self.left, self.right = self.site.split("users", b"m")
        self.site.hold_safe_point("kept", self.first)
        self.since = 0

    def fingerprint(self) -> dict[str, object]:
        """All that a user can see of the site."""
        names = self.site.namespaces()
        spaces = {name: self.site.namespace(name) for name in names}
        return {
            "records": {
                name: [space.record(key) for key, _ in space.scan()] for name, space in spaces.items()
            },
            "settings": {name: space.settings for name, space in spaces.items()},
            "changes": list(self.site.changes(since=self.since)),
            "partitions": [(partition.id, partition.range) for partition in self.site.partitions()],
            "safe points": self.site.safe_points(),
        }

    def refuse(
        self,
        kind: type[FloodmarkError] | tuple[type[FloodmarkError], ...],
        says: str,
        call: Callable[[], object],
    ) -> FloodmarkError:
        """Make a bad call; its error must be of this very kind and say all of these things."""
        before = self.fingerprint()
        with pytest.raises(FloodmarkError) as refused:
            consume(call())
        assert type(refused.value) in (kind if isinstance(kind, tuple) else (kind,))
        for part in says.split(" & "):
            assert re.search(part, str(refused.value)), f"{str(refused.value)!r} does not say {part!r}"
        assert self.fingerprint() == before
        return refused.value


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.site.close()


def test_what_is_no_set_of_keys_is_refused(bench: Bench) -> None:
    for keys in (None, 5, 1.5, object()):
        bench.refuse(errors.InvalidArgument, "get_many & list", partial(bench.users.get_many, keys))
        view = bench.users.as_of(bench.first)
        bench.refuse(errors.InvalidArgument, "get_many & list", partial(view.get_many, keys))


def test_what_is_no_transaction_topology_or_subscription_is_refused(bench: Bench) -> None:
    site = bench.site
    bad_calls: dict[str, Callable[[], object]] = {
        "timeout": lambda: site.transaction(timeout=5),
        "timeout & negative": lambda: site.run_transaction(print, timeout=timedelta(-1)),
        "work": lambda: site.run_transaction(None),
        "coordinator": lambda: site.transaction(coordinator="first"),
        "topology": lambda: site.set_topology({"epoch": 1}),
        "options": lambda: site.subscribe("indexer", "users", options={"lease": 5}),
    }
    for says, call in bad_calls.items():
        bench.refuse(errors.InvalidArgument, says, call)


def table(calls: dict[str, Call], bad: Sequence[tuple[Any, str]]) -> list[Any]:
    """Every call with every bad argument and what the error must say of it."""
    return [
        pytest.param(call, argument, says, id=f"{name}-{argument!r:.10}".encode("ascii", "replace").decode())
        for name, call in calls.items()
        for argument, says in bad
    ]


BAD_KEYS = [
    (b"", "key & empty"),
    (b"big" + bytes(KEY_BYTES_MAX), "big & 4,099 & 4,096 & Hash|shorten"),
    ("ada", "str & 'ada' & encode"),
    (bytearray(b"ada"), "bytearray & ada & encode"),
    (memoryview(b"ada"), "memoryview & encode"),
    (None, "None & encode"),
    (7, "int & 7 & encode"),
]


@pytest.mark.parametrize(("call", "key", "says"), table(KEY_CALLS, BAD_KEYS))
def test_bad_key_is_refused(bench: Bench, call: Call, key: Any, says: str) -> None:
    bench.refuse(errors.InvalidKey, says, lambda: call(bench, key))


TOO_LARGE = bytes(VALUE_BYTES_MAX + 1)
BAD_VALUES = [
    (TOO_LARGE, "ada & 1,048,577 & 1,048,576 & Cut"),
    ("text", "ada & str & encode"),
    (bytearray(b"x"), "ada & bytearray & encode"),
    (7, "ada & int & encode"),
]


@pytest.mark.parametrize(("call", "value", "says"), table(VALUE_CALLS, BAD_VALUES))
def test_bad_value_is_refused(bench: Bench, call: Call, value: Any, says: str) -> None:
    bench.refuse(errors.InvalidValue, says, lambda: call(bench, value))


@pytest.mark.parametrize("expected", ["text", bytearray(b"programmer"), 7])
def test_bad_expectation_is_refused(bench: Bench, expected: Any) -> None:
    """One that is too large is none: it is simply never met."""
    compare_and_set = bench.users.compare_and_set
    bench.refuse(errors.InvalidValue, "ada & encode", lambda: compare_and_set(b"ada", expected, b"x"))
    assert not compare_and_set(b"ada", TOO_LARGE, b"x")


def test_none_is_no_value_to_put(bench: Bench) -> None:
    bench.refuse(errors.InvalidValue, "ada & NoneType & encode|delete", lambda: bench.users.put(b"ada", None))


def test_largest_key_and_value_are_taken(bench: Bench) -> None:
    key, value = bytes(KEY_BYTES_MAX), bytes(VALUE_BYTES_MAX)
    bench.users.put(key, value)
    assert bench.users.get(key) == value


@pytest.mark.parametrize("pairs", [[b"ada"], [(b"ada",)], [(b"ada", b"x", b"y")], 7, [7]])
def test_pairs_that_are_none_are_refused(bench: Bench, pairs: Any) -> None:
    bench.refuse(errors.InvalidArgument, "pair", lambda: bench.users.put_many(pairs))


# Namespaces

NAME_CALLS: dict[str, Call] = {
    "namespace": lambda bench, name: bench.site.namespace(name),
    "update": lambda bench, name: bench.site.update_namespace(name, ttl=None),
    "drop": lambda bench, name: bench.site.drop_namespace(name),
    "changes": lambda bench, name: bench.site.changes(name),
    "split": lambda bench, name: bench.site.split(name, b"k"),
    "safe point": lambda bench, name: bench.site.hold_safe_point("new", bench.first, namespace=name),
}


@pytest.mark.parametrize(("call", "name", "says"), table(NAME_CALLS, [("nobody", "'nobody' & create")]))
def test_unknown_namespace_is_refused(bench: Bench, call: Call, name: Any, says: str) -> None:
    bench.refuse(errors.NamespaceNotFound, says, lambda: call(bench, name))


def test_existing_namespace_is_not_made_again(bench: Bench) -> None:
    bench.refuse(
        errors.NamespaceExists, "'users' & site.namespace", lambda: bench.site.create_namespace("users")
    )


BAD_NAMES = ["", "a b", "a/b", "a\tb", "a\n", "nul\0", "\ud800", "x" * 129, None, 7, b"users"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_bad_name_is_refused(bench: Bench, name: Any) -> None:
    bench.refuse(errors.InvalidName, "namespace & 128", lambda: bench.site.create_namespace(name))
    bench.refuse(
        errors.InvalidName, "safe point & 128", lambda: bench.site.hold_safe_point(name, bench.first)
    )


BAD_SETTINGS: list[dict[str, Any]] = [
    *({"merge": bad} for bad in ("newest", None, ["last_write"])),
    *({"ttl": bad} for bad in (timedelta(0), timedelta(seconds=-1), "1h")),
    *({"retention": bad} for bad in (timedelta(seconds=-1), "1h")),
]


@pytest.mark.parametrize("bad", BAD_SETTINGS, ids=str)
def test_bad_setting_is_refused(bench: Bench, bad: dict[str, Any]) -> None:
    (setting,) = bad
    kinds = (errors.InvalidName, errors.InvalidTimeToLive)
    bench.refuse(kinds, setting, lambda: bench.site.create_namespace("new", **bad))
    if setting != "merge":
        bench.refuse(kinds, setting, lambda: bench.site.update_namespace("users", **bad))


def test_namespace_with_the_shortest_ttl_can_be_used(bench: Bench) -> None:
    """Settings are kept in milliseconds; a shorter one must not be kept as nothing."""
    brief = bench.site.create_namespace("brief", ttl=timedelta(microseconds=1))
    brief.put(b"k", b"v")
    assert brief.settings.ttl > timedelta(0)


# Ranges

OF_RECORDS = {name: RANGE_CALLS[name] for name in ("scan", "reverse", "view", "delete_range", "changes")}
BAD_RANGES = [
    ((b"b", b"a"), "b'b' & b'a' & swap"),
    (("a", b"b"), "start & 'a' & bytes"),
    ((b"a", "b"), "end & 'b' & bytes"),
    ((None, b"b"), "start & None & bytes"),
    ((bytes(KEY_BYTES_MAX + 1), None), "start & 4,096"),
]


@pytest.mark.parametrize(("call", "keys", "says"), table(OF_RECORDS, BAD_RANGES))
def test_bad_range_is_refused(bench: Bench, call: Call, keys: Any, says: str) -> None:
    bench.refuse(errors.InvalidRange, says, lambda: call(bench, keys))


@pytest.mark.parametrize("keys", [{"start": b"a", "end": b"a"}, {"end": b"a", "prefix": b"b"}], ids=str)
def test_empty_range_is_no_mistake_and_holds_nothing(bench: Bench, keys: dict[str, bytes]) -> None:
    assert list(bench.users.scan(**keys)) == []
    assert list(bench.users.scan(**keys, reverse=True)) == []
    assert bench.users.delete_range(**keys) == 0


def test_bad_prefix_is_refused(bench: Bench) -> None:
    bench.refuse(errors.InvalidRange, "prefix & bytes", lambda: bench.users.scan(prefix="a"))
    bench.refuse(errors.InvalidRange, "prefix & bytes", lambda: bench.site.changes("users", prefix="a"))


def test_changes_of_a_range_need_a_namespace(bench: Bench) -> None:
    bench.refuse(errors.InvalidRange, "namespace", lambda: bench.site.changes(start_key=b"a"))


def test_changes_until_before_since_are_refused(bench: Bench) -> None:
    since = bench.first
    call = partial(bench.site.changes, since=since, until=since - 1)
    bench.refuse(errors.InvalidVersion, "until & since", call)


@pytest.mark.parametrize("limit", [-1, 1.5, "1", True])
def test_bad_limit_is_refused(bench: Bench, limit: Any) -> None:
    bench.refuse(errors.InvalidArgument, "limit & rows", lambda: bench.users.scan(limit=limit))


# Versions

OTHERS_AT: dict[str, Call] = {
    "since": lambda bench, at: bench.site.changes("users", since=at),
    "safe point": lambda bench, at: bench.site.hold_safe_point("new", at, namespace="users"),
}
UNTIL: dict[str, Call] = {"until": lambda bench, at: bench.site.changes("users", until=at)}
BAD_VERSIONS = [
    (-1, "-1 & version"),
    (1 << 64, "version"),
    (True, "True"),
    (1.5, "1.5"),
    ("later", "'later'"),
    (datetime(2024, 1, 1), "time zone & timezone"),
    (datetime(1969, 1, 1, tzinfo=UTC), "does not fit"),
]


@pytest.mark.parametrize(("call", "at", "says"), table(READS_AT | OTHERS_AT | UNTIL, BAD_VERSIONS))
def test_bad_version_is_refused(bench: Bench, call: Call, at: Any, says: str) -> None:
    bench.refuse(errors.InvalidVersion, says, lambda: call(bench, at))


@pytest.mark.parametrize("name", READS_AT)
def test_version_in_the_future_is_refused_and_does_not_move_the_clock(bench: Bench, name: str) -> None:
    future = compose(bench.time.ms + READ_SKEW_MS_MAX + 1, 0)
    moment = datetime.fromtimestamp(bench.time.ms / 1000 + 60, UTC)
    for at in (future, moment, (1 << 64) - 1):
        bench.refuse(errors.VersionInFuture, "future & leaving out", partial(READS_AT[name], bench, at))
    assert bench.site.statistics().clock_ahead_ms == 0
    READS_AT[name](bench, compose(bench.time.ms + READ_SKEW_MS_MAX, 0))


def collect(bench: Bench) -> None:
    """Let the retention pass, and collect what lies behind it."""
    bench.site.release_safe_point("kept")
    bench.time.ms += 61_000
    bench.site.namespace("orders").put(b"2", b"pen")
    bench.site.collect_garbage()
    bench.since = max(space.oldest_version for space in bench.site.statistics().namespaces)
    assert bench.since > bench.first


@pytest.mark.parametrize("name", READS_AT | OTHERS_AT)
def test_version_behind_the_safe_point_is_refused(bench: Bench, name: str) -> None:
    collect(bench)
    says = f"{bench.first} & {bench.since} & retention|safe point|snapshot"
    error = bench.refuse(
        errors.VersionCollected, says, lambda: (READS_AT | OTHERS_AT)[name](bench, bench.first)
    )
    assert (error.details["version"], error.details["oldest"]) == (bench.first, bench.since)


def test_collection_that_found_nothing_old_leaves_all_changes_readable() -> None:
    """A young site collects by itself every ten minutes; its changes must stay complete until they age."""
    bench = Bench()
    bench.site.release_safe_point("kept")
    bench.site.update_namespace("users", retention=timedelta(hours=24))
    before = bench.fingerprint()
    bench.site.collect_garbage()
    assert bench.fingerprint() == before


# Times to live and durability

BAD_TTLS = [
    (0, "positive & delete"),
    (-1, "positive & -1 & delete"),
    (-0.5, "positive & -0.5 & delete"),
    (timedelta(0), "positive & delete"),
    (timedelta(seconds=-1), "positive & delete"),
    ("60", "timedelta & seconds & '60'"),
    (True, "timedelta & seconds & True"),
    (float("nan"), "time to live & nan"),
    (float("inf"), "time to live & inf"),
    (1e30, "time to live & 1e"),
    (1 << 80, "time to live & 1208925819614629174706176"),
]


@pytest.mark.parametrize(("call", "ttl", "says"), table(TTL_CALLS, BAD_TTLS))
def test_bad_time_to_live_is_refused(bench: Bench, call: Call, ttl: Any, says: str) -> None:
    bench.refuse(errors.InvalidTimeToLive, says, lambda: call(bench, ttl))


OPENED: dict[str, Call] = {
    "open": lambda _, how: open_engine(MemoryEngine(FAMILIES), site="new", durability=how),
}
BAD_DURABILITY = [(how, "'fsync' & 'async'") for how in ("disk", "", True, 1, ["fsync"])]


@pytest.mark.parametrize(("call", "how", "says"), table(DURABILITY_CALLS | OPENED, BAD_DURABILITY))
def test_bad_durability_is_refused(bench: Bench, call: Call, how: Any, says: str) -> None:
    bench.refuse(errors.InvalidArgument, says, lambda: call(bench, how))


# Commits, partitions and safe points


def test_commit_over_the_limit_is_refused_and_nothing_of_it_written(bench: Bench) -> None:
    value = bytes(MIB)
    small = {b"a": b"fits in the left partition"}
    large = small | {b"n%d" % index: value for index in range(64)}
    says = "65|64 & 67,10\\d,\\d{3} & 67,108,864 & smaller & partition|users"
    bench.refuse(errors.CommitTooLarge, says, lambda: bench.users.put_many(large))


def test_bad_partition_is_refused(bench: Bench) -> None:
    site, right = bench.site, bench.right
    bench.refuse(errors.PartitionNotFound, "999 & partitions", lambda: site.merge(999, right))
    bench.refuse(errors.PartitionNotFound, f"{right} & neighbours", lambda: site.merge(right, right))
    bench.refuse(errors.PartitionNotFound, f"{right} & inside", lambda: site.split("users", b"m"))


def test_bad_safe_point_is_refused(bench: Bench) -> None:
    hold = bench.site.hold_safe_point
    bench.refuse(errors.SafePointNotFound, "'lost'", lambda: bench.site.release_safe_point("lost"))
    for lifetime in (timedelta(0), timedelta(seconds=-1), "1h", None):
        call = partial(hold, "new", bench.first, lifetime=lifetime)
        bench.refuse(errors.InvalidArgument, "lifetime", call)


# Use after the end


@pytest.mark.parametrize("name", [*NAMESPACE_CALLS, "writer"])
def test_handle_of_a_dropped_namespace_refuses_every_call(bench: Bench, name: str) -> None:
    handles = [bench.users, bench.users.as_of(bench.first)] if name in VIEW_CALLS else [bench.users]
    bench.site.drop_namespace("users")
    for name_is_back in (False, True):
        if name_is_back:
            bench.site.create_namespace("users").put(b"new", b"life")
        for handle in handles:
            call = partial(getattr(handle, name), *NAMESPACE_CALLS.get(name, ()))
            bench.refuse(errors.NamespaceNotFound, "'users' & create|namespace\\(", call)
