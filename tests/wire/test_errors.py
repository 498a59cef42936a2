"""Errors over the wire: ours come back as they were, and every error of Flight means something."""

import inspect
from datetime import UTC, datetime

import pyarrow
import pytest
from pyarrow import flight

from floodmark.model import errors
from floodmark.model.errors import (
    FloodmarkError,
    LimitExceeded,
    NotAllowed,
    NotAuthenticated,
    OutcomeUnknown,
    Unreachable,
    WireMismatch,
)
from floodmark.wire.errors import (
    TRANSPORT_ERRORS,
    ErrorMessage,
    decode_error,
    encode_error,
    restore_error,
    to_flight_error,
    translate,
)

SERVER = "grpc://oslo:7100"
TREE = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, FloodmarkError)]

# What each error of Flight means for a call that reads, and for one that writes.
MEANINGS: dict[type[BaseException], tuple[type[FloodmarkError], type[FloodmarkError]]] = {
    flight.FlightError: (Unreachable, OutcomeUnknown),
    flight.FlightInternalError: (Unreachable, OutcomeUnknown),
    flight.FlightTimedOutError: (Unreachable, OutcomeUnknown),
    flight.FlightCancelledError: (Unreachable, OutcomeUnknown),
    flight.FlightUnavailableError: (Unreachable, OutcomeUnknown),
    flight.FlightServerError: (WireMismatch, WireMismatch),
    flight.FlightUnauthenticatedError: (NotAuthenticated, NotAuthenticated),
    flight.FlightUnauthorizedError: (NotAllowed, NotAllowed),
    flight.FlightWriteSizeExceededError: (LimitExceeded, LimitExceeded),
    pyarrow.ArrowNotImplementedError: (WireMismatch, WireMismatch),
    pyarrow.ArrowKeyError: (WireMismatch, WireMismatch),
    pyarrow.ArrowInvalid: (Unreachable, OutcomeUnknown),
    OSError: (Unreachable, OutcomeUnknown),
}


def make(kind: type[BaseException], text: str) -> BaseException:
    return kind(text, 1, 2) if kind is flight.FlightWriteSizeExceededError else kind(text)


@pytest.mark.parametrize("kind", TREE)
def test_every_error_of_the_tree_comes_back_as_it_was(kind: type[FloodmarkError]) -> None:
    error = kind("what happened", version=(1 << 64) - 1, key=b"\xff\x00", name="ada", there=True, none=None)
    restored = decode_error(encode_error(error))
    assert type(restored) is kind
    assert str(restored) == "what happened"
    assert restored is not None
    assert restored.details == error.details


def test_an_unknown_class_becomes_the_nearest_that_is_known() -> None:
    message = ErrorMessage(["DiskOnFire", "StorageFull", "StorageFailed", "Retryable"], "it burns")
    assert type(restore_error(message)) is errors.StorageFull
    assert type(restore_error(ErrorMessage(["Newer", "Newest"], "x"))) is FloodmarkError


@pytest.mark.parametrize("detail", [1 << 70, object(), {1: {2}}, 1j, datetime(2020, 1, 1, tzinfo=UTC)])
def test_details_that_cannot_travel_do_so_as_text(detail: object) -> None:
    restored = decode_error(encode_error(FloodmarkError("x", detail=detail)))
    assert restored is not None
    assert restored.details["detail"] is not None


def test_a_message_without_end_is_cut() -> None:
    assert len(encode_error(FloodmarkError("x" * 10**6, detail="y" * 10**6))) < 30_000


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x93\x01\x02\x03", b"not msgpack", b"\x81\xa1x\x01"])
def test_other_bytes_are_not_an_error_of_ours(garbage: bytes) -> None:
    assert decode_error(garbage) is None


def test_an_error_beside_a_flight_error_is_what_is_raised() -> None:
    own = errors.NamespaceNotFound("no namespace 'x'", namespace="x")
    found = translate(to_flight_error(own), writes=True, server=SERVER)
    assert type(found) is errors.NamespaceNotFound
    assert found.details == {"namespace": "x"}


def test_every_error_of_flight_has_a_meaning() -> None:
    raised = {
        kind
        for _, kind in inspect.getmembers(flight, inspect.isclass)
        if issubclass(kind, BaseException) and kind.__name__.startswith("Flight")
    }
    assert len(raised) >= 9
    assert raised <= MEANINGS.keys(), "a new release of pyarrow raises something new: decide what it means"


@pytest.mark.parametrize("kind", MEANINGS)
def test_flight_errors_become_ours(kind: type[BaseException]) -> None:
    reading, writing = MEANINGS[kind]
    assert issubclass(kind, TRANSPORT_ERRORS)
    for writes, expected in ((False, reading), (True, writing)):
        error = translate(make(kind, "Socket closed"), writes=writes, server=SERVER)
        assert type(error) is expected
        assert SERVER in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused",
        "errors resolving nowhere.invalid:1: [field:hostname lookup error:address lookup failed]",
        "DNS resolution failed for nowhere.invalid",
    ],
)
def test_a_write_that_was_never_sent_was_not_done(text: str) -> None:
    error = flight.FlightUnavailableError(f"Flight returned unavailable error, with message: {text}")
    assert type(translate(error, writes=True, server=SERVER)) is Unreachable


@pytest.mark.parametrize(
    "text",
    [
        "Socket closed",
        "recvmsg:Connection reset by peer",
        "keepalive watchdog timeout",
        "GOAWAY received",
        "something that gRPC will say one day",
    ],
)
def test_a_write_whose_answer_is_lost_is_unknown(text: str) -> None:
    error = translate(flight.FlightUnavailableError(text), writes=True, server=SERVER)
    assert type(error) is OutcomeUnknown
    assert "read before you repeat" in str(error)


def test_a_failed_handshake_hints_at_certificates() -> None:
    text = (
        "failed to connect to all addresses; last error: UNKNOWN: Ssl handshake failed: "
        "SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED"
    )
    error = translate(flight.FlightUnavailableError(text), writes=False, server=SERVER)
    assert "tls_root" in str(error)
