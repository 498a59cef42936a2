"""An atomic batch: writes that an atomic read sees all or none of.

    with site.atomic() as batch:
        batch.put(messages, b"grace/17", body)
        batch.add(unread, b"grace", 1)
    batch.version

No reader or writer waits for a batch, and none is refused because of another: unlike a transaction it reads
nothing.
"""

from collections.abc import Callable, Mapping

from floodmark.codec.ordered import encode_namespace
from floodmark.model.errors import Closed
from floodmark.model.limits import COMMIT_BYTES_MAX
from floodmark.model.version import Version
from floodmark.site.gathering import GatheredWrites


class Batch(GatheredWrites):
    """Writes that wait for the end of their block.  Made by `Site.atomic`; for one thread.

    A block that fails writes nothing.
    """

    def __init__(self, write: Callable[[Mapping[bytes, bytes]], Version]) -> None:
        super().__init__("the atomic batch", bytes_max=COMMIT_BYTES_MAX)
        # The version of its commit, which is its id in feeds; 0 before, and if nothing was written.
        self.version: Version = 0
        self._write = write
        self._ended = False

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None and not self._ended:
            self.commit()
        self._ended = True

    def commit(self) -> Version:
        """Write everything in one commit; its version, 0 if there is nothing to write."""
        self._require_open()
        self._ended = True
        rows = {
            encode_namespace(namespace.id) + key: stored
            for namespace, written in self._writes.values()
            for key, stored in written.items()
        }
        if rows:
            self.version = self._write(rows)
        return self.version

    def _require_open(self) -> None:
        """Raise Closed after the end of the block."""
        if self._ended:
            raise Closed("the atomic batch has ended; begin another one with site.atomic()")
