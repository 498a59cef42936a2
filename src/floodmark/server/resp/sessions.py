"""Commands about the connection, the server and its clients, and transactions."""

import platform
from importlib.metadata import version as installed_version
from typing import Any, Final

from floodmark.model.access import Role
from floodmark.model.errors import InvalidArgument, NotAuthenticated
from floodmark.model.limits import RESP_CONNECTIONS_MAX, VALUE_BYTES_MAX
from floodmark.model.stream import OnGeneration
from floodmark.server.logs import auditing_administration
from floodmark.server.resp.session import QueuedCommands, Session
from floodmark.server.resp.table import (
    SYNTAX,
    TABLE,
    Arguments,
    Command,
    CommandError,
    Kind,
    integer,
    text,
    word,
)
from floodmark.wire.resp import OK, PONG, RESP2, RESP3, Simple

# The version by which clients decide which commands the server has.
REDIS_VERSION: Final = "7.0.0"
NAME_BYTES_MAX: Final = 256

# Who and what


@TABLE.session("HELLO", -1, "differs: proto, server, role and version are told as by Redis", is_open=True)
def hello(session: Session, arguments: Arguments) -> object:
    options = list(arguments[1:])
    protocol = session.protocol
    if options:
        protocol = integer(options.pop(0), "ERR Protocol version is not an integer or out of range")
        if protocol not in (RESP2, RESP3):
            raise CommandError("NOPROTO unsupported protocol version")
    name: bytes | None = None
    while options:
        option = word(options.pop(0))
        if option == b"AUTH" and len(options) >= 2:
            _authenticate(session, options[0], options[1])
            del options[:2]
        elif option == b"SETNAME" and options:
            name = _checked_name(options.pop(0))
        else:
            raise CommandError(f"ERR Syntax error in HELLO option '{option[:64].decode(errors='replace')}'")
    if session.caller is None:
        raise CommandError(
            "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> "
            "AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol "
            "version at the same time"
        )
    session.protocol = protocol
    if name is not None:
        session.name = name
    return {
        b"server": b"redis",
        b"version": REDIS_VERSION,
        b"floodmark": installed_version("floodmark"),
        b"proto": protocol,
        b"id": session.id,
        b"mode": b"standalone",
        b"role": b"master",
        b"modules": [],
    }


@TABLE.session(
    "AUTH",
    -2,
    "differs: `AUTH token` or `AUTH user token`; the user is the name in the access file",
    is_open=True,
)
def authenticate(session: Session, arguments: Arguments) -> object:
    if len(arguments) > 3:
        raise CommandError(SYNTAX)
    _authenticate(session, arguments[1] if len(arguments) == 3 else b"default", arguments[-1])
    return OK


def _authenticate(session: Session, user: bytes, token: bytes) -> None:
    before = session.caller
    try:
        session.authenticate(token.decode(errors="surrogateescape"))
        assert session.caller is not None
        # Without an access file every client is the same anonymous caller, whatever it shows.
        if user not in (b"default", b"") and session.caller.name not in (
            user.decode(errors="replace"),
            "anonymous",
        ):
            session.revoke(before)
            raise NotAuthenticated("the token is not that of the user")
    except NotAuthenticated as error:
        session.door.refused.note(session.address, "resp.auth", error)
        raise CommandError(
            f"WRONGPASS invalid username-password pair or user is disabled. ({error})"
        ) from None


@TABLE.session("PING", -1, is_queued=True)
def ping(session: Session, arguments: Arguments) -> object:
    if len(arguments) > 2:
        raise CommandError("ERR wrong number of arguments for 'ping' command")
    return arguments[1] if len(arguments) == 2 else PONG


@TABLE.session("ECHO", 2, is_queued=True)
def echo(session: Session, arguments: Arguments) -> object:
    return arguments[1]


@TABLE.session(
    "SELECT",
    2,
    "differs: selects a namespace by its name, in no transaction; 0 is the default one (--resp-namespace)",
)
def select(session: Session, arguments: Arguments) -> object:
    session.select(text(arguments[1], "the name of a namespace"))
    return OK


