"""Calls of ports, each checked against its declaration (`model/actions.py`).

Feeds and subscriptions belong to the namespace that they read; to a caller limited to other namespaces they
do not exist.  Running a feed and consuming a subscription need the role "write": both store positions and
hold back garbage collection.  Transactions, safe points and streams of epochs belong to the caller that began
them (`ownership.py`).
"""

from collections.abc import Iterable
from typing import Any

from msgspec.structs import asdict

from floodmark.feed.safepoints import require_safe_point_name
from floodmark.host.ports import PORTS, Host, Port
from floodmark.model.access import Role
from floodmark.model.actions import Action, Arguments, Owned, Scope
from floodmark.model.errors import FeedNotFound, NamespaceNotFound, SubscriptionNotFound
from floodmark.model.names import require_name
from floodmark.partition.commit.entering import check_key
from floodmark.server.access import Caller
from floodmark.server.data import Handler
from floodmark.server.guard import AccessGuard, check_position
from floodmark.server.logs import auditing
from floodmark.server.ownership import mark_of, owner_of, require_owner
from floodmark.wire.messages import Method, port_methods


def call_handlers(host: Host, ports: Iterable[Port] = PORTS) -> list[Handler]:
    """The handlers of all calls of a host's ports."""
    return [
        Handler(method, _Call(host, port, method))
        for port in ports
        for method in port_methods(port.protocol, port.prefix).values()
    ]


class _Call:
    """One method of a port, called after the checks of its declaration."""

    def __init__(self, host: Host, port: Port, method: Method[Any]) -> None:
        self._host = host
        self._port = port
        self._method = method
        self._action = method.action
        self._guard = AccessGuard(host)

    def __call__(self, caller: Caller, request: Any) -> object:
        action = self._action
        arguments: Arguments = asdict(request)
        if action.exempt is not None and action.exempt.when(arguments):
            return self._run(caller, action.exempt.role, arguments)
        with auditing(caller, self._method.name, action, arguments):
            return self._run(caller, action.role, arguments)

    def _run(self, caller: Caller, role: Role, arguments: Arguments) -> object:
        action = self._action
        require_role(caller, role)
        self._host.require_here(action)
        _check_arguments(action, arguments)
        if arguments.get("reads") is not None:
            self._guard.check_reads(caller, arguments["reads"])
        try:
            self._require_scope(caller, role, arguments)
        except (FeedNotFound, SubscriptionNotFound):
            if not action.may_be_gone:
                raise
            return None
        if action.owned is not None:
            arguments = self._as_owner(caller, action.owned, arguments)
        result = self._call(caller, arguments)
        if action.shown_by is None:
            return result
        return [item for item in result if caller.may(role, action.shown_by(item))]

    def _call(self, caller: Caller, arguments: Arguments) -> Any:
        try:
            return getattr(getattr(self._host, self._port.attribute), self._method.call)(**arguments)
        except NamespaceNotFound as error:
            if caller.namespaces is None:
                raise
            # The site's own error would list the existing namespaces.
            named = error.details.get("namespace")
            raise NamespaceNotFound(
                f"no namespace {named!r}; an administrator of it can create it", namespace=named
            ) from None

    def _require_scope(self, caller: Caller, role: Role, arguments: Arguments) -> None:
        match self._action.scope:
            case Scope.SITE:
                caller.require(role, None)
            case Scope.NAMESPACE:
                for namespace in self._action.namespaces(arguments):
                    caller.require(role, namespace)
            case Scope.FEED | Scope.SUBSCRIPTION as scope:
                caller.require(role, self._namespace_of(caller, scope, arguments["name"]))

    def _namespace_of(self, caller: Caller, scope: Scope, name: str) -> str:
        """The namespace of a feed or subscription; not found if a limited caller may not read it."""
        store = self._host.feeds if scope is Scope.FEED else self._host.subscriptions
        if caller.namespaces is None:
            return store.find(name).spec.namespace
        found = next((row.spec.namespace for row in store.list() if row.name == name), None)
        if found is not None and caller.may(Role.READ, found):
            return found
        where = f"in the namespaces of {caller.name!r}: {', '.join(sorted(caller.namespaces))}"
        if scope is Scope.FEED:
            raise FeedNotFound(f"no feed {name!r:.200} {where}", feed=name)
        raise SubscriptionNotFound(f"no subscription {name!r:.200} {where}", subscription=name)

    def _as_owner(self, caller: Caller, owned: Owned, arguments: Arguments) -> Arguments:
        """The arguments with the caller as owner; NotAllowed for a transaction of another caller."""
        if "transaction" in arguments:
            require_owner(caller, arguments["transaction"])
        if "owner" in arguments:
            owner = mark_of(caller) if owned is Owned.TRANSACTION else owner_of(caller)
            return {**arguments, "owner": owner}
        return arguments


def require_role(caller: Caller, role: Role) -> None:
    """Refuse a caller whose role is too low, whatever its namespaces."""
    if caller.role < role:
        namespaces = caller.namespaces
        caller.require(role, None if namespaces is None else min(namespaces, default=None))


def _check_arguments(action: Action, arguments: Arguments) -> None:
    """Check again what a `Site` checks of its users' arguments: a caller may be any program."""
    if "key" in arguments:
        check_key(arguments["key"])
    for version in ("version", "since", "until", "at", "position", "horizon"):
        if version in arguments:
            check_position(arguments[version])
    if "name" in arguments:
        if action.owned is Owned.SAFE_POINT:
            require_safe_point_name(arguments["name"])
        else:
            require_name(arguments["name"], "feed or subscription")
