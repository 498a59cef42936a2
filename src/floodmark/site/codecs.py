"""Handles of a namespace with text keys, whose values a codec converts to and from Python objects.

The codec belongs to the handle.  The site stores bytes, and other handles, feeds and Spark see the bytes.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

from floodmark.codec.objects import Codec
from floodmark.host.ports import Host
from floodmark.model.errors import InvalidKey, InvalidValue
from floodmark.model.version import Version
from floodmark.site.arguments import At, Durability
from floodmark.site.namespace import CounterNamespace, Lookup, Namespace, View, list_pairs
from floodmark.site.writer import BATCH_RECORDS, Encoding, Writer

Value = TypeVar("Value")


class CodedView(Lookup[str, Value]):
    """Read-only access to a namespace, or to a view of its past, with text keys and decoded values."""

    def __init__(self, stored: Namespace | View, codec: Codec[Value]) -> None:
        self._reads = stored
        self._codec = codec

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._reads!r})"

    def get(self, key: str) -> Value | None:
        """The value of a key; None if absent.  Raises InvalidValue if the codec cannot decode it."""
        return self.decode(key, self._reads.get(to_key(key)))

    def get_many(self, keys: Iterable[str]) -> list[Value | None]:
        """The values of several keys, in their order; None for an absent key."""
        named = list(keys)
        found = self._reads.get_many([to_key(key) for key in named])
        return [self.decode(key, stored) for key, stored in zip(named, found, strict=True)]

    def scan(
        self,
        start: str = "",
        end: str | None = None,
        *,
        prefix: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[tuple[str, Value]]:
        """The keys in `[start, end)` with their values, in order of their UTF-8 bytes, as of one version."""
        rows = self._reads.scan(
            to_key(start),
            None if end is None else to_key(end),
            prefix=None if prefix is None else to_key(prefix),
            limit=limit,
            reverse=reverse,
        )
        return (self.present(*row) for row in rows)

    def present(self, key: bytes, stored: bytes) -> tuple[str, Value]:
        """Decode a stored key and value.  Raises InvalidValue if the codec cannot decode the value."""
        try:
            return key.decode(), self._codec.decode(stored)
        except (TypeError, ValueError) as error:
            raise _refuse_stored(key, error) from error

    def decode(self, key: str, stored: bytes | None) -> Value | None:
        """Decode the stored bytes of a key's value; None for None."""
        return None if stored is None else self.present(key.encode(), stored)[1]


