"""A process to be killed: threads run small transactions beside plain writes, and say what they were told.

    python -m tests.partition.support_prepared DIRECTORY NAME

A decision is a durable record of its own before it is carried out, as a coordinator's log would have it.
Every transaction puts a key of its own and adds one to a counter that all of them share.
"""

import sys
from itertools import count
from random import Random
from threading import Lock, Thread

import floodmark
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.host.embedded import EmbeddedHost
from floodmark.merge.counter import add_to_counter
from floodmark.model.errors import Retryable
from floodmark.model.partition import Decision, Fate
from floodmark.model.version import Version
from floodmark.partition import LocalPartition, Node
from floodmark.site import Namespace, Site

ABORT = b"abort"
SHARED = b"shared"


def node_of(site: Site) -> Node:
    assert isinstance(site.host, EmbeddedHost)
    return site.host.node


def open_site(path: str, life: str = "none") -> Site:
    """Open the directory with someone who knows how transactions end.

    One of this life may still be decided; one of an earlier life that was not has aborted.
    """
    site = floodmark.open(path, site="oslo", background=False)
    if "users" not in site.namespaces():
        for name in ("users", "decisions"):
            site.create_namespace(name)
        site.create_namespace("counts", merge="counter")
    decisions = site.namespace("decisions")

    def settle(transaction: str) -> Fate:
        decided = decisions.get(transaction.encode())
        if decided is None and transaction.startswith(life):
            return Fate(Decision.UNDECIDED)
        if decided is None or decided == ABORT:
            return Fate(Decision.ABORT)
        return Fate(Decision.COMMIT, int(decided))

    node_of(site).committer.prepared.settler = settle
    return site


def history(site: Site, until: Version) -> int:
    """A number for all changes at or below a version."""
    changes = [
        (change.version, name, change.key, change.value)
        for name in ("users", "counts")
        for change in site.changes(name, until=until)
    ]
    return hash_of(changes)


def hash_of(changes: object) -> int:
    number = 0
    for byte in repr(changes).encode():
        number = (number * 31 + byte) % (1 << 61)
    return number


class Child:
    """The threads, and the site that they share."""

    def __init__(self, path: str, name: str) -> None:
        self.name = name
        self.site = open_site(path, name)
        self.users, self.counts, self.decisions = map(self.site.namespace, ("users", "counts", "decisions"))
        self.lock = Lock()

    @property
    def partition(self) -> LocalPartition:
        return node_of(self.site).map.partitions[0]

    def say(self, *words: object) -> None:
        with self.lock:
            print(*words, flush=True)

    def transact(self, thread: int) -> None:
        chance = Random(thread)
        for number in count():
            transaction = f"{self.name}-{thread}-{number}"
            keys = [qualify(self.users, transaction.encode()), qualify(self.counts, SHARED)]
            values = [encode_value(b"1"), add_to_counter(1)]
            try:
                version = self.partition.prepare(transaction, keys, values)
            except Retryable:
                continue
            self.say("prepared", version)
            commits = chance.random() < 0.7
            self.decisions.put(transaction.encode(), b"%d" % version if commits else ABORT)
            if commits:
                self.partition.commit_prepared(transaction, version)
                self.say("committed", transaction)
            else:
                self.partition.abort_prepared(transaction)
                self.say("aborted", transaction)

    def write(self) -> None:
        """Plain writes, which make the shared counter go on above what is prepared."""
        for number in count():
            self.users.put(b"plain", b"%d" % number, durability="async" if number % 3 else "fsync")
            self.counts.add(SHARED, 1000)
            self.say("added")

    def ask(self) -> None:
        for number in count():
            resolved = self.site.resolved_version()
            self.say("resolved", resolved, history(self.site, resolved) if number % 5 == 0 else "-")
            if number % 7 == 0:
                self.site.heartbeat()


def qualify(namespace: Namespace, key: bytes) -> bytes:
    return encode_namespace(namespace.id) + key


def main() -> None:
    child = Child(*sys.argv[1:])
    for work in (lambda: child.transact(1), lambda: child.transact(2), child.write):
        Thread(target=work, daemon=True).start()
    child.ask()


if __name__ == "__main__":
    main()
