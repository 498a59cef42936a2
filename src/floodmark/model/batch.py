"""The id of an atomic batch over several nodes, or of a commit whose answer may get lost.

    "b-" | milliseconds since 1970, 11 hexadecimal digits | "-" | random, 16 hexadecimal digits

The id is used in the place of a transaction's id.  It names one attempt: a writer whose batch was refused, or
whose partitions have moved, tries again with another id.

A client gets the id of a commit together with the first qualified key that the commit writes, in hexadecimal
after another "-".  The partition of that key knows the outcome (`partition/prepared/outcomes.py`).
"""

import re
from secrets import token_hex
from typing import Final

from floodmark.model.errors import InvalidArgument

BATCH_ID_CHARACTERS: Final = 30
_FORM: Final = re.compile("b-([0-9a-f]{11})-[0-9a-f]{16}")
_NAMED: Final = re.compile(f"({_FORM.pattern})-((?:[0-9a-f]{{2}})+)")


def mint_batch(now_ms: int) -> str:
    """A new id.

    >>> is_batch(mint_batch(1_700_000_000_000)), is_batch("0-7")
    (True, False)
    """
    return f"{batches_from(now_ms)}-{token_hex(8)}"


def batches_from(ms: int) -> str:
    """The prefix of the ids that are minted at a time; ids sort by their time.

    >>> batches_from(1_700_000_000_000) <= mint_batch(1_700_000_000_000) < batches_from(1_700_000_000_001)
    True
    """
    return f"b-{max(0, ms):011x}"


def is_batch(transaction: str) -> bool:
    """Whether an id is that of a batch, and not of a transaction."""
    return _FORM.fullmatch(transaction) is not None


def require_batch(transaction: str) -> None:
    """Raise InvalidArgument for an id of another form."""
    if not is_batch(transaction):
        raise InvalidArgument(f"{transaction!r:.80} is not the id of a batch or commit")


def batch_age_ms(batch: str, now_ms: int) -> int:
    """How long ago the id of a batch was minted.

    >>> batch_age_ms("b-0000000000a-0123456789abcdef", 30)
    20
    """
    return now_ms - int(batch[2:13], 16)


def name_commit(batch: str, key: bytes) -> str:
    """The id of a commit for its client, with the first key that it writes.

    >>> split_commit(name_commit("b-0000000000a-0123456789abcdef", b"ada"))
    ('b-0000000000a-0123456789abcdef', b'ada')
    """
    return f"{batch}-{key.hex()}"


def split_commit(transaction: str) -> tuple[str, bytes] | None:
    """The batch id and the key of a commit's id; None for the id of a transaction with a coordinator."""
    found = _NAMED.fullmatch(transaction)
    return None if found is None else (found[1], bytes.fromhex(found[3]))
