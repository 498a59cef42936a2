"""Each checker of the harness finds the fault that it is there for, planted here in an engine."""

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import pytest
from tests.faults.harness import visit
from tests.faults.observation import Violation

from floodmark.codec.changelog import decode_log_key, decode_row, encode_heartbeat
from floodmark.engine import Guard, WriteRow
from floodmark.model import Heartbeat
from floodmark.model.change import Sums, Tally
from floodmark.model.ranges import after
from floodmark.partition import FAMILIES
from floodmark.testing import Fault, FaultPlan, FaultyEngine, Operation

CLOCK_BOUND = b"clock/bound"


class RewritingEngine(FaultyEngine):
    """Writes something else than it was given, while the operation is at work."""

    always = False

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        rewrites = self.always or self._plan is not None
        return super().write(self.rewrite(list(rows)) if rewrites else rows, guards)

    def rewrite(self, rows: list[WriteRow]) -> list[WriteRow]:
        """What is really written."""
        return rows


class DropsLogRows(RewritingEngine):
    """Keeps the data of a commit and forgets its row in the change log."""

    def rewrite(self, rows: list[WriteRow]) -> list[WriteRow]:
        return [row for row in rows if row[0] != "log"]


class DropsDataRows(RewritingEngine):
    """Keeps the change log and forgets the data."""

    def rewrite(self, rows: list[WriteRow]) -> list[WriteRow]:
        return [row for row in rows if row[0] != "data"]


