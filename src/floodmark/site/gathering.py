"""Gathers the writes of a transaction or an atomic batch, which are committed together."""

from datetime import timedelta
from typing import Any, Protocol

from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.host.ports import Host
from floodmark.model.errors import CommitTooLarge, InvalidArgument
from floodmark.site.policies import Fields
from floodmark.site.writer import Encoding


class AnyNamespace(Protocol):
    """A handle of a namespace, plain (bytes) or with a codec (text keys and the codec's values)."""

    @property
    def name(self) -> str: ...

    @property
    def id(self) -> int: ...

    @property
    def host(self) -> Host: ...

    @property
    def encoding(self) -> Encoding: ...


def require_of(host: Host, namespace: AnyNamespace) -> None:
    """Raise InvalidArgument for a namespace of another site: its id names another namespace here."""
    if namespace.host is not host:
        raise InvalidArgument(
            f"{namespace!r} belongs to another site, or was opened by another connection; open it with the "
            "site that the batch or transaction was begun at"
        )


class GatheredWrites:
    """Gathered writes to namespaces: stored values, or unstamped states, by qualified key."""

    def __init__(self, name: str, host: Host, *, bytes_max: int) -> None:
        self._host = host
        self._rows: dict[bytes, bytes] = {}
        # The namespaces of the writes, by the prefix of their qualified keys.
        self._namespaces: dict[bytes, AnyNamespace] = {}
        self._name = name
        self._bytes_max = bytes_max
        self._bytes = 0

    def _require_open(self) -> None:
        """Raise Closed if the transaction or batch has ended."""
        raise NotImplementedError

    def put(
        self, namespace: AnyNamespace, key: bytes | str, value: Any, *, ttl: timedelta | float | None = None
    ) -> None:
        """Write a value."""
        encoding = namespace.encoding
        stored = encoding.policy.put(key, value, encoding.expire(ttl))
        self._add(namespace, encoding, key, stored)

    def delete(self, namespace: AnyNamespace, key: bytes | str) -> None:
        """Delete a key, present or not."""
        encoding = namespace.encoding
        self._add(namespace, encoding, key, encoding.policy.delete())

    def update(
        self,
        namespace: AnyNamespace,
        key: bytes | str,
        fields: Fields,
        *,
        ttl: timedelta | float | None = None,
    ) -> None:
        """Write some fields of a record and keep the others."""
        encoding = namespace.encoding
        self._add(namespace, encoding, key, encoding.policy.update(key, fields, encoding.expire(ttl)))

    def delete_field(self, namespace: AnyNamespace, key: bytes | str, *names: str) -> None:
        """Delete some fields of a record."""
        encoding = namespace.encoding
        self._add(namespace, encoding, key, encoding.policy.delete_field(key, names))

    def add(self, namespace: AnyNamespace, key: bytes | str, number: int = 1) -> None:
        """Add to a counter."""
        encoding = namespace.encoding
        self._add(namespace, encoding, key, encoding.policy.add(key, number))

    def _add(self, namespace: AnyNamespace, encoding: Encoding, key: bytes | str, stored: bytes) -> None:
        self._require_open()
        require_of(self._host, namespace)
        policy, qualify, _ = encoding
        qualified = qualify(key)
        earlier = self._rows.get(qualified)
        if earlier is not None and policy.merges:
            joined = policy.join(earlier, stored)
            if joined is None:
                raise InvalidArgument(
                    f"the writes of {self._name} to {key!r:.60} cannot become one; write them in "
                    "two of these, or as one update"
                )
            stored = joined
        self._count_bytes(key, len(stored) + (len(qualified) if earlier is None else -len(earlier)))
        self._namespaces[qualified[:NAMESPACE_BYTES]] = namespace
        self._rows[qualified] = stored

    def _count_bytes(self, key: bytes | str, added: int) -> None:
        """Add the bytes of a write to the total.  Raises CommitTooLarge above the limit."""
        if self._bytes + added > self._bytes_max:
            raise CommitTooLarge(
                f"with {key!r:.60} {self._name} would write {self._bytes + added:,} bytes, and may "
                f"write {self._bytes_max:,}; commit what it has, and go on in another one",
                size=self._bytes + added,
            )
        self._bytes += added
