"""Drivers of links: they take the steps of links over an unreliable network.

A driver plans a step, reads it, applies it and has the target note it, with time in between, and may die
between any two of these.  It stores nothing, so the next driver begins with the state of the sites; the old
one may still be running then.  All rules are in `floodmark.links`, which Spark also uses.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

import pyarrow

from floodmark.host.directory import Identity
from floodmark.host.ports import Host
from floodmark.links.applying import Applier
from floodmark.links.bringing import bring_data_sets
from floodmark.links.reading import Piece, read_pieces, whole_step
from floodmark.links.steps import plan_step, run_step
from floodmark.model.errors import (
    ClockSkew,
    Fenced,
    FloodmarkError,
    NamespaceNotFound,
    Unreachable,
    VersionCollected,
)
from floodmark.model.format import FORMAT
from floodmark.model.partition import ApplyStream, GenerationStream, WriteStream
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version
from floodmark.replication.applied import Applied
from floodmark.replication.step import LinkStep
from floodmark.testing.simulation.chronicle import NAMESPACES
from floodmark.testing.simulation.clocks import Schedule
from floodmark.testing.simulation.history import Violation
from floodmark.testing.simulation.network import Carrier, Network
from floodmark.testing.simulation.ports import DistantPorts
from floodmark.testing.simulation.sites import HOLD, TROUBLE, Down, SimulatedSite, embedded
from floodmark.testing.simulation.workload import KEYS

Result = TypeVar("Result")

STAGE_MS_MAX: Final = 60
PAUSE_MS_MAX: Final = 800
CHANGES_MAX: Final = 8
BATCH_ROWS_MAX: Final = 8
GONE: Final = 0.01
GONE_MS_MAX: Final = 3_000


class DistantSite(DistantPorts):
    """A site as reached by a remote driver, as the source or the target of a link."""

    def __init__(self, network: Carrier, place: str, site: SimulatedSite) -> None:
        super().__init__(self._ask)
        self._network = network
        self._place = place
        self._site = site
        self.identity = Identity(site=site.name, site_id=site.id, format=FORMAT)

    def physical_ms(self) -> int:
        """The time at the site."""
        return self._site.time()

    def hold_safe_points(self, name: str, versions: Mapping[str, Version]) -> None:
        """Keep a version of each namespace at the site, in one call.

        A link that has not begun yet is at 0, and needs what the site has shared since it began to.
        """
        unread: dict[str, Version] = {namespace: 0 for namespace, version in versions.items() if not version}

        def hold(host: Host) -> None:
            cuts = host.replication.cut_link(unread, None) if unread else ()
            begins = {cut.name: cut.start for cut in cuts}
            for namespace, version in versions.items():
                begin = begins.get(namespace, version)
                host.retention.hold_safe_point(f"{name}-{namespace}", begin, HOLD, namespace)

        self._ask(hold)

    @property
    def router(self) -> "DistantSite":
        """The site itself, which implements the needed methods of a router."""
        return self

    def get(self, key: bytes, at: Version | None) -> bytes | None:
        """Read what is stored under a key."""
        return self._ask(lambda host: host.router.get(key, at))

    def scan_records(
        self, keys: KeyRange, at: Version, *, dead: bool = False
    ) -> Iterator[pyarrow.RecordBatch]:
        """Read records, all in one call."""
        return iter(self._ask(lambda host: list(host.router.scan_records(keys, at, dead=dead))))

    def changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        """Read changes."""
        return iter(self._ask(lambda host: list(host.changes(request))))

    def write_stream(self, command: ApplyStream | GenerationStream) -> WriteStream:
        """A stream each of whose batches is a call of its own."""

        def send(rows: Mapping[bytes, bytes]) -> int:
            def deliver() -> int:
                if isinstance(command, ApplyStream):
                    self._site.note_arrival(rows)
                return self._site.call_host(lambda host: host.write_stream(command).send(rows).result())

            return self._call(deliver)

        return _DistantStream(send)

    def _ask(self, action: Callable[[Host], Result]) -> Result:
        return self._call(lambda: self._site.call_host(action))

    def _call(self, action: Callable[[], Result]) -> Result:
        return self._network.call(self._place, self._site.name, action)


class _DistantStream:
    def __init__(self, send: Callable[[Mapping[bytes, bytes]], int]) -> None:
        self._send = send

    def send(self, rows: Mapping[bytes, bytes]) -> "Future[int]":
        future: Future[int] = Future()
        try:
            future.set_result(self._send(rows))
        except FloodmarkError as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        pass


@dataclass
class Link:
    """One direction between two sites.  Its driver is at the target."""

    source: SimulatedSite
    target: SimulatedSite
    network: Network
    in_parts: bool = False
    """Whether several tasks share a step, each with some of the keys."""
    incarnation: int = 1
    """Which life of the source is read, by the topology that drivers have."""
    is_closed: bool = False
    """Whether the link is in no topology any more, so that no driver runs it."""

    @property
    def sites(self) -> tuple[SimulatedSite, SimulatedSite]:
        """Source and target."""
        return self.source, self.target

    @property
    def name(self) -> str:
        """The name of the link in the history."""
        return f"{self.source.name}>{self.target.name}"

    def ends(self) -> tuple[DistantSite, DistantSite]:
        """Source and target, as reached by a driver."""
        place = self.target.name
        return DistantSite(self.network, place, self.source), DistantSite(self.network, place, self.target)

    def plan(self, changes_max: int | None) -> LinkStep:
        """Plan the next step, and hold the changes that it needs at the source."""
        source, target = (end.host for end in self.ends())
        step = plan_step(source, target, NAMESPACES, incarnation=self.incarnation, changes_max=changes_max)
        self.hold_safe_points({namespace.name: namespace.begin for namespace in step.namespaces})
        return step

    def hold_safe_points(self, positions: Mapping[str, Version]) -> None:
        """Hold the changes that the target lacks at the source."""
        self.ends()[0].hold_safe_points(f"link-{self.target.name}", positions)

    def has_left(self, step: LinkStep) -> bool:
        """Whether the link is past the beginning of a step: then no safe point holds the step's changes."""
        if not self.target.is_up or step.incarnation < self.incarnation:
            return True
        rows = self.target.call_host(lambda host: embedded(host).links.rows)
        return any(
            rows[each.target_id, self.source.id].through > each.since
            for each in step.namespaces
            if (each.target_id, self.source.id) in rows
        )

    def draw_shares(self, step: LinkStep, random: Random) -> list[list[Piece]]:
        """The pieces of the tasks of a step.  A step with atomic batches is one task."""
        whole = whole_step(step)
        if step.batches or not self.in_parts:
            return [whole]
        border = random.choice(KEYS)
        parts = KeyRange(b"", border), KeyRange(border, None)
        return [[Piece(place, keys) for place, _ in whole] for keys in parts]

    def run_step(self) -> None:
        """Take one whole step to the present at once."""
        source, target = (end.host for end in self.ends())
        step = self.plan(None)
        bring_data_sets(source, target, step)
        run_step(source, target, step)


