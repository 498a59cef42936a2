"""Sites that share namespaces, in this process, and links between them without Spark."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.harness import NAMESPACE, Database, make_pairs
from benchmarks.peers.base import in_batches_of

import floodmark
from floodmark import Site
from floodmark.codec.changelog import encode_log_range
from floodmark.host.embedded import EmbeddedHost
from floodmark.links.steps import plan_step, run_step
from floodmark.model.limits import PAGE_BYTES_MAX
from floodmark.model.version import Version
from floodmark.partition import FAMILIES
from floodmark.partition.beating import NODE
from floodmark.partition.families import LOG
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology

COMMIT: Final = 50
HEARTBEATS_MAX: Final = 1_000_000


def open_site(path: Path, *, site_id: int | None = None, background: bool = True) -> Site:
    """Open the site in a directory, under the directory's name."""
    return floodmark.open(path, site=path.name, site_id=site_id, background=background)


def embedded(site: Site) -> EmbeddedHost:
    """The host of a site that is embedded in this process."""
    assert isinstance(site.host, EmbeddedHost)
    return site.host


def share(
    ids: Mapping[str, int],
    namespaces: Iterable[str],
    urls: Mapping[str, str] | None = None,
    *,
    epoch: int = 1,
) -> Topology:
    """A topology in which all sites share all namespaces."""
    places = urls or {}
    return Topology(
        epoch=epoch,
        sites={name: MemberSite(id=number, url=places.get(name)) for name, number in ids.items()},
        namespaces={name: SharedNamespace() for name in namespaces},
    )


def run_link(source: Site, target: Site, namespaces: Sequence[str]) -> int:
    """Take steps until the target lacks no change; returns the number of changes applied."""
    applied = 0
    while (step := plan_step(source.host, target.host, namespaces)).changes != 0:
        applied += run_step(source.host, target.host, step).changes
    return applied


def fill_shared_site(path: Path, ids: Mapping[str, int], records: int) -> None:
    """Make a site, fill a shared namespace in commits of fifty, and wait for flushes and compactions."""
    with open_site(path, site_id=ids[path.name]) as site:
        site.set_topology(share(ids, [NAMESPACE]))
        namespace = site.namespace(NAMESPACE)
        for batch in in_batches_of(COMMIT, make_pairs(records, seed=42)):
            namespace.put_many(batch, durability="async")
        site.heartbeat()
    with Database(path / "engine", FAMILIES) as engine:
        engine.settle()


def make_neighbours(directory: Path, ids: Mapping[str, int], namespaces: Sequence[str]) -> None:
    """Make sites that share namespaces, and replicate a write of each, so that no watermark is empty."""
    sites = {name: open_site(directory / name, site_id=number) for name, number in ids.items()}
    try:
        for site in sites.values():
            site.set_topology(share(ids, namespaces))
            for name in namespaces:
                site.namespace(name).put(site.name.encode(), b"written here")
        for source in sites.values():
            for target in sites.values():
                if source is not target:
                    run_link(source, target, namespaces)
    finally:
        for site in sites.values():
            site.close()


def heartbeat_bytes(path: Path, since: Version, until: Version) -> tuple[int, int]:
    """The number of heartbeats that a closed site wrote between two versions, and their bytes in its log."""
    with open_site(path, background=False) as site:
        start, end = encode_log_range(NODE, since, until)
        rows = embedded(site).node.engine.scan(
            LOG, start, end, rows_max=HEARTBEATS_MAX, bytes_max=PAGE_BYTES_MAX
        )
    return len(rows), sum(len(key) + len(row) for key, row in rows)
