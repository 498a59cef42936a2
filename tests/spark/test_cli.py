"""The jobs as commands: on directories and on servers, for people and for programs, with their exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.cli.support import run
from tests.links.support import Served, ServeSite

import floodmark

pytestmark = pytest.mark.usefixtures("spark")


@pytest.fixture
def oslo(tmp_path: Path) -> Path:
    """A directory with a site of 300 users, one of whom was deleted."""
    directory = tmp_path / "data" / "oslo"
    with floodmark.open(directory, site="oslo") as site:
        users = site.create_namespace("users")
        users.put_many({b"user-%03d" % number: b"value %d" % number for number in range(300)})
        users.delete(b"user-007")
    return directory


def read_all(directory: Path, namespace: str = "users") -> dict[bytes, bytes]:
    with floodmark.open(directory, background=False) as site:
        return dict(site.namespace(namespace).scan())


@pytest.mark.slow
def test_a_directory_is_backed_up_checked_and_restored(oslo: Path, tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    full = run("backup", oslo, "users", backups, "--json")
    assert full.code == 0, full.errors
    assert full.json["kind"] == "full"
    assert full.json["rows"]["live"] == 299
    with floodmark.open(oslo) as site:
        site.namespace("users").put(b"user-007", b"is back")
    assert run("backup", oslo, "users", backups, "--incremental").code == 0
    assert run("backup", "--check", backups).code == 0
    restored = run("restore", backups, oslo, "restored", "--json")
    assert restored.code == 0, restored.errors
    assert restored.json["verified"] is True
    assert read_all(oslo, "restored") == read_all(oslo)
    before = run("restore", backups, oslo, "before", "--at", full.json["version"], "--prefix", "user-00")
    assert before.code == 0, before.errors
    assert sorted(read_all(oslo, "before")) == [b"user-%03d" % number for number in range(10) if number != 7]


@pytest.mark.slow
def test_a_damaged_backup_is_a_finding(oslo: Path, tmp_path: Path) -> None:
    backups = tmp_path / "backups"
    assert run("backup", oslo, "users", backups).code == 0
    file = next(iter(sorted(backups.rglob("*.parquet"))))
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    checked = run("backup", "--check", backups)
    assert checked.code == 1
    refused = run("restore", backups, oslo, "restored")
    assert refused.code == 1
    assert file.name in refused.errors
    with floodmark.open(oslo) as site:
        assert site.namespaces() == ["users"]
    assert file.name in checked.text


@pytest.mark.parametrize("runner", ["process", "spark"])
def test_a_site_is_copied_to_a_server(oslo: Path, serve_site: ServeSite, runner: str) -> None:
    rome = serve_site("rome")
    copied = run("replicate", oslo, rome.url, "--once", "--json", "--runner", runner)
    assert copied.code == 0, copied.errors
    assert [(link["source"], link["target"]) for link in copied.json["links"]] == [("oslo", "rome")]
    assert dict(rome.site.namespace("users").scan()) == read_all(oslo)


def test_changes_come_into_a_table_each_once(oslo: Path, tmp_path: Path) -> None:
    table = tmp_path / "lake"
    first = run("export", oslo, "users", table, "--once", "--json")
    assert (first.code, first.json["rows"]) == (0, 301), first.errors
    assert run("export", oslo, "users", table, "--once", "--json").json["rows"] == 0
    assert DeltaTable(str(table)).to_pyarrow_table().num_rows == 301


def test_a_feed_runs_on_spark(oslo: Path, tmp_path: Path) -> None:
    files = tmp_path / "files"
    assert run("feed", "create", oslo, "lake", "users", "--sink", f"parquet:{files}").code == 0
    allowed = ("--allow", f"parquet:{files}")
    delivered = run("feed", "run", oslo, "lake", "--runner", "spark", "--once", "--json", *allowed)
    assert delivered.code == 0, delivered.errors
    # It begins with a snapshot of what is live.
    assert delivered.json["changes"] == 299
    assert list(files.rglob("*.parquet"))


def test_the_summary_can_be_read(oslo: Path, tmp_path: Path) -> None:
    text = run("backup", oslo, "users", tmp_path / "backups").text
    assert "namespace   users" in text
    assert "live: 299" in text


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("backup", "grpc://127.0.0.1:1", "users", "BACKUP"), 69, "grpc://127.0.0.1:1"),
        (("backup", "SITE", "nobody", "BACKUP"), 1, "no namespace 'nobody'"),
        (("backup", "SITE"), 64, "a namespace"),
        (("backup", "SITE", "users", "BACKUP", "--conf", "oops"), 64, "--conf"),
        (("backup", "MISSING", "users", "BACKUP"), 66, "there is no site"),
        (("backup", "--check", "MISSING"), 64, "no backup"),
        (("restore", "MISSING", "SITE", "users-2"), 64, "no complete full backup"),
        (("export", "SITE", "users", "TABLE", "--view", "sideways"), 64, "--view is history or current"),
        (("replicate", "SITE", "SITE", "--checkpoint", "STATE"), 64, "the target stores the position"),
        (("replicate", "SITE", "SITE"), 69, "open"),
        (("replicate", "SITE"), 64, "a source and a target"),
        (("replicate", "SITE", "SITE", "--runner", "train"), 64, "--runner is spark or process"),
        (("replicate", "SITE", "SITE", "--runner", "process", "--master", "local"), 64, "does not use Spark"),
        (("feed", "run", "SITE", "nothing", "--runner", "spark"), 1, "nothing"),
        (("feed", "run", "SITE", "nothing", "--master", "local"), 64, "--runner spark"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    arguments: tuple[str, ...], code: int, words: str, oslo: Path, tmp_path: Path
) -> None:
    places = {
        "SITE": str(oslo),
        "BACKUP": str(tmp_path / "b"),
        "TABLE": str(tmp_path / "t"),
        "STATE": str(tmp_path / "s"),
        "MISSING": str(tmp_path / "missing"),
    }
    outcome = run("--timeout", "2s", *(places.get(argument, argument) for argument in arguments))
    assert outcome.code == code, outcome.errors
    assert words in outcome.errors
    assert "Traceback" not in outcome.errors


def test_a_wrong_token_is_not_allowed(guarded: Served, tmp_path: Path) -> None:
    guarded.site.create_namespace("users")
    token = tmp_path / "wrong"
    token.write_text("not-the-token", "ascii")
    outcome = run("--token-file", token, "backup", guarded.url, "users", tmp_path / "backups")
    assert outcome.code == 77, outcome.errors
    assert "not-the-token" not in outcome.errors + outcome.text


@pytest.mark.slow
def test_without_spark_the_command_says_what_to_install(oslo: Path, tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['pyspark'] = None; from floodmark.cli import main; "
        f"sys.exit(main(['backup', {str(oslo)!r}, 'users', {str(tmp_path / 'b')!r}]))"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.returncode == 64
    assert "floodmark[spark]" in finished.stderr
