// Read the columns that `packing.py` writes: gzip of 32-bit numbers, their bytes of equal place together, as base64.
"use strict";

async function decode(column) {
  const text = atob(column.data), packed = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) packed[index] = text.charCodeAt(index);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = column.length;
  const numbers = new Int32Array(length);
  const second = length, third = 2 * length, fourth = 3 * length;
  for (let index = 0; index < length; index++) {
    numbers[index] = planes[index] | (planes[second + index] << 8) | (planes[third + index] << 16) | (planes[fourth + index] << 24);
  }
  return column.type === "f" ? new Float32Array(numbers.buffer) : numbers;
}

// Decode all columns within a value, at any depth, and leave all else as it is.
async function decodeAll(value) {
  if (value === null || typeof value !== "object") return value;
  if (typeof value.data === "string" && "length" in value && "type" in value) return decode(value);
  if (Array.isArray(value)) return Promise.all(value.map(decodeAll));
  const entries = Object.entries(value).map(async ([key, each]) => [key, await decodeAll(each)]);
  return Object.fromEntries(await Promise.all(entries));
}

// Make an element: element("td", {class: "right"}, "text", child, ...).
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

const themeColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function formatNumber(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en", size >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits });
}

function formatBytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  while (size >= 1024 && index < units.length - 1) { size /= 1024; index++; }
  return `${index === 0 ? Math.round(size) : Number(size.toPrecision(3))} ${units[index]}`;
}

// Format seconds in the unit that suits `span`, by default the unit that suits them; with a `step`, as exactly as it needs.
function formatSeconds(seconds, span = seconds, step = null) {
  const size = Number(Math.abs(span).toPrecision(4));
  const [factor, unit] = size >= 1 || size === 0 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  if (step === null) return `${Number((seconds * factor).toPrecision(4))} ${unit}`;
  return `${Number((seconds * factor).toFixed(Math.min(12, Math.max(0, -Math.floor(Math.log10(step * factor))))))} ${unit}`;
}

const tip = {
  show(text, event) {
    const box = document.getElementById("tip");
    box.textContent = text;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const right = event.clientX + 14 + width > innerWidth;
    box.style.left = `${Math.max(4, right ? event.clientX - width - 10 : event.clientX + 14)}px`;
    box.style.top = `${Math.max(4, Math.min(event.clientY + 16, innerHeight - height - 4))}px`;
  },
  hide() { document.getElementById("tip").hidden = true; },
};
