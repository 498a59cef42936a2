"""A transaction: reads, writes and acknowledgements that take effect together or not at all, at one moment.

    def transfer(t):
        balance = int(t.get(accounts, b"ada") or 0)
        if balance < 10:
            raise NotEnough
        t.put(accounts, b"ada", b"%d" % (balance - 10))
        t.put(accounts, b"grace", b"%d" % (int(t.get(accounts, b"grace") or 0) + 10))

    site.run_transaction(transfer)

Transactions are serializable: their results are those of some serial order that respects real time.  They are
optimistic.  All reads are as of one version, writes are gathered, and the commit raises `Conflict` if
anything that was read has been written since.  `run_transaction` then runs the work again, so the work should
have no other side effects.  No reader and no plain write waits for a transaction.

A transaction whose keys are all at one node is one commit there.  One that spans nodes, or that acknowledges
changes of a subscription, has a coordinator (`coordinated.py`).
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import wraps
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, TypeVar

from floodmark.codec.appends import NO_BUCKET, SHIFT_MAX, append_key, append_size, encode_append, set_after
from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.feed.subscription.consumer import Delivery
from floodmark.host.ports import Host
from floodmark.host.transaction_port import NamespaceWrites
from floodmark.model.errors import (
    Closed,
    CommitUnknown,
    Conflict,
    InvalidArgument,
    Retryable,
    TransactionEnded,
)
from floodmark.model.limits import TRANSACTION_BYTES_MAX
from floodmark.model.partition import ReadSet
from floodmark.model.ranges import KeyRange, after
from floodmark.model.version import VERSION_MAX, Version
from floodmark.site.arguments import check_range
from floodmark.site.coordinated import TIMEOUT, Coordinated, Pace
from floodmark.site.gathering import AnyNamespace, GatheredWrites, require_of
from floodmark.site.idempotency import Once
from floodmark.site.read_versions import ReadVersions
from floodmark.site.reading import ReadAt, TransactionReads
from floodmark.site.rivals import Retries, Rivals
from floodmark.site.uncoordinated import commit_uncoordinated, finish_commit
from floodmark.site.watching import Watch, Watches

# The number of attempts of a transaction that conflicts.
ATTEMPTS_MAX = 100

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Transaction(GatheredWrites):
    """An open transaction.  Made by `Site.transaction`; only for the thread that made it.

    A `with` block commits at its end, or aborts if it raises.
    """

    def __init__(
        self,
        host: Host,
        begin: Callable[[], Coordinated],
        watches: Watches,
        *,
        durable: bool,
        begun: Coordinated | None = None,
        read_version: ReadAt | None = None,
        committed: Callable[[Version], None] = lambda _: None,
        expected: Callable[[], Version] | None = None,
        timeout: timedelta = TIMEOUT,
        pace: Pace,
        once: Once | None = None,
    ) -> None:
        super().__init__("the transaction", host, bytes_max=TRANSACTION_BYTES_MAX)
        # The commit version; 0 before the commit and for a transaction without writes.
        self.version: Version = 0
        # The number of the attempt of `run_transaction`, from 1.
        self.attempt = 1
        self._begin = begin
        self._durable = durable
        self._coordinated = begun
        read_version = read_version or ReadVersions(host.versions.read_version).fresh
        self._reads = TransactionReads(host.router, read_version, self._rows)
        self._watches = watches
        self._watched: list[Watch] = []
        # The appends: keys and values encoded without the commit version, and shifts.
        self._appends: list[tuple[bytes, bytes, int]] = []
        # Returns a version below that of the commit.
        self._expected = expected or host.versions.read_version
        # Called with the version of the commit.
        self._committed = committed
        self._timeout = timeout
        self._pace = pace
        self._once = once
        # The id of a commit without a coordinator that got no answer; empty if there is none.
        self._doubtful = ""
        self._ended = False
        self._thread = get_ident()

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._ended or self._doubtful:
            return
        if error is None:
            self.commit()
        else:
            self.abort(f"its block ended with {error!r:.200}")

    @property
    def id(self) -> str:
        """The id at the coordinator, or the id of a commit that got no answer; empty if there is neither."""
        return self._doubtful if self._coordinated is None else self._coordinated.id

    @property
    def is_done(self) -> bool:
        """Whether a transaction with its idempotency key was committed before; if so, this writes nothing."""
        self._require_open()
        return self._once is not None and self._once.is_done(self)

    def run(self, work: Callable[["Transaction"], Result]) -> Result:
        """Run `work` in this transaction, or return the result of an earlier one with the idempotency key."""
        return work(self) if self._once is None else self._once.run(self, lambda: work(self))

    # Reads

    @property
    def read_version(self) -> Version:
        """The version of all reads, which the first read asks for."""
        self._require_open()
        return self._reads.version

    def get(self, namespace: AnyNamespace, key: bytes | str, *, snapshot: bool = False) -> Any:
        """The value of a key, with this transaction's writes applied; None if the key is absent.

        A `snapshot` read causes no conflict if the key changes before the commit.
        """
        self._require_open()
        require_of(self._host, namespace)
        return self._reads.get(namespace, key, snapshot=snapshot)

    def get_many(
        self, namespace: AnyNamespace, keys: Iterable[bytes | str], *, snapshot: bool = False
    ) -> list[Any]:
        """The values of several keys, in their order; None for an absent key."""
        self._require_open()
        require_of(self._host, namespace)
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
        """The keys in `[start, end)` with their values, in order, with this transaction's writes applied.

        The commit conflicts with writes to the part of the range that was read, new keys included.
        """
        self._require_open()
        require_of(self._host, namespace)
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
        """Make the commit conflict with writes to a key or a range, as if the transaction had read it."""
        self._require_open()
        require_of(self._host, namespace)
        self._reads.depend_on(namespace, _key_or_range(key, start, end, prefix))

    def add_write_conflict(
        self,
        namespace: AnyNamespace,
        key: bytes | str | None = None,
        *,
        start: bytes | str = b"",
        end: bytes | str | None = None,
        prefix: bytes | str | None = None,
    ) -> None:
        """Make transactions that read the key, or any key of the range, conflict as if this one wrote it."""
        self._require_open()
        require_of(self._host, namespace)
        self._reads.declare(namespace, _key_or_range(key, start, end, prefix))

    def watch(self, namespace: AnyNamespace, key: bytes | str) -> "Future[Version]":
        """A future that completes when the key changes after the read version.

        If the transaction writes the key, only changes after its commit count.  The result is the version of
        a change.  The future completes only after the commit, and is cancelled if the commit fails or the
        site is closed.
        """
        # The read moves the clock of the key's node past the read version, so every later change is above it.
        self.get(namespace, key, snapshot=True)
        self._watched.append(self._watches.open(namespace, key, self._reads.version))
        return self._watched[-1].future

    # Writes

    def delete_range(
        self,
        namespace: AnyNamespace,
        start: bytes | str = b"",
        end: bytes | str | None = None,
        *,
        prefix: bytes | str | None = None,
    ) -> int:
        """Delete the keys in `[start, end)`; return their number.  The range counts as read."""
        found = [key for key, _ in self.scan(namespace, start, end, prefix=prefix)]
        for key in found:
            self.delete(namespace, key)
        return len(found)

    def append(
        self,
        namespace: AnyNamespace,
        prefix: bytes,
        value: Any,
        *,
        shift: int | None = None,
        before: Version = VERSION_MAX,
    ) -> int:
        """Write a value under the key `prefix + commit version + index`; return the index.

        The version has eight bytes.  The index, the number of the append in this transaction, has four.  With
        `shift`, eight bytes precede the version: the bits of `version >> shift` in reversed order, so that
        keys of adjacent intervals of versions are far apart.  The commit raises Conflict if its version would
        not be below `before`.
        """
        self._require_open()
        require_of(self._host, namespace)
        index = len(self._appends)
        key, stored, bits = encode_appended(namespace, prefix, value, index, shift, before)
        self._count_bytes(key, len(key) + len(stored))
        self._namespaces[key[:NAMESPACE_BYTES]] = namespace
        self._appends.append((key, stored, bits))
        return index

    def _writes(self, above: Version) -> dict[bytes, bytes]:
        """All rows of the commit, with appends encoded for a commit version above `above`."""
        return self._rows | {
            append_key(key[: append_size(key, shift)], shift, above, index): set_after(stored, above)
            for index, (key, stored, shift) in enumerate(self._appends)
        }

    def acknowledge(self, *deliveries: Delivery) -> None:
        """Acknowledge changes of one subscription if this transaction commits."""
        self._acknowledge(deliveries, through=False)

    def acknowledge_through(self, delivery: Delivery) -> None:
        """Acknowledge a change and all earlier ones of its subscription if this transaction commits."""
        self._acknowledge((delivery,), through=True)

    def _acknowledge(self, deliveries: tuple[Delivery, ...], *, through: bool) -> None:
        self._require_open()
        if not all(isinstance(delivery, Delivery) for delivery in deliveries):
            raise InvalidArgument(f"acknowledge what a subscription delivered, not {deliveries!r:.200}")
        if deliveries:
            self._coordinate().acknowledge(deliveries, through=through)

    # Commit and abort

    def commit(self) -> Version:
        """Commit the transaction; return the commit version, 0 if there is nothing to write.

        Raises Conflict if anything that was read has been written since.  Raises CommitUnknown if no answer
        arrives within the timeout: calling `commit` again then returns the version, or raises
        TransactionEnded if the transaction was not committed.
        """
        self._require_own()
        try:
            version = self._commit()
        except BaseException as error:
            self._unwatch()
            if self._appends and isinstance(error, Conflict):
                # The appends of the next attempt are encoded for a commit above the conflict's version.
                self._committed(version_of(error))
            raise
        self.version = version
        if version:
            self._committed(version)
        for watch in self._watched:
            self._watches.arm(watch, version if watch.key in self._rows else self._reads.version)
        return version

    def _commit(self) -> Version:
        if self._once is not None and not self._doubtful and not self._once.record(self):
            self._rows.clear()
            self._appends.clear()
        self._reads.attempt = self.attempt
        reads, rows = self._reads.conflicts, self._rows
        if self._appends:
            above = self._expected()
            rows = self._writes(above)
            # A read set keeps this from being an atomic batch: its parts at several nodes would not know its
            # version.
            reads = reads or ReadSet(above)
        if self._coordinated is None:
            version = self._commit_uncoordinated(rows, reads)
            if version is not None:
                self._ended = True
                return version
        writes = {
            prefix: NamespaceWrites(namespace.name, namespace.id, {})
            for prefix, namespace in self._namespaces.items()
        }
        for key, stored in rows.items():
            writes[key[:NAMESPACE_BYTES]].rows[key[NAMESPACE_BYTES:]] = stored
        version = self._coordinate().commit([*writes.values()], reads)
        self._ended = True
        return version

    def _commit_uncoordinated(self, rows: dict[bytes, bytes], reads: ReadSet | None) -> Version | None:
        if not rows:
            return None if reads is not None and reads.writes else 0
        if self._doubtful:
            return finish_commit(self._host, self._doubtful, timeout=self._timeout, pace=self._pace)
        try:
            return commit_uncoordinated(
                self._host, rows, reads, durable=self._durable, timeout=self._timeout, pace=self._pace
            )
        except CommitUnknown as error:
            self._doubtful = str(error.details["transaction"])
            raise

    def abort(self, reason: str = "by its owner") -> None:
        """Discard all writes and acknowledgements.  A commit that got no answer may have happened."""
        self._ended = True
        self._unwatch()
        if self._coordinated is not None:
            self._coordinated.abort(reason)

    def _unwatch(self) -> None:
        for watch in self._watched:
            watch.future.cancel()

    def _coordinate(self) -> Coordinated:
        if self._coordinated is None:
            self._coordinated = self._begin()
        return self._coordinated

    def _require_open(self) -> None:
        if self._doubtful:
            raise Closed("a commit of the transaction got no answer; call commit() once more to find out")
        self._require_own()

    def _require_own(self) -> None:
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
    pace: Pace,
    rivals: Rivals,
) -> Result:
    """Run work in a transaction and commit it; again after a conflict, or a restart that aborted the commit.

    This includes a conflict that is reported only by a repeated commit request, after the first answer was
    lost.  `begin` is called with the number of the attempt, from 1.
    """
    until = pace.time_seconds() + timeout.total_seconds()
    retries: Retries | None = None
    try:
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                with begin(attempt) as transaction:
                    return transaction.run(work)
            except (Retryable, TransactionEnded) as error:
                is_over = attempt == ATTEMPTS_MAX or pace.time_seconds() >= until
                if is_over or not (isinstance(error, Retryable) or error.details.get("again")):
                    raise
                retries = retries or rivals.retries(pace)
                retries.wait(error)
    finally:
        if retries is not None:
            retries.leave()
    raise AssertionError("the last attempt returns or raises")


def transactional(
    work: Callable[Concatenate[Transaction, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Decorates a function of a transaction so that it can also be called with a site.

    Called with a site, it runs in a transaction of its own, like `run_transaction`.  Called with a
    transaction, it takes part in that one, so such functions can call each other.

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


def encode_appended(
    namespace: AnyNamespace,
    prefix: bytes,
    value: Any,
    index: int,
    shift: int | None,
    before: Version,
    above: Version = 0,
) -> tuple[bytes, bytes, int]:
    """The qualified key, the value and the shift of an append for a commit above the version `above`."""
    if shift is not None and not 0 <= shift <= SHIFT_MAX:
        raise InvalidArgument(f"a shift is 0 to {SHIFT_MAX} bits, not {shift!r:.60}")
    policy, qualify, expire = namespace.encoding
    bits = NO_BUCKET if shift is None else shift
    key = qualify(append_key(prefix, bits, above, index))
    stored = encode_append(policy.put(prefix, value, expire(None)), bits, after=above, before=before)
    return key, stored, bits


def version_of(conflict: Conflict) -> Version:
    """The version in the details of a conflict, or 0."""
    version = conflict.details.get("version")
    return version if isinstance(version, int) else 0


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
