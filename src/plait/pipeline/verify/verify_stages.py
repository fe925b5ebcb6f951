"""Verifies a pipeline: compares its stages with the plain model, on batches of the job.

Outputs, loss, the gradient of every parameter and the buffers after each step are compared: in training mode
twice on one batch and once on another, in evaluation mode on both, with the same random numbers. All runs use
copies. If the two differ in the code of a module that a cut divides, the module is kept in one stage, if that
is possible.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.core.errors import InputError, PlaitError
from plait.core.names import in_words
from plait.data.call_model import as_arguments, evaluation_mode, forward
from plait.pipeline.cutting.check_model import (
    StageError,
    describe_tensor,
    shared_memory,
    shared_tensors,
    used_tensors,
)
from plait.pipeline.cutting.whole_modules import Retrace, Stages, keep_modules_whole, keep_together
from plait.pipeline.stage import Loss
from plait.pipeline.verify.in_process import Choices, StagedModel, copied, observe_staged
from plait.planner import Plan
from plait.profiler.trace import trace
from plait.profiler.traced_model import TracedModel
from plait.verification import BUFFER, GRADIENT, Difference, Observation, same_random_numbers
from plait.verification.module_trace import ModuleTrace
from plait.verification.python_state import unchanged_state
from plait.verification.verify import (
    Mismatch,
    NotRepeatableError,
    Phase,
    Reference,
    first_differences,
    locate,
    verify,
)

_TRAINING = (Phase(True, 0), Phase(True, 0), Phase(True, 1))
_EVALUATION = (Phase(False, 0), Phase(False, 1))
_NOT_TWICE = (
    "because the plain model itself gives another result when it is run again from the same state with the "
    "same random numbers: its forward or its loss depends on something outside of it (a global variable, a "
    "file, the time)"
)
# How many times the cut is changed before StageError is raised.
_ATTEMPTS = 4


@dataclass(frozen=True)
class Example:
    """Batches of the job, as pairs of inputs and target, and how the model is trained on them."""

    batches: Sequence[tuple[Any, Any]]
    loss: Loss
    choices: Choices = field(default_factory=Choices)
    # Builds another model with the same state, if the model cannot be copied.
    fresh: Callable[[], nn.Module] | None = None

    def own_loss(self) -> Loss:
        """A copy of the loss, as a stateful loss must see the calls of only one model."""
        return copied(self.loss, lambda: self.loss)


@dataclass(frozen=True)
class VerifiedStages:
    """Stages of whole modules that compute the same as the model; `notes` say what was changed for that.

    `fine` are the same stages in layers of the plan. `seconds` is the duration of the verification.
    """

    traced: TracedModel
    stages: Stages
    fine: Stages
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def prepare_stages(
    traced: TracedModel, stages: Sequence[Sequence[str]], retrace: Retrace, example: Example | None
) -> VerifiedStages:
    """Verify stages, given in layers of `traced`; modules that no cut divides are kept whole.

    If a cut divides a module whose code cannot be traced correctly, the module is kept in one stage instead,
    if that is possible, and a note says so. Without `example` nothing is verified. Raises StageError.
    """
    verified = VerifiedStages(traced, (), tuple(tuple(ids) for ids in stages))

    def find() -> _Objection | None:
        nonlocal verified
        coarse, whole = keep_modules_whole(traced, verified.fine, retrace)
        verified = replace(verified, traced=coarse, stages=whole)
        objection = _objection(traced, verified)
        if objection is None and example is not None:
            started = time.perf_counter()
            mismatch = find_mismatch(coarse, whole, example)
            verified = replace(verified, seconds=verified.seconds + time.perf_counter() - started)
            if mismatch is not None:
                message = f"the stages do not compute what the model computes: {mismatch}"
                message += " (verify: off trains without this check)"
                objection = _Objection(message, mismatch.module, layers=_inside(traced, mismatch.module))
        return objection

    def mend(objection: _Objection) -> bool:
        nonlocal verified
        better = keep_together(traced, verified.fine, objection.layers)
        if better is None or better == verified.fine:
            return False
        notes = (*verified.notes, f"{objection}; so its layers stay in one stage")
        verified = replace(verified, fine=better, notes=notes)
        return True

    left = verify(find, mend, _ATTEMPTS)
    if left is not None:
        raise StageError(f"{left}; cut elsewhere (another number of stages), or train without a plan")
    return verified


def verify_stages(
    model: nn.Module,
    batches: Sequence[tuple[Any, Any]],
    loss: Loss,
    cuts: Plan | Sequence[str],
) -> VerifiedStages:
    """Verify in this process that stages of `model` compute the same as the model; returns the stages.

    `batches` are two pairs of inputs and target, preferably of different sizes and lengths; inputs are a
    tensor, or a tuple or dict of the arguments of forward. `loss(output, target)` returns a scalar. `cuts` is
    a plan, or the names of the first layers of all stages but the first, as in a profile. `fine` of the
    result are the layers of each stage; they differ from `cuts` if a module has to stay whole, and `notes`
    say why. The model is not changed. Raises StageError if the stages compute something else, and names the
    first module at which they differ.

    Examples:
        ```python
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        batches = [(torch.randn(n, 8), torch.randn(n, 1)) for n in (4, 6)]
        plait.verify_stages(model, batches, nn.functional.mse_loss, ["2"])  # cut before the layer "2"
        ```
    """
    if len(batches) != 2:
        raise InputError(f"verify_stages: found {len(batches)} batches, expected two, as (inputs, target)")
    first, second = (as_arguments(inputs) for inputs, _ in batches)
    traced = trace(model, first, others=[second], evaluation=False)
    stages = [s.layers for s in cuts.stages] if isinstance(cuts, Plan) else stages_from_cuts(traced, cuts)

    def retrace(whole: frozenset[str]) -> TracedModel:
        return trace(model, first, others=[second], whole=whole)

    return prepare_stages(traced, stages, retrace, Example(batches, loss))


def stages_from_cuts(traced: TracedModel, cuts: Sequence[str]) -> Stages:
    """The stages that begin with `cuts`, layers or modules, in any order; the first with the model."""
    order = [layer.id for layer in traced.layers]
    inside = {name: traced.inside([name]) for name in cuts if name and name not in order}
    first = {name: layers[0].id for name, layers in inside.items() if layers}
    ids = [first.get(name, name) for name in cuts]
    traced.select(ids)  # raises for unknown names
    begins = [0, *sorted(order.index(id) for id in ids), len(order)]
    if len(set(begins)) != len(begins):
        raise InputError(f"found the first layer {order[0]!r} or one twice among cuts {list(cuts)}")
    return tuple(tuple(order[begin:end]) for begin, end in itertools.pairwise(begins))


@dataclass(frozen=True)
class _Objection(Mismatch):
    """What is wrong with stages, and the layers that must be in one stage to correct it."""

    layers: Sequence[str] = ()


def _objection(traced: TracedModel, cut: VerifiedStages) -> _Objection | None:
    """What is known to be wrong with stages without running them."""
    coarse, other = cut.traced, cut.traced.evaluation
    for concern in (*coarse.concerns, *(other.concerns if other is not None else ())):
        return _Objection(concern.message, concern.path, layers=_inside(traced, concern.path))
    if (why := shared_memory(coarse)) is not None:
        return _Objection(why)
    for name, used in shared_tensors(coarse, cut.stages).items():
        message = f"{describe_tensor(coarse, name)} is written by forward and used in stages {sorted(used)}"
        return _Objection(
            message, layers=[layer.id for layer in traced.layers if name in used_tensors(layer)]
        )
    stage_of = {id: stage for stage, ids in enumerate(cut.fine) for id in ids}
    for kept in (*coarse.kept, *(other.kept if other is not None else ())):
        layers = [layer.id for layer in traced.inside(kept.paths)]
        stages = sorted({stage_of[id] for id in layers})
        if len(stages) > 1:
            message = f"{kept.message}, and is used in stages {stages}, each of which would have its own copy"
            return _Objection(message, layers=layers)
    return None


def _inside(traced: TracedModel, path: str | None) -> list[str]:
    """The layers of the module at `path`; none for the whole model."""
    return [layer.id for layer in traced.inside([path])] if path else []


def find_mismatch(traced: TracedModel, stages: Sequence[Sequence[str]], example: Example) -> Mismatch | None:
    """The first difference between the stages of `traced` and its model on the batches; None if equal."""
    if any(p.device.type == "meta" for p in traced.model.parameters()):
        raise InputError("verify: the model has no weights here; expected a model with all its weights")
    with unchanged_state({"model": traced.model, "loss": example.loss}):
        return _Comparison(traced, stages, example).mismatch()


class _PlainModel(Reference):
    """A copy of the model, with its own copy of the loss."""

    def __init__(self, traced: TracedModel, example: Example, model: nn.Module) -> None:
        self._example, self._loss = example, example.own_loss()
        phases = _TRAINING if traced.no_evaluation is not None else (*_TRAINING, *_EVALUATION)
        super().__init__(model, phases, self._loss)

    def forward(self, phase: Phase) -> tuple[Any, Tensor | None]:
        inputs, target = _copied_batch(self._example.batches[phase.batch])
        with self._example.choices.autocast():
            if phase.training:
                output = forward(self.model, inputs)
                return output, self._loss(output, target)
            with evaluation_mode(self.model):
                return forward(self.model, inputs), None


class _Comparison:
    """Compares stages with the plain model, each on copies."""

    def __init__(self, traced: TracedModel, stages: Sequence[Sequence[str]], example: Example) -> None:
        self._traced, self._stages, self._example = traced, stages, example
        self._reference = _PlainModel(traced, example, copied(traced.model, example.fresh))
        try:
            self._expected = list(self._reference.run())
        except (PlaitError, torch.OutOfMemoryError):
            raise
        except Exception as failure:
            if example.fresh is None:
                raise InputError(
                    f"verify: a copy of the model fails by itself on these batches: {in_words(failure)} "
                    "(hooks and functions kept in attributes may hold the model that was copied)"
                ) from failure
            self._reference = _PlainModel(traced, example, example.fresh())
            self._expected = list(self._reference.run())
        # The phase that the stages are running.
        self._running = 0

    def mismatch(self) -> Mismatch | None:
        try:
            apart = first_differences(self._reference, self._expected, self._run(self._stage()))
        except NotRepeatableError as failure:
            return self._part(failure.phase, failure.difference, _NOT_TWICE, None)
        except (PlaitError, torch.OutOfMemoryError):
            raise
        except Exception as failure:  # traced code can raise anything where the model does not
            line = f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"
            why = f"the stages fail where the plain model does not: {line}"
            wrong = Difference("the forward", why)
            return self._part(self._running, wrong, "there", _innermost(self._traced))
        return None if apart is None else self._locate(*apart)

    def _stage(self) -> StagedModel:
        example = self._example
        return StagedModel(self._traced, self._stages, example.own_loss(), example.choices, example.fresh)

    def _run(
        self, staged: StagedModel, until: int | None = None, trace: ModuleTrace | None = None
    ) -> Iterator[Observation]:
        """Run the stages in each phase up to `until`, which `trace` records."""
        for number, phase in enumerate(self._reference.phases[: None if until is None else until + 1]):
            inputs, target = _copied_batch(self._example.batches[phase.batch])
            expected, loss = self._expected[number], self._example.loss if phase.training else None
            self._running = number
            with same_random_numbers(number), (trace if number == until else None) or nullcontext():
                step = observe_staged(staged, expected, inputs, target, loss)
            yield step

    def _part(self, phase: int, difference: Difference, location: str, path: str | None) -> Mismatch:
        mode = self._reference.phases[phase].mode
        return Mismatch(f"in {mode} mode {difference}; they first differ {location}", path)

    def _locate(self, phase: int, differences: Sequence[Difference]) -> Mismatch:
        """Run both again up to `phase`, and compare them module by module."""
        first = next((d for d in differences if not d.name.startswith(GRADIENT)), None)
        if first is None:
            return self._part(phase, *_in_backward(self._traced, differences))
        staged = self._stage()
        trace = ModuleTrace(staged.modules)
        deque(self._run(staged, phase, trace), maxlen=0)
        located = locate(self._reference, phase, trace)
        if located is not None:
            return self._part(phase, first, *_describe_location(self._traced, located[1][0], trace))
        if first.name.startswith(BUFFER):
            return self._part(phase, first, f"at {first.name}", _owner(self._traced, first.name))
        location = "in the model's own code after its last module"
        return self._part(phase, first, location, _innermost(self._traced))


def _copied_batch(batch: Any) -> Any:
    """A copy of the batch, as a forward may write to it."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), batch)


