"""From keys to the partitions that serve them, in this process or behind a server."""

from floodmark.routing.router import Router, partly_done

__all__ = ["Router", "partly_done"]
