"""Fixtures for the tests of a node: the same site on an engine in memory as in tests/site."""

from tests.site.conftest import engine, site, time, users

__all__ = ["engine", "site", "time", "users"]
