"""Read several exports at one point in time.

A history holds every version up to where it is, so it can be read at any of them.  A current view was only
ever at the versions at which its steps ended.  Exports of several namespaces can be read together at a
version that each of them can be read at: for histories there always is one; for current views, exports that
go on `at_heartbeats` meet again and again, and exports `until` the same version meet there.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pyarrow.dataset

from floodmark.model.errors import InvalidArgument, InvalidVersion
from floodmark.model.version import Version
from floodmark.spark.jobs.exports import delta as export_delta
from floodmark.spark.jobs.exports import parquet as export_parquet
from floodmark.spark.jobs.exports.state import Cuts, ExportIdentity, local_directory
from floodmark.spark.jobs.files import directory_at


class _Opened(NamedTuple):
    location: str
    identity: ExportIdentity
    cuts: Cuts


def common_cut(targets: Iterable[str]) -> Version:
    """The highest version that all of several exports of a site hold completely, and can be read at."""
    opened = [_open(target) for target in targets]
    if not opened:
        raise InvalidArgument("name the exports that are to be read together")
    sites = {(each.identity.site, each.identity.site_id) for each in opened}
    if len(sites) > 1:
        names = " and ".join(sorted(site for site, _ in sites))
        raise InvalidArgument(f"these are exports of {names}: a version of one site means nothing at another")
    low = max(each.cuts.since for each in opened)
    high = min(each.cuts.through for each in opened)
    only = [each.cuts.only for each in opened if each.cuts.only is not None]
    possible = frozenset.intersection(*only) if only else {high}
    common = max((version for version in possible if low <= version <= high), default=None)
    if common is None:
        raise InvalidVersion(
            f"there is no version at which {', '.join(each.location for each in opened)} can all be read; "
            "export each of them until the same version"
        )
    return common


def read_export(target: str, at: Version | None = None) -> pyarrow.dataset.Dataset:
    """The rows of an export, as it is or as it was at a version at which it can be read."""
    opened, directory = _open(target), local_directory(target)
    cuts = opened.cuts
    version = cuts.through if at is None else at
    inside = cuts.since <= version <= cuts.through and (cuts.only is None or version in cuts.only)
    if not inside:
        raise InvalidVersion(
            f"{target} cannot be read at {version}: it "
            + (
                f"holds the changes in ({cuts.since}, {cuts.through}]"
                if cuts.only is None
                else "was never there"
            )
            + "; common_cut tells at which version several exports can be read"
        )
    if _is_delta(directory):
        return export_delta.read_at(directory, opened.identity, version)
    state = export_parquet.load_state(directory_at(str(directory)))
    assert state is not None
    return export_parquet.read_at(directory, state, version)


def _open(target: str) -> _Opened:
    directory = local_directory(target)
    if _is_delta(directory):
        table = export_delta.open_table(directory)
        identity = export_delta.identity_of(table, directory)
        return _Opened(target, identity, export_delta.cuts_of(table, identity))
    state = export_parquet.load_state(directory_at(str(directory)))
    if state is None or state.through is None:
        raise InvalidArgument(f"{target} holds no export; name the directory that was exported to")
    return _Opened(target, state.identity, export_parquet.cuts_of(state))


def _is_delta(directory: Path) -> bool:
    return (directory / export_delta.LOG).exists()
