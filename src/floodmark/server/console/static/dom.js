// Elements are made from text, never from markup, and the page is brought up to date in place: what has the
// focus, or is selected, stays so.

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) {
      element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
  }
  return element;
}

export const h = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

// Make the children of an element equal to these.
export function patch(element, ...children) {
  const wanted = build(document.createElement("div"), {}, children);
  patchChildren(element, wanted);
}

function patchChildren(old, wanted) {
  const present = [...old.childNodes];
  [...wanted.childNodes].forEach((child, place) => {
    const other = present[place];
    if (other === undefined) {
      old.append(child);
    } else if (other.nodeType !== child.nodeType || other.nodeName !== child.nodeName) {
      other.replaceWith(child);
    } else if (child.nodeType === Node.TEXT_NODE) {
      if (other.data !== child.data) other.data = child.data;
    } else {
      patchAttributes(other, child);
      patchChildren(other, child);
    }
    present[place] = null;
  });
  present.forEach((other) => other?.remove());
}

function patchAttributes(old, wanted) {
  // An operator has opened or closed it.
  const kept = old.nodeName === "DETAILS" ? ["open"] : [];
  for (const { name } of [...old.attributes]) {
    if (!wanted.hasAttribute(name) && !kept.includes(name)) old.removeAttribute(name);
  }
  for (const { name, value } of [...wanted.attributes]) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}

// Numbers for people

export const count = (number) => number.toLocaleString("en");

export function lag(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms < 7_200_000) return `${Math.round(ms / 60_000)} min`;
  if (ms < 172_800_000) return `${Math.round(ms / 3_600_000)} h`;
  return `${count(Math.round(ms / 86_400_000))} days`;
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  let number = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (number < 1024) return `${unit === "B" ? number : number.toFixed(1)} ${unit}`;
    number /= 1024;
  }
  return `${number.toFixed(1)} TiB`;
}

export const rate = (number) => (number >= 100 ? count(Math.round(number)) : number.toFixed(number >= 10 ? 0 : 1));

export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

export const moment = (ms) => `${new Date(ms).toISOString().slice(0, 19).replace("T", " ")} UTC`;

// Pieces that several panels have

const WORDS = { ok: "OK", warning: "Warning", problem: "Problem", unknown: "Unknown" };
const SHAPES = { ok: "✓", warning: "▲", problem: "✖", unknown: "?" };

export const badge = (severity, word) =>
  h("span", { class: "badge", "data-severity": severity },
    h("span", { "aria-hidden": "true", class: "shape" }, SHAPES[severity]), word ?? WORDS[severity]);

export const empty = (text) => h("p", { class: "empty" }, text);

export const command = (text) =>
  h("span", { class: "command" }, h("code", {}, text),
    h("button", { type: "button", class: "copy", "data-copy": text, "aria-label": `Copy: ${text}` }, "Copy"));

// Rows of cells; a cell is text, an element, or [attributes, content].
export const table = (caption, header, rows) =>
  h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, header.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, place) => {
        const [attributes, content] = Array.isArray(cell) ? cell : [{}, cell];
        return h(place ? "td" : "th", { "data-name": header[place], scope: place ? null : "row", ...attributes }, content);
      }))))));
