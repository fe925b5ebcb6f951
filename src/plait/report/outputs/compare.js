// The page of a folder of runs: those that are chosen, with their curves over each other and settings that differ.

const COLOURS = 8, WIDE = 340, HIGH = 200, EDGE = { left: 48, right: 20, top: 10, bottom: 24 };

function ticksOf(low, high) {
  const unit = 10 ** Math.floor(Math.log10((high - low) / 4));
  const step = [1, 2, 5, 10].map((each) => each * unit).find((each) => each * 5 >= high - low);
  const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: count }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

// An axis from values to pixels; `scale` is what `describePoint` turns pixels back by.
function makeAxis(values, start, end, isLog) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low === high) { const by = 0.05 * (Math.abs(low) || 1); low -= by; high += by; }
  const scaled = (value) => (isLog ? Math.log10(value) : value), a = scaled(low), b = scaled(high);
  const whole = isLog ? ticksOf(a, b).filter(Number.isInteger).map((power) => 10 ** power) : [];
  return { at: (value) => start + (scaled(value) - a) / (b - a) * (end - start), scale: [start, end, a, b],
    ticks: whole.length > 1 ? whole : ticksOf(low, high) };
}

// The chart of curves, each `{ name, points, colour }`, as SVG of the same form as the charts of a report.
function chartOf(title, curves) {
  const ys = curves.flatMap((curve) => curve.points.map((point) => point[1]));
  const isLog = title.includes("loss") && Math.min(...ys) > 0 && Math.max(...ys) > 100 * Math.min(...ys);
  const x = makeAxis(curves.flatMap((curve) => curve.points.map((point) => point[0])), EDGE.left, WIDE - EDGE.right, false);
  const y = makeAxis(ys, HIGH - EDGE.bottom, EDGE.top, isLog);
  const svg = document.querySelector("#compared svg.empty").cloneNode(false);
  const put = (tag, values, text = "") => {
    const element = document.createElementNS(svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(values)) element.setAttribute(name, value);
    element.textContent = text;
    svg.append(element);
  };
  svg.setAttribute("class", "chart");
  svg.setAttribute("viewBox", `0 0 ${WIDE} ${HIGH}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title} by step`);
  svg.dataset.scale = [...x.scale, ...y.scale, Number(isLog)].join(" ");
  for (const tick of y.ticks) {
    put("line", { class: "grid", x1: EDGE.left, x2: WIDE - EDGE.right, y1: y.at(tick), y2: y.at(tick) });
    put("text", { x: EDGE.left - 6, y: y.at(tick) + 4, "text-anchor": "end" }, showNumber(tick));
  }
  for (const tick of x.ticks) {
    const text = tick.toLocaleString("en"), isCut = x.at(tick) + 3 * text.length > WIDE;
    put("text", { x: x.at(tick), y: HIGH - 8, "text-anchor": isCut ? "end" : "middle" }, text);
  }
  put("text", { x: 4, y: HIGH - 8 }, "step");
  for (const { name, points, colour } of [...curves].reverse()) {
    const places = points.map(([step, value]) => [x.at(step).toFixed(1), y.at(value).toFixed(1)]);
    put("polyline", { class: colour, "data-name": name, points: places.map((place) => place.join(",")).join(" ") });
    for (const [cx, cy] of places.length < 12 ? places : []) put("circle", { class: colour, cx, cy, r: 2 });
  }
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  caption.textContent = title;
  figure.append(caption, svg);
  return figure;
}

function tableOf(rows) {
  const box = document.createElement("div"), table = document.createElement("table");
  box.className = "scroll";
  rows.forEach((texts, i) => {
    const row = table.insertRow();
    texts.forEach((text) => {
      const cell = document.createElement(i ? "td" : "th");
      cell.textContent = text;
      cell.className = "words";
      row.append(cell);
    });
  });
  box.append(table);
  return box;
}

function showCompared(box, chosen) {
  const note = (text) => { const p = document.createElement("p"); p.className = "note"; p.textContent = text; return p; };
  const colour = (i) => (i < COLOURS ? `c${i}` : "rest");
  const keep = box.querySelector("svg.empty");
  box.replaceChildren(keep);
  if (!chosen.length) { box.append(note("No run is chosen.")); return; }
  const legend = document.createElement("p"), charts = document.createElement("div");
  legend.className = "legend";
  chosen.forEach((run, i) => {
    const span = document.createElement("span");
    span.className = colour(i);
    span.textContent = run.name;
    legend.append(span);
  });
  charts.className = "charts";
  for (const title of new Set(chosen.flatMap((run) => Object.keys(run.curves)))) {
    const curves = chosen.map((run, i) => ({ name: run.name, points: run.curves[title] || [], colour: colour(i) }));
    charts.append(chartOf(title, curves.filter((curve) => curve.points.length)));
  }
  const keys = [...new Set(chosen.flatMap((run) => Object.keys(run.settings)))];
  const differ = keys.filter((key) => new Set(chosen.map((run) => run.settings[key])).size > 1);
  const heading = document.createElement("h3");
  heading.textContent = "Settings that differ";
  box.append(legend, charts, heading);
  if (chosen.length < 2) box.append(note("Choose another run to compare with."));
  else if (!differ.length) box.append(note("None: the jobs are the same."));
  else box.append(tableOf([["", ...chosen.map((run) => run.name)],
    ...differ.map((key) => [key, ...chosen.map((run) => run.settings[key] ?? "-")])]));
}

function startCompared(box) {
  const runs = JSON.parse(document.getElementById("runs-data").textContent);
  const rows = [...document.querySelector("#runs table").rows];
  box.insertAdjacentHTML("beforeend", '<svg class="empty" hidden></svg>');
  const chosen = () => runs.filter((run) => run.input.checked);
  rows[0].prepend(document.createElement("th"));
  rows.slice(1).forEach((row, i) => {
    const input = document.createElement("input");
    Object.assign(input, { type: "checkbox", checked: i < 2, ariaLabel: `compare ${runs[i].name}` });
    input.addEventListener("change", () => showCompared(box, chosen()));
    runs[i].input = input;
    row.insertCell(0).append(input);
    row.addEventListener("click", (event) => { if (event.target !== input) input.click(); });
  });
  showCompared(box, chosen());
}

if (typeof document !== "undefined" && document.getElementById("compared")) startCompared(document.getElementById("compared"));
