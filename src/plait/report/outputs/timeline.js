// The timeline of a report: a row for each worker, drawn on a canvas, and in words what is at a place of it.
"use strict";

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text).buffer;
  const characters = atob(text), bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes.buffer;
}

const TYPES = { row: Uint16Array, kind: Uint8Array, stage: Uint16Array, microbatch: Uint32Array, start: Float64Array,
  seconds: Float32Array, received: Float32Array, cause: Uint8Array, way: Uint8Array, peer: Uint16Array, bytes: Float32Array };

// The arrays of operations or messages, with those of each row in the order of their starts.
function readBars(data, names, count) {
  const ops = Object.fromEntries(names.map((name) => [name, new TYPES[name](bytesOf(data[name]))]));
  const rows = Array.from({ length: count }, () => []), longest = Array(count).fill(0);
  for (let i = 0; i < ops.row.length; i++) {
    const row = "way" in ops ? 2 * ops.row[i] + (ops.way[i] === RECEIVED) : ops.row[i];
    rows[row].push(i);
    longest[row] = Math.max(longest[row], ops.seconds[i]);
  }
  return { ops, rows, longest };
}

const RECEIVED = "r".charCodeAt(0);

function readTimeline(data) {
  const many = data.names.length, { ops, rows, longest } =
    readBars(data, ["row", "kind", "stage", "microbatch", "start", "seconds", "received", "cause"], many);
  // From when to when each worker took part.
  const spans = rows.map((order) => order.length
    ? [ops.start[order[0]], Math.max(...order.slice(-8).map((i) => ops.start[i] + ops.seconds[i]))] : [0, 0]);
  // Each worker has a row of messages that it sent, and one of those that it received.
  const messages = readBars(data.messages, Object.keys(data.messages), 2 * many);
  return { ...data, ops, rows, longest, spans, messages, overview: new Uint8Array(bytesOf(data.overview)),
    anchors: new Float64Array(bytesOf(data.anchors)) };
}

// The first place in `order` whose operation starts at or after `t`.
function firstFrom(order, start, t) {
  let low = 0, high = order.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (start[order[middle]] < t) low = middle + 1; else high = middle;
  }
  return low;
}

function showSeconds(s) {
  const a = Math.abs(s);
  if (a === 0) return "0 s";
  if (a < 1e-3) return (s * 1e6).toPrecision(3) + " µs";
  if (a < 1) return (s * 1e3).toPrecision(3) + " ms";
  return a < 100 ? s.toPrecision(3) + " s" : Math.round(s).toLocaleString("en") + " s";
}

function showBytes(many) {
  const unit = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([size]) => many >= size) || [1, "B"];
  return Number((many / unit[0]).toPrecision(3)) + " " + unit[1];
}

// The message at a time of a row of messages, in words; short ones also a little next to it.
function describeMessage(d, row, t, near) {
  if (!isWithin(d, t)) return describeAt(d, row >> 1, t);
  const { ops, rows, longest } = d.messages, order = rows[row], worker = d.names[row >> 1];
  let best = -1, least = near;
  for (let k = firstFrom(order, ops.start, t + near) - 1; k >= 0 && ops.start[order[k]] >= t - near - longest[row]; k--) {
    const i = order[k], away = Math.max(ops.start[i] - t, t - ops.start[i] - ops.seconds[i], 0);
    if (away < least || best < 0 && away === least) { best = i; least = away; }
  }
  if (best < 0) return `${worker}: ${row % 2 ? "receives" : "sends"} nothing here`;
  const what = ops.kind[best] === "F".charCodeAt(0) ? "output" : "gradient";
  return `${worker}: ${row % 2 ? "receives" : "sends"} the ${what} of microbatch ${ops.microbatch[best]} ` +
    `${row % 2 ? "from" : "to"} worker ${ops.peer[best]} (stage ${ops.stage[best]}), ` +
    `${showBytes(ops.bytes[best])}, ${showSeconds(ops.seconds[best])}`;
}

// Whether single operations and messages are known of a time.
function isWithin(d, t) { return d.windows.some(([a, b]) => a <= t && t <= b); }

