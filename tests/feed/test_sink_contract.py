"""Every sink that comes with Floodmark keeps the contract."""

import io
import json
from base64 import b64decode
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest

from floodmark.feed.sinks.base import Sink, SinkContext
from floodmark.feed.sinks.blackhole import BlackholeSink
from floodmark.feed.sinks.parquet import ParquetSink
from floodmark.feed.sinks.stdout import StdoutSink
from floodmark.files.directory import directory_at
from floodmark.model.change import Stamp
from floodmark.testing.sinks import Delivered, Keeps, MemorySinks, SinkContract, Subject


class TestMemorySink(SinkContract):
    @pytest.fixture
    def subject(self) -> Subject:
        return MemorySinks()


class Blackhole:
    keeps = Keeps.NOTHING

    def open(self, _context: SinkContext) -> Sink:
        return BlackholeSink()

    def read(self) -> list[Delivered]:
        return []


class TestBlackholeSink(SinkContract):
    @pytest.fixture
    def subject(self) -> Subject:
        return Blackhole()


class Stdout:
    keeps = Keeps.EVERY_DELIVERY

    def __init__(self) -> None:
        self._stream = io.BytesIO()

    def open(self, _context: SinkContext) -> Sink:
        return StdoutSink(self._stream)

    def read(self) -> list[Delivered]:
        return [self._read(json.loads(line)) for line in self._stream.getvalue().splitlines()]

    def _read(self, fields: dict[str, Any]) -> Delivered:
        key, value = _bytes(fields, "key"), _bytes(fields, "value")
        assert key is not None
        assert fields["type"] == ("delete" if value is None else "upsert")
        expires_at = fields["expires_at"]
        return Delivered(
            key,
            value,
            Stamp(int(fields["origin_version"]), fields["origin_site_id"]),
            None if expires_at is None else int(datetime.fromisoformat(expires_at).timestamp()),
        )


def _bytes(fields: dict[str, Any], name: str) -> bytes | None:
    if f"{name}_base64" in fields:
        return b64decode(fields[f"{name}_base64"])
    text = fields[name]
    return None if text is None else text.encode()


class TestStdoutSink(SinkContract):
    @pytest.fixture
    def subject(self) -> Subject:
        return Stdout()


class Parquet:
    keeps = Keeps.EVERY_CHANGE

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self, context: SinkContext) -> Sink:
        return ParquetSink(directory_at(str(self._directory)), context)

    def read(self) -> list[Delivered]:
        table = pyarrow.dataset.dataset(self._directory, format="parquet").to_table()
        if not table.num_rows:
            return []
        rows = table.sort_by("_commit_version").to_pylist()
        return [
            Delivered(
                row["key"],
                row["value"],
                Stamp(row["_origin_version"], row["_origin_site"]),
                None if row["_expires_at"] is None else int(row["_expires_at"].timestamp()),
            )
            for row in rows
        ]


class TestParquetSink(SinkContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return Parquet(tmp_path / "changes")
