"""Repair: all sites get what they would hold if everything had arrived, and nothing else is written."""

from collections.abc import Sequence
from functools import reduce
from itertools import combinations
from typing import NamedTuple, cast

import pytest
from tests.divergence.worlds import KEYS, Site, World, visible

from floodmark.codec.states import CounterEntry, CounterState, Field, FieldsState, decode_state, encode_state
from floodmark.codec.thin import digest_record
from floodmark.codec.values import decode_value, encode_value
from floodmark.divergence.comparing import Drift, DriftSide
from floodmark.divergence.repairing import KEYS_AT_ONCE, Choice, Copy, RepairSummary, choose_repair, repair
from floodmark.divergence.rules import Verdict, verdict
from floodmark.host.directory import Identity
from floodmark.host.ports import Host
from floodmark.merge.states import merge_states
from floodmark.model.change import Stamp
from floodmark.model.errors import (
    ClockSkew,
    Corruption,
    FloodmarkError,
    InvalidArgument,
    LimitExceeded,
    NotAllowed,
    PartlyDone,
    Unreachable,
)
from floodmark.model.record import FoundRecord, Repair
from floodmark.model.version import Version

STEPS = 60


# Which record is chosen


def put(value: bytes, stamp: Stamp) -> bytes:
    return encode_value(value, origin=stamp)


def test_the_highest_stamp_wins() -> None:
    copies = [Copy(1, 20, put(b"old", Stamp(5, 2))), Copy(2, 21, put(b"new", Stamp(6, 1)))]
    assert choose_repair(copies) == choose_repair(copies[::-1]) == Choice(put(b"new", Stamp(6, 1)))


def test_what_was_written_where_it_is_gets_its_stamp() -> None:
    assert choose_repair([Copy(1, 20, encode_value(b"own"))]) == Choice(put(b"own", Stamp(20, 1)))


def test_a_tombstone_that_is_newer_wins() -> None:
    tombstone = encode_value(b"", deleted=True, origin=Stamp(6, 1))
    assert choose_repair([Copy(1, 20, put(b"old", Stamp(5, 2))), Copy(2, 21, tombstone)]) == Choice(tombstone)


def test_of_equal_stamps_the_copy_of_the_origin_is_believed() -> None:
    damaged, right = put(b"x", Stamp(5, 2)), put(b"1", Stamp(5, 2))
    copies = [Copy(1, 20, damaged), Copy(2, 21, right), Copy(3, 9, damaged)]
    assert choose_repair(copies) == Choice(right)


def test_without_the_origin_it_cannot_be_known_which_bytes_are_right() -> None:
    choice = choose_repair([Copy(1, 20, put(b"x", Stamp(5, 3))), Copy(2, 21, put(b"1", Stamp(5, 3)))])
    assert choice.stored is None
    assert choice.problem is not None
    assert "site 3" in choice.problem


def test_records_of_different_kinds_are_left_alone() -> None:
    counter = encode_state(CounterState(None, (CounterEntry(1, 9, 5),)))
    assert choose_repair([Copy(1, 20, counter), Copy(2, 21, put(b"5", Stamp(9, 1)))]).stored is None


def test_states_are_joined() -> None:
    oslo = encode_state(CounterState(None, (CounterEntry(1, 9, 5), CounterEntry(2, 3, 1))))
    rome = encode_state(CounterState(None, (CounterEntry(1, 4, 2), CounterEntry(2, 8, 7))))
    chosen = choose_repair([Copy(1, 20, oslo), Copy(2, 21, rome)]).stored
    assert chosen is not None
    assert decode_state(chosen) == CounterState(None, (CounterEntry(1, 9, 5), CounterEntry(2, 8, 7)))
    assert decode_value(chosen).origin == Stamp(9, 1)


