// Spans on one time axis, a lane for each actor: a stall is a gap.
import { activityColour, activityPlace } from "./charts.js";
import { css, h, select, short, showTip, swatch, visible } from "./dom.js";
import { get, store } from "./store.js";

const TOP = 26;
const ROW = 22;
const MOST_ROWS = 5; // that are full ones; where more calls run at once, each is a thin line
const GAP = 10;
const NARROW = 600;

/** Where the lanes are, from the top: {top, height, row}, `row` being the height of a thin row. */
export function layout(lanes, top, title) {
  const found = [];
  for (const { rows } of lanes) {
    const height = ROW * Math.min(rows, MOST_ROWS);
    found.push({ top: top + title, height, row: height / rows });
    top += title + height + GAP;
  }
  return { lanes: found, end: top };
}

/** For each span, how many rows it and those have that overlap with it, at once or one after the other. */
export function crowds(spans) {
  const found = new Array(spans.length);
  for (const members of Map.groupBy(spans.keys(), (i) => spans[i][0]).values()) {
    let [crowd, until] = [[], -Infinity];
    const settle = () => {
      const rows = crowd.reduce((most, i) => Math.max(most, spans[i][1] + 1), 0);
      for (const i of crowd) found[i] = rows;
    };
    for (const i of members.sort((a, b) => spans[a][3] - spans[b][3])) {
      const [, , , start, length] = spans[i];
      if (start >= until) {
        settle();
        crowd = [];
      }
      crowd.push(i);
      until = Math.max(until, start + length);
    }
    settle();
  }
  return found;
}

/** Round distances between ticks: 1, 2 or 5 times a power of ten. */
export function tickSize(seconds, most) {
  const rough = seconds / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
}

