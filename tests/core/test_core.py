"""Artefacts, events, names, sizes: what goes out comes back, and what is wrong is named."""

from __future__ import annotations

import enum
import errno
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core import artefact, events, files, names
from plait.core.codec import decode, encode
from plait.core.errors import ArtefactError, DiskError, InputError, JobError
from plait.core.names import check_arguments, did_you_mean, nearest, resolve
from plait.core.run_events import Changed
from plait.core.shown import shown
from plait.core.splits import split
from plait.core.units import count_of, parse_bytes, show_bytes, show_rate, show_seconds


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    size: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: Inner
    colour: Colour
    mode: Literal["a", "b"]
    ratio: float
    maybe: int | None = None
    table: Mapping[str, Inner] = field(default_factory=dict)
    numbers: Mapping[int, int] = field(default_factory=dict)


inners = st.builds(Inner, st.integers(), st.lists(st.text(), max_size=3).map(tuple))
outers = st.builds(
    Outer,
    inners,
    st.sampled_from(Colour),
    st.sampled_from(["a", "b"]),
    st.floats(allow_nan=False),
    st.none() | st.integers(),
    st.dictionaries(st.text(), inners, max_size=2),
    st.dictionaries(st.integers(), st.integers(), max_size=2),
)


@given(outers)
def test_any_value_survives_the_way_through_json(value: Outer):
    assert decode(Outer, json.loads(json.dumps(encode(value)))) == value


GOOD = encode(Outer(Inner(1), Colour.RED, "a", 0.5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "green"}, "colour: found 'green', expected one of red, blue"),
        ({"mode": "c"}, "mode: found 'c'"),
        ({"ratio": "x"}, "ratio: found 'x', expected a number"),
        ({"inner": {"size": True}}, "inner.size: found True, expected a whole number"),
        ({"inner": {}}, "inner: field 'size' is missing"),
        ({"colours": "red"}, "unknown field 'colours'; did you mean 'colour'?"),
        ({"table": {"x": {"size": "1"}}}, "table.x.size: found '1', expected a whole number"),
        ({"numbers": {"x": 1}}, "numbers: found the key 'x', expected whole numbers"),
        ({"ratio": 10**400}, "ratio: found a whole number of 401 digits, expected a number"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_found_and_expected(change: dict, message: str):
    with pytest.raises(ArtefactError) as caught:
        decode(Outer, {**GOOD, **change})
    assert message in str(caught.value)


def test_an_artefact_comes_back_and_another_kind_or_version_is_refused(tmp_path: Path):
    path = tmp_path / "x.json"
    value = Inner(3, ("a",))
    artefact.save(value, path, "plan", 2)
    assert artefact.load(Inner, path, "plan", 2) == value
    with pytest.raises(ArtefactError, match="this is a plan file, expected a profile file"):
        artefact.load(Inner, path, "profile", 2)
    with pytest.raises(ArtefactError, match="version 2, but this Plait reads version 3"):
        artefact.load(Inner, path, "plan", 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "x.json:1: not JSON"),
        ("[1]", "found a JSON list"),
        ("{}", "no file of Plait's"),
        ("[" * 100_000, "x.json: nested too deeply; expected a plan file"),
        ('{"version": ' + "9" * 5000 + "}", "x.json: a number of too many digits; expected a plan file"),
        (
            '{"plait": "plan", "version": [' + "1, " * 5000 + "1]}",
            "plan file of version [1, 1, 1, 1, 1, 1, ...]",
        ),
        ('{"plait": "plan", "version": 1, "size": 3, "' + "s" * 5000 + '": 1}', "unknown field 'ssss"),
        ("\0", "x.json:1: not JSON"),
    ],
)
def test_a_file_that_is_no_artefact_says_so(tmp_path: Path, content: str, message: str):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ArtefactError) as caught:
        artefact.load(Inner, path, "plan", 1)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000
    with pytest.raises(ArtefactError, match="no such file"):
        artefact.load(Inner, tmp_path / "none.json", "plan", 1)


def test_a_file_without_end_is_refused_after_a_part_of_it():
    with pytest.raises(ArtefactError, match="/dev/zero: larger than 64 MB; expected a plan file"):
        artefact.load(Inner, Path("/dev/zero"), "plan", 1)


def test_a_name_that_no_file_can_have_is_refused():
    with pytest.raises(InputError, match="no file can have this name; expected a page"):
        files.read_text(Path("a\0b"), "a page", 10)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_next_to_it(tmp_path: Path, monkeypatch):
    path = tmp_path / "f"
    files.write_atomic(path, "old")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(full))
    with pytest.raises(DiskError, match=r"f: cannot be written: No space left on device; free some space"):
        files.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


