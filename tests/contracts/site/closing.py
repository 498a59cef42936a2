"""The site's contract: the end of a site.  Every public method of it refuses to be used afterwards."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

import pytest
from tests.contracts.site.base import SiteContractBase, fill, refused

from floodmark.feed.subscription.consumer import Subscription, SubscriptionOptions
from floodmark.model.change import Stamp
from floodmark.model.errors import Closed
from floodmark.replication.topology import MemberSite, Topology
from floodmark.site import Namespace, Site, View
from floodmark.site.feeds import Feeds, Subscriptions

# The arguments with which each method is called, by its name.
Calls: TypeAlias = dict[str, tuple[Any, ...]]

SITE_CALLS: Final[Calls] = {
    "append": (None, b"ada", b"x"),
    "atomic": (),
    "changes": ("users",),
    "collect_garbage": (),
    "covers": ("users", Stamp(1, 8)),
    "create_namespace": ("orders",),
    "drop_namespace": ("nobody",),
    "heartbeat": (),
    "heat": (),
    "hold_safe_point": ("new", 1 << 60),
    "locate": ("users", b"k"),
    "merge": (1, 2),
    "namespace": ("users",),
    "namespaces": (),
    "now": (),
    "partitions": (),
    "read_atomic": ([],),
    "read_atomic_many": ([],),
    "release_safe_point": ("lost",),
    "replication": (),
    "resolved_version": (),
    "run_transaction": (print,),
    "safe_points": (),
    "set_topology": (Topology(epoch=1, sites={"oslo": MemberSite(id=7), "rome": MemberSite(id=8)}),),
    "split": ("users", b"k"),
    "statistics": (),
    "subscribe": ("indexer", "users"),
    "sync": (),
    "topology": (),
    "transaction": (),
    "transaction_outcome": ("0-1-a",),
    "update_namespace": ("users",),
    "watch": (None, b"ada"),
}
VIEW_CALLS: Final[Calls] = {"get": (b"ada",), "get_many": ([b"ada"],), "record": (b"ada",), "scan": ()}
NAMESPACE_CALLS: Final[Calls] = VIEW_CALLS | {
    "compare_and_set": (b"ada", None, b"x"),
    "delete": (b"ada",),
    "delete_range": (),
    "first": (b"a", b"b"),
    "pages": (),
    "put": (b"ada", b"x"),
    "put_many": ({b"ada": b"x"},),
}
FIELDS_CALLS: Final[Calls] = VIEW_CALLS | {
    "compare_and_set": (b"ada", None, b"{}"),
    "delete": (b"ada",),
    "delete_field": (b"ada", "name"),
    "delete_range": (),
    "put": (b"ada", b"{}"),
    "put_many": ({b"ada": b"{}"},),
    "update": (b"ada", {"name": "Ada"}),
}
COUNTER_CALLS: Final[Calls] = VIEW_CALLS | {"add": (b"ada", 2), "delete": (b"ada",), "delete_range": ()}
FEED_CALLS: Final[Calls] = {
    "create": ("new", "users", "blackhole:"),
    "list": (),
    "pause": ("copy",),
    "rebalance": ("copy",),
    "remove": ("copy",),
    "resume": ("copy",),
    "show": ("copy",),
    "statistics": ("copy",),
    "update": ("copy",),
}
SUBSCRIPTION_CALLS: Final[Calls] = {
    "list": (),
    "remove": ("indexer",),
    "seek": ("indexer", "end"),
    "show": ("indexer",),
    "statistics": ("indexer",),
}


def public_methods(kind: type) -> set[str]:
    """The methods that users call."""
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


class ClosingContract(SiteContractBase):
    """A site that was closed does nothing more, and says so."""

    def test_tables_of_calls_name_every_method(self) -> None:
        assert set(SITE_CALLS) == public_methods(Site) - {"close"}
        calls = set(NAMESPACE_CALLS) | set(FIELDS_CALLS) | set(COUNTER_CALLS)
        assert calls == public_methods(Namespace) - {"as_of", "writer"}
        assert set(VIEW_CALLS) == public_methods(View)
        assert set(FEED_CALLS) == public_methods(Feeds) - {"runner"}
        assert set(SUBSCRIPTION_CALLS) == public_methods(Subscriptions)

    def test_closing_twice_is_harmless(self, site: Site) -> None:
        site.close()
        site.close()

    def test_site_is_closed_at_the_end_of_its_block(self, site: Site) -> None:
        with site as same:
            assert same is site
        refused(Closed, site.namespaces)

    def test_closed_site_refuses_every_call_about_merged_records(self, site: Site) -> None:
        people = site.create_namespace("people", merge="fields")
        visits = site.create_namespace("visits", merge="counter")
        site.close()
        for namespace, calls in ((people, FIELDS_CALLS), (visits, COUNTER_CALLS)):
            for name, arguments in calls.items():
                refused(Closed, partial(getattr(namespace, name), *arguments))

    def test_closed_site_refuses_every_call(self, site: Site, users: Namespace) -> None:
        users.put(b"ada", b"countess")
        site.close()
        for name, arguments in SITE_CALLS.items():
            error = refused(Closed, lambda name=name, arguments=arguments: getattr(site, name)(*arguments))  # type: ignore[misc]
            assert str(error) == f"site {site.name!r} was closed; open it again", name
        assert (site.name, site.id) == ("oslo", 7)

    def test_what_belongs_to_a_closed_site_refuses_every_call(self, site: Site, users: Namespace) -> None:
        version = users.put(b"ada", b"countess")
        view, feeds, subscriptions = users.as_of(version), site.feeds, site.subscriptions
        feeds.create("copy", "users", "blackhole:")
        runner, writer = feeds.runner("copy"), users.writer()
        subscription = subscribe(site)
        writer.put(b"bob", b"builder")
        site.close()
        asks: dict[str, Callable[[], object]] = {
            f"{type(owner).__name__}.{name}": lambda owner=owner, name=name, given=given: getattr(  # type: ignore[misc]
                owner, name
            )(*given)
            for owner, calls in (
                (users, NAMESPACE_CALLS),
                (view, VIEW_CALLS),
                (feeds, FEED_CALLS),
                (subscriptions, SUBSCRIPTION_CALLS),
            )
            for name, given in calls.items()
        }
        asks |= {
            "runner": runner.run,
            "writer flush": writer.flush,
            "writer of a closed site": lambda: write(users),
            "subscription": lambda: next(iter(subscription)),
            "feeds": lambda: site.feeds,
            "subscriptions": lambda: site.subscriptions,
        }
        wrong = []
        for name, ask in asks.items():
            try:
                error = refused(Closed, ask)
                assert "again" in str(error)
            except (AssertionError, pytest.fail.Exception) as failure:
                wrong.append(f"{name}: {failure}")
        assert not wrong, "\n".join(["", *wrong])

    def test_open_scans_and_readers_end_with_an_error(self, site: Site, users: Namespace) -> None:
        for index in range(20):
            fill(users, 1_500, b"%d" % index * 200)
        rows, changes = users.scan(), site.changes("users")
        next(rows)
        next(changes)
        site.close()
        refused(Closed, lambda: list(rows))
        refused(Closed, lambda: list(changes))


def write(namespace: Namespace) -> None:
    """Write a record by a stream."""
    with namespace.writer() as writer:
        writer.put(b"carl", b"composer")


def subscribe(site: Site) -> Subscription:
    """A consumer that does nothing by itself."""
    return site.subscribe("indexer", "users", options=SubscriptionOptions(follow=False, background=False))
