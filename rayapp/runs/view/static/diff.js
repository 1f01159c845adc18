// Two completions against each other: usually the same prompt at two steps.

import {askRun} from "./api.js";
import {groupName, h, rewardBadge, statusChip, visible} from "./dom.js";
import {go, link} from "./route.js";

export async function diffPage({run, query}) {
  const [diff, left, right] = await Promise.all([askRun(run, "diff", query), askRun(run, "group", {step: query.step, group: query.group}), askRun(run, "group", {step: query.other_step, group: query.other_group})]);
  return h("div", {}, h("div", {class: "title"}, h("h1", {}, `${visible(diff.left.task)}: step ${query.step} against step ${query.other_step}`),
    h("div", {class: "right"}, h("a", {"data-up": true, href: link("group", {run: query.run, step: query.other_step, group: query.other_group})}, groupName(Number(query.other_group))))),
    diff.same_prompt ? null : h("p", {class: "note"}, "These two answer different prompts."),
    h("div", {class: "diff card"}, h("table", {}, h("thead", {}, h("tr", {}, side(left, diff.left, query, ""), side(right, diff.right, query, "other_"))), h("tbody", {}, diff.rows.map(row)))));
}

function side(group, verdict, query, prefix) {
  const name = prefix ? "right" : "left";
  const groups = group.same_prompt.map((one) => [`${one.step}:${one.group_id}`, `step ${one.step}, ${groupName(one.group_id)}`]);
  const current = `${query[`${prefix}step`]}:${query[`${prefix}group`]}`;
  const toGroup = (event) => { const [step, id] = event.target.value.split(":"); go("diff", {...query, [`${prefix}step`]: step, [`${prefix}group`]: id, [`${prefix}index`]: 0}, {replace: true}); };
  const toIndex = (event) => go("diff", {...query, [`${prefix}index`]: event.target.value}, {replace: true});
  return h("th", {scope: "col"}, h("div", {class: "side"},
    h("select", {"aria-label": `group on the ${name}`, "data-key": `${prefix}group`, on: {change: toGroup}}, groups.map(([value, text]) => h("option", {value, selected: value === current}, text))),
    h("select", {"aria-label": `completion on the ${name}`, "data-key": `${prefix}index`, on: {change: toIndex}}, group.trajectories.map((one) => h("option", {value: one.index, selected: String(one.index) === query[`${prefix}index`]}, `#${one.index}  reward ${one.reward}`))),
    rewardBadge(verdict.reward), statusChip(verdict.reward_status)));
}

function row({op, left, right}) {
  const cell = (pieces, kind) => h("td", {class: pieces ? kind : "void"}, pieces ? h("pre", {}, pieces.map(([text, differs]) => differs && op === "change" ? h("mark", {}, visible(text)) : visible(text)), "\u200b") : null);
  const kinds = {equal: ["", ""], change: ["gone", "new"], delete: ["gone", ""], insert: ["", "new"]}[op];
  return h("tr", {"data-op": op}, cell(left, kinds[0]), cell(right, kinds[1]));
}
