"""Whether fused trials compute what the same trials compute alone; and if not, which module is to blame.

Three of the trials run on real batches, fused and alone, with the same random numbers: outputs, losses, the
gradient of every parameter, buffers and numbers that modules keep in Python must agree up to rounding, in
training and in evaluation. Where they do not, the first module at which they part runs trial by trial, and
all is compared again. Everything runs on copies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils import _pytree as pytree

from plait.core.errors import PlaitError
from plait.fusion.check import check_models
from plait.fusion.dispatch.random import Streams
from plait.fusion.dispatch.tensor import TrialTensor
from plait.fusion.errors import FusionError
from plait.fusion.module import FusedModule
from plait.fusion.shared import Shared
from plait.fusion.trials.alone import LoneMode, seeded_for
from plait.fusion.trials.per_trial import PerTrial
from plait.fusion.trials.unfused import own_copy, trials_without_gradient
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

log = logging.getLogger(__name__)

# Whether in training, and on which batch: each twice in a row, so that what a model keeps is seen.
SCENES = ((True, 0), (True, 1), (False, 0), (False, 1))
# Modules that are tried one by one before the whole model runs trial by trial.
_ATTEMPTS = 12
# What products of float32 may be rounded to on a GPU: convolutions are, unless torch is configured otherwise.
TF32_EPS = 2.0**-10
# How far, relative to their size, the weights of trials are set apart.
APART = 0.01
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_WHOLE = "the whole model"
# The path of no module: where a loss or backward failed.
_IN_NONE = "\0"
_GRADIENT, _BUFFER, _ATTRIBUTE = "the gradient of ", "the buffer ", "the attribute "


_NOT_TWICE = (
    "a trial alone does something else when it is run again from the same state with the same random "
    "numbers: its forward goes by what is outside of the model (a global variable, a file, the time)"
)


class _NotRepeatable(Exception):
    """A plain model that cannot be compared with anything."""


class _NoCopy(Exception):
    """A plain model of which a copy does not run."""


class Rehearsal(Protocol):
    """How trials of a job run on its batches, together and alone; batches are numbered 0 and 1."""

    @property
    def models(self) -> Sequence[nn.Module]:
        """The plain models, which stay as they are."""

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
    `loss_alone` only the loss is computed trial by trial.
    """

    unfused: Mapping[str, str] = field(default_factory=dict)
    refused: str | None = None
    seconds: float = 0.0
    has_python_state: bool = False
    loss_alone: bool = False

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


def verify_fused(rehearsal: Rehearsal, unfused: Mapping[str, str] | None = None) -> Verdict:
    """Compare the first, the last and one trial in between, fused, with the same trials alone."""
    start = time.perf_counter()
    check = _Check(rehearsal, dict(unfused or {}))
    try:
        refused = check.resolve()
    except (_NotRepeatable, _NoCopy) as failure:
        refused = str(failure)
    except torch.OutOfMemoryError:
        log.warning("fused trials were not verified: there is not enough memory for a second copy of them")
        refused = None
    seconds = time.perf_counter() - start
    return Verdict(check.unfused, refused, seconds, check.has_python_state, rehearsal.loss_alone)


def log_verdict(verdict: Verdict, known: Mapping[str, str]) -> None:
    """Log which modules run trial by trial, besides those `known` before."""
    for name, why in verdict.unfused.items():
        if name not in known:
            log.warning("%s runs trial by trial, which is slower: %s", name or _WHOLE, why)
    if verdict.refused is not None:
        log.warning("these trials are not fused, each trains alone: %s", verdict.refused)


