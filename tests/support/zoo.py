"""The benchmark of models as a module, and its cases by family and name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).parents[2] / "benchmarks" / "model_zoo.py"
_spec = importlib.util.spec_from_file_location("model_zoo", _PATH)
assert _spec is not None
assert _spec.loader is not None
zoo = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = zoo
_spec.loader.exec_module(zoo)
CASES = {f"{case.family} {case.name}": case for case in zoo.cases()}
