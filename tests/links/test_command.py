"""`floodmark replicate --runner process` as a process: without Spark, ended by signals, small."""

import json
import signal
import subprocess
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
from tests.cli.support import FLOODMARK, PROCESS_SECONDS_MAX, get_page, read_pages_url, run, run_process
from tests.links.support import ServeSite, describe
from tests.server.support import open_memory
from tests.sizes import only
from tests.spark.support_garbage import collect_old
from tests.waiting import wait_until

from floodmark.cli.failures import DONE
from floodmark.feed.named.feeds import FeedState
from floodmark.model.errors import InvalidArgument
from floodmark.site import feeds as site_feeds

INSTEAD = "floodmark replicate SOURCE TARGET --runner process"
# Puts a package `pyspark` that cannot be imported before the installed one.
NO_SPARK = 'raise ModuleNotFoundError("no Spark here", name="pyspark")\n'


@pytest.fixture
def without_spark(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which neither pyspark nor Java can be used."""
    package = tmp_path / "packages" / "pyspark"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text(NO_SPARK, "utf-8")
    return {"PYTHONPATH": str(package.parent), "JAVA_HOME": str(tmp_path / "nowhere")}


def test_a_directory_is_copied_to_another_without_spark(
    tmp_path: Path, without_spark: dict[str, str]
) -> None:
    oslo, rome = tmp_path / "oslo", tmp_path / "rome"
    for directory in (oslo, rome):
        assert run("init", directory, "--site", directory.name).code == DONE
    run("namespace", "create", oslo, "users")
    run("put", oslo, "users", "ada", "countess")
    copied = run_process("replicate", oslo, rome, "--once", "--runner", "process", "--json", **without_spark)
    assert copied.code == DONE, copied.errors
    assert run("get", rome, "users", "ada").text == "countess\n"


def test_a_copy_that_begins_with_a_snapshot_says_what_came_by_it(serve_site: ServeSite) -> None:
    oslo, rome = serve_site("oslo"), serve_site("rome")
    users = oslo.site.create_namespace("users", retention=timedelta(milliseconds=1))
    users.put_many({b"ada": b"countess", b"grace": b"admiral"})
    collect_old(oslo.site)
    command = "replicate", oslo.url, rome.url, "--once", "--runner", "process"
    assert run(*command).text.startswith("copied 2 records by snapshot and 0 changes in ")
    users.put(b"ada", b"enchantress")
    assert run(*command).text.startswith("copied 1 change in ")


@pytest.mark.parametrize("ending", only([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_ends_replication_with_its_summary(
    serve_site: ServeSite, tmp_path: Path, ending: signal.Signals
) -> None:
    served = [serve_site(name) for name in ("oslo", "rome")]
    oslo, rome = (each.site for each in served)
    file = tmp_path / "topology.toml"
    urls = {each.site.name: each.url for each in served}
    file.write_text(describe(urls, {site.name: site.id for site in (oslo, rome)}), "utf-8")
    command = [FLOODMARK, "replicate", "--topology", str(file), "--runner", "process", "--json"]
    command += ["--metrics", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        pages = read_pages_url(process)
        wait_until(lambda: all("users" in site.namespaces() for site in (oslo, rome)), "no topology")
        oslo.namespace("users").put(b"ada", b"countess")
        wait_until(lambda: rome.namespace("users").get(b"ada") is not None, "nothing has arrived")
        shown = 'floodmark_replicate_changes_total{source="oslo",target="rome"} 1.0'
        wait_until(lambda: shown in get_page(f"{pages}/metrics"), "the change is not counted")
        assert get_page(f"{pages}/readyz") == "ok\n"
        process.send_signal(ending)
        output, _ = process.communicate(timeout=PROCESS_SECONDS_MAX)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == DONE
    summary = json.loads(output)
    assert (summary["wrong"], len(summary["links"])) == (0, 2)


def test_a_feed_to_another_site_is_refused_and_a_stored_one_fails_with_the_command_to_use() -> None:
    with open_memory("oslo") as site:
        site.create_namespace("users").put(b"ada", b"1")
        with pytest.raises(InvalidArgument, match=INSTEAD):
            site.feeds.create("copy", "users", "floodmark://rome:7100/users")
        # As an earlier release stored it.
        with patch.object(site_feeds, "require_sink"):
            site.feeds.create("copy", "users", "floodmark://rome:7100/users", until=site.now())
        with pytest.raises(InvalidArgument, match=INSTEAD):
            site.feeds.runner("copy", sinks=["floodmark://rome:7100"]).run()
        assert site.feeds.show("copy").state is FeedState.ERROR
