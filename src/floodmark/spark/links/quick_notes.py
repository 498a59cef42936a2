"""Let Spark write down quickly how far a query is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pyspark.sql import SparkSession

_CHECKPOINT_FILES: Final = "spark.sql.streaming.checkpointFileManagerClass"
_QUICK_FILES: Final = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)


@contextmanager
def quick_notes(spark: SparkSession, checkpoint_url: str) -> Iterator[None]:
    """Let the query that is started here write its checkpoint in the quicker way, where there are two.

    For a local directory Spark starts programs to set the modes of the two files that it writes for each
    batch, unless it is told to go by the other of its two interfaces to file systems.
    """
    conf = spark.conf
    if not checkpoint_url.startswith("file:") or conf.get(_CHECKPOINT_FILES, None) is not None:
        yield
        return
    conf.set(_CHECKPOINT_FILES, _QUICK_FILES)
    try:
        yield
    finally:
        conf.unset(_CHECKPOINT_FILES)
