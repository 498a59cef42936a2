"""Sites that write to one key and hear of each other: in any order, repeatedly, and by whole records.

A site's clock passes every stamp that the site has seen, as a partition's does; sites that have not heard
of each other mint the same versions again and again.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from hypothesis import strategies as st

from floodmark.codec.states import decode_state, encode_state
from floodmark.codec.values import decode_value
from floodmark.merge.states import merge_states, newest_stamp, write_state
from floodmark.model.change import Stamp

SITES_MAX = 4

Build = Callable[[int, int], bytes]


class Merge(Protocol):
    """`merge_states`, or a faulty one."""

    def __call__(self, current: bytes | None, incoming: bytes, /, *, own: Stamp | None = None) -> bytes: ...


class Step(NamedTuple):
    """A site writes, or hears of what another wrote; numbers choose what."""

    action: str
    site: int
    other: int
    choice: int


def steps(*actions: str) -> st.SearchStrategy[list[Step]]:
    """Histories of some actions."""
    numbers = st.integers(0, SITES_MAX - 1)
    step = st.builds(Step, st.sampled_from(actions), numbers, numbers, st.integers(0, 11))
    return st.lists(step, max_size=30)


class Replica:
    """One site: the record that it holds, the small states that it has logged, and its clock."""

    def __init__(self, site: int, merge: Merge = merge_states) -> None:
        self.site = site
        self._merge = merge
        self.version = 0
        self.stored: bytes | None = None
        self.logged: list[bytes] = []

    def write(self, unstamped: bytes) -> Stamp:
        """Commit a write; its stamp."""
        self.version += 1
        written = write_state(self.stored, unstamped, self.version, self.site)
        self._store(written.stored)
        self.logged.append(written.logged)
        # What was logged adds nothing to what was stored.
        assert merge_states(self.stored, written.logged) is self.stored
        return Stamp(self.version, self.site)

    def hear(self, state: bytes) -> None:
        """Apply what was written elsewhere, or a whole record."""
        self.version = max(self.version, newest_stamp(decode_state(state)).version) + 1
        merged = self._merge(self.stored, state, own=Stamp(self.version, self.site))
        if merged is not self.stored:
            self._store(merged)
        assert merge_states(self.stored, state) is self.stored

    def content(self) -> bytes | None:
        """The bytes that must be equal at all sites: all but the origin."""
        return None if self.stored is None else encode_state(decode_state(self.stored))

    def _store(self, merged: bytes) -> None:
        newest = newest_stamp(decode_state(merged))
        own = newest == Stamp(self.version, self.site)
        assert decode_value(merged).origin == (None if own else newest)
        self.stored = merged


def run(
    history: list[Step], sites: int, writes: dict[str, Build]
) -> tuple[list[Replica], list[tuple[str, Step, Stamp]]]:
    """The sites after a history, and what was written with which stamps."""
    replicas = [Replica(site + 1) for site in range(sites)]
    written = []
    for step in history:
        replica, other = replicas[step.site % sites], replicas[step.other % sites]
        if step.action in writes:
            stamp = replica.write(writes[step.action](step.other, step.choice))
            written.append((step.action, step, stamp))
        elif step.action == "hear" and other.logged:
            replica.hear(other.logged[step.choice % len(other.logged)])
        elif step.action == "hear all" and other.stored is not None:
            replica.hear(other.stored)
    return replicas, written


def exchange(replicas: list[Replica], order: int) -> None:
    """All sites hear of all that was written, each in an order of its own, and of some of it again."""
    everything = [state for replica in replicas for state in replica.logged]
    for replica in replicas:
        start = order * replica.site % max(1, len(everything))
        turned = everything[start:] + everything[:start]
        for state in turned[:: -1 if (order + replica.site) % 2 else 1] + turned[:2]:
            replica.hear(state)
