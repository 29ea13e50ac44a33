// Curves over steps, drawn by uPlot (vendored in uplot/).
import { css, h, short, strokeOf, visible } from "./dom.js";

const uPlot = globalThis.uPlot;
export const COLOURS = Array.from({ length: 16 }, (_, i) => `--c${i + 1}`);
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [4, 4]];

export const colour = (number) => css(COLOURS[number % COLOURS.length]);
export const dash = (number) => DASHES[number % DASHES.length];

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

/** A chart that lives in `element` and is given data again and again. */
export class Chart {
  #plot = null;
  #shape = "";
  #raw = [];

  constructor(title, { stack = false, onclose = null } = {}) {
    this.stack = stack;
    this.body = h("div", { class: "plot" });
    const close = onclose && h("button", { class: "close", title: "remove", onclick: onclose }, "×");
    this.element = h(
      "section",
      { class: "card chart", "data-title": title },
      h("h2", {}, visible(title), close),
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
    return { width: Math.max(240, this.body.clientWidth), height: 210 };
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
      scales: {
        x: { time: false },
        y: { range: this.stack ? (_u, _low, high) => [0, (high || 1) * 1.05] : undefined },
      },
      cursor: { sync: { key: "steps" }, points: { size: 6 }, y: false },
      legend: { live: true, markers: this.stack ? {} : { width: 0, fill: "transparent" } },
      axes: [
        { ...axis, font, size: 28 },
        { ...axis, font, size: 52, values: (_u, ticks) => ticks.map(short) },
      ],
      series: [
        { label: "step", value: (_u, step) => (step === null ? "–" : String(step)) },
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
      value: (_u, _value, series, i) => short(i === null ? null : this.#raw[series - 1].values[i]),
    };
  }
}
