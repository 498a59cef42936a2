"""Rounds of RESP writes that fail as a whole: no write is acknowledged."""

from asyncio import new_event_loop
from contextlib import closing
from types import SimpleNamespace
from typing import Any

from tests.cluster import KEY, Cluster

from floodmark.codec.values import encode_value
from floodmark.partition.membership import retire
from floodmark.server.resp.calls import CallFailure, PutJob
from floodmark.server.resp.committing import RoundLeader, WriteJob
from floodmark.wire.messages import PUT
from floodmark.wire.resp import OK, ErrorReply


def test_no_put_at_a_node_that_was_fenced_is_acknowledged() -> None:
    shared = Cluster().nodes[0]
    retire(shared.node, shared.engine.fenced())
    connection: Any = SimpleNamespace(session=SimpleNamespace(durable=True))
    called = PutJob(connection, PUT.request(1, [KEY], [encode_value(b"1")], durable=True), 0.0)
    plain = WriteJob(connection, "SET", lambda *_: OK, (), 0.0)
    plain.key, plain.value, plain.reply = KEY, encode_value(b"1"), OK
    with (
        closing(new_event_loop()) as loop,
        closing(RoundLeader(lambda: shared.node, loop, lambda *_: None)) as committing,
    ):
        committing._commit([called, plain])
    assert isinstance(called.outcome(), CallFailure)
    assert isinstance(plain.outcome(), ErrorReply)
