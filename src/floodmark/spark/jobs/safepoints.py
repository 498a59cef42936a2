"""Safe points of jobs, which keep the versions that a job reads.

A safe point outlives its process, so that a killed job finds its data when it is run again.  It has a
lifetime, so that a job that never runs again does not fill the site's disk.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Final

from floodmark.model.errors import FloodmarkError, SafePointNotFound
from floodmark.model.version import Version
from floodmark.site.site import Site

LIFETIME: Final = timedelta(hours=24)
RENEWAL: Final = timedelta(minutes=10)


@contextmanager
def holding(site: Site, name: str, version: Version, namespace: str) -> Iterator[None]:
    """Hold a version of a namespace, and renew that until the block ends.  It stays held after the block."""
    host = site.host
    host.retention.hold_safe_point(name, version, LIFETIME, namespace)
    ended = Event()

    def renew() -> None:
        while not ended.wait(RENEWAL.total_seconds()):
            # A failed renewal is harmless: the lifetime is many renewals long.
            with suppress(FloodmarkError):
                host.retention.hold_safe_point(name, version, LIFETIME, namespace)

    renewer = Thread(target=renew, name="floodmark-safe-point", daemon=True)
    renewer.start()
    try:
        yield
    finally:
        ended.set()
        renewer.join()


def release(site: Site, name: str) -> None:
    """Release a safe point, if it exists."""
    with suppress(SafePointNotFound):
        site.host.retention.release_safe_point(name)
