"""The `floodmark` command: where its commands are, and one place where everything ends."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_group

from floodmark.cli.arguments import duration_option, text_option
from floodmark.cli.connection import ConnectionOptions, connection_options, owns_process
from floodmark.cli.failures import DONE, INTERRUPTED, report

HELP: Final = """Floodmark: a key-value store that remembers every change.

A site is a directory, which one process at a time may open, or the URL of a server that has it open:
grpc://host:port, or grpc+tls://host:port if the server has a certificate. Every command works on both.

\b
Example:
  floodmark demo
  floodmark init data/oslo --site oslo
  floodmark namespace create data/oslo users
  floodmark put data/oslo users ada countess
  floodmark changes data/oslo
  floodmark serve data/oslo --listen 127.0.0.1:7100
  floodmark get grpc://127.0.0.1:7100 users ada

Keys and values are UTF-8 text, or hexadecimal behind 0x: 0x00ff. They are printed in the same form.
Durations are 90s, 30m, 24h, 7d. Every command has --json, and --help with examples.

Options about servers stand before the command. A token is never one of them, because others can read the
command line: put it into a file, and name the file.

Exit codes: 0 done; 1 not found, or a check failed; 2 could not tell; 64 usage; 69 unreachable, try
again; 70 a bug in Floodmark; 77 not allowed; 130 interrupted; 143 a job on Spark was ended by SIGTERM.
"""


# Where each command, or group of commands, is defined: in the order of the help.
COMMANDS: Final = {
    "demo": "floodmark.cli.demo.command:demo",
    "init": "floodmark.cli.commands.sites:init",
    "serve": "floodmark.cli.commands.serving:serve",
    "token": "floodmark.cli.commands.tokens:token",
    "put": "floodmark.cli.commands.data:put",
    "get": "floodmark.cli.commands.data:get",
    "update": "floodmark.cli.commands.data:update",
    "add": "floodmark.cli.commands.data:add",
    "delete": "floodmark.cli.commands.data:delete",
    "scan": "floodmark.cli.commands.data:scan",
    "changes": "floodmark.cli.commands.changes:changes",
    "replicate": "floodmark.cli.commands.copying:replicate",
    "verify": "floodmark.cli.commands.verifying:verify",
    "backup": "floodmark.cli.commands.backups:backup",
    "restore": "floodmark.cli.commands.backups:restore",
    "export": "floodmark.cli.commands.copying:export",
    "status": "floodmark.cli.commands.status:status",
    "doctor": "floodmark.cli.commands.doctor:doctor",
    "gc": "floodmark.cli.commands.sites:gc",
    "version": "floodmark.cli.commands.version:version",
    "namespace": "floodmark.cli.commands.namespaces:commands",
    "topology": "floodmark.cli.commands.topology:commands",
    "partition": "floodmark.cli.commands.partitions:commands",
    "safepoint": "floodmark.cli.commands.safepoints:commands",
    "feed": "floodmark.cli.commands.feeds:commands",
    "subscription": "floodmark.cli.commands.subscriptions:commands",
    "txn": "floodmark.cli.commands.transactions:commands",
}


class LazyGroup(TyperGroup):
    """The root of the commands.  Each is imported and built when it is used."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # For their names only: typer lists them, and suggests them to a user who mistypes one.
        self.commands.update(dict.fromkeys(COMMANDS, self))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _build(cmd_name) if cmd_name in COMMANDS else None


@cache
def _build(name: str) -> Any:
    """A command, made of its signature, or a group of commands."""
    module, _, attribute = COMMANDS[name].partition(":")
    found = getattr(import_module(module), attribute)
    parent = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    if isinstance(found, typer.Typer):
        parent.add_typer(found, name=name)
    else:
        parent.command(name)(found)
    return get_group(parent).commands[name]


@dataclass
class Session:
    """State of one run of the command."""

    debug: bool


app = typer.Typer(
    cls=LazyGroup,
    help=HELP,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


@app.callback(invoke_without_command=True, help=HELP)
def root(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error came from. Also FLOODMARK_DEBUG=1.")
    ] = False,
    token_file: Annotated[
        Path | None,
        text_option("--token-file", "FILE", "A file with the token.", envvar="FLOODMARK_TOKEN_FILE"),
    ] = None,
    tls_root: Annotated[
        Path | None,
        text_option(
            "--tls-root",
            "FILE",
            "Certificates that vouch for the server; without it, those that the system trusts.",
            envvar="FLOODMARK_TLS_ROOT",
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        text_option(
            "--tls-certificate",
            "FILE",
            "Your own certificate, for a server that wants one.",
            envvar="FLOODMARK_TLS_CERTIFICATE",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None, text_option("--tls-key", "FILE", "Its private key.", envvar="FLOODMARK_TLS_KEY")
    ] = None,
    timeout: Annotated[
        timedelta | None,
        duration_option(
            "--timeout", "How long to wait for an answer.", envvar="FLOODMARK_TIMEOUT", show_default="30s"
        ),
    ] = None,
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version, as `floodmark version` does.")
    ] = False,
) -> None:
    if show_version:
        _build("version").callback(json=False)
        raise typer.Exit
    if debug:
        context.obj.debug = True
    connection_options.set(
        ConnectionOptions(
            token_file=token_file,
            tls_root=tls_root,
            tls_certificate=tls_certificate,
            tls_key=tls_key,
            timeout=timeout,
        )
    )
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    _replace_closed_streams()
    owns_process.set(arguments is None)
    session = Session(debug=os.environ.get("FLOODMARK_DEBUG", "") not in ("", "0"))
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments, session)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has what it wanted, as in `| head`.
        _discard_stdout()
        return DONE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        code = report(error, debug=session.debug)
        _flush_or_discard()
    return code


def _run(arguments: Sequence[str], session: Session) -> int:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    command = get_group(app)
    try:
        with command.make_context("floodmark", list(arguments), obj=session) as context:
            command.invoke(context)
    except typer.Exit as finished:
        return finished.exit_code
    return DONE


def _replace_closed_streams() -> None:
    """Send output to the null device where the shell closed a stream, as in `>&-`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))


def _flush_or_discard() -> None:
    """Flush output from before an error, unless printing was the error."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_stdout()


def _discard_stdout() -> None:
    """Send buffered output to the null device, so that the interpreter's last flush does not fail."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
