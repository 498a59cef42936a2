"""Random writes, and how to recognise them in a feed afterwards.

Every write has a number of its own, so that a value identifies its write.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, TypeAlias

import msgspec

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.states import CounterState, FieldsState, decode_state
from floodmark.codec.values import decode_value, encode_value
from floodmark.host.embedded import EmbeddedHost
from floodmark.model.version import Version
from floodmark.site import Namespace, Site
from floodmark.site.arguments import Durability
from floodmark.site.batch import Batch
from floodmark.testing.simulation.history import Key

KEYS: Final = tuple(b"key-%d" % number for number in range(5))
DELETED_COUNTERS: Final = KEYS[:2]
FIELDS: Final = ("city", "mail", "name")
# The share of writes that are atomic batches.
BATCHES: Final = 0.15
TTL_SECONDS: Final = (1, 2, 5)

# Whether a logged change is the intended one; takes the record before it and the logged value.
Check: TypeAlias = Callable[[bytes | None, bytes], bool]
BatchWrite: TypeAlias = Callable[[Site, Batch], None]


@dataclass(frozen=True, kw_only=True)
class PlannedWrite:
    """A write to attempt.  `run` returns its version, if the site returns one.

    A conditional write returns False if it did not happen.  One that `prepares` first may be overtaken by
    heartbeats.
    """

    operation: str
    durable: bool
    expected: Mapping[Key, Check]
    run: Callable[[Site], Version | bool]
    adds: int = 0
    prepares: bool = False
    batch: bool = False


def choose_write(random: Random, number: int, site: int, namespaces: Mapping[str, str]) -> PlannedWrite:
    """A random write at a site, into one of the namespaces, by their merge policy."""
    if random.random() < BATCHES:
        return choose_batch(random, number, site, namespaces)
    name = random.choice(list(namespaces))
    writer = _Writer(random, number, site, name, "async" if random.random() < 0.3 else "fsync")
    return getattr(writer, namespaces[name])()  # type: ignore[no-any-return]


def choose_batch(random: Random, number: int, site: int, namespaces: Mapping[str, str]) -> PlannedWrite:
    """A random atomic batch at a site: some keys of each namespace or of the first, and one counter."""
    durability: Durability = "async" if random.random() < 0.3 else "fsync"
    value, adds = b"%d" % number, random.randint(1, 9)
    writes: list[BatchWrite] = []
    expected: dict[Key, Check] = {}
    for name, merge in list(namespaces.items())[: random.choice((1, None))]:
        for key in random.sample(KEYS, 1 if merge == "counter" else random.randint(1, 3)):
            if merge == "counter":
                write, check = _add(name, key, adds), _added(site, adds)
            elif random.random() < 0.2:
                write, check = _delete(name, key), _deleted
            elif merge == "fields":
                write, check = _update(name, key, value), _wrote_fields({FIELDS[0]: value})
            else:
                write, check = _put(name, key, value), _holds(value)
            writes.append(write)
            expected[Key(name, key)] = check

    def run(site: Site) -> Version:
        with site.atomic(durability=durability) as batch:
            for write in writes:
                write(site, batch)
        return batch.version

    return PlannedWrite(
        operation=f"batch {number}",
        durable=durability == "fsync",
        expected=expected,
        run=run,
        adds=adds,
        batch=True,
    )


def _put(name: str, key: bytes, value: bytes) -> BatchWrite:
    return lambda site, batch: batch.put(site.namespace(name), key, value)


def _delete(name: str, key: bytes) -> BatchWrite:
    return lambda site, batch: batch.delete(site.namespace(name), key)


def _update(name: str, key: bytes, value: bytes) -> BatchWrite:
    return lambda site, batch: batch.update(site.namespace(name), key, {FIELDS[0]: int(value)})


def _add(name: str, key: bytes, adds: int) -> BatchWrite:
    return lambda site, batch: batch.add(site.namespace(name), key, adds)


class _Writer:
    """Chooses one write; it has a method for each merge policy."""

    def __init__(self, random: Random, number: int, site: int, name: str, durability: Durability) -> None:
        self._random = random
        self._number = number
        self._site = site
        self._name = name
        self._durability = durability
        self._key = random.choice(KEYS)
        self._ttl = random.choice(TTL_SECONDS) if random.random() < 0.2 else None

    def _write(
        self,
        operation: str,
        run: Callable[[Namespace], Version | bool],
        check: Check,
        *,
        keys: Sequence[bytes] = (),
        adds: int = 0,
    ) -> PlannedWrite:
        name = self._name
        return PlannedWrite(
            operation=f"{operation} {self._number}",
            durable=self._durability == "fsync",
            expected={Key(name, key): check for key in keys or (self._key,)},
            run=lambda site: run(site.namespace(name)),
            adds=adds,
        )

    def last_write(self) -> PlannedWrite:
        """Puts and deletes of whole records."""
        key, value, ttl, durability = self._key, b"%d" % self._number, self._ttl, self._durability
        kinds = ("put", "delete", "put_many", "compare_and_set", "prepare")
        kind = self._random.choices(kinds, (5, 3, 2, 1, 1))[0]
        holds = _holds(value)
        if kind == "delete":
            return self._delete()
        if kind == "put":
            return self._write(
                kind, lambda users: users.put(key, value, ttl=ttl, durability=durability), holds
            )
        if kind == "put_many":
            keys = self._random.sample(KEYS, self._random.randint(2, len(KEYS)))
            pairs = dict.fromkeys(keys, value)
            return self._write(
                kind, lambda users: users.put_many(pairs, ttl=ttl, durability=durability), holds, keys=keys
            )
        if kind == "prepare":
            return self._prepare(value)
        return self._write(
            kind,
            lambda users: users.compare_and_set(key, users.get(key), value, durability=durability),
            holds,
        )

    def _prepare(self, value: bytes) -> PlannedWrite:
        """A put like that of a transaction: prepared, and committed after some heartbeats."""
        name, key, transaction = self._name, self._key, f"transaction {self._number}"
        beats = self._random.randrange(4)

        def run(site: Site) -> Version | bool:
            assert isinstance(site.host, EmbeddedHost)
            node = site.host.node
            qualified = encode_namespace(site.namespace(name).id) + key
            partition = node.map.route(qualified)
            version = partition.prepare(transaction, [qualified], [encode_value(value)])
            for _ in range(beats):
                node.heartbeat()
            return partition.commit_prepared(transaction, version) and version

        return PlannedWrite(
            operation=f"prepare {self._number}",
            durable=True,
            expected={Key(name, key): _holds(value)},
            run=run,
            prepares=True,
        )

    def fields(self) -> PlannedWrite:
        """Puts, updates and deletes of records and fields."""
        key, ttl, durability = self._key, self._ttl, self._durability
        kind = self._random.choices(
            ("put", "update", "delete", "delete_field", "put_many", "compare_and_set"), (2, 6, 1, 2, 2, 1)
        )[0]
        names = self._random.sample(FIELDS, self._random.randint(1, len(FIELDS)))
        value = msgspec.json.encode(dict.fromkeys(names, self._number))
        wrote = _wrote_fields(dict.fromkeys(names, b"%d" % self._number))
        if kind == "delete":
            return self._delete()
        if kind == "put":
            return self._write(
                kind, lambda profiles: profiles.put(key, value, ttl=ttl, durability=durability), wrote
            )
        if kind == "update":
            return self._write(
                kind, lambda profiles: profiles.update(key, value, ttl=ttl, durability=durability), wrote
            )
        if kind == "delete_field":
            gone = _wrote_fields(dict.fromkeys(names, None))
            return self._write(
                kind, lambda profiles: profiles.delete_field(key, *names, durability=durability), gone
            )
        if kind == "put_many":
            keys = self._random.sample(KEYS, self._random.randint(2, len(KEYS)))
            pairs = dict.fromkeys(keys, value)
            return self._write(
                kind,
                lambda profiles: profiles.put_many(pairs, ttl=ttl, durability=durability),
                wrote,
                keys=keys,
            )
        return self._write(
            kind,
            lambda profiles: profiles.compare_and_set(key, profiles.get(key), value, durability=durability),
            wrote,
        )

    def counter(self) -> PlannedWrite:
        """Additions, and now and then a delete."""
        key, durability = self._key, self._durability
        # Some counters are never deleted: of these the true total is known.
        if key in DELETED_COUNTERS and self._random.random() < 0.2:
            return self._delete()
        adds = self._random.randint(-3, 9)
        return self._write(
            f"add {adds:+}",
            lambda counts: counts.add(key, adds, durability=durability),
            _added(self._site, adds),
            adds=adds,
        )

    def _delete(self) -> PlannedWrite:
        key, durability = self._key, self._durability
        return self._write("delete", lambda namespace: namespace.delete(key, durability=durability), _deleted)


def _holds(value: bytes) -> Check:
    def check(_: bytes | None, logged: bytes) -> bool:
        record = decode_value(logged)
        return record.value == value and not record.deleted

    return check


def _deleted(_: bytes | None, logged: bytes) -> bool:
    return decode_value(logged).deleted


def _wrote_fields(texts: Mapping[str, bytes | None]) -> Check:
    def check(_: bytes | None, logged: bytes) -> bool:
        state = decode_state(logged)
        return isinstance(state, FieldsState) and {field.name: field.text for field in state.fields} == texts

    return check


def _added(site: int, adds: int) -> Check:
    def check(before: bytes | None, logged: bytes) -> bool:
        return own_total(logged, site) - own_total(before, site) == adds

    return check


def own_total(stored: bytes | None, site: int) -> int:
    """The total that a site has added to a counter, from its stored state."""
    state = None if stored is None else decode_state(stored)
    entries = state.entries if isinstance(state, CounterState) else ()
    return sum(entry.total for entry in entries if entry.site == site)
