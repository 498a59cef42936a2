"""The `floodmark` command: the table of its commands, and the one place that turns errors into exit codes."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from itertools import takewhile
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from floodmark import __version__
from floodmark.cli.arguments import Commands, adapt
from floodmark.cli.failures import DONE, INTERRUPTED, report
from floodmark.cli.opening import ConnectionOptions, connection_options, owns_process, show_trace

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

Keys and values are UTF-8 text, or hexadecimal after 0x: 0x00ff. They are printed in the same form.
Durations are 90s, 30m, 24h, 7d. Every command has --json, which holds for errors too, and --help with
examples; `floodmark help COMMAND` shows the same. --install-completion lets the shell complete commands.

Options about servers stand before the command. A token is never one of them, because others can read the
command line: put it into a file, and name the file.

Exit codes: 0 done; 1 not found, or a check failed; 2 could not tell; 64 usage; 66 no such path, or no
site in it; 69 unreachable, try again; 70 a bug in Floodmark; 77 not allowed; 130 interrupted; 143 a job on
Spark was ended by SIGTERM.
"""


COMPLETION: Final = "_FLOODMARK_COMPLETE"

# Where each command, or group of commands, is defined, and its line in the help, in this order.
COMMANDS: Final = {
    "demo": ("demo.command:demo", "Show two sites that lose a change, find it and repair it."),
    "init": ("commands.sites:init", "Make a site."),
    "serve": ("commands.serving:serve", "Serve a site to other processes and machines."),
    "console": ("commands.console:console", "Show several sites on one page, for browsers."),
    "token": ("commands.tokens:token", "Make a token, and the entry for the server's access file."),
    "put": ("commands.data:put", "Write a value, and print its version."),
    "get": ("commands.data:get", "Read the value of a key, now or in the past."),
    "update": ("commands.data:update", "Write some fields of a record, and print the version."),
    "add": ("commands.data:add", "Add to a counter, and print the version."),
    "delete": ("commands.data:delete", "Delete a key, and print the version of the deletion."),
    "scan": ("commands.data:scan", "Print keys and values in order, all as of one version."),
    "changes": ("commands.changes:changes", "Print changes, in commit order."),
    "replicate": ("commands.copying:replicate", "Replicate between sites, in all directions or in one."),
    "verify": ("commands.verifying:verify", "Say whether sites agree, and which keys have drifted apart."),
    "backup": ("commands.backups:backup", "Back up a namespace, as of one version, to Parquet files."),
    "restore": ("commands.backups:restore", "Restore a backup into a new namespace."),
    "export": ("commands.copying:export", "Export changes into a Delta or Parquet table."),
    "status": ("commands.status:status", "Show the state of a site, now or every second."),
    "doctor": ("commands.doctor:doctor", "Check a site, and say what to do."),
    "gc": ("commands.sites:gc", "Collect garbage: remove versions older than the retention."),
    "version": ("commands.sites:version", "Print the versions of Floodmark, its format and Python."),
    "namespace": ("commands.namespaces:commands", "Create, list, show, change, rewrite and drop namespaces."),
    "publish": ("commands.publishing:publish", "Replace a namespace by the rows of a file, at once."),
    "generation": ("commands.publishing:commands", "List, show and remove generations; return to one."),
    "topology": ("commands.topology:commands", "Show and set which sites share which namespaces."),
    "partition": (
        "commands.partitions:commands",
        "List, split, join and move partitions, and see where writes go.",
    ),
    "node": ("commands.nodes:commands", "List, drain and remove the nodes that serve a site."),
    "safepoint": ("commands.safepoints:commands", "Keep old versions and changes from garbage collection."),
    "feed": ("commands.feeds:commands", "Deliver changes elsewhere: create, run and remove feeds."),
    "subscription": ("commands.subscriptions:commands", "List, show, move and remove durable subscriptions."),
    "txn": ("commands.transactions:commands", "List, show and abort transactions, and see their logs."),
}


class LazyGroup(TyperGroup):
    """The root of the commands.  Each is imported and built when it is used, and for the help not at all."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # For their names only: typer lists them, and suggests them to a user who mistypes one.
        self.commands.update(dict.fromkeys(COMMANDS, self))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _build(cmd_name) if cmd_name in COMMANDS else None

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        named = [TyperCommand(name, help=help_text) for name, (_, help_text) in COMMANDS.items()]
        group = TyperGroup(name=self.name, commands=named)
        return group.shell_complete(typer.Context(group), incomplete)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in COMMANDS.items()])


@cache
def _build(name: str) -> Any:
    """Import a command or a group of commands, and build it."""
    place, help_text = COMMANDS[name]
    module, _, attribute = place.partition(":")
    found = getattr(import_module(f"floodmark.cli.{module}"), attribute)
    parent = Commands(rich_markup_mode=None, pretty_exceptions_enable=False)
    if isinstance(found, Commands):
        parent.add_typer(found, name=name, help=help_text)
    else:
        parent.command(name)(found)
    return get_group(parent).commands[name]


app = typer.Typer(
    cls=LazyGroup,
    help=HELP,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def root(
    context: typer.Context,
    *,
    debug: Annotated[bool, "Show where an error came from. Also FLOODMARK_DEBUG=1."] = False,
    connection: ConnectionOptions,
    version: Annotated[bool, "Print the version; `floodmark version` prints more."] = False,
) -> None:
    if version:
        print(f"floodmark {__version__}")
        raise typer.Exit
    if debug:
        show_trace.set(True)
    connection_options.set(connection)
    if context.invoked_subcommand is None:
        print(context.get_help())


app.callback(invoke_without_command=True, help=HELP)(adapt(root))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    _replace_closed_streams()
    owns_process.set(arguments is None)
    if owns_process.get():
        # gRPC's own log is not JSON, and adds nothing to Floodmark's errors and logs.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    show_trace.set(os.environ.get("FLOODMARK_DEBUG", "") not in ("", "0"))
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe, as in `| head`.
        _discard_stdout()
        return DONE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        code = report(error, debug=show_trace.get(), json="--json" in takewhile("--".__ne__, words))
        _flush_or_discard()
    return code


def _run(arguments: Sequence[str]) -> int:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    command = get_command(app)
    if COMPLETION in os.environ:
        # The shell asks for words that complete the line; Typer answers, and ends the process.
        command.main(prog_name="floodmark")
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        with command.make_context("floodmark", list(arguments)) as context:
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
