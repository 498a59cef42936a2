"""Fixtures for the tests of Spark: a shared session, a cluster, a Connect server, and sites to work on.

`spark` is for most tests.  `local_cluster` and `connect` run functions in processes of their own:
`local_cluster.run(function, *arguments)` calls `function(session, *arguments)` there.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession
from tests.links.support import Served, ServeSite, serving_sites
from tests.nodes import LOOPBACK
from tests.server.processes import Process, start_server
from tests.server.support import token_of, write_roles
from tests.spark import support_connect
from tests.spark.processes import SparkProcess

import floodmark
from floodmark.clock import system_time_ms
from floodmark.model.access import Role
from floodmark.server import Server, ServerOptions, serve
from floodmark.site import Site
from floodmark.spark.session import SparkOptions, open_session

ROOT = Path(__file__).resolve().parents[2]

TEST_CONF = {
    "spark.sql.shuffle.partitions": "2",
    # Python workers stay for the next test.
    "spark.python.worker.reuse": "true",
    "spark.sql.streaming.stopTimeout": "240s",
    # A worker may start slowly on a machine under load.
    "spark.python.authenticate.socketTimeout": "240s",
}


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """What processes are started with for a while; Spark's workers find the modules of the tests."""
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PYTHONPATH": search, **variables}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def event_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the shared session's event log."""
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="session")
def spark_session(event_log: Path) -> Iterator[SparkSession]:
    """The shared session, for fixtures that outlive a test."""
    logging = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": event_log.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
    }
    with ExitStack() as stack:
        with environment():
            options = SparkOptions(master="local[2]", conf=TEST_CONF | logging)
            session = stack.enter_context(open_session(options))
        yield session


@pytest.fixture
def spark(spark_session: SparkSession) -> Iterator[SparkSession]:
    """The shared session; queries that the test leaves running are stopped."""
    yield spark_session
    for query in spark_session.streams.active:
        query.stop()


@pytest.fixture(scope="session")
def local_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkProcess]:
    """A session whose workers are two processes beside the driver, as on a cluster."""
    # Such workers keep their logs where Spark is: give it a place that is only the tests'.
    home = tmp_path_factory.mktemp("spark-home")
    for part in ("bin", "jars", "python"):
        (home / part).symlink_to(Path(str(pyspark.__file__)).parent / part)
    with environment(SPARK_HOME=str(home)):
        process = SparkProcess(SparkOptions(master="local-cluster[2,1,1024]", conf=TEST_CONF))
    yield process
    process.close()


@pytest.fixture(scope="session")
def connect_url() -> Iterator[str]:
    """The URL of a Spark Connect server."""
    command = [sys.executable, support_connect.__file__, "local[2]"]
    with environment():
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server:
        url = server.stdout.readline().strip()
        assert url.startswith("sc://"), "the Spark Connect server did not start; its errors stand above"
        yield url
        server.communicate(timeout=60)


@pytest.fixture(scope="session")
def connect(connect_url: str) -> Iterator[SparkProcess]:
    """A client of the Spark Connect server."""
    process = SparkProcess(SparkOptions(remote=connect_url))
    yield process
    process.close()


@pytest.fixture
def serve_site(tmp_path: Path) -> Iterator[ServeSite]:
    """Serves as many sites as a test needs."""
    with serving_sites(tmp_path) as start:
        yield start


@pytest.fixture
def served(serve_site: ServeSite) -> Served:
    """A site that everybody may use."""
    return serve_site()


@pytest.fixture
def set_back(tmp_path: Path) -> Iterator[Served]:
    """A site whose versions are an hour ahead: its clock was, and has been set back to the right time."""
    ahead_ms = [3_600_000]
    directory = tmp_path / "ahead"
    site = floodmark.open(directory, site="oslo", time_source=lambda: system_time_ms() + ahead_ms[0])
    with serve(site, LOOPBACK) as server:
        site.create_namespace("users")
        site.create_namespace("profiles", merge="fields")
        site.heartbeat()
        ahead_ms[0] = 0
        yield Served(site=site, server=server, directory=directory)


@pytest.fixture
def site(served: Served) -> Site:
    """The site in the server's process, which is this one."""
    return served.site


@pytest.fixture
def server(served: Served) -> Server:
    return served.server


@pytest.fixture
def url(served: Served) -> str:
    return served.url


@pytest.fixture
def guarded(serve_site: ServeSite, tmp_path: Path) -> Served:
    """A site with a token for each role on everything, and for each role on the namespace `users` alone."""
    return serve_site("guarded", ServerOptions(access=write_roles(tmp_path / "access.toml", "users")))


@pytest.fixture
def token_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes the file with the token of a role at `guarded`: `token_file(Role.READ, "users")`."""

    def write(role: Role, namespace: str | None = None) -> Path:
        path = tmp_path / f"{token_of(role, namespace)}.txt"
        path.write_text(token_of(role, namespace) + "\n", "utf-8")
        return path

    return write


@pytest.fixture
def server_process(tmp_path: Path) -> Iterator[Process]:
    """A server that a test may kill: `.said` is its URL, `.kill()` is kill -9."""
    process = start_server(tmp_path / "process")
    yield process
    process.kill()


@pytest.fixture(params=["url", "directory"])
def location(request: pytest.FixtureRequest, served: Served) -> Callable[[], str]:
    """Where to read from, once everything that was written so far can be read there."""

    def find() -> str:
        if request.param == "url":
            return served.url
        # A directory is known to be complete up to the last heartbeat.
        served.site.heartbeat()
        return str(served.directory)

    return find
