"""Read several exports at one point in time.

A history can be read at every version that it holds, a current view only at the versions at which its steps
ended.  Exports of several namespaces can be read together at a version that each of them can be read at.
Histories always have one; current views have one if they are exported `at_heartbeats` or `until` the same
version.
"""

from collections.abc import Iterable

import pyarrow.dataset

from floodmark.model.errors import InvalidArgument, InvalidVersion
from floodmark.model.version import Version
from floodmark.spark.jobs.exports import delta, parquet
from floodmark.spark.jobs.exports.state import Exported, local_directory


def common_cut(targets: Iterable[str]) -> Version:
    """The highest version that all of several exports of a site hold completely, and can be read at."""
    exports = {target: _open(target) for target in targets}
    if not exports:
        raise InvalidArgument("name the exports that are to be read together")
    sites = {(each.identity.site, each.identity.site_id) for each in exports.values()}
    if len(sites) > 1:
        names = " and ".join(sorted(site for site, _ in sites))
        raise InvalidArgument(f"these are exports of {names}: a version of one site means nothing at another")
    cuts = [each.cuts for each in exports.values()]
    low, high = max(each.since for each in cuts), min(each.through for each in cuts)
    only = [each.only for each in cuts if each.only is not None]
    possible = frozenset.intersection(*only) if only else {high}
    common = max((version for version in possible if low <= version <= high), default=None)
    if common is None:
        raise InvalidVersion(
            f"there is no version at which {', '.join(exports)} can all be read; "
            "export each of them until the same version"
        )
    return common


def read_export(target: str, at: Version | None = None) -> pyarrow.dataset.Dataset:
    """The rows of an export, as it is or as it was at a version at which it can be read."""
    exported = _open(target)
    cuts = exported.cuts
    version = cuts.through if at is None else at
    if not cuts.since <= version <= cuts.through or (cuts.only is not None and version not in cuts.only):
        has = "was never there" if cuts.only else f"holds the changes in ({cuts.since}, {cuts.through}]"
        raise InvalidVersion(
            f"{target} cannot be read at {version}: it {has}; common_cut tells at which version several "
            "exports can be read"
        )
    return exported.read(version)


def _open(target: str) -> Exported:
    directory = local_directory(target)
    exported = delta.open_exported(directory) or parquet.open_exported(directory)
    if exported is None:
        raise InvalidArgument(f"{target} holds no export; name the directory that was exported to")
    return exported
