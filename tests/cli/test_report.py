"""`plait report`: a run of 20 steps in two stages with known times, a sweep, and folders that are neither."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from plait.core import run_events
from plait.core.errors import ArtefactError, InputError
from plait.core.events import Event
from plait.report import timeline
from plait.report.curves import decimated
from plait.report.idle import BACKWARD, BETWEEN, FORWARD, RECEIVING
from plait.report.record import RunReader, read_run
from plait.report.timeline import make_timeline
from support.browser import Browser
from support.recorded_run import STATUS, STEPS, T0, make_run, plait, record


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "two-stages")


def test_idle_time_is_explained_by_the_operation_that_sent_the_input(run: Path):
    line = make_timeline(read_run(run), None)
    assert line is not None
    first, second = np.round(line.idle_s, 4)
    assert first[BACKWARD] == pytest.approx(20 * (2.1 + 1.9))
    assert first[RECEIVING] == pytest.approx(20 * 0.2)
    # All stages take part in the evaluation, which is no idle time.
    assert first[BETWEEN] == pytest.approx(19 * 1.3 - 0.5)
    assert second[FORWARD] == pytest.approx(19 * 3.4 - 1.1 - 0.5)
    assert second[BETWEEN] == pytest.approx(1.1)
    assert second[RECEIVING] == pytest.approx(19 * 0.1)
    assert line.busy_s == pytest.approx([20 * 4.5, 20 * 6.5])
    assert line.anchors == pytest.approx(10.0 * np.arange(STEPS))


def test_a_sender_that_is_busy_after_its_message_has_left_is_waited_for(tmp_path: Path):
    start = run_events.RunStarted("two", "m:f", 100, 2, "cpu", "float32", 640, 64, 2, 0, 0, "2.13")
    for stage, (begin, end) in enumerate([(0.0, 1.0), (0.6, 0.8)]):
        times = [tuple(T0 + 10 * step + each for step in range(2)) for each in (begin, end)]
        own = run_events.Operations(2, "FF", (stage,) * 2, (0, 0), *times)
        record(tmp_path, stage, [(T0, start), (T0 + 11, own)] if stage == 0 else [(T0 + 11, own)])
    line = make_timeline(read_run(tmp_path), None)
    assert line is not None
    assert line.idle_s[1][[FORWARD, RECEIVING]] == pytest.approx([9.8, 0.0])


def test_audits_are_shown_as_such_and_not_as_idle_time(run: Path):
    with (run / "events" / "rank0.jsonl").open("a") as file:
        audit = {"step": 1, "seconds": 0.8, "largest": 0.0, "differences": []}
        file.write(json.dumps({"t": T0 + 9.7, "rank": 0, "kind": "audited", **audit}) + "\n")
    line = make_timeline(read_run(run), None)
    assert line is not None
    assert line.other_s == pytest.approx([0.5 + 0.8, 0.5 + 0.8])
    assert line.idle_s[0][BETWEEN] == pytest.approx(19 * 1.3 - 0.5 - 0.8)
    plait("report", str(run), "-o", "page.html")
    assert ">evaluating, saving, auditing</td><td>1.3 s</td>" in Path("page.html").read_text()


def test_a_run_whose_workers_and_batches_change_has_the_numbers_of_its_workers_and_its_last_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)

    def signals(number: int, *work_s: float) -> run_events.Signals:
        batch = (64, 1.0, len(work_s), "all-reduce", "ring")
        return run_events.Signals(number, 1.0, *batch, step_s=2.0, work_s=work_s)

    start = run_events.RunStarted("d", "m:f", 100, 3, "cpu", "float32", 640, 64, 100, 0, 0, "2.13")
    lost = run_events.WorkersChanged(5, 2, (0, 2), (), (), (1,), 1.5, "supervisor", "it was killed")
    change = run_events.Changed(6, "BatchSizeChange", {"batch_size": 128, "lr_factor": 4 / 3}, "p", "why")
    events: list[tuple[float, Event]] = [
        (T0, start),
        (T0 + 10, run_events.Step(5, 0, 1.0, 0.1, 320, 10.0)),
        (T0 + 10, signals(4, 1.0, 2.0, 1.5)),
        (T0 + 12, lost),
        (T0 + 13, change),
        (T0 + 23, run_events.Step(10, 0, 1.0, 0.1, 320, 10.0)),
        (T0 + 23, signals(9, 1.0, 0.5)),
    ]
    record(tmp_path / "d", 0, events)
    progress = {"step": 10, "steps": 60}
    (tmp_path / "d" / "status.json").write_text(json.dumps({**STATUS, "progress": progress}))
    plait("report", "d")
    page = Path("d.report.html").read_text()
    assert "<dt>steps</dt><dd>10 of 60</dd>" in page
    assert f"<dt>idle</dt><dd>{1 - 6 / 10:.0%} of the workers" in page
    assert "batch size 128, lr factor 1.333" in page
    work = page.partition("seconds of work in a step")[2].partition("</figure>")[0]
    assert re.findall('data-name="(.*?)"', work) == ["worker 2", "worker 1", "worker 0"]
    line = make_timeline(read_run(tmp_path / "d"), None)
    assert line is not None
    # Of the steps of an interval one was measured.
    computed = [float((line.ops.ends - line.ops.starts)[line.ops.workers == each].sum()) for each in range(3)]
    assert computed == pytest.approx([5.0 + 5.0, 10.0, 7.5 + 2.5])


def test_a_long_run_keeps_single_operations_in_windows_and_all_of_them_in_the_overview(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(timeline, "MOST_OPERATIONS", 48)
    line = make_timeline(read_run(run), None)
    assert line is not None
    assert (len(line.ops), line.total, len(line.windows)) == (48, 202, 12)
    seconds = line.overview.sum(axis=2) * line.end_s / line.overview.shape[2]
    assert seconds == pytest.approx(
        np.array([[40, 40, 10, 0.5, 0, 84], [40, 80, 10, 0.5, 0, 64.9]]), rel=1e-6
    )


def test_decimated_curves_keep_the_lowest_and_the_highest_values():
    points = [(float(x), float(x % 7)) for x in range(10_000)]
    points[5000] = (5000.0, 99.0)
    points[7001] = (7001.0, -99.0)
    kept = decimated(points, 200)
    assert len(kept) <= 210
    assert {points[0], points[5000], points[7001], points[-1]} <= set(kept)
    assert kept == sorted(kept)


def test_the_page_has_all_of_a_run_within_it(run: Path):
    assert "wrote two-stages.report.html" in plait("report", str(run))
    page = Path("two-stages.report.html").read_text()
    text = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page, flags=re.DOTALL)
    for words in (
        "20 of 20",
        "test accuracy",
        '<td class="words">topology ring</td>',
        "a link is slow &lt;script&gt;",
        "lost worker 2",
        "it was killed",
        "5 MB",
        "- / 4.1 kB",
        "waiting for the backward of the stage behind",
        "6.4 samples/s",
    ):
        assert words in text, words
    assert "<script>alert" not in page
    # Nothing is loaded from anywhere.
    assert not re.search(r"https?://|src=|@import|url\(", page)
    plait("report", str(run))  # a report of Plait's is replaced


NODE = """
const data = readTimeline(JSON.parse(require("fs").readFileSync(0, "utf8")));
const view = zoomed({ from: 0, to: data.end }, data.end, 0.1, 50);
const seen = [];
const canvas = { clearRect() {}, beginPath() {}, moveTo() {}, lineTo() {}, stroke() {}, fill() {},
  fillText() {}, measureText: () => ({ width: 40 }),
  fillRect(x, y, w, h) { seen.push([x, y, w, h]); } };
