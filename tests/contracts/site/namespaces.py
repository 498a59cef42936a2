"""The site's contract: who the site is, and its namespaces."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from msgspec import UNSET
from tests.contracts.site.base import (
    HOUR,
    SITE,
    SITE_ID,
    Refused,
    SiteContractBase,
    outcome_of,
    refused,
)

from floodmark.model.errors import NamespaceExists, NamespaceNotFound
from floodmark.site import Namespace, NamespaceSettings, Site

GOOD_NAMES = ["a", "Z9", "x" * 128, "a.b-c_d:e", "smörgås", "日本", "🌊", "a\\b", "'quoted'", "%s{}"]


class NamespaceContract(SiteContractBase):
    """Creating, finding, changing and dropping namespaces."""

    def test_site_says_who_it_is(self, site: Site) -> None:
        assert type(site) is Site
        assert (site.name, site.id) == (SITE, SITE_ID)
        assert repr(site) == f"Site({SITE!r}, id={SITE_ID})"

    def test_new_site_has_no_namespaces(self, site: Site) -> None:
        assert site.namespaces() == []

    def test_new_namespace_is_empty_and_has_the_usual_settings(self, site: Site) -> None:
        made = site.create_namespace("users")
        found = site.namespace("users")
        for namespace in (made, found):
            assert type(namespace) is Namespace
            assert namespace.name == "users"
            assert repr(namespace) == "Namespace('users')"
            assert namespace.settings == NamespaceSettings(
                merge="last_write", ttl=None, retention=timedelta(hours=24)
            )
            assert list(namespace.scan()) == []

    def test_settings_are_kept(self, site: Site) -> None:
        wanted = NamespaceSettings(ttl=timedelta(seconds=90), retention=timedelta(days=7))
        made = site.create_namespace("users", ttl=wanted.ttl, retention=wanted.retention)
        assert made.settings == wanted
        assert site.namespace("users").settings == wanted

    def test_settings_are_rounded_up_to_milliseconds(self, site: Site) -> None:
        brief = timedelta(microseconds=1)
        settings = site.create_namespace("users", ttl=brief, retention=brief).settings
        assert settings.ttl == settings.retention == timedelta(milliseconds=1)

    def test_retention_may_be_nothing(self, site: Site) -> None:
        assert site.create_namespace("users", retention=timedelta(0)).settings.retention == timedelta(0)

    def test_names_are_listed_in_order(self, site: Site) -> None:
        for name in reversed(GOOD_NAMES):
            site.create_namespace(name)
        assert site.namespaces() == sorted(GOOD_NAMES)
        assert [site.namespace(name).name for name in GOOD_NAMES] == GOOD_NAMES

    def test_name_is_used_once(self, site: Site, users: Namespace) -> None:
        users.put(b"ada", b"countess")
        error = refused(NamespaceExists, lambda: site.create_namespace("users"), namespace="users")
        assert "site.namespace('users')" in str(error)
        assert site.namespace("users").get(b"ada") == b"countess"

    def test_name_that_is_not_there_is_not_found(self, site: Site) -> None:
        site.create_namespace("users")
        site.create_namespace("orders")
        for ask in (
            lambda: site.namespace("nobody"),
            lambda: site.update_namespace("nobody"),
            lambda: site.drop_namespace("nobody"),
            lambda: site.changes("nobody"),
            lambda: site.split("nobody", b"k"),
            lambda: site.subscribe("indexer", "nobody"),
            lambda: site.feeds.create("copy", "nobody", "blackhole:"),
        ):
            error = refused(NamespaceNotFound, ask, namespace="nobody")
            assert "there are: orders, users" in str(error)
            assert "site.create_namespace('nobody')" in str(error)

    def test_namespaces_are_separate_sets_of_keys(self, site: Site, users: Namespace) -> None:
        orders = site.create_namespace("orders")
        users.put(b"key", b"user")
        orders.put(b"key", b"order")
        orders.put(b"other", b"order")
        assert (users.get(b"key"), users.get(b"other")) == (b"user", None)
        assert users.delete_range() == 1
        assert list(orders.scan()) == [(b"key", b"order"), (b"other", b"order")]

    # Updates

    def test_update_changes_what_it_names_and_nothing_else(self, site: Site) -> None:
        site.create_namespace("users", ttl=HOUR, retention=2 * HOUR)
        longer = site.update_namespace("users", ttl=3 * HOUR)
        assert type(longer) is Namespace
        assert longer.settings == NamespaceSettings(ttl=3 * HOUR, retention=2 * HOUR)
        assert site.update_namespace("users").settings == longer.settings
        assert site.update_namespace("users", ttl=UNSET, retention=UNSET).settings == longer.settings
        endless = site.update_namespace("users", ttl=None)
        assert endless.settings == NamespaceSettings(ttl=None, retention=2 * HOUR)
        shorter = site.update_namespace("users", retention=HOUR)
        assert shorter.settings == NamespaceSettings(ttl=None, retention=HOUR)
        assert site.namespace("users").settings == shorter.settings

    def test_update_shows_in_every_handle(self, site: Site, users: Namespace) -> None:
        site.update_namespace("users", ttl=HOUR, retention=5 * HOUR)
        assert users.settings == NamespaceSettings(ttl=HOUR, retention=5 * HOUR)

    def test_update_holds_for_writes_through_every_handle(self, site: Site, users: Namespace) -> None:
        site.update_namespace("users", ttl=HOUR)
        users.put(b"ada", b"countess")
        users.put_many({b"bob": b"builder"})
        for key in (b"ada", b"bob"):
            record = users.record(key)
            assert record is not None
            assert record.expires_at is not None

    # Drops

    def test_dropped_namespace_is_gone_at_once(self, site: Site, users: Namespace) -> None:
        site.create_namespace("orders")
        users.put(b"ada", b"countess")
        site.drop_namespace("users")
        assert site.namespaces() == ["orders"]
        refused(NamespaceNotFound, lambda: site.namespace("users"), namespace="users")
        refused(NamespaceNotFound, lambda: site.changes("users"), namespace="users")
        refused(NamespaceNotFound, lambda: site.drop_namespace("users"), namespace="users")

    @pytest.mark.parametrize("name_is_back", [False, True])
    def test_handle_of_a_dropped_namespace_can_no_longer_be_used(
        self, site: Site, users: Namespace, name_is_back: bool
    ) -> None:
        version = users.put(b"ada", b"countess")
        view = users.as_of(version)
        site.drop_namespace("users")
        if name_is_back:
            site.create_namespace("users").put(b"new", b"life")
        asked: dict[str, Callable[[], object]] = {
            "get": lambda: users.get(b"ada"),
            "get at": lambda: users.get(b"ada", at=version),
            "get_many": lambda: users.get_many([b"ada"]),
            "record": lambda: users.record(b"ada"),
            "scan": users.scan,
            "put": lambda: users.put(b"ada", b"again"),
            "put_many": lambda: users.put_many({b"ada": b"again"}),
            "put_many of nothing": lambda: users.put_many({}),
            "writer": users.writer,
            "delete": lambda: users.delete(b"ada"),
            "delete_range": users.delete_range,
            "compare_and_set": lambda: users.compare_and_set(b"ada", b"countess", b"again"),
            "view get": lambda: view.get(b"ada"),
            "view scan": view.scan,
        }
        said = "namespace 'users' was dropped; create it again with site.create_namespace('users')"
        expected = Refused(NamespaceNotFound, said, {"namespace": (str, "users")})
        assert {name: outcome_of(ask) for name, ask in asked.items()} == dict.fromkeys(asked, expected)
        if name_is_back:
            assert list(site.namespace("users").scan()) == [(b"new", b"life")]

    def test_name_of_a_dropped_namespace_returns_as_a_new_set(self, site: Site, users: Namespace) -> None:
        users.put(b"ada", b"countess")
        site.drop_namespace("users")
        again = site.create_namespace("users")
        assert list(again.scan()) == []
        version = again.put(b"bob", b"builder")
        assert [(change.key, change.version) for change in site.changes("users")] == [(b"bob", version)]
