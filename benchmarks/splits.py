"""The median wall and processor time of a split at a site with many partitions.

.venv/bin/python benchmarks/splits.py --partitions 1000
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

import floodmark
from floodmark.codec.ordered import encode_namespace
from floodmark.host.embedded import EmbeddedHost

SPLITS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=int, default=1_000)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as directory,
        floodmark.open(Path(directory) / "site", site="oslo", background=False) as site,
    ):
        site.create_namespace("users")
        assert isinstance(site.host, EmbeddedHost)
        node, namespace = site.host.node, encode_namespace(1)
        for number in range(1, options.partitions):
            node.reshaping.split(namespace + b"%08d" % (2 * number))
        walls: list[float] = []
        processor: list[float] = []
        for number in range(SPLITS):
            began, began_processor = perf_counter(), process_time()
            node.reshaping.split(namespace + b"%08d" % (2 * number + 1))
            walls.append(perf_counter() - began)
            processor.append(process_time() - began_processor)
    wall_ms, processor_ms = (1_000 * statistics.median(each) for each in (walls, processor))
    sys.stdout.write(
        f"a split at {options.partitions:,} partitions: {wall_ms:.2f} ms, processor {processor_ms:.2f} ms\n"
    )


if __name__ == "__main__":
    main()
