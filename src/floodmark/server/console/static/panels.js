// One function for each panel: from a snapshot to elements.

import { badge, clock, command, count, empty, h, lag, moment, patch, rate, size, table } from "./dom.js";
import { lagLabel, map, meter, perSecond, sparkline, strip } from "./draw.js";

const SILENT_WORDS = { connecting: "connecting", silent: "does not answer" };
const HEARTBEAT_MS_MAX = 10_000;
const LAG_MS_MAX = 60_000;

const answering = (snapshot) => snapshot.sites.filter((site) => site.overview);
const several = (snapshot) => snapshot.sites.length > 1;
const ofSite = (snapshot, site, row) => (several(snapshot) ? [site.name, ...row] : row);
const header = (snapshot, names) => (several(snapshot) ? ["Site", ...names] : names);
const stale = (site) => (site.state === "answering" ? null : `last known, from ${clock(site.seen_at_ms)}`);

// Health

export function health(element, { snapshot }) {
  const { severity, sentence } = snapshot.health;
  element.dataset.severity = severity;
  patch(element,
    h("div", { class: "verdict" }, badge(severity), h("h1", { id: "sentence", "aria-live": "polite" }, sentence)),
    snapshot.alarms.length > 0 && h("ul", { class: "alarms" }, snapshot.alarms.map(({ site, finding }) =>
      h("li", { "data-severity": finding.severity },
        badge(finding.severity),
        h("div", {},
          h("p", { class: "what" }, h("strong", {}, `${site} · ${finding.check}`), " ", finding.message),
          finding.advice && h("p", { class: "advice" }, h("span", {}, "What to do: "), finding.advice))))));
}

// Sites and links

const linkSeverity = (link, site) => {
  if (site.state !== "answering") return "unknown";
  if (link.intervals_wrong) return "problem";
  const overdue = link.heartbeat_age_ms === null || link.heartbeat_age_ms > LAG_MS_MAX;
  return link.stalled || overdue || link.backlog_ms > LAG_MS_MAX ? "warning" : "ok";
};

const worst = (severities) => ["problem", "warning", "unknown", "ok"].find((each) => severities.includes(each)) ?? "ok";

function arrows(snapshot) {
  const found = new Map();
  for (const site of answering(snapshot)) {
    for (const link of site.overview.links) {
      const name = `${link.source}\u0000${site.name}`;
      const arrow = found.get(name) ?? { source: link.source, target: site.name, severities: [], p99: null };
      arrow.severities.push(linkSeverity(link, site));
      if (link.lag_ms_p99 !== null) arrow.p99 = Math.max(arrow.p99 ?? 0, link.lag_ms_p99);
      found.set(name, arrow);
    }
  }
  return [...found.values()].map((arrow) => {
    const severity = worst(arrow.severities);
    const word = { ok: "", warning: "▲ ", problem: "✖ ", unknown: "? " }[severity];
    return { ...arrow, severity, label: word + (arrow.p99 === null ? "idle" : `p99 ${lag(arrow.p99)}`) };
  });
}

export function links(element, { snapshot, series }) {
  const drawn = arrows(snapshot);
  const names = snapshot.sites.map((site) => site.name);
  const others = [...new Set(drawn.map((arrow) => arrow.source))].filter((name) => !names.includes(name));
  const sites = [
    ...snapshot.sites.map((site) => ({ name: site.name, state: site.state, note: siteNote(site) })),
    ...others.map((name) => ({ name, state: "unwatched", note: "not watched here" })),
  ];
  const byName = (left, right) => left.source.localeCompare(right.source) || left.namespace.localeCompare(right.namespace);
  const rows = snapshot.sites.flatMap((site) => (site.overview?.links ?? []).toSorted(byName).map((link) => linkRow(snapshot, site, link, series)));
  const nodes = snapshot.sites.flatMap((site) => (site.overview?.nodes ?? []).map((node) => ofSite(snapshot, site, nodeRow(node))));
  patch(element,
    h("div", { class: "overview" },
      map(sites, drawn, Math.max(280, Math.min(640, element.clientWidth))),
      h("ul", { class: "sites" }, snapshot.sites.map((site) => siteCard(site, series)))),
    rows.length
      ? table("Links", ["Link", "Namespace", "State", "Lag, up to 15 minutes back", "Backlog", "Heartbeat", "Checked", "Wrong"], rows)
      : empty("No links: these sites share no namespace with others. A topology makes them: floodmark topology set."),
    nodes.length > 0 && h("h3", {}, "Nodes"),
    nodes.length > 0 && table("Nodes", header(snapshot, ["Node", "State", "Partitions", "Changes a second", "Last beat", "Ceiling", "URL"]), nodes));
}

