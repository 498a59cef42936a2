"""What the parts of the site's contract share: a site under simulated time, and ways to ask it.

Every test runs on a site of its own whose time stands still until the test moves it.  Behind a server
the same simulated time drives the served site and the client's idea of the server's clock, so both ends
agree on it, as they do in earnest to within a network's delay.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from floodmark.engine import Engine, MemoryEngine
from floodmark.model.errors import FloodmarkError
from floodmark.model.limits import KEY_BYTES_MAX
from floodmark.model.version import Version
from floodmark.partition import FAMILIES
from floodmark.site import Namespace, Site, open_engine
from floodmark.testing.clock import SimulatedTime

# A hundred milliseconds into a second: expiry is judged in whole seconds, and a clock that runs a few
# milliseconds ahead of this time is still in the same one.
START_MS: Final = 1_700_000_000_100
SITE: Final = "oslo"
SITE_ID: Final = 7

HOUR: Final = timedelta(hours=1)
HOUR_MS: Final = 3_600_000


class SiteContractBase:
    """How a site comes into a test.  Override `open_site`, and `open_on` if the engine can be chosen."""

    key_bytes_max = KEY_BYTES_MAX

    def open_site(self, time: SimulatedTime, directory: Path) -> AbstractContextManager[Site]:
        """A fresh site of the name `SITE` and the id `SITE_ID`, closed at the end of the block.

        It follows `time`, does nothing in the background, and may keep its files in the directory, which
        is empty and its own.
        """
        raise NotImplementedError

    def open_on(self, engine: Engine, time: SimulatedTime) -> AbstractContextManager[Site]:
        """The same on an engine that the test has prepared."""
        pytest.skip("the engine of this site cannot be chosen")

    def open_model(self, time: SimulatedTime) -> Site:
        """A site of this process that gives the same versions and ids, to compare outcomes with."""
        return open_in_memory(time)

    @pytest.fixture
    def time(self) -> SimulatedTime:
        """The time of the site."""
        return SimulatedTime(START_MS)

    @pytest.fixture
    def site(self, time: SimulatedTime, tmp_path: Path) -> Iterator[Site]:
        """An empty site."""
        directory = tmp_path / "site"
        directory.mkdir()
        with self.open_site(time, directory) as site:
            yield site

    @pytest.fixture
    def users(self, site: Site) -> Namespace:
        """A namespace that remembers the last hour."""
        return site.create_namespace("users", retention=HOUR)


def open_in_memory(time: SimulatedTime, engine: Engine | None = None) -> Site:
    """A site of this process that holds everything in memory: the plainest there is."""
    return open_engine(engine or MemoryEngine(FAMILIES), site=SITE, site_id=SITE_ID, time_source=time)


# Asking


def drain(result: object) -> object:
    """Read an iterator to its end: what is lazy counts as well."""
    return list(result) if isinstance(result, Iterator) else result


def refused(kind: type[FloodmarkError], call: Callable[[], object], **details: object) -> FloodmarkError:
    """The error of a call, which must be of this very class, with these details and no others."""
    with pytest.raises(FloodmarkError) as caught:
        drain(call())
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    assert dict(error.details) == details, str(error)
    return error


class Refused(NamedTuple):
    """An error, to be compared: its class, what it says, and its details with their types."""

    kind: type[Exception]
    message: str
    details: Mapping[str, tuple[type, object]] = {}

    def __str__(self) -> str:
        details = {name: detail for name, (_, detail) in self.details.items()}
        return f"{self.kind.__name__}: {self.message} {details}"


def outcome_of(call: Callable[[], object]) -> object:
    """What a call gives: its result, or its error in a form that can be compared."""
    try:
        return drain(call())
    except FloodmarkError as error:
        details = {name: (type(detail), detail) for name, detail in error.details.items()}
        return Refused(type(error), str(error), details)
    except Exception as error:
        # Not one of ours: whoever compares will see it.
        return Refused(type(error), str(error))


def oldest(site: Site, namespace: str = "users") -> Version:
    """The oldest version at which a namespace can still be read."""
    return next(row.oldest_version for row in site.statistics().namespaces if row.name == namespace)


def age(site: Site, time: SimulatedTime, hours: float = 2) -> None:
    """Let time pass, and collect what has become old."""
    time.advance(int(hours * HOUR_MS))
    site.collect_garbage()


def fill(namespace: Namespace, count: int, value: bytes = b"x") -> dict[bytes, bytes]:
    """Put numbered keys in one call, and say what they hold."""
    rows = {b"key-%05d" % index: value for index in range(count)}
    namespace.put_many(rows)
    return rows


def check_rows(found: Iterable[object], expected: Iterable[object]) -> None:
    """Fail at the first row that differs: to explain how thousands differ would take pytest minutes."""
    for number, (row, wanted) in enumerate(zip_longest(found, expected, fillvalue="no row")):
        assert row == wanted, f"row {number}"


def state_after(changes: Iterable[tuple[bytes, bytes | None]]) -> Mapping[bytes, bytes]:
    """What a reader holds who has applied changes in their order."""
    state: dict[bytes, bytes] = {}
    for key, value in changes:
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value
    return state
