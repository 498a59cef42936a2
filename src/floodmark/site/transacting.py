"""The methods of a site for transactions."""

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from floodmark.host.ports import Host
from floodmark.host.transaction_port import Transactions
from floodmark.model.errors import Conflict, InvalidArgument
from floodmark.model.transaction import TransactionOutcome
from floodmark.model.version import VERSION_MAX, Version
from floodmark.site.arguments import check_count, check_duration
from floodmark.site.coordinated import PACE, TIMEOUT, Coordinated, Pace
from floodmark.site.gathering import AnyNamespace, require_of
from floodmark.site.idempotency import Once, check_idempotency_key, open_idempotency
from floodmark.site.namespace import Namespace
from floodmark.site.read_versions import STALENESS_MAX, ReadVersion, ReadVersionCounts, ReadVersions
from floodmark.site.rivals import Rivals
from floodmark.site.transaction import Transaction, encode_appended, run_transaction, version_of
from floodmark.site.uncoordinated import find_outcome
from floodmark.site.watching import Watches
from floodmark.transaction.coordinator import check_timeout

Result = TypeVar("Result")


class TransactionCalls:
    """The methods of a site for transactions, appends and watches, with the cache of read versions."""

    _durable: bool

    def __init__(
        self, host: Host, read_version: ReadVersion, slow_answer: timedelta, pace: Pace = PACE
    ) -> None:
        _check_read_version(read_version)
        self._pace = pace
        self._read_versions = ReadVersions(
            host.versions.read_version, slow_answer=slow_answer, time_seconds=pace.time_seconds
        )
        self._read_version: ReadVersion = read_version
        self._watches = Watches(host)
        self._rivals = Rivals()
        # The namespace of the idempotency records, opened at first use.
        self._idempotency: Namespace | None = None

    @property
    def host(self) -> Host:
        """The host of this site.  Raises Closed after `close`."""
        raise NotImplementedError

    def transaction(
        self,
        *,
        timeout: timedelta = TIMEOUT,
        coordinator: int | None = None,
        read_version: ReadVersion | None = None,
        max_staleness: timedelta = STALENESS_MAX,
        idempotency_key: str | None = None,
    ) -> Transaction:
        """Begin a transaction: reads, writes and acknowledgements that take effect together or not at all.

        A `with` block commits at its end, and raises Conflict if anything that it read has been written
        since.  A transaction that needs a coordinator is aborted after `timeout`.  With the number of a
        `coordinator` it begins there.

        With `read_version` "cached" it reads at the highest version at which this site object has read or
        committed, if that is at most `max_staleness` old; this saves a call to the server.

        Of all transactions with the same `idempotency_key`, one is committed in a day; the others write
        nothing.

        >>> import floodmark, tempfile
        >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
        ...     accounts = site.create_namespace("accounts", merge="counter")
        ...     with site.transaction() as transaction:
        ...         transaction.add(accounts, b"ada", -5)
        ...         transaction.add(accounts, b"bob", 5)
        ...     accounts.get(b"ada"), accounts.get(b"bob")
        (-5, 5)
        """
        if timeout is not TIMEOUT:
            check_timeout(check_duration(timeout, "timeout"))
        if max_staleness is not STALENESS_MAX:
            check_duration(max_staleness, "max_staleness")
        if coordinator is not None:
            check_count(coordinator, "coordinator")
        kind = self._read_version if read_version is None else _check_read_version(read_version)
        transactions, versions = self.host.transactions, self._read_versions

        def begin() -> Coordinated:
            begun = transactions.begin(timeout, coordinator or 0)
            return Coordinated(transactions, begun, timeout=timeout, pace=self._pace)

        return Transaction(
            self.host,
            begin,
            self._watches,
            durable=self._durable,
            begun=None if coordinator is None else begin(),
            read_version=versions.fresh if kind == "fresh" else partial(versions.cached, max_staleness),
            committed=versions.saw,
            expected=versions.expected,
            timeout=timeout,
            pace=self._pace,
            once=None if idempotency_key is None else self._begin_once(idempotency_key),
        )

    def _begin_once(self, key: str) -> Once:
        encoded = check_idempotency_key(key)
        if self._idempotency is None:
            self._idempotency = open_idempotency(self.host, durable=self._durable)
        return Once(self._idempotency, encoded)

    def run_transaction(
        self,
        work: Callable[[Transaction], Result],
        *,
        timeout: timedelta = TIMEOUT,
        read_version: ReadVersion | None = None,
        max_staleness: timedelta = STALENESS_MAX,
        idempotency_key: str | None = None,
    ) -> Result:
        """Run `work` in a transaction, commit it and return the result; after a conflict, run it again.

        A retry reads at a fresh version.  With an `idempotency_key` the work is committed once in a day, even
        if it is called again after CommitUnknown or in another process: later calls return the result of the
        first one, which is stored as JSON.

        >>> import floodmark, tempfile
        >>> def order(transaction):
        ...     transaction.add(stock, b"books", -1)
        ...     return {"ordered": 1}
        >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
        ...     stock = site.create_namespace("stock", merge="counter")
        ...     results = [site.run_transaction(order, idempotency_key="order-17") for _ in range(2)]
        ...     results, stock.get(b"books")
        ([{'ordered': 1}, {'ordered': 1}], -1)
        """
        if not callable(work):
            raise InvalidArgument(f"work must be a function of a transaction, not {work!r:.60}")

        def begin(attempt: int) -> Transaction:
            kind = read_version if attempt == 1 else "fresh"
            transaction = self.transaction(
                timeout=timeout,
                read_version=kind,
                max_staleness=max_staleness,
                idempotency_key=idempotency_key,
            )
            transaction.attempt = attempt
            return transaction

        return run_transaction(begin, work, timeout=timeout, pace=self._pace, rivals=self._rivals)

    def append(
        self,
        namespace: AnyNamespace,
        prefix: bytes,
        value: Any,
        *,
        shift: int | None = None,
        before: Version = VERSION_MAX,
    ) -> Version:
        """Commit a single `Transaction.append`; return the commit version.

        Raises Conflict, with a version in its details, if the commit version would not be below `before`, or
        if the key for that version belongs to another node; the next call asks that node.
        """
        require_of(self.host, namespace)
        versions = self._read_versions
        above = versions.expected()
        key, stored, _ = encode_appended(namespace, prefix, value, 0, shift, before, above)
        try:
            version: Version = self.host.router.call(
                key, lambda partition: partition.write((key,), (stored,), durable=self._durable)
            )
        except Conflict as conflict:
            versions.saw(version_of(conflict))
            raise
        versions.saw(version)
        return version

    def watch(self, namespace: AnyNamespace, key: bytes | str) -> "Future[Version]":
        """A future that completes when a key next changes.  Its result is the version of a change.

        It is cancelled when the site is closed.  To miss no change between a read and the watch, do both in
        one transaction.

        >>> import floodmark, tempfile
        >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
        ...     settings = site.create_namespace("settings")
        ...     changed = site.watch(settings, b"colour")
        ...     settings.put(b"colour", b"blue") == changed.result(timeout=60)
        True
        """
        with self.transaction() as transaction:
            return transaction.watch(namespace, key)

    def transaction_outcome(self, transaction: str) -> TransactionOutcome:
        """The outcome of a transaction, by the id in the details of CommitUnknown.

        Asking decides: a transaction that is not yet committed is aborted.  The outcome of a commit without a
        coordinator is kept for at least a minute, and unknown after that.  Raises Retryable if the site does
        not answer, or if its nodes have not settled the outcome yet.
        """
        if not isinstance(transaction, str) or not transaction:
            raise InvalidArgument(
                f"name a transaction by the id in the details of CommitUnknown, not {transaction!r:.80}"
            )
        return find_outcome(self.host, transaction, pace=self._pace)

    @property
    def transactions(self) -> Transactions:
        """The transactions that have a coordinator, and the coordinators' logs."""
        return self.host.transactions

    @property
    def read_versions(self) -> ReadVersionCounts:
        """Counts how the transactions of this site object got their read versions."""
        return self._read_versions.counts


def _check_read_version(kind: ReadVersion) -> ReadVersion:
    if kind not in ("fresh", "cached"):
        raise InvalidArgument(f"read_version is 'fresh' or 'cached', not {kind!r:.60}")
    return kind
