"""The counters of a server's requests: outcomes, durations, bytes and streams."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from threading import Lock
from typing import Any, Final

from prometheus_client import Counter, Gauge, Histogram, Metric
from prometheus_client.samples import Sample

from floodmark.clock import TimeSource, system_time_ms
from floodmark.model.errors import Conflict, FloodmarkError, NotAllowed, OutcomeUnknown, Retryable
from floodmark.model.partition import ReadSet
from floodmark.model.version import physical_ms

BUCKETS_SECONDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
OUTCOMES: Final = ("done", "retryable", "unknown", "not_allowed", "refused", "bug")
OTHER: Final = "other"
# The groups by which durations are measured.  Actions of ports, `feeds.create`, go by their port.
_GROUPS: Final = {
    **dict.fromkeys(("find", "get", "get_fresh", "get_many"), "read"),
    **dict.fromkeys(("apply", "compare_and_set", "delete_unchanged", "load", "merge", "put"), "write"),
    **dict.fromkeys(("put_unchanged", "repair"), "write"),
    **dict.fromkeys(("abort_prepared", "commit_prepared", "prepare", "settle"), "transactions"),
    **dict.fromkeys(("ask_prepared", "ended_prepared"), "transactions"),
    **dict.fromkeys(("records", "scan"), "scan"),
    **{"changes": "changes", "write_stream": "write_stream"},
}


def group_of(action: str) -> str:
    """The group of an action, as the label of a metric.

    >>> group_of("put"), group_of("feeds.create"), group_of("resp.get"), group_of("hello")
    ('write', 'feeds', 'resp', 'other')
    """
    port, dot, _ = action.partition(".")
    return _GROUPS.get(action, port if dot else OTHER)


def outcome_of(error: BaseException | None) -> str:
    """How a request ended, as the label of a metric.

    >>> from floodmark.model.errors import InvalidKey, StorageFull
    >>> outcome_of(None), outcome_of(StorageFull("x")), outcome_of(InvalidKey("x")), outcome_of(KeyError())
    ('done', 'retryable', 'refused', 'bug')
    """
    match error:
        case None:
            return "done"
        case NotAllowed():
            return "not_allowed"
        case Retryable():
            return "retryable"
        case OutcomeUnknown():
            return "unknown"
        case FloodmarkError():
            return "refused"
        case _:
            return "bug"


class RequestTally:
    """Requests of one action, counted by one thread or under a lock.  Cheaper than the library's metrics."""

    __slots__ = ("buckets", "outcomes", "seconds")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BUCKETS_SECONDS) + 1)
        self.seconds = 0.0
        # The usual outcome exists from the start, so that its rate counts the first request as well.
        self.outcomes = {OUTCOMES[0]: 0}

    def add(self, seconds: float, outcome: str = OUTCOMES[0], *, number: int = 1) -> None:
        """Count `number` requests that have ended, each of which took `seconds`."""
        self.buckets[bisect_left(BUCKETS_SECONDS, seconds)] += number
        self.seconds += number * seconds
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + number

    def samples(self, action: str) -> Iterator[Sample]:
        """The tally as the samples of the two metrics of requests."""
        for outcome, count in [*self.outcomes.items()]:
            yield Sample("floodmark_requests_total", {"action": action, "outcome": outcome}, count)
        name, count, group = "floodmark_request_seconds", 0, group_of(action)
        for bound, number in zip((*BUCKETS_SECONDS, inf), [*self.buckets], strict=True):
            count += number
            yield Sample(f"{name}_bucket", {"group": group, "le": _show_bound(bound)}, count)
        yield Sample(f"{name}_count", {"group": group}, count)
        yield Sample(f"{name}_sum", {"group": group}, self.seconds)


def add_samples(samples: Iterable[Sample]) -> Iterable[Sample]:
    """The samples, added up by name and labels: each action of a group has a tally of its own."""
    sums: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
    for sample in samples:
        key = sample.name, frozenset(sample.labels.items())
        found = sums.get(key)
        sums[key] = sample if found is None else sample._replace(value=found.value + sample.value)
    return sums.values()


def _show_bound(seconds: float) -> str:
    return "+Inf" if seconds == inf else str(seconds)


