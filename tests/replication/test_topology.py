"""The topology: what is written comes back, and what contradicts itself or its predecessor is refused."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.host.directory import new_identity
from floodmark.model.errors import InvalidConfiguration
from floodmark.replication.topology import (
    Direction,
    MemberSite,
    SharedNamespace,
    SiteState,
    Topology,
    check_succession,
    check_topology,
    parse_topology,
)
from floodmark.replication.topology_file import render_topology

TEXT = """
epoch = 3

[sites.oslo]
id = 1
url = "grpc://127.0.0.1:7101"

[sites.rome]
id = 2
url = "grpc+tls://rome:7100"
token-file = "rome.token"
tls-root-certificate = "root.pem"
incarnation = 2

[sites.bonn]
id = 3
state = "removed"
final = 411225436913926252

[namespaces.users]
sites = ["oslo", "rome"]
merge = "last_write"

[namespaces.orders]
"""

ALL = parse_topology(TEXT)

_GONE = 'state = "removed"'


def changed(topology: Topology = ALL, **fields: Any) -> Topology:
    return msgspec.structs.replace(topology, **{"epoch": topology.epoch + 1, **fields})


def with_site(name: str, site: MemberSite) -> Topology:
    return changed(sites={**ALL.sites, name: site})


def test_file_is_read_as_written() -> None:
    assert parse_topology(TEXT) == Topology(
        epoch=3,
        sites={
            "oslo": MemberSite(id=1, url="grpc://127.0.0.1:7101"),
            "rome": MemberSite(
                id=2,
                url="grpc+tls://rome:7100",
                token_file="rome.token",
                tls_root_certificate="root.pem",
                incarnation=2,
            ),
            "bonn": MemberSite(id=3, state=SiteState.REMOVED, final=411225436913926252),
        },
        namespaces={"users": SharedNamespace(sites=("oslo", "rome")), "orders": SharedNamespace()},
    )


def test_namespace_goes_to_all_sites_if_none_are_named_and_links_only_to_active_ones() -> None:
    assert set(ALL.members("users")) == {"oslo", "rome"}
    assert set(ALL.members("orders")) == {"oslo", "rome", "bonn"}
    assert set(ALL.active_members("orders")) == {"oslo", "rome"}
    assert ALL.members("secrets") == {}
    both = ("orders", "users")
    assert list(ALL.directions()) == [Direction("oslo", "rome", both), Direction("rome", "oslo", both)]


def test_sites_that_share_nothing_have_no_link() -> None:
    sites = {name: MemberSite(id=number) for number, name in enumerate("abcd", 1)}
    namespaces = {"x": SharedNamespace(sites=("a", "b")), "y": SharedNamespace(sites=("b", "c"))}
    topology = Topology(epoch=1, sites=sites, namespaces=namespaces)
    pairs = [(source, target) for source, target, _ in topology.directions()]
    assert pairs == [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")]


NAMES = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters="/"), min_size=1, max_size=8)


@given(
    st.lists(NAMES, min_size=2, max_size=4, unique=True),
    st.dictionaries(NAMES, st.sampled_from([None, 2]), max_size=3),
    st.text(max_size=20),
)
def test_rendered_topology_is_read_back(names: list[str], shared: dict[str, int | None], url: str) -> None:
    topology = Topology(
        epoch=1,
        sites={name: MemberSite(id=number, url=url) for number, name in enumerate(names, 1)},
        namespaces={
            name: SharedNamespace(sites=None if count is None else tuple(names[:count]))
            for name, count in shared.items()
        },
    )
    assert parse_topology(render_topology(topology)) == topology


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("epoch = 1", "sites"),
        ("sites = ]", "cannot be used"),
        (TEXT.replace("epoch = 3", "epoch = 0"), "epoch counts from 1"),
        (TEXT.replace("[sites.rome]", "[sites.rome]\ncolour = 1"), "colour"),
        (TEXT.replace("id = 2", "id = 1"), "both have id 1"),
        (TEXT.replace("id = 2", "id = 0"), "ids go from 1 to 255"),
        (TEXT.replace("id = 2", "id = 256"), "ids go from 1 to 255"),
        (TEXT.replace("incarnation = 2", "incarnation = 0"), "incarnation counts from 1"),
        ("epoch = 1\n[sites.oslo]\nid = 1", "at least two sites"),
        (TEXT.replace("incarnation = 2", _GONE).replace("id = 1", f"id = 1\n{_GONE}"), "all of its sites"),
        (TEXT.replace('state = "removed"\n', ""), "`final` is the last version"),
        (TEXT.replace('state = "removed"', 'state = "gone"'), "gone"),
        (TEXT.replace('"rome"]', '"rom"]'), "'rom', which is not in [sites]; there are: oslo, rome, bonn"),
        (TEXT.replace('["oslo", "rome"]', '["oslo"]'), "one site only"),
        (TEXT.replace('["oslo", "rome"]', '["oslo", "oslo"]'), "names a site twice"),
        (TEXT.replace('"last_write"', '"mine"'), "choose from: "),
        (TEXT.replace("namespaces.users", 'namespaces."us ers"'), "cannot name a namespace"),
        (TEXT.replace("sites.oslo", 'sites."os/lo"'), "cannot name a site"),
    ],
)
def test_topology_that_contradicts_itself_is_refused_with_what_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(InvalidConfiguration) as refusal:
        parse_topology(text, "topology.toml")
    assert str(refusal.value).startswith("topology.toml cannot be used: ")
    assert problem in str(refusal.value)


@pytest.mark.parametrize(
    ("successor", "problem"),
    [
        (changed(epoch=3), "set epoch = 4"),
        (changed(epoch=2), "set epoch = 4"),
        (
            changed(sites={name: site for name, site in ALL.sites.items() if name != "bonn"}),
            "'bonn' is missing",
        ),
        (with_site("bonn", MemberSite(id=3)), "that is final"),
        (with_site("bonn", MemberSite(id=3, state=SiteState.REMOVED, final=5)), "ended at version"),
        (with_site("oslo", MemberSite(id=4)), "an id is for life"),
        (with_site("rome", MemberSite(id=2)), "only counts up"),
        (changed(namespaces={"users": SharedNamespace(merge="counter")}), "it is for life"),
        (changed(namespaces={"users": SharedNamespace(sites=("oslo", "bonn"))}), "no longer to 'rome'"),
        (
            changed(namespaces={**ALL.namespaces, "new": SharedNamespace()}),
            r"""name those that share it: sites = \["oslo", "rome"\]""",
        ),
    ],
)
def test_topology_that_cannot_follow_is_refused(successor: Topology, problem: str) -> None:
    check_topology(successor)
    with pytest.raises(InvalidConfiguration, match=problem):
        check_succession(ALL, successor)


@pytest.mark.parametrize(
    "successor",
    [
        changed(),
        changed(epoch=9),
        changed(namespaces={}),
        with_site("kiel", MemberSite(id=4)),
        with_site("rome", MemberSite(id=2, incarnation=3)),
        with_site("rome", MemberSite(id=2, incarnation=2, state=SiteState.REMOVED)),
    ],
)
def test_topology_may_grow_and_remove_and_restore(successor: Topology) -> None:
    check_succession(ALL, successor)


def test_an_id_that_is_left_out_follows_from_the_name_as_in_a_site_made_without_one() -> None:
    topology = parse_topology("epoch = 1\nsites = {oslo = {}, rome = {id = 7}}")
    assert {name: site.id for name, site in topology.sites.items()} == {
        "oslo": new_identity("oslo", None).site_id,
        "rome": 7,
    }
