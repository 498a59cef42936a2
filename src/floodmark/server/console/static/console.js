// The page: what comes over the stream goes to the panels, and what does not come is said.

import { clock } from "./dom.js";
import { offerNamespaces, prepareLookup } from "./key.js";
import * as panels from "./panels.js";
import { follow, keepToken, takeTokenFromLink } from "./stream.js";

const STALE_MS = 3000;
const POINTS_MAX = 180;
const PANELS = ["links", "heat", "readers", "transactions", "verify", "machine"];

const by = (id) => document.getElementById(id);
const state = { snapshot: null, points: [], at: 0, connected: false };

const series = (name) => state.points.map((point) => [point.at_ms, point.series[name] ?? null]);

function draw() {
  const { snapshot } = state;
  by("login").hidden = true;
  by("panels").hidden = false;
  panels.health(by("health"), { snapshot });
  for (const name of PANELS) panels[name](by(name).querySelector(".body"), { snapshot, series });
  offerNamespaces(by("key"), snapshot);
  document.title = `${{ ok: "✓", warning: "▲", problem: "✖", unknown: "?" }[snapshot.health.severity]} Floodmark`;
  by("as-of").textContent = `As of ${clock(snapshot.at_ms)}, ${snapshot.sites.length === 1 ? "one site" : `${snapshot.sites.length} sites`}.`;
}

// Whether the page shows the present.
function judge() {
  const age = performance.now() - state.at;
  const word = !state.snapshot ? (state.connected === null ? "unreachable" : "loading")
    : state.connected === null ? "unreachable" : age > STALE_MS ? "stale" : "live";
  const pill = by("connection"), notice = by("notice");
  pill.dataset.state = word;
  pill.textContent = { loading: "… Connecting", live: "● Live", stale: "▲ Stale", unreachable: "✖ Unreachable" }[word];
  document.body.dataset.connection = word;
  const since = state.snapshot ? ` You see how it was at ${clock(state.snapshot.at_ms)}.` : "";
  const text = word === "stale" ? `No news for ${Math.round(age / 1000)} s.${since}`
    : word === "unreachable" ? `The console's server does not answer; the page tries again each second.${since}` : "";
  if (notice.textContent !== text) notice.textContent = text;
  notice.hidden = !text;
}

function start() {
  by("connection").hidden = false;
  follow({
    history(points) { state.points = points; },
    point(point) { state.points = [...state.points, point].slice(-POINTS_MAX); },
    snapshot(snapshot) {
      Object.assign(state, { snapshot, at: performance.now(), connected: true });
      draw();
      judge();
    },
    broken() { state.connected = null; judge(); },
    refused(problem, status) {
      keepToken(null);
      state.connected = false;
      Object.assign(state, { snapshot: null, points: [] });
      by("panels").hidden = true;
      by("connection").hidden = true;
      by("login").hidden = false;
      by("login-problem").textContent = status === 401 && !tried ? "" : problem;
      by("token").focus();
    },
  });
}

let tried = false;

by("login").addEventListener("submit", (event) => {
  event.preventDefault();
  tried = true;
  keepToken(by("token").value.trim());
  by("token").value = "";
  start();
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.dataset.copied = "";
  } catch {
    // Without https the browser refuses: select it, for the keyboard.
    getSelection().selectAllChildren(button.previousSibling);
  }
});

prepareLookup(by("key"));
takeTokenFromLink();
setInterval(judge, 500);
judge();
start();
