"""The files that `plait report` writes, those that it leaves alone, and folders that it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from plait.core import run_events
from plait.core.errors import InputError
from support.recorded_run import T0, make_run, plait, record


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "two-stages")


def test_a_trace_tables_and_a_picture_are_written_too(run: Path):
    options = ("-o", "r.html", "--trace", "t.json", "--csv", "tables", "--png", "p.png", "--json")
    files = json.loads(plait("report", str(run), *options))["files"]
    traced = json.loads(Path("t.json").read_text())["traceEvents"]
    bars = [each for each in traced if each["ph"] == "X" and each["cat"] != "message"]
    assert len(bars) == 200
    times = {"ts": 1_100_000, "dur": 1_000_000}
    third = {"name": "forward 0", "cat": "F", "ph": "X", "pid": 0, "tid": 1, "args": {"stage": 1}}
    assert bars[2] == {**third, **times}
    lines = {path.name: path.read_text().splitlines() for path in Path("tables").iterdir()}
    assert {name: len(each) - 1 for name, each in lines.items()} == {
        "curves.csv": 42,
        "idle.csv": 2,
        "stages.csv": 2,
        "adaptations.csv": 2,
        "faults.csv": 1,
        "operations.csv": 200,
        "messages.csv": 160,
    }
    assert lines["messages.csv"][:2] == [
        "worker,kind,stage,microbatch,start,end,way,peer,peer_stage,bytes",
        "1,F,1,0,1700000000.0,1700000001.1,r,0,0,4096",
    ]
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")
    assert set(files) == {"r.html", "t.json", "p.png", *(f"tables/{name}" for name in lines)}
    plait("report", str(run), *options)  # each is known as Plait's


def test_a_trace_has_an_arrow_for_each_message_from_its_send_to_its_receive(run: Path):
    plait("report", str(run), "--trace", "t.json")
    traced = json.loads(Path("t.json").read_text())["traceEvents"]
    rows = {each["tid"]: each["args"]["name"] for each in traced if each["name"] == "thread_name"}
    bars = {(each["tid"], each["ts"]): each for each in traced if each["ph"] == "X"}
    ends: dict[int, dict[str, Any]] = {}
    for each in traced:
        if each["ph"] in "sf":
            ends.setdefault(each["id"], {})[each["ph"]] = each
    assert len(ends) == 80
    for arrow in ends.values():
        sent = bars[arrow["s"]["tid"], arrow["s"]["ts"]]
        (received,) = [
            bar
            for (row, start), bar in bars.items()
            if row == arrow["f"]["tid"] and start <= arrow["f"]["ts"] < start + bar["dur"]
        ]
        assert rows[sent["tid"]] == f"worker {received['args']['peer']} sends"
        assert rows[received["tid"]] == f"worker {sent['args']['peer']} receives"
        assert sent["name"].split()[1] == received["name"].split()[1]
        assert 0 <= received["ts"] + received["dur"] - sent["ts"] < 3e6


def messages_of(rank: int, times: list[tuple[float, float]]) -> tuple[float, run_events.Messages]:
    """Messages that worker `rank` sends to worker 0, one after the other."""
    many, none = len(times), (0,) * len(times)
    starts, ends = (tuple(T0 + each for each in column) for column in zip(*times))
    event = run_events.Messages(1, "F" * many, "s" * many, none, none, none, none, none, starts, ends)
    return T0 + 9, event


def test_sends_that_overlap_are_in_rows_of_their_own(run: Path):
    record(run, 2, [messages_of(2, [(0.0, 2.0), (1.0, 3.0), (2.5, 4.0)])])
    plait("report", str(run), "--trace", "t.json")
    traced = json.loads(Path("t.json").read_text())["traceEvents"]
    names = {each["tid"]: each["args"]["name"] for each in traced if each["name"] == "thread_name"}
    bars = [each for each in traced if each["ph"] == "X" and names[each["tid"]] == "worker 2 sends"]
    assert [each["tid"] for each in bars] == [2_000_002, 3_000_002, 2_000_002]


def test_a_run_of_a_version_that_recorded_no_messages_is_shown_without_them(run: Path):
    for path in (run / "events").iterdir():
        path.write_text("".join(line for line in path.open() if '"kind": "messages"' not in line))
    plait("report", str(run), "--trace", "t.json", "--csv", "tables")
    assert "thin bars beneath" not in Path("two-stages.report.html").read_text()
    assert not Path("tables/messages.csv").exists()
    assert '"message"' not in Path("t.json").read_text()


@pytest.mark.parametrize("option", ["-o", "--trace", "--png", "--csv"])
def test_what_plait_did_not_write_is_replaced_only_when_asked(option: str, run: Path):
    path = Path("mine/curves.csv" if option == "--csv" else "mine")
    path.parent.mkdir(exist_ok=True)
    path.write_text("my notes")
    with pytest.raises(
        InputError, match="exists and is no report of Plait's; name another file, or say --force"
    ):
        plait("report", str(run), option, "mine")
    assert path.read_text() == "my notes"
    assert not Path("two-stages.report.html").exists()
    if option != "--png":  # which takes long to draw
        plait("report", str(run), option, "mine", "--force")
        assert "my notes" not in path.read_text()


@pytest.mark.parametrize("seconds", ["NaN", "Infinity"])
def test_times_that_are_no_numbers_are_left_out_of_the_page_and_the_trace(run: Path, seconds: str):
    with (run / "events" / "rank0.jsonl").open("a") as file:
        fields = f'"step": 5, "metrics": {{}}, "samples": 1, "seconds": {seconds}'
        file.write(f'{{"t": {T0 + 50}, "rank": 0, "kind": "evaluated", {fields}}}\n')
    plait("report", str(run), "--trace", "t.json")
    page = Path("two-stages.report.html").read_text()
    (timeline,) = re.findall(r'id="timeline-data">(.*?)</script>', page, flags=re.DOTALL)
    for text in (timeline, Path("t.json").read_text()):
        json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize("t", ["NaN", "1e999"])
def test_an_event_at_no_time_is_refused(run: Path, t: str):
    with (run / "events" / "rank0.jsonl").open("a") as file:
        file.write(f'{{"t": {t}, "rank": 0, "kind": "sync-chosen", "sync": "x", "reason": "y"}}\n')
    with pytest.raises(InputError, match=r"rank0.jsonl:66: found .*, expected an event"):
        plait("report", str(run), "--trace", "t.json")


def test_two_outputs_in_one_file_are_refused(run: Path):
    with pytest.raises(InputError, match="found one file for two of them, expected a file for each"):
        plait("report", str(run), "-o", "one.html", "--trace", "./one.html")
    assert not Path("one.html").exists()


@pytest.mark.parametrize("option", ["-o", "--trace", "--png"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_anything_is_written(option: str, run: Path):
    Path("there").mkdir()
    with pytest.raises(InputError, match=rf"{option}: found 'there', a folder, expected a file"):
        plait("report", str(run), option, "there", "--csv", "tables")
    assert not Path("tables").exists()
    assert not Path("two-stages.report.html").exists()


def test_a_reader_that_has_read_enough_is_no_error_and_nothing_is_added_to_a_stream(run: Path):
    reading, writing = os.pipe()
    os.close(reading)
    assert plait("report", str(run), "-o", f"/dev/fd/{writing}") == ""
    os.close(writing)
    assert plait("report", str(run), "-o", "/dev/null") == ""


def test_tables_of_another_version_are_replaced(run: Path):
    Path("tables").mkdir()
    Path("tables/idle.csv").write_text("worker,computing,resting\n0,1.0,2.0\n")
    plait("report", str(run), "--csv", "tables")
    assert "resting" not in Path("tables/idle.csv").read_text()


def broken(run: Path, kind: str = "operations", **fields: Any) -> None:
    with (run / "events" / "rank1.jsonl").open("a") as file:
        file.write(json.dumps({"t": T0, "rank": 1, "kind": kind, **fields}) + "\n")


def no_folder(run: Path) -> None:
    shutil.rmtree(run / "events")
    (run / "events").touch()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda run: broken(run, "messages", ways="s", letters="F", starts=[T0], bytes=["many"]),
            r"rank1.jsonl:41: expected messages, each with a way, peer, bytes, start and end",
        ),
        (
            lambda run: broken(run, letters='"', stages=[0], microbatches=[0], starts=[T0], ends=[T0]),
            r"rank1.jsonl:41: expected operations",
        ),
        (lambda run: (run / "status.json").unlink(), "expected a run's folder or name"),
        (no_folder, r"two-stages/events: Not a directory; name another place"),
        (lambda run: shutil.rmtree(run / "events"), r"no events \(finished\); .* a script does not"),
        (
            lambda run: broken(run, letters="FB", stages=[1]),
            r"rank1.jsonl:41: expected operations, each with a letter, stage, microbatch, start and end",
        ),
    ],
)
def test_a_folder_that_has_no_record_is_refused(change: Any, message: str, run: Path):
    change(run)
    with pytest.raises(InputError, match=message):
        plait("report", str(run))
    assert not list(Path.cwd().glob("*.html"))
