"""Large values at other sites: whole or absent while a link copies them, and swept by one site alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import pytest
from msgspec.structs import replace
from tests.layers.conftest import CHUNK, Place
from tests.layers.test_large_values import HOUR_MS, NAME, Stalling, content, rows, spread
from tests.replication.support_links import IDS, Mesh, open_one, topology_of

from floodmark.engine import MemoryEngine
from floodmark.layers import LargeValues
from floodmark.links.applying import Applier
from floodmark.links.pair import pair_topology
from floodmark.links.reading import Piece, read_pieces
from floodmark.links.steps import plan_step, run_step
from floodmark.model.errors import Corruption, LinkStalled
from floodmark.model.ranges import KeyRange
from floodmark.partition import FAMILIES
from floodmark.replication.applied import Applied
from floodmark.replication.step import LinkStep
from floodmark.replication.topology import MemberSite, SiteState
from floodmark.site import Site
from floodmark.testing.clock import SimulatedTime

pytestmark = pytest.mark.usefixtures("small_chunks")

RECORDS = KeyRange(b"r", b"s")
CHUNKS = KeyRange(b"c", b"d")
GARBAGE = KeyRange(b"g", b"h")


@dataclass
class Link:
    """A link between two sites that share large values."""

    source: Site
    target: Site
    # The time at the source.
    time: SimulatedTime

    @property
    def here(self) -> LargeValues:
        return LargeValues(self.source, NAME)

    @property
    def there(self) -> LargeValues:
        return LargeValues(self.target, NAME)

    def plan(self) -> LinkStep:
        return plan_step(self.source.host, self.target.host, [NAME])

    def copy(self) -> None:
        run_step(self.source.host, self.target.host, self.plan())

    def apply(self, step: LinkStep, keys: KeyRange) -> Applied:
        """Apply some keys of a step, as a task of Spark does; the target does not take note of it."""
        with Applier(self.target.host, step) as applier:
            for batch in read_pieces(self.source.host, step, [Piece(0, keys)]):
                applier.add(batch)
            return applier.finish()


@pytest.fixture
def link(place: Place) -> Iterator[Link]:
    """A link to a site whose records and chunks may lie at different nodes."""
    time = SimulatedTime()
    with open_one(MemoryEngine(FAMILIES), "rome", time) as source:
        source.create_namespace(NAME)
        spread(place)
        topology = pair_topology(source, place.site, [NAME])
        for site in (source, place.site):
            site.set_topology(topology)
        LargeValues(source, NAME)
        link = Link(source, place.site, time)
        link.copy()
        yield link


# Links


def test_a_value_whose_record_comes_before_its_chunks_is_not_there_yet(link: Link) -> None:
    old, new = content(4 * CHUNK, 1), content(6 * CHUNK, 2)
    link.here.put(b"switch", old)
    link.here.put(b"router", b"small")
    link.copy()
    before = link.target.now()
    link.here.put(b"switch", new)
    link.here.put(b"firewall", new)
    step = link.plan()
    # The later keys first, and some of the chunks never: the task that brings them fails.
    link.apply(step, RECORDS)
    for _ in range(2):
        assert link.there.get(b"switch") == old
        assert (link.there.get(b"firewall"), b"firewall" in link.there) == (None, False)
        assert dict(link.there.scan()) == {b"switch": old, b"router": b"small"}
        assert dict(link.there.sizes()) == {b"switch": len(old), b"router": 5}
        link.apply(step, CHUNKS)
    meanwhile = link.target.now()
    run_step(link.source.host, link.target.host, step)
    assert dict(link.there.scan()) == {b"firewall": new, b"switch": new, b"router": b"small"}
    assert b"firewall" in link.there
    # The past stays what it was.
    for version in (before, meanwhile):
        assert dict(link.there.scan(at=version)) == {b"switch": old, b"router": b"small"}
        assert link.there.get(b"switch", at=version) == old


def test_an_old_value_is_read_until_a_link_has_brought_the_new_one_and_its_removal(
    link: Link, place: Place
) -> None:
    """The link was down for so long that the source has removed the chunks of the old value meanwhile."""
    old = {b"router": content(2 * CHUNK, 1), b"switch": content(6 * CHUNK, 2)}
    new = {b"router": content(3 * CHUNK, 3), b"switch": content(7 * CHUNK, 4)}
    for values in (old, new):
        for key, value in values.items():
            link.here.put(key, value)
        if values is old:
            link.copy()
    link.time.advance(2 * HOUR_MS)
    place.advance(2 * HOUR_MS)
    assert link.here.sweep() == 2
    step = link.plan()
    # The task that applies these ranges does so in this order, and the step is not noted yet.
    for keys in (RECORDS, CHUNKS, GARBAGE):
        link.apply(step, keys)
    assert dict(link.there.scan()) == old
    with link.there.open(b"switch") as stream:
        place.advance(48 * HOUR_MS)
        place.site.heartbeat()
        place.site.collect_garbage()
        assert stream.read() == old[b"switch"]
    place.site.collect_garbage()
    with pytest.raises(LinkStalled, match="when the link has brought the rest"):
        link.there.get(b"switch")
    with pytest.raises(LinkStalled, match="when the link has brought the rest"):
        dict(link.there.sizes())
    link.time.advance(48 * HOUR_MS)
    run_step(link.source.host, link.target.host, step)
    assert dict(link.there.scan()) == new


def test_an_old_value_whose_chunks_were_removed_first_is_to_be_read_again(link: Link, place: Place) -> None:
    link.here.put(b"switch", content(6 * CHUNK, 1))
    link.copy()
    link.here.put(b"switch", content(7 * CHUNK, 2))
    link.time.advance(2 * HOUR_MS)
    place.advance(2 * HOUR_MS)
    assert link.here.sweep() == 1
    step = link.plan()
    for keys in (CHUNKS, RECORDS):
        link.apply(step, keys)
        place.advance(1)
    with pytest.raises(LinkStalled, match="when the link has brought the rest"):
        link.there.get(b"switch")
    run_step(link.source.host, link.target.host, step)
    assert link.there.get(b"switch") == content(7 * CHUNK, 2)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_limit_counts_the_values_that_are_whole(link: Link, reverse: bool) -> None:
    link.here.put(b"m", b"small")
    link.copy()
    for name in b"abcxyz":
        link.here.put(bytes([name]), content(4 * CHUNK, name))
    step = link.plan()
    link.apply(step, RECORDS)
    for key in (b"d", b"w"):
        link.there.put(key, b"here")
    expected = sorted([b"d", b"m", b"w"], reverse=reverse)
    for limit in range(5):
        assert [key for key, _ in link.there.sizes(limit=limit, reverse=reverse)] == expected[:limit]
    run_step(link.source.host, link.target.host, step)
    expected = sorted([b"%c" % name for name in b"abcdmwxyz"], reverse=reverse)
    for limit in range(11):
        assert [key for key, _ in link.there.scan(limit=limit, reverse=reverse)] == expected[:limit]


def test_a_value_that_replaces_one_half_copied_is_whole(link: Link) -> None:
    link.here.put(b"switch", content(6 * CHUNK, 1))
    step = link.plan()
    link.apply(step, RECORDS)
    link.there.put(b"switch", content(5 * CHUNK, 2))
    assert link.there.get(b"switch") == content(5 * CHUNK, 2)
    run_step(link.source.host, link.target.host, step)
    assert link.there.get(b"switch") == content(5 * CHUNK, 2)


def test_at_another_site_a_value_is_visible_only_with_all_its_chunks() -> None:
    mesh = Mesh("oslo", "rome")
    values = LargeValues(mesh["oslo"], "users")

    def copy() -> None:
        mesh.exchange()
        assert LargeValues(mesh["rome"], "users").get(b"switch") in (None, content(6 * CHUNK))

    values.put(b"switch", content(6 * CHUNK))
    copy()
    values.put(b"switch", Stalling(9 * CHUNK, 7, copy))  # type: ignore[arg-type]
    there = LargeValues(mesh["rome"], "users")
    assert there.get(b"switch") == content(6 * CHUNK)
    mesh.exchange()
    assert there.get(b"switch") == b"x" * 9 * CHUNK


def test_a_site_does_not_sweep_under_the_put_of_another() -> None:
    mesh = Mesh("oslo", "rome")
    values = LargeValues(mesh["oslo"], "users")

    def pause() -> None:
        mesh.exchange()
        mesh.time.advance(2 * HOUR_MS)
        assert LargeValues(mesh["rome"], "users").sweep() == 0

    values.put(b"switch", Stalling(9 * CHUNK, 7, pause))  # type: ignore[arg-type]
    mesh.exchange()
    assert LargeValues(mesh["rome"], "users").get(b"switch") == b"x" * 9 * CHUNK
    # A value is discarded by the site that replaces it, whichever wrote it.
    LargeValues(mesh["rome"], "users").delete(b"switch")
    mesh.time.advance(2 * HOUR_MS)
    assert LargeValues(mesh["rome"], "users").sweep() == 1
    mesh.exchange()
    assert rows(values) == []


def test_a_site_never_sweeps_what_a_link_still_copies_in(link: Link, place: Place) -> None:
    """Whatever the age of the garbage rows that have come, and in whatever order the rest comes."""

    def pause() -> None:
        step = link.plan()
        link.apply(step, GARBAGE)
        place.advance(100 * HOUR_MS)
        assert link.there.sweep(older_than=timedelta(0)) == 0
        link.copy()
        place.advance(100 * HOUR_MS)
        link.there.put(b"other", content(9 * CHUNK, 2))

    link.here.put(b"switch", content(6 * CHUNK, 1))
    link.here.put(b"switch", Stalling(9 * CHUNK, 7, pause))  # type: ignore[arg-type]
    link.copy()
    assert link.there.sweep(older_than=timedelta(0)) == 0
    assert link.there.get(b"switch") == b"x" * 9 * CHUNK
    assert link.there.get(b"other") == content(9 * CHUNK, 2)


def test_what_a_removed_site_has_left_is_swept_by_the_others() -> None:
    mesh = Mesh("oslo", "rome", "bonn")
    for seed in (1, 2):
        LargeValues(mesh["oslo"], "users").put(b"switch", content(6 * CHUNK, seed))
    for _ in range(2):
        mesh.exchange()
    others = [LargeValues(mesh[name], "users") for name in ("rome", "bonn")]
    final = min(mesh.watermark(name)[IDS["oslo"]] for name in ("rome", "bonn"))
    removed = MemberSite(id=IDS["oslo"], state=SiteState.REMOVED, final=final)
    for name in ("rome", "bonn"):
        mesh[name].set_topology(topology_of("rome", "bonn", epoch=2, oslo=removed))
    mesh.time.advance(HOUR_MS)
    assert [values.sweep() for values in others] == [0, 0]
    mesh.time.advance(24 * HOUR_MS)
    # Both may, in any order; it is the same to each of them whether the other has.
    assert [values.sweep() for values in others] == [1, 1]
    for source, target in (("rome", "bonn"), ("bonn", "rome")):
        mesh.step(source, target)
    for values in others:
        assert len(rows(values)) == 1 + 6
        assert values.get(b"switch") == content(6 * CHUNK, 2)


def lose_the_source(link: Link) -> None:
    """Remove the source of a link from the topology, with what the target has of it."""
    mark = link.target.host.replication.watermark(NAME, None)
    removed = MemberSite(id=link.source.id, state=SiteState.REMOVED, final=mark[link.source.id])
    topology = pair_topology(link.source, link.target, [NAME])
    sites = {**topology.sites, "rome": removed}
    link.target.set_topology(replace(topology, epoch=topology.epoch + 1, sites=sites))


def test_a_sweep_keeps_the_old_value_of_one_that_a_lost_site_has_left_in_part(
    link: Link, place: Place
) -> None:
    old = content(6 * CHUNK, 1)
    link.here.put(b"switch", old)
    link.copy()
    before = link.target.now()
    link.here.put(b"switch", content(7 * CHUNK, 2))
    step = link.plan()
    for keys in (RECORDS, GARBAGE):
        link.apply(step, keys)
    assert link.there.get(b"switch") == old
    lose_the_source(link)
    with pytest.raises(Corruption, match="chunk 0 is missing"):
        link.there.get(b"switch")
    place.advance(25 * HOUR_MS)
    assert link.there.sweep() == 0
    assert link.there.get(b"switch", at=before) == old
    # A new value leaves the others to the next sweeps.
    link.there.put(b"switch", b"small")
    place.advance(25 * HOUR_MS)
    assert link.there.sweep() == 2
    assert rows(link.there) == [b"rswitch"]


def test_a_sweep_keeps_a_value_whose_put_a_lost_site_has_not_ended_here(link: Link, place: Place) -> None:
    new = b"x" * 9 * CHUNK
    link.here.put(b"switch", Stalling(9 * CHUNK, 7, link.copy))  # type: ignore[arg-type]
    step = link.plan()
    for keys in (CHUNKS, RECORDS):
        link.apply(step, keys)
    lose_the_source(link)
    assert link.there.get(b"switch") == new
    place.advance(25 * HOUR_MS)
    assert link.there.sweep() == 0
    assert link.there.get(b"switch") == new
    assert len(rows(link.there)) == 10
