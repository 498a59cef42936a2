"""The links that end at a site, by the names of its namespaces, with their statistics and alarms."""

from typing import Final

from floodmark.clock.hybrid import SKEW_MS_MAX
from floodmark.host.catalog import NamespaceRow
from floodmark.host.local import LocalVersions
from floodmark.host.parts import LocalPort, SiteParts
from floodmark.host.sharing import Sharing
from floodmark.host.statistics import AlarmKind, LinkAlarm, LinkStatistics, ReplicationStatistics
from floodmark.model.change import Stamp
from floodmark.model.errors import StaleLink
from floodmark.model.limits import REPORTED_CHARACTERS_MAX
from floodmark.model.version import Version, physical_ms
from floodmark.replication.applied import Applied
from floodmark.replication.cutting import LinkSource, cut_link
from floodmark.replication.lag import RecentLink
from floodmark.replication.links import LinkPosition, LinkRow
from floodmark.replication.members import active_others
from floodmark.replication.step import LinkStep, NamespaceCut, NamespacePosition

# The age of a heartbeat above which a link is late: one is written each second, and arrives in one or two.
HEARTBEAT_MS_MAX: Final = 10_000
# How long a finding is shown as an alarm.  It is kept for longer.
FINDING_MS_MAX: Final = 24 * 60 * 60_000


