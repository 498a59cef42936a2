"""The encoding of point calls over RESP, without I/O (`server/resp/calls.py` answers them)."""

from collections.abc import Sequence
from typing import Final

from floodmark.model.errors import FloodmarkError, NotAuthenticated, WireMismatch
from floodmark.wire.errors import decode_error
from floodmark.wire.messages import HELLO, WIRE_VERSION, Hello
from floodmark.wire.resp import PONG, ErrorReply, encode_call, encode_request

PING: Final = encode_request([b"PING"])

_NOT_KNOWN: Final = ("NOAUTH", "WRONGPASS")


def is_pong(reply: object) -> bool:
    """Whether a reply is the one to `PING`."""
    return reply == PONG.encode()


def encode_greeting(token: str | None) -> tuple[bytes, int]:
    """The first request of a client, and the number of replies to it."""
    hello = encode_call(HELLO.head, HELLO.encode_request(HELLO.request()))
    if token is None:
        return hello, 1
    return encode_request([b"AUTH", token.encode()]) + hello, 2


def require_greeting(replies: Sequence[object], expected: Hello) -> None:
    """Raise if the server is of another site or wire version, or does not know the token."""
    for reply in replies[:-1]:
        if isinstance(reply, ErrorReply):
            raise take_failure(reply)
    hello = HELLO.decode_reply(take_answer(replies[-1]))
    if (hello.site, hello.site_id) != (expected.site, expected.site_id):
        raise WireMismatch(f"site {hello.site!r} answers there, and not {expected.site!r}")
    if not hello.wire_version_min <= WIRE_VERSION <= hello.wire_version:
        raise WireMismatch(f"the server speaks version {hello.wire_version} of the wire")


def take_answer(reply: object) -> bytes:
    """The body of an answer; raises the error if the answer is one."""
    if type(reply) is bytes:
        return reply
    if isinstance(reply, list) and len(reply) == 1 and type(reply[0]) is bytes:
        error = decode_error(reply[0])
        if error is not None:
            raise error
    raise take_failure(reply)


def take_failure(reply: object) -> FloodmarkError:
    """The error for a reply of the RESP protocol itself."""
    if isinstance(reply, ErrorReply) and reply.startswith(_NOT_KNOWN):
        return NotAuthenticated(f"the server does not know this caller: {reply}")
    return WireMismatch(f"the server answers, but not as a Floodmark server does: {reply!r:.200}")
