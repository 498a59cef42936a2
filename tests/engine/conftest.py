"""Failing asserts of the contract show what they compared, as those of the tests themselves do."""

import pytest

pytest.register_assert_rewrite("floodmark.testing.contracts")
