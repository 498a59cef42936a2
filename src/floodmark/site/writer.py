"""Writes many records as a stream of batches.  A thread sends an incomplete batch after a short time."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Any, Final, NamedTuple
from weakref import ref

from floodmark.model.errors import Closed, FloodmarkError, InvalidArgument
from floodmark.model.partition import WriteStream
from floodmark.model.version import Version
from floodmark.site.policies import Fields, LastWrite

BATCH_RECORDS: Final = 1_000
BATCH_BYTES_MAX: Final = 4 * 1024 * 1024
# Interval of the thread that sends incomplete batches: each is sent after one to two intervals.
LINGER_SECONDS: Final = 0.5
# The number of unacknowledged batches above which the writer waits.
UNSETTLED_MAX: Final = 64


class Encoding(NamedTuple):
    """Encodes writes as rows: the merge policy, and functions that qualify a key and compute an expiry."""

    policy: LastWrite
    qualify: Callable[[Any], bytes]
    expire: Callable[[timedelta | float | None], int | None]


class Writer:
    """A stream of writes to a namespace.  Made by the `writer` method of its handle; for one thread.

    Batches are sent in order, and each is one commit per node; several writes to a key in one batch become
    one change.  All writes are acknowledged when `flush` or the `with` block ends without an error.  After an
    error nothing more is sent, and the first `acknowledged` records are known to be written.
    """

    def __init__(
        self,
        stream: WriteStream,
        encoding: Encoding,
        batch_records: int = BATCH_RECORDS,
    ) -> None:
        if type(batch_records) is not int or batch_records < 1:
            raise InvalidArgument(f"a batch has at least one record, not {batch_records!r}")
        self.acknowledged = 0
        self.version: Version = 0
        self._stream = stream
        self._policy, self._qualify, self._expire = encoding
        self._batch_records = batch_records
        self._rows: dict[bytes, bytes] = {}
        self._bytes = 0
        self._records = 0
        self._sent: deque[tuple[int, Future[Version]]] = deque()
        self._failure: FloodmarkError | None = None
        self._closed = False
        # Guards the batch against the thread that sends incomplete batches.
        self._lock = Lock()
        self._batches = 0
        self._done = Event()
        self._is_looked_after = False

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            with self._lock:
                # The block failed, so gathered writes that were not sent are discarded.
                self._rows = {}
                self._failure = self._failure or Closed("the block that wrote ended with an error")
        self.close()

    def put(self, key: bytes | str, value: Any, *, ttl: timedelta | float | None = None) -> None:
        """Add a write of a value to the batch."""
        self._add(self._qualify(key), self._policy.put(key, value, self._expire(ttl)))

    def delete(self, key: bytes | str) -> None:
        """Add the deletion of a key to the batch."""
        self._add(self._qualify(key), self._policy.delete())

    def update(self, key: bytes | str, fields: Fields, *, ttl: timedelta | float | None = None) -> None:
        """Add a write of some fields of a record to the batch."""
        self._add(self._qualify(key), self._policy.update(key, fields, self._expire(ttl)))

    def delete_field(self, key: bytes | str, *names: str) -> None:
        """Add the deletion of some fields of a record to the batch."""
        self._add(self._qualify(key), self._policy.delete_field(key, names))

    def add(self, key: bytes | str, number: int = 1) -> None:
        """Add an addition to a counter to the batch."""
        self._add(self._qualify(key), self._policy.add(key, number))

    def flush(self) -> Version:
        """Wait until all writes so far are acknowledged; return the highest version of this writer."""
        with self._lock:
            self._require_usable()
            self._send()
            self._settle(0)
            return self.version

    def close(self) -> None:
        """Call `flush`, and close the stream.  Closing twice is harmless."""
        if self._closed:
            return
        try:
            if self._failure is None:
                self.flush()
        finally:
            self._done.set()
            with self._lock:
                self._closed = True
                self._stream.close()
                self._count_answered()

    def send_if_left(self, seen: int) -> int:
        """Send the batch if its number is still `seen`; return the number of the current batch."""
        with self._lock:
            if self._rows and self._batches == seen and self._failure is None and not self._closed:
                try:
                    self._send()
                except FloodmarkError as error:
                    # The next write or flush raises it.
                    self._failure = error
            return self._batches

    def _add(self, key: bytes, stored: bytes) -> None:
        with self._lock:
            self._gather(key, stored)
            if not self._is_looked_after and self._rows:
                self._is_looked_after = True
                Thread(
                    target=_look_after, args=(ref(self), self._done), name="floodmark-writer", daemon=True
                ).start()

    def _gather(self, key: bytes, stored: bytes) -> None:
        self._require_usable()
        if self._policy.merges and (earlier := self._rows.get(key)) is not None:
            joined = self._policy.join(earlier, stored)
            if joined is None:
                self._send()
            else:
                stored = joined
        self._rows[key] = stored
        self._bytes += len(key) + len(stored)
        self._records += 1
        if len(self._rows) >= self._batch_records or self._bytes >= BATCH_BYTES_MAX:
            self._send()

    def _send(self) -> None:
        if not self._rows:
            return
        rows, records = self._rows, self._records
        self._rows, self._bytes, self._records = {}, 0, 0
        self._batches += 1
        self._sent.append((records, self._stream.send(rows)))
        self._settle(UNSETTLED_MAX)

    def _settle(self, unsettled_max: int) -> None:
        """Process acknowledgements, and wait while more than `unsettled_max` batches are unacknowledged."""
        while self._sent and (len(self._sent) > unsettled_max or self._sent[0][1].done()):
            records, answer = self._sent.popleft()
            try:
                self.version = max(self.version, answer.result())
            except FloodmarkError as error:
                self._failure = error
                raise
            self.acknowledged += records

    def _count_answered(self) -> None:
        """Count the acknowledgements that arrived after the writer had failed."""
        while self._sent and self._sent[0][1].done() and self._sent[0][1].exception() is None:
            records, answer = self._sent.popleft()
            self.version = max(self.version, answer.result())
            self.acknowledged += records

    def _require_usable(self) -> None:
        if self._closed:
            raise Closed("the writer was closed; open another one with namespace.writer()")
        if self._failure is not None:
            raise self._failure.again()


def _look_after(writer: "ref[Writer]", done: Event) -> None:
    """Send incomplete batches of a writer until it is closed or no longer referenced."""
    seen = 0
    while not done.wait(LINGER_SECONDS):
        writing = writer()
        if writing is None:
            return
        seen = writing.send_if_left(seen)
        del writing
