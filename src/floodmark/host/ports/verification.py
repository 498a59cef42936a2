"""The port for comparing, repairing and examining the records of a site."""

from typing import Protocol

from floodmark.host.examination import CheckResult
from floodmark.model.access import Role
from floodmark.model.actions import Action, Scope
from floodmark.model.record import FoundRecord, Repair
from floodmark.model.version import Version


class VerificationPort(Protocol):
    """Looks records up with their stamps, repairs them, and looks for damage."""

    @Action(Role.READ, Scope.NAMESPACE, large=True, repeatable=True)
    def find_records(
        self, namespace: str, keys: list[bytes], at: Version | None, thin: bool
    ) -> list[FoundRecord | None]:
        """The newest records of some keys, in their order, dead or alive, now or as of a version.

        With `thin` they come without their values; digests stand for these.
        """
        ...

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True, unsaid=("repairs",), large=True)
    def repair_records(self, namespace: str, repairs: list[Repair]) -> list[bool]:
        """Store records, with the stamps that they carry, under keys that still hold what was seen.

        Returns which of them were stored.  Each is a new version of its key, and a change like others.
        """
        ...

    @Action(Role.ADMIN, Scope.SITE, repeatable=True, lengthy=True)
    def examine(self, quick: bool) -> list[CheckResult]:
        """Look for everything that is wrong with the site; unless `quick`, in every record."""
        ...
