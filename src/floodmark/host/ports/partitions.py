"""The port to a site's partitions."""

from typing import Protocol

from floodmark.host.statistics import PartitionHeat, PartitionStatistics
from floodmark.model.access import Role
from floodmark.model.actions import Action, Scope


class PartitionPort(Protocol):
    """Lists, splits and merges partitions."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def partitions(self) -> list[PartitionStatistics]:
        """The partitions in order of keys."""
        ...

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True, lengthy=True)
    def split(self, namespace: str, key: bytes) -> tuple[int, int]:
        """Cut a partition in two, before a key; the ids of the halves."""
        ...

    @Action(Role.ADMIN, Scope.SITE, audited=True, lengthy=True)
    def merge(self, left: int, right: int) -> int:
        """Join two neighbouring partitions; the id of the new one."""
        ...

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def heat(self) -> list[PartitionHeat]:
        """The load of each partition over the last minutes."""
        ...
