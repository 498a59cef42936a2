"""Loaded before any test: failed assertions of the shipped contract suites are explained like others."""

import pytest

pytest.register_assert_rewrite("floodmark.testing")
