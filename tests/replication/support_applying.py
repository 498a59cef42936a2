"""What the tests of steps share: commits as they stand at a site, and what it knows of a link."""

from collections.abc import Iterable, Iterator
from itertools import groupby

import pyarrow
from tests.replication.support_links import Mesh, embedded

from floodmark.links.applying import Applier
from floodmark.model.change import Change, Stamp
from floodmark.model.version import Version
from floodmark.replication.applied import Applied
from floodmark.replication.links import LinkRow
from floodmark.replication.step import LinkStep
from floodmark.site import Site


def changes_of(site: Site, namespace: str = "users") -> list[Change]:
    """All changes of a namespace, those that came from others included."""
    return [change for change in site.changes(namespace) if isinstance(change, Change)]


def commits_of(site: Site) -> list[list[Change]]:
    """The changes of `users`, commit by commit."""
    return [list(commit) for _, commit in groupby(changes_of(site), lambda change: change.version)]


def state_of(site: Site) -> dict[bytes, tuple[bytes | None, Stamp]]:
    """The newest change of every key, by which sites are compared: the value and the stamp."""
    return {change.key: (change.value, change.stamp) for change in changes_of(site)}


def link_row(mesh: Mesh, source: str, target: str) -> LinkRow:
    """What a site has stored about a link."""
    return stored_link(mesh[target], mesh[source].id)


def stored_link(target: Site, source_id: int) -> LinkRow:
    """What a site has stored about a link from the site of this id."""
    host = embedded(target)
    return host.links.rows[host.namespaces.find_namespace("users").id, source_id]


def require_whole_commits(site: Site) -> None:
    """Every commit of another site must stand in one commit of each partition here, and not in two."""
    versions: dict[tuple[Stamp, int], set[Version]] = {}
    for change in changes_of(site):
        versions.setdefault((change.stamp, change.partition), set()).add(change.version)
    assert all(len(each) == 1 for each in versions.values())


def apply_rows(
    mesh: Mesh, target: str, step: LinkStep, batches: Iterable[pyarrow.RecordBatch], **options: int
) -> Applied:
    """Apply given rows, and let the target take note of the step."""
    host = mesh[target].host
    with Applier(host, step, **options) as applier:
        for rows in batches:
            applier.add(rows)
        applied = applier.finish()
    host.replication.advance_link(step, applied)
    return applied


def sliced(batches: Iterable[pyarrow.RecordBatch], rows_max: int) -> Iterator[pyarrow.RecordBatch]:
    """The same rows in small batches, as another process may cut them."""
    for batch in batches:
        for start in range(0, batch.num_rows, rows_max):
            yield batch.slice(start, rows_max)
