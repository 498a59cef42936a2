"""A site in this process keeps the site's contract on every engine, and a site with a fault does not.

The second half of the sentence is what makes the first worth something: each fault below is one that a
site could plausibly have, and the contract must find it.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.site.base import (
    HOUR,
    SITE,
    SITE_ID,
    START_MS,
    SiteContractBase,
    open_in_memory,
)
from tests.contracts.site.contract import SiteContract
from tests.site.support import host_of

import floodmark
from floodmark.engine import Engine
from floodmark.host.catalog import NamespaceRow
from floodmark.merge.policies import MergePolicy
from floodmark.model.errors import FloodmarkError, NamespaceNotFound
from floodmark.model.partition import Partition
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version
from floodmark.routing import Router
from floodmark.site import Site
from floodmark.testing.clock import SimulatedTime


class TestSiteInMemory(SiteContract):
    def open_site(self, time: SimulatedTime, directory: Path) -> Site:
        return open_in_memory(time)

    def open_on(self, engine: Engine, time: SimulatedTime) -> Site:
        return open_in_memory(time, engine)


@pytest.mark.slow
class TestSiteInDirectory(SiteContract):
    def open_site(self, time: SimulatedTime, directory: Path) -> Site:
        return floodmark.open(directory, site=SITE, site_id=SITE_ID, background=False, time_source=time)


def test_no_part_of_the_contract_hides_a_test_of_another() -> None:
    """Two parts with a test of the same name would be one test in the whole, and the other would be lost."""
    parts = [part for part in SiteContract.__mro__ if issubclass(part, SiteContractBase)]
    names = Counter(name for part in parts for name in vars(part) if name.startswith("test_"))
    assert names.total() > 100
    assert [name for name, count in names.items() if count > 1] == []


# Faults


class ForgetfulRouter(Router):
    """Drops every seventh row of what is put."""

    def put(self, rows: Mapping[bytes, bytes], *, durable: bool) -> Version:
        kept = {key: value for number, (key, value) in enumerate(rows.items(), 1) if number % 7}
        return super().put(kept, durable=durable)


class SortingRouter(Router):
    """Answers in the order of the keys, and not in the order in which they were asked for."""

    def get_many(self, keys: Sequence[bytes], at: Version | None) -> list[bytes | None]:
        return super().get_many(sorted(keys), at)


class UnsortedRouter(Router):
    """Gives the first row of each page last."""

    def scan(
        self, keys: KeyRange, at: Version, limit: int | None, *, reverse: bool
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        for page in super().scan(keys, at, limit, reverse=reverse):
            yield page[1:] + page[:1]


class HastyRouter(Router):
    """Takes the first page for all of them."""

    def scan(
        self, keys: KeyRange, at: Version, limit: int | None, *, reverse: bool
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        yield from list(super().scan(keys, at, limit, reverse=reverse))[:1]


class RepeatingRouter(Router):
    """Merges what is written twice, as one would who calls again without looking."""

    def merge_one(self, key: bytes, state: bytes, *, durable: bool) -> Version:
        super().merge_one(key, state, durable=durable)
        return super().merge_one(key, state, durable=durable)


class TerseRouter(Router):
    """Raises the right errors, without their details."""

    def call(self, key: bytes, operation: Callable[[Partition], Any]) -> Any:
        try:
            return super().call(key, operation)
        except FloodmarkError as error:
            raise type(error)(str(error)) from error


def route_by(kind: type[Router]) -> Callable[[Site], None]:
    """Let a site find its partitions by another router."""

    def change(site: Site) -> None:
        host = host_of(site)
        host.router = kind(host.node)

    change.__qualname__ = kind.__name__
    return change


def hold_nothing(site: Site) -> None:
    """Scans do not keep garbage collection from what they still have to read."""

    host_of(site).reading = lambda *_: nullcontext()  # type: ignore[method-assign]


def run_late(site: Site) -> None:
    """Times to live begin a second too late."""
    told = host_of(site).physical_ms
    host_of(site).physical_ms = lambda: told() + 1_000  # type: ignore[method-assign]


def skip_changes(site: Site) -> None:
    """Of a batch with several changes, the last is left out."""
    read = host_of(site).changes

    def changes(request: ChangesRequest) -> Iterator[ChangeBatch]:
        return map(_without_last, read(request))

    host_of(site).changes = changes  # type: ignore[method-assign]


def _without_last(batch: ChangeBatch) -> ChangeBatch:
    if len(batch.keys) < 2:
        return batch
    columns = {name: getattr(batch, name)[:-1] for name in ("versions", "partitions", "keys", "values")}
    return replace(batch, **columns, befores=None if batch.befores is None else batch.befores[:-1])


def mumble(site: Site) -> None:
    """The right error with the right details, in other words."""
    host = host_of(site)
    find = host.namespaces.find_namespace

    def find_namespace(namespace: str) -> NamespaceRow:
        try:
            return find(namespace)
        except NamespaceNotFound as error:
            raise NamespaceNotFound("not found", **error.details) from error

    host.namespaces.find_namespace = find_namespace  # type: ignore[method-assign]


def leave_open(site: Site) -> None:
    """Closing does nothing."""
    site.close = lambda: None  # type: ignore[method-assign]


Fault = Callable[[Site], None]

# The namespaces that the tests of the contract ask for, and how they merge.
NAMESPACES: Mapping[str, MergePolicy] = {"users": "last_write", "people": "fields", "visits": "counter"}

# Each fault, and tests that must find it, whatever others do.
FAULTS: Mapping[Fault, Sequence[str]] = {
    route_by(ForgetfulRouter): [
        "test_keys_may_hold_every_byte",
        "test_everything_is_written_when_the_block_has_ended",
        "test_large_commits_come_whole",
        "test_any_history_has_the_outcomes_of_a_site_of_this_process",
    ],
    route_by(SortingRouter): [
        "test_get_many_answers_in_the_order_of_the_keys",
        "test_any_history_has_the_outcomes_of_a_site_of_this_process",
    ],
    route_by(UnsortedRouter): [
        "test_range_prefix_limit_and_direction_choose_rows",
        "test_long_scan_goes_over_pages_and_partitions",
        "test_any_history_has_the_outcomes_of_a_site_of_this_process",
    ],
    route_by(HastyRouter): [
        "test_long_scan_goes_over_pages_and_partitions",
        "test_scan_across_splits_and_merges_sees_each_row_once",
        "test_delete_range_of_many_keys_in_several_partitions",
    ],
    route_by(RepeatingRouter): [
        "test_counter_adds_up",
        "test_nothing_that_several_add_at_once_is_lost",
        "test_changes_show_whole_records",
    ],
    route_by(TerseRouter): ["test_version_that_was_collected_is_refused"],
    hold_nothing: [
        "test_open_scan_keeps_what_it_has_to_read",
        "test_scan_of_a_past_version_keeps_it_from_the_call_on",
    ],
    run_late: [
        "test_time_to_live_is_rounded_up_to_whole_seconds",
        "test_time_to_live_begins_at_the_time_of_the_site",
    ],
    skip_changes: [
        "test_since_is_exclusive_and_until_is_inclusive",
        "test_reading_may_go_on_from_any_change",
        "test_what_was_acknowledged_is_not_delivered_again",
    ],
    mumble: [
        "test_name_that_is_not_there_is_not_found",
        "test_bad_input_is_refused_as_by_a_site_of_this_process",
    ],
    leave_open: ["test_closed_site_refuses_every_call", "test_site_is_closed_at_the_end_of_its_block"],
}


class FaultySite(SiteContract):
    """The contract over a site in memory with a fault."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def open_site(self, time: SimulatedTime, directory: Path) -> Site:
        site = open_in_memory(time)
        self._fault(site)
        return site


