"""Atomic batches, and the atomic reads that see all of a batch or nothing.

    with site.atomic() as batch:
        batch.put(messages, b"grace/17", body)
        batch.add(unread, b"grace", 1)
    batch.version

    text, count = site.read_atomic([(messages, b"grace/17"), (unread, b"grace")])

Batches never make a reader or a writer wait, and never conflict with each other.  Unlike a transaction, a
batch reads nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.feed import at_present
from floodmark.host.ports import Host
from floodmark.model.errors import Closed, InvalidArgument, LimitExceeded
from floodmark.model.limits import ATOMIC_READ_BYTES_MAX, ATOMIC_READ_KEYS_MAX, COMMIT_BYTES_MAX
from floodmark.model.version import Version
from floodmark.routing.atomic import read_atomic
from floodmark.site.arguments import Durability, check_durability
from floodmark.site.codecs import CodedNamespace, present
from floodmark.site.gathering import AnyNamespace, GatheredWrites, require_of
from floodmark.site.namespace import Namespace

# A namespace and one of its keys: bytes, or text for a handle with a codec.
Pair: TypeAlias = tuple[AnyNamespace, bytes | str]


class Batch(GatheredWrites):
    """Gathers writes and commits them together at the end of its `with` block.  Made by `Site.atomic`.

    A block that ends with an error writes nothing.  For one thread.
    """

    def __init__(self, host: Host, write: Callable[[Mapping[bytes, bytes]], Version]) -> None:
        super().__init__("the atomic batch", host, bytes_max=COMMIT_BYTES_MAX)
        # The commit version, which identifies the batch in feeds; 0 before the commit and for an empty batch.
        self.version: Version = 0
        self._write = write
        self._ended = False

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None and not self._ended:
            self.commit()
        self._ended = True

    def commit(self) -> Version:
        """Write everything in one commit; return the commit version, 0 if there is nothing to write."""
        self._require_open()
        self._ended = True
        if self._rows:
            self.version = self._write(self._rows)
        return self.version

    def _require_open(self) -> None:
        """Raise Closed if the block has ended."""
        if self._ended:
            raise Closed("the atomic batch has ended; begin another one with site.atomic()")


class AtomicCalls:
    """The methods of a site for atomic batches and atomic reads."""

    _durable: bool

    @property
    def host(self) -> Host:
        """The host of this site.  Raises Closed after `close`."""
        raise NotImplementedError

    def atomic(self, *, durability: Durability | None = None) -> Batch:
        """Begin an atomic batch: its writes, to any namespaces, are one commit when its `with` block ends.

        Raises CommitTooLarge, and writes nothing, if the writes do not fit into one commit.

        >>> import floodmark, tempfile
        >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
        ...     messages = site.create_namespace("messages")
        ...     unread = site.create_namespace("unread", merge="counter")
        ...     with site.atomic() as batch:
        ...         batch.put(messages, b"grace/17", b"hello")
        ...         batch.add(unread, b"grace", 1)
        ...     site.read_atomic([(messages, b"grace/17"), (unread, b"grace")])
        [b'hello', 1]
        """
        durable = self._durable if durability is None else check_durability(durability)
        return Batch(self.host, partial(self.host.router.write_batch, durable=durable))

    def read_atomic(self, pairs: Iterable[Pair]) -> list[Any]:
        """The values of (namespace, key) pairs, in their order; None for an absent key.

        Every atomic batch is seen whole or not at all.  Raises LimitExceeded for more than 1,000 pairs.
        """
        listed = _check_pairs(pairs)
        for namespace, _ in listed:
            require_of(self.host, namespace)
        keys = [namespace.encoding.qualify(key) for namespace, key in listed]
        if (size := sum(map(len, keys))) > ATOMIC_READ_BYTES_MAX:
            raise LimitExceeded(
                f"the keys of an atomic read have {size:,} bytes; at most {ATOMIC_READ_BYTES_MAX:,} are "
                "allowed. Read fewer keys at a time"
            )
        host = self.host

        def read_snapshot(seen: Version) -> list[bytes | None]:
            return at_present(
                # The session's reads never go back behind a version that it has seen.
                lambda: max(seen, host.versions.read_version()),
                lambda version: host.router.get_many(list(dict.fromkeys(keys)), version),
            )

        found = read_atomic(host.router, keys, read_snapshot)
        return [
            present(namespace, qualified[NAMESPACE_BYTES:], found[qualified])[1]
            for (namespace, _), qualified in zip(listed, keys, strict=True)
        ]

    def read_atomic_many(self, pairs: Iterable[Pair]) -> dict[Pair, Any]:
        """`read_atomic`, returned as a mapping from each pair to its value."""
        listed = _check_pairs(pairs)
        return dict(zip(listed, self.read_atomic(listed), strict=True))


def _check_pairs(pairs: Iterable[Pair]) -> list[Any]:
    """The pairs as a list.  Raises InvalidArgument for an item that is no pair, or LimitExceeded."""
    if not isinstance(pairs, Iterable):
        raise InvalidArgument(f"an atomic read takes pairs of a namespace and a key, not {pairs!r:.60}")
    listed = list(pairs)
    if len(listed) > ATOMIC_READ_KEYS_MAX:
        raise LimitExceeded(
            f"an atomic read has {len(listed):,} keys; at most {ATOMIC_READ_KEYS_MAX:,} are allowed. Read "
            "them in portions; each is atomic by itself"
        )
    for pair in listed:
        if (
            not isinstance(pair, tuple)
            or len(pair) != 2
            or not isinstance(pair[0], Namespace | CodedNamespace)
        ):
            raise InvalidArgument(f"an atomic read takes pairs of a namespace and a key, not {pair!r:.60}")
    return listed
