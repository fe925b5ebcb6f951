"""Verification of a pipeline: its stages, in turn, against the plain model, on batches of the job.

Outputs, loss, the gradient of every parameter and the buffers after each step are compared, in training mode
twice in a row on one batch and once on another, and in evaluation mode on both, with the same random numbers.
All of it happens on copies. Where the two part, the place is found module by module.
"""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.core.errors import InputError, PlaitError
from plait.data.calling import as_arguments, evaluation_mode
from plait.pipeline.cutting.cut import StageError, describe_tensor, shared_tensors, used_tensors
from plait.pipeline.cutting.whole_modules import Retrace, Stages, keep_modules_whole, keep_together
from plait.pipeline.stage import Loss
from plait.pipeline.verify.in_process import Choices, StagedModel, observe_staged
from plait.planner import Plan
from plait.profiler.trace import trace
from plait.profiler.traced import TracedModel
from plait.verification import (
    Difference,
    Noise,
    Observation,
    find_differences,
    measure_noise,
    observe_step,
    perturb,
    same_random_numbers,
)
from plait.verification.python_state import unchanged_state

# What is done in turn: with which of the batches, and whether in training mode.
_STEPS = ((0, True), (0, True), (1, True), (0, False), (1, False))
# The seed of a plain model whose weights are not perturbed.
_AS_IT_IS = -1
_NOT_TWICE = (
    "because the plain model itself does something else when it is run again from the same state with the "
    "same random numbers: its forward or its loss goes by what is outside of it (a global variable, a file, "
    "the time)"
)
# So often the cut is changed before the run is refused.
_ATTEMPTS = 4


@dataclass(frozen=True)
class Parting:
    """Where stages and plain model part; `path` is the opened module whose code it is, if that is known."""

    difference: Difference
    training: bool
    place: str
    path: str | None

    def __str__(self) -> str:
        mode = "training" if self.training else "evaluation"
        return f"in {mode} mode {self.difference}; they part {self.place}"


@dataclass(frozen=True)
class Example:
    """Batches of the job, as pairs of inputs and target, and how the model is trained on them."""

    batches: Sequence[tuple[Any, Any]]
    loss: Loss
    choices: Choices = field(default_factory=Choices)
    # The model anew, with the state it has now, where it cannot be copied.
    fresh: Callable[[], nn.Module] | None = None


@dataclass(frozen=True)
class Checked:
    """Stages that compute what the model computes, in whole modules, and what had to be changed for it.

    `fine` are the same stages in the layers of the plan. `seconds` is what the verification took.
    """

    traced: TracedModel
    stages: Stages
    fine: Stages
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def prepare_stages(
    traced: TracedModel, stages: Sequence[Sequence[str]], retrace: Retrace, example: Example | None
) -> Checked:
    """The stages, given in layers of `traced`, with all modules whole that no cut divides; verified.

    Where a cut divides a module whose code a trace cannot repeat, the module is kept in one stage instead,
    if that is possible, and a note says so. Without `example` nothing is verified. Raises StageError.
    """
    seconds, notes = 0.0, list[str]()
    found = tuple(tuple(ids) for ids in stages)
    for _ in range(_ATTEMPTS):
        coarse, whole = keep_modules_whole(traced, found, retrace)
        words, better = _objection(traced, found, coarse, whole)
        if not words and example is not None:
            started = time.perf_counter()
            parting = find_parting(coarse, whole, example)
            seconds += time.perf_counter() - started
            if parting is not None:
                words = f"the stages do not compute what the model computes: {parting}"
                words += " (verify: off trains without this check)"
                better = _without_opening(traced, found, parting.path)
        if not words:
            return Checked(coarse, whole, found, tuple(notes), seconds)
        if better is None or better == found:
            break
        notes.append(f"{words}; so its layers stay in one stage")
        found = better
    raise StageError(f"{words}; cut elsewhere (another number of stages), or train without a plan")


