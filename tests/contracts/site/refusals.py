"""The site's contract: what users get wrong is refused by name, with advice, and without a trace.

What an error must say is not written down twice.  Each bad call is made on the site under test and on one
of this process that holds everything in memory; class, message and details must be the same, to the
letter.  Both sites are made in the same steps at the same times, so that even their versions are equal.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, TypeAlias

import pytest
from tests.contracts.site.base import (
    START_MS,
    Refused,
    SiteContractBase,
    outcome_of,
)

from floodmark.feed.subscription.consumer import SubscriptionOptions
from floodmark.model import errors
from floodmark.model.errors import FloodmarkError
from floodmark.model.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from floodmark.model.version import compose
from floodmark.site import Site
from floodmark.testing.clock import SimulatedTime

BY_HAND: Final = SubscriptionOptions(follow=False, background=False)


class Stage:
    """A site with a little of everything.  Typed loosely, for all that is wrong here."""

    def __init__(self, site: Site, time: SimulatedTime) -> None:
        self.site: Any = site
        self.time = time
        steps: list[Callable[[], Any]] = [
            lambda: site.create_namespace("users", retention=timedelta(minutes=1)),
            lambda: site.create_namespace("orders").put(b"1", b"book"),
            lambda: self.users.put(b"ada", b"countess"),
            lambda: self.users.put_many({b"bob": b"builder", b"zoe": b"zoologist"}),
            lambda: self.users.put(b"ada", b"programmer", ttl=3600),
            lambda: self.users.delete(b"bob"),
            lambda: site.split("users", b"m"),
            lambda: site.feeds.create("copy", "users", "blackhole:", until=self.first),
            lambda: site.feeds.create("paused", "users", "blackhole:"),
            lambda: site.feeds.pause("paused"),
            lambda: site.subscribe("indexer", "users", options=BY_HAND).close(),
        ]
        self.first = 0
        for step in steps:
            # Each in a millisecond of its own: versions then do not depend on who asked for one in between.
            time.advance(1)
            done = step()
            self.first = self.first or (done if type(done) is int else 0)
        site.hold_safe_point("kept", self.first)

    @property
    def users(self) -> Any:
        """The namespace that most is asked of."""
        return self.site.namespace("users")

    def fingerprint(self) -> Mapping[str, object]:
        """All that a user can see of the site."""
        site = self.site
        spaces = {name: site.namespace(name) for name in site.namespaces()}
        return {
            "records": {
                name: [space.record(key) for key, _ in space.scan()] for name, space in spaces.items()
            },
            "settings": {name: space.settings for name, space in spaces.items()},
            "changes": list(site.changes()),
            "partitions": [(partition.id, partition.range) for partition in site.partitions()],
            "safe points": site.safe_points(),
            "feeds": site.feeds.list(),
            "subscriptions": [(row.name, row.through) for row in site.subscriptions.list()],
        }


# On a stage, or on what has the same site, namespace and version.
Call: TypeAlias = Callable[[Any, Any], object]
# What is asked, and the class of the error that answers it.
Refusal: TypeAlias = tuple[type[FloodmarkError], Callable[[Stage], object]]


def refusals(
    kind: type[FloodmarkError], calls: Mapping[str, Call], arguments: Sequence[object]
) -> dict[str, Refusal]:
    """Every call with every bad argument."""
    return {
        f"{name} {argument!r:.40}": (kind, partial(_ask, call, argument))
        for name, call in calls.items()
        for argument in arguments
    }


def _ask(call: Call, argument: object, stage: Stage) -> object:
    return call(stage, argument)


KEY_CALLS: Final[dict[str, Call]] = {
    "get": lambda stage, key: stage.users.get(key),
    "get at": lambda stage, key: stage.users.get(key, at=stage.first),
    "get_many": lambda stage, key: stage.users.get_many([b"ada", key]),
    "record": lambda stage, key: stage.users.record(key),
    "view": lambda stage, key: stage.users.as_of(stage.first).get(key),
    "put": lambda stage, key: stage.users.put(key, b"x"),
    "put_many": lambda stage, key: stage.users.put_many([(b"new", b"x"), (key, b"x")]),
    "delete": lambda stage, key: stage.users.delete(key),
    "compare_and_set": lambda stage, key: stage.users.compare_and_set(key, None, b"x"),
    "split": lambda stage, key: stage.site.split("users", key),
}
BAD_KEYS: Final = [b"", b"k" * (KEY_BYTES_MAX + 1), "ada", bytearray(b"ada"), memoryview(b"ada"), None, 7]

VALUE_CALLS: Final[dict[str, Call]] = {
    "put": lambda stage, value: stage.users.put(b"ada", value),
    "put_many": lambda stage, value: stage.users.put_many({b"new": b"x", b"ada": value}),
    "compare_and_set": lambda stage, value: stage.users.compare_and_set(b"ada", b"programmer", value),
}
BAD_VALUES: Final = [bytes(VALUE_BYTES_MAX + 1), "countess", bytearray(b"x"), 7, [b"x"]]
EXPECTED: Final[dict[str, Call]] = {
    "expected": lambda stage, expected: stage.users.compare_and_set(b"ada", expected, b"x")
}
PAIRS: Final[dict[str, Call]] = {"put_many": lambda stage, pairs: stage.users.put_many(pairs)}
BAD_PAIRS: Final = [[b"ada"], [(b"ada",)], [(b"ada", b"x", b"y")], 7, [7], None]

TTL_CALLS: Final[dict[str, Call]] = {
    "put": lambda stage, ttl: stage.users.put(b"ada", b"x", ttl=ttl),
    "put_many": lambda stage, ttl: stage.users.put_many({b"ada": b"x"}, ttl=ttl),
    "compare_and_set": lambda stage, ttl: stage.users.compare_and_set(b"ada", b"programmer", b"x", ttl=ttl),
}
BAD_TTLS: Final = [
    *(0, -1, -0.5, timedelta(0), timedelta(seconds=-1), timedelta(days=36_501)),
    *("60", True, float("nan"), float("inf"), 1e30, 1 << 80),
]

DURABILITY_CALLS: Final[dict[str, Call]] = {
    "put": lambda stage, how: stage.users.put(b"ada", b"x", durability=how),
    "put_many": lambda stage, how: stage.users.put_many({b"ada": b"x"}, durability=how),
    "delete": lambda stage, how: stage.users.delete(b"ada", durability=how),
    "delete_range": lambda stage, how: stage.users.delete_range(durability=how),
    "compare_and_set": lambda stage, how: stage.users.compare_and_set(b"z", None, b"x", durability=how),
    "writer": lambda stage, how: stage.users.writer(durability=how),
}
BAD_DURABILITY: Final = ["disk", "", True, 1, ["fsync"]]

RANGE_CALLS: Final[dict[str, Call]] = {
    "scan": lambda stage, keys: stage.users.scan(*keys),
    "reverse": lambda stage, keys: stage.users.scan(*keys, reverse=True),
    "view": lambda stage, keys: stage.users.as_of(stage.first).scan(*keys),
    "delete_range": lambda stage, keys: stage.users.delete_range(*keys),
    "changes": lambda stage, keys: stage.site.changes("users", start_key=keys[0], end_key=keys[1]),
    "subscribe": lambda stage, keys: stage.site.subscribe(
        "new", "users", start_key=keys[0], end_key=keys[1], options=BY_HAND
    ),
    "feed": lambda stage, keys: stage.site.feeds.create(
        "new", "users", "blackhole:", start_key=keys[0], end_key=keys[1]
    ),
}
BAD_RANGES: Final = [
    (b"b", b"a"),
    ("a", b"b"),
    (b"a", "b"),
    (None, b"b"),
    (bytes(KEY_BYTES_MAX + 1), None),
    (b"", bytes(KEY_BYTES_MAX + 1)),
]
PREFIX_CALLS: Final[dict[str, Call]] = {
    "scan": lambda stage, prefix: stage.users.scan(prefix=prefix),
    "delete_range": lambda stage, prefix: stage.users.delete_range(prefix=prefix),
    "changes": lambda stage, prefix: stage.site.changes("users", prefix=prefix),
    "subscribe": lambda stage, prefix: stage.site.subscribe("new", "users", prefix=prefix, options=BY_HAND),
    "feed": lambda stage, prefix: stage.site.feeds.create("new", "users", "blackhole:", prefix=prefix),
}
BAD_PREFIXES: Final = ["a", 7, bytes(KEY_BYTES_MAX + 1)]
ALL_NAMESPACES: Final[dict[str, Call]] = {
    "changes of a prefix": lambda stage, prefix: stage.site.changes(prefix=prefix),
    "changes from a key": lambda stage, start: stage.site.changes(start_key=start),
}
BACKWARDS: Final[dict[str, Call]] = {
    "changes": lambda stage, by: stage.site.changes("users", since=stage.first, until=stage.first - by),
}
LIMITS: Final[dict[str, Call]] = {
    "scan": lambda stage, limit: stage.users.scan(limit=limit),
    "view": lambda stage, limit: stage.users.as_of(stage.first).scan(limit=limit),
}
BAD_LIMITS: Final = [-1, 1.5, "1", True]

READS_AT: Final[dict[str, Call]] = {
    "get": lambda stage, at: stage.users.get(b"ada", at=at),
    "record": lambda stage, at: stage.users.record(b"ada", at=at),
    "get_many": lambda stage, at: stage.users.get_many([b"ada"], at=at),
    "scan": lambda stage, at: stage.users.scan(at=at),
    "reverse": lambda stage, at: stage.users.scan(at=at, reverse=True),
    "view get": lambda stage, at: stage.users.as_of(at).get(b"ada"),
    "view scan": lambda stage, at: stage.users.as_of(at).scan(),
}
STARTS: Final[dict[str, Call]] = {
    "changes": lambda stage, at: stage.site.changes("users", since=at),
    "subscribe": lambda stage, at: stage.site.subscribe("new", "users", start=at, options=BY_HAND),
    "seek": lambda stage, at: stage.site.subscriptions.seek("indexer", at),
    "feed": lambda stage, at: stage.site.feeds.create("new", "users", "blackhole:", since=at),
    "resume": lambda stage, at: stage.site.feeds.resume("paused", since=at),
}
ENDS: Final[dict[str, Call]] = {
    "until": lambda stage, at: stage.site.changes("users", until=at),
    "target": lambda stage, at: stage.site.feeds.create("new", "users", "blackhole:", until=at),
    "update": lambda stage, at: stage.site.feeds.update("paused", until=at),
    "safe point": lambda stage, at: stage.site.hold_safe_point("new", at, namespace="users"),
}
BAD_VERSIONS: Final = [
    *(-1, 1 << 64, True, 1.5, "later", b"now"),
    datetime(2024, 1, 1),
    datetime(1969, 1, 1, tzinfo=UTC),
]
FUTURE: Final = [compose(START_MS + 600_000, 0), datetime(2200, 1, 1, tzinfo=UTC), (1 << 64) - 1]

NEW_NAMES: Final[dict[str, Call]] = {
    "namespace": lambda stage, name: stage.site.create_namespace(name),
    "safe point": lambda stage, name: stage.site.hold_safe_point(name, stage.first),
    "feed": lambda stage, name: stage.site.feeds.create(name, "users", "blackhole:"),
    "subscription": lambda stage, name: stage.site.subscribe(name, "users", options=BY_HAND),
}
BAD_NAMES: Final = ["", "a b", "a/b", "a\tb", "a\n", "nul\0", "\ud800", "x" * 129, None, 7, b"users"]
# Nothing has such a name, for three different reasons.
ABSENT_NAMES: Final = ["nobody", "Users", "日本"]
IMPOSSIBLE_NAMES: Final = ["", "a b", "a/b", "x" * 129]
NO_NAMES: Final = [7, None, b"users", "\ud800"]
NAMESPACES: Final[dict[str, Call]] = {
    "namespace": lambda stage, name: stage.site.namespace(name),
    "update": lambda stage, name: stage.site.update_namespace(name, ttl=None),
    "drop": lambda stage, name: stage.site.drop_namespace(name),
    "split": lambda stage, name: stage.site.split(name, b"k"),
    "subscribe": lambda stage, name: stage.site.subscribe("new", name, options=BY_HAND),
    "feed": lambda stage, name: stage.site.feeds.create("new", name, "blackhole:"),
}
FEEDS: Final[dict[str, Call]] = {
    "feed show": lambda stage, name: stage.site.feeds.show(name),
    "feed pause": lambda stage, name: stage.site.feeds.pause(name),
    "feed remove": lambda stage, name: stage.site.feeds.remove(name),
    "feed statistics": lambda stage, name: stage.site.feeds.statistics(name),
    "feed run": lambda stage, name: stage.site.feeds.runner(name).run(),
}
SUBSCRIPTIONS: Final[dict[str, Call]] = {
    "subscription show": lambda stage, name: stage.site.subscriptions.show(name),
    "subscription seek": lambda stage, name: stage.site.subscriptions.seek(name, "end"),
    "subscription remove": lambda stage, name: stage.site.subscriptions.remove(name),
    "subscription statistics": lambda stage, name: stage.site.subscriptions.statistics(name),
}
RELEASES: Final[dict[str, Call]] = {
    "release": lambda stage, name: stage.site.release_safe_point(name),
}

SETTINGS: Final[dict[str, Call]] = {
    "create": lambda stage, settings: stage.site.create_namespace("new", **settings),
}
UPDATES: Final[dict[str, Call]] = {
    "update": lambda stage, settings: stage.site.update_namespace("users", **settings),
}
BAD_MERGES: Final = [{"merge": bad} for bad in ("newest", None, ["last_write"])]
BAD_SETTINGS: Final = [
    *({"ttl": bad} for bad in (timedelta(0), timedelta(seconds=-1), timedelta(days=36_501), "1h", 60)),
    *({"retention": bad} for bad in (timedelta(seconds=-1), timedelta(days=36_501), "1h", 60)),
]
LIFETIMES: Final[dict[str, Call]] = {
    "hold": lambda stage, lifetime: stage.site.hold_safe_point("new", stage.first, lifetime=lifetime),
}
BAD_LIFETIMES: Final = [timedelta(0), timedelta(seconds=-1), timedelta(days=36_501), "1h", None, 60]
MERGES: Final[dict[str, Call]] = {"merge": lambda stage, pair: stage.site.merge(*pair)}
BAD_MERGED: Final = [(999, 1), (1, 999), (-1, 1), (1 << 70, 1), ("1", 2), (None, None), (1.5, 2)]

NEW_FEEDS: Final[dict[str, Call]] = {
    "create": lambda stage, options: stage.site.feeds.create("new", "users", **options),
}
BAD_FEEDS: Final[list[dict[str, Any]]] = [
    *({"sink": bad} for bad in ("", "no scheme", "parquet:x?token=abc", "x:" + "y" * 3_000, 7, None)),
    *({"sink": "blackhole:", "ranges": bad} for bad in (0, 65, "2", 1.5)),
    *({"sink": "blackhole:", "description": bad} for bad in ("x" * 1_001, 7)),
    {"sink": "blackhole:", "options": {"concurrency": 2}},
    {"sink": "blackhole:?concurrency=0"},
    {"sink": "blackhole:?concurrency=many"},
]
FEED_UPDATES: Final[dict[str, Call]] = {
    "update": lambda stage, options: stage.site.feeds.update("paused", **options),
}
BAD_FEED_UPDATES: Final[list[dict[str, Any]]] = [
    *({"sink": bad} for bad in ("", "no scheme", "parquet:x?token=abc", 7)),
    *({"ranges": bad} for bad in (0, 65, "2", 1.5)),
    *({"description": bad} for bad in ("x" * 1_001, 7)),
    {"options": {"concurrency": 2}},
]
HOLDERS: Final[dict[str, Call]] = {
    "run": lambda stage, holder: stage.site.feeds.runner("copy", holder=holder).run(),
}
SUBSCRIBES: Final[dict[str, Call]] = {
    "subscribe": lambda stage, options: stage.site.subscribe(
        "new", "users", **{"options": BY_HAND} | options
    ),
}
BAD_SUBSCRIBES: Final[list[dict[str, Any]]] = [
    *({"unacked_max": bad} for bad in (0, -1, 30_001, True, "9")),
    *({"options": replace(BY_HAND, lease_seconds=bad)} for bad in (0.0, -1.0, 3_601.0, "9")),  # type: ignore[arg-type]
]
SUBSCRIBER_NAMES: Final[dict[str, Call]] = {
    "holder": lambda stage, holder: stage.site.subscribe("indexer", "users", holder=holder, options=BY_HAND),
}


def _looked_up(names: Sequence[object]) -> dict[str, Refusal]:
    """To look for what is not there is no mistake, whatever it is called."""
    return (
        refusals(errors.NamespaceNotFound, NAMESPACES, names)
        | refusals(errors.FeedNotFound, FEEDS, names)
        | refusals(errors.SubscriptionNotFound, SUBSCRIPTIONS, names)
    )


REFUSALS: Final[dict[str, dict[str, Refusal]]] = {
    "keys": refusals(errors.InvalidKey, KEY_CALLS, BAD_KEYS),
    "values": refusals(errors.InvalidValue, VALUE_CALLS, BAD_VALUES)
    | refusals(errors.InvalidValue, EXPECTED, ["countess", 7])
    | refusals(errors.InvalidValue, {"put": VALUE_CALLS["put"]}, [None])
    | refusals(errors.InvalidArgument, PAIRS, BAD_PAIRS),
    "times to live": refusals(errors.InvalidTimeToLive, TTL_CALLS, BAD_TTLS),
    "durability": refusals(errors.InvalidArgument, DURABILITY_CALLS, BAD_DURABILITY),
    "ranges": refusals(errors.InvalidRange, RANGE_CALLS, BAD_RANGES)
    | refusals(errors.InvalidRange, PREFIX_CALLS, BAD_PREFIXES)
    | refusals(errors.InvalidRange, ALL_NAMESPACES, [b"a"])
    | refusals(errors.InvalidVersion, BACKWARDS, [1])
    | refusals(errors.InvalidArgument, LIMITS, BAD_LIMITS),
    "versions": refusals(errors.InvalidVersion, READS_AT | STARTS | ENDS, BAD_VERSIONS)
    | refusals(errors.VersionInFuture, READS_AT | STARTS, FUTURE)
    | refusals(errors.InvalidVersion, READS_AT, ["now", 0]),
    "new names": refusals(errors.InvalidName, NEW_NAMES | RELEASES, BAD_NAMES),
    "absent names": _looked_up(ABSENT_NAMES) | refusals(errors.SafePointNotFound, RELEASES, ABSENT_NAMES),
    "impossible names": refusals(
        errors.InvalidName, NAMESPACES | FEEDS | SUBSCRIPTIONS, [*IMPOSSIBLE_NAMES, *NO_NAMES]
    ),
    "settings": refusals(errors.InvalidName, SETTINGS, BAD_MERGES)
    | refusals(errors.InvalidName, SETTINGS | UPDATES, BAD_SETTINGS)
    | refusals(errors.InvalidArgument, LIFETIMES, BAD_LIFETIMES)
    | refusals(errors.PartitionNotFound, MERGES, BAD_MERGED),
    "feeds": refusals(errors.InvalidArgument, NEW_FEEDS, BAD_FEEDS)
    | refusals(errors.InvalidArgument, FEED_UPDATES, BAD_FEED_UPDATES)
    | refusals(errors.InvalidName, HOLDERS, ["a b", "x" * 129, 7]),
    "subscriptions": refusals(errors.InvalidArgument, SUBSCRIBES, BAD_SUBSCRIBES)
    | refusals(errors.InvalidName, SUBSCRIBER_NAMES, ["a b", "x" * 129, 7]),
}


class RefusalContract(SiteContractBase):
    """Bad input of every kind."""

    @pytest.mark.parametrize("what", REFUSALS)
    def test_bad_input_is_refused_as_by_a_site_of_this_process(
        self, site: Site, time: SimulatedTime, what: str
    ) -> None:
        stage, model_time = Stage(site, time), SimulatedTime(START_MS)
        with self.open_model(model_time) as model_site:
            model = Stage(model_site, model_time)
            before = stage.fingerprint()
            assert before == model.fingerprint()
            differences = []
            for name, (kind, ask) in REFUSALS[what].items():
                expected, found = outcome_of(partial(ask, model)), outcome_of(partial(ask, stage))
                if not isinstance(expected, Refused) or expected.kind is not kind:
                    differences.append(f"{name}: {expected}\n    is not of the kind {kind.__name__}")
                elif found != expected:
                    differences.append(f"{name}: {found}\n    instead of {expected}")
            assert not differences, "\n".join(["", *differences])
            assert stage.fingerprint() == before
