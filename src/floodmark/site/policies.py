"""Encodes writes by the merge policy of a namespace, and refuses those that it does not allow.

Values of `last_write` are whole records; the others are unstamped states, merged into the record by the
commit (`codec/states.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from floodmark.codec.states import (
    CounterEntry,
    CounterState,
    FieldsState,
    decode_state,
    encode_state,
    live_value,
)
from floodmark.codec.values import PLAIN, TOMBSTONE, encode_value
from floodmark.merge.counter import add_to_counter
from floodmark.merge.fields import delete_fields, put_fields, update_fields
from floodmark.merge.policies import COUNTER, FIELDS
from floodmark.merge.states import delete_record, write_state
from floodmark.model.errors import InvalidValue, LimitExceeded, WrongPolicy
from floodmark.model.limits import COUNTER_TOTAL_MAX, VALUE_BYTES_MAX
from floodmark.site.arguments import refuse_value

# A JSON object: its text, or a mapping that can be encoded as JSON.
Fields: TypeAlias = bytes | Mapping[str, object]


class LastWrite:
    """The policy "last_write": a record is one value, which each write replaces."""

    # Whether the commit merges writes into the stored record.
    merges: bool = False

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def put(self, key: object, value: Fields, expires_at: int | None) -> bytes:
        """The encoded write that replaces a record."""
        if type(value) is not bytes or len(value) > VALUE_BYTES_MAX:
            raise refuse_value(key, value)
        return value + PLAIN if expires_at is None else encode_value(value, expires_at)

    def delete(self) -> bytes:
        """The encoded write that deletes a record."""
        return TOMBSTONE

    def update(self, key: object, fields: Fields, expires_at: int | None) -> bytes:
        """The encoded write of some fields.  Raises WrongPolicy unless the policy is "fields"."""
        raise self._refuse(
            "update", "its records are values without fields: use put, or a namespace of fields"
        )

    def delete_field(self, key: object, names: Sequence[str]) -> bytes:
        """The encoded write that deletes fields.  Raises WrongPolicy unless the policy is "fields"."""
        raise self._refuse(
            "delete_field", "its records are values without fields: use delete, or a namespace of fields"
        )

    def add(self, key: object, number: int) -> bytes:
        """The encoded addition to a counter.  Raises WrongPolicy unless the policy is "counter"."""
        raise self._refuse(
            "add", "its records are no counters: use compare_and_set, or a namespace of counters"
        )

    def compare(self, key: object, value: Fields | None, expires_at: int | None) -> bytes:
        """The encoded write with which `compare_and_set` replaces the expected value; None deletes."""
        return self.delete() if value is None else self.put(key, value, expires_at)

    def read_back(self, value: bytes | None, stored: bytes) -> bytes | None:
        """The value after a write to a key that held `value`; None stands for an absent key."""
        return live_value(stored, 0)

    def join(self, earlier: bytes, later: bytes) -> bytes | None:
        """One write with the effect of two successive writes to a key; None if there is no such write."""
        return later

    def _refuse(self, operation: str, why: str) -> WrongPolicy:
        return WrongPolicy(
            f"{operation} is not possible in namespace {self._namespace!r}: {why}",
            namespace=self._namespace,
            operation=operation,
        )


class FieldsPolicy(LastWrite):
    """The policy "fields": a record is a JSON object whose fields are written separately."""

    merges = True

    def put(self, key: object, value: Fields, expires_at: int | None) -> bytes:
        return _encode(key, value, lambda fields: put_fields(fields, expires_at))

    def delete(self) -> bytes:
        return _DELETE_FIELDS

    def update(self, key: object, fields: Fields, expires_at: int | None) -> bytes:
        return _encode(key, fields, lambda given: update_fields(given, expires_at))

    def delete_field(self, key: object, names: Sequence[str]) -> bytes:
        if not all(isinstance(name, str) for name in names):
            raise InvalidValue(f"the fields of {key!r:.60} have names of text, not {names!r:.60}", key=key)
        return _named(key, lambda: delete_fields(names))

    def read_back(self, value: bytes | None, stored: bytes) -> bytes | None:
        return _write_on(None if value is None else put_fields(value), stored)

    def add(self, key: object, number: int) -> bytes:
        raise self._refuse(
            "add", "its records have fields, and none of them is a counter: use a namespace of counters"
        )

    def join(self, earlier: bytes, later: bytes) -> bytes | None:
        first, second = decode_state(earlier), decode_state(later)
        assert isinstance(first, FieldsState)
        assert isinstance(second, FieldsState)
        if second.deleted is not None:
            return later
        fields = {field.name: field for field in (*first.fields, *second.fields)}
        if first.deleted is not None:
            fields = {name: field for name, field in fields.items() if field.text is not None}
        return encode_state(FieldsState(first.deleted, tuple(fields[name] for name in sorted(fields))))


class CounterPolicy(LastWrite):
    """The policy "counter": a record is a number, and every write adds to it."""

    merges = True

    def put(self, key: object, value: Fields, expires_at: int | None) -> bytes:
        raise self._refuse(
            "put", "its records are counters: add to them with add, and begin anew with delete"
        )

    def delete(self) -> bytes:
        return _DELETE_COUNTER

    def update(self, key: object, fields: Fields, expires_at: int | None) -> bytes:
        raise self._refuse("update", "its records are counters without fields: add to them with add")

    def delete_field(self, key: object, names: Sequence[str]) -> bytes:
        raise self._refuse("delete_field", "its records are counters without fields: use delete")

    def add(self, key: object, number: int) -> bytes:
        return _named(key, lambda: add_to_counter(number))

    def read_back(self, value: bytes | None, stored: bytes) -> bytes | None:
        return _write_on(None if value is None else add_to_counter(int(value)), stored)

    def compare(self, key: object, value: Fields | None, expires_at: int | None) -> bytes:
        raise self._refuse(
            "compare_and_set", "its records are counters, which cannot be set: add to them with add"
        )

    def join(self, earlier: bytes, later: bytes) -> bytes | None:
        first, second = decode_state(earlier), decode_state(later)
        assert isinstance(first, CounterState)
        assert isinstance(second, CounterState)
        if second.deleted is not None:
            return later
        total = sum(entry.total for entry in (*first.entries, *second.entries))
        # A delete also removes additions at its own version, so the two cannot be one write.
        if first.deleted is not None or abs(total) > COUNTER_TOTAL_MAX:
            return None
        return encode_state(CounterState(None, (CounterEntry(0, 0, total),)))


POLICIES: Final[Mapping[str, type[LastWrite]]] = {
    "last_write": LastWrite,
    FIELDS: FieldsPolicy,
    COUNTER: CounterPolicy,
}

_DELETE_FIELDS: Final = delete_record("fields")
_DELETE_COUNTER: Final = delete_record("counter")


def _write_on(before: bytes | None, stored: bytes) -> bytes | None:
    """The value of a record after the write `before`, if any, and then the write `stored`."""
    standing = None if before is None else write_state(None, before, 1, 1).stored
    return live_value(write_state(standing, stored, 2, 1).stored, 0)


def _encode(key: object, value: Fields, build: Callable[[Fields], bytes]) -> bytes:
    if type(value) is bytes:
        if len(value) > VALUE_BYTES_MAX:
            raise refuse_value(key, value)
    elif not isinstance(value, Mapping):
        raise InvalidValue(
            f"the value of {key!r:.60} must be a JSON object, as bytes or as a mapping, not "
            f"{type(value).__name__}",
            key=key,
        )
    return _named(key, lambda: build(value))


def _named(key: object, build: Callable[[], bytes]) -> bytes:
    """Return `build()`.  Its errors are raised again with the key in message and details."""
    try:
        return build()
    except LimitExceeded as error:
        raise LimitExceeded(f"{key!r:.60} cannot be written so: {error}", key=key) from error
    except (InvalidValue, TypeError, ValueError, RecursionError) as error:
        raise InvalidValue(f"{key!r:.60} cannot be written so: {error}", key=key) from error
