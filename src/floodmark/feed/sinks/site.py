"""`floodmark://host:port/namespace` and `floodmark+tls://…` write changes to another site.

A change arrives there with the stamp that it was first written with, and is stored where that stamp is the
highest.  So it does no harm to deliver it twice, late, or after someone has written to the other site: the
last write wins, whichever way it came.  Every change is a commit of its own key there, so that the feeds of
the other site show what the feeds of this one do.

The token, and what TLS needs, stand in files that the URI names: `token_file`, `tls_root_file`,
`tls_certificate_file`, `tls_key_file`.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

import msgspec

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.feed.sinks.address import SinkAddress
from floodmark.feed.sinks.base import Sink, SinkContext
from floodmark.model.access import Role
from floodmark.model.actions import Action, Scope
from floodmark.model.change import Change
from floodmark.model.errors import ClockSkew, Closed, InvalidArgument, SinkFailed, WrongPolicy
from floodmark.model.limits import MIB
from floodmark.model.version import Version
from floodmark.routing import Router
from floodmark.wire import Connection, RemoteCalls, RemotePartitionMaps, call_specs

# What is sent at a time.  A commit of the other site may hold more.
APPLY_BYTES_MAX: Final = 4 * MIB

_FILES: Final = {
    "token_file": "token_file",
    "tls_root_file": "tls_root",
    "tls_certificate_file": "tls_certificate",
    "tls_key_file": "tls_key",
}


class Applies(Protocol):
    """The part of a router that a sink needs."""

    def apply(self, rows: dict[bytes, bytes], *, durable: bool) -> Version:
        """Commit values that carry their origin, once per partition, where they win."""
        ...


class NamespaceId(msgspec.Struct, frozen=True):
    """Of what a site knows about a namespace, the part that keys are made of, and how it merges."""

    id: int
    merge: str = "last_write"


class Namespaces(Protocol):
    """The part of a site's administration that a sink needs."""

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True)
    def find_namespace(self, namespace: str) -> NamespaceId:
        """The namespace of a name."""
        ...


class SiteSink:
    """Applies changes to one namespace of another site."""

    def __init__(self, router: Applies, namespace: int, release: Callable[[], None] = lambda: None) -> None:
        self._router = router
        self._prefix = encode_namespace(namespace)
        self._release = release
        self._closed = False

    def write(self, changes: Sequence[Change], *, since: Version, through: Version) -> None:
        if self._closed:
            raise Closed("the sink was closed; open it again")
        rows: dict[bytes, bytes] = {}
        size = 0
        for change in changes:
            key, value = self._prefix + change.key, encode_change(change)
            if rows and (key in rows or size + len(key) + len(value) > APPLY_BYTES_MAX):
                self._apply(rows)
                rows, size = {}, 0
            rows[key] = value
            size += len(key) + len(value)
        if rows:
            self._apply(rows)

    def flush(self) -> None:
        # Each commit was on the other site's disk when it returned.
        pass

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._release()

    def _apply(self, rows: dict[bytes, bytes]) -> None:
        try:
            self._router.apply(rows, durable=True)
        except ClockSkew as error:
            # Clocks that disagree stall a feed until they agree again; nothing is dropped.
            raise SinkFailed(f"the other site refused changes from its future: {error}") from error


def encode_change(change: Change) -> bytes:
    """A change as the record that another site stores."""
    if change.value is None:
        return encode_value(b"", deleted=True, origin=change.stamp)
    return encode_value(change.value, change.expires_at, origin=change.stamp)


def open_sink(address: SinkAddress, context: SinkContext) -> Sink:
    """Connect to the other site, and find the namespace there."""
    address.require_known(_FILES)
    namespace = address.path.removeprefix("/")
    if not address.host or not namespace or "/" in namespace:
        raise InvalidArgument(
            f"the sink {address.scheme}: is written as {address.scheme}://host:port/namespace"
        )
    files = {_FILES[name]: file for name, file in address.parameters.items()}
    connection = Connection(
        f"{address.scheme}://{address.host}",
        token_file=files.get("token_file"),
        tls_root=files.get("tls_root"),
        tls_certificate=files.get("tls_certificate"),
        tls_key=files.get("tls_key"),
    )
    try:
        if (connection.hello().site, namespace) == (context.site, context.namespace):
            raise InvalidArgument(
                f"feed {context.feed!r} would write {namespace!r} of site {context.site!r} into itself; "
                "name another site or another namespace"
            )
        specs = call_specs(Namespaces, "administration")
        calls = cast(Namespaces, RemoteCalls(connection, specs.values()))
        found = calls.find_namespace(namespace)
        if found.merge != "last_write":
            raise WrongPolicy(
                f"namespace {namespace!r} of the other site merges by {found.merge}, and a feed carries "
                "whole values; copy it with floodmark replicate, or name one that merges by last_write",
                namespace=namespace,
            )
        return SiteSink(Router(RemotePartitionMaps(connection)), found.id, connection.close)
    except BaseException:
        connection.close()
        raise
