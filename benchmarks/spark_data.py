"""The same rows for Spark to read and write: in Parquet, a site's directory, its server, and PostgreSQL.

Rows have 100 bytes: a key of 16 and a value of 84, random, so that nothing compresses.  Every read ends in
one aggregate over both columns, so that no side can skip a column, and all sides must give the same result.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from shutil import rmtree
from time import perf_counter
from typing import Any, Final, NamedTuple

import numpy
import pyarrow
import pyarrow.parquet
from benchmarks.floodmark_peer import SITE, ServedSite
from benchmarks.harness import BATCH, KEY_BYTES, NAMESPACE, Database
from benchmarks.peers import PeerFailed
from benchmarks.peers.base import LOOPBACK, find_program, free_port, server_process
from benchmarks.peers.postgres import DATABASE, ROLE, PostgresServer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import bit_xor, count, xxhash64

import floodmark
from floodmark.model.errors import Unreachable
from floodmark.partition import FAMILIES

with suppress(ImportError):
    import psycopg

VALUE_BYTES: Final = 84
# Spark's tasks for a read, on every side: enough to keep two cores busy even if one task is slower.
TASKS: Final = 4

DRIVER: Final = "org.postgresql.Driver"
DRIVER_JAR: Final = Path("/usr/share/java/postgresql.jar")
INSTALL_DRIVER: Final = (
    "apt-get install --no-install-recommends libpostgresql-jdbc-java, or name it with --jdbc-jar"
)
TABLE: Final = "records"
# Without a fetch size, the driver fetches a whole table at once.  In interleaved trials of 1,000, 10,000 and
# 50,000 rows, the sizes differed by less than the spread, for fetches and for batches.
FETCH_ROWS: Final = 10_000
BATCH_ROWS: Final = 10_000
BLOCK_BYTES: Final = 8192


class Digest(NamedTuple):
    """A hash over all rows, whatever their order, and their number."""

    hash: int | None
    rows: int


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Random rows in a directory of Parquet files."""

    path: Path
    count: int

    def frame(self, spark: SparkSession) -> DataFrame:
        return spark.read.parquet(os.fspath(self.path))

    def batches(self) -> Iterator[list[tuple[bytes, bytes]]]:
        """The rows in batches of `BATCH`."""
        for file in sorted(self.path.iterdir()):
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(BATCH):
                yield list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def make_rows(path: Path, number: int, seed: int) -> Rows:
    """Write random rows; always the same for a seed."""
    path.mkdir()
    randomness = numpy.random.default_rng(seed)
    schema = pyarrow.schema([pyarrow.field(name, pyarrow.binary(), False) for name in ("key", "value")])
    share = -(number // -TASKS)
    for part, first in enumerate(range(0, number, share)):
        rows = min(share, number - first)
        columns = [_random_column(randomness, rows, length) for length in (KEY_BYTES, VALUE_BYTES)]
        table = pyarrow.table(columns, schema)
        # Where nothing repeats, dictionaries would only cost the readers.
        pyarrow.parquet.write_table(table, path / f"{part}.parquet", use_dictionary=False)
    return Rows(path=path, count=number)


def _random_column(randomness: numpy.random.Generator, rows: int, length: int) -> Any:
    offsets = numpy.arange(0, rows * length + 1, length, dtype=numpy.int32)
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(randomness.bytes(rows * length))]
    return pyarrow.Array.from_buffers(pyarrow.binary(), rows, buffers)


def digest(frame: DataFrame) -> Digest:
    """Read all rows of a frame, in one aggregate."""
    row: Any = frame.agg(bit_xor(xxhash64("key", "value")), count("*")).first()
    return Digest(*row)


def rows_per_second(open_frame: Callable[[], DataFrame], expected: Digest) -> float:
    """Rows a second from opening a frame to its aggregate.  Raises PeerFailed unless that is as expected."""
    begun = perf_counter()
    found = digest(open_frame())
    seconds = perf_counter() - begun
    require_equal(found, expected)
    return found.rows / seconds


