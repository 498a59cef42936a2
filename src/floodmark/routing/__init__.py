"""From keys to the partitions that serve them, in this process or behind a server."""

from floodmark.routing.router import ROUTES_MAX, Router, partly_done

__all__ = ["ROUTES_MAX", "Router", "partly_done"]
