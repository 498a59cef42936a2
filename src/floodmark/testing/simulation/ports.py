"""The ports of a simulated site's host, as reached by callers.

A simulated site has one host after another, and each call goes to the current one.
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

# Runs an action on the host of a site, and returns the result.
Ask = Callable[[Callable[[Host], Any]], Any]


class DistantPorts:
    """The ports of a remote host.  The base class of sites as reached by callers."""

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
        """This object as a `Host`, for callers that use only the ports."""
        return cast(Host, self)


class _DistantPort:
    def __init__(self, ask: Ask, attribute: str) -> None:
        self._ask = ask
        self._attribute = attribute

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._ask(
            lambda host: getattr(getattr(host, self._attribute), name)(*args, **kwargs)
        )
