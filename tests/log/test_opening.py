"""A log keeps to the settings with which it is opened."""

import pytest

from floodmark.clock import system_time_ms
from floodmark.engine import MemoryEngine
from floodmark.log import FAMILY, BatchSettings, OpenLog, open_log
from floodmark.model.errors import InvalidArgument
from floodmark.model.limits import LEDGER_IN_FLIGHT_BYTES_MAX
from floodmark.testing.ledgers import EngineStore


def open_with(settings: BatchSettings) -> OpenLog[bytes]:
    engine = MemoryEngine((FAMILY,))
    return open_log(
        EngineStore(engine), "log", settings, encode=bytes, decode=bytes, time_source=system_time_ms
    )


def test_a_log_has_as_many_bytes_in_flight_as_it_is_set_to() -> None:
    writer = open_with(BatchSettings(max_bytes=100, max_bytes_in_flight=200)).writer
    assert writer._bytes_in_flight_max == 200
    writer.close()


@pytest.mark.parametrize("wrong", [0, 99, LEDGER_IN_FLIGHT_BYTES_MAX + 1])
def test_what_is_in_flight_holds_an_entry_and_has_a_limit(wrong: int) -> None:
    BatchSettings(max_bytes=100, max_bytes_in_flight=100).require_sound()
    with pytest.raises(InvalidArgument, match="max_bytes_in_flight"):
        BatchSettings(max_bytes=100, max_bytes_in_flight=wrong).require_sound()