def verify_stages(
    model: nn.Module,
    batches: Sequence[tuple[Any, Any]],
    loss: Loss,
    cuts: Plan | Sequence[str],
) -> Checked:
    """The stages of `model`, after it is verified in this process that they compute what it computes.

    `batches` are two pairs of inputs and target, best of different sizes and lengths; inputs are a tensor,
    or a tuple or dict of the arguments of forward. `loss(output, target)` gives a number to differentiate.
    `cuts` is a plan, or names the layers with which the second and further stages begin, as a profile names
    them. `fine` of the answer are the layers of each stage: where a module has to stay whole, other stages
    than asked for, and `notes` say why. The model is left as it is. Raises StageError where the stages
    compute something else, with the first module at which they part.
    """
    if len(batches) != 2:
        raise InputError(f"verify_stages: found {len(batches)} batches, expected two, as (inputs, target)")
    first, second = (as_arguments(inputs) for inputs, _ in batches)
    traced = trace(model, first, others=[second], evaluation=False)
    stages = [s.layers for s in cuts.stages] if isinstance(cuts, Plan) else _begun_by(traced, cuts)

    def retrace(whole: frozenset[str]) -> TracedModel:
        return trace(model, first, others=[second], whole=whole, before=traced)

    return prepare_stages(traced, stages, retrace, Example(batches, loss))


def _begun_by(traced: TracedModel, cuts: Sequence[str]) -> Stages:
    """The stages of which each but the first begins with one of `cuts`, in whichever order these are."""
    order = [layer.id for layer in traced.layers]
    traced.select(cuts)  # refuses names that no layer has
    begins = [0, *sorted(order.index(id) for id in cuts), len(order)]
    if len(set(begins)) != len(begins):
        raise InputError(f"verify_stages: found the first layer {order[0]!r} or one twice among cuts {cuts}")
    return tuple(tuple(order[begin:end]) for begin, end in itertools.pairwise(begins))


def _objection(
    traced: TracedModel, stages: Stages, coarse: TracedModel, whole: Stages
) -> tuple[str, Stages | None]:
    """What is known to be wrong with these stages, and better ones; no words where nothing is."""
    other = coarse.evaluation
    for concern in (*coarse.concerns, *(other.concerns if other is not None else ())):
        return concern.words, _without_opening(traced, stages, concern.path)
    for name, used in shared_tensors(coarse, whole).items():
        words = f"{describe_tensor(coarse, name)} is written by forward and used in stages {sorted(used)}"
        layers = [layer.id for layer in traced.layers if name in used_tensors(layer)]
        return words, keep_together(traced, stages, layers)
    stage_of = {id: stage for stage, ids in enumerate(stages) for id in ids}
    for kept in (*coarse.kept, *(other.kept if other is not None else ())):
        layers = [layer.id for layer in traced.inside(kept.paths)]
        found = sorted({stage_of[id] for id in layers})
        if len(found) > 1:
            words = f"{kept.words}, and is used in stages {found}, each of which would have its own"
            return words, keep_together(traced, stages, layers)
    return "", None


def _without_opening(traced: TracedModel, stages: Stages, path: str | None) -> Stages | None:
    """Stages none of which divides the module at `path`; None where that is the whole model."""
    if not path:
        return None
    return keep_together(traced, stages, [layer.id for layer in traced.inside([path])])


def find_parting(traced: TracedModel, stages: Sequence[Sequence[str]], example: Example) -> Parting | None:
    """Where the stages of `traced` and its model part on the batches; None where they do not."""
    if any(p.device.type == "meta" for p in traced.model.parameters()):
        raise InputError("verify: the model has no weights here; expected one that is built whole")
    with unchanged_state({"model": traced.model, "loss": example.loss}):
        return _find_parting(traced, stages, example)


def _find_parting(traced: TracedModel, stages: Sequence[Sequence[str]], example: Example) -> Parting | None:
    plain, own = plain_copy(traced.model, example), with_own_loss(example)
    staged = StagedModel(traced, stages, own_loss(example), example.choices, example.fresh)
    perturbed: dict[int, _Perturbed] = {}

    def again(number: int, seed: int) -> Observation:
        if seed not in perturbed:
            perturbed[seed] = _Perturbed(traced, example, seed)
        return perturbed[seed].observe(number)

    for number, (batch, training) in enumerate(_STEPS):
        if not training and traced.no_evaluation is not None:
            break
        expected = _observe_plain(plain, own, number, batch, training)
        try:
            found = _observe_stages(staged, plain, own, number, batch, training)
        except (PlaitError, torch.OutOfMemoryError):
            raise
        except Exception as failure:  # the traced code can fail in any way where the model's own does not
            return _failed(traced, failure, training)
        differences = find_differences(expected, found, Noise({}))
        if differences and find_differences(expected, again(number, _AS_IT_IS), Noise({})):
            # Beside such a model nothing can be compared: its noise would hide whatever is wrong.
            return Parting(differences[0], training, _NOT_TWICE, None)
        if differences:
            noise = measure_noise(expected, functools.partial(again, number))
            differences = find_differences(expected, found, noise)
        if differences:
            return _locate(traced, stages, example, number, differences)
    return None


