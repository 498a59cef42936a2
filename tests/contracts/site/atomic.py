"""Atomic batches: one commit at one version, over namespaces, policies and partitions."""

from itertools import groupby

import pytest
from tests.contracts.site.base import SiteContractBase, refused

from floodmark.model.change import Change, Resolved
from floodmark.model.errors import (
    Closed,
    CommitTooLarge,
    InvalidArgument,
    InvalidKey,
    LimitExceeded,
    NamespaceNotFound,
    WrongPolicy,
)
from floodmark.model.limits import ATOMIC_READ_KEYS_MAX, COMMIT_BYTES_MAX, VALUE_BYTES_MAX
from floodmark.site import CounterNamespace, Namespace, Site
from floodmark.site.batch import Pair


class AtomicContract(SiteContractBase):
    """`Site.atomic`, `read_atomic` and `read_atomic_many`."""

    @pytest.fixture(params=[False, True], ids=["one partition", "many partitions"])
    def badges(self, request: pytest.FixtureRequest, site: Site, users: Namespace) -> CounterNamespace:
        """A namespace of counters beside the users', each cut into several partitions or none."""
        badges = site.create_namespace("unread", merge="counter")
        if request.param:
            for name, key in (("unread", b"g"), ("users", b"g"), ("users", b"p"), ("unread", b"p")):
                site.split(name, key)
        return badges

    def test_writes_of_a_batch_are_one_commit_at_one_version(
        self, site: Site, users: Namespace, badges: CounterNamespace
    ) -> None:
        people = site.create_namespace("people", merge="fields")
        users.put(b"q", b"old")
        people.put(b"ada", {"name": "Ada", "city": "London"})
        badges.add(b"ada", 40)
        since = site.now()
        with site.atomic() as batch:
            batch.put(users, b"z", b"last")
            batch.put(users, b"a", b"first")
            batch.delete(users, b"q")
            batch.update(people, b"ada", {"title": "countess"})
            batch.delete_field(people, b"ada", "city")
            batch.add(badges, b"ada", 1)
            batch.add(badges, b"ada", 1)
            batch.add(badges, b"zoe", -3)
            assert users.get(b"z") is None
        found = list(site.changes(since=since))
        assert {change.version for change in found} == {change.batch for change in found} == {batch.version}
        assert [(change.namespace, change.key, change.value) for change in found] == [
            ("users", b"a", b"first"),
            ("users", b"q", None),
            ("users", b"z", b"last"),
            ("unread", b"ada", b"42"),
            ("unread", b"zoe", b"-3"),
            ("people", b"ada", b'{"name":"Ada","title":"countess"}'),
        ]
        assert dict(users.scan()) == {b"a": b"first", b"z": b"last"}
        for space, key in ((users, b"a"), (people, b"ada"), (badges.stored, b"zoe")):
            record = space.record(key)
            assert record is not None
            assert (record.version, record.stamp.version) == (batch.version, batch.version)
        assert users.get(b"q", at=batch.version - 1) == b"old"
        assert badges.get(b"ada", at=batch.version - 1) == 40

    def test_other_writes_are_of_no_batch(
        self, site: Site, users: Namespace, badges: CounterNamespace
    ) -> None:
        with site.atomic() as batch:
            batch.put(users, b"a", b"1")
            batch.add(badges, b"a", 1)
        users.put_many({b"a": b"2", b"z": b"2"})
        badges.add(b"a", 1)
        batches = [(change.key, change.batch) for change in site.changes(since=batch.version)]
        assert batches == [(b"a", None), (b"z", None), (b"a", None)]
        assert badges.get(b"a") == 2

    def test_nothing_is_written_by_a_block_that_fails_or_is_empty(
        self, site: Site, users: Namespace, badges: CounterNamespace
    ) -> None:
        def fail() -> None:
            with batch:
                batch.put(users, b"a", b"1")
                raise ZeroDivisionError

        batch = site.atomic()
        with pytest.raises(ZeroDivisionError):
            fail()
        with site.atomic() as empty:
            pass
        assert (batch.version, empty.version) == (0, 0)
        assert list(site.changes()) == []
        for ended in (batch, empty):
            refused(Closed, lambda ended=ended: ended.put(users, b"a", b"1"))  # type: ignore[misc]
            refused(Closed, ended.commit)

    def test_batch_that_is_refused_writes_nothing(
        self, site: Site, users: Namespace, badges: CounterNamespace
    ) -> None:
        with site.atomic() as batch:
            batch.put(users, b"a", b"1")
            with pytest.raises(WrongPolicy):
                batch.add(users, b"a", 1)
            with pytest.raises(WrongPolicy):
                batch.put(badges, b"a", b"1")
        badges.add(b"z", (1 << 63) - 1)
        since = site.now()
        batch = site.atomic()
        batch.put(users, b"z", b"1")
        batch.add(badges, b"z", (1 << 63) - 1)
        refused(LimitExceeded, batch.commit)
        assert list(site.changes(since=since)) == []

    def test_batch_over_the_limit_of_a_commit_is_refused_whole(
        self, site: Site, users: Namespace, badges: CounterNamespace
    ) -> None:
        value = bytes(VALUE_BYTES_MAX)
        count = COMMIT_BYTES_MAX // VALUE_BYTES_MAX
        batch = site.atomic()
        for index in range(count - 1):
            batch.put(users, b"%02d" % index, value)
        with pytest.raises(CommitTooLarge, match="the atomic batch would write"):
            batch.put(users, b"z", value)
        assert list(users.scan(limit=1)) == []

    def test_readers_get_a_batch_whole_whatever_their_limits(
        self, site: Site, users: Namespace, badges: CounterNamespace
    ) -> None:
        versions = []
        for number in range(3):
            users.put(b"k", b"%d" % number)
            with site.atomic() as batch:
                for key in (b"a", b"h", b"q", b"z"):
                    batch.put(users, key, b"%d" % number)
                    batch.add(badges, key, 1)
            versions.append(batch.version)
        position, cuts = 0, []
        while (cut := site.host.versions.cut_changes("users", position, 2, None, False)).changes:
            cuts.append(cut.changes)
            position = cut.version
        assert cuts == [1, 4] * 3
        followed: list[Change] = []
        for item in site.changes(follow=True, resolved_markers=True):
            if isinstance(item, Change):
                followed.append(item)
            elif isinstance(item, Resolved) and item.version >= versions[-1]:
                break
        assert followed == list(site.changes())
        for version, changes in groupby(followed, lambda change: change.version):
            keys = [(change.namespace, change.key) for change in changes]
            if version in versions:
                assert keys == [
                    (name, key) for name in ("users", "unread") for key in (b"a", b"h", b"q", b"z")
                ]

    def test_atomic_read_finds_values_by_the_handles_that_it_names(
        self, site: Site, users: Namespace, badges: CounterNamespace
    ) -> None:
        people = site.create_namespace("people", merge="fields", codec="json")
        texts = site.namespace("users", codec="text")
        with site.atomic() as batch:
            batch.put(users, b"z", b"last")
            batch.put(users, b"a", b"first")
            batch.delete(users, b"q")
            batch.put(people, "ada", {"title": "countess"})
            batch.add(badges, b"zoe", 2)
        pairs: list[Pair] = [
            (badges, b"zoe"),
            (users, b"q"),
            (people, "ada"),
            (users, b"z"),
            (texts, "z"),
            (users, b"none"),
            (badges, b"zoe"),
            (users, b"a"),
        ]
        expected = [2, None, {"title": "countess"}, b"last", "last", None, 2, b"first"]
        assert site.read_atomic(pairs) == site.read_atomic(iter(pairs)) == expected
        assert site.read_atomic_many(pairs) == dict(zip(pairs, expected, strict=True))
        assert site.read_atomic([]) == []
        assert site.read_atomic_many([]) == {}

    def test_atomic_read_of_large_values_goes_on_where_an_answer_ends(
        self, site: Site, users: Namespace, badges: CounterNamespace
    ) -> None:
        keys = [b"%c" % letter for letter in b"acegikmoqsuw"]
        with site.atomic() as batch:
            for key in keys:
                batch.put(users, key, key * VALUE_BYTES_MAX)
        found = site.read_atomic([(users, key) for key in keys])
        assert [(value[:1], len(value)) for value in found] == [(key, VALUE_BYTES_MAX) for key in keys]

    def test_atomic_read_has_limits(self, site: Site, users: Namespace, badges: CounterNamespace) -> None:
        users.put(b"1", b"x")
        pairs: list[Pair] = [(users, b"%d" % number) for number in range(ATOMIC_READ_KEYS_MAX)]
        assert list(site.read_atomic_many(pairs).values()) == [None, b"x", *[None] * 998]
        refused(LimitExceeded, lambda: site.read_atomic([*pairs, (users, b"x")]))
        refused(LimitExceeded, lambda: site.read_atomic_many([*pairs, (users, b"x")]))
        long: list[Pair] = [(users, b"%04d" % number * 1000) for number in range(132)]
        refused(LimitExceeded, lambda: site.read_atomic(long))
        refused(InvalidArgument, lambda: site.read_atomic(users))  # type: ignore[arg-type]
        refused(InvalidArgument, lambda: site.read_atomic([b"ab"]))  # type: ignore[list-item]
        refused(InvalidArgument, lambda: site.read_atomic([("users", b"a")]))  # type: ignore[list-item]
        refused(InvalidKey, lambda: site.read_atomic([(users, "a")]))
        refused(InvalidKey, lambda: site.read_atomic([(users, b"")]))
        site.drop_namespace("users")
        dropped: list[Pair] = [(badges, b"a"), (users, b"a")]
        refused(NamespaceNotFound, lambda: site.read_atomic(dropped), namespace="users")
