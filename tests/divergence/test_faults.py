"""Whatever can go wrong between sites that copy each other is found, is called by its name, and is mended.

Each fault happens in the product itself: something is lost on a link, a site decides by a broken rule, a
tombstone goes too early, a byte turns over on a disk.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import pytest
from tests.divergence.support_sites import POLICIES, RETENTION_MS, Sites
from tests.sizes import only

from floodmark.codec.values import decode_value, encode_value
from floodmark.divergence.comparing import Lag
from floodmark.divergence.repairing import RepairSummary
from floodmark.model.change import Stamp
from floodmark.replication.links import Links
from floodmark.site import Namespace
from floodmark.testing.simulation.faults import plant


class Expected(NamedTuple):
    """What is to be said of the one key that has drifted, and what all sites hold when it is mended.

    The verdict is that on Oslo, to the left, and Rome.
    """

    namespace: str
    verdict: str
    mended: bytes | None
    part: str | int | None = None


def drop_change(sites: Sites) -> Expected:
    """A change is dropped on the way to one site, which was never written to again."""
    sites.users("oslo").put(b"key", b"1")
    sites.beat()
    sites.link("oslo", "rome", lost=b"key")
    return Expected("users", "missing_right", b"1")


def lose_last_update(sites: Sites) -> Expected:
    """Of two changes of a key the last one is lost."""
    sites.users("oslo").put(b"key", b"1")
    sites.link_all()
    sites.users("oslo").put(b"key", b"2")
    sites.beat()
    sites.link("oslo", "rome", lost=b"key")
    return Expected("users", "value_mismatch", b"2")


def lose_delete(sites: Sites) -> Expected:
    """A deletion is lost."""
    sites.users("oslo").put(b"key", b"1")
    sites.link_all()
    sites.users("oslo").delete(b"key")
    sites.beat()
    sites.link("oslo", "rome", lost=b"key")
    return Expected("users", "missing_left", None)


def lose_expiry(sites: Sites) -> Expected:
    """A record that lives for ever at one site ends at the other."""
    sites.users("oslo").put(b"key", b"1")
    sites.link_all()
    sites.users("oslo").put(b"key", b"1", ttl=3_600)
    sites.beat()
    sites.link("oslo", "rome", lost=b"key")
    return Expected("users", "value_mismatch", b"1")


def corrupt_value(sites: Sites) -> Expected:
    """A value turns into another one where it lies: under one stamp there are two values."""
    sites.users("oslo").put(b"key", b"sound")
    sites.link_all()
    found = sites.stored("rome", "users", b"key")
    rotten = encode_value(b"rotten", origin=decode_value(found.stored).origin)
    sites.overwrite("rome", "users", b"key", found.version, rotten)
    return Expected("users", "value_mismatch", b"sound")


def corrupt_stamp(sites: Sites) -> Expected:
    """With a value its stamp turns into another one, which is not over yet: nothing would ever cover it."""
    sites.users("oslo").put(b"key", b"sound")
    sites.link_all()
    found = sites.stored("rome", "users", b"key")
    origin = decode_value(found.stored).origin
    assert origin is not None
    rotten = encode_value(b"rotten", origin=Stamp(origin.version + (1 << 40), origin.site))
    sites.overwrite("rome", "users", b"key", found.version, rotten)
    return Expected("users", "value_mismatch", b"sound")


def corrupt_original(sites: Sites) -> Expected:
    """The same at the site where it was written.  Nobody can know that, and this site is believed."""
    sites.users("oslo").put(b"key", b"sound")
    sites.link_all()
    version = sites.stored("oslo", "users", b"key").version
    sites.overwrite("oslo", "users", b"key", version, encode_value(b"rotten"))
    return Expected("users", "value_mismatch", b"rotten")


def resolve_wrongly(sites: Sites) -> Expected:
    """Two sites write at the same time, and one of them lets the older write win."""
    sites.users("oslo").put(b"key", b"older")
    sites.time.advance(1)
    sites.users("rome").put(b"key", b"newer")
    sites.beat()
    with plant("loser-stored"):
        sites.link("oslo", "rome")
    return Expected("users", "value_mismatch", b"newer")


def resurrect(sites: Sites) -> Expected:
    """A tombstone is collected before all that is older has come; what comes then finds nothing above it."""
    sites.users("bonn").put(b"key", b"1")
    sites.time.advance(1)
    sites.users("oslo").delete(b"key")
    sites.beat()
    sites.link("oslo", "rome")
    sites.time.advance(2 * RETENTION_MS)
    for target in ("oslo", "bonn"):
        sites.link("rome", target)
    with plant("tombstone-early"):
        sites["rome"].collect_garbage()
    with pytest.MonkeyPatch.context() as patch:
        # Nobody watches over what arrives either.
        patch.setattr(Links, "horizon", lambda *_: 0)
        sites.link("bonn", "rome")
    return Expected("users", "missing_left", None)


def lose_increment(sites: Sites) -> Expected:
    """A counter misses what another site has added, and counts on."""
    for name in ("oslo", "rome"):
        sites[name].namespace("counts").add(b"key", 1)
    sites.link_all()
    sites["oslo"].namespace("counts").add(b"key", 40)
    sites.beat()
    sites.link("oslo", "rome", lost=b"key")
    sites["rome"].namespace("counts").add(b"key", 5)
    return Expected("counts", "value_mismatch", b"47", part=1)


def lose_field(sites: Sites) -> Expected:
    """Of a record with fields one is lost, and another one is written later."""
    profiles = sites["oslo"].namespace("profiles")
    profiles.put(b"key", {"name": "Ada"})
    sites.link_all()
    profiles.update(b"key", {"city": "Paris"})
    sites.beat()
    sites.link("oslo", "rome", lost=b"key")
    profiles.update(b"key", {"name": "Ada King"})
    return Expected("profiles", "value_mismatch", b'{"city":"Paris","name":"Ada King"}', part="city")


FAULTS: Final[Mapping[str, Callable[[Sites], Expected]]] = {
    fault.__name__: fault
    for fault in (
        drop_change,
        lose_last_update,
        lose_delete,
        lose_expiry,
        corrupt_value,
        corrupt_stamp,
        corrupt_original,
        resolve_wrongly,
        resurrect,
        lose_increment,
        lose_field,
    )
}


@pytest.fixture
def sites() -> Sites:
    """Three sites that agree, and hold something besides."""
    sites = Sites("oslo", "rome", "bonn")
    for name in sites.sites:
        sites.users(name).put(b"of " + name.encode(), b"1")
        sites[name].namespace("counts").add(b"all", 1)
        sites[name].namespace("profiles").put(b"of " + name.encode(), {"name": name})
    sites.link_all()
    assert list(sites.find()) == []
    return sites


@pytest.mark.parametrize("fault", only(["drop_change", "lose_delete", "corrupt_value", "lose_field"], FAULTS))
def test_fault_is_found_exactly_and_mended(sites: Sites, fault: str) -> None:
    expected = FAULTS[fault](sites)
    sites.link_all()
    found = {(drift.left.site, drift.right.site): (namespace, drift) for namespace, drift in sites.drifts()}
    namespace, drift = found.pop(("oslo", "rome"))
    assert (namespace, drift.key, str(drift.verdict), drift.part) == (
        expected.namespace,
        b"key",
        expected.verdict,
        expected.part,
    )
    assert drift.left.digest != drift.right.digest
    # Bonn is between the two: it differs from the one that is wrong, and from no other.
    assert {pair[1] for pair in found} <= {"bonn"}
    assert len(found) == 1
    assert sites.lags() == 0

    assert sites.repair() == RepairSummary(repaired=1)
    assert list(sites.find()) == []
    sites.link_all()
    assert list(sites.find()) == []
    held = [site.namespace(expected.namespace).stored.get(b"key") for site in sites.sites.values()]
    assert held == [expected.mended] * 3


def test_a_record_that_names_a_site_which_nobody_knows_is_in_doubt_and_no_source(sites: Sites) -> None:
    """Rome's copy is altered, origin and all, and Bonn has lost the key: only Oslo may be believed."""
    sites.users("oslo").put(b"key", b"sound")
    sites.link_all()
    found = sites.stored("rome", "users", b"key")
    origin = decode_value(found.stored).origin
    assert origin is not None
    rotten = encode_value(b"rotten", origin=Stamp(origin.version, origin.site ^ 128))
    sites.overwrite("rome", "users", b"key", found.version, rotten)
    sites.overwrite("bonn", "users", b"key", sites.stored("bonn", "users", b"key").version, None)
    assert [(drift.left.site, drift.right.site) for _, drift in sites.drifts()] == [("oslo", "bonn")]
    assert sites.repair() == RepairSummary(repaired=1)
    held = {name: sites.users(name).get(b"key") for name in sites.sites}
    assert held == {"oslo": b"sound", "rome": b"rotten", "bonn": b"sound"}
    doubts = [finding.doubt for _, finding in sites.find() if isinstance(finding, Lag)]
    assert len(doubts) == 2
    assert all("a stamp of site 129" in (doubt or "") for doubt in doubts)


