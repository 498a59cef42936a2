"""The merge policies by the name that a namespace's settings give."""

from collections.abc import Callable, Mapping
from typing import Final

from floodmark.merge.last_write import Stamped, last_write

MergePolicy = Callable[[Stamped | None, Stamped], Stamped]

POLICIES: Final[Mapping[str, MergePolicy]] = {"last_write": last_write}