def require_equal(found: Digest, expected: Digest) -> None:
    if found != expected:
        raise PeerFailed(f"read were {found}, and there should be {expected}")


# Sites


def fill_site(path: Path, namespaces: Mapping[str, Rows]) -> None:
    """Make a site with these rows, in commits of a thousand, and wait for its flushes and compactions."""
    with floodmark.open(path, site=SITE) as site:
        for name, rows in namespaces.items():
            namespace = site.create_namespace(name)
            for batch in rows.batches():
                namespace.put_many(batch, durability="async")
        site.sync()
    with Database(path / "engine", FAMILIES) as engine:
        engine.settle()


@contextmanager
def serving(path: Path, *, temporary: bool = False) -> Iterator[ServedSite]:
    """Serve a site from its own process, made if it does not exist, and removed at the end if `temporary`."""
    program = find_program("floodmark")
    if program is None:
        raise PeerFailed("the floodmark command is not beside this Python: make setup")
    home = path.with_name(f"{path.name}-server")
    home.mkdir()
    listen = f"{LOOPBACK}:{free_port()}"
    command: list[str | Path] = [program, "serve", path, "--listen", listen]
    if not path.exists():
        command += ["--site", path.name]
    with server_process(path.name, command, home) as process:
        served = ServedSite(url=f"grpc://{listen}")
        process.wait_until_ready(served.facts, (Unreachable,))
        yield served
    if temporary:
        rmtree(path)


def read_site(spark: SparkSession, location: str, namespace: str = NAMESPACE) -> DataFrame:
    """A snapshot of a namespace; `location` is a URL or a directory."""
    reader = spark.read.format("floodmark").option("namespace", namespace).option("minPartitions", TASKS)
    return reader.load(location)


def write_site(frame: DataFrame, url: str, namespace: str) -> None:
    frame.write.format("floodmark").option("namespace", namespace).mode("append").save(url)


# PostgreSQL


@dataclass(frozen=True, kw_only=True)
class Jdbc:
    """A PostgreSQL server that Spark reads and writes through JDBC."""

    server: PostgresServer

    @property
    def url(self) -> str:
        # The first option rewrites inserts to many rows in a statement, which made writes faster in
        # interleaved trials.  The second sends columns in binary from the first execution on, which made
        # reads faster, and writes not clearly.
        tuning = "reWriteBatchedInserts=true&prepareThreshold=-1"
        return f"jdbc:postgresql://{LOOPBACK}:{self.server.port}/{DATABASE}?{tuning}"

    def read(self, spark: SparkSession) -> DataFrame:
        """The whole table, in as many tasks as on the other sides."""
        properties = {"user": ROLE, "driver": DRIVER, "fetchsize": str(FETCH_ROWS)}
        return spark.read.jdbc(self.url, TABLE, predicates=self._block_ranges(), properties=properties)

    def write(self, frame: DataFrame) -> None:
        properties = {"user": ROLE, "driver": DRIVER, "batchsize": str(BATCH_ROWS)}
        frame.write.jdbc(self.url, TABLE, mode="append", properties=properties)

    def truncate(self) -> None:
        self.run(f"TRUNCATE {TABLE}")

    def settle(self) -> None:
        """Vacuum and analyze the table, and flush it to disk, as PostgreSQL itself would in time."""
        self.run(f"VACUUM ANALYZE {TABLE}", "CHECKPOINT")

    def run(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements; returns the rows of the last one, if it has any."""
        with closing(
            psycopg.connect(host=LOOPBACK, port=self.server.port, user=ROLE, dbname=DATABASE, autocommit=True)
        ) as connection:
            for statement in statements:
                cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description is not None else []

    def _block_ranges(self) -> list[str]:
        """Conditions that divide the table into ranges of blocks, so that each block is read once."""
        [(size,)] = self.run(f"SELECT pg_relation_size('{TABLE}')")
        borders = [size // BLOCK_BYTES * part // TASKS for part in range(TASKS)]
        ranges = [f"ctid >= '({first},0)' AND ctid < '({end},0)'" for first, end in pairwise(borders)]
        return [*ranges, f"ctid >= '({borders[-1]},0)'"]