@TABLE.session("QUIT", -1, is_open=True, is_quick=True)
def leave(session: Session, arguments: Arguments) -> object:
    session.is_leaving = True
    return OK


@TABLE.session("RESET", 1, is_open=True, is_quick=True)
def reset(session: Session, arguments: Arguments) -> object:
    session.reset()
    return Simple("RESET")


# Clients


def _checked_name(name: bytes) -> bytes:
    if len(name) > NAME_BYTES_MAX or any(not 33 <= byte <= 126 for byte in name):
        raise CommandError("ERR Client names cannot contain spaces, newlines or special characters.")
    return name


@TABLE.session(
    "CLIENT",
    -2,
    "differs: ID, INFO, LIST, SETNAME, GETNAME, SETINFO, KILL, NO-EVICT, NO-TOUCH; others are refused",
)
def client(session: Session, arguments: Arguments) -> object:
    subcommand, rest = word(arguments[1]), arguments[2:]
    match subcommand, len(rest):
        case b"ID", 0:
            return session.id
        case b"INFO", 0:
            return session.describe() + "\n"
        case b"GETNAME", 0:
            return session.name or None
        case b"SETNAME", 1:
            session.name = _checked_name(rest[0])
            return OK
        case b"SETINFO", 2 if word(rest[0]) in (b"LIB-NAME", b"LIB-VER"):
            session.library[word(rest[0]) == b"LIB-VER"] = _checked_name(rest[1])
            return OK
        case ((b"NO-EVICT" | b"NO-TOUCH"), 1):
            return OK
        case b"LIST", _:
            return "".join(f"{each.describe()}\n" for each in _visible(session))
        case b"KILL", _ if rest:
            return _kill(session, rest)
    raise CommandError(
        f"ERR unknown subcommand '{subcommand[:64].decode(errors='replace')}' or wrong number of arguments. "
        "docs/resp.md lists what CLIENT can do here"
    )


def _visible(session: Session) -> list[Session]:
    """The sessions that a caller may see and end: all as an administrator of the site, else its own."""
    assert session.caller is not None
    everything = session.door.sessions()
    if session.caller.may(Role.ADMIN, None):
        return [*everything]
    return [
        each for each in everything if each.caller is not None and each.caller.name == session.caller.name
    ]


def _kill(session: Session, rest: Arguments) -> object:
    assert session.caller is not None
    wanted: dict[bytes, str] = {}
    if len(rest) == 1:
        wanted[b"ADDR"] = rest[0].decode(errors="replace")
    elif len(rest) % 2 == 0:
        wanted = {
            word(name): value.decode(errors="replace")
            for name, value in zip(rest[::2], rest[1::2], strict=True)
        }
    skips = wanted.pop(b"SKIPME", "yes").lower() == "yes" and len(rest) > 1
    if not wanted or not wanted.keys() <= {b"ID", b"ADDR", b"USER"}:
        raise CommandError(SYNTAX)
    found = [
        each
        for each in _visible(session)
        if wanted.get(b"ID", str(each.id)) == str(each.id)
        and wanted.get(b"ADDR", each.address) == each.address
        and wanted.get(b"USER", each.caller.name if each.caller else "")
        == (each.caller.name if each.caller else "")
        and not (skips and each is session)
    ]
    said = {name.decode().lower(): value for name, value in wanted.items()}
    with auditing_administration(session.caller, "resp.client_kill", said):
        for each in found:
            session.door.end(each)
        if not found and len(rest) == 1:
            raise InvalidArgument("No such client")
    return OK if len(rest) == 1 else len(found)


# The server


