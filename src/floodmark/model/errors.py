"""Everything that can go wrong, as one tree.

    FloodmarkError
    ├── Retryable                    the same call may succeed later, as it is
    │   ├── PartitionMoved           ask the site for the partition map again
    │   │   └── NodeFenced           another node has taken over the partitions of this one
    │   ├── NotKeeper                another node does what concerns the whole site; call it there
    │   ├── CatalogChanged           a namespace was changed meanwhile; the settings are loaded again
    │   ├── Conflict                 what a transaction read was written meanwhile; do it again
    │   │   └── TransactionTooOld    it read too long ago; do it again, with less work in it
    │   ├── PartitionStopped         a failed write is being recovered from
    │   ├── LeaseHeld                another process does this work; wait for it, or let it
    │   ├── LinkStalled              changes of another site do not come; the target shows why
    │   ├── Rejoining                a site that was restored has not got everything back yet
    │   ├── SinkFailed               what a feed writes to refused
    │   ├── StaleLink                a link stands elsewhere than the step supposed: plan the step again
    │   ├── Unreachable              no answer from a server; nothing was done, or nothing changed
    │   └── StorageFailed            the disk or the database refused; nothing was written
    │       └── StorageFull          make room, then call again
    ├── OutcomeUnknown               the write may or may not have happened: read before you repeat
    │   ├── CommitUnknown            a transaction's; site.transaction_outcome(id) tells
    │   └── PartlyDone               some of many writes happened, the others did not
    └── Terminal                     the same call will fail again
        ├── InvalidArgument          also a ValueError
        │   ├── InvalidKey
        │   ├── InvalidValue
        │   ├── InvalidRange
        │   ├── InvalidTimeToLive
        │   ├── InvalidVersion
        │   │   └── VersionInFuture
        │   ├── InvalidName
        │   ├── InvalidOption
        │   └── SchemaMismatch
        ├── WrongPolicy              the namespace merges its records in another way
        ├── LimitExceeded
        │   └── CommitTooLarge
        ├── KeyNotFound              also a KeyError
        ├── NamespaceNotFound
        ├── NamespaceExists
        ├── PartitionNotFound
        ├── SafePointNotFound
        ├── FeedNotFound
        ├── FeedExists
        ├── FeedStateConflict        not possible in the state that the feed is in
        ├── SubscriptionNotFound
        ├── AcknowledgementConflict  acknowledged before, or pending in another transaction
        ├── TransactionNotFound
        ├── TransactionEnded         it is decided, or over its time; begin another one
        ├── NotAllowed
        │   └── NotAuthenticated
        ├── VersionCollected
        │   └── GenerationSwapped    a data set was published: go on from a snapshot
        ├── PublicationConflict      another data set is in the way, or this publication has ended
        ├── ClockSkew
        ├── Fenced                   a link from a site that was removed, or restored since
        ├── Corruption
        │   └── BackupDamaged        restore from another copy, or an earlier version
        ├── Closed
        └── CannotOpen
            ├── NotASite
            ├── SiteLocked
            ├── SiteMismatch
            ├── InvalidConfiguration
            ├── WireMismatch
            └── FormatTooNew

A message says what happened, to which key, partition or namespace, and what to do next; the same
facts stand in `details` for programs.  Errors survive pickling, because they cross process borders.
"""

from collections.abc import Mapping
from typing import Self


class FloodmarkError(Exception):
    """Root of all errors that Floodmark raises on purpose."""

    def __init__(self, message: str, /, **details: object) -> None:
        super().__init__(message)
        self.details: Mapping[str, object] = details

    def again(self) -> Self:
        """A copy of the error, to raise in another thread or at another time."""
        return type(self)(str(self), **self.details)

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), str(self), dict(self.details))


def _restore(kind: type[FloodmarkError], message: str, details: dict[str, object]) -> FloodmarkError:
    return kind(message, **details)


class Retryable(FloodmarkError):
    """The same call may succeed later; nothing was done."""


class Terminal(FloodmarkError):
    """The same call will fail again; nothing was done."""


class OutcomeUnknown(FloodmarkError):
    """A write was handed to storage and no answer came back: it may or may not have happened."""


class CommitUnknown(OutcomeUnknown):
    """No answer came to the commit of a transaction, whose id `details["transaction"]` has."""


class PartlyDone(OutcomeUnknown):
    """A call that consists of several commits failed after some of them."""


class PartitionMoved(Retryable):
    """The partition was split, merged or moved; its keys are served elsewhere."""


class NodeFenced(PartitionMoved):
    """The node was declared dead, or could not show for too long that it lives."""


class NotKeeper(Retryable):
    """The node does not hold the keeper's lease, which writes for the whole site need."""


class CatalogChanged(Retryable):
    """Another node has changed a namespace since this node has loaded the catalog."""


