
// Keeps the page of `plait report --watch` up to date: the server sends the sections that have changed.

// Makes `before` equal to `after` and keeps the elements that are there: what is scrolled, typed or drawn stays.
function patch(before, after) {
  if (before.isEqualNode(after) || (before.hasAttribute && before.hasAttribute("data-keep"))) return;
  if (before.nodeName !== after.nodeName) { before.replaceWith(after); return; }
  if (before.nodeType !== Node.ELEMENT_NODE) { before.data = after.data; return; }
  for (const { name } of [...before.attributes]) if (!after.hasAttribute(name)) before.removeAttribute(name);
  for (const { name, value } of after.attributes)
    if (before.getAttribute(name) !== value) before.setAttribute(name, value);
  const old = [...before.childNodes], now = [...after.childNodes];
  now.forEach((node, i) => (i < old.length ? patch(old[i], node) : before.append(node)));
  old.slice(now.length).forEach((node) => node.remove());
}

function showSection(section, text) {
  const made = section.cloneNode(false), cell = section.querySelector("th[data-down]");
  const sorted = cell && { text: cell.textContent, down: cell.dataset.down };
  // The data of the timeline is long: it need not be parsed as HTML.
  let data = null;
  made.innerHTML = text.replace(/(id="timeline-data">)([^<]*)/, (_, start, found) => { data = found; return start; });
  patch(section, made);
  const box = document.getElementById("timeline");
  if (data !== null) box.load ? box.load(data) : startTimeline(box, data);
  const same = sorted && [...section.querySelectorAll("th")].find((each) => each.textContent === sorted.text);
  if (same) {  // the table stays sorted as it was
    same.dataset.down = sorted.down ? "" : "1";
    sortBy(same);
  }
}

function showSections(sections, hasButtons) {
  for (const [name, text] of Object.entries(sections)) {
    const section = document.getElementById("part-" + name);
    if (section && (name !== "controls" || hasButtons)) showSection(section, text);
  }
}

function follow(watch) {
  const lost = document.getElementById("lost");
  let source = null, seen = watch.id;
  function open() {
    const asked = new URLSearchParams({ since: seen, ...(watch.token ? { token: watch.token } : {}) });
    source = new EventSource("events?" + asked);
    source.onopen = () => { lost.hidden = true; };
    source.onmessage = (event) => {
      seen = event.lastEventId;
      showSections(JSON.parse(event.data).sections, Boolean(watch.token));
    };
    source.onerror = () => {
      lost.textContent = `plait report --watch does not answer; this is how the run was at ${new Date().toLocaleTimeString()}.`;
      lost.hidden = false;
      if (source.readyState === EventSource.CLOSED) { source = null; setTimeout(look, 5000); }
    };
  }
  // A page that nobody sees costs nothing.
  function look() {
    if (document.hidden && source) { source.close(); source = null; }
    else if (!document.hidden && !source) open();
  }
  document.addEventListener("visibilitychange", look);
  look();
}

function answer(text, isBad) {
  const box = document.getElementById("answer");
  box.textContent = text;
  box.classList.toggle("bad", isBad);
}

async function ask(token, action, content) {
  answer("asking the run…", false);
  try {
    const response = await fetch(action, {
      method: "POST", body: JSON.stringify(content),
      headers: { "Content-Type": "application/json", "X-Plait-Token": token },
    });
    const said = await response.json();
    answer(said.answer || said.error, !response.ok);
  } catch (failure) {
    answer(`plait report --watch does not answer: ${failure.message}`, true);
  }
}

function startButtons(token) {
  const dialog = document.getElementById("question"), yes = dialog.querySelector("[name=yes]");
  let confirmed = () => {};
  dialog.querySelector("[name=no]").addEventListener("click", () => dialog.close());
  yes.addEventListener("click", () => { dialog.close(); confirmed(); });
  document.getElementById("part-controls").addEventListener("click", (event) => {
    const button = event.target.closest("[data-action]");
    if (!button) return;
    const { action, question } = button.dataset, workers = document.querySelector("[name=workers]");
    if (action === "resize" && !workers.reportValidity()) return;
    const content = action === "resize" ? { workers: workers.valueAsNumber } : {};
    dialog.querySelector("p").textContent = question.replace("%", content.workers);
    yes.textContent = button.textContent.replace("…", "");
    confirmed = () => ask(token, action, content);
    dialog.showModal();
  });
}

if (typeof document !== "undefined") {
  const watch = JSON.parse(document.getElementById("watch-data").textContent);
  if (watch.token) startButtons(watch.token);
  follow(watch);
}
