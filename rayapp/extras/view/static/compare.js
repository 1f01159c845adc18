// Several runs in the same charts, and what their configurations differ in.

import {askRun} from "./api.js";
import {chart} from "./chart.js";
import {h, visible} from "./dom.js";
import {go, link} from "./route.js";

export async function comparePage({runs, query}) {
  const asked = query.runs ? query.runs.split(",").map(Number) : runs.map((_, i) => i);
  const chosen = asked.filter((i) => i in runs);
  const [panels, configs] = await Promise.all([Promise.all(chosen.map((i) => askRun(i, "panels"))), Promise.all(chosen.map((i) => askRun(i, "config")))]);
  const titles = [...new Map(panels.flat().map((panel) => [panel.title, panel])).values()];
  return h("div", {}, h("div", {class: "title"}, h("h1", {}, "Compare"), h("div", {class: "right"}, picker(runs, chosen, query))),
    chosen.length ? h("div", {class: "charts"}, titles.map((panel, at) => overlay(panel, `m${at}`, query, chosen, panels, runs))) : h("div", {class: "empty"}, "Choose a run."),
    differences(chosen, configs, runs));
}

function picker(runs, chosen, query) {
  const toggle = (i) => (event) => go("compare", {...query, runs: event.target.checked ? [...chosen, i].sort((a, b) => a - b).join(",") : chosen.filter((one) => one !== i).join(",") || "none"});
  return h("fieldset", {class: "runs"}, h("legend", {class: "visually-hidden"}, "Runs"), runs.map((run, i) =>
    h("label", {}, h("input", {type: "checkbox", checked: chosen.includes(i), "data-key": `pick-${i}`, on: {change: toggle(i)}}), visible(run.name))));
}

// One metric of a panel at a time, in every run; the address keeps which.
function overlay(panel, name, query, chosen, panels, runs) {
  const keys = [...new Set(panels.flat().filter((one) => one.title === panel.title).flatMap((one) => one.keys))];
  const key = keys.includes(query[name]) ? query[name] : keys[0];
  const series = chosen.map((i, at) => ({name: `${runs[i].name} (${i})`, label: runs[i].name, ...(panels[at].find((one) => one.title === panel.title)?.curves[key] ?? {steps: [], values: []})}));
  const onChange = (event) => go("compare", {...query, [name]: event.target.value}, {replace: true});
  const choice = keys.length < 2 ? null : h("select", {"aria-label": `metric of ${panel.title}`, "data-key": name, on: {change: onChange}}, keys.map((one) => h("option", {value: one, selected: one === key}, visible(one))));
  return chart(series, {title: panel.title, meaning: panel.meaning, unit: panel.unit, floor: panel.floor, ceiling: panel.ceiling, smooth: 1, choice});
}

function differences(chosen, configs, runs) {
  const flat = configs.map((config) => flatten(config));
  const keys = [...new Set(flat.flatMap(Object.keys))].sort().filter((key) => new Set(flat.map((one) => one[key])).size > 1);
  if (chosen.length < 2) return null;
  return h("section", {}, h("h2", {}, "Settings that differ"), keys.length ? h("div", {class: "scroll card"}, h("table", {class: "settings"},
    h("thead", {}, h("tr", {}, h("th", {scope: "col"}, "Key"), chosen.map((i) => h("th", {scope: "col"}, h("a", {href: link("curves", {run: i})}, visible(runs[i].name)))))),
    h("tbody", {}, keys.map((key) => h("tr", {}, h("th", {scope: "row", class: "mono"}, visible(key)), flat.map((one) => h("td", {class: "mono"}, visible(one[key] ?? "–")))))))) : h("p", {class: "quiet"}, "None."));
}

function flatten(value, prefix = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return {[prefix]: JSON.stringify(value)};
  return Object.assign({}, ...Object.entries(value).map(([key, inner]) => flatten(inner, prefix ? `${prefix}.${key}` : key)));
}
