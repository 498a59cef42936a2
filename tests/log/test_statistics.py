"""What a writer says about itself, against traffic that is known."""

from threading import Event

import pytest
from tests.log.support import GatedLedger, SimulatedSeconds, answers, busy

from floodmark.codec.entries import ENTRY_HEAD_BYTES, RECORD_HEAD_BYTES
from floodmark.log import BatchedWriter, BatchSettings, Histogram, Trigger
from floodmark.log.statistics import BYTES_BUCKETS, DELAY_SECONDS_BUCKETS, RECORDS_BUCKETS, FlushCounter
from floodmark.model.errors import StorageFailed


def test_buckets_are_those_of_the_document_in_the_unit_that_the_name_says() -> None:
    assert RECORDS_BUCKETS == (10, 50, 100, 200, 500, 1_000)
    assert BYTES_BUCKETS == (128, 512, 1_024, 2_048, 4_096, 16_384, 102_400, 1_048_576)
    assert DELAY_SECONDS_BUCKETS == (0.001, 0.005, 0.01)


@pytest.mark.parametrize(
    ("records", "bucket"),
    [(1, 0), (9, 0), (10, 0), (11, 1), (50, 1), (51, 2), (500, 4), (501, 5), (1_000, 5), (1_001, 6)],
)
def test_a_bucket_counts_what_is_at_or_below_its_bound(records: int, bucket: int) -> None:
    counter = FlushCounter()
    counter.flushed(Trigger.IDLE, records, 1, 0.0)
    histogram = counter.statistics(enabled=True, bytes_in_flight=0).records_per_entry
    assert histogram.counts.index(1) == bucket


@pytest.mark.parametrize(
    ("delay_ms", "bucket"), [(0, 0), (1, 0), (1.001, 1), (5, 1), (5.001, 2), (10, 2), (10.001, 3), (2_000, 3)]
)
def test_a_delay_of_milliseconds_lies_in_a_bucket_of_seconds(delay_ms: float, bucket: int) -> None:
    counter = FlushCounter()
    counter.flushed(Trigger.IDLE, 1, 1, delay_ms / 1_000)
    histogram = counter.statistics(enabled=True, bytes_in_flight=0).oldest_record_delay_seconds
    assert histogram.counts.index(1) == bucket


def test_cumulative_counts_are_what_prometheus_wants() -> None:
    histogram = Histogram(bounds=(1, 5, 0.01), counts=(3, 0, 2, 1), sum=40)
    assert histogram.count == 6
    assert histogram.cumulative() == [("1", 3), ("5", 3), ("0.01", 5), ("+Inf", 6)]


def test_known_traffic_gives_known_numbers() -> None:
    ledger, time = GatedLedger(), SimulatedSeconds()
    writer = BatchedWriter[bytes](
        ledger,
        BatchSettings(max_records=60, max_bytes=1_000, max_delay_ms=8, max_bytes_in_flight=10_000),
        time_seconds=time,
    )
    with busy(writer, ledger):
        futures = [writer.add(bytes(10)) for _ in range(60)]  # count: 60 records
        futures += [writer.add(bytes(500)) for _ in range(2)]  # bytes: 2 records
        futures += [writer.add(bytes(3)), writer.add(bytes(2_000))]  # bytes and large: 1 record each
        futures += [writer.add(bytes(1)) for _ in range(11)]  # age: 11 records
        assert writer.statistics().bytes_in_flight == 4 + 600 + 1_000 + 3 + 2_000 + 11
        time.now = 0.009
    answers(futures)
    writer.write(bytes(7))  # idle, as the plug
    writer.enabled = False
    writer.write(bytes(8))
    writer.enabled = True
    ledger.failures = [StorageFailed("no")]
    with pytest.raises(StorageFailed):
        writer.write(bytes(9))
    writer.close()

    statistics = writer.statistics()
    assert statistics.flushes == {
        Trigger.COUNT: 1,
        Trigger.BYTES: 2,
        Trigger.LARGE: 1,
        Trigger.AGE: 1,
        Trigger.IDLE: 2,
    }
    batches = {"plug": (1, 4), "count": (60, 600), "bytes": (2, 1_000), "before": (1, 3), "large": (1, 2_000)}
    batches |= {"age": (11, 11), "idle": (1, 7)}
    sizes = [ENTRY_HEAD_BYTES + RECORD_HEAD_BYTES * count + size for count, size in batches.values()]
    assert statistics.records == sum(count for count, _ in batches.values()) + 1
    assert statistics.batched_entries == 7
    assert statistics.entries == 8
    assert (statistics.bare_entries, statistics.bare_bytes) == (1, 8)
    assert statistics.failed_appends == 1
    assert statistics.bytes_in_flight == 0
    assert statistics.records_per_entry.counts == (5, 1, 1, 0, 0, 0, 0)
    assert statistics.records_per_entry.sum == 77
    assert statistics.bytes == sum(sizes) + 8
    assert statistics.entry_size_bytes.cumulative() == [
        (str(bound), sum(size <= bound for size in sizes)) for bound in BYTES_BUCKETS
    ] + [("+Inf", 7)]
    # All but the plug and the last one waited for 9 ms.
    assert statistics.oldest_record_delay_seconds.counts == (2, 0, 5, 0)
    assert statistics.oldest_record_delay_seconds.sum == pytest.approx(5 * 0.009)


def test_statistics_can_be_read_during_traffic() -> None:
    ledger = GatedLedger()
    writer = BatchedWriter[bytes](ledger)
    ended = Event()
    futures = [writer.add(b"x") for _ in range(500)]
    futures[-1].add_done_callback(lambda _: ended.set())
    seen = [writer.statistics().records]
    while not ended.is_set():
        seen.append(writer.statistics().records)
    assert seen == sorted(seen)
    assert writer.statistics().records == 500
    assert writer.statistics().enabled
    writer.close()
