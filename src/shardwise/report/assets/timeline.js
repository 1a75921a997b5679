// Draw timelines on canvases under each other: a row a rank, time from left to right. Only what is visible is drawn;
// actions that are narrower than a pixel are merged, and a pixel's strength is the share of it that is busy.
"use strict";

const AXIS_HEIGHT = 24, LABEL_WIDTH = 112, MARGIN_RIGHT = 12, MAX_HEIGHT = 460, MIN_PITCH = 4, MAX_PITCH = 60;

class Timelines {
  // `panels` are decoded; the toolbar serves all of them.
  constructor(container, panels) {
    const spans = panels.map((panel) => panel.makespan_s);
    this.isSameAxis = Math.max(...spans) < 20 * Math.min(...spans);
    this.query = "";
    this.hovered = null;
    const longest = Math.max(...panels.map((panel) => panel.makespan_s));
    this.panels = panels.map((panel) => new TimelinePanel(this, panel, longest));
    container.append(this.toolbar(), ...this.panels.map((panel) => panel.place), this.legend(panels));
    this.fit();
    new ResizeObserver(() => this.draw()).observe(container);
  }

  toolbar() {
    this.found = element("span", { class: "quiet found" });
    this.input = element("input", {
      type: "search", placeholder: "search: F5, rank 17, mb 3, send …", class: "search", "aria-label": "search actions",
      oninput: () => this.search(this.input.value),
      onkeydown: (event) => { if (event.key === "Enter") this.jump(event.shiftKey ? -1 : 1); },
    });
    const button = (text, title, onclick) => element("button", { title, onclick }, text);
    const same = element("input", {
      type: "checkbox", onchange: () => { this.isSameAxis = same.checked; this.fit(); },
    });
    same.checked = this.isSameAxis;
    return element("div", { class: "toolbar" }, this.input,
      button("‹", "the match before", () => this.jump(-1)), button("›", "the next match (Enter)", () => this.jump(1)),
      this.found, element("span", { class: "gap" }),
      ...(this.panels.length > 1 ? [element("label", {}, same, " one scale")] : []),
      element("span", { class: "group" }, "time ", button("−", "zoom out (−)", () => this.zoom(2)),
        button("+", "zoom in (+)", () => this.zoom(0.5)), button("fit", "see all (0)", () => this.fit())),
      element("span", { class: "group" }, "rows ", button("−", "lower rows", () => this.scaleRows(1 / 1.5)),
        button("+", "higher rows", () => this.scaleRows(1.5))));
  }

  legend(panels) {
    const kinds = new Map(panels.flatMap((panel) => panel.kinds.map((kind) => [kind.word, kind.colours[0][0]])));
    const items = [...kinds].map(([word, colour]) =>
      element("span", { class: "key" }, element("i", { style: `background: ${colour}` }), word));
    const idle = element("span", { class: "key" }, element("i", { class: "idle" }), "idle");
    const shades = panels.some((panel) => panel.num_chunks > 1) ? ["later stages of a rank are lighter"] : [];
    const hint = "drag to move, Ctrl + wheel to zoom, double-click to see all";
    return element("div", { class: "legend" }, ...items, idle, element("span", { class: "quiet" }, [...shades, hint].join("; ")));
  }

  // Each panel shows [from, to] in seconds; with one scale all panels show the same.
  fit() {
    for (const panel of this.panels) panel.show(0, this.isSameAxis ? panel.longest : panel.makespan, false);
    this.draw();
  }

  zoom(factor) {
    this.isSameAxis ? this.panels[0].zoomAt(factor) : this.panels.forEach((panel) => panel.zoomAt(factor));
  }

  scaleRows(factor) {
    for (const panel of this.panels) panel.scaleRows(factor);
    this.draw();
  }

  search(text) {
    this.query = text.trim();
    const test = this.query ? matcher(this.query) : null;
    for (const panel of this.panels) panel.search(test);
    const num = this.panels.reduce((sum, panel) => sum + panel.matches.length, 0);
    const all = this.panels.reduce((sum, panel) => sum + panel.start.length, 0);
    this.found.textContent = this.query ? `${num.toLocaleString("en")} of ${all.toLocaleString("en")} actions` : "";
    this.place = -1;
    this.draw();
  }

