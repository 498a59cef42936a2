"""Access control: a file of grants, read again while the server runs.

A caller shows a bearer token or a client certificate.  The file holds only the SHA-256 of each token; a plain
hash is enough for 256 random bits.  Two entries of one name let a token be rotated without a gap.  The file
is checked for changes at most once a second; if it is invalid, the last grants stay in force.
"""

import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Annotated, Final, Protocol, TypeAlias

import msgspec

from floodmark.clock import TimeSource, system_time_ms
from floodmark.model.access import Role
from floodmark.model.errors import InvalidConfiguration, NotAllowed, NotAuthenticated

CHECK_EVERY_MS: Final = 1_000
TOKEN_BYTES: Final = 32
NAME_CHARACTERS_MAX: Final = 128

_log = logging.getLogger("floodmark.server")

# Differs after every change of a file.  An editor that replaces the file changes the inode, one that writes
# into it the times or the size, and a change of rights the last time.
_State: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True)
class Caller:
    """An authenticated caller, and what it may do.

    >>> indexer = Caller("indexer", Role.READ, frozenset({"users"}))
    >>> indexer.may(Role.READ, "users"), indexer.may(Role.WRITE, "users"), indexer.may(Role.READ, "orders")
    (True, False, False)
    """

    name: str
    role: Role
    namespaces: frozenset[str] | None = None
    expires_at: datetime | None = None
    # Whether it is another node of the site.
    is_node: bool = False

    def may(self, role: Role, namespace: str | None) -> bool:
        """Whether the caller has `role` in a namespace; None stands for the whole site."""
        return self.role >= role and (self.namespaces is None or namespace in self.namespaces)

    def require(self, role: Role, namespace: str | None) -> None:
        """Raise NotAllowed unless the caller has `role` in a namespace; None stands for the whole site."""
        if not self.may(role, namespace):
            raise NotAllowed(
                f"{self.name!r} has role {self.role} {_say_where(self.namespaces)}, and this needs role "
                f"{role} {_say_where(None if namespace is None else {namespace})}; ask for a wider entry in "
                "the server's access file",
                caller=self.name,
                role=str(role),
                namespace=namespace,
            )

    def require_node(self) -> None:
        """Refuse a caller that is not a node of the site."""
        if not self.is_node:
            raise NotAllowed(
                f"{self.name!r} is not a node of this site, and nodes alone take the steps of transactions "
                "and repairs; commit or abort the transaction, or run `floodmark verify --repair`, instead",
                caller=self.name,
            )

    def is_expired(self, now_ms: int) -> bool:
        """Whether the grant has expired."""
        return self.expires_at is not None and self.expires_at <= datetime.fromtimestamp(now_ms / 1000, UTC)


class Access(Protocol):
    """Authenticates the caller of each request."""

    def authenticate(self, token: str | None, certificate: str | None) -> Caller:
        """The caller with this token or certificate name; NotAuthenticated if it is unknown."""
        ...


class OpenAccess:
    """Every caller may do everything.  Only for a server that no other user can reach."""

    _anonymous: Final = Caller("anonymous", Role.ADMIN)

    def authenticate(self, token: str | None, certificate: str | None) -> Caller:
        """The anonymous administrator, whatever the credentials."""
        return self._anonymous


OPEN_ACCESS: Final = OpenAccess()


class PeerAccess:
    """Authenticates the other nodes of a site by their token, and all other callers by another access."""

    def __init__(self, access: Access, token: str) -> None:
        self._access = access
        self._digest = _digest(token)

    def authenticate(self, token: str | None, certificate: str | None) -> Caller:
        """The caller with this token or certificate name."""
        if token is not None and hmac.compare_digest(_digest(token), self._digest):
            return PEER
        return self._access.authenticate(token, certificate)


class OneToken:
    """Authenticates a single caller, with the role `read`, by one token."""

    def __init__(self, name: str, token: str) -> None:
        self._caller = Caller(name, Role.READ)
        self._digest = _digest(token)

    def authenticate(self, token: str | None, certificate: str | None) -> Caller:
        """The caller; NotAuthenticated if the token is another."""
        if token is None or not hmac.compare_digest(_digest(token), self._digest):
            raise NotAuthenticated("this is not the token; open the link that was printed at the start")
        return self._caller


PEER: Final = Caller("node", Role.ADMIN, is_node=True)


