// Reading values off charts, switching between runs. Without it the page shows everything at once.
"use strict";

const page = JSON.parse(document.getElementById("page-data").textContent);
const hiddenRuns = new Set();
document.documentElement.classList.add("js");

function svgElement(svg, name, attributes) {
  const made = document.createElementNS(svg.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// --- Which run's details are shown -----------------------------------------------------------------------------------

function showRun(run) {
  for (const panel of document.querySelectorAll(".panel")) panel.hidden = panel.dataset.run !== run;
}

const switches = document.querySelectorAll('input[name="run"]');
for (const one of switches) one.addEventListener("change", () => showRun(one.value));
if (switches.length) showRun([...switches].find((one) => one.checked).value);

// --- Which runs are drawn --------------------------------------------------------------------------------------------

for (const box of document.querySelectorAll("[data-toggle-run]")) {
  box.addEventListener("change", () => {
    const run = Number(box.dataset.toggleRun);
    if (box.checked) hiddenRuns.delete(run);
    else hiddenRuns.add(run);
    for (const other of document.querySelectorAll(`[data-toggle-run="${run}"]`)) other.checked = box.checked;
    for (const curve of document.querySelectorAll(`.curve[data-run="${run}"]`)) {
      curve.classList.toggle("hidden", !box.checked);
    }
  });
}

// --- Reading values --------------------------------------------------------------------------------------------------

function pointIn(svg, event) {
  const point = new DOMPoint(event.clientX, event.clientY);
  return point.matrixTransform(svg.getScreenCTM().inverse());
}

function nearest(points, x) {
  let best = null;
  for (const point of points) if (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
  return best;
}

function readLines(figure, chart) {
  const svg = figure.querySelector("svg");
  const pointer = svg.querySelector(".pointer");
  const readout = figure.querySelector(".readout");
  const [left, top, right, bottom] = chart.box;
  const across = (value) => left + ((value - chart.x[0]) / (chart.x[1] - chart.x[0])) * (right - left);
  const down = (value) => bottom - ((value - chart.y[0]) / (chart.y[1] - chart.y[0])) * (bottom - top);
  let at = null;

  function read(x) {
    at = Math.min(chart.x[1], Math.max(chart.x[0], x));
    pointer.replaceChildren(svgElement(svg, "line", { x1: across(at), x2: across(at), y1: top, y2: bottom }));
    figure.classList.add("reading");
    readout.replaceChildren(`${chart.xName} ${Number(at.toPrecision(3))}`);
    for (const series of chart.series) {
      const point = hiddenRuns.has(series.run) ? null : nearest(series.points, at);
      if (!point) continue;
      const dot = svgElement(svg, "circle", { cx: across(point[0]), cy: down(point[1]), r: 4 });
      dot.classList.add(`run-${series.run}`);
      pointer.append(dot);
      const value = document.createElement("b");
      value.textContent = point[2];
      readout.append(page.runs.length > 1 ? ` · ${page.runs[series.run]} ` : " · ", value);
    }
  }

  function forget() {
    pointer.replaceChildren();
    readout.textContent = "";
    figure.classList.remove("reading");
    at = null;
  }

  svg.addEventListener("pointermove", (event) => {
    const x = pointIn(svg, event).x;
    read(chart.x[0] + ((x - left) / (right - left)) * (chart.x[1] - chart.x[0]));
  });
  svg.addEventListener("pointerleave", forget);
  svg.addEventListener("blur", forget);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    read(at === null ? chart.x[step > 0 ? 0 : 1] : at + (step * (chart.x[1] - chart.x[0])) / 40);
  });
}

function readMap(map, chart) {
  const figures = [...map.querySelectorAll("figure")];
  let chosen = null;

  function read(number) {
    chosen = number;
    for (const figure of figures) {
      const svg = figure.querySelector("svg");
      const [x, y] = chart.layouts[svg.dataset.layout][number];
      svg.querySelector(".pointer").replaceChildren(svgElement(svg, "circle", { class: "ring", cx: x, cy: y, r: 7 }));
      figure.querySelector(".readout").textContent = chart.names[number];
      figure.classList.add("reading");
    }
  }

  for (const svg of map.querySelectorAll("figure > svg")) {
    const places = chart.layouts[svg.dataset.layout];
    svg.addEventListener("pointermove", (event) => {
      const point = pointIn(svg, event);
      let best = 0;
      let least = Infinity;
      places.forEach(([x, y], number) => {
        const distance = (x - point.x) ** 2 + (y - point.y) ** 2;
        if (distance < least) [best, least] = [number, distance];
      });
      if (least < 400) read(best);
    });
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const order = places.map(([x], number) => [x, number]).sort((a, b) => a[0] - b[0]);
      const rank = chosen === null ? -step : order.findIndex((entry) => entry[1] === chosen);
      read(order[(rank + step + order.length) % order.length][1]);
    });
  }
}

for (const figure of document.querySelectorAll("[data-chart]")) {
  const chart = page.charts[figure.dataset.chart];
  if (chart.kind === "map") readMap(figure, chart);
  else readLines(figure, chart);
}

// Print the collapsed sections too.
window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