/** The share of a time that a lane's spans cover; those inside others count once. */
export function busyShare(spans, lane, from, to) {
  let [busy, covered] = [0, from];
  const mine = spans.filter((span) => span[0] === lane).sort((a, b) => a[3] - b[3]);
  for (const [, , , start, length] of mine) {
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
  let places = layout([], TOP, 0);
  let crowd = []; // of each span, in the order of the spans
  const touches = new Map(); // fingers on the canvas, where they are
  const canvas = h("canvas", { tabindex: "0", "aria-label": "timeline" });
  const note = h("p", { class: "quiet" });
  const legend = h("span", { class: "legend" });
  const names = new Map(); // of the spans, with their colours
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
      button("last 60 s", () => data && view(Math.max(0, data.seconds - 60), data.seconds)),
      button("zoom in", () => zoom(0.5)),
      button("zoom out", () => zoom(2)),
      legend,
    ),
    h("div", { class: "card" }, canvas),
    note,
  );

  const end = () => to ?? data?.seconds ?? 1;
  let width = 1; // of the canvas, when it was last drawn
  // On a phone the names of the lanes are above them.
  const narrow = () => width < NARROW;
  const left = () => (narrow() ? 0 : 190);
  const scale = () => (width - left()) / Math.max(end() - from, 1e-6);

  async function load() {
    const mine = ++asked;
    try {
      const window = to === null && from === 0 ? {} : { start: from, end: end() };
      const answer = await get("timeline", { run, ...window });
      if (mine !== asked) return;
      data = answer;
      crowd = crowds(data.spans);
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
    width = canvas.clientWidth;
    places = layout(data.lanes, TOP, narrow() ? 18 : 0);
    const height = Math.max(TOP + ROW, places.end);
    canvas.style.height = `${height}px`;
    canvas.width = width * pixels;
    canvas.height = height * pixels;
    const pen = canvas.getContext("2d");
    pen.scale(pixels, pixels);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    drawTicks(pen, height);
    pen.save();
    pen.beginPath();
    pen.rect(left(), TOP, width, height);
    pen.clip();
    data.spans.forEach((span, i) => drawSpan(pen, span, heightOf(span, i)));
    pen.restore();
    data.lanes.forEach((lane, i) => drawName(pen, lane, i));
    showNote();
    legend.replaceChildren(
      ...[...names]
        .sort(([a], [b]) => activityPlace(a) - activityPlace(b))
        .map(([name, value]) => h("span", {}, swatch(value), visible(name))),
    );
  }

  function drawName(pen, { name, rows }, lane) {
    const { top, height } = places.lanes[lane];
    const busy = `${Math.round(100 * busyShare(data.spans, lane, from, end()))} % busy`;
    const most = rows > 1 ? `up to ${rows} at once` : "";
    const write = (text, x, y, colour) => {
      pen.fillStyle = css(colour);
      pen.fillText(text, x, y);
    };
    if (narrow()) {
      write(visible(name).slice(0, 24), 0, top - 9, "--text");
      const rest = [busy, most].filter(Boolean).join(" · ");
      return write(rest, width - pen.measureText(rest).width, top - 9, "--quiet");
    }
    const middle = top + ROW / 2;
    write(visible(name).slice(0, 16), 4, middle, "--text");
    write(busy, left() - 12 - pen.measureText(busy).width, middle, "--quiet");
    if (height > ROW) write(most, 4, middle + 17, "--quiet");
  }

  function showNote() {
    const touch = matchMedia("(pointer: coarse)").matches;
    const how = touch
      ? "Pinch to zoom, drag to move, tap a span for its times."
      : "Wheel: zoom. Drag: move. Double click: all.";
    const some = data.shown < data.total ? `the ${data.shown} longest of ${data.total}` : `all ${data.total}`;
    note.textContent = data.total
      ? `Shows ${some} spans of this time. ${how}`
      : "This run has no timeline.json yet.";
  }

  function drawTicks(pen, height) {
    const size = tickSize(Math.max(end() - from, 1e-6), narrow() ? 4 : 10);
    for (let tick = Math.ceil(from / size) * size; tick <= end(); tick += size) {
      const x = left() + (tick - from) * scale();
      pen.fillStyle = css("--line");
      pen.fillRect(x, TOP - 4, 1, height);
      pen.fillStyle = css("--quiet");
      pen.fillText(`${short(tick)} s`, x + 3, 10);
    }
  }

  const heightOf = ([lane], i) => (crowd[i] <= MOST_ROWS ? ROW : places.lanes[lane].row);

  function drawSpan(pen, [lane, row, name, start, length], rowHeight) {
    const x = left() + (start - from) * scale();
    const wide = Math.max(1, length * scale() - 0.5);
    if (x + wide < left() || x > width) return;
    const y = places.lanes[lane].top + row * rowHeight;
    const height = Math.max(1, rowHeight - (rowHeight > 5 ? 1 : 0.3));
    if (!names.has(name)) names.set(name, activityColour(name));
    pen.fillStyle = names.get(name);
    pen.fillRect(x, y, wide, height);
    if (wide < 44 || height < 12) return;
    pen.save();
    pen.beginPath();
    pen.rect(x, y, wide - 3, height);
    pen.clip();
    pen.fillStyle = "#fff";
    pen.fillText(visible(name), Math.max(x, left()) + 5, y + height / 2);
    pen.restore();
  }

  const timeAt = (event) => from + (event.offsetX - left()) / scale();
  function spanAt(event) {
    const lane = places.lanes.findIndex(
      ({ top, height }) => event.offsetY >= top && event.offsetY < top + height,
    );
    if (lane < 0) return undefined;
    const down = event.offsetY - places.lanes[lane].top;
    const [time, slack] = [timeAt(event), 1 / scale()];
    return data.spans.findLast(
      (span, i) =>
        span[0] === lane &&
        span[1] === Math.floor(down / heightOf(span, i)) &&
        time >= span[3] - slack &&
        time <= span[3] + span[4] + slack,
    );
  }

  function showSpan(event) {
    const span = spanAt(event);
    if (!span) return showTip(event, null);
    const [, , name, start, length, step] = span;
    const at = step === null ? "" : `, step ${step}`;
    showTip(event, h("div", {}, h("b", {}, visible(name)), ` ${short(length)} s, from ${short(start)} s${at}`));
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
  /** What a drag starts from: the fingers or the pointer as they are now. */
  function grab() {
    const places = [...touches.values()];
    drag = places.length ? { xs: places.map((one) => one.offsetX), from, to: end() } : null;
  }
  canvas.addEventListener("pointerdown", (event) => {
    touches.set(event.pointerId, event);
    canvas.setPointerCapture(event.pointerId);
    grab();
  });
  for (const kind of ["pointerup", "pointercancel"])
    canvas.addEventListener(kind, (event) => {
      touches.delete(event.pointerId);
      grab();
    });
  canvas.addEventListener("click", showSpan);
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return showSpan(event);
    touches.set(event.pointerId, event);
    const xs = [...touches.values()].map((one) => one.offsetX);
    const perPixel = (drag.to - drag.from) / (width - left());
    if (xs.length > 1) {
      // The times under both fingers stay under them.
      const [a, b] = drag.xs.map((x) => drag.from + (x - left()) * perPixel);
      const wide = (b - a) / (Math.abs(xs[1] - xs[0]) < 1 ? 1 : xs[1] - xs[0]);
      if (wide > 0) {
        const start = a - (xs[0] - left()) * wide;
        view(start, start + wide * (width - left()));
      }
      return;
    }
    const by = Math.max(-drag.from, (drag.xs[0] - xs[0]) * perPixel);
    if (Math.abs(drag.xs[0] - xs[0]) > 2) view(drag.from + by, drag.to + by);
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
