// The schedule of one optimizer step: what `golfnb.model.plan.predict` computes, and its picture.
import {choice, html, legend, slider, start, svg, ticks} from "./parts.js";

// the model: names and order of operations are those of golfnb/model/plan.py

const elements = (bank, world) => Math.ceil(bank.matrices.length / world) * world * bank.shape[0] * bank.shape[1];

export function transferUs(bytes, world, links, kind, nodes = 1) {
  if (world === 1) return 0;
  let [latency, gbytes] = links.collectives?.[kind] ?? [links.latency_us, links.bandwidth_gbytes_per_s];
  if (nodes > 1) [latency, gbytes] = [Math.max(latency, links.between[0]), Math.min(gbytes, links.between[1])];
  const rounds = kind === "all-reduce" ? 2 : 1;
  return latency + rounds * bytes * (world - 1) / world / (gbytes * 1e3);
}

export function updateUs(bank, world, links) {
  const count = Math.ceil(bank.matrices.length / world), [short, long] = [Math.min(...bank.shape), Math.max(...bank.shape)];
  const measured = links.update?.[`${short}x${long}`];
  if (measured) return measured[0] + count * measured[1];
  const flops = 5 * (4 * short * short * long + 2 * short ** 3);
  return Math.max(count * flops / (links.ns_tflops * 1e6), 22 * links.launch_us);
}

export function commOrder(banks, order) {
  const size = bank => bank.matrices.length * bank.shape[0] * bank.shape[1];
  return [...banks].sort((a, b) => order === "small_first" ? size(a) - size(b) : size(b) - size(a));
}

function preparedUs(banks, world, links, clip, stacked) {
  const passes = (clip === "local" ? 5 : 0) + (stacked ? 2 : 0), prepare = clip === "local" ? links.prepare_us ?? 0 : 0;
  if (!links.memory_gbps) return prepare;
  return passes * 2 * banks.reduce((sum, bank) => sum + elements(bank, world), 0) / (links.memory_gbps * 1e3) + prepare;
}

// Events {what, of, stream, start, end} of a step; `scatter` and `work` are the banks in both orders.
export function predict(scatter, work, world, links, {smallBytes = 0, clip = "local", stacked = false, nodes = 1, twoLevel = false} = {}) {
  const events = [], free = {net: 0, gpu: 0}, arrived = new Map();
  let gate = preparedUs(scatter, world, links, clip, stacked);
  const place = (what, of, stream, ready, us) => {
    const start = Math.max(ready, free[stream]);
    free[stream] = start + us;
    events.push({what, of, stream, start, end: start + us});
    return start + us;
  };
  const flat = twoLevel ? 1 : nodes, all = twoLevel ? world * nodes : world;
  const send = (of, what, ready, bytes, over = flat, ranks = world) => place(what, of, "net", ready, transferUs(bytes, ranks, links, what, over));
  if (smallBytes) send("small", "all-reduce", gate, smallBytes, nodes, all);
  for (const bank of scatter) {
    const bytes = 2 * elements(bank, world);
    let there = send(bank.name, "scatter", gate, bytes);
    if (twoLevel && nodes > 1) there = place("cross", bank.name, "net", there, transferUs(2 * bytes, nodes, links, "cross", nodes));
    arrived.set(bank, there);
  }
  if (clip === "global") gate = send("norm", "all-reduce", Math.max(...arrived.values()), 4);
  for (const bank of work) {
    const done = place("work", bank.name, "gpu", Math.max(arrived.get(bank), gate), updateUs(bank, world, links));
    send(bank.name, "gather", done, 2 * elements(bank, world));
  }
  return events;
}

// The arrangements that the buttons choose from; a matrix by itself is updated by every rank, so its gradient is all-reduced.
export function timeline(data, {ranks, gbytes, latency, launch, flow, order, unit}) {
  const links = {...data.links, latency_us: latency, bandwidth_gbytes_per_s: gbytes, launch_us: launch, between: [latency, gbytes]};
  const single = unit === "single", world = single ? 1 : ranks;
  const banks = single ? data.banks.flatMap(b => b.matrices.map(name => ({name, shape: b.shape, matrices: [name]}))) : data.banks;
  const more = {nodes: single ? ranks : 1, twoLevel: single}, ordered = commOrder(banks, order);
  if (flow === "all") return predict(ordered, ordered, world, links, {smallBytes: data.small_bytes, ...more});
  let now = 0;
  return ordered.flatMap((bank, i) => {
    const part = predict([bank], [bank], world, links, {smallBytes: i ? 0 : data.small_bytes, ...more});
    const moved = part.map(e => ({...e, start: e.start + now, end: e.end + now}));
    now = finishUs(moved);
    return moved;
  });
}

