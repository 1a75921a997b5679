// Build the page from its data: the head, and a section for each question about a run or a plan.
"use strict";

const RUN_COLOURS = ["#2f7ed8", "#e07b28", "#2b9a63", "#9a6fd0", "#d04a63", "#1fa0a8", "#8a8f2a", "#7d8794"];
const CATEGORY_COLOURS = {
  parameters: "#2f6fb7", params: "#2f6fb7", gradients: "#2b8a5a", grads: "#2b8a5a", optimizer: "#c8452e",
  gathered: "#8a6fc8", buckets: "#1f9aa0", activations: "#d99a1c", logits: "#b8742a", workspace: "#c2557f",
  overhead: "#7d8794", rounding: "#b4bcc6", other: "#5a6470",
  compute: "#2f6fb7", recompute: "#8a6fc8", tensor: "#1f9aa0", context: "#6fae3d", experts: "#b8742a",
  bubble: "#b4bcc6", data: "#2b8a5a", offload: "#d99a1c", step: "#c8452e",
};
const colourOf = (name) => CATEGORY_COLOURS[name] ?? "#7d8794";
const sum = (parts) => Object.values(parts).reduce((total, each) => total + each, 0);
const prefix = (source) => (SOURCES.length > 1 ? `${source.name}: ` : "");
const sentence = (text) => (SOURCES.some((source) => text.startsWith(`${source.name}: `)) ? text : text.charAt(0).toUpperCase() + text.slice(1));
const paragraph = (text, kind = "note") => element("p", { class: kind }, sentence(text));

const REPORT = JSON.parse(document.getElementById("data").textContent);
const SOURCES = REPORT.sources.map((source, index) => ({ ...source, colour: RUN_COLOURS[index % RUN_COLOURS.length] }));

// Make the section of a key, with the reason of each source that has nothing there; one with nothing to say stays away.
function section(key, title) {
  const empty = emptyStates(key);
  const made = element("section", { id: key }, element("h2", {}, title), ...empty);
  if (empty.length || has(key).length) document.getElementById("main").append(made);
  return made;
}

// Say for each source what a section has not; runs of one reason are named together.
function emptyStates(key) {
  return SOURCES.filter((source) => "absent" in source[key] && source[key].absent)
    .map((source) => paragraph(`${prefix(source)}${source[key].absent.replace(/\.$/, "")}.`, "empty"));
}

const has = (key) => SOURCES.filter((source) => !("absent" in source[key]));

function drawHead() {
  const [first] = SOURCES;
  document.title = `${SOURCES.map((source) => source.name).join(", ")} · Shardwise`;
  const themes = element("select", {
    "aria-label": "theme", onchange: (event) => { setTheme(event.target.value); },
  }, ...["auto", "light", "dark"].map((each) => element("option", { value: each }, each)));
  themes.value = document.documentElement.dataset.theme ?? "auto";
  const names = SOURCES.map((source) => element("span", { class: "name" },
    ...(SOURCES.length > 1 ? [element("i", { style: `background: ${source.colour}` })] : []), source.name));
  const what = SOURCES.length === 1 && first.what !== "run" ? element("p", { class: "what" }, first.what) : "";
  document.getElementById("head").append(
    element("div", { class: "title" }, element("h1", {}, ...names), themes), what,
    element("p", { class: "quiet" }, `written ${REPORT.written} by Shardwise ${REPORT.version}`));
  for (const source of SOURCES) {
    if (!source.facts.length) continue;
    const tiles = source.facts.map((fact) => element("div", { class: "tile" },
      element("span", { class: "quiet" }, fact.label), element("b", {}, fact.value), element("small", {}, fact.note)));
    const name = SOURCES.length > 1 ? [element("div", { class: "tiles-name", style: `color: ${source.colour}` }, source.name)] : [];
    document.getElementById("head").append(...name, element("div", { class: "tiles" }, ...tiles));
  }
}

async function drawCurves() {
  const runs = has("curves");
  const place = section("curves", "Training");
  if (!runs.length) return;
  const decoded = await Promise.all(runs.map(async (run) => ({ ...run, curves: await decodeAll(run.curves) })));
  window.report.curves = new Curves(place, decoded);
  for (const run of decoded) {
    const { curves } = run;
    if (curves.bucket > 1) place.append(paragraph(`${prefix(run)}${curves.num_steps.toLocaleString("en")} steps; a point is the mean of ${curves.bucket}, the band their least and largest value.`));
    if (curves.num_damaged) place.append(paragraph(`${prefix(run)}${curves.num_damaged} damaged lines of metrics.jsonl were left out.`));
  }
}

