"""The families of a node's engine, and the keys of its small metadata rows."""

from typing import Final

from floodmark.log import FAMILY

DATA: Final = "data"
LOG: Final = "log"
META: Final = "meta"
LEDGER: Final = FAMILY

FAMILIES: Final = (DATA, LOG, META, LEDGER)
# The families that readers of records and changes need; every format has them.
READ_FAMILIES: Final = (DATA, LOG, META)

# The first two groups of a record's key: namespace and the first twelve bytes of the user's key.
FILTERED_BYTES: Final = {DATA: 18}

IDENTITY: Final = b"identity"
# The format of the data, in a database: there is no directory that holds it.
STORED_FORMAT: Final = b"format"
CLOCK_BOUND: Final = b"clock/bound"
LOG_TRIMMED: Final = b"log/trimmed"
LOGS: Final = b"logs/"
PARTITIONS: Final = b"partitions/"
NEXT_ID: Final = b"next-id"
COLLECTED: Final = b"collected/"
HORIZON: Final = b"horizon/"
LOADED: Final = b"loaded/"
EXPIRING: Final = b"expiring/"
# The namespaces and the site's part in replication: each change of them raises the epoch.
CATALOG: Final = b"namespaces/"
TOPOLOGY: Final = b"topology"
INCARNATION: Final = b"incarnation"
CATALOG_EPOCH: Final = b"catalog/epoch"
# Of nodes on a shared engine (`fencing.py`).
FENCE: Final = b"fence/"
CEILING: Final = b"ceiling/"
BEAT: Final = b"beat/"
# The incarnation of a node that gives its partitions away; written by the keeper.
DRAINED: Final = b"drained/"
KEEPER: Final = b"keeper"
# The token by which nodes authenticate to each other.
NODES_SECRET: Final = b"nodes/secret"
# Whether all records that expire are in the index.
EXPIRING_INDEXED: Final = b"expiring-indexed"
