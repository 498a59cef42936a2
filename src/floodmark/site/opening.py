"""Opening a site in a directory.  Loads RocksDB, which clients of a server do without."""

import os
from collections.abc import Callable
from datetime import timedelta

from floodmark.clock import TimeSource, elapsed_ms, system_time_ms
from floodmark.clock.hybrid import SKEW_MS_MAX
from floodmark.engine.base import RECOVERY_ROOM_BYTES
from floodmark.engine.rocks import RocksEngine
from floodmark.host.directory import SiteDirectory
from floodmark.model.errors import Closed
from floodmark.model.names import require_path
from floodmark.partition import FAMILIES, FILTERED_BYTES, EngineBound
from floodmark.site.arguments import Durability
from floodmark.site.embedding import COLLECT_EVERY, check_options, open_engine
from floodmark.site.site import Site


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
    check_options(
        durability=durability,
        collect_every=collect_every,
        log_retention=log_retention,
        skew_ms_max=skew_ms_max,
        disk_reserve_bytes=disk_reserve_bytes,
        time_source=time_source,
    )
    directory = SiteDirectory(require_path(path, "a site's directory"), site, site_id, create=create)
    try:
        engine = _open_database(directory)
        return open_engine(
            engine,
            bound=_bound(engine),
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
            # Another time source need not go at the speed of this machine's clocks.
            elapsed_source=elapsed_ms if time_source is system_time_ms else None,
            release=directory.release,
            abandon=_abandon(directory, engine),
        )
    except BaseException:
        directory.release()
        raise


def open_accepting(
    path: str | os.PathLike[str],
    *,
    loss: bool = False,
    clock: bool = False,
    time_source: TimeSource = system_time_ms,
) -> Site:
    """Open a site that is refused, and from then on opens as any other.

    With `loss`, one that has lost acknowledged writes, without them; with `clock`, one whose last version
    lies so far back that the machine's clock is not believed.
    """
    directory = SiteDirectory(require_path(path, "a site's directory"), None, None, create=False)
    try:
        engine = _open_database(directory, accept_loss=loss)
        return open_engine(
            engine,
            bound=_bound(engine),
            site=directory.identity.site,
            site_id=directory.identity.site_id,
            disk=directory.path,
            time_source=time_source,
            accept_clock=clock,
            release=directory.release,
            abandon=_abandon(directory, engine),
        )
    except BaseException:
        directory.release()
        raise


def _open_database(directory: SiteDirectory, *, accept_loss: bool = False) -> RocksEngine:
    engine = RocksEngine(
        directory.engine_path,
        FAMILIES,
        prefix_bytes=FILTERED_BYTES,
        witness=directory.witness_path,
        accept_loss=accept_loss,
    )
    try:
        directory.finish()
    except BaseException:
        engine.close()
        raise
    return engine


def _abandon(directory: SiteDirectory, engine: RocksEngine) -> Callable[[Closed], None]:
    def abandon(refusal: Closed) -> None:
        engine.abandon(refusal)
        directory.abandon()

    return abandon


def _bound(engine: RocksEngine) -> EngineBound:
    return EngineBound(engine, sync=engine.sync_witnessed, floor=engine.witnessed_version)
