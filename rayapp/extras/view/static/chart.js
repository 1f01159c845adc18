// One chart: lines over optimizer steps. The legend is the read-out: it shows the values at the step under the pointer
// (or under the arrow keys), and the last ones otherwise. All charts of a page follow the same step.

import {explained, h, number, svg, visible} from "./dom.js";

const HEIGHT = 190, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 22;
const NUM_COLOURS = 8;
const hovering = new EventTarget();

// series: [{name, steps: [...], values: [...]}]; options: {title, meaning, unit, floor, ceiling, smooth, onStep}
export function chart(series, options) {
  // A series without values keeps its colour, so that a run has the same one in every chart.
  const shown = series.map((one, i) => ({...one, colour: colour(i)})).filter((one) => one.steps.length);
  const figure = h("figure", {class: "chart card", tabindex: 0, role: "group", "aria-label": summary(shown, options), "data-key": options.title});
  const heading = h("figcaption", {}, h("h3", {}, explained(options.title, options.meaning)), options.choice, h("span", {class: "quiet at"}));
  const legend = h("div", {class: "legend"});
  const values = shown.map((one) => {
    const value = h("span", {class: "value"});
    legend.append(h("span", {class: "series"}, h("i", {class: "swatch", vars: {"--colour": one.colour}}), h("span", {class: "name", title: one.name}, visible(one.label ?? one.name)), value));
    return value;
  });
  const plot = h("div", {class: "plot"});
  figure.append(heading, plot, legend);
  if (!shown.length) {
    plot.append(h("p", {class: "quiet"}, "No values."));
    return figure;
  }
  const steps = [...new Set(shown.flatMap((one) => one.steps))].sort((a, b) => a - b);
  let cursor = null, line = null, scaleX = null;

  const showAt = (step) => {
    cursor = step;
    heading.querySelector(".at").textContent = step === null ? options.unit ?? "" : `step ${number(step, 1)}`;
    shown.forEach((one, i) => {
      const at = step === null ? one.values.length - 1 : nearest(one.steps, step);
      values[i].textContent = number(one.values[at]);
    });
    if (line && scaleX) {
      line.setAttribute("visibility", step === null ? "hidden" : "visible");
      if (step !== null) { line.setAttribute("x1", scaleX(step)); line.setAttribute("x2", scaleX(step)); }
    }
  };
  const tell = (step) => hovering.dispatchEvent(new CustomEvent("step", {detail: step}));

  const draw = (width) => {
    const drawn = drawing(shown, {...options, width});
    ({line, scaleX} = drawn);
    plot.replaceChildren(drawn.root);
    drawn.root.addEventListener("pointermove", (event) => {
      const box = drawn.root.getBoundingClientRect();
      tell(steps[nearest(steps, drawn.stepAt(event.clientX - box.left))] ?? null);
    });
    drawn.root.addEventListener("pointerleave", () => tell(null));
    drawn.root.addEventListener("click", () => cursor !== null && options.onStep?.(cursor));
    showAt(cursor);
  };
  figure.addEventListener("keydown", (event) => {
    if (event.target !== figure) return;
    const moves = {ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity};
    if (event.key in moves) {
      const from = cursor === null ? steps.length : nearest(steps, cursor);
      const at = from + moves[event.key];
      tell(steps[Math.max(0, Math.min(steps.length - 1, at))]);
      event.preventDefault();
    } else if (event.key === "Escape") tell(null);
    else if (event.key === "Enter" && cursor !== null) options.onStep?.(cursor);
  });
  figure.addEventListener("blur", () => tell(null));
  const follow = (event) => figure.isConnected ? showAt(event.detail) : hovering.removeEventListener("step", follow);
  hovering.addEventListener("step", follow);
  let drawnWidth = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (width && width !== drawnWidth) draw(drawnWidth = width);
  }).observe(plot);
  showAt(null);
  return figure;
}

