"""txn on the command line, and what a reader finds that knows only bare entries."""

from datetime import timedelta
from pathlib import Path

import pytest
from tests.cli.support import run
from tests.coordinating import begin_for_client

import floodmark
from floodmark import SubscriptionOptions
from floodmark.engine.rocks import RocksEngine
from floodmark.feed.subscription.pending import decode_pending
from floodmark.log import StoredLedger, list_ledgers
from floodmark.partition import FAMILIES
from floodmark.testing.ledgers import EngineStore
from floodmark.transaction.records import decode_record

HOUR = timedelta(hours=1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A site with one message."""
    with floodmark.open(tmp_path / "data", site="oslo") as site:
        site.create_namespace("messages").put(b"ada/1", b"hello")
    return tmp_path / "data"


def leave_open(data: Path) -> str:
    """A transaction of a server's client that is open, with an acknowledgement, when its site is closed."""
    with floodmark.open(data) as site:
        transaction = begin_for_client(site, HOUR)
        options = SubscriptionOptions(follow=False)
        with site.subscribe("counting", "messages", options=options) as subscription:
            transaction.acknowledge(next(subscription))
        return transaction.id


def read_bare(data: Path) -> list[str]:
    """Whose records a reader finds that knows only bare entries: each entry is a record to it."""
    engine = RocksEngine(data / "engine", FAMILIES)
    try:
        found = []
        for name in list_ledgers(engine):
            decode = decode_record if name.startswith("coordinator/") else decode_pending
            ledger = StoredLedger(EngineStore(engine), name)
            for _, entry in ledger.read(entries_max=1_000, bytes_max=1_000_000):
                found.append(decode(entry).transaction)
        return found
    finally:
        engine.close()


def test_an_open_transaction_is_listed_shown_and_aborted(data: Path) -> None:
    transaction = leave_open(data)
    (listed,) = run("txn", "list", data, "--json").json_lines
    assert (listed["id"], listed["state"], listed["coordinator"]) == (transaction, "open", 0)
    assert listed["participants"] == [{"kind": "subscription", "name": "counting"}]
    assert transaction in run("txn", "list", data).text
    assert run("txn", "list", data, "--slow", "1h", "--json").lines == []
    assert "participant  subscription counting" in run("txn", "show", data, transaction).text
    shown = run("txn", "abort", data, transaction, "--reason", "it hangs").text
    assert "aborted (it hangs)" in shown
    assert run("txn", "list", data, "--json").lines == []
    with floodmark.open(data) as site:
        options = SubscriptionOptions(follow=False)
        with site.subscribe("counting", "messages", options=options) as subscription:
            assert [delivery.change.key for delivery in subscription] == [b"ada/1"]


def test_the_log_of_each_is_shown(data: Path) -> None:
    transaction = leave_open(data)
    listed = run("txn", "log", "list", data, "--json").json_lines
    assert [(each["log"], each["owner"], each["live_records"]) for each in listed] == [
        ("coordinator", "0", 2),
        ("pending-ack", "counting", 1),
    ]
    shown = run("txn", "log", "show", data, "coordinator", "0", "--json").json
    assert [each["kind"] for each in shown["records"]] == ["begun", "joined"]
    assert shown["segments"][0]["entries"] == 2
    text = run("txn", "log", "show", data, "pending-ack", "counting").text
    assert transaction in text
    assert run("txn", "log", "show", data, "coordinator", "7").code == 64


@pytest.mark.parametrize("wrong", [("abort", "0-7"), ("show", "nonsense")])
def test_a_transaction_that_is_not_there_is_a_finding(data: Path, wrong: tuple[str, str]) -> None:
    command, transaction = wrong
    failed = run("txn", command, data, transaction)
    assert failed.code == 1
    assert "floodmark txn list" in failed.errors


def test_a_reader_of_bare_entries_reads_the_logs_once_nothing_batched_is_left(data: Path) -> None:
    batched = leave_open(data)
    with pytest.raises(floodmark.FloodmarkError):
        read_bare(data)
    assert run("txn", "batch-log", data, "--enable").code == 64
    first = run("txn", "batch-log", data, "--log", "coordinator", "--disable").text
    assert "cannot read these logs yet: disable pending-ack as well and wait" in first
    both = run("txn", "batch-log", data, "--log", "pending-ack", "--disable").text
    assert "cannot read these logs yet: wait" in both
    assert "cannot read these logs yet: wait" in run("txn", "batch-log", data, "--status").text
    run("txn", "abort", data, batched)
    bare = leave_open(data)
    status = run("txn", "batch-log", data)
    assert "a reader of bare entries can read these logs" in status.text
    assert "version" not in status.text, "an earlier release refuses the format of this one"
    assert status.text.count("disabled") == 4
    assert set(read_bare(data)) == {bare}
    # And back: what was written bare is read, and batches go on from there.
    for log in ("coordinator", "pending-ack"):
        run("txn", "batch-log", data, "--log", log, "--enable")
    with floodmark.open(data) as site:
        other = site.transaction(timeout=HOUR, coordinator=0)
        assert {each.id for each in site.transactions.list(timedelta(0))} == {bare, other.id}
        site.transactions.abort(bare, "done")
        site.transactions.abort(other.id, "done")
        assert not any(report.live_records for report in site.transactions.logs())


@pytest.mark.parametrize("switch", ["--disable", "--enable", "--status"])
def test_a_script_sees_what_is_left_however_it_asks(data: Path, switch: str) -> None:
    leave_open(data)
    shown = run("txn", "batch-log", data, "--log", "coordinator", switch, "--json").json
    assert [(each["log"], each["holds_batches"]) for each in shown["logs"]] == [("coordinator", True)]


def test_nothing_is_said_of_bare_entries_where_batching_is_enabled(data: Path) -> None:
    assert "bare" not in run("txn", "batch-log", data, "--log", "coordinator", "--enable").text
    half = run("txn", "batch-log", data, "--log", "coordinator", "--disable").text
    assert "cannot read these logs yet: disable pending-ack as well\n" in half


def test_settings_are_kept_and_checked(data: Path) -> None:
    pending = ("txn", "batch-log", data, "--log", "pending-ack")
    run(*pending, "--max-records", "64", "--max-delay-ms", "5", "--max-bytes-in-flight", "5000000")
    settings = run("txn", "batch-log", data, "--json").json["settings"]
    assert settings["pending-ack"] == {
        "enabled": True,
        "max_records": 64,
        "max_bytes": 4_194_304,
        "max_delay_ms": 5,
        "max_bytes_in_flight": 5_000_000,
    }
    assert settings["coordinator"]["max_records"] == 512
    assert settings["coordinator"]["max_bytes_in_flight"] == 67_108_864
    for wrong in ("4194303", "1073741825"):
        assert "max_bytes_in_flight" in run(*pending, "--max-bytes-in-flight", wrong).errors
    refused = run("txn", "batch-log", data, "--log", "coordinator", "--max-records", "0")
    assert refused.code == 64
