"""The links that end at a site, as stored: their positions and accounts.

For every source and namespace there is one row: the position, which is the version of the source up to which
all changes are here, and the account of their heartbeats (`accounting/account.py`).  Both are written
together, after the changes that they cover and above them, so that after a crash neither covers a change that
is not here.  A step from another position is refused; a step that was noted before has no effect.

    links/ namespace: 3 | source: 1                     position, account, last heartbeat, findings
    marks/ namespace: 3 | source: 1 | ~version: 8       the position, as of a version of this site

The position is the site's *watermark* entry for that source.  Earlier positions stay as long as the data
does, for readers of the past.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from floodmark.accounting.account import Account, AccountState, Checked, Doubt, Finding, Verdict
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace, encode_version
from floodmark.engine import Engine, Guard, WriteRow
from floodmark.model.change import NamespaceBeat, Tally
from floodmark.model.errors import Corruption, Fenced, InvalidArgument, StaleLink
from floodmark.model.limits import PAGE_BYTES_MAX, SITE_IDS_MAX
from floodmark.model.partition import LinkGuard
from floodmark.model.ranges import prefix_end
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition import META, Node
from floodmark.partition.families import HORIZON
from floodmark.partition.layout import read_metadata
from floodmark.partition.read.records import require_kept
from floodmark.replication.applied import Applied, NamespaceApplied
from floodmark.replication.lag import RecentLinks
from floodmark.replication.members import Members
from floodmark.replication.step import LinkStep, NamespaceStep, why_too_old
from floodmark.replication.topology import MemberSite, settled_version

FINDINGS_KEPT: Final = 16

_LINKS: Final = b"links/"
_MARKS: Final = b"marks/"

_log = logging.getLogger("floodmark.replication")

# Namespace and source, by their ids.
LinkId: TypeAlias = tuple[int, int]


class LinkPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a site in a namespace of a source."""

    source_id: int
    namespace: str
    through: Version
    incarnation: int


class LastBeat(msgspec.Struct, frozen=True, array_like=True):
    """The last heartbeat of a source: its time, and the state of its site at that time."""

    version: Version
    wall_ms: int
    through: Version
    watermark: dict[int, Version]


class StoredFinding(msgspec.Struct, frozen=True, array_like=True):
    """A finding of an account, and its time."""

    at_ms: int
    finding: Finding


class LinkRow(msgspec.Struct, frozen=True, array_like=True):
    """A link and namespace as stored.  The counts are of intervals between heartbeats."""

    through: Version = 0
    incarnation: int = 0
    account: AccountState = AccountState()
    beat: LastBeat | None = None
    checked: int = 0
    unchecked: int = 0
    wrong: int = 0
    findings: tuple[StoredFinding, ...] = ()


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(LinkRow).decode


