"""What the size of a run decides: the number of examples of a property, and the parameters of a test.

`tests/conftest.py` says how `make test`, `make test-all` and `make soak` differ.
"""

from collections.abc import Iterable
from typing import Any, Final

import pytest
from hypothesis import Phase, settings

# A canary's search: it ends with the first example that finds the planted fault, in every profile.
SEARCH: Final = settings(
    max_examples=2_000, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False
)


def scaled(times: float, **others: Any) -> settings:
    """Settings with so many times the examples of the profile, and with others of hypothesis's settings."""
    return settings(max_examples=max(1, round(settings().max_examples * times)), **others)


def only(chosen: Iterable[object], values: Iterable[object], more: Iterable[object] = ()) -> list[Any]:
    """The values of a parameter: `make test` takes the chosen ones only, `make test-all` takes all.

    `make soak` takes `more`.
    """
    quick = list(chosen)
    return [
        *(value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values),
        *(pytest.param(value, marks=pytest.mark.soak) for value in more),
    ]
