"""How a record's expiry becomes a change: a random model of the rule, and of rules that are nearly right.

A site keeps an index of its records by the second in which they expire.  When that has passed, it writes the
record once more, at a new commit version and under the stamp that it always had, if it is still the newest of
its key.  Everything else follows from that: the stamp decides between sites as before, and a reader of the
log finds a record that is dead at its own version, which is a delete.

The model runs sites that copy each other with delay, prepared writes that commit below others, restarts,
splits, garbage collection and followers that resume from a position or begin with a snapshot.  In the end
all sites must hold the write with the highest stamp, every follower what its site holds, and none is told
of an expiry twice.
"""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

KEYS = "ab"
RUNS = 2_000


class Stored(NamedTuple):
    version: int
    stamp: tuple[int, int]
    value: int
    expires: int | None

    def is_dead(self, now: int) -> bool:
        return self.expires is not None and self.expires <= now


class ModelSite:
    """Versions are ten to a second, so that `version // 10` is their time."""

    def __init__(self, number: int, mode: str) -> None:
        self.number, self.mode, self.latest = number, mode, 0
        self.data: dict[str, list[Stored]] = {key: [] for key in KEYS}
        self.logs: list[dict[int, dict[str, Stored]]] = [{}]
        self.index: set[tuple[int, str, int]] = set()
        self.told = 0
        self.forgotten: set[tuple[str, tuple[int, int]]] = set()
        self.prepared: dict[str, tuple[int, int, int | None]] = {}
        self.sent = dict.fromkeys(range(3), 0)

    def mint(self, now: int) -> int:
        self.latest = max(self.latest + 1, now * 10)
        return self.latest

    def resolved(self, now: int) -> int:
        return min([self.mint(now), *(version - 1 for version, _, _ in self.prepared.values())])

    def newest(self, key: str, at: int) -> Stored | None:
        return max((each for each in self.data[key] if each.version <= at), default=None)

    def store(self, key: str, record: Stored) -> None:
        """Commit, perhaps below others: those that the commit wins over would not have been stored."""
        below = self.newest(key, record.version)
        if below is not None and below.stamp >= record.stamp:
            return
        for above in [each for each in self.data[key] if each.version > record.version]:
            if above.stamp < record.stamp:
                self._remove(key, above)
        self._write(key, record)
        if record.expires is not None:
            self.index.add((record.expires, key, record.version))

    def _write(self, key: str, record: Stored) -> None:
        self.data[key].append(record)
        self.logs[-1].setdefault(record.version, {})[key] = record

    def _remove(self, key: str, record: Stored) -> None:
        self.data[key].remove(record)
        for log in self.logs:
            log.get(record.version, {}).pop(key, None)

    def expire(self, now: int, rows_max: int) -> None:
        """One turn: at most so many rows of the index."""
        for row in sorted(row for row in self.index if row[0] <= now)[:rows_max]:
            self.index.remove(row)
            expires, key, version = row
            newest = max(self.data[key], default=None)
            if newest is None or (newest.version != version and self.mode != "blind"):
                continue
            if expires <= version // 10 and self.mode != "repeating":
                # It was dead when it came, and nobody has seen it alive.
                continue
            at = self.mint(now)
            stamp = (at, self.number) if self.mode == "fresh stamp" else newest.stamp
            dead = now if self.mode in ("fresh stamp", "blind") else newest.expires
            self._write(key, newest._replace(version=at, stamp=stamp, expires=dead))
        if not any(row[0] <= now for row in self.index):
            self.told = now

    def collect(self, safe_point: int) -> None:
        judged = safe_point // 10 if self.mode == "collecting first" else min(safe_point // 10, self.told)
        for key, records in self.data.items():
            newest = self.newest(key, safe_point)
            if newest is None:
                continue
            self.data[key] = [each for each in records if each.version >= newest.version]
            if newest.is_dead(judged) and min(self.sent.values()) >= newest.version:
                self.data[key].remove(newest)
                self.forgotten.add((key, newest.stamp))

    def changes(self, since: int, until: int) -> list[tuple[int, str, Stored]]:
        return sorted(
            (version, key, record)
            for log in self.logs
            for version, commit in log.items()
            for key, record in commit.items()
            if since < version <= until
        )


