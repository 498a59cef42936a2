"""The ports of a simulated site's host, as its callers reach them.

A simulated site has one host after another: each call asks the one that it has then.
"""

from collections.abc import Callable
from typing import Any, cast

from floodmark.host.ports import (
    GenerationPort,
    Host,
    MembershipPort,
    NamespacePort,
    ReplicationPort,
    RetentionPort,
    StatusPort,
    VerificationPort,
    VersionPort,
)

# Has the host of a site do something, and returns its answer.
Ask = Callable[[Callable[[Host], Any]], Any]


class DistantPorts:
    """The ports of a host elsewhere; a base class of the callers' sites."""

    def __init__(self, ask: Ask) -> None:
        self.namespaces = cast(NamespacePort, _DistantPort(ask, "namespaces"))
        self.versions = cast(VersionPort, _DistantPort(ask, "versions"))
        self.generations = cast(GenerationPort, _DistantPort(ask, "generations"))
        self.retention = cast(RetentionPort, _DistantPort(ask, "retention"))
        self.membership = cast(MembershipPort, _DistantPort(ask, "membership"))
        self.replication = cast(ReplicationPort, _DistantPort(ask, "replication"))
        self.verification = cast(VerificationPort, _DistantPort(ask, "verification"))
        self.status = cast(StatusPort, _DistantPort(ask, "status"))

    @property
    def host(self) -> Host:
        """The site as a host, for callers that need no more than it has."""
        return cast(Host, self)


class _DistantPort:
    def __init__(self, ask: Ask, attribute: str) -> None:
        self._ask = ask
        self._attribute = attribute

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._ask(
            lambda host: getattr(getattr(host, self._attribute), name)(*args, **kwargs)
        )
