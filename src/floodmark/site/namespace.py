"""Handles of namespaces, for reads and writes, and read-only views of their past."""

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from functools import cached_property, partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar, cast

from floodmark.codec.ordered import encode_namespace, qualify_range
from floodmark.codec.values import PLAIN, TOMBSTONE, encode_value
from floodmark.feed import at_present
from floodmark.host.catalog import NamespaceRow, NamespaceSettings
from floodmark.host.ports import Host
from floodmark.merge.policies import COUNTER, FIELDS
from floodmark.model.errors import (
    FloodmarkError,
    InvalidArgument,
    KeyNotFound,
    NamespaceNotFound,
    PartlyDone,
    WrongPolicy,
)
from floodmark.model.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from floodmark.model.partition import MergeStream, PutStream
from floodmark.model.ranges import KeyRange
from floodmark.model.record import Versioned
from floodmark.model.version import Version
from floodmark.partition.commit.entering import check_key, refuse_key
from floodmark.site.arguments import (
    At,
    Durability,
    check_durability,
    check_range,
    refuse_value,
    to_expiry,
    to_version,
)
from floodmark.site.policies import POLICIES, Fields
from floodmark.site.writer import BATCH_RECORDS, Encoding, Writer

DELETE_RANGE_ROWS: Final = 1_000

Pairs: TypeAlias = Mapping[bytes, Fields] | Iterable[tuple[bytes, Fields]]
Key = TypeVar("Key")
Value = TypeVar("Value")
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    # The default makes `Namespace` mean `Namespace[bytes]`.
    Held = TypeVarWithDefault("Held", default=bytes)
else:
    Held = TypeVar("Held")


class Lookup(Generic[Key, Value]):
    """Implements `key in users` and `users[key]` with `get`."""

    def get(self, key: Key) -> Value | None:
        """The value of a key; None if there is none."""
        raise NotImplementedError

    def __contains__(self, key: Key) -> bool:
        return self.get(key) is not None

    def __getitem__(self, key: Key) -> Value:
        value = self.get(key)
        if value is None:
            raise KeyNotFound(f"{self!r} has no key {key!r:.60}; get returns None for such a key", key=key)
        return value


