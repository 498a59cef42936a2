"""Transactions as a site offers them."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from floodmark.host.ports import Host
from floodmark.host.transaction_port import Transactions
from floodmark.model.errors import InvalidArgument
from floodmark.site.arguments import check_count, check_duration
from floodmark.site.coordinated import TIMEOUT, Coordinated
from floodmark.site.read_versions import STALENESS_MAX, ReadVersion, ReadVersionCounts, ReadVersions
from floodmark.site.transaction import Transaction, run_transaction
from floodmark.transaction.coordinator import check_timeout

Result = TypeVar("Result")


class TransactionCalls:
    """Begins transactions, and keeps the versions at which they read."""

    _durable: bool

    def __init__(self, host: Host, read_version: ReadVersion) -> None:
        _check_read_version(read_version)
        self._read_versions = ReadVersions(host.versions.read_version)
        self._read_version: ReadVersion = read_version

    @property
    def host(self) -> Host:
        """The host of an open site; Closed after `close`."""
        raise NotImplementedError

    def transaction(
        self,
        *,
        timeout: timedelta = TIMEOUT,
        coordinator: int | None = None,
        read_version: ReadVersion | None = None,
        max_staleness: timedelta = STALENESS_MAX,
    ) -> Transaction:
        """Reads, writes, and acknowledgements of subscriptions, that happen together or not at all.

        As a `with` block it commits at the end; Conflict if what it has read was written since.  One that
        needs a coordinator is aborted if it is not committed in time; with a number of one it begins there.

        With `read_version` "cached" it reads at the highest version that this site object has read or
        committed at, if that is at most `max_staleness` old: that saves a call to a server.

        >>> import floodmark, tempfile
        >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
        ...     accounts = site.create_namespace("accounts", merge="counter")
        ...     with site.transaction() as transaction:
        ...         transaction.add(accounts, b"ada", -5)
        ...         transaction.add(accounts, b"bob", 5)
        ...     accounts.get(b"ada"), accounts.get(b"bob")
        (b'-5', b'5')
        """
        check_timeout(check_duration(timeout, "timeout"))
        check_duration(max_staleness, "max_staleness")
        if coordinator is not None:
            check_count(coordinator, "coordinator")
        kind = self._read_version if read_version is None else _check_read_version(read_version)
        transactions, versions = self.host.transactions, self._read_versions

        def begin() -> Coordinated:
            return Coordinated(transactions, transactions.begin(timeout, coordinator or 0), timeout=timeout)

        return Transaction(
            self.host,
            begin,
            durable=self._durable,
            begun=None if coordinator is None else begin(),
            read_version=versions.fresh if kind == "fresh" else lambda: versions.cached(max_staleness),
            committed=versions.saw,
        )

    def run_transaction(
        self,
        work: Callable[[Transaction], Result],
        *,
        timeout: timedelta = TIMEOUT,
        read_version: ReadVersion | None = None,
        max_staleness: timedelta = STALENESS_MAX,
    ) -> Result:
        """Do work in a transaction and commit it; again after a conflict, at a fresh version."""
        if not callable(work):
            raise InvalidArgument(f"work must be a function of a transaction, not {work!r:.60}")

        def begin(attempt: int) -> Transaction:
            kind = read_version if attempt == 1 else "fresh"
            return self.transaction(timeout=timeout, read_version=kind, max_staleness=max_staleness)

        return run_transaction(begin, work, timeout=timeout)

    @property
    def transactions(self) -> Transactions:
        """The transactions with a coordinator, and their logs."""
        return self.host.transactions

    @property
    def read_versions(self) -> ReadVersionCounts:
        """How the transactions begun here came to their read versions."""
        return self._read_versions.counts


def _check_read_version(kind: ReadVersion) -> ReadVersion:
    if kind not in ("fresh", "cached"):
        raise InvalidArgument(f"read_version is 'fresh' or 'cached', not {kind!r:.60}")
    return kind
