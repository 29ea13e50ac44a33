// The table of rollouts: filtered and sorted by the server, a page at a time.
import { h, mark, select, short, visible } from "./dom.js";
import { get, store } from "./store.js";

// Of the index: name, title, whether it is a number, and whether it is shown before anybody chooses.
const COLUMNS = [
  ["step", "step", true, true],
  ["task", "task", false, true],
  ["split", "split", false, true],
  ["group", "group", false, false],
  ["sample", "sample", true, false],
  ["correct", "correct", false, true],
  ["reward", "reward", true, true],
  ["advantage", "advantage", true, true],
  ["status", "status", false, true],
  ["turns", "turns", true, false],
  ["tokens", "tokens", true, true],
  ["policy_version", "policy version", true, false],
  ["seconds", "seconds", true, false],
];
const NUMBERS = new Set(COLUMNS.filter(([, , number]) => number).map(([name]) => name));
const TEXTS = [
  ["question", "question"],
  ["preview", "answer"],
  ["expected_answer", "expected"],
];
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

function cell([name, title], row) {
  const attributes = { "data-column": name, "data-title": title };
  if (name === "correct") return h("td", attributes, mark(row.correct));
  if (NUMBERS.has(name)) return h("td", { ...attributes, class: "number" }, short(row[name]));
  const text = visible(row[name] ?? "");
  const odd = name === "status" && row.status !== "finished";
  return h("td", { ...attributes, class: odd ? "odd" : "", title: text }, text);
}

function textCell([name, title], row, address) {
  const text = visible((row[name] ?? "").replace(/\s+/g, " ").trim());
  const attributes = { class: "words", "data-column": name, "data-title": title, title: text };
  if (name !== "preview") return h("td", attributes, text);
  return h("td", attributes, h("a", { href: address }, text || "(empty)"));
}

/** Names of the columns that are shown; in this browser, for all runs. */
function shownColumns() {
  const kept = JSON.parse(localStorage.getItem("columns") || "null");
  return new Set(kept || COLUMNS.filter(([, , , first]) => first).map(([name]) => name));
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
  const head = h("tr");
  const body = h("tbody");
  const shown = shownColumns();
  const columns = () => COLUMNS.filter(([name]) => shown.has(name));
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
        "data-column": name,
        "aria-sort": on ? (up ? "ascending" : "descending") : null,
      },
      button,
    );
  }

  function line(row, i) {
    const address = rolloutAddress(run, row);
    return h(
      "tr",
      { onclick: () => (location.hash = address), class: i === at ? "at" : "", "data-key": row.key },
      columns().map((column) => cell(column, row)),
      TEXTS.map((column) => textCell(column, row, address)),
    );
  }

  function showRows() {
    const texts = TEXTS.map(([name, title]) => h("th", { "data-column": name }, title));
    head.replaceChildren(...columns().map(header), ...texts);
    body.replaceChildren(...page.rows.map(line));
  }

  function columnPicker() {
    const box = ([name, title]) => {
      const made = h("input", { type: "checkbox", name: `column_${name}`, checked: shown.has(name) });
      made.addEventListener("change", () => {
        if (made.checked) shown.add(name);
        else shown.delete(name);
        localStorage.setItem("columns", JSON.stringify([...shown]));
        showRows();
      });
      return h("label", {}, made, title);
    };
    return h(
      "details",
      { class: "picker" },
      h("summary", { class: "button" }, "columns"),
      h("div", { class: "menu" }, COLUMNS.map(box)),
    );
  }

  /** For a phone, where rows are cards and have no header to click on. */
  function sorter() {
    const chosen = `${query.sort || "step"} ${query.order || "descending"}`;
    const options = COLUMNS.flatMap(([name, title]) => [
      [`${name} descending`, `sort by ${title} ↓`],
      [`${name} ascending`, `sort by ${title} ↑`],
    ]);
    const made = select("sort", options, chosen, (value) => {
      const [sort, order] = value.split(" ");
      filter({ sort, order });
    });
    made.classList.add("sorter");
    return made;
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
      input("text", "search", "search questions and answers"),
      sorter(),
      columnPicker(),
      ...(query.group ? [h("span", { class: "chip" }, `group ${visible(query.group)}`)] : []),
      ...(FILTERS.some((name) => query[name])
        ? [
            h(
              "button",
              {
                type: "button",
                onclick: () => filter(Object.fromEntries(FILTERS.map((name) => [name, ""]))),
              },
              "clear filters",
            ),
          ]
        : []),
    );
  }

  function showPaging() {
    const start = Number(query.start || 0);
    const count = page.total.toLocaleString("en");
    const text = query.text
      ? `${page.rows.length} found in ${page.searched.toLocaleString("en")} of ${count} rollouts`
      : page.rows.length
        ? `${(start + 1).toLocaleString("en")}–${(start + page.rows.length).toLocaleString("en")} of ${count} rollouts`
        : `${count} rollouts`;
    const back = h("button", { disabled: !starts.length, onclick: () => history.back() }, "← previous");
    const more = () => go({ start: page.next, back: JSON.stringify([...starts, start].slice(-50)) });
    const onward = h(
      "button",
      { disabled: page.next === null, onclick: more },
      query.text ? "search further →" : "next →",
    );
    note.replaceChildren(
      h("span", { class: "count" }, text),
      back,
      onward,
      h("span", { class: "quiet hint" }, "keys: j, k to move, Enter to open"),
    );
  }

  async function load() {
    const mine = ++asked;
    try {
      const answer = await get("rollouts", { ...query, run });
      if (mine !== asked) return;
      const first = page === null;
      // The same rows stay as they are: an element that is replaced under the pointer loses its click.
      const same = JSON.stringify(page?.rows) === JSON.stringify(answer.rows);
      page = answer;
      Object.assign(listed, { run, query, rows: [...page.rows], next: page.next });
      if (first || !filters.contains(document.activeElement)) showFilters(page.facets);
      if (!same) showRows();
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
      h("table", {}, h("thead", {}, head), body),
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
