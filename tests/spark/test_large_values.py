"""Large values in the jobs of Spark, which see the rows of the layer: what comes back is whole."""

from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.layers.conftest import CHUNK, small_chunks
from tests.layers.test_large_values import content
from tests.links.support import Served, ServeSite
from tests.spark.support_backup import address_of, contents
from tests.spark.support_export import current_of, exported, exported_current, history_of
from tests.spark.support_verify import World, forget

from floodmark.layers import large_values
from floodmark.model.errors import Corruption
from floodmark.site import Site
from floodmark.spark.jobs import backup, check_backup, export, restore, verify

__all__ = ["small_chunks"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_chunks")]

NAME = "configs"
OLD, NEW = content(6 * CHUNK, 1), content(8 * CHUNK, 2)


def chunks(site: Site, name: str) -> list[tuple[bytes, bytes]]:
    return list(site.namespace(name).scan(prefix=b"c"))


def test_a_backup_and_its_changes_bring_back_whole_values_of_any_moment(
    spark: SparkSession,
    served: Served,
    serve_site: ServeSite,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configs = served.site.create_namespace(NAME, large_values=True)
    configs.put(b"switch", OLD)
    configs.put(b"small", b"down")
    target, source, rome = str(tmp_path / "backups"), address_of(served.url), serve_site("rome")
    first = backup(source, NAME, target, spark=spark).version
    between = configs.put(b"switch", NEW)
    configs.put(b"router", OLD)
    configs.delete(b"small")
    last = backup(source, NAME, target, incremental=True, spark=spark).version
    assert not check_backup(target, spark=spark).findings

    # No link brings the changes of the first site, so that the other may sweep what that has left.
    monkeypatch.setattr(large_values, "FOREIGN_GARBAGE_AGE", timedelta(0))
    for version, values, owned in (
        (first, {b"small": b"down", b"switch": OLD}, 6),
        (between, {b"small": b"down", b"switch": NEW}, 8),
        (last, {b"router": OLD, b"switch": NEW}, 6 + 8),
    ):
        assert dict(configs.scan(at=version)) == values
        name = f"at-{version}"
        assert restore(target, address_of(rome.url), name, at=version, spark=spark).verified
        assert contents(rome.site, name) == contents(served.site, NAME, version)
        restored = rome.site.namespace(name, large_values=True)
        assert dict(restored.scan()) == values
        assert restored.sweep(older_than=timedelta(0)) == (version != first)
        assert dict(restored.scan()) == values
        assert len(chunks(rome.site, name)) == owned


def test_an_export_has_the_rows_of_the_layer_and_all_of_a_value(
    spark: SparkSession, served: Served, tmp_path: Path
) -> None:
    configs = served.site.create_namespace(NAME, large_values=True)
    for value in (OLD, NEW):
        configs.put(b"switch", value)
    configs.put(b"small", b"down")
    for view in ("history", "current"):
        target = tmp_path / view
        through = export(
            address_of(served.url), NAME, str(target), format="parquet", view=view, spark=spark
        ).through
        assert through is not None
        if view == "history":
            assert exported(target) == history_of(served.site, NAME, through)
            continue
        rows = exported_current(target)
        assert rows == current_of(served.site, NAME, through)
        # As the table in docs/layers.md says.
        assert rows[b"rsmall"] == b"\x00down"
        form, pointer, size = rows[b"rswitch"][:1], rows[b"rswitch"][1:17], rows[b"rswitch"][17:25]
        assert (form, int.from_bytes(size, "big")) == (b"\x01", len(NEW))
        assert b"".join(rows[key] for key in sorted(rows) if key.startswith(b"c" + pointer)) == NEW


def test_sites_with_large_values_agree_and_a_lost_chunk_is_found_and_mended(
    serve_site: ServeSite, spark: SparkSession
) -> None:
    world = World(serve_site)
    for name, value in (("oslo", OLD), ("rome", NEW)):
        world[name].namespace("users", large_values=True).put(name.encode(), value)
        world.link_all()
    values = {b"oslo": OLD, b"rome": NEW}
    for site in world.sites.values():
        assert dict(site.namespace("users", large_values=True).scan()) == values
    summary = verify(world.addresses, ["users"], spark=spark)
    assert (summary.drift, summary.lag) == (0, 0)
    lost = chunks(world["rome"], "users")[2][0]
    forget(world["rome"], "users", lost)
    with pytest.raises(Corruption, match="chunk 2 is missing"):
        dict(world["rome"].namespace("users", large_values=True).scan())
    summary = verify(world.addresses, ["users"], repair=True, spark=spark)
    assert [each.drift.key for each in summary.sample] == [lost]
    assert dict(world["rome"].namespace("users", large_values=True).scan()) == values
