"""put, get, update, add, delete and scan: one key or a range of keys of one namespace."""

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from floodmark.cli.arguments import BYTES_HELP, AtOption, Key, KeyOptions, NamespaceName, OpenSite, Ttl, parse
from floodmark.cli.failures import FINDING
from floodmark.cli.render.output import Output, note
from floodmark.cli.render.progress import counted
from floodmark.cli.render.text import show_bytes, show_expiry, show_time
from floodmark.model import Version
from floodmark.model.limits import VALUE_BYTES_MAX
from floodmark.model.text import json_bytes, read_bytes

Value = Annotated[str, "VALUE", f"The value: {BYTES_HELP} A single - reads it from stdin, as it is."]
Fields = Annotated[str, "JSON", "A JSON object of the fields to write. A single - reads it from stdin."]


def put(
    site: OpenSite,
    output: Output,
    namespace: NamespaceName,
    key: Key,
    value: Value,
    ttl: Ttl = None,
) -> None:
    """Write a value, and print its version.

    The value is on disk when the command ends. A key or value that starts with a dash
    goes behind --.

    Examples:
      floodmark put data/oslo users ada countess
      floodmark put data/oslo sessions 0x00ff token --ttl 90s
      floodmark put data/oslo users portrait - < ada.png
    """
    version = site.namespace(namespace).put(key, _read(value, parse(read_bytes)), ttl=ttl)
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
        int, typer.Argument(metavar="NUMBER", help="A whole number; behind -- if negative.")
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
) -> None:
    """Read the value of a key, now or in the past.

    Text is printed as it is, anything else as hexadecimal behind 0x; --raw writes the exact
    bytes. The exit code is 1 if there is no such key.

    Examples:
      floodmark get data/oslo users ada
      floodmark get data/oslo users ada --at 2026-01-31T12:00:00Z
      floodmark get data/oslo users portrait --raw > ada.png
    """
    record = site.namespace(namespace).record(key, at=at)
    about: dict[str, object] = {"namespace": namespace, **json_bytes("key", key)}
    if record is None:
        if output.json:
            output.object({**about, "found": False})
        note(f"not found: {show_bytes(key)} in namespace {namespace}")
        raise typer.Exit(FINDING)
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
    records = site.namespace(namespace)
    version = records.delete_field(key, *field) if field else records.delete(key)
    _print_version(output, namespace, key, version)


def scan(
    site: OpenSite,
    output: Output,
    namespace: NamespaceName,
    keys: KeyOptions,
    limit: Annotated[int | None, "ROWS", "At most so many keys.", {"min": 0}] = None,
    reverse: Annotated[bool, "From the last key to the first."] = False,
    at: AtOption = None,
) -> None:
    """Print keys and values in order, all as of one version.

    A line has a key, a tab and its value.

    Examples:
      floodmark scan data/oslo users --prefix a --limit 10
      floodmark scan data/oslo users --start-key a --end-key m --reverse
      floodmark scan data/oslo users --at 2026-01-31T12:00:00Z --json > users.jsonl
    """
    records = site.namespace(namespace)
    options: Any = {"prefix": keys.prefix, "limit": limit, "reverse": reverse, "at": at}
    rows = records.scan(keys.start_key or b"", keys.end_key, **options)
    for key, value in counted(rows, "keys read"):
        if output.json:
            output.object({**json_bytes("key", key), **json_bytes("value", value)})
        else:
            output.line((show_bytes(key), "cyan"), "\t", show_bytes(value))


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
