"""Where a site is: in a directory, or behind the URL of its server."""

import os
import re
from typing import Final

from floodmark.cli.render.text import json_bytes, show_bytes

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(location: str) -> bool:
    """Whether a site is named by the URL of its server; anything else is a directory.

    >>> is_url("grpc+tls://oslo.example:7100"), is_url("data/oslo"), is_url("./odd://name")
    (True, False, False)
    """
    return _URL.match(location) is not None


def location_fields(location: str) -> dict[str, str | None]:
    """Where a site is, for programs: its `directory` or its `url`.

    >>> location_fields("data/oslo"), location_fields("grpc://oslo:7100")
    ({'directory': 'data/oslo'}, {'url': 'grpc://oslo:7100'})
    """
    return json_bytes("url" if is_url(location) else "directory", os.fsencode(location))


def show_location(location: str) -> str:
    """Where a site is, for people."""
    return show_bytes(os.fsencode(location))
