// Tokens, coloured by what is known of them.
import { h, short, showTip, swatch, visible, visibleToken } from "./dom.js";

const BLUE = "37, 99, 235";
const ORANGE = "234, 88, 12";
const AMBER = "217, 119, 6";
const MASKS = {
  RL: "37, 99, 235",
  echo: "147, 51, 234",
  none: null,
  "masked: ratio too high": "220, 38, 38",
  "masked: ratio too low": "234, 88, 12",
};
const VERSIONS = [
  "37, 99, 235",
  "22, 163, 74",
  "234, 88, 12",
  "147, 51, 234",
  "219, 39, 119",
  "13, 148, 136",
];
const MOST_TOKENS = 20000; // of a sequence, before the rest has to be asked for

// How to colour: `of` is a token's number, `scale` which end of it has which colour.
export const MODES = {
  advantage: { label: "advantage", scale: "both", of: (c, i) => c.advantage[i] },
  token_logprobs: { label: "generator logprob", scale: "low", of: (c, i) => c.token_logprobs[i] },
  trainer_logprobs: { label: "trainer logprob", scale: "low", of: (c, i) => c.trainer_logprobs[i] },
  mismatches: { label: "mismatch", scale: "both", of: (c, i) => c.mismatches[i] },
  ratios: {
    label: "ratio",
    scale: "both",
    of: (c, i) => (c.ratios[i] > 0 ? Math.log(c.ratios[i]) : null),
    text: (v) => short(Math.exp(v)),
  },
  entropies: { label: "entropy", scale: "high", of: (c, i) => c.entropies[i] },
  rl: { label: "mask", kinds: maskOf },
  token_versions: {
    label: "policy version",
    kinds: (c, i) => (c.token_versions[i] === null ? null : `version ${c.token_versions[i]}`),
  },
};

/** How to colour by a column; one that is none of ours is shown under its own name. */
export function modeOf(name) {
  return Object.hasOwn(MODES, name)
    ? MODES[name]
    : { label: name.replaceAll("_", " "), scale: "both", of: (c, i) => c[name][i] };
}

/** All modes: ours, and the columns that the generator of a run has declared. */
export function allModes(sequences) {
  return [...new Set([...Object.keys(MODES), ...sequences.flatMap((columns) => columns.own)])];
}

function maskOf(columns, i) {
  if (columns.masked?.[i] > 0) return "masked: ratio too high";
  if (columns.masked?.[i] < 0) return "masked: ratio too low";
  if (columns.rl[i]) return "RL";
  return columns.echo?.[i] ? "echo" : "none";
}

/** The modes for which some token of some sequence has a value. */
export function modesOf(sequences) {
  return allModes(sequences).filter((mode) =>
    sequences.some((columns) => columns[mode]?.some((value) => value !== null)),
  );
}

/**
 * {colour(columns, i): CSS or "", legend: element} for all sequences shown together. `reach` widens
 * the scale of a mode, as to the advantages of the whole group.
 */
export function palette(mode, sequences, reach = {}) {
  return modeOf(mode).kinds ? kinds(mode, sequences) : scale(mode, sequences, reach[mode] || 0);
}

function kinds(mode, sequences) {
  const found = new Set(
    sequences.flatMap((columns) => columns.tokens.map((_, i) => MODES[mode].kinds(columns, i))),
  );
  found.delete(null);
  const order = Object.keys(MASKS);
  const names = [...found].sort((a, b) => order.indexOf(a) - order.indexOf(b) || (a < b ? -1 : 1));
  const colours = new Map(
    names.map((name, i) => [name, mode === "rl" ? MASKS[name] : VERSIONS[i % VERSIONS.length]]),
  );
  const paint = (rgb) => (rgb ? `rgba(${rgb}, 0.35)` : "");
  const legend = names.slice(0, 12).map((name) => h("span", {}, swatch(paint(colours.get(name))), name));
  return {
    colour: (columns, i) => paint(colours.get(MODES[mode].kinds(columns, i))),
    legend: h("span", { class: "legend" }, legend),
  };
}

