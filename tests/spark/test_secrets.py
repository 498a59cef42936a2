"""No secret stands in a plan, an error or an event log, and what would put one there is refused."""

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from uuid import uuid4

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from tests.links.support import Served, ServeSite
from tests.server.certificates import Certificates, make_certificates
from tests.server.support import token_of, write_roles
from tests.waiting import wait_until

from floodmark.model.access import Role
from floodmark.model.errors import InvalidOption, NotAuthenticated
from floodmark.server import ServerOptions
from floodmark.spark.runtime.failures import find_error

SECRET = "open-sesame-4711"
URL_WITH_PASSWORD = f"grpc://ada:{SECRET}@127.0.0.1:7100"


def load(spark: SparkSession, url: str, schema: str | None = None, **options: str) -> DataFrame:
    reader = spark.read.format("floodmark").options(namespace="users", **options)
    return (reader if schema is None else reader.schema(schema)).load(url)


def stream(spark: SparkSession, url: str, **options: str) -> DataFrame:
    reader = spark.readStream.format("floodmark").options(namespace="users", **options)
    return reader.option("readChangeFeed", "true").load(url)


def write(spark: SparkSession, url: str, **options: str) -> None:
    rows = spark.createDataFrame([("a", "b")], "key string, value string")
    rows.write.format("floodmark").mode("append").options(namespace="users", **options).save(url)


USES: dict[str, Callable[..., object]] = {
    "read": load,
    "read with a schema": lambda spark, url, **options: load(spark, url, "key string", **options).collect(),
    "stream": stream,
    "write": write,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("url", "options"),
    [(URL_WITH_PASSWORD, {}), ("grpc://127.0.0.1:7100", {"Token": SECRET})],
    ids=["password", "token"],
)
def test_secret_in_an_option_is_refused_and_not_repeated(
    spark: SparkSession, use: str, url: str, options: dict[str, str]
) -> None:
    with pytest.raises(PySparkException) as caught:
        USES[use](spark, url, **options)
    assert isinstance(find_error(caught.value), InvalidOption)
    assert SECRET not in str(caught.value)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def closed_site(serve_site: ServeSite, certificates: Certificates, tmp_path: Path) -> Served:
    """A site that wants to see a client's certificate and a token."""
    options = ServerOptions(
        tls_certificate=certificates.server.certificate_path,
        tls_key=certificates.server.key_path,
        tls_client_root=certificates.root_path,
        access=write_roles(tmp_path / "access.toml"),
    )
    return serve_site("closed", options)


def use_credentials(spark: SparkSession, url: str, options: dict[str, str]) -> list[str]:
    """What Spark shows of a read, a write, and reads that fail."""
    frame = load(spark, url, **options)
    with redirect_stdout(StringIO()) as plans:
        frame.explain(mode="extended")
        frame.explain(mode="formatted")
    shown = [plans.getvalue(), str(frame), str(frame.collect())]
    write(spark, url, **options)
    Path(options["tokenFile"]).write_text(f"not-{token_of(Role.WRITE)}", "utf-8")
    with pytest.raises(PySparkException) as caught:
        load(spark, url, **options).collect()
    assert isinstance(find_error(caught.value), NotAuthenticated)
    refused = load(spark, url, "key string", token=SECRET)
    with pytest.raises(PySparkException) as caught_later:
        refused.collect()
    return [*shown, str(caught.value), str(caught_later.value), str(refused)]


def read_events(spark: SparkSession, directory: Path) -> str:
    """The event log so far: Spark logs in order, so all is there that came before one last job."""
    last = f"the last job of {uuid4()}"
    spark.sparkContext.setJobDescription(last)
    spark.range(1).collect()
    spark.sparkContext.setJobDescription("")
    (path,) = (file for file in directory.iterdir() if not file.name.startswith("."))
    wait_until(lambda: last in path.read_text("utf-8"), "the last job is not in the event log")
    return path.read_text("utf-8")


def test_token_and_key_are_nowhere_but_in_their_files(
    spark: SparkSession,
    event_log: Path,
    closed_site: Served,
    certificates: Certificates,
    token_file: Callable[..., Path],
) -> None:
    closed_site.site.create_namespace("users").put(b"ada", b"1")
    ada, token = certificates.client("ada"), token_file(Role.WRITE)
    options = {
        "tokenFile": str(token),
        "tlsRootCertificate": str(certificates.root_path),
        "tlsCertificate": str(ada.certificate_path),
        "tlsKey": str(ada.key_path),
    }
    shown = use_credentials(spark, closed_site.url, options)
    events = read_events(spark, event_log)
    assert "SparkListenerSQLExecutionStart" in events
    assert "ada" in "".join(shown)
    secrets = [SECRET, token_of(Role.WRITE), *ada.key.decode().splitlines()[1:-1]]
    for text in [*shown, events]:
        assert not [secret for secret in secrets if secret in text]