class TestHappened(events.Event):
    __test__ = False
    what: str
    number: int


def test_events_come_back_typed_and_a_half_written_line_is_dropped(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    log = events.EventLog(path, rank=3)
    log.record(TestHappened("a", 1))
    log.close()
    with path.open("a") as file:
        file.write('{"t": 1.0, "ra')
    assert [r.event for r in events.read(path)] == [TestHappened("a", 1)]
    log = events.EventLog(path, rank=3)
    log.record(TestHappened("b", 2))
    log.close()
    assert [(r.rank, r.event) for r in events.read(path)] == [
        (3, TestHappened("a", 1)),
        (3, TestHappened("b", 2)),
    ]


def test_a_change_is_on_disk_before_the_next_step_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events, "FLUSH_S", 1e9)
    path = tmp_path / "events.jsonl"
    log = events.EventLog(path, rank=0)
    log.flush()
    log.record(TestHappened("a", 1))
    assert path.read_text() == ""
    change = Changed(3, "batch-size", {"batch_size": 8}, "steps", "as the table says")
    log.record(change)
    assert [r.event for r in events.read(path)] == [TestHappened("a", 1), change]


def test_an_event_of_an_unknown_kind_names_its_line(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"t": 1.0, "rank": 0, "kind": "test-happend"}\n')
    with pytest.raises(ArtefactError, match=r"events.jsonl:1: .*did you mean 'test-happened'"):
        list(events.read(path))


@pytest.mark.parametrize(
    "line",
    [
        b'{"t":1,"rank":0,"kind":"test-happened"\xff}',
        b"[" * 100_000,
        b'{"t":1,"rank":Infinity,"kind":"test-happened"}',
        b'{"t":' + b"9" * 5000 + b',"rank":0,"kind":"test-happened"}',
        b"\0\0",
    ],
    ids=["bytes", "deep", "infinite", "digits", "nul"],
)
def test_a_damaged_line_of_events_is_refused_by_its_number(tmp_path: Path, line: bytes):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"t":1,"rank":0,"kind":"test-happened","what":"a","number":1}\n' + line + b"\n")
    with pytest.raises(
        ArtefactError, match=r"events.jsonl:2: found .*, expected an event; delete that line"
    ) as caught:
        list(events.read(path))
    assert len(str(caught.value)) < 500


def test_names_resolve_and_misses_are_explained():
    assert resolve("pathlib:Path", "model") is Path
    for path, message in [
        ("pathlib", "expected 'package.module:name'"),
        ("pathlib:Pth", "pathlib has no 'Pth'; did you mean 'Path'?"),
        ("no_such_module:x", "there is no module 'no_such_module'"),
    ]:
        with pytest.raises(JobError) as caught:
            resolve(path, "model", JobError)
        assert str(caught.value).startswith("model: ")
        assert message in str(caught.value)


def test_arguments_that_a_function_does_not_take_or_lacks_are_named():
    def factory(split: str, size: int, colour: str = "red") -> None: ...

    check_arguments(factory, {"size": 1}, "data", positional=1)
    with pytest.raises(InputError, match=r"data.siz: factory takes no 'siz'; did you mean 'size'"):
        check_arguments(factory, {"siz": 1}, "data", positional=1)
    with pytest.raises(InputError, match=r"factory needs 'size'; add data.size"):
        check_arguments(factory, {}, "data", positional=1)
    with pytest.raises(InputError, match=r"data: factory takes 3, but is called with 4 positional arguments"):
        check_arguments(factory, {}, "data", positional=4)
    check_arguments(lambda *given: None, {}, "data", positional=4)


def test_the_nearest_name_is_offered_or_all_of_them():
    assert nearest("adm", ["adam", "sgd"]) == "adam"
    assert nearest("ADAM", ["adam", "sgd"]) == "adam"
    assert did_you_mean("zzz", ["adam", "sgd"]) == "; valid: adam, sgd"


def test_what_a_thing_is_called_elsewhere_leads_to_its_name_here():
    sgd = ["lr", "momentum", "weight_decay", "nesterov", "foreach"]
    assert did_you_mean("learning_rate", sgd) == "; did you mean 'lr'?"
    assert did_you_mean("decay", sgd) == "; did you mean 'weight_decay'?"
    assert nearest("num_workers", ["batch_size", "loaders"]) == "loaders"
    assert nearest("num_workers", ["workers", "plan"]) == "workers"
    assert nearest("learning_rate", ["learning_rates"]) == "learning_rates"


def test_names_that_are_no_names_and_very_many_valid_ones_make_short_messages():
    assert nearest("a" * 10**6, ["b"]) is None
    assert nearest(None, ["none"]) is None
    assert did_you_mean(3, ["33"]) == "; did you mean '33'?"
    many = did_you_mean("zzz", [f"node{i}" for i in range(10_000)])
    assert len(many) < 600
    assert many.endswith(" more")


