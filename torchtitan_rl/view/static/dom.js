// Elements and text. All text goes in by textContent: a rollout is untrusted.

/** An element: h("a", {class: "x", href: "#", onclick: f}, "text", child, [more]) */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "selected" || name === "disabled")
      element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Text with every control, format and unpaired character visible, but for line breaks and tabs. */
export function visible(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}]/gu, (character) => {
    const code = character.codePointAt(0);
    if (code === 9 || code === 10) return character;
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    if (code === 127) return "␡";
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** As a token shows it: line breaks and tabs are visible, too. */
export function visibleToken(text) {
  return visible(text).replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
}

/** A number as short as it can be read: 0.7342, 12.35, 1234, 1.2e-5. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(3)).toExponential();
  return String(Number(value.toPrecision(4)));
}

/** Numbers that came as text, as a state's values do, in the same form; other text as it is. */
export function shortText(text) {
  return /^-?\d+\.\d+$/.test(text) ? short(Number(text)) : visible(text);
}

export function mark(correct) {
  if (correct === null || correct === undefined) return h("span", { class: "quiet" }, "–");
  return correct ? h("span", { class: "good" }, "✓") : h("span", { class: "bad" }, "✗");
}

/** A form's select; `options` are texts or [value, text]. */
export function select(name, options, value, onchange) {
  const made = options.map((option) => {
    const [id, text] = Array.isArray(option) ? option : [option, option];
    return h("option", { value: id, selected: id === value }, visible(text));
  });
  return h("select", { name, onchange: (event) => onchange(event.target.value) }, made);
}

/** A short line as a curve is drawn, for a legend. */
export function strokeOf(colour, dash = []) {
  const sharp = 2; // pixels of the canvas for one of the page
  const canvas = h("canvas", { class: "stroke", width: 26 * sharp, height: 8 * sharp });
  const pen = canvas.getContext("2d");
  pen.scale(sharp, sharp);
  pen.strokeStyle = colour;
  pen.lineWidth = 2.5;
  pen.setLineDash(dash);
  pen.moveTo(0, 4);
  pen.lineTo(26, 4);
  pen.stroke();
  return canvas;
}

/** A small square of a colour, for a legend. */
export function swatch(background) {
  const made = h("i", { class: "swatch" });
  made.style.background = background;
  return made;
}

export function css(variable) {
  return getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
}

const tip = document.getElementById("tip");

/** Shows content beside the pointer; null hides it. */
export function showTip(event, content) {
  tip.hidden = content === null;
  if (content === null) return;
  tip.replaceChildren(content);
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.min(event.clientX + 14, innerWidth - width - 8);
  const below = event.clientY + 18;
  const top = below + height > innerHeight ? event.clientY - height - 12 : below;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}
