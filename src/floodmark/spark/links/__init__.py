"""The links of a topology on Spark."""
