// A row of weights on its grid, and two correlated inputs: what golfnb/file/grid.py and golfnb/file/quantize.py compute, and its pictures.
import {html, legend, slider, start, svg, ticks} from "./parts.js";

// the numbers: names are those of the library

export function roundEven(x) {
  const floor = Math.floor(x);
  if (x - floor !== 0.5) return Math.round(x);
  return floor % 2 ? floor + 1 : floor;
}

// x as fp16 holds it: by way of float32, as torch converts a float64
export function half(x) {
  const single = Math.fround(x), exponent = Math.max(Math.floor(Math.log2(Math.abs(single))), -14), step = 2 ** (exponent - 10);
  return single === 0 ? 0 : roundEven(single / step) * step;
}

export const rowScale = (clip, qmax) => half(Math.min(Math.max(clip / qmax, 2 ** -24), 65504));
export const nearest = (w, scale, qmax) => Math.min(Math.max(roundEven(w / scale), -qmax), qmax);

export function entropyBits(integers) {
  const counts = new Map();
  for (const q of integers) counts.set(q, (counts.get(q) ?? 0) + 1);
  return [...counts.values()].reduce((bits, n) => bits - n / integers.length * Math.log2(n / integers.length), 0);
}

// The row on the grid whose clip is `ratio` times its largest magnitude.
export function onGrid(row, ratio, qmax) {
  const clip = ratio * Math.max(...row.map(Math.abs)), scale = rowScale(clip, qmax), integers = row.map(w => nearest(w, scale, qmax));
  const error = row.reduce((sum, w, i) => sum + (integers[i] * scale - w) ** 2, 0) / row.length;
  return {scale, integers, bits: entropyBits(integers), error};
}

// U with the inverse of [[1, rho], [rho, 1]] = U^T U: [U11, U12, U22]
export function factor(rho) {
  const diagonal = 1 / (1 - rho * rho), first = Math.sqrt(diagonal), beside = -rho * diagonal / first;
  return [first, beside, Math.sqrt(diagonal - beside * beside)];
}

// Integers of two weights on a grid of step 1, and the second weight as the first rounding leaves it.
export function gptq([a, b], rho, qmax = 31) {
  const [first, beside] = factor(rho), whole = nearest(a, 1, qmax), moved = b - (a - whole) / first * beside;
  return {integers: [whole, nearest(moved, 1, qmax)], moved};
}

export const outputError = ([a, b], [p, q], rho) => (p - a) ** 2 + 2 * rho * (p - a) * (q - b) + (q - b) ** 2;

// one row

const CLIPS = Array.from({length: 96}, (_, i) => (i + 5) / 100), LEVELS = Array.from({length: 63}, (_, i) => 2 * i + 3);
const percent = x => `${(100 * x).toFixed(x < 0.0995 ? 1 : 0)}\u00a0%`;
const text = (x, y, words, more = {}) => svg("text", {x, y, ...more}, words);
const axis = (x1, y1, x2, y2) => svg("line", {class: "axis", x1, y1, x2, y2});

function rowMarks(row, state, width) {
  const qmax = (state.levels - 1) / 2, found = onGrid(row, state.clip, qmax), {scale, integers} = found, reach = Math.max(...row.map(Math.abs)) * 1.04;
  const left = 34, right = 8, x = w => left + (width - left - right) * (w + reach) / (2 * reach), top = 20, rug = 34, base = 196, nodes = [];
  const edge = qmax * scale, counts = new Map();
  integers.forEach(q => counts.set(q, (counts.get(q) ?? 0) + 1));
  const most = Math.max(...counts.values()), y = n => base - (base - top - rug - 14) * n / most, wide = x(scale) - x(0), inset = Math.min(1, wide / 5);
  for (let q = -qmax; q <= qmax; q++) if (Math.abs(q * scale) <= reach) nodes.push(svg("line", {class: "axis", x1: x(q * scale), x2: x(q * scale), y1: top, y2: base, "data-grid": q * scale}));
  const beyond = w => Math.abs(w) > edge + scale / 2;
  row.forEach(w => nodes.push(svg("line", {x1: x(w), x2: x(w), y1: top, y2: top + rug, stroke: beyond(w) ? "var(--orange)" : "var(--blue)", "stroke-width": beyond(w) ? 1.5 : 1, "data-w": w, "data-beyond": beyond(w) ? "" : undefined})));
  for (const [q, n] of counts) {
    const cut = row.filter((w, i) => integers[i] === q && beyond(w)).length, bar = {x: x(q * scale) - wide / 2 + inset / 2, width: Math.max(wide - inset, 0.8)};
    nodes.push(svg("rect", {...bar, y: y(n), height: base - y(n), fill: "var(--blue)", "data-q": q, "data-n": n}));
    if (cut) nodes.push(svg("rect", {...bar, y: y(n), height: y(n - cut) - y(n), fill: "var(--orange)", "data-cut": cut}));
  }
  const marks = ticks(most, 4).filter(n => Number.isInteger(n));
  marks.forEach(n => nodes.push(text(left - 6, y(n) + 4, String(n), {class: "muted", "text-anchor": "end"})));
  for (const w of ticks(reach, width < 420 ? 2 : 3).flatMap(w => w ? [-w, w] : [w])) nodes.push(text(x(w), base + 16, String(+w.toFixed(6)).replace("-", "−"), {class: "muted", "text-anchor": "middle"}));
  nodes.push(axis(left, base, width - right, base), text(0, 12, `the ${row.length} weights, and how many fall on a grid point`, {class: "muted"}), text(left + (width - left - right) / 2, base + 33, "weight", {class: "muted", "text-anchor": "middle"}));
  return {nodes, found, height: base + 40};
}

