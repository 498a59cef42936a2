"""All errors that Floodmark raises, as one tree.

    FloodmarkError
    ├── Retryable                    the same call may succeed later, as it is
    │   ├── PartitionMoved           ask the site for the partition map again
    │   │   └── NodeFenced           another node has taken over the partitions of this one
    │   ├── NotKeeper                only the keeper makes this call; send it to that node
    │   ├── CatalogChanged           a namespace was changed meanwhile; its settings are loaded again
    │   ├── Conflict                 a read of the transaction is outdated; run the transaction again
    │   │   └── TransactionTooOld    its reads are too old; run it again, with less work in it
    │   ├── PartitionStopped         storage is recovering from a failed write
    │   ├── LeaseHeld                another process holds the lease; wait for it, or leave it the work
    │   ├── LinkStalled              changes of another site do not arrive; the target shows why
    │   ├── Rejoining                a restored site does not have all its changes back yet
    │   ├── SinkFailed               the sink of a feed refused a write
    │   ├── StaleLink                the link has moved on: plan the step again
    │   ├── Unreachable              no answer from a server; nothing was changed
    │   └── StorageFailed            the disk or the database refused; nothing was written
    │       └── StorageFull          make room, then call again
    ├── OutcomeUnknown               the write may or may not have happened: read before you repeat
    │   ├── CommitUnknown            for a transaction; site.transaction_outcome(id) returns the outcome
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
        ├── FeedStateConflict        not possible in the present state of the feed
        ├── SubscriptionNotFound
        ├── AcknowledgementConflict  acknowledged before, or pending in another transaction
        ├── TransactionNotFound
        ├── TransactionEnded         it is decided, or past its deadline; begin another one
        ├── NotAllowed
        │   └── NotAuthenticated
        ├── VersionCollected
        │   └── GenerationSwapped    a data set was published: continue from a snapshot
        ├── PublicationConflict      another data set is being published, or this publication has ended
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

A message says what happened, to which key, partition or namespace, and what to do next; programs find the
same facts in `details`.  Errors can be pickled, because they cross process borders.
"""

from collections.abc import Mapping
from typing import Self


class FloodmarkError(Exception):
    """The root of all errors that Floodmark raises on purpose.  `details` has the facts of the message."""

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
    """The call had no effect, and may succeed later if it is repeated as it is."""


class Terminal(FloodmarkError):
    """The call had no effect, and will fail again if it is repeated as it is."""


class OutcomeUnknown(FloodmarkError):
    """No answer to a write: it may or may not have happened.  Read before you repeat it."""


class CommitUnknown(OutcomeUnknown):
    """No answer to the commit of a transaction; its id is `details["transaction"]`."""


class PartlyDone(OutcomeUnknown):
    """A call with several steps failed after some of them took effect, such as commits to some partitions."""


class PartitionMoved(Retryable):
    """The partition was split, merged or moved; other partitions, or another node, serve its keys now."""


class NodeFenced(PartitionMoved):
    """The node was declared dead by another node, or could not write its beat for too long."""


class NotKeeper(Retryable):
    """The node does not hold the keeper's lease, without which it cannot write for the whole site."""


class CatalogChanged(Retryable):
    """Another node changed a namespace after this node had loaded the catalog; nothing was written."""


class Conflict(Retryable):
    """A record that the transaction read was changed before its commit; the transaction wrote nothing."""


class TransactionTooOld(Conflict):
    """Too much time passed between the first read of a transaction and its commit to detect conflicts."""


class PartitionStopped(Retryable):
    """Storage is busy, or has not recovered from a failed write yet; this write did not happen."""


class LeaseHeld(Retryable):
    """Another process holds the lease of the work, such as that of a feed or a subscription."""


class LinkStalled(Retryable):
    """Changes that another site has made do not arrive over a link."""


class Rejoining(Retryable):
    """A restored site refuses this until it has back all changes that it wrote before it was restored."""


class SinkFailed(Retryable):
    """The sink of a feed refused a write, or the target of a job lacks rows that were written to it."""


class StaleLink(Retryable):
    """A step of a link does not begin at the present position of the link; plan the step again."""


class Unreachable(Retryable):
    """The server did not answer a read, or a call was never sent to it; nothing was changed."""


class StorageFailed(Retryable):
    """The disk or the database refused the operation; nothing was written."""


