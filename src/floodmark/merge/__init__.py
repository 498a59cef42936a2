"""Merge policies: pure functions that say what a site makes of two records of a key."""
