// Tables and lists: key figures, comparison, worst pairs, heads, times, attribution, recipe, terms.

// columns: [title, cell of a row, class]; a cell is text or an element.
function table(label, columns, rows) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    el("table", {}, el("thead", {}, el("tr", {}, ...columns.map(([title, , kind]) => el("th", { scope: "col", class: kind }, title)))),
      el("tbody", {}, ...rows.map((row, i) => el("tr", {}, ...columns.map(([, cell, kind]) => el("td", { class: kind }, cell(row, i))))))));
}

function keyFigures(data) {
  const figure = (value, name) => el("div", { class: "figure" }, el("b", {}, value), el("span", {}, name));
  const below = [["0.99", data.lt_0_99], ["0.9", data.lt_0_9], ["0", data.lt_0]].filter(([, n]) => isNumber(n));
  return el("div", { class: "figures" },
    figure(small(data.rel_l2), "relative L2 over all outputs"),
    figure(small(data.rel_l2_max), `relative L2 of the worst pair (${place(data, data.rel_l2_max_pair)})`),
    figure(cosine(data.min_cos), `lowest cosine (${place(data, data.min_cos_pair)}); mean ${cosine(data.mean_cos)}`),
    figure(count(data.lt_0_99), `of ${count(data.pairs)} pairs have a cosine under 0.99; ` + below.slice(1).map(([edge, n]) => `${count(n)} under ${edge}`).join(", ")),
    data.non_finite > 0 ? figure(count(data.non_finite), "pairs with a NaN or Inf that the truth does not have") : null,
    data.truth_not_finite > 0 ? figure(count(data.truth_not_finite), "pairs whose truth has a NaN or Inf: in no other figure") : null,
    figure(percent(data.hot_share), `of the visible (row, tile) pairs hot; ${percent(data.skip_share)} skipped`),
    isNumber(data.lamp_recomputed) ? figure(percent(data.lamp_recomputed), `of the sub-blocks recomputed; ${percent(data.lamp_disruptive)} of the tiles disruptive`) : null,
    figure(small(data.max_abs), `largest error of a value; mean ${small(data.mean_abs)}`),
    figure(small(data.lse_max_abs), "largest error of the LSE"),
    isNumber(data.speedup) ? figure(times(data.speedup), `the speed of ${data.engine}'s exact method, prep included`)
      : figure(ms(data.prep_ms + data.attention_ms), "prep + attention, measured"));
}

function compareTable() {
  return table("Comparison", [
    ["method", (one) => one.label], ["relative L2", (one) => small(one.data.rel_l2)], ["worst pair", (one) => small(one.data.rel_l2_max)],
    ["mean cosine", (one) => cosine(one.data.mean_cos)], ["lowest", (one) => cosine(one.data.min_cos)], ["< 0.99", (one) => count(one.data.lt_0_99)],
    ["hot", (one) => percent(one.data.hot_share)], ["prep + attention", (one) => ms(one.data.prep_ms + one.data.attention_ms)],
    ["against exact", (one) => times(one.data.speedup)], ["engine, kernel", (one) => `${one.data.engine}: ${one.data.kernel}`, "left"],
  ], evals);
}

function worstTable(data, view) {
  const digits = Math.max(...data.worst.map((pair) => cosineDigits(pair.cos)));
  const head = (pair) => data.map.heads.findIndex((h) => h.batch === pair.batch && h.head === pair.head);
  const show = (pair) => el("button", { type: "button", "aria-label": `Show ${place(data, [pair.batch, pair.head, pair.row])} on the map`,
    onclick: () => view.show(head(pair), pair.row, pair.largest_cold_tile >= 0 ? pair.largest_cold_tile : Math.floor(pair.position / view.map.tile)) }, "map");
  const columns = [
    ["", (pair, i) => `${i + 1}`], [data.shape.B > 1 ? "batch, head" : "head", (pair) => (data.shape.B > 1 ? `${pair.batch}, ${pair.head}` : String(pair.head))],
    ["row", (pair) => count(pair.row)], ["at key", (pair) => count(pair.position)], ["cosine", (pair) => cosine(pair.cos, digits)], ["relative L2", (pair) => small(pair.rel_l2)],
    ["hot of tiles", (pair) => `${count(pair.hot_tiles)} of ${count(pair.tiles)}`], ["cold mass", (pair) => percent(pair.cold_mass)],
    ["largest cold share", (pair) => percent(pair.largest_cold_share)], ["in tile", (pair) => (pair.largest_cold_tile >= 0 ? count(pair.largest_cold_tile) : DASH)],
    ["cancellation", (pair) => times(pair.cancellation)], ["|out| / |exact|", (pair) => (pair.truth_norm > 0 ? (pair.out_norm / pair.truth_norm).toFixed(4) : DASH)],
  ];
  if (view) columns.splice(1, 0, ["show", show, "left"]);
  return table("Worst pairs", columns, data.worst);
}

function histogramTable({ edges, one_minus_cos: cos, rel_l2: rel }) {
  const used = cos.map((n, i) => i).filter((i) => cos[i] > 0 || rel[i] > 0);
  return table("Histogram", [
    ["from … to under", (i) => binRange(edges, i)], ["pairs by 1 − cosine", (i) => count(cos[i])], ["pairs by relative L2", (i) => count(rel[i])],
  ], used);
}