class Namespace(Lookup[bytes, Held]):
    """A named set of keys with its own settings.  Safe to use from many threads.

    >>> import floodmark, tempfile
    >>> site = floodmark.open(tempfile.mkdtemp(), site="oslo")
    >>> users = site.create_namespace("users")
    >>> version = users.put(b"ada", b"countess")
    >>> _ = users.put(b"ada", b"programmer")
    >>> users.get(b"ada"), users.get(b"ada", at=version)
    (b'programmer', b'countess')
    >>> site.close()
    """

    def __init__(
        self,
        row: NamespaceRow,
        host: Host,
        *,
        durable: bool,
    ) -> None:
        self._row = row
        self._prefix = encode_namespace(row.id)
        self._policy = POLICIES[row.merge](row.name)
        # The host of the namespace's site.
        self.host = host
        self._router = host.router
        self._durable = durable

    @property
    def name(self) -> str:
        """The name of the namespace."""
        return self._row.name

    @property
    def settings(self) -> NamespaceSettings:
        """The current settings."""
        return self._row.settings

    @property
    def id(self) -> int:
        """The id of the namespace, which is part of each stored key."""
        return self._row.id

    @property
    def stored(self) -> "Namespace[bytes]":
        """A handle to the same namespace whose values are bytes."""
        return self  # type: ignore[return-value]

    @cached_property
    def encoding(self) -> Encoding:
        """The encoding of writes as rows, for writers that gather rows before they send them."""
        return Encoding(self._policy, self._qualify, self._expiry)

    def __repr__(self) -> str:
        return f"Namespace({self.name!r})"

    # Reads

    def get(self, key: bytes, *, at: At | None = None) -> Held | None:
        """The value of a key, now or as of a version or moment; None if the key is absent."""
        qualified = self._qualify(key)
        version = None if at is None else to_version(at)
        return self._router.get(qualified, version)  # type: ignore[return-value]

    def get_many(self, keys: Iterable[bytes], *, at: At | None = None) -> list[Held | None]:
        """The values of several keys, in their order; None for an absent key.

        Without `at` the keys are not read as of one version.
        """
        version = None if at is None else to_version(at)
        if not isinstance(keys, Iterable):
            raise InvalidArgument(f"get_many takes keys, not {keys!r:.60}; pass a list of bytes")
        return self._router.get_many(  # type: ignore[return-value]
            [self._qualify(key) for key in keys], version
        )

    def record(self, key: bytes, *, at: At | None = None) -> Versioned | None:
        """The value of a key with its version, stamp and expiry; None if the key is absent."""
        qualified = self._qualify(key)
        version = None if at is None else to_version(at)
        return self._router.find(qualified, version)

    def first(self, start: bytes, end: bytes, *, at: At | None = None) -> tuple[bytes, Held] | None:
        """The first key in `[start, end)` with its value, now or as of a version; None if there is none."""
        version = None if at is None else to_version(at)
        found = self._router.find(self._qualify(start), version, self._prefix + end)
        if found is None:
            return next(self.scan(start, end, limit=1, at=at), None)
        return found.key, found.value  # type: ignore[return-value]

    def scan(
        self,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bytes | None = None,
        limit: int | None = None,
        reverse: bool = False,
        at: At | None = None,
    ) -> Iterator[tuple[bytes, Held]]:
        """Iterate over the keys in `[start, end)` with their values, in order, all as of one version.

        The scan holds one page in memory, and a safe point until it ends or is closed.
        """
        return _rows(self.pages(start, end, prefix=prefix, limit=limit, reverse=reverse, at=at))

    def pages(
        self,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bytes | None = None,
        limit: int | None = None,
        reverse: bool = False,
        at: At | None = None,
    ) -> Iterator[list[tuple[bytes, Held]]]:
        """`scan` in pages of at most 1,000 rows or some 4 MiB, for readers that process rows in bulk."""
        self._require_there()
        keys = qualify_range(self.id, check_range(start, end, prefix))
        if limit is not None and (type(limit) is not int or limit < 0):
            raise InvalidArgument(f"limit must be a number of rows, not {limit!r}")
        scan = partial(_pages, self.host, keys, namespace=self.id, limit=limit, reverse=reverse)
        return at_present(self.host.versions.read_version, scan) if at is None else scan(to_version(at))

    def as_of(self, at: At) -> "View[Held]":
        """A read-only view of the namespace as it was at a version or moment."""
        return View(self, to_version(at))

    # Writes

    def put(
        self,
        key: bytes,
        value: Fields,
        *,
        ttl: timedelta | float | None = None,
        durability: Durability | None = None,
    ) -> Version:
        """Write a value and return its version.

        With durability "fsync" the value is on disk when this returns; with "async", a moment later.  Without
        `durability` or `ttl`, those of the site and of the namespace hold.
        """
        qualified = self._qualify(key)
        if type(value) is not bytes or len(value) > VALUE_BYTES_MAX:
            raise refuse_value(key, value)
        if ttl is None and self._row.ttl_ms is None:
            stored = value + PLAIN
        else:
            stored = encode_value(value, self._expiry(ttl))
        durable = self._durable if durability is None else check_durability(durability)
        return self._router.put_one(qualified, stored, durable=durable)

    def put_many(
        self,
        pairs: Pairs,
        *,
        ttl: timedelta | float | None = None,
        durability: Durability | None = None,
    ) -> Version:
        """Write many values in one commit per node; return the highest version, 0 for no pairs.

        If a key occurs twice, its last value is written.
        """
        expires_at = self._expiry(ttl)
        durable = self._durable if durability is None else check_durability(durability)
        self._require_there()
        suffix = PLAIN if expires_at is None else encode_value(b"", expires_at)
        rows = _encode_pairs(pairs, self._prefix, suffix)
        return self._router.put(rows, durable=durable)

    def writer(
        self,
        *,
        batch_records: int = BATCH_RECORDS,
        durability: Durability | None = None,
        encoding: Encoding | None = None,
    ) -> Writer:
        """A stream of writes, for many records: it sends batches without waiting for their acknowledgements.

        >>> import floodmark, tempfile
        >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
        ...     numbers = site.create_namespace("numbers")
        ...     with numbers.writer() as writer:
        ...         for number in range(3000):
        ...             writer.put(b"%04d" % number, b"x")
        ...     writer.acknowledged
        3000
        """
        durable = self._durable if durability is None else check_durability(durability)
        self._require_there()
        stream = self.host.write_stream(MergeStream(durable) if self._policy.merges else PutStream(durable))
        return Writer(stream, encoding or self.encoding, batch_records)

    def delete(self, key: bytes, *, durability: Durability | None = None) -> Version:
        """Delete a key, present or not, and return the version of the deletion."""
        qualified = self._qualify(key)
        durable = self._durable if durability is None else check_durability(durability)
        return self._router.put_one(qualified, TOMBSTONE, durable=durable)

    def delete_range(
        self,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bytes | None = None,
        durability: Durability | None = None,
    ) -> int:
        """Delete the keys now in `[start, end)`, in several commits, and return their number.

        A key that is written meanwhile keeps the newer value.  Raises PartlyDone if a later commit fails.
        """
        durable = self._durable if durability is None else check_durability(durability)
        keys, deleted = check_range(start, end, prefix), 0
        since, rows = at_present(
            self.host.versions.read_version,
            lambda version: (version, self.scan(keys.start, keys.end, at=version)),
        )
        try:
            while portion := [self._prefix + key for key, _ in islice(rows, DELETE_RANGE_ROWS)]:
                deleted += self._router.delete_unchanged(portion, since, durable=durable)
        except FloodmarkError as error:
            if deleted:
                raise PartlyDone(
                    f"{deleted:,} keys were deleted before it failed ({error}); call again for the rest",
                    deleted=deleted,
                ) from error
            raise
        return deleted

    def compare_and_set(
        self,
        key: bytes,
        expected: bytes | None,
        value: Fields | None,
        *,
        ttl: timedelta | float | None = None,
        durability: Durability | None = None,
    ) -> bool:
        """Write a value if the current value is `expected`; return whether it was written.

        None stands for an absent key: `expected=None` creates and `value=None` deletes.
        """
        qualified = self._qualify(key)
        if expected is not None and type(expected) is not bytes:
            raise refuse_value(key, expected)
        stored = self._policy.compare(key, value, None if value is None else self._expiry(ttl))
        if expected is not None and len(expected) > VALUE_BYTES_MAX and not self._policy.merges:
            # No value is that large, except a record whose fields were written at several sites.
            return False
        durable = self._durable if durability is None else check_durability(durability)
        return self._router.compare_and_set(qualified, expected, stored, durable=durable)

    # Writes of records that are merged

    def update(
        self,
        key: bytes,
        fields: Fields,
        *,
        ttl: timedelta | float | None = None,
        durability: Durability | None = None,
    ) -> Version:
        """Write some fields of a record and keep the others; a field with the value None (null) is deleted.

        Only for the merge policy "fields".  A time to live applies to the written fields only.

        >>> import floodmark, tempfile
        >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
        ...     users = site.create_namespace("users", merge="fields")
        ...     _ = users.put(b"ada", {"name": "Ada", "city": "London"})
        ...     _ = users.update(b"ada", {"city": None, "title": "countess"})
        ...     users.get(b"ada")
        b'{"name":"Ada","title":"countess"}'
        """
        self._qualify(key)
        return self._merge(key, self._policy.update(key, fields, self._expiry(ttl)), durability)

    def delete_field(self, key: bytes, *names: str, durability: Durability | None = None) -> Version:
        """Delete fields of a record, which is absent without fields.  Only for the merge policy "fields"."""
        self._qualify(key)
        return self._merge(key, self._policy.delete_field(key, names), durability)

    def add(self, key: bytes, number: int = 1, *, durability: Durability | None = None) -> Version:
        """Add a number, which may be negative, to a counter.  An absent counter is 0.

        Only for the merge policy "counter".  Concurrent additions of several sites are all counted.

        >>> import floodmark, tempfile
        >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
        ...     visits = site.create_namespace("visits", merge="counter")
        ...     _ = visits.add(b"home", 3), visits.add(b"home", -1)
        ...     visits.get(b"home")
        2
        """
        self._qualify(key)
        return self._merge(key, self._policy.add(key, number), durability)

    # Encoding of arguments

    def _merge(self, key: bytes, state: bytes, durability: Durability | None) -> Version:
        durable = self._durable if durability is None else check_durability(durability)
        return self._router.merge_one(self._qualify(key), state, durable=durable)

    def _qualify(self, key: bytes) -> bytes:
        if type(key) is not bytes or not 0 < len(key) <= KEY_BYTES_MAX:
            raise refuse_key(key)
        if self._row.dropped_at is not None:
            self._require_there()
        return self._prefix + key

    def _require_there(self) -> None:
        if self._row.dropped_at is not None:
            raise NamespaceNotFound(
                f"namespace {self.name!r} was dropped; create it again with "
                f"site.create_namespace({self.name!r})",
                namespace=self.name,
            )

    def _expiry(self, ttl: timedelta | float | None) -> int | None:
        if ttl is not None:
            return to_expiry(ttl, self.host.physical_ms())
        if self._row.ttl_ms is not None:
            return to_expiry(self._row.ttl_ms / 1000, self.host.physical_ms())
        return None


