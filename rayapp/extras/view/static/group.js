// One group: the prompt, and its completions side by side.

import {askRun} from "./api.js";
import {chip, explained, facts, groupName, h, number, pictures, rewardBadge, seconds, statusChip, visible, WORDS} from "./dom.js";
import {lastGroups} from "./groups.js";
import {go, link} from "./route.js";

const SORTS = {index: "as sampled", best: "best first", worst: "worst first", long: "longest first"};

export async function groupPage({run, query}) {
  const group = await askRun(run, "group", {step: query.step, group: query.group});
  const sort = query.sort in SORTS ? query.sort : "index";
  return h("div", {}, heading(group, query, sort), summary(group), pictures(run, group.pictures), promptBlock(group),
    h("h2", {}, `${group.trajectories.length} completions`),
    h("div", {class: "completions"}, ordered(group.trajectories, sort).map((one) => completion(one, group, query))));
}

function heading(group, query, sort) {
  const back = link("groups", lastGroups.run === query.run ? lastGroups : {run: query.run});
  const near = (one, rel, text) => one ? h("a", {rel, href: link("group", {run: query.run, step: one.step, group: one.group_id, sort: query.sort})}, text) : null;
  const onChange = (event) => go("group", {...query, sort: event.target.value}, {replace: true});
  return h("div", {class: "title"}, h("h1", {}, visible(group.task)),
    h("span", {class: "quiet"}, h("a", {href: link("groups", {run: query.run, step_min: group.step, step_max: group.step})}, `step ${group.step}`), ` · ${groupName(group.group_id)}`),
    h("div", {class: "right"}, h("a", {href: back, "data-up": true}, "All groups"), near(group.neighbours.previous, "prev", "← Previous"), near(group.neighbours.next, "next", "Next →"),
      h("select", {"aria-label": "Order of completions", "data-key": "sort", on: {change: onChange}}, Object.entries(SORTS).map(([value, text]) => h("option", {value, selected: value === sort}, text)))));
}

function summary(group) {
  const valid = group.trajectories.filter((one) => one.valid);
  const rewards = valid.map((one) => one.reward);
  const mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
  const solved = valid.filter((one) => one.reward_terms.solved === 1).length;
  return facts([
    ["Mean reward", rewardBadge(mean, valid.length > 0)], ["Lowest to highest", rewards.length ? `${number(Math.min(...rewards))} to ${number(Math.max(...rewards))}` : "–"],
    ["Solved", `${solved} of ${group.trajectories.length}`], ["Prompt", `${number(group.num_prompt_tokens)} tokens`],
    ["Signal", new Set(rewards).size > 1 ? "rewards differ" : "none: rewards are equal"],
  ]);
}

function promptBlock(group) {
  return h("details", {class: "prompt card"}, h("summary", {}, "Prompt"), h("pre", {}, visible(group.prompt)));
}

function ordered(trajectories, sort) {
  const by = {index: (a, b) => a.index - b.index, best: (a, b) => b.reward - a.reward, worst: (a, b) => a.reward - b.reward, long: (a, b) => (b.num_response_tokens ?? b.completion.length) - (a.num_response_tokens ?? a.completion.length)};
  return [...trajectories].sort((a, b) => by[sort](a, b) || a.index - b.index);
}

function completion(one, group, query) {
  const href = link("trajectory", {run: query.run, step: group.step, group: group.group_id, index: one.index});
  return h("article", {class: "completion card"},
    h("header", {}, h("a", {href, "data-stop": true, "data-key": `completion-${one.index}`}, `#${one.index}`), rewardBadge(one.reward, one.valid), statusChip(one.reward_status),
      one.status !== "completed" ? statusChip(one.status) : null, one.num_turns > 1 ? chip(`${one.num_turns} turns`) : null, advantage(one, group)),
    one.reward_detail ? h("p", {class: "detail"}, visible(one.reward_detail)) : null,
    h("pre", {}, h("span", {class: "quiet"}, visible(group.prefill)), visible(one.completion)),
    h("footer", {class: "quiet"}, [one.num_response_tokens ? `${number(one.num_response_tokens)} tokens` : null, `sampled in ${seconds(one.time_generate_s)}`, `scored in ${seconds(one.time_score_s)}`].filter(Boolean).join(" · ")));
}

function advantage(one, group) {
  if (one.advantage === null) return h("span", {class: "right quiet"}, explained("in no loss"));
  const text = Math.abs(one.advantage) < 5e-3 ? "0" : `${one.advantage > 0 ? "+" : "−"}${Math.abs(one.advantage).toFixed(2)}`;
  return h("span", {class: "right quiet number"}, explained("A", `${group.advantage_label}: ${WORDS.A}`), ` ${text}`);
}