class Links:
    """Keeps the positions of the links that end at one site."""

    def __init__(
        self,
        node: Node,
        members: Members,
        site_id: int,
        name_of: Callable[[int], str | None],
        fresh_version: Callable[[], Version],
    ) -> None:
        self._node = node
        self._fresh_version = fresh_version
        self._storage = node.storage
        self._members = members
        self._name_of = name_of
        self._site_id = site_id
        # Replaced as a whole, in the turn, after the change on disk.
        self._rows: Mapping[LinkId, LinkRow] = {}
        self.recent = RecentLinks()
        self.load()
        self._storage.on_recovery.append(self.load)

    def load(self) -> None:
        """Load the positions, which the keeper may have moved."""
        rows: dict[LinkId, LinkRow] = {}
        for key, stored in read_metadata(self._storage.engine, _LINKS):
            name = key[len(_LINKS) :]
            try:
                row = _decode(stored)
            except msgspec.MsgspecError as error:
                raise Corruption(
                    f"the row {key!r} of a link is damaged: {error}. Restore the site from a backup"
                ) from error
            rows[int.from_bytes(name[:NAMESPACE_BYTES], "big"), name[NAMESPACE_BYTES]] = row
        self._rows = rows

    # Positions

    @property
    def rows(self) -> Mapping[LinkId, LinkRow]:
        """All links as stored, by namespace and source."""
        return self._rows

    def watermarks(self) -> dict[int, dict[int, Version]]:
        """The watermarks of all namespaces that are there, as heartbeats tell them."""
        found: dict[int, dict[int, Version]] = {}
        for (namespace, source), row in self._rows.items():
            if encode_namespace(namespace) not in self._storage.dropped:
                found.setdefault(namespace, {})[source] = row.through
        return found

    def watermark(self, namespace: int, at: Version | None = None) -> dict[int, Version]:
        """The versions of other sites up to which their changes are here, now or as of a version here.

        A missing entry is 0.  The watermark as of a resolved version never changes.
        """
        sources = {source: row.through for (each, source), row in self._rows.items() if each == namespace}
        if at is None:
            return sources
        self._node.observe(at)
        self._node.committer.wait_applied(at)
        marks = {source: self._mark(namespace, source, at) for source in sources}
        require_kept(at, self._node.retention.collected_version(namespace))
        return {source: through for source, through in marks.items() if through}

    def _mark(self, namespace: int, source: int, at: Version) -> Version:
        found = self._older_marks(namespace, source, at, rows_max=1)
        return int.from_bytes(found[0][1], "big") if found else 0

    def _older_marks(
        self, namespace: int, source: int, at: Version, rows_max: int
    ) -> list[tuple[bytes, bytes]]:
        """Positions as of a version and before it, the newest first."""
        prefix = _MARKS + _name(namespace, source)
        return self._storage.engine.scan(
            META,
            prefix + encode_version(at),
            prefix_end(prefix),
            rows_max=rows_max,
            bytes_max=PAGE_BYTES_MAX,
        )

    def settled_version(
        self, namespace: int, members: Mapping[int, MemberSite], sources: Collection[int] | None = None
    ) -> Version:
        """The version up to which no older change of a namespace can still arrive (`settled.py`)."""
        watermarks = {self._site_id: self.watermark(namespace)}
        for (each, source), row in self._rows.items():
            member = members.get(source)
            if each != namespace or row.beat is None or member is None:
                continue
            # Heartbeats of an earlier incarnation do not count.
            if row.incarnation >= member.incarnation:
                watermarks[source] = {**row.beat.watermark, source: row.beat.through}
        return settled_version(self._site_id, members, watermarks, sources)

    # Steps

    def advance(self, step: LinkStep, applied: Applied, lacking: Collection[str] = ()) -> None:
        """Note a step whose changes are all applied and durable.  A step that was noted before has no effect.

        The namespaces in `lacking` have no data set here that the source has.
        Raises StaleLink if the step does not begin at the position of the link, and Fenced if its source may
        no longer write here.
        """
        _check_step(step)
        if self._node.number:
            # The watermark lies above all changes that it covers, at whichever node they were applied.
            self._fresh_version()
        with self._storage.settled():
            now_ms = self._node.clock.time_source()
            rows: dict[LinkId, LinkRow] = {}
            for part in step.namespaces:
                row = self._rows.get((part.target_id, step.source_id), LinkRow())
                self._require_living(step, part, row)
                if part.until > row.through:
                    _require_next(step, part, row)
                    self._require_admitted(step.source_id, part.target_id, part.begin)
                    self._node.clock.require_near(part.until)
                    done = applied.namespaces.get(part.name, NamespaceApplied())
                    rows[part.target_id, step.source_id] = _advance(row, step.incarnation, part, done, now_ms)
            if not rows:
                return
            self._store(rows)
            self._remember(step, applied, lacking, now_ms)

    def admit(self, guard: LinkGuard) -> Sequence[Guard]:
        """Refuse writes of a step that has been noted, planned again, or fenced meanwhile.

        Returns the guards of the write: a node of several admits by rows that the keeper may change until the
        write happens.  The topology needs none, since the catalog's epoch covers it.
        """
        if guard.source == self._site_id:
            self._require_returning(guard)
            return ()
        guards: list[Guard] = []
        self._members.require_rejoined()
        member = self._members.find(guard.source)
        if member is not None and not member.admits(guard.incarnation):
            raise Fenced(
                f"changes of site {guard.source} as incarnation {guard.incarnation} are refused: it was "
                "removed from the topology, or restored since"
            )
        for namespace, position in guard.positions.items():
            row = self._rows.get((namespace, guard.source), LinkRow())
            if self._node.number:
                found = _guards_of(self._storage.engine, namespace, guard.source)
                guards += found
                row = LinkRow() if found[0].expected is None else _decode(found[0].expected)
            if row.through != position:
                raise StaleLink(
                    f"changes of site {guard.source} behind version {position} come too late: the link "
                    f"stands at {row.through}. Plan the step again",
                    through=row.through,
                )
            begin = max(position, guard.starts.get(namespace, 0))
            self._require_admitted(guard.source, namespace, begin)
        return guards

    def why_refused(self, source: int, namespace: int, begin: Version = VERSION_MAX) -> str | None:
        """Why the site refuses a source's changes after a version, in a namespace of an id; or None.

        A site without a topology applies all changes.
        """
        name = self._name_of(namespace)
        if self._members.topology is None or name is None:
            return None
        if source not in self._members.sources(name):
            return "the topology in force here does not let this namespace come from that site"
        horizon = self.horizon(source, namespace)
        return why_too_old(self._members.name_of(source), name, begin, horizon) if begin < horizon else None

    def horizon(self, source: int, namespace: int) -> Version:
        """The version of a source after which its changes must begin: deletions before it are collected.

        Garbage collection waits for members, so none of them is older.  But a site that took part before
        this one knew of it was not waited for: its older writes would come back to life here only.
        """
        name, member = self._name_of(namespace), self._members.find(source)
        # The members have agreed on the changes of a removed site.
        if name is None or member is None or not member.is_active:
            return 0
        return self._node.retention.collected_horizon(namespace)

    def _require_returning(self, guard: LinkGuard) -> None:
        """Refuse this site's own writes, which come back only while it is being restored."""
        if not self._members.is_rejoining or guard.incarnation != self._members.incarnation:
            raise StaleLink(
                f"what this site wrote before it was restored as incarnation {guard.incarnation} comes too "
                "late: it has got everything back"
            )

    def _require_admitted(self, source: int, namespace: int, begin: Version) -> None:
        problem = self.why_refused(source, namespace, begin)
        if problem is not None:
            raise self._fence(source, namespace, problem)

    def _require_living(self, step: LinkStep, part: NamespaceStep, row: LinkRow) -> None:
        problem = self._why_fenced(step, part, row)
        if problem is not None:
            raise self._fence(step.source_id, part.target_id, problem)

    def _fence(self, source: int, namespace: int, problem: str) -> Fenced:
        self.recent.of(namespace, source).stalled = problem
        site, name = self._members.name_of(source), self._name_of(namespace)
        return Fenced(
            f"changes of {name!r} from {site!r} are refused: {problem}", source=site, namespace=name
        )

    def _why_fenced(self, step: LinkStep, part: NamespaceStep, row: LinkRow) -> str | None:
        if step.source_id == self._site_id:
            return "that is this site itself; give every site an id of its own"
        member = self._members.find(step.source_id)
        incarnation = max(row.incarnation, 0 if member is None else member.incarnation)
        if step.incarnation < incarnation:
            return (
                f"they are of its incarnation {step.incarnation}, and it was restored as incarnation "
                f"{incarnation} since; let replication read the present topology"
            )
        if member is not None and member.is_active and step.incarnation > incarnation:
            return (
                f"they are of its incarnation {step.incarnation}, and it is known here as incarnation "
                f"{incarnation}; put the present topology in force at this site first"
            )
        if member is not None and not member.is_active and part.until > (member.final or 0):
            return "it was removed from the topology, and what it wrote since is lost"
        return None

    def _remember(self, step: LinkStep, applied: Applied, lacking: Collection[str], now_ms: int) -> None:
        for part in step.namespaces:
            done = applied.namespaces.get(part.name)
            recent = self.recent.of(part.target_id, step.source_id)
            recent.lacks_data_set = part.name in lacking
            if not recent.lacks_data_set:
                recent.stalled = None
            if done is not None:
                recent.add_lags(done.lags, now_ms)
                recent.changes += done.changes
                recent.ahead_ms = max((beat.wall_ms - now_ms for beat in done.beats), default=recent.ahead_ms)

    # Adopted positions

    def adopt(
        self, namespace: int, watermark: Mapping[int, Version], horizon: Version, told: Version
    ) -> None:
        """Take over the positions of the site from which a namespace was loaded.

        Raises StaleLink if a link of the namespace has a position of its own; repeating it has no effect.
        `told` is the version up to which all other sites have this site's own writes.
        """
        with self._storage.settled():
            known = {source: row for (each, source), row in self._rows.items() if each == namespace}
            if known and {source: row.through for source, row in known.items()} == watermark:
                return
            if any(row.through for row in known.values()):
                raise StaleLink(
                    "the namespace has changes of other sites already, and does not begin anew; load into "
                    "one that is empty",
                    namespace=namespace,
                )
            self._store(
                {
                    (namespace, source): LinkRow(through=through, incarnation=self._incarnation_of(source))
                    for source, through in watermark.items()
                },
                self._node.retention.raise_horizon(namespace, horizon),
                self._members.note_told(namespace, told),
            )

    def _incarnation_of(self, source: int) -> int:
        member = self._members.find(source)
        return 1 if member is None else member.incarnation

    def _store(self, rows: Mapping[LinkId, LinkRow], *others: WriteRow) -> None:
        """Store links.  The caller has the turn."""
        self._storage.require_not_dropped([encode_namespace(namespace) for namespace, _ in rows])
        self._node.committer.store_in_turn(lambda version: [*_stored(rows, version), *others])
        self._rows = {**self._rows, **rows}

    # Garbage

    def forgetting(self, namespaces: Sequence[int]) -> list[WriteRow]:
        """The writes that end the links of namespaces that are no longer shared."""
        return [
            (META, _LINKS + _name(namespace, source), None)
            for namespace, source in self._rows
            if namespace in namespaces
        ]

    def reload(self) -> None:
        """Load the stored links again."""
        with self._storage.settled():
            self.load()

    def forget_marks(self, namespace: int, safe_point: Version) -> None:
        """Remove the positions that no reader at or above a safe point asks for."""
        for each, source in self._rows:
            if each != namespace:
                continue
            # The newest position at or below the safe point is still needed.
            older = self._older_marks(namespace, source, safe_point, rows_max=2)[1:]
            if older:
                end = prefix_end(_MARKS + _name(namespace, source))
                assert end is not None
                self._storage.remove_range(META, older[0][0], end)

    def forget(self, namespace: int) -> None:
        """Remove the links of a namespace whose data is gone."""
        for prefix in (_LINKS, _MARKS):
            start = prefix + encode_namespace(namespace)
            end = prefix_end(start)
            assert end is not None
            self._storage.remove_range(META, start, end)
        with self._storage.settled():
            self._rows = {link: row for link, row in self._rows.items() if link[0] != namespace}
        self.recent.forget(namespace)


