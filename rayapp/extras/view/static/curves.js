// Curves of one run, in sections, all following the same step.

import {askRun} from "./api.js";
import {chart} from "./chart.js";
import {h} from "./dom.js";
import {go, link} from "./route.js";

const WINDOWS = [1, 5, 10, 25];

export async function curvesPage({run, query}) {
  const panels = await askRun(run, "panels");
  if (!panels.length) return h("div", {class: "empty"}, "No step is recorded yet. The curves appear as soon as the first step is.");
  const smooth = Number(query.smooth) || 1;
  const title = h("div", {class: "title"}, h("h1", {}, "Curves"), h("div", {class: "right"}, smoothing(query, smooth)));
  return h("div", {}, title, [...new Set(panels.map((panel) => panel.section))].map((section) => h("section", {"aria-label": section},
    h("h2", {}, section),
    h("div", {class: "charts"}, panels.filter((panel) => panel.section === section).map((panel) => panelChart(panel, run, smooth))),
  )));
}

export function smoothing(query, chosen) {
  const onChange = (event) => go("curves", {...query, smooth: event.target.value === "1" ? "" : event.target.value});
  return h("label", {}, "Smoothing",
    h("select", {"data-key": "smooth", on: {change: onChange}}, WINDOWS.map((n) => h("option", {value: n, selected: n === chosen}, n === 1 ? "none" : `mean of ${n} steps`))));
}

function panelChart(panel, run, smooth) {
  const series = panel.keys.map((key) => ({name: key, label: shortName(key, panel.keys), ...panel.curves[key]}));
  const onStep = (step) => { location.hash = link("groups", {run, step_min: Math.round(step), step_max: Math.round(step)}); };
  return chart(series, {title: panel.title, meaning: panel.meaning, unit: panel.unit, floor: panel.floor, ceiling: panel.ceiling, smooth, onStep});
}

// What tells a metric from its neighbours: their common beginning and end, cut at slashes, go. One that stands alone
// loses its first part and a last part "mean": reward/raised_rate/mean is "raised_rate".
export function shortName(key, all) {
  if (all.length === 1) return key.split("/").filter((part, i, parts) => i && (part !== "mean" || parts.length < 3)).join("/") || key;
  const parts = key.split("/"), others = all.filter((one) => one !== key).map((one) => one.split("/"));
  const shortest = Math.min(parts.length, ...others.map((one) => one.length)) - 1;
  let head = 0, tail = 0;
  while (head < shortest && others.every((one) => one[head] === parts[head])) head++;
  while (tail < shortest - head && others.every((one) => one.at(-1 - tail) === parts.at(-1 - tail))) tail++;
  return parts.slice(head, parts.length - tail).join("/") || key;
}
