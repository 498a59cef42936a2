"""The heartbeats of a site that several nodes serve: the sums of its nodes' heartbeats.

A node counts the changes of the logs that it owns, and writes the sums into a log of heartbeats of its own.
A reader counts the changes of all nodes together.  So the owner of the first partition adds the nodes' sums
over the same versions, and writes them as the heartbeat of node 0, the only one that readers see:

    node 1    |--------|--------|--------|          its heartbeats, which end at common versions
    node 2             |-----------------|          it was slow, or got its first partition late
    node 3    |--------|----S                       it was taken over: S ends its last log
    site      |--------|-----------------|

A version T ends an interval of the site if for each log that was opened below T

- the node that counts the log has a heartbeat that ends at T, or
- the log was sealed at or below T.  The heartbeat that seals a log counts its changes since the node's last
  one, so T must not lie between the two.  A log that a takeover has kept is not counted until it is sealed.

**The order of reading.**  The ends of heartbeats are read before the partition map: a log that was sealed in
between is still counted up to these ends.  The sums are read after the map: so they include all that was
counted before a seal in the map.  A node that gets a partition writes there only above its own heartbeats.

**Doubt.**  If a node has lost count, or logs were trimmed, the heartbeat is marked as unchecked.  If a
heartbeat of a node is missing, the site's heartbeat does not begin where the last ended, which shows readers
the gap.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from typing import NamedTuple

from floodmark.codec.changelog import decode_row, encode_log_key
from floodmark.engine import Engine
from floodmark.model.change import Heartbeat, Sums
from floodmark.model.errors import VersionCollected
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition.families import LOG
from floodmark.partition.layout import LogRow, PartitionRow, load_logs, load_partitions
from floodmark.partition.read.changelog import read_logs, version_of


class LogAccount(NamedTuple):
    """Which heartbeats count the changes of a log.

    Those above `opened_at` and up to `counted` are in the heartbeats of `node`, and those up to `sealed` in
    `seal`.  An open log is counted up to VERSION_MAX; `seal` is None if the row is gone.
    """

    node: int
    opened_at: Version
    counted: Version = VERSION_MAX
    sealed: Version = VERSION_MAX
    seal: Heartbeat | None = None

    def may_end(self, through: Version, ends: Set[tuple[int, Version]]) -> bool:
        """Whether an interval of the site may end at a version, by the ends of the nodes' heartbeats."""
        if through <= self.opened_at or through >= self.sealed:
            return True
        return through <= self.counted and (self.node, through) in ends


def sum_up(
    engine: Engine, logs: Sequence[LogRow], before: Heartbeat | None, trimmed: Callable[[], Version]
) -> Heartbeat | None:
    """The next heartbeat of the site after `before`; None if logs are just being changed or trimmed.

    The caller sets its version, time and watermark.  It ends where `before` ended if no later interval is
    complete; without `before` it is None then.  `logs` are those known before the call.
    """
    # A last heartbeat that was trimmed ended at or below the trimmed version.
    since = trimmed() if before is None else before.through
    try:
        ends = {(beat.node, beat.through) for beat in _read_beats(engine, logs, since, trimmed)}
        present = load_logs(engine)
        accounts = _load_accounts(engine, present, since)
        if accounts is None:
            return None
        through = _find_end(since, ends, accounts)
        # A node whose log is not among `logs` may have beaten, and have lost its partitions, meanwhile.
        beats = list(_read_beats(engine, present, since, trimmed))
    except VersionCollected:
        # The logs are just being trimmed.
        return None
    if before is None and through == since:
        return None
    summed = [beat for beat in beats if since < beat.through <= through]
    seals = [account for account in accounts if since < account.sealed <= through]
    sums: dict[int, Sums] = {}
    for beat in (*summed, *(account.seal for account in seals if account.seal is not None)):
        for namespace, each in beat.sums.items():
            sums[namespace] = sums.get(namespace, Sums()).plus(each)
    # After all was read: rows that were trimmed meanwhile are missing.
    is_doubtful = (
        before is None
        or since < trimmed()
        or any(account.seal and not account.seal.since for account in seals)
    )
    told = since
    begun = {log.id: log.opened_at for log in present if log.partition is None}
    for node in {account.node for account in accounts}:
        own = [account for account in accounts if account.node == node]
        chain = [beat for beat in summed if beat.node == node]
        is_doubtful = is_doubtful or _has_lost_count(since, own, chain)
        told = max(told, _find_gap(since, through, begun.get(node, 0), own, chain))
    if any(account.seal is None for account in seals):
        told = through
    return Heartbeat(
        version=0,
        node=0,
        wall_ms=0,
        since=0 if is_doubtful else told,
        through=through,
        watermark={},
        sums=sums,
    )


