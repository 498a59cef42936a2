"""Opens a site on any engine, in this process."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from floodmark.clock import GuardedTime, HybridClock, TimeSource, UpperBound, system_time_ms
from floodmark.clock.hybrid import SKEW_MS_MAX
from floodmark.engine import Engine
from floodmark.host.background import Background
from floodmark.host.catalog import generations_of, load_namespaces
from floodmark.host.directory import (
    Identity,
    encode_engine_identity,
    new_identity,
    require_same_identity,
)
from floodmark.host.embedded import BuildHost, EmbeddedHost
from floodmark.host.ports import Host
from floodmark.model.errors import Closed
from floodmark.model.version import physical_ms
from floodmark.partition import IDENTITY, META, EngineBound, Node
from floodmark.partition.generations import GenerationsEngine
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
    """Raise InvalidArgument for invalid options of `open`, before any file or engine is touched."""
    check_durability(options["durability"])
    check_duration(options["collect_every"], "collect_every")
    if options["log_retention"] is not None:
        check_duration(options["log_retention"], "log_retention")
    check_count(options["skew_ms_max"], "skew_ms_max")
    check_count(options["disk_reserve_bytes"], "disk_reserve_bytes")
    check_time_source(options["time_source"])


class MakeHost(Protocol):
    """Factory of a site's host on an engine."""

    def __call__(
        self,
        engine: Engine,
        identity: Identity,
        time_source: GuardedTime,
        skew_ms_max: int,
        build: BuildHost,
    ) -> Host:
        """Return the host, before its threads are started.  `build` makes the host of a given node."""
        ...


def one_process(
    engine: Engine,
    identity: Identity,
    time_source: GuardedTime,
    skew_ms_max: int,
    build: BuildHost,
    *,
    bound: UpperBound | None = None,
    accept_clock: bool = False,
) -> EmbeddedHost:
    """The host of a site whose engine no other process uses.

    Raises ClockSkew if the time is far ahead of the stored versions, unless `accept_clock`.
    """
    upper_bound = EngineBound(engine) if bound is None else bound
    clock = HybridClock(time_source, skew_ms_max=skew_ms_max, upper_bound=upper_bound)
    if not accept_clock:
        time_source.start(physical_ms(clock.latest))
    generations = GenerationsEngine(engine, identity.site_id)
    # Before the node starts: it counts changes again, and reads their large values from the data.
    generations.reload = lambda: generations.show(*generations_of(load_namespaces(engine)))
    generations.reload()
    return build(Node(generations, clock, identity.site_id))


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
    release: Callable[[], None] = lambda: None,
    abandon: Callable[[Closed], None] = lambda _: None,
    make_host: MakeHost = one_process,
) -> Site:
    """Open a site on any engine.  The site owns the engine and closes it.

    Raises ClockSkew if `time_source` is far ahead of the stored versions.  Later readings that are far ahead
    of the time measured by `elapsed_source` raise it, too.

    >>> from floodmark.engine import MemoryEngine
    >>> from floodmark.partition import FAMILIES
    >>> with open_engine(MemoryEngine(FAMILIES), site="scratch") as scratch:
    ...     scratch.create_namespace("users").put(b"ada", b"1") > 0
    True
    """
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
        build = partial(
            EmbeddedHost,
            identity,
            make_background=partial(
                Background, collect_every=collect_every, disk=disk, disk_reserve_bytes=disk_reserve_bytes
            ),
            background=background,
            release=release,
            abandon=abandon,
            log_retention=log_retention,
            disk=disk,
        )
        guarded = GuardedTime(time_source, elapsed_source)
        host = make_host(engine, identity, guarded, skew_ms_max, build)
        opened = Site(host, durable=check_durability(durability))
        host.start()
        return opened
    except BaseException:
        engine.close()
        raise


def keep_identity(engine: Engine, identity: Identity, path: object) -> None:
    """Check the identity stored in the engine; store it if an earlier release has not done so."""
    stored = engine.get(META, IDENTITY)
    if stored is None:
        engine.write([(META, IDENTITY, encode_engine_identity(identity))])
        engine.sync()
    else:
        require_same_identity(identity, stored, path)
