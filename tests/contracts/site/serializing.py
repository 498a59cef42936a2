"""The site's contract: what transactions read, and which writes of others they conflict with."""

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from random import Random
from threading import Lock, Thread
from time import monotonic
from typing import Any

import pytest
from tests.contracts.site.base import SiteContractBase

import floodmark
from floodmark.model.errors import (
    Closed,
    CommitTooLarge,
    Conflict,
    InvalidArgument,
    LimitExceeded,
    TransactionEnded,
    TransactionTooOld,
)
from floodmark.model.limits import (
    IDEMPOTENCY_AGE_MAX,
    IDEMPOTENCY_KEY_BYTES_MAX,
    IDEMPOTENCY_RESULT_BYTES_MAX,
    TRANSACTION_AGE_MS_MAX,
    TRANSACTION_KEYS_MAX,
    WRITE_CONFLICTS_MAX,
)
from floodmark.model.ranges import KeyRange
from floodmark.model.transaction import ABORTED, UNKNOWN, TransactionOutcome
from floodmark.site import Namespace, Site, Transaction
from floodmark.testing.clock import SimulatedTime
from floodmark.testing.serializability import Observed, check_serializable

THREADS, ROUNDS, KEYS = 4, 12, 4
HOUR = timedelta(hours=1)

in_partitions = pytest.mark.usefixtures("cut_users")


def write_and_read(transaction: Transaction, users: Namespace) -> None:
    """Read what the transaction has written itself."""
    transaction.put(users, b"h", b"own")
    assert transaction.get(users, b"h") == b"own"


