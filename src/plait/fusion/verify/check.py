"""Whether fused trials compute what the same trials compute alone; and if not, which module is to blame.

The trials run on real batches, fused and each alone, with the same random numbers: outputs, losses, the
gradient of every parameter, buffers and numbers that modules keep in Python must agree up to rounding, in
training and in evaluation. Where they do not, the first module at which they part runs trial by trial, and
all is compared again. The fused trials are an array of their own, a trial alone is its model itself, which is
afterwards as it was before.
"""

from __future__ import annotations

import gc
import logging
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.core.errors import PlaitError
from plait.fusion.errors import FusionError
from plait.fusion.module import FusedModule
from plait.fusion.trials.per_trial import PerTrial
from plait.fusion.trials.unfused import trials_without_gradient
from plait.fusion.verify.lone_run import LoneRun
from plait.fusion.verify.traces import IN_NONE, FailureTrace, ModuleTrace, slice_of_trial
from plait.verification import (
    Difference,
    Noise,
    Observation,
    find_differences,
    measure_noise,
    observe_outputs,
    observe_step,
    perturb,
    same_random_numbers,
)
from plait.verification.borrowed import borrowed

log = logging.getLogger(__name__)

# Whether in training, and on which batch.
Scenes = Sequence[tuple[bool, int]]
# Each twice in a row, so that what a model keeps is seen.
SCENES: Scenes = ((True, 0), (True, 1), (False, 0), (False, 1))
# For trials of a kind of which others have been compared.
FEW_SCENES: Scenes = ((True, 0), (False, 0))
# Modules that are tried one by one before the whole model runs trial by trial.
_ATTEMPTS = 12
# Longer than this, and than a few times the first comparison, no further modules are tried one by one.
_SEARCH_S, _SEARCH_TIMES = 20.0, 6.0
# What products of float32 may be rounded to on a GPU: convolutions are, unless torch is configured otherwise.
TF32_EPS = 2.0**-10
# How far, relative to their size, the weights of trials are set apart.
APART = 0.01
# How many numbers are drawn for it; they are repeated over larger weights, of which no side divides them.
_DRAWN = 4093
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_WHOLE = "the whole model"
_GRADIENT, _BUFFER, _ATTRIBUTE = "the gradient of ", "the buffer ", "the attribute "
_NOT_TWICE = (
    "a trial alone does something else when it is run again from the same state with the same random "
    "numbers: its forward goes by what is outside of the model (a global variable, a file, the time)"
)


class _NotComparable(Exception):
    """A plain model that does something else each time."""


class _FailsAlone(Exception):
    """A plain model that fails by itself."""

    def __init__(self, trial: int, why: str) -> None:
        super().__init__(why)
        self.trial = trial


class Rehearsal(Protocol):
    """How trials of a job run on its batches, together and alone; batches are numbered 0 and 1."""

    @property
    def models(self) -> Sequence[nn.Module]:
        """The plain models, as whoever makes them made them; they stay as they are."""

    @property
    def seeds(self) -> Sequence[int]: ...

    @property
    def ages(self) -> Sequence[int]: ...

    @property
    def step(self) -> float:
        """The rounding of the coarsest numbers that are computed with."""

    @property
    def in_stages(self) -> bool:
        """Whether trials are cut, so that the fused form opens some of the modules."""

    @property
    def loss_alone(self) -> bool:
        """Whether losses are computed trial by trial; verification sets it where they must be."""

    @loss_alone.setter
    def loss_alone(self, value: bool) -> None: ...

    def some(self, trials: Sequence[int]) -> Rehearsal:
        """The same for some of the trials."""

    def prepare(self, trial: int) -> None:
        """Give the model of a trial, which is borrowed, the weights it begins with, where not its own."""

    def fuse(self, models: Sequence[nn.Module], unfused: Mapping[str, str]) -> Sequence[FusedModule]:
        """These models fused as they are to be trained: in one module, or in one for each stage."""

    def together(self, fused: Sequence[FusedModule], batch: int) -> tuple[Any, Tensor]:
        """The outputs of all trials, trials first, and their losses."""

    def alone(self, model: nn.Module, trial: int, batch: int) -> tuple[Any, Tensor]:
        """What one trial's plain model gives for its own batch, and its loss."""