@pytest.mark.parametrize("turned", [False, True])
def test_a_part_with_equal_stamps_and_different_bytes_is_that_of_its_origin(turned: bool) -> None:
    right = FieldsState(None, (Field("a", b"1", Stamp(5, 2)), Field("b", b"1", Stamp(6, 1))))
    damaged = FieldsState(None, (Field("a", b"9", Stamp(5, 2)), Field("b", b"9", Stamp(6, 1))))
    copies = [Copy(1, 20, encode_state(damaged)), Copy(2, 21, encode_state(right))]
    chosen = choose_repair(copies[::-1] if turned else copies).stored
    assert chosen is not None
    # Each of the two is believed in what it wrote itself.
    assert decode_state(chosen) == FieldsState(
        None, (Field("a", b"1", Stamp(5, 2)), Field("b", b"9", Stamp(6, 1)))
    )


def test_a_part_whose_origin_is_not_there_cannot_be_known() -> None:
    copies = [
        Copy(site, 20, encode_state(FieldsState(None, (Field("a", text, Stamp(5, 3)),))))
        for site, text in ((1, b"1"), (2, b"2"))
    ]
    assert choose_repair(copies).stored is None


def test_a_record_with_a_stamp_that_cannot_be_is_no_source() -> None:
    sound = Copy(1, 20, put(b"sound", Stamp(5, 1)))
    for stamp in (Stamp(22, 1), Stamp(5, 130)):
        rotten = Copy(2, 21, put(b"rotten", stamp), is_named=False)
        assert choose_repair([sound, rotten], {1, 2}) == Choice(sound.stored)
        assert choose_repair([rotten], {1, 2}).stored is None
    # Where nobody says who may have written, only the version tells.
    assert choose_repair([sound, Copy(2, 21, put(b"new", Stamp(5, 130)))]).stored == put(
        b"new", Stamp(5, 130)
    )


def test_a_damaged_record_gives_way_only_to_a_site_that_has_heard_of_whatever_it_was() -> None:
    damaged = Copy(1, 20, put(b"new", Stamp(1 << 62, 3)), mark={1: 30, 2: 10, 3: 20})
    lagging = Copy(2, 8, put(b"old", Stamp(5, 1)), mark={1: 30, 2: 40, 3: 19})
    refused = choose_repair([damaged, lagging])
    assert (refused.stored, "has heard of all" in (refused.problem or "")) == (None, True)
    heard = lagging._replace(mark={1: 30, 2: 40, 3: 20})
    assert choose_repair([damaged, heard]) == Choice(put(b"old", Stamp(5, 1)))


def test_of_a_damaged_merged_record_only_what_cannot_be_gives_way() -> None:
    damaged = Copy(
        1,
        20,
        encode_state(CounterState(None, (CounterEntry(1, 9, 5), CounterEntry(3, 1 << 62, 99)))),
        mark={1: 30, 2: 10, 3: 20},
    )
    other = Copy(2, 12, encode_state(CounterState(None, (CounterEntry(2, 8, 7), CounterEntry(3, 11, 1)))))
    assert choose_repair([damaged, other._replace(mark={1: 30, 2: 40, 3: 19})]).stored is None
    chosen = choose_repair([damaged, other._replace(mark={1: 30, 2: 40, 3: 20})]).stored
    assert chosen is not None
    assert decode_state(chosen) == CounterState(
        None, (CounterEntry(1, 9, 5), CounterEntry(2, 8, 7), CounterEntry(3, 11, 1))
    )


def test_what_only_a_lagging_site_has_is_believed_if_it_was_written_there_or_its_origin_has_it() -> None:
    old = Copy(1, 20, put(b"old", Stamp(5, 1)))
    own = Copy(2, 21, encode_value(b"own"), is_named=False)
    assert choose_repair([old, own]) == Choice(put(b"own", Stamp(21, 2)))
    copied = Copy(2, 21, put(b"new", Stamp(9, 3)), is_named=False)
    refused = choose_repair([old, copied])
    assert (refused.stored, "only lags" in (refused.problem or "")) == (None, True)
    origin = Copy(3, 9, encode_value(b"new"), is_named=False)
    assert choose_repair([old, copied, origin]) == Choice(put(b"new", Stamp(9, 3)))
    assert choose_repair([old, copied._replace(is_named=True)]) == Choice(put(b"new", Stamp(9, 3)))


