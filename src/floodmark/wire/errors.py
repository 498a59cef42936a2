"""Errors across the wire: Floodmark's own, and those of Arrow Flight.

An error is sent with the names of its class and bases, so that an older client raises the nearest class that
it knows.  After a lost connection, a call that was not sent or only reads raises `Unreachable`; a write
raises `OutcomeUnknown`.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
import pyarrow
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

MESSAGE_CHARACTERS_MAX: Final = 10_000

# What Arrow Flight raises.  An error of the gRPC library is one of these, whatever its cause.
TRANSPORT_ERRORS: Final = (flight.FlightError, pyarrow.ArrowException, OSError)

_TIMED_OUT: Final = (flight.FlightTimedOutError, TimeoutError)
# How gRPC says that a call was never sent.
_UNSENT: Final = ("failed to connect to all addresses", "errors resolving ", "DNS resolution failed")
_CERTIFICATE: Final = ("ssl", "tls", "certificate", "handshake")

_KNOWN: Final[Mapping[str, type[FloodmarkError]]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, FloodmarkError)
}


class ErrorMessage(msgspec.Struct, frozen=True):
    """An error on the wire.  `kinds` begins with its class and ends with the root."""

    kinds: list[str]
    message: str
    details: dict[str, object] = {}


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=repr)
_decoder: Final = msgspec.msgpack.Decoder(ErrorMessage)


def describe_error(error: FloodmarkError) -> ErrorMessage:
    """An error as a message.  Details that cannot be encoded, or are too long, become text."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, FloodmarkError)]
    details = {name: _portable(detail) for name, detail in error.details.items()}
    return ErrorMessage(kinds, str(error)[:MESSAGE_CHARACTERS_MAX], details)


def _portable(detail: object) -> object:
    try:
        encoded = _encoder.encode(detail)
        return detail if len(encoded) <= MESSAGE_CHARACTERS_MAX else repr(detail)[:MESSAGE_CHARACTERS_MAX]
    except (TypeError, OverflowError, RecursionError):
        return repr(detail)[:MESSAGE_CHARACTERS_MAX]


def restore_error(message: ErrorMessage) -> FloodmarkError:
    """The error of the nearest class that is known here.

    >>> restore_error(ErrorMessage(["DiskOnFire", "StorageFailed", "Retryable"], "it burns"))
    StorageFailed('it burns')
    """
    kind = next((_KNOWN[name] for name in message.kinds if name in _KNOWN), FloodmarkError)
    return kind(message.message, **message.details)


def encode_error(error: FloodmarkError) -> bytes:
    """An error as bytes, for the `extra_info` of a Flight error."""
    return _encoder.encode(describe_error(error))


def decode_error(encoded: bytes) -> FloodmarkError | None:
    """The error that `encode_error` has encoded; None if the bytes are not one of Floodmark's errors."""
    try:
        return restore_error(_decoder.decode(encoded))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def to_flight_error(error: FloodmarkError) -> flight.FlightServerError:
    """The Flight error that a server raises; of any other, Flight would send the traceback to the client."""
    return flight.FlightServerError(str(error)[:200], extra_info=encode_error(error))


def translate(
    error: BaseException, *, writes: bool, server: str, patience: float | None = None
) -> FloodmarkError:
    """The error of a failed call for its caller.

    `writes` is true if the call changes something; `patience` is its timeout in seconds.
    """
    own = decode_error(getattr(error, "extra_info", b"") or b"")
    if own is not None:
        return own
    said = _first_line(error)
    if patience is not None and isinstance(error, _TIMED_OUT):
        said = f"no answer within {patience:g} s"
    match error:
        case flight.FlightUnauthenticatedError():
            return NotAuthenticated(f"{server} does not know this caller: {said}")
        case flight.FlightUnauthorizedError():
            return NotAllowed(f"{server} refuses: {said}")
        case flight.FlightWriteSizeExceededError():
            return LimitExceeded(f"a message to {server} is too large: {said}")
        case flight.FlightServerError() | pyarrow.ArrowNotImplementedError() | pyarrow.ArrowKeyError():
            return WireMismatch(f"{server} answers, but not as a Floodmark server does: {said}")
        case _:
            return _lost(error, said, writes=writes, server=server)


def is_lost(error: BaseException) -> bool:
    """Whether the connection failed; False if the server answered with an error."""
    return decode_error(getattr(error, "extra_info", b"") or b"") is None


def _lost(error: BaseException, said: str, *, writes: bool, server: str) -> FloodmarkError:
    unsent = isinstance(error, flight.FlightUnavailableError) and any(words in said for words in _UNSENT)
    if writes and not unsent:
        return OutcomeUnknown(
            f"no answer from {server} to a write ({said}); it may or may not have happened: "
            "read before you repeat it"
        )
    timed_out = isinstance(error, _TIMED_OUT)
    hint = "check that the server runs and that the address is right"
    if any(word in said.lower() for word in _CERTIFICATE):
        hint = (
            "check the certificates: tls_root must have signed the server's, its names must include this "
            "host, and a server that asks for a client's certificate needs tls_certificate and tls_key"
        )
    elif timed_out:
        hint = "it is busy or cannot be reached; try again, or allow more time"
    return Unreachable(f"no answer from {server} ({said}); {hint}", timed_out=timed_out)


def _first_line(error: BaseException) -> str:
    """The message without Arrow's additions."""
    text = str(error).partition("\n")[0]
    return (text.rpartition("with message: ")[2] or type(error).__name__)[:500]