class LocalLinks(LocalPort):
    """The port to the links of a site of this process."""

    def __init__(self, site: SiteParts, sharing: Sharing, versions: LocalVersions) -> None:
        super().__init__(site)
        self._links = site.links
        self._identity = site.identity
        self._sharing = sharing
        self._versions = versions

    def links(self) -> list[LinkPosition]:
        self._members.require_rejoined()
        names = {row.id: row.name for row in self._catalog.live()}
        return [
            LinkPosition(
                source_id=source,
                namespace=names[namespace],
                through=row.through,
                incarnation=row.incarnation,
            )
            for (namespace, source), row in sorted(self._links.rows.items())
            if namespace in names
        ]

    def link_positions(self, source_id: int, namespaces: list[str]) -> list[NamespacePosition]:
        self._members.require_rejoined()
        found = {row.name: row for row in self._catalog.live()}
        rows = [found[name] for name in namespaces if name in found]
        links = self._links.rows
        return [
            NamespacePosition(
                name=row.name,
                id=row.id,
                through=links.get((row.id, source_id), LinkRow()).through,
                horizon=self._links.horizon(source_id, row.id),
                refused=self._links.why_refused(source_id, row.id),
                data_set=row.present.stamp,
            )
            for row in rows
        ]

    def advance_link(self, step: LinkStep, applied: Applied) -> None:
        """Store a step.  Raises StaleLink if one of its namespaces was dropped and created again since."""
        self._members.require_rejoined()
        lacking = set()
        for part in step.namespaces:
            row = self._catalog.get(part.name)
            if row.id != part.target_id:
                raise StaleLink(
                    f"namespace {part.name!r} was dropped and made anew since the step was planned; plan it "
                    "again",
                    namespace=part.name,
                )
            if part.data_set > row.present.stamp:
                lacking.add(part.name)
        self._links.advance(step, applied, lacking)

    def stall_link(self, source_id: int, namespaces: list[str], reason: str) -> None:
        ids = [row.id for row in self._catalog.live() if row.name in namespaces]
        self._links.recent.stall(source_id, ids, reason[:REPORTED_CHARACTERS_MAX])

    def cut_link(self, positions: dict[str, Version], changes_max: int | None) -> list[NamespaceCut]:
        source = LinkSource(
            site=self._identity.site,
            find_id=lambda name: self._catalog.get(name).id,
            data_set=lambda name: self._catalog.get(name).present.stamp,
            shared_since=self._sharing.shared_since,
            loaded_version=self._sharing.loaded_version,
            returned_version=self._members.returned_version,
            cut_own=lambda name, since, changes_max, until: self._versions.cut_changes(
                name, since, changes_max, until, False, own=True
            ),
        )
        return cut_link(source, positions, changes_max)

    def watermark(self, namespace: str, at: Version | None) -> dict[int, Version]:
        return self._links.watermark(self._catalog.get(namespace).id, at)

    def covers(self, namespace: str, stamp: Stamp, at: Version | None) -> bool:
        row = self._catalog.get(namespace)
        member = self._members.sources(row.name).get(stamp.site)
        has_link = member is not None or (row.id, stamp.site) in self._links.rows
        if stamp.site == self._identity.site_id or not has_link:
            return True
        through = self._links.watermark(row.id, at).get(stamp.site, 0)
        return through >= stamp.version or (member is not None and member.has_ended(through))

    def statistics(self) -> ReplicationStatistics:
        """The statistics of all links, those that the topology expects included."""
        topology = self._members.topology
        links = [
            self._describe(row, source)
            for row in self._catalog.live()
            for source in sorted(self._sources(row), key=self._members.name_of)
        ]
        return ReplicationStatistics(
            site=self._identity.site,
            site_id=self._identity.site_id,
            epoch=None if topology is None else topology.epoch,
            links=sorted(links, key=lambda link: (link.source, link.namespace)),
            rejoining=self._members.is_rejoining,
            missing=self._sharing.missing_namespaces(),
            peers=self._peers(),
        )

    def _peers(self) -> list[str]:
        shared = [self._members.of(name) for name in self._members.shared]
        others = {each for members in shared for each in active_others(members, self._identity.site_id)}
        return sorted(map(self._members.name_of, others))

    def _sources(self, row: NamespaceRow) -> set[int]:
        if not self._members.of(row.name):
            return {source for namespace, source in self._links.rows if namespace == row.id}
        watermark, sources = self._links.watermark(row.id), self._members.sources(row.name)
        # A removed site is shown only if some of its changes are missing here.
        left = {
            source
            for source, member in sources.items()
            if not member.is_active and not member.has_ended(watermark.get(source, 0))
        }
        return {*active_others(sources, self._identity.site_id), *left}

    def _describe(self, namespace: NamespaceRow, source: int) -> LinkStatistics:
        now_ms = self._node.clock.time_source()
        row = self._links.rows.get((namespace.id, source), LinkRow())
        recent = self._links.recent.of(namespace.id, source)
        lags = recent.lags(now_ms)
        missing = self._why_missing(source)
        return LinkStatistics(
            source=self._members.name_of(source),
            source_id=source,
            namespace=namespace.name,
            incarnation=row.incarnation,
            through=row.through,
            heartbeat_age_ms=None if row.beat is None else max(0, now_ms - row.beat.wall_ms),
            backlog_ms=max(0, now_ms - physical_ms(row.through)) if row.through else self._waiting_ms(now_ms),
            changes=round(sum(lags.counts.values())),
            changes_ever=recent.changes,
            lag_ms_p50=lags.percentile(0.5),
            lag_ms_p99=lags.percentile(0.99),
            intervals_checked=row.checked,
            intervals_unchecked=row.unchecked,
            intervals_wrong=row.wrong,
            findings=[str(stored.finding) for stored in row.findings],
            stalled=missing or recent.stalled,
            alarms=self._alarms(source, row, recent, now_ms)
            if missing is None
            else [_missing_alarm(missing)],
        )

    def _why_missing(self, source: int) -> str | None:
        """The reason why changes of a removed site are missing here; None if the site was not removed."""
        member, name = self._members.find(source), self._members.name_of(source)
        if member is None or member.is_active:
            return None
        once_more = f"run `floodmark topology remove {name} --topology FILE` again"
        if member.final is None:
            return f"its removal was not finished (docs/operations/remove.md); {once_more}"
        return (
            f"it was removed, and this site, which joined later, lacks what it wrote "
            f"(docs/operations/join.md); {once_more}, and the others hand it over"
        )

    def _waiting_ms(self, now_ms: int) -> int:
        """How long the site has waited for the first step of a link."""
        return max(0, now_ms - self._members.set_at_ms) if self._members.set_at_ms else 0

    def _alarms(self, source: int, row: LinkRow, recent: RecentLink, now_ms: int) -> list[LinkAlarm]:
        alarms: list[LinkAlarm] = []
        member = self._members.find(source)

        def raise_alarm(kind: AlarmKind, text: str) -> None:
            alarms.append(LinkAlarm(kind=kind, text=text))

        silent_ms = self._waiting_ms(now_ms) if row.beat is None else now_ms - row.beat.wall_ms
        if member is not None and row.incarnation < member.incarnation > 1:
            raise_alarm(
                AlarmKind.OVERDUE,
                f"it comes back as incarnation {member.incarnation}, and has sent nothing yet; `floodmark "
                "status` of that site says what is missing",
            )
        elif silent_ms > HEARTBEAT_MS_MAX:
            raise_alarm(
                AlarmKind.OVERDUE,
                f"no heartbeat for {silent_ms // 1000:,} s; check that the source and replication run",
            )
        late = [stored for stored in row.findings if now_ms - stored.at_ms <= FINDING_MS_MAX]
        if late:
            raise_alarm(AlarmKind.FINDING, f"{late[-1].finding}; compare the sites")
        if recent.stalled is not None:
            # Changes arrive, while a data set is still missing.
            what = "" if recent.lacks_data_set else "nothing is taken in: "
            raise_alarm(AlarmKind.STALLED, f"{what}{recent.stalled}")
        if recent.ahead_ms > SKEW_MS_MAX:
            raise_alarm(
                AlarmKind.SKEW,
                f"the source's clock is at least {recent.ahead_ms:,} ms ahead; set the time on both machines",
            )
        return alarms


def _missing_alarm(reason: str) -> LinkAlarm:
    return LinkAlarm(kind=AlarmKind.STALLED, text=f"something is missing: {reason}")
