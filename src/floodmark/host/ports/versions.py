"""The port to a site's versions: its clock, and how far its commits reach."""

from typing import Protocol

from floodmark.feed.reading.cut import ChangesCut
from floodmark.model.access import Role
from floodmark.model.actions import SITE_OWNER, Action, Owned, Scope
from floodmark.model.change import Heartbeat
from floodmark.model.version import Version


class VersionPort(Protocol):
    """Tells the versions that readers and writers begin and end at."""

    @Action(Role.READ, repeatable=True)
    def read_version(self) -> Version:
        """The version at which a reader sees every acknowledged write."""
        ...

    @Action(Role.READ, repeatable=True)
    def resolved_version(self) -> Version:
        """Every change at or below this is durable and published, and none will be added."""
        ...

    @Action(Role.READ, repeatable=True)
    def now(self) -> Version:
        """A fresh version."""
        ...

    @Action(Role.READ, repeatable=True)
    def observe(self, version: Version) -> None:
        """Move the clock past a version that a reader asks for, which must not be in the future."""
        ...

    @Action(Role.ADMIN, Scope.SITE, audited=True, repeatable=True)
    def pass_version(self, version: Version) -> None:
        """Move the clock past a version that other sites hold.

        Raises ClockSkew if it is further ahead than they tolerate.
        """
        ...

    @Action(Role.WRITE, repeatable=True)
    def sync(self) -> None:
        """Make durable all writes with durability "async"."""
        ...

    @Action(Role.ADMIN, Scope.SITE, audited=True)
    def heartbeat(self) -> Heartbeat:
        """Write a heartbeat now."""
        ...

    @Action(Role.WRITE, Scope.NAMESPACE, audited=True, repeatable=True, owned=Owned.STREAM)
    def open_epoch(self, namespace: str, stream: str, epoch: int, owner: str = SITE_OWNER) -> Version:
        """The version of an epoch of a stream from outside that is written into a namespace.

        It is drawn when the epoch is first opened, above everything that was written before, and never
        changes.  A stream opens its epochs in order.  The site remembers the last 16, until the stream was
        not used for 30 days.  The stream belongs to the owner that opened its first epoch: with a version
        that another caller drew too early, the owner's writes would lose.
        """
        ...

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True, lengthy=True)
    def cut_changes(
        self,
        namespace: str,
        since: Version,
        changes_max: int | None,
        until: Version | None,
        at_heartbeat: bool,
        own: bool = False,
    ) -> ChangesCut:
        """The version at which the next step of a reader of a namespace's changes ends.

        With `own` the reader reads, and counts, only changes that were first written at this site.
        """
        ...
