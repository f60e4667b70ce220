// What every part of the page uses: the data, elements, numbers as text, colours of the theme.

const report = JSON.parse(document.getElementById("data").textContent);

// An element; properties that begin with "on" are listeners, the others are set as attributes. All text goes in as text,
// never as HTML: names come from files.
function el(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function section(title, about, ...children) {
  return el("section", { "aria-label": title }, el("h2", {}, title), el("p", { class: "about" }, ...[].concat(about)), ...children);
}

// ---- numbers as text; what is not there is a dash

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const MINUS = "\u2212", DASH = "\u2013";

// 1.23e-4 as people write it: 1.23·10⁻⁴ is long in a table, so 1.23e−4.
function small(value, digits = 2) {
  if (!isNumber(value)) return DASH;
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 0.01 && size < 10000 ? String(Number(value.toPrecision(digits + 1))) : value.toExponential(digits);
  return text.replace("e+", "e").replaceAll("-", MINUS);
}

// A cosine: its nines and two digits more, or as many digits as asked; where the nines become hard to count, 1 − 2e−11.
const cosineDigits = (value) => (isNumber(value) ? Math.max(4, Math.ceil(-Math.log10(Math.max(1 - value, 1e-9))) + 1) : 4);
function cosine(value, digits = cosineDigits(value)) {
  if (!isNumber(value)) return DASH;
  if (value >= 1 - 1e-15) return "1";
  return 1 - value < 1e-9 ? `1 ${MINUS} ${small(1 - value, 0)}` : value.toFixed(digits).replace("-", MINUS);
}

const percent = (value) => (isNumber(value) ? (100 * value).toFixed(value > 0 && value < 0.001 ? 3 : 2) + "\u00a0%" : DASH);
const count = (value) => (isNumber(value) ? value.toLocaleString("en-US").replaceAll(",", "\u202f") : DASH);
const times = (value) => (isNumber(value) ? value.toFixed(2) + "×" : DASH);
function ms(value) {
  if (!isNumber(value)) return DASH;
  if (value === 0) return "0\u00a0ms";
  return (value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(2) : value.toPrecision(3)) + "\u00a0ms";
}

// ---- results

const results = report.results.map((result, index) => ({ ...result, index }));
const evals = results.filter((result) => result.kind === "eval");
const sweeps = results.filter((result) => result.kind === "sweep");

// A name for each evaluation that no other has: the method, the file if that is needed, a number if that is.
evals.forEach((one) => {
  const same = evals.filter((other) => other.data.method === one.data.method);
  const sameFile = same.filter((other) => other.file === one.file);
  one.label = one.data.method + (same.length > sameFile.length ? ` (${one.file})` : "") +
    (sameFile.length > 1 ? ` #${sameFile.indexOf(one) + 1}` : "");
});

const headName = (data, batch, head) => ((data.shape.B > 1 ? `batch ${batch}, ` : "") + `head ${head}`);
const place = (data, pair) => (pair && pair[2] >= 0 ? `${headName(data, pair[0], pair[1])}, row ${pair[2]}` : "");

// ---- theme

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
let drawings = []; // {node, draw}: what is to be drawn again when the theme changes, as long as it is on the page
const drawWith = (node, draw) => { drawings.push({ node, draw }); };
function drawAll() {
  drawings = drawings.filter(({ node }) => node.isConnected);
  drawings.forEach(({ draw }) => draw());
}
