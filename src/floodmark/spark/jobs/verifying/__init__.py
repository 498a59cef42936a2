"""Comparing sites on Spark, and repairing the keys that differ."""
