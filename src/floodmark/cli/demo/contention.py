"""Steps in which many threads want the same thing: a counter, and a partition that is being split."""

from itertools import count, pairwise
from threading import Event, Lock
from typing import Final

from floodmark.cli.demo.stage import ORDERS, Stage, run_threads, wait_until
from floodmark.cli.text import draw_bar, show_bytes
from floodmark.clock import system_time_ms
from floodmark.codec.ordered import NAMESPACE_BYTES

THREADS: Final = 8
INCREMENTS: Final = 25
COUNTER: Final = b"orders-so-far"

SPLIT_KEYS: Final = (b"seat-25", b"seat-75")
SEATS: Final = 100
BETWEEN_SPLITS: Final = 1_000
SPLIT_SECONDS_MAX: Final = 2.0
BAR_WIDTH: Final = 30


def race_for_a_counter(stage: Stage) -> None:
    """Compare and set: a counter without a lock."""
    stage.begin("counter", f"{THREADS} threads add to one counter with compare_and_set, without a lock")
    stage.orders.put(COUNTER, b"0")
    with stage.working("counting"):
        lost = sum(run_threads(THREADS, lambda _: _increment(stage)))
    total = int(stage.orders.get(COUNTER) or b"-1")
    stage.say(f"{THREADS} times {INCREMENTS} increments make {total}")
    stage.say(f"{lost:,} attempts came too late, were refused, and were made again with the new value")
    stage.figures(total=total, refused=lost)
    stage.check("the counter is exact", total == THREADS * INCREMENTS)


def split_under_writes(stage: Stage) -> None:
    """Two splits while threads write; nobody waits, nothing is lost."""
    stage.begin("split", "A hot partition is split while threads write to it")
    stop = Event()
    progress_made = _Progress()

    def split_when_busy(thread: int) -> dict[bytes, bytes]:
        if thread == 0:
            try:
                _split(stage, progress_made)
            finally:
                stop.set()
            return {}
        return _take_seats(stage, thread, stop, progress_made)

    with stage.working("splitting"):
        last_by_thread = run_threads(4, split_when_busy)
    expected = {key: value for last in last_by_thread for key, value in last.items()}
    found = dict(stage.orders.scan(prefix=b"seat-"))
    _draw_heat(stage)
    stage.figures(
        writes=progress_made.writes,
        writes_at_splits=progress_made.at_splits,
        partitions=len(stage.site.partitions()),
    )
    stage.check("there are three partitions now", len(stage.site.partitions()) == 3)
    marks = [0, *progress_made.at_splits, progress_made.writes]
    grew = len(marks) == 4 and all(left < right for left, right in pairwise(marks))
    stage.check("threads wrote before, between and after the splits", grew)
    stage.check("each key has the last value that its thread wrote", found == expected)


class _Progress:
    """How many writes there were, and how many when each split came."""

    def __init__(self) -> None:
        self.writes = 0
        self.at_splits: list[int] = []
        self._lock = Lock()

    def add(self) -> None:
        """Count a write."""
        with self._lock:
            self.writes += 1


def _increment(stage: Stage) -> int:
    """Add one, many times; how many attempts were refused."""
    orders, refused = stage.orders, 0
    for _ in range(INCREMENTS):
        while True:
            present = orders.get(COUNTER)
            assert present is not None
            if orders.compare_and_set(COUNTER, present, str(int(present) + 1).encode()):
                break
            refused += 1
    return refused


def _split(stage: Stage, progress: _Progress) -> None:
    for key in SPLIT_KEYS:
        _wait_for_writes(progress)
        stage.site.split(ORDERS, key)
        progress.at_splits.append(progress.writes)
    _wait_for_writes(progress)


def _wait_for_writes(progress: _Progress) -> None:
    enough = progress.writes + BETWEEN_SPLITS
    wait_until(lambda: progress.writes >= enough, SPLIT_SECONDS_MAX)


def _take_seats(stage: Stage, thread: int, stop: Event, progress: _Progress) -> dict[bytes, bytes]:
    """Write one thread's share of the seats again and again, the middle ones most; the last values."""
    last: dict[bytes, bytes] = {}
    for number in count():
        if stop.is_set():
            return last
        key = _seat(number, thread)
        last[key] = f"{system_time_ms()}-{number}".encode()
        stage.orders.put(key, last[key])
        progress.add()
    raise AssertionError("count() never ends")


def _seat(number: int, thread: int) -> bytes:
    """A seat of the thread's own, so that it knows the last value; four of five in the middle half."""
    place = number % SEATS if number % 5 == 0 else SEATS // 4 + number % (SEATS // 2)
    return f"seat-{place:02}-{thread}".encode()


def _draw_heat(stage: Stage) -> None:
    """One bar a partition: what was written to it since it is there."""
    heat = [(each, sum(sample.writes for sample in each.samples)) for each in stage.site.heat()]
    top = max(writes for _, writes in heat)
    for each, writes in heat:
        start = show_bytes(each.range.start[NAMESPACE_BYTES:]) or "the first key"
        bar = draw_bar(writes, top, BAR_WIDTH, stage.bars)
        stage.say(f"partition {each.id:<3} from {start:<14} {writes:>6,} writes  {bar}")