@TABLE.session("TIME", 1, is_queued=True)
def time(session: Session, arguments: Arguments) -> object:
    now_ms = session.door.spaces.host.physical_ms()
    return [str(now_ms // 1000), str(now_ms % 1000 * 1000)]


@TABLE.session("COMMAND", -1, "differs: COUNT, LIST, INFO and DOCS; flags and documentation are short")
def command(session: Session, arguments: Arguments) -> object:
    subcommand = word(arguments[1]) if len(arguments) > 1 else b""
    match subcommand:
        case b"" | b"INFO":
            names = arguments[2:] or [each.name.encode() for each in TABLE]
            return [None if (found := TABLE.find(name)) is None else _show_command(found) for name in names]
        case b"COUNT":
            return len([*TABLE])
        case b"LIST":
            return [each.name.lower() for each in TABLE]
        case b"DOCS":
            wanted = [found for name in arguments[2:] if (found := TABLE.find(name))] or [*TABLE]
            return {each.name.lower(): {"summary": each.verdict, "group": str(each.kind)} for each in wanted}
    raise CommandError(
        f"ERR unknown subcommand '{subcommand[:64].decode(errors='replace')}'. Try COMMAND LIST"
    )


def _show_command(found: Command) -> list[Any]:
    flags = [Simple("write" if found.kind is Kind.WRITE else "readonly")]
    return [found.name.lower(), found.arity, flags, *found.keys, [], [], [], []]


_CONFIG: Final = {
    "appendonly": "yes",
    "appendfsync": "always",
    "databases": "1",
    "maxclients": str(RESP_CONNECTIONS_MAX),
    "maxmemory": "0",
    "proto-max-bulk-len": str(VALUE_BYTES_MAX),
    "save": "",
    "timeout": "0",
}


@TABLE.session("CONFIG", -2, "differs: `CONFIG GET` of a fixed few; nothing can be set")
def config(session: Session, arguments: Arguments) -> object:
    if word(arguments[1]) != b"GET" or len(arguments) < 3:
        raise CommandError("ERR only CONFIG GET is here; a server is configured by floodmark serve")
    patterns = [pattern.decode(errors="replace").lower() for pattern in arguments[2:]]
    return {
        name: value
        for name, value in _CONFIG.items()
        if any(
            pattern in ("*", name) or (pattern.endswith("*") and name.startswith(pattern[:-1]))
            for pattern in patterns
        )
    }


@TABLE.session("INFO", -1, "differs: sections server, clients, stats and keyspace, with what a site knows")
def info(session: Session, arguments: Arguments) -> object:
    door = session.door
    host = door.spaces.host
    sections: dict[str, dict[str, object]] = {
        "server": {
            "redis_version": REDIS_VERSION,
            "floodmark_version": installed_version("floodmark"),
            "redis_mode": "standalone",
            "os": platform.platform(),
            "tcp_port": door.port,
            "site": host.identity.site,
            "site_id": host.identity.site_id,
        },
        "clients": {"connected_clients": len(door.sessions()), "maxclients": RESP_CONNECTIONS_MAX},
        "persistence": {"loading": 0, "aof_enabled": 1},
        "stats": {
            "total_commits_processed": host.node.committer.counting.commits,
            "total_rounds_processed": host.node.committer.counting.rounds,
        },
        "replication": {"role": "master", "connected_slaves": 0},
    }
    wanted = {argument.decode(errors="replace").lower() for argument in arguments[1:]}
    everything = not wanted or wanted & {"all", "default", "everything"}
    lines: list[str] = []
    for name, fields in sections.items():
        if everything or name in wanted:
            lines += [f"# {name.capitalize()}", *(f"{field}:{value}" for field, value in fields.items()), ""]
    return "\r\n".join(lines)


# Transactions


@TABLE.session("MULTI", 1, is_quick=True)
def begin(session: Session, arguments: Arguments) -> object:
    if session.queued is not None:
        raise CommandError("ERR MULTI calls can not be nested")
    session.queued = []
    session.is_spoiled = False
    return OK


@TABLE.session("DISCARD", 1, is_quick=True)
def discard(session: Session, arguments: Arguments) -> object:
    if session.queued is None:
        raise CommandError("ERR DISCARD without MULTI")
    session.discard()
    return OK


@TABLE.session(
    "EXEC",
    1,
    "same as Redis; all writes are one commit in each partition, in one atomic write",
    is_quick=True,
)
def execute(session: Session, arguments: Arguments) -> object:
    if session.queued is None:
        raise CommandError("ERR EXEC without MULTI")
    queued, watched, is_spoiled = session.queued, session.watched, session.is_spoiled
    session.discard()
    if is_spoiled:
        raise CommandError("EXECABORT Transaction discarded because of previous errors.")
    records = session.records
    assert records is not None
    # A key that cannot be looked up is an error of its command, and of no other.
    on = {*watched}
    for each, request in queued:
        try:
            on |= {records.locate(key, Role.READ).qualified for key in each.keys_of(request)}
        except Exception:
            continue

    return QueuedCommands(sorted(on), queued, watched, session)


@TABLE.slow("WATCH", -2, is_quick=True, keys=(1, -1, 1))
def watch(session: Session, arguments: Arguments) -> object:
    if session.queued is not None:
        raise CommandError("ERR WATCH inside MULTI is not allowed")
    records = session.records
    assert records is not None
    for key in arguments[1:]:
        qualified = records.locate(key, Role.READ).qualified
        session.watched.setdefault(qualified, records.watch(qualified))
    return OK


@TABLE.session("UNWATCH", 1, is_queued=True)
def unwatch(session: Session, arguments: Arguments) -> object:
    session.watched = {}
    return OK


# Floodmark's own commands


@TABLE.session("FM.VERSION", 1, "ours: the version of the last write of this connection; 0 before the first")
def version(session: Session, arguments: Arguments) -> object:
    return session.version


@TABLE.session(
    "FM.DURABILITY",
    2,
    "ours: `FM.DURABILITY fsync|async`, whether this connection's writes wait for the disk",
)
def durability(session: Session, arguments: Arguments) -> object:
    match word(arguments[1]):
        case b"FSYNC":
            session.durable = True
        case b"ASYNC":
            session.durable = False
        case _:
            raise CommandError("ERR durability is fsync or async")
    return OK


@TABLE.session(
    "FM.GENERATION",
    2,
    "ours: `FM.GENERATION fail|difference|snapshot`, how this connection's XREAD and XRANGE, and the groups "
    "that it makes or revives, go on where a data set was published; `fail` if not given",
)
def choose_generation(session: Session, arguments: Arguments) -> object:
    try:
        session.chosen = OnGeneration(arguments[1].decode(errors="replace").lower())
    except ValueError:
        raise CommandError(f"ERR FM.GENERATION takes one of {', '.join(OnGeneration)}") from None
    return OK


TABLE.refuse(("KEYS", "RANDOMKEY"), "it would read all keys at once; use SCAN")
TABLE.refuse(("FLUSHDB", "FLUSHALL", "SWAPDB"), "drop the namespace with `floodmark namespace drop`")
TABLE.refuse(
    ("RENAME", "RENAMENX", "COPY", "MOVE"),
    "a key keeps its history; write the new key and delete the old one",
)
TABLE.refuse(
    ("LPUSH", "RPUSH", "LPOP", "RPOP", "LRANGE", "LLEN", "SADD", "SREM", "SMEMBERS", "ZADD", "ZRANGE", "ZREM",
     "PFADD", "SETBIT", "GEOADD"),
    "lists, sets and sketches are not here; use values, counters or fields",
)  # fmt: skip
TABLE.refuse(
    ("SUBSCRIBE", "PSUBSCRIBE", "PUBLISH"), "read the changes of a namespace with XREAD or XREADGROUP"
)
TABLE.refuse(("EVAL", "EVALSHA", "FCALL", "SCRIPT", "FUNCTION"), "no scripts run here; use MULTI with WATCH")
TABLE.refuse(("XADD", "XDEL", "XTRIM"), "a stream is the change feed of a namespace; write to its keys")
TABLE.refuse(("SAVE", "BGSAVE", "BGREWRITEAOF", "SHUTDOWN", "DEBUG", "REPLICAOF",
     "ACL", "CLUSTER"),
    "the server is administered with floodmark")  # fmt: skip
