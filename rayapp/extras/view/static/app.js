// The frame: header, which page is shown, keyboard, and looking for news every two seconds.

import {ask} from "./api.js";
import {announce, h, number, visible} from "./dom.js";
import {help, keys} from "./keys.js";
import {comparePage} from "./compare.js";
import {curvesPage} from "./curves.js";
import {groupPage} from "./group.js";
import {groupsPage} from "./groups.js";
import {go, link, route} from "./route.js";
import {trajectoryPage} from "./trajectory.js";

const PAGES = {curves: curvesPage, groups: groupsPage, group: groupPage, trajectory: trajectoryPage, compare: comparePage};
// Only these change while a run goes on; what somebody reads stays as it is.
const LIVE = new Set(["curves", "groups", "compare"]);
const POLL_MS = 2000;
const STATES = {running: "running", finished: "finished", quiet: "no news", waiting: "waiting for the first step"};

let runs = [], shownRevision = "", drawing = 0;

const content = document.getElementById("content");
const chosenRun = (query) => Math.min(Math.max(0, Number(query.run) || 0), Math.max(0, runs.length - 1));

async function draw({isUpdate = false, isReplaced = false} = {}) {
  const turn = ++drawing;
  // News that arrives during the drawing is not in it: it must be drawn next.
  const address = location.hash, revision = revisions();
  const {page, query} = route();
  const run = chosenRun(query);
  const focused = isUpdate || isReplaced ? document.activeElement?.getAttribute?.("data-key") : null;
  drawHeader(page, query, run);
  if (!isUpdate) content.setAttribute("aria-busy", "true");
  let drawn;
  try {
    drawn = await (PAGES[page] ?? unknownPage)({run, runs, query: {...query, run: String(run)}});
  } catch (error) {
    drawn = h("p", {class: "note bad", role: "alert"}, visible(error.message));
  }
  if (turn !== drawing) return; // somebody went on meanwhile
  shownRevision = revision;
  content.removeAttribute("aria-busy");
  content.dataset.address = address;
  content.replaceChildren(...problems(run), drawn);
  document.title = `${runs[run] ? `${runs[run].name} · ` : ""}${page} · rayapp`;
  if (focused) [...content.querySelectorAll("[data-key]")].find((one) => one.getAttribute("data-key") === focused)?.focus({preventScroll: true});
  if (!isUpdate && !isReplaced) scrollTo(0, 0);
}

const unknownPage = ({query}) => h("p", {class: "note"}, "There is no such page. ", h("a", {href: link("curves", {run: query.run})}, "Curves"));

function drawHeader(page, query, run) {
  const current = runs[run];
  const tabs = [["curves", "Curves"], ["groups", "Groups"], ["compare", "Compare"]].filter(([name]) => name !== "compare" || runs.length > 1);
  const own = {group: "groups", trajectory: "groups"}[page] ?? page;
  document.getElementById("header").replaceChildren(h("div", {class: "bar"},
    h("div", {class: "who"}, runs.length > 1 ? runSelect(run, page) : visible(current?.name ?? "rayapp")),
    h("nav", {"aria-label": "Pages"}, tabs.map(([name, text]) => h("a", {href: link(name, {run}), "aria-current": own === name ? "page" : null}, text))),
    h("div", {class: "right"}, current ? runState(current) : null,
      h("button", {class: "icon", title: "Keyboard shortcuts and words (?)", "aria-label": "Keyboard shortcuts and words", on: {click: help}}, "?"),
      h("button", {class: "icon", title: "Light or dark", "aria-label": "Switch between light and dark", on: {click: switchTheme}}, "◐")),
  ));
}

function runSelect(run, page) {
  const onChange = (event) => go(["curves", "groups", "compare"].includes(page) ? page : "groups", {run: event.target.value});
  return h("select", {"aria-label": "Run", "data-key": "run", on: {change: onChange}}, runs.map((one, i) => h("option", {value: i, selected: i === run}, visible(one.name))));
}

function runState(run) {
  const at = run.last ? `step ${number(run.last.step)}${run.num_steps ? ` of ${number(run.num_steps)}` : ""}` : "";
  const kind = {running: "running", quiet: "quiet-run"}[run.state] ?? "";
  return h("span", {class: `state ${kind}`, "data-state": run.state}, [STATES[run.state], at].filter(Boolean).join(" · "));
}

function problems(run) {
  const found = runs[run]?.problems ?? [];
  return found.length ? [h("div", {class: "note", role: "alert"}, found.slice(0, 5).map((text) => h("div", {}, visible(text))), found.length > 5 ? h("div", {}, `and ${found.length - 5} more`) : null)] : [];
}

const revisions = () => runs.map((run) => `${run.revision}${run.state}${run.problems.length}`).join("|");

async function poll() {
  try {
    if (!document.hidden) {
      runs = await ask("runs");
      document.body.removeAttribute("data-lost");
      const {page, query} = route();
      const isNew = revisions() !== shownRevision;
      if (isNew && LIVE.has(page) && !document.querySelector("dialog[open]") && !isTyping()) await draw({isUpdate: true});
      else if (isNew) drawHeader(page, query, chosenRun(query));
    }
  } catch (error) {
    document.body.setAttribute("data-lost", "");
    announce(error.message);
    const state = document.querySelector(".state");
    if (state) { state.className = "state quiet-run"; state.textContent = "the server does not answer"; }
  }
  setTimeout(poll, POLL_MS);
}

const isTyping = () => ["INPUT", "SELECT"].includes(document.activeElement?.tagName);

function switchTheme() {
  const isDark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(isDark ? "light" : "dark");
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("theme", theme); } catch { /* a browser without storage forgets it */ }
}

try { const kept = localStorage.getItem("theme"); if (kept) setTheme(kept); } catch { /* as above */ }
// `go` with replace sends an event of its own, without addresses: the reader stays where they are on the page.
addEventListener("hashchange", (event) => draw({isReplaced: !event.newURL}));
addEventListener("keydown", keys);
try { runs = await ask("runs"); } catch (error) { content.replaceChildren(h("p", {class: "note bad", role: "alert"}, visible(error.message))); }
if (runs.length) await draw();
setTimeout(poll, POLL_MS);
