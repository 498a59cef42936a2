"""A coordinator with its log, opened together; and the thread that sweeps."""

import logging
from collections.abc import Callable
from threading import Thread
from typing import Final

from floodmark.clock import TimeSource, monotonic_ms
from floodmark.log import BatchSettings, Store, open_log
from floodmark.transaction.coordinator import WAIT_SECONDS_MAX, TransactionCoordinator
from floodmark.transaction.ports import Participants
from floodmark.transaction.records import decode_record, encode_record

# What the names of coordinators' ledgers begin with.
LEDGERS: Final = "coordinator/"

_log = logging.getLogger("floodmark.transaction")


def open_coordinator(
    number: int,
    store: Store,
    participants: Participants,
    *,
    settings: BatchSettings,
    mint: Callable[[], object],
    time_source: TimeSource,
    growing_ms: TimeSource = monotonic_ms,
    wait_seconds_max: float = WAIT_SECONDS_MAX,
    is_abandoned: Callable[[str], bool] = lambda _: False,
) -> TransactionCoordinator:
    """The coordinator of a number, as its log says."""
    log = open_log(
        store,
        f"{LEDGERS}{number}",
        settings,
        encode=encode_record,
        decode=decode_record,
        time_source=time_source,
    )
    return TransactionCoordinator(
        number,
        log.writer,
        log.live,
        participants,
        mint=mint,
        time_source=time_source,
        growing_ms=growing_ms,
        wait_seconds_max=wait_seconds_max,
        is_abandoned=is_abandoned,
    )


def start_sweeping(coordinator: TransactionCoordinator) -> Thread:
    """A thread that sweeps whenever there is something to sweep, until the coordinator is closed."""

    def run() -> None:
        while coordinator.wait_work():
            try:
                coordinator.sweep()
            except Exception:
                _log.exception(
                    "coordinator %d could not look after all of its transactions", coordinator.number
                )

    thread = Thread(target=run, name=f"floodmark-coordinator-{coordinator.number}", daemon=True)
    thread.start()
    return thread
