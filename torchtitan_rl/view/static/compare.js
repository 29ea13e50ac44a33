// Two rollouts side by side: samples of one group, or of the same group in two runs.
import { h, mark, select, short, shortText, visible } from "./dom.js";
import { conversation, factsOf, modeBar, sampleChips } from "./rollout.js";
import { get, store } from "./store.js";
import { addressOf } from "./table.js";

/** The first place where two lists differ; -1: nowhere. */
export function firstDifference(a, b) {
  const length = Math.max(a.length, b.length);
  for (let i = 0; i < length; i++) if (a[i] !== b[i]) return i;
  return -1;
}

async function sideOf(run, key, like) {
  if (key) return get("rollout", { run, key });
  // The same group of another run: the same sample of it, if it has that many.
  const { samples } = await get("group", { run, step: like.step ?? 0, group: like.group });
  const row = samples.find((one) => one.sample === like.sample) || samples[0];
  if (!row) throw new Error(`${run} has no group ${like.group}`);
  return get("rollout", { run, key: row.key });
}

function pane(side, rollout, talk, parameters) {
  const go = (changes) => addressOf("compare", { ...parameters, ...changes });
  const chips = sampleChips(rollout.samples, rollout.key, (row) =>
    go({ [side]: rollout.run, [`${side}_key`]: row.key }),
  );
  const runs =
    store.chosen.length > 1
      ? select(`run_${side}`, store.chosen, rollout.run, (run) => {
          const { [`${side}_key`]: _, ...rest } = parameters;
          location.hash = addressOf("compare", { ...rest, [side]: run });
        })
      : null;
  return h(
    "section",
    { class: "pane", "data-side": side },
    h("div", { class: "bar" }, runs, h("span", {}, `step ${short(rollout.step)}`), chips),
    h(
      "p",
      { class: "verdict" },
      mark(rollout.correct),
      ` reward ${short(rollout.reward)} · advantage ${short(rollout.advantage)} · ${visible(rollout.status)}`,
    ),
    talk.element,
    h("details", {}, h("summary", {}, "all values"), factsOf(rollout)),
  );
}

export function compare(root, parameters) {
  let closed = false;
  root.append(h("p", { class: "quiet" }, "Reading both rollouts …"));

  async function load() {
    try {
      // One side has a key; the other may only name a run.
      const known = parameters.a_key ? "a" : "b";
      const first = await sideOf(parameters[known], parameters[`${known}_key`]);
      const other = known === "a" ? "b" : "a";
      const second = await sideOf(parameters[other], parameters[`${other}_key`], first);
      if (!closed) show(known === "a" ? first : second, known === "a" ? second : first);
    } catch (error) {
      if (!closed) root.replaceChildren(h("p", { class: "warning" }, visible(error.message)));
    }
  }

  function show(a, b) {
    const full = { a: a.run, a_key: a.key, b: b.run, b_key: b.key };
    const differsAt = firstDifference(a.sequences[0]?.tokens || [], b.sequences[0]?.tokens || []);
    const talks = [a, b].map((rollout) => conversation(rollout, { differsAt }));
    const bar = modeBar([a, b], (colours) => talks.forEach((talk) => talk.paint(colours)));
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
        h("b", {}, visible(a.group === b.group ? a.group : `${a.group} and ${b.group}`)),
        a.expected_answer === ""
          ? null
          : h("span", {}, `expected: ${shortText(a.expected_answer).slice(0, 200)}`),
        h(
          "span",
          { class: "quiet" },
          differsAt < 0 ? "the tokens are the same" : "the red mark is the first difference",
        ),
      ),
      bar,
      h("div", { class: "panes" }, pane("a", a, talks[0], full), pane("b", b, talks[1], full)),
    );
  }
  load();
  return { close: () => (closed = true) };
}