class StorageFull(StorageFailed):
    """No space is left on the disk, or in the database or object store; free some, then call again."""


class InvalidArgument(Terminal, ValueError):
    """An argument is invalid, whatever the state of the site."""


class InvalidKey(InvalidArgument):
    """A key is empty, too large or not bytes."""


class InvalidValue(InvalidArgument):
    """A value is too large, not bytes, or not of the form that the call needs, such as a JSON object."""


class InvalidRange(InvalidArgument):
    """The start of a key range is after its end."""


class InvalidTimeToLive(InvalidArgument):
    """A time to live is not positive, or too long."""


class InvalidVersion(InvalidArgument):
    """An argument is neither a version nor a moment with a time zone."""


class VersionInFuture(InvalidVersion):
    """A version to read at is in the future of this site."""


class InvalidName(InvalidArgument):
    """A name, or a setting of a namespace, cannot be used."""


class InvalidOption(InvalidArgument):
    """An option, such as that of a command or of a Spark reader, is missing, unknown or cannot be used."""


class SchemaMismatch(InvalidArgument):
    """Columns are missing or not expected, or have types that cannot be read or written here."""


class WrongPolicy(Terminal):
    """The merge policy of the namespace, or the layer that it holds, does not allow the operation."""


class LimitExceeded(Terminal):
    """A documented limit would be exceeded; nothing was written."""


class CommitTooLarge(LimitExceeded):
    """The rows do not fit into one commit; write them in smaller portions."""


class KeyNotFound(Terminal, KeyError):
    """There is no value under this key."""

    # KeyError shows its message in quotes.
    __str__ = Exception.__str__


class NamespaceNotFound(Terminal):
    """There is no namespace of this name, or it was dropped."""


class NamespaceExists(Terminal):
    """A namespace of this name exists already."""


class PartitionNotFound(Terminal):
    """There is no partition with this id, or none that the request can be applied to."""


class SafePointNotFound(Terminal):
    """There is no safe point of this name, or it has expired."""


class FeedNotFound(Terminal):
    """There is no feed of this name."""


class FeedExists(Terminal):
    """A feed of this name exists already."""


class FeedStateConflict(Terminal):
    """The operation is not possible in the present state of the feed."""


class SubscriptionNotFound(Terminal):
    """There is no subscription of this name."""


class AcknowledgementConflict(Terminal):
    """A change was acknowledged before, or another transaction that has not ended acknowledges it."""


class TransactionNotFound(Terminal):
    """There is no transaction with this id, or it ended too long ago to be remembered."""


class TransactionEnded(Terminal):
    """The transaction was committed or aborted already, or is past its deadline; begin another one."""


class NotAllowed(Terminal):
    """The caller's role does not allow this."""


class NotAuthenticated(NotAllowed):
    """The caller sent no credentials, or invalid ones."""


class VersionCollected(Terminal):
    """Garbage collection has removed records or changes that a read at this version needs."""


class GenerationSwapped(VersionCollected):
    """A data set was published and has replaced the records that a stream of changes has read so far."""


class PublicationConflict(Terminal):
    """Another data set is being published into the namespace, or has this base; or this one has ended."""


class ClockSkew(Terminal):
    """A version from elsewhere, or a reading of this machine's clock, is too far ahead."""


class Fenced(Terminal):
    """The source of a link was removed from the topology, or replaced by a later incarnation."""


class Corruption(Terminal):
    """Stored bytes are damaged: they are not those that Floodmark wrote."""


class BackupDamaged(Corruption):
    """The files of a backup are missing or damaged; the site was not changed."""


class Closed(Terminal):
    """The site, connection or stream was closed; open it again."""


class CannotOpen(Terminal):
    """A site cannot be opened, connected to or served as asked."""


class NotASite(CannotOpen):
    """The directory or database does not hold a site."""


class SiteLocked(CannotOpen):
    """Another process has the directory open, or runs under the same node number."""


class SiteMismatch(CannotOpen):
    """The directory, database or server is that of a site with another name or id."""


class InvalidConfiguration(CannotOpen):
    """A configuration file, or a combination of options, cannot be used."""


class WireMismatch(CannotOpen):
    """Client and server have no common version of the wire protocol, or cannot read each other's messages."""


class FormatTooNew(CannotOpen):
    """A newer Floodmark wrote the data; this one cannot read its format."""
