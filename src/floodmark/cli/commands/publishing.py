"""publish, and generation list, show, rollback and drop."""

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import pyarrow
import pyarrow.dataset

import floodmark
from floodmark.cli.arguments import Commands, NamespaceName, OpenSite
from floodmark.cli.commands.topology import open_others, read_topology
from floodmark.cli.failures import Usage
from floodmark.cli.render.output import Column, Output, plain
from floodmark.cli.render.progress import tracked
from floodmark.host.catalog import KEPT_GENERATIONS, GenerationRow
from floodmark.model import Version
from floodmark.model.errors import SchemaMismatch
from floodmark.site.dataset import REFUSED_MAX, Refuse, RefusedRows
from floodmark.site.earlier import ARRIVAL

commands = Commands("generation")

_FORMATS: Final = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
_BATCH_ROWS: Final = 8_192
_BYTES: Final = (pyarrow.binary(), pyarrow.string(), pyarrow.large_binary(), pyarrow.large_string())

_COLUMNS: Final[dict[str, Column[dict[str, Any]]]] = {
    "number": "number",
    "state": "state",
    "since": "since",
    "until": "until",
    "base": "base",
    "publisher": "publisher",
}

Number = Annotated[int, "NUMBER", "The generation's number."]
Keep = Annotated[int, "COUNT", "How many earlier generations to keep for a rollback."]
TopologyFile = Annotated[Path | None, "FILE", "Do it at all sites of this topology that share the namespace."]
Without = Annotated[
    list[str] | None,
    "SITE",
    "A site that is down; may be given several times. It gets the data later, by its links.",
]


def publish(
    file: Annotated[Path, "FILE", "The data: a Parquet, CSV or JSON Lines file, or a directory of such."],
    site: OpenSite,
    output: Output,
    name: NamespaceName,
    key: Annotated[str, "COLUMN", "The column with the keys."] = "key",
    base: Annotated[
        Version | None,
        "VERSION|TIME",
        "The time of the data; changes made since then are kept. Now by default.",
    ] = None,
    keep: Keep = KEPT_GENERATIONS,
    duplicates: Annotated[
        str, "fail|last", "If a key is in several rows: fail, or take the last row."
    ] = "fail",
    dry_run: Annotated[bool, "Only read the file and check its rows."] = False,
    resume: Annotated[
        str | None, "PUBLISHER", "Name this publication; after a failure, the same command continues it."
    ] = None,
    wait: Annotated[
        timedelta | None, "DURATION", "How long to wait for the end of another publication."
    ] = None,
    topology: TopologyFile = None,
    without: Without = None,
    refused: Annotated[
        Path | None, "CSV", "Write invalid rows to this file, and continue without them."
    ] = None,
    refused_max: Annotated[int, "ROWS", "Fail after more than ROWS refused rows.", {"min": 0}] = REFUSED_MAX,
) -> None:
    """Replace a namespace by the rows of a file, at once.

    Readers find the old rows before the swap and the new rows after it, never a mixture. Writes continue
    meanwhile: those made since --base are kept, and win over the file. If the file has the columns KEY and
    `value` only, the value is that column; otherwise the other columns of a row become a JSON object. Rows
    may be in any order.

    At the swap a subscription ends with an error, and can continue from a snapshot; so does a feed without
    --on-generation. With --topology, all sites load the rows before any of them swaps.

    Examples:
      floodmark publish prices.parquet data/oslo prices
      floodmark publish prices.parquet grpc://oslo:7100 prices --base 2026-01-05T00:00:00Z --topology t.toml
      floodmark publish prices.jsonl data/oslo prices --key sku --resume nightly --refused refused.csv
    """
    with ExitStack() as stack:
        on_refused = _open_refused(stack, refused, refused_max)
        track = stack.enter_context(tracked("loading"))
        rows = _read(file, key)
        if dry_run:
            taken, left = site.generations.check(
                name, rows, duplicates=duplicates, on_refused=on_refused, report=track
            )
            output.result({"rows": taken, "refused": left}, f"rows: {taken:,}, refused: {left:,}")
            return
        published = site.generations.publish(
            name,
            rows,
            others=_open_members(stack, site, name, topology, without or []),
            without=without or [],
            duplicates=duplicates,
            base=base,
            keep=keep,
            publisher=resume,
            wait=wait,
            on_refused=on_refused,
            report=track,
        )
    output.report(published)


def _open_refused(stack: ExitStack, file: Path | None, rows_max: int) -> Refuse | None:
    """A function that writes refused rows to a file; None without a file."""
    if file is None:
        return None
    return RefusedRows(stack.enter_context(file.open("w", newline="")), rows_max).add


