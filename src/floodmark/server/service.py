"""The Flight service: dispatches each request from the network to the part that serves it."""

from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any, Final, NoReturn

import pyarrow
from pyarrow import flight

from floodmark.clock import TimeSource, monotonic_ms
from floodmark.host.ports import Host
from floodmark.model.errors import FloodmarkError, WireMismatch
from floodmark.model.limits import (
    REQUEST_BYTES_MAX,
    STREAMS_MAX,
    STREAMS_PER_CALLER_MAX,
)
from floodmark.server.access import Access
from floodmark.server.admission import Admission
from floodmark.server.calls import call_handlers
from floodmark.server.counters import ServerMetrics
from floodmark.server.data import DataPlane, Handler
from floodmark.server.guard import AccessGuard, check_size
from floodmark.server.leases import Leases
from floodmark.server.logs import RefusedCallers
from floodmark.server.memory import FreedMemory, keep_little
from floodmark.server.relay import Relay
from floodmark.server.stalled import STALL_SECONDS, Watchdog
from floodmark.server.streams import Streams
from floodmark.server.visits import MIDDLEWARE, Gate, Headers, Reception, StreamPlaces
from floodmark.server.writes import WriteService
from floodmark.wire.errors import to_flight_error
from floodmark.wire.messages import COMMAND, TICKET, VALIDATE

SCAN: Final = "scan"
RECORDS: Final = "records"
CHANGES: Final = "changes"
WRITE: Final = "write_stream"


class Service(flight.FlightServerBase):
    """Serves a host over Flight.  It listens from construction on."""

    def __init__(
        self,
        location: str,
        host: Host,
        access: Access,
        *,
        tls_certificates: list[tuple[bytes, bytes]] | None = None,
        client_root: bytes | None = None,
        relay: Relay | None = None,
        stall_seconds: float = STALL_SECONDS,
        streams_max: int = STREAMS_MAX,
        streams_per_caller_max: int = STREAMS_PER_CALLER_MAX,
        time_source: TimeSource = monotonic_ms,
    ) -> None:
        keep_little()
        memory = FreedMemory(time_source)
        guard, self.leases = AccessGuard(host), Leases(host, time_source)
        self.data = DataPlane(host, guard, self.leases)
        handlers = [*self.data.handlers(), *call_handlers(host)]
        self.handlers: dict[str, Handler] = {handler.method.name: handler for handler in handlers}
        self.metrics = ServerMetrics([*self.handlers, SCAN, RECORDS, CHANGES, WRITE])
        for handler in handlers:
            if "reads" in handler.method.request.__struct_fields__ and handler.method is not VALIDATE:
                handler.handle = self.metrics.counting_transactions(handler.handle)
        self.admission = Admission(self.metrics)
        self.gate = Gate()
        self.watchdog = Watchdog(
            time_source,
            stall_seconds=stall_seconds,
            on_cut=self.metrics.connection_cut,
            on_look=(self.leases.expire, memory.give_back_if_due),
        )
        headers = Headers()
        self.refused = RefusedCallers(time_source)
        self._reception = Reception(
            headers,
            access,
            self.metrics,
            self.watchdog,
            self.gate,
            refused=self.refused,
            monotonic_ms=time_source,
            relay=relay,
        )
        self.places = StreamPlaces(streams_max, streams_per_caller_max, on_end=memory.note_much_used)
        self._streams = Streams(host, guard, monotonic_ms=time_source)
        self._writes = WriteService(host, guard, self.metrics)
        super().__init__(
            location,
            tls_certificates=tls_certificates,
            verify_client=client_root is not None,
            root_certificates=client_root,
            middleware={MIDDLEWARE: headers},
        )
        self.watchdog.start()

    # Calls

    def do_action(self, context: Any, action: Any) -> Iterator[Any]:
        """Answer a request."""
        handler = self.handlers.get(action.type)
        writes = handler is not None and handler.method.writes
        with self._reception.receive(context, action.type, writes=writes) as visit:
            if handler is None:
                raise WireMismatch(f"this server has no {action.type!r:.100}; it may be too old for it")
            self.metrics.received(action.body.size)
            if handler.method.action.delayed:
                self.admission.delay_read_version()
            with self.admission.writing() if writes else nullcontext():
                reply = handler(visit.caller, memoryview(action.body))
            self.metrics.sent(len(reply))
            # The client may be slow to read the reply.
            visit.activity.leave()
            yield pyarrow.py_buffer(reply)

    # Streams

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Begin a stream of rows to a client."""
        try:
            check_size("a ticket", len(ticket.ticket), REQUEST_BYTES_MAX)
            wanted = TICKET.decode_request(ticket.ticket)
        except FloodmarkError as error:
            raise to_flight_error(error) from None
        return flight.GeneratorStream(self._streams.schema(wanted), self._send(context, wanted))

    def _send(self, context: Any, wanted: Any) -> Iterator[Any]:
        name = type(wanted).__struct_config__.tag
        with (
            self._reception.receive(context, name, writes=False) as visit,
            self.places.taking(visit.caller),
            self.metrics.stream(),
            closing(self._streams.batches(visit, wanted)) as batches,
        ):
            for rows in batches:
                batch = rows[0] if isinstance(rows, tuple) else rows
                self.metrics.sent(batch.nbytes)
                visit.activity.leave()
                yield rows
                visit.activity.come_back()

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Serve a stream of writes from a client."""
        with (
            self._reception.receive(context, WRITE, writes=True) as visit,
            self.places.taking(visit.caller),
            self.metrics.stream(),
        ):
            command = descriptor.command or b""
            check_size("a command", len(command), REQUEST_BYTES_MAX)
            self._writes.serve(visit, COMMAND.decode_request(command), reader, writer)

    # Calls of Flight that this protocol does not use

    def _refuse(self, *_: object) -> NoReturn:
        raise to_flight_error(WireMismatch("this server does not offer that; connect with Floodmark"))

    do_exchange = get_flight_info = list_actions = list_flights = _refuse

    def get_schema(self, context: Any, descriptor: Any) -> Any:
        """An empty schema: Flight would send an error raised here with the server's traceback."""
        return flight.SchemaResult(pyarrow.schema([]))