// Error and bits over all clips at this number of levels, with the chosen clip.
function curveMarks(row, state, width) {
  const qmax = (state.levels - 1) / 2, all = CLIPS.map(clip => onGrid(row, clip, qmax)), spread = Math.sqrt(row.reduce((sum, w) => sum + w * w, 0) / row.length);
  const left = 34, right = 8, x = clip => left + (width - left - right) * (clip - 0.05) / 0.95, nodes = [], tall = 66;
  const curves = [["error", "error, % of the spread", all.map(f => 100 * Math.sqrt(f.error) / spread)], ["bits", "bits a weight", all.map(f => f.bits)]];
  curves.forEach(([name, label, values], i) => {
    const top = 20 + i * (tall + 30), base = top + tall, most = Math.max(...values), least = 0.8 * Math.min(...values), at = CLIPS.indexOf(state.clip);
    const y = name === "error" ? v => base - tall * Math.log(v / least) / Math.log(most / least) : v => base - tall * v / most;
    nodes.push(text(0, top - 8, label, {class: "muted"}), axis(left, base, width - right, base));
    const marks = name === "error" ? [1, 2, 5, 10, 20, 50, 100].filter(v => v >= least && v <= most) : ticks(most, 3);
    const apart = marks.filter((v, j) => marks.slice(j + 1).every(w => y(v) - y(w) > 13));
    for (const v of apart) nodes.push(text(left - 6, y(v) + 4, String(+v.toFixed(6)), {class: "muted", "text-anchor": "end"}));
    nodes.push(svg("path", {d: CLIPS.map((c, j) => `${j ? "L" : "M"}${x(c).toFixed(2)} ${y(values[j]).toFixed(2)}`).join(""), fill: "none", stroke: "var(--blue)", "stroke-width": 1.8}));
    nodes.push(svg("circle", {cx: x(state.clip), cy: y(values[at]), r: 4.5, fill: "var(--ink)", "data-curve": name, "data-value": values[at]}));
    if (name === "error") {
      const best = values.indexOf(Math.min(...values)), near = x(CLIPS[best]);
      nodes.push(svg("line", {x1: near, x2: near, y1: base, y2: base - 9, stroke: "var(--green)", "stroke-width": 2, "data-best": CLIPS[best]}),
        text(width - right, top - 8, `least at a clip of ${percent(CLIPS[best])}`, {"text-anchor": "end", style: "fill: var(--green)"}));
    }
  });
  const bottom = 20 + 2 * tall + 30;
  for (const clip of [0.05, 0.25, 0.5, 0.75, 1]) nodes.push(text(x(clip), bottom + 16, `${100 * clip}`, {class: "muted", "text-anchor": clip === 1 ? "end" : "middle"}));
  nodes.push(text(left + (width - left - right) / 2, bottom + 33, "clip, % of the largest weight", {class: "muted", "text-anchor": "middle"}));
  return {nodes, height: bottom + 40};
}

const power = x => { const e = Math.floor(Math.log10(x)); return `${(x / 10 ** e).toFixed(2)}·10${String(e).replace(/./g, c => c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])}`; };

// two inputs

const SIDE = 2.2;