@dataclass(frozen=True)
class Verdict:
    """What verification found: the modules that must run trial by trial, by name, and why.

    `refused` says why not even that helps; then each trial has to be trained alone. `has_python_state` says
    that modules keep numbers in Python that change from step to step, which no CUDA graph can hold. With
    `loss_alone` only the loss is computed trial by trial. `failed` are trials, by their places, that cannot
    take a step alone either, and why.
    """

    unfused: Mapping[str, str] = field(default_factory=dict)
    refused: str | None = None
    seconds: float = 0.0
    has_python_state: bool = False
    loss_alone: bool = False
    failed: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_fused(self) -> bool:
        return self.refused is None


@dataclass(frozen=True)
class _Problem:
    """Where trials part: the scene, the trial, and the innermost module known to be about it."""

    scene: int
    trial: int
    why: str
    module: str | None = None
    only_gradients: bool = False
    only_loss: bool = False


def verify_fused(
    rehearsal: Rehearsal, unfused: Mapping[str, str] | None = None, scenes: Scenes = SCENES
) -> Verdict:
    """Compare all trials, fused, with the same trials alone.

    Where memory is too short for a second array of all trials, they are compared in arrays of fewer.
    """
    start = time.perf_counter()
    found = _verify(rehearsal, dict(unfused or {}), scenes, list(range(len(rehearsal.models))))
    return replace(found, seconds=time.perf_counter() - start)


def _verify(rehearsal: Rehearsal, unfused: dict[str, str], scenes: Scenes, trials: list[int]) -> Verdict:
    check = _Check(rehearsal.some(trials), unfused, scenes, trials)
    try:
        return check.verdict()
    except torch.OutOfMemoryError:
        pass  # the frames of what failed hold memory: go on outside of here
    del check
    gc.collect()
    torch.cuda.empty_cache()
    if len(trials) == 1:
        log.warning("fused trials were not verified: there is no memory for a second copy of one of them")
        return Verdict(unfused)
    half = len(trials) // 2
    first = _verify(rehearsal, unfused, scenes, trials[:half])
    if first.refused is not None:
        return first
    rehearsal.loss_alone = rehearsal.loss_alone or first.loss_alone
    return _verify(rehearsal, dict(first.unfused), scenes, trials[half:])


def log_verdict(verdict: Verdict, known: Mapping[str, str]) -> None:
    """Log which modules run trial by trial, besides those `known` before."""
    for name, why in verdict.unfused.items():
        if name not in known:
            log.warning("%s runs trial by trial, which is slower: %s", name or _WHOLE, why)
    if verdict.refused is not None:
        log.warning("these trials are not fused, each trains alone: %s", verdict.refused)


