"""Histories of real sites, as verify walks through them: what was lost is found, what was repaired is not."""

import pytest
from tests.divergence.support_sites import Sites
from tests.replication.support_links import embedded

from floodmark.divergence.histories import Difference
from floodmark.model.errors import LimitExceeded
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.spark import SiteAddress
from floodmark.spark.jobs.verifying.comparing import (
    CHANGES_MAX,
    RangeComparison,
    SiteView,
    walk_range,
)


def walk(
    sites: Sites, namespace: str, since: Version = 0, changes_max: int = CHANGES_MAX
) -> list[Difference]:
    """Walk through the histories of a namespace at all sites."""
    views = [
        SiteView(
            address=SiteAddress(location="grpc://127.0.0.1:1"),
            site=site.name,
            site_id=site.id,
            namespace_id=embedded(site).catalog.get(namespace).id,
            version=site.resolved_version(),
            mark={},
        )
        for site in sites.sites.values()
    ]
    work = RangeComparison(namespace=namespace, views=views, keys=KeyRange())
    hosts = [site.host for site in sites.sites.values()]
    return list(walk_range(work, hosts, since, changes_max=changes_max))


@pytest.fixture
def sites() -> Sites:
    sites = Sites("oslo", "rome")
    for name in sites.sites:
        sites.users(name).put_many({b"%s-%02d" % (name.encode(), number): b"1" for number in range(20)})
        sites[name].namespace("counts").add(b"all", 1)
        sites[name].namespace("profiles").put(b"ada", {name: 1})
    sites.link_all()
    return sites


KEYS = {"users": b"oslo-00", "profiles": b"ada", "counts": b"all"}


def write(sites: Sites, namespace: str) -> None:
    """Write to a key at Oslo."""
    here = sites["oslo"].namespace(namespace)
    if namespace == "counts":
        here.add(KEYS[namespace], 5)
    elif namespace == "profiles":
        here.update(KEYS[namespace], {"city": "Paris"})
    else:
        here.put(KEYS[namespace], b"2")
    sites.beat()


def lose(sites: Sites, namespace: str) -> None:
    """Lose a change of a key on its way to Rome, which then says that it has it."""
    write(sites, namespace)
    sites.link("oslo", "rome", lost=KEYS[namespace])
    sites.beat()


@pytest.mark.parametrize("namespace", ["users", "profiles", "counts"])
def test_repair_does_not_look_like_another_fault(sites: Sites, namespace: str) -> None:
    """A repair comes late, and brings a merged record as a whole: that is no alteration."""
    lose(sites, namespace)
    sites.repair()
    sites.link_all()
    assert [(each.key, each.kind.value, each.other) for each in walk(sites, namespace)] == [
        (KEYS[namespace], "lost", "rome")
    ]


@pytest.mark.parametrize("namespace", ["users", "profiles", "counts"])
def test_repair_of_what_is_older_than_the_history_is_no_finding(sites: Sites, namespace: str) -> None:
    """Oslo gets back what it wrote itself, and Rome has had it all the time."""
    write(sites, namespace)
    sites.link_all()
    newest = sites.stored("oslo", namespace, KEYS[namespace]).version
    sites.overwrite("oslo", namespace, KEYS[namespace], newest, None)
    since = max(site.resolved_version() for site in sites.sites.values())
    sites.repair()
    sites.link_all()
    assert walk(sites, namespace, since) == []


@pytest.mark.parametrize("namespace", ["profiles", "counts"])
def test_what_another_site_writes_to_a_merged_record_does_not_hide_a_loss(
    sites: Sites, namespace: str
) -> None:
    there = sites["rome"].namespace(namespace)
    write(sites, namespace)
    if namespace == "counts":
        there.add(KEYS[namespace], 1)
    else:
        there.update(KEYS[namespace], {"zip": "00184"})
    sites.link("oslo", "rome", lost=KEYS[namespace])
    sites.beat()
    write(sites, namespace)
    sites.link_all()
    sites.link_all()
    assert sites.drifts() == []
    assert [(each.kind.value, each.other) for each in walk(sites, namespace)] == [("lost", "rome")]


def test_long_history_is_walked_in_parts(sites: Sites) -> None:
    lose(sites, "users")
    sites.users("oslo").put(b"oslo-00", b"3")
    sites.link_all()
    whole = walk(sites, "users")
    assert [each.key for each in whole] == [b"oslo-00"]
    assert walk(sites, "users", changes_max=4) == whole


def test_key_with_too_many_changes_is_named(sites: Sites) -> None:
    for number in range(10):
        sites.users("oslo").put(b"hot", b"%d" % number)
    with pytest.raises(LimitExceeded, match=r"the history of b'hot' has more than .* retention"):
        walk(sites, "users", changes_max=5)