const siteNote = (site) => {
  if (site.state !== "answering") return SILENT_WORDS[site.state];
  return `id ${site.overview.site_id}`;
};

function siteCard(site, series) {
  const { overview } = site;
  return h("li", { class: "card", "data-site": site.name, "data-state": site.state },
    h("div", { class: "card-head" }, h("strong", {}, site.name),
      badge({ answering: "ok", silent: "problem", connecting: "unknown" }[site.state],
        { answering: "answers", silent: "does not answer", connecting: "connecting" }[site.state])),
    h("p", { class: "quiet" }, site.url),
    site.error && h("p", { class: "error" }, site.error),
    overview && h("dl", {},
      h("div", {}, h("dt", {}, "Changes a second"), h("dd", {}, rate(site.changes_per_second ?? 0),
        sparkline([{ points: series(`changes/${site.name}`) }], site.at_ms, "Changes a second over 15 minutes"))),
      h("div", {}, h("dt", {}, "Resolved"), h("dd", {}, `${lag(overview.resolved_age_ms)} ago`)),
      h("div", {}, h("dt", {}, "Data"), h("dd", {}, `${size(overview.data_bytes)}, change log ${size(overview.log_bytes)}`)),
      h("div", {}, h("dt", {}, "Namespaces"), h("dd", {}, overview.namespaces.join(", ") || "none yet"))),
    overview && stale(site) && h("p", { class: "quiet" }, stale(site)));
}

function linkRow(snapshot, site, link, series) {
  const name = `${site.name}/${link.source}/${link.namespace}`;
  const severity = linkSeverity(link, site);
  const said = lagLabel(link.lag_ms_p50, link.lag_ms_p99);
  // Why nothing is taken in stands in the alarm.
  const state = link.stalled ? "stalled" : { ok: "moving", warning: "behind", problem: "changes lost or doubled", unknown: "not known" }[severity];
  return [
    `${link.source} → ${site.name}`,
    link.namespace,
    badge(severity, state),
    [{ class: "chart" }, [
      sparkline([{ points: series(`p99/${name}`) }, { points: series(`p50/${name}`) }], site.at_ms, `Lag over 15 minutes, now ${said}`),
      h("span", { class: "legend" }, said)]],
    [{ class: "number" }, lag(link.backlog_ms)],
    [{ class: "number" }, link.heartbeat_age_ms === null ? "none yet" : `${lag(link.heartbeat_age_ms)} ago`],
    [{ class: "number" }, `${count(link.intervals_checked)}${link.intervals_unchecked ? `, ${count(link.intervals_unchecked)} not` : ""}`],
    [{ class: "number", "data-severity": link.intervals_wrong ? "problem" : null }, link.intervals_wrong ? `✖ ${count(link.intervals_wrong)}` : "0"],
  ];
}

const nodeRow = (node) => [
  `${node.node}${node.keeps ? " (keeper)" : ""}`,
  badge(node.lives ? (node.drained ? "warning" : "ok") : "problem", node.lives ? (node.drained ? "drained" : "beats") : "lost"),
  [{ class: "number" }, count(node.partitions)],
  [{ class: "number" }, count(node.load)],
  [{ class: "number" }, `${lag(node.beat_age_ms)} ago`],
  [{ class: "number" }, `${lag(Math.max(0, node.ceiling_ahead_ms))} ahead`],
  node.url,
];

