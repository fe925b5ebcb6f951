// The timeline follows the pointer, fingers, keys and buttons: drag to pan, pinch or Ctrl-wheel to zoom.

function zoomed(view, end, factor, at) {
  const span = Math.min(end, Math.max(end * 1e-9, 2e-5, (view.to - view.from) * factor));
  const share = (at - view.from) / (view.to - view.from);
  return moved({ from: at - share * span, to: at + (1 - share) * span }, end, 0);
}

function moved(view, end, by) {
  const span = view.to - view.from, from = Math.max(0, Math.min(end - span, view.from + by));
  return { from, to: from + span };
}

function startTimeline(box, text) {
  const canvas = box.querySelector("canvas"), tip = box.querySelector(".tip"), c2d = canvas.getContext("2d");
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  let d = null, view = null, layout = null, pending = false, colours = null, width = 1;

  // Takes the data, again when there is more; what is looked at stays, a view of the end follows it.
  function load(text) {
    const before = d;
    d = readTimeline(JSON.parse(text));
    const lane = d.predicted.row.length ? 9 : 0, bar = d.names.length > 24 ? 10 : 20;
    const messages = d.messages.ops.row.length ? 12 : 0, laneTop = bar + 2 + messages + (messages ? 2 : 0);
    layout = { top: 26, bar, messages, lane, laneTop, row: laneTop + lane + (lane ? 6 : 4), left: 0 };
    layout.height = layout.top + d.names.length * layout.row + 4;
    canvas.style.height = layout.height + "px";
    if (!before || (view.from <= 0 && view.to >= before.end)) view = { from: 0, to: d.end };
    else view = moved(view, d.end, view.to >= before.end * (1 - 1e-9) ? d.end - view.to : 0);
    redraw();
  }
  function draw() {
    const height = layout.height;
    pending = false;
    const ratio = window.devicePixelRatio || 1;
    const whole = Math.max(80, canvas.clientWidth);
    layout.left = whole < 600 ? 16 + 7 * String(d.names.length).length : d.names.some((name) => name.length > 10) ? 116 : 70;
    width = whole - layout.left;
    if (canvas.width !== Math.round(whole * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(whole * ratio);
      canvas.height = Math.round(height * ratio);
    }
    colours = colours || coloursOf(scheme.matches, getComputedStyle(document.documentElement));
    c2d.setTransform(ratio, 0, 0, ratio, layout.left * ratio, 0);
    drawTimeline(c2d, d, { ...view, width }, layout, colours);
  }
  function redraw() {
    if (!pending) { pending = true; requestAnimationFrame(draw); }
  }
  function show(next) { view = next; redraw(); }
  const timeAt = (x) => view.from + (x - layout.left) / width * (view.to - view.from);
  function tell(x, y) {
    const row = Math.floor((y - layout.top) / layout.row), beneath = y - layout.top - row * layout.row - layout.bar - 1;
    const isMessage = beneath >= 0 && beneath < layout.messages + 1;
    if (row < 0) tip.textContent = markAt(d, { ...view, width }, x - layout.left);
    else if (row >= d.names.length) tip.textContent = "\u00a0";
    else if (!isMessage) tip.textContent = describeAt(d, row, timeAt(x));
    else tip.textContent = describeMessage(d, 2 * row + (beneath > layout.messages / 2), timeAt(x), 4 / width * (view.to - view.from));
  }
  function first() {
    const a = d.anchors[0] || 0, b = d.anchors.length > 1 ? d.anchors[1] : d.end;
    let last = a;  // without what follows the step, such as an evaluation
    for (let i = 0; i < d.ops.start.length; i++)
      if (d.ops.start[i] < b && !"ECA".includes(String.fromCharCode(d.ops.kind[i]))) last = Math.max(last, d.ops.start[i] + d.ops.seconds[i]);
    show(zoomed({ from: a, to: Math.min(b, last) > a ? Math.min(b, last) : b }, d.end, 1, a));
  }
  const actions = {
    all: () => show({ from: 0, to: d.end }), first,
    closer: () => show(zoomed(view, d.end, 0.5, (view.from + view.to) / 2)),
    further: () => show(zoomed(view, d.end, 2, (view.from + view.to) / 2)),
    left: () => show(moved(view, d.end, -0.25 * (view.to - view.from))),
    right: () => show(moved(view, d.end, 0.25 * (view.to - view.from))),
  };
  const keys = { ArrowLeft: "left", ArrowRight: "right", "+": "closer", "-": "further", Home: "all" };
  box.querySelectorAll("button").forEach((button) => button.addEventListener("click", actions[button.name]));
  canvas.addEventListener("keydown", (event) => {
    if (keys[event.key]) { event.preventDefault(); actions[keys[event.key]](); }
  });
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !event.shiftKey && !sideways) return;
    event.preventDefault();
    if (event.ctrlKey) show(zoomed(view, d.end, Math.exp(event.deltaY * 0.01), timeAt(event.offsetX)));
    else show(moved(view, d.end, (sideways ? event.deltaX : event.deltaY) / width * (view.to - view.from)));
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => show(zoomed(view, d.end, 0.25, timeAt(event.offsetX))));
  const fingers = new Map();
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, event.offsetX);
    tell(event.offsetX, event.offsetY);
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (before === undefined) { tell(event.offsetX, event.offsetY); return; }
    const others = [...fingers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
    if (others.length) {
      const apart = Math.max(8, Math.abs(before - others[0])), now = Math.max(8, Math.abs(event.offsetX - others[0]));
      show(zoomed(view, d.end, apart / now, timeAt(others[0])));
    } else show(moved(view, d.end, (before - event.offsetX) / width * (view.to - view.from)));
    fingers.set(event.pointerId, event.offsetX);
  });
  for (const name of ["pointerup", "pointercancel"])
    canvas.addEventListener(name, (event) => fingers.delete(event.pointerId));
  scheme.addEventListener("change", () => { colours = null; redraw(); });
  window.addEventListener("resize", redraw);
  box.load = load;
  box.view = () => view;
  load(text);
}

if (typeof document !== "undefined") {
  const box = document.getElementById("timeline");
  if (box) startTimeline(box, document.getElementById("timeline-data").textContent);
}
