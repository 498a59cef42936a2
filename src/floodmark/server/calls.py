"""What may be called besides reading and writing, and by whom.

Every method of a port has a rule here; a port that grows a method without one is not served at all, so
that nothing is ever offered to everybody by oversight.  A rule names the least role, and what the role
must be held on:

- *a namespace*, if the call is about one.  Feeds and subscriptions belong to the namespace that they read;
- *the site*, for what shows or changes the whole of it.  A caller who is limited to some namespaces has no
  part in that;
- *anything*, for what every caller needs and what tells nothing: the clock, making one's own writes
  durable, and lists, from which others' namespaces are left out.

Running a feed and consuming a subscription need the role "write": both store how far they are, and keep
garbage collection from what they have not seen.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from floodmark.feed.store import FeedStore
from floodmark.feed.subscriptions import SubscriptionStore
from floodmark.model.access import Role
from floodmark.model.errors import FeedNotFound, InvalidKey, SubscriptionNotFound
from floodmark.model.limits import KEY_BYTES_MAX
from floodmark.model.names import require_name
from floodmark.server.access import Caller
from floodmark.server.checks import check_position
from floodmark.server.data import Handler
from floodmark.server.logs import log_administration
from floodmark.site.host import Administration, Host
from floodmark.wire.calls import CallSpec, call_specs

Arguments: TypeAlias = Mapping[str, Any]
# The namespace that a call is about; None stands for the whole site.
Scope: TypeAlias = Callable[[Host, Arguments], str | None]


def _whole_site(_host: Host, _arguments: Arguments) -> str | None:
    return None


def _named(_host: Host, arguments: Arguments) -> str | None:
    namespace: str | None = arguments["namespace"]
    return namespace


def _of_new(_host: Host, arguments: Arguments) -> str | None:
    namespace: str = arguments["spec"].namespace
    return namespace


def _of_feed(host: Host, arguments: Arguments) -> str | None:
    return host.feeds.find(arguments["name"]).spec.namespace


def _of_subscription(host: Host, arguments: Arguments) -> str | None:
    return host.subscriptions.find(arguments["name"]).spec.namespace


@dataclass(frozen=True)
class Rule:
    """Who may make a call.  Without a scope, whoever has the role anywhere."""

    role: Role
    scope: Scope | None = None
    # Whether what the call is about may be gone: then there is nothing left to protect.
    may_be_gone: bool = False
    # Whether it is noted who did it.
    audited: bool = False
    # What of a result a caller may see, by the namespace of each item.
    shown_by: Callable[[Any], str] | None = None


def _administers(scope: Scope) -> Rule:
    return Rule(Role.ADMIN, scope, audited=True)


ADMINISTRATION: Final[Mapping[str, Rule]] = {
    "create_namespace": _administers(_named),
    "find_namespace": Rule(Role.READ, _named),
    "list_namespaces": Rule(Role.READ, shown_by=lambda row: row.name),
    "update_namespace": _administers(_named),
    "drop_namespace": _administers(_named),
    "read_version": Rule(Role.READ),
    "resolved_version": Rule(Role.READ),
    "now": Rule(Role.READ),
    "observe": Rule(Role.READ),
    "sync": Rule(Role.WRITE),
    "heartbeat": _administers(_whole_site),
    "partitions": Rule(Role.READ, _whole_site),
    "split": _administers(_named),
    "merge": _administers(_whole_site),
    "heat": Rule(Role.READ, _whole_site),
    "hold_safe_point": _administers(_named),
    "release_safe_point": _administers(_whole_site),
    "safe_points": Rule(Role.READ, _whole_site),
    "oldest_version": Rule(Role.READ, _named),
    "collect_garbage": _administers(_whole_site),
    "statistics": Rule(Role.READ, _whole_site),
    "examine": Rule(Role.ADMIN, _whole_site),
}

FEEDS: Final[Mapping[str, Rule]] = {
    "create": _administers(_of_new),
    "find": Rule(Role.READ, _of_feed),
    "pause": _administers(_of_feed),
    "resume": _administers(_of_feed),
    "update": _administers(_of_feed),
    "remove": _administers(_of_feed),
    "rebalance": _administers(_of_feed),
    "statistics": Rule(Role.READ, _of_feed),
    "acquire": Rule(Role.WRITE, _of_feed),
    "report": Rule(Role.WRITE, _of_feed),
    "release": Rule(Role.WRITE, _of_feed, may_be_gone=True),
    "list": Rule(Role.READ, shown_by=lambda feed: feed.spec.namespace),
}

SUBSCRIPTIONS: Final[Mapping[str, Rule]] = {
    "open": Rule(Role.WRITE, _of_new),
    "acknowledge": Rule(Role.WRITE, _of_subscription),
    "renew": Rule(Role.WRITE, _of_subscription),
    "release": Rule(Role.WRITE, _of_subscription, may_be_gone=True),
    "seek": Rule(Role.WRITE, _of_subscription, audited=True),
    "find": Rule(Role.READ, _of_subscription),
    "remove": _administers(_of_subscription),
    "statistics": Rule(Role.READ, _of_subscription),
    "list": Rule(Role.READ, shown_by=lambda row: row.spec.namespace),
}


@dataclass(frozen=True)
class Port:
    """A protocol whose methods are offered: under which prefix, by which object, by which rules."""

    prefix: str
    protocol: type
    target: Callable[[Host], object]
    rules: Mapping[str, Rule]


PORTS: Final = (
    Port("administration", Administration, lambda host: host.administration, ADMINISTRATION),
    Port("feeds", FeedStore, lambda host: host.feeds, FEEDS),
    Port("subscriptions", SubscriptionStore, lambda host: host.subscriptions, SUBSCRIPTIONS),
)


def call_handlers(host: Host, ports: Iterable[Port] = PORTS) -> list[Handler]:
    """What can be called on a host, each call behind its rule."""
    return [handler for port in ports for handler in _port_handlers(host, port)]


def _port_handlers(host: Host, port: Port) -> list[Handler]:
    specs = {spec.name: spec for spec in call_specs(port.protocol, port.prefix).values()}
    if specs.keys() != port.rules.keys():
        odd = ", ".join(sorted(specs.keys() ^ port.rules.keys()))
        raise TypeError(f"the rules of {port.prefix} and its methods do not match: {odd}")
    return [Handler(spec.method, _Call(host, port, spec, port.rules[name])) for name, spec in specs.items()]


class _Call:
    """One method of a port, behind its rule."""

    def __init__(self, host: Host, port: Port, spec: CallSpec, rule: Rule) -> None:
        self._host = host
        self._port = port
        self._spec = spec
        self._rule = rule

    def __call__(self, caller: Caller, request: object) -> object:
        rule, arguments = self._rule, self._spec.arguments(request)
        require_role(caller, rule.role)
        _check_arguments(arguments)
        if rule.scope is not None:
            self._require_scope(caller, rule.scope, arguments)
        if rule.audited:
            log_administration(caller, self._spec.method.name, arguments)
        result: Any = self._spec.call(self._port.target(self._host), request)
        if rule.shown_by is None:
            return result
        return [item for item in result if caller.may(rule.role, rule.shown_by(item))]

    def _require_scope(self, caller: Caller, scope: Scope, arguments: Arguments) -> None:
        try:
            namespace = scope(self._host, arguments)
        except (FeedNotFound, SubscriptionNotFound):
            if not self._rule.may_be_gone:
                raise
        else:
            caller.require(self._rule.role, namespace)


def require_role(caller: Caller, role: Role) -> None:
    """Refuse a caller whose role is too low, wherever it holds it."""
    if caller.role < role:
        namespaces = caller.namespaces
        caller.require(role, None if namespaces is None else min(namespaces, default=None))


def _check_arguments(arguments: Arguments) -> None:
    """What a site checks of its users' arguments, checked again: nobody has to be a site to call."""
    if "key" in arguments and not 0 < len(arguments["key"]) <= KEY_BYTES_MAX:
        raise InvalidKey(f"a key has 1 to {KEY_BYTES_MAX:,} bytes, not {len(arguments['key']):,}")
    if "version" in arguments:
        check_position(arguments["version"])
    if "name" in arguments:
        require_name(arguments["name"], "safe point, feed or subscription")
