"""The id of an atomic batch over several nodes, until the batch has a commit version.

    "b-" | milliseconds since 1970, 11 hexadecimal digits | "-" | random, 16 hexadecimal digits

The id stands where the id of a transaction stands.  It names one attempt: a writer whose batch was refused,
or whose partitions have moved, tries again with another id.
"""

import re
from typing import Final
from uuid import uuid4

BATCH_ID_CHARACTERS: Final = 30
_FORM: Final = re.compile("b-([0-9a-f]{11})-[0-9a-f]{16}")


def mint_batch(now_ms: int) -> str:
    """A new id.

    >>> is_batch(mint_batch(1_700_000_000_000)), is_batch("0-7")
    (True, False)
    """
    return f"{batches_from(now_ms)}-{uuid4().hex[:16]}"


def batches_from(ms: int) -> str:
    """What the ids begin with that were minted at a time; ids sort by their time.

    >>> batches_from(1_700_000_000_000) <= mint_batch(1_700_000_000_000) < batches_from(1_700_000_000_001)
    True
    """
    return f"b-{max(0, ms):011x}"


def is_batch(transaction: str) -> bool:
    """Whether an id is that of a batch, and not of a transaction."""
    return _FORM.fullmatch(transaction) is not None


def batch_age_ms(batch: str, now_ms: int) -> int:
    """How long ago the id of a batch was minted.

    >>> batch_age_ms("b-0000000000a-0123456789abcdef", 30)
    20
    """
    return now_ms - int(batch[2:13], 16)
