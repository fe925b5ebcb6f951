"""What a run consists of, built from its settings: model, data, loss, optimizer, device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from plait.adapt.monitors.gradient_noise import GradientAverages
from plait.adapt.monitors.squared_norms import gradients
from plait.adapt.policies.registry import make_policy
from plait.api.world import choose_device
from plait.callbacks.callback import callbacks_of, check_callbacks
from plait.core.errors import JobError
from plait.data.batches import DataSource
from plait.data.call_model import forward
from plait.data.loader import Batch, cut, to_device
from plait.data.requirements import check_continued, check_length, check_vocabulary
from plait.data.sampler import Position
from plait.data.seeding import mix, seed_all, seed_factory
from plait.pipeline import named_state
from plait.pipeline.cutting.meta_device import LocalTensors
from plait.pipeline.named_state import has_extra_state, is_known, model_state
from plait.schema.settings import Mode, OptimizerSettings, TrainSettings
from plait.sync.averaging.base import WhenSynchronized
from plait.sync.averaging.optimizer_state import rest_of_state
from plait.training import checkpoint as checkpoints
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.evaluate import Totals, totals_of_share
from plait.training.fused.rounds import Round, TrialMicrobatch
from plait.training.fused.shared_bases import take_changed
from plait.training.fused.trial_norms import TrialNorms
from plait.training.optimizers.build import build_optimizer, check_groups
from plait.training.optimizers.lr_schedule import check_lr_schedule, set_lr
from plait.training.optimizers.traits import check_summed
from plait.training.setup.data import (
    DataPair,
    build_data,
    build_train_data,
    check_stream,
    check_test_split,
    find_collate_fn,
)
from plait.training.setup.model import build_placed_model, find_model
from plait.training.setup.precision import autocast_of, dtype_of
from plait.training.trial import total_steps
from plait.workloads import data
from plait.workloads.losses import Loss, build_loss
from plait.workloads.metrics import NamedMetric, find_metrics, modes_of, unknown_mode


@dataclass(frozen=True)
class Components:
    """Model, loss, optimizer and data of one worker's run, ready to train."""

    model: torch.nn.Module
    names: Mapping[Tensor, str]
    loss: Loss
    metrics: tuple[NamedMetric, ...]
    modes: Mapping[str, Mode]
    optimizer: torch.optim.Optimizer
    base_lrs: tuple[float, ...]
    scaler: torch.amp.GradScaler
    train_set: DataSource
    test_set: DataSource | None
    device: torch.device
    dtype: torch.dtype | None
    autocast: Callable[[], AbstractContextManager[Any]]
    # For a model on the meta device: allocates the tensors that this worker holds.
    local_tensors: LocalTensors | None = None
    # Warnings for the user when the run begins.
    warnings: tuple[str, ...] = ()
    # Measures gradient norms, as for fused trials; in a run, the engine's monitor does.
    norms: TrialNorms[GradientAverages] | None = None

    # One trial without a trials axis: nothing is shared with other trials, and Python state may change.
    trials = 1
    can_be_captured = has_partial_gradients = False
    # Whether losses of microbatches in stages are already weighted by their share of the batch.
    weights_losses = False

    @property
    def is_whole(self) -> bool:
        """Whether this worker holds the tensors of the whole model."""
        return self.local_tensors is None

    @property
    def weights(self) -> frozenset[str]:
        """The names of the parameters that are trained."""
        return frozenset(name for parameter, name in self.names.items() if parameter.requires_grad)

    def examples(self, count: int, seed: int) -> tuple[Any, Any]:
        """Inputs and target of some samples of the training split, as examples."""
        (content,) = self.train_set.example_batches((count,), seed)
        inputs, target = to_device(content, self.device, self.dtype)
        return inputs, target

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.model.parameters())

    @property
    def is_optimizer_known(self) -> bool:
        """Whether it is one of torch's optimizers; a user's may keep gradients and draw random numbers."""
        return is_known(self.optimizer)

    def check_summed(self, settings: OptimizerSettings) -> None:
        """Refuse an optimizer that treats summed gradients of several workers differently from local ones."""
        check_summed(settings, dict(self.model.named_parameters()))

    def load(self, state: Checkpoint | EngineState) -> None:
        """Load the tensors of a checkpoint on a worker that holds the whole model."""
        take_changed(self.model, state.model)
        checkpoints.load_model_state(self.model, state.model)
        named_state.load_optimizer_state(self.optimizer, self.names, state.optimizer)

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        """Any trial may take this one's slot."""

    def change(self, leaving: Sequence[int], entering: Sequence[TrialInit]) -> Components:
        """The components of the trial that takes this one's slot."""
        (entry,) = entering
        return entry.components

    def set_lr(self, factors: Sequence[float]) -> None:
        """Set the factor on the learning rate for the next steps."""
        set_lr(self.optimizer, self.base_lrs, factors[0])

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def seed_step(self, seed: int, step: int, rank: int) -> int:
        """Seed a step by these numbers only; returns the seed of its update, the same on all ranks."""
        seed_all(mix(seed, step, rank))
        return mix(seed, step)

    def seed_share(self, seed: int, steps: Sequence[int], share: int) -> None:
        """Seed a worker's update on a share of a step, whichever worker takes it."""
        self.seed_step(seed, steps[0], share)

    def rest_of_state(
        self, store: dist.Store, prefix: str, weights: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> list[WhenSynchronized]:
        """What workers that average these weights and buffers average besides when they synchronize."""
        return rest_of_state(store, prefix, weights, buffers, self.optimizer, self.scaler)

    def of_slot(self, name: str, tensor: Tensor, slot: int) -> Tensor:
        """The trial's part of a tensor that has the shape of the weight `name`: all of it."""
        return tensor

    def cut(self, batches: Sequence[Batch], microbatches: Sequence[int], alone: bool) -> list[Round]:
        """The rounds of a step on a batch, with as many microbatches.

        What hooks see is the gradient of this worker's mean, as under DistributedDataParallel; its share of
        the batch comes in when gradients are summed.
        """
        (batch,), (count,) = batches, microbatches
        whole = batch.total if alone else batch.count
        parts = cut(batch.content, batch.count, count) if batch.count else ()
        return [([part], [part[1] / whole]) for part in parts]

    def share(self, batches: Sequence[Batch]) -> float:
        """The weight of this worker's gradients in the sum."""
        return batches[0].count / batches[0].total

    def to_device(self, microbatches: Sequence[TrialMicrobatch]) -> tuple[Any, Any]:
        """Inputs and target of a round."""
        inputs, target = to_device(microbatches[0][0], self.device, self.dtype)
        return inputs, target

    def stacked(self, contents: Sequence[Any], length: int) -> Any:
        """The inputs and targets of the one trial, on the device."""
        return to_device(contents[0], self.device, self.dtype)

    def losses(self, content: Any, counts: Sequence[int] = (), weights: Sequence[float] = ()) -> Tensor:
        inputs, target = content
        with self.autocast():
            return self.loss(forward(self.model, inputs), target)

    def weighted(self, losses: Tensor, weights: Sequence[float]) -> Tensor:
        return losses * weights[0]

    def begin_scaling(self, losses: Tensor) -> None:
        """Initialize the loss scale, which happens on first use, if this worker has no samples."""
        self.scaler.scale(losses)

    def backward(self, losses: Tensor) -> None:
        """Add the gradients of the loss, times the loss scale."""
        self.scaler.scale(losses).backward()

    def update(self, clip_norm: float | None = None, seed: int | None = None) -> None:
        """Update the weights; an optimizer that draws random numbers draws them from `seed` on."""
        if clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
        if seed is not None and not self.is_optimizer_known:
            seed_all(seed)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def drawing_alike(
        self, batches: Sequence[Batch], accumulate: int, workers: int
    ) -> AbstractContextManager[None]:
        """Does nothing: generators are seeded for each step."""
        return contextlib.nullcontext()

    @property
    def trial_gradients(self) -> list[Tensor]:
        """The gradients, each with a trials axis."""
        return [gradient.unsqueeze(0) for gradient in gradients(self.model.parameters())]

    @property
    def loss_scales(self) -> Tensor:
        """What the loss of each trial, and so its gradients, are multiplied by until the update."""
        return torch.tensor([self.scaler.get_scale()])

    def totals(
        self, slots: Sequence[int], settings: Sequence[TrainSettings], share: tuple[int, int]
    ) -> list[Totals]:
        """The totals of the one trial over a share of the test split."""
        return [totals_of_share(self, settings[0], *share)]

    def add_to(
        self, totals: Totals, slot: int, output: Any, target: Any, count: int, order: tuple[int, int]
    ) -> None:
        """Add a batch of `count` samples, for which the model returned `output`, to the trial's totals."""
        totals.add(self, output, target, count, order)

    def state(self, slot: int = 0) -> EngineState:
        """The state of a model that this worker holds as a whole."""
        return EngineState(
            named_state.model_state(self.model),
            named_state.optimizer_state(self.optimizer, self.names),
            unsaved=tuple(named_state.unsaved_state(self.optimizer)),
            loss_scale=self.scaler.state_dict(),
        )

    def of_trial(self, slot: int) -> Components:
        """The components for evaluating the trial."""
        return self


@dataclass(frozen=True)
class TrialInit:
    """A trial that joins an array: its components as for a single run, and its forward passes so far."""

    settings: TrainSettings
    components: Components
    age: int = 0
    # The state of the sync of the workers that trained it; see `EngineState`.
    sync: Mapping[str, Tensor] = field(default_factory=dict)
    # Its gradient noise, updated where it is measured.
    noise: GradientAverages = field(default_factory=GradientAverages)


def check(settings: TrainSettings) -> None:
    """Refuse settings with unknown names or wrong arguments; builds and reads nothing."""
    code = resolve_names(settings)
    factory: Any = data.check(settings.data.kind, settings.data.options)[0]
    # Whether a function makes a stream is only known once it is called.
    if isinstance(factory, type) and issubclass(factory, IterableDataset):
        check_stream(settings)
    find_collate_fn(settings.data)
    known = ["loss", *(metric.name for metric in code.metrics)]
    for key, name in (
        ("checkpoint.keep_best", settings.checkpoint.keep_best),
        ("early_stop.metric", settings.early_stop.metric if settings.early_stop else None),
    ):
        if name is not None and name not in known:
            raise JobError(f"{key}: found {name!r}, but evaluation gives {' and '.join(known)}")
        if name is not None and name not in code.modes:
            raise JobError(f"{key}: {unknown_mode(name)}")
    # On a dummy parameter, so that the optimizer checks its options.
    build_optimizer(settings.optimizer, [torch.nn.Parameter(torch.zeros(1, 1))])
    choose_device(settings.device, 0)
    check_lr_schedule(settings.lr_schedule)
    for policy in settings.adapt:
        make_policy(policy.kind, policy.options)
    check_callbacks(callbacks_of(settings))


@dataclass(frozen=True)
class JobCode:
    """The code that a job names for its model, loss and metric."""

    model: Callable[..., torch.nn.Module]
    loss: Loss
    metrics: tuple[NamedMetric, ...]

    @property
    def modes(self) -> Mapping[str, Mode]:
        """Whether less or more of the loss and of each metric is better, if known."""
        return modes_of(self.metrics)


def resolve_names(settings: TrainSettings) -> JobCode:
    """The objects that the names of a job refer to; JobError for unknown names or wrong arguments."""
    seed_factory(settings.seed)
    return JobCode(
        model=find_model(settings.model),
        loss=build_loss(settings.loss, settings.loss_args),
        metrics=find_metrics(settings.evaluate, settings.loss),
    )


def build(
    settings: TrainSettings,
    device: torch.device,
    sets: DataPair | None = None,
    local_tensors: LocalTensors | None = None,
) -> Components:
    """The components of a run on `device`, the same on every worker; `sets` are its data if already read.

    With `local_tensors` the model is the one on the meta device that they belong to.
    """
    code = resolve_names(settings)
    train_set, test_set = sets or (build_train_data(settings), build_data(settings, "test"))
    if train_set.is_stream:
        check_stream(settings, train_set)
    if test_set is None:
        check_test_split(settings)
    total_steps(settings, train_set.length, 0, Position())
    warned: tuple[str, ...] = ()
    if local_tensors is not None:
        model = local_tensors.model
    else:
        model, warned = build_placed_model(code.model, settings, device)
    for source in (train_set, test_set):
        if source is not None:
            check_vocabulary(settings, code.model, model, source.dataset)
            check_length(settings, code.model, model, source.dataset)
    check_continued(settings, train_set.dataset, model)
    return _with_optimizer(settings, code, device, model, (train_set, test_set), local_tensors, warned)


def build_without_data(settings: TrainSettings, device: torch.device) -> Components:
    """The components of a run that gets its batches from the caller: no data are read."""
    code = resolve_names(settings)
    model, warned = build_placed_model(code.model, settings, device)
    return _with_optimizer(settings, code, device, model, (DataSource(()), None), warnings=warned)


def _with_optimizer(
    settings: TrainSettings,
    code: JobCode,
    device: torch.device,
    model: torch.nn.Module,
    sets: DataPair,
    local_tensors: LocalTensors | None = None,
    warnings: tuple[str, ...] = (),
) -> Components:
    """The components of a run with this model."""
    if not any(p.requires_grad for p in model.parameters()):
        raise JobError(f"model: {settings.model.factory} has no parameter to train")
    if has_extra_state(model):
        # Fails now rather than at the first checkpoint.
        model_state(model)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    check_groups(settings.optimizer.groups, [names[parameter] for parameter in trained])
    optimizer = build_optimizer(settings.optimizer, trained, names)
    if local_tensors is not None:
        # Some optimizers create state for all parameters at once; each worker's optimizer has only its
        # stages.
        optimizer.state.clear()
    return Components(
        model=model,
        names=names,
        loss=code.loss,
        metrics=code.metrics,
        modes=code.modes,
        optimizer=optimizer,
        base_lrs=tuple(float(group["lr"]) for group in optimizer.param_groups),
        # A loss scale keeps small fp16 gradients from underflowing; other dtypes need none.
        scaler=torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16"),
        train_set=sets[0],
        test_set=sets[1],
        device=device,
        dtype=dtype_of(settings),
        autocast=autocast_of(settings.precision, device),
        local_tensors=local_tensors,
        warnings=warnings,
    )


def with_fresh_model(components: Components, settings: TrainSettings, keep_scale: bool = True) -> Components:
    """The components with a newly built, untrained model and optimizer."""
    fresh = build(settings, components.device, (components.train_set, components.test_set))
    return replace(fresh, scaler=components.scaler) if keep_scale else fresh