class _Check:
    """One array of trials and the same trials alone; `numbers` are how messages call them."""

    def __init__(
        self, rehearsal: Rehearsal, unfused: dict[str, str], scenes: Scenes, numbers: Sequence[int]
    ) -> None:
        self.rehearsal = rehearsal
        self.unfused = unfused
        self.has_python_state = False
        self._scenes = scenes
        self._numbers = numbers
        self._blamed: list[type] = []
        # The modules that the fused form calls, by name: in stages some of the plain model's are opened.
        self._called: dict[str, nn.Module] = {}
        # Of each scene, how far rounding took one of the trials.
        self._noise: dict[int, Noise] = {}

    def verdict(self) -> Verdict:
        refused, failed = None, {}
        try:
            refused = self._resolve()
        except _FailsAlone as failure:
            number = self._numbers[failure.trial]
            refused = f"trial {number} fails by itself on these batches: {failure}"
            failed = {number: str(failure)}
        except _NotComparable as failure:
            refused = str(failure)
        state, alone = self.has_python_state, self.rehearsal.loss_alone
        return Verdict(self.unfused, refused, 0.0, state, alone, failed)

    def _resolve(self) -> str | None:
        """Run modules trial by trial until all agree; or why they do not."""
        start, limit_s = time.perf_counter(), _SEARCH_S
        for attempt in range(_ATTEMPTS + 2):
            problem = self._problem()
            if problem is None:
                return None
            if attempt == 0:
                # It may be one of the trials that cannot take a step, and no module of all of them.
                for trial in range(1, len(self.rehearsal.models)):
                    self._alone(trial, until=0)
                limit_s = max(limit_s, _SEARCH_TIMES * (time.perf_counter() - start))
            if problem.only_loss and not self.rehearsal.loss_alone:
                self.rehearsal.loss_alone = True
                continue
            if "" in self.unfused or problem.only_loss:
                return problem.why
            is_late = attempt >= _ATTEMPTS or time.perf_counter() - start > limit_s
            blamed = problem.module if problem.module is not None else self._locate(problem)
            for name in [""] if is_late else self._to_unfuse(blamed):
                for inner in [one for one in self.unfused if one.startswith(f"{name}.") or not name]:
                    del self.unfused[inner]
                self.unfused[name] = problem.why
        return "no way was found to run these trials together"

    def _to_unfuse(self, blamed: str) -> list[str]:
        """The module to run trial by trial next: the one to blame, or what is around it."""
        parts = {"": self.rehearsal.models[0], **self._called}
        name = blamed
        while name and (_is_within(name, self.unfused) or name not in parts):
            name = name.rpartition(".")[0]
        kind = type(parts[name])
        # Where a second one of a kind is to blame, all of that kind are.
        is_second = kind in self._blamed
        self._blamed.append(kind)
        if not name or not is_second:
            return [name]
        return [
            path
            for path, part in parts.items()
            if path and type(part) is kind and not _is_within(path, self.unfused)
        ]

    def _problem(self) -> _Problem | None:
        """The first trial that is not what it is alone, and the first scene in which it is not."""
        # Of the first trial before anything is fused: a model that fails alone is no one's else fault.
        alone = self._alone(0)
        if all(training for training, _ in self._scenes[:2]):
            self.has_python_state = _changes_in_python([seen for seen, _ in alone])
        try:
            fused = self._fuse()
        except FusionError as failure:
            return _Problem(0, 0, _first_line(failure), "")
        found: list[_ArrayStep] = []
        failed: _Problem | None = None
        trace = FailureTrace([one.module for one in fused])
        for scene in range(len(alone)):
            try:
                with trace:
                    found.append(self._together(fused, scene))
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:  # the user's code can fail in any way on fused tensors
                in_loss = trace.failed_in == IN_NONE and not self.rehearsal.loss_alone
                failed = _Problem(scene, 0, _first_line(failure), trace.failed_in, only_loss=in_loss)
                break
        del fused
        # Where a step failed, one trial is enough to see whether the steps before it were right.
        for trial in range(1 if failed is not None else len(self.rehearsal.models)):
            seen = alone if trial == 0 else self._alone(trial, until=len(found) - 1)
            if (problem := self._compare(trial, seen, found)) is not None:
                return problem
            alone = []
        return failed

    def _compare(
        self, trial: int, alone: Sequence[tuple[Observation, Any]], found: Sequence[_ArrayStep]
    ) -> _Problem | None:
        for scene, ((expected, _), step) in enumerate(zip(alone, found)):
            wanted, own = self._observable(expected), step.of_trial(trial, self.rehearsal.models[trial])
            differences = find_differences(wanted, own, self._noise.get(scene, Noise({})))
            if differences:
                differences = self._beyond_noise(trial, scene, wanted, own)
            if differences:
                return self._as_problem(scene, trial, differences)
        return None

    def _fuse(self) -> Sequence[FusedModule]:
        models = self.rehearsal.models
        fused = self.rehearsal.fuse(models, self.unfused)
        first_names = _first_names(models[0])
        for one in fused:
            for name, parameter in one.module.named_parameters():
                for trial in range(one.trials):
                    _set_apart(parameter, parameter.data[trial], first_names.get(name, name), trial)
        plain = dict(models[0].named_modules())
        self._called = {
            path: plain[path]
            for one in fused
            for path, part in one.module.named_modules()
            if path and path in plain and type(part) is not nn.Module and not isinstance(part, _CONTAINERS)
        }
        return fused

    def _observable(self, alone: Observation) -> Observation:
        """What of a plain model can be seen of its fused form: not what an opened module keeps in Python."""
        if not self.rehearsal.in_stages:
            return alone
        kept = {f"{_ATTRIBUTE}{path}" for path in self._called}
        return {
            name: value
            for name, value in alone.items()
            if not name.startswith(_ATTRIBUTE) or name.rpartition(".")[0] in kept
        }

    def _comparable(self, trace: Mapping[str, Tensor | None]) -> Observation:
        """What modules did that are called both in the plain model and in its fused form."""
        if not self.rehearsal.in_stages:
            return trace
        return {key: value for key, value in trace.items() if key.partition("\0")[0] in self._called}

    def _beyond_noise(
        self, trial: int, scene: int, expected: Observation, found: Observation
    ) -> Sequence[Difference]:
        again = self._observable(self._alone(trial, until=scene)[scene][0])
        if find_differences(expected, again, Noise({})):
            # Its noise would hide whatever is wrong.
            raise _NotComparable(_NOT_TWICE)
        noise = measure_noise(expected, lambda seed: self._alone(trial, seed, until=scene)[scene][0])
        self._noise[scene] = noise
        return find_differences(expected, found, noise)

    def _alone(
        self, trial: int, noise: int | None = None, until: int | None = None, traced: int | None = None
    ) -> list[tuple[Observation, ModuleTrace | None]]:
        """What a trial's plain model does in the scenes; with `noise`, from weights rounded otherwise."""
        model = self.rehearsal.models[trial]
        last = len(self._scenes) - 1 if until is None else until
        seen: list[tuple[Observation, ModuleTrace | None]] = []
        with borrowed(model):
            self.rehearsal.prepare(trial)
            for name, parameter in model.named_parameters():
                _set_apart(parameter, parameter.data, name, trial)
            if noise is not None:
                _perturb_weights(model, noise, self.rehearsal.step)
            lone = LoneRun(model, self.rehearsal.seeds[trial], self.rehearsal.ages[trial], self.unfused)
            for scene in range(last + 1):
                trace = ModuleTrace([model], lambda leaf: leaf) if scene == traced else None
                step = self._lone_step(model, lone, trial, scene, trace)
                if step is None:
                    break
                seen.append((step, trace))
        return seen

    def _lone_step(
        self, model: nn.Module, lone: LoneRun, trial: int, scene: int, trace: ModuleTrace | None
    ) -> Observation | None:
        """What one scene shows of a plain model; None where it cannot be evaluated alone."""
        training, batch = self._scenes[scene]
        _set_mode(model, training)

        def forward() -> tuple[Any, Tensor]:
            with lone.forward(), trace or nullcontext():
                return self.rehearsal.alone(model, trial, batch)

        # Casts of weights are kept while autocast is on, and these are other weights now.
        torch.clear_autocast_cache()
        try:
            with same_random_numbers(1000 + trial):
                step = observe_step(model, forward, backward=training)
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:  # the user's code can fail in any way
            if training and isinstance(failure, PlaitError):
                raise
            if training:
                raise _FailsAlone(trial, _first_line(failure)) from failure
            return None  # its forward asks for gradients, say
        return {**step, **_numbers_in(model)}

    def _together(
        self, fused: Sequence[FusedModule], scene: int, trace: ModuleTrace | None = None
    ) -> _ArrayStep:
        """What the trials do in one scene, fused."""
        training, batch = self._scenes[scene]
        for one in fused:
            if not training or not one.module.training:
                one.train(training)
            for parameter in one.parameters():
                parameter.grad = None
        torch.clear_autocast_cache()
        with same_random_numbers(7), torch.set_grad_enabled(training):
            with trace or nullcontext():
                outputs, losses = self.rehearsal.together(fused, batch)
            if training and losses.requires_grad:
                losses.sum().backward()
        return _ArrayStep(fused, outputs, losses, training, _first_names(self.rehearsal.models[0]))

    def _locate(self, problem: _Problem) -> str:
        """The first module whose outcome parts from that of the module alone."""
        trial, scene = problem.trial, problem.scene
        fused = self._fuse()
        together = ModuleTrace([one.module for one in fused], lambda leaf: slice_of_trial(leaf, trial))
        try:
            for earlier in range(scene + 1):
                self._together(fused, earlier, together if earlier == scene else None)
            alone = self._alone(trial, None, scene, scene)[scene][1]
            others = [self._alone(trial, seed, scene, scene)[scene][1] for seed in range(2)]
        except torch.OutOfMemoryError:
            raise
        except Exception:  # some hook of the trace does what the model does not like: the whole is to blame
            return ""
        assert alone is not None
        kinds = ("gradients",) if problem.only_gradients else ("outputs", "gradients")
        for kind in kinds:
            expected = getattr(alone, kind)
            moved = [getattr(other, kind) for other in others]
            noise = measure_noise(expected, lambda seed, moved=moved: moved[seed])  # type: ignore[misc]
            found = self._comparable(getattr(together, kind))
            parted = find_differences(self._comparable(expected), found, noise)
            names = [difference.name.partition("\0")[0] for difference in parted]
            if names:
                return names[0] if kind == "outputs" else _nearest_parent(names, list(expected))
        return ""

    def _as_problem(self, scene: int, trial: int, differences: Sequence[Difference]) -> _Problem:
        names = [difference.name for difference in differences]
        forward = [n for n in names if n.startswith(("output", _BUFFER, _ATTRIBUTE))]
        mode = "training" if self._scenes[scene][0] else "evaluation"
        why = f"trial {self._numbers[trial]} parts from the trial alone in {mode}: {differences[0]}"
        only_loss = names == ["the loss"] or (not forward and names[0] == "the loss")
        return _Problem(scene, trial, why, None, not forward and not only_loss, only_loss)