def _describe_location(traced: TracedModel, key: str, trace: ModuleTrace) -> tuple[str, str]:
    """Where the stages first differ, given a key of the trace, and the traced module with that code."""
    path, call, which = key.split("\0")
    parent = _opened(traced, path.rpartition(".")[0])
    what = "gets other inputs" if which.startswith("input") else "computes something else"
    if trace.calls[path] <= int(call):
        what = "is not called as often"
    location = (
        f"in the code of {_describe_module(traced, parent)} before it"
        if what == "gets other inputs"
        else "there"
    )
    return f"{location}: {_describe_module(traced, path)} {what}", parent


def _describe_module(traced: TracedModel, path: str) -> str:
    kind = type(traced.model.get_submodule(path)).__name__
    return f"{path} ({kind})" if path else kind


def _owner(traced: TracedModel, name: str) -> str:
    """The innermost traced module that contains the parameter or buffer of a difference."""
    return _opened(traced, name.rpartition(" ")[2].rpartition(".")[0])


def _opened(traced: TracedModel, path: str) -> str:
    """The module at `path`, or its innermost parent that is not called as a whole."""
    while path and path in traced.whole:
        path = path.rpartition(".")[0]
    return path


def _innermost(traced: TracedModel) -> str | None:
    """The innermost traced module, other than the model itself."""
    opened = {layer.location.path for layer in traced.layers} - traced.whole
    opened = {path for path in opened if path and not _is_leaf_call(traced, path)}
    return max(opened, key=lambda path: path.count("."), default=None)


def _is_leaf_call(traced: TracedModel, path: str) -> bool:
    return any(node.op == "call_module" and node.target == path for node in traced.graph.nodes)


def _in_backward(
    traced: TracedModel, differences: Sequence[Difference]
) -> tuple[Difference, str, str | None]:
    """If outputs are equal but gradients are not: the first differing layer in the order of backward."""
    wrong = {d.name.removeprefix(GRADIENT): d for d in differences}
    for number in reversed(range(len(traced.layers))):
        layer = traced.layers[number]
        for name in layer.parameters:
            if name in wrong:
                behind = traced.layers[number + 1].id if number + 1 < len(traced.layers) else "the loss"
                location = f"in backward between {behind!r} and {layer.id!r}"
                return wrong[name], location, _owner(traced, name) or _innermost(traced)
    return differences[0], "in backward", _innermost(traced)
