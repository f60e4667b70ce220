// Charts, by Chart.js. Each is made anew when the theme changes, and each has its figures in a table beside it or under it.

Chart.defaults.animation = false;
Chart.defaults.responsive = true;
Chart.defaults.maintainAspectRatio = false;
Chart.defaults.font.family = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

const SERIES = ["first", "second", "third", "fourth"];
const POINTS = ["circle", "rectRot", "triangle", "rect", "rectRounded"]; // with the colours: twenty series differ

// A place for a chart; make() gives Chart.js its configuration in the colours of the theme.
function chart(label, make, tall = false) {
  const canvas = el("canvas", { role: "img", "aria-label": label });
  const box = el("div", { class: tall ? "chart tall" : "chart" }, canvas);
  let drawn = null;
  box.draw = () => {
    if (drawn) drawn.destroy();
    Chart.defaults.color = colour("soft");
    Chart.defaults.borderColor = colour("grid");
    drawn = new Chart(canvas, make());
  };
  drawWith(box, box.draw);
  return box;
}

const axis = (title, more = {}) => ({ title: { display: true, text: title }, grid: { color: colour("grid") }, ...more });
// Labels at powers of ten; on a shorter axis at their doubles and fives, too, on a very short one at all round numbers.
const decades = (title, more = {}) => axis(title, {
  type: "logarithmic",
  ticks: {
    callback(value) {
      const lead = value / 10 ** Math.floor(Math.log10(value) + 1e-9), span = this.max / this.min;
      const is = (n) => Math.abs(lead - n) < 1e-6;
      const shown = span < 8 ? is(Math.round(lead)) : is(1) || (span < 100 && (is(2) || is(5)));
      return shown ? small(value, 0) : "";
    },
  },
  ...more,
});
const keys = { labels: { usePointStyle: true, boxHeight: 7 } };

// ---- histogram

function binRange(edges, i) {
  if (i === 0) return `under ${small(edges[0], 1)}`;
  return i === edges.length ? `${small(edges[i - 1], 1)} and more` : `${small(edges[i - 1], 1)} to ${small(edges[i], 1)}`;
}

function histogramChart(histogram, key, title) {
  const counts = histogram[key], { edges } = histogram, last = counts.length - 1;
  let low = counts.findIndex((n) => n > 0), high = last;
  while (high > low && counts[high] === 0) high--;
  if (low < 0) low = high = 0;
  const bins = counts.map((n, i) => i).slice(low, high + 1);
  const range = (i) => binRange(edges, i);
  const shown = (i) => (i === 0 ? "0" : small(edges[i - 1], 0));
  return chart(`Histogram of ${title}: ` + bins.map((i) => `${range(i)}: ${counts[i]}`).join("; "), () => ({
    type: "bar",
    data: { labels: bins.map(shown), datasets: [{ data: bins.map((i) => counts[i] || null), backgroundColor: colour("first"), barPercentage: 1, categoryPercentage: 0.94 }] },
    options: {
      plugins: { legend: { display: false }, tooltip: { callbacks: { title: (items) => range(bins[items[0].dataIndex]), label: (item) => `${count(counts[bins[item.dataIndex]])} pairs` } } },
      scales: { x: axis(title + ", from … on", { ticks: { maxRotation: 0 } }), y: decades("pairs", { min: 0.5 }) },
    },
  }));
}

// ---- error by head

function headsChart(data) {
  const heads = data.heads, names = heads.map((h) => headName(data, h.batch, h.head).replace("batch ", "b").replace("head ", "h"));
  const series = (label, key, name) => ({ label, data: heads.map((h) => (h[key] > 0 ? h[key] : null)), borderColor: colour(name), backgroundColor: colour(name), pointRadius: 5, showLine: false, clip: 10 });
  return chart("Relative L2 of every head, over all its rows and its worst row; the figures are in the table below", () => ({
    type: "line",
    data: { labels: names, datasets: [series("all rows of the head", "rel_l2", "first"), { ...series("its worst row", "rel_l2_max", "second"), pointStyle: "triangle" }] },
    options: {
      interaction: { mode: "index", intersect: false },
      plugins: { legend: keys, tooltip: { callbacks: { label: (item) => `${item.dataset.label}: ${small(item.raw)}`, afterBody: (items) => `hot ${percent(heads[items[0].dataIndex].hot_share)}` } } },
      scales: { x: axis("head", { offset: true }), y: decades("relative L2") },
    },
  }));
}

// ---- error against cost

