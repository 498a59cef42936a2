"""Publishing a whole data set in the place of what a namespace holds."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Final

from floodmark.clock import monotonic_ms
from floodmark.host.catalog import KEPT_GENERATIONS, GenerationRow, NamespaceRow
from floodmark.host.ports import Host
from floodmark.model.errors import (
    FloodmarkError,
    InvalidArgument,
    PublicationConflict,
)
from floodmark.model.limits import GENERATIONS_KEPT_MAX
from floodmark.model.names import require_name
from floodmark.model.partition import GenerationStream, WriteStream
from floodmark.model.version import Version
from floodmark.site.arguments import At, to_version
from floodmark.site.dataset import DataSet, Refuse, Rows
from floodmark.site.namespace import open_namespace

# Changes are copied again while the new generation is so far behind; then it is swapped in.
NEAR_MS: Final = 1_000
_WAIT_SECONDS: Final = 1.0

# What is sent and not acknowledged yet.
_PORTIONS_IN_FLIGHT_MAX: Final = 4


@dataclass(frozen=True, kw_only=True)
class Published:
    """A data set that is read from `version` on; the milliseconds of each phase."""

    namespace: str
    generation: int
    base: Version
    version: Version
    rows: int
    refused: int
    replayed: int
    load_ms: int
    rewind_ms: int
    swap_ms: int


class Generations:
    """Publishes data sets, and goes back to earlier ones: `site.generations`.

    >>> import floodmark, tempfile
    >>> site = floodmark.open(tempfile.mkdtemp(), site="oslo")
    >>> prices = site.create_namespace("prices")
    >>> _ = prices.put(b"apple", b"1"), prices.put(b"pear", b"1")
    >>> published = site.generations.publish("prices", {b"apple": b"2"})
    >>> dict(prices.scan()), dict(prices.scan(at=published.version - 1))
    ({b'apple': b'2'}, {b'apple': b'1', b'pear': b'1'})
    >>> _ = site.generations.rollback("prices")
    >>> [(each.number, each.state.value) for each in site.generations.list("prices")]
    [(1, 'kept'), (2, 'kept'), (3, 'current')]
    >>> site.close()
    """

    def __init__(self, host: Callable[[], Host], holder: str) -> None:
        # A closed site refuses at once.
        host()
        self._host = host
        self._holder = holder

    def list(self, namespace: str) -> list[GenerationRow]:
        """The generations of a namespace that are there, the oldest first."""
        row = self._find(namespace)
        return row.generations or [row.present]

    def publish(
        self,
        namespace: str,
        rows: Rows,
        *,
        duplicates: str = "fail",
        base: At | None = None,
        keep: int = KEPT_GENERATIONS,
        publisher: str | None = None,
        wait: timedelta | None = None,
        on_refused: Refuse | None = None,
        report: Callable[[str, int], None] = lambda _phase, _done: None,
    ) -> Published:
        """Replace all that a namespace holds by some rows, at one version.

        Rows are pairs, or Arrow tables and batches with the columns `key` and `value`.  They are sorted on
        disk, if they are many.  One that is no key and value raises InvalidKey or InvalidValue, or is passed
        to `on_refused` with that and left out.  Of several rows with one key the last counts, or InvalidKey
        is raised, as `duplicates` says.

        `base` is the moment of the data: changes made since go on above it; by default it is now.  `keep`
        earlier generations stay for a rollback.

        While another data set is being published, PublicationConflict is raised, after `wait`.  If this
        fails, the namespace stays as it was, and what was loaded is removed.  A `publisher` with a name can
        instead call again, with the same rows, and goes on.
        """
        check_keep(keep)
        version = 0 if base is None else to_version(base)
        row = self._find(namespace)
        dataset = self._dataset(row, duplicates, on_refused, report)
        name = publisher or self._holder
        loading = self._begin(namespace, version, name, wait)
        with self._dropping(namespace, loading.number, publisher is None):
            begun_ms = monotonic_ms()
            with closing(self._host().write_stream(GenerationStream(row.id, loading.number))) as stream:
                self._load(dataset, stream, rows, report)
            loaded_ms = monotonic_ms()
            return self.finish(
                namespace,
                loading.number,
                keep=keep,
                rows=dataset.rows,
                refused=dataset.refused,
                load_ms=loaded_ms - begun_ms,
                report=report,
            )

    def finish(
        self,
        namespace: str,
        number: int,
        *,
        keep: int,
        rows: int,
        refused: int = 0,
        load_ms: int = 0,
        report: Callable[[str, int], None] = lambda _phase, _done: None,
    ) -> Published:
        """Copy the changes made since the base into a loaded generation, and swap it in."""
        generations = self._host().generations
        begun_ms, replayed, behind_ms = monotonic_ms(), 0, NEAR_MS + 1
        while behind_ms > NEAR_MS:
            rewound = generations.rewind_generation(namespace, number)
            replayed, behind_ms = replayed + rewound.replayed, rewound.behind_ms
            report("replaying changes", replayed)
        rewound_ms = monotonic_ms()
        report("swapping", rows)
        swapped = generations.swap_generation(namespace, number, keep)
        assert swapped.since is not None
        return Published(
            namespace=namespace,
            generation=number,
            base=swapped.base,
            version=swapped.since,
            rows=rows,
            refused=refused,
            replayed=swapped.replayed,
            load_ms=load_ms,
            rewind_ms=rewound_ms - begun_ms,
            swap_ms=monotonic_ms() - rewound_ms,
        )

    def rollback(
        self, namespace: str, number: int | None = None, *, keep: int = KEPT_GENERATIONS
    ) -> GenerationRow:
        """Publish an earlier generation again, by default the last, with all changes made since its end.

        It gets a number of its own.
        """
        check_keep(keep)
        self._find(namespace)
        return self._host().generations.rollback_generation(namespace, number, self._holder, keep)

    def drop(self, namespace: str, number: int) -> None:
        """Remove a generation: one whose publication was left, or one that ended before the retention."""
        self._find(namespace)
        self._host().generations.drop_generation(namespace, number)

    def check(
        self,
        namespace: str,
        rows: Rows,
        *,
        duplicates: str = "fail",
        on_refused: Refuse | None = None,
        report: Callable[[str, int], None] = lambda _phase, _done: None,
    ) -> tuple[int, int]:
        """How many rows `publish` would take and refuse; nothing is written, and errors are the same."""
        dataset = self._dataset(self._find(namespace), duplicates, on_refused, report)
        for _ in dataset.pairs(rows):
            pass
        return dataset.rows, dataset.refused

    # Steps

    def _dataset(
        self,
        row: NamespaceRow,
        duplicates: str,
        on_refused: Refuse | None,
        report: Callable[[str, int], None],
    ) -> DataSet:
        encoding = open_namespace(row, self._host(), durable=False).encoding
        return DataSet(row, encoding, duplicates, on_refused, report)

    def _find(self, namespace: str) -> NamespaceRow:
        require_name(namespace, "namespace")
        return self._host().namespaces.find_namespace(namespace)

    def _begin(self, namespace: str, base: Version, publisher: str, wait: timedelta | None) -> GenerationRow:
        begin = self._host().generations.begin_generation
        end_ms = monotonic_ms() + (wait or timedelta(0)) // timedelta(milliseconds=1)
        while True:
            try:
                return begin(namespace, base, publisher)
            except PublicationConflict:
                if monotonic_ms() >= end_ms:
                    raise
                Event().wait(_WAIT_SECONDS)

    @contextmanager
    def _dropping(self, namespace: str, number: int, drops: bool) -> Iterator[None]:
        """Remove a generation if the block fails."""
        try:
            yield
        except BaseException:
            if drops:
                # What cannot be removed now, garbage collection removes.
                with suppress(FloodmarkError):
                    self._host().generations.drop_generation(namespace, number)
            raise

    def _load(
        self, dataset: DataSet, stream: WriteStream, rows: Rows, report: Callable[[str, int], None]
    ) -> None:
        sent: deque[Future[int]] = deque()
        for pairs in dataset.pairs(rows):
            sent.append(stream.send(pairs))
            while len(sent) >= _PORTIONS_IN_FLIGHT_MAX:
                sent.popleft().result()
            report("loading", dataset.rows)
        for answer in sent:
            answer.result()


def check_keep(keep: int) -> None:
    """Refuse a number of generations that cannot be kept."""
    if type(keep) is not int or not 0 <= keep <= GENERATIONS_KEPT_MAX:
        raise InvalidArgument(
            f"a namespace keeps 0 to {GENERATIONS_KEPT_MAX} earlier generations, not {keep!r:.60}"
        )