// Heat

export function heat(element, { snapshot }) {
  const found = answering(snapshot).flatMap((site) => site.overview.partitions.map((partition) => ({ site, partition })));
  if (!found.length) return patch(element, empty("No partition has been seen yet."));
  const calls = ({ partition }) => sum(partition.writes) + sum(partition.reads);
  found.sort((left, right) => calls(right) - calls(left));
  const top = Math.max(1, ...found.flatMap(({ partition }) => [...partition.writes, ...partition.reads]));
  const more = answering(snapshot).reduce((all, site) => all + site.overview.partitions_count, 0) - found.length;
  return patch(element,
    h("p", { class: "quiet" }, "Hottest first. ", h("span", { class: "key-writes" }, "▲ writes"), " above the line, ", h("span", { class: "key-reads" }, "▼ reads"), " below it."),
    h("ul", { class: "strips" }, found.map(({ site, partition }) => {
      const writes = perSecond(sum(partition.writes), partition.seconds), reads = perSecond(sum(partition.reads), partition.seconds);
      const where = `${partition.start || "the first key"} … ${partition.end || "the last key"}`;
      return h("li", { "data-partition": `${site.name}/${partition.id}` },
        h("div", { class: "strip-head" },
          h("strong", {}, `${several(snapshot) ? `${site.name} · ` : ""}partition ${partition.id}${partition.node ? ` at node ${partition.node}` : ""}`),
          h("span", { class: "quiet range" }, where)),
        strip(partition.writes, partition.reads, top, `${writes} writes and ${reads} reads a second over ${lag(partition.seconds * 1000)}`),
        h("div", { class: "strip-foot" },
          h("span", {}, `${writes} writes/s, ${reads} reads/s over ${lag(partition.seconds * 1000)}`),
          command(`floodmark partition split ${site.url} ${partition.id} --auto`)));
    })),
    more > 0 && h("p", { class: "quiet" }, `and ${count(more)} cooler partitions`));
}

const sum = (numbers) => numbers.reduce((all, number) => all + number, 0);

// Feeds and subscriptions

const STATES = { normal: "ok", consumed: "ok", finished: "ok", idle: "unknown", stopped: "warning", error: "warning", failed: "problem" };

function readerState({ kind, state, holder, error }) {
  if (kind === "feed" && state === "normal" && !holder) return badge("warning", "not run");
  return h("span", {}, badge(STATES[state] ?? "unknown", state), error && h("span", { class: "quiet" }, ` ${error}`));
}

export function readers(element, { snapshot }) {
  const rows = answering(snapshot).flatMap((site) => site.overview.readers.map((reader) => ofSite(snapshot, site, [
    `${reader.kind} ${reader.name}`,
    reader.namespace,
    readerState(reader),
    [{ class: "number" }, lag(reader.lag_ms)],
    [{ class: "number" }, reader.backlog === null || reader.backlog === undefined ? "–" : `${count(reader.backlog)}${reader.backlog_is_exact ? "" : "+"}`],
    reader.holder ?? "none",
    [{ class: "number" }, reader.safe_point_ms === null || reader.safe_point_ms === undefined ? "none" : `expires in ${lag(reader.safe_point_ms)}`],
  ])));
  const points = answering(snapshot).flatMap((site) => site.overview.safe_points.map((point) => ofSite(snapshot, site, [
    point.name, point.namespace ?? "all", [{ class: "number" }, lag(point.age_ms)], [{ class: "number" }, lag(point.expires_in_ms)],
  ])));
  const holds = answering(snapshot).flatMap((site) => site.overview.holds.map((hold) => `${site.name}: ${hold}`));
  patch(element,
    rows.length
      ? table("Feeds and subscriptions", header(snapshot, ["Reader", "Namespace", "State", "Checkpoint lag", "Backlog", "Holder", "Safe point"]), rows)
      : empty("No feed and no subscription. floodmark feed create makes one."),
    h("h3", {}, "Held back"),
    h("p", {}, badge(holds.length ? "warning" : "ok", "resolved version"), " ", holds.join("; ") || "nothing holds it back"),
    points.length
      ? table("Safe points, the oldest first", header(snapshot, ["Safe point", "Namespace", "Holds garbage collection back for", "Expires in"]), points)
      : h("p", {}, badge("ok", "garbage collection"), " no safe point holds it back"));
}

