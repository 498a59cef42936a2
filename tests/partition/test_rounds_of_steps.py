"""Steps of atomic batches that share a round leave the rows that they leave one after the other."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from random import Random
from typing import Final
from unittest.mock import patch

import pytest
from tests.site.support import HookedEngine, node_of, open_memory

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.engine import Row
from floodmark.merge.counter import add_to_counter
from floodmark.model.batch import batches_from, mint_batch
from floodmark.model.change import Stamp
from floodmark.model.errors import TransactionEnded
from floodmark.model.partition import Decision, Fate
from floodmark.model.version import Version
from floodmark.partition import FAMILIES
from floodmark.partition.commit.commit import Commit, arrange
from floodmark.partition.committer import Committer, EngineBatch, commit_together
from floodmark.partition.prepared.outcomes import NamedCommit
from floodmark.partition.prepared.steps import AbortPrepared, CommitPrepared, Prepare
from floodmark.testing.clock import SimulatedTime

ROUNDS: Final = 12
SEEDS: Final = 60


def run(seed: int, commit: Callable[[Committer, Sequence[Commit]], None]) -> list[tuple[str, list[Row]]]:
    """A history of batches of plain values, copies and counters, in rounds; all rows that it leaves."""
    random, time, engine = Random(seed), SimulatedTime(), HookedEngine()
    with open_memory(engine, time) as site:
        users, counts = site.create_namespace("users"), site.create_namespace("counts", merge="counter")
        plain = [encode_namespace(users.id) + key for key in (b"a", b"b", b"c")]
        adding = [encode_namespace(counts.id) + key for key in (b"d", b"e")]
        node = node_of(site)
        opened: dict[str, Version] = {}
        committer, partition = node.committer, node.map.partitions[0]

        def write(key: bytes, number: int, copied: Stamp | None) -> bytes:
            return add_to_counter(number) if key in adding else encode_value(b"%d" % number, origin=copied)

        for number in range(ROUNDS):
            steps: list[Commit] = []
            done = random.sample([*opened], random.randint(0, min(3, len(opened))))
            steps += (CommitPrepared(committer.place, partition, each, opened.pop(each)) for each in done)
            prepares: list[tuple[str, Prepare]] = []
            for each in range(random.randint(0, 3)):
                copied = Stamp(1 + random.randrange(1_000) + number, 3) if random.random() < 0.3 else None
                keys = sorted(random.sample(plain if copied else plain + adding, random.randint(1, 3)))
                values = [write(key, 100 * number + each, copied) for key in keys]
                batch = f"{batches_from(time())}-{100 * number + each:016x}"
                writes = arrange(keys, values, own=copied is None)
                prepares.append((batch, Prepare(committer.place, partition, batch, writes, keys[:1], keys)))
            steps += (prepare for _, prepare in prepares)
            for _ in range(random.randint(0, 2)):
                key = random.choice(plain)
                steps.append(Commit(partition, arrange([key], [encode_value(b"put")]), durable=True))
            random.shuffle(steps)
            commit(committer, steps)
            assert [each.error for each in steps] == [None] * len(steps)
            opened |= {batch: step.version for batch, step in prepares}
        return [(name, engine.scan(name, b"", None, rows_max=10**6, bytes_max=10**9)) for name in FAMILIES]


def one_by_one(committer: Committer, steps: Sequence[Commit]) -> None:
    for step in steps:
        commit_together(committer, [step])


def first_difference(seeds: Sequence[int]) -> int | None:
    return next((seed for seed in seeds if run(seed, commit_together) != run(seed, one_by_one)), None)


def test_a_round_leaves_what_its_steps_leave_one_by_one() -> None:
    assert first_difference(range(SEEDS)) is None


def _blind() -> AbstractContextManager[object]:
    """No step sees what earlier commits of its round have written."""
    return patch.object(EngineBatch, "show", lambda *_: None)


def _rewriting_unseen() -> AbstractContextManager[object]:
    """A commit that has written rows of others anew tells its own keys alone."""

    def touches(step: CommitPrepared) -> Sequence[bytes]:
        write = step._write or step._place.prepared.find(step._transaction, step._partition.range)
        return () if write is None else write.keys

    return patch.object(CommitPrepared, "touches", property(touches))


@pytest.mark.parametrize("fault", [_blind, _rewriting_unseen])
def test_a_step_that_does_not_see_the_round_before_it_is_found(
    fault: Callable[[], AbstractContextManager[object]],
) -> None:
    assert first_difference(range(1)) is None
    with fault():
        assert first_difference(range(10 * SEEDS)) is not None


@pytest.mark.parametrize("is_shared", [False, True])
def test_steps_that_touch_different_keys_share_one_write_to_the_engine(is_shared: bool) -> None:
    engine, time = HookedEngine(), SimulatedTime()
    with open_memory(engine, time) as site:
        users = site.create_namespace("users")
        node = node_of(site)
        committer, partition = node.committer, node.map.partitions[0]
        versions: dict[str, Version] = {}
        for number in range(4):
            key = encode_namespace(users.id) + (b"same" if is_shared else b"%d" % number)
            batch = f"{batches_from(time())}-{number:016x}"
            versions[batch] = partition.prepare(batch, [key], [encode_value(b"%d" % number)], [key])
        steps = [CommitPrepared(committer.place, partition, *each) for each in versions.items()]
        operations: list[str] = []
        engine.before = operations.append
        commit_together(committer, steps)
        assert sum(each.startswith("write") for each in operations) == (4 if is_shared else 1)


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_commit_and_the_question_for_its_outcome_see_each_other_in_a_round(is_refused: bool) -> None:
    engine, time = HookedEngine(), SimulatedTime()
    with open_memory(engine, time) as site:
        users = site.create_namespace("users")
        node = node_of(site)
        partition, key, batch = (
            node.map.partitions[0],
            encode_namespace(users.id) + b"ada",
            mint_batch(time()),
        )
        commit = Commit(
            partition,
            arrange([key], [encode_value(b"1")]),
            durable=True,
            named=NamedCommit(node.engine, batch, key),
        )
        ask = AbortPrepared(node.committer.place, partition, batch, key, asks=True)
        commit_together(node.committer, [ask, commit] if is_refused else [commit, ask])
        assert isinstance(commit.error, TransactionEnded) == is_refused
        assert ask.fate == (Fate(Decision.ABORT) if is_refused else Fate(Decision.COMMIT, commit.version))
        assert users.get(b"ada") == (None if is_refused else b"1")


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("is_later", [False, True])
def test_a_commit_that_comes_twice_in_a_round_is_one_commit(is_batch: bool, is_later: bool) -> None:
    # A reader that meets a prepared write settles it while the coordinator tells its partition.
    engine, time = HookedEngine(), SimulatedTime()
    with open_memory(engine, time) as site:
        users = site.create_namespace("users")
        node = node_of(site)
        committer, partition = node.committer, node.map.partitions[0]
        key = encode_namespace(users.id) + b"ada"
        name = mint_batch(time()) if is_batch else "transaction"
        version = partition.prepare(name, [key], [encode_value(b"1")], [key] if is_batch else [])
        at = committer.now() if is_later else version
        before = len(partition.tallies)
        steps = [CommitPrepared(committer.place, partition, name, at) for _ in range(3)]
        commit_together(committer, steps)
        assert [step.error for step in steps] == [None] * 3
        assert [step.version for step in steps] == [at, 0, 0]
        assert len(partition.tallies) == before + 1
        assert users.get(b"ada") == b"1"
