"""Packages keep their order: each imports those above it and none below; names and folders stay findable."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch

import plait
from support.world import run_ranks

SOURCE = Path(plait.__file__).parent
ORDER = (
    "core",
    "schema",
    "workloads",
    "callbacks",
    "data",
    "comm",
    "launcher",
    "verification",
    "graph",
    "profiler",
    "planner",
    "sync",
    "pipeline",
    "fusion",
    "adapt",
    "api",
    "training",
    "measure",
    "sweeping",
    "report",
    "jobs",
    "cli",
)
MOST_MODULES = 15
LEVEL = {package: level for level, package in enumerate(ORDER)}
# The packages of fusion; the modules beside them may stand anywhere in this order.
OF_FUSION = ("dispatch", "kernels", "speed", "rules", "trials", "optim", "verify")


def package_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "plait" and len(parts) > 1 else None


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """The nodes of a module, which several tests look at."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def imported_modules(path: Path) -> list[str]:
    modules: list[str] = []
    for node in nodes_of(path):
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
        if here in ("__init__", "__main__", "worker"):
            continue
        assert here in LEVEL, f"{path}: {here} is no package"
        for module in imported_modules(path):
            there = package_of(module)
            if there in LEVEL and there != here and LEVEL[there] >= LEVEL[here]:
                found.append(f"{path.relative_to(SOURCE)} imports {module}")
    return found


def test_no_package_imports_one_that_lies_below_it():
    assert violations() == []


def test_no_package_of_fusion_imports_one_that_lies_below_it():
    fusion = SOURCE / "fusion"
    assert {path.parent.name for path in fusion.glob("*/__init__.py")} == set(OF_FUSION)
    found = []
    for level, here in enumerate(OF_FUSION):
        lower = tuple(f"plait.fusion.{each}." for each in OF_FUSION[level + 1 :])
        for path in (fusion / here).rglob("*.py"):
            found += [f"{path.name} imports {m}" for m in imported_modules(path) if m.startswith(lower)]
    assert found == []


def test_nothing_in_plait_imports_the_experiments():
    """They are a distribution of their own, which `plait bench` finds where it is installed."""
    imported = {str(path.relative_to(SOURCE)): imported_modules(path) for path in SOURCE.rglob("*.py")}
    named = {path: [m for m in found if m.split(".")[0] == "plait_bench"] for path, found in imported.items()}
    assert {path: found for path, found in named.items() if found} == {}


# Modules and functions that unpickle what they are given.
UNPICKLERS = re.compile(
    r"^\s*(?:import|from) (?:pickle|cloudpickle|dill|shelve|marshal)\b.*"
    r"|\btorch\.load\((?!.*weights_only=True).*"
    r"|\bdist\.\w*_object\w*.*",
    re.MULTILINE,
)


def test_nothing_that_a_peer_sends_is_unpickled():
    sources = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    found = {path: UNPICKLERS.findall(text) for path, text in sources.items()}
    # What the same user's processes have pickled: through a pipe of their own, and in the folder of a run.
    own = {"api/launching.py", "api/objects.py"}
    assert {path: uses for path, uses in found.items() if uses and path not in own} == {}