class MergedNamespace(Namespace[Held]):
    """A namespace of fields or counters, whose writes are merged.

    It is a subclass so that the write path of `Namespace` has no branch for merging.
    """

    def put(
        self,
        key: bytes,
        value: Fields,
        *,
        ttl: timedelta | float | None = None,
        durability: Durability | None = None,
    ) -> Version:
        self._qualify(key)
        return self._merge(key, self._policy.put(key, value, self._expiry(ttl)), durability)

    def put_many(
        self,
        pairs: Pairs,
        *,
        ttl: timedelta | float | None = None,
        durability: Durability | None = None,
    ) -> Version:
        expires_at = self._expiry(ttl)
        durable = self._durable if durability is None else check_durability(durability)
        self._require_there()
        put = self._policy.put
        rows = {self._prefix + key: put(key, value, expires_at) for key, value in _checked_pairs(pairs)}
        return self._router.merge(rows, durable=durable)

    def delete(self, key: bytes, *, durability: Durability | None = None) -> Version:
        self._qualify(key)
        return self._merge(key, self._policy.delete(), durability)


class CounterNamespace(MergedNamespace[int]):
    """A namespace of counters, whose reads return int.

    Changes, records and feeds hold the number as decimal text in bytes.

    >>> import floodmark, tempfile
    >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
    ...     visits = site.create_namespace("visits", merge="counter")
    ...     _ = visits.add(b"home", 3)
    ...     visits[b"home"], visits.get(b"none"), visits.get_many([b"home"]), dict(visits.scan())
    (3, None, [3], {b'home': 3})
    """

    @cached_property
    def stored(self) -> Namespace[bytes]:
        """The same namespace, with values as bytes."""
        return MergedNamespace(self._row, self.host, durable=self._durable)

    def get(self, key: bytes, *, at: At | None = None) -> int | None:
        return to_number(super().get(key, at=at))

    def get_many(self, keys: Iterable[bytes], *, at: At | None = None) -> list[int | None]:
        return [to_number(value) for value in super().get_many(keys, at=at)]

    def first(self, start: bytes, end: bytes, *, at: At | None = None) -> tuple[bytes, int] | None:
        found = super().first(start, end, at=at)
        return None if found is None else (found[0], int(found[1]))

    def pages(
        self,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bytes | None = None,
        limit: int | None = None,
        reverse: bool = False,
        at: At | None = None,
    ) -> Iterator[list[tuple[bytes, int]]]:
        pages = super().pages(start, end, prefix=prefix, limit=limit, reverse=reverse, at=at)
        return ([(key, int(value)) for key, value in page] for page in pages)


