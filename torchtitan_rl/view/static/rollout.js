// One rollout: what was said, token by token, and everything that is known about it.
import { h, mark, short, shortText, showTip, visible } from "./dom.js";
import { get, store } from "./store.js";
import { addressOf, neighbour, rolloutAddress } from "./table.js";
import { allModes, modeOf, modesOf, palette, sequenceView } from "./tokens.js";

const MODE_KEY = "mode";

/** Buttons for what colours the tokens; `onchange(mode)` is called at once with the first. */
export function modeBar(rollouts, onchange) {
  const sequences = rollouts.flatMap((rollout) => rollout.sequences);
  const advantages = rollouts.flatMap((rollout) =>
    rollout.samples.map((row) => Math.abs(row.advantage ?? 0)),
  );
  const reach = { advantage: Math.max(0, ...advantages) };
  const modes = modesOf(sequences);
  const legend = h("span");
  let mode = localStorage.getItem(MODE_KEY) || "advantage";
  if (!modes.includes(mode)) mode = modes.find((name) => name !== "rl") || modes[0] || "rl";
  const buttons = allModes(sequences).map((name) => {
    const missing = !modes.includes(name);
    const title = missing ? "not saved; --trainer.export_tokens saves what the trainer computes" : "";
    return h(
      "button",
      { "data-mode": name, disabled: missing, title, onclick: () => choose(name) },
      modeOf(name).label,
    );
  });
  const choose = (name) => {
    localStorage.setItem(MODE_KEY, (mode = name));
    buttons.forEach((button) => button.classList.toggle("on", button.dataset.mode === mode));
    const colours = palette(mode, sequences, reach);
    legend.replaceChildren(colours.legend);
    onchange(colours);
  };
  if (sequences.length) choose(mode);
  return h(
    "div",
    { class: "bar modes" },
    h("span", { class: "quiet" }, "colour by"),
    h("span", { class: "buttons" }, buttons),
    legend,
  );
}

function message(one) {
  const extra = Object.entries(one).filter(([name, value]) => !["role", "content"].includes(name) && value);
  const kind = one.role === "assistant" ? "assistant" : one.role === "tool" ? "environment" : "prompt";
  return h(
    "article",
    { class: `turn ${kind}` },
    h("h3", {}, visible(one.role || "?")),
    h("div", { class: "text" }, visible(one.content || "")),
    extra.map(([name, value]) =>
      h("div", { class: "text extra" }, h("small", {}, `${visible(name)} `), visible(value)),
    ),
  );
}

/** The conversation of a rollout; with `tokens`, each one by itself. Returns {element, paint}. */
export function conversation(rollout, { tokens = true, differsAt = -1 } = {}) {
  const element = h("div", { class: "conversation" });
  if (!tokens || !rollout.sequences.length) {
    element.append(...rollout.messages.map(message));
    if (!rollout.messages.length) element.append(h("p", { class: "quiet" }, "Nothing was said."));
    return { element, paint: () => {} };
  }
  const views = rollout.sequences.map((columns, i) =>
    sequenceView(columns, { differsAt: i === 0 ? differsAt : -1 }),
  );
  views.forEach((view, i) => {
    if (views.length > 1) element.append(h("h2", {}, `sequence ${i + 1} of ${views.length}`));
    element.append(view.element);
  });
  return { element, paint: (colours) => views.forEach((view) => view.paint(colours)) };
}

/** The samples of a group, to go to. */
export function sampleChips(samples, current, address) {
  return h(
    "span",
    { class: "chips" },
    samples.map((row) =>
      h(
        "a",
        { class: `chip${row.key === current ? " on" : ""}`, href: address(row), "data-key": row.key },
        `${short(row.sample)} `,
        mark(row.correct),
        ` ${short(row.reward)}`,
      ),
    ),
  );
}

function facts(title, entries) {
  const rows = entries.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  if (!rows.length) return null;
  return h(
    "section",
    {},
    h("h2", {}, title),
    h(
      "table",
      { class: "details" },
      rows.map(([name, value]) => h("tr", {}, h("th", {}, visible(name)), h("td", {}, value))),
    ),
  );
}

const texts = (values) => Object.entries(values).map(([name, value]) => [name, shortText(value)]);

