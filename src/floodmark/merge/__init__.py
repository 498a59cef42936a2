"""Merge policies: pure functions that say what a site makes of two records of a key."""

from floodmark.merge.last_write import Stamped, last_write
from floodmark.merge.policies import POLICIES, MergePolicy, join_records
from floodmark.merge.states import (
    Written,
    add_to_counter,
    delete_fields,
    delete_record,
    live_value,
    merge_states,
    newest_stamp,
    put_fields,
    stamp_state,
    stamps_of,
    update_fields,
    write_state,
)

__all__ = [
    "POLICIES",
    "MergePolicy",
    "Stamped",
    "Written",
    "add_to_counter",
    "delete_fields",
    "delete_record",
    "join_records",
    "last_write",
    "live_value",
    "merge_states",
    "newest_stamp",
    "put_fields",
    "stamp_state",
    "stamps_of",
    "update_fields",
    "write_state",
]
