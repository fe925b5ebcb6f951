"""Every operation of torch on fused tensors, against the same operation on each trial alone.

    python benchmarks/fuzz_fusion.py [--only softmax] [--samples 12] [--seed 0] [--jobs 2] [--verbose]

Torch's own samples of arguments (OpInfo) are tried with 2 to 5 trials, with the first tensor, all floats or
all tensors fused, in three memory layouts, as a function, a method and in place; values, types, shapes and
gradients are compared in float64. Counted are cases that are right, refused with a message, wrong, and that
fail with a bare error of torch. Exit status 1 when any is wrong or fails.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import itertools
import multiprocessing
import random
import signal
import sys
import time
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import plait.fusion.rules  # noqa: F401  (fills the table of rules)
from plait.fusion.dispatch.random import Streams
from plait.fusion.dispatch.tensor import Trials, TrialTensor
from plait.fusion.dispatch.torch_patches import running
from plait.fusion.errors import FusionError
from plait.fusion.trials.mode import TrialMode
from plait.fusion.trials.one_by_one import apply_alone

KINDS = ("right", "refused", "wrong", "bare error")
LAYOUTS = ("outer", "inner", "turned")
FUSED = ("first", "floats", "all")
FORMS = ("function", "method", "in place")
CASE_S, VARIANT_S = 5, 40
# Memory that nobody wrote has no values to compare.
UNDEFINED = ("empty", "resize")


class TakesTooLong(BaseException):
    """The time of one case is used up; no `except Exception` of the code under test may catch it."""


@dataclass(frozen=True)
class Case:
    """One call: which sample, how many trials, what of it is fused, how that lies in memory, which form."""

    sample: int
    count: int
    fused: str
    layout: str
    form: str


@dataclass
class Tally:
    """How often each outcome was seen for one operation, and the first example of each."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, case: Case, words: str) -> None:
        self.counts[kind] += 1
        self.examples.setdefault(kind, f"{words} | {case}")


@functools.cache
def operations() -> dict[str, Any]:
    """Torch's descriptions of its operations, by name and variant."""
    _stand_in_for_expecttest()
    from torch.testing._internal.common_methods_invocations import op_db

    named = {f"{op.name}.{op.variant_test_name}".strip("."): op for op in op_db}
    return {name: op for name, op in sorted(named.items()) if _is_tried(op)}


def _stand_in_for_expecttest() -> None:
    """Torch's test modules import `expecttest`, of which nothing here is used."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        module = types.ModuleType("expecttest")
        module.TestCase = type("TestCase", (unittest.TestCase,), {})  # type: ignore[attr-defined]
        sys.modules["expecttest"] = module


def _is_tried(op: Any) -> bool:
    undefined = any(word in op.name for word in UNDEFINED)
    return not undefined and "sparse" not in op.name and torch.float64 in op.dtypes


def try_operation(op: Any, seed: int, samples: int, layouts: tuple[str, ...] = LAYOUTS) -> Tally:
    """All cases of one operation."""
    tally, source = Tally(), random.Random(seed)
    began = time.process_time()
    with _at_most(VARIANT_S, tally):
        given = list(itertools.islice(op.sample_inputs("cpu", torch.float64, requires_grad=False), samples))
        for case in _cases(given, layouts, source):
            form = _form_of(op, case.form)
            if form is None:
                continue
            if time.process_time() - began > VARIANT_S:
                tally.counts["too slow"] += 1
                continue
            with _at_most(CASE_S, tally):
                kind, words = try_case(op, form, given[case.sample], case, source.randrange(2**31))
                tally.add(kind, case, words)
    return tally


def _cases(samples: list[Any], layouts: tuple[str, ...], source: random.Random) -> Iterator[Case]:
    for number, sample in enumerate(samples):
        first = next((x for x in _tensors(sample.input)), None)
        length = first.shape[0] if first is not None and first.dim() else 0
        for layout, fused, form in itertools.product(layouts, FUSED, FORMS):
            if form != "function" and (layout != layouts[0] or fused == "first"):
                continue
            # As many trials as the first axis is long, half of the time: one must not pass for the other.
            own = length if 2 <= length <= 5 and source.random() < 0.5 else source.randint(2, 5)
            yield Case(number, own, fused, layout, form)


def _form_of(op: Any, form: str) -> Callable[..., Any] | None:
    found = {"function": op.op, "method": op.method_variant, "in place": op.inplace_variant}[form]
    return found if callable(found) else None


class _Draws(TorchDispatchMode):
    """Notices random numbers: those of a trial are its own, and none of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Attention says that it may draw also where it does not; its dropout is an operation of its own.
        may_draw = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func)
        self.seen = self.seen or may_draw
        return func(*args, **(kwargs or {}))