class Conflict(Retryable):
    """What a transaction has read was written before it could commit; nothing was written by it."""


class TransactionTooOld(Conflict):
    """A transaction commits later after its first read than a site can still judge it."""


class PartitionStopped(Retryable):
    """Storage failed in the middle of a write and has not recovered yet."""


class LeaseHeld(Retryable):
    """Another process holds the lease of a feed or a subscription, or has taken it over."""


class LinkStalled(Retryable):
    """Nothing has come over a link for a long time, though there is something to come."""


class Rejoining(Retryable):
    """A site that was restored takes no writes before it has got back what it wrote in its earlier life."""


class SinkFailed(Retryable):
    """The sink of a feed did not take what was written to it."""


class StaleLink(Retryable):
    """A step of a link that does not begin where the link stands."""


class Unreachable(Retryable):
    """The server did not answer.  A read, or a call that was never sent: nothing was done."""


class StorageFailed(Retryable):
    """Storage refused the operation; nothing was written."""


class StorageFull(StorageFailed):
    """No room is left on the disk that holds the site."""


class InvalidArgument(Terminal, ValueError):
    """An argument that can never be right."""


class InvalidKey(InvalidArgument):
    """A key that is empty, too large or not bytes."""


class InvalidValue(InvalidArgument):
    """A value that is too large or not bytes."""


class InvalidRange(InvalidArgument):
    """A key range whose start lies behind its end."""


class InvalidTimeToLive(InvalidArgument):
    """A time to live that is not positive."""


class InvalidVersion(InvalidArgument):
    """Something that is neither a version nor a moment with a time zone."""


class VersionInFuture(InvalidVersion):
    """A version that this site has not reached yet."""


class InvalidName(InvalidArgument):
    """A name or a setting that cannot be used."""


class InvalidOption(InvalidArgument):
    """An option of a Spark reader, writer or job that is missing, unknown or cannot be used."""


class SchemaMismatch(InvalidArgument):
    """Columns that are not the ones that are read or written here, or whose types do not fit."""


class WrongPolicy(Terminal):
    """Something that the merge policy of the namespace does not allow."""


class LimitExceeded(Terminal):
    """A documented limit would be passed."""


class CommitTooLarge(LimitExceeded):
    """More than one commit can hold."""


class KeyNotFound(Terminal, KeyError):
    """No value under this key."""

    # KeyError shows its message in quotes.
    __str__ = Exception.__str__


class NamespaceNotFound(Terminal):
    """No namespace of this name."""


class NamespaceExists(Terminal):
    """A namespace of this name is already there."""


class PartitionNotFound(Terminal):
    """No partition of this id, or none that fits the request."""


class SafePointNotFound(Terminal):
    """No safe point of this name, or its lifetime is over."""


class FeedNotFound(Terminal):
    """No feed of this name."""


class FeedExists(Terminal):
    """A feed of this name is already there."""


class FeedStateConflict(Terminal):
    """Something that cannot be done to a feed in its present state."""


class SubscriptionNotFound(Terminal):
    """No subscription of this name."""


class AcknowledgementConflict(Terminal):
    """A change that was acknowledged before, or is pending in another transaction."""


class TransactionNotFound(Terminal):
    """No transaction has this id, or it has ended."""


class TransactionEnded(Terminal):
    """A transaction takes no further part: it was committed or aborted, or its time is over."""


class NotAllowed(Terminal):
    """The caller's role does not allow this."""


class NotAuthenticated(NotAllowed):
    """The caller did not show who it is, or what it showed is not valid."""


class VersionCollected(Terminal):
    """The version asked for lies behind what garbage collection has kept."""


class GenerationSwapped(VersionCollected):
    """A data set was published in the place of what a stream of changes has read so far."""


class PublicationConflict(Terminal):
    """Another data set is being published into the namespace, or has this base; or this publication ended."""


class ClockSkew(Terminal):
    """A remote version, or a reading of this machine's own clock, lies too far ahead."""


class Fenced(Terminal):
    """A link whose source has been removed from the topology, or replaced by a later incarnation."""


class Corruption(Terminal):
    """Stored bytes that are not what Floodmark wrote."""


class BackupDamaged(Corruption):
    """A backup whose files are not those that were written; the site is not touched."""


class Closed(Terminal):
    """Use after close."""


class CannotOpen(Terminal):
    """A site that cannot be opened as asked."""


class NotASite(CannotOpen):
    """A directory that holds something else."""


class SiteLocked(CannotOpen):
    """Another process owns the directory."""


class SiteMismatch(CannotOpen):
    """The directory holds a site of another name or id."""


class InvalidConfiguration(CannotOpen):
    """A configuration file, or a combination of options, that cannot be used."""


class WireMismatch(CannotOpen):
    """Client and server speak no common version of the wire protocol."""


class FormatTooNew(CannotOpen):
    """The directory was written by a newer Floodmark."""