class _ArrayStep:
    """What a step of all trials left: outputs, losses, and of each module gradients, buffers and numbers."""

    def __init__(
        self,
        fused: Sequence[FusedModule],
        outputs: Any,
        losses: Tensor,
        training: bool,
        first_names: Mapping[str, str],
    ) -> None:
        self._outputs = pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), outputs)
        self._losses = losses.detach().clone()
        self._training = training
        self._parts = [_left_in(one, training, first_names) for one in fused]

    def of_trial(self, trial: int, model: nn.Module) -> dict[str, Tensor | None]:
        """What one trial did, under the names that its plain model has."""
        found: dict[str, Tensor | None] = dict(
            observe_outputs(pytree.tree_map(lambda leaf: _of_trial(leaf, trial), self._outputs))
        )
        found["the loss"] = self._losses[trial]
        # Of what no stage holds there is no gradient, and its buffers stay.
        if self._training:
            found |= {f"{_GRADIENT}{name}": None for name, _ in model.named_parameters()}
        found |= {f"{_BUFFER}{name}": buffer for name, buffer in model.named_buffers()}
        for part in self._parts:
            found |= part[trial]
        return found


def _set_apart(parameter: Tensor, values: Tensor, name: str, trial: int) -> None:
    """Move one trial's values of a trained parameter a little, by what its name and the trial draw.

    Trials that begin alike would hide that one computes with what belongs to another.
    """
    if not trial or not parameter.requires_grad or not parameter.is_floating_point():
        return
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {trial}".encode()))
    with torch.no_grad():
        few = torch.randn(min(_DRAWN, values.numel()), generator=generator).to(values)
        times = -(-values.numel() // max(1, len(few)))
        drawn = few.repeat(times)[: values.numel()].view(values.shape)
        values.add_(drawn * values.abs().mean().clamp(min=1e-3), alpha=APART)


def _set_mode(model: nn.Module, training: bool) -> None:
    """Evaluation, or training, in which modules kept in evaluation mode on purpose stay in it."""
    if training != model.training:
        model.train(training)


def _first_names(model: nn.Module) -> dict[str, str]:
    """By each name of a parameter or buffer, the first that it has."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _of_trial(leaf: Any, trial: int) -> Any:
    if isinstance(leaf, Tensor):
        return leaf[trial]
    return leaf.of(trial) if isinstance(leaf, PerTrial) else leaf


def _left_in(
    fused: FusedModule, training: bool, first_names: Mapping[str, str]
) -> list[dict[str, Tensor | None]]:
    """Of each trial, the gradients, buffers and numbers that a step left in a fused module."""
    found: list[dict[str, Tensor | None]] = [{} for _ in range(fused.trials)]
    module, own = fused.module, fused.own_modules()
    for name, parameter in module.named_parameters() if training else ():
        key = f"{_GRADIENT}{first_names.get(name, name)}"
        absent = trials_without_gradient(parameter, fused.trials)
        # The step's own tensor: the next step begins another.
        for trial, state in enumerate(found):
            state[key] = None if trial in absent or parameter.grad is None else parameter.grad[trial]
    for name, buffer in module.named_buffers():
        copied = buffer.detach().clone()
        for trial, state in enumerate(found):
            state[f"{_BUFFER}{first_names.get(name, name)}"] = copied[trial]
    for trial, state in enumerate(found):
        for path, modules in own.items():
            for name, buffer in modules.modules[trial].named_buffers(prefix=path):
                state[f"{_BUFFER}{first_names.get(name, name)}"] = buffer.detach().clone()
        state |= _numbers_in(module, trial, {path: m.modules[trial] for path, m in own.items()})
    return found


def _numbers_in(
    model: nn.Module, trial: int = 0, own: Mapping[str, nn.Module] | None = None
) -> dict[str, Tensor]:
    """Numbers that modules keep in attributes; those of submodules in `own` are looked up there."""
    found = {}
    own = own or {}
    for path, part in [
        *model.named_modules(),
        *((p, m) for p in own for p, m in own[p].named_modules(prefix=p)),
    ]:
        if _is_within(path, own) and not any(
            part is one for module in own.values() for one in module.modules()
        ):
            continue
        for name, value in vars(part).items():
            if isinstance(value, PerTrial):
                value = value.of(trial)
            if isinstance(value, (bool, int, float)) and name not in ("training", "call_super_init"):
                found[f"{_ATTRIBUTE}{path}.{name}"] = torch.tensor(value, dtype=torch.float64)
    return found


def _changes_in_python(seen: Sequence[Observation]) -> bool:
    """Whether numbers kept in Python change from one training step to the next."""
    if len(seen) < 2:
        return False
    first, second = ({n: v for n, v in one.items() if n.startswith(_ATTRIBUTE)} for one in seen[:2])
    return any(value is not None and not torch.equal(value, second[name]) for name, value in first.items())  # type: ignore[arg-type]


def _nearest_parent(names: Sequence[str], order: Sequence[str]) -> str:
    """The module around the last of those that ran: their gradients part, and that one was made first."""
    last = max(
        names, key=lambda name: max(i for i, key in enumerate(order) if key.partition("\0")[0] == name)
    )
    return last.rpartition(".")[0]


def _is_within(name: str, others: Mapping[str, Any]) -> bool:
    return any(name == other or name.startswith(f"{other}.") or not other for other in others)


def _first_line(failure: BaseException) -> str:
    """What was found, in one line: without the advice of fusion's errors, to do what is done here."""
    text = failure.what if isinstance(failure, FusionError) else str(failure)
    text = text.strip() or type(failure).__name__
    line = " ".join(part.strip() for part in text.splitlines()[:2])
    line = line if isinstance(failure, PlaitError) else f"{type(failure).__name__}: {line}"
    return line if len(line) <= 300 else f"{line[:297]}..."


@torch.no_grad()
def _perturb_weights(model: nn.Module, seed: int, step: float) -> None:
    for number, tensor in enumerate([*model.parameters(), *model.buffers()]):
        if tensor.is_floating_point():
            tensor.copy_(perturb(tensor, 1000 * seed + number, step))
