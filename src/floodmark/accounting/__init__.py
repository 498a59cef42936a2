"""Counts and digests of changes, which every reader compares with the heartbeats of a namespace."""
