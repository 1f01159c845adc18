// One trajectory, turn by turn, its sampled tokens coloured.

import {askRun} from "./api.js";
import {chip, facts, groupName, h, number, pictures, rewardBadge, seconds, statusChip, visible} from "./dom.js";
import {go, link} from "./route.js";
import {legend, SCALES, tokenSpans} from "./tokens.js";

const KINDS = {prompt: "Prompt", sampled: "Policy", read: "Environment"};

export async function trajectoryPage({run, query}) {
  const one = await askRun(run, "trajectory", {step: query.step, group: query.group, index: query.index});
  const scales = Object.entries(SCALES).filter(([, scale]) => scale.has(one));
  const colour = scales.some(([name]) => name === query.colour) ? query.colour : "log_prob";
  return h("div", {}, heading(one, query), summary(one), pictures(run, one.pictures),
    one.reward_detail ? h("p", {class: "note"}, visible(one.reward_detail)) : null,
    one.is_tokenized ? bar(one, scales, colour, query) : noTokenizer(),
    h("ol", {class: "turns"}, one.turns.map((turn) => turnBlock(turn, one, colour))), outputBlock(one));
}

// What an external agent's program wrote, with the reasons why its calls forked the trajectory.
function outputBlock(one) {
  if (!one.agent_output) return null;
  return h("details", {class: "turn read card", "data-kind": "output", open: one.num_forks ? true : null},
    h("summary", {}, h("span", {class: "kind"}, "Agent's output")), h("pre", {}, visible(one.agent_output)));
}

function heading(one, query) {
  const near = (index) => link("trajectory", {...query, index});
  return h("div", {class: "title"}, h("h1", {}, `${visible(one.task)} #${one.index}`),
    h("span", {class: "quiet"}, `step ${one.step} · `, h("a", {href: link("group", {run: query.run, step: one.step, group: one.group_id}), "data-up": true}, groupName(one.group_id))),
    h("div", {class: "right"}, one.index > 0 ? h("a", {href: near(one.index - 1), rel: "prev"}, "← Previous") : null, one.index + 1 < one.group_size ? h("a", {href: near(one.index + 1), rel: "next"}, "Next →") : null));
}

function summary(one) {
  const version = one.min_policy_version === one.max_policy_version ? one.max_policy_version : `${one.min_policy_version} to ${one.max_policy_version}`;
  return facts([
    ["Reward", rewardBadge(one.reward, one.valid)], ["Verdict", statusChip(one.reward_status)], ["Ended", statusChip(one.status)],
    one.failure_kind ? ["Failure", chip(one.failure_kind, "bad")] : null,
    [one.advantage_label, one.advantage === null ? "in no loss" : number(one.advantage, 3)],
    ["Tokens", `${number(one.num_tokens)}, ${number(one.num_prompt_tokens)} of them prompt`], ["Turns", number(one.num_turns)], one.num_forks ? ["Forks", number(one.num_forks)] : null, ["Policy version", version],
    ["Sampled in", seconds(one.time_generate_s)], ["Scored in", seconds(one.time_score_s)],
    ...Object.entries(one.reward_terms).map(([name, value]) => [name, number(value)]),
  ]);
}

function bar(one, scales, colour, query) {
  const onChange = (event) => go("trajectory", {...query, colour: event.target.value}, {replace: true});
  return h("div", {class: "colour-bar"},
    h("label", {}, "Tokens coloured by", h("select", {"data-key": "colour", on: {change: onChange}}, scales.map(([name, scale]) => h("option", {value: name, selected: name === colour}, scale.text(one))))),
    legend(SCALES[colour]), h("output", {class: "readout mono", id: "readout"}, "Point at a token to read it"));
}

function turnBlock(turn, one, colour) {
  const body = turn.ids ? h("pre", {class: "tokens"}, tokenSpans(turn, one, colour)) : h("pre", {}, visible(turn.text));
  const title = [h("span", {class: "kind"}, KINDS[turn.kind]), turn.num_tokens ? h("span", {class: "quiet"}, `${number(turn.num_tokens)} tokens`) : null];
  const isFolded = turn.kind === "prompt";
  return h("li", {class: `turn ${turn.kind}`, "data-kind": turn.kind},
    isFolded ? h("details", {}, h("summary", {}, title), body) : [h("div", {class: "turn-head"}, title), body], turn.calls.map(callBlock));
}

// A tool call as it was recorded: what was asked, what came back, how long it took.
function callBlock(call) {
  const took = `${seconds(call.duration_s)}${call.waited_s > 0.05 ? `, ${seconds(call.waited_s)} of them waiting` : ""}`;
  return h("div", {class: "call"},
    h("div", {class: "turn-head"}, h("span", {class: "kind"}, "Tool call"), h("code", {}, visible(call.name || "(could not be read)")), call.failure ? chip(call.failure, "bad") : null,
      call.reward === null ? null : rewardBadge(call.reward), h("span", {class: "quiet"}, took)),
    h("pre", {}, visible(call.arguments)), h("div", {class: "returned quiet"}, "returned"), h("pre", {}, visible(call.output)));
}

function noTokenizer() {
  return h("p", {class: "note"}, "No tokenizer was found for this run, so tokens can't be shown one by one. Start the page with ", h("code", {}, "--tokenizer MODEL_FOLDER"), ".");
}
