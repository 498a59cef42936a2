"""A client of a bank, as a process: transfers, lists and audits in transactions, until it is killed.

It prints what each transaction has read and is about to write, commits it, and prints that it has ended.  So
a transaction of which only the first line is there has an unknown outcome, and one without a line has none.
"""

import json
import sys
from functools import partial
from itertools import count
from random import Random
from time import monotonic
from typing import Any

import floodmark

ACCOUNTS = [b"account-%d" % number for number in range(6)]
LISTS = [b"list-%d" % number for number in range(3)]
BALANCE = 100


class Teller:
    """One client.  Every value that it writes is unique: it ends with the name of its transaction."""

    def __init__(self, site: floodmark.Site, name: str) -> None:
        self._site = site
        self._bank = site.namespace("bank")
        self._name = name
        self._random = Random(name)
        self._attempts = count()

    def run(self) -> None:
        """Run transactions, one after the other."""
        works = [self._transfer, self._transfer, self._append, self._audit]
        while True:
            work, began = self._random.choice(works), monotonic()
            try:
                attempt = self._site.run_transaction(partial(work, began))
            except (floodmark.Retryable, floodmark.OutcomeUnknown):
                # A node was killed.  Without an end it counts as unknown.
                continue
            _print(name=attempt, ended=monotonic())

    def _transfer(self, began: float, t: floodmark.Transaction) -> str:
        giver, taker = self._random.sample(ACCOUNTS, 2)
        given, taken = t.get_many(self._bank, [giver, taker])
        amount = self._random.randint(1, 9)
        balances = {giver: int(given.split()[0]) - amount, taker: int(taken.split()[0]) + amount}
        writes = {key: str(balance) for key, balance in balances.items()}
        return self._write(t, began, {giver: given, taker: taken}, writes)

    def _append(self, began: float, t: floodmark.Transaction) -> str:
        key = self._random.choice(LISTS)
        found = t.get(self._bank, key)
        return self._write(t, began, {key: found}, {key: (found or b"")[-100:].decode()})

    def _audit(self, began: float, t: floodmark.Transaction) -> str:
        return self._write(t, began, dict(t.scan(self._bank, prefix=b"account-")), {}, scanned=True)

    def _write(
        self,
        t: floodmark.Transaction,
        began: float,
        reads: dict[bytes, bytes | None],
        writes: dict[bytes, str],
        **options: bool,
    ) -> str:
        attempt = f"{self._name}-{next(self._attempts)}"
        written = {key.decode(): f"{value} {attempt}" for key, value in writes.items()}
        for key, text in written.items():
            t.put(self._bank, key.encode(), text.encode())
        read = {key.decode(): None if value is None else value.decode() for key, value in reads.items()}
        _print(name=attempt, began=began, reads=read, writes=written, **options)
        return attempt


def _print(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with floodmark.connect(sys.argv[1]) as connected:
        Teller(connected, sys.argv[2]).run()
