"""Channels: frequent calls over streams that stay open, because gRPC sets up every call anew.

    request   length of the method's name: 1 byte | name | body         a name of length 0 asks for nothing
    answer    0 | body      or      1 | error

A channel that rested for a moment is tried with an empty request first, so that a write does not find out
that the server was restarted.  One that rested for long is closed before the server takes its client for
stalled.
"""

from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, Final

import pyarrow
from pyarrow import flight

from floodmark.clock import TimeSource, monotonic_ms
from floodmark.wire.errors import TRANSPORT_ERRORS, decode_error

CHANNEL_COMMAND: Final = b"channel"
CHANNELS_MAX: Final = 64
REST_MS: Final = 500
CLOSE_AFTER_MS: Final = 8_000

_DONE: Final = b"\x00"
_FAILED: Final = b"\x01"
_NOTHING: Final = b"\x00"
_LOOK_SECONDS: Final = 0.5

# Opens a stream: its writer and its reader.
OpenStream = Callable[[], tuple[Any, Any]]
Wait = Callable[[float], bool]


def encode_call(name: str, body: bytes) -> bytes:
    """A request as it travels.

    >>> decode_call(encode_call("get", b"..."))
    ('get', b'...')
    """
    encoded = name.encode()
    return bytes([len(encoded)]) + encoded + body


def decode_call(request: bytes) -> tuple[str, bytes]:
    """Undo `encode_call`; a request that is too short names nothing."""
    end = 1 + (request[0] if request else 0)
    return request[1:end].decode(errors="replace"), request[end:]


def encode_answer(body: bytes) -> bytes:
    """An answer as it travels."""
    return _DONE + body


def encode_failure(error: bytes) -> bytes:
    """An error as it travels."""
    return _FAILED + error


class Channel:
    """One stream.  For one thread at a time."""

    def __init__(self, stream: tuple[Any, Any], time_source: TimeSource) -> None:
        self._writer, self._reader = stream
        self._time_source = time_source
        self.rested_since_ms = time_source()
        self.deadline_ms: int | None = None
        self.is_overdue = False

    def ask(self, request: bytes, timeout_seconds: float) -> bytes:
        """Send a request, and wait for its answer.  Raises what Flight raises, or the error that came."""
        self.deadline_ms = self._time_source() + round(timeout_seconds * 1000)
        try:
            self._writer.write_metadata(pyarrow.py_buffer(request))
            answer: bytes = self._reader.read_chunk().app_metadata.to_pybytes()
        except StopIteration:
            raise flight.FlightUnavailableError("the server has ended the stream") from None
        except TRANSPORT_ERRORS:
            if self.is_overdue:
                raise flight.FlightTimedOutError(f"no answer within {timeout_seconds:g} s") from None
            raise
        finally:
            self.deadline_ms = None
        self.rested_since_ms = self._time_source()
        if answer[:1] == _DONE:
            return answer[1:]
        raise decode_error(answer[1:]) or flight.FlightServerError("an answer that is none")

    def is_alive(self, timeout_seconds: float) -> bool:
        """Whether the server is still at the other end.  Raises FlightTimedOutError if it does not say."""
        try:
            self.ask(_NOTHING, timeout_seconds)
        except flight.FlightTimedOutError:
            raise
        except TRANSPORT_ERRORS:
            return False
        return True

    def cancel(self) -> None:
        """End whatever is waited for.  Any thread may do so."""
        with suppress(*TRANSPORT_ERRORS):
            self._reader.cancel()

    def close(self) -> None:
        """Let go of the stream, without waiting for the server."""
        self.cancel()
        with suppress(*TRANSPORT_ERRORS):
            self._writer.close()


class Channels:
    """The channels of a connection.  Safe to use from many threads.  `wait` returns whether it was closed."""

    def __init__(self, open_stream: OpenStream, wait: Wait, time_source: TimeSource = monotonic_ms) -> None:
        self._open_stream = open_stream
        self._wait = wait
        self._time_source = time_source
        self._lock = Lock()
        # The one that was used last comes first, so that what is not needed comes to rest.
        self._resting: list[Channel] = []
        self._at_work: set[Channel] = set()
        self._is_watched = False

    def take(self, timeout_seconds: float) -> Channel | None:
        """A channel that works, to be given back; None if there are too many."""
        while (channel := self._take_resting()) is not None:
            if self._time_source() - channel.rested_since_ms < REST_MS:
                return channel
            try:
                if channel.is_alive(timeout_seconds):
                    return channel
            except flight.FlightTimedOutError:
                # A new channel would not be answered either, and nothing was sent yet.
                self.discard(channel)
                raise
            self.discard(channel)
        with self._lock:
            if len(self._at_work) >= CHANNELS_MAX:
                return None
        channel = Channel(self._open_stream(), self._time_source)
        with self._lock:
            self._at_work.add(channel)
            if not self._is_watched:
                self._is_watched = True
                Thread(target=self._watch, name="floodmark-channels", daemon=True).start()
        return channel

    def give_back(self, channel: Channel) -> None:
        """The channel is free for others."""
        with self._lock:
            self._at_work.discard(channel)
            self._resting.append(channel)

    def discard(self, channel: Channel) -> None:
        """The channel does not work any more."""
        with self._lock:
            self._at_work.discard(channel)
        channel.close()

    def close(self) -> None:
        """Let go of all channels."""
        self.close_resting()
        with self._lock:
            at_work = list(self._at_work)
        for channel in at_work:
            channel.cancel()

    def close_resting(self) -> None:
        """Close the channels that are not in use, as when their token is not valid any more."""
        with self._lock:
            resting, self._resting = self._resting, []
        for channel in resting:
            channel.close()

    def _take_resting(self) -> Channel | None:
        with self._lock:
            if not self._resting:
                return None
            channel = self._resting.pop()
            self._at_work.add(channel)
            return channel

    def _watch(self) -> None:
        """End calls that take too long, and channels that rest for long, as long as there are any."""
        while not self._wait(_LOOK_SECONDS):
            now_ms = self._time_source()
            with self._lock:
                late = [each for each in self._at_work if each.deadline_ms and each.deadline_ms <= now_ms]
                old = [each for each in self._resting if now_ms - each.rested_since_ms >= CLOSE_AFTER_MS]
                self._resting = [each for each in self._resting if each not in old]
                if not self._resting and not self._at_work:
                    self._is_watched = False
            for channel in late:
                channel.is_overdue = True
                channel.cancel()
            for channel in old:
                channel.close()
            if not self._is_watched:
                return