class AccessFile:
    """The grants of a TOML file (`docs/operations/access.md`).  Safe to use from many threads."""

    def __init__(self, path: str | os.PathLike[str], time_source: TimeSource = system_time_ms) -> None:
        self.path = Path(path)
        # Why the present file is not in force; None if it is.
        self.error: str | None = None
        self._time_source = time_source
        self._refreshing = Lock()
        self._checked_at_ms = time_source()
        try:
            self._state: _State | None = _state_of(self.path)
            content = self.path.read_bytes()
        except OSError as error:
            raise InvalidConfiguration(
                f"cannot read the access file {self.path}: {error.strerror}; check the path and its rights",
                path=str(self.path),
            ) from error
        self._grants = _read_grants(self.path, content)

    def __repr__(self) -> str:
        return f"AccessFile({str(self.path)!r})"

    def authenticate(self, token: str | None, certificate: str | None) -> Caller:
        """The caller with this token or certificate name; NotAuthenticated if it is unknown.

        A wrong token is refused, also beside a valid certificate.
        """
        now_ms = self._time_source()
        self._refresh_if_due(now_ms)
        grants = self._grants
        if token is not None:
            caller, what = grants.by_token(token), "token"
        elif certificate is not None:
            caller, what = grants.by_certificate.get(certificate), f"client certificate {certificate!r}"
        else:
            raise NotAuthenticated(
                "this server wants to know who calls; connect with a token, or with a client certificate"
            )
        if caller is None:
            raise NotAuthenticated(
                f"the {what} is not in this server's access file; check that it is the right one, or ask "
                "for an entry"
            )
        if caller.is_expired(now_ms):
            raise NotAuthenticated(
                f"the {what} of {caller.name!r} expired at {caller.expires_at}; ask for a new entry in the "
                "server's access file",
                caller=caller.name,
            )
        return caller

    def _refresh_if_due(self, now_ms: int) -> None:
        # The distance in both directions, because a clock that was set back must not stop the checks.
        if abs(now_ms - self._checked_at_ms) < CHECK_EVERY_MS:
            return
        # A call that arrives while another thread reads the file uses the present grants.
        if self._refreshing.acquire(blocking=False):
            try:
                self._checked_at_ms = now_ms
                self._refresh()
            finally:
                self._refreshing.release()

    def _refresh(self) -> None:
        try:
            # Taken before the content: a change in between is then seen at the next check.
            state = _state_of(self.path)
            if state == self._state:
                return
            content = self.path.read_bytes()
        except OSError as error:
            # Forgotten, so that the file is read as soon as it can be, even if it is the same as before.
            self._state = None
            self._report(f"cannot read the access file {self.path}: {error.strerror}")
            return
        self._state = state
        try:
            self._grants = _read_grants(self.path, content)
        except InvalidConfiguration as error:
            self._report(str(error))
            return
        self.error = None
        _log.info("took in the changed access file %s with %d entries", self.path, len(self._grants))

    def _report(self, problem: str) -> None:
        if problem != self.error:
            _log.error("%s. The entries that were read before stay in force", problem)
        self.error = problem


def hash_token(token: str) -> str:
    """The hash of a token, as `token_sha256` in the access file has it.

    >>> hash_token("open sesame")
    '41ef4bb0b23661e66301aac36066912dac037827b4ae63a7b1165a5aa93ed4eb'
    """
    return _digest(token).hex()


