"""What is no drift is not called so: lag, reordering, duplicates, a stopped site, garbage, writes meanwhile.

Each test shows as well that something was there which might have been mistaken for drift.
"""

from collections.abc import Iterator
from datetime import timedelta
from itertools import permutations
from random import Random

import pytest
from tests.divergence.support_sites import POLICIES, RETENTION_MS, Sites
from tests.sizes import only

from floodmark.divergence.comparing import Drift, Lag, compare_keys, take_vantage
from floodmark.links.applying import Applier
from floodmark.links.reading import read_step
from floodmark.links.steps import plan_step

KEYS = [b"key-%d" % number for number in range(8)]


@pytest.fixture
def sites() -> Sites:
    sites = Sites("oslo", "rome", "bonn")
    write_somewhere(sites, Random(1), 30)
    sites.link_all()
    assert list(sites.find()) == []
    return sites


def write_somewhere(sites: Sites, random: Random, count: int) -> None:
    """Write this and that at all sites, and delete some of it."""
    for number in range(count):
        sites.time.advance(random.randint(0, 3))
        site, key = sites[random.choice(list(sites.sites))], random.choice(KEYS)
        match random.randrange(6):
            case 0:
                site.namespace("users").delete(key)
            case 1:
                site.namespace("users").put(key, b"%d" % number, ttl=random.randint(1, 5))
            case 2:
                site.namespace("counts").add(key, 1)
            case 3:
                site.namespace("profiles").update(key, {random.choice("ab"): number})
            case 4:
                site.namespace(random.choice(list(POLICIES))).delete(key)
            case _:
                site.namespace("users").put(key, b"%d" % number)


def test_silent_under_lag(sites: Sites) -> None:
    write_somewhere(sites, Random(2), 60)
    assert sites.drifts() == []
    assert sites.lags() > 5
    sites.link("oslo", "rome")
    assert sites.drifts() == []


@pytest.mark.parametrize("seed", only([0], range(2)))
def test_silent_under_reordering(sites: Sites, seed: int) -> None:
    """Links run in any order and each at its own pace, so that effects arrive before their causes."""
    random, lag = Random(seed), 0
    for _ in range(5):
        write_somewhere(sites, random, 10)
        sites.beat()
        for source, target in random.sample(list(permutations(sites.sites, 2)), 3):
            sites.link(source, target)
            assert sites.drifts() == []
            lag += sites.lags()
    assert lag > 20
    sites.link_all()
    assert list(sites.find()) == []


def test_silent_under_duplicates(sites: Sites) -> None:
    """A step is applied twice and not noted, and then taken once more."""
    write_somewhere(sites, Random(3), 60)
    sites.beat()
    for source, target in permutations(sites.sites, 2):
        here, there = sites[source].host, sites[target].host
        for _ in range(2):
            step = plan_step(here, there, tuple(POLICIES))
            with Applier(there, step) as applier:
                for rows in read_step(here, step):
                    applier.add(rows)
                applier.finish()
            assert sites.drifts() == []
    sites.link_all()
    assert list(sites.find()) == []


def test_silent_about_a_site_that_has_stopped(sites: Sites) -> None:
    """Nothing comes to Bonn for an hour, while the others go on."""
    random = Random(4)
    for _ in range(6):
        write_somewhere(sites, random, 20)
        sites.time.advance(RETENTION_MS // 10)
        sites.beat()
        for source, target in (("oslo", "rome"), ("rome", "oslo")):
            sites.link(source, target)
        assert sites.drifts() == []
    assert sites.lags() > 5
    sites.link_all()
    assert list(sites.find()) == []


def test_silent_under_garbage_collection(sites: Sites) -> None:
    """One site has forgotten what it deleted, which another still holds or has as a tombstone."""
    for key in KEYS:
        sites.users("oslo").put(key, b"1")
    sites.link_all()
    for key in KEYS[:4]:
        sites.users("rome").delete(key)
    sites.link_all()
    sites.time.advance(2 * RETENTION_MS)
    sites.link_all()
    sites.link_all()
    for name in sites.sites:
        horizon = sites.horizon(name)
        sites[name].collect_garbage()
        assert sites.horizon(name) > horizon
        assert list(sites.find()) == []


def test_silent_about_a_tombstone_that_is_collected_while_somebody_looks(sites: Sites) -> None:
    """Bonn is seen before the deletion came there, and Oslo when it had forgotten it again."""
    sites.users("oslo").put(b"gone", b"1")
    sites.link_all()
    early = sites.vantages("users")[2]
    sites["bonn"].host.retention.hold_safe_point("look", early.version, timedelta(days=1), "users")
    sites.users("oslo").delete(b"gone")
    sites.collect()
    late = sites.vantages("users")
    found = list(sites.compare_hosts(["oslo", "bonn"], [late[0], early], [b"gone"]))
    assert found == [Lag(b"gone", "oslo", "bonn")]


def test_silent_under_writes_during_the_check(sites: Sites) -> None:
    """Between any two steps of whoever looks, all sites write and copy."""
    random, lag = Random(5), 0

    def disturb() -> None:
        write_somewhere(sites, random, 3)
        sites.beat()
        for source, target in random.sample(list(permutations(sites.sites, 2)), 2):
            sites.link(source, target)

    def keys() -> Iterator[bytes]:
        disturb()
        yield from KEYS

    hosts = [site.host for site in sites.sites.values()]
    for namespace in (*POLICIES, *POLICIES):
        vantages = []
        for host in hosts:
            vantages.append(take_vantage(host, namespace))
            disturb()
        for finding in compare_keys(hosts, namespace, keys(), vantages):
            assert not isinstance(finding, Drift)
            lag += 1
    assert lag > 5
