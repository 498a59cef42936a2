"""All commands: importing this fills the table."""

from typing import Final

from floodmark.server.resp import calls, groups, hashes, scans, sessions, strings
from floodmark.server.resp.table import TABLE, CommandTable

MODULES: Final = (calls, groups, hashes, scans, sessions, strings)
COMMANDS: Final[CommandTable] = TABLE
# The two most frequent commands.
GET: Final = TABLE.commands[b"GET"]
SET: Final = TABLE.commands[b"SET"]
