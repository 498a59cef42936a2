"""Streams of changes: catch-up from the log or by a scan, the live tail, snapshots."""