  jump(direction) {
    const all = this.panels.flatMap((panel) => Array.from(panel.matches, (index) => [panel, index]));
    if (!all.length) return;
    this.place = (this.place + direction + all.length) % all.length;
    const [panel, index] = all[this.place];
    panel.reveal(index);
    this.found.textContent = `${(this.place + 1).toLocaleString("en")} of ${all.length.toLocaleString("en")} matches`;
  }

  hover(action) {
    this.hovered = action;
    this.draw();
  }

  draw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      for (const panel of this.panels) panel.draw();
    });
  }
}

// Return a test of (panel, index) for a query: a code such as 2F5, "rank 17", "stage 2", "mb 3", or words of a kind.
function matcher(query) {
  const code = /^(\d*)([a-z])(\d+)$/i.exec(query);
  if (code) {
    const symbol = code[2].toUpperCase(), stage = code[1] === "" ? null : Number(code[1]), number = Number(code[3]);
    return (panel, index) => panel.kinds[panel.kind[index]].symbol === symbol && panel.microBatch[index] === number &&
      (stage === null || panel.stage[index] === stage);
  }
  const wanted = [];
  const words = query.toLowerCase().replace(/\b(rank|stage|mb|micro-?batch)[\s=]*(\d+)\b/g, (all, name, number) => {
    const column = { rank: "rankOf", stage: "stage" }[name] ?? "microBatch";
    wanted.push((panel, index) => panel[column][index] === Number(number));
    return "";
  }).split(/\s+/).filter(Boolean);
  for (const word of words) {
    wanted.push((panel, index) => panel.kinds[panel.kind[index]].word.includes(word) ||
      (panel.groups[panel.group[index]] ?? "").toLowerCase().includes(word));
  }
  return (panel, index) => wanted.every((test) => test(panel, index));
}

class TimelinePanel {
  constructor(owner, data, longest) {
    Object.assign(this, { owner, longest, makespan: data.makespan_s || 1e-9, streams: data.streams, ranks: data.ranks });
    Object.assign(this, { kinds: data.kinds, kind: data.kind, stage: data.stage, chunk: data.chunk, group: data.group });
    Object.assign(this, { microBatch: data.micro_batch, groups: data.group_names, numChunks: data.num_chunks });
    Object.assign(this, { idle: data.idle, spanIdle: data.span_idle_s, tick: this.makespan / data.num_ticks });
    this.unpack(data);
    this.matches = [];
    this.matched = null;
    this.scrollY = 0;
    this.pitch = Math.min(this.streams.length > 1 ? 34 : 26, Math.max(MIN_PITCH, (MAX_HEIGHT - AXIS_HEIGHT) / this.ranks.length));
    this.canvas = element("canvas", { tabindex: 0, "aria-label": data.title });
    this.context = this.canvas.getContext("2d");
    const left = data.left_out.length ? `Left out, to keep the page small: ${data.left_out.join("; ")}.` : "";
    this.place = element("div", { class: "panel" },
      element("div", { class: "panel-head" }, element("b", {}, data.title),
        element("span", { class: "quiet" }, ` · bubble ${data.bubble}`)),
      ...(left ? [element("p", { class: "note" }, left)] : []), this.canvas);
    this.listen();
  }

