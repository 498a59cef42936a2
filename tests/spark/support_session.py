"""Opens sessions where nothing is set up, and says what it got, as JSON.

    python support_session.py NAME=VALUE...

One session is opened as it comes, and then one with the settings given.
"""

import json
import os
import sys

from pyspark.sql import SparkSession

from floodmark.spark.session import SparkOptions, find_session, open_session

SETTINGS = [
    "spark.app.name",
    "spark.driver.bindAddress",
    "spark.driver.host",
    "spark.master",
    "spark.sql.execution.arrow.maxRecordsPerBatch",
    "spark.sql.session.timeZone",
    "spark.sql.shuffle.partitions",
    "spark.ui.enabled",
    "spark.ui.showConsoleProgress",
]


def describe(session: SparkSession) -> dict[str, object]:
    """What a session runs on."""
    assert session.range(10).repartition(2).count() == 10
    java: str = session._jvm.System.getProperty("java.home")  # type: ignore[union-attr]
    return {"java.home": java, **{key: session.conf.get(key, None) for key in SETTINGS}}


def main(*conf: str) -> None:
    """Open both sessions."""
    before = dict(os.environ)
    options = SparkOptions(conf=dict(setting.split("=", 1) for setting in conf))
    with open_session() as first:
        said = [describe(first)]
    assert find_session() is None
    with open_session(options) as second:
        said.append(describe(second))
    # Spark itself leaves some; none of ours may stay.
    kept = {name for name in os.environ if before.get(name) != os.environ[name]}
    print(json.dumps({"sessions": said, "kept": sorted(kept)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
