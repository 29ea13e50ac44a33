// The frame around the views: tabs, runs, status, and which view the address names.
import { colour } from "./charts.js";
import { compare } from "./compare.js";
import { h, showTip, swatch, visible } from "./dom.js";
import { overview } from "./overview.js";
import { rolloutView } from "./rollout.js";
import { store } from "./store.js";
import { table } from "./table.js";
import { timeline } from "./timeline.js";

// A view is a function of its element and the address's parameters; it may return what to do after
// a change of the runs (`update`), on a key (`key`) and at its end (`close`).
const VIEWS = { overview, rollouts: table, rollout: rolloutView, compare, timeline };
const TAB_OF = { rollout: "rollouts", compare: "rollouts" };
let current = {};

function route() {
  const [path, query] = location.hash.replace(/^#\//, "").split("?");
  const name = Object.hasOwn(VIEWS, path) ? path : "overview";
  for (const tab of document.querySelectorAll("#tabs a"))
    tab.classList.toggle("on", tab.hash === `#/${TAB_OF[name] || name}`);
  current.close?.();
  document.querySelector("#runs details")?.removeAttribute("open");
  showTip(null, null);
  const root = document.getElementById("view");
  root.replaceChildren();
  root.className = name;
  current = VIEWS[name](root, Object.fromEntries(new URLSearchParams(query))) || {};
}

function showRuns() {
  const picker = document.getElementById("runs");
  if (store.runs.length < 2) {
    picker.replaceChildren(h("span", { class: "run" }, visible(store.runs[0] || "")));
    return;
  }
  const open = picker.querySelector("details")?.open;
  const boxes = store.runs.map((run) => {
    const box = h("input", { type: "checkbox", checked: store.chosen.includes(run) });
    box.addEventListener("change", () => {
      const others = store.chosen.filter((name) => name !== run);
      store.choose(box.checked ? [...others, run] : others);
    });
    return h("label", {}, box, visible(run));
  });
  const names = store.chosen.map(visible).join(", ") || "no run chosen";
  picker.replaceChildren(
    h("details", { open }, h("summary", { title: names }, names), h("div", { class: "menu" }, boxes)),
  );
}

/** Steps that are done: the last line of a run may be an evaluation alone. */
function stepsDone(metrics) {
  const last = [...metrics.keys()].reduce((a, b) => Math.max(a, b), -1);
  return last + (metrics.get(last)?.["time/step"] === undefined ? 0 : 1);
}

/** When a run has last written something: without it, one that was killed looks like a live one. */
function lastWritten(seconds) {
  const minutes = Math.floor((Date.now() / 1000 - seconds) / 60);
  if (minutes < 1) return "last written just now";
  const hours = Math.floor(minutes / 60);
  const ago = minutes < 60 ? `${minutes} min` : hours < 48 ? `${hours} h` : `${Math.floor(hours / 24)} days`;
  return `last written ${ago} ago`;
}

/** One line: how far a run has come, and what is wrong with its files. */
function statusOf(name, place) {
  const { status, metrics } = store.run(name);
  if (!status) return null;
  const several = store.chosen.length > 1;
  const total = Number(status.config?.steps) ? ` of ${Number(status.config.steps)}` : "";
  const parts = [
    ...(metrics.size ? [`${stepsDone(metrics)}${total} steps`] : []),
    `${status.rollouts.toLocaleString("en")} rollouts`,
    ...(status.written ? [lastWritten(status.written)] : []),
  ];
  const line = h(
    "div",
    { class: "line", "data-run": name },
    several ? h("b", {}, swatch(colour(place)), visible(name)) : null,
    h("span", {}, parts.join(" · ")),
  );
  if (status.files_pending || !status.scanned)
    line.append(
      h("progress", { max: status.files || 1, value: status.files - status.files_pending }),
      h(
        "span",
        { class: "indexing" },
        status.scanned ? `indexing rollouts, ${status.files_pending} files left` : "indexing rollouts …",
      ),
    );
  const broken = store.broken(name);
  if (broken)
    line.append(
      h(
        "span",
        { class: "warning broken", title: "these lines are cut off or no JSON" },
        `${broken} broken ${broken === 1 ? "line" : "lines"} skipped`,
      ),
    );
  if (status.error) line.append(h("span", { class: "warning" }, visible(status.error)));
  return line;
}

function showStatus() {
  const lines = store.chosen.map(statusOf).filter(Boolean);
  if (store.error) lines.push(h("div", { class: "line warning" }, visible(store.error)));
  document.getElementById("status").replaceChildren(...lines);
}

addEventListener("hashchange", route);
addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (!typing && !event.ctrlKey && !event.metaKey && !event.altKey) current.key?.(event);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", route);
store.subscribe(() => {
  showStatus();
  current.update?.();
});

setInterval(showStatus, 15_000); // time passes also where nothing is written

let shown = "";
store.subscribe(() => {
  if (shown === (shown = JSON.stringify([store.runs, store.chosen]))) return;
  showRuns();
});

try {
  await store.start();
  showRuns();
  route();
} catch (error) {
  document.getElementById("view").replaceChildren(h("p", { class: "warning" }, visible(error.message)));
}
