"""Owners of transactions, safe points, streams of epochs, and leases of feeds and subscriptions.

Only the owner, or an administrator of the site, commits or aborts a transaction or acknowledges in it, moves
or releases a safe point, opens an epoch, renews a lease.  The id of a transaction is no secret:
subscriptions, errors and logs show it.  So it ends with the *mark* of the caller that began it, derived from
the name in the access file, and the server refuses other callers.  The mark is in the coordinator's log from
the first record on, and survives a rotated token.  Transactions of an embedded process have a mark that no
caller has.

An id without a mark comes from a release without owners, and every caller may end it.  None is left once the
longest timeout has passed since the upgrade.
"""

import hashlib
import re
from typing import Final

from floodmark.model.access import Role
from floodmark.model.actions import SITE_OWNER
from floodmark.model.errors import NotAllowed
from floodmark.server.access import Caller

MARK_DIGITS: Final = 16

_MARKED: Final = re.compile(rf".*-[0-9a-f]{{{MARK_DIGITS}}}", re.DOTALL)


def mark_of(caller: Caller) -> str:
    """The mark with which the ids of a caller's transactions end.

    >>> mark_of(Caller("indexer", Role.WRITE))
    '70fa78e5ae555639'
    """
    return hashlib.sha256(caller.name.encode()).hexdigest()[:MARK_DIGITS]


def owner_of(caller: Caller) -> str:
    """The owner of a caller's safe points, streams and leases: its mark; SITE_OWNER for an administrator."""
    return SITE_OWNER if caller.may(Role.ADMIN, None) else mark_of(caller)


def require_owner(caller: Caller, transaction: str) -> None:
    """Refuse a caller who neither began a transaction nor administers the site.

    >>> require_owner(Caller("indexer", Role.WRITE), "0-470491275818434560-5f2b9c7de014-70fa78e5ae555639")
    """
    is_marked = _MARKED.fullmatch(transaction) is not None
    is_owner = not is_marked or transaction.endswith(f"-{mark_of(caller)}")
    if not (is_owner or caller.may(Role.ADMIN, None)):
        raise NotAllowed(
            f"transaction {transaction!r:.100} was not begun by {caller.name!r}; only the caller that "
            "began it and administrators of the whole site may commit it, abort it or acknowledge in it",
            caller=caller.name,
            transaction=transaction[:100],
        )
