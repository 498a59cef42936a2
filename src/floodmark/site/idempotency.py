"""Idempotency keys: of all transactions with one key, only one is committed.

The transaction itself reads and writes a record of the key with the result of the work.  Of two concurrent
transactions one conflicts, and finds the record at its retry.  The records are in a separate namespace and
expire after a day.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

import msgspec

from floodmark.host.catalog import NamespaceSettings
from floodmark.host.ports import Host
from floodmark.model.errors import (
    InvalidArgument,
    LimitExceeded,
    NamespaceExists,
    NamespaceNotFound,
    NotAllowed,
)
from floodmark.model.limits import (
    IDEMPOTENCY_AGE_MAX,
    IDEMPOTENCY_KEY_BYTES_MAX,
    IDEMPOTENCY_RESULT_BYTES_MAX,
)
from floodmark.site.namespace import Namespace, open_namespace

NAMESPACE: Final = "floodmark-idempotency"

Result = TypeVar("Result")


class Recording(Protocol):
    """The part of a transaction that reads and writes the record of the key."""

    def get(self, namespace: Namespace, key: bytes, /) -> Any: ...

    def put(self, namespace: Namespace, key: bytes, value: bytes, /, *, ttl: timedelta) -> None: ...


def check_idempotency_key(key: str) -> bytes:
    """The bytes of an idempotency key.  Raises InvalidArgument or LimitExceeded for an invalid one."""
    if not isinstance(key, str) or not key:
        raise InvalidArgument(f"an idempotency key is a text that is not empty, not {key!r:.60}")
    encoded = key.encode()
    if len(encoded) > IDEMPOTENCY_KEY_BYTES_MAX:
        raise LimitExceeded(
            f"the idempotency key {key!r:.60} has {len(encoded):,} bytes; at most "
            f"{IDEMPOTENCY_KEY_BYTES_MAX:,} are allowed. Use an id, or a digest",
            size=len(encoded),
        )
    return encoded


def open_idempotency(host: Host, *, durable: bool) -> Namespace:
    """The namespace of the records, created if it is missing."""
    try:
        row = host.namespaces.find_namespace(NAMESPACE)
    except NamespaceNotFound:
        try:
            row = host.namespaces.create_namespace(NAMESPACE, NamespaceSettings())
        except NamespaceExists:
            row = host.namespaces.find_namespace(NAMESPACE)
        except NotAllowed as error:
            raise NotAllowed(
                f"idempotency keys are kept in the namespace {NAMESPACE!r}, which is missing; let an "
                f"administrator of the site create it, and allow this caller to write to it ({error})"
            ) from error
    return open_namespace(row, host, durable=durable)


class Once:
    """The idempotency key of one transaction, and the result of its work."""

    def __init__(self, namespace: Namespace, key: bytes) -> None:
        self._namespace = namespace
        self._key = key
        self._result: Any = None
        self._is_recorded = False

    def is_done(self, transaction: Recording) -> bool:
        """Whether an earlier transaction of the key was committed; if so, its result is loaded."""
        stored = transaction.get(self._namespace, self._key)
        if stored is None or self._is_recorded:
            return False
        (self._result,) = msgspec.json.decode(stored)
        return True

    def run(self, transaction: Recording, work: Callable[[], Result]) -> Result:
        """Run the work and return its result, or return the stored result of an earlier transaction."""
        if not self.is_done(transaction):
            self._result = work()
            _encode(self._result)
        result: Result = self._result
        return result

    def record(self, transaction: Recording) -> bool:
        """Write the record of the key in the transaction; return False if an earlier one has committed it."""
        if self._is_recorded:
            return True
        if self.is_done(transaction):
            return False
        transaction.put(self._namespace, self._key, _encode(self._result), ttl=IDEMPOTENCY_AGE_MAX)
        self._is_recorded = True
        return True


def _encode(result: object) -> bytes:
    """A result as JSON.  Raises InvalidArgument if decoding would not return an equal value."""
    try:
        encoded = msgspec.json.encode([result])
        is_same = msgspec.json.decode(encoded) == [result]
    except (TypeError, ValueError, OverflowError, RecursionError):
        is_same = False
    if not is_same:
        raise InvalidArgument(
            f"the result {result!r:.60} of a transaction with an idempotency key cannot be stored as JSON; "
            "return None, a bool, a number, text, or lists and dicts of these with text as keys"
        )
    if len(encoded) > IDEMPOTENCY_RESULT_BYTES_MAX:
        raise LimitExceeded(
            f"the result of a transaction with an idempotency key has {len(encoded):,} bytes; at most "
            f"{IDEMPOTENCY_RESULT_BYTES_MAX:,} are stored. Write it to a key, and return the key",
            size=len(encoded),
        )
    return encoded
