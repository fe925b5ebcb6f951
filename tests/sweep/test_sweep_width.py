"""How many trials an array holds is measured elsewhere than where they train, and not by chance."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
from typing import Any, cast

import pytest
import torch

from plait.fusion.errors import FusionError
from plait.measure.fresh_process import FreshProcessError, FreshProcesses
from plait.sweeping.array_size import MARGIN, choose, find_width, slower_by

HERE = "sweep.test_sweep_width" if __name__.startswith("sweep.") else __name__
left_behind: list[int] = []


def leave_something(number: int) -> dict[str, Any]:
    left_behind.append(number)
    return {"left": len(left_behind), "process": os.getpid(), "threads": torch.get_num_threads()}


def fail(words: str) -> None:
    raise (FusionError if words == "ours" else ValueError)(words)


def end(number: int) -> None:
    faulthandler.disable()  # pytest's would write a traceback that nobody looks for
    os.kill(os.getpid(), number)


def test_each_call_has_a_process_of_its_own_that_nothing_else_has_changed():
    fresh = FreshProcesses(lambda: None)
    found = [fresh.call(f"{HERE}:leave_something", number) for number in range(2)]
    assert [one["left"] for one in found] == [1, 1]
    assert len({one["process"] for one in found} | {os.getpid()}) == 3
    assert {one["threads"] for one in found} == {torch.get_num_threads()}
    assert left_behind == []


def test_a_call_that_fails_or_ends_says_so():
    fresh = FreshProcesses(lambda: None)
    with pytest.raises(FreshProcessError, match="^ours$"):
        fresh.call(f"{HERE}:fail", "ours")
    with pytest.raises(FreshProcessError, match="^ValueError: theirs$"):
        fresh.call(f"{HERE}:fail", "theirs")
    with pytest.raises(FreshProcessError, match="gave no answer; was memory short.*--width N"):
        fresh.call(f"{HERE}:end", signal.SIGKILL)
    with pytest.raises(FreshProcessError, match="^a process that measures .* ended by SIGSEGV. .*--width N"):
        fresh.call(f"{HERE}:end", signal.SIGSEGV)


def test_a_call_for_a_gpu_begins_from_nothing():
    assert FreshProcesses(lambda: None).call("builtins:abs", -3, on_gpu=True) == 3


def times(slower: float, noise: float, seed: int, pairs: int = 9) -> list[tuple[float, float]]:
    """Times of a narrow step and of one twice as wide, on a machine whose load changes from step to step."""
    drawn = random.Random(seed)
    return [
        (1.0 * (1 + noise * drawn.random()), 2.0 * slower * (1 + noise * drawn.random()))
        for _ in range(pairs)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_width_is_not_decided_by_the_load_of_the_machine(seed: int):
    assert slower_by(times(0.9, 0.5, seed), 1, 2) <= MARGIN
    assert slower_by(times(1.6, 0.5, seed), 1, 2) > MARGIN


class Steps:
    """Steps that are slower from a width on; the memory holds `fits` trials, that of one worker `held`."""

    def __init__(self, slower_from: int, fits: int = 8, held: int = 8) -> None:
        self._slower_from, self._fits, self._held = slower_from, fits, held

    def fitting(self) -> int:
        return self._fits

    def held_by_one(self) -> int:
        return self._held

    def of_width(self, width: int) -> int:
        assert width <= self._held
        return width

    def seconds(self, narrow: int, wide: int) -> list[tuple[float, float]]:
        return [(float(narrow), wide * (1.5 if wide >= self._slower_from else 1.02))] * 3


@pytest.mark.parametrize(("slower_from", "width"), [(64, 8), (8, 4), (4, 2), (2, 1)])
def test_arrays_are_made_narrower_only_where_they_are_clearly_slower(slower_from, width):
    found, why = find_width(cast("Any", Steps(slower_from)), 8)
    assert found == width
    assert bool(why) == (width == 1)


@pytest.mark.parametrize(
    ("slower_from", "fits", "held", "width"),
    [(64, 8, 2, 8), (2, 8, 2, 1), (4, 8, 4, 2), (64, 8, 0, 8), (64, 1, 0, 1), (64, 32, 16, 12)],
)
def test_arrays_in_stages_are_as_wide_as_their_memory_holds_where_the_width_that_one_worker_times_pays(
    slower_from, fits, held, width
):
    assert choose(cast("Any", Steps(slower_from, fits, held)), 12)[0] == width
