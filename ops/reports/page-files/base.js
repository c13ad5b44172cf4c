"use strict";
// What all parts of the page share: elements, sizes as text, colors, the tip. Text from files is only
// ever set as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);

function el(tag, properties, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "style") Object.assign(made.style, value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB"];

// The text that headroom.memory.format_bytes gives.
function bytes(size) {
  const sign = size < 0 ? "-" : "";
  let value = Math.abs(size);
  if (value < 1000) return `${sign}${Math.round(value)} B`;
  let power = 0;
  value /= 1024;
  while (value >= 999.5 && power < UNITS.length - 1) {
    value /= 1024;
    power += 1;
  }
  const digits = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return `${sign}${value.toFixed(digits)} ${UNITS[power]}`;
}

const count = (number) => Math.round(number).toLocaleString("en-US");
const percent = (part, whole) => `${((100 * part) / Math.max(1, whole)).toFixed(1)} %`;
const words = (kind) => kind.replaceAll("_", " ");
// Colors of names that are no kinds; gray is left to what is unknown and to all others.
const GRAY = data.colors.temporaries;
const PALETTE = Object.values(data.colors).filter((color) => color !== GRAY);

function sums(differences) {
  let sum = 0;
  return differences.map((difference) => (sum += difference));
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function isPale(color) { // whether light text is read better on it
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b < 125;
}

const dot = (color) => el("span", { className: "dot", style: { background: color } });
const entry = (color, text) => el("span", null, dot(color), el("span", null, text)); // of a legend
const cell = (text, kind) => el("td", { className: kind || "" }, text);

function tile(value, label) {
  return el("div", { className: "tile" }, el("b", null, value), el("span", null, label));
}

// Buttons of which one is pressed.
function choice(names, chosen, onchoose) {
  const group = el("div", { className: "choice", role: "group" });
  for (const [key, name] of Object.entries(names)) {
    group.append(el("button", {
      "aria-pressed": String(key === chosen),
      onclick: (event) => {
        for (const other of group.children) other.setAttribute("aria-pressed", "false");
        event.currentTarget.setAttribute("aria-pressed", "true");
        onchoose(key);
      },
    }, name));
  }
  return group;
}

const tip = el("div", { id: "tip", role: "tooltip" });

function showTip(event, ...children) {
  tip.replaceChildren(...children);
  tip.style.display = "block";
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - width - 16 : event.clientX + 16;
  const top = event.clientY + 16 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 16;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

function hideTip() {
  tip.style.display = "none";
}

// A canvas that is drawn again when its size or the colors change; draw(context, width, height).
function picture(height, draw, properties) {
  const canvas = el("canvas", { ...properties, style: { height: `${height}px` } });
  canvas.redraw = () => {
    const width = canvas.clientWidth;
    if (!width) return;
    const tall = canvas.clientHeight;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.clearRect(0, 0, width, tall);
    draw(context, width, tall);
  };
  new ResizeObserver(canvas.redraw).observe(canvas);
  pictures.add(canvas);
  return canvas;
}

const pictures = new Set();

function redrawAll() {
  for (const canvas of pictures) {
    if (canvas.isConnected) canvas.redraw();
    else pictures.delete(canvas);
  }
}

// Round numbers of bytes from 0 to most, about so many.
function ticks(most, wanted) {
  let unit = 1;
  while (most / unit >= 1024) unit *= 1024;
  const rough = most / unit / wanted;
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough) * unit;
  const found = [];
  for (let at = 0; at <= most; at += step) found.push(at);
  return found;
}

function stackLines(content, stack) {
  return (content.stacks[stack] || []).map((line) => content.strings[line]);
}

function ownerName(content, owner) {
  const [, module, op] = owner;
  const name = module === null ? "" : content.strings[module] || "(model)";
  const what = op === null ? "" : content.strings[op].replace(/^aten::/, "");
  return (what.startsWith(`${name}.`) ? [what] : [name, what]).filter(Boolean).join(" ");
}