export const finishUs = events => Math.max(...events.map(e => e.end));
const until = (event, us) => Math.min(event.end, us) - Math.min(event.start, us);
export const workedUs = (events, us) => events.filter(e => e.stream === "gpu").reduce((sum, e) => sum + until(e, us), 0);

// How many of a rank's slots of a bank are padding.
export function padding(bank, ranks, rank) {
  const each = Math.ceil(bank.matrices.length / ranks);
  return each - Math.max(0, Math.min(each, bank.matrices.length - rank * each));
}

function padShare(data, state, rank, name) {
  if (state.unit === "single") return 0;
  const bank = data.banks.find(b => b.name === name);
  return padding(bank, state.ranks, rank) / Math.ceil(bank.matrices.length / state.ranks);
}

export const paddedUs = (data, state, events, rank, us) =>
  events.filter(e => e.what === "work").reduce((sum, e) => sum + padShare(data, state, rank, e.of) * until(e, us), 0);

// the picture

const RANKS = Array.from({length: 32}, (_, i) => i + 1);
const GBYTES = [10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 450, 600, 900];
const LATENCY = [0, 2, 5, 10, 15, 20, 30, 50, 75, 100];
const LAUNCH = [0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20];
const COLOURS = {"all-reduce": "var(--grey)", cross: "var(--grey)", scatter: "var(--blue)", work: "var(--orange)", gather: "var(--green)"};
const DOES = {"all-reduce": "all-reduces", cross: "all-reduces", scatter: "reduce-scatters", gather: "all-gathers"};
const FLOWS = {all: "all under way", turn: "one after the other"}, UNITS = {bank: "banks", single: "single matrices"};
const LANE = 17, GAP = 9, TOP = 4, STEPS = 1000;

const whole = us => us < 1000 ? `${us.toFixed(0)}\u00a0µs` : `${(us / 1000).toFixed(2)}\u00a0ms`;
const three = v => String(+v.toPrecision(3));
const short = name => name.replace(/_bank$/, "").replace(/\.weight$/, "");

// Up to eight ranks are drawn: of more, the first five and the last three.
const shownRanks = ranks => ranks <= 8 ? Array.from({length: ranks}, (_, i) => i) : [0, 1, 2, 3, 4, null, ranks - 3, ranks - 2, ranks - 1];

function block(event, y, x, label, real = 1) {
  const left = x(event.start), width = (x(event.end) - left) * real, trim = Math.min(1, width / 4);
  const rect = svg("rect", {x: left, y, width: Math.max(width - trim, 0), height: LANE - 1, fill: COLOURS[event.what],
    "data-what": event.what, "data-of": event.of, "data-start": event.start, "data-end": event.end});
  const marks = [rect];
  const words = [label, label.split("_").pop()].find(w => 6.8 * w.length + 4 < width);
  if (words) marks.push(svg("text", {class: "on", x: left + width / 2, y: y + 12, "text-anchor": "middle"}, words));
  if (real < 1) marks.push(svg("rect", {x: left + width + 0.5, y: y + 0.5, width: Math.max(x(event.end) - left - width - 2, 0), height: LANE - 2,
    fill: "none", stroke: COLOURS[event.what], "stroke-dasharray": "2 2", "data-padding": event.of}));
  return marks;
}

function say(data, state, events, us) {
  const at = stream => events.find(e => e.stream === stream && e.start <= us && us < e.end), net = at("net"), gpu = at("gpu");
  const bank = name => data.banks.find(b => b.name === name);
  if (us >= finishUs(events)) return `After ${whole(us)} every rank has all new weights, and the next step can begin. Each GPU has waited ${whole(us - workedUs(events, us))} of them.`;
  const slots = name => Math.ceil(bank(name).matrices.length / state.ranks);
  const each = name => bank(name) ? ` (${slots(name)} ${slots(name) > 1 ? "slots" : "slot"} on each rank)` : ", the same on every rank";
  const sent = !net ? "the network is idle" : net.of === "small" ? "the network all-reduces the small gradients"
    : `the network ${DOES[net.what]} ${net.what === "gather" ? "the new weights of" : "the gradients of"} ${short(net.of)}`;
  const work = gpu ? `Newton-Schulz runs on ${short(gpu.of)}${each(gpu.of)}` : "every GPU waits";
  return `At ${whole(us)} ${sent}; ${work}. So far each GPU has waited ${whole(us - workedUs(events, us))}.`;
}

