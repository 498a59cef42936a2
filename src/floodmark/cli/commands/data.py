"""put, get, update, add, delete and scan: one key or a range of keys of one namespace."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import SEEK_END, BytesIO
from pathlib import Path
from shutil import copyfileobj
from typing import Annotated, Any, BinaryIO, NoReturn, cast

import typer

import floodmark
from floodmark.cli.arguments import BYTES_HELP, AtOption, Key, KeyOptions, NamespaceName, OpenSite, Ttl, parse
from floodmark.cli.failures import FINDING, Usage
from floodmark.cli.render.output import Output, note
from floodmark.cli.render.progress import counted, tracked
from floodmark.cli.render.text import show_expiry, show_time
from floodmark.layers.large_values import CHUNK_BYTES, LARGE_VALUES, LargeValues
from floodmark.layers.ports import layer_of
from floodmark.model import Version
from floodmark.model.limits import VALUE_BYTES_MAX
from floodmark.model.text import json_bytes, read_bytes, show_bytes

Value = Annotated[
    str | None,
    typer.Argument(
        metavar="VALUE", help=f"The value: {BYTES_HELP} A single - reads it from stdin, as it is."
    ),
]
Fields = Annotated[str, "JSON", "A JSON object of the fields to write. A single - reads it from stdin."]


def put(
    site: OpenSite,
    output: Output,
    namespace: NamespaceName,
    key: Key,
    value: Value = None,
    ttl: Ttl = None,
    file: Annotated[Path | None, "FILE", "Read the value from a file, as it is."] = None,
) -> None:
    """Write a value, and print its version.

    The value is on disk when the command ends. A key or value that starts with a dash
    goes behind --. A namespace that was created with --large-values takes files of any size.

    Examples:
      floodmark put data/oslo users ada countess
      floodmark put data/oslo sessions 0x00ff token --ttl 90s
      floodmark put data/oslo users portrait - < ada.png
      floodmark put data/oslo configs switch-17 --file dump.xml
    """
    if (value is None) == (file is None):
        raise Usage("a value is needed, or --file, and not both", "floodmark put --help")
    records = _find(site, namespace)
    if isinstance(records, LargeValues):
        if ttl is not None:
            raise Usage("large values do not expire", "leave out --ttl, and delete the value instead")
        with _source(value, file) as source, tracked("bytes written") as show:
            version = records.put(key, cast(BinaryIO, _Shown(source, "bytes written", show)))
    elif file is not None:
        with _source(None, file) as source:
            version = records.put(key, source.read(VALUE_BYTES_MAX + 1), ttl=ttl)
    else:
        version = records.put(key, _read(cast(str, value), parse(read_bytes)), ttl=ttl)
    _print_version(output, namespace, key, version)


def update(
    site: OpenSite,
    output: Output,
    namespace: NamespaceName,
    key: Key,
    fields: Fields,
    ttl: Ttl = None,
) -> None:
    """Write some fields of a record, and print the version.

    For a namespace that was created with --merge fields. The other fields stay as they are;
    a field that is null is deleted; --ttl holds for the fields that are named.

    Examples:
      floodmark update data/oslo profiles ada '{"city": "London", "title": null}'
      floodmark update data/oslo profiles ada '{"session": "x1"}' --ttl 30m
    """
    version = site.namespace(namespace).update(key, _read(fields, str.encode), ttl=ttl)
    _print_version(output, namespace, key, version)


def add(
    site: OpenSite,
    output: Output,
    namespace: NamespaceName,
    key: Key,
    number: Annotated[
        int, typer.Argument(metavar="NUMBER", help="A whole number; after -- if negative.")
    ] = 1,
) -> None:
    """Add to a counter, and print the version.

    For a namespace that was created with --merge counter. A counter begins at 0.

    Examples:
      floodmark add data/oslo visits home
      floodmark add data/oslo visits home -- -3
    """
    version = site.namespace(namespace).add(key, number)
    _print_version(output, namespace, key, version)


def get(
    site: OpenSite,
    output: Output,
    namespace: NamespaceName,
    key: Key,
    at: AtOption = None,
    raw: Annotated[bool, "Write the value's bytes and nothing else."] = False,
    file: Annotated[
        Path | None, "FILE", "Write the value's bytes to a file, which is renamed into place when complete."
    ] = None,
) -> None:
    """Read the value of a key, now or in the past.

    Text is printed as it is, anything else as hexadecimal after 0x; --raw and --file write the
    exact bytes. The exit code is 1 if there is no such key.

    Examples:
      floodmark get data/oslo users ada
      floodmark get data/oslo users ada --at 2026-01-31T12:00:00Z
      floodmark get data/oslo users portrait --raw > ada.png
      floodmark get data/oslo configs switch-17 --file dump.xml
    """
    records = _find(site, namespace)
    about: dict[str, object] = {"namespace": namespace, **json_bytes("key", key)}
    if isinstance(records, LargeValues):
        _get_large(records, output, key, at, about, raw=raw, file=file)
        return
    record = records.record(key, at=at)
    if record is None:
        _not_found(output, about, namespace, key)
    if file is not None:
        _write_file(file, BytesIO(record.value))
        output.result({**about, "found": True, "bytes": len(record.value), "file": str(file)}, str(file))
        return
    if raw and not output.json:
        output.raw(record.value)
        return
    output.result(
        {
            **about,
            "found": True,
            **json_bytes("value", record.value),
            "version": str(record.version),
            "time": show_time(record.version),
            "origin_version": str(record.stamp.version),
            "origin_site_id": record.stamp.site,
            "expires_at": show_expiry(record.expires_at),
        },
        _show_text(record.value),
    )


def delete(
    site: OpenSite,
    output: Output,
    namespace: NamespaceName,
    key: Key,
    field: Annotated[list[str] | None, "NAME", "Delete only this field; may be given several times."] = None,
) -> None:
    """Delete a key, and print the version of the deletion.

    It is no error if the key does not exist. Older versions can still be read with --at until
    they are collected.

    Examples:
      floodmark delete data/oslo users ada
      floodmark delete data/oslo profiles ada --field city --field title
    """
    records = site.namespace(namespace) if field else _find(site, namespace)
    if isinstance(records, LargeValues):
        version = records.delete(key)
    else:
        version = records.delete_field(key, *field) if field else records.delete(key)
    _print_version(output, namespace, key, version)


def scan(
    site: OpenSite,
    output: Output,
    namespace: NamespaceName,
    keys: KeyOptions,
    limit: Annotated[int | None, "ROWS", "Print at most this many keys.", {"min": 0}] = None,
    reverse: Annotated[bool, "Print from the last key to the first."] = False,
    at: AtOption = None,
) -> None:
    """Print keys and values in order, all as of one version.

    A line has a key, a tab and its value, or the size of its value in a namespace of large values.

    Examples:
      floodmark scan data/oslo users --prefix a --limit 10
      floodmark scan data/oslo users --start-key a --end-key m --reverse
      floodmark scan data/oslo users --at 2026-01-31T12:00:00Z --json > users.jsonl
    """
    records = _find(site, namespace)
    options: Any = {"prefix": keys.prefix, "limit": limit, "reverse": reverse, "at": at}
    if isinstance(records, LargeValues):
        for key, size in counted(records.sizes(keys.start_key or b"", keys.end_key, **options), "keys read"):
            if output.json:
                output.object({**json_bytes("key", key), "bytes": size})
            else:
                output.line((show_bytes(key), "cyan"), "\t", f"{size:,} bytes")
        return
    rows = records.scan(keys.start_key or b"", keys.end_key, **options)
    for key, value in counted(rows, "keys read"):
        if output.json:
            output.object({**json_bytes("key", key), **json_bytes("value", value)})
        else:
            output.line((show_bytes(key), "cyan"), "\t", show_bytes(value))


def _find(site: floodmark.Site, name: str) -> floodmark.Namespace | LargeValues:
    """A namespace, as `LargeValues` if it holds such."""
    records = site.namespace(name)
    return LargeValues(site, name) if layer_of(records) == LARGE_VALUES else records.stored


def _get_large(
    records: LargeValues,
    output: Output,
    key: bytes,
    at: Version | None,
    about: dict[str, object],
    *,
    raw: bool,
    file: Path | None,
) -> None:
    """Print a large value, or copy it to stdout or a file."""
    try:
        stream = records.open(key, at=at)
    except floodmark.KeyNotFound:
        _not_found(output, about, records.name, key)
    with stream:
        size = stream.seek(0, SEEK_END)
        stream.seek(0)
        if file is not None:
            _write_file(file, stream)
            output.result({**about, "found": True, "bytes": size, "file": str(file)}, str(file))
        elif raw and not output.json:
            while part := stream.read(CHUNK_BYTES):
                output.raw(part)
        elif size > VALUE_BYTES_MAX:
            raise Usage(f"the value has {size:,} bytes", "copy it with --file FILE, or with --raw")
        else:
            value = stream.read()
            output.result(
                {**about, "found": True, **json_bytes("value", value), "bytes": size}, _show_text(value)
            )


def _not_found(output: Output, about: dict[str, object], namespace: str, key: bytes) -> NoReturn:
    if output.json:
        output.object({**about, "found": False})
    note(f"not found: {show_bytes(key)} in namespace {namespace}")
    raise typer.Exit(FINDING)


class _Shown:
    """A binary file that shows how many bytes were read from it."""

    def __init__(self, source: BinaryIO, what: str, show: Callable[[str, int], None]) -> None:
        self._source = source
        self._what = what
        self._show = show
        self._bytes = 0

    def read(self, size: int) -> bytes:
        part = self._source.read(size)
        self._bytes += len(part)
        self._show(self._what, self._bytes)
        return part


@contextmanager
def _source(value: str | None, file: Path | None) -> Iterator[BinaryIO]:
    """The bytes of an argument, of stdin for `-`, or of a file."""
    if file is not None:
        with file.open("rb") as source:
            yield source
    elif value == "-":
        yield sys.stdin.buffer
    else:
        yield BytesIO(parse(read_bytes)(value))


def _write_file(file: Path, source: BinaryIO) -> None:
    """Copy a stream to a file, which gets its name once it is complete."""
    staged = file.with_name(f".{file.name}.new")
    try:
        with staged.open("wb") as target, tracked("bytes read") as show:
            copyfileobj(cast(BinaryIO, _Shown(source, "bytes read", show)), target, CHUNK_BYTES)
        staged.replace(file)
    finally:
        staged.unlink(missing_ok=True)


def _read(argument: str, read: Callable[[str], bytes]) -> bytes:
    """The bytes that an argument stands for: those of stdin for `-`."""
    return sys.stdin.buffer.read(VALUE_BYTES_MAX + 1) if argument == "-" else read(argument)


def _print_version(output: Output, namespace: str, key: bytes, version: Version) -> None:
    about = {"namespace": namespace, **json_bytes("key", key)}
    output.result({**about, "version": str(version), "time": show_time(version)}, str(version))


def _show_text(value: bytes) -> str:
    """A value by itself: unlike in a list, it may be text of several lines."""
    shown = value.removesuffix(b"\n")
    lines = shown.replace(b"\t", b" ").split(b"\n")
    if any(show_bytes(line).startswith("0x") for line in lines):
        return show_bytes(value)
    return shown.decode()
