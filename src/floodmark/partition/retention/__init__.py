"""Garbage collection, and how far back the history of a node reaches."""
