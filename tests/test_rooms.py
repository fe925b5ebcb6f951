"""The rooms keep their order: a room knows those above it and none below."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import plait

SOURCE = Path(plait.__file__).parent
ORDER = (
    "core",
    "schema",
    "workloads",
    "data",
    "comm",
    "launch",
    "verification",
    "graph",
    "profiler",
    "planner",
    "sync",
    "pipeline",
    "fusion",
    "training",
    "measure",
    "sweep",
    "adapt",
    "report",
    "jobs",
    "experiments",
    "cli",
)
LEVEL = {package: level for level, package in enumerate(ORDER)}


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "plait" and len(parts) > 1 else None


def imported_modules(path: Path) -> list[str]:
    modules: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return modules


def violations() -> list[str]:
    found = []
    for path in SOURCE.rglob("*.py"):
        here = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if here in ("__init__", "__main__"):
            continue
        assert here in LEVEL, f"{path}: {here} is no room"
        for module in imported_modules(path):
            there = room_of(module)
            if there in LEVEL and there != here and LEVEL[there] >= LEVEL[here]:
                found.append(f"{path.relative_to(SOURCE)} imports {module}")
    return found


def test_no_room_imports_one_that_lies_below_it():
    assert violations() == []


def test_importing_plait_loads_neither_torch_nor_any_optional_dependency():
    script = (
        "import sys, plait; print([m for m in ('torch', 'pydantic', 'rich', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_every_name_that_plait_offers_is_there():
    for name in plait.__all__:
        assert getattr(plait, name) is not None
    assert plait.plan.__name__ == "make_plan"


def test_the_rooms_below_the_job_file_import_without_pydantic():
    rooms = sorted(p.name for p in SOURCE.iterdir() if p.is_dir() and p.name in LEVEL and p.name != "cli")
    modules = [
        ".".join(("plait", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for room in rooms
        for path in sorted((SOURCE / room).rglob("*.py"))
    ]
    script = f"""
import importlib, sys
sys.modules['pydantic'] = None
for module in {modules!r}:
    importlib.import_module(module)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=90
    )
    assert done.returncode == 0, done.stderr
