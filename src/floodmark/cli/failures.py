"""The message of a command that fails, and its exit code.

0    done
1    a finding: a check failed, or something was not found
2    unknown: a write of unknown outcome, or a version that was collected
64   usage: the command or its arguments are wrong
66   no input: a path does not exist, or holds no site
69   unreachable: the site is in use, does not answer, or its storage fails; try again
70   a bug in Floodmark
77   not allowed
130  interrupted with Ctrl-C
143  a job on Spark that SIGTERM ended
"""

import json as json_module
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import typer
from rich.text import Text

from floodmark.cli.render.output import console_on
from floodmark.cli.render.text import show_text, show_time
from floodmark.model import errors

DONE: Final = 0
FINDING: Final = 1
UNKNOWN: Final = 2
USAGE: Final = 64
NO_INPUT: Final = 66
UNREACHABLE: Final = 69
BUG: Final = 70
NOT_ALLOWED: Final = 77
INTERRUPTED: Final = 130


# Options that earlier releases had, and what to use instead.
_RENAMED: Final = {
    "--checkpoint": "the target stores the position; leave the option out",
    "--end": "--end-key",
    "--follow": "export, replicate and feed run go on until Ctrl-C; --once ends them at the present",
    "--site-id": "--id",
    "--start": "--start-key",
}


