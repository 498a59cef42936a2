"""All commands: importing this fills the table."""

from typing import Final

from floodmark.server.resp import hashes, sessions, strings
from floodmark.server.resp.table import TABLE, CommandTable

MODULES: Final = (hashes, sessions, strings)
COMMANDS: Final[CommandTable] = TABLE
