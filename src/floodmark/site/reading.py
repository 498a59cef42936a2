"""What a transaction reads, as of one version and with its own writes on top."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from heapq import merge
from itertools import islice
from typing import Any

from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace, qualify_range
from floodmark.model.errors import Conflict, InvalidArgument, LimitExceeded, VersionCollected
from floodmark.model.limits import TRANSACTION_KEYS_MAX
from floodmark.model.partition import ReadSet
from floodmark.model.ranges import KeyRange, after
from floodmark.model.version import Version
from floodmark.site.codecs import CodedNamespace
from floodmark.site.gathering import AnyNamespace
from floodmark.site.namespace import Namespace

# The writes of a transaction to a namespace, by its id and by key: stored values or unstamped states.
Written = Callable[[int], Mapping[bytes, bytes]]


class TransactionReads:
    """The reads of a transaction: all as of the version of the first, which is asked for then."""

    def __init__(self, read_version: Callable[[], Version], written: Written) -> None:
        self._read_version = read_version
        self._written = written
        self._version: Version = 0
        # What must not change until the commit: qualified keys, and the ranges as far as they were read.
        self._keys: set[bytes] = set()
        self._ranges: list[_ReadRange] = []
        self._count = 0

    @property
    def version(self) -> Version:
        """The version of the reads."""
        if not self._version:
            self._version = self._read_version()
        return self._version

    @property
    def conflicts(self) -> ReadSet | None:
        """What the commit depends on; None if it depends on nothing."""
        ranges = sorted({each.keys for each in self._ranges if each.keys is not None})
        if not self._keys and not ranges:
            return None
        return ReadSet(self.version, sorted(self._keys), ranges)

    def get_many(self, namespace: AnyNamespace, keys: Iterable[Any], *, snapshot: bool) -> list[Any]:
        """The values of several keys, in their order; None for a key that is absent."""
        policy, qualify, _ = namespace.encoding
        wanted = [qualify(key)[NAMESPACE_BYTES:] for key in keys]
        written = self._written(namespace.id)
        stored = [key for key in wanted if policy.merges or key not in written]
        self._add(len(stored))
        with _collected_is_conflict():
            found = dict(zip(stored, _bare(namespace).get_many(stored, at=self.version), strict=True))
        if not snapshot:
            prefix = encode_namespace(namespace.id)
            self._keys.update(prefix + key for key in stored)
        values = [
            policy.read_back(found.get(key), written[key]) if key in written else found[key] for key in wanted
        ]
        return [
            None if value is None else _present(namespace, key, value)[1]
            for key, value in zip(wanted, values, strict=True)
        ]

    def scan(
        self,
        namespace: AnyNamespace,
        keys: KeyRange,
        *,
        limit: int | None,
        reverse: bool,
        snapshot: bool,
    ) -> Iterator[tuple[Any, Any]]:
        """The keys of a range with their values, in order."""
        policy = namespace.encoding.policy
        written = {key: row for key, row in self._written(namespace.id).items() if keys.contains(key)}
        read = _ReadRange(namespace.id, keys, reverse=reverse)
        if not snapshot:
            self._ranges.append(read)
        most = None if limit is None else limit + len(written)
        with _collected_is_conflict():
            rows = _bare(namespace).scan(keys.start, keys.end, limit=most, reverse=reverse, at=self.version)

        def pairs() -> Iterator[tuple[Any, Any]]:
            own = ((key, None) for key in sorted(written, reverse=reverse))
            last: bytes | None = None
            for key, value in merge(rows, own, key=_first, reverse=reverse):
                read.reach(key)
                if key == last:
                    # The same key among the transaction's own writes.
                    continue
                last = key
                self._add(1)
                found = policy.read_back(value, written[key]) if key in written else value
                if found is not None:
                    yield _present(namespace, key, found)
            read.finish()

        return islice(pairs(), limit)

    def depend_on(self, namespace: AnyNamespace, keys: KeyRange) -> None:
        """Let the commit fail if a range has changed since the transaction's version."""
        self._add(1)
        read = _ReadRange(namespace.id, keys, reverse=False)
        read.finish()
        self._ranges.append(read)

    def _add(self, count: int) -> None:
        self._count += count
        if self._count > TRANSACTION_KEYS_MAX:
            raise LimitExceeded(
                f"a transaction may read {TRANSACTION_KEYS_MAX:,} keys; read with snapshots of a namespace "
                "(`as_of`), or in several transactions"
            )


class _ReadRange:
    """How much of a range a scan has read: nothing yet, up to a key, or all."""

    def __init__(self, namespace: int, keys: KeyRange, *, reverse: bool) -> None:
        self.keys: KeyRange | None = None
        self._namespace = namespace
        self._whole = keys
        self._reverse = reverse

    def reach(self, key: bytes) -> None:
        """Count what lies between the scan's beginning and a key, itself included."""
        start, end = self._whole
        self._set(KeyRange(key, end) if self._reverse else KeyRange(start, after(key)))

    def finish(self) -> None:
        """Count the whole range."""
        self._set(self._whole)

    def _set(self, keys: KeyRange) -> None:
        self.keys = qualify_range(self._namespace, keys)


@contextmanager
def _collected_is_conflict() -> Iterator[None]:
    """A transaction whose version was collected is done again at a newer one."""
    try:
        yield
    except VersionCollected as error:
        raise Conflict(f"{error}; the transaction begins again", **error.details) from error


def _bare(namespace: AnyNamespace) -> Namespace:
    """The handle of a namespace without a codec."""
    if isinstance(namespace, CodedNamespace):
        return namespace.stored
    if not isinstance(namespace, Namespace):
        raise InvalidArgument(f"a transaction reads from a namespace of its site, not from {namespace!r:.60}")
    return namespace


def _present(namespace: AnyNamespace, key: bytes, value: bytes) -> tuple[Any, Any]:
    """A stored key and value as a handle shows them."""
    return namespace.present(key, value) if isinstance(namespace, CodedNamespace) else (key, value)


def _first(pair: tuple[bytes, bytes | None]) -> bytes:
    return pair[0]
