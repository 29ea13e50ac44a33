// Settings of the chosen runs, and in which of them the runs differ.
import { colour } from "./charts.js";
import { h, swatch, visible } from "./dom.js";
import { store } from "./store.js";

const UNIMPORTANT = new Set(["run_name", "output_dir", "resume"]); // of every run its own

/** Names of the settings that not all of the configs have the same value of. */
export function differences(configs) {
  const names = [...new Set(configs.flatMap((config) => Object.keys(config)))];
  return names.filter(
    (name) => !UNIMPORTANT.has(name) && configs.some((config) => config[name] !== configs[0][name]),
  );
}

/** A table with a row for each setting, and a column for each run. */
function table(names, found) {
  const differing = new Set(differences(found.map(([, config]) => config)));
  const title = ([run], i) => h("th", {}, swatch(colour(i)), visible(run));
  const cell = (name) =>
    function value([run, config]) {
      return h("td", { "data-run": visible(run) }, visible(config[name] ?? "–") || '""');
    };
  const row = (name) =>
    h(
      "tr",
      { class: differing.has(name) && found.length > 1 ? "differs" : "", "data-name": name },
      h("th", {}, visible(name)),
      found.map(cell(name)),
    );
  const several = found.length > 1;
  return h(
    "table",
    { class: `details settings${several ? " several" : ""}` },
    several ? h("thead", {}, h("tr", {}, h("th", {}, "setting"), found.map(title))) : null,
    h("tbody", {}, names.map(row)),
  );
}

/** All settings, with a field that leaves those whose names contain a text. */
function all(found) {
  const names = [...new Set(found.flatMap(([, config]) => Object.keys(config)))];
  const made = table(names, found);
  const find = h("input", { type: "search", placeholder: "find a setting", "aria-label": "find a setting" });
  find.addEventListener("input", () => {
    const wanted = find.value.trim().toLowerCase();
    for (const row of made.tBodies[0].rows)
      row.hidden = !row.dataset.name.toLowerCase().includes(wanted);
  });
  const title = found.length > 1 ? "All settings" : "Settings";
  return h("details", { class: "card config" }, h("summary", {}, title), find, made);
}

export function settingsView() {
  const element = h("div");
  let known = "";
  return {
    element,
    update() {
      const found = store.chosen
        .map((run) => [run, store.run(run).status?.config])
        .filter(([, config]) => config);
      const versions = found.map(([run]) => [run, store.run(run).status.config_version]);
      if (known === (known = JSON.stringify(versions))) return;
      if (!found.length) return element.replaceChildren();
      const names = differences(found.map(([, config]) => config));
      const differing = h(
        "section",
        { class: "card config differing" },
        h("h2", {}, "Settings that differ"),
        names.length
          ? table(names, found)
          : h("p", { class: "quiet" }, "None: the runs have the same settings."),
      );
      element.replaceChildren(...(found.length > 1 ? [differing] : []), all(found));
    },
  };
}
