"""Up to where nothing can come any more: the lowest of everything that is known of everybody."""

from floodmark.model.version import VERSION_MAX
from floodmark.replication.topology import MemberSite, SiteState, settled_version

THREE = {number: MemberSite(id=number) for number in (1, 2, 3)}
KNOWN = {1: {2: 50, 3: 60}, 2: {1: 40, 2: 80, 3: 70}, 3: {1: 90, 2: 45, 3: 75}}


def test_the_lowest_entry_of_any_member_counts() -> None:
    assert settled_version(1, THREE, KNOWN) == 40
    for holder, entries in KNOWN.items():
        for site in entries:
            lower = {**KNOWN, holder: {**entries, site: 7}}
            assert settled_version(1, THREE, lower) == 7


def test_what_is_not_known_counts_as_nothing() -> None:
    for holder, entries in KNOWN.items():
        assert settled_version(1, THREE, {**KNOWN, holder: {}}) == 0
        for site in entries:
            partly = {other: version for other, version in entries.items() if other != site}
            assert settled_version(1, THREE, {**KNOWN, holder: partly}) == 0


def test_a_site_that_is_no_member_settles_nothing() -> None:
    assert settled_version(9, THREE, KNOWN) == 0


def test_of_a_removed_site_everything_up_to_its_end_must_be_in_and_its_own_watermark_does_not_count() -> None:
    removed = {**THREE, 3: MemberSite(id=3, state=SiteState.REMOVED, final=65)}
    assert settled_version(1, removed, {1: {2: 70, 3: 60}, 2: {1: 80, 2: 90, 3: 65}}) == 60
    assert settled_version(1, removed, {1: {2: 70, 3: 65}, 2: {1: 80, 2: 90, 3: 64}}) == 64
    assert settled_version(1, removed, {1: {2: 70, 3: 65}, 2: {1: 80, 2: 90, 3: 66}}) == 70


def test_of_a_site_that_was_removed_without_an_end_nothing_is_known_to_be_the_last() -> None:
    removed = {**THREE, 3: MemberSite(id=3, state=SiteState.REMOVED)}
    assert settled_version(1, removed, {1: {2: 70, 3: 60}, 2: {1: 80, 2: 90, 3: 65}}) == 60


def test_alone_with_removed_sites_everything_is_settled() -> None:
    members = {1: MemberSite(id=1), 3: MemberSite(id=3, state=SiteState.REMOVED, final=5)}
    assert settled_version(1, members, {1: {3: 5}}) == VERSION_MAX
