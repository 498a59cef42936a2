"""The links between sites: one driver for all links of a topology, and the runner of this process.

`driver.py` puts the topology in force, lets a *runner* take steps, and reports.  A runner decides where steps
are taken: `process.py` takes them in threads of this process, `spark/links/` in the tasks of a Spark query.
Both plan with `planning.py`, and read and apply with the room `replication`.
"""