class AppliesHalfABatch(RewritingEngine):
    """Stops in the middle of a batch and says that all is well."""

    def rewrite(self, rows: list[WriteRow]) -> list[WriteRow]:
        return rows[: (len(rows) + 1) // 2]


class DropsBatches(RewritingEngine):
    """Says that it has written, and has not."""

    def rewrite(self, rows: list[WriteRow]) -> list[WriteRow]:
        return []


class Miscounts(RewritingEngine):
    """Makes heartbeats vouch for one change too many."""

    def rewrite(self, rows: list[WriteRow]) -> list[WriteRow]:
        return [
            (family, key, miscounted(key, value) if family == "log" and value else value)
            for family, key, value in rows
        ]


def miscounted(key: bytes, value: bytes) -> bytes:
    row = decode_row(decode_log_key(key)[1], value)
    if not isinstance(row, Heartbeat):
        return value
    sums = {**row.sums, 2: row.sums.get(2, Sums()).plus(Sums(Tally(1, 0), Tally(1, 0)))}
    return encode_heartbeat(
        Heartbeat(row.version, row.node, row.wall_ms, row.since, row.through, row.watermark, sums, row.log)
    )


class ForgetsTheClock(RewritingEngine):
    """Does not keep the clock's upper bound."""

    always = True

    def rewrite(self, rows: list[WriteRow]) -> list[WriteRow]:
        return [row for row in rows if row[1] != CLOCK_BOUND]


class SetsTheClockTooLow(ForgetsTheClock):
    """Keeps the newest written version as the bound, and so forgets versions that were only named."""

    def rewrite(self, rows: list[WriteRow]) -> list[WriteRow]:
        versions = [decode_log_key(key)[1] for family, key, _ in rows if family == "log"]
        bounds: list[WriteRow] = [
            ("meta", CLOCK_BOUND, version.to_bytes(8, "big")) for version in versions[-1:]
        ]
        return super().rewrite(rows) + bounds


class SyncsNothing(FaultyEngine):
    """Says that all is on disk, and nothing is."""

    def _make_durable(self) -> None:
        pass


class ForgetsASyncedWrite(FaultyEngine):
    """Loses a whole commit that was synced long ago."""

    def _make_durable(self) -> None:
        super()._make_durable()
        if self._plan is not None:
            for engine in (self._visible, self._durable):
                for family in ("data", "log"):
                    rows = engine.scan(family, b"", None, rows_max=1_000, bytes_max=1_000_000)
                    engine.write((family, key, None) for key, value in rows if b"second" in value)


class LosesTheMiddle(FaultyEngine):
    """Keeps the last writes in a power cut and loses those before."""

    def crash(self, keep: int | None = None) -> FaultyEngine:
        in_order = self._unsynced
        self._unsynced = in_order[::-1]
        try:
            return super().crash(keep)
        finally:
            self._unsynced = in_order


class WritesLate(FaultyEngine):
    """Refuses a write, and lets it appear after the next sync but one."""

    syncs_left = 2

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        taken = list(rows)
        fired = self.fired
        try:
            return super().write(taken, guards)
        except Exception:
            self.late = [] if fired else taken
            raise

    def sync(self) -> None:
        if self.fired and self.late:
            self.syncs_left -= 1
            if not self.syncs_left:
                super().write(self.late)
        super().sync()


class RefusesAndWrites(FaultyEngine):
    """Says that nothing was written, also to the one who looks it up, and it was."""

    _denied: frozenset[tuple[str, bytes]] = frozenset()

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        taken = list(rows)
        fired = self.fired
        try:
            return super().write(taken, guards)
        except Exception:
            if not fired:
                super().write(taken, guards)
                self._denied = frozenset((family, key) for family, key, _ in taken)
            raise

    def get(self, family: str, key: bytes) -> bytes | None:
        return None if (family, key) in self._denied else super().get(family, key)


class ForgetsWhenItCloses(FaultyEngine):
    """Drops a safe point on the way out."""

    def close(self) -> None:
        if not self._closed:
            super().write([("meta", b"safe-points/held", None)])
        super().close()


class StaysBroken(FaultyEngine):
    """Goes on failing after a fault that should have been transient."""

    def _fault(self, operation: Operation) -> Fault | None:
        return Fault.TRANSIENT if self.fired else super()._fault(operation)


class LosesAPartition(FaultyEngine):
    """Leaves a hole in the partition map after a power cut."""

    def crash(self, keep: int | None = None) -> FaultyEngine:
        image = super().crash(keep)
        if self._plan is not None:
            first = image.ceiling("meta", b"partitions/")
            second = image.ceiling("meta", after(first[0])) if first else None
            image.write([("meta", row[0], None) for row in (second,) if row])
        return image


class RaisesItsOwnError(FaultyEngine):
    """Lets an error through that is not ours."""

    def _fail(self, operation: Operation, fault: Fault) -> NoReturn:
        raise ConnectionError("the socket broke")


CANARIES: list[tuple[type[FaultyEngine], str, Fault, str]] = [
    (RaisesItsOwnError, "put", Fault.TRANSIENT, "outcome: the caller got ConnectionError"),
    (RefusesAndWrites, "put", Fault.TRANSIENT, "state: the outcome was REFUSED"),
    (DropsBatches, "put", Fault.TRANSIENT, "state: the outcome was SUCCESS"),
    (DropsBatches, "split", Fault.TRANSIENT, "state: the outcome was SUCCESS"),
    (ForgetsWhenItCloses, "put", Fault.TRANSIENT, "settled: when opened again, the safe_points are"),
    (StaysBroken, "put", Fault.TRANSIENT, "usable: put still fails 1 calls after"),
    (LosesAPartition, "put", Fault.TRANSIENT, "usable: the site cannot be opened"),
    (DropsLogRows, "put", Fault.TRANSIENT, "whole: users reads"),
    (DropsDataRows, "put", Fault.TRANSIENT, "whole: users at"),
    (AppliesHalfABatch, "put_many in one partition", Fault.TRANSIENT, "whole: users reads"),
    (ForgetsASyncedWrite, "put", Fault.TRANSIENT, "durable: .* was acknowledged"),
    (LosesTheMiddle, "put async", Fault.TRANSIENT, "suffix: "),
    (ForgetsTheClock, "put", Fault.TRANSIENT, "versions: .* was written"),
    (SetsTheClockTooLow, "put", Fault.TRANSIENT, "versions: .* was given out"),
    (SyncsNothing, "put", Fault.TRANSIENT, "resolved: .* a power cut can still take"),
    (WritesLate, "put", Fault.TRANSIENT, "resolved: .* appeared at or below"),
    (Miscounts, "heartbeat", Fault.TRANSIENT, "accounts: "),
]


@pytest.mark.parametrize(
    ("engine", "operation", "fault", "finding"),
    CANARIES,
    ids=[f"{engine.__name__} under {operation}" for engine, operation, *_ in CANARIES],
)
def test_the_harness_finds_a_planted_fault(
    engine: Callable[[tuple[str, ...]], FaultyEngine], operation: str, fault: Fault, finding: str
) -> None:
    with pytest.raises(Violation, match=finding):
        visit(operation, FaultPlan(at=1, kind=fault), lambda: engine(FAMILIES))


def test_every_checker_has_a_canary() -> None:
    checkers = {"outcome", "state", "settled", "usable", "whole", "durable", "suffix"}
    assert {finding.partition(":")[0] for *_, finding in CANARIES} == checkers | {
        "versions",
        "resolved",
        "accounts",
    }