// What can be put on the chart: evaluations and rows of sweeps, with the cost of each device, and the time of this machine.
function costPoints() {
  const points = [];
  const add = (name, group, data) => {
    const cost = {};
    for (const [device, one] of Object.entries(data.cost || {})) cost[device] = { total: one.total_ms, exact: one.exact_ms };
    if (isNumber(data.attention_ms)) cost.measured = { total: data.prep_ms + data.attention_ms, exact: isNumber(data.exact_ms) ? data.exact_ms : null };
    points.push({ name, group, error: data.rel_l2, hot: data.hot_share, min_cos: data.min_cos, cost, shape: JSON.stringify(data.shape), engine: data.engine });
  };
  evals.forEach((one) => add(one.label, evals.length > 1 ? "evaluated" : one.label, one.data));
  sweeps.forEach((sweep) => sweep.data.rows.filter((row) => !row.refused).forEach((row) => {
    const knobs = Object.entries(row.knobs).map(([key, value]) => `${key}=${value}`).join(" ");
    add(`${row.method} ${knobs}`.trim(), row.method + (sweeps.length > 1 ? ` (${sweep.file})` : ""), { ...row, shape: sweep.data.shape });
  }));
  return points.filter((point) => isNumber(point.error) && point.error >= 0);
}

// The points that no other beats, by cost: less error at no more cost, or less cost at no more error.
function frontier(points, device) {
  const at = (p) => p.cost[device].total;
  let best = { error: Infinity, cost: Infinity };
  return [...points].sort((a, b) => at(a) - at(b) || a.error - b.error).filter((p) => {
    const kept = p.error < best.error || (p.error === best.error && at(p) === best.cost);
    if (kept) best = { error: p.error, cost: at(p) };
    return kept;
  });
}

// A dashed line at the exact method's cost.
const exactLine = (value) => ({
  id: "exact",
  afterDatasetsDraw(chart) {
    const { ctx, chartArea: area, scales: { x } } = chart, at = x.getPixelForValue(value);
    if (!isNumber(value) || at < area.left || at > area.right) return;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("soft");
    ctx.setLineDash([5, 4]);
    ctx.beginPath();
    ctx.moveTo(at, area.top);
    ctx.lineTo(at, area.bottom);
    ctx.stroke();
    ctx.font = "12px system-ui, sans-serif";
    const room = at > area.left + 90;
    ctx.textAlign = room ? "right" : "left";
    ctx.fillText("exact method", at + (room ? -6 : 6), area.top + 12);
    ctx.restore();
  },
});

function costChart(points, device) {
  const shown = points.filter((p) => p.cost[device] && p.cost[device].total > 0);
  const positive = shown.filter((p) => p.error > 0), groups = [...new Set(shown.map((p) => p.group))];
  const best = frontier(shown, device);
  const exact = shown.map((p) => p.cost[device].exact).find(isNumber);
  const xs = shown.map((p) => p.cost[device].total).concat(isNumber(exact) ? [exact] : []);
  const xy = (p) => ({ x: p.cost[device].total, y: p.error, point: p });
  return chart("Relative L2 against cost; the figures are in the table below", () => ({
    type: "scatter",
    plugins: [exactLine(exact)],
    data: {
      datasets: [...groups.map((group, i) => ({
        label: group, data: positive.filter((p) => p.group === group).map(xy), backgroundColor: colour(SERIES[i % 4]), borderColor: colour(SERIES[i % 4]),
        pointRadius: 5, pointHoverRadius: 7, clip: 10, pointStyle: POINTS[i % POINTS.length],
      })), { label: "no point is better in both", data: best.filter((p) => p.error > 0).map(xy), showLine: true, pointStyle: "line", pointRadius: 0, pointHitRadius: 0, borderColor: colour("soft"), borderWidth: 1.5, backgroundColor: "transparent" }],
    },
    options: {
      plugins: { legend: keys, tooltip: { callbacks: { label: ({ raw }) => [raw.point.name, `relative L2 ${small(raw.y)}, ${ms(raw.x)}, hot ${percent(raw.point.hot)}`] } } },
      scales: {
        x: decades(device === "measured" ? "prep + attention, measured, ms" : `prep + attention on ${device}, modelled, ms`, {
          min: Math.min(...xs) / 1.3, max: Math.max(...xs) * 1.3,
        }),
        y: decades("relative L2 of all outputs"),
      },
    },
  }), true);
}

// ---- times

function timesChart(list) {
  const rows = list.filter((one) => isNumber(one.data.attention_ms));
  const bar = (label, key, name, stack) => ({ label, data: rows.map((one) => one.data[key]), backgroundColor: colour(name), stack });
  return chart("Measured times in milliseconds: " + rows.map(({ label, data }) => `${label}: prep ${ms(data.prep_ms)}, attention ${ms(data.attention_ms)}, exact ${ms(data.exact_ms)}`).join("; "), () => ({
    type: "bar",
    data: { labels: rows.map((one) => one.label), datasets: [bar("prep", "prep_ms", "third", "method"), bar("attention", "attention_ms", "first", "method"), bar("the same engine's exact method", "exact_ms", "second", "exact")] },
    options: {
      indexAxis: "y",
      plugins: { tooltip: { callbacks: { label: (item) => `${item.dataset.label}: ${ms(item.raw)}` } } },
      scales: { x: axis("ms, median", { stacked: true, beginAtZero: true }), y: axis("", { stacked: true, title: { display: false }, grid: { display: false } }) },
    },
  }));
}
