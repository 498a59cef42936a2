"""Opens a coordinator with its log, and starts its sweeping thread."""

import logging
from collections.abc import Callable
from threading import Thread
from typing import Final

from floodmark.clock import TimeSource, monotonic_ms
from floodmark.log import BatchSettings, Store, open_log
from floodmark.transaction.coordinator import WAIT_SECONDS_MAX, TransactionCoordinator
from floodmark.transaction.ports import Participants
from floodmark.transaction.records import decode_record, encode_record

# The prefix of the names of coordinators' ledgers.
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
    """Open the coordinator of a number, with what its log holds."""
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
    """Start a daemon thread that sweeps whenever a transaction is due, until the coordinator is closed."""

    def run() -> None:
        while coordinator.wait_work():
            try:
                coordinator.sweep()
            except Exception:
                _log.exception("a sweep of coordinator %d failed; the next one retries", coordinator.number)

    thread = Thread(target=run, name=f"floodmark-coordinator-{coordinator.number}", daemon=True)
    thread.start()
    return thread
