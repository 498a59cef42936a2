"""The page of metrics, read back with Prometheus' own parser and held against known traffic."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from urllib.request import urlopen

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.feed.support_losing import lose_changes
from tests.replication.support_links import Mesh
from tests.server.certificates import LATER_BUT_STILL_LONG_AGO, Certificates

from floodmark.accounting.checks import FINDING_MS_MAX
from floodmark.engine import MemoryEngine
from floodmark.feed.named.store import LocalFeedStore
from floodmark.host.coordination import LocalTransactions
from floodmark.host.transaction_port import BatchUpdate, LogKind
from floodmark.model.errors import (
    InvalidConfiguration,
    InvalidKey,
    NotAuthenticated,
    OutcomeUnknown,
    PartitionMoved,
    PartlyDone,
    StorageFailed,
)
from floodmark.partition import FAMILIES
from floodmark.server import ServerOptions, serve
from floodmark.server.certificates import first_expiry
from floodmark.server.counters import BUCKETS_SECONDS, ServerMetrics, outcome_of
from floodmark.server.metrics import NAMESPACES_SHOWN_MAX
from floodmark.server.page import MetricsPage
from floodmark.site import Site, open_engine
from floodmark.testing.clock import START_MS, SimulatedTime

START_SECONDS = START_MS / 1000


@pytest.fixture
def time() -> SimulatedTime:
    return SimulatedTime()


@pytest.fixture
def site(time: SimulatedTime) -> Iterator[Site]:
    with open_engine(MemoryEngine(FAMILIES), site="oslo", site_id=7, time_source=time) as site:
        yield site


@pytest.fixture
def server() -> ServerMetrics:
    return ServerMetrics(["put", "get", "scan"])


@pytest.fixture
def page(site: Site, server: ServerMetrics) -> MetricsPage:
    return MetricsPage(site, server)


def families(page: MetricsPage) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(page.render().decode())}


def value(page: MetricsPage, name: str, **labels: str) -> float | None:
    """The one sample of a name and labels; None if there is none."""
    wanted = {"site": "oslo", **labels}
    found = [
        sample.value
        for family in families(page).values()
        for sample in family.samples
        if (sample.name, sample.labels) == (name, wanted)
    ]
    assert len(found) < 2, "the same sample stands there twice"
    return found[0] if found else None


# The page as a whole


def test_names_and_types_keep_to_the_conventions(page: MetricsPage) -> None:
    found = families(page)
    assert len(found) > 30
    for name, family in found.items():
        assert re.fullmatch(r"(floodmark|process)_[a-z_]+", name)
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
        if name.startswith("floodmark"):
            assert family.documentation.endswith(".")
            assert all(sample.labels["site"] == "oslo" for sample in family.samples)
        if family.type == "counter":
            assert all(sample.name == f"{name}_total" for sample in family.samples)
        elif family.type == "gauge":
            assert not name.endswith("_total")
        if any(word in name for word in ("timestamp", "lag", "ahead")):
            assert name.endswith("_seconds")


def test_every_family_is_described_once(page: MetricsPage) -> None:
    lines = page.render().decode().splitlines()
    described = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(described) == len(set(described))
    assert len(described) == sum(line.startswith("# HELP") for line in lines)


def test_every_type_is_as_known_traffic_needs_it(page: MetricsPage) -> None:
    types = {name: family.type for name, family in families(page).items()}
    expected = {
        "floodmark_requests": "counter",
        "floodmark_request_seconds": "histogram",
        "floodmark_open_streams": "gauge",
        "floodmark_received_bytes": "counter",
        "floodmark_sent_bytes": "counter",
        "floodmark_cut_connections": "counter",
        "floodmark_site_up": "gauge",
        "floodmark_commits": "counter",
        "floodmark_changes": "counter",
        "floodmark_written_bytes": "counter",
        "floodmark_recoveries": "counter",
        "floodmark_data_bytes": "gauge",
        "floodmark_change_log_bytes": "gauge",
        "floodmark_resolved_version_lag_seconds": "gauge",
        "floodmark_resolved_version_held_seconds": "gauge",
        "floodmark_clock_ahead_seconds": "gauge",
        "floodmark_background_failing": "gauge",
        "floodmark_garbage_runs": "counter",
        "floodmark_partition_writes": "counter",
        "floodmark_partition_reads": "counter",
        "floodmark_partition_written_bytes": "counter",
    }
    assert expected.items() <= types.items()


# The site


def test_site_is_shown_as_its_statistics_say(page: MetricsPage, site: Site, time: SimulatedTime) -> None:
    users = site.create_namespace("users")
    site.create_namespace("orders")
    users.put(b"ada", b"countess")
    users.put_many({b"grace": b"1", b"alan": b"2"})
    users.delete(b"ada")
    users.get(b"grace")
    time.advance(2_500)
    site.heartbeat()
    assert value(page, "floodmark_commits_total") == 3
    assert value(page, "floodmark_changes_total") == 4
    assert value(page, "floodmark_namespaces") == 2
    assert value(page, "floodmark_partitions") == 1
    assert value(page, "floodmark_background_failing") == 0
    assert value(page, "floodmark_clock_ahead_seconds") == 0
    assert value(page, "floodmark_last_heartbeat_timestamp_seconds") == START_SECONDS + 2.5
    assert value(page, "floodmark_resolved_version_timestamp_seconds") == START_SECONDS + 2.5
    assert value(page, "floodmark_resolved_version_lag_seconds") == 0
    statistics = site.statistics()
    assert value(page, "floodmark_site_info", site_id="7", format=str(statistics.format)) == 1
    assert value(page, "floodmark_written_bytes_total") == statistics.bytes_written
    assert value(page, "floodmark_data_bytes") == statistics.data_bytes
    assert value(page, "floodmark_change_log_bytes") == statistics.log_bytes
    (partition,) = statistics.partitions
    label = str(partition.id)
    assert value(page, "floodmark_partition_writes_total", partition=label) == 4
    assert value(page, "floodmark_partition_reads_total", partition=label) == partition.reads > 0
    assert value(page, "floodmark_partition_written_bytes_total", partition=label) == partition.bytes_written


def test_what_holds_the_resolved_version_back_is_shown(
    page: MetricsPage, site: Site, time: SimulatedTime
) -> None:
    site.create_namespace("users").put(b"ada", b"countess", durability="async")
    assert value(page, "floodmark_resolved_version_held_seconds", by="unsynced") == 0
    time.advance(2_500)
    assert value(page, "floodmark_resolved_version_held_seconds", by="unsynced") == 2.5
    assert value(page, "floodmark_resolved_version_held_seconds", by="prepared") == 0


def test_each_partition_has_its_own_numbers(page: MetricsPage, site: Site) -> None:
    users = site.create_namespace("users")
    left, right = site.split("users", b"m")
    users.put(b"ada", b"1")
    users.put(b"zoe", b"1")
    users.put(b"zoe", b"2")
    assert value(page, "floodmark_partition_writes_total", partition=str(left)) == 1
    assert value(page, "floodmark_partition_writes_total", partition=str(right)) == 2


def test_clock_that_was_set_back_shows(page: MetricsPage, site: Site, time: SimulatedTime) -> None:
    site.create_namespace("users").put(b"ada", b"1")
    time.advance(-1_500)
    assert value(page, "floodmark_clock_ahead_seconds") == 1.5


def test_garbage_collection_shows(page: MetricsPage, site: Site, time: SimulatedTime) -> None:
    users = site.create_namespace("users")
    assert value(page, "floodmark_namespace_oldest_version_timestamp_seconds", namespace="users") is None
    users.put(b"ada", b"1")
    users.put(b"ada", b"2")
    time.advance(48 * 3_600_000)
    site.collect_garbage()
    assert value(page, "floodmark_garbage_runs_total") == 1
    assert value(page, "floodmark_garbage_versions_removed_total") == 1
    trimmed = value(page, "floodmark_garbage_log_trimmed_timestamp_seconds")
    oldest = value(page, "floodmark_namespace_oldest_version_timestamp_seconds", namespace="users")
    assert trimmed == oldest == START_SECONDS + 24 * 3_600


def test_readers_of_changes_show(page: MetricsPage, site: Site, time: SimulatedTime) -> None:
    users = site.create_namespace("users")
    users.put_many({b"ada": b"1", b"alan": b"2", b"grace": b"3"})
    assert value(page, "floodmark_change_readers") == 0
    assert value(page, "floodmark_change_readers_lag_seconds") is None
    follower = site.changes("users", follow=True)
    assert [next(follower).key for _ in range(3)] == [b"ada", b"alan", b"grace"]
    time.advance(1_500)
    assert value(page, "floodmark_change_readers") == 1
    assert value(page, "floodmark_change_readers_lag_seconds") == 1.5
    (family,) = (family for name, family in families(page).items() if name == "floodmark_delivered_changes")
    assert {sample.labels["way"] for sample in family.samples} == {"tail", "log", "scan", "snapshot"}
    assert sum(sample.value for sample in family.samples) == 3


def test_namespaces_are_shown_up_to_a_number(page: MetricsPage, site: Site, time: SimulatedTime) -> None:
    for number in range(NAMESPACES_SHOWN_MAX + 1):
        site.create_namespace(f"namespace-{number}")
    time.advance(48 * 3_600_000)
    site.collect_garbage()
    shown = families(page)["floodmark_namespace_oldest_version_timestamp_seconds"].samples
    assert len(shown) == NAMESPACES_SHOWN_MAX
    assert value(page, "floodmark_namespaces") == NAMESPACES_SHOWN_MAX + 1


def test_page_of_a_site_that_does_not_answer_has_the_servers_own_metrics(
    page: MetricsPage, site: Site, server: ServerMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    assert value(page, "floodmark_site_up") == 1
    server.request("put", 0.001, "done")
    site.close()
    assert value(page, "floodmark_site_up") == 0
    assert value(page, "floodmark_commits_total") is None
    assert value(page, "floodmark_requests_total", action="put", outcome="done") == 1
    assert "was closed" in caplog.text


# Links


def test_links_show_how_they_are_and_what_is_wrong(server: ServerMetrics) -> None:
    mesh = Mesh("oslo", "rome")
    mesh.put("rome", b"ada")
    mesh.exchange()
    oslo = mesh["oslo"]
    page = MetricsPage(oslo, server)
    link = {"source": "rome", "namespace": "users"}
    mesh.time.advance(2_500)
    assert value(page, "floodmark_link_heartbeat_age_seconds", **link) == 2.5
    assert value(page, "floodmark_link_backlog_seconds", **link) == 2.5
    assert value(page, "floodmark_link_lag_seconds", quantile="0.99", **link) == 1.0
    assert value(page, "floodmark_link_intervals_unchecked_total", **link) == 1
    assert value(page, "floodmark_link_intervals_wrong_total", **link) == 0
    assert value(page, "floodmark_link_alarm", kind="overdue", **link) == 0
    mesh.time.advance(10_000)
    assert value(page, "floodmark_link_alarm", kind="overdue", **link) == 1
    assert value(page, "floodmark_link_alarm", kind="finding", **link) == 0


def test_link_of_which_nothing_has_come_has_no_age(server: ServerMetrics) -> None:
    oslo = Mesh("oslo", "rome")["oslo"]
    page = MetricsPage(oslo, server)
    link = {"source": "rome", "namespace": "users"}
    assert value(page, "floodmark_link_heartbeat_age_seconds", **link) is None
    assert value(page, "floodmark_link_lag_seconds", quantile="0.5", **link) is None
    assert value(page, "floodmark_link_alarm", kind="stalled", **link) == 0


# Feeds


def test_feeds_show_their_state_and_how_far_they_lie_behind(
    page: MetricsPage, site: Site, time: SimulatedTime
) -> None:
    site.create_namespace("users")
    for name in ("indexer", "lake"):
        site.feeds.create(name, "users", "blackhole:", since="now")
    site.feeds.pause("lake")
    time.advance(1_500)
    assert value(page, "floodmark_feed_state", feed="indexer", state="normal") == 1
    assert value(page, "floodmark_feed_checkpoint_lag_seconds", feed="indexer") == 1.5
    assert value(page, "floodmark_feed_resolved_lag_seconds", feed="indexer") == 0
    assert value(page, "floodmark_feed_state", feed="lake", state="stopped") == 1


def test_feeds_that_cannot_be_read_cost_only_their_own_metrics(
    page: MetricsPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise StorageFailed("the disk is away")

    monkeypatch.setattr(LocalFeedStore, "list", fail)
    assert value(page, "floodmark_site_up") == 1
    assert "floodmark_feed_state" not in families(page)


def test_feeds_show_what_heartbeats_have_shown(
    site: Site, server: ServerMetrics, time: SimulatedTime
) -> None:
    site.create_namespace("users")
    site.feeds.create("lake", "users", "blackhole:")
    page = MetricsPage(site, server)
    assert value(page, "floodmark_feed_alarm", feed="lake") == 0
    lose_changes(site, "lake")
    assert value(page, "floodmark_feed_intervals_checked_total", feed="lake") == 0
    assert value(page, "floodmark_feed_intervals_unchecked_total", feed="lake") == 1
    assert value(page, "floodmark_feed_intervals_wrong_total", feed="lake") == 1
    assert value(page, "floodmark_feed_alarm", feed="lake") == 1
    # It is remembered for longer than it is an alarm.
    time.advance(FINDING_MS_MAX + 1_000)
    assert value(page, "floodmark_feed_intervals_wrong_total", feed="lake") == 1
    assert value(page, "floodmark_feed_alarm", feed="lake") == 0


# The server


def test_requests_are_counted_by_action_and_outcome(page: MetricsPage, server: ServerMetrics) -> None:
    for _ in range(3):
        server.request("put", 0.002, "done")
    server.request("put", 0.002, "refused")
    assert value(page, "floodmark_requests_total", action="put", outcome="done") == 3
    assert value(page, "floodmark_requests_total", action="put", outcome="refused") == 1
    assert value(page, "floodmark_requests_total", action="get", outcome="done") == 0
    assert value(page, "floodmark_requests_total", action="get", outcome="refused") is None


def test_request_stands_in_the_bucket_of_its_bound_and_all_above(
    page: MetricsPage, server: ServerMetrics
) -> None:
    for seconds in (0.001, 0.0011, 9.0, 60.0):
        server.request("get", seconds, "done")
    samples = families(page)["floodmark_request_seconds"].samples
    buckets = {
        sample.labels["le"]: sample.value
        for sample in samples
        if sample.name.endswith("_bucket") and sample.labels["group"] == "read"
    }
    assert [float(bound) for bound in buckets] == [*BUCKETS_SECONDS, float("inf")]
    assert (buckets["0.0005"], buckets["0.001"], buckets["0.0025"]) == (0, 1, 2)
    assert (buckets["5.0"], buckets["10.0"], buckets["+Inf"]) == (2, 3, 4)
    assert list(buckets.values()) == sorted(buckets.values())
    assert value(page, "floodmark_request_seconds_count", group="read") == 4
    assert value(page, "floodmark_request_seconds_sum", group="read") == pytest.approx(69.0021)


def test_callers_cannot_make_the_list_of_labels_grow(page: MetricsPage, server: ServerMetrics) -> None:
    before = len(page.render().splitlines())
    for number in range(1_000):
        server.request(f"invented-{number}", 0.001, "done")
        server.request("put", 0.001, f"invented-{number}")
    assert len(page.render().splitlines()) == before + 1
    assert value(page, "floodmark_requests_total", action="other", outcome="done") == 1_000
    assert value(page, "floodmark_requests_total", action="put", outcome="other") == 1_000


def test_clock_that_was_set_back_makes_no_sum_go_down(page: MetricsPage, server: ServerMetrics) -> None:
    server.request("get", 0.5, "done")
    server.request("get", -3.0, "done")
    assert value(page, "floodmark_request_seconds_sum", group="read") == 0.5


def test_streams_are_open_as_long_as_they_are(page: MetricsPage, server: ServerMetrics) -> None:
    with server.stream():
        assert value(page, "floodmark_open_streams") == 1
        with pytest.raises(KeyError), server.stream():
            raise KeyError("a stream that fails")
        assert value(page, "floodmark_open_streams") == 1
        with server.stream():
            assert value(page, "floodmark_open_streams") == 2
    assert value(page, "floodmark_open_streams") == 0


def test_bytes_and_cut_connections_add_up(page: MetricsPage, server: ServerMetrics) -> None:
    server.received(100)
    server.received(23)
    server.sent(1 << 40)
    server.connection_cut()
    assert value(page, "floodmark_received_bytes_total") == 123
    assert value(page, "floodmark_sent_bytes_total") == 1 << 40
    assert value(page, "floodmark_cut_connections_total") == 1


def test_nothing_is_lost_between_threads(page: MetricsPage, server: ServerMetrics) -> None:
    def count() -> None:
        for _ in range(5_000):
            server.request("put", 0.001, "done")
            server.received(1)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(count) for _ in range(4)]:
            future.result()
    assert value(page, "floodmark_requests_total", action="put", outcome="done") == 20_000
    assert value(page, "floodmark_request_seconds_count", group="write") == 20_000
    assert value(page, "floodmark_received_bytes_total") == 20_000


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "done"),
        (PartitionMoved("x"), "retryable"),
        (OutcomeUnknown("x"), "unknown"),
        (PartlyDone("x"), "unknown"),
        (NotAuthenticated("x"), "not_allowed"),
        (InvalidKey("x"), "refused"),
        (AssertionError("x"), "bug"),
    ],
)
def test_outcome_says_what_the_caller_may_do(error: Exception | None, outcome: str) -> None:
    assert outcome_of(error) == outcome


# Transactions


def test_transactions_show_how_many_there_are_and_what_was_written_to_their_logs(
    site: Site, server: ServerMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = MetricsPage(site, server)
    assert value(page, "floodmark_transactions", state="open") == 0
    first, _ = (site.transaction(coordinator=0) for _ in range(2))
    first.commit()
    site.transactions.set_batching(LogKind.COORDINATOR, BatchUpdate(enabled=False))
    site.transaction(coordinator=0)
    log = {"log": "coordinator", "owner": "0"}
    with monkeypatch.context() as patch:
        # However many there are, they are counted and not listed.
        patch.setattr(LocalTransactions, "list", None)
        assert value(page, "floodmark_transactions", state="open") == 2
        assert value(page, "floodmark_transactions", state="committing") == 0
        assert value(page, "floodmark_transaction_oldest_age_seconds") is not None
    # Two were begun and one was decided, each alone, before batching was switched off.  The thread of the log
    # counts a record that it finds late by its age.
    triggers = [
        value(page, "floodmark_txn_log_flushes_total", trigger=trigger, **log) for trigger in ("idle", "age")
    ]
    assert sum(count or 0 for count in triggers) == 3
    assert value(page, "floodmark_txn_log_flushes_total", trigger="count", **log) == 0
    assert value(page, "floodmark_txn_log_records_per_entry_bucket", le="10", **log) == 3
    assert value(page, "floodmark_txn_log_records_per_entry_sum", **log) == 3
    assert value(page, "floodmark_txn_log_entry_size_bytes_count", **log) == 3
    assert value(page, "floodmark_txn_log_oldest_record_delay_seconds_count", **log) == 3
    assert value(page, "floodmark_txn_log_bare_entries_total", **log) == 1
    assert value(page, "floodmark_txn_log_live_records", **log) == 2


# Certificates


def test_the_expiry_of_a_file_is_that_of_its_first_certificate_to_expire(certificates: Certificates) -> None:
    now = datetime.now(UTC).timestamp()
    expired, valid = certificates.expired_client("eve").certificate, certificates.server.certificate
    assert first_expiry(valid) > now
    assert first_expiry(valid + expired) == LATER_BUT_STILL_LONG_AGO.timestamp()
    assert first_expiry(certificates.root) == first_expiry(certificates.foreign_root_path.read_bytes())


@pytest.mark.parametrize(
    "pem", [b"", b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n", b"\xff"]
)
def test_a_file_without_a_certificate_is_refused(pem: bytes) -> None:
    with pytest.raises(InvalidConfiguration):
        first_expiry(pem)


def test_a_server_with_tls_tells_when_its_certificates_expire(certificates: Certificates, site: Site) -> None:
    options = ServerOptions(
        tls_certificate=certificates.server.certificate_path,
        tls_key=certificates.server.key_path,
        tls_client_root=certificates.root_path,
        metrics_listen="127.0.0.1:0",
    )
    with serve(site, "127.0.0.1:0", options) as running:
        assert running.metrics_address is not None
        with urlopen("http://{}:{}/metrics".format(*running.metrics_address)) as answer:
            page = answer.read().decode()
    found = {
        sample.labels["certificate"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "floodmark_certificate_expiry_timestamp_seconds"
    }
    assert found == {
        "server": first_expiry(certificates.server.certificate),
        "client_root": first_expiry(certificates.root),
    }
