"""The error tree: as drawn, marked for callers, and able to cross process borders."""

import copy
import pickle
from collections.abc import Iterator

import pytest

import floodmark
from floodmark.model import errors
from floodmark.model.errors import (
    FloodmarkError,
    InvalidArgument,
    OutcomeUnknown,
    Retryable,
    StorageFailed,
    Terminal,
)


def subclasses(kind: type[FloodmarkError]) -> Iterator[type[FloodmarkError]]:
    """A class and all below it that Floodmark defines, but for what is made up to test it."""
    yield kind
    for child in kind.__subclasses__():
        if child.__module__.startswith(f"{floodmark.__name__}.") and ".testing." not in child.__module__:
            yield from subclasses(child)


KINDS = list(dict.fromkeys(subclasses(FloodmarkError)))
LEAVES = [kind for kind in KINDS if not [child for child in KINDS if child.__base__ is kind]]


def parent_of(kind: type[FloodmarkError]) -> str | None:
    parents = [base.__name__ for base in kind.__bases__ if issubclass(base, FloodmarkError)]
    return parents[0] if parents else None


def drawn_tree(text: str) -> dict[str, str | None]:
    """Child to parent, read from the drawing in a docstring."""
    tree: dict[str, str | None] = {}
    path: list[str] = []
    for line in text.splitlines():
        stripped = line.lstrip(" │├└─")
        if line.startswith("    ") and stripped:
            depth = (len(line) - len(stripped)) // 4 - 1
            name = stripped.split()[0]
            path = [*path[:depth], name]
            assert len(path) == depth + 1, f"{name} hangs in the air"
            assert name not in tree, f"{name} is drawn twice"
            tree[name] = path[-2] if depth else None
    return tree


def test_drawn_tree_is_the_real_one() -> None:
    assert drawn_tree(errors.__doc__ or "") == {kind.__name__: parent_of(kind) for kind in KINDS}


@pytest.mark.parametrize(
    "drawing",
    [
        "    FloodmarkError\n    └── Retryable\n    └── Terminal",
        "    FloodmarkError\n    ├── Terminal\n    │   └── Retryable",
        "",
    ],
)
def test_reader_of_the_drawing_sees_differences(drawing: str) -> None:
    assert drawn_tree(drawing) != {"FloodmarkError": None, "Retryable": "FloodmarkError"}


def test_all_errors_live_in_one_file() -> None:
    assert {kind.__module__ for kind in KINDS} == {errors.__name__}


def test_what_is_drawn_as_also_a_value_error_is_one() -> None:
    (line,) = [line for line in (errors.__doc__ or "").splitlines() if "also a ValueError" in line]
    assert "InvalidArgument" in line
    assert {kind for kind in KINDS if issubclass(kind, ValueError)} == set(subclasses(InvalidArgument))


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_every_leaf_says_what_a_caller_may_do(kind: type[FloodmarkError]) -> None:
    marks = [mark for mark in (Retryable, Terminal, OutcomeUnknown) if issubclass(kind, mark)]
    assert len(marks) == 1


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_pickles_with_message_and_details(kind: type[FloodmarkError], protocol: int) -> None:
    error = kind("the key b'ada' is gone; read it again", key=b"ada", version=7, message="kept", kind=None)
    for restored in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(restored) is kind
        assert str(restored) == str(error)
        assert restored.args == error.args
        assert restored.details == {"key": b"ada", "version": 7, "message": "kept", "kind": None}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_documented_and_needs_no_details(kind: type[FloodmarkError]) -> None:
    assert kind.__doc__
    assert kind.__doc__.endswith(".")
    assert dict(kind("why").details) == {}


def test_full_disk_is_caught_as_failed_storage() -> None:
    with pytest.raises(StorageFailed):
        raise errors.StorageFull("no room")