function timesTable(list) {
  return table("Measured times", [
    ["method", (one) => one.label], ["prep", (one) => ms(one.data.prep_ms)], ["attention", (one) => ms(one.data.attention_ms)],
    ["exact method", (one) => ms(one.data.exact_ms)], ["against exact", (one) => times(one.data.speedup)], ["medians of", (one) => count(one.data.repeats)],
    ["kernel", (one) => one.data.kernel, "left"],
  ], list);
}

function headsTable(data) {
  return table("Heads", [
    ["head", (h) => headName(data, h.batch, h.head)], ["mean cosine", (h) => cosine(h.mean_cos)], ["lowest", (h) => cosine(h.min_cos)],
    ["in row", (h) => count(h.min_cos_row)], ["relative L2", (h) => small(h.rel_l2)], ["worst row", (h) => small(h.rel_l2_max)],
    ["< 0.99", (h) => count(h.lt_0_99)], ["hot", (h) => percent(h.hot_share)], ["skipped", (h) => percent(h.skip_share)],
  ], data.heads);
}

function modelTable(data) {
  return table("Modelled times", [
    ["device", ([device]) => device], ["prep", ([, c]) => ms(c.prep_ms)], ["attention", ([, c]) => ms(c.attention_ms)], ["exact method", ([, c]) => ms(c.exact_ms)],
    ["against exact", ([, c]) => times(c.speedup)], ["done by a wider unit", ([, c]) => (c.replaced && c.replaced.length ? c.replaced.join(", ") : DASH), "left"],
  ], Object.entries(data.cost));
}

function pointsTable(points, device) {
  const shown = points.filter((p) => p.cost[device] && isNumber(p.cost[device].total)), best = new Set(frontier(shown, device));
  return table("Error against cost", [
    ["setting", (p) => p.name], ["relative L2", (p) => small(p.error)], ["lowest cosine", (p) => cosine(p.min_cos)], ["hot", (p) => percent(p.hot)],
    ["cost", (p) => ms(p.cost[device].total)], ["exact method", (p) => ms(p.cost[device].exact)],
    ["against exact", (p) => times(p.cost[device].exact / p.cost[device].total)], ["none better", (p) => (best.has(p) ? "yes" : ""), "left"], ["engine", (p) => p.engine, "left"],
  ], [...shown].sort((a, b) => a.cost[device].total - b.cost[device].total));
}

function attributionTable(attribution) {
  const rows = [["all, as the method is", attribution.all], ["none", attribution.none]];
  for (const kind of ["only", "all_but"])
    for (const [operand, runs] of Object.entries(attribution.operands)) rows.push([`${kind.replace("_", " ")} ${operand}`, runs[kind]]);
  return table("Error by operand", [
    ["quantised", ([name]) => name], ["relative L2", ([, run]) => (run.ran ? small(run.rel_l2) : DASH)], ["lowest cosine", ([, run]) => (run.ran ? cosine(run.min_cos) : DASH)],
    ["worst pairs: relative L2", ([, run]) => (run.ran ? small(run.worst_rel_l2) : DASH)], ["mean cosine", ([, run]) => (run.ran ? cosine(run.worst_mean_cos) : DASH)],
    ["verdicts flipped", ([, run]) => (run.ran ? percent(run.verdicts_changed) : DASH)], ["", ([, run]) => (run.ran ? "" : run.refusal), "left"],
  ], rows);
}

function recipeList(recipe) {
  const text = (value) => (typeof value === "number" ? String(value).replace("-", MINUS) : String(value));
  return el("dl", { class: "recipe" }, ...Object.entries(recipe).map(([knob, value]) => el("div", {}, el("dt", {}, knob), el("dd", {}, text(value)))));
}

const TERMS = [
  ["pair", "one output vector: a query position of a query head. All of them are measured, none is sampled."],
  ["exact", "attention in double precision over the same inputs: what every error here is against."],
  ["tile", "a run of keys (64 as a rule) that is judged as a whole."],
  ["hot", "a row's group gives the tile more than ε of its probability mass, so it is computed again in the exact format."],
  ["cold", "the tile stays as the cheap format computed it."],
  ["skipped", "a cold tile that provably changes nothing at the precision kept, so its work was left out."],
  ["sink", "the first tile: many heads of language models park probability there, which shows as a hot first column."],
  ["diagonal", "the newest keys that a query sees: usually near in meaning, so usually hot."],
  ["cosine", "of the angle between output and exact output; 1 is the same direction. It does not see a wrong length."],
  ["relative L2", "length of the error over length of the exact output. It sees direction and length."],
  ["cold mass", "share of a row's exact probability that went through the cheap format."],
  ["largest cold share", "the largest part of that in one tile, taken from the exact probabilities; the verdict saw an estimate of it."],
  ["cancellation", "lengths of what hot and cold tiles contribute, added, over the length of their sum: how much their own relative errors grow."],
  ["LSE", "natural logarithm of the sum of the exponentials of the scaled scores."],
  ["prep", "statistics and quantisation of K and V, before any query is looked at."],
  ["ε (eps)", "the share of a row's mass beyond which a tile is hot."],
  ["modelled", "operations counted in this run, divided by a device's documented rates. Not a measurement."],
];

function termsList() {
  return el("dl", { class: "terms" }, ...TERMS.flatMap(([term, meaning]) => [el("dt", {}, term), el("dd", {}, meaning)]));
}
