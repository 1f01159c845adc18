// The table of groups: filters and order are in the address, the server does the work.

import {askRun} from "./api.js";
import {announce, chip, explained, groupName, h, number, rewardBadge, statusChip, visible} from "./dom.js";
import {go, link} from "./route.js";

const PAGE_ROWS = 50;
const FILTERS = ["purpose", "step_min", "step_max", "source", "task", "reward_min", "reward_max", "reward_status", "status", "failure", "signal", "tool_failed"];

// What the table showed last, so that the way up from a group leads back to it.
export let lastGroups = {};

export async function groupsPage({run, query}) {
  lastGroups = query;
  const [facets, found] = await Promise.all([askRun(run, "facets"), askRun(run, "groups", {...query, limit: PAGE_ROWS})]);
  const title = h("div", {class: "title"}, h("h1", {}, "Groups"),
    h("span", {class: "quiet", "data-count": found.total}, `${number(found.total)} of ${number(facets.groups)} groups, ${number(facets.trajectories)} trajectories in all`));
  announce(`${found.total} groups`);
  return h("div", {}, title, filters(facets, query), found.rows.length ? [table(found.rows, facets, query), pager(found.total, query)] : empty(query));
}

function filters(facets, query) {
  const set = (name) => (event) => go("groups", {...query, [name]: event.target.value, offset: ""}, {replace: true});
  const input = (name, text, props) => h("label", {}, text, h("input", {name, type: "number", value: query[name] ?? "", "data-key": name, on: {change: set(name)}, ...props}));
  const select = (name, text, values, any) => values.length ? h("label", {}, text, h("select", {name, "data-key": name, on: {change: set(name)}},
    h("option", {value: ""}, any), values.map(([value, shown]) => h("option", {value, selected: query[name] === value}, visible(shown))))) : null;
  const plain = (values) => values.map((value) => [value, value.replaceAll("_", " ")]);
  const [first, last] = facets.steps;
  const active = FILTERS.some((name) => query[name]);
  return h("div", {class: "filters card", role: "search"},
    facets.evaluated ? select("purpose", "Sampled for", [["train", "training"], ["eval", "evaluations"]], "both") : null,
    input("step_min", "From step", {min: first, max: last, placeholder: first ?? ""}), input("step_max", "to step", {min: first, max: last, placeholder: last ?? ""}),
    select("source", "Source", facets.sources.map((source) => [source, source]), "all sources"),
    select("task", "Task", facets.tasks.map((task) => [task, task]), "all tasks"),
    input("reward_min", "Mean reward from", {step: "any"}), input("reward_max", "to", {step: "any"}),
    select("reward_status", "Some verdict is", plain(facets.reward_statuses), "any"),
    select("status", "Some ended as", plain(facets.statuses), "any"),
    select("failure", "Failure", plain(facets.failures), "any or none"),
    select("signal", "Rewards", [["some", "differ (teaches)"], ["none", "all equal"]], "any"),
    facets.tools ? select("tool_failed", "Tool calls", [["some", "some failed"], ["none", "none failed"]], "any") : null,
    active ? h("a", {class: "clear", href: link("groups", {run: query.run, sort: query.sort, order: query.order})}, "Clear filters") : null);
}

const COLUMNS = [
  ["step", "Step"], ["source", "Source"], ["task", "Task"], [null, "Prompt"], ["reward_mean", "Reward"], ["reward_std", "±"], ["pass_rate", "Passed"], ["solved", "Solved"],
  ["response_tokens_mean", "Tokens"], [null, "Verdicts"], ["tool_failed", "Tools failed"],
];

function table(rows, facets, query) {
  const columns = COLUMNS.filter(([key]) => (key !== "tool_failed" || facets.tools) && (key !== "source" || facets.sources.length));
  const sorted = query.sort || "step", order = query.order === "asc" ? "asc" : "desc";
  const head = columns.map(([key, text]) => {
    if (!key) return h("th", {scope: "col", class: `of-${text.toLowerCase()}`}, explained(text));
    const next = sorted === key && order === "desc" ? "asc" : "desc";
    const arrow = sorted === key ? (order === "desc" ? " ↓" : " ↑") : "";
    return h("th", {scope: "col", class: isText(key) ? key : `number ${key}`, "aria-sort": sorted === key ? `${order}ending` : null},
      h("a", {href: link("groups", {...query, sort: key, order: next, offset: ""}), "data-key": `sort-${key}`}, explained(text), arrow));
  });
  return h("div", {class: "scroll card"}, h("table", {class: "groups"}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows.map((row) => groupRow(row, facets, query)))));
}

const isText = (key) => key === "task" || key === "source";

function groupRow(row, facets, query) {
  const href = link("group", {run: query.run, step: row.step, group: row.group_id});
  const open = (event) => { if (!event.target.closest("a") && !getSelection().toString()) location.hash = href; };
  const share = (value) => value === null ? "–" : `${Math.round(value * 100)}%`;
  const odd = (row.reward_statuses ?? []).filter((status) => status !== "scored");
  return h("tr", {on: {click: open}},
    h("td", {class: "number"}, h("a", {href, "data-stop": true, "data-key": `${row.step}-${row.group_id}`, "aria-label": `step ${row.step}, ${groupName(row.group_id)}`}, number(row.step)), row.group_id < 0 ? [" ", chip("eval")] : null),
    facets.sources.length ? h("td", {class: "source"}, visible(row.source)) : null,
    h("td", {class: "task"}, visible(row.task)),
    h("td", {class: "preview"}, h("div", {title: visible(row.preview)}, visible(row.preview))),
    h("td", {class: "number"}, rewardBadge(row.reward_mean, row.num_valid > 0)),
    h("td", {class: "number quiet reward_std"}, row.reward_std === null ? "–" : row.reward_std < 1e-9 ? "0" : number(row.reward_std, 2)),
    h("td", {class: "number pass_rate"}, share(row.pass_rate)), h("td", {class: "number solved"}, share(row.solved)),
    h("td", {class: "number response_tokens_mean"}, number(row.response_tokens_mean, 0)),
    h("td", {class: "chips"}, odd.length ? odd.map(statusChip) : chip("all scored"), (row.failures ?? []).map((kind) => chip(kind, "bad"))),
    facets.tools ? h("td", {class: "number tool_failed"}, number(row.tool_failed)) : null);
}

function pager(total, query) {
  const offset = Number(query.offset) || 0;
  const last = Math.min(total, offset + PAGE_ROWS);
  const to = (at) => link("groups", {...query, offset: at || ""});
  return h("nav", {class: "pager", "aria-label": "Pages of groups"},
    offset > 0 ? h("a", {rel: "prev", href: to(Math.max(0, offset - PAGE_ROWS))}, "← Previous") : h("span", {class: "quiet"}, "← Previous"),
    h("span", {class: "quiet"}, `${number(offset + 1)}–${number(last)} of ${number(total)}`),
    last < total ? h("a", {rel: "next", href: to(last)}, "Next →") : h("span", {class: "quiet"}, "Next →"));
}

function empty(query) {
  if (FILTERS.some((name) => query[name])) return h("div", {class: "empty"}, "No group matches the filters. ", h("a", {href: link("groups", {run: query.run})}, "Clear filters"));
  return h("div", {class: "empty"}, "This run has no trajectories: no step is done yet.");
}
