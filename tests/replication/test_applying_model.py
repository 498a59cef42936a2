"""Three sites of different layouts exchange changes in any order of steps, and come to hold the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Final

from hypothesis import given
from hypothesis import strategies as st
from tests.replication.support_applying import apply_rows, link_row, require_whole_commits, sliced, state_of
from tests.replication.support_links import Mesh

from floodmark.links.reading import read_step
from floodmark.links.steps import plan_step

NAMES: Final = ("oslo", "rome", "bonn")
LINKS: Final = tuple(permutations(NAMES, 2))

KEYS: Final = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"])
Action = Callable[[Mesh], None]


def put(site: str, keys: frozenset[bytes], value: int) -> Action:
    return lambda mesh: _ignore(mesh[site].namespace("users").put_many(dict.fromkeys(keys, b"%d" % value)))


def delete(site: str, key: bytes) -> Action:
    return lambda mesh: _ignore(mesh[site].namespace("users").delete(key))


def split(site: str, key: bytes) -> Action:
    def act(mesh: Mesh) -> None:
        host = mesh[site].host
        if len(host.partitions.partitions()) < 3:
            users = host.namespaces.find_namespace("users").id.to_bytes(3, "big")
            if all(each.range.start != users + key for each in host.partitions.partitions()):
                host.partitions.split("users", key)

    return act


def merge(site: str) -> Action:
    def act(mesh: Mesh) -> None:
        partitions = mesh[site].host.partitions.partitions()
        if len(partitions) > 1:
            mesh[site].host.partitions.merge(partitions[0].id, partitions[1].id)

    return act


def beat(site: str, pause_ms: int) -> Action:
    def act(mesh: Mesh) -> None:
        mesh.time.advance(pause_ms)
        mesh[site].heartbeat()

    return act


def link(pair: tuple[str, str], changes_max: int, rows_max: int, times: int) -> Action:
    """A step, in batches of any size, that is applied up to three times and noted after the last."""

    def act(mesh: Mesh) -> None:
        source, target = pair
        step = plan_step(mesh[source].host, mesh[target].host, ["users"], changes_max=changes_max)
        for _ in range(times):
            mesh.apply(source, target, step)
        rows = sliced(read_step(mesh[source].host, step), rows_max)
        apply_rows(mesh, target, step, rows, batch_rows_max=rows_max)

    return act


def _ignore(result: object) -> None:
    """What an action returns is of no interest."""


SITES: Final = st.sampled_from(NAMES)
ACTIONS: Final = st.one_of(
    st.builds(put, SITES, st.frozensets(KEYS, min_size=1, max_size=6), st.integers(0, 99)),
    st.builds(delete, SITES, KEYS),
    st.builds(split, SITES, KEYS),
    st.builds(merge, SITES),
    st.builds(beat, SITES, st.integers(0, 300)),
    st.builds(link, st.sampled_from(LINKS), st.integers(1, 6), st.integers(1, 9), st.integers(0, 2)),
)


@contextmanager
def three_sites() -> Iterator[Mesh]:
    mesh = Mesh(*NAMES, topology=False)
    try:
        yield mesh
    finally:
        for site in mesh.sites.values():
            site.close()


@given(st.lists(ACTIONS, max_size=40))
def test_all_sites_converge_and_no_link_finds_anything_wrong(actions: list[Action]) -> None:
    with three_sites() as mesh:
        for action in actions:
            action(mesh)
        for _ in range(2):
            mesh.exchange()
        assert state_of(mesh["oslo"]) == state_of(mesh["rome"]) == state_of(mesh["bonn"])
        contents = [dict(site.namespace("users").scan()) for site in mesh.sites.values()]
        assert contents[0] == contents[1] == contents[2]
        for site in mesh.sites.values():
            require_whole_commits(site)
        for source, target in LINKS:
            row = link_row(mesh, source, target)
            assert row.wrong == 0
            assert row.checked >= 1
