"""Safe points of jobs: what a job reads stays, for as long as the job runs and not much longer.

A safe point outlives the process that holds it, so that a job that was killed finds its data when it is run
again; and it has a lifetime, so that one that never comes back does not fill the site's disk.
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
    """Keep a version of a namespace, and renew that until the block ends.  It holds on after the block."""
    host = site.host
    host.retention.hold_safe_point(name, version, LIFETIME, namespace)
    ended = Event()

    def renew() -> None:
        while not ended.wait(RENEWAL.total_seconds()):
            # A site that cannot be reached now is asked again: the lifetime is many renewals long.
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
    """Let go of a safe point, if it still holds."""
    with suppress(SafePointNotFound):
        site.host.retention.release_safe_point(name)
