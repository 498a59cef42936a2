"""Local files that survive a power cut: written, synced, and renamed into place."""

import os
from collections.abc import Iterable
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import Final

# The error numbers of a write for which the file system has no space.
FULL_DISK: Final = frozenset({ENOSPC, EDQUOT, EFBIG})


def sync(paths: Iterable[str | Path]) -> None:
    """Return when these files, or the names in these directories, are on disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_durably(file: Path, content: bytes) -> None:
    """Replace a file in one step: after a power cut it holds the earlier content or the new one."""
    staged = file.with_name(f"{file.name}.new")
    with staged.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    staged.rename(file)
    sync([file.parent])
