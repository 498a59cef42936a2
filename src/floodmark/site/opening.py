"""Opening a site in a directory."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Final

from floodmark.clock import HybridClock, TimeSource, system_time_ms
from floodmark.clock.hybrid import SKEW_MS_MAX
from floodmark.engine import Engine
from floodmark.engine.rocks import RECOVERY_ROOM_BYTES, RocksEngine
from floodmark.partition import FAMILIES, FILTERED_BYTES, EngineBound, Node
from floodmark.site.arguments import Durability, check_durability
from floodmark.site.background import Background
from floodmark.site.directory import SiteDirectory, new_identity
from floodmark.site.embedded import EmbeddedHost
from floodmark.site.garbage import GarbageCollection
from floodmark.site.site import Site

COLLECT_EVERY: Final = timedelta(minutes=10)


def open(
    path: str | os.PathLike[str],
    *,
    site: str | None = None,
    site_id: int | None = None,
    create: bool = True,
    durability: Durability = "fsync",
    background: bool = True,
    collect_every: timedelta = COLLECT_EVERY,
    log_retention: timedelta | None = None,
    skew_ms_max: int = SKEW_MS_MAX,
    disk_reserve_bytes: int = RECOVERY_ROOM_BYTES,
    time_source: TimeSource = system_time_ms,
) -> Site:
    """Open the site in a directory, which is made if it is missing and `create` is not False.

    A site has a name and an id from 1 to 255 for life; without a name it takes the directory's, and
    without an id one that follows from its name.  `durability` holds for writes that name none.
    `background=False` leaves heartbeats and garbage collection to the caller.  The change log is kept as
    long as the versions that it names, or only for `log_retention`, which saves its space; feeds that come
    later than that catch up by scanning the versions.
    """
    check_durability(durability)
    directory = SiteDirectory(Path(path), site, site_id, create=create)
    try:
        return open_engine(
            RocksEngine(directory.engine_path, FAMILIES, prefix_bytes=FILTERED_BYTES),
            site=directory.identity.site,
            site_id=directory.identity.site_id,
            durability=durability,
            background=background,
            collect_every=collect_every,
            log_retention=log_retention,
            skew_ms_max=skew_ms_max,
            disk=directory.path,
            disk_reserve_bytes=disk_reserve_bytes,
            time_source=time_source,
            release=directory.release,
        )
    except BaseException:
        directory.release()
        raise


def open_engine(
    engine: Engine,
    *,
    site: str,
    site_id: int | None = None,
    durability: Durability = "fsync",
    background: bool = False,
    collect_every: timedelta = COLLECT_EVERY,
    log_retention: timedelta | None = None,
    skew_ms_max: int = SKEW_MS_MAX,
    disk: Path | None = None,
    disk_reserve_bytes: int = 0,
    time_source: TimeSource = system_time_ms,
    release: Callable[[], None] = lambda: None,
) -> Site:
    """Open a site on any engine.  The site owns the engine from here on and closes it.

    >>> from floodmark.engine import MemoryEngine
    >>> with open_engine(MemoryEngine(FAMILIES), site="scratch") as scratch:
    ...     scratch.create_namespace("users").put(b"ada", b"1") > 0
    True
    """

    def start_background(node: Node, garbage: GarbageCollection) -> Background:
        work = Background(node, garbage.run, collect_every, disk, disk_reserve_bytes)
        work.watch_disk()
        if background:
            work.start()
        return work

    try:
        clock = HybridClock(time_source, skew_ms_max=skew_ms_max, upper_bound=EngineBound(engine))
        identity = new_identity(site, site_id)
        host = EmbeddedHost(
            identity,
            Node(engine, clock, identity.site_id),
            start_background=start_background,
            release=release,
            log_retention=log_retention,
            disk=disk,
        )
        return Site(host, durable=check_durability(durability))
    except BaseException:
        engine.close()
        raise
