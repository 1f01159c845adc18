// Curves of one run, in sections, all following the same step.

import {askRun} from "./api.js";
import {chart} from "./chart.js";
import {explained, h, number, seconds, visible} from "./dom.js";
import {go, link} from "./route.js";

const WINDOWS = [1, 5, 10, 25];

export async function curvesPage({run, query}) {
  const [panels, profiles] = await Promise.all([askRun(run, "panels"), askRun(run, "profiles")]);
  if (!panels.length) return h("div", {class: "empty"}, "No step is recorded yet. The curves appear as soon as the first step is.");
  const smooth = Number(query.smooth) || 1;
  const title = h("div", {class: "title"}, h("h1", {}, "Curves"), h("div", {class: "right"}, smoothing(query, smooth)));
  return h("div", {}, title, [...new Set(panels.map((panel) => panel.section))].map((section) => h("section", {"aria-label": section},
    h("h2", {}, section),
    h("div", {class: "charts"}, panels.filter((panel) => panel.section === section).map((panel) => panelChart(panel, run, smooth))),
  )), profiles.map(profileSection));
}

// Where the time of a profiled step went (train.profile_steps): its phases, and the operators of the recorded processes.
function profileSection(profile) {
  const percent = (share) => `${Math.round(100 * share)}%`;
  const table = (columns, rows) => h("div", {class: "scroll card"}, h("table", {class: "settings"},
    h("thead", {}, h("tr", {}, columns.map((name) => h("th", {scope: "col"}, explained(name))))),
    h("tbody", {}, rows.map(([name, ...cells]) => h("tr", {}, h("th", {scope: "row", class: "mono"}, visible(name.replace(/^ +/, "\u2003"))), cells.map((cell) => h("td", {class: "number"}, cell)))))));
  return h("section", {"aria-label": `Profile of step ${profile.step}`}, h("h2", {}, `Where the time of step ${profile.step} went: ${seconds(profile.total_s)}`),
    table(["Phase", "Time", "Share"], profile.rows.map(([name, took, share]) => [name, seconds(took), percent(share)])),
    profile.processes.map((process) => [
      h("p", {}, h("b", {}, visible(process.process)), `: ${process.device} busy for ${seconds(process.busy_s)} of ${seconds(process.recorded_s)} recorded, ${process.covers}`),
      table(["Operator", "Calls", "Own time", "Share"], process.operators.slice(0, 10).map((one) => [one.name, number(one.calls), seconds(one.seconds), percent(one.share)]))]));
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

// What tells a metric from its neighbours: their common beginning and end, cut at slashes, go.
export function shortName(key, all) {
  if (all.length === 1) return key;
  const parts = key.split("/"), others = all.filter((one) => one !== key).map((one) => one.split("/"));
  const shortest = Math.min(parts.length, ...others.map((one) => one.length)) - 1;
  let head = 0, tail = 0;
  while (head < shortest && others.every((one) => one[head] === parts[head])) head++;
  while (tail < shortest - head && others.every((one) => one.at(-1 - tail) === parts.at(-1 - tail))) tail++;
  return parts.slice(head, parts.length - tail).join("/") || key;
}
