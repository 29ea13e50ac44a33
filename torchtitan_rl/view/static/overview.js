// Curves of the chosen runs: reward, accuracy, where the time of a step goes, and any other metric.
import { Chart, activityColour, colour, dash, smoothed } from "./charts.js";
import { h, select, visible } from "./dom.js";
import { defaultCharts, phasesOf, tasksOf } from "./metrics.js";
import { notesView } from "./notes.js";
import { settingsView } from "./settings.js";
import { store } from "./store.js";

const EACH = "each task";
const SECONDS = "seconds";

function allKeys() {
  return [...new Set(store.chosen.flatMap((run) => [...store.run(run).keys]))].sort();
}

function allSteps(runs) {
  return [...new Set(runs.flatMap((run) => [...store.run(run).metrics.keys()]))].sort((a, b) => a - b);
}

function valuesOf(run, key, steps) {
  const { metrics } = store.run(run);
  return steps.map((step) => {
    const value = metrics.get(step)?.[key];
    return typeof value === "number" ? value : null;
  });
}

/** Whether a metric of some chosen run is ever not 0. */
function moves(key) {
  return store.chosen.some((run) => [...store.run(run).metrics.values()].some((row) => row[key]));
}

/** Whether a curve has so few values that each needs a point: one, or some of its steps only. */
export function isSparse(values) {
  const known = values.flatMap((value, i) => (value === null ? [] : [i]));
  return known.length < 2 || known.length * 2 < known.at(-1) - known[0] + 1;
}

/** Series of some keys: with one run a colour a key; with several a colour a run, a dash a key. */
function seriesOf(steps, keys, smooth) {
  const several = store.chosen.length > 1;
  const found = store.chosen.flatMap((run, r) =>
    keys.map(({ key, label, like }, k) => ({ run, r, label, like, k, values: valuesOf(run, key, steps) })),
  );
  const shown = found.filter(({ values }) => values.some((value) => value !== null));
  const alone = new Set(shown.map(({ label }) => label)).size === 1;
  return shown.map(({ run, r, label, like, k, values }) => ({
    label: !several ? label : alone || label === "all" ? run : `${run} · ${label}`,
    values: smoothed(values, smooth),
    colour: colour(several ? r : (like ?? k)),
    dash: dash(several ? k : like === undefined ? 0 : 1),
    points: isSparse(values),
  }));
}

/** Charts that the user has added and removed; in this browser, for all runs. */
class Choice {
  constructor() {
    const kept = JSON.parse(localStorage.getItem("charts") || "{}");
    this.added = kept.added || [];
    this.removed = kept.removed || [];
  }

  #keep() {
    localStorage.setItem("charts", JSON.stringify({ added: this.added, removed: this.removed }));
  }

  add(id) {
    if (this.removed.includes(id)) this.removed = this.removed.filter((other) => other !== id);
    else this.added = [...new Set([...this.added, id])];
    this.#keep();
  }

  remove(id) {
    if (this.added.includes(id)) this.added = this.added.filter((other) => other !== id);
    else this.removed = [...new Set([...this.removed, id])];
    this.#keep();
  }
}

