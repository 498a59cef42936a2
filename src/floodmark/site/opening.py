"""Opens a site in a directory or a database.  Importing this loads RocksDB, which clients do not need."""

import os
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, Final

from floodmark.clock import TimeSource, elapsed_ms, system_time_ms
from floodmark.clock.hybrid import SKEW_MS_MAX
from floodmark.engine.base import RECOVERY_ROOM_BYTES
from floodmark.engine.rocks import RocksEngine
from floodmark.host.directory import SiteDirectory, engine_path, raise_format, stored_identity, witness_path
from floodmark.model.errors import Closed, InvalidArgument, InvalidConfiguration, SiteMismatch
from floodmark.model.names import require_name, require_path
from floodmark.partition import FAMILIES, FILTERED_BYTES, IDENTITY, META, EngineBound
from floodmark.site.arguments import DATABASES, Durability
from floodmark.site.embedding import COLLECT_EVERY, check_options, one_process, open_engine
from floodmark.site.site import Site

# Imported only for a site in a database: the first needs an optional library, the second imports Flight.
ENGINE: Final = "floodmark.engine.postgres"
NODES: Final = "floodmark.host.nodes"
EXTRA: Final = "floodmark[postgres]"


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
    node: int | None = None,
) -> Site:
    """Open the site in a directory, or in the PostgreSQL database of a URL such as `postgresql://host/name`.

    A missing site is created unless `create` is False.  Its name and its id, from 1 to 255, never change.
    By default the name is that of the directory, and the id is derived from the name; a site in a database
    must be named, and its disk is not watched.

    `durability` is the default for writes.  `background=False` leaves heartbeats and garbage collection to
    the caller.  The change log is kept as long as the versions that it refers to, or, to save space, only for
    `log_retention`; feeds that lag further behind then catch up by scanning the versions.

    Several processes can open a site in a database.  Each is a node with its own number from 1 to 63, by
    default the lowest free one.
    """
    options: dict[str, Any] = {
        "durability": durability,
        "background": background,
        "collect_every": collect_every,
        "log_retention": log_retention,
        "skew_ms_max": skew_ms_max,
        "time_source": time_source,
        # The elapsed time says nothing about a time source other than the system clock.
        "elapsed_source": elapsed_ms if time_source is system_time_ms else None,
    }
    check_options(disk_reserve_bytes=disk_reserve_bytes, **options)
    if isinstance(path, str) and path.startswith(DATABASES):
        return _open_shared(path, site, site_id, create, node, options)
    if node is not None:
        raise InvalidArgument("one process has the site of a directory; only sites in a database have nodes")
    directory = SiteDirectory(require_path(path, "a site's directory"), site, site_id, create=create)
    return _open(directory, disk_reserve_bytes=disk_reserve_bytes, **options)


def open_accepting(
    path: str | os.PathLike[str],
    *,
    loss: bool = False,
    clock: bool = False,
    time_source: TimeSource = system_time_ms,
) -> Site:
    """Open a site that `open` refuses, and accept the `loss` of acknowledged writes or its `clock` skew."""
    directory = SiteDirectory(require_path(path, "a site's directory"), None, None, create=False)
    return _open(directory, accept_loss=loss, time_source=time_source, accept_clock=clock)


def _open(
    directory: SiteDirectory, *, accept_loss: bool = False, accept_clock: bool = False, **options: Any
) -> Site:
    try:
        engine = RocksEngine(
            engine_path(directory.path),
            FAMILIES,
            prefix_bytes=FILTERED_BYTES,
            witness=witness_path(directory.path),
            accept_loss=accept_loss,
        )
        try:
            directory.finish()
        except BaseException:
            engine.close()
            raise

        def abandon(refusal: Closed) -> None:
            engine.abandon(refusal)
            directory.abandon()

        bound = EngineBound(engine, sync=engine.sync_witnessed, floor=engine.witnessed_version)
        return open_engine(
            engine,
            site=directory.identity.site,
            site_id=directory.identity.site_id,
            disk=directory.path,
            release=directory.release,
            abandon=abandon,
            make_host=partial(one_process, bound=bound, accept_clock=accept_clock),
            **options,
        )
    except BaseException:
        directory.release()
        raise


def _open_shared(
    url: str, site: str | None, site_id: int | None, create: bool, node: int | None, options: dict[str, Any]
) -> Site:
    """Open a site in a database, as one of its nodes."""
    if site is None:
        raise InvalidArgument("a database may hold several sites; name the one to open: site='oslo'")
    require_name(site, "site")
    try:
        postgres = import_module(ENGINE)
    except ModuleNotFoundError as error:
        raise InvalidConfiguration(
            f"a site in PostgreSQL needs {error.name}, which is not installed; "
            f"install it with: pip install '{EXTRA}'"
        ) from error
    engine = postgres.PostgresEngine(url, FAMILIES, site=site, create=create)
    try:
        held = stored_identity(engine.get(META, IDENTITY), f"site {site!r}")
        if held is not None and site_id not in (None, held.site_id):
            raise SiteMismatch(
                f"site {site!r} in the database has id {held.site_id}, and was asked for by id {site_id}; "
                "open it under its own id, or choose another name",
                site=site,
            )
        raise_format(engine, f"site {site!r}")
    except BaseException:
        engine.close()
        raise
    return open_engine(
        engine,
        site=site,
        site_id=held.site_id if held else site_id,
        abandon=engine.abandon,
        make_host=partial(import_module(NODES).make_node, node=node),
        **options,
    )
