// The page: sections in the order in which a reader asks.

const code = (text) => el("code", {}, text);
const asTable = (figures) => el("details", {}, el("summary", {}, "As a table"), figures);

function facts(one) {
  const { data } = one, s = data.shape;
  return `${one.file}: B ${s.B}, Hq ${s.Hq}, Hkv ${s.Hkv}, Sq ${count(s.Sq)}, Skv ${count(s.Skv)}, D ${s.D}, Dv ${s.Dv}, ${data.dtype}. ` +
    `Engine ${data.engine}, kernels ${data.kernel}` + (data.isa ? `, level ${data.isa}` : "") + (isNumber(data.threads) ? `, ${data.threads} thread${data.threads === 1 ? "" : "s"}` : "") +
    `. ${count(data.pairs)} pairs, every one against exact attention in double.`;
}

function mapSection(data) {
  if (!data.map) return [section("Map of verdicts", ["This result holds no map. ", code("apa eval --map"), " writes one into its JSON; ", code("apa report"), " on the inputs themselves makes one."])];
  if (!data.map.height || !data.map.width || !data.map.heads.length) return [section("Map of verdicts", "There is nothing to draw: no queries, no keys or no heads.")];
  const view = new MapView(data, new VerdictMap(data.map));
  return [section("Map of verdicts", "Which tiles of keys were computed again exactly, query by query. A hot first column is the attention sink, a hot edge the diagonal: the newest keys.", view.root), view];
}

function evalSections(one) {
  const { data } = one, list = [section("Key figures", facts(one), keyFigures(data))];
  const [map, view] = mapSection(data);
  list.push(map);
  if (data.histogram)
    list.push(section("All pairs by their error", "How many pairs lie how far off, two bars to a factor of ten; the axis of counts is logarithmic, so that a single bad pair shows.",
      el("div", { class: "charts" }, histogramChart(data.histogram, "one_minus_cos", "1 − cosine"), histogramChart(data.histogram, "rel_l2", "relative L2")),
      asTable(histogramTable(data.histogram))));
  if (data.worst && data.worst.length)
    list.push(section("Worst pairs", "Where they are, and what is special about them: exact attention of these pairs, split by the verdicts of the run.", worstTable(data, view)));
  else
    list.push(section("Worst pairs", ["This result lists none: ", code("apa eval --worst N"), " does. With softcap, bias, ALiBi or sinks pairs are not taken apart."]));
  if (data.heads && data.heads.length)
    list.push(section("Error by head", "Is it one head?", headsChart(data), asTable(headsTable(data))));
  if (data.attribution)
    list.push(section("Error by operand", `Whose rounding is it? Operands of the cold tiles quantised one at a time and all but one, over all pairs and over the ${data.attribution.worst_pairs} worst.`, attributionTable(data.attribution)));
  return list;
}

function laterSections(one) {
  const { data } = one, list = [];
  if (data.cost && Object.keys(data.cost).length)
    list.push(section("Modelled times of " + one.label, "What the operations of this run would take on other devices, and the exact method there.", modelTable(data)));
  list.push(section("Recipe of " + one.label, "Every knob as it ran, nothing on auto.", recipeList(data.recipe)));
  return list;
}

function costSection() {
  const points = costPoints(), devices = [...new Set(points.flatMap((p) => Object.keys(p.cost)))].sort((a, b) => (a === "measured") - (b === "measured"));
  if (points.length < 2 || devices.length === 0)
    return section("Error against cost", ["One setting alone makes no curve. ", code("apa report --compare NAME,NAME…"), " puts several methods here, and so does ", code("--from SWEEP.json"), " with what ", code("apa sweep --over KEY=V1,V2… --json SWEEP.json"), " wrote."]);
  const shapes = new Set(points.map((p) => p.shape)), place = el("div", {}), rows = el("div", {});
  const pick = el("select", {}, ...devices.map((device) => el("option", { value: device }, device === "measured" ? "measured, where each ran" : device + " (modelled)")));
  const draw = () => {
    const box = costChart(points, pick.value);
    place.replaceChildren(box);
    rows.replaceChildren(pointsTable(points, pick.value));
    box.draw();
  };
  pick.addEventListener("change", draw);
  const root = section("Error against cost", "Further down is more accurate, further left is faster; the line joins the settings that no other beats in both." +
    (shapes.size > 1 ? " The results are of different shapes: compare costs within one of them only." : ""),
    el("div", { class: "controls" }, el("label", {}, "Cost on ", pick)), place, asTable(rows));
  root.start = draw;
  return root;
}

function refusedSection() {
  const refused = sweeps.flatMap((sweep) => sweep.data.rows.filter((row) => row.refused).map((row) => ({ ...row, file: sweep.file })));
  if (refused.length === 0) return null;
  return section("Combinations that were refused", "Rows of the sweep that make no sense or that no engine runs, with the reason.", table("Refused", [
    ["method", (row) => row.method], ["knobs", (row) => Object.entries(row.knobs).map(([k, v]) => `${k}=${v}`).join(" "), "left"], ["reason", (row) => row.refused, "left"],
  ], refused));
}

function build() {
  const main = document.getElementById("main"), one = el("div", {}), later = el("div", {}), all = el("div", {});
  const chooser = document.getElementById("result"), title = document.getElementById("title"), subtitle = document.getElementById("subtitle");
  const files = [...new Set(results.map((result) => result.file))].join(", ");
  if (evals.length > 1) all.append(section("Comparison", "The same inputs, the same truth, one method after the other.", compareTable()));
  const cost = costSection(), timed = evals.filter((e) => isNumber(e.data.attention_ms));
  const below = el("div", {}, cost);
  if (timed.length) below.append(section("Measured times", "Medians on the machine that made this page's data, and the same engine's exact method beside it, timed in turn.", timesChart(timed), asTable(timesTable(timed))));
  const refused = refusedSection();
  if (refused) below.append(refused);
  main.append(all, one, below, later, section("What the words mean", "", termsList()));

  const show = (index) => {
    one.replaceChildren(...evalSections(evals[index]));
    later.replaceChildren(...laterSections(evals[index]));
    drawAll();
  };
  title.textContent = evals.length === 1 ? `${evals[0].label} on ${evals[0].file}` : evals.length > 1 ? `${evals.length} results on ${files}` : `Sweep: ${files}`;
  document.title = title.textContent + " · apa report";
  subtitle.textContent = "Attention whose precision follows the probability mass: what the method did to the output, and where.";
  if (evals.length > 1) {
    document.getElementById("choose").hidden = false;
    chooser.append(...evals.map((e, i) => el("option", { value: i }, e.label)));
    chooser.addEventListener("change", () => show(Number(chooser.value)));
  }
  if (cost.start) cost.start();
  const first = Math.max(0, evals.findIndex((e) => e.data.hot_share > 0 && e.data.hot_share < 1)); // one with something to see
  chooser.value = first;
  if (evals.length) show(first);
  else drawAll();
  document.getElementById("footer").textContent = `Made by apa ${report.apa}. Charts: Chart.js ${Chart.version} (MIT licence, in this file). This page loads nothing.`;
}

function followTheme() {
  const choice = document.getElementById("theme");
  choice.addEventListener("change", () => {
    if (choice.value) document.documentElement.dataset.theme = choice.value;
    else delete document.documentElement.dataset.theme;
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
}

build();
followTheme();
document.documentElement.dataset.ready = "yes";
