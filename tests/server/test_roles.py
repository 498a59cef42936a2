"""Role by role and namespace by namespace: every request, by every caller."""

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.server.support import connected, connection_of, qualify, serving, stored, token_of, write_roles
from tests.waiting import HANG_SECONDS

from floodmark.codec.values import encode_value
from floodmark.feed.named.feeds import FeedSpec, FeedUpdate
from floodmark.feed.subscription.acknowledgement import Acknowledgement, Progress
from floodmark.feed.subscription.subscriptions import SubscriptionSpec
from floodmark.host.catalog import NamespaceSettings
from floodmark.host.comparisons import ComparisonNote
from floodmark.host.ports import PORTS, Balance, NamespaceUpdate, PeerCommands, Port
from floodmark.host.transaction_port import BatchUpdate, LogKind, NamespaceWrites
from floodmark.merge.counter import add_to_counter
from floodmark.model.access import Role
from floodmark.model.actions import Action, Scope
from floodmark.model.batch import mint_batch
from floodmark.model.change import Stamp
from floodmark.model.errors import FeedNotFound, FloodmarkError, NotAllowed, SubscriptionNotFound
from floodmark.model.partition import (
    ApplyStream,
    GenerationStream,
    LoadStream,
    PutStream,
    ReadSet,
    StreamCommand,
)
from floodmark.model.ranges import KeyRange
from floodmark.model.record import Repair
from floodmark.model.stream import ChangesRequest
from floodmark.replication.applied import Applied
from floodmark.replication.step import LinkStep, NamespaceStep
from floodmark.replication.topology import Topology
from floodmark.server import Server, ServerOptions
from floodmark.server.data import DataPlane
from floodmark.server.guard import AccessGuard
from floodmark.server.leases import Leases
from floodmark.site import Site
from floodmark.wire.messages import HOLD, RELEASE, port_methods

Use = Callable[[Site], object]

MINE, OTHER = "mine", "other"
KEY = b"key"
COPIED = encode_value(b"x", origin=Stamp(1, 9))


def _key(namespace: str) -> bytes:
    return {MINE: b"\x00\x00\x01", OTHER: b"\x00\x00\x02"}[namespace] + KEY


def _partition(site: Site) -> Any:
    return site.host.router.maps.map.partitions[0]


def _stream(command: StreamCommand, value: bytes) -> Callable[[Site, str], object]:
    def send(site: Site, namespace: str) -> object:
        with closing(site.host.write_stream(command)) as stream:
            return stream.send({_key(namespace): value}).result(HANG_SECONDS)

    return send


def _changes(site: Site, namespace: str | None) -> object:
    if namespace is None:
        return list(site.host.changes(ChangesRequest()))
    prefix = _key(namespace)[:3]
    request = ChangesRequest(keys=KeyRange(prefix, prefix + b"\xff"), namespace=prefix[2])
    return list(site.host.changes(request))


def _scan(site: Site, namespace: str) -> object:
    prefix = _key(namespace)[:3]
    at = site.host.versions.read_version()
    return list(_partition(site).scan(KeyRange(prefix, prefix + b"\xff"), at))


def _feed(namespace: str, name: str) -> FeedSpec:
    return FeedSpec(name=name, namespace=namespace, sink="blackhole:")


def _step(*namespaces: str) -> LinkStep:
    parts = tuple(
        NamespaceStep(name=name, source_id=1, target_id=_key(name)[2], since=0, until=0)
        for name in namespaces
    )
    return LinkStep(source="rome", source_id=9, namespaces=parts)


TOPOLOGY = Topology(epoch=1, sites={})


def _subscription(namespace: str) -> SubscriptionSpec:
    return SubscriptionSpec(name=namespace, namespace=namespace)