export function overview(root) {
  let smooth = Number(localStorage.getItem("smooth") || 0);
  let task = sessionStorage.getItem("task");
  const choice = new Choice();
  const charts = new Map();
  const grid = h("div", { class: "grid" });
  const chooser = h("select", { name: "metric", "aria-label": "add a chart" });
  chooser.addEventListener("change", () => {
    if (chooser.value) choice.add(chooser.value);
    update();
  });
  const levels = [
    ["0", "off"],
    ["0.6", "some"],
    ["0.9", "strong"],
  ];
  const smoothing = select("smooth", levels, String(smooth), (value) => {
    localStorage.setItem("smooth", (smooth = Number(value)));
    update();
  });
  const tasks = h("label");
  const notes = notesView();
  const settings = settingsView();
  const empty = h(
    "p",
    { class: "quiet" },
    "No step is finished yet. The charts appear here without a reload.",
  );
  root.append(
    h("div", { class: "bar" }, tasks, h("label", {}, "smoothing ", smoothing), chooser),
    notes.element,
    empty,
    grid,
    settings.element,
  );

  /** A chart by its id, made when it is first asked for. */
  function chart(id, title, options) {
    if (!charts.has(id)) {
      const onclose = () => {
        choice.remove(options.choice ?? id);
        update();
      };
      charts.set(id, new Chart(title, { ...options, onclose }));
      grid.append(charts.get(id).element);
    }
    return charts.get(id);
  }

  /** The charts to show, but for the seconds of a step; and those that the user has removed. */
  function wanted(keys) {
    // Several runs, several tasks: too many curves for one chart.
    const names = tasksOf(keys, "reward");
    const shown = task ?? (store.chosen.length > 1 && names.includes("all") ? "all" : EACH);
    showTasks(names, shown);
    // Of runs with different tasks, each has a curve for its own.
    const apart = shown === EACH || !names.includes(shown);
    const defaults = defaultCharts(keys, (name) => apart || name === shown, moves);
    const own = choice.added.map((key) => ({ id: key, title: key, keys: [{ key, label: "value" }] }));
    const kept = defaults.filter(({ id }) => !choice.removed.includes(id));
    return { specs: [...kept, ...own], removed: defaults.filter((one) => !kept.includes(one)) };
  }

  function showSeconds() {
    const ids = [];
    for (const run of choice.removed.includes(SECONDS) ? [] : store.chosen) {
      const phases = phasesOf([...store.run(run).keys]);
      // The last line of a run may be an evaluation alone.
      const { metrics } = store.run(run);
      const steps = allSteps([run]).filter((step) =>
        phases.some((name) => metrics.get(step)[`time/${name}`] > 0),
      );
      if (!steps.length) continue;
      const title = store.chosen.length > 1 ? `Seconds of a step: ${run}` : "Seconds of a step";
      const series = phases.map((name) => ({
        label: name,
        values: valuesOf(run, `time/${name}`, steps),
        colour: activityColour(name),
      }));
      ids.push(`${SECONDS} ${title}`);
      chart(ids.at(-1), title, { stack: true, choice: SECONDS }).show(steps, series);
    }
    return ids;
  }

  function update() {
    const keys = allKeys();
    const steps = allSteps(store.chosen);
    empty.hidden = steps.length > 0;
    const { specs, removed } = wanted(keys);
    const shown = [];
    for (const { id, title, keys: some, ...options } of specs) {
      const series = seriesOf(steps, some, smooth);
      if (!series.length) continue;
      shown.push(id);
      chart(id, title, options).show(steps, series);
    }
    shown.splice(2, 0, ...showSeconds()); // after reward and accuracy
    for (const [id, made] of charts)
      if (!shown.includes(id)) {
        made.close();
        made.element.remove();
        charts.delete(id);
      }
    for (const [place, id] of shown.entries()) charts.get(id).element.style.order = place;
    const gone = removed.map(({ id, title }) => [id, title]);
    if (choice.removed.includes(SECONDS)) gone.push([SECONDS, "Seconds of a step"]);
    showChooser(keys, gone);
    notes.update();
    settings.update();
  }

  let offeredTasks = "";
  function showTasks(names, shown) {
    if (offeredTasks === (offeredTasks = JSON.stringify([names, shown]))) return;
    tasks.hidden = names.length < 2;
    const choose = (value) => {
      sessionStorage.setItem("task", (task = value));
      update();
    };
    const options = names.map((name) => (name === "all" ? [name, "all tasks together"] : name));
    tasks.replaceChildren("task ", select("task", [EACH, ...options], shown, choose));
  }

  let offered = "";
  function showChooser(keys, gone) {
    const rest = keys.filter((key) => key !== "step" && !choice.added.includes(key));
    if (offered === (offered = JSON.stringify([rest, gone]))) return;
    const option = ([id, title]) => h("option", { value: id }, visible(title));
    const group = (name, members) => h("optgroup", { label: visible(name) }, members.map(option));
    const groups = Map.groupBy(rest, (key) => key.split("/")[0]);
    chooser.replaceChildren(
      h("option", { value: "" }, "add a chart …"),
      ...(gone.length ? [group("removed", gone)] : []),
      ...[...groups].map(([name, members]) =>
        group(
          name,
          members.map((key) => [key, key]),
        ),
      ),
    );
  }

  update();
  return { update, close: () => charts.forEach((made) => made.close()) };
}
