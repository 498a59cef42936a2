"""Counts and digests of changes, which every reader holds against the heartbeats of a namespace."""
