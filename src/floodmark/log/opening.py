"""Opens a log: its ledger, the live records in it, and a writer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from floodmark.clock import TimeSource
from floodmark.log.acknowledgement import Acknowledgements
from floodmark.log.base import Position
from floodmark.log.batches import require_limits
from floodmark.log.stored import Store, StoredLedger
from floodmark.log.writer import (
    BYTES_IN_FLIGHT_MAX,
    BYTES_MAX,
    DELAY_MS_MAX,
    RECORDS_MAX,
    BatchedWriter,
)
from floodmark.model.errors import InvalidArgument
from floodmark.model.limits import LEDGER_IN_FLIGHT_BYTES_MAX

Record = TypeVar("Record")


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an entry, and how many bytes may wait to be written before callers wait for room."""

    enabled: bool = True
    max_records: int = RECORDS_MAX
    max_bytes: int = BYTES_MAX
    max_delay_ms: int = DELAY_MS_MAX
    max_bytes_in_flight: int = BYTES_IN_FLIGHT_MAX

    def require_sound(self) -> None:
        """Raise `InvalidArgument` for settings that no writer takes."""
        require_limits(self.max_records, self.max_bytes, self.max_delay_ms)
        if not self.max_bytes <= self.max_bytes_in_flight <= LEDGER_IN_FLIGHT_BYTES_MAX:
            raise InvalidArgument(
                f"max_bytes_in_flight must be between max_bytes, which is {self.max_bytes:,}, and "
                f"{LEDGER_IN_FLIGHT_BYTES_MAX:,}, but is {self.max_bytes_in_flight:,}"
            )


@dataclass(frozen=True)
class OpenLog(Generic[Record]):
    """A log, and the records that were live when it was opened, in order."""

    ledger: StoredLedger
    writer: BatchedWriter[Record]
    live: list[tuple[Position, Record]]


def open_log(
    store: Store,
    name: str,
    settings: BatchSettings,
    *,
    encode: Callable[[Record], bytes],
    decode: Callable[[bytes], Record],
    time_source: TimeSource,
) -> OpenLog[Record]:
    """Open the log of a name.  The first record creates its ledger."""
    ledger = StoredLedger(store, name, time_source=time_source)
    acknowledgements = Acknowledgements(ledger)
    live = [(position, decode(record)) for position, record in acknowledgements.recover()]
    writer = BatchedWriter(
        ledger,
        acknowledgements=acknowledgements,
        enabled=settings.enabled,
        max_records=settings.max_records,
        max_bytes=settings.max_bytes,
        max_delay_ms=settings.max_delay_ms,
        bytes_in_flight_max=settings.max_bytes_in_flight,
        encode=encode,
    )
    return OpenLog(ledger, writer, live)