def _read_beats(
    engine: Engine, logs: Sequence[LogRow], since: Version, trimmed: Callable[[], Version]
) -> Iterator[Heartbeat]:
    """The nodes' heartbeats above a version, in order, except for those that were trimmed."""
    of_nodes = [log for log in logs if log.partition is None and log.id]
    for page in read_logs(engine, of_nodes, max(since, trimmed()), VERSION_MAX, trimmed):
        for line in page:
            row = decode_row(version_of(line), line[1])
            if isinstance(row, Heartbeat):
                yield row


def _load_accounts(engine: Engine, logs: Sequence[LogRow], since: Version) -> list[LogAccount] | None:
    """The accounts of all logs that may have changes above a version; None if logs are just being changed.

    `logs` were loaded just before.  The open logs that a node counts form one account, from the version at
    which the first of them was opened.
    """
    accounts: list[LogAccount] = []
    opened: dict[int, Version] = {}
    rows: dict[int, PartitionRow] = {row.log: row for row in load_partitions(engine)}
    for log in logs:
        if log.partition is None:
            continue
        if log.sealed_at is not None:
            if log.sealed_at > since:
                accounts.append(_sealed_account(engine, log, log.sealed_at, since))
        elif (row := rows.get(log.id)) is None:
            return None
        elif row.counted is not None:
            node, counted = row.counted
            accounts.append(LogAccount(node, log.opened_at, counted))
        else:
            opened[row.node] = min(log.opened_at, opened.get(row.node, VERSION_MAX))
    return [*accounts, *(LogAccount(node, opened_at) for node, opened_at in opened.items())]


def _sealed_account(engine: Engine, log: LogRow, sealed: Version, since: Version) -> LogAccount:
    stored = engine.get(LOG, encode_log_key(log.id, sealed))
    seal = None if stored is None else decode_row(sealed, stored)
    if not isinstance(seal, Heartbeat):
        return LogAccount(0, log.opened_at, since, sealed)
    # A node that has lost count counted at least up to the last heartbeat of the site.
    return LogAccount(seal.node, log.opened_at, seal.since or since, sealed, seal)


def _find_end(since: Version, ends: Set[tuple[int, Version]], accounts: Sequence[LogAccount]) -> Version:
    """The last version that ends an interval of the site; `since` if there is none."""
    for through in sorted({end for _, end in ends if end > since}, reverse=True):
        if all(account.may_end(through, ends) for account in accounts):
            return through
    return since


def _has_lost_count(since: Version, accounts: Sequence[LogAccount], chain: Sequence[Heartbeat]) -> bool:
    """Whether one of a node's heartbeats is unchecked, while the node had changes to count."""
    return any(
        not beat.since and account.opened_at < beat.through and account.counted > since
        for beat in chain
        for account in accounts
    )


def _find_gap(
    since: Version,
    through: Version,
    begun: Version,
    accounts: Sequence[LogAccount],
    chain: Sequence[Heartbeat],
) -> Version:
    """A version before which a heartbeat of a node is missing, or `since`.

    The node wrote nothing at or below `begun`, at which its own log was opened.  A log that it was given may
    have been opened below that, by a node whose clock was behind.
    """
    counted = [
        account for account in accounts if max(since, account.opened_at) < min(through, account.counted)
    ]
    if not counted:
        return since
    reached = max(since, begun, min(account.opened_at for account in counted))
    for beat in chain:
        if beat.since > reached:
            return beat.since
        reached = max(reached, beat.through)
    last = max(min(through, account.counted) for account in counted)
    return since if reached >= last else reached
