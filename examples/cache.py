"""A cache beside a store, which catches up with the changes of the store.

When a data set has been published, the cache reads only the keys that it changed.

One file holds the entries and the version up to which they have every change, and is replaced as a whole.  So
a process that is killed resumes from a complete file: it reads some changes twice, and misses none.

    python cache.py URL CACHE    brings the cache up to date
"""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import floodmark


class Cache:
    """The values of a namespace, as JSON in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        stored: dict[str, Any] = {"version": 0, "values": {}}
        if path.exists():
            stored = json.loads(path.read_text())
        self._version: int = stored["version"]
        self.values: dict[str, str] = stored["values"]

    def catch_up(self, site: floodmark.Site, namespace: str) -> None:
        """Apply the changes since the last call; begin again with a snapshot if they are collected."""
        try:
            for item in site.changes(
                namespace,
                since=self._version or "snapshot",
                resolved_markers=True,
                on_generation="difference",
            ):
                if isinstance(item, floodmark.Resolved):
                    if not item.snapshot:
                        self._version = item.version
                        self._save()
                elif isinstance(item, floodmark.Change):
                    self._take(item)
        except floodmark.VersionCollected:
            self._version, self.values = 0, {}
            self.catch_up(site, namespace)

    def _take(self, change: floodmark.Change) -> None:
        if change.value is None:
            self.values.pop(change.key.decode(), None)
        else:
            self.values[change.key.decode()] = change.value.decode()

    def _save(self) -> None:
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps({"version": self._version, "values": self.values}))
        os.replace(draft, self._path)


def main() -> None:
    """Bring a cache up to date; without arguments, demonstrate one in a temporary directory."""
    if len(sys.argv) == 3:
        with floodmark.connect(sys.argv[1]) as site:
            Cache(Path(sys.argv[2])).catch_up(site, "prices")
        return
    with TemporaryDirectory() as directory, floodmark.open(directory + "/store", site="oslo") as site:
        prices, path = site.create_namespace("prices"), Path(directory) / "cache.json"
        prices.put_many({b"tea": b"3", b"milk": b"1"})
        Cache(path).catch_up(site, "prices")
        prices.put(b"tea", b"4")
        prices.delete(b"milk")
        cache = Cache(path)
        print(cache.values)
        cache.catch_up(site, "prices")
        print(cache.values, Cache(path).values == {"tea": "4"})


if __name__ == "__main__":
    main()
