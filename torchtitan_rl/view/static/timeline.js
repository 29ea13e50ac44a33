// Spans on one time axis, a lane a thread: a stall is a gap.
import { COLOURS, colour } from "./charts.js";
import { css, h, select, short, showTip, visible } from "./dom.js";
import { get, store } from "./store.js";

const LANE = 30;
const LEFT = 170;
const TOP = 26;

// Each its own colour, the same in every run; that of what is not listed is none of these.
const NAMES = [
  ...["generate", "grade", "train", "pull weights", "publish weights", "respond", "compute logprobs"],
  ...["start", "measure", "save a checkpoint", "export the model"],
];

/** Round distances between ticks: 1, 2 or 5 times a power of ten. */
export function tickSize(seconds, most) {
  const rough = seconds / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
}

/** The share of a time that a lane's spans cover; those inside others count once. */
export function busyShare(spans, lane, from, to) {
  let [busy, covered] = [0, from];
  const mine = spans.filter((span) => span[0] === lane).sort((a, b) => a[2] - b[2]);
  for (const [, , start, length] of mine) {
    const end = Math.min(to, start + length);
    busy += Math.max(0, end - Math.max(start, covered));
    covered = Math.max(covered, end);
  }
  return to > from ? busy / (to - from) : 0;
}

export function timeline(root, parameters) {
  const run = store.chosen.includes(parameters.run) ? parameters.run : store.chosen[0];
  if (run === undefined) return void root.append(h("p", { class: "quiet" }, "No run is chosen."));
  let data = null;
  let from = 0;
  let to = null; // null: to the end, also as the run goes on
  let asked = 0;
  let drag = null;
  const canvas = h("canvas", { tabindex: "0", "aria-label": "timeline" });
  const note = h("p", { class: "quiet" });
  const legend = h("span", { class: "legend" });
  const names = new Map();
  const runs =
    store.chosen.length > 1
      ? select(
          "run",
          store.chosen,
          run,
          (value) => (location.hash = `#/timeline?${new URLSearchParams({ run: value })}`),
        )
      : null;
  const button = (text, action) => h("button", { onclick: action }, text);
  root.append(
    h(
      "div",
      { class: "bar" },
      runs,
      button("all", () => view(0, null)),
      button("last 60 s", () => view(Math.max(0, data.seconds - 60), data.seconds)),
      button("+", () => zoom(0.5)),
      button("−", () => zoom(2)),
      legend,
    ),
    h("div", { class: "card" }, canvas),
    note,
  );

  const end = () => to ?? data?.seconds ?? 1;
  const scale = () => (canvas.clientWidth - LEFT) / Math.max(end() - from, 1e-6);
  const colourOf = (name) => {
    if (!names.has(name)) {
      const others = [...names.keys()].filter((other) => !NAMES.includes(other)).length;
      const known = NAMES.indexOf(name);
      const free = NAMES.length + (others % (COLOURS.length - NAMES.length));
      names.set(name, colour(known < 0 ? free : known));
    }
    return names.get(name);
  };

  async function load() {
    const mine = ++asked;
    try {
      const window = to === null && from === 0 ? {} : { start: from, end: end() };
      const answer = await get("timeline", { run, ...window });
      if (mine !== asked) return;
      data = answer;
      draw();
    } catch (error) {
      note.textContent = visible(error.message);
    }
  }

  let later = 0;
  function view(start, stop) {
    const whole = data?.seconds || 1;
    from = Math.max(0, Math.min(start, whole));
    to = stop === null || (from === 0 && stop >= whole) ? null : Math.min(stop, whole * 1.02);
    if (data) draw();
    clearTimeout(later);
    later = setTimeout(load, 120);
  }

  function zoom(factor, at = (from + end()) / 2) {
    const span = Math.max(1e-4, (end() - from) * factor);
    const share = (at - from) / Math.max(end() - from, 1e-9);
    view(at - span * share, at + span * (1 - share));
  }

  function draw() {
    const pixels = devicePixelRatio || 1;
    const height = TOP + LANE * Math.max(1, data.lanes.length) + 6;
    canvas.style.height = `${height}px`;
    canvas.width = canvas.clientWidth * pixels;
    canvas.height = height * pixels;
    const pen = canvas.getContext("2d");
    pen.scale(pixels, pixels);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    drawTicks(pen, height);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, canvas.clientWidth, height);
    pen.clip();
    for (const [lane, name, start, length] of data.spans) drawSpan(pen, lane, name, start, length);
    pen.restore();
    data.lanes.forEach((name, i) => {
      pen.fillStyle = css("--text");
      pen.fillText(visible(name).slice(0, 18), 4, TOP + i * LANE + LANE / 2);
      pen.fillStyle = css("--quiet");
      pen.fillText(
        `${Math.round(100 * busyShare(data.spans, i, from, end()))} %`,
        LEFT - 46,
        TOP + i * LANE + LANE / 2,
      );
    });
    pen.fillText("busy", LEFT - 46, 10);
    note.textContent = !data.total
      ? "This run has no timeline.json yet."
      : `${data.shown} of ${data.total} spans in view${data.shown < data.total ? " (the longest; zoom in for the others)" : ""}. Wheel: zoom · drag: move · double click: all`;
    legend.replaceChildren(
      ...[...names].slice(0, COLOURS.length).map(([name, value]) => {
        const swatch = h("i", { class: "swatch" });
        swatch.style.background = value;
        return h("span", {}, swatch, visible(name));
      }),
    );
  }

  function drawTicks(pen, height) {
    const size = tickSize(Math.max(end() - from, 1e-6), 10);
    for (let tick = Math.ceil(from / size) * size; tick <= end(); tick += size) {
      const x = LEFT + (tick - from) * scale();
      pen.fillStyle = css("--line");
      pen.fillRect(x, TOP - 4, 1, height);
      pen.fillStyle = css("--quiet");
      pen.fillText(`${short(tick)} s`, x + 3, 10);
    }
  }

  function drawSpan(pen, lane, name, start, length) {
    const x = LEFT + (start - from) * scale();
    const width = Math.max(1, length * scale() - 0.5);
    if (x + width < LEFT || x > canvas.clientWidth) return;
    pen.fillStyle = colourOf(name);
    pen.fillRect(x, TOP + lane * LANE + 3, width, LANE - 6);
    if (width < 44) return;
    pen.save();
    pen.beginPath();
    pen.rect(x, TOP + lane * LANE, width - 3, LANE);
    pen.clip();
    pen.fillStyle = "#fff";
    pen.fillText(visible(name), Math.max(x, LEFT) + 5, TOP + lane * LANE + LANE / 2);
    pen.restore();
  }

  const timeAt = (event) => from + (event.offsetX - LEFT) / scale();
  function spanAt(event) {
    const [lane, time] = [Math.floor((event.offsetY - TOP) / LANE), timeAt(event)];
    const slack = 1 / scale();
    return data?.spans.findLast(
      (span) => span[0] === lane && time >= span[2] - slack && time <= span[2] + span[3] + slack,
    );
  }

  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      if (!data) return;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY))
        view(from + event.deltaX / scale(), end() + event.deltaX / scale());
      else zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event));
    },
    { passive: false },
  );
  canvas.addEventListener("dblclick", () => view(0, null));
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.offsetX, from, to: end() };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => (drag = null));
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const by = Math.max(-drag.from, (drag.x - event.offsetX) / scale());
      if (Math.abs(drag.x - event.offsetX) > 2) view(drag.from + by, drag.to + by);
      return;
    }
    const span = spanAt(event);
    showTip(
      event,
      span
        ? h(
            "div",
            {},
            h("b", {}, visible(span[1])),
            ` ${short(span[3])} s, from ${short(span[2])} s`,
            span[4] === null ? "" : `, step ${span[4]}`,
          )
        : null,
    );
  });
  canvas.addEventListener("pointerleave", (event) => showTip(event, null));
  const observer = new ResizeObserver(() => data && draw());
  observer.observe(canvas);
  load();
  return {
    update: () => {
      if (to === null) load();
    },
    close: () => observer.disconnect(),
  };
}
