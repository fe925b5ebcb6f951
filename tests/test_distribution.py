"""What is installed: the wheel has all of Plait and nothing else, and names the extras for the rest.

`make wheel-test` installs the wheel into an empty environment and takes the tour there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Set
from email.parser import Parser
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

import plait
from plait.callbacks.callback import check_callbacks
from plait.cli.watch import watch
from plait.core.errors import InputError
from plait.core.names import EXTRAS
from plait.launcher.launchers.choose import make_launcher
from plait.launcher.run_dir import RunDir
from plait.planner.schedules.simulator import Simulation
from plait.planner.schedules.timeline import draw
from plait.report.sweep import write_sweep
from plait.schema.job import make_job
from plait.schema.placement import HostAccess
from plait.schema.results import SweepResult
from plait.schema.settings import CallSettings, LoraSettings, SearchSettings
from plait.sweeping.search.space import parse_dimension
from plait.sweeping.search.values import check as check_search
from plait.sweeping.settings import SweepSettings
from plait.training import components
from plait.workloads.adapters.lora import check_lora
from plait.workloads.data.image_folder import image_folder
from plait.workloads.from_transformers import from_config

ROOT = Path(plait.__file__).parents[2]
SOURCE = ROOT / "src" / "plait"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Packages whose modules have other names, and modules that torch and pydantic bring along.
MODULES = {"pillow": "PIL", "pyyaml": "yaml", "scikit-learn": "sklearn", "nvidia-ml-py": "pynvml"}
WITH_OTHERS = ("sympy", "triton", "pydantic_core")


def modules_of(requirements: list[str]) -> set[str]:
    """The modules that are installed with these requirements."""
    names = [re.split(r"[\[<>=]", each)[0].lower() for each in requirements]
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


BASE = modules_of(PROJECT["dependencies"])
EXTRA_MODULES = {key: modules_of(each) for key, each in PROJECT["optional-dependencies"].items()}
OPTIONAL = {name for key, each in EXTRA_MODULES.items() if key != "dev" for name in each}


@pytest.fixture(name="wheel", scope="module")
def _wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout, built from a copy: building leaves files next to the sources."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("src", "tests/support", "examples"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    build = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(folder / done.stdout.splitlines()[-1])


def test_the_wheel_has_every_module_what_pages_are_made_of_and_the_marker_for_types(wheel: zipfile.ZipFile):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {
        str(path.relative_to(ROOT / "src"))
        for kind in ("py", "css", "js")
        for path in SOURCE.rglob(f"*.{kind}")
    }
    assert names == {*sources, "plait/py.typed"}


def test_the_wheel_says_what_it_needs_and_has_the_command(wheel: zipfile.ZipFile):
    def read(name: str) -> str:
        return wheel.read(f"plait-{plait.__version__}.dist-info/{name}").decode()

    assert read("entry_points.txt").split() == ["[console_scripts]", "plait", "=", "plait.__main__:main"]
    metadata = Parser().parsestr(read("METADATA"))
    assert metadata["Version"] == plait.__version__
    needed = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert modules_of(needed) == BASE
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])


def test_each_optional_package_is_in_the_extra_that_messages_name():
    for package, extra in EXTRAS.items():
        assert package in EXTRA_MODULES[extra]
        assert package not in BASE


# Within functions, for checkers, or where a fallback is at hand, lines are indented.
IMPORTED = re.compile(
    r"^( *)(?:from|import) ([a-zA-Z]\w*)(?:\.[\w.]+)?(?: as \w+| import .*)?$", re.MULTILINE
)


def others_imported(folder: Path, packages: Set[str]) -> list[str]:
    """What the files of a folder import that is not in `packages`, and extras that are imported at once."""
    known = {*packages, *sys.stdlib_module_names, *BASE, *WITH_OTHERS}
    return [
        f"{path.relative_to(folder)}: {package}"
        for path in folder.rglob("*.py")
        for indented, package in IMPORTED.findall(path.read_text())
        if package not in known and (not indented or package not in OPTIONAL)
    ]


def test_what_plait_imports_is_installed_with_it_or_is_an_extra_that_is_imported_where_it_is_needed():
    assert others_imported(SOURCE, {"plait"}) == []


def test_the_experiments_import_what_a_user_can():
    """The scripts next to them, which are run from a checkout, may also use what the tests have."""
    assert others_imported(ROOT / "benchmarks" / "plait_bench", {"plait", "plait_bench"}) == []
    scripts = {path.stem for path in (ROOT / "benchmarks").iterdir()}
    assert others_imported(ROOT / "benchmarks", {"plait", "support", *scripts}) == []


JOB = {
    "name": "t",
    "model": "torch.nn:Identity",
    "data": {"kind": "digits", "batch_size": 8},
    "optimizer": {"kind": "sgd", "lr": 1.0},
    "steps": 1,
}


def check_board() -> None:
    components.check(make_job({**JOB, "tensorboard": True}).settings())


def check_asha() -> None:
    over = (parse_dimension("optimizer.lr=log:1e-3:1"),)
    check_search(SweepSettings(make_job(JOB).settings(), over, SearchSettings("asha", trials=4)))


def check_watch() -> None:
    """As if the other package were installed."""
    with patch.dict(sys.modules):
        for name in ("starlette", "uvicorn"):
            sys.modules.setdefault(name, ModuleType(name))
        watch(RunDir(Path("none")), lambda: None, "127.0.0.1", 0, False)


USES: dict[str, Callable[[], object]] = {
    "PIL": lambda: image_folder("train", Path("none")),
    "matplotlib": lambda: draw(Simulation((), 1, {}), Path("x.png"), ""),
    "mlflow": lambda: check_callbacks([CallSettings("plait.callbacks:MLflow")]),
    "optuna": check_asha,
    "peft": lambda: check_lora(LoraSettings()),
    "ray": lambda: make_launcher("ray", HostAccess(), ()).take_hosts(1, 1),
    "starlette": check_watch,
    "tensorboard": check_board,
    "transformers": lambda: from_config("GPT2LMHeadModel"),
    "uvicorn": check_watch,
    "wandb": lambda: check_callbacks([CallSettings("plait.callbacks:WandB")]),
}


@pytest.mark.parametrize("package", EXTRAS)
def test_what_needs_an_extra_names_it_before_anything_is_done(package: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"needs {package}, which is not installed; pip install 'plait\[{EXTRAS[package]}\]'"
    with pytest.raises(InputError, match=message):
        USES[package]()


def test_a_sweep_without_matplotlib_has_its_table_and_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "rank0.jsonl").touch()
    write_sweep(
        tmp_path, SweepResult("finished", 0, 0, "grid", "loss", None, (), (), 0.0, 0.0, 1, 1, "", "min", ())
    )
    assert {path.name for path in tmp_path.iterdir()} == {"events", "trials.csv", "sweep.html"}
