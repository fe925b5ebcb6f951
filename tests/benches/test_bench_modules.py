"""Every experiment that the command line names is there, and so is what its workers run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import plait_bench
from plait.cli.bench import MODULES

SOURCE = Path(plait_bench.__file__).parent


@pytest.mark.parametrize("name", MODULES)
def test_an_experiment_can_be_run_in_parts_that_it_names(name: str) -> None:
    module = importlib.import_module(MODULES[name])
    assert callable(module.run)
    assert all(isinstance(part, str) for part in getattr(module, "PARTS", {}))


def entries() -> list[tuple[str, str]]:
    found = []
    for path in SOURCE.rglob("*.py"):
        module = ".".join(("plait_bench", *path.relative_to(SOURCE).with_suffix("").parts))
        text = path.read_text()
        found += [(module, name) for name in re.findall(r'f"\{__name__\}:([a-z_]+)"', text)]
        found += [(there, name) for there, name in re.findall(r'"(plait\.[a-z_.]+):([a-z_]+)"', text)]
    return found


def test_what_the_workers_of_experiments_run_is_there() -> None:
    assert len(entries()) > 5
    for module, name in entries():
        assert callable(getattr(importlib.import_module(module), name)), f"{module}:{name}"