def _check_step(step: LinkStep) -> None:
    """Raise an error for a malformed step: steps come from other processes."""
    if not 1 <= step.source_id <= SITE_IDS_MAX or step.incarnation < 1:
        raise InvalidArgument(f"no site has id {step.source_id} and incarnation {step.incarnation}")
    for part in step.namespaces:
        if not 0 <= part.since <= part.until <= VERSION_MAX:
            raise InvalidArgument(
                f"a step of {part.name!r} goes from version {part.since} to {part.until}, and never back"
            )


def _require_next(step: LinkStep, part: NamespaceStep, row: LinkRow) -> None:
    if part.since != row.through:
        raise StaleLink(
            f"a step of {part.name!r} from {step.source!r} begins at version {part.since}, and the link "
            f"stands at {row.through}: another process runs the link as well, or the step is an old one. "
            "Plan it again",
            source=step.source,
            namespace=part.name,
            through=row.through,
        )


def _advance(
    row: LinkRow, incarnation: int, part: NamespaceStep, applied: NamespaceApplied, now_ms: int
) -> LinkRow:
    """A link after a step."""
    account = Account(row.account, own=True)
    verdicts: list[Verdict] = []
    if part.begin > row.through > 0 and incarnation == row.incarnation:
        # Only a link that begins, or begins anew, leaves versions out, and one whose source was loaded.
        if part.begin > part.loaded:
            verdicts.append(Finding(row.through, part.begin, None, Tally()))
        else:
            _log.warning(
                "namespace %r: the step leaves out versions %d to %d, in which its source was loaded",
                part.name,
                row.through,
                part.begin,
                extra={"namespace": part.name},
            )
    if part.begin > row.through or incarnation != row.incarnation:
        # The changes in between, and their heartbeats, did not have to be read.
        account.doubt(Doubt.FIRST)
        # The first heartbeat may end before the place where reading begins, and so may the next interval.
        account.add(part.begin, Tally())
    verdicts += applied.enter(account)
    wrong = [verdict for verdict in verdicts if isinstance(verdict, Finding)]
    for finding in wrong:
        _log.error("namespace %r: %s", part.name, finding, extra={"namespace": part.name})
    found = (*row.findings, *(StoredFinding(now_ms, finding) for finding in wrong))
    checked = sum(isinstance(verdict, Checked) for verdict in verdicts)
    return LinkRow(
        through=part.until,
        incarnation=incarnation,
        account=account.state,
        beat=_last_beat(row.beat, applied.beats),
        checked=row.checked + checked,
        unchecked=row.unchecked + _count_unchecked(verdicts),
        wrong=row.wrong + len(wrong),
        findings=found[-FINDINGS_KEPT:],
    )