function pairMarks(state, width) {
  const size = Math.min(width, 380), left = 34, top = 8, plot = size - left - 8, unit = plot / (2 * SIDE), x = a => left + (a + SIDE) * unit, y = b => top + (SIDE - b) * unit;
  const {w, rho} = state, plain = w.map(v => nearest(v, 1, 31)), {integers, moved} = gptq(w, rho), errors = [plain, integers].map(p => outputError(w, p, rho));
  const nodes = [svg("clipPath", {id: "golf-pair"}, svg("rect", {x: left, y: top, width: plot, height: plot}))], inside = svg("g", {"clip-path": "url(#golf-pair)"});
  for (let a = -2; a <= 2; a++) {
    inside.append(axis(x(a), top, x(a), top + plot), axis(left, y(a), left + plot, y(a)));
    nodes.push(text(x(a), top + plot + 16, String(a).replace("-", "−"), {class: "muted", "text-anchor": "middle"}), text(left - 8, y(a) + 4, String(a).replace("-", "−"), {class: "muted", "text-anchor": "end"}));
  }
  for (let a = -2; a <= 2; a++) for (let b = -2; b <= 2; b++) inside.append(svg("circle", {cx: x(a), cy: y(b), r: 3, fill: "var(--grey)"}));
  const ellipse = (error, colour, name) => svg("ellipse", {rx: unit * Math.sqrt(error / (1 + rho)), ry: unit * Math.sqrt(error / (1 - rho)), transform: `translate(${x(w[0])} ${y(w[1])}) rotate(-45)`,
    fill: "none", stroke: colour, "stroke-width": 1.5, "data-ellipse": name, "data-error": error});
  inside.append(ellipse(errors[0], "var(--orange)", "plain"), ellipse(errors[1], "var(--blue)", "gptq"));
  inside.append(svg("path", {d: `M${x(w[0])} ${y(w[1])}L${x(plain[0])} ${y(plain[1])}`, stroke: "var(--orange)", "stroke-width": 2, fill: "none", "stroke-dasharray": "5 4"}));
  inside.append(svg("path", {d: `M${x(w[0])} ${y(w[1])}L${x(integers[0])} ${y(moved)}L${x(integers[0])} ${y(integers[1])}`, stroke: "var(--blue)", "stroke-width": 2, fill: "none", "data-moved": moved}));
  inside.append(svg("rect", {x: x(plain[0]) - 7, y: y(plain[1]) - 7, width: 14, height: 14, fill: "none", stroke: "var(--orange)", "stroke-width": 2.5, "data-plain": plain.join(" ")}));
  inside.append(svg("circle", {cx: x(integers[0]), cy: y(integers[1]), r: 5, fill: "var(--blue)", "data-gptq": integers.join(" ")}));
  nodes.push(inside, text(left + plot / 2, top + plot + 33, "first weight, in steps of the grid", {class: "muted", "text-anchor": "middle"}), svg("text", {class: "muted", "text-anchor": "middle", transform: `translate(10 ${top + plot / 2}) rotate(-90)`}, "second weight"));
  return {nodes, height: top + plot + 40, width: size, x, y, unit, left, top, plain, integers, moved, errors};
}

function pairWords({w, rho}, {plain, integers, moved, errors}) {
  const by = integers[0] - w[0], shift = moved - w[1], signed = v => `${v < 0 ? "−" : "+"}${Math.abs(v).toFixed(2)}`, same = String(plain) === String(integers);
  return `Rounding changes the first weight by ${signed(by)}. The inputs' correlation is ${signed(rho)}, so GPTQ moves the second weight by ${signed(shift)}, to ${signed(moved)}, before it rounds it. `
    + (same ? `Both end at the same point; the output's squared error is ${errors[0].toFixed(3)}.` : `The output's squared error is ${errors[0].toFixed(3)} with plain rounding and ${errors[1].toFixed(3)} with GPTQ.`);
}

