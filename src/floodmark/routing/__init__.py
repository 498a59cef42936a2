"""Routes calls by key to the partitions that serve them, in this process or at a server."""

from floodmark.routing.batches import BatchWriter
from floodmark.routing.calls import CallPool
from floodmark.routing.router import Router, partly_done

__all__ = ["BatchWriter", "CallPool", "Router", "partly_done"]