# For each request: the least role, and how to make it about a namespace.
DATA: dict[str, tuple[Role, Callable[[Site, str], object]]] = {
    "get": (Role.READ, lambda site, name: _partition(site).get(_key(name))),
    "get_fresh": (Role.READ, lambda site, name: _partition(site).get_fresh(_key(name))),
    "find": (Role.READ, lambda site, name: _partition(site).find(_key(name))),
    "get_many": (Role.READ, lambda site, name: _partition(site).get_many([_key(name)])),
    "read_batches": (Role.READ, lambda site, name: _partition(site).read_batches([_key(MINE)], [_key(name)])),
    "scan": (Role.READ, _scan),
    "changes": (Role.READ, _changes),
    "hold": (
        Role.READ,
        lambda site, name: connection_of(site).call(HOLD, site.now(), _key(name)[2]),
    ),
    "put": (
        Role.WRITE,
        lambda site, name: _partition(site).put([_key(name)], [stored(b"x")], durable=True),
    ),
    "write": (
        Role.WRITE,
        lambda site, name: _partition(site).write(
            [_key(name)], [add_to_counter(1)], durable=True, batch=True
        ),
    ),
    "merge": (
        Role.WRITE,
        lambda site, name: _partition(site).merge([_key(name)], [add_to_counter(1)], durable=True),
    ),
    "apply": (
        Role.REPLICATE,
        lambda site, name: _partition(site).apply([_key(name)], [COPIED], durable=True),
    ),
    "load": (
        Role.ADMIN,
        lambda site, name: _partition(site).load([_key(name)], [COPIED], durable=True),
    ),
    "apply_stream": (Role.REPLICATE, _stream(ApplyStream(True), COPIED)),
    "load_stream": (Role.ADMIN, _stream(LoadStream(True), COPIED)),
    "generation_stream": (
        Role.REPLICATE,
        lambda site, name: _stream(GenerationStream(_key(name)[2], 1), COPIED)(site, name),
    ),
    "compare_and_set": (
        Role.WRITE,
        lambda site, name: _partition(site).compare_and_set(_key(name), b"?", stored(b"x"), durable=True),
    ),
    "delete_unchanged": (
        Role.WRITE,
        lambda site, name: _partition(site).delete_unchanged([_key(name)], 1, durable=True),
    ),
    "put_unchanged": (
        Role.WRITE,
        lambda site, name: _partition(site).put_unchanged([_key(name)], [stored(b"x")], 1, durable=True),
    ),
    "ask_prepared": (
        Role.WRITE,
        lambda site, name: _partition(site).ask_prepared(mint_batch(1), _key(name)),
    ),
    "write_stream": (Role.WRITE, _stream(PutStream(True), stored(b"x"))),
}

# Requests for nodes of the site alone.
STEPS: dict[str, Callable[[Site], object]] = {
    "prepare": lambda site: _partition(site).prepare("0-7", [_key(MINE)], [stored(b"x")]),
    "prepare_batch": lambda site: _partition(site).prepare(
        mint_batch(1), [_key(MINE)], [stored(b"x")], [_key(MINE)], [_key(MINE)]
    ),
    "commit_prepared": lambda site: _partition(site).commit_prepared("0-7", 1),
    "abort_prepared": lambda site: _partition(site).abort_prepared("0-7"),
    "validate": lambda site: _partition(site).validate("0-1", ReadSet(1, [_key(MINE)]), 2),
    "ended_prepared": lambda site: _partition(site).ended_prepared([mint_batch(1)], [_key(MINE)]),
    "reserve": lambda site: _partition(site).reserve("0-1", KeyRange(_key(MINE), _key(MINE) + b"z")),
    "settle": lambda site: _partition(site).settle([_key(MINE)], 1),
    "repair": lambda site: _partition(site).repair([_key(MINE)], [COPIED], [0]),
}

# Requests that tell nothing, and are for everyone who has a role at all.
OPEN = {
    "hello": lambda site: connection_of(site).hello(),
    "map": lambda site: site.host.router.maps.refresh(),
    "resolved": lambda site: _partition(site).resolved_version(),
    "release": lambda site: connection_of(site).call(RELEASE, 1),
}