def test_of_a_merged_record_what_only_a_lagging_site_has_is_left_out_unless_it_is_confirmed() -> None:
    def state(*entries: CounterEntry, deleted: Stamp | None = None) -> bytes:
        return encode_state(CounterState(deleted, entries))

    named = Copy(1, 20, state(CounterEntry(1, 9, 5)))
    lagging = Copy(
        2, 21, state(CounterEntry(2, 8, 7), CounterEntry(3, 11, 1), deleted=Stamp(4, 3)), is_named=False
    )
    chosen = choose_repair([named, lagging]).stored
    assert chosen is not None
    assert decode_state(chosen) == CounterState(None, (CounterEntry(1, 9, 5), CounterEntry(2, 8, 7)))
    origin = Copy(3, 12, state(CounterEntry(3, 11, 1), deleted=Stamp(4, 3)), is_named=False)
    chosen = choose_repair([named, lagging, origin]).stored
    assert chosen is not None
    assert decode_state(chosen) == CounterState(
        Stamp(4, 3), (CounterEntry(1, 9, 5), CounterEntry(2, 8, 7), CounterEntry(3, 11, 1))
    )


@pytest.mark.parametrize("altered", [CounterEntry(3, 22, 1), CounterEntry(130, 9, 1)])
def test_a_merged_record_with_a_stamp_that_cannot_be_is_not_written_over(altered: CounterEntry) -> None:
    copies = [
        Copy(site, 21, encode_state(CounterState(None, entries)))
        for site, entries in ((1, (CounterEntry(1, 9, 5),)), (2, (CounterEntry(2, 8, 7), altered)))
    ]
    assert choose_repair(copies, {1, 2, 3}).stored is None
    # Nor is it a source if it is not to be written over.
    unnamed = [copies[0], copies[1]._replace(is_named=False)]
    chosen = choose_repair(unnamed, {1, 2, 3}).stored
    assert chosen is not None
    assert decode_state(chosen) == CounterState(None, (CounterEntry(1, 9, 5),))


# Whole sites


