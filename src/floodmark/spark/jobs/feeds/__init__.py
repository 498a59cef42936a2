"""Named feeds run by Spark."""
