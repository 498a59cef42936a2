"""The message of a command that fails, and its exit code.

0    done
1    a finding: a check failed, or something was not found
2    unknown: a write of unknown outcome, or a version that was collected
64   usage: the command or its arguments are wrong
69   unreachable: the site does not exist, is in use, does not answer, or its storage fails; try again
70   a bug in Floodmark
77   not allowed
130  interrupted with Ctrl-C
143  a job on Spark that SIGTERM ended
"""

import re
import sys
import traceback
from collections.abc import Callable
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
UNREACHABLE: Final = 69
BUG: Final = 70
NOT_ALLOWED: Final = 77
INTERRUPTED: Final = 130


class Usage(typer.TyperException):
    """A wrong command line, and what to do about it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


# The nearest class counts.
EXIT_CODES: Final[dict[type[BaseException], int]] = {
    errors.Retryable: UNREACHABLE,
    errors.OutcomeUnknown: UNKNOWN,
    errors.InvalidArgument: USAGE,
    errors.WrongPolicy: USAGE,
    errors.LimitExceeded: USAGE,
    errors.NamespaceNotFound: FINDING,
    errors.NamespaceExists: FINDING,
    errors.PartitionNotFound: FINDING,
    errors.SafePointNotFound: FINDING,
    errors.FeedNotFound: FINDING,
    errors.FeedExists: FINDING,
    errors.FeedStateConflict: FINDING,
    errors.SubscriptionNotFound: FINDING,
    errors.AcknowledgementConflict: FINDING,
    errors.TransactionNotFound: FINDING,
    errors.TransactionEnded: FINDING,
    errors.NotAllowed: NOT_ALLOWED,
    errors.VersionCollected: UNKNOWN,
    errors.ClockSkew: UNREACHABLE,
    errors.Fenced: NOT_ALLOWED,
    errors.Corruption: UNKNOWN,
    errors.BackupDamaged: FINDING,
    errors.Closed: BUG,
    errors.CannotOpen: UNREACHABLE,
    errors.SiteMismatch: USAGE,
    errors.InvalidConfiguration: USAGE,
    # The command may be right: one of the two installations has to change.
    errors.WireMismatch: UNREACHABLE,
    typer.TyperException: USAGE,
    PermissionError: NOT_ALLOWED,
    OSError: UNREACHABLE,
    BaseException: BUG,
}

_BEFORE_THE_COMMAND: Final = (
    "--debug",
    "--token-file",
    "--tls-root",
    "--tls-certificate",
    "--tls-key",
    "--timeout",
)

Say = Callable[[errors.FloodmarkError], tuple[str, str]]


def _say_collected(error: errors.FloodmarkError) -> tuple[str, str]:
    version, oldest = error.details.get("version"), error.details.get("oldest")
    if not isinstance(version, int) or not isinstance(oldest, int):
        return str(error), ""
    return (
        f"version {version} is no longer kept; the oldest is {oldest} ({show_time(oldest)})",
        f"{oldest} or later, or for changes --since snapshot, which has every key; to keep more, floodmark "
        "namespace update --retention, or floodmark safepoint hold",
    )


def _say_unreachable(error: errors.FloodmarkError) -> tuple[str, str]:
    # In Python these are arguments; here they are options of the same names.
    message = re.sub(r"\btls_(root|certificate|key)\b", r"--tls-\1", str(error))
    hint = "is `floodmark serve` running there, on this port? With a certificate its URL is grpc+tls://…"
    if error.details.get("timed_out"):
        hint = "floodmark --timeout 2m …"
    return message, hint


# Messages in terms of the command, where the library's are in terms of Python.
_WORDS: Final[dict[type[errors.FloodmarkError], Say]] = {
    errors.NamespaceNotFound: lambda error: (
        f"no namespace {error.details.get('namespace')!r}",
        f"floodmark namespace list SITE, or floodmark namespace create SITE {error.details.get('namespace')}",
    ),
    errors.NamespaceExists: lambda error: (
        f"namespace {error.details.get('namespace')!r} is already there",
        f"floodmark namespace show SITE {error.details.get('namespace')}",
    ),
    errors.WrongPolicy: lambda error: (str(error), "floodmark namespace show SITE NAMESPACE"),
    errors.PartitionNotFound: lambda error: (str(error), "floodmark partition list SITE"),
    errors.SafePointNotFound: lambda error: (str(error), "floodmark safepoint list SITE"),
    errors.FeedNotFound: lambda error: (str(error), "floodmark feed list SITE"),
    errors.FeedExists: lambda error: (str(error), f"floodmark feed show SITE {error.details.get('feed')}"),
    errors.FeedStateConflict: lambda error: (
        str(error),
        f"floodmark feed show SITE {error.details.get('feed')}",
    ),
    errors.SubscriptionNotFound: lambda error: (str(error), "floodmark subscription list SITE"),
    errors.TransactionNotFound: lambda error: (str(error), "floodmark txn list SITE"),
    errors.Unreachable: _say_unreachable,
    errors.NotAuthenticated: lambda error: (
        str(error),
        "floodmark --token-file FILE …, or FLOODMARK_TOKEN_FILE=FILE; floodmark token makes a new token",
    ),
    errors.WireMismatch: lambda error: (
        str(error),
        "floodmark version here and on the server's machine, and install the same",
    ),
    errors.SiteLocked: lambda error: (
        str(error),
        "if it is a server, use its URL in the directory's place: grpc://HOST:PORT",
    ),
    errors.NotASite: lambda error: (
        str(error),
        "check the path, or make a site with floodmark init" if error.details.get("missing") else "",
    ),
    errors.VersionInFuture: lambda error: (
        f"version {error.details.get('version')} lies in the future of this site",
        "leave out --at to read the present",
    ),
    errors.VersionCollected: _say_collected,
}


def exit_code(error: BaseException) -> int:
    """The exit code of an error.

    >>> exit_code(errors.StorageFull("x")), exit_code(errors.InvalidKey("x")), exit_code(KeyError("x"))
    (69, 64, 70)
    """
    if isinstance(error.__cause__, PermissionError):
        return NOT_ALLOWED
    return next(EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES)


def report(error: Exception, *, debug: bool) -> int:
    """Print the message and a hint to stderr; the exit code."""
    code = exit_code(error)
    message, hint = _words(error, code)
    console = console_on(sys.stderr)
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
    if isinstance(error, errors.FloodmarkError):
        say = next((_WORDS[kind] for kind in type(error).__mro__ if kind in _WORDS), None)
        return say(error) if say else (str(error), "")
    return str(error), ""


def _say_usage(error: typer.TyperException) -> tuple[str, str]:
    if isinstance(error, Usage):
        return error.message, error.hint
    message = error.format_message().removesuffix(".")
    context = getattr(error, "ctx", None)
    command = "floodmark" if context is None else context.command_path
    option = getattr(error, "option_name", None)
    if option in _BEFORE_THE_COMMAND:
        return f"{option} stands before the command", f"floodmark {option} … {command.partition(' ')[2]} …"
    return message[:1].lower() + message[1:], f"{command} --help"
