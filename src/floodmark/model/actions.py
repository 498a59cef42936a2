"""The declarations of a server's actions: the role that a call needs, the scope in which the caller must have
it, whether the call is audited, and whether a client may repeat it.

The declaration decorates the method of a port, or the class of a request.  Client, server and documentation
read the same declaration, and an action without one is not served: `declared` raises TypeError.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias, TypeVar

from floodmark.model.access import Role

Arguments: TypeAlias = Mapping[str, Any]

# The owner of objects that the site itself has made; also stands for an administrator of the whole site.
# Both may use every object; other callers may use only their own.
SITE_OWNER: Final = ""

_ATTRIBUTE: Final = "__floodmark_action__"

Member = TypeVar("Member", bound=Callable[..., Any])


class Scope(StrEnum):
    """The scope in which a caller must have the role.  A caller limited to some namespaces lacks the site."""

    ANY = "any namespace"
    """For what tells nothing: the clock, making one's own writes durable, and lists, from which the
    namespaces of others are left out."""

    NAMESPACE = "the namespace"
    """Each namespace that the call is about; the whole site where it names none."""

    FEED = "the feed's namespace"
    SUBSCRIPTION = "the subscription's namespace"
    SITE = "the whole site"


class Owned(StrEnum):
    """Objects of the caller that has made them; of others, only administrators of the site may use them."""

    TRANSACTION = "transaction"
    SAFE_POINT = "safe point"
    STREAM = "stream of epochs"
    LEASE = "lease of a feed or subscription"


@dataclass(frozen=True)
class Exempt:
    """The calls for which a lower role than the declared one is enough; `words` are for the documentation."""

    role: Role
    when: Callable[[Arguments], bool]
    words: str


def _argument_namespace(arguments: Arguments) -> Iterable[str | None]:
    return (arguments["namespace"],)


@dataclass(frozen=True)
class Action:
    """The declaration of a call, and the decorator that attaches it."""

    role: Role
    scope: Scope = Scope.ANY
    # Whether the call is in the audit log, and which arguments are left out there, because they hold values.
    audited: bool = False
    unsaid: tuple[str, ...] = ()
    # Whether a second call has no further effect: a client repeats it if it gets no answer.
    repeatable: bool = False
    # Whether it may take minutes.
    lengthy: bool = False
    # Whether a server delays it while it is overloaded.
    delayed: bool = False
    # Whether any node of a site answers it, and not only the keeper.
    anywhere: bool = False
    # Whether a request may be as large as a commit.
    large: bool = False
    # With the scope NAMESPACE: the namespaces that a call concerns; None stands for the whole site.
    namespaces: Callable[[Arguments], Iterable[str | None]] = _argument_namespace
    # Whether the feed or subscription may be missing: then the call has nothing to do, and is no error.
    may_be_gone: bool = False
    # The namespace of an item of the result: a caller sees those of namespaces that it has the role on.
    shown_by: Callable[[Any], str] | None = None
    exempt: Exempt | None = None
    # The kind of owned object that it uses.  The server passes the caller's mark as the argument `owner`.
    owned: Owned | None = None

    def __call__(self, member: Member) -> Member:
        """Attach this declaration to a method of a port, or to a class of requests."""
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
