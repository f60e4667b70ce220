// A map of verdicts in memory: cells of 2 bits, the same layout as cli/verdict_map.h.

const COLD = 0, HOT = 1, SKIPPED = 2, INVISIBLE = 3;
const VERDICTS = ["cold", "hot", "skipped", "not visible"];

class VerdictMap {
  constructor(map) {
    Object.assign(this, map);
    this.tiles = Math.ceil(this.keys / this.tile);
    this.decoded = new Array(map.heads.length);
  }
  cells(head) {
    if (!this.decoded[head]) {
      const text = atob(this.heads[head].cells), bytes = new Uint8Array(text.length);
      for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
      this.decoded[head] = bytes;
    }
    return this.decoded[head];
  }
  at(head, y, x) {
    const i = y * this.width + x;
    return (this.cells(head)[i >> 2] >> (2 * (i & 3))) & 3;
  }
  // Keys of column x, query positions and rows of line y: [first, last].
  keysOf(x) {
    const size = this.tile * this.tiles_per_cell;
    return [x * size, Math.min(this.keys, (x + 1) * size) - 1];
  }
  rowsOf(y) {
    return [y * this.rows_per_cell, Math.min(this.rows, (y + 1) * this.rows_per_cell) - 1];
  }
  // Share of hot cells among the visible ones, by column.
  hotByColumn(head) {
    const shares = new Float64Array(this.width);
    for (let x = 0; x < this.width; x++) {
      let hot = 0, visible = 0;
      for (let y = 0; y < this.height; y++) {
        const verdict = this.at(head, y, x);
        hot += verdict === HOT;
        visible += verdict !== INVISIBLE;
      }
      shares[x] = visible > 0 ? hot / visible : 0;
    }
    return shares;
  }
}

const rgb = (name) => {
  const text = colour(name);
  return [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
};

// Paints the cells in `view` {x, y, w, h} (cells, fractions allowed) into an ImageData. A pixel that several cells share
// mixes their colours, and a hot one counts four times, so that a lone one stays visible.
function paintCells(map, head, view, image) {
  const palette = [rgb("cold"), rgb("hot"), rgb("skipped"), rgb("invisible")], weight = [1, 4, 1, 1];
  const { width, height, data } = image;
  const edges = (n, from, length, limit) => Array.from({ length: n + 1 }, (_, i) =>
    Math.min(limit, Math.max(0, Math.floor(from + (i * length) / n + 1e-9))));
  const xs = edges(width, view.x, view.w, map.width), ys = edges(height, view.y, view.h, map.height);
  const bytes = map.cells(head);
  let at = 0;
  for (let py = 0; py < height; py++) {
    const y0 = Math.min(ys[py], map.height - 1), y1 = Math.max(ys[py + 1], y0 + 1);
    for (let px = 0; px < width; px++, at += 4) {
      const x0 = Math.min(xs[px], map.width - 1), x1 = Math.max(xs[px + 1], x0 + 1);
      let r = 0, g = 0, b = 0, total = 0;
      for (let y = y0; y < y1; y++)
        for (let x = x0; x < x1; x++) {
          const i = y * map.width + x, verdict = (bytes[i >> 2] >> (2 * (i & 3))) & 3, w = weight[verdict];
          r += w * palette[verdict][0];
          g += w * palette[verdict][1];
          b += w * palette[verdict][2];
          total += w;
        }
      data[at] = r / total;
      data[at + 1] = g / total;
      data[at + 2] = b / total;
      data[at + 3] = 255;
    }
  }
}