function lanes(data, state, events, width, us) {
  const narrow = width < 560, left = narrow ? 20 : 116, right = narrow ? 104 : 112, plot = width - left - right, end = finishUs(events);
  const x = t => left + plot * t / end, nodes = [], labels = [], ranks = shownRanks(state.ranks), height = r => r === null ? 22 : 2 * LANE + GAP;
  const bottom = TOP + 18 + ranks.reduce((sum, r) => sum + height(r), 0) - GAP + 4, scale = end >= 2000 ? 1000 : 1;
  const mark = (us, style, words) => nodes.push(svg("line", {class: "axis", x1: x(us), x2: x(us), y1: TOP + 18, y2: bottom}), svg("text", {class: style, x: x(us), y: bottom + 15, "text-anchor": "middle"}, words));
  for (const tick of ticks(end / scale, narrow ? 4 : 7)) if (x(end) - x(tick * scale) > 32) mark(tick * scale, "muted", String(+tick.toFixed(6)));
  mark(end, "strong", scale === 1 ? end.toFixed(0) : (end / 1000).toFixed(2));
  nodes.push(svg("text", {class: "muted", x: left + plot / 2, y: bottom + 32, "text-anchor": "middle"}, `${scale === 1 ? "µs" : "ms"} after backward`));
  nodes.push(svg("text", {class: "muted", x: 0, y: TOP + 10}, "rank"), svg("text", {class: "muted", x: width - right + 10, y: TOP + 10}, "GPU so far"));
  let y = TOP + 18;
  for (const rank of ranks) {
    if (rank === null) nodes.push(svg("text", {class: "muted", x: left + 4, y: y + 11}, `${state.ranks - 8} more ranks`));
    else {
      nodes.push(svg("text", {class: "strong", x: 0, y: y + 12}, String(rank)));
      if (!narrow) nodes.push(svg("text", {class: "muted", x: left - 8, y: y + 12, "text-anchor": "end"}, "network"), svg("text", {class: "muted", x: left - 8, y: y + LANE + 12, "text-anchor": "end"}, "compute"));
      const row = svg("g", {"data-rank": rank});
      for (const event of events.filter(e => e.end > e.start)) {
        const real = event.what === "work" ? 1 - padShare(data, state, rank, event.of) : 1;
        const marks = block(event, event.stream === "net" ? y : y + LANE, x, short(event.of), real);
        row.append(...marks.filter(m => m.tagName === "rect"));
        labels.push(...marks.filter(m => m.tagName === "text"));
      }
      const padded = paddedUs(data, state, events, rank, us), waited = us - workedUs(events, us);
      row.append(svg("text", {x: width - right + 10, y: y + 12, "data-waited": waited}, `waited ${whole(waited)}`));
      if (padded > 0) row.append(svg("text", {class: "muted", x: width - right + 10, y: y + LANE + 12, "data-padded": padded}, `padding ${whole(padded)}`));
      nodes.push(row);
    }
    y += height(rank);
  }
  nodes.push(svg("line", {class: "now", x1: x(us), x2: x(us), y1: TOP + 14, y2: bottom + 2, stroke: "var(--ink)", "stroke-width": 1.5, "data-now": us}), ...labels);
  return {nodes, height: bottom + 38, left, plot, right};
}

