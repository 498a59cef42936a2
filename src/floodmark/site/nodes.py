"""Opening a site on an engine that several processes share.  Loads Flight, by which nodes call each other."""

from collections.abc import Callable
from datetime import timedelta
from threading import Event
from typing import Any

from floodmark.clock import GuardedTime, TimeSource, elapsed_ms, system_time_ms
from floodmark.clock.hybrid import SKEW_MS_MAX
from floodmark.engine import Engine
from floodmark.host.background import Background
from floodmark.host.directory import Identity, new_identity
from floodmark.host.embedded import EmbeddedHost
from floodmark.host.garbage import GarbageCollection
from floodmark.host.nodes import BuildHost, NodeHost
from floodmark.model.errors import Closed
from floodmark.model.version import physical_ms
from floodmark.partition import Node
from floodmark.partition.families import CEILING
from floodmark.partition.layout import read_metadata
from floodmark.partition.membership import claim
from floodmark.site.arguments import Durability, check_durability
from floodmark.site.embedding import COLLECT_EVERY, check_options, keep_identity
from floodmark.site.site import Site


def open_node(
    engine: Engine,
    *,
    site: str,
    node: int | None = None,
    site_id: int | None = None,
    durability: Durability = "fsync",
    background: bool = False,
    collect_every: timedelta = COLLECT_EVERY,
    log_retention: timedelta | None = None,
    skew_ms_max: int = SKEW_MS_MAX,
    time_source: TimeSource = system_time_ms,
    elapsed_source: TimeSource | None = None,
    beat_source: TimeSource = elapsed_ms,
    beats: bool = True,
    abandon: Callable[[Closed], None] = lambda _: None,
) -> Site:
    """Open a site as one of its nodes.  The site owns the engine from here on and closes it.

    Without a number of the `node`, it gets the lowest that is free.  `beat_source` measures the time between
    beats; `beats=False` leaves `NodeHost.beat` and `watch` to the caller.
    """
    try:
        check_options(
            durability=durability,
            collect_every=collect_every,
            log_retention=log_retention,
            skew_ms_max=skew_ms_max,
            disk_reserve_bytes=0,
            time_source=time_source,
        )
        identity = new_identity(site, site_id)
        keep_identity(engine, identity, "the engine")
        guarded = _guard(engine, time_source, elapsed_source)

        host = NodeHost(
            identity,
            engine,
            claim(engine, node, Event().wait),
            build=_builder(
                identity,
                collect_every,
                sweeps=background,
                abandon=abandon,
                log_retention=log_retention,
            ),
            time_source=guarded,
            elapsed_source=beat_source,
            skew_ms_max=skew_ms_max,
        )
        opened = Site(host, durable=check_durability(durability))
        host.start(background=background, beats=beats)
        return opened
    except BaseException:
        engine.close()
        raise


def _guard(engine: Engine, time_source: TimeSource, elapsed_source: TimeSource | None) -> GuardedTime:
    """A time source that refuses a reading far ahead of all versions that nodes may have given."""
    guarded = GuardedTime(time_source, elapsed_source)
    ceilings = [int.from_bytes(stored, "big") for _, stored in read_metadata(engine, CEILING)]
    guarded.start(physical_ms(max(ceilings, default=0)))
    return guarded


def _builder(identity: Identity, collect_every: timedelta, **options: Any) -> BuildHost:
    """Makes the hosts of a node's incarnations."""

    def build(node: Node, *, keeps: bool, **parts: Any) -> EmbeddedHost:
        def make_background(node: Node, garbage: GarbageCollection) -> Background:
            # The keeper collects for the whole site.
            collect = garbage.run if keeps else lambda _: None
            return Background(node, collect, collect_every, None, 0)

        return EmbeddedHost(
            identity,
            node,
            make_background=make_background,
            release=lambda: None,
            keeps=keeps,
            **parts,
            **options,
        )

    return build