class ModelHost:
    """A site of a small world, as repair reaches it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.identity = Identity(site=f"site-{site.id}", site_id=site.id, format=1)
        self.written: list[Repair] = []

        self.versions = self.replication = self.membership = self.status = self.verification = self

    def read_version(self) -> Version:
        return self.site.clock

    def find_records(
        self, namespace: str, keys: list[bytes], at: Version, thin: bool
    ) -> list[FoundRecord | None]:
        assert len(keys) <= KEYS_AT_ONCE
        assert not thin
        found = [self.site.find(key, at) for key in keys]
        return [None if each is None else FoundRecord(*each, digest_record(each[1])) for each in found]

    def repair_records(self, namespace: str, repairs: list[Repair]) -> list[bool]:
        done = []
        for each in repairs:
            found = self.site.find(each.key, self.site.clock)
            fits = each.seen == (0 if found is None else found[0])
            done.append(fits)
            if fits:
                self.written.append(each)
                self.site.clock += 1
                self.site.records.setdefault(each.key, []).append((self.site.clock, each.stored))
        return done

    def watermark(self, namespace: str, at: Version | None) -> dict[int, Version]:
        return self.site.mark(self.site.clock if at is None else at)

    def topology(self) -> None:
        return None

    def links(self) -> object:
        return ()

    def statistics(self) -> "ModelStatistics":
        return ModelStatistics([ModelNamespace("users", self.site.horizon)])


def mend(hosts: Sequence[ModelHost], namespace: str, drifts: Sequence[Drift]) -> RepairSummary:
    """Repair sites that have all that repair asks for."""
    return repair([cast(Host, host) for host in hosts], namespace, drifts)


class ModelStatistics(NamedTuple):
    namespaces: list["ModelNamespace"]


class ModelNamespace(NamedTuple):
    name: str
    collected_horizon: Version


def find_drifts(hosts: Sequence[ModelHost]) -> list[Drift]:
    drifts = []
    for key in KEYS:
        for left, right in combinations(hosts, 2):
            found = verdict(
                *(host.site.side(key, host.site.clock, host.site.horizon) for host in (left, right))
            )
            if found.is_drift:
                drifts.append(Drift(key, found, seen_of(left, key), seen_of(right, key)))
    return drifts


def seen_of(host: ModelHost, key: bytes) -> DriftSide:
    found = host.site.find(key, host.site.clock)
    mark = dict.fromkeys((1, 2, 3), host.site.clock)
    return DriftSide(host.identity.site, 0 if found is None else found[0], None, mark, None, False)


def test_after_a_repair_all_sites_of_a_world_agree_and_hold_what_was_written() -> None:
    repaired = 0
    for seed in range(250):
        world = World(seed, losses=0.3)
        world.live(STEPS)
        world.drain()
        hosts = [ModelHost(site) for site in world.sites]
        drifts = find_drifts(hosts)
        expected = {key: join_of(world, key) for key in {drift.key for drift in drifts}}
        summary = mend(hosts, "users", drifts)
        assert summary == RepairSummary(repaired=len(expected)), f"seed {seed}"
        assert find_drifts(hosts) == [], f"seed {seed}"
        now_ms = max(site.clock for site in world.sites) >> 18
        for key, held in expected.items():
            values = [visible(site, key, now_ms) for site in world.sites]
            assert values.count(values[0]) == len(values)
            for host in hosts:
                assert all(digest_record(each.stored) == held for each in host.written if each.key == key)
        repaired += summary.repaired
    assert repaired > 50


def join_of(world: World, key: bytes) -> int:
    """The digest of what the sites hold of a key together."""
    held = [(*found, site.id) for site in world.sites if (found := site.find(key, site.clock)) is not None]
    if key.startswith(b"last"):
        newest = max(held, key=lambda each: decode_value(each[1]).origin or Stamp(each[0], each[2]))
        return digest_record(newest[1])
    return digest_record(reduce(merge_states, [stored for _, stored, _ in held]))


def two_sites(left: bytes | None, right: bytes | None) -> list[ModelHost]:
    hosts = [ModelHost(Site(number, 0, clock=50)) for number in (1, 2)]
    for host, stored in zip(hosts, (left, right), strict=True):
        if stored is not None:
            host.site.records[b"ada"] = [(40, stored)]
    return hosts


def drift_of(hosts: Sequence[ModelHost], key: bytes = b"ada") -> Drift:
    return Drift(key, Verdict.VALUE_MISMATCH, seen_of(hosts[0], key), seen_of(hosts[1], key))


def test_what_has_changed_since_it_was_seen_is_left_alone() -> None:
    hosts = two_sites(put(b"1", Stamp(5, 1)), put(b"2", Stamp(6, 2)))
    drift = drift_of(hosts)
    hosts[0].site.records[b"ada"].append((45, put(b"3", Stamp(45, 1))))
    assert mend(hosts, "users", [drift]) == RepairSummary(changed_meanwhile=1)
    assert hosts[0].written == hosts[1].written == []


def test_what_changes_under_the_eyes_of_repair_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = two_sites(put(b"1", Stamp(5, 1)), put(b"2", Stamp(6, 2)))
    drift, write = drift_of(hosts), hosts[0].repair_records

    def write_late(namespace: str, repairs: list[Repair]) -> list[bool]:
        hosts[0].site.records[b"ada"].append((45, put(b"3", Stamp(45, 1))))
        return write(namespace, repairs)

    monkeypatch.setattr(hosts[0], "repair_records", write_late)
    assert mend(hosts, "users", [drift]) == RepairSummary(changed_meanwhile=1)


def test_a_record_is_given_to_who_lacks_it_and_never_taken_away() -> None:
    hosts = two_sites(None, put(b"1", Stamp(6, 2)))
    assert mend(hosts, "users", [drift_of(hosts)]) == RepairSummary(repaired=1)
    assert hosts[0].written == [Repair(b"ada", 0, put(b"1", Stamp(6, 2)))]
    assert hosts[1].written == []


def test_what_cannot_be_repaired_is_told_with_its_reason() -> None:
    hosts = two_sites(put(b"1", Stamp(5, 3)), put(b"2", Stamp(5, 3)))
    summary = mend(hosts, "users", [drift_of(hosts)])
    assert (summary.repaired, summary.impossible) == (0, 1)
    assert "b'ada': sites hold different bytes under one stamp" in summary.problems[0]


def test_a_site_that_was_not_found_to_differ_is_a_source_and_not_written_to() -> None:
    hosts = two_sites(put(b"x", Stamp(5, 3)), put(b"y", Stamp(5, 3)))
    origin = ModelHost(Site(3, 0, clock=50))
    origin.site.records[b"ada"] = [(5, encode_value(b"1"))]
    summary = mend([*hosts, origin], "users", [drift_of(hosts)])
    assert summary == RepairSummary(repaired=1)
    assert [each.stored for host in hosts for each in host.written] == [put(b"1", Stamp(5, 3))] * 2
    assert origin.written == []


@pytest.mark.parametrize("error", [ClockSkew, InvalidArgument, LimitExceeded, PartlyDone, Corruption])
@pytest.mark.parametrize("call", ["find_records", "repair_records"])
def test_a_key_that_cannot_be_repaired_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch, error: type[FloodmarkError], call: str
) -> None:
    hosts = two_sites(None, None)
    keys = [b"%04d" % number for number in range(KEYS_AT_ONCE + 10)]
    for key in keys:
        hosts[1].site.records[key] = [(40, encode_value(key))]
    act = getattr(hosts[0], call)

    def refuse(namespace: str, some: list[bytes] | list[Repair], *others: object) -> object:
        if b"0007" in [each.key if isinstance(each, Repair) else each for each in some]:
            raise error("refused")
        return act(namespace, some, *others)

    monkeypatch.setattr(hosts[0], call, refuse)
    summary = mend(hosts, "users", [drift_of(hosts, key) for key in keys])
    assert (summary.repaired, summary.changed_meanwhile, summary.impossible) == (len(keys) - 1, 0, 1)
    (problem,) = summary.problems
    assert problem.startswith("b'0007': site-1 ")
    assert problem.endswith(": refused")


@pytest.mark.parametrize("error", [NotAllowed, Unreachable])
def test_a_site_that_takes_nothing_is_not_asked_for_each_key(
    monkeypatch: pytest.MonkeyPatch, error: type[FloodmarkError]
) -> None:
    hosts = two_sites(None, None)
    keys = [b"%04d" % number for number in range(10)]
    asked = []
    for key in keys:
        hosts[1].site.records[key] = [(40, encode_value(key))]

    def refuse(_: str, repairs: list[Repair]) -> list[bool]:
        asked.append(len(repairs))
        raise error("refused")

    monkeypatch.setattr(hosts[0], "repair_records", refuse)
    summary = mend(hosts, "users", [drift_of(hosts, key) for key in keys])
    assert (summary.repaired, summary.impossible, asked) == (0, 10, [10])


def test_the_right_bytes_under_a_stamp_that_cannot_be_are_written_again() -> None:
    hosts = two_sites(put(b"1", Stamp(5, 3)), put(b"1", Stamp(60, 3)))
    assert mend(hosts, "users", [drift_of(hosts)]) == RepairSummary(repaired=1)
    assert hosts[1].written == [Repair(b"ada", 40, put(b"1", Stamp(5, 3)))]


def test_many_keys_are_repaired_a_few_at_a_time() -> None:
    hosts = two_sites(None, None)
    keys = [b"%04d" % number for number in range(3 * KEYS_AT_ONCE + 1)]
    for key in keys:
        hosts[1].site.records[key] = [(40, encode_value(key))]
    assert mend(hosts, "users", [drift_of(hosts, key) for key in keys]).repaired == len(keys)
    assert [hosts[0].site.newest(key) for key in keys] == [put(key, Stamp(40, 2)) for key in keys]
