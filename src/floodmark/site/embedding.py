"""Opening a site on any engine, in this process."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from floodmark.clock import GuardedTime, HybridClock, TimeSource, UpperBound, system_time_ms
from floodmark.clock.hybrid import SKEW_MS_MAX
from floodmark.engine import Engine
from floodmark.host.background import Background
from floodmark.host.directory import (
    Identity,
    encode_engine_identity,
    new_identity,
    require_same_identity,
)
from floodmark.host.embedded import EmbeddedHost
from floodmark.host.garbage import GarbageCollection
from floodmark.model.errors import Closed
from floodmark.model.version import physical_ms
from floodmark.partition import IDENTITY, META, EngineBound, Node
from floodmark.site.arguments import (
    Durability,
    check_count,
    check_durability,
    check_duration,
    check_time_source,
)
from floodmark.site.site import Site

COLLECT_EVERY: Final = timedelta(minutes=10)


def check_options(**options: Any) -> None:
    """Refuse options that no site can be opened with, before anything is made or touched."""
    check_durability(options["durability"])
    check_duration(options["collect_every"], "collect_every")
    if options["log_retention"] is not None:
        check_duration(options["log_retention"], "log_retention")
    check_count(options["skew_ms_max"], "skew_ms_max")
    check_count(options["disk_reserve_bytes"], "disk_reserve_bytes")
    check_time_source(options["time_source"])


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
    elapsed_source: TimeSource | None = None,
    accept_clock: bool = False,
    bound: UpperBound | None = None,
    release: Callable[[], None] = lambda: None,
    abandon: Callable[[Closed], None] = lambda _: None,
) -> Site:
    """Open a site on any engine.  The site owns the engine from here on and closes it.

    A reading of `time_source` far ahead of the stored versions, or of what `elapsed_source` has measured, is
    refused with `ClockSkew`, unless `accept_clock` takes the first one for right.

    >>> from floodmark.engine import MemoryEngine
    >>> from floodmark.partition import FAMILIES
    >>> with open_engine(MemoryEngine(FAMILIES), site="scratch") as scratch:
    ...     scratch.create_namespace("users").put(b"ada", b"1") > 0
    True
    """

    def make_background(node: Node, garbage: GarbageCollection) -> Background:
        work = Background(node, garbage.run, collect_every, disk, disk_reserve_bytes)
        work.watch_disk()
        return work

    try:
        check_options(
            durability=durability,
            collect_every=collect_every,
            log_retention=log_retention,
            skew_ms_max=skew_ms_max,
            disk_reserve_bytes=disk_reserve_bytes,
            time_source=time_source,
        )
        identity = new_identity(site, site_id)
        keep_identity(engine, identity, disk or "the engine")
        upper_bound = EngineBound(engine) if bound is None else bound
        guarded = GuardedTime(time_source, elapsed_source)
        clock = HybridClock(guarded, skew_ms_max=skew_ms_max, upper_bound=upper_bound)
        if not accept_clock:
            guarded.start(physical_ms(clock.latest))
        host = EmbeddedHost(
            identity,
            Node(engine, clock, identity.site_id),
            make_background=make_background,
            sweeps=background,
            release=release,
            abandon=abandon,
            log_retention=log_retention,
            disk=disk,
        )
        opened = Site(host, durable=check_durability(durability))
        if background:
            host.start()
        return opened
    except BaseException:
        engine.close()
        raise


def keep_identity(engine: Engine, identity: Identity, path: object) -> None:
    """Compare the engine's copy of the site's identity; an engine of an earlier Floodmark gets one now."""
    stored = engine.get(META, IDENTITY)
    if stored is None:
        engine.write([(META, IDENTITY, encode_engine_identity(identity))])
        engine.sync()
    else:
        require_same_identity(identity, stored, path)
