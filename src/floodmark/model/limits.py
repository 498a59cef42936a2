"""Every limit of a site, in one place.  `docs/limits.md` is checked against this file.

A limit is refused with an error before anything is written; none of them is reached by surprise in
the middle of a commit.
"""

from datetime import timedelta
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

KEY_BYTES_MAX: Final = 4 * KIB
VALUE_BYTES_MAX: Final = 1 * MIB
COMMIT_BYTES_MAX: Final = 64 * MIB
NAMESPACES_MAX: Final = 1 << 24
NAMESPACE_NAME_CHARACTERS_MAX: Final = 128
PARTITIONS_MAX: Final = 10_000
SITE_IDS_MAX: Final = 255
NODES_MAX: Final = 64
SAFE_POINTS_MAX: Final = 10_000

TTL_MAX: Final = timedelta(days=36_500)

# A change-log row holds values up to this size; larger ones are read from the data they name.
LOG_INLINE_VALUE_BYTES_MAX: Final = 4 * KIB
# A commit whose change-log entry is larger is cut into several rows of about this size.
LOG_ROW_BYTES_MAX: Final = 1 * MIB

# A scan holds at most one page in memory.
PAGE_ROWS_MAX: Final = 1_000
PAGE_BYTES_MAX: Final = 4 * MIB
