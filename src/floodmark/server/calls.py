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
garbage collection from what they have not seen.  A reader keeps it by a safe point of its own, in the
namespace that it reads; such safe points have names that begin with "spark/".

A transaction belongs to the caller that began it (`ownership.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeAlias

from floodmark.feed import SafePoint
from floodmark.feed.store import FeedStore
from floodmark.feed.subscriptions import SubscriptionStore
from floodmark.model.access import Role
from floodmark.model.errors import FeedNotFound, InvalidKey, SafePointNotFound, SubscriptionNotFound
from floodmark.model.limits import KEY_BYTES_MAX, REQUEST_BYTES_MAX
from floodmark.model.names import require_name
from floodmark.server.access import Caller
from floodmark.server.checks import check_position
from floodmark.server.data import WRITE_BYTES_MAX, Handler
from floodmark.server.logs import log_administration
from floodmark.server.ownership import mark_of, require_owner
from floodmark.site.host import Administration, Host
from floodmark.site.transactions import Transactions
from floodmark.wire.calls import CallSpec, call_specs

# Safe points whose names begin so belong to readers, which need no other rights for them.
READERS_SAFE_POINTS: Final = "spark/"
READERS_LIFETIME_MAX: Final = timedelta(days=30)

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
    # Namespaces besides, on each of which the role must be held.
    each: Callable[[Arguments], Iterable[str]] | None = None
    # Whether it is noted who did it, and which arguments are left out of the note: they hold values.
    audited: bool = False
    unsaid: tuple[str, ...] = ()
    # What of a result a caller may see, by the namespace of each item.
    shown_by: Callable[[Any], str] | None = None
    # Calls for which it is enough to read a namespace: which one; None for all others.
    for_readers: Scope | None = None
    # Whether the call is about a transaction, which must be the caller's; or begins one that is from then on.
    owned: bool = False
    begins: bool = False
    # How large a call may be.
    bytes_max: int = REQUEST_BYTES_MAX


def _administers(scope: Scope, for_readers: Scope | None = None) -> Rule:
    return Rule(Role.ADMIN, scope, audited=True, for_readers=for_readers)


def _held_by_reader(host: Host, arguments: Arguments) -> str | None:
    """A safe point that a reader may hold: not for ever, and not in place of one of another namespace."""
    if not _is_readers(arguments) or arguments["lifetime"] > READERS_LIFETIME_MAX:
        return None
    point = _find_safe_point(host, arguments["name"])
    if point is not None and _namespace_of(host, point) != arguments["namespace"]:
        return None
    return _named(host, arguments)


def _released_by_reader(host: Host, arguments: Arguments) -> str | None:
    if not _is_readers(arguments):
        return None
    point = _find_safe_point(host, arguments["name"])
    if point is None:
        # The site would name those that there are, and not everybody may know them.
        raise SafePointNotFound(f"no safe point {arguments['name']!r}", name=arguments["name"])
    return _namespace_of(host, point)


def _is_readers(arguments: Arguments) -> bool:
    name: str = arguments["name"]
    return name.startswith(READERS_SAFE_POINTS)


def _find_safe_point(host: Host, name: str) -> SafePoint | None:
    return next((point for point in host.administration.safe_points() if point.name == name), None)


def _namespace_of(host: Host, point: SafePoint) -> str | None:
    rows = host.administration.list_namespaces()
    return next((row.name for row in rows if row.id == point.namespace), None)


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
    "open_epoch": Rule(Role.WRITE, _named),
    "cut_changes": Rule(Role.READ, _named),
    "hold_safe_point": _administers(_named, _held_by_reader),
    "release_safe_point": _administers(_whole_site, _released_by_reader),
    "safe_points": Rule(Role.READ, _whole_site),
    "oldest_version": Rule(Role.READ, _named),
    "collect_garbage": _administers(_whole_site),
    "topology": Rule(Role.READ, _whole_site),
    "set_topology": _administers(_whole_site),
    "rewritable_version": Rule(Role.READ, _named),
    "shared_since": Rule(Role.READ, _named),
    "note_rewritten": Rule(Role.WRITE, _named),
    "declare_loaded": _administers(_named),
    "adopt_watermark": _administers(_named),
    "finish_rejoining": _administers(_whole_site),
    "links": Rule(Role.READ, shown_by=lambda link: link.namespace),
    "link_positions": Rule(Role.READ, each=lambda arguments: arguments["namespaces"]),
    "cut_link": Rule(Role.READ, each=lambda arguments: arguments["positions"]),
    # A site that was away brings along all heartbeats that it has missed.
    "advance_link": Rule(
        Role.WRITE,
        each=lambda arguments: [part.name for part in arguments["step"].namespaces],
        bytes_max=WRITE_BYTES_MAX,
    ),
    "stall_link": Rule(Role.WRITE, each=lambda arguments: arguments["namespaces"]),
    "watermark": Rule(Role.READ, _named),
    "find_records": Rule(Role.READ, _named, bytes_max=WRITE_BYTES_MAX),
    "repair_records": Rule(Role.ADMIN, _named, bytes_max=WRITE_BYTES_MAX, audited=True, unsaid=("repairs",)),
    "replication": Rule(Role.READ, _whole_site),
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
    "pending": Rule(Role.READ, _of_subscription),
    "remove": _administers(_of_subscription),
    "statistics": Rule(Role.READ, _of_subscription),
    "list": Rule(Role.READ, shown_by=lambda row: row.spec.namespace),
}

TRANSACTIONS: Final[Mapping[str, Rule]] = {
    "begin": Rule(Role.WRITE, begins=True),
    "acknowledge": Rule(Role.WRITE, _of_subscription, owned=True),
    "commit": Rule(
        Role.WRITE,
        each=lambda arguments: [each.namespace for each in arguments["writes"]],
        owned=True,
        bytes_max=WRITE_BYTES_MAX,
    ),
    "abort": Rule(Role.WRITE, audited=True, owned=True),
    "list": Rule(Role.READ, _whole_site),
    "show": Rule(Role.READ, _whole_site),
    "logs": Rule(Role.READ, _whole_site),
    "log_records": Rule(Role.READ, _whole_site),
    "batching": Rule(Role.READ, _whole_site),
    "set_batching": _administers(_whole_site),
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
    Port("transactions", Transactions, lambda host: host.transactions, TRANSACTIONS),
)


def call_handlers(host: Host, ports: Iterable[Port] = PORTS) -> list[Handler]:
    """What can be called on a host, each call behind its rule."""
    return [handler for port in ports for handler in _port_handlers(host, port)]


def _port_handlers(host: Host, port: Port) -> list[Handler]:
    specs = {spec.name: spec for spec in call_specs(port.protocol, port.prefix).values()}
    if specs.keys() != port.rules.keys():
        odd = ", ".join(sorted(specs.keys() ^ port.rules.keys()))
        raise TypeError(f"the rules of {port.prefix} and its methods do not match: {odd}")
    return [
        Handler(spec.method, _Call(host, port, spec, rule), bytes_max=rule.bytes_max)
        for spec, rule in ((spec, port.rules[name]) for name, spec in specs.items())
    ]


class _Call:
    """One method of a port, behind its rule."""

    def __init__(self, host: Host, port: Port, spec: CallSpec, rule: Rule) -> None:
        self._host = host
        self._port = port
        self._spec = spec
        self._rule = rule

    def __call__(self, caller: Caller, request: object) -> object:
        arguments: Arguments = self._spec.arguments(request)
        rule = self._rule_for(arguments)
        require_role(caller, rule.role)
        _check_arguments(arguments)
        if rule.scope is not None:
            self._require_scope(caller, rule, rule.scope, arguments)
        for namespace in () if rule.each is None else rule.each(arguments):
            caller.require(rule.role, namespace)
        if rule.owned:
            require_owner(caller, arguments["transaction"])
        if rule.begins:
            request = self._spec.bind(**{**arguments, "owner": mark_of(caller)})
        if rule.audited:
            said = {name: value for name, value in arguments.items() if name not in rule.unsaid}
            log_administration(caller, self._spec.method.name, said)
        result: Any = self._spec.call(self._port.target(self._host), request)
        if rule.shown_by is None:
            return result
        return [item for item in result if caller.may(rule.role, rule.shown_by(item))]

    def _rule_for(self, arguments: Arguments) -> Rule:
        rule = self._rule
        namespace = None if rule.for_readers is None else rule.for_readers(self._host, arguments)
        return rule if namespace is None else Rule(Role.READ, lambda _host, _arguments: namespace)

    def _require_scope(self, caller: Caller, rule: Rule, scope: Scope, arguments: Arguments) -> None:
        try:
            namespace = scope(self._host, arguments)
        except (FeedNotFound, SubscriptionNotFound):
            if not rule.may_be_gone:
                raise
        else:
            caller.require(rule.role, namespace)


def require_role(caller: Caller, role: Role) -> None:
    """Refuse a caller whose role is too low, wherever it holds it."""
    if caller.role < role:
        namespaces = caller.namespaces
        caller.require(role, None if namespaces is None else min(namespaces, default=None))


def _check_arguments(arguments: Arguments) -> None:
    """What a site checks of its users' arguments, checked again: nobody has to be a site to call."""
    if "key" in arguments and not 0 < len(arguments["key"]) <= KEY_BYTES_MAX:
        raise InvalidKey(f"a key has 1 to {KEY_BYTES_MAX:,} bytes, not {len(arguments['key']):,}")
    for version in ("version", "since", "until", "at", "position", "horizon"):
        if version in arguments:
            check_position(arguments[version])
    if "name" in arguments:
        name: str = arguments["name"]
        require_name(name.removeprefix(READERS_SAFE_POINTS), "safe point, feed or subscription")
