// Charts of a report: the step and the value under the pointer; tables that are sorted by a click on a column.
"use strict";

function showNumber(value) {
  const a = Math.abs(value);
  if (a !== 0 && (a >= 1e6 || a < 1e-3)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return a < 1e3 ? String(Number(value.toPrecision(4))) : Number(value.toPrecision(4)).toLocaleString("en");
}

// Of all curves of a chart the point nearest to a place in its picture.
function nearestPoint(svg, x, y) {
  let best = null, least = Infinity;
  for (const line of svg.querySelectorAll("polyline"))
    for (const point of line.points) {
      const far = 9 * (point.x - x) ** 2 + (point.y - y) ** 2;
      if (far < least) { least = far; best = { x: point.x, y: point.y, name: line.dataset.name }; }
    }
  return best;
}

function describePoint(svg, point) {
  const [left, right, firstX, lastX, bottom, top, low, high, isLog] = svg.dataset.scale.split(" ").map(Number);
  const step = firstX + (point.x - left) / (right - left) * (lastX - firstX);
  const value = low + (point.y - bottom) / (top - bottom) * (high - low);
  const name = svg.querySelectorAll("polyline").length > 1 ? ` (${point.name})` : "";
  return `step ${Math.round(step)}: ${showNumber(isLog ? 10 ** value : value)}${name}`;
}

function showPoint(svg, event) {
  const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
  const x = (event.clientX - box.x) / box.width * view.width, y = (event.clientY - box.y) / box.height * view.height;
  const point = nearestPoint(svg, x, y);
  if (!point) return;
  const part = (tag) => {
    const element = document.createElementNS(svg.namespaceURI, tag);
    element.setAttribute("class", "cursor");
    svg.append(element);
    return element;
  };
  const line = svg.querySelector("line.cursor") || part("line"), text = svg.querySelector("text.cursor") || part("text");
  for (const [name, value] of [["x1", point.x], ["x2", point.x], ["y1", 14], ["y2", view.height - 24]])
    line.setAttribute(name, value);
  text.textContent = describePoint(svg, point);
  text.setAttribute("text-anchor", point.x > view.width / 2 ? "end" : "start");
  text.setAttribute("x", point.x);
  text.setAttribute("y", 11);
}

const SECONDS = { h: 3600, min: 60, s: 1, ms: 1e-3, "µs": 1e-6 };

function sortBy(cell) {
  const table = cell.closest("table"), [head, ...rows] = table.rows, column = cell.cellIndex;
  const sign = cell.dataset.down ? -1 : 1;
  for (const other of head.cells) if (other !== cell) delete other.dataset.down;
  cell.dataset.down = cell.dataset.down ? "" : "1";
  const value = (row) => {
    const text = row.cells[column].textContent.replace(/,/g, "");
    const times = [...text.matchAll(/([0-9.]+) (h|min|s|ms|µs)(?= |$)/g)];
    if (times.length) return times.reduce((sum, [, many, unit]) => sum + many * SECONDS[unit], 0);
    return isNaN(parseFloat(text)) ? text : parseFloat(text);
  };
  const order = (a, b) => typeof a === typeof b ? (a > b) - (a < b) : typeof a === "number" ? -1 : 1;
  rows.sort((a, b) => sign * order(value(a), value(b)));
  head.parentNode.append(...rows);
}

// The document listens, so charts and tables that a page gets later need nothing.
if (typeof document !== "undefined") {
  for (const kind of ["pointermove", "pointerdown"])
    document.addEventListener(kind, (event) => {
      const svg = event.target.closest && event.target.closest("svg.chart");
      document.querySelectorAll(".cursor").forEach((each) => { if (each.ownerSVGElement !== svg) each.remove(); });
      if (svg) showPoint(svg, event);
    });
  document.addEventListener("click", (event) => {
    const cell = event.target.closest(".sortable th");
    if (cell) sortBy(cell);
  });
}