// What the pointer is over, in words: an operation, or idle time and its reason.
function describeAt(d, row, t) {
  const { ops } = d, order = d.rows[row];
  const next = firstFrom(order, ops.start, t);
  for (let k = next - 1; k >= Math.max(0, next - 8); k--) {
    const i = order[k];
    if (t <= ops.start[i] + ops.seconds[i]) {
      const letter = String.fromCharCode(ops.kind[i]);
      const number = "FBIW".includes(letter) ? ` of microbatch ${ops.microbatch[i]}, stage ${ops.stage[i]}`
        : letter === "U" ? ` of stage ${ops.stage[i]} to version ${ops.microbatch[i]}`
        : ` to step ${ops.microbatch[i]}`;
      return `${d.names[row]}: ${d.labels[letter]}${number}, ${showSeconds(ops.seconds[i])}`;
    }
  }
  if (!isWithin(d, t)) {
    const n = d.buckets, bucket = Math.min(n - 1, Math.max(0, Math.floor(t / d.end * n)));
    const share = d.groups.map((name, g) => [name, d.overview[(row * d.groups.length + g) * n + bucket] / 255]);
    const busy = share.filter(([, part]) => part > 0.004).map(([name, part]) => `${name} ${Math.round(part * 100)}%`);
    return `${d.names[row]}: ${busy.join(", ") || "idle"} (about ${showSeconds(d.end / n)} around here)`;
  }
  if (next === 0 || next >= order.length) return `${d.names[row]}: idle`;
  const i = order[next], receives = t >= ops.start[i] - ops.received[i];
  return `${d.names[row]}: idle, ${receives ? d.causes[d.receiving] : d.causes[ops.cause[i]]}; ` +
    `the next operation begins ${showSeconds(ops.start[i] - t)} later`;
}

// A colour as `#rrggbb` in the order of bytes of a picture's pixels.
function pixelOf(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return (255 << 24 | b << 16 | g << 8 | r) >>> 0;
}

// From `x0` to `x1`, a column of pixels for each moment: as high as the share of each kind of work. Many rectangles
// would take ten times as long as the pixels of a picture.
function drawOverview(c, d, row, view, x0, x1, top, height, colours) {
  const n = d.buckets, perPixel = (view.to - view.from) / view.width;
  const from = Math.max(0, Math.floor(x0)), wide = Math.ceil(Math.min(view.width, x1)) - from;
  if (wide <= 0) return;
  const picture = new ImageData(wide, height), pixels = new Uint32Array(picture.data.buffer);
  const fills = colours.groups.map(pixelOf);
  for (let column = 0; column < wide; column++) {
    const t = view.from + (from + column) * perPixel;
    const first = Math.max(0, Math.min(n - 1, Math.floor(t / d.end * n)));
    const last = Math.max(first, Math.min(n - 1, Math.floor((t + perPixel) / d.end * n)));
    let share = 0, y = height;
    for (let g = 0; g < fills.length; g++) {
      const base = (row * fills.length + g) * n;
      let sum = 0;
      for (let b = first; b <= last; b++) sum += d.overview[base + b];
      share += sum / (255 * (last - first + 1));
      for (const end = Math.max(0, height - Math.round(share * height)); y > end;) pixels[--y * wide + column] = fills[g];
    }
  }
  const part = new OffscreenCanvas(wide, height);
  part.getContext("2d").putImageData(picture, 0, 0);
  c.drawImage(part, from, top);
}

function colourOf(letter, microbatch, colours) {
  if (letter === "U") return colours.groups[2];
  if (!"FBIW".includes(letter)) return colours.groups["ECA".includes(letter) ? 3 : 4];
  const hue = colours.hues[microbatch % colours.hues.length];
  return `hsl(${hue} 55% ${letter === "F" ? colours.light : letter === "W" ? colours.light + 12 : colours.dark}%)`;
}

// Idle time before operation `i`: waiting for other workers shaded, receiving as a low bar, the reason where it fits.
function drawIdle(c, d, i, from, to, before, top, height, colours) {
  const received = Math.max(from, to - before), cause = d.ops.cause[i];
  if (cause !== d.between) {
    c.fillStyle = colours.wait;
    c.fillRect(from, top, to - from, height);
  }
  if (to - received > 1) {
    c.fillStyle = colours.receive;
    c.fillRect(received, top + height * 0.6, to - received, height * 0.4);
  }
  if (height > 12) drawText(c, d.causes[cause], from + 4, received, top + height / 2 + 4, colours.text);
}

function drawText(c, text, from, to, y, colour) {
  if (to - from < 20 || c.measureText(text).width > to - from - 4) return;
  c.fillStyle = colour;
  c.fillText(text, from, y);
}

