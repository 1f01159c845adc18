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

// Pictures that the policy read, as small images that open in full.
export function pictures(run, hashes) {
  if (!hashes?.length) return null;
  const address = (sha256) => `api/runs/${run}/picture?sha256=${sha256}`;
  return h("div", {class: "pictures"}, hashes.map((sha256, i) => h("a", {href: address(sha256), target: "_blank", rel: "noreferrer"}, h("img", {src: address(sha256), alt: `Picture ${i + 1}`, loading: "lazy"}))));
}

export function chip(text, kind = "") {
  return h("span", {class: `chip ${kind}`.trim()}, visible(text));
}

// What the page's words mean: tooltips where they stand, and a list in the help.
export const WORDS = {
  "Group": "the completions of one prompt in one step",
  "Step": "number of the update of the policy that trained on the group; for evaluations, of the update before",
  "Source": "the source of tasks (section `sources`) that the prompt belongs to",
  "Task": "the prompt and its scoring rules; for data rows, the data source",
  "Reward": "the number that training raises; for a group, the mean over its valid completions",
  "±": "standard deviation of the group's rewards; 0: the group teaches nothing",
  "Passed": "mean share of hidden tests that a completion passes",
  "Solved": "completions that pass every hidden test, or give the right answer",
  "Tokens": "tokens that the policy sampled, mean over the group",
  "Verdicts": "what happened when the answers were scored; failures of sandboxes, engines or tools are red",
  "Tools failed": "tool calls that failed, e.g. with bad arguments or a timeout",
  "Signal": "GRPO compares a completion with its group, so a group whose rewards are all equal teaches nothing",
  "Verdict": "what happened when the answer was scored",
  "Ended": "why sampling ended: completed, truncated (no tokens left), max turns, or an error",
  "Failure": "the infrastructure failed: no reward, left out of the loss",
  "Turns": "completions of the policy, with tool results or texts of the environment in between",
  "Policy version": "number of training steps that made the weights that sampled; two numbers if the weights changed meanwhile",
  "Sampled in": "seconds until the last token, tools included",
  "Scored in": "seconds from the last token to the verdict",
  "A": "advantage: how much better the completion is than its group; above 0, training makes its tokens likelier",
  "in no loss": "left out of the loss: no verdict was possible",
};

const STATUSES = {
  scored: ["plain", "tests or a rule gave the reward"], completed: ["plain", "the policy ended by itself"],
  truncated: ["warn", "cut off: no tokens were left"], max_turns: ["warn", "called a tool in its last turn too"],
  timeout: ["warn", "the code ran too long"], no_code: ["warn", "no function or program was found in the answer"],
  banned: ["bad", "the code uses a name or operator that the task bans"], too_long: ["warn", "over a million characters"],
  unreadable: ["warn", "took over 2 s to read"], syntax_error: ["bad", "the code does not parse"],
  error: ["bad", "the code raised, or its process ended"], invalid: ["bad", "no verdict was possible; left out of the loss"],
};

// Names also come from runs: `constructor`, say, is not in the table.
const own = (table, name) => Object.hasOwn(table, name) ? table[name] : undefined;

// A word of the page with its meaning as a tooltip, where WORDS has one.
export function explained(word, meaning = own(WORDS, word)) {
  return meaning ? h("abbr", {title: meaning}, visible(word)) : visible(word);
}

export function facts(pairs) {
  return h("dl", {class: "facts"}, pairs.filter(Boolean).map(([name, value]) => h("div", {}, h("dt", {}, explained(name)), h("dd", {}, value))));
}

export function statusChip(status) {
  const [kind, meaning] = own(STATUSES, status) ?? [status.startsWith("error") ? "bad" : "plain"];
  return h("span", {class: `chip ${kind}`, title: meaning}, visible(status.replaceAll("_", " ")));
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
