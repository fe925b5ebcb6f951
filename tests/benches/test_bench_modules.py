"""Every experiment that the command line names is there, and so is what its workers run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import plait_bench
from plait.cli.bench import installed

SOURCE = Path(plait_bench.__file__).parent


@pytest.mark.parametrize("name", installed())
def test_an_experiment_can_be_run_in_parts_that_it_names(name: str) -> None:
    module = importlib.import_module(installed()[name])
    assert callable(module.run)
    assert all(isinstance(part, str) for part in getattr(module, "PARTS", {}))


def entries() -> list[tuple[str, str]]:
    found = []
    for path in SOURCE.rglob("*.py"):
        module = ".".join(("plait_bench", *path.relative_to(SOURCE).with_suffix("").parts))
        text = path.read_text()
        found += [(module, name) for name in re.findall(r'f"\{__name__\}:([A-Za-z_]+)"', text)]
        found += [(module, name) for name in re.findall(r"in_world\([^,]+, ([a-z_]+),", text)]
        found += re.findall(r'"(plait\.[a-z_.]+):([a-z_0-9]+)"', text)
    return found


def test_what_the_workers_of_experiments_run_is_there() -> None:
    assert len(entries()) > 15
    for module, name in entries():
        assert callable(getattr(importlib.import_module(module), name)), f"{module}:{name}"
