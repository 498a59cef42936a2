"""Many plain copies in one commit, looked at all at once: what is stored is the same as one by one."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from unittest.mock import patch

import pyarrow
from hypothesis import given
from hypothesis import strategies as st
from tests.site.support import START_MS, HookedEngine, open_memory, rows_of

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.columns.pairs import Pairs
from floodmark.engine import Row
from floodmark.model.change import Heartbeat, Stamp
from floodmark.model.version import Version, compose
from floodmark.testing.clock import SimulatedTime

BASE = compose(START_MS - 60_000, 0)
HERE = 7
KEYS = 400

Rows = dict[bytes, bytes]


@dataclass
class Outcome:
    """All that can be seen of a site afterwards."""

    versions: list[Version]
    rows: dict[str, list[Row]]
    heartbeat: Heartbeat
    changes: list[object]


def run(written: list[bytes], batches: list[Rows], *, load: bool, columns: bool = False) -> Outcome:
    """Write some keys here, and take in batches from elsewhere."""
    engine = HookedEngine()
    with open_memory(engine, SimulatedTime(START_MS)) as site:
        users = site.create_namespace("users")
        prefix = encode_namespace(users.id)
        for key in written:
            users.put(key, b"written here")
        versions = []
        for batch in batches:
            rows: Mapping[bytes, bytes] = {prefix + key: value for key, value in batch.items()}
            if columns:
                rows = Pairs.sort(pyarrow.array(list(rows)), pyarrow.array(list(rows.values())))
            take_in = site.host.router.load if load else site.host.router.apply
            versions.append(take_in(rows, durable=True))
        changes: list[object] = list(site.changes("users"))
        heartbeat = site.heartbeat()
        return Outcome(versions, rows_of(engine), heartbeat, changes)


def make_batch(random: Random, unusual: list[bytes]) -> Rows:
    """Copies of one length or of several, some of which may be of another kind."""
    sizes = random.choice([(20,), (0, 20, 4000)])
    rows = {}
    for number in random.sample(range(KEYS), random.randint(60, KEYS)):
        origin = Stamp(BASE + random.randint(1, 9), random.randint(2, 5))
        rows[b"%03d" % number] = encode_value(random.randbytes(random.choice(sizes)), origin=origin)
    rows.update(zip(random.sample(sorted(rows), len(unusual)), unusual, strict=True))
    return rows


UNUSUAL = [
    encode_value(b"", deleted=True, origin=Stamp(BASE + 5, 3)),
    encode_value(b"1", 99, origin=Stamp(BASE + 5, 3)),
    encode_value(bytes(5000), origin=Stamp(BASE + 5, 3)),
    encode_value(b"got back", origin=Stamp(BASE + 5, HERE)),
]


@given(
    st.integers(0, 999),
    st.integers(0, 3),
    st.lists(st.sampled_from(UNUSUAL), max_size=2),
    st.sampled_from([0, 0, 5]),
    st.booleans(),
)
def test_many_copies_at_once_are_stored_like_copies_one_by_one(
    seed: int, batches: int, unusual: list[bytes], written: int, load: bool
) -> None:
    random = Random(seed)
    own = [b"%03d" % number for number in random.sample(range(KEYS), written)]
    taken_in = [make_batch(random, unusual if number else []) for number in range(batches)]
    found = run(own, taken_in, load=load)
    with patch("floodmark.partition.partition.gather_copies", return_value=None):
        assert run(own, taken_in, load=load) == found
    assert run(own, taken_in, load=load, columns=True) == found
