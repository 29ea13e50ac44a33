// The table of rollouts: filtered and sorted by the server, a page at a time.
import { h, mark, select, short, visible } from "./dom.js";
import { get, store } from "./store.js";

const COLUMNS = [
  ["step", "step"],
  ["task", "task"],
  ["split", "split"],
  ["group", "group"],
  ["sample", "sample"],
  ["correct", "correct"],
  ["reward", "reward"],
  ["advantage", "advantage"],
  ["status", "status"],
  ["turns", "turns"],
  ["tokens", "tokens"],
  ["policy_version", "version"],
  ["seconds", "seconds"],
];
const NUMBERS = new Set([
  "step",
  "sample",
  "reward",
  "advantage",
  "turns",
  "tokens",
  "policy_version",
  "seconds",
]);
const FILTERS = [
  "task",
  "split",
  "status",
  "correct",
  "step_min",
  "step_max",
  "reward_min",
  "reward_max",
  "text",
  "group",
];

export const addressOf = (view, parameters) => `#/${view}?${new URLSearchParams(parameters)}`;
export const rolloutAddress = (run, row) => addressOf("rollout", { run, key: row.key });

// What was listed last: j and k go through it when a rollout is open.
export const listed = { run: "", query: {}, rows: [], next: null };

/** The rollout before (-1) or after (+1) one in the list, fetching on at its end; null: none. */
export async function neighbour(run, key, direction) {
  const place = listed.run === run ? listed.rows.findIndex((row) => row.key === key) : -1;
  if (place < 0) return null;
  if (place + direction >= listed.rows.length && listed.next !== null) {
    const page = await get("rollouts", { ...listed.query, run, start: listed.next });
    listed.rows.push(...page.rows);
    listed.next = page.next;
  }
  return listed.rows[place + direction] || null;
}

function cell(name, row) {
  if (name === "correct") return h("td", {}, mark(row.correct));
  if (NUMBERS.has(name)) return h("td", { class: "number" }, short(row[name]));
  if (name === "status")
    return h("td", { class: row.status === "finished" ? "" : "odd" }, visible(row.status));
  return h("td", { title: visible(row[name] ?? "") }, visible(row[name] ?? ""));
}

