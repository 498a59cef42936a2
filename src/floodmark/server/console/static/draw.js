// Pictures as SVG.  Each has a text that says the same.

import { h, s, lag, count } from "./dom.js";

const HISTORY_MS = 15 * 60_000;
const SPAN_MS_MIN = 60_000;
const GAP_MS = 20_000;

// Lines over what is known of the last 15 minutes: [{ name, points: [[ms, number or null]…] }], the first as an area.
export function sparkline(lines, now, label) {
  const width = 180, height = 36;
  const first = Math.min(now, ...lines.flatMap((line) => (line.points.length ? [line.points[0][0]] : [])));
  const span = Math.min(HISTORY_MS, Math.max(SPAN_MS_MIN, now - first));
  const top = Math.max(1, ...lines.flatMap((line) => line.points.map(([, number]) => number ?? 0)));
  const x = (ms) => width * (1 - (now - ms) / span);
  const y = (number) => height - 3 - (height - 8) * (number / top);
  const pieces = lines.flatMap((line, place) =>
    runs(line.points, now).map((run) => {
      const path = run.map(([ms, number], step) => `${step ? "L" : "M"}${x(ms).toFixed(1)} ${y(number).toFixed(1)}`).join("");
      const area = place === 0 && run.length > 1
        ? s("path", { class: "area", d: `${path}L${x(run.at(-1)[0]).toFixed(1)} ${height}L${x(run[0][0]).toFixed(1)} ${height}Z` })
        : null;
      const dot = run.length === 1
        ? s("circle", { class: `dot line-${place}`, cx: x(run[0][0]).toFixed(1), cy: y(run[0][1]).toFixed(1), r: 1.5 })
        : s("path", { class: `line line-${place}`, d: path });
      return [area, dot];
    }));
  return s("svg", { class: "sparkline", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    s("path", { class: "base", d: `M0 ${height - 0.5}H${width}` }), pieces);
}

// Stretches without a gap: a console that was closed has seen nothing.
function runs(points, now) {
  const found = [];
  let run = [];
  for (const [ms, number] of points) {
    if (now - ms > HISTORY_MS) continue;
    if (run.length && (number === null || ms - run.at(-1)[0] > GAP_MS)) {
      found.push(run);
      run = [];
    }
    if (number !== null) run.push([ms, number]);
  }
  return run.length ? [...found, run] : found;
}

// Writes above the line and reads below it, the last interval on the right.
export function strip(writes, reads, top, label) {
  const step = 6, middle = 20, height = 40, width = 60 * step;
  const bar = (number) => (number ? Math.max(1.5, (middle - 1) * Math.sqrt(number / top)) : 0);
  const at = (place) => width - (writes.length - place) * step;
  return s("svg", { class: "strip", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    s("path", { class: "base", d: `M0 ${middle}H${width}` }),
    writes.map((number, place) => number > 0 &&
      s("rect", { class: "writes", x: at(place), y: (middle - bar(number)).toFixed(1), width: step - 1, height: bar(number).toFixed(1) })),
    reads.map((number, place) => number > 0 &&
      s("rect", { class: "reads", x: at(place), y: middle, width: step - 1, height: bar(number).toFixed(1) })));
}

// The sites in a ring, with an arrow for each direction.  sites: [{ name, state, note }];
// arrows: [{ source, target, severity, label }].
export function map(sites, arrows, width) {
  const radius = 26, height = sites.length > 2 ? 300 : 150;
  const across = Math.min(width / 2 - 70, 240), down = height / 2 - 50;
  const places = new Map(sites.map((site, place) => {
    const turn = (2 * Math.PI * place) / sites.length + (sites.length > 2 ? -Math.PI / 2 : Math.PI);
    return [site.name, sites.length === 1 ? [width / 2, height / 2] : [width / 2 + across * Math.cos(turn), height / 2 - 10 + down * Math.sin(turn) * (sites.length > 2)]];
  }));
  const drawn = arrows.filter((arrow) => places.has(arrow.source) && places.has(arrow.target)).map((arrow) => {
    const [x1, y1] = places.get(arrow.source), [x2, y2] = places.get(arrow.target);
    const length = Math.hypot(x2 - x1, y2 - y1) || 1;
    const [ux, uy] = [(x2 - x1) / length, (y2 - y1) / length];
    const bend = 26;
    const [cx, cy] = [(x1 + x2) / 2 - uy * bend, (y1 + y2) / 2 + ux * bend];
    const [sx, sy] = [x1 + ux * (radius + 4) - uy * 8, y1 + uy * (radius + 4) + ux * 8];
    const [ex, ey] = [x2 - ux * (radius + 8) - uy * 8, y2 - uy * (radius + 8) + ux * 8];
    const [dx, dy] = [ex - cx, ey - cy], far = Math.hypot(dx, dy) || 1, [vx, vy] = [dx / far, dy / far];
    const head = `M${ex} ${ey}L${ex - vx * 9 - vy * 5} ${ey - vy * 9 + vx * 5}L${ex - vx * 9 + vy * 5} ${ey - vy * 9 - vx * 5}Z`;
    return s("g", { class: "arrow", "data-severity": arrow.severity },
      s("path", { class: "shaft", d: `M${sx} ${sy}Q${cx} ${cy} ${ex} ${ey}` }), s("path", { class: "head", d: head }),
      s("text", { x: (sx + 2 * cx + ex) / 4 - uy * 10, y: (sy + 2 * cy + ey) / 4 + ux * 12 + 4 }, arrow.label));
  });
  const nodes = sites.map((site) => {
    const [x, y] = places.get(site.name);
    return s("g", { class: "site", "data-state": site.state },
      s("circle", { cx: x, cy: y, r: radius }),
      s("text", { class: "sign", x, y: y + 6 }, { answering: "✓", silent: "✖", connecting: "…", unwatched: "?" }[site.state]),
      s("text", { class: "title", x, y: y + radius + 17 }, site.name),
      s("text", { class: "note", x, y: y + radius + 33 }, site.note));
  });
  const said = arrows.map((arrow) => `${arrow.source} to ${arrow.target}: ${arrow.label}`).join("; ");
  return s("svg", { class: "map", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Sites and links. ${said}` }, drawn, nodes);
}

export const meter = (used, most, label) =>
  h("span", { class: "meter" },
    s("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
      s("rect", { class: "base", width: 100, height: 6, rx: 3 }),
      s("rect", { class: used / most > 0.8 ? "near" : "used", width: most ? Math.min(100, Math.max(used ? 1 : 0, (100 * used) / most)) : 0, height: 6, rx: 3 })),
    h("span", {}, label));

export const lagLabel = (p50, p99) => (p99 === null ? "no change lately" : `p50 ${lag(p50)}, p99 ${lag(p99)}`);
export const perSecond = (calls, seconds) => count(Math.round(seconds > 0 ? calls / seconds : 0));