def new_token() -> str:
    """A token that cannot be guessed."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def require_safe_listening(host: str, *, tls: bool, access: bool, insecure: bool) -> None:
    """Refuse to listen where other machines can connect, without encryption and access control."""
    if insecure or (tls and access) or is_loopback(host):
        return
    missing = " and ".join(["no TLS certificate"] * (not tls) + ["no access file"] * (not access))
    raise InvalidConfiguration(
        f"{host or 'an empty host'} can be reached from other machines, and there is {missing}; serve with "
        "--tls-certificate, --tls-key and --access, listen on 127.0.0.1, or say --insecure if a closed "
        "network protects the server",
        host=host,
    )


def require_safe_metrics(host: str, *, insecure: bool) -> None:
    """Refuse to show metrics, which nothing protects, to other machines."""
    if insecure or is_loopback(host):
        return
    raise InvalidConfiguration(
        f"{host or 'an empty host'} can be reached from other machines, and metrics have neither TLS nor "
        "tokens, though they name namespaces, feeds and sites; serve them on 127.0.0.1, for an agent or a "
        "proxy of this machine, or say --insecure-metrics if a closed network protects them",
        host=host,
    )


@dataclass(frozen=True)
class _Grants:
    by_digest: tuple[tuple[bytes, Caller], ...] = field(repr=False)
    by_certificate: Mapping[str, Caller]

    def __len__(self) -> int:
        return len(self.by_digest) + len(self.by_certificate)

    def by_token(self, token: str) -> Caller | None:
        """The caller with a token, or None.  Compares it with every entry, so that timing reveals nothing."""
        shown, found = _digest(token), None
        for digest, caller in self.by_digest:
            if hmac.compare_digest(digest, shown):
                found = caller
        return found


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    role: str
    token_sha256: str | None = None
    certificate: str | None = None
    namespaces: frozenset[str] | None = None
    expires_at: Annotated[datetime, msgspec.Meta(tz=True)] | None = None

    def digest(self) -> bytes | None:
        """The bytes of the hash.  Errors do not show the text: it may be a token, put there by mistake."""
        if self.token_sha256 is None:
            return None
        try:
            digest = bytes.fromhex(self.token_sha256)
        except ValueError:
            digest = b""
        if len(digest) != hashlib.sha256().digest_size:
            raise ValueError("token_sha256 must be the 64 hexadecimal digits that `floodmark token` prints")
        if digest == _digest(""):
            raise ValueError("token_sha256 is the hash of an empty token; make one with `floodmark token`")
        return digest

    def caller(self) -> Caller:
        """The rights of the entry; a ValueError names the field that is wrong."""
        if not self.name.strip() or not self.name.isprintable() or len(self.name) > NAME_CHARACTERS_MAX:
            raise ValueError(f"name must have 1 to {NAME_CHARACTERS_MAX} printable characters")
        if (self.token_sha256 is None) == (self.certificate is None):
            raise ValueError("give either token_sha256 or certificate, one of them and not both")
        if self.certificate is not None and not self.certificate.strip():
            raise ValueError("certificate must be the name in a client certificate, and is empty")
        if self.namespaces is not None and not all(self.namespaces or {""}):
            raise ValueError("namespaces must name one or more; leave it out to allow all")
        try:
            role = Role.parse(self.role)
        except ValueError:
            raise ValueError(f"role must be one of {', '.join(map(str, Role))}") from None
        return Caller(self.name, role, self.namespaces, self.expires_at)


def _read_grants(path: Path, content: bytes) -> _Grants:
    by_digest: dict[bytes, Caller] = {}
    by_certificate: dict[str, Caller] = {}
    for number, table in enumerate(_read_tables(path, content), start=1):
        try:
            entry = msgspec.convert(table, _Entry)
            caller, digest = entry.caller(), entry.digest()
            if digest in by_digest or entry.certificate in by_certificate:
                what = "certificate" if digest is None else "token_sha256"
                raise ValueError(f"{what} stands in an earlier entry already; each has one entry")
        except ValueError as error:
            name = table.get("name") if isinstance(table, dict) else None
            which = f"entry {number}" if name is None else f"entry {number} ({name!r})"
            raise _refuse(path, f"{which}: {error}") from error
        if digest is not None:
            by_digest[digest] = caller
        if entry.certificate is not None:
            by_certificate[entry.certificate] = caller
    return _Grants(tuple(by_digest.items()), by_certificate)


def _read_tables(path: Path, content: bytes) -> list[object]:
    try:
        document = msgspec.toml.decode(content, type=dict[str, object])
    except ValueError as error:
        raise _refuse(path, f"no TOML: {error}") from error
    unknown = sorted(document.keys() - {"access"})
    if unknown:
        raise _refuse(path, f"unknown key {unknown[0]!r}; every entry begins with [[access]]")
    tables = document.get("access", [])
    if not isinstance(tables, list) or not tables:
        # An editor that is about to write leaves an empty file for a moment.
        raise _refuse(path, "no [[access]] entry, so that no caller would be admitted")
    return tables


def _refuse(path: Path, problem: str) -> InvalidConfiguration:
    return InvalidConfiguration(f"the access file {path} cannot be used: {problem}", path=str(path))


def _digest(token: str) -> bytes:
    # A header may hold any bytes: one that is not text must be refused as unknown, not fail here.
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _state_of(path: Path) -> _State:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _say_where(namespaces: frozenset[str] | set[str] | None) -> str:
    if namespaces is None:
        return "on the whole site"
    return "in " + ", ".join(map(repr, sorted(namespaces)))


def is_loopback(host: str) -> bool:
    """Whether a host can be reached from this machine only.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "[::1]", "::ffff:127.0.0.1", "127.1")]
    [True, True, True, True, True]
    >>> [is_loopback(host) for host in ("0.0.0.0", "::", "", "192.0.2.1", "2001:db8::1")]
    [False, False, False, False, False]
    """
    name = host.removeprefix("[").removesuffix("]")
    try:
        # An empty host stands for every address of the machine, as `AI_PASSIVE` says.
        found = socket.getaddrinfo(name or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError) as error:
        raise InvalidConfiguration(
            f"the host {host!r} to listen on is not known ({error}); name an address of this machine",
            host=host,
        ) from error
    addresses = [ipaddress.ip_address(address[4][0]) for address in found]
    return all((getattr(each, "ipv4_mapped", None) or each).is_loopback for each in addresses)
