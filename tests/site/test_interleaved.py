"""Two things at once, and one damaged thing among many: neither may spoil the rest."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.site.support import HookedEngine, host_of, node_of

import floodmark
from floodmark.codec.ordered import encode_key
from floodmark.model.errors import Corruption, LimitExceeded, StorageFailed, StorageFull, VersionCollected
from floodmark.model.limits import NAMESPACES_MAX
from floodmark.model.version import Version
from floodmark.site import Namespace, Site
from floodmark.testing import SimulatedTime

HOUR_MS = 3_600_000


def test_namespace_made_while_a_collection_begins_keeps_its_changes(
    site: Site, time: SimulatedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.create_namespace("short", retention=timedelta(0)).put(b"key", b"1")
    node = node_of(site)
    resolved = node.resolved_version
    written: list[Version] = []

    def resolve_and_create() -> Version:
        monkeypatch.setattr(node, "resolved_version", resolved)
        written.append(site.create_namespace("late").put(b"key", b"1"))
        time.advance(HOUR_MS)
        return resolved()

    monkeypatch.setattr(node, "resolved_version", resolve_and_create)
    site.collect_garbage()
    assert [change.version for change in site.changes("late")] == written


def test_refused_compare_and_set_does_not_hold_the_resolved_version(site: Site, users: Namespace) -> None:
    users.put(b"key", b"1")
    assert not users.compare_and_set(b"key", b"other", b"2")
    refused_at = site.now()
    assert site.resolved_version() > refused_at


def test_who_failed_together_with_others_does_not_recover_once_more(site: Site, engine: HookedEngine) -> None:
    storage = node_of(site).storage
    operations: list[str] = []
    engine.before = operations.append
    answers = iter([StorageFailed("being reopened"), None])

    def fail_once_while_another_recovers() -> int:
        if (error := next(answers)) is not None:
            storage.recoveries += 1
            raise error
        return 7

    assert storage.retry_recovered(fail_once_while_another_recovers) == 7
    assert "recover" not in operations


def test_settings_changed_by_two_at_once_are_both_kept(
    site: Site, users: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = node_of(site).storage
    settled: Callable[[], AbstractContextManager[None]] = storage.settled

    @contextmanager
    def settled_after_another() -> Iterator[None]:
        monkeypatch.setattr(storage, "settled", settled)
        site.update_namespace("users", ttl=timedelta(hours=1))
        with settled():
            yield

    monkeypatch.setattr(storage, "settled", settled_after_another)
    site.update_namespace("users", retention=timedelta(hours=2))
    assert (users.settings.ttl, users.settings.retention) == (timedelta(hours=1), timedelta(hours=2))


class Usage(NamedTuple):
    free: int


def full_disk(path: Path) -> Usage:
    assert path.is_dir()
    return Usage(0)


def test_writes_go_on_when_there_is_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with floodmark.open(tmp_path, site="oslo", background=False) as site:
        users = site.create_namespace("users")
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", full_disk)
            host_of(site).background.watch_disk()
            with pytest.raises(StorageFull):
                users.put(b"key", b"1")
        assert users.put(b"key", b"1")


def test_damaged_record_does_not_keep_the_garbage_of_others(
    site: Site, engine: HookedEngine, time: SimulatedTime
) -> None:
    for name in ("damaged", "sound"):
        namespace = site.create_namespace(name, retention=timedelta(0))
        version = namespace.put(b"key", b"old")
        namespace.put(b"key", b"new")
        if name == "damaged":
            engine.write([("data", encode_key(1, b"other", version), b"\xff")])
    time.advance(HOUR_MS)
    with pytest.raises(Corruption, match="other"):
        site.collect_garbage()
    sound = engine.scan("data", b"r\0\0\2", b"r\0\0\3", rows_max=10, bytes_max=1000)
    assert len(sound) == 1
    assert site.statistics().garbage.log_trimmed_version > version


def test_last_namespace_that_can_be_made_can_be_scanned(site: Site) -> None:
    host_of(site).catalog._next_id = NAMESPACES_MAX - 2
    last = site.create_namespace("last")
    last.put(b"key", b"1")
    assert list(last.scan()) == [(b"key", b"1")]
    with pytest.raises(LimitExceeded):
        site.create_namespace("excess")


def test_changes_that_come_too_late_are_refused_by_the_call_itself(site: Site, time: SimulatedTime) -> None:
    site.create_namespace("short", retention=timedelta(0)).put(b"key", b"1")
    time.advance(HOUR_MS)
    site.collect_garbage()
    with pytest.raises(VersionCollected):
        site.changes("short")


def test_changes_hold_what_they_have_to_read_from_the_call_on(site: Site, time: SimulatedTime) -> None:
    version = site.create_namespace("short", retention=timedelta(0)).put(b"key", b"1")
    unread = site.changes("short")
    time.advance(HOUR_MS)
    site.collect_garbage()
    assert [change.version for change in unread] == [version]