// Transactions

export function transactions(element, { snapshot }) {
  const sites = answering(snapshot);
  if (!sites.length) return patch(element, empty("No site answers."));
  const rows = sites.map((site) => {
    const { transactions: states, transaction_commits: commits, oldest_transaction_ms: oldest } = site.overview;
    const committed = commits.committed ?? 0, conflicts = commits.conflict ?? 0, tried = committed + conflicts;
    return [site.name,
      Object.entries(states).map(([state, number]) => `${count(number)} ${state}`).join(", ") || "none",
      [{ class: "number" }, oldest ? lag(oldest) : "–"],
      [{ class: "number" }, count(committed)],
      [{ class: "number" }, conflicts ? `${count(conflicts)} (${((100 * conflicts) / tried).toFixed(1)} %)` : "0"],
      [{ class: "number" }, count(commits.retried ?? 0)]];
  });
  const open = sites.flatMap((site) => site.overview.open_transactions.map((each) => ofSite(snapshot, site, [
    h("code", {}, each.id), each.state, [{ class: "number" }, lag(each.age_ms)], each.waits_for.join(", ") || "–"])));
  const logs = sites.flatMap((site) => site.overview.logs.map((log) => ofSite(snapshot, site, [
    `${log.log} ${log.owner}`, [{ class: "number" }, count(log.records)],
    [{ class: "number" }, log.entries ? (log.records / log.entries).toFixed(1) : "–"], [{ class: "number" }, count(log.live_records)]])));
  return patch(element,
    table("Transactions", ["Site", "Not ended", "Oldest", "Committed", "Conflicts", "Retries"], rows),
    open.length > 0 && h("h3", {}, "Not ended, the oldest first"),
    open.length > 0 && table("Transactions that have not ended", header(snapshot, ["Transaction", "State", "Age", "Waits for"]), open),
    h("h3", {}, "Logs"),
    logs.length ? table("Logs", header(snapshot, ["Log", "Records", "Records an entry", "Live"]), logs)
      : empty("No log yet: it begins with the first transaction that acknowledges changes or spans nodes."));
}

const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));

// Verify

const OUTCOMES = { agree: ["ok", "the sites agree"], drift: ["problem", "the sites have drifted apart"], unknown: ["unknown", "could not be told"] };

export function verify(element, { snapshot }) {
  const told = answering(snapshot);
  const newest = (name) => told.map((site) => site.overview[name]).filter(Boolean).sort((left, right) => right.at_ms - left.at_ms)[0];
  const running = newest("running_comparison"), whole = newest("whole_comparison"), last = newest("last_comparison");
  patch(element,
    running && runningComparison(running.report),
    whole
      ? comparison("Last whole comparison", whole, snapshot)
      : h("p", { class: "never" }, badge("unknown", "never run"), " No whole comparison has told these sites its result: that they agree is not known."),
    !whole && !running && h("p", { class: "advice" }, h("span", {}, "What to do: "), command(`floodmark verify ${snapshot.sites.map((site) => site.url).join(" ")}`)),
    last && last.at_ms !== whole?.at_ms && comparison("Last pass over what has changed", last, snapshot));
}