// A bar of parts, as one element: long lists of ranks stay quick.
function bar(parts, whole, kind, describe) {
  let at = 0;
  const stops = Object.entries(parts).map(([name, size]) => {
    const from = (100 * at) / whole;
    at += size;
    return `${colourOf(name)} ${from}% ${(100 * at) / whole}%`;
  });
  const style = `background: linear-gradient(to right, ${stops.join(", ")}, transparent ${(100 * at) / whole}%)`;
  const made = element("div", { class: `bar ${kind}`, style });
  made.addEventListener("pointermove", (event) => tip.show(describe(), event));
  made.addEventListener("pointerleave", () => tip.hide());
  return made;
}

function categoryLegend(names) {
  return element("div", { class: "legend" }, ...names.map((name) =>
    element("span", { class: "key" }, element("i", { style: `background: ${colourOf(name)}` }), name)));
}

const listed = (title, parts, format) =>
  [title, ...Object.entries(parts).sort((a, b) => b[1] - a[1]).map(([name, size]) => `${name}: ${format(size)}`)].join("\n");

function drawMemory() {
  const place = section("memory", "Memory");
  for (const source of has("memory")) {
    const { rows, limit, notes, when } = source.memory;
    const totals = rows.flatMap((row) => [sum(row.measured ?? {}), sum(row.predicted ?? {})]);
    const whole = Math.max(limit ?? 0, ...totals) * 1.02;
    const head = [when, limit ? `limit ${formatBytes(limit)}` : "the device's limit is not known, so bars are scaled to the fullest rank", ...notes];
    const names = [...new Set(rows.flatMap((row) => Object.keys({ ...row.measured, ...row.predicted })))];
    const box = element("div", { class: "ranks" });
    if (limit) box.style.setProperty("--limit", `${(100 * limit) / whole}%`);
    for (const row of rows) {
      const bars = element("div", { class: limit ? "bars limited" : "bars" });
      const texts = [];
      for (const kind of ["predicted", "measured"]) {
        if (!row[kind] || !sum(row[kind])) continue;
        const total = sum(row[kind]);
        bars.append(bar(row[kind], whole, kind, () => listed(`${row.name}, ${kind}: ${formatBytes(total)}`, row[kind], formatBytes)));
        texts.push(element("span", {}, `${formatBytes(total)}${limit ? ` · ${Math.round((100 * total) / limit)} %` : ""}`, element("small", {}, ` ${kind}`)));
      }
      box.append(element("div", { class: "rank" }, element("span", { class: "rank-name" }, row.name), bars, element("span", { class: "rank-total" }, ...texts)));
    }
    const title = SOURCES.length > 1 ? [element("h3", { style: `color: ${source.colour}` }, source.name)] : [];
    place.append(...title, paragraph(`${head.join("; ")}.`), box, categoryLegend(names));
  }
}

function drawParts() {
  const place = section("parts", "Where a step's time goes");
  const rows = has("parts").flatMap((source) => source.parts.rows.map(([kind, parts]) => [SOURCES.length > 1 ? `${source.name}, ${kind}` : kind, parts]));
  if (!rows.length) return;
  const totals = rows.map(([, parts]) => sum(parts));
  // Steps of very different lengths are compared by their shares.
  const isShare = Math.max(...totals) > 20 * Math.min(...totals);
  const box = element("div", { class: "ranks" });
  for (const [name, parts] of rows) {
    const total = sum(parts);
    const made = bar(parts, isShare ? total : Math.max(...totals), "measured", () => listed(`${name}: ${formatSeconds(total)}`, parts, (each) => `${formatSeconds(each)}, ${((100 * each) / total).toFixed(1)} %`));
    box.append(element("div", { class: "rank" }, element("span", { class: "rank-name", title: name }, name), element("div", { class: "bars" }, made), element("span", { class: "rank-total" }, formatSeconds(total))));
  }
  place.append(box, categoryLegend([...new Set(rows.flatMap(([, parts]) => Object.keys(parts)))]));
}

function drawExperts() {
  const place = section("experts", "Tokens of the fullest expert");
  const shown = has("experts");
  if (!shown.length) return;
  const layers = Math.max(...shown.map((source) => source.experts.rows.length));
  const most = Math.max(...shown.flatMap((source) => source.experts.rows.flat()));
  const right = (text) => ({ text, class: "right" });
  const cells = (row) => (row ? [right(row[0].toFixed(2)), right(row[1].toFixed(2)), { text: element("div", { class: "share", style: `width: ${(100 * row[1]) / most}%` }), class: "wide" }] : ["", "", ""]);
  const rows = Array.from({ length: layers }, (_, layer) => [right(`${layer + 1}`), ...shown.flatMap((source) => cells(source.experts.rows[layer]))]);
  place.append(paragraph("Over the mean of all experts of the layer; 1 is even."),
    table(["layer of experts", ...shown.flatMap((source) => [right(`${prefix(source)}last step`), right("mean of steps"), ""])], rows));
}

