"""Which implementation of an operation is chosen, however warm the device was at first; kept on disk."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from plait.fusion.speed import autotune, choice_cache

FAST, SLOW = 1.0e-3, 1.2e-3


class Device:
    """A device on which the `ways` take these seconds, and more in its first runs and in a way's first."""

    def __init__(self, seconds: dict[str, float], cold: float = 0.0, compiling: float = 0.0) -> None:
        self.seconds, self.cold, self.compiling = seconds, cold, compiling
        self.runs: list[str] = []

    def time(self, way, operands) -> float:
        name = way(*operands)
        if name not in self.seconds:
            raise RuntimeError("not on this device")
        first = 0.0 if name in self.runs else self.compiling
        drift = 1.0 + self.cold * 0.8 ** len(self.runs)
        self.runs.append(name)
        return first + self.seconds[name] * drift


def chosen(device: Device, monkeypatch: pytest.MonkeyPatch, *names: str) -> str:
    monkeypatch.setattr(autotune, "_seconds", device.time)
    monkeypatch.setattr(autotune, "_MOST_ROUNDS", 8)  # in other tests one has to do (support/warm.py)
    ways = {name: lambda x, name=name: name for name in names}
    return autotune.measure(ways, (torch.zeros(1),))


@pytest.mark.parametrize("fastest", ["default", "other"])
@pytest.mark.parametrize("cold", [0.0, 3.0, 30.0])
def test_the_way_that_is_fastest_on_a_warm_device_is_chosen_on_a_cold_one(monkeypatch, fastest, cold):
    seconds = {name: FAST if name == fastest else SLOW for name in ("default", "other")}
    assert chosen(Device(seconds, cold, compiling=9.0), monkeypatch, "default", "other") == fastest


def test_the_default_stays_if_no_way_is_clearly_faster_or_none_else_works(monkeypatch):
    assert chosen(Device({"a": FAST, "b": 0.99 * FAST}), monkeypatch, "a", "b") == "a"
    assert chosen(Device({"b": SLOW}), monkeypatch, "a", "b") == "b"
    assert chosen(Device({}), monkeypatch, "a", "b") == "a"


@pytest.mark.parametrize(("seconds", "cold", "rounds"), [(FAST, 0.0, 3), (1.0, 5.0, 3), (FAST, 30.0, 9)])
def test_a_device_whose_times_change_is_measured_for_longer_unless_the_operation_is_long(
    monkeypatch, seconds, cold, rounds
):
    device = Device({"a": seconds, "b": seconds}, cold)
    chosen(device, monkeypatch, "a", "b")
    assert device.runs == ["a", "b"] * rounds


class Gpu(Device):
    """A device whose choices are kept in the user's cache folder, as those of a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "Fake GPU 1") -> None:
        super().__init__({"a": SLOW, "b": FAST})
        self._patch = monkeypatch
        monkeypatch.setattr(autotune, "_seconds", self.time)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        on_gpu = choice_cache.choices_on
        monkeypatch.setattr(autotune, "choices_on", lambda device: on_gpu(torch.device("cuda", 0)))

    def new_process(self) -> None:
        self.runs.clear()
        self._patch.setattr(autotune, "_CHOSEN", {})
        choice_cache._file.cache_clear()

    def choose(self, *shape: int, names: tuple[str, ...] = ("a", "b")) -> str:
        ways = {name: lambda x, name=name: name for name in names}
        return autotune.choose("test", ways, torch.zeros(shape))


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PLAIT_CACHE", raising=False)
    gpu = Gpu(monkeypatch)
    gpu.new_process()
    yield gpu
    choice_cache._file.cache_clear()


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_later_process_measures_only_shapes_that_no_earlier_one_has(gpu, tmp_path):
    assert [gpu.choose(2), gpu.choose(3)] == ["b", "b"]
    (path,) = files(tmp_path)
    assert path.name == f"Fake-GPU-1-torch-{torch.__version__}.json"
    gpu.new_process()
    assert [gpu.choose(2), gpu.choose(3)] == ["b", "b"]
    assert not gpu.runs
    gpu.choose(4)
    assert gpu.runs


def test_choices_of_another_device_type_or_set_of_ways_are_not_used(gpu, monkeypatch):
    gpu.choose(2)
    gpu.new_process()
    gpu.choose(2, names=("a", "c"))  # the way that was kept does not exist any more
    assert gpu.runs
    gpu.new_process()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake GPU 2")
    gpu.choose(2)
    assert gpu.runs


def test_what_another_process_has_kept_meanwhile_stays(gpu, tmp_path):
    gpu.choose(2)
    (path,) = files(tmp_path)
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "ways": {**kept["ways"], "of another": "a"}}))
    gpu.choose(3)
    assert len(json.loads(path.read_text())["ways"]) == 3


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "not JSON"), ('{"plait": "choices", "version": 9}', "of version 9"), ("[1]", "found a JSON list")],
)
def test_a_damaged_file_or_one_of_another_version_is_ignored_in_words(gpu, tmp_path, caplog, text, why):
    gpu.choose(2)
    (path,) = files(tmp_path)
    path.write_text(text)
    gpu.new_process()
    with caplog.at_level(logging.WARNING):
        assert gpu.choose(2) == "b"
    assert gpu.runs
    assert why in caplog.text
    gpu.new_process()
    gpu.choose(2)
    assert not gpu.runs  # it was replaced


def test_a_folder_that_cannot_be_written_is_done_without_in_words(gpu, tmp_path, caplog, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "file"))
    assert [gpu.choose(2), gpu.choose(3)] == ["b", "b"]
    assert caplog.text.count("not kept for later runs") == 1


def test_the_cache_can_be_turned_off_and_a_cpu_has_none(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("PLAIT_CACHE", "")
    gpu.choose(2)
    monkeypatch.delenv("PLAIT_CACHE")
    monkeypatch.setattr(autotune, "choices_on", choice_cache.choices_on)
    gpu.choose(3)  # on the CPU
    assert not files(tmp_path)