export function factsOf(rollout) {
  const versions =
    rollout.newest_version !== null && rollout.newest_version !== rollout.policy_version
      ? `${short(rollout.policy_version)} to ${short(rollout.newest_version)}`
      : short(rollout.policy_version);
  return [
    rollout.expected_answer === ""
      ? null
      : h(
          "section",
          {},
          h("h2", {}, "Expected answer"),
          h("div", { class: "text" }, shortText(rollout.expected_answer)),
        ),
    facts("Reward", [
      ["reward", h("b", {}, short(rollout.reward))],
      ["correct", mark(rollout.correct)],
      ["advantage", short(rollout.advantage)],
      ...texts(rollout.reward_parts),
    ]),
    facts("Rollout", [
      ["task", visible(rollout.task)],
      ["step", short(rollout.step)],
      ["split", visible(rollout.split)],
      ["group", visible(rollout.group)],
      ["sample", short(rollout.sample)],
      ["status", visible(rollout.status)],
      ["failure", visible(rollout.failure)],
      ["turns", short(rollout.turns)],
      ["tokens", short(rollout.tokens)],
      ["tool calls", rollout.tool_calls.map(visible).join(", ")],
      ["policy version", versions],
      ["temperature", short(rollout.temperature)],
    ]),
    facts("Seconds", texts(rollout.parts)),
    facts("State", texts(rollout.state)),
  ];
}

/** The other sample of the group whose reward differs most: the one to learn from. */
function contrast(rollout, key) {
  const distance = (row) => Math.abs((row.reward ?? 0) - (rollout.reward ?? 0));
  const others = rollout.samples.filter((row) => row.key !== key);
  return others.sort((a, b) => distance(b) - distance(a))[0];
}

export function rolloutView(root, { run, key }) {
  let rollout = null;
  let closed = false;
  let tokens = localStorage.getItem("as") !== "messages";
  root.append(h("p", { class: "quiet" }, "Reading the rollout …"));

  function show() {
    showTip(null, null);
    const talk = conversation(rollout, { tokens });
    const bar = tokens && rollout.sequences.length ? modeBar([rollout], talk.paint) : null;
    const as = (name, label) =>
      h(
        "button",
        {
          class: (name === "tokens") === tokens ? "on" : "",
          "data-as": name,
          onclick: () => {
            localStorage.setItem("as", name);
            tokens = name === "tokens";
            show();
          },
        },
        label,
      );
    const others = store.chosen.filter((name) => name !== run);
    const sibling = contrast(rollout, key);
    const side = (parameters) => addressOf("compare", { a: run, a_key: key, ...parameters });
    root.replaceChildren(
      h(
        "div",
        { class: "bar" },
        h(
          "a",
          {
            href: "#",
            onclick: (event) => {
              event.preventDefault();
              history.back();
            },
          },
          "← back",
        ),
        h("b", {}, visible(rollout.group)),
        sampleChips(rollout.samples, key, (row) => rolloutAddress(run, row)),
        sibling
          ? h(
              "a",
              { class: "button", id: "compare", href: side({ b: run, b_key: sibling.key }) },
              "compare samples",
            )
          : null,
        others.map((other) =>
          h("a", { class: "button compare-run", href: side({ b: other }) }, `compare with ${visible(other)}`),
        ),
        h(
          "span",
          { class: "bar hint" },
          h("button", { title: "key: k", onclick: () => move(-1) }, "← previous"),
          h("button", { title: "key: j", onclick: () => move(1) }, "next →"),
        ),
      ),
      h(
        "div",
        { class: "bar" },
        rollout.sequences.length
          ? h("span", { class: "buttons" }, as("tokens", "tokens"), as("messages", "messages"))
          : h("span", { class: "quiet" }, "messages: no tokens were saved for this rollout"),
        bar,
      ),
      rollout.problem && tokens ? h("p", { class: "warning" }, visible(rollout.problem)) : "",
      h("div", { class: "columns" }, talk.element, h("aside", {}, factsOf(rollout))),
    );
  }

  async function load() {
    try {
      rollout = await get("rollout", { run, key });
      if (!closed) show();
    } catch (error) {
      if (!closed) root.replaceChildren(h("p", { class: "warning" }, visible(error.message)));
    }
  }

  /** To the rollout after this one (+1) or before it (-1), in the table or else in the group. */
  async function move(by) {
    if (rollout === null) return;
    const place = rollout.samples.findIndex((row) => row.key === key);
    const row = (await neighbour(run, key, by)) || rollout.samples[place + by];
    if (row && !closed) location.replace(rolloutAddress(run, row));
  }

  load();
  return {
    // Opened by its address before the index had come to it.
    update: () => {
      if (rollout === null) load();
    },
    close: () => (closed = true),
    key(event) {
      const by = { j: 1, ArrowRight: 1, k: -1, ArrowLeft: -1 }[event.key];
      if (by !== undefined) move(by);
    },
  };
}
