"""Every limit of a site, in one place.  `docs/limits.md` is checked against this file.

A call that would exceed a limit is refused with an error before anything is written, never in the middle of a
commit.
"""

from datetime import timedelta
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

KEY_BYTES_MAX: Final = 4 * KIB
VALUE_BYTES_MAX: Final = 1 * MIB
COMMIT_BYTES_MAX: Final = 64 * MIB
# Bytes that a transaction writes, keys that it reads and writes, and the time from first read to commit.
TRANSACTION_BYTES_MAX: Final = 10 * MIB
TRANSACTION_KEYS_MAX: Final = 100_000
TRANSACTION_AGE_MS_MAX: Final = 5_000
# Keys and ranges that one transaction declares as written, and that a node keeps for some seconds.
WRITE_CONFLICTS_MAX: Final = 1_000
WRITE_CONFLICTS_HELD_MAX: Final = 100_000
# The key under which a transaction is committed once, the result stored with it, and for how long.
IDEMPOTENCY_KEY_BYTES_MAX: Final = 512
IDEMPOTENCY_RESULT_BYTES_MAX: Final = 64 * KIB
IDEMPOTENCY_AGE_MAX: Final = timedelta(days=1)
# Writes that a server has accepted and not committed yet, and transactions that wait to begin meanwhile.
WRITES_QUEUED_MAX: Final = 10_000
READ_VERSIONS_DELAYED_MAX: Final = 1_000
# Keys that a site object watches for changes.
WATCHES_MAX: Final = 10_000

# Keys of one atomic read, and their bytes, which a request contains twice.
ATOMIC_READ_KEYS_MAX: Final = 1_000
ATOMIC_READ_BYTES_MAX: Final = 512 * KIB
# Keys of the last atomic batches, in memory, for atomic reads.
BATCH_CACHE_BYTES_MAX: Final = 4 * MIB

# The fields of a merged record, including deleted ones, which it remembers.
FIELDS_MAX: Final = 4_096
FIELD_NAME_BYTES_MAX: Final = 1 * KIB
# The total that one site has added to a counter, above or below zero.
COUNTER_TOTAL_MAX: Final = (1 << 63) - 1

NAMESPACES_MAX: Final = 1 << 24
NAMESPACE_NAME_CHARACTERS_MAX: Final = 128
PARTITIONS_MAX: Final = 10_000
SITE_IDS_MAX: Final = 255
NODES_MAX: Final = 64
# The age of a node's last beat at which it stops answering reads, and at which others replace it.
NODE_LEASE_MS_MAX: Final = 3_000
NODE_SILENT_MS_MAX: Final = 5_000
NODE_SKEW_MS_MAX: Final = 500
SAFE_POINTS_MAX: Final = 10_000
# Safe points of one caller of a server that does not administer the site.
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

# The bytes of a record of a transaction log, and the highest setting of records in one entry.
LEDGER_RECORD_BYTES_MAX: Final = 16 * MIB
LEDGER_ENTRY_RECORDS_MAX: Final = 16_384
# Records of such a log that one call shows.
LEDGER_RECORDS_READ_MAX: Final = 100_000
# The highest setting of bytes in flight to such a log, beyond which callers wait.
LEDGER_IN_FLIGHT_BYTES_MAX: Final = 1_024 * MIB
# Coordinators, their transactions that have not ended, and the participants of one transaction.
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
# Connections of a client to one server for point calls: one for each thread with a call in progress.
LINES_MAX: Final = 64
# Threads of an asyncio client for calls that cannot run on its event loop.
ASYNC_THREADS_MAX: Final = 16
# Versions that clients keep from garbage collection while they read.
LEASES_MAX: Final = 10_000
LEASES_PER_CALLER_MAX: Final = 2_500
REQUEST_BYTES_MAX: Final = 1 * MIB
# The largest call that a server decodes on its event loop; larger ones run in threads.
QUICK_CALL_BYTES_MAX: Final = 64 * KIB
# The characters stored of a text that a runner, a replication job or a client reports; the rest is cut off.
REPORTED_CHARACTERS_MAX: Final = 2_000

# Connections to a server behind a relay, before one of their requests has authenticated its sender.
NEWCOMERS_MAX: Final = 256
NEWCOMER_BYTES_MAX: Final = 256 * KIB
NEWCOMER_TIME_MAX: Final = timedelta(seconds=10)

# Connections over RESP, the limits of clients not authenticated yet, and replies that a client leaves unread.
RESP_CONNECTIONS_MAX: Final = 10_000
RESP_ARGUMENTS_MAX: Final = 100_000
RESP_NEWCOMER_ARGUMENTS_MAX: Final = 16
RESP_NEWCOMER_BULK_BYTES_MAX: Final = 16 * KIB
RESP_UNREAD_BYTES_MAX: Final = 1 * MIB
# Scans over RESP that have not ended, and readers within the changes of a data set; the oldest is dropped.
RESP_CURSORS_MAX: Final = 10_000
# Consumer groups over RESP that one server consumes.
RESP_GROUPS_MAX: Final = 100

TTL_MAX: Final = timedelta(days=36_500)

# The parts of a message that a relay reads before it forwards it.  Flight's messages have a few fields; many
# small ones would keep the relay busy.
MESSAGE_FIELDS_MAX: Final = 64
COLUMN_HEADER_BYTES_MAX: Final = 64 * KIB

# The expiries that one commit writes: so many that other writers wait for it only some milliseconds.
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
# The changes that a scanning reader sorts in memory; the rest goes to disk.
SORT_BYTES_MAX: Final = 64 * MIB
# The changes that the runner of a feed has read and its sink has not taken yet, for each range.
FEED_BUFFER_BYTES_MAX: Final = 32 * MIB