class SerializingContract(SiteContractBase):
    """Transactions as if one came after the other."""

    @pytest.fixture(params=[False, True], ids=["one partition", "many partitions"])
    def cut_users(self, request: pytest.FixtureRequest, site: Site, users: Namespace) -> None:
        """Let keys of a transaction lie in one partition or in several."""
        if request.param:
            site.split("users", b"g")
            site.split("users", b"p")

    # Reads

    @in_partitions
    def test_all_reads_are_as_of_one_version(self, site: Site, users: Namespace) -> None:
        users.put_many({b"a": b"1", b"q": b"1"})
        with site.transaction() as transaction:
            assert transaction.get(users, b"a") == b"1"
            users.put_many({b"a": b"2", b"q": b"2", b"z": b"2"})
            assert transaction.get_many(users, [b"q", b"a", b"z"]) == [b"1", b"1", None]
            assert list(transaction.scan(users)) == [(b"a", b"1"), (b"q", b"1")]
            assert users.get(b"q", at=transaction.read_version) == b"1"

    @in_partitions
    def test_reads_see_the_own_writes(self, site: Site, users: Namespace) -> None:
        counts = site.create_namespace("counts", merge="counter")
        people = site.create_namespace("people", merge="fields")
        texts = site.create_namespace("texts", codec="json")
        users.put_many({b"a": b"1", b"h": b"1", b"q": b"1"})
        counts.add(b"ada", 40)
        people.put(b"ada", {"name": "Ada", "city": "London"})
        with site.transaction() as transaction:
            transaction.put(users, b"a", b"2")
            transaction.delete(users, b"h")
            transaction.put(users, b"z", b"2")
            transaction.add(counts, b"ada", 2)
            transaction.update(people, b"ada", {"city": None, "title": "countess"})
            transaction.put(texts, "ada", {"born": 1815})
            left = [(b"a", b"2"), (b"q", b"1"), (b"z", b"2")]
            assert list(transaction.scan(users)) == left
            assert list(transaction.scan(users, reverse=True, limit=2)) == left[:0:-1]
            assert list(transaction.scan(users, b"b", b"z")) == [(b"q", b"1")]
            assert transaction.get_many(users, [b"a", b"h", b"q"]) == [b"2", None, b"1"]
            assert transaction.get(counts, b"ada") == 42
            assert list(transaction.scan(counts)) == [(b"ada", 42)]
            assert transaction.get(people, b"ada") == b'{"name":"Ada","title":"countess"}'
            assert (transaction.get(texts, "ada"), list(transaction.scan(texts))) == (
                {"born": 1815},
                [("ada", {"born": 1815})],
            )
        assert list(users.scan()) == left
        assert (counts.get(b"ada"), texts.get("ada")) == (42, {"born": 1815})
        assert people.get(b"ada") == b'{"name":"Ada","title":"countess"}'

    @in_partitions
    def test_range_is_deleted_with_what_the_transaction_wrote(self, site: Site, users: Namespace) -> None:
        users.put_many({b"a": b"1", b"h": b"1", b"q": b"1"})
        with site.transaction() as transaction:
            transaction.put(users, b"i", b"2")
            assert transaction.delete_range(users, b"b", b"z") == 3
        assert list(users.scan()) == [(b"a", b"1")]

    # Conflicts

    READS: tuple[tuple[Callable[[Transaction, Namespace], Any], set[bytes]], ...] = (
        (lambda t, users: t.get(users, b"h"), {b"h"}),
        (lambda t, users: t.get(users, b"i"), {b"i"}),
        (lambda t, users: t.get_many(users, [b"a", b"q"]), {b"a", b"q"}),
        (lambda t, users: list(t.scan(users, b"b", b"i")), {b"b", b"h"}),
        (lambda t, users: list(t.scan(users, b"b", limit=1)), {b"b", b"h"}),
        (lambda t, users: next(t.scan(users, b"b", reverse=True)), {b"q", b"x", b"z"}),
        (lambda t, users: list(t.scan(users, prefix=b"x")), {b"x"}),
        (lambda t, users: t.add_read_conflict(users, b"h"), {b"h"}),
        (lambda t, users: t.add_read_conflict(users, start=b"h", end=b"q"), {b"h", b"i"}),
        # No key is empty, but a range may begin there.
        (lambda t, users: t.add_read_conflict(users, start=b"", end=b"\0"), set()),
        (lambda t, users: t.delete_range(users, b"h", b"i"), {b"h"}),
        (lambda t, users: t.get(users, b"h", snapshot=True), set()),
        (lambda t, users: list(t.scan(users, snapshot=True)), set()),
        (lambda t, users: t.scan(users), set()),
        (write_and_read, set()),
    )

    @in_partitions
    @pytest.mark.parametrize("number", range(len(READS)))
    def test_write_to_what_was_read_is_a_conflict_and_to_nothing_else(
        self, site: Site, users: Namespace, number: int
    ) -> None:
        read, conflicting = self.READS[number]
        for changed in (b"a", b"b", b"h", b"i", b"q", b"x", b"z"):
            users.delete_range()
            users.put_many({b"a": b"1", b"h": b"1", b"q": b"1"})
            transaction = site.transaction()
            assert transaction.read_version
            read(transaction, users)
            transaction.put(users, b"written", b"1")
            users.put(changed, b"2")
            if changed in conflicting:
                with pytest.raises(Conflict) as raised:
                    transaction.commit()
                assert raised.value.details["key"] == changed
            else:
                transaction.commit()
            assert (users.get(b"written") is None) == (changed in conflicting)

    @in_partitions
    @pytest.mark.parametrize("coordinator", [None, 0], ids=["one round", "coordinated"])
    @pytest.mark.parametrize("writes", [True, False])
    def test_read_of_what_is_declared_as_written_is_a_conflict(
        self, site: Site, users: Namespace, coordinator: int | None, writes: bool
    ) -> None:
        users.put_many({b"a": b"1", b"h": b"1", b"q": b"1"})
        for key, touched in ((b"h", True), (b"i", False)):
            readers = [site.transaction(coordinator=coordinator) for _ in range(3)]
            declaring = site.transaction(coordinator=coordinator)
            readers[0].get(users, key)
            list(readers[1].scan(users, b"b", b"z"))
            readers[2].get_many(users, [b"a", b"j"])
            for reader in readers:
                reader.put(users, b"0", b"1")
            if writes:
                declaring.put(users, b"1", b"1")
            declaring.add_write_conflict(users, b"h")
            declaring.add_write_conflict(users, start=b"x", end=b"y")
            declaring.add_read_conflict(users, b"h")
            declaring.commit()
            if touched:
                with pytest.raises(Conflict) as raised:
                    readers[0].commit()
                assert raised.value.details["key"] == key
            else:
                readers[0].commit()
            with pytest.raises(Conflict):
                readers[1].commit()
            readers[2].commit()
        # Those that read later do not conflict, and the declared keys were not written.
        with site.transaction(coordinator=coordinator) as later:
            assert later.get(users, b"h") == b"1"
            later.put(users, b"0", b"2")

    def test_too_many_declared_ranges_are_refused(self, site: Site, users: Namespace) -> None:
        transaction = site.transaction()
        for number in range(WRITE_CONFLICTS_MAX):
            transaction.add_write_conflict(users, b"%d" % number)
        with pytest.raises(LimitExceeded, match="declare a range"):
            transaction.add_write_conflict(users, b"one more")
        transaction.put(users, b"a", b"1")
        transaction.commit()

    def test_deletion_of_what_was_read_is_a_conflict(self, site: Site, users: Namespace) -> None:
        users.put(b"a", b"1")
        transaction = site.transaction()
        transaction.get(users, b"a")
        transaction.put(users, b"q", b"1")
        users.delete(b"a")
        with pytest.raises(Conflict):
            transaction.commit()

    def test_writes_alone_conflict_with_nothing(self, site: Site, users: Namespace) -> None:
        first, second = site.transaction(), site.transaction()
        for transaction in (first, second):
            transaction.put(users, b"a", b"%d" % id(transaction))
        first.commit()
        second.commit()
        assert users.get(b"a") == b"%d" % id(second)

    @in_partitions
    @pytest.mark.parametrize("coordinator", [None, 0], ids=["one round", "coordinated"])
    def test_two_that_each_write_what_the_other_reads_do_not_both_commit(
        self, site: Site, users: Namespace, coordinator: int | None
    ) -> None:
        users.put_many({b"a": b"on call", b"q": b"on call"})
        one, other = (site.transaction(coordinator=coordinator) for _ in range(2))
        for transaction, key in ((one, b"a"), (other, b"q")):
            assert len(list(transaction.scan(users))) == 2
            transaction.delete(users, key)
        one.commit()
        with pytest.raises(Conflict):
            other.commit()
        assert list(users.scan()) == [(b"q", b"on call")]

    def test_work_is_done_again_after_a_conflict(self, site: Site, users: Namespace) -> None:
        users.put(b"a", b"0")
        attempts = []

        @floodmark.transactional
        def add(transaction: Transaction, number: int) -> int:
            before = int(transaction.get(users, b"a"))
            attempts.append(before)
            if len(attempts) == 1:
                users.put(b"a", b"10")
            transaction.put(users, b"a", b"%d" % (before + number))
            return before + number

        @floodmark.transactional
        def add_twice(transaction: Transaction) -> int:
            add(transaction, 1)
            return add(transaction, 2)

        assert add_twice(site) == 13
        assert (attempts, users.get(b"a")) == ([0, 1, 10, 11], b"13")

    # Cached read versions

    def test_cached_version_is_that_of_the_last_transaction(self, site: Site, users: Namespace) -> None:
        # While the last answer was slow, as on a busy machine, each transaction asks.
        for _ in range(100):
            slow = site.read_versions.slow
            with site.transaction(read_version="cached") as first:
                first.get(users, b"a")
                first.put(users, b"a", b"1")
            if site.read_versions.slow == slow:
                break
        users.put(b"a", b"2")
        before = site.read_versions
        with site.transaction(read_version="cached", max_staleness=HOUR) as second:
            assert second.get(users, b"a") == b"1"
            assert second.read_version == first.version
        assert site.read_versions.cached == before.cached + 1
        assert site.read_versions.asked == before.asked
        with site.transaction(read_version="cached", max_staleness=timedelta(0)) as third:
            assert third.get(users, b"a") == b"2"
        assert site.read_versions.asked == before.asked + 1

    def test_work_on_a_stale_version_is_done_again_on_a_fresh_one(self, site: Site, users: Namespace) -> None:
        with site.transaction() as transaction:
            transaction.put(users, b"a", b"1")
        users.put(b"a", b"10")
        seen = []

        def add(transaction: Transaction) -> None:
            seen.append(transaction.get(users, b"a"))
            transaction.put(users, b"a", b"%d" % (int(seen[-1]) + 1))

        site.run_transaction(add, read_version="cached", max_staleness=HOUR)
        assert (seen, users.get(b"a")) == ([b"1", b"10"], b"11")

    def test_another_kind_of_read_version_is_refused(self, site: Site) -> None:
        wrong: Any = "stale"
        with pytest.raises(InvalidArgument, match="'fresh' or 'cached'"):
            site.transaction(read_version=wrong)

    # Once for each key

    def test_work_with_an_idempotency_key_is_committed_once(self, site: Site, users: Namespace) -> None:
        results: list[Any] = [None, True, 7, 1 << 80, 1.5, "text", [1, [None]], {"a": {"b": [2]}}]

        def count(transaction: Transaction, result: Any) -> Any:
            transaction.put(users, b"count", b"%d" % (1 + int(transaction.get(users, b"count") or 0)))
            return result

        for number, result in enumerate(results):
            for _ in range(2):
                found = site.run_transaction(partial(count, result=result), idempotency_key=f"order-{number}")
                assert (found, type(found)) == (result, type(result))
        assert users.get(b"count") == b"%d" % len(results)

    @pytest.mark.parametrize("coordinator", [None, 0], ids=["one round", "coordinated"])
    def test_of_two_with_one_idempotency_key_the_later_writes_nothing(
        self, site: Site, users: Namespace, coordinator: int | None
    ) -> None:
        one, other = (site.transaction(coordinator=coordinator, idempotency_key="k") for _ in range(2))
        for transaction in (one, other):
            assert not transaction.is_done
            transaction.put(users, b"a", b"%d" % id(transaction))
        one.commit()
        with pytest.raises(Conflict):
            other.commit()
        with site.transaction(coordinator=coordinator, idempotency_key="k") as again:
            assert again.is_done
            again.put(users, b"a", b"again")
        assert users.get(b"a") == b"%d" % id(one)
        assert site.run_transaction(lambda _: 1, idempotency_key="k") is None

    def test_work_with_an_idempotency_key_that_failed_is_done_again(
        self, site: Site, users: Namespace
    ) -> None:
        def fail(transaction: Transaction) -> None:
            transaction.put(users, b"a", b"1")
            raise LookupError

        for _ in range(2):
            with pytest.raises(LookupError):
                site.run_transaction(fail, idempotency_key="k")
        assert users.get(b"a") is None
        assert site.run_transaction(lambda _: 7, idempotency_key="k") == 7

    def test_idempotency_keys_are_forgotten_after_a_day(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        assert site.run_transaction(lambda _: 1, idempotency_key="k") == 1
        time.advance(IDEMPOTENCY_AGE_MAX // timedelta(milliseconds=1) - 60_000)
        assert site.run_transaction(lambda _: 2, idempotency_key="k") == 1
        time.advance(120_000)
        assert site.run_transaction(lambda _: 3, idempotency_key="k") == 3

    @pytest.mark.parametrize("result", [b"bytes", (1, 2), {1: 2}, object(), {1, 2}, timedelta(1)])
    def test_result_that_cannot_be_kept_with_an_idempotency_key_is_refused(
        self, site: Site, users: Namespace, result: object
    ) -> None:
        def work(transaction: Transaction) -> object:
            transaction.put(users, b"a", b"1")
            return result

        with pytest.raises(InvalidArgument, match="JSON"):
            site.run_transaction(work, idempotency_key="k")
        assert users.get(b"a") is None
        with pytest.raises(LimitExceeded, match="Write it to a key"):
            site.run_transaction(lambda _: "x" * IDEMPOTENCY_RESULT_BYTES_MAX, idempotency_key="k")

    @pytest.mark.parametrize("key", ["", b"k", 7])
    def test_idempotency_key_that_is_none_is_refused(self, site: Site, key: Any) -> None:
        with pytest.raises(InvalidArgument, match="idempotency key"):
            site.run_transaction(lambda _: None, idempotency_key=key)
        with pytest.raises(LimitExceeded, match="digest"):
            site.transaction(idempotency_key="ä" * IDEMPOTENCY_KEY_BYTES_MAX)

    # Outcomes

    def test_outcomes_of_coordinated_transactions_are_told(self, site: Site, users: Namespace) -> None:
        committed, aborted, open_one = (site.transaction(coordinator=0) for _ in range(3))
        for transaction in (committed, aborted, open_one):
            transaction.put(users, b"a", b"%d" % id(transaction))
        version = committed.commit()
        aborted.abort()
        assert site.transaction_outcome(committed.id) == TransactionOutcome("committed", version)
        assert site.transaction_outcome(aborted.id) == ABORTED
        # To ask decides: it can be committed no more.
        assert site.transaction_outcome(open_one.id) == ABORTED
        with pytest.raises(TransactionEnded):
            open_one.commit()
        assert users.get(b"a") == b"%d" % id(committed)

    @pytest.mark.parametrize("transaction", ["0-1-2", "x", "b-0123-4"])
    def test_outcome_of_what_never_was_is_unknown(self, site: Site, transaction: str) -> None:
        assert site.transaction_outcome(transaction) == UNKNOWN

    @pytest.mark.parametrize("transaction", ["", None, b"0-7"])
    def test_outcome_of_what_has_no_id_is_refused(self, site: Site, transaction: Any) -> None:
        with pytest.raises(InvalidArgument, match="CommitUnknown"):
            site.transaction_outcome(transaction)

    # Misuse

    def test_transaction_that_has_ended_writes_no_more(self, site: Site, users: Namespace) -> None:
        with site.transaction() as committed:
            committed.put(users, b"a", b"1")
        aborted = site.transaction()
        aborted.abort()
        for ended in (committed, aborted):
            for use in (
                lambda ended=ended: ended.put(users, b"a", b"2"),
                lambda ended=ended: ended.delete_range(users),
                ended.commit,
            ):
                with pytest.raises(Closed, match="begin another one"):
                    use()

    @in_partitions
    @pytest.mark.parametrize("coordinator", [None, 0])
    @pytest.mark.parametrize("reads", ["get", "get_many", "scan", "part of a scan", "field"])
    def test_what_has_expired_after_it_was_read_is_a_conflict(
        self, site: Site, users: Namespace, time: SimulatedTime, reads: str, coordinator: int | None
    ) -> None:
        people = site.create_namespace("people", merge="fields")
        read: Callable[[Transaction], object] = {
            "get": lambda t: t.get(users, b"lease"),
            "get_many": lambda t: t.get_many(users, [b"a", b"lease"])[1],
            "scan": lambda t: dict(t.scan(users)).get(b"lease"),
            "part of a scan": lambda t: dict(t.scan(users, limit=1)).get(b"lease"),
            "field": lambda t: json.loads(t.get(people, b"lease")).get("holder"),
        }[reads]
        users.put(b"old", b"1", ttl=1)
        time.advance(1_000)
        people.put(b"lease", {"name": "lease"})
        people.update(b"lease", {"holder": "me"}, ttl=2)
        users.put(b"lease", b"other", ttl=1)
        users.put(b"lease", b"me", ttl=2)
        time.advance(1_000)
        with site.transaction(coordinator=coordinator) as transaction:
            assert read(transaction) is not None
            assert transaction.get(users, b"old") is None
            transaction.put(users, b"x", b"1")
        # A second begins, and nothing expires.
        transaction = site.transaction(coordinator=coordinator)
        assert read(transaction) is not None
        transaction.put(users, b"resource", b"1")
        time.advance(2_000)
        with pytest.raises(Conflict) as raised:
            transaction.commit()
        assert raised.value.details["key"] == b"lease"
        assert users.get(b"resource") is None
        # What had expired before is none.
        with site.transaction(coordinator=coordinator) as transaction:
            assert read(transaction) is None
            transaction.put(users, b"resource", b"2")
            time.advance(1_000)
        assert users.get(b"resource") == b"2"

    def test_transaction_that_is_too_old_or_too_large_says_what_to_do(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        transaction = site.transaction()
        transaction.get(users, b"a")
        transaction.put(users, b"a", b"1")
        time.advance(TRANSACTION_AGE_MS_MAX + 1_000)
        with pytest.raises(TransactionTooOld, match="begin it again"):
            transaction.commit()
        large = site.transaction()
        for number in range(9):
            large.put(users, b"%d" % number, bytes(1 << 20))
        with pytest.raises(CommitTooLarge, match="go on in another one"):
            large.put(users, b"last", bytes(1 << 20))
        large.abort()
        with pytest.raises(LimitExceeded, match="or in several transactions"):
            site.transaction().get_many(users, [b"%d" % number for number in range(TRANSACTION_KEYS_MAX + 1)])
        assert list(users.scan()) == []

    def test_transaction_that_is_nested_in_another_is_one_of_its_own(
        self, site: Site, users: Namespace
    ) -> None:
        outer = site.transaction()
        outer.put(users, b"a", b"outer")
        with site.transaction() as inner:
            inner.put(users, b"b", b"inner")
            assert inner.get(users, b"a") is None
        outer.abort()
        assert dict(users.scan()) == {b"b": b"inner"}
        with pytest.raises(InvalidArgument, match="a site or a transaction"):
            floodmark.transactional(write_and_read)(users, users)

    def test_transaction_that_has_ended_reads_no_more(self, site: Site, users: Namespace) -> None:
        with site.transaction() as transaction:
            transaction.get(users, b"a")
        for read in (
            lambda: transaction.get(users, b"a"),
            lambda: transaction.scan(users),
            lambda: transaction.read_version,
            lambda: transaction.add_read_conflict(users, b"a"),
        ):
            with pytest.raises(Closed):
                read()

    def test_another_thread_is_refused(self, site: Site, users: Namespace) -> None:
        transaction, refusals = site.transaction(), []

        def use() -> None:
            with pytest.raises(InvalidArgument, match="thread"):
                transaction.get(users, b"a")
            refusals.append(True)

        thread = Thread(target=use)
        thread.start()
        thread.join()
        assert refusals == [True]
        transaction.abort()

    # All together

    @in_partitions
    def test_histories_of_threads_are_serializable(self, site: Site, users: Namespace) -> None:
        history = History(site, users)
        threads = [Thread(target=history.run, args=(seed,)) for seed in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert history.failures == []
        assert len(history.seen) == THREADS * ROUNDS
        check_serializable(history.seen, history.orders())


class History:
    """Transactions of many threads over few keys, which read, scan and write what no other writes."""

    def __init__(self, site: Site, users: Namespace) -> None:
        self.seen: list[Observed] = []
        self.failures: list[BaseException] = []
        self._site = site
        self._users = users
        self._lock = Lock()

    def run(self, seed: int) -> None:
        try:
            for number in range(ROUNDS):
                self._transact(Random(100 * seed + number), f"{seed}-{number}")
        except BaseException as error:
            self.failures.append(error)

    def _transact(self, random: Random, name: str) -> None:
        keys = [bytes([ord("a") + 6 * number]) for number in range(KEYS)]
        read, written = random.sample(keys, 2), random.sample(keys, random.randrange(3))
        scanned = KeyRange(*sorted(random.sample(keys, 2))) if random.random() < 0.3 else None
        began = monotonic()
        found: dict[bytes, bytes | None] = {}
        ranges: list[tuple[KeyRange, dict[bytes, bytes]]] = []

        def work(transaction: Transaction) -> None:
            found.clear()
            ranges.clear()
            found.update(zip(read, transaction.get_many(self._users, read), strict=True))
            if scanned is not None:
                ranges.append((scanned, dict(transaction.scan(self._users, *scanned))))
            for key in written:
                transaction.put(self._users, key, name.encode())

        self._site.run_transaction(work)
        writes = dict.fromkeys(written, name.encode())
        with self._lock:
            self.seen.append(Observed(name, began, monotonic(), dict(found), list(ranges), writes))

    def orders(self) -> dict[bytes, list[bytes]]:
        """The values that each key has held, in order."""
        orders: dict[bytes, list[bytes]] = {}
        for change in self._site.changes("users"):
            assert change.value is not None
            orders.setdefault(change.key, []).append(change.value)
        return orders
