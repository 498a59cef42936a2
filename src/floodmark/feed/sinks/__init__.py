"""Sinks: the targets of feeds, each found by the scheme of its URI."""
