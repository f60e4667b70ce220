// The map on the page: axes, hot share by key above it, zoom, a cursor for pointer and keyboard.

class MapView {
  constructor(data, map) {
    this.data = data;
    this.map = map;
    this.head = 0;
    this.cursor = null;
    this.view = { x: 0, y: 0, w: map.width, h: map.height };
    this.canvas = el("canvas", {
      id: "map", tabindex: "0", role: "application", "aria-roledescription": "map", "aria-describedby": "map-readout",
      onkeydown: (event) => this.key(event), onpointermove: (event) => this.move(event),
      onpointerdown: (event) => this.press(event), onpointerup: () => { this.drag = null; },
      onpointercancel: () => { this.drag = null; },
      onpointerleave: () => { if (!this.drag && document.activeElement !== this.canvas) this.point(null); },
      onblur: () => this.point(null),
    });
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.readout = el("output", { id: "map-readout", "aria-live": "polite" });
    this.root = el("div", {}, this.headPicker(), this.tools(), this.legend(),
      el("div", { class: "map" }, this.canvas, this.readout));
    this.select(0);
    drawWith(this.canvas, () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentNode);
  }

  // ---- around the map

  headPicker() {
    const { heads } = this.map;
    if (heads.length < 2) return null;
    if (heads.length > 128) {
      this.list = el("select", { onchange: () => this.select(Number(this.list.value)) },
        ...heads.map((head, i) => el("option", { value: i }, `${headName(this.data, head.batch, head.head)}, ${percent(head.hot / head.visible)} hot`)));
      return el("p", {}, el("label", {}, "Head ", this.list));
    }
    this.buttons = heads.map((head, i) => el("button", { type: "button", onclick: () => this.select(i) },
      headName(this.data, head.batch, head.head), " · ", percent(head.visible > 0 ? head.hot / head.visible : 0),
      el("canvas", { width: 264, height: 112, "aria-hidden": "true" })));
    const strip = el("div", { class: "heads", role: "group", "aria-label": "Head" }, ...this.buttons);
    drawWith(strip, () => this.buttons.forEach((button, i) => {
      const context = button.lastChild.getContext("2d"), image = context.createImageData(264, 112);
      paintCells(this.map, i, { x: 0, y: 0, w: this.map.width, h: this.map.height }, image);
      context.putImageData(image, 0, 0);
    }));
    return strip;
  }
  tools() {
    const button = (name, label, action) => el("button", { type: "button", title: label, "aria-label": label, onclick: action }, name);
    return el("div", { class: "controls map-tools" },
      button("+", "Zoom in", () => this.zoom(0.5)), button(MINUS, "Zoom out", () => this.zoom(2)),
      button("Whole map", "Show the whole map", () => this.zoom(Infinity)));
  }
  legend() {
    const head = this.map;
    const entry = (verdict, text) => el("li", {}, el("i", { style: `background: var(--${verdict})` }), text);
    return el("ul", { class: "legend" }, entry("hot", "hot: computed again, exactly"), entry("cold", "cold: the cheap format's result stands"),
      entry("skipped", "skipped: cold, and left out because it changes nothing"), entry("invisible", "not visible: behind the mask"),
      el("li", {}, `a cell is ${head.rows_per_cell} rows × ${head.tile * head.tiles_per_cell} keys, hot if any verdict in it is`));
  }

