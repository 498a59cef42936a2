"""Garbage collection, and how far back a node remembers."""