class _Check:
    def __init__(self, rehearsal: Rehearsal, unfused: dict[str, str]) -> None:
        self.rehearsal = rehearsal
        self.unfused = unfused
        self.has_python_state = False
        # Trials that begin alike would hide that one computes with what belongs to another.
        self.models = [_set_apart(model, number) for number, model in enumerate(rehearsal.models)]
        count = len(self.models)
        self.trials = sorted({0, count // 2, count - 1})
        self._blamed: list[type] = []
        # The modules that the fused form calls, by name: in stages some of the plain model's are opened.
        self._called: dict[str, nn.Module] = {}

    def resolve(self) -> str | None:
        """Run modules trial by trial until all agree; or why they do not."""
        for attempt in range(_ATTEMPTS + 2):
            problem = self._problem()
            if problem is None:
                return None
            if problem.only_loss and not self.rehearsal.loss_alone:
                self.rehearsal.loss_alone = True
                continue
            if "" in self.unfused or problem.only_loss:
                return problem.why
            blamed = problem.module if problem.module is not None else self._locate(problem)
            names = [""] if attempt >= _ATTEMPTS else self._to_unfuse(blamed)
            for name in names:
                for inner in [one for one in self.unfused if one.startswith(f"{name}.") or not name]:
                    del self.unfused[inner]
                self.unfused[name] = problem.why
        return "no way was found to run these trials together"

    def _to_unfuse(self, blamed: str) -> list[str]:
        """The module to run trial by trial next: the one to blame, or what is around it."""
        parts = {"": self.models[0], **self._called}
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
        """The first scene in which a trial is not what it is alone."""
        expected = {trial: self._alone(trial) for trial in self.trials}
        scenes = min(len(seen) for seen in expected.values())
        self.has_python_state = _changes_in_python([seen for seen, _ in expected[self.trials[0]]])
        try:
            fused = self._fuse()
        except FusionError as failure:
            return _Problem(0, 0, _first_line(failure), "")
        stack = _Stack([one.module for one in fused])
        for scene in range(scenes):
            try:
                with stack:
                    found = self._together(fused, scene)
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:  # the user's code can fail in any way on fused tensors
                in_loss = stack.failed_in == _IN_NONE and not self.rehearsal.loss_alone
                return _Problem(scene, 0, _first_line(failure), stack.failed_in, only_loss=in_loss)
            for trial in self.trials:
                wanted = self._observable(expected[trial][scene][0])
                differences = find_differences(wanted, found[trial], Noise({}))
                if differences:
                    differences = self._beyond_noise(trial, scene, wanted, found[trial])
                if differences:
                    return _as_problem(scene, trial, differences)
        return None

    def _fuse(self) -> Sequence[FusedModule]:
        fused = self.rehearsal.fuse(self.models, self.unfused)
        plain = dict(self.models[0].named_modules())
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
        again = self._alone(trial, until=scene)[scene][0]
        if find_differences(expected, again, Noise({})):
            # Its noise would hide whatever is wrong.
            raise _NotRepeatable(_NOT_TWICE)
        noise = measure_noise(expected, lambda seed: self._alone(trial, seed, until=scene)[scene][0])
        return find_differences(expected, found, noise)

    def _alone(
        self, trial: int, noise: int | None = None, until: int = len(SCENES) - 1, traced: int | None = None
    ) -> list[tuple[Observation, _Trace | None]]:
        """What a trial's plain model does in the scenes; with `noise`, from weights rounded otherwise."""
        model = own_copy(self.models[trial])
        if noise is not None:
            _perturb_weights(model, noise, self.rehearsal.step)
        lone = _Lone(model, self.rehearsal.seeds[trial], self.rehearsal.ages[trial], self.unfused)
        seen: list[tuple[Observation, _Trace | None]] = []
        for scene in range(until + 1):
            training, batch = SCENES[scene]
            _set_mode(model, training)
            trace = _Trace([model], lambda leaf: leaf) if scene == traced else None

            def forward(batch: int = batch, trace: _Trace | None = trace) -> tuple[Any, Tensor]:
                with lone.forward(), trace or nullcontext():
                    return self.rehearsal.alone(model, trial, batch)

            try:
                with same_random_numbers(1000 + trial):
                    step = observe_step(model, forward, backward=training)
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:  # the user's code can fail in any way
                if training and isinstance(failure, PlaitError):
                    raise
                if training:
                    raise _NoCopy(
                        f"a copy of the model fails by itself on these batches: {_first_line(failure)} "
                        f"(hooks and functions kept in attributes may hold the model that was copied)"
                    ) from failure
                break  # a model that cannot be evaluated alone, as its forward asks for gradients, say
            seen.append(({**step, **_numbers_in(model)}, trace))
        return seen

    def _together(
        self, fused: Sequence[FusedModule], scene: int, trace: _Trace | None = None
    ) -> dict[int, dict[str, Tensor | None]]:
        """What the compared trials do in one scene, fused."""
        training, batch = SCENES[scene]
        for one in fused:
            if not training or not one.module.training:
                one.train(training)
            for parameter in one.parameters():
                parameter.grad = None
        with same_random_numbers(7), torch.set_grad_enabled(training):
            with trace or nullcontext():
                outputs, losses = self.rehearsal.together(fused, batch)
            if training and losses.requires_grad:
                losses.sum().backward()
        return {trial: self._of_trial(fused, trial, outputs, losses, training) for trial in self.trials}

    def _of_trial(
        self, fused: Sequence[FusedModule], trial: int, outputs: Any, losses: Tensor, training: bool
    ) -> dict[str, Tensor | None]:
        """What one trial did, under the names that its plain model has."""
        model = self.models[trial]
        found: dict[str, Tensor | None] = dict(observe_outputs(pytree.tree_map(_picker(trial), outputs)))
        found["the loss"] = losses[trial].detach().clone()
        # Of what no stage holds there is no gradient, and its buffers stay.
        if training:
            found |= {f"{_GRADIENT}{name}": None for name, _ in model.named_parameters()}
        found |= {f"{_BUFFER}{name}": buffer for name, buffer in model.named_buffers()}
        for one in fused:
            found |= _left_in(one, trial, training, _first_names(model))
        return found

    def _locate(self, problem: _Problem) -> str:
        """The first module whose outcome parts from that of the module alone."""
        trial, scene = problem.trial, problem.scene
        fused = self._fuse()
        together = _Trace([one.module for one in fused], lambda leaf: _slice(leaf, trial))
        try:
            for earlier in range(scene + 1):
                self._together(fused, earlier, together if earlier == scene else None)
            alone = self._alone(trial, None, scene, scene)[scene][1]
            others = [self._alone(trial, seed, scene, scene)[scene][1] for seed in range(2)]
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


def _set_apart(model: nn.Module, number: int) -> nn.Module:
    """A copy of a trial's model whose trained weights are a little of its own."""
    copied = own_copy(model)
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in copied.parameters():
            if number and parameter.requires_grad and parameter.is_floating_point():
                drawn = torch.randn(parameter.shape, generator=generator).to(parameter)
                size = parameter.abs().mean().clamp(min=1e-3)
                parameter.add_(drawn * size, alpha=APART)
    return copied


def _set_mode(model: nn.Module, training: bool) -> None:
    """Evaluation, or training, in which modules kept in evaluation mode on purpose stay in it."""
    if training != model.training:
        model.train(training)


class _Lone:
    """One trial's plain model: its stream, and its generators where its fused form has modules of its own."""

    def __init__(self, model: nn.Module, seed: int, age: int, unfused: Mapping[str, str]) -> None:
        self._model = model
        self._seed = seed
        self._age = age
        self._streams: Streams | None = None
        for name in unfused:
            part = model.get_submodule(name)
            if not isinstance(part, torch.jit.ScriptModule):
                part.register_forward_pre_hook(self._enter)
                part.register_forward_hook(self._leave)
        self._open: list[Any] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Within, one forward and its loss run as this trial."""
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        seeds, ages = (torch.tensor([number], device=device) for number in (self._seed, self._age))
        self._streams = Streams(seeds, ages)
        mode = LoneMode(self._streams)
        handle = self._model.register_forward_hook(lambda *_: self._begin_loss(mode, seeds, ages))
        try:
            with mode:
                yield
        finally:
            handle.remove()
            while self._open:
                self._open.pop().__exit__(None, None, None)
        if self._model.training:
            self._age += 1

    def _begin_loss(self, mode: LoneMode, seeds: Tensor, ages: Tensor) -> None:
        """A loss draws as the next call of the fused module would."""
        mode.trials.streams = self._streams = Streams(seeds, ages + int(self._model.training))

    def _enter(self, *_: object) -> None:
        assert self._streams is not None
        context = seeded_for(self._streams)
        context.__enter__()
        self._open.append(context)

    def _leave(self, *_: object) -> None:
        self._open.pop().__exit__(None, None, None)


class _Stack:
    """Within, notes in which module of `models` an error was raised."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._paths = _paths(models)
        self._running: list[str] = []
        self._handles: list[Any] = []
        self.failed_in: str | None = None

    def __enter__(self) -> None:
        self._running = []
        self._handles = [
            torch_modules.register_module_forward_pre_hook(self._enter),
            torch_modules.register_module_forward_hook(self._leave),
        ]

    def __exit__(self, kind: object, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        if kind is not None:
            # Without one, it was raised by the loss or by backward.
            self.failed_in = self._running[-1] if self._running else _IN_NONE

    def _enter(self, part: nn.Module, _: object) -> None:
        if id(part) in self._paths:
            self._running.append(self._paths[id(part)])

    def _leave(self, part: nn.Module, *_: object) -> None:
        if id(part) in self._paths and self._running:
            self._running.pop()


class _Trace:
    """Within, notes what each module of `models` returns, in the order in which they end, and gradients."""

    def __init__(self, models: Sequence[nn.Module], pick: Callable[[Tensor], Tensor]) -> None:
        self._paths = _paths(models)
        self._pick = pick
        self._calls: dict[str, int] = {}
        self.outputs: dict[str, Tensor | None] = {}
        self.gradients: dict[str, Tensor | None] = {}

    def __enter__(self) -> None:
        self._handle = torch_modules.register_module_forward_hook(self._note)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _note(self, part: nn.Module, _: object, output: Any) -> None:
        path = self._paths.get(id(part))
        if path is None:
            return
        call = self._calls[path] = self._calls.get(path, -1) + 1
        for number, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, Tensor):
                key = f"{path}\0{call}\0{number}"
                self.outputs[key] = self._pick(leaf).detach().clone()
                inner = leaf.stacked if isinstance(leaf, TrialTensor) else leaf
                if leaf.is_floating_point():
                    self.gradients[key] = None
                if inner.requires_grad:
                    inner.register_hook(lambda g, key=key, like=leaf: self._note_gradient(key, g, like))

    def _note_gradient(self, key: str, gradient: Tensor, like: Tensor) -> None:
        wrapped = TrialTensor(gradient, like.trials) if isinstance(like, TrialTensor) else gradient
        before = self.gradients.get(key)
        own = self._pick(wrapped).detach().clone()
        self.gradients[key] = own if before is None else before + own


def _slice(leaf: Tensor, trial: int) -> Tensor:
    return leaf.stacked[trial] if isinstance(leaf, TrialTensor) else leaf


def _paths(models: Sequence[nn.Module]) -> dict[int, str]:
    return {id(part): path for model in models for path, part in model.named_modules()}


def _first_names(model: nn.Module) -> dict[str, str]:
    """By each name of a parameter or buffer, the first that it has."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _picker(trial: int) -> Callable[[Any], Any]:
    """What takes one trial's part of a value."""

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf[trial]
        return leaf.of(trial) if isinstance(leaf, PerTrial) else leaf

    return pick


def _left_in(
    fused: FusedModule, trial: int, training: bool, first_names: Mapping[str, str]
) -> dict[str, Tensor | None]:
    """Gradients, buffers and numbers that a step left in one trial of a fused module."""
    found: dict[str, Tensor | None] = {}
    module, own = fused.module, fused.own_modules()
    if training:
        for name, parameter in module.named_parameters():
            lacks = trial in trials_without_gradient(parameter, fused.trials)
            gradient = None if lacks or parameter.grad is None else parameter.grad[trial].clone()
            found[f"{_GRADIENT}{first_names.get(name, name)}"] = gradient
    for name, buffer in module.named_buffers():
        found[f"{_BUFFER}{first_names.get(name, name)}"] = buffer[trial].detach().clone()
    for path, modules in own.items():
        for name, buffer in modules.modules[trial].named_buffers(prefix=path):
            found[f"{_BUFFER}{first_names.get(name, name)}"] = buffer.detach().clone()
    return {**found, **_numbers_in(module, trial, {path: m.modules[trial] for path, m in own.items()})}


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
    first, second = ({n: v for n, v in one.items() if n.startswith(_ATTRIBUTE)} for one in seen[:2])
    return any(value is not None and not torch.equal(value, second[name]) for name, value in first.items())  # type: ignore[arg-type]


def _as_problem(scene: int, trial: int, differences: Sequence[Difference]) -> _Problem:
    names = [difference.name for difference in differences]
    forward = [n for n in names if n.startswith(("output", _BUFFER, _ATTRIBUTE))]
    mode = "training" if SCENES[scene][0] else "evaluation"
    why = f"trial {trial} parts from the trial alone in {mode}: {differences[0]}"
    only_loss = names == ["the loss"] or (not forward and names[0] == "the loss")
    return _Problem(scene, trial, why, None, not forward and not only_loss, only_loss)


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


class BatchRehearsal:
    """Trials of `fuse` on batches that plain models take: a tensor, a tuple of them, or named ones.

    The first batch is the same for all trials; in the second each trial has one of its own: where the batches
    are not of one shape, a copy with numbers that are a little smaller. The loss is a weighting of all that a
    model returns.
    """

    in_stages = False
    loss_alone = True

    def __init__(
        self, models: Sequence[nn.Module], seeds: Sequence[int], ages: Sequence[int], batches: Sequence[Any]
    ) -> None:
        self.models, self.seeds, self.ages = models, seeds, ages
        self._batches = [_arguments(batch) for batch in batches]
        if not self._batches:
            raise FusionError("fuse: verify found no batches, expected one or more that the models take")
        shapes = [
            [(x.shape, x.dtype) for x in pytree.tree_leaves(b) if isinstance(x, Tensor)]
            for b in self._batches
        ]
        self._are_alike = all(one == shapes[0] for one in shapes)

    @property
    def step(self) -> float:
        """The rounding of the coarsest numbers that are computed with."""
        on_gpu = any(p.is_cuda and p.dtype == torch.float32 for p in self.models[0].parameters())
        return TF32_EPS if on_gpu else 0.0

    def _batch(self, trial: int, batch: int) -> Any:
        place = batch % len(self._batches)
        if batch == 1 and self._are_alike:
            place = (trial + 1) % len(self._batches)
        shrunk = 1.0 - 0.01 * trial if batch == 1 and not self._are_alike else 1.0

        def own(x: Tensor) -> Tensor:
            return x * shrunk if shrunk != 1.0 and x.is_floating_point() else x.clone()

        return pytree.tree_map_only(Tensor, own, self._batches[place])

    def fuse(self, models: Sequence[nn.Module], unfused: Mapping[str, str]) -> list[FusedModule]:
        """The trials in one module."""
        check_models(models)
        return [FusedModule(list(models), list(self.seeds), list(self.ages), unfused)]

    def together(self, fused: Sequence[FusedModule], batch: int) -> tuple[Any, Tensor]:
        """What the models return, and its weighting."""
        (whole,) = fused
        each = [self._batch(trial, batch) for trial in range(whole.trials)]
        if batch == 1:
            flat = [pytree.tree_flatten(one) for one in each]
            leaves = [
                torch.stack(x) if isinstance(x[0], Tensor) else x[0] for x in zip(*(f for f, _ in flat))
            ]
            args, kwargs = pytree.tree_unflatten(leaves, flat[0][1])
        else:
            args, kwargs = pytree.tree_map_only(Tensor, Shared, each[0])
        outputs = whole(*args, **kwargs)
        return outputs, torch.stack([_total(_at(outputs, trial)) for trial in range(whole.trials)])

    def alone(self, model: nn.Module, trial: int, batch: int) -> tuple[Any, Tensor]:
        args, kwargs = self._batch(trial, batch)
        outputs = model(*args, **kwargs)
        return outputs, _total(outputs)


def _at(outputs: Any, trial: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x[trial], outputs)


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def _total(outputs: Any) -> Tensor:
    """Something to differentiate: a fixed weighting of all numbers that a model returned."""
    tensors = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point()]
    parts = [
        (x * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype, device=x.device).view(x.shape)).sum()
        for x in tensors
    ]
    if not parts:
        raise FusionError(
            f"verify: the model returns {_kind(outputs)}, in which no tensors of numbers are seen; return a "
            f"tensor, a tuple, a dict or a named tuple of tensors"
        )
    return torch.stack([part.to(parts[0]) for part in parts]).sum()


def _kind(outputs: Any) -> str:
    return "nothing" if outputs is None else f"a {type(outputs).__name__}"