async function drawTimelines() {
  const place = section("timelines", "Timeline");
  const shown = has("timelines");
  if (!shown.length) return;
  const panels = (await Promise.all(shown.map((source) => decodeAll(source.timelines.panels)))).flatMap((each, index) =>
    each.map((panel) => ({ ...panel, title: SOURCES.length > 1 ? `${shown[index].name} · ${panel.title}` : panel.title })));
  window.report.timelines = new Timelines(place, panels);
  for (const source of shown) {
    for (const note of source.timelines.notes) place.append(paragraph(prefix(source) + note));
  }
}

function table(head, rows) {
  const cell = (name, value) => element(name, typeof value === "object" ? { class: value.class ?? "" } : {}, value.text ?? value);
  return element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((each) => cell("th", each)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((each) => cell("td", each)))))));
}

function drawWire() {
  const place = section("wire", "Bytes on the wire");
  const shown = has("wire");
  if (!shown.length) return;
  const keys = [...new Set(shown.flatMap((source) => source.wire.rows.filter((row) => row[2] > 0).map(([axis, op]) => `${axis} ${op}`)))].sort();
  const sizes = (key) => shown.map((source) => source.wire.rows.find(([axis, op]) => `${axis} ${op}` === key)?.[2] ?? 0);
  const most = Math.max(1, ...keys.flatMap(sizes));
  const right = (text) => ({ text, class: "right" });
  const share = (size) => ({ text: element("div", { class: "share", style: `width: ${(100 * size) / most}%` }), class: "wide" });
  const rows = keys.map((key) => [key.split(" ")[0], key.split(" ")[1].replaceAll("_", "-"), ...sizes(key).flatMap((size) => [right(formatBytes(size)), share(size)])]);
  const totals = shown.flatMap((source) => [right(formatBytes(source.wire.rows.reduce((total, row) => total + row[2], 0))), ""]);
  const names = shown.flatMap((source) => [right(SOURCES.length > 1 ? source.name : "bytes a step"), ""]);
  place.append(...[...new Set(shown.map((source) => source.wire.note))].map((note) => paragraph(`${note}.`)),
    table(["axis", "operation", ...names], [...rows, ["all", "", ...totals]]));
}

function drawKeys(key, title, pick) {
  const place = section(key, title);
  const shown = has(key);
  if (!shown.length) return;
  const all = [...new Set(shown.flatMap((source) => Object.keys(source[key].keys)))];
  const values = (name) => shown.map((source) => source[key].keys[name] ?? "–");
  const heads = ["key", ...shown.map((source) => (SOURCES.length > 1 ? source.name : "value"))];
  const rows = (names) => table(heads, names.map((name) => [{ text: name, class: "mono" }, ...values(name).map((text) => ({ text, class: "mono" }))]));
  const differing = all.filter((name) => new Set(values(name)).size > 1);
  if (shown.length > 1) {
    place.append(element("h3", {}, differing.length ? "What differs" : "Nothing differs"));
    if (differing.length) place.append(rows(differing));
  }
  const picked = all.filter((name) => shown.some((source) => pick(source, name)));
  if (shown.length > 1) place.append(element("h3", {}, key === "config" ? "Not the defaults" : "All"));
  else if (key === "config") place.append(paragraph(`${picked.length} of ${all.length} keys are not the defaults.`));
  place.append(rows(picked));
  if (picked.length < all.length) place.append(element("details", {}, element("summary", {}, `all ${all.length} keys`), rows(all)));
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  redraw();
}

// Canvases take their colours when they are drawn.
function redraw() {
  window.report.curves?.draw();
  window.report.timelines?.draw();
}

async function start() {
  window.report = {};
  drawHead();
  await drawCurves();
  drawMemory();
  drawParts();
  drawExperts();
  // What is drawn so far can be used while the timelines, which are the largest, are decoded.
  await new Promise(requestAnimationFrame);
  window.report.usableMs = performance.now();
  await drawTimelines();
  drawWire();
  drawKeys("config", "Config", (source, name) => source.config.set.includes(name));
  drawKeys("environment", "Environment", () => true);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // Once more after the frame in which the timelines are drawn.
  requestAnimationFrame(() => requestAnimationFrame(() => {
    window.report.readyMs = performance.now();
    document.documentElement.dataset.ready = "";
    document.dispatchEvent(new Event("report-ready"));
  }));
}

start();
