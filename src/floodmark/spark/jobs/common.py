"""Parts that all jobs use: safe points that keep the versions a job reads, and the rows of a site.

A safe point outlives its process, so that a killed job finds its data when it is run again.  It has a
lifetime, so that a job that never runs again does not fill the site's disk.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from floodmark.accounting.counting import Counted, count_idle
from floodmark.codec.ordered import qualify_range
from floodmark.host.ports import Host
from floodmark.model.errors import FloodmarkError, SafePointNotFound
from floodmark.model.stream import ChangesRequest, OnGeneration
from floodmark.model.version import Version
from floodmark.site.address import SiteAddress
from floodmark.site.site import Site
from floodmark.spark.source.source import FORMAT

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


def read_site(
    spark: SparkSession,
    address: SiteAddress,
    namespace: str,
    options: Mapping[str, str],
    columns: StructType | None = None,
) -> DataFrame:
    """Rows of a namespace; without `columns`, with the default ones."""
    reader = spark.read.format(FORMAT).options(**address.options(), namespace=namespace, **options)
    return (reader if columns is None else reader.schema(columns)).load(address.location)


def changes_between(since: Version, through: Version) -> dict[str, str]:
    """The options to read the changes in `(since, through]`, with what data sets have changed."""
    return {
        "readChangeFeed": "true",
        "startingVersion": str(since + 1),
        "endingVersion": str(through),
        "onGeneration": OnGeneration.DIFFERENCE.value,
    }


def pass_heartbeats(host: Host, namespace: int, since: Version, through: Version) -> Counted:
    """Count the heartbeats of an interval in which nothing is delivered."""
    request = ChangesRequest(
        keys=qualify_range(namespace),
        namespace=namespace,
        since=since,
        until=through,
        heartbeats=True,
    )
    site_id = host.identity.site_id
    return count_idle(host.changes(request), since, through, site_id=site_id, namespace=namespace)