function drawBars(c, d, row, view, window, top, height, colours) {
  const { ops } = d, order = d.rows[row], scale = view.width / (view.to - view.from);
  const from = Math.max(view.from, window[0]), to = Math.min(view.to, window[1]);
  let k = firstFrom(order, ops.start, from - d.longest[row]);
  let lastPixel = -1, busyTo = k > 0 ? (ops.start[order[k - 1]] + ops.seconds[order[k - 1]] - view.from) * scale : Infinity;
  for (; k < order.length; k++) {
    if (busyTo === Infinity) busyTo = (ops.start[order[k]] - view.from) * scale;
    const i = order[k], letter = String.fromCharCode(ops.kind[i]);
    const x = (ops.start[i] - view.from) * scale, wide = ops.seconds[i] * scale;
    if (ops.start[i] > to) {
      if (ops.start[i] <= window[1]) drawIdle(c, d, i, Math.max(0, busyTo), x, ops.received[i] * scale, top, height, colours);
      break;
    }
    if (x + wide < 0) { busyTo = Math.max(busyTo, x + wide); continue; }
    if (wide < 1 && Math.floor(x) === lastPixel) continue;
    lastPixel = Math.floor(x);
    if (x - busyTo > 1) drawIdle(c, d, i, Math.max(0, busyTo), x, ops.received[i] * scale, top, height, colours);
    busyTo = Math.max(busyTo, x + wide);
    c.fillStyle = colourOf(letter, ops.microbatch[i], colours);
    c.fillRect(x, top, Math.max(1, wide - (wide > 3 ? 0.5 : 0)), height);
    if (wide > 34 && "FBIWU".includes(letter) && height > 12)
      drawText(c, letter + ops.microbatch[i], Math.max(2, x + 3), x + wide, top + height / 2 + 4, colours.onBar);
  }
}

// The messages that a worker sent, and beneath them those that it received.
function drawMessages(c, d, row, view, top, height, colours) {
  const { ops, rows, longest } = d.messages, scale = view.width / (view.to - view.from);
  for (const way of [2 * row, 2 * row + 1]) {
    const order = rows[way];
    let lastPixel = -1;
    for (let k = firstFrom(order, ops.start, view.from - longest[way]); k < order.length && ops.start[order[k]] <= view.to; k++) {
      const i = order[k], x = (ops.start[i] - view.from) * scale, wide = ops.seconds[i] * scale;
      if (x + wide < 0 || wide < 1 && Math.floor(x) === lastPixel) continue;
      lastPixel = Math.floor(x);
      c.fillStyle = colourOf(String.fromCharCode(ops.kind[i]), ops.microbatch[i], colours);
      c.fillRect(x, top + (way % 2) * (height / 2), Math.max(1, wide), height / 2 - 1);
    }
  }
}

function drawPredicted(c, d, row, view, top, height, colours) {
  const p = d.predicted, scale = view.width / (view.to - view.from);
  if (p.row.length === 0) return;
  const longest = Math.max(...p.end);
  for (const anchor of d.anchors) {
    if (anchor > view.to) break;
    if (anchor + longest < view.from) continue;
    for (let i = 0; i < p.row.length; i++) {
      if (p.row[i] !== row) continue;
      c.fillStyle = colourOf(p.kind[i], p.microbatch[i], colours);
      const x = (anchor + p.start[i] - view.from) * scale;
      c.fillRect(x, top, Math.max(1, (p.end[i] - p.start[i]) * scale - 0.5), height);
    }
  }
}

function coloursOf(dark, style) {
  const named = (name) => style.getPropertyValue(name).trim();
  return {
    hues: [212, 145, 280, 350, 180, 75, 245, 315], light: dark ? 58 : 56, dark: dark ? 40 : 36,
    groups: [named("--forward"), named("--backward"), named("--update"), named("--other"), named("--steps"), named("--wait")],
    receive: named("--receive"), wait: named("--wait"), idle: named("--idle"), onBar: "#fff", text: named("--text"),
    line: named("--line"), back: named("--back"), change: named("--accent"), fault: named("--bad"),
  };
}

