// Sampled tokens as spans whose ground shows a number. The number itself is in the read-out, so colour is never all.

import {h, number, visible} from "./dom.js";

const STRONG = 0.62;

export const SCALES = {
  log_prob: {
    text: () => "log-probability (engine)", has: () => true, ends: ["sure (0)", "a surprise (−5)"], kind: "surprise",
    at: (turn, one, i) => ({shown: turn.log_probs[i], strength: Math.min(1, -(turn.log_probs[i] ?? 0) / 5)}),
  },
  advantage: {
    text: (one) => one.advantage_label, has: (one) => one.advantage !== null, ends: ["made rarer (−2)", "made likelier (+2)"], kind: "signed",
    at: (turn, one) => ({shown: one.advantage, strength: Math.max(-1, Math.min(1, one.advantage / 2))}),
  },
  difference: {
    text: () => "engine − learner log-probability", has: (one) => one.has_learner_log_probs, ends: ["learner higher (0.1)", "engine higher (0.1)"], kind: "signed",
    at: (turn, one, i) => {
      const shown = turn.log_probs[i] - turn.learner_log_probs[i];
      return {shown, strength: Math.max(-1, Math.min(1, shown / 0.1))};
    },
  },
  none: {text: () => "nothing", has: () => true, ends: null, kind: "none", at: () => ({shown: null, strength: 0})},
};

export function tokenSpans(turn, one, colour) {
  const scale = SCALES[colour];
  const readout = (event) => {
    const i = event.target.getAttribute?.("data-i");
    if (i !== null && i !== undefined) show(turn, scale, one, Number(i));
  };
  const spans = turn.texts.map((text, i) => {
    const {strength} = scale.at(turn, one, i);
    const tint = ground(scale.kind, strength);
    return h("span", {"data-i": i, class: text.includes("\n") ? "breaks" : null, vars: tint ? {"background-color": tint} : {}}, visible(text));
  });
  const line = h("span", {tabindex: 0, role: "group", "aria-label": "tokens; arrow keys read them one by one", on: {pointerover: readout, keydown: walk(turn, scale, one)}}, spans);
  return line;
}

function walk(turn, scale, one) {
  let at = -1;
  return (event) => {
    const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!by) return;
    event.preventDefault();
    const spans = event.currentTarget.children;
    spans[at]?.classList.remove("read");
    at = Math.max(0, Math.min(spans.length - 1, at + by));
    spans[at].classList.add("read");
    show(turn, scale, one, at);
  };
}

function show(turn, scale, one, i) {
  const logProb = turn.log_probs[i];
  const parts = [JSON.stringify(turn.texts[i]), `id ${turn.ids[i]}`, `log-prob ${logProb === null ? "–" : logProb.toFixed(3)}`, `p ${logProb === null ? "–" : Math.exp(logProb).toFixed(3)}`];
  if (turn.learner_log_probs) parts.push(`learner ${turn.learner_log_probs[i]?.toFixed(3)}`);
  if (one.advantage !== null) parts.push(`advantage ${number(one.advantage, 2)}`);
  document.getElementById("readout").textContent = visible(parts.join("   "));
}

function ground(kind, strength) {
  const size = Math.round(Math.abs(strength) * 100 * STRONG);
  if (size < 3) return "";
  const hue = kind === "surprise" ? "--heat" : strength > 0 ? "--plus" : "--minus";
  return `color-mix(in oklab, var(${hue}) ${size}%, transparent)`;
}

export function legend({ends, kind}) {
  if (!ends) return null;
  return h("span", {class: "scale"}, h("span", {}, ends[0]), h("i", {class: `ramp ${kind}`}), h("span", {}, ends[1]));
}
