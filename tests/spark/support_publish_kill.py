"""A driver that publishes a DataFrame, one of whose tasks says that it has begun, and never ends.

python support_publish_kill.py URL NAMESPACE FILE [OPTION=VALUE...]
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pyarrow

from floodmark.spark.session import SparkOptions, open_session


def main(url: str, namespace: str, begun: str, *options: str) -> None:
    def stall(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in batches:
            ids = batch.column(0).to_pylist()
            keys = pyarrow.array([b"%d" % number for number in ids], pyarrow.binary())
            yield pyarrow.RecordBatch.from_arrays([keys, keys], names=["key", "value"])
            if 0 not in ids:
                Path(begun).touch()
                Event().wait()

    with open_session(SparkOptions(master="local[2]")) as spark:
        rows = spark.range(1_000, numPartitions=2).mapInArrow(stall, "key binary, value binary")
        writer = rows.write.format("floodmark").option("namespace", namespace)
        writer.options(**dict(each.split("=", 1) for each in options)).mode("overwrite").save(url)


if __name__ == "__main__":
    main(*sys.argv[1:])
