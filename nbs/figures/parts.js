// What the moving figures share: elements, controls, scales, colours, and the way into a page.

const STYLE = `
.golf-figure { color-scheme: light dark; font-size: 14px; line-height: 1.45; color: var(--ink); margin: 0.5rem 0; max-width: 46rem;
  --ink: light-dark(#1f2328, #e6e8eb); --muted: light-dark(#59616b, #a3abb5); --line: light-dark(#d4d9de, #3d444d); --back: light-dark(#f3f5f7, #22272d);
  --blue: light-dark(#1f6fbf, #6cb0f2); --orange: light-dark(#b85a10, #f0a05a); --green: light-dark(#1d7d46, #62c48b); --grey: light-dark(#6a727c, #a3abb5); --on: light-dark(#fff, #111); }
html[data-theme="light"] .golf-figure, body[data-jp-theme-light="true"] .golf-figure { color-scheme: light; }
html[data-theme="dark"] .golf-figure, body[data-jp-theme-light="false"] .golf-figure { color-scheme: dark; }
.golf-figure :is(svg, .golf-controls, p) { max-width: none; }
.golf-figure svg { display: block; width: 100%; font: 12px system-ui, sans-serif; font-variant-numeric: tabular-nums; overflow: visible; }
.golf-figure svg text { fill: var(--ink); }
.golf-figure svg text.muted { fill: var(--muted); }
.golf-figure svg text.on { fill: var(--on); }
.golf-figure svg text.strong { font-weight: 600; }
.golf-figure svg .axis { stroke: var(--line); }
.golf-controls { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.2rem, 1fr)); gap: 0.6rem 1.6rem; margin: 0 0 0.9rem; }
.golf-choices { grid-template-columns: repeat(auto-fit, minmax(min(100%, 13rem), 1fr)); }
.golf-slider { display: grid; grid-template-columns: 1fr auto; gap: 0 0.6rem; }
.golf-slider b { font-variant-numeric: tabular-nums; font-weight: 600; }
.golf-slider input { grid-column: 1 / -1; }
.golf-figure input[type="range"] { width: 100%; height: 1.75rem; margin: 0; accent-color: var(--blue); cursor: pointer; }
.golf-choice { border: 0; margin: 0; padding: 0; min-width: 0; }
.golf-choice legend { font-size: inherit; margin: 0 0 0.2rem; padding: 0; float: none; width: auto; color: inherit; }
.golf-choice div { display: grid; grid-auto-flow: column; grid-auto-columns: auto; font-size: 13px; border: 1px solid var(--line); border-radius: 6px; overflow: hidden; }
.golf-choice label { position: relative; margin: 0; padding: 0.45rem 0.3rem; text-align: center; cursor: pointer; line-height: 1.25; display: grid; place-items: center; }
.golf-choice label + label { border-left: 1px solid var(--line); }
.golf-choice label:has(:checked) { background: var(--blue); color: var(--on); }
.golf-choice input { position: absolute; inset: 0; opacity: 0; margin: 0; cursor: pointer; }
.golf-choice label:has(:focus-visible) { outline: 3px solid var(--ink); outline-offset: -3px; }
.golf-figure :is(input[type="range"], svg [tabindex]):focus-visible { outline: 2px solid var(--ink); outline-offset: 2px; border-radius: 4px; }
.golf-figure:has(.golf-parts) { max-width: 60rem; }
.golf-parts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 0.5rem 2.5rem; }
.golf-legend { display: flex; flex-wrap: wrap; gap: 0.15rem 1.1rem; margin: 0 0 0.4rem; padding: 0; font-size: 13px; }
.golf-legend span { white-space: nowrap; }
.golf-legend svg { display: inline-block; width: 12px; height: 12px; margin-right: 0.35rem; vertical-align: -1px; }
.golf-figure p.golf-say { margin: 0.5rem 0 1rem; font-size: 14px; }
.golf-figure h4.golf-head { font-size: 14px; font-weight: 600; margin: 0.9rem 0 0.3rem; color: inherit; }
@media (max-width: 719px) { figure .golf-figure { padding: 0 1.25rem; } }
@media print { .golf-figure { color-scheme: light !important; } }
`;

function made(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const html = (tag, attributes = {}, ...children) => made(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => made(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// A slider over the entries of `values` and `value`; `format` says one in words, `change` gets it.
export function slider(name, label, offered, value, format, change) {
  const values = [...new Set([...offered, value])].sort((a, b) => a - b);
  const said = html("b"), input = html("input", {type: "range", name, min: 0, max: values.length - 1, step: 1});
  const tell = () => input.setAttribute("aria-valuetext", said.textContent = format(values[input.value]));
  input.value = values.indexOf(value);
  input.addEventListener("input", () => { tell(); change(values[input.value]); });
  tell();
  return html("label", {class: "golf-slider"}, html("span", {}, label), said, input);
}

let choices = 0;

// One of several options, [value, words] each: radio buttons side by side.
export function choice(name, label, options, value, change) {
  const group = `golf-${name}-${choices++}`;
  const buttons = options.map(([option, words]) => {
    const input = html("input", {type: "radio", name: group, value: option});
    input.checked = option === value;
    input.addEventListener("change", () => change(option));
    return html("label", {}, input, words);
  });
  return html("fieldset", {class: "golf-choice", "data-name": name}, html("legend", {}, label), html("div", {}, ...buttons));
}

// Colour squares with words, [css fill, words] each; `hollow` ones are an outline.
export function legend(entries) {
  const square = ([colour, words, hollow]) => html("span", {}, svg("svg", {viewBox: "0 0 12 12", "aria-hidden": "true"},
    svg("rect", {x: 1, y: 1, width: 10, height: 10, fill: hollow ? "none" : colour, stroke: colour, "stroke-width": 1.5, "stroke-dasharray": hollow ? "2 2" : undefined})), words);
  return html("div", {class: "golf-legend"}, ...entries.map(square));
}

// Round numbers from 0 to at most `end`, about `count` of them.
export function ticks(end, count) {
  const rough = end / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(s => s * power >= rough);
  return Array.from({length: Math.floor(end / step + 1e-9) + 1}, (_, i) => i * step);
}

// Draw in every figure of this name that is still a picture; what `draw` gives takes the picture's place.
export function start(name, draw) {
  if (!document.getElementById("golf-figure-style")) document.head.append(html("style", {id: "golf-figure-style"}, STYLE));
  for (const figure of document.querySelectorAll(`.golf-figure[data-figure="${name}"]:not([data-live])`)) {
    figure.setAttribute("data-live", "");
    const {nodes, redraw} = draw(JSON.parse(figure.querySelector('script[type="application/json"]').textContent));
    figure.querySelector("img").replaceWith(...nodes);
    let width = 0;
    new ResizeObserver(() => {
      if (nodes[0].clientWidth && nodes[0].clientWidth !== width) redraw(width = nodes[0].clientWidth);
    }).observe(figure);
  }
}