# The arguments of every call, about a namespace where it is about one.
ARGUMENTS: dict[str, Callable[[str], tuple[object, ...]]] = {
    "administration.create_namespace": lambda name: (name, NamespaceSettings()),
    "administration.find_namespace": lambda name: (name,),
    "administration.update_namespace": lambda name: (name, NamespaceUpdate()),
    "administration.drop_namespace": lambda name: (name,),
    "administration.begin_generation": lambda name: (name, 0, "publisher"),
    "administration.rewind_generation": lambda name: (name, 1),
    "administration.count_generation": lambda name: (name, 1),
    "administration.swap_generation": lambda name: (name, 1, 1),
    "administration.rollback_generation": lambda name: (name, None, "publisher", 1),
    "administration.drop_generation": lambda name: (name, 1),
    "administration.observe": lambda _: (1,),
    "administration.pass_version": lambda _: (1,),
    "administration.split": lambda name: (name, KEY),
    "peers.pass_peer_version": lambda _: (1,),
    "administration.merge": lambda _: (1, 2),
    "administration.split_by_load": lambda _: (1,),
    "administration.move": lambda _: (1, 2),
    "administration.rebalance": lambda _: (Balance.LOAD,),
    "administration.drain": lambda _: (1,),
    "administration.remove_node": lambda _: (1,),
    "peers.fate": lambda _: ("1",),
    "peers.run_commands": lambda name: (
        PeerCommands(
            requests=[[b"DEL", KEY]],
            watched=None,
            on=[_key(name)],
            space=name,
            by_prefix=False,
            caller="admin",
            role=Role.ADMIN,
            namespaces=None,
            durable=True,
            protocol=2,
        ),
    ),
    "peers.split_peer": lambda _: (KEY,),
    "peers.merge_peer": lambda _: (1, 2),
    "peers.move_peer": lambda _: (1, 2),
    "administration.open_epoch": lambda name: (name, "stream", 0),
    "administration.cut_changes": lambda name: (name, 0, None, None, False),
    "administration.hold_safe_point": lambda name: ("point", 1, timedelta(1), name),
    "administration.release_safe_point": lambda _: ("point",),
    "administration.oldest_version": lambda name: (name,),
    "administration.set_topology": lambda _: (TOPOLOGY,),
    "administration.rewritable_version": lambda name: (name,),
    "administration.shared_since": lambda name: (name, 0),
    "administration.declare_loaded": lambda name: (name,),
    "administration.adopt_watermark": lambda name: (name, {}, 0),
    "administration.finish_rejoining": lambda _: (),
    "administration.note_rewritten": lambda name: (name, 1),
    "administration.advance_link": lambda name: (_step(name), Applied()),
    "administration.link_positions": lambda name: (9, [name]),
    "administration.cut_link": lambda name: ({name: 0}, None),
    "administration.stall_link": lambda name: (9, [name], "reason"),
    "administration.watermark": lambda name: (name, None),
    "administration.covers": lambda name: (name, Stamp(1, 1), None),
    "administration.find_records": lambda name: (name, [KEY], 1, True),
    "administration.repair_records": lambda name: (name, [Repair(KEY, 1, COPIED)]),
    "administration.note_comparison": lambda _: (ComparisonNote(sites=[]),),
    "administration.examine": lambda _: (True,),
    # A feed and a subscription have the name of the namespace that they read.
    "feeds.create": lambda name: (_feed(name, "another"),),
    "feeds.find": lambda name: (name,),
    "feeds.pause": lambda name: (name,),
    "feeds.resume": lambda name: (name, None),
    "feeds.update": lambda name: (name, FeedUpdate()),
    "feeds.remove": lambda name: (name,),
    "feeds.rebalance": lambda name: (name,),
    "feeds.statistics": lambda name: (name,),
    "feeds.acquire": lambda name: (name, "holder", 10.0),
    "feeds.report": lambda name: (name, "holder", [], None),
    "feeds.release": lambda name: (name, "holder"),
    "subscriptions.open": lambda name: (_subscription(name), 0, "holder", 10.0),
    "subscriptions.acknowledge": lambda name: (name, 1, Progress(through=1)),
    "subscriptions.release": lambda name: (name, 1),
    "subscriptions.seek": lambda name: (name, 1, None),
    "subscriptions.find": lambda name: (name,),
    "subscriptions.pending": lambda name: (name,),
    "subscriptions.remove": lambda name: (name,),
    "subscriptions.statistics": lambda name: (name,),
    "transactions.begin": lambda _: (timedelta(seconds=1), 0),
    "transactions.acknowledge": lambda name: ("0-7", name, 1, Progress(through=1), Acknowledgement()),
    "transactions.commit": lambda name: ("0-7", [NamespaceWrites(name, 1, {KEY: stored(b"x")})]),
    "transactions.abort": lambda _: ("0-7", "because"),
    "transactions.outcome": lambda _: ("0-7",),
    "transactions.list": lambda _: (timedelta(0),),
    "transactions.show": lambda _: ("0-7",),
    "transactions.log_records": lambda _: (LogKind.COORDINATOR, "0", 1),
    "transactions.batching": lambda _: (LogKind.COORDINATOR,),
    "transactions.set_batching": lambda _: (LogKind.COORDINATOR, BatchUpdate()),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    access = write_roles(Path(tmp_path_factory.mktemp("access")) / "access.toml", MINE, OTHER)
    with serving(ServerOptions(access=access)) as (site, server):
        assert qualify(site.create_namespace(MINE), b"") == b"\x00\x00\x01"
        assert qualify(site.create_namespace(OTHER), b"") == b"\x00\x00\x02"
        for name in (MINE, OTHER):
            site.host.feeds.create(_feed(name, name))
            site.host.subscriptions.open(_subscription(name), site.now(), "holder", 10.0)
        yield server


def is_allowed(server: Server, role: Role, limit: str | None, use: Use) -> bool:
    """Whether a caller is let through; what becomes of the request then is not the question."""
    with connected(server, token=token_of(role, limit)) as site:
        try:
            use(site)
        except NotAllowed:
            return False
        except (FeedNotFound, SubscriptionNotFound) as error:
            # Those of other namespaces are not there, to a caller that is limited to some.
            return "in the namespaces of" not in str(error)
        except FloodmarkError:
            return True
        return True


@pytest.mark.parametrize("request_name", DATA)
@pytest.mark.parametrize("role", Role)
def test_reads_need_read_and_writes_need_write_in_their_namespace(
    server: Server, request_name: str, role: Role
) -> None:
    least, use = DATA[request_name]
    enough = role >= least
    assert is_allowed(server, role, None, lambda site: use(site, MINE)) is enough
    assert is_allowed(server, role, MINE, lambda site: use(site, MINE)) is enough
    assert not is_allowed(server, role, MINE, lambda site: use(site, OTHER))


def test_a_batch_over_several_namespaces_needs_all_of_them(server: Server) -> None:
    def put_both(site: Site) -> object:
        keys = [_key(MINE), _key(OTHER)]
        return _partition(site).put(keys, [stored(b"x")] * 2, durable=True)

    assert is_allowed(server, Role.WRITE, None, put_both)
    assert not is_allowed(server, Role.WRITE, MINE, put_both)


@pytest.mark.parametrize("coordinated", [False, True])
def test_a_commit_that_depends_on_a_namespace_needs_read_on_it(server: Server, coordinated: bool) -> None:
    def commit(site: Site, reads: ReadSet) -> object:
        if coordinated:
            name = site.transactions.begin(timedelta(minutes=1), 0)
            return site.transactions.commit(name, [], reads)
        return site.host.router.write_together({_key(MINE): stored(b"x")}, reads, durable=True)

    for others in (ReadSet(1, [_key(OTHER)]), ReadSet(1, (), [KeyRange(_key(OTHER), _key(OTHER) + b"z")])):
        assert not is_allowed(server, Role.WRITE, MINE, partial(commit, reads=others))

    def commit_own(site: Site) -> object:
        return commit(site, ReadSet(site.host.versions.read_version(), [_key(MINE)]))

    assert is_allowed(server, Role.WRITE, MINE, commit_own)


def test_a_step_over_several_namespaces_needs_all_of_them(server: Server) -> None:
    def advance(site: Site) -> None:
        site.host.replication.advance_link(_step(MINE, OTHER), Applied())

    assert is_allowed(server, Role.REPLICATE, None, advance)
    assert not is_allowed(server, Role.REPLICATE, MINE, advance)


def test_the_changes_of_all_namespaces_need_all_of_them(server: Server) -> None:
    assert is_allowed(server, Role.READ, None, lambda site: _changes(site, None))
    assert not is_allowed(server, Role.ADMIN, MINE, lambda site: _changes(site, None))


@pytest.mark.parametrize("request_name", OPEN)
def test_what_tells_nothing_is_for_everyone(server: Server, request_name: str) -> None:
    assert is_allowed(server, Role.READ, MINE, OPEN[request_name])


@pytest.mark.parametrize("request_name", STEPS)
def test_only_nodes_take_steps_of_transactions(server: Server, request_name: str) -> None:
    assert not is_allowed(server, Role.ADMIN, None, STEPS[request_name])


def test_every_request_of_the_data_plane_is_in_the_tables_above() -> None:
    nothing: Any = None
    offered = {
        handler.method.name
        for handler in DataPlane(nothing, AccessGuard(nothing), Leases(nothing, nothing)).handlers()
    }
    streams = {"scan", "changes", "write_stream", "apply_stream", "load_stream", "generation_stream"}
    assert offered | streams == DATA.keys() | STEPS.keys() | OPEN.keys()


CALLS = [
    (port, method.call, method.action)
    for port in PORTS
    for method in port_methods(port.protocol, port.prefix).values()
]


@pytest.mark.parametrize(
    ("port", "name", "action"), CALLS, ids=[f"{port.prefix}.{name}" for port, name, _ in CALLS]
)
def test_every_call_is_refused_to_those_without_the_role(
    server: Server, port: Port, name: str, action: Action
) -> None:
    full_name = f"{port.prefix}.{name}"

    def use(namespace: str) -> Use:
        make = ARGUMENTS.get(full_name)
        arguments = () if make is None else make(namespace)
        return lambda site: getattr(getattr(site.host, port.attribute), name)(*arguments)

    for role in Role:
        if role < action.role:
            assert not is_allowed(server, role, None, use(OTHER)), f"{role} may {full_name}"
            assert not is_allowed(server, role, OTHER, use(OTHER)), f"{role} may {full_name} in its namespace"
    # What releases another's lease does nothing, as if the lease were gone.
    if action.scope is not Scope.ANY and not action.may_be_gone:
        assert not is_allowed(server, action.role, MINE, use(OTHER)), f"{full_name} in another's namespace"
    if action.role is Role.READ:
        assert is_allowed(server, action.role, None, use(MINE))


def test_lists_show_only_what_a_caller_may_see(server: Server) -> None:
    with connected(server, token=token_of(Role.READ, MINE)) as site:
        assert site.namespaces() == [MINE]
        assert [feed.name for feed in site.host.feeds.list()] == [MINE]
        assert [row.name for row in site.host.subscriptions.list()] == [MINE]
    with connected(server, token=token_of(Role.READ)) as site:
        assert site.namespaces() == [MINE, OTHER]
        assert len(site.host.feeds.list()) == len(site.host.subscriptions.list()) == 2


def test_the_lease_of_another_namespace_is_not_released(server: Server) -> None:
    with connected(server, token=token_of(Role.ADMIN)) as site:
        held = site.host.feeds.acquire(OTHER, "runner", 10.0).lease
    assert is_allowed(server, Role.WRITE, MINE, lambda site: site.host.feeds.release(OTHER, "runner"))
    with connected(server, token=token_of(Role.ADMIN)) as site:
        assert site.host.feeds.find(OTHER).lease == held
        site.host.feeds.release(OTHER, "runner")


def test_what_is_gone_can_be_released_by_anyone_who_may_hold_it(server: Server) -> None:
    assert is_allowed(server, Role.WRITE, MINE, lambda site: site.host.feeds.release("gone", "holder"))
    assert not is_allowed(server, Role.READ, MINE, lambda site: site.host.feeds.release("gone", "holder"))
