"""Threads for minutes: writers, readers, splits, merges and collections all at once."""

from contextlib import suppress
from datetime import timedelta
from random import Random

import pytest
from tests.site.support import state_after, stored_versions
from tests.site.test_threads import Writers, contents, restless_interpreter

from floodmark.model.change import Change
from floodmark.model.errors import PartitionNotFound, VersionCollected
from floodmark.site import Site

# A fixture for these tests.
__all__ = ["restless_interpreter"]

pytestmark = pytest.mark.soak

STEPS = 5000


def test_everything_at_once_loses_nothing(real_site: Site) -> None:
    users = real_site.create_namespace("users", retention=timedelta(days=1))
    churn = real_site.create_namespace("churn", retention=timedelta(0))
    writers = Writers(users)
    followed: list[Change] = []

    def follow() -> None:
        position, last = 0, False
        while not last:
            last = writers.done.is_set()
            resolved = real_site.resolved_version()
            assert resolved >= position, "the resolved version went back"
            if resolved > position:
                followed.extend(real_site.changes("users", since=position, until=resolved))
                position = resolved

    def reshape() -> None:
        chance, written = Random(5), 0
        while not writers.done.is_set():
            if len(writers.acknowledged) < written + 50:
                writers.done.wait(0.001)
                continue
            written = len(writers.acknowledged)
            partitions = real_site.partitions()
            with suppress(PartitionNotFound):
                if len(partitions) > 1 and chance.random() < len(partitions) / 10:
                    index = chance.randrange(len(partitions) - 1)
                    real_site.merge(partitions[index].id, partitions[index + 1].id)
                else:
                    real_site.split("users", b"key-%d" % chance.randrange(8))

    def collect() -> None:
        while not writers.done.is_set():
            real_site.collect_garbage()
            real_site.heartbeat()
            writers.done.wait(0.01)

    def churn_and_scan() -> None:
        step = 0
        while not writers.done.is_set():
            churn.put_many({b"%d" % index: b"%d" % step for index in range(10)})
            with suppress(VersionCollected):
                assert len({value for _, value in churn.scan()}) <= 10
            churn.delete_range()
            step += 1

    writers.run(STEPS, follow, reshape, collect, churn_and_scan, seconds=600)
    changes = list(real_site.changes("users"))
    followed += real_site.changes("users", since=followed[-1].version)
    assert contents(followed) == contents(changes)
    assert len(changes) == len(writers.acknowledged)
    assert state_after(changes) == dict(users.scan())
    assert stored_versions(real_site, "users") == {(change.key, change.version) for change in changes}
