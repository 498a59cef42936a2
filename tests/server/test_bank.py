"""Transactions of real processes: the sum of all accounts never changes, and the history is serializable."""

from pathlib import Path

import pytest
from tests.bank import run_bank
from tests.postgres import PostgresServer


@pytest.mark.slow
def test_transactions_are_serializable_though_clients_and_nodes_are_killed(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    postgres.execute("DROP SCHEMA IF EXISTS floodmark_oslo CASCADE")
    assert run_bank(postgres.url, tmp_path, seconds=20, seed=1) > 0
