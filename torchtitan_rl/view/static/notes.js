// Notes on the chosen runs: read, written and saved.
import { h, visible } from "./dom.js";
import { post, store } from "./store.js";

/** The notes on one run: their text, or a field to write them in while `editing`. */
function card(run) {
  const element = h("section", { class: "note", "data-run": run });
  let shown = null;
  let editing = false;
  const about = () => (store.chosen.length > 1 ? ` on ${visible(run)}` : "");

  function show(notes) {
    shown = JSON.stringify([notes, about()]);
    element.classList.toggle("card", notes.text !== "");
    const button = h(
      "button",
      {
        class: "edit",
        disabled: notes.problem !== "",
        title: visible(notes.problem),
        onclick: () => edit(notes),
      },
      notes.text ? "edit" : `add a note${about()}`,
    );
    element.replaceChildren(
      ...(notes.text
        ? [h("h2", {}, `Notes${about()}`, button), h("div", { class: "text" }, visible(notes.text))]
        : [button]),
    );
  }

  function edit(notes) {
    editing = true;
    element.classList.add("card");
    const field = h("textarea", { rows: 4, "aria-label": `notes${about()}`, value: notes.text });
    const problem = h("span", { class: "warning", role: "alert" });
    const done = (after) => {
      editing = false;
      show(after);
    };
    const save = async () => {
      try {
        const { version } = notes;
        const after = await post("notes", { run, text: field.value, version });
        store.run(run).status.notes = after;
        done(after);
      } catch (error) {
        problem.textContent = visible(error.message);
      }
    };
    const onkeydown = (event) => {
      if (event.key === "Escape") done(notes);
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
    };
    const buttons = h(
      "div",
      { class: "bar" },
      h("button", { class: "save on", onclick: save }, "save"),
      h("button", { onclick: () => done(notes) }, "cancel"),
      h("span", { class: "quiet" }, "kept as notes.md in the folder of the run"),
      problem,
    );
    element.replaceChildren(h("div", { onkeydown }, h("h2", {}, `Notes${about()}`), field, buttons));
    field.focus();
  }

  return {
    element,
    update() {
      const notes = store.run(run).status?.notes;
      // What is being written must not be replaced under the user's hands.
      if (notes && !editing && shown !== JSON.stringify([notes, about()])) show(notes);
    },
  };
}

export function notesView() {
  const element = h("div", { class: "notes" });
  const cards = new Map();
  return {
    element,
    update() {
      for (const run of store.chosen) if (!cards.has(run)) cards.set(run, card(run));
      const wanted = store.chosen.map((run) => cards.get(run).element);
      const shown = [...element.children];
      const same = wanted.length === shown.length && wanted.every((one, i) => one === shown[i]);
      if (!same) element.replaceChildren(...wanted);
      for (const run of store.chosen) cards.get(run).update();
    },
  };
}
