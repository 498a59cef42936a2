"""Fixtures for the long tests: the same sites as in tests/site."""

from tests.site.conftest import real_site

__all__ = ["real_site"]
