"""The four kinds of records in a coordinator's log, each about one transaction.

They are messagepack arrays, `[kind, transaction, ...]`, so that none begins with the magic of a batched
entry (`codec/entries.py`).  There is no record of the end: when all participants have confirmed, the records
of the transaction are acknowledged.  A crash may bring them back, and then the transaction ends once more.
"""

from typing import TypeAlias

import msgspec

from floodmark.model.errors import Corruption
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
    """The transaction is committed at a version; participants have to be told."""

    transaction: str
    version: Version


class Aborting(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The transaction is aborted for a reason; participants have to be told."""

    transaction: str
    reason: str


Record: TypeAlias = Begun | Joined | Committing | Aborting

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """Encode a record for the log.

    >>> decode_record(encode_record(Committing("0-7", 9)))
    Committing(transaction='0-7', version=9)
    """
    return _encoder.encode(record)


def decode_record(stored: bytes) -> Record:
    """Undo `encode_record`."""
    try:
        return _decoder.decode(stored)
    except msgspec.MsgspecError as error:
        raise Corruption(
            f"a record of a coordinator's log cannot be read ({error}); restore the site from a backup"
        ) from error
