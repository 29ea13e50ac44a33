// The frame around the views: tabs, runs, status, and which view the address names.
import { compare } from "./compare.js";
import { h, showTip, visible } from "./dom.js";
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

/** How long ago a run has last written something: one that was killed looks like a live one else. */
function lastWritten(seconds) {
  const minutes = Math.floor((Date.now() / 1000 - seconds) / 60);
  if (minutes < 1) return "written just now";
  const hours = Math.floor(minutes / 60);
  const ago = minutes < 60 ? `${minutes} min` : hours < 48 ? `${hours} h` : `${Math.floor(hours / 24)} days`;
  return `last written ${ago} ago`;
}

function showStatus() {
  const parts = [];
  for (const name of store.chosen) {
    const { status, metrics } = store.run(name);
    if (!status) continue;
    const rollouts = status.rollouts.toLocaleString("en");
    const total = Number(status.config?.steps) ? ` of ${Number(status.config.steps)}` : "";
    const steps = metrics.size ? `${stepsDone(metrics)}${total} steps · ` : "";
    const written = status.written ? ` · ${lastWritten(status.written)}` : "";
    const prefix = store.chosen.length > 1 ? `${visible(name)}: ` : "";
    parts.push(h("span", {}, `${prefix}${steps}${rollouts} rollouts${written}`));
    if (status.files_pending || !status.scanned)
      parts.push(
        h("progress", { max: status.files || 1, value: status.files - status.files_pending }),
        h(
          "span",
          { class: "indexing" },
          status.scanned ? `indexing, ${status.files_pending} files to go` : "indexing …",
        ),
      );
    const broken = store.broken(name);
    if (broken)
      parts.push(
        h(
          "span",
          { class: "warning broken", title: "cut off or no JSON; they are left out" },
          `${broken} broken ${broken === 1 ? "line" : "lines"} skipped`,
        ),
      );
    if (status.error) parts.push(h("span", { class: "warning" }, visible(status.error)));
  }
  if (store.error) parts.push(h("span", { class: "warning" }, visible(store.error)));
  document.getElementById("status").replaceChildren(...parts);
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