const runningComparison = (report) =>
  h("div", { class: "running" }, h("p", {}, badge("unknown", "running"), ` ${report.sites.join(", ")}`),
    meter(report.done, report.total ?? 0, report.total === null || report.total === undefined ? "planning" : `${count(report.done)} of ${count(report.total)} ranges`));

function comparison(title, told, snapshot) {
  const { report } = told;
  const [severity, word] = OUTCOMES[report.outcome] ?? OUTCOMES.unknown;
  return h("div", { class: "of-site" }, h("h3", {}, title),
    h("p", {}, badge(severity, word), ` ${report.sites.join(", ")}, ${lag(Math.max(0, snapshot.at_ms - told.at_ms))} ago, in ${report.seconds.toFixed(1)} s`),
    h("dl", { class: "facts" },
      fact("Keys compared", count(report.compared ?? 0)), fact("Agree", count(report.agree ?? 0)),
      fact("Under way", count(report.lag ?? 0)), fact("Differ", count(report.drift ?? 0))),
    report.sample?.length > 0 && h("ul", { class: "keys" }, report.sample.map((key) => h("li", {}, h("code", {}, key)))),
    report.doubts?.length > 0 && h("ul", {}, report.doubts.map((doubt) => h("li", {}, doubt))));
}

// Machine

const DISK_RESERVES_MIN = 4;
const DAYS_MIN = 21;

export function machine(element, { snapshot }) {
  patch(element,
    answering(snapshot).length === 0 && empty("No site answers."),
    h("ul", { class: "machines" }, answering(snapshot).map((site) => {
      const { machine: facts } = site.overview;
      const limits = facts.limits.filter((limit) => limit.used / limit.most >= 0.5);
      return h("li", { class: "card" }, h("div", { class: "card-head" }, h("strong", {}, site.name), h("span", { class: "quiet" }, `format ${site.overview.format}`)),
        h("dl", { class: "facts" },
          fact("Disk", disk(facts)),
          fact("Clock", clockFact(site, facts)),
          fact("Certificates", Object.keys(facts.certificates).length
            ? h("span", {}, Object.entries(facts.certificates).map(([name, seconds]) => certificate(name, seconds, snapshot.at_ms)))
            : "no TLS"),
          fact("Versions", `Floodmark ${facts.release || "?"}, Python ${facts.python}`),
          fact("Limits", limits.length
            ? h("span", {}, limits.map((limit) => meter(limit.used, limit.most, `${limit.name}: ${count(limit.used)} of ${count(limit.most)}`)))
            : `none near; the nearest is ${facts.limits[0].name}: ${count(facts.limits[0].used)} of ${count(facts.limits[0].most)}`)));
    })));
}

function disk(facts) {
  if (facts.disk_free === null) return "not on a disk of this machine";
  const near = facts.disk_free < DISK_RESERVES_MIN * facts.disk_reserve;
  return h("span", {}, near && badge("warning", "little room"),
    meter(facts.disk_total - facts.disk_free, facts.disk_total, `${size(facts.disk_free)} of ${size(facts.disk_total)} free`));
}

function clockFact(site, facts) {
  const skew = site.now_skew_ms;
  const word = Math.abs(skew) < 500 ? "agrees with this console's" : `${lag(Math.abs(skew))} ${skew > 0 ? "ahead of" : "behind"} this console's`;
  return h("span", {}, Math.abs(skew) >= 500 && badge("warning", "skew"), ` ${word}`,
    facts.clock_ahead_ms > 0 && `; versions run ${lag(facts.clock_ahead_ms)} ahead`);
}

function certificate(name, seconds, now) {
  const days = Math.floor((seconds * 1000 - now) / 86_400_000);
  return h("span", { class: "line" }, badge(days < 0 ? "problem" : days < DAYS_MIN ? "warning" : "ok", name), ` ${days < 0 ? "expired" : "expires"} ${moment(seconds * 1000)}`);
}
