"""Sites that copy each other, faults that are planted into them, and what must be found of each."""

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Final, NamedTuple

from tests.links.support import POLICIES, Served, ServeSite, share

from floodmark.codec.ordered import encode_key, encode_namespace
from floodmark.codec.states import CounterEntry, CounterState, decode_state, encode_state
from floodmark.codec.values import decode_value, encode_value
from floodmark.host.embedded import EmbeddedHost
from floodmark.links.bringing import bring_data_sets
from floodmark.links.steps import plan_step, run_step
from floodmark.merge.states import newest_stamp
from floodmark.model.change import Stamp
from floodmark.model.record import FoundRecord
from floodmark.model.version import Version
from floodmark.partition.families import DATA
from floodmark.partition.generations import below, place
from floodmark.site import Site
from floodmark.spark import SiteAddress

KEYS: Final = 60


class World:
    """Served sites that share a namespace of each policy, and links that run when they are told to."""

    def __init__(self, serve_site: ServeSite, names: Sequence[str] = ("oslo", "rome")) -> None:
        self.served: dict[str, Served] = share(serve_site, names)[0]
        self.sites = {name: each.site for name, each in self.served.items()}

    def __getitem__(self, name: str) -> Site:
        return self.sites[name]

    @property
    def addresses(self) -> list[SiteAddress]:
        return [SiteAddress(location=each.url) for each in self.served.values()]

    @property
    def urls(self) -> list[str]:
        return [each.url for each in self.served.values()]

    def fill(self) -> None:
        """Write at every site, and let the others have it."""
        for name, site in self.sites.items():
            users, profiles, counts = (site.namespace(each) for each in POLICIES)
            users.put_many({b"%s-%02d" % (name.encode(), number): b"first" for number in range(KEYS)})
            profiles.put_many({b"%s-%d" % (name.encode(), number): {"name": name} for number in range(5)})
            counts.add(b"all", 1)
        self.link_all()

    def link(self, source: str, target: str) -> None:
        """Copy what is there in one direction."""
        here, there = self[source].host, self[target].host
        goal = self[source].resolved_version()
        while True:
            step = plan_step(here, there, tuple(POLICIES))
            bring_data_sets(here, there, step)
            if all(part.since >= goal for part in step.namespaces):
                return
            run_step(here, there, step)

    def link_all(self) -> None:
        """Copy everything everywhere."""
        for source, target in permutations(self.sites, 2):
            self.link(source, target)

    # Faults

    def find(self, name: str, namespace: str, key: bytes) -> FoundRecord:
        """What a site holds of a key."""
        return find(self[name], namespace, key)

    def overwrite(self, name: str, namespace: str, key: bytes, version: Version, stored: bytes) -> None:
        """Change what stands on a site's disk."""
        overwrite(self[name], namespace, key, version, stored)

    def forget(self, name: str, namespace: str, key: bytes) -> None:
        """Take the newest version of a key away."""
        forget(self[name], namespace, key)


def find(site: Site, namespace: str, key: bytes) -> FoundRecord:
    """What a site holds of a key."""
    (found,) = site.host.verification.find_records(namespace, [key], None, False)
    assert found is not None
    return found


def overwrite(site: Site, namespace: str, key: bytes, version: Version, stored: bytes | None) -> None:
    """Change what stands on a site's disk, past everything that watches over it."""
    assert isinstance(site.host, EmbeddedHost)
    row = site.host.catalog.get(namespace)
    placed = place(encode_key(row.id, key, version), encode_namespace(row.present.id))
    below(site.host.node.engine).write([(DATA, placed, stored)])


def forget(site: Site, namespace: str, key: bytes) -> None:
    """Take the newest version of a key away, as if its change had never come."""
    overwrite(site, namespace, key, find(site, namespace, key).version, None)


class Planted(NamedTuple):
    """A key that has drifted: in which namespace, and what is to be said of it."""

    namespace: str
    key: bytes
    verdict: str


def drop_change(world: World) -> Planted:
    """A change does not come."""
    world["oslo"].namespace("users").put(b"dropped", b"1")
    world.link_all()
    world.forget("rome", "users", b"dropped")
    return Planted("users", b"dropped", "missing_right")


