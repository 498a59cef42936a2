"""The site's contract: futures that complete when a key changes."""

from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
from tests.contracts.site.base import SiteContractBase, refused
from tests.waiting import HANG_SECONDS, wait_until

from floodmark.model.errors import Closed, Conflict, LimitExceeded
from floodmark.model.version import Version
from floodmark.site import Namespace, Site, watching


def version_of(watched: "Future[Version]") -> Version:
    """The result of a watch, waited for."""
    return watched.result(HANG_SECONDS)


def watch_and_change(site: Site, users: Namespace, key: bytes) -> None:
    """Wait until the watches of a namespace have come to the present."""
    watched = site.watch(users, key)
    assert users.put(key, b"changed") == version_of(watched)


class WatchingContract(SiteContractBase):
    """Watches of keys."""

    def test_watch_completes_with_the_next_change_of_its_key(self, site: Site, users: Namespace) -> None:
        users.put_many({b"ada": b"1", b"bob": b"1"})
        ada, bob, absent = (site.watch(users, key) for key in (b"ada", b"bob", b"carl"))
        assert users.delete(b"ada") == version_of(ada)
        assert users.put(b"carl", b"2") == version_of(absent)
        assert not bob.done()
        assert users.put(b"bob", b"1") == version_of(bob), "the same value again is a change"

    def test_changes_after_the_reads_count_whenever_the_watch_is_set(
        self, site: Site, users: Namespace
    ) -> None:
        site.watch(users, b"other")
        with site.transaction() as transaction:
            assert transaction.get(users, b"ada", snapshot=True) is None
            users.put(b"ada", b"1")
            deleted = users.delete(b"ada")
            # The thread that follows the namespace is past these changes now.
            watch_and_change(site, users, b"bob")
            watched = transaction.watch(users, b"ada")
            transaction.put(users, b"carl", b"1")
            assert not watched.done(), "it completes after the commit"
        assert version_of(watched) == deleted

    def test_own_write_is_no_change(self, site: Site, users: Namespace) -> None:
        with site.transaction() as transaction:
            watched = transaction.watch(users, b"ada")
            transaction.put(users, b"ada", b"own")
        watch_and_change(site, users, b"bob")
        assert not watched.done()
        assert users.put(b"ada", b"2") == version_of(watched)

    @pytest.mark.parametrize("merge", ["fields", "counter"])
    def test_records_that_are_merged_can_be_watched(self, site: Site, merge: Any) -> None:
        namespace = site.create_namespace("merged", merge=merge)
        watched = site.watch(namespace, b"ada")
        write = namespace.update(b"ada", {"x": 1}) if merge == "fields" else namespace.add(b"ada")
        assert version_of(watched) == write

    def test_keys_of_a_codec_are_text(self, site: Site) -> None:
        texts = site.create_namespace("texts", codec="text")
        watched = site.watch(texts, "ada")
        assert texts.put("ada", "x") == version_of(watched)

    def test_watch_of_what_is_not_committed_is_cancelled(self, site: Site, users: Namespace) -> None:
        transaction = site.transaction()
        aborted = transaction.watch(users, b"ada")
        transaction.abort()
        transaction = site.transaction()
        transaction.get(users, b"bob")
        refused_too = transaction.watch(users, b"ada")
        transaction.put(users, b"bob", b"1")
        users.put(b"bob", b"2")
        with pytest.raises(Conflict):
            transaction.commit()
        assert aborted.cancelled()
        assert refused_too.cancelled()

    def test_closing_cancels_watches(self, site: Site, users: Namespace) -> None:
        watched = site.watch(users, b"ada")
        site.close()
        with pytest.raises(CancelledError):
            watched.result(HANG_SECONDS)
        refused(Closed, lambda: site.watch(users, b"ada"))

    def test_number_of_watches_is_limited_and_ended_ones_count_no_more(
        self, site: Site, users: Namespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(watching, "WATCHES_MAX", 2)
        first, second = site.watch(users, b"ada"), site.watch(users, b"bob")
        error = refused(LimitExceeded, lambda: site.watch(users, b"carl"))
        assert "cancel" in str(error)
        first.cancel()
        third = site.watch(users, b"carl")
        users.put_many({b"ada": b"1", b"bob": b"1", b"carl": b"1"})
        assert {version_of(second), version_of(third)} == {version_of(third)}
        assert first.cancelled()
        watch_and_change(site, users, b"ada")

    def test_nothing_follows_the_changes_when_no_key_is_watched(self, site: Site, users: Namespace) -> None:
        watch_and_change(site, users, b"ada")
        wait_until(lambda: not site.statistics().readers.open, "the stream of the watches stays open")
        watch_and_change(site, users, b"ada")