  select(head) {
    this.head = head;
    const one = this.map.heads[head];
    this.shares = this.map.hotByColumn(head);
    if (this.buttons) this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === head)));
    if (this.list) this.list.value = head;
    this.summary = `${headName(this.data, one.batch, one.head)}: of ${count(one.visible)} visible (row, tile) pairs ` +
      `${percent(one.hot / one.visible)} hot, ${percent(1 - one.hot / one.visible)} cold` +
      (one.skipped > 0 ? ` (${percent(one.skipped / one.visible)} skipped)` : "") + ".";
    this.canvas.setAttribute("aria-label", "Map of verdicts, " + this.summary + " Arrow keys move over the cells, + and " + MINUS + " zoom.");
    this.say();
    this.draw();
  }

  // To a pair from a table: its head, the cell of its row and of a tile.
  show(head, row, tile) {
    this.select(head);
    this.zoom(Infinity);
    this.canvas.scrollIntoView({ block: "center" });
    this.canvas.focus({ preventScroll: true });
    this.point({ x: Math.floor(Math.max(0, tile) / this.map.tiles_per_cell), y: Math.floor(row / this.map.rows_per_cell) });
  }

  // ---- the cursor

  point(cell) {
    if (cell) {
      cell = { x: Math.min(this.map.width - 1, Math.max(0, cell.x)), y: Math.min(this.map.height - 1, Math.max(0, cell.y)) };
      this.follow(cell);
    }
    this.cursor = cell;
    this.say();
    this.draw();
  }
  say() {
    if (!this.cursor) {
      this.readout.textContent = this.summary + " Point at a cell, or focus the map and use the arrow keys.";
      return;
    }
    const { x, y } = this.cursor, rows = this.map.rowsOf(y), keys = this.map.keysOf(x), off = this.map.q_offset;
    const tiles = [x * this.map.tiles_per_cell, Math.min(this.map.tiles, (x + 1) * this.map.tiles_per_cell) - 1];
    const span = (pair, shift = 0) => (pair[0] === pair[1] ? count(pair[0] + shift) : `${count(pair[0] + shift)}–${count(pair[1] + shift)}`);
    this.readout.textContent = `Queries at ${span(rows, off)} (rows ${span(rows)}) × keys ${span(keys)} ` +
      `(tile ${span(tiles)}): ${VERDICTS[this.map.at(this.head, y, x)]}. Of this column ${percent(this.shares[x])} of the visible cells are hot.`;
  }
  cellAt(event) {
    const box = this.canvas.getBoundingClientRect(), p = this.plot;
    const u = (event.clientX - box.left - p.x) / p.w, v = (event.clientY - box.top - p.y) / p.h;
    if (u < 0 || v < 0 || u >= 1 || v >= 1) return null;
    return { x: Math.floor(this.view.x + u * this.view.w), y: Math.floor(this.view.y + v * this.view.h) };
  }
  press(event) {
    this.drag = { x: event.clientX, y: event.clientY, view: { ...this.view } };
    this.canvas.setPointerCapture(event.pointerId);
    this.point(this.cellAt(event));
  }
  move(event) {
    if (this.drag && this.zoomed()) {
      this.view.x = this.drag.view.x - ((event.clientX - this.drag.x) / this.plot.w) * this.view.w;
      this.view.y = this.drag.view.y - ((event.clientY - this.drag.y) / this.plot.h) * this.view.h;
      this.clamp();
      this.draw();
    } else this.point(this.cellAt(event));
  }
  key(event) {
    const step = event.shiftKey ? 10 : 1, at = this.cursor || { x: Math.floor(this.view.x), y: Math.floor(this.view.y) };
    const moves = {
      ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step],
      Home: [-this.map.width, 0], End: [this.map.width, 0], PageUp: [0, -10], PageDown: [0, 10],
    };
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (moves[event.key]) this.point({ x: at.x + moves[event.key][0], y: at.y + moves[event.key][1] });
    else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "0") this.zoom(Infinity);
    else if (event.key === "Escape") this.point(null);
    else return;
    event.preventDefault();
  }

  // ---- the part that is shown

  zoomed() { return this.view.w < this.map.width || this.view.h < this.map.height; }
  clamp() {
    const { view, map } = this;
    view.w = Math.min(map.width, Math.max(Math.min(8, map.width), view.w));
    view.h = Math.min(map.height, Math.max(Math.min(4, map.height), view.h));
    view.x = Math.min(map.width - view.w, Math.max(0, view.x));
    view.y = Math.min(map.height - view.h, Math.max(0, view.y));
    this.canvas.style.touchAction = this.zoomed() ? "none" : "pan-y";
  }
  zoom(factor, at = this.cursor) {
    const { view, map } = this;
    if (factor === Infinity) this.view = { x: 0, y: 0, w: map.width, h: map.height };
    else {
      const u = at ? (at.x + 0.5 - view.x) / view.w : 0.5, v = at ? (at.y + 0.5 - view.y) / view.h : 0.5;
      const w = view.w * factor, h = view.h * factor;
      this.view = { x: view.x + u * (view.w - w), y: view.y + v * (view.h - h), w, h };
    }
    this.clamp();
    this.draw();
  }
  wheel(event) {
    if (!event.ctrlKey) return; // the page scrolls; with Ctrl (and by pinching a touchpad) the map zooms
    event.preventDefault();
    this.zoom(Math.exp(event.deltaY / 200), this.cellAt(event));
  }
  follow(cell) {
    const { view } = this;
    if (cell.x < view.x) view.x = cell.x;
    if (cell.x + 1 > view.x + view.w) view.x = cell.x + 1 - view.w;
    if (cell.y < view.y) view.y = cell.y;
    if (cell.y + 1 > view.y + view.h) view.y = cell.y + 1 - view.h;
  }

  // ---- drawing

  layout() {
    const width = this.canvas.parentNode.clientWidth, left = 78, top = 46, right = 8, bottom = 40;
    const plotWidth = Math.max(50, width - left - right), map = this.map;
    const shape = (plotWidth * map.rows) / map.keys; // as tall as it is true to scale, within reason
    const plotHeight = Math.round(Math.min(Math.max(shape, 240), Math.min(560, Math.max(320, plotWidth))));
    this.plot = { x: left, y: top, w: plotWidth, h: plotHeight };
    return { width, height: top + plotHeight + bottom };
  }
  draw() {
    if (!this.canvas.isConnected) return;
    const { width, height } = this.layout(), ratio = window.devicePixelRatio || 1, { canvas, plot } = this;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.dataset.plot = [plot.x, plot.y, plot.w, plot.h].join(",");
    const context = canvas.getContext("2d");
    const image = context.createImageData(Math.round(plot.w * ratio), Math.round(plot.h * ratio));
    paintCells(this.map, this.head, this.view, image);
    context.putImageData(image, Math.round(plot.x * ratio), Math.round(plot.y * ratio));
    context.scale(ratio, ratio);
    this.drawShares(context);
    this.drawAxes(context);
    if (this.cursor) this.drawCursor(context);
  }
  drawShares(context) {
    const { plot, view } = this, height = 24, base = plot.y - 6;
    context.fillStyle = colour("hot");
    for (let px = 0; px < plot.w; px++) {
      const x0 = Math.floor(view.x + (px / plot.w) * view.w), x1 = Math.max(x0 + 1, Math.floor(view.x + ((px + 1) / plot.w) * view.w));
      let share = 0;
      for (let x = x0; x < x1 && x < this.map.width; x++) share = Math.max(share, this.shares[x]);
      context.fillRect(plot.x + px, base - share * height, 1, share * height);
    }
    context.strokeStyle = colour("line");
    context.strokeRect(plot.x - 0.5, base - height - 0.5, plot.w + 1, height + 1);
    context.fillStyle = colour("soft");
    context.font = "12px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText("hot", plot.x - 8, base - height / 2);
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    context.fillText("hot share of each column, 0 … 100 %", plot.x, base - height - 5);
  }
  ticks(from, to, pixels, space) {
    const rough = ((to - from) * space) / pixels, power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) || 10 * power;
    const list = [];
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) list.push(at);
    return list;
  }
  drawAxes(context) {
    const { plot, view, map } = this, size = map.tile * map.tiles_per_cell, off = map.q_offset;
    context.strokeStyle = colour("line");
    context.strokeRect(plot.x - 0.5, plot.y - 0.5, plot.w + 1, plot.h + 1);
    context.fillStyle = colour("soft");
    context.font = "12px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const key of this.ticks(view.x * size, (view.x + view.w) * size, plot.w, 70)) {
      const x = plot.x + ((key / size - view.x) / view.w) * plot.w;
      context.fillRect(x, plot.y + plot.h, 1, 5);
      if (x < plot.x + plot.w - 16) context.fillText(count(key), x, plot.y + plot.h + 7);
    }
    context.fillText("key position →", plot.x + plot.w / 2, plot.y + plot.h + 23);
    context.textAlign = "right";
    context.textBaseline = "middle";
    const rows = map.rows_per_cell;
    for (const row of this.ticks(view.y * rows + off, (view.y + view.h) * rows + off, plot.h, 36)) {
      const y = plot.y + (((row - off) / rows - view.y) / view.h) * plot.h;
      if (y > plot.y + plot.h) continue;
      context.fillRect(plot.x - 5, y, 5, 1);
      context.fillText(count(row), plot.x - 8, Math.min(plot.y + plot.h - 6, Math.max(plot.y + 6, y)));
    }
    context.save();
    context.translate(8, plot.y + plot.h / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillText("← query position", 0, 0);
    context.restore();
  }
  drawCursor(context) {
    const { plot, view, cursor } = this;
    const w = plot.w / view.w, h = plot.h / view.h, x = plot.x + (cursor.x - view.x) * w, y = plot.y + (cursor.y - view.y) * h;
    context.lineWidth = 1;
    context.strokeStyle = colour("ink");
    context.globalAlpha = 0.35;
    context.strokeRect(Math.round(x) + 0.5, plot.y, Math.max(1, Math.round(w)), plot.h);
    context.strokeRect(plot.x, Math.round(y) + 0.5, plot.w, Math.max(1, Math.round(h)));
    context.globalAlpha = 1;
    context.lineWidth = 2;
    context.strokeRect(x - 1, y - 1, w + 2, h + 2);
  }
}
