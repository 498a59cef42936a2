"""The port to what a site keeps of the past: safe points and garbage collection.

An administrator names a safe point freely.  A reader needs the role `read` only, for a safe point in one
namespace, for a limited time, whose name says what kind of reader it is: `spark/5f2b9c7d`.
"""

from datetime import timedelta
from typing import Final, Protocol

from floodmark.feed import SafePoint
from floodmark.feed.safepoints import READERS_LIFETIME_MAX, is_readers_name
from floodmark.host.statistics import GarbageReport
from floodmark.model.access import Role
from floodmark.model.actions import SITE_OWNER, Action, Exempt, Owned, Scope
from floodmark.model.version import Version

READERS: Final = Exempt(
    Role.READ,
    lambda arguments: (
        is_readers_name(arguments["name"])
        and arguments["lifetime"] <= READERS_LIFETIME_MAX
        and arguments["namespace"] is not None
    ),
    f"`read` for names of the form `KIND/NAME`, for at most {READERS_LIFETIME_MAX.days} days",
)


class RetentionPort(Protocol):
    """Holds and releases safe points, and collects what lies behind them."""

    @Action(
        Role.ADMIN,
        Scope.NAMESPACE,
        audited=True,
        repeatable=True,
        exempt=READERS,
        owned=Owned.SAFE_POINT,
    )
    def hold_safe_point(
        self,
        name: str,
        version: Version,
        lifetime: timedelta,
        namespace: str | None,
        owner: str = SITE_OWNER,
    ) -> SafePoint:
        """Keep what a reader at `version` sees.  Raises NotAllowed if the name is another owner's."""
        ...

    @Action(Role.READ, audited=True, owned=Owned.SAFE_POINT)
    def release_safe_point(self, name: str, owner: str = SITE_OWNER) -> None:
        """Let garbage collection go on.  Only the owner of a safe point, or the site, releases it."""
        ...

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def safe_points(self) -> list[SafePoint]:
        """The safe points that hold now."""
        ...

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True)
    def oldest_version(self, namespace: str | None) -> Version:
        """The version after which every change of one namespace, or of all, is still there."""
        ...

    @Action(Role.ADMIN, Scope.SITE, audited=True, lengthy=True)
    def collect_garbage(self) -> GarbageReport:
        """Remove versions and changes behind the safe points."""
        ...
