// Curves of the chosen runs: reward, accuracy, where the time of a step goes, and any other metric.
import { Chart, colour, dash, smoothed } from "./charts.js";
import { h, select, visible } from "./dom.js";
import { store } from "./store.js";

const FIRST_EXTRAS = ["entropy/all/mean", "mismatch_kl/all/mean", "completion_tokens/all/mean", "policy_age/all/mean"];

const EVERY = "every one";

/** The tasks among keys such as reward/<task>/mean; `all` first. */
export function tasksOf(keys, metric) {
  const found = keys
    .map((key) => key.split("/"))
    .filter((parts) => parts[0] === metric && parts.at(-1) === "mean");
  const names = [...new Set(found.map((parts) => parts.slice(1, -1).join("/")))];
  // With one task, "all" and the task are the same curve.
  const tasks = names.filter((name) => name !== "all");
  return tasks.length === 1 ? tasks : names.sort((a, b) => (b === "all") - (a === "all") || (a < b ? -1 : 1));
}

/** The phases of a step's time, in the order they happen. */
export function phasesOf(keys) {
  const order = ["generate", "grade", "train", "sync", "evaluate"];
  const place = (name) => (order.indexOf(name) + 1 || order.length + 1) * 1000;
  const found = keys
    .filter((key) => key.startsWith("time/") && key !== "time/step")
    .map((key) => key.slice(5));
  return found.filter((name) => !name.includes("/")).sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
}

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

/** Series of some keys: with one run a colour a key; with several a colour a run, a dash a key. */
function seriesOf(steps, keys, smooth) {
  const several = store.chosen.length > 1;
  return store.chosen.flatMap((run, r) =>
    keys
      .map(({ key, label }, k) => {
        const values = valuesOf(run, key, steps);
        const known = values.filter((value) => value !== null).length;
        if (!known) return null;
        return {
          label: several ? `${run} · ${label}` : label,
          values: smoothed(values, smooth),
          colour: colour(several ? r : k),
          dash: several ? dash(k) : [],
          points: known < 2 || known * 2 < steps.length,
        };
      })
      .filter(Boolean),
  );
}

