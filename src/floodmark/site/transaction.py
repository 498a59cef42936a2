"""A transaction: reads, writes and acknowledgements that happen together or not at all, at one moment.

    def transfer(t):
        balance = int(t.get(accounts, b"ada") or 0)
        if balance < 10:
            raise NotEnough
        t.put(accounts, b"ada", b"%d" % (balance - 10))
        t.put(accounts, b"grace", b"%d" % (int(t.get(accounts, b"grace") or 0) + 10))

    site.run_transaction(transfer)

Transactions are serializable: there is an order of all, which respects real time, in which each would have
read what it read.  They are optimistic.  All reads are as of one version, writes are gathered, and the commit
is refused with `Conflict` if anything that was read has been written since; `run_transaction` then does the
work again, so it should have no effects of its own.  No reader and no plain write waits for a transaction.

One whose keys all lie at one node is one round of its commits.  One that spans nodes, or acknowledges changes
of a subscription, has a coordinator (`coordinated.py`).
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import wraps
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, TypeVar

from floodmark.codec.ordered import encode_namespace
from floodmark.feed.subscription.consumer import Delivery
from floodmark.host.ports import Host
from floodmark.host.transaction_port import NamespaceWrites
from floodmark.model.errors import Closed, InvalidArgument, Retryable, TransactionEnded
from floodmark.model.limits import TRANSACTION_BYTES_MAX
from floodmark.model.ranges import KeyRange, after
from floodmark.model.version import Version
from floodmark.site.arguments import check_range
from floodmark.site.coordinated import PACE, TIMEOUT, Coordinated, Pace
from floodmark.site.gathering import AnyNamespace, GatheredWrites
from floodmark.site.reading import TransactionReads

# How often work is done again that met other transactions.
ATTEMPTS_MAX = 100

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Transaction(GatheredWrites):
    """Made by `Site.transaction`; for the thread that made it.

    A `with` block commits at its end, or aborts if it fails.
    """

    def __init__(
        self,
        host: Host,
        begin: Callable[[], Coordinated],
        *,
        durable: bool,
        begun: Coordinated | None = None,
        read_version: Callable[[], Version] | None = None,
        committed: Callable[[Version], None] = lambda _: None,
    ) -> None:
        super().__init__("the transaction", bytes_max=TRANSACTION_BYTES_MAX)
        # At which version it was committed; 0 before, and if it wrote nothing.
        self.version: Version = 0
        self._host = host
        self._begin = begin
        self._durable = durable
        self._coordinated = begun
        self._reads = TransactionReads(read_version or host.versions.read_version, self._written)
        # Is told the version of the commit.
        self._committed = committed
        self._ended = False
        self._thread = get_ident()

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._ended:
            return
        if error is None:
            self.commit()
        else:
            self.abort(f"its block ended with {error!r:.200}")

    @property
    def id(self) -> str:
        """The name by which a coordinator of the site knows it; empty if it has none."""
        return "" if self._coordinated is None else self._coordinated.id

    # Reads

    @property
    def read_version(self) -> Version:
        """The version of all its reads, asked for with the first."""
        self._require_open()
        return self._reads.version

    def get(self, namespace: AnyNamespace, key: bytes | str, *, snapshot: bool = False) -> Any:
        """The value of a key, as the transaction would leave it; None if there is none.

        A `snapshot` read makes no conflict: the key may change before the commit.
        """
        return self.get_many(namespace, (key,), snapshot=snapshot)[0]

    def get_many(
        self, namespace: AnyNamespace, keys: Iterable[bytes | str], *, snapshot: bool = False
    ) -> list[Any]:
        """The values of several keys, in their order."""
        self._require_open()
        return self._reads.get_many(namespace, keys, snapshot=snapshot)

    def scan(
        self,
        namespace: AnyNamespace,
        start: bytes | str = b"",
        end: bytes | str | None = None,
        *,
        prefix: bytes | str | None = None,
        limit: int | None = None,
        reverse: bool = False,
        snapshot: bool = False,
    ) -> Iterator[tuple[Any, Any]]:
        """The keys in `[start, end)` with their values, in order, as the transaction would leave them.

        The commit conflicts with writes to the part of the range that was read, of absent keys too.
        """
        self._require_open()
        keys = _range(start, end, prefix)
        return self._reads.scan(namespace, keys, limit=limit, reverse=reverse, snapshot=snapshot)

    def add_read_conflict(
        self,
        namespace: AnyNamespace,
        key: bytes | str | None = None,
        *,
        start: bytes | str = b"",
        end: bytes | str | None = None,
        prefix: bytes | str | None = None,
    ) -> None:
        """Let the commit conflict with writes to a key, or to a range, as if it had been read."""
        self._require_open()
        self._reads.depend_on(namespace, _key_or_range(key, start, end, prefix))

    # Writes

    def delete_range(
        self,
        namespace: AnyNamespace,
        start: bytes | str = b"",
        end: bytes | str | None = None,
        *,
        prefix: bytes | str | None = None,
    ) -> int:
        """Delete the keys in `[start, end)`; how many.  The range counts as read."""
        found = [key for key, _ in self.scan(namespace, start, end, prefix=prefix)]
        for key in found:
            self.delete(namespace, key)
        return len(found)

    def acknowledge(self, *deliveries: Delivery) -> None:
        """Acknowledge changes of one subscription, if this transaction is committed."""
        self._acknowledge(deliveries, through=False)

    def acknowledge_through(self, delivery: Delivery) -> None:
        """Acknowledge a change and all that come before it, if this transaction is committed."""
        self._acknowledge((delivery,), through=True)

    def _acknowledge(self, deliveries: tuple[Delivery, ...], *, through: bool) -> None:
        self._require_open()
        if not all(isinstance(delivery, Delivery) for delivery in deliveries):
            raise InvalidArgument(f"acknowledge what a subscription delivered, not {deliveries!r:.200}")
        if deliveries:
            self._coordinate().acknowledge(deliveries, through=through)

    # The end

    def commit(self) -> Version:
        """Make everything effective; its version, 0 if there is nothing to write.

        Conflict if anything that it has read was written since.  After OutcomeUnknown of a transaction with a
        coordinator, committing again finds the outcome out.
        """
        self._require_open()
        reads = self._reads.conflicts
        if self._coordinated is None:
            rows = self._qualified()
            version = self._host.router.write_together(rows, reads, durable=self._durable) if rows else 0
            if version is not None:
                self._ended = True
                return self._commit_at(version)
        writes = [
            NamespaceWrites(namespace.name, namespace.id, rows) for namespace, rows in self._writes.values()
        ]
        return self._commit_at(self._coordinate().commit(writes, reads))

    def _commit_at(self, version: Version) -> Version:
        self.version = version
        if version:
            self._committed(version)
        return version

    def abort(self, reason: str = "by its owner") -> None:
        """Leave everything as it was."""
        self._ended = True
        if self._coordinated is not None:
            self._coordinated.abort(reason)

    def _coordinate(self) -> Coordinated:
        if self._coordinated is None:
            self._coordinated = self._begin()
        return self._coordinated

    def _qualified(self) -> dict[bytes, bytes]:
        return {
            encode_namespace(namespace.id) + key: stored
            for namespace, written in self._writes.values()
            for key, stored in written.items()
        }

    def _written(self, namespace: int) -> dict[bytes, bytes]:
        return self._writes[namespace][1] if namespace in self._writes else {}

    def _require_open(self) -> None:
        if self._ended or (self._coordinated is not None and self._coordinated.ended):
            raise Closed("the transaction has ended; begin another one with site.transaction()")
        if get_ident() != self._thread:
            raise InvalidArgument(
                "a transaction is for the thread that began it; begin one in each thread, or pass values"
            )


def run_transaction(
    begin: Callable[[int], Transaction],
    work: Callable[[Transaction], Result],
    *,
    timeout: timedelta = TIMEOUT,
    pace: Pace = PACE,
) -> Result:
    """Commit work in a transaction; again after a conflict, or after a restart that aborted the commit.

    `begin` gets the number of the attempt.
    """
    pauses, until = pace.pauses(), pace.time_seconds() + timeout.total_seconds()
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            with begin(attempt) as transaction:
                return work(transaction)
        except Retryable:
            if attempt == ATTEMPTS_MAX or pace.time_seconds() >= until:
                raise
        except TransactionEnded as error:
            if not error.details.get("restarted") or attempt == ATTEMPTS_MAX:
                raise
        next(pauses)
    raise AssertionError("the last attempt returns or raises")


def transactional(
    work: Callable[Concatenate[Transaction, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """A function of a transaction that can also be called with a site: then it runs in a transaction.

    Called with a transaction it takes part in that, so such functions can call each other.

    >>> import floodmark, tempfile
    >>> @floodmark.transactional
    ... def move(t, accounts, giver, taker, amount):
    ...     t.put(accounts, giver, b"%d" % (int(t.get(accounts, giver)) - amount))
    ...     t.put(accounts, taker, b"%d" % (int(t.get(accounts, taker) or 0) + amount))
    >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
    ...     accounts = site.create_namespace("accounts")
    ...     _ = accounts.put(b"ada", b"10")
    ...     move(site, accounts, b"ada", b"grace", 4)
    ...     accounts.get(b"ada"), accounts.get(b"grace")
    (b'6', b'4')
    """

    @wraps(work)
    def call(target: Any, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        if isinstance(target, Transaction):
            return work(target, *arguments, **named)
        if not hasattr(target, "run_transaction"):
            raise InvalidArgument(f"call it with a site or a transaction first, not {target!r:.60}")
        found: Result = target.run_transaction(lambda t: work(t, *arguments, **named))
        return found

    return call


def _range(start: bytes | str, end: bytes | str | None, prefix: bytes | str | None) -> KeyRange:
    return check_range(
        _bytes(start),
        None if end is None else _bytes(end),
        None if prefix is None else _bytes(prefix),
    )


def _key_or_range(
    key: bytes | str | None, start: bytes | str, end: bytes | str | None, prefix: bytes | str | None
) -> KeyRange:
    if key is None:
        return _range(start, end, prefix)
    return KeyRange(_bytes(key), after(_bytes(key)))


def _bytes(key: bytes | str) -> bytes:
    return key.encode() if isinstance(key, str) else key