class _at_most:
    """Within, at most so many seconds of CPU time; a case that takes longer counts as such."""

    def __init__(self, seconds: float, tally: Tally) -> None:
        self.seconds, self.tally = seconds, tally

    def __enter__(self) -> None:
        self.before = signal.signal(signal.SIGPROF, _too_long)
        self.rest = signal.setitimer(signal.ITIMER_PROF, self.seconds)[0]

    def __exit__(self, kind: Any, *rest: Any) -> bool:
        signal.signal(signal.SIGPROF, self.before)
        signal.setitimer(signal.ITIMER_PROF, max(0.1, self.rest - self.seconds) if self.rest else 0)
        if kind is TakesTooLong:
            self.tally.counts["too slow"] += 1
        return kind is TakesTooLong


def _too_long(*signal_and_frame: Any) -> None:
    raise TakesTooLong


def try_case(op: Any, form: Callable[..., Any], sample: Any, case: Case, seed: int) -> tuple[str, str]:
    """What came of one case, in a word, and why."""
    tree = (sample.input, tuple(sample.args), dict(sample.kwargs))
    leaves, spec = pytree.tree_flatten(tree)
    places = _fused_places(leaves, case.fused)
    if not places or any(x.layout != torch.strided for x in _tensors(tree)):
        return "skipped", "nothing to fuse"
    values = {place: _values(leaves[place], case.count, seed + place) for place in places}

    def arguments(trial: int, gradients: bool) -> tuple[Any, list[Tensor]]:
        own = [x.clone() if isinstance(x, Tensor) else copy.copy(x) for x in leaves]
        for place in places:
            own[place] = values[place][trial].clone().requires_grad_(gradients and _is_float(own[place]))
        return pytree.tree_unflatten(own, spec), [own[place] for place in places]

    gradients = bool(op.supports_autograd) and any(_is_float(leaves[place]) for place in places)
    try:
        with _Draws() as draws:
            lone = [_call(form, *arguments(trial, gradients), case.form) for trial in range(case.count)]
    except Exception as failure:
        return "skipped", f"fails alone: {failure}"
    wanted = _lone_gradients(lone) if gradients and not draws.seen else None
    trials = Trials(case.count, Streams(torch.arange(case.count), torch.zeros(case.count, dtype=torch.int64)))
    stacked = [
        _laid_out(values[place], case.layout).requires_grad_(gradients and _is_float(leaves[place]))
        for place in places
    ]
    own = [x.clone() if isinstance(x, Tensor) else copy.copy(x) for x in leaves]
    for place, inner in zip(places, stacked):
        own[place] = TrialTensor(inner, trials)
    try:
        with running(lambda: nullcontext, partial(apply_alone, trials)), TrialMode(trials):
            found, inputs = _call(form, pytree.tree_unflatten(own, spec), stacked, case.form)
        differs = _difference(found, [outcome for outcome, _ in lone], trials, draws.seen)
        if differs is None and wanted is not None:
            differs = _gradient_difference(found, inputs, wanted, trials)
    except FusionError as failure:
        return "refused", str(failure).split("\n")[-1].strip()
    except Exception as failure:
        return "bare error", f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
    return ("right", "") if differs is None else ("wrong", differs)


def _call(form: Callable[..., Any], tree: Any, inputs: list[Tensor], name: str) -> tuple[Any, list[Tensor]]:
    """The outcome, and the inputs that gradients are asked for; in place, of a copy that may be written."""
    first, args, kwargs = tree
    if name == "in place" and isinstance(first, Tensor):
        first = first.clone()
    return form(first, *args, **kwargs), inputs


def _fused_places(leaves: list[Any], fused: str) -> list[int]:
    tensors = [place for place, x in enumerate(leaves) if isinstance(x, Tensor)]
    floats = [place for place in tensors if _is_float(leaves[place])]
    return {"first": floats[:1], "floats": floats, "all": tensors if floats else []}[fused]


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _values(x: Tensor, count: int, seed: int) -> list[Tensor]:
    """One tensor a trial: the sample's own, then somewhat smaller ones; indices are the same in all."""
    source = torch.Generator().manual_seed(seed)
    x = x.detach()
    if not _is_float(x):
        return [x.clone() for _ in range(count)]
    shrink = [1 - 0.05 * torch.rand(x.shape, generator=source, dtype=torch.float64) for _ in range(count - 1)]
    return [x.clone(), *((x * factor).to(x.dtype) for factor in shrink)]


def _laid_out(values: list[Tensor], layout: str) -> Tensor:
    """The trials' tensors with the trials axis first, and in memory outermost, innermost or axes turned."""
    stacked = torch.stack(values)
    if layout == "inner":
        return torch.stack(values, -1).movedim(-1, 0)
    if layout == "turned" and stacked.dim() > 2:
        return stacked.transpose(1, -1).contiguous().transpose(1, -1)
    if layout == "turned" and stacked.dim() == 2:
        return torch.stack(values, 1).movedim(1, 0)
    return stacked


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _stacked(x: Tensor, trials: Trials) -> Tensor:
    return x.stacked if isinstance(x, TrialTensor) else x.expand(trials.count, *x.shape)


