// Draw curves over steps: one chart a metric, all runs in each, with one zoom and one pointer for all charts.
"use strict";

const METRICS = [
  { key: "loss", title: "Loss", unit: "nats a token", isWide: true, mayBeLog: true },
  { key: "tokens_per_s", title: "Speed", unit: "tokens/s", fromZero: true },
  { key: "grad_norm", title: "Gradient norm", unit: "", mayBeLog: true },
  { key: "lr", title: "Learning rate", unit: "" },
  { key: "mfu", title: "MFU", unit: "% of the devices' peak", factor: 100, fromZero: true },
];

class Curves {
  // `runs` are [{name, colour, curves}], decoded.
  constructor(container, runs) {
    this.runs = runs;
    this.charts = [];
    this.smoothing = 0;
    this.isLog = false;
    this.grid = element("div", { class: "charts" });
    container.append(this.toolbar(), this.grid);
    this.draw();
    new ResizeObserver(() => this.resize()).observe(this.grid);
  }

  toolbar() {
    const slider = element("input", {
      type: "range", min: 0, max: 0.98, step: 0.02, value: 0,
      oninput: () => { this.smoothing = Number(slider.value); this.draw(); },
    });
    const log = element("input", {
      type: "checkbox", onchange: () => { this.isLog = log.checked; this.draw(); },
    });
    const reset = element("button", { onclick: () => this.reset() }, "whole run");
    const hint = element("span", { class: "quiet" }, "drag to zoom, double-click to see all");
    return element("div", { class: "toolbar" },
      element("label", {}, "smooth ", slider), element("label", {}, log, " log scale"), reset, hint);
  }

  draw() {
    const shown = this.charts[0]?.plot.scales.x;
    const range = shown && this.isZoomed ? [shown.min, shown.max] : null;
    for (const chart of this.charts) chart.plot.destroy();
    this.grid.replaceChildren();
    const keys = new Set(this.runs.flatMap((run) => Object.keys(run.curves.metrics)));
    const own = [...keys].filter((key) => key.startsWith("values/"));
    const metrics = [...METRICS, ...own.map((key) => ({ key, title: key.slice("values/".length), unit: "" }))];
    this.charts = metrics.filter((metric) => this.runs.some((run) => metric.key in run.curves.metrics))
      .map((metric) => this.chart(metric));
    this.grid.classList.toggle("three", (this.charts.length - 1) % 3 === 0);
    this.resize();
    if (range) this.zoom(...range);
  }

