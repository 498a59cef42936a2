"""Publishes a whole data set as a new generation of a namespace."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import Event
from typing import Final, Protocol

from floodmark.clock import monotonic_ms
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.records import rename_keys
from floodmark.columns.packed import pack
from floodmark.columns.pairs import Pairs
from floodmark.host.catalog import KEPT_GENERATIONS, GenerationRow, NamespaceRow
from floodmark.host.ports import Host
from floodmark.host.publishing import require_last_write, rewind_until
from floodmark.layers.ports import layer_of
from floodmark.model.errors import (
    FloodmarkError,
    InvalidArgument,
    InvalidConfiguration,
    PartlyDone,
    PublicationConflict,
    VersionCollected,
    WrongPolicy,
)
from floodmark.model.limits import GENERATIONS_KEPT_MAX
from floodmark.model.names import require_name
from floodmark.model.partition import GenerationStream
from floodmark.model.version import Version
from floodmark.site.arguments import At, to_version
from floodmark.site.dataset import DataSet, Refuse, Rows
from floodmark.site.earlier import ARRIVAL, changed, earlier_rows, require_present, wait_arrived
from floodmark.site.namespace import open_namespace

# The rewind copies changes until the new generation lags by less than this; then it is swapped in.
NEAR_MS: Final = 1_000
_WAIT_SECONDS: Final = 1.0

# Portions sent to each site and not acknowledged yet.
_PORTIONS_IN_FLIGHT_MAX: Final = 4


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published data set, which reads see from `version` on, with the milliseconds of each phase."""

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
    # The swap versions at other sites, by site name.
    others: dict[str, Version] = field(default_factory=dict)


class HasHost(Protocol):
    """An open site, or anything else with a host."""

    @property
    def host(self) -> Host: ...


@dataclass
class _Place:
    """A site at which the data set is loaded, with its generation there."""

    host: Host
    row: NamespaceRow
    # The number of the generation; 0 until it has begun.
    number: int = 0

    @property
    def site(self) -> str:
        return self.host.identity.site


