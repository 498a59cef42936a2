"""Rewrites all records of a namespace under new stamps of this site, so that the namespace can be shared.

This site has all writes of other sites up to a version W.  Only records with a stamp at or below W are
rewritten, so newer ones win, and running twice does no harm.  A rewrite wins against a concurrent write of
another site that has not arrived, so no other site may write to these keys meanwhile.

A site can rewrite only its own entries of a counter: a counter with an entry of a site that no longer shares
the namespace is refused.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Final

import msgspec
import pyarrow

from floodmark.codec.ordered import encode_namespace, qualify_range
from floodmark.codec.states import HERE, CounterState, FieldsState, decode_state, encode_state
from floodmark.codec.values import decode_value, encode_value
from floodmark.feed import at_present
from floodmark.host.ports import Host
from floodmark.merge.counter import add_to_counter
from floodmark.merge.policies import COUNTER, FIELDS, LAST_WRITE
from floodmark.model.errors import InvalidConfiguration, StaleLink
from floodmark.model.partition import MergeStream, PutUnchangedStream, WriteStream
from floodmark.model.version import Version

# Batches sent and not acknowledged.
_UNSETTLED_MAX: Final = 8


class Rewritten(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `rewrite`, which rewrote all records with a stamp at or below `since`."""

    namespace: str
    since: Version
    records_read: int
    records_written: int | None


def rewrite(host: Host, namespace: str, report: Callable[[int], None] = lambda _: None) -> Rewritten:
    """Give all records of a namespace a new stamp.  `report` is called with the number of records read."""
    row = host.namespaces.find_namespace(namespace)
    since = host.membership.rewritable_version(namespace)
    if not since:
        raise StaleLink(
            f"not all sites that share {namespace!r} have sent what they wrote; let replication run, then "
            "rewrite again",
            namespace=namespace,
        )
    prefix = encode_namespace(row.id)
    encode = _ENCODERS.get(row.merge) or _CounterEncoder(host, namespace)
    read = 0
    with ExitStack() as stack:
        at, _ = at_present(
            host.versions.read_version,
            lambda version: (version, stack.enter_context(host.reading(version, row.id))),
        )
        # Adding 0 to a counter gives it a new stamp and loses no concurrent addition, as a put would.
        is_counter = row.merge == COUNTER
        stream = host.write_stream(MergeStream(True) if is_counter else PutUnchangedStream(True, since))
        writing = _Writing(stream)
        try:
            for batch in host.router.scan_records(qualify_range(row.id), at):
                writing.send(_rows(batch, prefix, encode))
                read += batch.num_rows
                report(read)
            writing.settle(0)
        finally:
            stream.close()
    host.membership.note_rewritten(namespace, since)
    return Rewritten(
        namespace=namespace,
        since=since,
        records_read=read,
        records_written=None if is_counter else writing.written,
    )


class _Writing:
    """Sends batches, and counts the records that were stored."""

    def __init__(self, stream: WriteStream) -> None:
        self.written = 0
        self._stream = stream
        self._sent: deque[Future[int]] = deque()

    def send(self, rows: dict[bytes, bytes]) -> None:
        if rows:
            self._sent.append(self._stream.send(rows))
            self.settle(_UNSETTLED_MAX)

    def settle(self, unsettled_max: int) -> None:
        while len(self._sent) > unsettled_max:
            self.written += self._sent.popleft().result()


def _rows(batch: pyarrow.RecordBatch, prefix: bytes, encode: Callable[[bytes], bytes]) -> dict[bytes, bytes]:
    keys, stored = batch.column("key").to_pylist(), batch.column("value").to_pylist()
    return {prefix + key: encode(value) for key, value in zip(keys, stored, strict=True)}


def _encode_value(stored: bytes) -> bytes:
    record = decode_value(stored)
    return encode_value(record.value, record.expires_at)


def _encode_fields(stored: bytes) -> bytes:
    """The present fields, with the stamp of this write; deleted fields are left out."""
    state = decode_state(stored)
    assert isinstance(state, FieldsState)
    fields = tuple(
        msgspec.structs.replace(field, stamp=HERE) for field in state.fields if field.text is not None
    )
    return encode_state(FieldsState(None, fields))


class _CounterEncoder:
    """Encodes an addition of 0, which gives this site's entry of a counter a new stamp."""

    def __init__(self, host: Host, namespace: str) -> None:
        topology = host.membership.topology()
        members = {} if topology is None else topology.members(namespace)
        self._namespace = namespace
        self._sites = {host.identity.site_id, *(member.id for member in members.values())}

    def __call__(self, stored: bytes) -> bytes:
        state = decode_state(stored)
        assert isinstance(state, CounterState)
        strangers = [entry.site for entry in state.entries if entry.site not in self._sites]
        if strangers:
            raise InvalidConfiguration(
                f"counters of {self._namespace!r} hold what site {strangers[0]} has counted, which does not "
                "share it any more, and only what was counted here can be written again; add the sums to "
                "counters of a new namespace, and share that",
                namespace=self._namespace,
            )
        return add_to_counter(0)


_ENCODERS: Final = {LAST_WRITE: _encode_value, FIELDS: _encode_fields}
