"""The connection of a streaming query's driver to its site, and the safe point that it holds there.

The safe point keeps everything that the query may still read, also while it is stopped.  It is held before
anything is read, moves behind the batches that Spark has committed, and is renewed while the query runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Final, TypeVar

from floodmark.clock import TimeSource, monotonic_ms
from floodmark.codec.ordered import encode_namespace
from floodmark.feed.reading.cut import ChangesCut
from floodmark.feed.safepoints import begin_reading
from floodmark.host.ports import Host
from floodmark.model.change import Resolved
from floodmark.model.errors import FloodmarkError, VersionCollected
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.site.address import SiteAddress
from floodmark.site.arguments import qualify_range
from floodmark.spark.runtime.patience import Wait, ask_patiently
from floodmark.spark.source.planning import plan_ranges

# A safe point moves at most this often; one with a short lifetime is renewed more often.
HOLD_MS: Final = 10_000
RENEWALS_PER_LIFETIME: Final = 4

Result = TypeVar("Result")


class Query:
    """A query's connection to a site.  Connects at once; close it."""

    def __init__(
        self,
        address: SiteAddress,
        namespace: str,
        lifetime: timedelta,
        *,
        monotonic: TimeSource = monotonic_ms,
        wait: Wait | None = None,
    ) -> None:
        self._lifetime = lifetime
        self._namespace = namespace
        self._monotonic = monotonic
        self._hold_ms = min(HOLD_MS, lifetime // timedelta(milliseconds=RENEWALS_PER_LIFETIME))
        # The reader whose safe point is held, the version that it needs, and when that was last held.
        self._reader: str | None = None
        self._needed: Version = 0
        self._told: Version = 0
        self._told_at_ms = 0
        # The server may be started after the query.
        self._site = ask_patiently(address.connect, wait=wait)
        self.site_id = self._site.id
        row = self.ask(lambda host: host.namespaces.find_namespace(namespace))
        self.namespace_id, self._created_at = row.id, row.created_at
        # The place whose versions these are.  A namespace that was dropped and made again is another one.
        self.place = f"namespace {namespace} ({row.id}) of site {self._site.name} ({self.site_id})"

    def ask(self, question: Callable[[Host], Result]) -> Result:
        """Ask the site, also if it is being restarted."""
        return ask_patiently(lambda: question(self._site.host))

    def physical_ms(self) -> int:
        """The site's time in unix milliseconds."""
        return ask_patiently(self._site.host.physical_ms)

    def begin(self, reader: str, start: Version | str) -> Version:
        """Hold the version that a start names, and return it."""

        def hold(place: Resolved) -> Version:
            self._hold(reader, place.version)
            return place.version

        return begin_reading(
            start,
            hold,
            present=lambda: self.ask(lambda host: host.versions.resolved_version()),
            require_past=lambda version: self.ask(lambda host: host.versions.observe(version)),
            created_at=self._created_at,
        )

    def keep(self, reader: str, version: Version) -> None:
        """Hold what a reader at a version needs, or renew what it holds already."""
        if self._reader != reader:
            self._hold(reader, version)
        elif self._monotonic() - self._told_at_ms >= self._hold_ms:
            self._hold(reader, self._needed)

    def advance(self, reader: str, version: Version) -> None:
        """Note that the reader needs nothing at or below a version."""
        if self._reader == reader:
            self._needed = max(self._needed, version)
        self.keep(reader, version)

    def release(self, reader: str) -> None:
        """Release a safe point.  If that fails, it expires."""
        if self._reader == reader:
            self._reader = None
        with suppress(FloodmarkError):
            self._site.host.retention.release_safe_point(reader)

    def cut(self, since: Version, changes_max: int | None, until: Version | None) -> ChangesCut:
        """The end of the next step."""
        with self._explained():
            return self.ask(
                lambda host: host.versions.cut_changes(self._namespace, since, changes_max, until, False)
            )

    def cut_snapshot(self, keys: KeyRange, at: Version, rows_max: int) -> bytes | None:
        """The qualified key up to which a range has so many rows at a version; None if it has fewer."""

        def cut() -> bytes | None:
            left = rows_max
            # Rows are counted by their digests; values need not travel.
            for page in self._site.host.router.scan_records(keys, at, content=Content.DIGESTS):
                if page.num_rows >= left:
                    key: bytes = page.column(0)[left - 1].as_py()
                    return encode_namespace(self.namespace_id) + key
                left -= page.num_rows
            return None

        with self._explained():
            return ask_patiently(cut)

    def present(self) -> Version:
        """The version up to which every acknowledged write can be read."""
        resolved = self.ask(lambda host: host.versions.resolved_version())
        # The cut also makes durable, and publishes, writes that did not wait for the disk.
        return self.cut(resolved, None, None).resolved

    def qualify(self, keys: KeyRange) -> KeyRange:
        """A range of users' keys as a range of qualified ones."""
        return qualify_range(encode_namespace(self.namespace_id), keys)

    def ranges(self, keys: KeyRange) -> list[KeyRange]:
        """A range of qualified keys along the partitions of the site."""
        maps = self._site.host.router.maps
        ask_patiently(maps.refresh)
        partitions = [partition.range for partition in maps.map.partitions]
        return plan_ranges(partitions, keys)

    def close(self) -> None:
        """Move the safe point to the needed version, and close the connection."""
        with suppress(FloodmarkError):
            if self._reader is not None and self._needed > self._told:
                self._hold(self._reader, self._needed)
        self._site.close()

    def _hold(self, reader: str, version: Version) -> None:
        with self._explained():
            self.ask(
                lambda host: host.retention.hold_safe_point(reader, version, self._lifetime, self._namespace)
            )
        self._reader, self._needed, self._told = reader, version, version
        self._told_at_ms = self._monotonic()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except VersionCollected as error:
            raise VersionCollected(
                f"changes of {self._namespace!r} that the query has not read are gone: {error}. A query may "
                f"be stopped for {self._lifetime} (option safePointLifetime). Start it anew with another "
                'checkpoint directory and the option startingVersion "snapshot", which has every key',
                **error.details,
            ) from error
