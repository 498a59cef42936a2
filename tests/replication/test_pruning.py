"""What was deleted inside a record is forgotten when nobody needs it, and not before."""

import pytest
from tests.replication.support_links import embedded
from tests.replication.support_return import IDS, World

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.states import CounterState, FieldsState, decode_state
from floodmark.engine import MemoryEngine
from floodmark.model.batch import mint_batch
from floodmark.model.errors import LimitExceeded, VersionCollected
from floodmark.model.limits import FIELDS_MAX
from floodmark.model.partition import Decision, Fate
from floodmark.partition import FAMILIES
from floodmark.site import Site, open_engine
from floodmark.testing.clock import SimulatedTime

DAYS_MS = 3 * 24 * 3_600_000


def collect(world: World, *names: str) -> None:
    for name in names or world.sites:
        world[name].host.retention.collect_garbage()


def names_in(world: World, site: str, key: bytes = b"ada") -> list[str]:
    state = decode_state(world.records(site, "profiles")[key])
    assert isinstance(state, FieldsState)
    return [field.name for field in state.fields]


def horizon(site: Site, namespace: str) -> int:
    (facts,) = [each for each in site.statistics().namespaces if each.name == namespace]
    return facts.collected_horizon


@pytest.fixture
def world() -> World:
    """Oslo wrote a field and Rome deleted it, and everybody has heard; nobody knows that of everybody."""
    world = World("oslo", "rome", "bonn")
    world["oslo"].namespace("profiles").put(b"ada", {"city": "Oslo", "name": "Ada"})
    world["oslo"].namespace("counts").add(b"home", 3)
    world.link_all()
    world["rome"].namespace("profiles").delete_field(b"ada", "city")
    world["rome"].namespace("counts").delete(b"home")
    world["rome"].namespace("counts").add(b"home", 4)
    world.time.advance(DAYS_MS)
    world.link_all()
    return world


def test_it_is_forgotten_when_everybody_is_known_to_have_it(world: World) -> None:
    collect(world)
    assert all(names_in(world, site) == ["city", "name"] for site in world.sites)
    for _ in range(2):
        world.link_all()
    collect(world)
    for site in world.sites:
        assert names_in(world, site) == ["name"]
        assert world[site].namespace("profiles").get(b"ada") == b'{"name":"Ada"}'
        counter = decode_state(world.records(site, "counts")[b"home"])
        assert isinstance(counter, CounterState)
        assert counter.deleted is None
        assert world[site].namespace("counts").get(b"home") == 4
    world.require_equal()


def test_one_that_has_not_heard_holds_it_everywhere(world: World) -> None:
    world.sites.pop("bonn")
    for _ in range(4):
        world.time.advance(DAYS_MS)
        for site in world.sites.values():
            site.heartbeat()
        world.link("oslo", "rome")
        world.link("rome", "oslo")
    collect(world)
    assert names_in(world, "oslo") == names_in(world, "rome") == ["city", "name"]
    assert horizon(world["oslo"], "profiles") == 0


def test_what_was_forgotten_counts_as_collected(world: World) -> None:
    deleted = decode_state(world.records("oslo", "profiles")[b"ada"])
    assert isinstance(deleted, FieldsState)
    for _ in range(2):
        world.link_all()
    collect(world, "oslo")
    assert horizon(world["oslo"], "profiles") == deleted.fields[0].stamp.version
    assert horizon(world["rome"], "profiles") == 0


def test_the_deletion_of_a_field_stays_while_an_older_copy_is_prepared() -> None:
    world = World("oslo", "rome")
    profiles = world["oslo"].namespace("profiles")
    profiles.put(b"ada", {"city": "Oslo", "name": "Ada"})
    world.link_all()
    older = world.records("rome", "profiles")[b"ada"]
    profiles.delete_field(b"ada", "city")
    world.time.advance(DAYS_MS)
    for _ in range(3):
        world.link_all()
    node = embedded(world["rome"]).node
    node.settle_by(lambda _: Fate(Decision.UNDECIDED), lambda *_: Fate(Decision.UNDECIDED))
    key, batch = encode_namespace(world["rome"].namespace("profiles").id) + b"ada", mint_batch(world.time())
    partition = node.map.route(key)
    version = partition.prepare(batch, [key], [older], [key], [key])
    collect(world)
    assert names_in(world, "oslo") == ["name"]
    partition.commit_prepared(batch, version)
    assert names_in(world, "rome") == ["city", "name"]
    world.link_all()
    collect(world)
    for site in world.sites.values():
        assert site.namespace("profiles").get(b"ada") == b'{"name":"Ada"}'
    assert names_in(world, "rome") == ["name"]