function scale(mode, sequences, reach) {
  const { of, scale: kind, text = short } = modeOf(mode);
  let low = 0;
  let high = 0;
  for (const columns of sequences)
    columns[mode]?.forEach((_, i) => {
      const value = of(columns, i) ?? 0;
      low = Math.min(low, value);
      high = Math.max(high, value);
    });
  const most = Math.max(-low, high, reach) || 1;
  const paint = (value) => {
    // By the square root: a few tokens are far from the others, and those must still be seen.
    const rgb = kind === "both" ? (value > 0 ? BLUE : ORANGE) : AMBER;
    return `rgba(${rgb}, ${(0.6 * Math.sqrt(Math.min(1, Math.abs(value) / most))).toFixed(3)})`;
  };
  const bar = h("span", { class: "gradient" });
  const from = low < 0 || reach ? -most : 0;
  const to = high > 0 || reach ? most : 0;
  bar.style.background = `linear-gradient(to right, ${paint(from)}, ${paint((from + to) / 2)}, ${paint(to)})`;
  return {
    colour: (columns, i) => {
      const value = columns[mode] ? of(columns, i) : null;
      return value === null || value === undefined ? "" : paint(value);
    },
    legend: h("span", { class: "legend" }, text(from), bar, text(to)),
  };
}

/** Everything known of a token. */
function details(columns, i) {
  const rows = [
    ["token", visibleToken(columns.text[i])],
    ["id", String(columns.tokens[i])],
    ["place", i < columns.prompt ? `${i} of the prompt` : `${i - columns.prompt} of the completion`],
  ];
  for (const mode of allModes([columns]))
    if (mode !== "rl" && columns[mode]) rows.push([modeOf(mode).label, short(columns[mode][i])]);
  if (columns.positions) rows.push(["position", short(columns.positions[i])]);
  rows.push(["mask", maskOf(columns, i)]);
  if (columns.echo_alpha?.[i]) rows.push(["echo weight", short(columns.echo_alpha[i])]);
  if (columns.token_logprobs?.[i] !== null && columns.token_logprobs !== undefined)
    rows.push(["probability", `${short(100 * Math.exp(columns.token_logprobs[i]))} %`]);
  return h(
    "table",
    { class: "details" },
    rows.map(([name, value]) => h("tr", {}, h("th", {}, name), h("td", {}, value))),
  );
}

/** The turns of one sequence; returns {element, paint(palette)}. */
export function sequenceView(columns, { differsAt = -1 } = {}) {
  const spans = [];
  const element = h("div", { class: "sequence" });
  const span = (i) => {
    const classes = `t${columns.sampled[i] ? "" : " given"}${i === differsAt ? " differs" : ""}`;
    const made = h("span", { class: classes, "data-i": i }, visibleToken(columns.text[i]));
    spans[i] = made;
    return made;
  };
  let left = MOST_TOKENS;
  for (const { who, start, end } of columns.segments) {
    const tokens = h("div", { class: "tokens" });
    const shownTo = Math.min(end, start + Math.max(0, left));
    left -= end - start;
    const fill = (from, to) => {
      for (let i = from; i < to; i++) tokens.append(span(i));
    };
    fill(start, shownTo);
    const kind = ["assistant", "prompt"].includes(who) ? who : "environment";
    const block = h(
      "article",
      { class: `turn ${kind}` },
      h("h3", {}, visible(who), h("small", {}, ` ${end - start} tokens`)),
      tokens,
    );
    if (shownTo < end)
      block.append(
        h(
          "button",
          {
            onclick: (event) => {
              fill(shownTo, end);
              event.target.remove();
              repaint();
            },
          },
          `show ${end - shownTo} more tokens`,
        ),
      );
    element.append(block);
  }
  let last = null;
  const repaint = () => spans.forEach((made, i) => (made.style.backgroundColor = last.colour(columns, i)));
  element.addEventListener("mousemove", (event) => {
    const i = event.target.dataset?.i;
    showTip(event, i === undefined ? null : details(columns, Number(i)));
  });
  element.addEventListener("mouseleave", (event) => showTip(event, null));
  return {
    element,
    paint: (colours) => {
      last = colours;
      repaint();
    },
  };
}