def failures(contract: SiteContract, name: str, directory: Path) -> list[str]:
    """Run one test of the contract with all its parameters, without pytest; what went wrong."""
    test = getattr(contract, name)
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    names = [mark.args[0] for mark in marks]
    found = []
    for values in product(*(list(mark.args[1]) for mark in marks)):
        time = SimulatedTime(START_MS)
        with contract.open_site(time, directory) as site:
            given = dict(zip(names, values, strict=True)) | {"time": time, "site": site}
            for each, policy in NAMESPACES.items():
                if each in inspect.signature(test).parameters:
                    given[each] = site.create_namespace(each, merge=policy, retention=HOUR)
            try:
                test(**{name: given[name] for name in inspect.signature(test).parameters})
            except (Exception, pytest.fail.Exception) as error:
                found.append(f"{values}: {error!r}")
    return found


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        pytest.param(fault, name, id=f"{fault.__qualname__}-{name}")
        for fault, names in FAULTS.items()
        for name in names
    ],
)
def test_contract_finds_a_fault(fault: Fault, name: str, tmp_path: Path) -> None:
    assert failures(FaultySite(fault), name, tmp_path)


@pytest.mark.slow
def test_contract_finds_no_fault_where_there_is_none(tmp_path: Path) -> None:
    contract = FaultySite(lambda _: None)
    names = {name for names in FAULTS.values() for name in names}
    assert {name: failures(contract, name, tmp_path) for name in names} == {name: [] for name in names}