class CodedNamespace(CodedView[Value]):
    """A namespace with text keys and values of a codec.  Made by `Site.namespace` and `create_namespace`.

    >>> import floodmark, tempfile
    >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
    ...     users = site.create_namespace("users", codec="json")
    ...     _ = users.put("ada", {"name": "Ada", "born": 1815})
    ...     "ada" in users, users["ada"]["born"], site.namespace("users").get(b"ada")
    (True, 1815, b'{"name":"Ada","born":1815}')
    """

    def __init__(self, stored: Namespace, codec: Codec[Value]) -> None:
        super().__init__(stored, codec)
        self.stored = stored
        """The same namespace, with keys and values as bytes."""

    @property
    def name(self) -> str:
        """The name of the namespace."""
        return self.stored.name

    @property
    def id(self) -> int:
        """The id of the namespace, which is part of each stored key."""
        return self.stored.id

    @property
    def host(self) -> Host:
        """The host of the namespace's site."""
        return self.stored.host

    @cached_property
    def encoding(self) -> Encoding:
        """The encoding of writes as rows, for writers and transactions, which gather rows."""
        policy, qualify, expire = self.stored.encoding

        def put(key: Any, value: Any, expires_at: int | None) -> bytes:
            return policy.put(to_key(key), self._encode(key, value), expires_at)

        coded = copy(policy)
        coded.put = put  # type: ignore[method-assign]
        return Encoding(coded, lambda key: qualify(to_key(key)), expire)

    def as_of(self, at: At) -> CodedView[Value]:
        """A read-only view of the namespace as it was at a version or moment."""
        return CodedView(self.stored.as_of(at), self._codec)

    def put(
        self,
        key: str,
        value: Value,
        *,
        ttl: timedelta | float | None = None,
        durability: Durability | None = None,
    ) -> Version:
        """Write a value and return its version.  Raises InvalidValue if the codec cannot encode it."""
        return self.stored.put(to_key(key), self._encode(key, value), ttl=ttl, durability=durability)

    def put_many(
        self,
        pairs: Mapping[str, Value] | Iterable[tuple[str, Value]],
        *,
        ttl: timedelta | float | None = None,
        durability: Durability | None = None,
    ) -> Version:
        """Write many values in one commit per node; return the highest version, 0 for no pairs."""
        rows = [(to_key(key), self._encode(key, value)) for key, value in list_pairs(pairs)]
        return self.stored.put_many(rows, ttl=ttl, durability=durability)

    def delete(self, key: str, *, durability: Durability | None = None) -> Version:
        """Delete a key, present or not, and return the version of the deletion."""
        return self.stored.delete(to_key(key), durability=durability)

    def compare_and_set(
        self,
        key: str,
        expected: Value | None,
        value: Value | None,
        *,
        ttl: timedelta | float | None = None,
        durability: Durability | None = None,
    ) -> bool:
        """Write a value if the current one equals `expected` in Python; return whether it was written.

        None stands for an absent key: `expected=None` creates and `value=None` deletes.
        """
        name, new = to_key(key), None if value is None else self._encode(key, value)
        while True:
            stored = self.stored.get(name)
            if (stored is None) != (expected is None) or self.decode(key, stored) != expected:
                return False
            # The stored bytes changed since the read: read and compare again.
            if self.stored.compare_and_set(name, stored, new, ttl=ttl, durability=durability):
                return True

    def update(
        self,
        key: str,
        fields: Mapping[str, object],
        *,
        ttl: timedelta | float | None = None,
        durability: Durability | None = None,
    ) -> Version:
        """Write some fields of a record and keep the others; a field with the value None is deleted."""
        return self.stored.update(to_key(key), fields, ttl=ttl, durability=durability)

    def add(self, key: str, number: int = 1, *, durability: Durability | None = None) -> Version:
        """Add a number to a counter.  With codec "json", `get` returns counters as int."""
        return self.stored.add(to_key(key), number, durability=durability)

    def writer(self, *, batch_records: int = BATCH_RECORDS, durability: Durability | None = None) -> Writer:
        """A stream of writes, for many records, with text keys and values of the codec."""
        return self.stored.writer(batch_records=batch_records, durability=durability, encoding=self.encoding)

    def _encode(self, key: object, value: Value) -> bytes:
        try:
            return self._codec.encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidValue(f"the value of {key!r:.60} cannot be encoded: {error}", key=key) from error


def with_codec(
    namespace: Namespace[Any], codec: Codec[Value] | None
) -> Namespace[Any] | CodedNamespace[Value]:
    """The handle itself, or wrapped in a `CodedNamespace` if there is a codec."""
    return namespace if codec is None else CodedNamespace(namespace.stored, codec)


def present(namespace: Namespace | CodedNamespace[Any], key: bytes, stored: bytes | None) -> tuple[Any, Any]:
    """A stored key and value in the types of the handle; a stored None stays None."""
    if stored is None:
        return key, None
    if isinstance(namespace, CodedNamespace):
        return namespace.present(key, stored)
    return key, int(stored) if isinstance(namespace, CounterNamespace) else stored


def to_key(key: object) -> bytes:
    """The UTF-8 bytes of a text key.  Raises InvalidKey if it is not text."""
    if not isinstance(key, str):
        raise InvalidKey(
            f"a key of this handle must be str, not {type(key).__name__} ({key!r:.60}); a handle without "
            "codec takes bytes"
        )
    try:
        return key.encode()
    except UnicodeEncodeError as error:
        raise InvalidKey(f"the key {key!r:.60} has no UTF-8 form: {error}") from error


def _refuse_stored(key: bytes, error: Exception) -> InvalidValue:
    return InvalidValue(
        f"what {key!r:.60} holds cannot be decoded: {error}; read it with a handle without codec", key=key
    )
