"""No secret stands in a plan, an error or an event log, and what would put one there is refused."""

from collections.abc import Callable
from contextlib import closing, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from tests.links.support import Served, ServeSite
from tests.server.certificates import Certificates, make_certificates
from tests.server.support import token_of, write_roles
from tests.spark.processes import SparkProcess

from floodmark.model.access import Role
from floodmark.model.errors import InvalidOption, NotAuthenticated
from floodmark.server import ServerOptions
from floodmark.spark.runtime.failures import find_error
from floodmark.spark.session import SparkOptions

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
    """For another process: what Spark shows of reads, of writes, and of one that fails."""
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


def test_token_and_key_are_nowhere_but_in_their_files(
    closed_site: Served, certificates: Certificates, token_file: Callable[..., Path], tmp_path: Path
) -> None:
    closed_site.site.create_namespace("users").put(b"ada", b"1")
    ada, token = certificates.client("ada"), token_file(Role.WRITE)
    options = {
        "tokenFile": str(token),
        "tlsRootCertificate": str(certificates.root_path),
        "tlsCertificate": str(ada.certificate_path),
        "tlsKey": str(ada.key_path),
    }
    events = tmp_path / "events"
    events.mkdir()
    conf = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
    }
    # The log is complete when the session is closed.
    with closing(SparkProcess(SparkOptions(master="local[1]", conf=conf))) as process:
        shown = process.run(use_credentials, closed_site.url, options)
    logs = [file.read_text("utf-8") for file in events.rglob("*") if file.is_file()]
    assert any("SparkListenerSQLExecutionStart" in text for text in logs)
    secrets = [SECRET, token_of(Role.WRITE), *ada.key.decode().splitlines()[1:-1]]
    assert "ada" in "".join(shown)
    for text in [*shown, *logs]:
        assert not [secret for secret in secrets if secret in text]
