"""Every action has a declaration, and the page about access lists them all."""

from pathlib import Path

import pytest
from tests.server.support import open_memory, serving

from floodmark.host.ports import PORTS, Port
from floodmark.model.access import Role
from floodmark.model.actions import Action, declared
from floodmark.server import Server
from floodmark.server.actions import offered_actions, table_of_actions
from floodmark.server.calls import call_handlers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations" / "access.md"


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
    # It looks at everything and changes nothing.
    assert unaudited == {"administration.examine"}


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
