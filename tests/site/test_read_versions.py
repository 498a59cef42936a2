"""At which versions transactions begin to read, by a clock of the test's own."""

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from floodmark.site.read_versions import ReadVersions

SECOND = timedelta(seconds=1)


class Answers:
    """A site that answers with ever higher versions, after a delay."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.delay = 0.001
        self.version = 100
        self.versions = ReadVersions(
            self.answer, slow_answer=timedelta(milliseconds=10), time_seconds=lambda: self.seconds
        )

    def answer(self) -> int:
        self.seconds += self.delay
        self.version += 1
        return self.version


@pytest.fixture
def site() -> Answers:
    return Answers()


def test_first_version_is_asked_for(site: Answers) -> None:
    assert site.versions.cached(SECOND) == 101
    assert site.versions.cached(SECOND) == 101


def test_version_that_is_too_old_is_asked_for_again(site: Answers) -> None:
    site.versions.fresh()
    # From the moment of the question: what was written during the answer may be missing in it.
    site.seconds = 1.0
    assert site.versions.cached(SECOND) == 101
    site.seconds = 1.001
    assert site.versions.cached(SECOND) == 102


def test_commits_are_seen_by_what_comes_later(site: Answers) -> None:
    site.versions.fresh()
    site.versions.saw(500)
    site.versions.saw(400)
    assert site.versions.cached(SECOND) == 500
    assert site.versions.fresh() == 500, "a node that is behind must not take the client back"


def test_cache_steps_aside_while_answers_are_slow(site: Answers) -> None:
    site.delay = 0.011
    assert [site.versions.cached(SECOND) for _ in range(3)] == [101, 102, 103]
    site.delay = 0.009
    assert [site.versions.cached(SECOND) for _ in range(3)] == [104, 104, 104]
    counts = site.versions.counts
    assert (counts.asked, counts.slow, counts.cached) == (4, 3, 2)


def test_many_threads_never_get_a_version_older_than_one_they_saw() -> None:
    """A version that one thread notes is not lost to another that notes a lower one at the same time."""
    versions = ReadVersions(lambda: 1, time_seconds=lambda: 0.0)
    threads, rounds = 8, 2_000
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:

            def work(thread: int) -> None:
                for number in range(1, rounds + 1):
                    version = thread + threads * number
                    versions.saw(version)
                    assert versions.cached() >= version

            for _ in pool.map(work, range(threads)):
                pass
    finally:
        sys.setswitchinterval(interval)
    assert versions.cached() == threads * (rounds + 1) - 1
    assert versions.counts.cached == threads * rounds + 1
