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
# What a transaction writes, what it reads and writes, and how long after its first read it may commit.
TRANSACTION_BYTES_MAX: Final = 10 * MIB
TRANSACTION_KEYS_MAX: Final = 100_000
TRANSACTION_AGE_MS_MAX: Final = 5_000
# Keys and ranges that one transaction declares as written, and that a node keeps of the last seconds.
WRITE_CONFLICTS_MAX: Final = 1_000
WRITE_CONFLICTS_HELD_MAX: Final = 100_000
# The key under which a transaction is committed once, the result that is kept with it, and for how long.
IDEMPOTENCY_KEY_BYTES_MAX: Final = 512
IDEMPOTENCY_RESULT_BYTES_MAX: Final = 64 * KIB
IDEMPOTENCY_AGE_MAX: Final = timedelta(days=1)
# Writes that a server has taken and not committed, and transactions that wait to begin meanwhile.
WRITES_QUEUED_MAX: Final = 10_000
READ_VERSIONS_DELAYED_MAX: Final = 1_000
# Keys that a site object watches for changes.
WATCHES_MAX: Final = 10_000

# Keys of one atomic read, and their bytes, which stand twice in a request.
ATOMIC_READ_KEYS_MAX: Final = 1_000
ATOMIC_READ_BYTES_MAX: Final = 512 * KIB
# Keys of the last atomic batches, in memory, for atomic reads.
BATCH_CACHE_BYTES_MAX: Final = 4 * MIB

# A record that is merged field by field; fields that were deleted count, for they are remembered.
FIELDS_MAX: Final = 4_096
FIELD_NAME_BYTES_MAX: Final = 1 * KIB
# What one site has added to a counter, in either direction.
COUNTER_TOTAL_MAX: Final = (1 << 63) - 1

NAMESPACES_MAX: Final = 1 << 24
NAMESPACE_NAME_CHARACTERS_MAX: Final = 128
PARTITIONS_MAX: Final = 10_000
SITE_IDS_MAX: Final = 255
NODES_MAX: Final = 64
# The age of a node's last beat at which it stops to read the newest state, and at which others replace it.
NODE_LEASE_MS_MAX: Final = 3_000
NODE_SILENT_MS_MAX: Final = 5_000
NODE_SKEW_MS_MAX: Final = 500
SAFE_POINTS_MAX: Final = 10_000
# What one caller of a server that does not administer the site may have of them.
SAFE_POINTS_PER_CALLER_MAX: Final = 1_000

FEEDS_MAX: Final = 1_000
FEED_RANGES_MAX: Final = 64
SUBSCRIPTIONS_MAX: Final = 1_000
UNACKED_MAX: Final = 30_000

# Streams from outside, such as Spark's: how many, which of their epochs, and for how long.
EPOCH_STREAMS_MAX: Final = 10_000
EPOCH_STREAMS_PER_CALLER_MAX: Final = 5_000
EPOCHS_REMEMBERED_MAX: Final = 16
EPOCH_STREAM_IDLE_MAX: Final = timedelta(days=30)

# Keys that one call of a comparison looks up or repairs.
RECORDS_FOUND_MAX: Final = 10_000

# A record of a transaction log, and what one entry may be set to hold.
LEDGER_RECORD_BYTES_MAX: Final = 16 * MIB
LEDGER_ENTRY_RECORDS_MAX: Final = 16_384
# What one call shows of such a log.
LEDGER_RECORDS_READ_MAX: Final = 100_000
# What may be set to be on its way to such a log before others wait.
LEDGER_IN_FLIGHT_BYTES_MAX: Final = 1_024 * MIB
# Transactions of one coordinator that have not ended, and what may have a part in one of them.
COORDINATORS_MAX: Final = 16
TRANSACTIONS_OPEN_MAX: Final = 100_000
TRANSACTIONS_OF_CALLER_MAX: Final = 10_000
TRANSACTION_PARTICIPANTS_MAX: Final = 64
PREPARED_WRITES_MAX: Final = 10_000
PREPARED_BYTES_MAX: Final = 256 * MIB
BATCH_PARTITIONS_MAX: Final = 1_000
BATCH_AGE_MS_MAX: Final = 60_000

# Earlier generations of a namespace that stay for a rollback.
GENERATIONS_KEPT_MAX: Final = 8

STREAMS_MAX: Final = 1_000
STREAMS_PER_CALLER_MAX: Final = 500
# Connections of a client to one server for point calls: one for each thread that calls at once.
LINES_MAX: Final = 64
# Threads of an asyncio client for calls that cannot run on its event loop.
ASYNC_THREADS_MAX: Final = 16
# Versions that clients keep from garbage collection while they read.
LEASES_MAX: Final = 10_000
LEASES_PER_CALLER_MAX: Final = 2_500
REQUEST_BYTES_MAX: Final = 1 * MIB
# What a server decodes on its event loop; larger calls run in threads.
QUICK_CALL_BYTES_MAX: Final = 64 * KIB
# What is kept of a text that a runner, a replication job or a client reports; the rest is cut off.
REPORTED_CHARACTERS_MAX: Final = 2_000

# Connections to a server that has a relay in front, before one of their requests has shown who sends it.
NEWCOMERS_MAX: Final = 256
NEWCOMER_BYTES_MAX: Final = 256 * KIB
NEWCOMER_TIME_MAX: Final = timedelta(seconds=10)

# Connections over RESP, those of them whose client is not known yet, and what each may send and not read.
RESP_CONNECTIONS_MAX: Final = 10_000
RESP_ARGUMENTS_MAX: Final = 100_000
RESP_NEWCOMER_ARGUMENTS_MAX: Final = 16
RESP_NEWCOMER_BULK_BYTES_MAX: Final = 16 * KIB
RESP_UNREAD_BYTES_MAX: Final = 1 * MIB
# Scans over RESP that have not come to their end, and readers within what a data set brings; the oldest is
# forgotten.
RESP_CURSORS_MAX: Final = 10_000
# Consumer groups over RESP that one server consumes.
RESP_GROUPS_MAX: Final = 100

TTL_MAX: Final = timedelta(days=36_500)

# What a relay reads of a message before it passes it on.  Flight's messages have a handful of fields; many
# small ones would keep the relay busy.
MESSAGE_FIELDS_MAX: Final = 64
COLUMN_HEADER_BYTES_MAX: Final = 64 * KIB

# One commit tells of so many expiries, so that writers wait for it some milliseconds.
EXPIRIES_PER_COMMIT_MAX: Final = 256

# A change-log row holds values up to this size; larger ones are read from the data they name.
LOG_INLINE_VALUE_BYTES_MAX: Final = 4 * KIB
# A commit whose change-log entry is larger is cut into several rows of about this size.
LOG_ROW_BYTES_MAX: Final = 1 * MIB

# A scan holds at most one page in memory.
PAGE_ROWS_MAX: Final = 1_000
PAGE_BYTES_MAX: Final = 4 * MIB

# The last commits in memory, for followers.
TAIL_BYTES_MAX: Final = 16 * MIB
# What a reader sorts in memory when it has to scan; the rest goes to disk.
SORT_BYTES_MAX: Final = 64 * MIB
# What the runner of a feed has read and its sink has not taken yet, for each range.
FEED_BUFFER_BYTES_MAX: Final = 32 * MIB
