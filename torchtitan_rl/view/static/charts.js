// Curves over steps, drawn by uPlot (vendored in uplot/).
import { css, h, short, strokeOf, visible } from "./dom.js";

const uPlot = globalThis.uPlot;
export const COLOURS = Array.from({ length: 18 }, (_, i) => `--c${i + 1}`);
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [4, 4]];
const WHOLE = [1, 2, 5].flatMap((n) => [n, n * 10, n * 100, n * 1e3, n * 1e4, n * 1e5]).sort((a, b) => a - b);

// What actors do has one colour in all charts, of all runs. The last colour is for what is not listed.
const ACTIVITIES = [
  ...["generate", "grade", "train", "pull weights", "evaluate", "publish weights", "respond"],
  ...["start", "compute logprobs", "measure", "save a checkpoint", "export the model", "read"],
  ...["say its step", "end", "cancel", "answer a probe"],
];
const PHASES = { sync: "pull weights" }; // a phase of a step that the timeline has by another name

export const colour = (number) => css(COLOURS[number % COLOURS.length]);
export const dash = (number) => DASHES[number % DASHES.length];

/** The place of an activity among all: that of what is not listed is the last. */
export function activityPlace(name) {
  const place = ACTIVITIES.indexOf(PHASES[name] || name);
  return place < 0 ? COLOURS.length - 1 : place;
}

/** The colour of a phase of a step, or of a span of the timeline. */
export const activityColour = (name) => css(COLOURS[activityPlace(name)]);

/** Exponential moving average; 0 leaves values as they are. Gaps stay gaps. */
export function smoothed(values, amount) {
  if (!amount) return values;
  let mean = null;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = mean === null ? value : amount * mean + (1 - amount) * value;
    return mean;
  });
}

/** Sums from the first series up, for areas that lie on one another. */
export function stacked(series) {
  const sums = [];
  return series.map(({ values }) => values.map((value, i) => (sums[i] = (sums[i] || 0) + (value || 0))));
}

/** The value axis for values from `low` to `high`: some room around them, and never below 0 for nothing. */
export function axisRange(low, high) {
  if (low === null || high === null || low === undefined || high === undefined) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (high - low <= 1e-9 * size) {
    if (size === 0) return [0, 1];
    return high > 0 ? [0, 2 * high] : [2 * low, 0];
  }
  const room = 0.06 * (high - low);
  return [low >= 0 ? Math.max(0, low - room) : low - room, high <= 0 ? Math.min(0, high + room) : high + room];
}

/** The step axis; one step alone is in the middle. */
export function stepRange(low, high) {
  if (low === null || low === undefined) return [0, 1];
  return low === high ? [low - 0.5, low + 0.5] : [low, high];
}

/** The last value there is. */
export const latest = (values) => values.findLast((value) => value !== null && value !== undefined) ?? null;

/** A share as a percentage. */
const percent = (value) => (value === null || value === undefined ? "–" : `${short(100 * value)} %`);

/** A chart that lives in `element` and is given data again and again. */
export class Chart {
  #plot = null;
  #shape = "";
  #raw = [];

  /** about: the names of the metrics; share: values are shown as percentages */
  constructor(title, { about = "", share = false, stack = false, onclose = null } = {}) {
    this.stack = stack;
    this.number = share ? percent : short;
    this.body = h("div", { class: "plot" });
    const close =
      onclose && h("button", { class: "close", title: "remove this chart", onclick: onclose }, "×");
    this.element = h(
      "section",
      { class: "card chart", "data-title": title },
      h("h2", {}, h("span", {}, visible(title)), h("small", { class: "quiet" }, visible(about)), close),
      this.body,
    );
    this.observer = new ResizeObserver(() => this.#plot?.setSize(this.#size()));
    this.observer.observe(this.body);
  }

  /** steps: ascending; series: [{label, values, colour, dash, points}], values aligned with steps */
  show(steps, series) {
    const shape = JSON.stringify(series.map((one) => [one.label, one.colour]));
    // Areas are painted from the highest sum down, each over the one before.
    const drawn = this.stack ? stacked(series).reverse() : series.map((one) => one.values);
    this.#raw = this.stack ? [...series].reverse() : series;
    const data = [steps, ...drawn];
    if (shape === this.#shape && this.#plot) return this.#plot.setData(data);
    this.#shape = shape;
    this.#plot?.destroy();
    this.#plot = new uPlot(this.#options(), data, this.body);
    // A square could not tell curves apart that differ in their dashes only.
    if (!this.stack)
      this.body
        .querySelectorAll(".u-series:not(:first-child) .u-marker")
        .forEach((marker, i) => marker.replaceChildren(strokeOf(series[i].colour, series[i].dash)));
  }

  close() {
    this.observer.disconnect();
    this.#plot?.destroy();
  }

  #size() {
    return { width: Math.max(200, this.body.clientWidth), height: 200 };
  }

  #options() {
    const axis = {
      stroke: css("--quiet"),
      grid: { stroke: css("--line"), width: 1 },
      ticks: { show: false },
    };
    const font = "11px system-ui, sans-serif";
    return {
      ...this.#size(),
      padding: [8, 12, 0, 0],
      scales: {
        x: { time: false, range: (_u, low, high) => stepRange(low, high) },
        y: { range: (_u, low, high) => (this.stack ? [0, (high || 1) * 1.05] : axisRange(low, high)) },
      },
      cursor: { sync: { key: "steps" }, points: { size: 6 }, y: false },
      legend: { live: true, markers: this.stack ? {} : { width: 0, fill: "transparent" } },
      axes: [
        { ...axis, font, size: 28, incrs: WHOLE },
        { ...axis, font, size: 52, values: (_u, ticks) => ticks.map(this.number) },
      ],
      series: [
        // Without a pointer in the chart, the legend has the latest values: of each curve its own.
        { label: "step", value: (_u, step) => (step === null ? "latest" : String(step)) },
        ...this.#raw.map((one) => this.#line(one)),
      ],
    };
  }

  #line(one) {
    return {
      label: visible(one.label),
      stroke: one.colour,
      fill: this.stack ? one.colour : undefined,
      dash: one.dash,
      width: this.stack ? 0 : 1.75,
      spanGaps: true,
      points: { show: one.points || false, size: 5, fill: one.colour },
      value: (_u, _value, series, i) => {
        const { values } = this.#raw[series - 1];
        return this.number(i === null ? latest(values) : values[i]);
      },
    };
  }
}