function bars(data, state, width) {
  const narrow = width < 560, left = narrow ? 0 : 228, rows = Object.keys(UNITS).flatMap(unit => Object.keys(FLOWS).map(flow => ({unit, flow})));
  const us = rows.map(row => finishUs(timeline(data, {...state, ...row}))), plot = width - left - 72, pitch = narrow ? 40 : 24;
  return {height: rows.length * pitch, nodes: rows.flatMap(({unit, flow}, i) => {
    const here = unit === state.unit && flow === state.flow, y = i * pitch, barY = narrow ? y + 18 : y + 3, length = plot * us[i] / Math.max(...us);
    return [svg("text", {class: here ? "strong" : "", x: narrow ? 0 : left - 10, y: y + 15, "text-anchor": narrow ? "start" : "end"}, `${UNITS[unit]}, ${FLOWS[flow]}`),
      svg("rect", {x: left, y: barY, width: length, height: 16, fill: here ? "var(--blue)" : "var(--grey)", opacity: here ? 1 : 0.45, "data-unit": unit, "data-flow": flow, "data-us": us[i]}),
      svg("text", {class: here ? "strong" : "", x: left + length + 6, y: barY + 12}, whole(us[i]))];
  })};
}

export function draw(data) {
  const state = {...data.state};
  let width = 700, part = 0.4;
  const chart = svg("svg", {role: "img", "aria-label": "Timeline of one optimizer step, two lanes for each rank: network and compute."}), compare = svg("svg", {role: "img", "aria-label": "How long each of the four arrangements takes."});
  const scrub = html("input", {type: "range", name: "time", min: 0, max: STEPS, step: 1, value: part * STEPS, "aria-label": "time after backward"});
  const words = html("p", {class: "golf-say", "aria-live": "polite"}), seen = html("div");
  function redraw(newWidth = width) {
    width = newWidth;
    const events = timeline(data, state), us = part * finishUs(events), drawn = lanes(data, state, events, width, us), below = bars(data, state, width);
    chart.setAttribute("viewBox", `0 0 ${width} ${drawn.height}`);
    chart.dataset.end = finishUs(events);
    chart.replaceChildren(...drawn.nodes);
    compare.setAttribute("viewBox", `0 0 ${width} ${below.height}`);
    compare.replaceChildren(...below.nodes);
    scrub.style.cssText = `display: block; width: ${drawn.plot + 16}px; margin-left: ${drawn.left - 8}px`;
    chart.dataset.left = drawn.left;
    chart.dataset.plot = drawn.plot;
    words.textContent = say(data, state, events, us);
    scrub.setAttribute("aria-valuetext", words.textContent);
    const kinds = state.unit === "single" ? [["var(--grey)", "all-reduce"], ["var(--orange)", "Newton-Schulz"]]
      : [["var(--grey)", "all-reduce of small gradients"], ["var(--blue)", "reduce-scatter"], ["var(--orange)", "Newton-Schulz"], ["var(--orange)", "of padding", true], ["var(--green)", "all-gather"]];
    seen.replaceChildren(legend(kinds));
  }
  const set = name => value => { state[name] = value; redraw(); };
  const seek = event => {
    const {left, plot} = chart.dataset, at = (event.clientX - chart.getBoundingClientRect().left - left) / plot;
    part = Math.round(Math.min(1, Math.max(0, at)) * STEPS) / STEPS;
    scrub.value = part * STEPS;
    redraw();
  };
  scrub.addEventListener("input", () => { part = scrub.value / STEPS; redraw(); });
  chart.style.cssText = "touch-action: pan-y; cursor: ew-resize";
  chart.addEventListener("pointerdown", event => { chart.setPointerCapture(event.pointerId); seek(event); });
  chart.addEventListener("pointermove", event => { if (chart.hasPointerCapture(event.pointerId)) seek(event); });
  const controls = html("div", {}, html("div", {class: "golf-controls golf-choices"},
    choice("unit", "what travels", Object.entries(UNITS), state.unit, set("unit")),
    choice("flow", "when", Object.entries(FLOWS), state.flow, set("flow")),
    choice("order", "order", [["big_first", "big first"], ["small_first", "small first"]], state.order, set("order"))), html("div", {class: "golf-controls"},
    slider("ranks", "ranks", RANKS, state.ranks, v => String(v), set("ranks")),
    slider("gbytes", "bandwidth", GBYTES, state.gbytes, v => `${three(v)} GB/s`, set("gbytes")),
    slider("latency", "latency", LATENCY, state.latency, v => `${three(v)} µs`, set("latency")),
    slider("launch", "kernel launch", LAUNCH, state.launch, v => `${three(v)} µs`, set("launch"))));
  return {nodes: [controls, seen, chart, scrub, words, html("h4", {class: "golf-head"}, "Until every rank has all new weights"), compare], redraw};
}

if (typeof document !== "undefined") start("schedule", draw);
