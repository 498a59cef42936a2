"""A transaction belongs to the caller that began it, whoever else knows its id."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.contracts.site.subscriptions import BY_HAND
from tests.server.support import LOOPBACK, connected, serving, write_access
from tests.site.support import HookedEngine, host_of

from floodmark.feed.named.feeds import FeedSpec
from floodmark.feed.subscription.acknowledgement import Acknowledgement, Progress
from floodmark.host import coordination as transacting
from floodmark.host.transaction_port import OWN_MARK, NamespaceWrites
from floodmark.model.access import Role
from floodmark.model.errors import LeaseHeld, LimitExceeded, NotAllowed, TransactionNotFound
from floodmark.server import Server, ServerOptions, serve
from floodmark.server.access import Caller
from floodmark.server.ownership import MARK_DIGITS, mark_of
from floodmark.site import Site, Transaction, open_engine

HOUR = timedelta(hours=1)
OWNER, ROTATED, OTHER, LIMITED, ADMIN = (
    "owner-token",
    "rotated",
    "other-token",
    "limited-token",
    "admin-token",
)


class House:
    """A site with an owner of transactions and others, whose server can be started again."""

    def __init__(self, directory: Path) -> None:
        self.engine = HookedEngine()
        self.access = write_access(
            directory / "access.toml",
            {"name": "owner", "role": "write", "token": OWNER},
            {"name": "owner", "role": "write", "token": ROTATED},
            {"name": "other", "role": "write", "token": OTHER},
            {"name": "limited", "role": "admin", "token": LIMITED, "namespaces": ["users"]},
            {"name": "admin", "role": "admin", "token": ADMIN},
        )

    @contextmanager
    def served(self) -> Iterator[tuple[Site, Server]]:
        self.engine.reopen()
        site = open_engine(self.engine, site="oslo", site_id=7)
        with serve(site, LOOPBACK, ServerOptions(access=self.access)) as server:
            yield site, server


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = House(tmp_path)
    with house.served() as (site, _):
        site.create_namespace("users").put(b"ada", b"countess")
        site.create_namespace("unread", merge="counter")
    return house


def begin(site: Site) -> Transaction:
    """A transaction that counts a change and has acknowledged it."""
    transaction = site.transaction(timeout=HOUR)
    transaction.add(site.namespace("unread"), b"ada", 1)
    with site.subscribe("counting", "users", options=BY_HAND) as subscription:
        transaction.acknowledge(next(subscription))
    return transaction


def see(site: Site) -> str:
    """The id of a transaction, as everybody sees it who may read the namespace."""
    (pending,) = site.host.subscriptions.pending("counting")
    return pending.transaction


def meddle(site: Site, transaction: str) -> None:
    """Try all that would take a transaction from its owner."""
    row = site.host.subscriptions.find("counting")
    with pytest.raises(NotAllowed, match="not begun by"):
        site.transactions.commit(transaction, [])
    with pytest.raises(NotAllowed, match="not begun by"):
        site.transactions.abort(transaction, "because")
    with pytest.raises(NotAllowed, match="not begun by"):
        site.transactions.acknowledge(
            transaction, "counting", row.epoch, Progress(through=row.through), Acknowledgement()
        )


@pytest.mark.parametrize("token", [OTHER, LIMITED])
def test_whoever_sees_the_id_of_another_s_transaction_cannot_end_it(house: House, token: str) -> None:
    with house.served() as (site, server), connected(server, token=OWNER) as owner:
        transaction = begin(owner)
        with connected(server, token=token) as other:
            assert see(other) == transaction.id
            meddle(other, transaction.id)
        transaction.commit()
        assert site.namespace("unread").get(b"ada") == 1


def test_it_stays_the_owner_s_when_the_server_is_started_again(house: House) -> None:
    with house.served() as (_, server), connected(server, token=OWNER) as owner:
        transaction = begin(owner).id
    with house.served() as (site, server):
        with connected(server, token=OTHER) as other:
            meddle(other, transaction)
        with connected(server, token=ROTATED) as owner:
            unread = owner.host.namespaces.find_namespace("unread")
            rows = {b"ada": site.namespace("unread").encoding.policy.add(b"ada", 1)}
            owner.transactions.commit(transaction, [NamespaceWrites("unread", unread.id, rows)])
        assert site.namespace("unread").get(b"ada") == 1


def test_an_administrator_of_the_site_may_end_any(house: House) -> None:
    with house.served() as (site, server), connected(server, token=OWNER) as owner:
        marked = begin(owner).id
        plain = site.transaction(timeout=HOUR, coordinator=0).id
        with pytest.raises(NotAllowed):
            owner.transactions.abort(plain, "it was begun where the site is")
        with connected(server, token=ADMIN) as admin:
            for transaction in (marked, plain):
                admin.transactions.abort(transaction, "by an operator")
        assert list(site.transactions.list(timedelta(0))) == []


def test_what_an_older_version_began_without_an_owner_can_be_ended_by_whoever_began_it(house: House) -> None:
    with house.served() as (site, server):
        site.transactions.begin(HOUR, 0)
        coordinator = host_of(site).transactions.coordinators[0]
        committed, aborted = coordinator.begin(HOUR), coordinator.begin(HOUR)
        with connected(server, token=OWNER) as owner:
            unread = owner.host.namespaces.find_namespace("unread")
            rows = {b"ada": site.namespace("unread").encoding.policy.add(b"ada", 1)}
            owner.transactions.commit(committed, [NamespaceWrites("unread", unread.id, rows)])
            owner.transactions.abort(aborted, "because")
        assert site.namespace("unread").get(b"ada") == 1


def test_a_transaction_that_is_begun_where_the_site_is_has_a_mark_that_is_nobody_s(house: House) -> None:
    with house.served() as (site, server), connected(server, token=OWNER) as owner:
        begun = site.transactions.begin(HOUR, 0)
        assert begun.endswith(f"-{OWN_MARK}")
        assert len(OWN_MARK) == MARK_DIGITS
        with pytest.raises(NotAllowed, match="not begun by"):
            owner.transactions.abort(begun, "because")
        # Without the mark, the id is that of no transaction.
        with pytest.raises(TransactionNotFound):
            owner.transactions.abort(begun.removesuffix(f"-{OWN_MARK}"), "because")


def test_nobody_begins_or_ends_one_in_the_name_of_another(house: House) -> None:
    marks = {name: mark_of(Caller(name, Role.WRITE)) for name in ("owner", "other")}
    with house.served() as (_, server), connected(server, token=OTHER) as other:
        begun = other.transactions.begin(HOUR, 0, marks["owner"])
        assert begun.endswith(marks["other"])
        with connected(server, token=OWNER) as owner:
            transaction = owner.transaction(timeout=HOUR, coordinator=0)
        # With one's own mark in its place or behind it, the id is that of no transaction.
        exchanged = transaction.id.removesuffix(marks["owner"]) + marks["other"]
        for forged in (exchanged, f"{transaction.id}-{marks['other']}"):
            with pytest.raises(TransactionNotFound):
                other.transactions.abort(forged, "because")


def test_one_caller_does_not_hold_all_transactions_that_may_be_open(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transacting, "TRANSACTIONS_OF_CALLER_MAX", 2)
    with house.served() as (site, server), connected(server, token=OWNER) as owner:
        begun = [owner.transaction(coordinator=0) for _ in range(2)]
        with connected(server, token=ROTATED) as same, pytest.raises(LimitExceeded, match="of this caller"):
            same.transaction(coordinator=0)
        with connected(server, token=OTHER) as other:
            other.transaction(coordinator=0).abort()
        for _ in range(3):
            site.transaction(coordinator=0)
        begun[0].abort()
        owner.transaction(coordinator=0)


def test_a_runner_is_believed_only_if_its_caller_has_the_lease(tmp_path: Path) -> None:
    """The name of the holder is public: with it, another writer moved the checkpoint past what was lost."""
    access = write_access(
        tmp_path / "access.toml",
        {"name": "runner", "role": "write", "token": "runner"},
        {"name": "other", "role": "write", "token": "other"},
    )
    with serving(ServerOptions(access=access)) as (site, server):
        users = site.create_namespace("users")
        site.host.feeds.create(FeedSpec(name="copy", namespace="users", sink="blackhole:"))
        users.put(b"ada", b"countess")
        with connected(server, token="runner") as mine, connected(server, token="other") as theirs:
            feed = mine.host.feeds.acquire("copy", "me", 10.0)
            past = [replace(part, checkpoint=site.resolved_version()) for part in feed.ranges]
            with pytest.raises(LeaseHeld):
                theirs.host.feeds.report("copy", "me", past, None)
            theirs.host.feeds.release("copy", "me")
            assert site.host.feeds.find("copy").checkpoint == feed.checkpoint
            assert mine.host.feeds.report("copy", "me", past, None).checkpoint > feed.checkpoint
            mine.host.feeds.release("copy", "me")
            assert site.host.feeds.find("copy").lease is None


def test_a_consumer_is_believed_only_if_its_caller_has_the_lease(tmp_path: Path) -> None:
    """Holder and epoch are public: with them, another writer acknowledged what it had never seen."""
    access = write_access(
        tmp_path / "access.toml",
        {"name": "indexer", "role": "write", "token": "indexer"},
        {"name": "other", "role": "write", "token": "other"},
    )
    with serving(ServerOptions(access=access)) as (site, server):
        site.create_namespace("users").put(b"ada", b"countess")
        with connected(server, token="indexer") as mine, connected(server, token="other") as theirs:
            subscription = mine.subscribe("index", "users", holder="me", options=BY_HAND)
            row, store = site.host.subscriptions.find("index"), theirs.host.subscriptions
            past = Progress(through=site.resolved_version())
            transaction = theirs.transaction(coordinator=0).__enter__()
            for meddle in (
                lambda: store.acknowledge("index", row.epoch, past),
                lambda: store.acknowledge("index", row.epoch, Progress(through=0)),
                lambda: store.seek("index", past.through, row.epoch),
                lambda: store.open(row.spec, row.through, "me", 10.0),
                lambda: theirs.host.transactions.acknowledge(
                    transaction.id, "index", row.epoch, past, Acknowledgement()
                ),
            ):
                with pytest.raises(LeaseHeld):
                    meddle()
            store.release("index", row.epoch)
            assert site.host.subscriptions.find("index") == row
            assert [delivery.change.key for delivery in subscription] == [b"ada"]
            subscription.close()
            assert site.host.subscriptions.find("index").lease is None
