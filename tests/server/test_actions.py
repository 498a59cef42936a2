"""Every action has a declaration, and the page about access lists them all."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import pytest
from tests.server.support import open_memory, serving

from floodmark.host.ports import PORTS, Port
from floodmark.model.access import Role
from floodmark.model.actions import Action, Owned, declared
from floodmark.model.partition import StreamCommand
from floodmark.server import Server
from floodmark.server.calls import call_handlers
from floodmark.wire import messages
from floodmark.wire.messages import Method, Ticket, port_methods

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations" / "access.md"


OWNERS = {
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
    methods = [method for port in PORTS for method in port_methods(port.protocol, port.prefix).values()]
    return ((method.name, method.action) for method in sorted(methods, key=lambda method: method.name))


def _say_role(action: Action) -> str:
    role = f"`{action.role}`"
    return role if action.exempt is None else f"{role}, or {action.exempt.words}"


def _say_scope(action: Action) -> str:
    return str(action.scope) if action.owned is None else f"{action.scope}; {OWNERS[action.owned]}"


def test_the_page_lists_every_action_as_it_is_declared() -> None:
    table = table_of_actions()
    assert table in PAGE.read_text("utf-8"), f"replace the table of the page by this one:\n{table}"


def test_the_table_names_all_that_the_server_answers() -> None:
    with serving() as (_, server):
        answered = _handlers_of(server)
    assert {name for name in offered_actions() if not name.startswith("stream.")} == answered


def _handlers_of(server: Server) -> set[str]:
    return set(server.service.handlers)


def test_what_moves_positions_or_changes_settings_is_audited() -> None:
    unaudited = {
        name for name, action in offered_actions().items() if action.role > Role.WRITE and not action.audited
    }
    # The first two look and change nothing; nodes ask each other the others many times a second.
    assert unaudited == {
        *("administration.count_generation", "administration.examine"),
        *("peers.fate", "peers.peer_versions", "peers.settle_peer"),
        *("peers.run_commands", "peers.peer_heat", "peers.peer_partitions", "peers.refresh_peer"),
        *("prepare", "prepare_batch", "commit_prepared", "abort_prepared", "ended_prepared"),
        *("validate", "reserve", "settle", "repair"),
    }


def test_an_action_without_a_declaration_is_not_served() -> None:
    class Careless:
        def wipe(self) -> None: ...

    with open_memory() as site, pytest.raises(TypeError, match="wipe declares no role"):
        call_handlers(site.host, [*PORTS, Port("careless", Careless, "careless")])


def test_a_declaration_is_found_where_it_was_made() -> None:
    action = Action(Role.WRITE)

    @action
    class Command: ...

    assert declared(Command) is action