def lose_and_forget_a_deletion(sites: Sites, namespace: str) -> None:
    """Oslo deletes a key, or a part of it, Rome does not hear of it, and the deletion is collected."""
    delete: dict[str, Callable[[Namespace[Any]], object]] = {
        "users": lambda users: users.delete(b"key"),
        "profiles": lambda profiles: profiles.delete_field(b"key", "city"),
        "counts": lambda counts: counts.delete(b"key"),
    }
    delete[namespace](sites["oslo"].namespace(namespace))
    sites.beat()
    sites.link("oslo", "rome", lost=b"key")
    for _ in range(2):
        sites.collect()


@pytest.mark.parametrize("namespace", POLICIES)
def test_a_lost_deletion_that_was_collected_meanwhile_is_not_undone(sites: Sites, namespace: str) -> None:
    """No trace of it is left, so it looks like a change that Oslo and Bonn have lost."""
    sites.users("oslo").put(b"key", b"1")
    sites["oslo"].namespace("profiles").put(b"key", {"city": "London", "name": "Ada"})
    sites["oslo"].namespace("counts").add(b"key", 3)
    sites.link_all()
    lose_and_forget_a_deletion(sites, namespace)
    before = {name: site.namespace(namespace).get(b"key") for name, site in sites.sites.items()}
    assert before["oslo"] != before["rome"]
    summary = sites.repair()
    assert (summary.repaired, summary.impossible) == (0, 1)
    assert "may have deleted that" in summary.problems[0]
    assert {name: site.namespace(namespace).get(b"key") for name, site in sites.sites.items()} == before


def test_what_is_newer_than_all_collected_deletions_is_given_back(sites: Sites) -> None:
    sites.users("oslo").put(b"other", b"1")
    sites.link_all()
    sites.users("oslo").delete(b"other")
    sites.beat()
    for _ in range(2):
        sites.collect()
    assert sites.horizon("rome")
    sites.users("oslo").put(b"key", b"1")
    sites.beat()
    sites.link("oslo", "rome", lost=b"key")
    sites.link_all()
    assert sites.repair() == RepairSummary(repaired=1)
    assert sites.users("rome").get(b"key") == b"1"
