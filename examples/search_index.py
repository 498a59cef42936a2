"""A full-text index that follows an ordered log: SQLite's FTS5, in a file of its own.

Each document is written in one transaction with an entry of the log that names it.  The index and its
position in the log are updated in one SQLite transaction, so an indexer that is killed resumes where its
index ends.

A published data set, which replaces all documents (docs/publishing.md), is in no log.  The index reads its
difference, document by document.

    python search_index.py URL INDEX    brings the index up to date
"""

import sqlite3
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import floodmark
from floodmark.layers import LogPosition, OrderedLog

BATCH = 100


class Library:
    """Documents, and a log of those that changed."""

    def __init__(self, site: floodmark.Site) -> None:
        self._site = site
        self.documents = site.create_namespace("documents", codec="text", exist_ok=True)
        self.changed = OrderedLog(site, "changed-documents")

    def write(self, name: str, text: str | None) -> None:
        """Write a document, or delete it."""

        def work(transaction: floodmark.Transaction) -> None:
            if text is None:
                transaction.delete(self.documents, name)
            else:
                transaction.put(self.documents, name, text)
            self.changed.append(name.encode(), transaction=transaction)

        self._site.run_transaction(work)

    def published(self, since: int | None) -> Iterator[tuple[int, Iterator[str]]]:
        """Yields the version of each data set published after `since`, and the documents that it changed.

        If `since` is None, yields all documents at once, with which an index begins.
        """
        versions = [each.since for each in self._site.generations.list("documents") if each.since is not None]
        if since is None:
            yield max(versions), (name for name, _ in self.documents.scan())
        for version in versions:
            if since is not None and version > since:
                changes = self._site.changes(
                    "documents", since=version - 1, until=version, on_generation="difference"
                )
                yield version, (change.key.decode() for change in changes if change.key)


class SearchIndex:
    """The words of the documents in a SQLite file."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path)
        self._database.executescript(
            "CREATE VIRTUAL TABLE IF NOT EXISTS documents USING fts5(name UNINDEXED, text);"
            "CREATE TABLE IF NOT EXISTS position (version INTEGER, number INTEGER);"
            "CREATE TABLE IF NOT EXISTS data_set (version INTEGER);"
        )

    def catch_up(self, library: Library) -> None:
        """Index the documents that changed since the last call, `BATCH` in a transaction."""
        row = self._database.execute("SELECT version FROM data_set").fetchone()
        for version, changed in library.published(None if row is None else row[0]):
            while some := set(islice(changed, BATCH)):
                self._take(library, some)
            with self._database:
                self._database.execute("DELETE FROM data_set")
                self._database.execute("INSERT INTO data_set VALUES (?)", (version,))
        names: set[str] = set()
        for position, entry in library.changed.read(since=self.position()):
            names.add(entry.decode())
            if len(names) == BATCH:
                self._take(library, names, position)
                names = set()
        if names:
            self._take(library, names, position)

    def position(self) -> LogPosition | None:
        """How far the index has come in the log."""
        row = self._database.execute("SELECT version, number FROM position").fetchone()
        return None if row is None else LogPosition(*row)

    def _take(self, library: Library, names: Iterable[str], position: LogPosition | None = None) -> None:
        """Index the current texts of documents; if one changes later, a later entry of the log names it."""
        with self._database:
            for name in names:
                self._database.execute("DELETE FROM documents WHERE name = ?", (name,))
                if (text := library.documents.get(name)) is not None:
                    self._database.execute("INSERT INTO documents VALUES (?, ?)", (name, text))
            if position is not None:
                self._database.execute("DELETE FROM position")
                self._database.execute("INSERT INTO position VALUES (?, ?)", position)

    def search(self, words: str) -> list[str]:
        """The names of the documents that have all the words."""
        found = self._database.execute(
            "SELECT name FROM documents WHERE documents MATCH ? ORDER BY name", (words,)
        )
        return [name for (name,) in found]

    def rows(self) -> dict[str, str]:
        """The indexed documents, by name."""
        return dict(self._database.execute("SELECT name, text FROM documents"))

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def main() -> None:
    """Bring an index up to date; without arguments, demonstrate one in a temporary directory."""
    if len(sys.argv) == 3:
        with floodmark.connect(sys.argv[1]) as site:
            SearchIndex(Path(sys.argv[2])).catch_up(Library(site))
        return
    with TemporaryDirectory() as directory, floodmark.open(directory + "/store", site="oslo") as site:
        library, index = Library(site), SearchIndex(Path(directory) / "index.db")
        library.write("flood", "the line that the highest water leaves behind")
        library.write("ebb", "the water goes")
        index.catch_up(library)
        print(index.search("water"), index.search("water line"))
        library.write("flood", None)
        library.write("ebb", "the sea goes out")
        index.catch_up(library)
        print(index.search("water"), index.search("sea"))
        site.generations.publish("documents", {b"tide": b"the water comes and goes"})
        index.catch_up(library)
        print(index.search("water"), index.search("sea"))
        index.close()


if __name__ == "__main__":
    main()
