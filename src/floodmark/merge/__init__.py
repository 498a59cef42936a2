"""Merge policies: pure functions that make one record of two records of a key."""
