"""The topology of a site as stored, and the site's part in it.

A site without a topology shares nothing.  From its topology a site knows the members of each of its
namespaces: for whom garbage collection waits, and whose heartbeats are missing.

A site also stores which incarnation of itself it is.  If the topology names a later one, the site was
restored and is *rejoining*: it takes no writes, and announces no positions, until it has fetched all of its
earlier writes that the other sites hold.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from floodmark.clock import TimeSource
from floodmark.codec.ordered import encode_namespace
from floodmark.engine import WriteRow
from floodmark.model.errors import Corruption, InvalidConfiguration, Rejoining
from floodmark.model.version import Version
from floodmark.partition import META, Storage
from floodmark.partition.families import INCARNATION, TOPOLOGY
from floodmark.partition.layout import load_version, store_version
from floodmark.replication.topology import MemberSite, Topology, check_succession, check_topology

_REWRITTEN: Final = b"rewritten/"
_TOLD: Final = b"told/"
_RETURNED: Final = b"returned"


class TopologyRow(msgspec.Struct, frozen=True):
    """A topology as stored, and the time when it was put in force here."""

    topology: Topology
    set_at_ms: int


class Members:
    """Stores the topology of one site.  The copy in memory equals the one on disk."""

    def __init__(self, storage: Storage, time_source: TimeSource, site: str, site_id: int) -> None:
        self.site = site
        self._storage = storage
        self._time_source = time_source
        self.site_id = site_id
        self._row: TopologyRow | None = None
        self._incarnation = 1
        self.load()
        storage.on_recovery.append(self.load)

    def load(self) -> None:
        """Load the topology, which the keeper may have changed.  Call it in the turn."""
        stored = self._storage.engine.get(META, TOPOLOGY)
        try:
            self._row = None if stored is None else msgspec.json.decode(stored, type=TopologyRow)
        except msgspec.MsgspecError as error:
            raise Corruption(
                f"the stored topology is damaged: {error}. Restore the site from a backup"
            ) from error
        self._incarnation = load_version(self._storage.engine, INCARNATION) or 1
        self._refuse_writers()

    def _refuse_writers(self) -> None:
        self._storage.refuse_writers(self._rejoining() if self.is_rejoining else None)

    @property
    def topology(self) -> Topology | None:
        """The topology in force; None if there is none."""
        row = self._row
        return None if row is None else row.topology

    @property
    def set_at_ms(self) -> int:
        """The time when the topology was put in force; 0 if there is none."""
        row = self._row
        return 0 if row is None else row.set_at_ms

    # The site itself

    @property
    def incarnation(self) -> int:
        """The incarnation of this site in the topology; 1 if there is none."""
        own = None if self.topology is None else self.topology.sites.get(self.site)
        return 1 if own is None else own.incarnation

    @property
    def is_rejoining(self) -> bool:
        """Whether this site was restored, and has not fetched all of its earlier writes."""
        return self.incarnation > self._incarnation

    def is_reborn_by(self, topology: Topology) -> bool:
        """Whether a topology names a later incarnation of this site than the one in force."""
        own = topology.sites.get(self.site)
        return own is not None and own.incarnation > max(self.incarnation, self._incarnation)

    def require_rejoined(self) -> None:
        """Raise Rejoining while the site is rejoining."""
        if self.is_rejoining:
            raise self._rejoining()

    def _rejoining(self) -> Rejoining:
        return Rejoining(
            f"site {self.site!r} was restored as incarnation {self.incarnation}, and takes no part before it "
            "has its data back; run `floodmark restore --rejoin` for each namespace that `floodmark status` "
            "names as missing",
            site=self.site,
        )

    def note_rejoined(self, version: Version) -> None:
        """End the rejoining.  The fetched writes are below `version`.  The caller holds the write turn."""
        incarnation = self.incarnation
        self._storage.store([store_version(INCARNATION, incarnation), store_version(_RETURNED, version)])
        self._incarnation = incarnation
        self._refuse_writers()

    def returned_version(self) -> Version:
        """The version up to which the log may hold writes of an earlier incarnation; 0 if never restored.

        Their stamps are older than their versions, so a link passes them in one step: a target with a part of
        them would seem to have all.
        """
        return load_version(self._storage.engine, _RETURNED)

    # Who shares what

    @property
    def shared(self) -> list[str]:
        """The namespaces that this site shares, in the order of the topology."""
        topology = self.topology
        if topology is None:
            return []
        return [name for name in topology.namespaces if self.site in topology.active_members(name)]

    def of(self, namespace: str) -> dict[int, MemberSite]:
        """The sites that share a namespace, removed ones included, by id; none if it is not shared here."""
        topology = self.topology
        if topology is None or self.site not in topology.active_members(namespace):
            return {}
        return {site.id: site for site in topology.members(namespace).values()}

    def sources(self, namespace: str) -> dict[int, MemberSite]:
        """The members whose changes of a namespace go to the others, this site and removed ones included."""
        members, topology = self.of(namespace), self.topology
        if topology is None or not members:
            return {}
        return {site.id: site for site in topology.sources(namespace).values()}

    def name_of(self, site_id: int) -> str:
        """The name of a site; its id as text if no topology names it."""
        topology = self.topology
        return (None if topology is None else topology.name_of(site_id)) or str(site_id)

    def find(self, site_id: int) -> MemberSite | None:
        """The site of an id in the topology."""
        topology = self.topology
        if topology is None:
            return None
        return next((site for site in topology.sites.values() if site.id == site_id), None)

    def joined_by(self, topology: Topology) -> list[str]:
        """The namespaces that this site would begin to share."""
        return [name for name in topology.shared_by(self.site) if name not in self.shared]

    def left_by(self, topology: Topology) -> list[str]:
        """The namespaces that this site would no longer share."""
        return [name for name in self.shared if name not in topology.shared_by(self.site)]

    def check(self, topology: Topology) -> bool:
        """Refuse a topology that cannot be put in force here; False if it is in force already."""
        check_topology(topology)
        known = self.topology
        if known == topology:
            return False
        own = topology.sites.get(self.site)
        if own is None or own.id != self.site_id:
            found = "is not in it" if own is None else f"has id {own.id} in it"
            raise InvalidConfiguration(
                f"this topology cannot be used at site {self.site!r}, which has id {self.site_id} and "
                f"{found}; name each site as it was made",
                site=self.site,
            )
        if known is not None:
            check_succession(known, topology)
        return True

    def store(self, topology: Topology, others: Sequence[WriteRow] = (), *, left: Sequence[int] = ()) -> None:
        """Put a topology in force, in one write with other rows; repeating it has no effect.

        Removes the traces of the namespaces that the site leaves, named by their ids.
        """
        with self._storage.settled():
            if not self.check(topology):
                return
            self._storage.require_wanted()
            row = TopologyRow(topology, self._time_source())
            traces = [trace for namespace in left for trace in _traces(namespace)]
            self._storage.store([(META, TOPOLOGY, msgspec.json.encode(row)), *others, *traces])
            self._row = row
            self._refuse_writers()

    # Data from before the namespace was shared

    def note_rewritten(self, namespace: int, since: Version) -> None:
        """Store that all records of a namespace, named by its id, have stamps above a version."""
        with self._storage.settled():
            self._storage.require_not_dropped((encode_namespace(namespace),))
            if since > self.rewritten_since(namespace):
                self._storage.store([store_version(_REWRITTEN + encode_namespace(namespace), since)])

    def rewritten_since(self, namespace: int) -> Version:
        """The version above which all stamps in a namespace are; 0 if it was never rewritten."""
        return load_version(self._storage.engine, _REWRITTEN + encode_namespace(namespace))

    # Data that is in no change log

    def note_told(self, namespace: int, version: Version) -> WriteRow:
        """The write that sets the told version."""
        return store_version(_TOLD + encode_namespace(namespace), version)

    def told_version(self, namespace: int) -> Version:
        """The version up to which this site's data is not in its log for new links; 0 if all is."""
        return load_version(self._storage.engine, _TOLD + encode_namespace(namespace))

    def forget(self, namespace: int) -> None:
        """Remove the traces of a namespace whose data is gone."""
        self._storage.remove(_traces(namespace))


def active_others(members: Mapping[int, MemberSite], site_id: int) -> list[int]:
    """The ids of the active sites among members, but one."""
    return [each for each, member in members.items() if member.is_active and each != site_id]


def _traces(namespace: int) -> list[WriteRow]:
    """The writes that remove the traces of a namespace."""
    return [(META, kind + encode_namespace(namespace), None) for kind in (_REWRITTEN, _TOLD)]
