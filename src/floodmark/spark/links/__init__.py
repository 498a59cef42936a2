"""The links of a topology, driven by Spark."""