const colours = coloursOf(false, { getPropertyValue: () => "red" });
const layout = { top: 0, bar: 20, messages: 10, lane: 0, row: 36, height: 80, left: 70 };
drawTimeline(canvas, data, { ...view, width: 1000 }, layout, colours);
console.log(JSON.stringify({
  said: [[0, 0.5], [0, 3], [0, 4.15], [1, 10.5]].map(([row, t]) => describeAt(data, row, t)),
  messages: [[0, 1.05], [1, 3], [2, 7.05], [3, 4.15], [3, 4.3]].map(
    ([row, t]) => describeMessage(data, row, t, 0.1)),
  view, seen, finite: seen.flat().every(Number.isFinite), end: moved(view, data.end, 1e9).to,
}));
"""


def test_the_script_of_the_page_draws_the_operations_and_says_why_a_worker_is_idle(run: Path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node to run the page's script")
    plait("report", str(run), "-o", "page.html")
    page = Path("page.html").read_text()
    (data,) = re.findall(r'id="timeline-data">(.*?)</script>', page, flags=re.DOTALL)
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    done = subprocess.run(
        [node, "-e", script + NODE], input=data, capture_output=True, text=True, timeout=60, check=True
    )
    answer = json.loads(done.stdout)
    assert answer["said"] == [
        "worker 0 (stage 0): forward of microbatch 0, stage 0, 1.00 s",
        "worker 0 (stage 0): idle, waiting for the backward of the stage behind; "
        "the next operation begins 1.20 s later",
        "worker 0 (stage 0): idle, receiving; the next operation begins 50.0 ms later",
        "worker 1 (stage 1): idle, waiting for the forward of the stage before; "
        "the next operation begins 600 ms later",
    ]
    assert answer["messages"] == [
        "worker 0 (stage 0): sends the output of microbatch 0 to worker 1 (stage 1), 4.1 kB, 100 ms",
        "worker 0 (stage 0): receives the gradient of microbatch 0 from worker 1 (stage 1), 1.02 kB, 2.20 s",
        "worker 1 (stage 1): sends the gradient of microbatch 1 to worker 0 (stage 0), 1.02 kB, 100 ms",
        "worker 1 (stage 1): receives the output of microbatch 1 from worker 0 (stage 0), 4.1 kB, 0 s",
        "worker 1 (stage 1): receives nothing here",
    ]
    assert answer["view"]["to"] - answer["view"]["from"] == pytest.approx(19.87, rel=0.01)
    assert answer["end"] == pytest.approx(198.7)
    # Backgrounds, about two steps of ten operations, the idle time before them, and eight messages.
    assert 36 < len(answer["seen"]) < 96
    thin = [y for x, y, w, h in answer["seen"] if h == 4]
    assert set(thin) == {22, 27, 58, 63}
    assert len(thin) == pytest.approx(16, abs=3)
    assert answer["finite"]


def test_a_run_that_died_shows_how_far_it_was_and_why(run: Path):
    progress = {"step": 20, "steps": 30, "left_s": 100.0}
    (run / "status.json").write_text(json.dumps({**STATUS, "state": "running", "progress": progress}))
    first = run / "events" / "rank0.jsonl"
    first.write_text("".join(line for line in first.open() if "run-ended" not in line))
    (run / "failure.txt").write_text("worker 1 on localhost failed: out of <memory>\n")
    with (run / "events" / "rank1.jsonl").open("a") as file:
        file.write('{"t": 1.7')  # what a crash cut off
        file.flush()
    plait("report", str(run))
    page = Path("two-stages.report.html").read_text()
    assert '<span class="state bad">died</span>' in page
    assert "worker 1 on localhost failed: out of &lt;memory&gt;" in page
    assert "time left" not in page


def test_what_another_version_wrote_is_left_out_and_the_rest_is_shown(run: Path):
    (run / "settings.json").write_text(json.dumps({"pipeline": {"plan": {"slices": 3}}, "colour": "red"}))
    with (run / "events" / "rank0.jsonl").open("a") as file:
        file.write(json.dumps({"t": T0 + 201, "rank": 0, "kind": "step", "steps": [1, 2]}) + "\n")
    plait("report", str(run))
    page = Path("two-stages.report.html").read_text()
    for words in (
        "20 of 20",
        "worker 1 (stage 1)",
        "<dt>plan</dt><dd>not shown: ",
        "perhaps another version of Plait wrote it",
        "<dt>not shown</dt><dd>1 event, perhaps of another version of Plait; the first: ",
    ):
        assert words in page, words


def test_a_folder_of_runs_is_listed_and_those_that_are_chosen_are_compared(
    run: Path, browser: Browser, tmp_path: Path
):
    for name, rate in (("a", 0.1), ("b", 0.2), ("c", 0.1)):
        shutil.copytree(run, tmp_path / "all" / name)
        (tmp_path / "all" / name / "job.yaml").write_text(
            f"name: {name}\noptimizer: {{lr: {rate}}}\nsteps: 20\nadapt: {[{'kind': name * 150}]}\n"
        )
    (tmp_path / "all" / "hurt").mkdir()
    (tmp_path / "all" / "hurt" / "status.json").write_text("{<")
    assert "wrote all.report.html" in plait("report", "all")
    browser.open((tmp_path / "all.report.html").as_uri())
    texts = "[...document.querySelectorAll({!r})].map((cell) => cell.textContent)"
    first, *rows = browser.value(
        "[...document.querySelectorAll('#runs tr')].map((r) => r.innerText.split('\\t'))"
    )
    assert first[2:] == ["state", "steps", "training loss", "test loss", "test accuracy", "time", "workers"]
    assert sorted(row[1] for row in rows) == ["a", "b", "c"]
    assert {tuple(row[2:]) for row in rows} == {
        ("finished", "20 of 20", "0.1", "0.5", "75.0%", "3 min 20 s", "2")
    }
    assert browser.value(texts.format("#part-unreadable td"))[:2] == ["hurt", "unreadable"]
    names = [row[1] for row in rows]
    for name in "abc":
        if (name in names[:2]) != (name in "ab"):
            browser.click(f"input[aria-label='compare {name}']")
    browser.wait("document.querySelectorAll('#compared polyline').length === 2 * 4")
    assert sorted(browser.value(texts.format("#compared .legend span"))) == ["a", "b"]
    cells = sorted(browser.value(texts.format("#compared td")))
    assert (cells[:2], cells[-2:]) == (["0.1", "0.2"], ["adapt", "optimizer.lr"])
    # Long settings wrap.
    scroll = "document.querySelector('#compared .scroll')"
    assert browser.value(f"{scroll}.scrollWidth === {scroll}.clientWidth")
    assert browser.errors() == []
    with pytest.raises(
        InputError, match="a folder of runs, expected one run; name one of them, such as all/"
    ):
        plait("report", "all", "--trace", "t.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="and no run below empty/ to list"):
        plait("report", "empty")


def test_a_sweep_shows_the_curves_and_values_of_its_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    start = run_events.SweepStarted("s", "m:f", "asha", ("lr", "kind"), 12, 0, "loss", 1, "2.13")
    events: list[tuple[float, Event]] = [(T0, start)]
    for trial in range(12):
        values = {"lr": 10.0 ** -(trial % 4), "kind": "adam" if trial % 2 else "sgd"}
        events.append((T0, run_events.TrialDrawn(trial, values, 20, "g")))
        losses = [(T0, run_events.TrialStep(trial, at, 1.0 + trial / at)) for at in range(1, 21)]
        events += losses
        loss = None if trial == 11 else 1.0 + trial
        events.append((T0 + 1, run_events.TrialEvaluated(trial, 20, {"loss": loss})))
        events.append((T0 + 1, run_events.TrialReached(trial, 20, loss, {"loss": loss}, 1.0)))
        state, why = ("failed", "no memory") if trial == 11 else ("finished", "")
        events.append((T0 + 2, run_events.TrialEnded(trial, 20, state, {"loss": loss}, 1.0, why)))
    record(tmp_path / "s", 0, events)
    (tmp_path / "s" / "status.json").write_text(json.dumps({**STATUS, "state": "stopped"}))
    plait("report", "s")
    page = Path("s.report.html").read_text()
    plot = page.partition("<figure class=wide>")[2].partition("</figure>")[0]
    assert plot.count("<polyline") == 12
    assert all(text in plot for text in ("adam", "sgd", "test loss"))
    assert "trial 11 failed" in page
    assert page.count("<tr>") == 1 + 12 + 2
    best = page.partition("<h2>Trials")[2].partition("<table>")[2].split("<tr>")[2]
    assert best.startswith("<td>0</td>")


def test_a_run_that_goes_on_is_read_where_the_last_reading_ended(run: Path):
    """Half lines wait, new workers are found, a damaged line is told once, another run begins anew."""
    whole = read_run(run)
    texts = {path: path.read_bytes() for path in sorted((run / "events").iterdir())}
    for path in texts:
        path.unlink()
    reader = RunReader(run)
    assert not reader.read_new()
    for path, text in texts.items():
        for cut in (len(text) // 3, len(text) // 2, len(text)):
            path.write_bytes(text[:cut])
            assert reader.read_new()
            assert not reader.read_new()
    assert reader.recorded().events == whole.events
    assert np.array_equal(reader.recorded().ops.starts, whole.ops.starts)
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(ArtefactError, match="rank1.jsonl:41: found '{}', expected an event"):
        reader.read_new()
    assert not reader.read_new()
    path.write_bytes(text[: len(text) // 2])
    assert reader.read_new()
    assert len(reader.recorded().ops) < len(whole.ops)
