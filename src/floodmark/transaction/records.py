"""The four kinds of records in a coordinator's log, each about one transaction.

They are messagepack arrays, `[kind, transaction, ...]`, so that none begins with the magic of a batched
entry (`codec/entries.py`).  There is no record of the end: when all participants have confirmed, the records
of the transaction are acknowledged.  If a crash brings them back, the transaction is ended once more.
"""

from typing import Final, TypeAlias

import msgspec

from floodmark.log import RecordFormat
from floodmark.model.transaction import Participant
from floodmark.model.version import Version


class Begun(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A transaction is open until its deadline, in unix milliseconds."""

    transaction: str
    deadline_ms: int
    timeout_ms: int


class Joined(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A participant has joined."""

    transaction: str
    participant: Participant


class Committing(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The transaction is committed at a version; its participants may not have confirmed."""

    transaction: str
    version: Version


class Aborting(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The transaction is aborted for a reason; its participants may not have confirmed."""

    transaction: str
    reason: str


Record: TypeAlias = Begun | Joined | Committing | Aborting

_FORMAT: Final = RecordFormat[Record](Record, "a coordinator's log")
encode_record, decode_record = _FORMAT.encode, _FORMAT.decode
