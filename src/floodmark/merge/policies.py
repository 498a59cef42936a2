"""The merge policies of namespaces, by name.

`last_write` keeps the record with the highest stamp: a version, and a site id that breaks ties.  The others
join states (`states.py`).
"""

from typing import Final, Literal, TypeAlias

LAST_WRITE: Final = "last_write"
FIELDS: Final = "fields"
COUNTER: Final = "counter"

MergePolicy: TypeAlias = Literal["last_write", "fields", "counter"]

POLICIES: Final = (COUNTER, FIELDS, LAST_WRITE)