class ServerMetrics:
    """Counts what a server does.  Safe to use from many threads.

    `actions` are the names that a request may have; any other is counted as "other".

    >>> metrics = ServerMetrics(["put", "get"])
    >>> metrics.request("put", 0.004, "done")
    >>> metrics.request("an unknown action", 0.001, "refused")
    """

    def __init__(self, actions: Iterable[str], time_ms: TimeSource = system_time_ms) -> None:
        self._streams = Gauge("floodmark_open_streams", "Streams that are open now.", registry=None)
        self._received = Counter("floodmark_received_bytes", "Bytes that came from clients.", registry=None)
        self._sent = Counter("floodmark_sent_bytes", "Bytes that went to clients.", registry=None)
        self._cut = Counter(
            "floodmark_cut_connections",
            "Clients that went away during a request, or were cut.",
            registry=None,
        )
        self._delayed = Counter(
            "floodmark_delayed_read_versions",
            "Calls for a read version that were delayed or refused because many writes were on their way.",
            ("outcome",),
            registry=None,
        )
        for outcome in ("delayed", "refused"):
            self._delayed.labels(outcome)
        self._queued = Gauge("floodmark_queued_writes", "Writes that are on their way.", registry=None)
        self._transactions = Counter(
            "floodmark_transaction_commits",
            "Commits of transactions that had read something: committed, or refused by a conflict.",
            ("outcome",),
            registry=None,
        )
        self._committed, self._conflicts = map(self._transactions.labels, ("committed", "conflict"))
        self._transaction_ages = Histogram(
            "floodmark_transaction_age_seconds",
            "How old the versions were at which transactions had read, when they committed or conflicted.",
            registry=None,
            buckets=BUCKETS_SECONDS,
        )
        self._retries = Counter(
            "floodmark_transaction_retries",
            "Commits and conflicts of transactions that `run_transaction` had begun again.",
            registry=None,
        )
        self._saved = Counter(
            "floodmark_saved_read_versions",
            "Commits and conflicts of transactions that had read at a cached version, without a call for it.",
            registry=None,
        )
        self._time_ms = time_ms
        # Tallies that many threads add to, under the lock; and tallies that one thread adds to.
        self._actions = {action: RequestTally() for action in (*sorted(actions), OTHER)}
        self._tallies: dict[str, RequestTally] = {}
        self._lock = Lock()

    def request(self, action: str, seconds: float, outcome: str) -> None:
        """Count a request that has ended, with its duration and its outcome."""
        tally = self._actions.get(action) or self._actions[OTHER]
        with self._lock:
            # A clock that was set back must not make a sum go down.
            tally.add(max(seconds, 0.0), outcome if outcome in OUTCOMES else OTHER)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream as open within the block."""
        with self._streams.track_inprogress():
            yield

    def received(self, size: int) -> None:
        """Count bytes that came from clients."""
        self._received.inc(size)

    def sent(self, size: int) -> None:
        """Count bytes that went to clients."""
        self._sent.inc(size)

    def tally(self, action: str) -> RequestTally:
        """The tally of an action whose requests a single thread counts."""
        return self._tallies.setdefault(action, RequestTally())

    def connection_cut(self) -> None:
        """Count a client that went away before its request had ended."""
        self._cut.inc()

    def transaction_commits(self) -> dict[str, int]:
        """Commits of transactions that had read something: "committed", "conflict", and those "retried"."""
        families = [*self._transactions.collect(), *self._retries.collect()]
        totals = [each for family in families for each in family.samples if each.name.endswith("_total")]
        return {each.labels.get("outcome", "retried"): int(each.value) for each in totals}

    def counting_transactions(self, handle: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Wrap the handler of a request that has `reads`, to count the commits of transactions."""

        def counted(caller: Any, request: Any) -> Any:
            if request.reads is None:
                return handle(caller, request)
            try:
                reply = handle(caller, request)
            except Conflict as conflict:
                self.transaction(request.reads, conflict)
                raise
            self.transaction(request.reads, None)
            return reply

        return counted

    def transaction(self, reads: ReadSet, error: FloodmarkError | None) -> None:
        """Count the commit of a transaction that had read something: done, or refused by a Conflict.

        Any other error is not counted.
        """
        if error is None or isinstance(error, Conflict):
            (self._committed if error is None else self._conflicts).inc()
            self._transaction_ages.observe(max(0, self._time_ms() - physical_ms(reads.since)) / 1_000)
            if reads.attempt > 1:
                self._retries.inc()
            if reads.is_cached:
                self._saved.inc()

    def read_version(self, outcome: str) -> None:
        """Count a call for a read version that was "delayed" or "refused"."""
        self._delayed.labels(outcome).inc()

    def show_queue(self, queued: Callable[[], float]) -> None:
        """Read the gauge of queued writes from `queued`."""
        self._queued.set_function(queued)

    def families(self, site: str) -> Iterator[Metric]:
        """The metrics as they are now, labelled with the site."""
        families = [
            Metric("floodmark_requests", "Requests that have ended.", "counter"),
            Metric("floodmark_request_seconds", "How long requests took, by group of actions.", "histogram"),
        ]
        tallies = (*self._actions.items(), *self._tallies.items())
        tallied = [each for action, tally in tallies for each in tally.samples(action)]
        for family in families:
            samples = (each for each in tallied if each.name.startswith(f"{family.name}_"))
            family.samples = [*add_samples(samples)]
        for metric in (
            self._streams, self._received, self._sent, self._cut, self._delayed, self._queued,
            self._transactions, self._transaction_ages, self._retries, self._saved,
        ):  # fmt: skip
            families += metric.collect()
        for family in families:
            family.samples = [
                sample._replace(labels={"site": site, **sample.labels})
                for sample in family.samples
                # The library adds the time at which each counter was made; the page leaves it out.
                if not sample.name.endswith("_created")
            ]
            yield family
