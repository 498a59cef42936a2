"""The format of a site's directory.

The format says which rows may stand in the database.  A row of a later format looks like damage to a
Floodmark that knows only earlier ones, so a directory says first that it may hold such rows:

1    records with one stamp each; heartbeats of fixed width (kind 2)
2    records that are merged (flag HAS_STAMPS), heartbeats of kind 3, topologies and links
3    subscriptions whose last changes stand in rows of their own, which earlier releases would pass over
4    records of atomic batches (flag IN_BATCH)
5    namespaces whose records stand under the id of a generation that was published
"""

from typing import Final

FORMAT: Final = 5
