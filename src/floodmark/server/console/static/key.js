// A key: its record at every site side by side, and its history as a time line.

import { badge, clock, count, empty, h, moment, patch, size } from "./dom.js";
import { ask } from "./stream.js";

export function prepareLookup(element) {
  const form = element.querySelector("form"), found = element.querySelector("#found");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const query = new URLSearchParams({
      namespace: form.querySelector("#lookup-namespace").value,
      key: form.querySelector("#lookup-key").value,
    });
    patch(found, h("p", { class: "empty" }, "Looking …"));
    try {
      const answer = await ask(`api/key?${query}`);
      const told = await answer.json();
      if (answer.ok) show(found, told);
      else patch(found, h("p", { class: "error" }, told.error));
    } catch {
      patch(found, h("p", { class: "error" }, "The console's server did not answer; try again."));
    }
  });
}

export function offerNamespaces(element, snapshot) {
  const names = [...new Set(snapshot.sites.flatMap((site) => site.overview?.namespaces ?? []))].sort();
  const field = element.querySelector("#lookup-namespace");
  patch(element.querySelector("#namespaces"), names.map((name) => h("option", { value: name })));
  if (!field.value && document.activeElement !== field && names.length) field.value = names[0];
}

function show(element, { sites, namespace, key }) {
  const present = sites.filter((site) => !site.error);
  const digests = new Set(present.map((site) => site.records[0]?.digest ?? "none"));
  const verdict = present.length < 2 ? null
    : digests.size === 1 ? badge("ok", digests.has("none") ? "at no site" : "the same at every site")
    : badge("warning", "not the same: under way, or drifted; floodmark verify tells which");
  patch(element,
    h("p", { class: "looked" }, h("code", {}, `${namespace} / ${key}`), ` at ${clock(Date.now())} `, verdict),
    h("ul", { class: "records" }, sites.map((site) =>
      h("li", { class: "card" }, h("div", { class: "card-head" }, h("strong", {}, site.site),
        site.error ? badge("problem", "no answer") : state(site.records[0])),
        site.error ? h("p", { class: "error" }, site.error) : history(site)))));
}

const state = (record) => (!record ? badge("unknown", "no record") : record.deleted ? badge("unknown", "deleted") : record.expired ? badge("unknown", "expired") : badge("ok", "present"));

function history(site) {
  if (!site.records.length) return empty("This site has no record of the key.");
  return h("ol", { class: "timeline" }, site.records.map((record, place) =>
    h("li", { class: place ? "past" : "present" },
      h("p", { class: "when" }, h("strong", {}, moment(record.at_ms)), ` · written at ${record.origin}`,
        h("span", { class: "quiet" }, ` · version ${record.version}`)),
      record.deleted ? h("p", {}, "deleted")
        : h("div", {},
            h("pre", { class: "value", tabindex: "0" }, record.value),
            h("p", { class: "quiet" }, `${size(record.bytes)}${record.cut ? `, the first ${count(record.value.length)} characters are shown` : ""}`,
              record.expires_at ? ` · expires ${moment(record.expires_at * 1000)}` : "")))),
    site.more && h("li", { class: "past" }, h("p", { class: "quiet" }, site.more)));
}