def test_a_value_is_shown_in_few_letters_whatever_it_is():
    deep: list[object] = []
    for _ in range(500):
        deep = [deep]
    huge = {f"key {i}": "x" * 10**5 for i in range(1000)}
    for value in (deep, huge, "x" * 10**6, 10**5000, list(range(10**5)), object()):
        assert len(shown(value)) <= 80
    assert shown(10**5000) == "a whole number of 5001 digits"
    assert [shown(value) for value in (1, 1.5, "a", None, [1, "b"], {"a": 1})] == [
        "1",
        "1.5",
        "'a'",
        "None",
        "[1, 'b']",
        "{'a': 1}",
    ]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("antigravity_:x", "there is no module"),
        ("..:x", "importing .. failed: TypeError"),
        ("broken_module:x", "importing broken_module failed: SystemExit: 3"),
        ("lazy_module:x", "'lazy_module:x' cannot be read: ValueError: not today"),
    ],
)
def test_whatever_goes_wrong_with_a_name_is_refused_in_one_sentence(
    path: str, message: str, tmp_path, monkeypatch
):
    (tmp_path / "broken_module.py").write_text("raise SystemExit(3)")
    (tmp_path / "lazy_module.py").write_text("def __getattr__(name): raise ValueError('not today')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(JobError) as caught:
        resolve(path, "model", JobError)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "count"), [("16GB", 16 * 10**9), ("512MiB", 512 * 2**20), ("1e9", 10**9), ("7", 7)]
)
def test_sizes_are_read_as_people_write_them(text: str, count: int):
    assert parse_bytes(text, "--memory") == count


@pytest.mark.parametrize(
    "text", ["", "GB", "1.2.3GB", "-5GB", "5iB", "much", "1e999GB", "1e400", "1e309TB", "٣GB"]
)
def test_a_size_that_is_none_is_refused(text: str):
    with pytest.raises(InputError, match=r"--memory: found .*expected a size such as 16GB"):
        parse_bytes(text, "--memory")


def test_quantities_are_shown_short():
    assert [show_bytes(x) for x in (12, 1500, 2.5e9)] == ["12 B", "1.5 kB", "2.5 GB"]
    assert [show_seconds(x) for x in (0.0, -3.2, 1e300, float("inf"))] == [
        "0 s",
        "-3.2 s",
        "2.78e+296 h",
        "inf s",
    ]
    assert [show_rate(x) for x in (5120.3, 12, 9.96, 3.21, 0.34, 0.0)] == [
        "5,120",
        "12",
        "10",
        "3.2",
        "0.34",
        "0",
    ]
    assert [count_of(n, "worker") for n in (1, 2)] == ["1 worker", "2 workers"]
    assert [show_seconds(x) for x in (3.4e-4, 0.0124, 3.2, 245, 7800)] == [
        "340 µs",
        "12.4 ms",
        "3.2 s",
        "4 min 05 s",
        "2 h 10 min",
    ]


@dataclass(frozen=True)
class Chosen:
    way: Literal["up", "down"] = "up"


def test_a_choice_that_is_none_is_answered_with_those_there_are():
    with pytest.raises(ArtefactError, match=r"Chosen\.way: found 'left', expected one of up, down"):
        decode(Chosen, {"way": "left"})


@given(st.integers(0, 60), st.integers(1, 12))
def test_parts_hold_everything_once_in_order_and_differ_by_one_at_most(count: int, parts: int):
    found = split(count, parts)
    assert [each for part in found for each in part] == list(range(count))
    assert len(found) == parts
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_modules_of_a_folder_are_found_after_all_others_and_only_meanwhile(tmp_path: Path):
    (tmp_path / "mine_alone.py").write_text("thing = 3")
    (tmp_path / "csv.py").write_text("raise SystemExit('not the one of Python')")
    before = list(sys.path)
    with names.searching(str(tmp_path), None, before[-1]):
        assert sys.path == [*before, str(tmp_path)]
        assert str(tmp_path) in names.user_folders()
        assert names.resolve("mine_alone:thing", "model") == 3
        with pytest.raises(
            InputError, match=r"csv has no 'net'.* \(.*/csv.py is hidden by the module in .*csv"
        ):
            names.resolve("csv:net", "model")
    assert sys.path == before


def test_the_path_that_workers_get_has_neither_pythons_own_folders_nor_those_of_packages(tmp_path: Path):
    with names.searching(str(tmp_path)):
        own = names.user_folders()
    assert str(tmp_path) in own
    for module in (json, pytest):
        assert not any(module.__file__.startswith(f"{folder}/") for folder in own)