  // Starts and ends in ticks, from gaps and lengths; the first action of each row; the rank of each action. An action may
  // lie within another, so `reach` is the latest end up to each action.
  unpack(data) {
    const num = data.gap.length;
    this.start = new Int32Array(num);
    this.end = new Int32Array(num);
    this.rankOf = new Int32Array(num);
    this.reach = new Int32Array(num);
    this.rowFirst = new Int32Array(data.counts.length + 1);
    let index = 0;
    for (let row = 0; row < data.counts.length; row++) {
      this.rowFirst[row] = index;
      for (let at = 0, reach = 0, last = index + data.counts[row]; index < last; index++) {
        this.start[index] = at + data.gap[index];
        at = this.end[index] = this.start[index] + data.long[index];
        reach = this.reach[index] = Math.max(reach, at);
        this.rankOf[index] = this.ranks[Math.floor(row / this.streams.length)];
      }
    }
    this.rowFirst[data.counts.length] = index;
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("dblclick", () => this.owner.fit());
    canvas.addEventListener("pointerdown", (event) => {
      this.drag = { x: event.clientX, y: event.clientY, from: this.from, to: this.to, scrollY: this.scrollY };
      canvas.setPointerCapture(event.pointerId);
      tip.hide();
    });
    canvas.addEventListener("pointermove", (event) => (this.drag ? this.dragTo(event) : this.point(event)));
    canvas.addEventListener("pointerup", () => { this.drag = null; });
    canvas.addEventListener("pointerleave", () => { tip.hide(); this.hoverRow = null; this.owner.hover(null); });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  get width() { return this.canvas.clientWidth - LABEL_WIDTH - MARGIN_RIGHT; }
  get rowsHeight() { return this.height - AXIS_HEIGHT; }
  get maxScroll() { return Math.max(0, this.pitch * this.ranks.length - this.rowsHeight); }

  show(from, to, isShared = this.owner.isSameAxis) {
    const whole = this.owner.isSameAxis ? this.longest : this.makespan;
    const span = Math.min(whole, Math.max(to - from, 4 * this.tick));
    from = Math.min(Math.max(0, from), whole - span);
    for (const panel of isShared ? this.owner.panels : [this]) [panel.from, panel.to] = [from, from + span];
    this.owner.draw();
  }

  zoomAt(factor, x = LABEL_WIDTH + this.width / 2) {
    const at = this.from + ((x - LABEL_WIDTH) / this.width) * (this.to - this.from);
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  scroll(by) { this.scrollY = Math.min(this.maxScroll, Math.max(0, this.scrollY + by)); }

  scaleRows(factor) {
    const before = this.pitch;
    this.pitch = Math.min(MAX_PITCH, Math.max(MIN_PITCH, this.pitch * factor));
    this.scrollY *= this.pitch / before;
  }

  wheel(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoomAt(Math.exp(event.deltaY * 0.003), event.offsetX);
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const by = ((event.deltaX || event.deltaY) / this.width) * (this.to - this.from);
      this.show(this.from + by, this.to + by);
    } else {
      const before = this.scrollY;
      this.scroll(event.deltaY);
      // At the first and last row the page itself scrolls.
      if (this.scrollY !== before) { event.preventDefault(); this.owner.draw(); }
    }
  }

  dragTo(event) {
    const by = ((this.drag.x - event.clientX) / this.width) * (this.drag.to - this.drag.from);
    this.scrollY = this.drag.scrollY;
    this.scroll(this.drag.y - event.clientY);
    this.show(this.drag.from + by, this.drag.to + by);
  }

  key(event) {
    const by = 0.2 * (this.to - this.from);
    const keys = {
      ArrowLeft: () => this.show(this.from - by, this.to - by), ArrowRight: () => this.show(this.from + by, this.to + by),
      ArrowUp: () => this.scroll(-3 * this.pitch), ArrowDown: () => this.scroll(3 * this.pitch),
      "+": () => this.zoomAt(0.5), "=": () => this.zoomAt(0.5), "-": () => this.zoomAt(2), 0: () => this.owner.fit(),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
    this.owner.draw();
  }

  search(test) {
    this.matched = test ? new Uint8Array(this.start.length) : null;
    this.matches = [];
    for (let index = 0; test && index < this.start.length; index++) {
      if (test(this, index)) { this.matched[index] = 1; this.matches.push(index); }
    }
  }

  // Bring an action to the middle, wide enough for its label.
  reveal(index) {
    const middle = (0.5 * (this.start[index] + this.end[index])) * this.tick;
    const long = (this.end[index] - this.start[index]) * this.tick;
    const span = Math.min(this.to - this.from, (long * this.width) / 40);
    this.scrollY = 0;
    this.scroll(this.ranks.indexOf(this.rankOf[index]) * this.pitch - this.rowsHeight / 2);
    this.show(middle - span / 2, middle + span / 2);
  }

  // Return the action under the pointer, or null; the rank's row is `hoverRow`.
  find(x, y) {
    const row = Math.floor((y - AXIS_HEIGHT + this.scrollY) / this.pitch);
    this.hoverRow = y > AXIS_HEIGHT && row < this.ranks.length ? row : null;
    if (this.hoverRow === null || x < LABEL_WIDTH) return null;
    const within = y - AXIS_HEIGHT + this.scrollY - row * this.pitch;
    const stream = this.bands().findIndex(([top, height]) => within >= top && within < top + height + 1);
    if (stream < 0) return null;
    const time = (this.from + ((x - LABEL_WIDTH) / this.width) * (this.to - this.from)) / this.tick;
    const pixel = (this.to - this.from) / this.width / this.tick;
    const first = this.rowFirst[row * this.streams.length + stream], last = this.rowFirst[row * this.streams.length + stream + 1];
    let found = null;
    for (let index = this.lower(first, last, time - pixel); index < last && this.start[index] <= time + pixel; index++) {
      if (this.end[index] >= time - pixel) found = index;  // the last one is drawn over the others
    }
    return found;
  }

  point(event) {
    const found = this.find(event.offsetX, event.offsetY);
    if (found !== null) tip.show(this.describe(found), event);
    else if (this.hoverRow !== null && event.offsetX < LABEL_WIDTH) tip.show(this.describeRank(this.hoverRow), event);
    else tip.hide();
    this.owner.hover(found === null ? null : { word: this.kinds[this.kind[found]].word, stage: this.stage[found], microBatch: this.microBatch[found] });
  }

  describe(index) {
    const start = this.start[index] * this.tick, end = this.end[index] * this.tick;
    const kind = this.kinds[this.kind[index]];
    const group = this.group[index] >= 0 ? `, ${this.groups[this.group[index]]}` : "";
    const batch = this.microBatch[index] >= 0 ? `, micro-batch ${this.microBatch[index]}` : "";
    const times = [start, end].map((each) => formatSeconds(each, this.makespan)).join(" to ");
    return `${kind.word} of stage ${this.stage[index]}${group}${batch}\nrank ${this.rankOf[index]}, ${times} (${formatSeconds(end - start)})`;
  }

  describeRank(row) {
    const busy = 1 - this.idle[row];
    return `rank ${this.ranks[row]} computes ${formatSeconds(busy * this.makespan)}, ${(100 * busy).toFixed(1)} % of the time\n` +
      `idle ${formatSeconds(this.idle[row] * this.makespan)}; ${formatSeconds(this.spanIdle[row])} between its first and last computation`;
  }

  // Return [top, height] of each stream within a rank's row: computations, then thin rows if they can be seen.
  bands() {
    const gap = this.pitch >= 18 ? 4 : this.pitch >= 9 ? 2 : this.pitch >= 6 ? 1 : 0;
    const thin = this.streams.length > 1 && this.pitch >= 20 ? 4 : 0;
    const main = this.pitch - gap - thin * (this.streams.length - 1);
    return this.streams.map((_, stream) => (stream === 0 ? [0, main] : thin ? [main + thin * (stream - 1) + 1, thin - 1] : [0, 0]));
  }

  // Return the first index from which on a row's actions reach beyond `time`, in ticks.
  lower(first, last, time) {
    let low = first, high = last;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.reach[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  draw() {
    const { canvas, context } = this;
    this.height = Math.min(MAX_HEIGHT, AXIS_HEIGHT + this.pitch * this.ranks.length + 2);
    this.scroll(0);
    const scale = devicePixelRatio || 1, wide = canvas.parentElement.clientWidth;
    canvas.style.height = `${this.height}px`;
    if (canvas.width !== Math.round(wide * scale)) canvas.width = Math.round(wide * scale);
    if (canvas.height !== Math.round(this.height * scale)) canvas.height = Math.round(this.height * scale);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    this.colours = { ink: themeColour("--ink"), quiet: themeColour("--quiet"), paper: themeColour("--paper"), line: themeColour("--line"), idle: themeColour("--idle") };
    context.clearRect(0, 0, wide, this.height);
    this.drawn = { single: 0, merged: 0, labels: 0, rows: 0, names: [] };
    context.save();
    context.beginPath();
    context.rect(LABEL_WIDTH, AXIS_HEIGHT, this.width, this.rowsHeight);
    context.clip();
    const first = Math.floor(this.scrollY / this.pitch);
    const last = Math.min(this.ranks.length, Math.ceil((this.scrollY + this.rowsHeight) / this.pitch));
    const bands = this.bands();
    this.drawIdle(first, last, bands[0][1]);
    this.drawAxis(true);
    for (let row = first; row < last; row++) this.drawRank(row, AXIS_HEIGHT + row * this.pitch - this.scrollY, bands);
    this.drawn.rows = last - first;
    context.restore();
    this.drawAxis(false);
    this.drawNames(first, last, bands[0][1]);
    this.drawThumb();
  }

  x(ticks) { return LABEL_WIDTH + ((ticks * this.tick - this.from) / (this.to - this.from)) * this.width; }

  drawIdle(first, last, height) {
    const whole = Math.min(this.x(this.makespan / this.tick) - LABEL_WIDTH, this.width);
    this.context.fillStyle = this.colours.idle;
    for (let row = first; row < last; row++) {
      this.context.fillRect(LABEL_WIDTH, AXIS_HEIGHT + row * this.pitch - this.scrollY, whole, height);
    }
  }

  drawRank(row, top, bands) {
    bands.forEach(([offset, height], stream) => {
      const at = row * this.streams.length + stream;
      if (height > 0) this.drawRow(this.rowFirst[at], this.rowFirst[at + 1], top + offset, height, stream === 0);
    });
  }

  drawRow(first, last, top, height, isMain) {
    const { context, tick } = this;
    const perTick = (this.width * tick) / (this.to - this.from);
    const base = LABEL_WIDTH - (this.from / tick) * perTick, end = this.to / tick;
    let pixel = null, busy = 0, longest = 0, colour = "";
    const flush = () => {
      if (pixel === null) return;
      context.globalAlpha = Math.max(0.12, Math.min(1, busy));
      context.fillStyle = colour;
      context.fillRect(pixel, top, 1, height);
      context.globalAlpha = 1;
      this.drawn.merged++;
      pixel = null;
    };
    for (let index = this.lower(first, last, this.from / tick); index < last && this.start[index] < end; index++) {
      const left = base + this.start[index] * perTick, width = (this.end[index] - this.start[index]) * perTick;
      const isDim = this.matched !== null && !this.matched[index];
      if (width >= 1.5) {
        flush();
        this.drawAction(index, left, width, top, height, isMain, isDim);
        continue;
      }
      const at = Math.floor(left);
      if (at !== pixel) { flush(); pixel = at; busy = 0; longest = -1; }
      // A match is seen at any zoom.
      busy += isDim ? 0.15 * width : this.matched !== null ? 1 : width;
      const weight = this.matched !== null && !isDim ? 1e9 : width;
      if (weight > longest) { longest = weight; colour = this.colourOf(index)[0]; }
    }
    flush();
  }

  colourOf(index) { return this.kinds[this.kind[index]].colours[this.chunk[index]]; }

  drawAction(index, left, width, top, height, isMain, isDim) {
    const { context } = this;
    const [fill, ink] = this.colourOf(index);
    const shown = Math.max(1, width - (width > 4 ? 1 : 0));
    context.globalAlpha = isDim ? 0.18 : 1;
    context.fillStyle = fill;
    context.fillRect(left, top, shown, height);
    this.drawn.single++;
    const hovered = this.owner.hovered;
    if (hovered && width > 3 && hovered.microBatch === this.microBatch[index] && hovered.stage === this.stage[index] && hovered.word === this.kinds[this.kind[index]].word) {
      context.strokeStyle = this.colours.ink;
      context.lineWidth = 2;
      context.strokeRect(left + 1, top + 1, shown - 2, height - 2);
    }
    if (isMain && height >= 11 && width >= 10) this.drawLabel(index, left, shown, top, height, ink);
    context.globalAlpha = 1;
  }

  // Write the longest text that fits: stage, symbol and micro-batch; symbol and micro-batch; the symbol.
  drawLabel(index, left, width, top, height, ink) {
    const symbol = this.kinds[this.kind[index]].symbol, number = this.microBatch[index] >= 0 ? this.microBatch[index] : "";
    const texts = [`${symbol}${number}`, `${number}`, symbol];
    if (this.numChunks > 1) texts.unshift(`${this.stage[index]}${symbol}${number}`);
    const text = texts.find((each) => each && each.length * 6.6 + 3 <= width);
    if (!text) return;
    // Of an action that is partly visible the label stays in sight.
    const from = Math.max(left, LABEL_WIDTH), to = Math.min(left + width, LABEL_WIDTH + this.width);
    if (to - from < text.length * 6.6) return;
    const { context } = this;
    context.fillStyle = ink;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, (from + to) / 2, top + height / 2 + 0.5);
    this.drawn.labels++;
  }

  // Draw the lines, which lie under the actions, or the times above them.
  drawAxis(isLines) {
    const { context } = this;
    const span = this.to - this.from, rough = span / Math.max(2, this.width / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    for (let count = Math.ceil(this.from / step - 1e-9); count * step <= this.to; count++) {
      const x = LABEL_WIDTH + ((count * step - this.from) / span) * this.width;
      context.fillStyle = this.colours.line;
      context.fillRect(Math.round(x), isLines ? AXIS_HEIGHT : AXIS_HEIGHT - 6, 1, isLines ? this.rowsHeight : 6);
      if (isLines) continue;
      context.fillStyle = this.colours.quiet;
      const text = formatSeconds(count * step, this.to, step);
      if (x + text.length * 6.2 < LABEL_WIDTH + this.width + MARGIN_RIGHT) context.fillText(text, x + 3, AXIS_HEIGHT - 9);
    }
  }

  // The names of the ranks stay at the left while time moves; of low rows only some have the space for one.
  drawNames(first, last, height) {
    const { context, colours } = this;
    context.clearRect(0, 0, LABEL_WIDTH, this.height);
    context.save();
    context.beginPath();
    context.rect(0, AXIS_HEIGHT, LABEL_WIDTH, this.rowsHeight);
    context.clip();
    context.textBaseline = "middle";
    const every = [1, 2, 4, 8, 16, 32, 64].find((each) => each * this.pitch >= 13) ?? 128;
    for (let row = first; row < last; row++) {
      const isHovered = row === this.hoverRow;
      if (row % every !== 0 && !isHovered) continue;
      // The hovered name replaces its neighbours.
      if (!isHovered && this.hoverRow !== null && Math.abs(row - this.hoverRow) * this.pitch < 13) continue;
      const y = Math.max(AXIS_HEIGHT + 6, AXIS_HEIGHT + row * this.pitch - this.scrollY + height / 2);
      context.font = `${isHovered ? "600 " : ""}12px system-ui, sans-serif`;
      context.textAlign = "left";
      context.fillStyle = colours.ink;
      context.fillText(`rank ${this.ranks[row]}`, 2, y);
      context.font = "11px system-ui, sans-serif";
      context.textAlign = "right";
      context.fillStyle = colours.quiet;
      context.fillText(`${Math.round(100 * (1 - this.idle[row]))} %`, LABEL_WIDTH - 10, y);
      this.drawn.names.push(this.ranks[row]);
    }
    context.restore();
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "alphabetic";
    context.fillStyle = colours.quiet;
    context.fillText("busy", LABEL_WIDTH - 10, AXIS_HEIGHT - 9);
  }

  // A thumb at the right says which of the rows are seen.
  drawThumb() {
    if (this.maxScroll === 0) return;
    const all = this.pitch * this.ranks.length, x = this.canvas.clientWidth - 7;
    this.context.fillStyle = this.colours.line;
    this.context.fillRect(x, AXIS_HEIGHT, 5, this.rowsHeight);
    this.context.fillStyle = this.colours.quiet;
    const length = Math.max(18, (this.rowsHeight * this.rowsHeight) / all);
    this.context.fillRect(x, AXIS_HEIGHT + (this.scrollY / this.maxScroll) * (this.rowsHeight - length), 5, length);
  }
}
