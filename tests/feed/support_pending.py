"""What the tests of pending acknowledgements share: a store of subscriptions on an engine that can fail."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from tests.feed.support_subscription import Stage, make_stage
from tests.site.support import host_of
from tests.waiting import HANG_SECONDS

from floodmark.clock import HybridClock
from floodmark.feed.safepoints import SafePoints
from floodmark.feed.subscription.acknowledgement import (
    Acknowledgement,
    ChangePosition,
    Deliveries,
    LiveCommit,
    Progress,
)
from floodmark.feed.subscription.bookkeeping import SendIn
from floodmark.feed.subscription.pending import PENDING_LEDGERS, PendingRecord, decode_pending, encode_pending
from floodmark.feed.subscription.store import LocalSubscriptionStore
from floodmark.feed.subscription.subscriptions import OpenChanges, SubscriptionSpec
from floodmark.log import Acknowledgements, BatchSettings, OpenLog, StoredLedger, open_log
from floodmark.model.errors import OutcomeUnknown
from floodmark.model.limits import COMMIT_BYTES_MAX
from floodmark.model.partition import Decision, Fate
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version
from floodmark.partition import FAMILIES, EngineBound, Retention, Storage
from floodmark.partition.committer import Committer
from floodmark.testing import FaultyEngine, SimulatedTime

NAME: Final = "indexer"
SPEC: Final = SubscriptionSpec(name=NAME, namespace="users")
BATCHED: Final = BatchSettings()
BARE: Final = BatchSettings(enabled=False)
RESOLVED: Final = 1_000_000
NAMESPACE: Final = 1
NOTHING: Final = Acknowledgement()


def no_changes(_: ChangesRequest) -> Iterator[ChangeBatch]:
    return iter(())


@dataclass(kw_only=True)
class Desk:
    """A store of subscriptions, its engine, and the ways in which both end and begin again."""

    engine: FaultyEngine = field(default_factory=lambda: FaultyEngine(FAMILIES))
    time: SimulatedTime = field(default_factory=SimulatedTime)
    settings: BatchSettings = BATCHED
    namespace: Callable[[str], tuple[int, Version]] = lambda _: (NAMESPACE, 0)
    resolved: Callable[[], Version] = lambda: RESOLVED
    open_changes: OpenChanges = no_changes
    store: LocalSubscriptionStore = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        storage = Storage(self.engine)
        self._ledgers = storage
        self.clock = HybridClock(self.time, upper_bound=EngineBound(self.engine))
        self.committer = Committer(storage, self.clock, 7, round_bytes_max=COMMIT_BYTES_MAX)
        self.store = LocalSubscriptionStore(
            SafePoints(storage, self.time, lambda: [NAMESPACE], Retention(storage)),
            take=self.committer.commit,
            resolve_namespace=self.namespace,
            resolved_version=self._resolve,
            open_changes=self.open_changes,
            open_log=self.open_log,
        )

    def _resolve(self, _: Version = 0) -> Version:
        """The resolved version, which the clock of a site has always passed."""
        version = self.resolved()
        self.clock.pass_version(version)
        return version

    def open_log(self, name: str) -> OpenLog[PendingRecord]:
        return open_log(
            self._ledgers,
            f"{PENDING_LEDGERS}{name}",
            self.settings,
            encode=encode_pending,
            decode=decode_pending,
            time_source=self.time,
        )

    def power_cut(self, keep: int = 0) -> None:
        """Lose the process, and all but `keep` writes of those that are not on disk."""
        self.engine = self.engine.crash(keep=keep)
        self.start()

    def image(self, keep: int) -> "Desk":
        """What a power cut would leave."""
        return Desk(
            engine=self.engine.crash(keep=keep),
            time=self.time,
            settings=self.settings,
            namespace=self.namespace,
            resolved=self.resolved,
            open_changes=self.open_changes,
        )

    # What a consumer would do

    def open(self, holder: str = "one") -> int:
        """Take the lease; the epoch."""
        return self.store.open(SPEC, 0, holder, 30.0).epoch

    @property
    def epoch(self) -> int:
        return self.store.find(NAME).epoch

    def deliver(self, *counts: int, after: Version = 0) -> list[ChangePosition]:
        """Tell of commits 10, 20, … behind a version, with so many changes each; all positions."""
        commits = [
            LiveCommit(after + 10 * number, count, [0, count]) for number, count in enumerate(counts, start=1)
        ]
        progress = Progress(through=after + 10 * len(counts), delivered=commits)
        self.store.acknowledge(NAME, self.epoch, progress)
        return [ChangePosition(commit.version, index) for commit in commits for index in range(commit.count)]

    def acknowledge(self, *positions: ChangePosition, through: ChangePosition | None = None) -> None:
        self.store.acknowledge(
            NAME, self.epoch, self.progress(Acknowledgement(positions=list(positions), through=through))
        )

    def acknowledge_in(
        self, transaction: str, *positions: ChangePosition, through: ChangePosition | None = None
    ) -> None:
        acknowledgement = Acknowledgement(positions=list(positions), through=through)
        self.store.acknowledge_in(transaction, NAME, self.epoch, self.progress(), acknowledgement)

    def progress(self, acknowledgement: Acknowledgement = NOTHING) -> Progress:
        return Progress(through=self.store.find(NAME).through, acknowledgement=acknowledgement)

    # What there is

    def live(self) -> list[ChangePosition]:
        row = self.store.find(NAME)
        return list(Deliveries(row.through, row.live).live_positions())

    def pending(self) -> dict[str, list[ChangePosition]]:
        """By transaction, the live changes that are pending in it."""
        row = self.store.find(NAME)
        deliveries = Deliveries(row.through, row.live)
        return {
            each.transaction: sorted(
                {
                    *filter(deliveries.is_live, each.acknowledgement.positions),
                    *(
                        deliveries.live_positions(each.acknowledgement.through)
                        if each.acknowledgement.through is not None
                        else ()
                    ),
                }
            )
            for each in self.store.pending(NAME)
        }

    def records(self) -> list[str]:
        """The transactions of the records in the ledger, as a reader of the disk finds them after a flush."""
        for log in self.store.pending_logs().values():
            assert log.writer.flush(HANG_SECONDS)
        ledger = StoredLedger(self._ledgers, f"{PENDING_LEDGERS}{NAME}")
        return [decode_pending(record).transaction for _, record in Acknowledgements(ledger).recover()]


def make_desk(settings: BatchSettings = BATCHED, counts: tuple[int, ...] = (3, 2, 3)) -> Desk:
    """A desk whose subscription has a consumer, to which commits 10, 20, 30 were delivered."""
    desk = Desk(settings=settings)
    desk.open()
    desk.deliver(*counts)
    return desk


def settler(fates: dict[str, Decision]) -> Callable[[str], Fate]:
    """What became of transactions; those that are not named are unknown, and so aborted."""
    return lambda transaction: Fate(fates.get(transaction, Decision.ABORT), 7)


def make_consumer_stage(settings: BatchSettings = BATCHED) -> tuple[Stage, Desk]:
    """A site whose changes are consumed through a desk."""
    stage = make_stage()
    catalog = host_of(stage.site).catalog
    desk = Desk(
        time=stage.time,
        settings=settings,
        namespace=lambda name: (catalog.get(name).id, catalog.get(name).created_at),
        resolved=stage.site.resolved_version,
        open_changes=stage.open_changes,
    )
    stage.store = desk.store
    return stage, desk


def losing(send: SendIn, *, after: bool) -> SendIn:
    """A way to the site on which the question gets lost, or the answer."""

    def lose(
        transaction: str, name: str, epoch: int, progress: Progress, acknowledgement: Acknowledgement
    ) -> None:
        if after:
            send(transaction, name, epoch, progress, acknowledgement)
        raise OutcomeUnknown("planned: no answer")

    return lose