function drawing(series, {width, floor, ceiling, smooth, onStep}) {
  const xs = series.flatMap((one) => one.steps), ys = series.flatMap((one) => one.values);
  const [x0, x1] = widen(Math.min(...xs), Math.max(...xs), 0.5);
  let [y0, y1] = widen(Math.min(...ys, floor ?? Infinity), Math.max(...ys, ceiling ?? -Infinity), Math.abs(ys[0]) * 0.1 || 0.5);
  const ticks = niceTicks(y0, y1, 4);
  y0 = Math.min(y0, ticks[0]); y1 = Math.max(y1, ticks.at(-1));
  const scaleX = (x) => LEFT + ((x - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
  const scaleY = (y) => HEIGHT - BOTTOM - ((y - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const line = svg("line", {class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"});
  const root = svg("svg", {width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true", class: onStep ? "clickable" : ""});
  for (const tick of ticks) {
    root.append(
      svg("line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: scaleY(tick), y2: scaleY(tick)}),
      svg("text", {class: "tick", x: LEFT - 7, y: scaleY(tick) + 4, "text-anchor": "end"}, tickText(tick, ticks)),
    );
  }
  for (const tick of stepTicks(xs, Math.max(2, Math.floor(width / 90))))
    root.append(svg("text", {class: "tick", x: scaleX(tick), y: HEIGHT - 5, "text-anchor": "middle"}, number(tick)));
  root.append(line);
  series.forEach((one) => {
    const draw = (values, cls) => root.append(svg("path", {class: cls, d: path(one.steps, values, scaleX, scaleY), vars: {"--colour": one.colour}}));
    if (smooth > 1) draw(one.values, "line faint");
    draw(smooth > 1 ? smoothed(one.values, smooth) : one.values, "line");
    if (one.steps.length === 1) root.append(svg("circle", {class: "dot", cx: scaleX(one.steps[0]), cy: scaleY(one.values[0]), r: 3, vars: {"--colour": one.colour}}),
      svg("text", {class: "tick", x: scaleX(one.steps[0]) + 7, y: scaleY(one.values[0]) + 4}, visible(one.label ?? one.name)));
  });
  return {root, line, scaleX, stepAt: (px) => x0 + ((px - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0)};
}

const colour = (i) => `var(--c${i % NUM_COLOURS})`;

function path(steps, values, scaleX, scaleY) {
  return steps.map((step, i) => `${i ? "L" : "M"}${scaleX(step).toFixed(1)} ${scaleY(values[i]).toFixed(1)}`).join("");
}

// Mean of each value and those before it, up to `window`.
export function smoothed(values, window) {
  let sum = 0;
  return values.map((value, i) => {
    sum += value - (i >= window ? values[i - window] : 0);
    return sum / Math.min(window, i + 1);
  });
}

function widen(low, high, by) {
  return low === high ? [low - by, high + by] : [low, high];
}

// Round numbers that span [low, high]: steps of 1, 2 or 5 times a power of ten.
export function niceTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({length: last - first + 1}, (_, i) => (first + i) * step);
}

// Whole numbers within the steps: the only step, where there is one.
export function stepTicks(steps, count) {
  const low = Math.min(...steps), high = Math.max(...steps);
  if (low === high) return [low];
  return [...new Set(niceTicks(low, high, count).map(Math.round))].filter((tick) => tick >= low && tick <= high);
}

function tickText(tick, ticks) {
  const gap = Math.abs(ticks[1] - ticks[0]);
  const largest = Math.max(...ticks.map(Math.abs));
  if (tick === 0) return "0";
  if (largest >= 1e5 || largest < 1e-3) return tick.toExponential(0);
  return tick.toLocaleString("en", {maximumFractionDigits: Math.max(0, -Math.floor(Math.log10(gap) + 1e-9))});
}

function nearest(sorted, target) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < target) low = middle + 1; else high = middle;
  }
  return low > 0 && target - sorted[low - 1] <= sorted[low] - target ? low - 1 : low;
}

function summary(series, {title, unit}) {
  const parts = series.map((one) => `${one.label ?? one.name} ${number(one.values.at(-1))}`);
  return `${title}${unit ? ` in ${unit}` : ""}; last values: ${parts.join(", ")}. Arrow keys read other steps, Enter opens a step's groups.`;
}
