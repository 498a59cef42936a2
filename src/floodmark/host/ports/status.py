"""The port to a site's statistics."""

from typing import Protocol

from floodmark.host.statistics import ReplicationStatistics, SiteStatistics
from floodmark.model.access import Role
from floodmark.model.actions import Action, Scope


class StatusPort(Protocol):
    """Describes a site at this moment."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def statistics(self) -> SiteStatistics:
        """The site at this moment."""
        ...

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def replication(self) -> ReplicationStatistics:
        """The links that end at the site, and their alarms."""
        ...
