"""The merge policies by the name that a namespace's settings give."""

from collections.abc import Callable, Mapping
from typing import Final

from floodmark.codec.states import decode_state
from floodmark.codec.values import decode_value, encode_value
from floodmark.merge.last_write import Stamped, last_write
from floodmark.merge.states import merge_states, newest_stamp
from floodmark.model.record import Record

# How the writes of several sites to one key become one, by the name that a namespace's settings give.
LAST_WRITE: Final = "last_write"
FIELDS: Final = "fields"
COUNTER: Final = "counter"

MergePolicy = Callable[[Stamped | None, Stamped], Stamped]


def join_records(current: Stamped | None, incoming: Stamped) -> Stamped:
    """The join of two records with stamps inside (`states.py`); its own stamp is the newest of them."""
    joined = merge_states(None if current is None else _encode(current.record), _encode(incoming.record))
    return Stamped(decode_value(joined), newest_stamp(decode_state(joined)))


def _encode(record: Record) -> bytes:
    return encode_value(record.value, record.expires_at, record.deleted, stamps=record.stamps)


# A record with stamps says by itself whether it has fields or counts.
POLICIES: Final[Mapping[str, MergePolicy]] = {
    LAST_WRITE: last_write,
    FIELDS: join_records,
    COUNTER: join_records,
}