def to_number(value: Any) -> int | None:
    """The integer value of a counter as stored; None for None."""
    return None if value is None else int(value)


def open_namespace(row: NamespaceRow, host: Host, *, durable: bool) -> Namespace[Any]:
    """The handle of a namespace, by its merge policy.  Raises WrongPolicy for an unknown policy."""
    if row.merge not in POLICIES:
        raise WrongPolicy(
            f"namespace {row.name!r} merges by {row.merge!r}, which this release does not know; upgrade it",
            namespace=row.name,
        )
    kind: type[Namespace[Any]]
    kind = CounterNamespace if row.merge == COUNTER else MergedNamespace if row.merge == FIELDS else Namespace
    return kind(row, host, durable=durable)


def _pages(
    host: Host,
    keys: KeyRange,
    at: Version,
    *,
    namespace: int,
    limit: int | None = None,
    reverse: bool = False,
) -> Generator[list[tuple[bytes, Any]], None, None]:
    def read() -> Generator[list[tuple[bytes, Any]], None, None]:
        found: Any = host.router.scan(keys, at, limit, reverse=reverse)
        with host.reading(at, namespace), closing(found):
            first: list[tuple[bytes, bytes]] = next(found, [])
            yield []
            yield from filter(None, chain((first,), found))

    # A generator runs only from its first `next`.  This one makes the scan take its safe point now and fail
    # at once for a collected version; `close` then releases the safe point even if no row was read.
    pages = read()
    next(pages)
    return pages