class Usage(typer.TyperException):
    """A wrong command line, and what to do about it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class NoInput(Usage):
    """A file or directory on the command line that does not exist."""


_BY_CODE: Final[dict[int, tuple[type[BaseException], ...]]] = {
    FINDING: (
        *(errors.KeyNotFound, errors.NamespaceNotFound, errors.NamespaceExists, errors.PartitionNotFound),
        *(errors.SafePointNotFound, errors.FeedNotFound, errors.FeedExists, errors.FeedStateConflict),
        *(errors.SubscriptionNotFound, errors.AcknowledgementConflict, errors.TransactionNotFound),
        *(errors.TransactionEnded, errors.BackupDamaged, errors.PublicationConflict),
    ),
    UNKNOWN: (errors.OutcomeUnknown, errors.VersionCollected, errors.Corruption),
    USAGE: (
        *(errors.InvalidArgument, errors.WrongPolicy, errors.LimitExceeded, errors.SiteMismatch),
        *(errors.InvalidConfiguration, typer.TyperException),
    ),
    NO_INPUT: (NoInput, FileNotFoundError),
    # With a WireMismatch the command may be right: one of the two installations has to change.
    UNREACHABLE: (errors.Retryable, errors.ClockSkew, errors.CannotOpen, errors.WireMismatch, OSError),
    NOT_ALLOWED: (errors.NotAllowed, errors.Fenced, PermissionError),
    BUG: (errors.Closed, BaseException),
}
# The nearest class counts.
EXIT_CODES: Final = {kind: code for code, kinds in _BY_CODE.items() for kind in kinds}
_BEFORE_THE_COMMAND: Final = (
    *("--debug", "--timeout", "--token-file", "--tls-root", "--tls-certificate", "--tls-key"),
)


def _say_collected(error: errors.FloodmarkError) -> tuple[str, str]:
    version, oldest = error.details.get("version"), error.details.get("oldest")
    if not isinstance(version, int) or not isinstance(oldest, int):
        return str(error), ""
    return (
        f"version {version} is no longer kept; the oldest is {oldest} ({show_time(oldest)})",
        f"{oldest} or later, or for changes --since snapshot, which has every key; to keep more, floodmark "
        "namespace update --retention, or floodmark safepoint hold",
    )


def _say_swapped(error: errors.GenerationSwapped) -> tuple[str, str]:
    swap = error.details.get("oldest")
    when = f" at version {swap} ({show_time(swap)})" if isinstance(swap, int) else ""
    return (
        f"a data set was published{when} and replaced what was read so far",
        "--on-generation difference for what it changed, or snapshot for all of it, or begin again --since "
        "snapshot",
    )


def _say_unreachable(error: errors.FloodmarkError) -> tuple[str, str]:
    # In Python these are arguments; here they are options of the same names.
    message = re.sub(r"\btls_(root|certificate|key)\b", r"--tls-\1", str(error))
    hint = "is `floodmark serve` running there, on this port? With a certificate its URL is grpc+tls://…"
    if error.details.get("timed_out"):
        hint = "floodmark --timeout 2m …"
    return message, hint


# What to try next, with the details of the error in braces; the library's hints are in terms of Python.
_HINTS: Final[dict[type[errors.FloodmarkError], str]] = {
    errors.NamespaceNotFound: "floodmark namespace list SITE, or floodmark namespace create SITE {namespace}",
    errors.NamespaceExists: "floodmark namespace show SITE {namespace}",
    errors.WrongPolicy: "floodmark namespace show SITE NAMESPACE",
    errors.PartitionNotFound: "floodmark partition list SITE",
    errors.SafePointNotFound: "floodmark safepoint list SITE",
    errors.FeedNotFound: "floodmark feed list SITE",
    errors.FeedExists: "floodmark feed show SITE {feed}",
    errors.FeedStateConflict: "floodmark feed show SITE {feed}",
    errors.SubscriptionNotFound: "floodmark subscription list SITE",
    errors.TransactionNotFound: "floodmark txn list SITE",
    errors.NotAuthenticated: (
        "floodmark --token-file FILE …, or FLOODMARK_TOKEN_FILE=FILE; floodmark token makes a new token"
    ),
    errors.WireMismatch: "floodmark version here and on the server's machine, and install the same",
    errors.SiteLocked: "if it is a server, use its URL in the directory's place: grpc://HOST:PORT",
    errors.VersionInFuture: "leave out --at to read the present",
}
# Messages in terms of the command, with the details of the error in braces.
_MESSAGES: Final[dict[type[errors.FloodmarkError], str]] = {
    errors.NamespaceNotFound: "no namespace {namespace!r}",
    errors.NamespaceExists: "namespace {namespace!r} is already there",
    errors.VersionInFuture: "version {version} lies in the future of this site",
}


def exit_code(error: BaseException) -> int:
    """The exit code of an error.

    >>> exit_code(errors.StorageFull("x")), exit_code(errors.InvalidKey("x")), exit_code(KeyError("x"))
    (69, 64, 70)
    """
    if isinstance(error.__cause__, PermissionError):
        return NOT_ALLOWED
    if isinstance(error, errors.NotASite) and error.details.get("missing"):
        return NO_INPUT
    return next(EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES)


def report(error: Exception, *, debug: bool, json: bool) -> int:
    """Print the message and a hint to stderr, with `json` as one JSON object; returns the exit code."""
    code = exit_code(error)
    message, hint = _words(error, code)
    console = console_on(sys.stderr)
    if json:
        kind = "Usage" if isinstance(error, typer.TyperException) else type(error).__name__
        shown = {"error": " ".join(message.split()), "kind": kind, "hint": hint or None, "exit_code": code}
        if debug:
            shown["trace"] = "".join(traceback.format_exception(error))
        sys.stderr.write(json_module.dumps(shown) + "\n")
        return code
    console.print(Text.assemble(("error: ", "bold red"), show_text(" ".join(message.split()))))
    if hint:
        console.print(Text(f"  try: {show_text(hint)}", style="dim"))
    if debug:
        console.print("".join(traceback.format_exception(error)), end="")
    return code


def _words(error: Exception, code: int) -> tuple[str, str]:
    if isinstance(error, typer.TyperException):
        return _say_usage(error)
    if code == BUG:
        name = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return (
            f"unexpected {name}; this is a bug in Floodmark, please report it",
            "floodmark --debug …, and add what it prints to the report",
        )
    match error:
        case errors.GenerationSwapped():
            return _say_swapped(error)
        case errors.VersionCollected():
            return _say_collected(error)
        case errors.Unreachable():
            return _say_unreachable(error)
        case errors.SiteLocked() if "node" in error.details:
            hint = "leave out --node to take the lowest number that is free"
            return str(error), hint if error.details["node"] else ""
        case errors.NotASite() if error.details.get("missing"):
            return str(error), "check the path, or make a site with floodmark init"
        case errors.FloodmarkError():
            return _look_up(_MESSAGES, error) or str(error), _look_up(_HINTS, error)
    return str(error), ""


def _look_up(words: Mapping[type[errors.FloodmarkError], str], error: errors.FloodmarkError) -> str:
    """The words for the nearest class of an error, filled in with its details."""
    found = next((words[kind] for kind in type(error).__mro__ if kind in words), "")
    return found.format_map(defaultdict(lambda: None, error.details))


def _say_usage(error: typer.TyperException) -> tuple[str, str]:
    if isinstance(error, Usage):
        return error.message, error.hint
    message = error.format_message().removesuffix(".")
    context = getattr(error, "ctx", None)
    command = "floodmark" if context is None else context.command_path
    option = getattr(error, "option_name", None)
    if option in _RENAMED and message.startswith("No such option"):
        return f"{option} is no longer an option: {_RENAMED[option]}", f"{command} --help"
    if option in _BEFORE_THE_COMMAND:
        return f"{option} stands before the command", f"floodmark {option} … {command.partition(' ')[2]} …"
    return message[:1].lower() + message[1:], f"{command} --help"