export function overview(root) {
  let smooth = Number(localStorage.getItem("smooth") || 0);
  let extras = JSON.parse(localStorage.getItem("metrics") || "null");
  let task = sessionStorage.getItem("task");
  const charts = new Map();
  const grid = h("div", { class: "grid" });
  const chooser = h("select", { name: "metric", "aria-label": "add a metric" });
  chooser.addEventListener("change", () => {
    if (chooser.value) setExtras([...extras, chooser.value]);
  });
  const levels = [
    ["0", "as it is"],
    ["0.6", "a little"],
    ["0.9", "much"],
  ];
  const smoothing = select("smooth", levels, String(smooth), (value) => {
    localStorage.setItem("smooth", (smooth = Number(value)));
    update();
  });
  const tasks = h("span");
  const configs = h("div");
  const empty = h("p", { class: "quiet" }, "No step is done yet; this page follows the run.");
  root.append(
    h("div", { class: "bar" }, tasks, h("label", {}, "smooth ", smoothing), chooser),
    empty,
    grid,
    configs,
  );

  function setExtras(keys) {
    localStorage.setItem("metrics", JSON.stringify((extras = [...new Set(keys)])));
    update();
  }

  /** A chart by its id, made when it is first asked for. */
  function chart(id, title, options) {
    if (!charts.has(id)) {
      charts.set(id, new Chart(title, options));
      grid.append(charts.get(id).element);
    }
    return charts.get(id);
  }

  function wanted(keys) {
    // Several runs, several tasks: too many curves for one chart.
    const shownTask =
      task ?? (store.chosen.length > 1 && tasksOf(keys, "reward").includes("all") ? "all" : EVERY);
    showTasks(tasksOf(keys, "reward"), shownTask);
    const wantedTask = (name) => shownTask === EVERY || name === shownTask;
    const named = (metric) =>
      tasksOf(keys, metric)
        .filter(wantedTask)
        .map((task) => ({ key: `${metric}/${task}/mean`, label: task || metric }));
    const held = (metric) =>
      keys
        .filter(
          (key) =>
            key === `eval/${metric}` ||
            (key.startsWith(`eval/${metric}/`) && wantedTask(key.slice(`eval/${metric}/`.length))),
        )
        .map((key) => ({ key, label: key.replace(`eval/${metric}`, "held out").replace("/", " ") }));
    return [
      { id: "reward", title: "Reward", keys: [...named("reward"), ...held("reward")] },
      { id: "accuracy", title: "Accuracy", keys: [...named("accuracy"), ...held("accuracy")] },
      ...extras.map((key) => ({
        id: `metric ${key}`,
        title: key,
        keys: [{ key, label: key }],
        options: { onclose: () => setExtras(extras.filter((other) => other !== key)) },
      })),
    ];
  }

  function showTimes() {
    const ids = [];
    for (const run of store.chosen) {
      const phases = phasesOf([...store.run(run).keys]);
      // The last line of a run may be an evaluation alone.
      const { metrics } = store.run(run);
      const steps = allSteps([run]).filter((step) =>
        phases.some((name) => metrics.get(step)[`time/${name}`] > 0),
      );
      if (!steps.length) continue;
      const title = store.chosen.length > 1 ? `Seconds of a step: ${run}` : "Seconds of a step";
      const series = phases.map((name, i) => ({
        label: name,
        values: valuesOf(run, `time/${name}`, steps),
        colour: colour(i),
      }));
      ids.push(title);
      chart(ids.at(-1), title, { stack: true }).show(steps, series);
    }
    return ids;
  }

  function update() {
    const keys = allKeys();
    if (extras === null && keys.length) extras = FIRST_EXTRAS.filter((key) => keys.includes(key));
    const steps = allSteps(store.chosen);
    empty.hidden = steps.length > 0;
    const shown = new Set();
    const specs = extras === null ? [] : wanted(keys);
    for (const [place, { id, title, keys: some, options }] of specs.entries()) {
      if (place === 2) for (const time of showTimes()) shown.add(time);
      const series = seriesOf(steps, some, smooth);
      if (!series.length) continue;
      shown.add(id);
      chart(id, title, options).show(steps, series);
    }
    if (specs.length <= 2) for (const time of showTimes()) shown.add(time);
    for (const [id, made] of charts)
      if (!shown.has(id)) {
        made.close();
        made.element.remove();
        charts.delete(id);
      }
    for (const [place, id] of [...shown].entries()) charts.get(id).element.style.order = place;
    showChooser(keys);
    showConfigs();
  }

  let known = "";
  function showConfigs() {
    const found = store.chosen
      .map((run) => [run, store.run(run).status?.config])
      .filter(([, config]) => config);
    if (known === (known = found.map(([run]) => run).join("\n"))) return;
    const row = ([name, value]) => h("tr", {}, h("th", {}, visible(name)), h("td", {}, visible(value)));
    const card = ([run, config]) =>
      h(
        "details",
        { class: "card config" },
        h("summary", {}, `Config of ${visible(run)}`),
        h("table", { class: "details" }, Object.entries(config).map(row)),
      );
    configs.replaceChildren(...found.map(card));
  }

  let offeredTasks = "";
  function showTasks(names, shown) {
    if (offeredTasks === (offeredTasks = JSON.stringify([names, shown]))) return;
    tasks.hidden = names.length < 2;
    const choose = (value) => {
      sessionStorage.setItem("task", (task = value));
      update();
    };
    tasks.replaceChildren("task ", select("task", [EVERY, ...names], shown, choose));
  }

  let offered = "";
  function showChooser(keys) {
    const rest = keys.filter((key) => key !== "step" && !(extras || []).includes(key));
    if (offered === (offered = rest.join("\n"))) return;
    const groups = Map.groupBy(rest, (key) => key.split("/")[0]);
    chooser.replaceChildren(
      h("option", { value: "" }, "add a metric …"),
      ...[...groups].map(([name, members]) =>
        h(
          "optgroup",
          { label: visible(name) },
          members.map((key) => h("option", { value: key }, visible(key))),
        ),
      ),
    );
  }

  update();
  return { update, close: () => charts.forEach((made) => made.close()) };
}
