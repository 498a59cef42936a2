"""The checker of atomic reads: against its definition, over random histories of batches."""

from hypothesis import given
from hypothesis import strategies as st

from floodmark.model.version import Version
from floodmark.testing.atomicity import Fracture, SeenVersions, find_fracture, locate

KEYS = ("a", "b", "c", "d")
MERGED = {"d"}
# Each write has the keys that it wrote; its place is its version.  One of several keys is a batch.
HISTORIES = st.lists(st.sets(st.sampled_from(KEYS), min_size=1), max_size=12)
PLACES = st.fixed_dictionaries(dict.fromkeys(KEYS, st.integers(0, 12)))


def batches_of(writes: list[set[str]]) -> list[dict[str, Version]]:
    return [dict.fromkeys(sorted(keys), at) for at, keys in enumerate(writes, 1) if len(keys) > 1]


def versions_at(writes: list[set[str]], places: dict[str, int]) -> dict[str, Version]:
    """The version that each key has for a reader who comes to it at a place of its own."""
    return {
        key: max((at for at, keys in enumerate(writes[: places[key]], 1) if key in keys), default=0)
        for key in KEYS
    }


def is_fractured(writes: list[set[str]], found: dict[str, Version]) -> bool:
    """The definition: a batch that is shown by one key and lacked by another."""
    return any(
        (found[shown] >= at if shown in MERGED else found[shown] == at) and found[lacking] < at
        for at, keys in enumerate(writes, 1)
        for shown in keys
        for lacking in keys
    )


@given(HISTORIES, PLACES)
def test_checker_agrees_with_the_definition_where_values_are_unique(
    writes: list[set[str]], places: dict[str, int]
) -> None:
    found = versions_at(writes, places)
    read = {key: SeenVersions(version, version, key in MERGED) for key, version in found.items()}
    assert (find_fracture(read, batches_of(writes)) is not None) == is_fractured(writes, found)


@given(HISTORIES, st.integers(0, 12))
def test_snapshot_is_accepted(writes: list[set[str]], place: int) -> None:
    found = versions_at(writes, dict.fromkeys(KEYS, place))
    read = {key: SeenVersions(version, version, key in MERGED) for key, version in found.items()}
    assert find_fracture(read, batches_of(writes)) is None


@given(HISTORIES, PLACES, st.integers(1, 3))
def test_values_that_recur_are_never_held_against_a_whole_read(
    writes: list[set[str]], places: dict[str, int], values: int
) -> None:
    found = versions_at(writes, places)
    read = {}
    for key in KEYS:
        history = [(at, b"%d" % (at % values)) for at, keys in enumerate(writes, 1) if key in keys]
        seen = locate(history, dict(history).get(found[key]), merged=key in MERGED)
        assert seen is not None
        assert seen.earliest <= found[key] <= seen.latest
        read[key] = seen
    if find_fracture(read, batches_of(writes)) is not None:
        assert is_fractured(writes, found)


def test_canaries_are_rejected() -> None:
    """What the wrong rules of the protocol lead to, each as one read."""
    first, second = {"a": 5, "b": 5}, {"b": 8, "c": 8}
    newest_in_the_second_round = {"a": SeenVersions(5, 5), "b": SeenVersions(8, 8), "c": SeenVersions(2, 2)}
    assert find_fracture(newest_in_the_second_round, [first, second]) == Fracture(8, "b", "c")
    unknown_taken_for_harmless = {"a": SeenVersions(5, 5), "b": SeenVersions(3, 3)}
    assert find_fracture(unknown_taken_for_harmless, [first]) == Fracture(5, "a", "b")
    badge_without_message = {"a": SeenVersions(3, 3), "b": SeenVersions(9, 9, merged=True)}
    assert find_fracture(badge_without_message, [first]) == Fracture(5, "b", "a")
    copied_in_two_parts = {"a": SeenVersions(5, 5), "b": SeenVersions(5, 5)}
    assert find_fracture(copied_in_two_parts, [{"a": 5, "b": 6}]) == Fracture(5, "a", "b")
    assert locate([(1, b"x")], b"y") is None


def test_reads_that_miss_nothing_are_accepted() -> None:
    batch = {"a": 5, "b": 5}
    for read in (
        {"a": SeenVersions(5, 5), "b": SeenVersions(9, 9)},
        {"a": SeenVersions(9, 9), "b": SeenVersions(3, 3)},
        {"a": SeenVersions(5, 5), "c": SeenVersions(0, 0)},
        {"a": SeenVersions(3, 5), "b": SeenVersions(3, 3)},
        {"a": SeenVersions(3, 3), "b": SeenVersions(4, 9, merged=True)},
        {},
    ):
        assert find_fracture(read, [batch]) is None