function pairPart(data) {
  const state = {rho: data.state.rho, w: [...data.state.w]}, chart = svg("svg", {role: "group", "aria-label": "Two weights on a grid."}), words = html("p", {class: "golf-say", "aria-live": "polite"});
  const handle = svg("g", {tabindex: 0, role: "slider", "aria-label": "the two weights, moved by arrow keys", style: "cursor: grab; touch-action: none"},
    svg("circle", {r: 22, fill: "transparent"}), svg("circle", {r: 8, fill: "var(--ink)"}));
  let drawn;
  function redraw() {
    drawn = pairMarks(state, part.clientWidth || 340);
    chart.setAttribute("viewBox", `0 0 ${drawn.width} ${drawn.height}`);
    chart.style.maxWidth = `${drawn.width}px`;
    handle.setAttribute("transform", `translate(${drawn.x(state.w[0])} ${drawn.y(state.w[1])})`);
    handle.setAttribute("aria-valuenow", state.w[0].toFixed(2));
    handle.setAttribute("aria-valuetext", state.w.map(v => v.toFixed(2)).join(" and "));
    handle.dataset.w = state.w.join(" ");
    const focused = document.activeElement === handle;
    for (const child of [...chart.children]) if (child !== handle) child.remove();
    chart.prepend(...drawn.nodes);
    if (!handle.isConnected) chart.append(handle);
    if (focused) handle.focus();
    words.textContent = pairWords(state, drawn);
  }
  const hold = v => Math.round(100 * Math.min(2, Math.max(-2, v))) / 100;
  const move = (a, b) => { state.w = [hold(a), hold(b)]; redraw(); };
  const drag = event => {
    const box = chart.getBoundingClientRect();
    move((event.clientX - box.left - drawn.left) / drawn.unit - SIDE, SIDE - (event.clientY - box.top - drawn.top) / drawn.unit);
  };
  const KEYS = {ArrowLeft: [-0.05, 0], ArrowRight: [0.05, 0], ArrowUp: [0, 0.05], ArrowDown: [0, -0.05]};
  handle.addEventListener("keydown", event => {
    if (!KEYS[event.key]) return;
    event.preventDefault();
    move(state.w[0] + KEYS[event.key][0], state.w[1] + KEYS[event.key][1]);
  });
  handle.addEventListener("pointerdown", event => { handle.setPointerCapture(event.pointerId); handle.focus(); event.preventDefault(); });
  handle.addEventListener("pointermove", event => { if (handle.hasPointerCapture(event.pointerId)) drag(event); });
  const RHO = Array.from({length: 39}, (_, i) => (i - 19) / 20);
  const part = html("div", {"data-part": "pair"}, html("h4", {class: "golf-head"}, "Two weights with correlated inputs"),
    html("div", {class: "golf-controls"}, slider("rho", "correlation of the inputs", RHO, state.rho, v => v.toFixed(2).replace("-", "−"), v => { state.rho = v; redraw(); })),
    legend([["var(--ink)", "the weights: drag them"], ["var(--orange)", "plain rounding"], ["var(--blue)", "GPTQ"]]), chart, words);
  return {part, redraw};
}

function rowPart(data) {
  const state = {clip: data.state.clip, levels: data.state.levels}, chart = svg("svg", {role: "img", "aria-label": "Weights of a row on the grid."}), curves = svg("svg", {role: "img", "aria-label": "Error and bits for every clip."});
  const words = html("p", {class: "golf-say", "aria-live": "polite"}), spread = Math.sqrt(data.row.reduce((sum, w) => sum + w * w, 0) / data.row.length);
  function redraw() {
    const width = part.clientWidth || 340, drawn = rowMarks(data.row, state, width), below = curveMarks(data.row, state, width), {scale, bits, error} = drawn.found;
    for (const [element, {nodes, height}] of [[chart, drawn], [curves, below]]) {
      element.setAttribute("viewBox", `0 0 ${width} ${height}`);
      element.replaceChildren(...nodes);
    }
    Object.assign(chart.dataset, {scale, bits, error});
    words.textContent = `The step of the grid is ${scale.toPrecision(3)}. A coder needs ${bits.toFixed(2)} bits a weight (entropy). The mean squared error is ${power(error)}; its root is ${percent(Math.sqrt(error) / spread)} of the weights' spread.`;
  }
  const set = name => value => { state[name] = value; redraw(); };
  const part = html("div", {"data-part": "row"}, html("h4", {class: "golf-head"}, "One row on its grid"),
    html("div", {class: "golf-controls"}, slider("clip", "clip", CLIPS, state.clip, percent, set("clip")), slider("levels", "levels", LEVELS, state.levels, String, set("levels"))),
    legend([["var(--blue)", "weight"], ["var(--orange)", "beyond the clip"]]), chart, words, curves);
  return {part, redraw};
}

export function draw(data) {
  const parts = [rowPart(data), pairPart(data)];
  return {nodes: [html("div", {class: "golf-parts"}, ...parts.map(p => p.part))], redraw: () => parts.forEach(p => p.redraw())};
}

if (typeof document !== "undefined") start("bits", draw);