class ModelFollower:
    def __init__(self, site: ModelSite, now: int) -> None:
        self.site, self.view, self.ends = site, dict[str, Stored](), list[tuple[str, tuple[int, int]]]()
        self.position = site.resolved(now)
        for key in KEYS:
            record = site.newest(key, self.position)
            if record is not None and not record.is_dead(self.position // 10):
                self.view[key] = record

    def follow(self, now: int) -> None:
        until = self.site.resolved(now)
        for version, key, record in self.site.changes(self.position, until):
            if record.is_dead(max(now, version // 10)):
                self.view.pop(key, None)
                if record.version // 10 >= (record.expires or 0):
                    self.ends.append((key, record.stamp))
            else:
                self.view[key] = record
        self.position = until


class ModelHistory:
    """Three sites, their followers and links, and a random order of what they do."""

    def __init__(self, seed: int, mode: str) -> None:
        self.rnd, self.mode, self.now = random.Random(seed), mode, 1
        self.sites = [ModelSite(number, mode) for number in range(3)]
        self.followers = [ModelFollower(site, self.now) for site in self.sites]
        self.written: dict[str, list[Stored]] = {key: [] for key in KEYS}

    def put(self, site: ModelSite) -> None:
        at = site.mint(self.now)
        expires = self.now + self.rnd.randrange(0, 4) if self.rnd.random() < 0.7 else None
        key, value = self.rnd.choice(KEYS), self.rnd.randrange(99)
        self.write(site, key, Stored(at, (at, site.number), value, expires))

    def write(self, site: ModelSite, key: str, record: Stored) -> None:
        self.written[key].append(record)
        site.store(key, record)

    def prepare(self, site: ModelSite) -> None:
        key, value = self.rnd.choice(KEYS), self.rnd.randrange(99)
        if key not in site.prepared:
            expires = self.rnd.choice((None, self.now + self.rnd.randrange(1, 5)))
            site.prepared[key] = site.mint(self.now), value, expires

    def commit(self, site: ModelSite) -> None:
        for key, (version, value, expires) in list(site.prepared.items()):
            at = version if self.rnd.random() < 0.6 else site.mint(self.now)
            del site.prepared[key]
            self.write(site, key, Stored(at, (at, site.number), value, expires))

    def copy(self, source: ModelSite, targets: Sequence[ModelSite]) -> None:
        for target in targets:
            if target is source:
                continue
            until = source.resolved(self.now)
            for _, key, record in source.changes(source.sent[target.number], until):
                if record.stamp[1] == source.number:
                    target.latest = max(target.latest, record.stamp[0])
                    target.store(key, record._replace(version=target.mint(self.now)))
            source.sent[target.number] = until

    def collect(self, site: ModelSite) -> None:
        held = [each.position for each in self.followers if each.site is site]
        site.collect(min([site.resolved(self.now), *held]))

    def restart(self, site: ModelSite) -> None:
        site.told = 0
        if self.mode == "index in memory":
            site.index.clear()

    def follow(self, site: ModelSite) -> None:
        for follower in self.followers:
            if follower.site is site and self.rnd.random() < 0.8:
                follower.follow(self.now)

    def step(self) -> None:
        """Let one site do something, or time pass."""
        site, step = self.rnd.choice(self.sites), self.rnd.random()
        site.sent[site.number] = site.resolved(self.now)
        if step < 0.25:
            self.put(site)
        elif step < 0.32:
            self.prepare(site)
        elif step < 0.4:
            self.commit(site)
        elif step < 0.55:
            self.copy(site, self.rnd.sample(self.sites, 2))
        elif step < 0.68:
            site.expire(self.now, self.rnd.randrange(1, 3))
        elif step < 0.74:
            self.collect(site)
        elif step < 0.77:
            self.restart(site)
        elif step < 0.8:
            site.logs.append({})
        elif step < 0.84:
            self.followers.append(ModelFollower(site, self.now))
        elif step < 0.92:
            self.follow(site)
        else:
            self.now += self.rnd.randrange(1, 3)

    def finish(self) -> None:
        """Let all expire that is to expire, and copy all."""
        self.now += 20
        for _ in range(2):
            for site in self.sites:
                self.commit(site)
                site.expire(self.now, 1_000)
                self.copy(site, self.sites)


def run(seed: int, mode: str) -> list[str]:
    """One history; what is wrong in the end."""
    history = ModelHistory(seed, mode)
    for _ in range(history.rnd.randrange(10, 60)):
        history.step()
    history.finish()
    winners = {
        key: max(records, key=lambda each: each.stamp) for key, records in history.written.items() if records
    }
    return list(judge(history.sites, history.followers, alive(winners, history.now), history.now))


def alive(records: dict[str, Stored], now: int) -> dict[str, int]:
    return {key: record.value for key, record in records.items() if not record.is_dead(now)}


def judge(
    sites: list[ModelSite], followers: list[ModelFollower], expected: dict[str, int], now: int
) -> Iterator[str]:
    """What is wrong, when all has expired that was to expire and all was copied."""
    for site in sites:
        if alive({key: max(records) for key, records in site.data.items() if records}, now) != expected:
            yield "a write was lost"
    for follower in followers:
        follower.follow(now)
        if {key: record.value for key, record in follower.view.items()} != expected:
            yield "a follower was not told"
        # Another site may tell of one that was forgotten here, and then it is told of again.
        ends = [end for end in follower.ends if end not in follower.site.forgotten]
        if len(set(ends)) != len(ends):
            yield "a follower was told twice"


def test_each_site_tells_an_expiry_once_and_all_agree() -> None:
    assert [seed for seed in range(RUNS) if run(seed, "rule")] == []


@pytest.mark.parametrize(
    ("mode", "finding"),
    [
        ("fresh stamp", "a write was lost"),
        ("blind", "a write was lost"),
        ("repeating", "a follower was told twice"),
        ("collecting first", "a follower was not told"),
        ("index in memory", "a follower was not told"),
    ],
)
def test_the_model_finds_a_rule_that_is_nearly_right(mode: str, finding: str) -> None:
    assert any(finding in run(seed, mode) for seed in range(RUNS))
