"""What a caller that is limited to some namespaces learns of the others: nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.support import connected, qualify, serving, token_of, write_access, write_roles

from floodmark.feed.named.feeds import FeedSpec
from floodmark.feed.subscription.subscriptions import SubscriptionSpec
from floodmark.model.access import Role
from floodmark.model.errors import (
    FeedNotFound,
    FloodmarkError,
    InvalidArgument,
    NamespaceNotFound,
    NotAllowed,
    SubscriptionNotFound,
)
from floodmark.model.ranges import KeyRange
from floodmark.server import Server, ServerOptions
from floodmark.site import Site

MINE, OTHER = "mine", "salaries"
SECRETS = ("salaries", "payroll", "zoe", "x/zoe")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Server]]:
    """Another namespace, with a split key, a feed and a subscription; one of the caller behind it."""
    access = write_roles(Path(tmp_path_factory.mktemp("access")) / "access.toml", MINE)
    with serving(ServerOptions(access=access)) as (site, server):
        site.create_namespace("first")
        site.create_namespace(OTHER)
        site.create_namespace(MINE)
        site.split(OTHER, b"zoe")
        site.split(MINE, b"m")
        site.host.feeds.create(FeedSpec(name="payroll", namespace=OTHER, sink="blackhole:"))
        spec = SubscriptionSpec(name="payroll", namespace=OTHER, keys=KeyRange(b"zoe"))
        site.host.subscriptions.open(spec, 0, "holder", 10.0)
        yield site, server


@pytest.fixture
def limited(served: tuple[Site, Server]) -> Iterator[Site]:
    with connected(served[1], token=token_of(Role.ADMIN, MINE)) as site:
        yield site


def refusal(kind: type[FloodmarkError], use: object) -> str:
    assert callable(use)
    with pytest.raises(kind) as caught:
        use()
    return f"{caught.value} {caught.value.details}"


def test_feeds_and_subscriptions_of_others_are_not_there(limited: Site) -> None:
    feeds, subscriptions = limited.host.feeds, limited.host.subscriptions
    for name in ("payroll", "nothing"):
        for use, kind in (
            (lambda name=name: feeds.find(name), FeedNotFound),
            (lambda name=name: feeds.remove(name), FeedNotFound),
            (lambda name=name: subscriptions.find(name), SubscriptionNotFound),
            (lambda name=name: subscriptions.seek(name, 1), SubscriptionNotFound),
        ):
            text = refusal(kind, use).replace(f"'{name}'", "")
            assert not any(secret in text for secret in SECRETS)


def test_a_subscription_that_is_taken_does_not_say_by_which_namespace(limited: Site) -> None:
    spec = SubscriptionSpec(name="payroll", namespace=MINE)
    text = refusal(InvalidArgument, lambda: limited.host.subscriptions.open(spec, 0, "me", 10.0))
    assert OTHER not in text
    assert "zoe" not in text


def test_a_namespace_that_is_gone_does_not_name_the_others(tmp_path: Path) -> None:
    access = write_roles(tmp_path / "access.toml", MINE)
    with serving(ServerOptions(access=access)) as (site, server):
        site.create_namespace(OTHER)
        with connected(server, token=token_of(Role.ADMIN, MINE)) as remote:
            text = refusal(NamespaceNotFound, lambda: remote.namespace(MINE))
    assert "'mine'" in text
    assert OTHER not in text


def test_the_map_shows_the_split_keys_of_a_callers_namespaces_only(
    served: tuple[Site, Server], limited: Site
) -> None:
    mine = limited.namespace(MINE)
    seen = limited.host.router.maps.map
    assert [partition.range for partition in seen.partitions] == [
        KeyRange(b"", qualify(mine, b"m")),
        KeyRange(qualify(mine, b"m"), None),
    ]
    whole = served[0].host.router.maps.map
    for key in (b"a", b"l", b"m", b"z"):
        assert seen.route(qualify(mine, key)).id == whole.route(qualify(mine, key)).id
    mine.put_many({b"a": b"1", b"z": b"2"})
    assert list(mine.scan()) == [(b"a", b"1"), (b"z", b"2")]
    assert list(mine.scan(reverse=True)) == [(b"z", b"2"), (b"a", b"1")]


def test_a_namespace_that_is_made_later_is_found_without_a_new_connection(tmp_path: Path) -> None:
    access = write_roles(tmp_path / "access.toml", MINE)
    with serving(ServerOptions(access=access)) as (site, server):
        site.create_namespace(OTHER)
        site.split(OTHER, b"m")
        with connected(server, token=token_of(Role.ADMIN, MINE)) as remote:
            assert len(remote.host.router.maps.map.partitions) == 1
            mine = remote.create_namespace(MINE)
            mine.put(b"a", b"1")
            assert list(mine.scan()) == [(b"a", b"1")]
            assert mine.get(b"a") == b"1"


def test_a_stream_ends_when_its_namespace_is_taken_from_its_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floodmark.server.visits.RENEW_MS", 0)
    entry: dict[str, object] = {"name": "ada", "role": "read", "token": "ada", "namespaces": [MINE, OTHER]}
    access = write_access(tmp_path / "access.toml", entry)
    with serving(ServerOptions(access=access)) as (site, server), connected(server, token="ada") as remote:
        site.create_namespace(MINE)
        follower = remote.changes(MINE, follow=True, resolved_markers=True)
        next(follower)
        write_access(access, {**entry, "namespaces": [OTHER]})
        with pytest.raises(NotAllowed, match="'mine'"):
            list(follower)