def _failed(traced: TracedModel, failure: Exception, training: bool) -> Parting:
    line = str(failure).strip().partition("\n")[0]
    why = f"the stages fail where the plain model does not: {type(failure).__name__}: {line}"
    return Parting(Difference("the forward", torch.inf, 0.0, why), training, "there", _innermost(traced))


def plain_copy(model: nn.Module, example: Example) -> nn.Module:
    """The model with the state it has now, to be run and thrown away."""
    try:
        return copy.deepcopy(model)
    except Exception:
        if example.fresh is None:
            raise
        return example.fresh()


def own_loss(example: Example) -> Loss:
    """The loss as it is now: one that counts its calls counts those of each model by itself."""
    try:
        return copy.deepcopy(example.loss)
    except Exception:  # a function or object that cannot be copied is called as it is
        return example.loss


def with_own_loss(example: Example) -> Example:
    """The example with a loss for one model alone."""
    return replace(example, loss=own_loss(example))


def _observe_plain(
    model: nn.Module, example: Example, number: int, batch: int, training: bool
) -> Observation:
    inputs, target = _own(example.batches[batch])
    arguments = as_arguments(inputs)

    def forward() -> tuple[Any, Tensor | None]:
        with example.choices.autocast():
            output = model(**arguments) if isinstance(arguments, dict) else model(*arguments)
            return output, example.loss(output, target) if training else None

    with same_random_numbers(number):
        if training:
            return observe_step(model, forward)
        with evaluation_mode(model):
            return observe_step(model, forward, backward=False)


def _observe_stages(
    staged: StagedModel, plain: nn.Module, example: Example, number: int, batch: int, training: bool
) -> Observation:
    inputs, target = _own(example.batches[batch])
    with same_random_numbers(number):
        return observe_staged(staged, plain, inputs, target, example.loss if training else None)


