"""Namespaces whose records are merged, and the choice of the class for a namespace.

They look like the others.  A class of their own leaves the way of a plain write as short as it is.
"""

from datetime import timedelta

from floodmark.host.catalog import NamespaceRow
from floodmark.host.ports import Host
from floodmark.model.errors import WrongPolicy
from floodmark.model.version import Version
from floodmark.site.arguments import Durability, check_durability
from floodmark.site.namespace import Namespace, Pairs, checked_pairs
from floodmark.site.policies import POLICIES, Fields


def open_namespace(row: NamespaceRow, host: Host, *, durable: bool) -> Namespace:
    """What users hold of a namespace."""
    if row.merge not in POLICIES:
        raise WrongPolicy(
            f"namespace {row.name!r} merges by {row.merge!r}, which this release does not know; upgrade it",
            namespace=row.name,
        )
    kind = MergedNamespace if POLICIES[row.merge].merges else Namespace
    return kind(row, host, durable=durable)


class MergedNamespace(Namespace):
    """A namespace of fields or counters: what is written is merged into what is there."""

    def put(
        self,
        key: bytes,
        value: Fields,
        *,
        ttl: timedelta | float | None = None,
        durability: Durability | None = None,
    ) -> Version:
        self._require_key(key)
        return self._merge(key, self._policy.put(key, value, self._expiry(ttl)), durability)

    def put_many(
        self,
        pairs: Pairs,
        *,
        ttl: timedelta | float | None = None,
        durability: Durability | None = None,
    ) -> Version:
        expires_at = self._expiry(ttl)
        durable = self._durable if durability is None else check_durability(durability)
        self._require_there()
        put = self._policy.put
        rows = {self._prefix + key: put(key, value, expires_at) for key, value in checked_pairs(pairs)}
        return self._router.merge(rows, durable=durable)

    def delete(self, key: bytes, *, durability: Durability | None = None) -> Version:
        self._require_key(key)
        return self._merge(key, self._policy.delete(), durability)
