"""The state that a site stores for replication: the topology, and the positions of the links that end here.

A *link* is one direction, from a source site to a target site.  It forwards the changes that were first
written at the source, in commit order, step by step.  The target stores the link's position (`links.py`), so
the process that drives a link, with the room `links`, stores nothing.
"""
