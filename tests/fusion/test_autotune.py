"""Which implementation of an operation is chosen does not depend on how warm the device was at first."""

from __future__ import annotations

import pytest
import torch

from plait.fusion.speed import autotune

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
    ways = {name: lambda x, name=name: name for name in names}
    return autotune._measure(ways, (torch.zeros(1),))


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