def _difference(found: Any, lone: list[Any], trials: Trials, draws: bool) -> str | None:
    """How `found` differs from what the trials alone returned; of random numbers only the shape counts."""
    tensors, expected = _tensors(found), [_tensors(one) for one in lone]
    if len(tensors) != len(expected[0]):
        return f"{len(tensors)} tensors, alone {len(expected[0])}"
    if not tensors and any(one != found for one in lone):
        return f"the value {found}, alone {lone}"
    for place, tensor in enumerate(tensors):
        inner = _stacked(tensor, trials)
        for trial in range(trials.count):
            own, other = inner[trial], expected[trial][place]
            if own.shape != other.shape or own.dtype != other.dtype:
                return f"{own.dtype} {tuple(own.shape)}, alone {other.dtype} {tuple(other.shape)}"
            if not draws and not _is_close(own, other, 1e-9):
                return f"values off by {_distance(own, other):.2g}"
    return None


def _is_close(own: Tensor, other: Tensor, tolerance: float) -> bool:
    own, other = own.detach().resolve_conj(), other.detach().resolve_conj()
    if not _is_float(other):
        return torch.equal(own, other)
    finite = other[other.isfinite()]
    size = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    return torch.allclose(own, other, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def _distance(own: Tensor, other: Tensor) -> float:
    wide = torch.complex128 if other.is_complex() else torch.float64
    return float((own.detach().to(wide) - other.detach().to(wide)).abs().nan_to_num(1e99).max())


def _total(values: Any) -> Tensor | None:
    """A number that hangs on all elements, each with a weight of its own."""
    parts = [x for x in _tensors(values) if _is_float(x) and x.requires_grad]
    weighted = []
    for x in parts:
        real = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        weight = torch.linspace(0.5, 1.5, real.numel(), dtype=torch.float64).view(real.shape)
        weighted.append((real * weight).sum())
    return functools.reduce(torch.add, weighted) if weighted else None


# The gradients of a trial's inputs, None where there is none; None for a trial that has no graph.
Gradients = list[tuple[Tensor | None, ...] | None]


def _lone_gradients(lone: Any) -> Gradients | None:
    """Those of each trial alone; None where torch itself has none."""
    try:
        return [_gradients(_total(outcome), inputs) for outcome, inputs in lone]
    except Exception:
        return None


def _gradients(total: Tensor | None, inputs: list[Tensor]) -> tuple[Tensor | None, ...] | None:
    asked = [x for x in inputs if x.requires_grad]
    return None if total is None else torch.autograd.grad(total, asked, allow_unused=True)


def _gradient_difference(found: Any, inputs: list[Tensor], wanted: Gradients, trials: Trials) -> str | None:
    pieces = [_total([_stacked(x, trials)[trial] for x in _tensors(found)]) for trial in range(trials.count)]
    if wanted[0] is None or any(piece is None for piece in pieces):
        agree = wanted[0] is None and all(piece is None for piece in pieces)
        return None if agree else "a graph of gradients in one of both alone"
    gradients = _gradients(functools.reduce(torch.add, pieces), inputs)
    for trial, lone in enumerate(wanted):
        for own, other in zip(gradients or (), lone or ()):
            if own is None and other is None:
                continue
            mine = torch.zeros_like(other) if own is None else own[trial]
            other = torch.zeros_like(mine) if other is None else other
            if not _is_close(mine, other, 1e-8):
                return f"gradients off by {_distance(mine, other):.2g}"
    return None


def _work(task: tuple[str, int, int]) -> tuple[str, Tally]:
    name, seed, samples = task
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    return name, try_operation(operations()[name], seed, samples)


def _show(tallies: dict[str, Tally], verbose: bool) -> None:
    for kind in ("wrong", "bare error", *(("refused", "too slow") if verbose else ())):
        for name, tally in tallies.items():
            if tally.counts[kind]:
                print(f"{kind}: {name} ({tally.counts[kind]}): {tally.examples.get(kind, '')}")
    print(f"\n{'':12} {'cases':>8} {'operations':>11}")
    for kind in (*KINDS, "too slow", "skipped"):
        cases = sum(tally.counts[kind] for tally in tallies.values())
        print(f"{kind:12} {cases:8} {sum(tally.counts[kind] > 0 for tally in tallies.values()):11}")
    clean = sum(set(+tally.counts) <= {"right", "skipped"} for tally in tallies.values())
    print(f"{len(tallies)} operations, {clean} of them right in all cases; torch {torch.__version__}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--samples", type=int, default=12, help="samples of arguments an operation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--verbose", action="store_true", help="show what is refused, too")
    asked = parser.parse_args()
    names = [name for name in operations() if asked.only in name]
    tasks = [(name, asked.seed, asked.samples) for name in names]
    with multiprocessing.get_context("fork").Pool(asked.jobs, maxtasksperchild=50) as pool:
        tallies = dict(pool.imap_unordered(_work, tasks))
    _show(dict(sorted(tallies.items())), asked.verbose)
    return int(any(tally.counts["wrong"] or tally.counts["bare error"] for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