class Driver:
    """Takes steps of a link, stage by stage, and retries failed ones.  A dead driver is replaced."""

    def __init__(self, link: Link, random: Random, schedule: Schedule) -> None:
        self._link = link
        self._random = random
        self._schedule = schedule
        self._source, self._target = link.ends()
        self._stages = self._run()
        self._step = LinkStep(source=link.source.name, source_id=link.source.id)

    def go_on(self) -> None:
        """Take the next stage, and schedule the one after it."""
        if self._link.is_closed:
            return
        if self._random.random() < GONE:
            successor = Driver(self._link, self._random, self._schedule)
            self._schedule.after(self._random.randint(0, GONE_MS_MAX), successor.go_on)
            return
        delay_ms_max = STAGE_MS_MAX if self._take_stage() else PAUSE_MS_MAX
        self._schedule.after(self._random.randint(0, delay_ms_max), self.go_on)

    def _take_stage(self) -> bool:
        """Take the next stage of a step; return False if the step has ended, successfully or not."""
        try:
            next(self._stages)
            return True
        except StopIteration:
            pass
        except VersionCollected as error:
            if not self._link.has_left(self._step):
                raise Violation("5", self._link.name, f"the link lost its place: {error}") from error
        except (*TROUBLE, ClockSkew, Fenced, NamespaceNotFound) as error:
            # A site that is being restored gets its namespaces one at a time.
            if not isinstance(error, Unreachable | Down):
                self._link.target.note(f"{self._link.name} is stopped: {type(error).__name__}")
        self._stages = self._run()
        return False

    def _run(self) -> Iterator[None]:
        random = self._random
        changes_max = random.randint(1, CHANGES_MAX) if random.random() < 0.3 else None
        step = self._step = self._link.plan(changes_max)
        if any(each.data_set for each in step.namespaces):
            yield
            bring_data_sets(self._source.host, self._target.host, step)
        if all(each.until <= each.since for each in step.namespaces):
            return
        yield
        applied = Applied()
        for pieces in self._link.draw_shares(step, random):
            batches = list(read_pieces(self._source.host, step, pieces))
            yield
            with Applier(
                self._target.host, step, batch_rows_max=random.randint(1, BATCH_ROWS_MAX)
            ) as applier:
                for rows in batches:
                    cut = random.randint(0, rows.num_rows)
                    for part in (rows.slice(0, cut), rows.slice(cut)):
                        if part.num_rows:
                            applier.add(part)
                    yield
                applied = applied.plus(applier.finish())
        yield
        self._target.replication.advance_link(step, applied)
