"""Atomic batches, and the atomic reads that see all of a batch or nothing.

    with site.atomic() as batch:
        batch.put(messages, b"grace/17", body)
        batch.add(unread, b"grace", 1)
    batch.version

    text, count = site.read_atomic([(messages, b"grace/17"), (unread, b"grace")])

No reader or writer waits for a batch, and none is refused because of another: unlike a transaction it reads
nothing.
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

# A namespace and a key of it: bytes, or text if the handle has a codec.
Pair: TypeAlias = tuple[AnyNamespace, bytes | str]


class Batch(GatheredWrites):
    """Writes that wait for the end of their block.  Made by `Site.atomic`; for one thread.

    A block that fails writes nothing.
    """

    def __init__(self, host: Host, write: Callable[[Mapping[bytes, bytes]], Version]) -> None:
        super().__init__("the atomic batch", host, bytes_max=COMMIT_BYTES_MAX)
        # The version of its commit, which is its id in feeds; 0 before, and if nothing was written.
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
        """Write everything in one commit; its version, 0 if there is nothing to write."""
        self._require_open()
        self._ended = True
        if self._rows:
            self.version = self._write(self._rows)
        return self.version

    def _require_open(self) -> None:
        """Raise Closed after the end of the block."""
        if self._ended:
            raise Closed("the atomic batch has ended; begin another one with site.atomic()")


class AtomicCalls:
    """Atomic batches and reads of a site."""

    _durable: bool

    @property
    def host(self) -> Host:
        """The host of an open site; Closed after `close`."""
        raise NotImplementedError

    def atomic(self, *, durability: Durability | None = None) -> Batch:
        """Writes to any namespaces that are one commit, at the end of a `with` block.

        What does not fit into one commit raises CommitTooLarge, and nothing is written.

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
        """The values of keys of any namespaces, in their order, of which no atomic batch is read in part.

        None stands for a key without value.  LimitExceeded for more than 1,000 keys.
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
                # A caller that has seen a version is not taken back behind it.
                lambda: max(seen, host.versions.read_version()),
                lambda version: host.router.get_many(list(dict.fromkeys(keys)), version),
            )

        found = read_atomic(host.router, keys, read_snapshot)
        return [
            present(namespace, qualified[NAMESPACE_BYTES:], found[qualified])[1]
            for (namespace, _), qualified in zip(listed, keys, strict=True)
        ]

    def read_atomic_many(self, pairs: Iterable[Pair]) -> dict[Pair, Any]:
        """`read_atomic` as a mapping from each pair to its value, in their order."""
        listed = _check_pairs(pairs)
        return dict(zip(listed, self.read_atomic(listed), strict=True))


def _check_pairs(pairs: Iterable[Pair]) -> list[Any]:
    """The pairs of an atomic read; InvalidArgument if one is no pair, LimitExceeded if they are too many."""
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
