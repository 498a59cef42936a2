"""Plain copies: many records of other sites, looked at all at once.

Most of what a site takes in is alike: records of one namespace with their origins, and with neither an
expiry, a tombstone nor stamps.

    | user value | origin version 8 | origin site 1 | HAS_ORIGIN |

Then keys and records are each put into one piece, and what a commit has to know of them, the highest stamp,
the sum of their digests and their rows in the change log, is made from the two pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy

from floodmark.codec.changelog import encode_columns
from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.codec.origins import digest_records
from floodmark.codec.stamps import STAMP_BYTES
from floodmark.codec.values import HAS_ORIGIN
from floodmark.columns.packed import Packed, pack, window
from floodmark.model.limits import LOG_INLINE_VALUE_BYTES_MAX
from floodmark.model.version import Version

_FLAGS_BYTES: Final = 1
_VERSION: Final = numpy.dtype(">u8")
# From so many records on, it is quicker to look at them all at once.
_MANY: Final = 64


@dataclass(frozen=True, slots=True)
class Copies:
    """Plain copies of one namespace, none of which was first written at this site."""

    keys: Packed
    records: Packed
    # The highest version among their origins.
    latest: Version

    def digest(self) -> int:
        """The XOR of the digests of all changes."""
        digests = digest_records(self.keys.to_arrow(), self.records.to_arrow(), key_start=NAMESPACE_BYTES)
        return int(numpy.bitwise_xor.reduce(digests))

    def encode_rows(self) -> list[bytes]:
        """Their rows in the change log: `encode_commit`."""
        return encode_columns(self.keys, self.records)


def gather_copies(keys: Sequence[bytes], records: Sequence[bytes], site: int) -> Copies | None:
    """Records under qualified keys, which stand in order, if they are many and plain copies; None if not."""
    if len(keys) < _MANY or not keys[-1].startswith(keys[0][:NAMESPACE_BYTES]):
        return None
    packed = pack(records)
    lengths = packed.lengths
    if lengths.min() < STAMP_BYTES + _FLAGS_BYTES or lengths.max() > LOG_INLINE_VALUE_BYTES_MAX:
        return None
    data, ends = numpy.frombuffer(packed.data, numpy.uint8), packed.borders[1:]
    flags, sites = data[ends - _FLAGS_BYTES], data[ends - _FLAGS_BYTES - 1]
    if (flags != HAS_ORIGIN).any() or (sites == site).any():
        return None
    versions = window(data, _VERSION)[ends - _FLAGS_BYTES - STAMP_BYTES]
    return Copies(pack(keys), packed, int(versions.max()))
