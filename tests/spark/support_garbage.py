"""Garbage collection that a test can count on."""

from tests.waiting import wait_until

from floodmark.model.version import physical_ms
from floodmark.site import Site


def collect_old(site: Site) -> None:
    """Collect whatever was written before, also with a retention of a millisecond.

    What was written in this very millisecond is not old yet.
    """
    written_ms = physical_ms(site.now())
    wait_until(lambda: physical_ms(site.now()) > written_ms + 1, "the clock stands still")
    site.collect_garbage()