def test_importing_plait_loads_neither_torch_nor_any_optional_dependency():
    script = (
        "import sys, plait; print([m for m in ('torch', 'pydantic', 'rich', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_a_run_under_a_plan_file_is_started_without_torch():
    script = "import sys, plait.jobs.train, plait.measure.auto_plan; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_every_name_that_plait_offers_is_there():
    for name in plait.__all__:
        assert getattr(plait, name) is not None
    assert plait.plan.__name__ == "make_plan"


def modules() -> dict[str, Path]:
    """Every module of Plait by its name."""
    named = {}
    for path in SOURCE.rglob("*.py"):
        parts = ("plait", *path.relative_to(SOURCE).with_suffix("").parts)
        named[".".join(parts).removesuffix(".__init__")] = path
    return named


def import_without(rank: int, missing: str, names: list[str]) -> None:
    """Import modules of Plait anew, in a process of its own, where another one is not installed."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("plait", missing)]:
        del sys.modules[name]
    sys.modules[missing] = None  # type: ignore[assignment]
    for name in names:
        importlib.import_module(name)


def test_workers_need_no_pydantic():
    above = ("plait.cli", "plait.jobs", "plait.schema.job", "plait.schema.messages", "plait.__main__")
    run_ranks(1, import_without, "pydantic", sorted(n for n in modules() if not n.startswith(above)))


def test_no_package_hides_a_name_that_plait_offers():
    assert {name for name in plait.__all__ if (SOURCE / name).exists()} == set()


def test_no_two_classes_have_one_name():
    homes = defaultdict(list)
    for name, path in modules().items():
        (module, *_) = nodes_of(path)
        assert isinstance(module, ast.Module)
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def imports_between(known: Mapping[str, Path]) -> dict[str, set[str]]:
    """For each module the modules of Plait that it imports: at once, once a function is called, or for types.

    The package itself only names what it offers, and imports it when asked.
    """
    found = {}
    for name, path in known.items():
        wanted = imported_modules(path) if name != "plait" else []
        homes = {each if each in known else each.rpartition(".")[0] for each in wanted}
        found[name] = {home for home in homes if home in known and home != name}
    return found


def circle_in(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, the first found; none where there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as failure:
        return list(failure.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle():
    imports = imports_between(modules())
    assert sum(len(found) for found in imports.values()) > 1000
    assert circle_in(imports) == []


def test_a_circle_by_an_import_within_a_function_is_found(tmp_path: Path):
    (tmp_path / "one.py").write_text("from plait.two import b\n")
    (tmp_path / "two.py").write_text("def b():\n    from plait import one\n    return one\n")
    known = {f"plait.{name}": tmp_path / f"{name}.py" for name in ("one", "two")}
    assert set(circle_in(imports_between(known))) == set(known)


def test_no_folder_has_more_modules_than_one_can_take_in_at_a_glance():
    counts = Counter(path.parent for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    assert {str(p.relative_to(SOURCE)): n for p, n in counts.items() if n > MOST_MODULES} == {}


def while_loops(condition: str) -> list[str]:
    """Where a `while` goes by a call of a method of that name."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.While):
                calls = [each for each in ast.walk(node.test) if isinstance(each, ast.Call)]
                names = [each.func.attr for each in calls if isinstance(each.func, ast.Attribute)]
                found += [str(path.relative_to(SOURCE))] * (condition in names)
    return found


def test_one_loop_drives_the_trials_of_runs_and_of_sweeps():
    assert while_loops("ended") == ["training/loop.py"]


def test_every_worker_has_a_membership():
    """Whether it may change is asked of it; where it may not, it is never absent."""
    absent = re.compile(r"memberships is (not )?None")
    assert [str(p.relative_to(SOURCE)) for p in SOURCE.rglob("*.py") if absent.search(p.read_text())] == []


def test_what_trains_a_model_knows_no_run():
    training = SOURCE / "training"
    folders = [training / name for name in ("engines", "audit", "monitoring")]
    paths = [training / "stages/model_stages.py", *(path for each in folders for path in each.glob("*.py"))]
    known = [path for path in paths if re.search(r"plait\.training\.run\b", path.read_text())]
    assert [str(path.relative_to(SOURCE)) for path in known] == []


BENCHMARKS = SOURCE.parents[1] / "benchmarks"
# What runs a job, and what measures: clients of the library.
CLIENTS = [
    *(path for name in ("training", "measure", "jobs", "cli") for path in (SOURCE / name).rglob("*.py")),
    *BENCHMARKS.rglob("*.py"),
]
# Of torch and of Optuna's studies, which have no other names for some things.
OF_OTHERS = {*dir(torch.nn.Module()), *dir(torch.zeros(1)), *dir(torch.optim.Optimizer), "_storage"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(path: Path, defined: Set[str]) -> list[str]:
    """Where a file imports what is private to a module of Plait, or uses it of an object."""
    uses = [m for m in imported_modules(path) if m.startswith("plait") and any(map(is_private, m.split(".")))]
    local = {node.name for node in nodes_of(path) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    attributes = [
        node for node in nodes_of(path) if isinstance(node, ast.Attribute) and is_private(node.attr)
    ]
    of_self = {node.attr for node in attributes if ast.unparse(node.value) in ("self", "cls")}
    uses += [ast.unparse(node) for node in attributes if node.attr in defined - of_self - local]
    return [f"{path.name}: {use}" for use in uses]


def test_what_runs_jobs_and_what_measures_use_nothing_private():
    defined = {
        node.name if isinstance(node, ast.FunctionDef) else node.attr
        for path in SOURCE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    }
    private = {name for name in defined if is_private(name)} - OF_OTHERS
    assert len(private) > 500
    assert [use for path in CLIENTS for use in private_uses(path, private)] == []


# What does the work of each object of the library, and the part of a job that it does, too.
BOTH_DOORS = {
    "plait.sync.allreduce.buckets.AllReduce": ("api/data_parallel.py", "training"),
    "plait.sync.make_averaging.make_averaging": ("api/averaging.py", "training"),
    "plait.pipeline.executor.PipelineExecutor": ("api/stages", "training"),
    "plait.pipeline.verify.prepare.prepare_together": ("api/stages", "training"),
    "plait.data.loader.load": ("api/data_loader.py", "training"),
    "plait.planner.fastest_plan": ("api/stages", "measure"),
    "plait.profiler.profile.profile_model": ("api/stages", "measure"),
}


@pytest.mark.parametrize("name", BOTH_DOORS)
def test_an_object_of_the_library_and_a_job_stand_on_the_same(name: str):
    for place in BOTH_DOORS[name]:
        paths = list((SOURCE / place).rglob("*.py")) if (SOURCE / place).is_dir() else [SOURCE / place]
        assert name in [module for path in paths for module in imported_modules(path)], place
