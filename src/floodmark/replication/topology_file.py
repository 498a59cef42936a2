"""A topology as a TOML file that people write too: a change keeps their comments and their order."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec
import tomlkit

from floodmark.replication.topology import Topology, parse_topology


def render_topology(topology: Topology, before: str = "") -> str:
    """The topology as TOML: the text of the topology before it, with only what differs changed.

    >>> text = '''# Our sites
    ... epoch = 1
    ... [sites.oslo]
    ... id = 1  # never used again
    ... [sites.rome]
    ... id = 2
    ... '''
    >>> changed = msgspec.structs.replace(parse_topology(text), epoch=2)
    >>> render_topology(changed, text) == text.replace("epoch = 1", "epoch = 2")
    True
    >>> print(render_topology(changed), end="")
    epoch = 2
    <BLANKLINE>
    [sites.oslo]
    id = 1
    <BLANKLINE>
    [sites.rome]
    id = 2
    """
    document = tomlkit.parse(before)
    known = msgspec.to_builtins(parse_topology(before)) if before else {}
    _change(document, known, msgspec.to_builtins(topology))
    return tomlkit.dumps(document)


def _change(table: MutableMapping[str, Any], known: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Set the values of a table; keys whose value does not change keep their text."""
    for key in known.keys() - wanted.keys():
        table.pop(key, None)
    for key, value in wanted.items():
        if isinstance(value, Mapping) and isinstance(known.get(key), Mapping) and key in table:
            _change(table[key], known[key], value)
        elif known.get(key) != value:
            table[key] = value
