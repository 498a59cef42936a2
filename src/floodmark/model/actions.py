"""What an action of a server needs, declared beside it: the role, what the role must be held on, whether
the call is audited, and whether a client may repeat it.

The methods of a port carry their declaration as a decorator; requests of the data plane are made with one.
Client, server and documentation read the same declaration, and an action without one is not served:
`declared` raises TypeError.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias, TypeVar

from floodmark.model.access import Role

Arguments: TypeAlias = Mapping[str, Any]

# The owner of what the site itself has made, or an administrator of the whole site: other callers do not
# touch that, and these two touch everything.
SITE_OWNER: Final = ""

_ATTRIBUTE: Final = "__floodmark_action__"

Member = TypeVar("Member", bound=Callable[..., Any])


class Scope(StrEnum):
    """What the role must be held on.  A caller that is limited to some namespaces has no part in the site."""

    ANY = "any namespace"
    """For what tells nothing: the clock, making one's own writes durable, and lists, from which the
    namespaces of others are left out."""

    NAMESPACE = "the namespace"
    """Each namespace that the call is about; the whole site where it names none."""

    FEED = "the feed's namespace"
    SUBSCRIPTION = "the subscription's namespace"
    SITE = "the whole site"


class Owned(StrEnum):
    """What belongs to a caller that has made it, and is refused to others but administrators of the site."""

    TRANSACTION = "transaction"
    SAFE_POINT = "safe point"
    STREAM = "stream of epochs"
    LEASE = "lease of a feed or subscription"


@dataclass(frozen=True)
class Exempt:
    """Calls for which less than the declared role is enough: which, and in words for the documentation."""

    role: Role
    when: Callable[[Arguments], bool]
    words: str


def _argument_namespace(arguments: Arguments) -> Iterable[str | None]:
    return (arguments["namespace"],)


@dataclass(frozen=True)
class Action:
    """What a call needs; the decorator that declares it."""

    role: Role
    scope: Scope = Scope.ANY
    # Whether the audit log names the caller, and which arguments it leaves out: they hold values.
    audited: bool = False
    unsaid: tuple[str, ...] = ()
    # Whether a second call changes nothing that the first has not: a client repeats it when no answer came.
    repeatable: bool = False
    # Whether it may take minutes.
    lengthy: bool = False
    # Whether a server delays it while it is overloaded.
    delayed: bool = False
    # Whether any node of a site answers it, and not only the keeper.
    anywhere: bool = False
    # Whether a request may hold as much as a commit.
    large: bool = False
    # The namespaces that it is about, where the scope is the namespace; None stands for the whole site.
    namespaces: Callable[[Arguments], Iterable[str | None]] = _argument_namespace
    # Whether the feed or subscription may be gone: then there is nothing left to do, and that is no error.
    may_be_gone: bool = False
    # Which items of the result a caller sees: those of the namespaces that it has the role on.
    shown_by: Callable[[Any], str] | None = None
    exempt: Exempt | None = None
    # What it uses that has an owner.  The server passes the caller's mark where the method takes an `owner`.
    owned: Owned | None = None

    def __call__(self, member: Member) -> Member:
        """Declare this of a method of a port, or of a class of requests."""
        setattr(member, _ATTRIBUTE, self)
        return member


def declared(member: Callable[..., Any]) -> Action:
    """The declaration of a method or a class of requests.

    >>> @Action(Role.WRITE, Scope.SITE)
    ... def flush() -> None: ...
    >>> declared(flush).role, declared(flush).audited
    (<Role.WRITE: 2>, False)
    """
    found = getattr(member, _ATTRIBUTE, None)
    if not isinstance(found, Action):
        raise TypeError(f"{member.__qualname__} declares no role; decorate it with @Action")
    return found
