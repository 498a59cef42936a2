"""token: make a credential for the clients of a server."""

import os
from pathlib import Path
from typing import Annotated

from floodmark.cli.failures import Usage
from floodmark.cli.jobs import access_entry
from floodmark.cli.render.output import Output, note
from floodmark.model.access import Role
from floodmark.server import hash_token, new_token
from floodmark.server.access import NAME_CHARACTERS_MAX


def token(
    output: Output,
    name: Annotated[str, "NAME", "The owner of the token, as shown in the server's log."] = "unnamed",
    role: Annotated[str, "ROLE", "read, write, replicate or admin."] = "read",
    namespace: Annotated[
        list[str] | None,
        "NAMESPACE",
        "Only this namespace; may be given several times. The whole site by default.",
    ] = None,
    output_file: Annotated[
        Path | None,
        "FILE",
        "Write the token to a new file that only you can read, and print only the entry.",
        {"name": "--output"},
    ] = None,
) -> None:
    """Make a token, and the entry for the server's access file.

    The token is shown this once: the access file holds only its hash. A server takes a changed
    access file in within a second.

    Examples:
      floodmark token --name indexer --role read --namespace users
      floodmark token --name ada --role admin --output ada.token >> access.toml
    """
    _require_possible(name, role)
    text = new_token()
    digest = hash_token(text)
    entry = access_entry(name, role, digest, namespace)
    if output_file is not None:
        _write_secret(output_file, text)
    if output_file is None and not output.json:
        output.line(text)
        output.line()
        note("the line above is the token, which is not shown again; add the entry to the access file")
    shown = {} if output_file is not None else {"token": text}
    output.result({**shown, "name": name, "role": role, "token_sha256": digest, "entry": entry}, entry)


def _require_possible(name: str, role: str) -> None:
    if not name.strip() or not name.isprintable() or len(name) > NAME_CHARACTERS_MAX:
        raise Usage(
            f"{name!r:.60} cannot be a name",
            f"1 to {NAME_CHARACTERS_MAX} printable characters",
        )
    try:
        Role.parse(role)
    except ValueError:
        raise Usage(f"{role!r:.60} is not a role", ", ".join(map(str, Role))) from None


def _write_secret(path: Path, text: str) -> None:
    """Create a file that only this user can ever read; refuse one that exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise Usage(f"{path} exists", "choose another file; nothing was changed") from None
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text + "\n")
