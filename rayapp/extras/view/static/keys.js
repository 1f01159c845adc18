// Keyboard: rows are walked with j and k, neighbours opened with [ and ], and ? lists them all.

import {h, WORDS} from "./dom.js";
import {go, route} from "./route.js";

const HELP = [["j k", "next, previous row or completion"], ["Enter", "open it"], ["[ ]", "previous, next trajectory or page"], ["u", "up: trajectory → group → groups"],
  ["/", "to the filters"], ["g c", "curves"], ["g g", "groups"], ["← →", "on a chart: read another step"], ["?", "this list"]];
let prefix = "";

export function keys(event) {
  const {tagName} = event.target;
  if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(tagName)) return;
  const pressed = prefix + event.key;
  prefix = event.key === "g" && !prefix ? "g" : "";
  const {query} = route();
  const actions = {
    j: () => walk(1), k: () => walk(-1), "/": () => document.querySelector(".filters input, .filters select")?.focus(),
    "[": () => document.querySelector("[rel=prev]")?.click(), "]": () => document.querySelector("[rel=next]")?.click(),
    u: () => document.querySelector("[data-up]")?.click(), "?": help, gc: () => go("curves", {run: query.run}), gg: () => go("groups", {run: query.run}),
  };
  if (pressed in actions) { event.preventDefault(); actions[pressed](); }
}

function walk(by) {
  const stops = [...document.querySelectorAll("[data-stop]")];
  const at = stops.indexOf(document.activeElement);
  stops[at < 0 ? (by > 0 ? 0 : stops.length - 1) : Math.max(0, Math.min(stops.length - 1, at + by))]?.focus();
}

export function help() {
  const dialog = h("dialog", {"aria-label": "Keyboard shortcuts and words"}, h("h3", {}, "Keyboard"),
    h("table", {}, HELP.map(([key, what]) => h("tr", {}, h("td", {}, key.split(" ").map((one) => [h("kbd", {}, one), " "])), h("td", {}, what)))),
    h("h3", {}, "Words"), h("table", {}, Object.entries(WORDS).map(([word, meaning]) => h("tr", {}, h("th", {scope: "row"}, word), h("td", {}, meaning)))),
    h("form", {method: "dialog"}, h("button", {autofocus: true, on: {click: (event) => { event.preventDefault(); dialog.close(); }}}, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  dialog.scrollTop = 0; // showing it scrolls to the focused button at its end
}