function drawTimeline(c, d, view, layout, colours) {
  c.clearRect(-layout.left, 0, view.width + layout.left, layout.height);
  c.font = "11px system-ui, sans-serif";
  const scale = view.width / (view.to - view.from);
  const hasLane = layout.lane && Math.max(...d.predicted.end) * scale >= 6;
  for (let row = 0; row < d.names.length; row++) {
    const top = layout.top + row * layout.row;
    const left = Math.max(0, (d.spans[row][0] - view.from) * scale);
    c.fillStyle = colours.idle;
    c.fillRect(left, top, Math.max(0, Math.min(view.width, (d.spans[row][1] - view.from) * scale) - left), layout.bar);
    const seen = d.rows[row], first = firstFrom(seen, d.ops.start, view.from);
    const many = firstFrom(seen, d.ops.start, view.to) - first > view.width / 3;
    let x = 0, hasBars = false;
    for (const [a, b] of many ? [] : d.windows) {
      const left = (a - view.from) * scale, right = (b - view.from) * scale;
      if (right < 0 || left > view.width) continue;
      drawOverview(c, d, row, view, x, left, top, layout.bar, colours);
      drawBars(c, d, row, view, [a, b], top, layout.bar, colours);
      hasBars = true;
      x = Math.max(x, right);
    }
    drawOverview(c, d, row, view, x, view.width, top, layout.bar, colours);
    if (hasBars && layout.messages) drawMessages(c, d, row, view, top + layout.bar + 2, layout.messages, colours);
    if (hasLane) drawPredicted(c, d, row, view, top + layout.laneTop, layout.lane, colours);
  }
  drawAxis(c, view, colours);
  c.fillStyle = colours.text;
  if (d.windows.length > 1) for (const [a, b] of d.windows)
    c.fillRect((a - view.from) * scale, layout.top - 4, Math.max(2, (b - a) * scale), 2);
  drawMarks(c, d, view, layout, colours);
  drawNames(c, d, layout, hasLane, colours);
}

// Adaptations and faults: a line through all workers, with a head on the axis.
function drawMarks(c, d, view, layout, colours) {
  for (const [t, , isFault] of d.marks) {
    const x = (t - view.from) / (view.to - view.from) * view.width;
    if (x < 0 || x > view.width) continue;
    c.fillStyle = isFault ? colours.fault : colours.change;
    c.fillRect(x, layout.top - 2, 1, layout.height - layout.top);
    c.beginPath(); c.moveTo(x - 4, layout.top - 8); c.lineTo(x + 5, layout.top - 8); c.lineTo(x + 0.5, layout.top - 1); c.fill();
  }
}

function drawNames(c, d, layout, hasLane, colours) {
  c.fillStyle = colours.back;
  c.fillRect(-layout.left, 0, layout.left, layout.height);
  c.fillStyle = colours.text;
  d.names.forEach((name, row) => {
    const top = layout.top + row * layout.row, shown = layout.left > 60 ? name.replace(/ \(/, ", ").replace(")", "") : name.split(" ")[1];
    c.fillText(shown, -layout.left, top + layout.bar / 2 + 4);
    if (layout.left <= 60) return;
    if (layout.messages) c.fillText("messages", -layout.left + 10, top + layout.bar + layout.messages);
    if (layout.lane) c.fillText(hasLane ? "predicted" : "predicted: zoom in", -layout.left + 10, top + layout.laneTop + layout.lane - 2);
  });
}

function markAt(d, view, x) {
  const place = (t) => Math.abs((t - view.from) / (view.to - view.from) * view.width - x);
  const near = d.marks.filter(([t]) => place(t) < 6).sort((a, b) => place(a[0]) - place(b[0]));
  return near.length ? near.map(([t, text]) => `${showSeconds(t)}: ${text}`).slice(0, 3).join("; ") : "\u00a0";
}

function drawAxis(c, view, colours) {
  const span = view.to - view.from, unit = Math.pow(10, Math.floor(Math.log10(span / 4)));
  const step = [1, 2, 5, 10].map((each) => each * unit).find((each) => span / each <= 8);
  const [name, many] = view.to < 1e-3 ? [" µs", 1e6] : view.to < 1 ? [" ms", 1e3] : [" s", 1];
  const digits = Math.max(0, Math.ceil(-Math.log10(step * many) - 1e-9));
  c.fillStyle = colours.text;
  c.strokeStyle = colours.line;
  for (let k = Math.ceil(view.from / step); k * step < view.to; k++) {
    const x = (k * step - view.from) / span * view.width;
    c.beginPath(); c.moveTo(x, 14); c.lineTo(x, 20); c.stroke();
    const text = (k * step * many).toFixed(digits) + name;
    if (x + 3 + c.measureText(text).width <= view.width) c.fillText(text, x + 3, 12);
  }
}
