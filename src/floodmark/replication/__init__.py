"""Copying changes between sites: the topology, and the steps in which a link goes.

A *link* is one direction, from a source site to a target site.  It forwards what was first written at the
source, in commit order, step by step: a step is planned (`planning.py`), read (`reading.py`), applied
(`applying.py`), and then the target takes note of how far it is (`links.py`).  The position is kept at the
target, so whoever drives a link keeps nothing: Spark, a test or a simulation run the same code.
"""
