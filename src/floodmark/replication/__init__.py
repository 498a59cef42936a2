"""Copying changes between sites: the topology, and the steps of links.

A *link* is one direction, from a source site to a target site.  It forwards the changes that were first
written at the source, in commit order, step by step: a step is planned (`planning.py`), read (`reading.py`),
applied (`applying.py`), and noted by the target (`links.py`).  The target stores the position, so the process
that drives a link keeps nothing: Spark, a thread, a test and the simulation run the same code.
"""