export function table(root, parameters) {
  const run = store.chosen.includes(parameters.run) ? parameters.run : store.chosen[0];
  if (run === undefined) return void root.append(h("p", { class: "quiet" }, "No run is chosen."));
  const query = { ...parameters };
  delete query.run;
  delete query.back;
  let page = null;
  let at = -1;
  let asked = 0;
  let version = null;
  const starts = JSON.parse(parameters.back || "[]");
  const filters = h("form", { class: "bar filters", onsubmit: (event) => event.preventDefault() });
  const body = h("tbody");
  const note = h("div", { class: "bar paging" });

  const go = (changes) => {
    const next = { run, ...query, ...changes };
    location.hash = addressOf(
      "rollouts",
      Object.fromEntries(Object.entries(next).filter(([, value]) => value !== "")),
    );
  };
  const filter = (changes) => go({ start: "", back: "", ...changes });

  function header([name, title]) {
    const on = (query.sort || "step") === name;
    const up = query.order === "ascending";
    const order = on && !up ? "ascending" : "descending";
    const button = h(
      "button",
      { onclick: () => filter({ sort: name, order }) },
      title,
      on ? (up ? " ↑" : " ↓") : "",
    );
    return h(
      "th",
      {
        class: NUMBERS.has(name) ? "number" : "",
        "aria-sort": on ? (up ? "ascending" : "descending") : null,
      },
      button,
    );
  }

  function line(row, i) {
    const open = () => (location.hash = rolloutAddress(run, row));
    const link = h(
      "a",
      { href: rolloutAddress(run, row) },
      visible(row.preview.replace(/\s+/g, " ")) || "(nothing said)",
    );
    const cells = COLUMNS.map(([name]) => cell(name, row));
    return h(
      "tr",
      { onclick: open, class: i === at ? "at" : "", "data-key": row.key },
      cells,
      h("td", { class: "preview" }, link),
    );
  }

  function showFilters(facets) {
    const any = (name) => ["", `any ${name}`];
    const choice = (name) =>
      select(name, [any(name), ...facets[name]], query[name] || "", (value) => filter({ [name]: value }));
    const input = (name, type, hint) =>
      h("input", {
        name,
        type,
        step: "any",
        placeholder: hint,
        "aria-label": hint,
        value: query[name] || "",
        onchange: (event) => filter({ [name]: event.target.value }),
      });
    const correct = [any("correctness"), ["true", "correct"], ["false", "wrong"]];
    const runs =
      store.chosen.length > 1 ? select("run", store.chosen, run, (value) => filter({ run: value })) : null;
    filters.replaceChildren(
      ...[runs].filter(Boolean),
      choice("task"),
      choice("split"),
      choice("status"),
      select("correct", correct, query.correct || "", (value) => filter({ correct: value })),
      h(
        "span",
        { class: "range" },
        "step ",
        input("step_min", "number", "from"),
        input("step_max", "number", "to"),
      ),
      h(
        "span",
        { class: "range" },
        "reward ",
        input("reward_min", "number", "from"),
        input("reward_max", "number", "to"),
      ),
      input("text", "search", "search the text"),
      ...(query.group ? [h("span", { class: "chip" }, `group ${visible(query.group)}`)] : []),
      ...(FILTERS.some((name) => query[name])
        ? [
            h(
              "button",
              {
                type: "button",
                onclick: () => filter(Object.fromEntries(FILTERS.map((name) => [name, ""]))),
              },
              "clear",
            ),
          ]
        : []),
    );
  }

  function showPaging() {
    const start = Number(query.start || 0);
    const count = page.total.toLocaleString("en");
    const text = query.text
      ? `${page.rows.length} found; searched ${page.searched.toLocaleString("en")} of ${count} rollouts`
      : page.rows.length
        ? `${(start + 1).toLocaleString("en")}–${(start + page.rows.length).toLocaleString("en")} of ${count} rollouts`
        : `${count} rollouts`;
    const back = h("button", { disabled: !starts.length, onclick: () => history.back() }, "← before");
    const more = () => go({ start: page.next, back: JSON.stringify([...starts, start].slice(-50)) });
    const onward = h(
      "button",
      { disabled: page.next === null, onclick: more },
      query.text ? "search on →" : "next →",
    );
    note.replaceChildren(
      h("span", { class: "count" }, text),
      back,
      onward,
      h("span", { class: "quiet hint" }, "j, k: up and down · Enter: open"),
    );
  }

  async function load() {
    const mine = ++asked;
    try {
      const answer = await get("rollouts", { ...query, run });
      if (mine !== asked) return;
      const first = page === null;
      page = answer;
      Object.assign(listed, { run, query, rows: [...page.rows], next: page.next });
      if (first || !filters.contains(document.activeElement)) showFilters(page.facets);
      body.replaceChildren(...page.rows.map(line));
      showPaging();
    } catch (error) {
      note.replaceChildren(h("span", { class: "warning" }, visible(error.message)));
    }
  }

  function move(by) {
    at = Math.max(0, Math.min(body.rows.length - 1, at + by));
    [...body.rows].forEach((row, i) => row.classList.toggle("at", i === at));
    body.rows[at]?.scrollIntoView({ block: "nearest" });
  }

  root.append(
    filters,
    h(
      "div",
      { class: "scroll" },
      h("table", {}, h("thead", {}, h("tr", {}, COLUMNS.map(header), h("th", {}, "said last"))), body),
    ),
    note,
  );
  version = store.run(run).status?.version;
  load();
  return {
    // Only the first page moves with the run; further down, rows must not jump.
    update() {
      const now = store.run(run).status?.version;
      if (now === version || Number(query.start || 0) > 0 || query.text) return;
      version = now;
      load();
    },
    key(event) {
      if (event.key === "j" || event.key === "ArrowDown") move(1);
      else if (event.key === "k" || event.key === "ArrowUp") move(-1);
      else if (event.key === "Enter" && at >= 0 && event.target === document.body)
        location.hash = rolloutAddress(run, page.rows[at]);
      else return;
      event.preventDefault();
    },
  };
}