class Generations:
    """Publishes data sets and rolls back to earlier ones: `site.generations`.

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
        """The stored generations of a namespace, oldest first."""
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
        others: Sequence[HasHost] = (),
        without: Collection[str] = (),
        on_refused: Refuse | None = None,
        report: Callable[[str, int], None] = lambda _phase, _done: None,
    ) -> Published:
        """Replace the whole content of a namespace with the rows, at one version.

        Rows are pairs, or Arrow tables and batches with the columns `key` and `value`.  Many rows are sorted
        on disk.  An invalid row raises InvalidKey or InvalidValue; with `on_refused` the row and the error
        are passed to it instead, and the row is skipped.  Rows with the same key raise InvalidKey, or with
        `duplicates="last"` the last one counts.

        `base` is the moment of the data, by default now: changes made after it are kept, on top of the rows.
        `keep` earlier generations are kept for a rollback.

        While another data set is being published, this waits for `wait` and then raises PublicationConflict.
        If publishing fails, the namespace keeps its content and the loaded rows are removed.  With the name
        of a `publisher` they are kept instead, and calling again with the same name and rows resumes.

        A shared namespace is published at `others`, too: all sites load the rows before any of them swaps.
        Name unreachable sites in `without`; they get the data set over their links.  Raises PartlyDone if
        some sites have swapped and another fails; that one gets the data set over its links, too.
        """
        check_keep(keep)
        dataset = self._dataset(self._find(namespace), duplicates, on_refused, report)
        begun_ms, places = monotonic_ms(), self._places(namespace, others)
        with _dropping(places, publisher is None):
            name = publisher or self._holder
            _begin(places, base, name, wait, without, gives_way=publisher is None)
            _load(dataset.pairs(rows), places, report)
            return self.finish(
                namespace,
                [place.number for place in places],
                others=others,
                keep=keep,
                rows=dataset.rows,
                refused=dataset.refused,
                load_ms=monotonic_ms() - begun_ms,
                report=report,
            )

    def begin(
        self,
        namespace: str,
        *,
        base: At | None,
        publisher: str,
        resumes: bool,
        others: Sequence[HasHost],
        without: Collection[str],
    ) -> tuple[int, ...]:
        """Create the generation here and at `others`, as `publish` does; return its number at each site."""
        places = self._places(namespace, others)
        with _dropping(places, not resumes):
            _begin(places, base, publisher, None, without, gives_way=not resumes)
        return tuple(place.number for place in places)

    def finish(
        self,
        namespace: str,
        numbers: Sequence[int],
        *,
        others: Sequence[HasHost] = (),
        keep: int,
        rows: int,
        refused: int = 0,
        load_ms: int = 0,
        report: Callable[[str, int], None] = lambda _phase, _done: None,
    ) -> Published:
        """Copy the changes made since the base into the loaded generations, and swap these in.

        `numbers` are the numbers of the generations at this site and at `others`.
        """
        begun_ms, places = monotonic_ms(), self._places(namespace, others, numbers)
        for place in reversed(places):
            _rewind(place.host, namespace, place.number, report)
        rewound_ms = monotonic_ms()
        report("swapping", rows)
        first = places[0]
        swapped = first.host.generations.swap_generation(namespace, first.number, keep)
        swapped_ms = monotonic_ms()
        assert swapped.since is not None
        return Published(
            namespace=namespace,
            generation=first.number,
            base=swapped.base,
            version=swapped.since,
            rows=rows,
            refused=refused,
            replayed=swapped.replayed,
            load_ms=load_ms,
            rewind_ms=rewound_ms - begun_ms,
            swap_ms=swapped_ms - rewound_ms,
            others=_swap_others(places, keep),
        )

    def rollback(
        self,
        namespace: str,
        number: int | None = None,
        *,
        keep: int = KEPT_GENERATIONS,
        wait: timedelta = ARRIVAL,
        others: Sequence[HasHost] = (),
        without: Collection[str] = (),
        report: Callable[[str, int], None] = lambda _phase, _done: None,
    ) -> GenerationRow:
        """Publish an earlier generation again, with all changes made since its end, under a new number.

        `number` is by default the last generation before the current one.  A shared namespace is rolled back
        at `others`, too, to this site's generation; `without` names unreachable sites, as for `publish`.

        This site must have the changes of the other sites up to a version above the current data set: waits
        for `wait`, then raises LinkStalled.  Raises PublicationConflict if another data set is being
        published, or has been published meanwhile.
        """
        check_keep(keep)
        places = self._places(namespace, others)
        first = places[0]
        if _require_all(places, namespace, without, "roll back") is None:
            return first.host.generations.rollback_generation(namespace, number, self._holder, keep)
        number, hosts = first.row.earlier(number).number, [place.host for place in places]
        arrived = wait_arrived(hosts, namespace, wait, without)
        with _dropping(places, True):
            try:
                _begin(places, arrived.base, self._holder, wait, without)
            except VersionCollected as error:
                raise changed(arrived) from error
            require_present(hosts, arrived)
            with closing(earlier_rows(first.host, arrived, number, report)) as rows:
                loaded = _load(rows, places, report)
            numbers = [place.number for place in places]
            self.finish(namespace, numbers, others=others, keep=keep, rows=loaded, report=report)
        return next(each for each in self.list(namespace) if each.number == first.number)

    def drop(self, namespace: str, number: int) -> None:
        """Remove a generation whose publication was abandoned, or one that ended before the retention."""
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
        """The numbers of rows that `publish` would load and refuse.  Raises like it, but writes nothing."""
        row = self._find(namespace)
        _require_plain(row, self._host())
        dataset = self._dataset(row, duplicates, on_refused, report)
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

    def _places(
        self, namespace: str, others: Sequence[HasHost], numbers: Sequence[int] | None = None
    ) -> Sequence[_Place]:
        """The places of this site and of `others`; `numbers` are those of generations that have begun."""
        require_name(namespace, "namespace")
        hosts = [self._host(), *(each.host for each in others)]
        return [
            _Place(host, host.namespaces.find_namespace(namespace), number)
            for host, number in zip(hosts, numbers or [0] * len(hosts), strict=True)
        ]

    def _find(self, namespace: str) -> NamespaceRow:
        require_name(namespace, "namespace")
        return self._host().namespaces.find_namespace(namespace)


def _require_all(
    places: Sequence[_Place], namespace: str, without: Collection[str], action: str = "publish"
) -> int | None:
    """Check that `places` are all sites that share the namespace, except those in `without`.

    Return the site id for the stamps of the rows; None for a namespace that is not shared.
    """
    first, *others = places
    topology = first.host.membership.topology()
    members = {} if topology is None else topology.active_members(namespace)
    wanted = members.keys() - {first.site, *without} if first.site in members else set()
    given = {place.site for place in others}
    if given != wanted:
        missing, unknown = sorted(wanted - given), sorted(given - wanted)
        raise InvalidConfiguration(
            f"namespace {namespace!r} is shared with {', '.join(missing)}; {action} at all sites "
            "(`--topology`, in Python `others`), and leave out by name those that are away (`--without`)"
            if missing
            else f"{unknown[0]!r} does not share namespace {namespace!r} with {first.site!r}; {action} there "
            "by itself",
            namespace=namespace,
        )
    return first.host.identity.site_id if first.site in members else None


def _require_plain(row: NamespaceRow, host: Host) -> None:
    """Raise WrongPolicy for a namespace that merges, or that holds the rows of a layer."""
    require_last_write(row)
    if (layer := layer_of(open_namespace(row, host, durable=False))) is not None:
        raise WrongPolicy(
            f"namespace {row.name!r} holds {layer.decode(errors='replace')}, which a data set would take "
            "away; publish into a namespace of its own",
            namespace=row.name,
        )


def _begin(
    places: Sequence[_Place],
    base: At | None,
    publisher: str,
    wait: timedelta | None,
    without: Collection[str],
    *,
    gives_way: bool = True,
) -> None:
    """Begin a generation at each place, at the base of the first.

    Waits while another publisher is at work at a place.  With `gives_way` this publisher drops its
    generations if that place's name comes before one of theirs: else two publishers that begin at different
    sites would wait for each other.
    """
    _require_plain(places[0].row, places[0].host)
    given = version = 0 if base is None else to_version(base)
    origin = _require_all(places, places[0].row.name, without)
    end_ms = monotonic_ms() + (wait or timedelta(0)) // timedelta(milliseconds=1)
    while (place := next((each for each in places if not each.number), None)) is not None:
        try:
            begun = place.host.generations.begin_generation(place.row.name, version, publisher, origin)
        except PublicationConflict as error:
            # Without a generation in its details, the conflict is about this publisher's own base.
            if "generation" not in error.details or monotonic_ms() >= end_ms:
                raise
            if gives_way and any(place.site < each.site for each in places if each.number):
                _drop(places)
                version = given
            Event().wait(_WAIT_SECONDS)
        else:
            place.number, version = begun.number, begun.base


@contextmanager
def _dropping(places: Sequence[_Place], drops: bool) -> Iterator[None]:
    """Drop the begun generations if the block fails."""
    try:
        yield
    except BaseException:
        if drops:
            _drop(places)
        raise


def _drop(places: Sequence[_Place]) -> None:
    """Drop the begun generations.

    Errors are ignored: a site refuses to drop a current generation, and garbage collection drops the others.
    """
    for place in places:
        if place.number:
            with suppress(FloodmarkError):
                place.host.generations.drop_generation(place.row.name, place.number)
        place.number = 0


def _load(pairs: Iterator[Pairs], places: Sequence[_Place], report: Callable[[str, int], None]) -> int:
    """Load stored records at all places; return their number."""
    sent: deque[Future[int]] = deque()
    rows = 0
    with ExitStack() as stack:
        streams = [
            stack.enter_context(
                closing(place.host.write_stream(GenerationStream(place.row.id, place.number)))
            )
            for place in places
        ]
        for portion in pairs:
            for place, stream in zip(places, streams, strict=True):
                sent.append(stream.send(for_namespace(portion, place.row.id)))
            while len(sent) >= _PORTIONS_IN_FLIGHT_MAX * len(places):
                sent.popleft().result()
            rows += len(portion)
            report("loading", rows)
        for answer in sent:
            answer.result()
    return rows


def for_namespace(pairs: Pairs, namespace: int) -> Pairs:
    """The pairs with the namespace id of a site in their keys."""
    if not pairs or pairs.key_column[0].startswith(encode_namespace(namespace)):
        return pairs
    keys = rename_keys(pairs.key_column, namespace)
    return Pairs(pack(keys).to_arrow(), pack(pairs.value_column).to_arrow())


def _rewind(host: Host, namespace: str, number: int, report: Callable[[str, int], None]) -> None:
    """Copy the changes made since the base, until the generation is nearly caught up."""
    replayed = 0
    for rewound in rewind_until(NEAR_MS, partial(host.generations.rewind_generation, namespace, number)):
        replayed += rewound.replayed
        report("replaying changes", replayed)


def _swap_others(places: Sequence[_Place], keep: int) -> dict[str, Version]:
    """Swap at the other sites; return the swap version of each, by site name."""
    first, *others = places
    swapped: dict[str, Version] = {}
    for place in others:
        try:
            done = place.host.generations.swap_generation(place.row.name, place.number, keep)
        except FloodmarkError as error:
            raise PartlyDone(
                f"{place.row.name!r} was published at {', '.join([first.site, *swapped])}, and not at "
                f"{place.site!r}, which gets it by its links ({error})",
                namespace=place.row.name,
            ) from error
        assert done.since is not None
        swapped[place.site] = done.since
    return swapped


def check_keep(keep: int) -> None:
    """Raise InvalidArgument unless `keep` is 0 to GENERATIONS_KEPT_MAX."""
    if type(keep) is not int or not 0 <= keep <= GENERATIONS_KEPT_MAX:
        raise InvalidArgument(
            f"a namespace keeps 0 to {GENERATIONS_KEPT_MAX} earlier generations, not {keep!r:.60}"
        )
