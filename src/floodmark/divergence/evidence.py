"""What a site shows of a record for the sake of comparison: its stamps, and digests in place of values."""

import msgspec

from floodmark.codec.states import State, decode_state
from floodmark.codec.values import decode_value
from floodmark.merge.states import stamps_of
from floodmark.model.change import Stamp
from floodmark.model.version import Version


class Evidence(msgspec.Struct, frozen=True):
    """A record, dead or alive, as it stands at one site.

    `version` is that of the commit which stored it there, and `stamp` says where and when it was first
    written.  `digest` covers the whole record but its origin (`codec/thin.py`).  A record that is merged
    has a `state` as well: fields, whose texts are digests, or a counter as it is.
    """

    version: Version
    stamp: Stamp
    digest: int
    deleted: bool = False
    expires_at: int | None = None
    state: State | None = None

    def is_alive_at(self, physical_ms: int) -> bool:
        """Whether a reader at this time finds the record."""
        return not self.deleted and (self.expires_at is None or self.expires_at * 1000 > physical_ms)

    @property
    def stamps(self) -> list[Stamp]:
        """What the record is made of: its own stamp, or those of its parts and of its delete."""
        return [self.stamp] if self.state is None else stamps_of(self.state)

    @property
    def is_possible(self) -> bool:
        """Whether a commit can have stored it.

        A clock moves past all stamps of what is taken in before that gets its version, so no record has a
        stamp above its own version.  One that has was altered where it lies.

        >>> Evidence(9, Stamp(7, 2), digest=0).is_possible, Evidence(9, Stamp(10, 2), digest=0).is_possible
        (True, False)
        """
        if self.stamp.version > self.version:
            return False
        return self.state is None or all(stamp.version <= self.version for stamp in self.stamps)


def evidence_of(version: Version, site_id: int, thin: bytes, digest: int) -> Evidence:
    """What a thin record shows that a site stores at a version.  Without an origin, it was written there.

    >>> from floodmark.codec.thin import thin_record
    >>> from floodmark.codec.values import encode_value
    >>> evidence_of(9, 1, *thin_record(encode_value(b"ada", origin=Stamp(7, 2)))).stamp
    Stamp(version=7, site=2)
    >>> evidence_of(9, 1, *thin_record(encode_value(b"ada"))).stamp
    Stamp(version=9, site=1)
    """
    record = decode_value(thin)
    return Evidence(
        version,
        Stamp(version, site_id) if record.origin is None else record.origin,
        digest,
        record.deleted,
        record.expires_at,
        None if record.stamps is None else decode_state(thin),
    )