def _open_members(
    stack: ExitStack, site: floodmark.Site, name: str, file: Path | None, without: list[str]
) -> list[floodmark.Site]:
    """Connect to the other sites of a topology that share a namespace, except those that are away."""
    if file is None:
        return []
    topology = read_topology(file)
    apart = [each for each in topology.sites if each not in topology.active_members(name)]
    others = open_others(topology, site.host.identity.site, *without, *apart)
    return [stack.enter_context(other) for _, other in others]


@commands.command("list")
def list_generations(site: OpenSite, output: Output, name: NamespaceName) -> None:
    """List the generations of a namespace."""
    output.rows([*map(_fields, site.generations.list(name))], _COLUMNS)


@commands.command()
def show(site: OpenSite, output: Output, name: NamespaceName, number: Number) -> None:
    """Show one generation.

    Example:
      floodmark generation show data/oslo prices 2
    """
    found = next((each for each in site.generations.list(name) if each.number == number), None)
    if found is None:
        raise Usage(f"{name!r} has no generation {number}", f"floodmark generation list SITE {name}")
    output.details(_fields(found), {**_COLUMNS, "replayed": "replayed"})


@commands.command()
def rollback(
    site: OpenSite,
    output: Output,
    name: NamespaceName,
    number: Annotated[int | None, "NUMBER", "The generation; the previous one by default."] = None,
    keep: Keep = KEPT_GENERATIONS,
    wait: Annotated[
        timedelta, "DURATION", "How long to wait for changes over links, or for another publication."
    ] = ARRIVAL,
    topology: TopologyFile = None,
    without: Without = None,
) -> None:
    """Return to an earlier generation, and keep all changes since.

    With --topology, all sites that share the namespace return to the earlier generation of SITE, once the
    links have delivered the changes from before the present one. After an interrupted rollback, first check
    `floodmark generation list`: it may have been completed.

    Examples:
      floodmark generation rollback data/oslo prices
      floodmark generation rollback grpc://oslo:7100 prices --topology t.toml
    """
    with ExitStack() as stack:
        track = stack.enter_context(tracked("rolling back"))
        generation = site.generations.rollback(
            name,
            number,
            others=_open_members(stack, site, name, topology, without or []),
            without=without or [],
            keep=keep,
            wait=wait,
            report=track,
        )
    output.details(_fields(generation), _COLUMNS)


@commands.command()
def drop(site: OpenSite, output: Output, name: NamespaceName, number: Number) -> None:
    """Remove a generation that is not read.

    One whose publication was left; or an old one, if it ended before the namespace's retention.

    Example:
      floodmark generation drop data/oslo prices 2
    """
    site.generations.drop(name, number)
    output.result({"name": name, "generation": number, "dropped": True}, f"dropped generation {number}")


def _fields(generation: GenerationRow) -> dict[str, Any]:
    return {**plain(generation), "state": generation.state.value}


def _read(path: Path, key: str) -> Iterator[tuple[Any, Any] | pyarrow.RecordBatch]:
    """The rows of a file as keys and values, in columns if these are bytes or text."""
    sample = next(path.glob("*.*"), path) if path.is_dir() else path
    kind = _FORMATS.get(sample.suffix.lower())
    if kind is None or not path.exists():
        raise Usage(
            f"{path} is not there, or not a file of a known kind", f"name one of: {', '.join(_FORMATS)}"
        )
    try:
        yield from _rows(path, kind, key)
    except pyarrow.ArrowException as error:
        raise Usage(
            f"{path} cannot be read as {kind}: {str(error).splitlines()[0]}",
            "the namespace stays as it was; mend the file, and publish it again",
        ) from error


def _rows(path: Path, kind: str, key: str) -> Iterator[tuple[Any, Any] | pyarrow.RecordBatch]:
    data = pyarrow.dataset.dataset(path, format=kind)
    names = data.schema.names
    if key not in names or len(names) < 2:
        raise SchemaMismatch(
            f"{path} has the columns {', '.join(names)}; the keys are read from {key!r}, and the values from "
            "`value` or from all others. Name the column of keys with --key"
        )
    is_plain = set(names) == {key, "value"}
    for batch in data.to_batches(batch_size=_BATCH_ROWS):
        if is_plain and all(kind in _BYTES for kind in batch.schema.types):
            yield pyarrow.RecordBatch.from_arrays([batch[key], batch["value"]], names=["key", "value"])
            continue
        keys = map(_encode, batch.column(key).to_pylist())
        if is_plain:
            yield from zip(keys, map(_encode, batch.column("value").to_pylist()), strict=True)
        else:
            others = batch.drop_columns([key]).to_pylist()
            yield from zip(keys, map(msgspec.json.encode, others), strict=True)


def _encode(value: Any) -> Any:
    """Text as UTF-8, numbers as digits, any other value as it is: later, all but bytes are refused."""
    if isinstance(value, str):
        return value.encode()
    return str(value).encode() if isinstance(value, int | float) else value
