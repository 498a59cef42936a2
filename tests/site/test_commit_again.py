"""A commit that is sent again while the first is under way hears what became of that."""

from datetime import timedelta

import pytest
from tests.site.support import host_of

from floodmark.engine import MemoryEngine
from floodmark.host.transaction_port import NamespaceWrites
from floodmark.model.errors import TransactionEnded
from floodmark.model.partition import Decision, Fate
from floodmark.partition import FAMILIES
from floodmark.site import Site, open_engine


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site on which every transaction is decided just after somebody has asked."""
    site = open_engine(MemoryEngine(FAMILIES), site="oslo", site_id=7, background=False)
    site.create_namespace("users")
    site.transaction(coordinator=0).abort()
    coordinator = host_of(site).transactions.coordinators[0]
    monkeypatch.setattr(coordinator, "fate", lambda _: Fate(Decision.UNDECIDED))
    return site


def writes(site: Site) -> list[NamespaceWrites]:
    policy, _, expire = site.namespace("users").encoding
    row = site.host.namespaces.find_namespace("users")
    return [NamespaceWrites("users", row.id, {b"ada": policy.put(b"ada", b"x", expire(None))})]


def test_the_same_commit_again_answers_the_same_version(site: Site) -> None:
    transaction = site.transactions.begin(timedelta(hours=1), 0)
    version = site.transactions.commit(transaction, writes(site))
    assert site.transactions.commit(transaction, writes(site)) == version
    assert site.namespace("users").get(b"ada") == b"x"


def test_a_commit_without_its_writes_by_another_is_told(site: Site) -> None:
    transaction = site.transactions.begin(timedelta(hours=1), 0)
    site.transactions.commit(transaction, [])
    with pytest.raises(TransactionEnded, match="committed without these writes"):
        site.transactions.commit(transaction, writes(site))
    assert site.namespace("users").get(b"ada") is None


def test_one_that_was_aborted_is_ended(site: Site) -> None:
    transaction = site.transactions.begin(timedelta(hours=1), 0)
    site.transactions.abort(transaction, "it hangs")
    with pytest.raises(TransactionEnded, match="it hangs"):
        site.transactions.commit(transaction, writes(site))