def _rows(pages: Iterator[list[tuple[bytes, Any]]]) -> Iterator[tuple[bytes, Any]]:
    """The rows of the pages; closing this generator closes `pages`."""
    with closing(cast(Generator[list[tuple[bytes, Any]], None, None], pages)):
        for page in pages:
            yield from page


def _encode_pairs(pairs: Pairs, prefix: bytes, suffix: bytes) -> dict[bytes, bytes]:
    """Qualified keys with stored values; the last value of a key that occurs twice."""
    rows: dict[bytes, bytes] = {}
    # The same checks as `_checked_pairs`, inlined: a generator would be a large part of the cost per row.
    for pair in list_pairs(pairs):
        try:
            key, value = pair
        except (TypeError, ValueError) as error:
            raise _refuse_pair(pair) from error
        if type(key) is not bytes or not 0 < len(key) <= KEY_BYTES_MAX:
            raise refuse_key(key)
        if type(value) is not bytes or len(value) > VALUE_BYTES_MAX:
            raise refuse_value(key, value)
        rows[prefix + key] = value + suffix
    return rows


def _checked_pairs(pairs: Pairs) -> Iterator[tuple[bytes, Fields]]:
    """The pairs, after a check of each key.  Values are not checked."""
    for pair in list_pairs(pairs):
        try:
            key, value = pair
        except (TypeError, ValueError) as error:
            raise _refuse_pair(pair) from error
        check_key(key)
        yield key, value


def list_pairs(pairs: Mapping[Key, Value] | Iterable[tuple[Key, Value]]) -> list[tuple[Key, Value]]:
    """The pairs of a mapping or an iterable, as a list.  The items of an iterable are not checked."""
    if not isinstance(pairs, Iterable):
        raise InvalidArgument(f"put_many takes a mapping or pairs, not {pairs!r:.60}")
    return list(pairs.items() if isinstance(pairs, Mapping) else pairs)


def _refuse_pair(pair: object) -> InvalidArgument:
    return InvalidArgument(f"put_many takes pairs of key and value, not {pair!r:.60}")


class View(Lookup[bytes, Held]):
    """A read-only view of a namespace at one version.  Made by `Namespace.as_of`."""

    def __init__(self, namespace: Namespace[Held], version: Version) -> None:
        self._namespace = namespace
        self.version = version

    def __repr__(self) -> str:
        return f"View({self._namespace.name!r}, version={self.version})"

    def get(self, key: bytes) -> Held | None:
        """The value of a key at the view's version."""
        return self._namespace.get(key, at=self.version)

    def get_many(self, keys: Iterable[bytes]) -> list[Held | None]:
        """The values of several keys at the view's version."""
        return self._namespace.get_many(keys, at=self.version)

    def record(self, key: bytes) -> Versioned | None:
        """The record of a key at the view's version."""
        return self._namespace.record(key, at=self.version)

    def scan(
        self,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bytes | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[tuple[bytes, Held]]:
        """The keys in `[start, end)` with their values at the view's version."""
        return self._namespace.scan(start, end, prefix=prefix, limit=limit, reverse=reverse, at=self.version)
