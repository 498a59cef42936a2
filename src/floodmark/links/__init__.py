"""Moves changes between sites: the steps of links, and the driver that takes them for a whole topology.

A step is planned (`steps.py`), read (`reading.py`), applied (`applying.py`), and noted by the target.  The
driver (`driver.py`) puts the topology in force and starts a *runner*, which takes the steps: in threads of
this process (`process.py`), or in the tasks of a Spark query (`spark/links.py`).  For sites that join from a
backup, return or are removed, records are exchanged instead (`exchange.py`, `returning.py`, `removing.py`).
"""