def _own(batch: Any) -> Any:
    """The batch in memory of its own: a forward may write into it."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), batch)


class _Perturbed:
    """The plain model with its weights rounded otherwise, step by step: how far rounding takes it.

    With the seed `_AS_IT_IS` it is the plain model once more.
    """

    def __init__(self, traced: TracedModel, example: Example, seed: int) -> None:
        self._example = with_own_loss(example)
        self._done = 0
        self._model = plain_copy(traced.model, example)
        if seed == _AS_IT_IS:
            return
        parameters = list(self._model.parameters())
        with torch.no_grad():
            for parameter, moved in zip(parameters, perturb(parameters, seed)):
                parameter.copy_(moved)

    def observe(self, number: int) -> Observation:
        """What it does at step `number`, which comes after those asked for before."""
        for step in range(self._done, number + 1):
            found = _observe_plain(self._model, self._example, step, *_STEPS[step])
        self._done = number + 1
        return found


# Where they part.


@dataclass(frozen=True)
class _Seen:
    """A call of a module: its path and number, the tensors that went in and those that came out."""

    path: str
    call: int
    inputs: list[Tensor]
    outputs: list[Tensor]


@contextmanager
def _watching(modules: Sequence[nn.Module]) -> Iterator[list[_Seen]]:
    """Note the calls of all modules below `modules`, by their paths there."""
    seen: list[_Seen] = []
    calls: Counter[str] = Counter()
    handles = []

    def hook(path: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[path] += 1
            seen.append(_Seen(path, calls[path], _clones((args, kwargs)), _clones(output)))

        return note

    for root in modules:
        for path, module in root.named_modules():
            if path:
                handles.append(module.register_forward_hook(hook(path), with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _clones(tree: Any) -> list[Tensor]:
    return [leaf.detach().clone() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _locate(
    traced: TracedModel,
    stages: Sequence[Sequence[str]],
    example: Example,
    number: int,
    differences: Sequence[Difference],
) -> Parting:
    """Run both once more up to step `number`, and compare them module by module."""
    training = _STEPS[number][1]
    plain = plain_copy(traced.model, example)
    staged = StagedModel(traced, stages, own_loss(example), example.choices, example.fresh)
    example = with_own_loss(example)
    for step, (batch, mode) in enumerate(_STEPS[:number]):
        _observe_plain(plain, example, step, batch, mode)
        _observe_stages(staged, plain, example, step, batch, mode)
    batch = _STEPS[number][0]
    with _watching([plain]) as ours:
        _observe_plain(plain, example, number, batch, training)
    with _watching(staged.modules) as theirs:
        _observe_stages(staged, plain, example, number, batch, training)
    first = next((d for d in differences if not d.name.startswith("the gradient of")), None)
    found = _first_apart(ours, theirs)
    if first is not None and found is not None:
        return Parting(first, training, *_place(traced, *found))
    if first is not None and not first.name.startswith("the buffer"):
        return Parting(first, training, "in the model's own code behind its last module", _innermost(traced))
    if first is not None:
        return Parting(first, training, f"at {first.name}", _owner(traced, first.name))
    return _in_backward(traced, differences, training)


def _first_apart(ours: Sequence[_Seen], theirs: Sequence[_Seen]) -> tuple[_Seen, str] | None:
    """The first call of the plain model that the stages do not make, or make with other results."""
    known = {(seen.path, seen.call): seen for seen in theirs}
    paths = {seen.path for seen in theirs}
    for seen in ours:
        other = known.get((seen.path, seen.call))
        if other is None:
            if seen.path in paths:
                return seen, "is not called as often"
            continue
        if not _alike(seen.inputs, other.inputs):
            return seen, "gets other inputs"
        if not _alike(seen.outputs, other.outputs):
            return seen, "computes something else"
    return None


def _alike(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    if len(ours) != len(theirs):
        return False
    for one, other in zip(ours, theirs):
        if one.shape != other.shape:
            return False
        a, b = one.double(), other.double()
        if not torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True):
            return False
    return True


def _place(traced: TracedModel, seen: _Seen, what: str) -> tuple[str, str | None]:
    parent = seen.path.rpartition(".")[0]
    while parent and parent in traced.whole:
        parent = parent.rpartition(".")[0]
    kind = type(traced.model.get_submodule(seen.path)).__name__
    own = f"in the code of {_shown(traced, parent)} before it" if what == "gets other inputs" else "there"
    return f"{own}: {seen.path} ({kind}) {what}", parent


def _shown(traced: TracedModel, path: str) -> str:
    kind = type(traced.model.get_submodule(path)).__name__
    return f"{path} ({kind})" if path else kind


def _owner(traced: TracedModel, name: str) -> str | None:
    """The innermost opened module around the parameter or buffer that a difference names."""
    parent = name.rpartition(" ")[2].rpartition(".")[0]
    while parent and parent in traced.whole:
        parent = parent.rpartition(".")[0]
    return parent


def _innermost(traced: TracedModel) -> str | None:
    """The innermost module that was opened, other than the model itself."""
    opened = {layer.place.path for layer in traced.layers} - traced.whole
    opened = {path for path in opened if path and not _is_leaf_call(traced, path)}
    return max(opened, key=lambda path: path.count("."), default=None)


def _is_leaf_call(traced: TracedModel, path: str) -> bool:
    return any(node.op == "call_module" and node.target == path for node in traced.graph.nodes)


def _in_backward(traced: TracedModel, differences: Sequence[Difference], training: bool) -> Parting:
    """Of right outputs with wrong gradients: the wrong layer that backward comes to first."""
    wrong = {d.name.removeprefix("the gradient of "): d for d in differences}
    for number in reversed(range(len(traced.layers))):
        layer = traced.layers[number]
        for name in layer.parameters:
            if name in wrong:
                behind = traced.layers[number + 1].id if number + 1 < len(traced.layers) else "the loss"
                owner = _owner(traced, name) or _innermost(traced)
                place = f"in backward between {behind!r} and {layer.id!r}"
                return Parting(wrong[name], training, place, owner)
    return Parting(differences[0], training, "in backward", _innermost(traced))
