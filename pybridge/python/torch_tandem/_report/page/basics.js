// Elements, and numbers and places as text. All data reaches the page as text nodes or attributes made here.

const data = JSON.parse(document.getElementById("data").textContent);

// An element: `h("button", { class: "link", onclick: f }, "text", child)`.
function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function count(number) {
  return Math.round(number ?? 0).toLocaleString("en-US");
}

function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function percent(part, whole) {
  if (!whole) return "0 %";
  const share = (100 * part) / whole;
  if (share >= 99 && share < 100) return `${Math.min(share, 99.9).toFixed(1)} %`;
  return `${share.toFixed(share > 0 && share < 1 ? 1 : 0)} %`;
}

function duration(microseconds) {
  const us = microseconds ?? 0;
  if (us >= 60e6) return `${Math.floor(us / 60e6)} min ${Math.round((us % 60e6) / 1e6)} s`;
  if (us >= 1e6) return `${(us / 1e6).toFixed(us >= 1e7 ? 1 : 2)} s`;
  if (us >= 1e3) return `${(us / 1e3).toFixed(us >= 1e5 ? 0 : us >= 1e4 ? 1 : 2)} ms`;
  return `${us.toFixed(0)} µs`;
}

function bytes(number) {
  let value = number ?? 0;
  for (const unit of ["bytes", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return unit === "bytes" ? `${value} bytes` : `${value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

// A line as the shell would name its file; libraries from their package's name on.
function shortLine(line) {
  let text = String(line ?? "");
  const root = data.about.roots.find((folder) => text.startsWith(folder));
  if (root) text = text.slice(root.length);
  const library = text.lastIndexOf("/site-packages/");
  return library >= 0 ? text.slice(library + "/site-packages/".length) : text;
}

// Only file and number of a line.
function fileLine(line) {
  return shortLine(line).replace(/ in \S*$/, "");
}

// The file's name alone, with the number.
function baseLine(line) {
  return fileLine(line).replace(/^.*\//, "");
}

function sourceOf(line) {
  return Object.hasOwn(data.sources ?? {}, line) ? data.sources[line] : "";
}

function shortOp(name) {
  return String(name ?? "").replace(/^aten::/, "");
}

// Text in which `back quotes` mark code.
function withCode(text) {
  return text.split("`").map((part, number) => (number % 2 ? h("code", null, part) : part));
}

// One of a few buttons is pressed. `options` are [value, title]; returns the element with a `set` function.
function choice(label, options, onChoose) {
  const buttons = new Map();
  const set = (value) => {
    for (const [other, button] of buttons) button.setAttribute("aria-pressed", String(other === value));
  };
  const element = h("div", { class: "choice", role: "group", "aria-label": label });
  for (const [value, title] of options) {
    const button = h("button", { type: "button", onclick: () => (set(value), onChoose(value)) }, title);
    buttons.set(value, button);
    element.append(button);
  }
  set(options[0][0]);
  return Object.assign(element, { set });
}

function legend(entries) {
  const swatch = ([title, color, shape]) => {
    const mark = h("i", { class: shape ?? null });
    mark.style.setProperty("--swatch", `var(${color})`);
    return h("span", null, mark, title);
  };
  return h("div", { class: "legend" }, entries.map(swatch));
}

// A small drawing of lines for a button.
function icon(path) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  line.setAttribute("d", path);
  svg.append(line);
  return svg;
}

function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", null, shown.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]).flat());
}

// A box beside the pointer, within `host`.
class Tip {
  constructor(host) {
    this.host = host;
    this.element = h("div", { class: "tip", role: "tooltip", hidden: true });
    host.append(this.element);
  }

  show(x, y, ...content) {
    const { element, host } = this;
    element.replaceChildren(...content);
    element.hidden = false;
    const right = x + 16 + element.offsetWidth > host.clientWidth;
    const left = right ? x - 16 - element.offsetWidth : x + 16;
    const top = Math.min(y + 14, host.clientHeight - element.offsetHeight - 4);
    element.style.left = `${Math.max(left, 4)}px`;
    element.style.top = `${Math.max(top, 4)}px`;
  }

  hide() {
    this.element.hidden = true;
  }
}

// --- Drawing -----------------------------------------------------------------------------------------------

const SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif';

// The style sheet's colors, in the scheme that is on.
function palette() {
  const style = getComputedStyle(document.documentElement);
  return new Proxy(
    {},
    {
      get(known, name) {
        known[name] ??= style.getPropertyValue(`--${name.replace(/[A-Z]/g, (c) => `-${c.toLowerCase()}`)}`);
        return known[name];
      },
    },
  );
}

// Calls back, now and whenever the size, the scheme or the sharpness of the screen is another.
function keepDrawn(canvas, draw) {
  const run = () => {
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width || !height) return;
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    draw(pen, width, height, palette());
  };
  let waiting = false;
  const soon = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      run();
    });
  };
  new ResizeObserver(run).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);
  run();
  return soon;
}

// Round numbers from 0 to `most`, about `wanted` of them.
function ticks(from, to, wanted) {
  const rough = (to - from) / Math.max(wanted, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough);
  const found = [];
  for (let tick = Math.ceil(from / step) * step; tick <= to + step * 1e-9; tick += step) found.push(tick);
  return found;
}
