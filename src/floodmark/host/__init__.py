"""The host of a site: its catalog, its upkeep and its links, in this process or behind a server."""