def lose_last_update(world: World) -> Planted:
    """Of two changes the last one does not come."""
    users = world["rome"].namespace("users")
    for value in (b"1", b"2"):
        users.put(b"updated", value)
        world.link_all()
    world.forget("oslo", "users", b"updated")
    return Planted("users", b"updated", "value_mismatch")


def lose_delete(world: World) -> Planted:
    """A deletion does not come."""
    users = world["oslo"].namespace("users")
    users.put(b"deleted", b"1")
    world.link_all()
    users.delete(b"deleted")
    world.link_all()
    world.forget("rome", "users", b"deleted")
    return Planted("users", b"deleted", "missing_left")


def corrupt_value(world: World) -> Planted:
    """A value turns into another on the disk."""
    world["oslo"].namespace("users").put(b"corrupted", b"sound")
    world.link_all()
    found = world.find("rome", "users", b"corrupted")
    record = decode_value(found.stored)
    world.overwrite(
        "rome", "users", b"corrupted", found.version, encode_value(b"rotten", origin=record.origin)
    )
    return Planted("users", b"corrupted", "value_mismatch")


def resolve_wrongly(world: World) -> Planted:
    """One site lets the older of two writes win."""
    world["oslo"].namespace("users").put(b"contended", b"older")
    older = world.find("oslo", "users", b"contended").version
    world["rome"].namespace("users").put(b"contended", b"newer")
    world.link_all()
    loser = encode_value(b"older", origin=Stamp(older, world["oslo"].id))
    world.overwrite("rome", "users", b"contended", world["rome"].now(), loser)
    return Planted("users", b"contended", "value_mismatch")


def resurrect(world: World) -> Planted:
    """A tombstone is collected too early, and an older write that comes late finds nothing in its way."""
    users = world["oslo"].namespace("users")
    users.put(b"resurrected", b"1")
    written = world.find("oslo", "users", b"resurrected").version
    users.delete(b"resurrected")
    world.link_all()
    world.forget("rome", "users", b"resurrected")
    late = encode_value(b"1", origin=Stamp(written, world["oslo"].id))
    world.overwrite("rome", "users", b"resurrected", world["rome"].now(), late)
    return Planted("users", b"resurrected", "missing_left")


def lose_increment(world: World) -> Planted:
    """A counter forgets the last that another site has added."""
    counts = world["oslo"].namespace("counts")
    counts.add(b"visits", 2)
    world.link_all()
    before = world.find("rome", "counts", b"visits").stored
    counts.add(b"visits", 40)
    world["rome"].namespace("counts").add(b"visits", 1)
    world.link_all()
    found = world.find("rome", "counts", b"visits")
    entries = {entry.site: entry for stored in (found.stored, before) for entry in entries_of(stored)}
    forgotten = CounterState(None, tuple(entries[site] for site in sorted(entries)))
    world.overwrite(
        "rome", "counts", b"visits", found.version, encode_state(forgotten, newest_stamp(forgotten))
    )
    return Planted("counts", b"visits", "value_mismatch")


def entries_of(stored: bytes) -> tuple[CounterEntry, ...]:
    """What each site has added to a counter."""
    state = decode_state(stored)
    assert isinstance(state, CounterState)
    return state.entries


def lose_field(world: World) -> Planted:
    """Of a record with fields, one does not come."""
    profiles = world["oslo"].namespace("profiles")
    profiles.put(b"ada", {"name": "Ada"})
    world.link_all()
    before = world.find("rome", "profiles", b"ada")
    profiles.update(b"ada", {"city": "London"})
    world.link_all()
    assert world.find("rome", "profiles", b"ada").version > before.version
    world.forget("rome", "profiles", b"ada")
    return Planted("profiles", b"ada", "value_mismatch")


FAULTS: Final[Mapping[str, Callable[[World], Planted]]] = {
    fault.__name__: fault
    for fault in (
        drop_change,
        lose_last_update,
        lose_delete,
        corrupt_value,
        resolve_wrongly,
        resurrect,
        lose_increment,
        lose_field,
    )
}
