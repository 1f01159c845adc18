// Making elements. Text becomes text nodes and never markup: nothing in these files assigns innerHTML.

const SVG = "http://www.w3.org/2000/svg";

// h("a", {href: "#/groups", class: "row", on: {click: f}}, "text", child)
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (name === "vars") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Control characters and the marks that reorder text would hide what a model wrote, so each is shown.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;
const MAX_LINE = 5000;

export function visible(text) {
  const shown = String(text).replace(HIDDEN, (char) => {
    const code = char.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return code === 0x7f ? "\u2421" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
  if (shown.length <= MAX_LINE) return shown;
  return shown.split("\n").map((line) =>
    line.length <= MAX_LINE ? line : `${line.slice(0, MAX_LINE)} … ${(line.length - MAX_LINE).toLocaleString("en")} more characters in this line`
  ).join("\n");
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? Math.min(2, digits) : digits);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 90 ? `${value.toFixed(1)} s` : `${Math.round(value / 60)} min`;
}

export function chip(text, kind = "") {
  return h("span", {class: `chip ${kind}`.trim()}, visible(text));
}

const KINDS = {
  scored: "plain", completed: "plain", truncated: "warn", max_turns: "warn", timeout: "warn", no_code: "warn", banned: "bad",
  too_long: "warn", unreadable: "warn", syntax_error: "bad", error: "bad", invalid: "bad",
};

export function statusChip(status) {
  return chip(status.replaceAll("_", " "), KINDS[status] ?? (status.startsWith("error") ? "bad" : "plain"));
}

export function rewardBadge(reward, valid = true) {
  if (!valid || reward === null || reward === undefined) return h("span", {class: "reward none"}, "not valid");
  const kind = reward > 0.999 ? "top" : reward > 0 ? "good" : reward < 0 ? "low" : "zero";
  return h("span", {class: `reward ${kind}`}, (reward > 0 ? "+" : "") + number(reward, 3));
}

// Prompts of evaluations have numbers below 0 in addresses.
export const groupName = (id) => id < 0 ? `evaluated prompt ${-1 - id}` : `group ${id}`;

export function announce(text) {
  document.getElementById("announcer").textContent = text;
}