def _count_unchecked(verdicts: Sequence[Verdict]) -> int:
    return sum(not isinstance(verdict, Checked | Finding) for verdict in verdicts)


def _last_beat(known: LastBeat | None, beats: Sequence[NamespaceBeat]) -> LastBeat | None:
    """The newest of a node's ordinary heartbeats; that of a sealed log says nothing about the node."""
    ordinary = [beat for beat in beats if beat.log is None]
    if not ordinary:
        return known
    last = max(ordinary, key=lambda beat: beat.version)
    return LastBeat(last.version, last.wall_ms, last.through, last.watermark)


def _stored(rows: Mapping[LinkId, LinkRow], version: Version) -> list[WriteRow]:
    """The writes that store links, and their positions as of a version of this site."""
    written: list[WriteRow] = []
    for (namespace, source), row in rows.items():
        name = _name(namespace, source)
        written.append((META, _LINKS + name, _encode(row)))
        written.append((META, _MARKS + name + encode_version(version), row.through.to_bytes(8, "big")))
    return written


def _guards_of(engine: Engine, namespace: int, source: int) -> list[Guard]:
    """Guards for the stored position of a link and the stored collected horizon."""
    keys = (_LINKS + _name(namespace, source), HORIZON + encode_namespace(namespace))
    return [Guard(META, key, engine.get(META, key)) for key in keys]


def _name(namespace: int, source: int) -> bytes:
    return encode_namespace(namespace) + bytes([source])
