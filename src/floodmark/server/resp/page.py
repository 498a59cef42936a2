"""The tables of `docs/resp.md`, made from the table that the server dispatches by.

python -m floodmark.server.resp.page docs/resp.md
"""

import sys
from pathlib import Path
from typing import Final

from floodmark.server.resp.commands import COMMANDS
from floodmark.server.resp.table import Command, Kind

MARK: Final = "<!-- What follows is made by python -m floodmark.server.resp.page -->\n"
SECTIONS: Final = {
    Kind.READ: "Reads",
    Kind.WRITE: "Writes",
    Kind.SESSION: "Connection, server and transactions",
    Kind.SLOW: "Scans, history and changes",
    Kind.CALL: "Clients of Floodmark",
}


def render_page(page: str) -> str:
    """The page with its tables made anew."""
    parts = [page.partition(MARK)[0] + MARK]
    for kind, title in SECTIONS.items():
        parts.append(
            _section(title, [each for each in COMMANDS if each.kind is kind and not _is_refused(each)])
        )
    parts.append("## Refused\n\n| commands | why |\n|---|---|\n" + _refused())
    return "\n".join(parts)


def _section(title: str, commands: list[Command]) -> str:
    rows = [
        f"| `{command.name}` | {command.role or 'none'} | {_cell(command.verdict)} |"
        for command in sorted(commands, key=lambda command: command.name)
    ]
    return "\n".join([f"## {title}", "", "| command | role | |", "|---|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _is_refused(command: Command) -> bool:
    return command.verdict.startswith("refused: ")


def _refused() -> str:
    reasons: dict[str, list[str]] = {}
    for command in COMMANDS:
        if _is_refused(command):
            reasons.setdefault(command.verdict.removeprefix("refused: "), []).append(f"`{command.name}`")
    return "".join(f"| {' '.join(names)} | {reason} |\n" for reason, names in reasons.items())


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(render_page(path.read_text("utf-8")), "utf-8")
