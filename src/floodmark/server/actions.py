"""Every action that a server offers, with its declaration: what `docs/operations/access.md` lists."""

from collections.abc import Iterator, Mapping
from typing import Final, get_args

from floodmark.host.ports import PORTS
from floodmark.model.actions import Action, Owned, declared
from floodmark.wire import call_specs, messages
from floodmark.wire.messages import Method, StreamCommand, Ticket

_OWNERS: Final = {
    Owned.TRANSACTION: "the transaction's owner",
    Owned.SAFE_POINT: "the safe point's owner",
    Owned.STREAM: "the stream's owner",
    Owned.LEASE: "the lease's owner",
}


def offered_actions() -> Mapping[str, Action]:
    """All actions by name.  A TypeError if one has no declaration."""
    return dict([*_requests(), *_streams(), *_calls()])


def table_of_actions() -> str:
    """The actions as a table in Markdown."""
    rows = [
        f"| `{name}` | {_say_role(action)} | {_say_scope(action)} | {'yes' if action.audited else ''} |"
        for name, action in offered_actions().items()
    ]
    return "\n".join(["| action | role | held on | audited |", "|---|---|---|---|", *rows])


def _requests() -> Iterator[tuple[str, Action]]:
    for method in vars(messages).values():
        if isinstance(method, Method) and method not in (messages.TICKET, messages.COMMAND):
            yield method.name, method.action


def _streams() -> Iterator[tuple[str, Action]]:
    for kind in (*get_args(Ticket), *get_args(StreamCommand)):
        yield f"stream.{kind.__struct_config__.tag}", declared(kind)


def _calls() -> Iterator[tuple[str, Action]]:
    specs = [spec for port in PORTS for spec in call_specs(port.protocol, port.prefix).values()]
    return ((spec.method.name, spec.action) for spec in sorted(specs, key=lambda spec: spec.method.name))


def _say_role(action: Action) -> str:
    role = f"`{action.role}`"
    return role if action.exempt is None else f"{role}, or {action.exempt.words}"


def _say_scope(action: Action) -> str:
    return str(action.scope) if action.owned is None else f"{action.scope}; {_OWNERS[action.owned]}"