def test_a_backup_that_still_has_the_field_does_not_bring_it_back() -> None:
    world = World("oslo", "rome", "bonn")
    world["rome"].namespace("profiles").put(b"ada", {"city": "Oslo", "name": "Ada"})
    for _ in range(2):
        world.link_all()
    backup = world.backup("oslo")
    world["rome"].namespace("profiles").delete_field(b"ada", "city")
    world.time.advance(DAYS_MS)
    for _ in range(3):
        world.link_all()
    collect(world, "rome", "bonn")
    world.open("oslo")
    world.change("oslo", incarnation=2)
    with pytest.raises(VersionCollected, match="'rome' has collected deletions"):
        world.restore("oslo", backup, "profiles")
    world.restore("oslo", world.backup("rome"), "profiles")
    assert names_in(world, "oslo") == ["name"]


def test_a_new_site_with_an_older_backup_is_told_that_it_comes_too_late() -> None:
    world = World("oslo", "rome")
    world["rome"].namespace("profiles").put(b"ada", {"city": "Oslo", "name": "Ada"})
    for _ in range(2):
        world.link_all()
    backup = world.backup("oslo")
    world["rome"].namespace("profiles").delete_field(b"ada", "city")
    world.time.advance(DAYS_MS)
    for _ in range(3):
        world.link_all()
    collect(world)
    assert names_in(world, "rome") == ["name"]
    world.change("lund")
    world.open("lund")
    world.join("lund", backup)
    with pytest.raises(VersionCollected):
        world.link("rome", "lund")


# One site alone


@pytest.fixture
def time() -> SimulatedTime:
    return SimulatedTime()


@pytest.fixture
def site(time: SimulatedTime) -> Site:
    return open_engine(MemoryEngine(FAMILIES), site="oslo", site_id=IDS["oslo"], time_source=time)


@pytest.mark.slow
def test_fields_that_come_and_go_never_fill_a_record_that_is_written_all_the_time(
    site: Site, time: SimulatedTime
) -> None:
    profiles = site.create_namespace("profiles", merge="fields")
    half = FIELDS_MAX // 2
    for day in range(4):
        names = [f"{day}-{number}" for number in range(half - 10)]
        profiles.update(b"ada", {"day": day} | dict.fromkeys(names, 1))
        profiles.delete_field(b"ada", *names)
        time.advance(DAYS_MS)
        profiles.update(b"ada", {"day": day})
        site.collect_garbage()
    assert profiles.get(b"ada") == b'{"day":3}'


def test_without_garbage_collection_they_do(site: Site) -> None:
    profiles = site.create_namespace("profiles", merge="fields")
    half = FIELDS_MAX // 2 - 10
    for day in range(2):
        profiles.update(b"ada", {f"{day}-{number}": None for number in range(half)} | {"day": day})
    with pytest.raises(LimitExceeded):
        profiles.update(b"ada", {f"2-{number}": None for number in range(half)})


def test_history_that_is_kept_stays_what_it_was(site: Site, time: SimulatedTime) -> None:
    profiles = site.create_namespace("profiles", merge="fields")
    profiles.put(b"ada", {"a": 1, "b": 2, "c": 3})
    profiles.delete_field(b"ada", "a")
    profiles.update(b"ada", {"brief": 1}, ttl=5)
    time.advance(DAYS_MS)
    versions = [profiles.update(b"ada", {"b": None}), profiles.update(b"ada", {"c": 4})]
    history = [profiles.get(b"ada", at=version) for version in versions]
    changes = list(site.changes("profiles", since=versions[0] - 1))
    site.collect_garbage()
    assert [profiles.get(b"ada", at=version) for version in versions] == history == [b'{"c":3}', b'{"c":4}']
    assert list(site.changes("profiles", since=versions[0] - 1)) == changes
    (stored,) = embedded(site).node.find_before([(b"\x00\x00\x01ada", site.now(), 0)])
    assert stored is not None
    state = decode_state(stored)
    assert isinstance(state, FieldsState)
    assert [field.name for field in state.fields] == ["b", "c"], "b was deleted too lately to be forgotten"