  chart(metric) {
    const readout = element("span", { class: "readout" });
    const unit = metric.unit ? ` · ${metric.unit}` : "";
    const head = element("div", { class: "chart-head" },
      element("b", {}, metric.title), element("span", { class: "quiet" }, unit), readout);
    const place = element("div", { class: metric.isWide ? "chart wide" : "chart" }, head);
    this.grid.append(place);
    const { data, series, bands, labels } = this.series(metric);
    const isLog = this.isLog && Boolean(metric.mayBeLog);
    const range = metric.fromZero ? (plot, low, high) => [0, (high > 0 ? high : 1) * 1.08] : undefined;
    const chart = { metric, place, readout, labels };
    const options = {
      width: place.clientWidth - 20,
      height: metric.isWide ? 280 : 220,
      legend: { show: false },
      cursor: { sync: { key: "shardwise" }, drag: { x: true, y: false, dist: 5 }, points: { size: 6 } },
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1, ...(range && !isLog ? { range } : {}) } },
      series, bands,
      axes: [this.axis({ values: (plot, ticks) => ticks.map(shortNumber), label: "step", labelSize: 16, labelFont: "11px system-ui, sans-serif", labelGap: 0, size: 26 }),
        this.axis({ values: (plot, ticks) => ticks.map((each) => (each === null ? "" : shortNumber(each))), size: 58 })],
      hooks: {
        setCursor: [(plot) => this.read(chart, plot)],
        setScale: [(plot, key) => { if (key === "x") this.follow(plot); }],
        ready: [(plot) => plot.over.addEventListener("wheel", (event) => this.wheel(plot, event), { passive: false })],
      },
    };
    chart.plot = new uPlot(options, data, place);
    chart.points = series.slice(1).map((each, index) => data[index + 1].length);
    this.read(chart, chart.plot);
    return chart;
  }

  axis(more) {
    const stroke = themeColour("--quiet");
    const line = { stroke: themeColour("--line"), width: 1 };
    return { stroke, grid: line, ticks: { ...line, size: 4 }, font: "11px system-ui, sans-serif", gap: 4, ...more };
  }

  // Join the runs' columns on their steps; a bucket of several steps has its least and largest value as a band.
  series(metric) {
    const factor = metric.factor ?? 1;
    const numbers = (column) => Array.from(column, (each) => (Number.isFinite(each) ? each * factor : null));
    const tables = [], series = [{}], bands = [], labels = [];
    for (const run of this.runs) {
      const columns = run.curves.metrics[metric.key];
      if (!columns) continue;
      const table = [Array.from(run.curves.step), smoothed(numbers(columns.mean), this.smoothing)];
      series.push({ stroke: run.colour, width: 1.6, spanGaps: true, points: { show: table[0].length === 1 } });
      const label = { name: run.name, colour: run.colour, mean: series.length - 1 };
      if (columns.low) {
        table.push(numbers(columns.low), numbers(columns.high));
        for (const _ of [0, 1]) series.push({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
        bands.push({ series: [series.length - 1, series.length - 2], fill: `${run.colour}33` });
        Object.assign(label, { low: series.length - 2, high: series.length - 1 });
      }
      labels.push(label);
      tables.push(table);
      const heldOut = run.curves.held_out;
      if (metric.key === "loss" && heldOut.step.length) {
        tables.push([Array.from(heldOut.step), numbers(heldOut.value)]);
        const points = { show: heldOut.step.length <= 60, size: 7, fill: themeColour("--paper"), stroke: run.colour, width: 1.6 };
        series.push({ stroke: run.colour, width: 1.2, dash: [5, 4], spanGaps: true, points });
        labels.push({ name: `${run.name}, held out`, colour: run.colour, mean: series.length - 1, isDashed: true });
      }
    }
    return { data: tables.length > 1 ? uPlot.join(tables) : tables[0], series, bands, labels };
  }

  // Show the values at the pointer, or the last ones where there is none.
  read(chart, plot) {
    if (!plot) return;
    const steps = plot.data[0];
    const index = plot.cursor.idx ?? steps.length - 1;
    chart.readout.replaceChildren(`step ${Math.round(steps[index]).toLocaleString("en")}`);
    for (const label of chart.labels) {
      const at = known(plot.data[label.mean], index, plot.cursor.idx === null || label.isDashed);
      if (at === null) continue;
      const span = label.low ? ` (${formatNumber(plot.data[label.low][at])} to ${formatNumber(plot.data[label.high][at])})` : "";
      const name = this.runs.length > 1 ? `${label.name} ` : label.isDashed ? "held out " : "";
      const where = label.isDashed && at !== index ? ` at ${steps[at].toLocaleString("en")}` : "";
      chart.readout.append(element("span", { class: "value", style: `color: ${label.colour}` },
        `${name}${formatNumber(plot.data[label.mean][at])}${span}${where}`));
    }
  }

  follow(plot) {
    const { min, max } = plot.scales.x;
    const steps = plot.data[0];
    this.isZoomed = min > steps[0] || max < steps.at(-1);
    if (!this.isFollowing) this.zoom(min, max, plot);
  }

  zoom(min, max, from = null) {
    this.isFollowing = true;
    for (const { plot } of this.charts) {
      if (plot && plot !== from) plot.setScale("x", { min, max });
    }
    // Scales are set in a microtask, whose hooks would call this again.
    queueMicrotask(() => queueMicrotask(() => { this.isFollowing = false; }));
  }

  reset() {
    const steps = this.runs.flatMap((run) => [run.curves.step[0], run.curves.step.at(-1)]);
    this.zoom(Math.min(...steps), Math.max(...steps));
  }

  wheel(plot, event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const { min, max } = plot.scales.x;
    const steps = plot.data[0];
    const at = plot.posToVal(event.offsetX, "x");
    const factor = Math.exp(event.deltaY * 0.003);
    this.zoom(Math.max(steps[0], at - (at - min) * factor), Math.min(steps.at(-1), at + (max - at) * factor));
  }

  resize() {
    for (const { plot, place } of this.charts) {
      const width = place.clientWidth - 20;
      if (Math.abs(width - plot.width) > 1) plot.setSize({ width, height: plot.height });
    }
  }
}

// Return the nearest index at or before `index` that has a value; only `index` itself unless `isPast`.
function known(column, index, isPast) {
  for (let at = index; at >= 0; at--) {
    if (column[at] !== null && column[at] !== undefined) return at;
    if (!isPast) return null;
  }
  return null;
}

// Average exponentially; the start is not biased towards 0.
function smoothed(values, weight) {
  if (weight === 0) return values;
  let sum = 0, norm = 0;
  return values.map((each) => {
    if (each === null) return null;
    sum = weight * sum + (1 - weight) * each;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

function shortNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(4))} M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(4))} k`;
  if (size !== 0 && size < 1e-3) return value.toExponential().replace("e-", "e−");
  return String(Number(value.toPrecision(6)));
}
