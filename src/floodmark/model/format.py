"""The format of a site's directory.

The format determines which rows the database may hold.  A row of a later format looks like damage to a
Floodmark that knows only earlier ones, so the format of a directory is raised before such rows are written:

1    records with one stamp each; heartbeats of fixed width (kind 2)
2    records that are merged (flag HAS_STAMPS), heartbeats of kind 3, topologies and links
3    subscriptions whose last changes are in rows of their own, which earlier releases would ignore
4    records of atomic batches (flag IN_BATCH)
5    namespaces whose records are stored under the id of a published generation
"""

from typing import Final

FORMAT: Final = 5
