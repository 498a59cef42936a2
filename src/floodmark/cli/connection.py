"""The options before the command that say how to reach a server."""

from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """The credentials for servers, by file: every user of the machine can read a command line."""

    token_file: Path | None = None
    tls_root: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    timeout: timedelta | None = None


_DEFAULTS: Final = ConnectionOptions()

# Whether the command is the purpose of this process, and not a call from a program or a test.
owns_process: Final = ContextVar("owns_process", default=False)
# What the options before the command have set.
connection_options: Final = ContextVar("connection_options", default=_DEFAULTS)
