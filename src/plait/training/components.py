"""What a run consists of, built from its settings: model, data, loss, optimizer, device."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import IterableDataset

from plait.adapt.monitors.gradient_noise import GradientAverages
from plait.adapt.monitors.squared_norms import gradients
from plait.adapt.policies.registry import make_policy
from plait.api.world import choose_device
from plait.callbacks.callback import callbacks_of, check_callbacks
from plait.core.codec import encode
from plait.core.errors import DataError, JobError
from plait.core.names import check_arguments, resolve
from plait.data.batches import Collate, DataSource, as_arguments, as_pair
from plait.data.call_model import forward
from plait.data.loader import Batch, cut, to_device
from plait.data.requirements import check_continued, check_length, check_vocabulary
from plait.data.sampler import Position, steps_per_epoch
from plait.data.seeding import mix, seed_all
from plait.pipeline import named_state
from plait.pipeline.cutting.meta_device import LocalTensors, NotInPiecesError
from plait.pipeline.named_state import has_extra_state, is_known, model_state
from plait.schema.settings import DataSettings, Mode, ModelSettings, OptimizerSettings, TrainSettings
from plait.sync.averaging.base import WhenSynchronized
from plait.sync.averaging.optimizer_state import rest_of_state
from plait.training import checkpoint as checkpoints
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.evaluate import Totals, totals_of_share
from plait.training.fused.rounds import Round, TrialMicrobatch
from plait.training.fused.shared_bases import base_of, leaves_base, take_changed, take_trained
from plait.training.fused.trial_norms import TrialNorms
from plait.training.optimizers.build import build_optimizer, check_groups
from plait.training.optimizers.lr_schedule import check_lr_schedule, set_lr
from plait.training.optimizers.traits import check_summed
from plait.training.trial import UNKNOWN_STEPS, Trial
from plait.workloads import data
from plait.workloads.adapters.lora import add_lora, check_lora
from plait.workloads.from_transformers import factory_of
from plait.workloads.losses import MODEL_LOSS, Loss, build_loss
from plait.workloads.metrics import NamedMetric, find_metrics, modes_of, unknown_mode

# A worker that builds the whole model must have room for its weights, a copy on the way to the device, and
# an optimizer's state of a checkpoint.
WHOLE_COPIES = 4
log = logging.getLogger(__name__)
_IN_EVALUATION_MODE = (
    "model: {} returned a model in evaluation mode, as from_pretrained does; all of it is put into training "
    "mode (call train() in the factory, and then eval() of the parts that are to stay in evaluation mode)"
)
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


# The training and the test split.
DataPair = tuple[DataSource, DataSource | None]


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


def find_model(settings: ModelSettings) -> Callable[..., torch.nn.Module]:
    if settings.adapter is not None:
        check_lora(settings.adapter)
    factory: Callable[..., torch.nn.Module] | None = factory_of(settings.factory)
    if factory is None:
        factory = resolve(settings.factory, "model", JobError)
    if isinstance(factory, torch.nn.Module):
        name = settings.factory.rpartition(":")[2]
        raise JobError(
            f"model: {settings.factory} is a {type(factory).__name__} that is made already, expected a "
            f"function or class that makes it: each worker, and each trial, has its own; write def make(): "
            f"return ... and name that instead of {name}"
        )
    if not callable(factory):
        raise JobError(
            f"model: {settings.factory} is {factory!r}, expected a function or class that makes a model"
        )
    check_arguments(factory, settings.args, "model_args", JobError)
    return factory


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


def seed_factory(seed: int) -> None:
    """Seed the random numbers that a factory draws by `seed` only.

    So it draws the same on every worker, and for both splits: parts of `random_split` have nothing in common.
    """
    # Unlike `seed_all`, also for GPUs that are not in use yet. On a build for CPUs this would only record
    # stack traces, a millisecond each time.
    if torch.accelerator.current_accelerator() is not None:
        torch.manual_seed(mix(seed))
    seed_all(mix(seed))


def dtype_of(settings: TrainSettings) -> torch.dtype | None:
    """The dtype of weights and batches; None if they are not converted."""
    return torch.float64 if settings.precision == "float64" else None


def build_model(settings: ModelSettings, seed: int) -> torch.nn.Module:
    """The model in training mode, with initial weights that depend only on `seed`."""
    # Modules may draw while they are imported, too.
    seed_factory(seed)
    model = _trained(_made(find_model(settings), settings, seed))
    return model if settings.adapter is None else add_lora(model, settings.adapter, settings.lora_array)


def _made(factory: Callable[..., torch.nn.Module], settings: ModelSettings, seed: int) -> torch.nn.Module:
    """The model without its adapter, in the mode that the factory returned it in."""
    seed_factory(seed)
    model = factory(**settings.args)
    if not isinstance(model, torch.nn.Module):
        raise JobError(
            f"model: {settings.factory} returned {type(model).__name__}, expected a torch.nn.Module"
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise JobError(
                f"model: {settings.factory} has a parameter without a size yet, {name} (LazyLinear and its "
                f"like); give the sizes, or run the model once on a sample in the factory"
            )
    return model


def _placed(
    factory: Callable[..., torch.nn.Module], settings: TrainSettings, device: torch.device
) -> tuple[torch.nn.Module, tuple[str, ...]]:
    """The model in training mode on `device`, and warnings."""
    model, dtype, warned = settings.model, dtype_of(settings), []

    def make() -> torch.nn.Module:
        made = _made(factory, model, settings.seed)
        if not made.training:
            warned.append(_IN_EVALUATION_MODE.format(model.factory))
        return _trained(made)

    if model.adapter is None:
        return make().to(device, dtype), tuple(warned)
    # A pipeline's layers change hands between workers.
    if settings.in_stages or not leaves_base(model.adapter):
        base = make()
    else:
        seed_factory(settings.seed)
        key = model.factory, encode(model.args), device, dtype
        base = base_of(key, settings.seed, lambda: make().to(device, dtype))
    made = add_lora(base, model.adapter, model.lora_array).to(device, dtype)
    take_trained(made)
    return made, tuple(warned)


def _trained(model: torch.nn.Module) -> torch.nn.Module:
    """All of a model that is not in training mode in it; else parts of it may be in evaluation mode."""
    return model if model.training else model.train()


def build_data(settings: TrainSettings, split: data.Split) -> DataSource | None:
    """The data set's `train` or `test` split; None where there is no test split."""
    seed_factory(settings.seed)
    data.check(settings.data.kind, settings.data.options)
    seed_factory(settings.seed)
    dataset = data.build(settings.data.kind, split, **settings.data.options)
    return None if dataset is None else as_source(dataset, settings)


def as_source(dataset: Any, settings: TrainSettings) -> DataSource:
    """`dataset` as a split of the job's data."""
    arrange = as_arguments if settings.loss == MODEL_LOSS else as_pair
    return DataSource(dataset, find_collate_fn(settings.data), arrange)


def build_train_data(settings: TrainSettings) -> DataSource:
    """The data set's training split."""
    return cast("DataSource", build_data(settings, "train"))


def find_collate_fn(settings: DataSettings) -> Collate | None:
    """The function that the job names to make batches of lists of samples."""
    if settings.collate_fn is None:
        return None
    collate: Collate = resolve(settings.collate_fn, "data.collate_fn", DataError)
    if not callable(collate):
        raise DataError(
            f"data.collate_fn: {settings.collate_fn} is {collate!r}, expected a function that takes a list "
            f"of samples and returns a batch"
        )
    return collate


def check_stream(settings: TrainSettings, source: DataSource | None = None) -> None:
    """Refuse settings that a stream of samples does not support; `source` is the stream, if already built."""
    kind = settings.data.kind
    if settings.sync.kind != "all-reduce":
        raise JobError(
            f"parallel.sync: found {settings.sync.kind!r}, but {kind} is a stream, and workers that claim "
            f"shares of batches need samples by index; use sync: all-reduce, or a map-style data set"
        )
    if settings.data.loaders > 1:
        raise JobError(
            f"data.loaders: found {settings.data.loaders}, but {kind} is a stream, which several loader "
            f"processes would each read from its beginning; use loaders: 1 or 0"
        )
    if source is None or settings.epochs is None or source.length is not None:
        return
    unknown = f"but {kind} is a stream without __len__, so the number of steps is unknown"
    if settings.in_stages:
        raise JobError(
            f"epochs: found {settings.epochs}, {unknown}, which the stages of a pipeline need; give "
            f"steps instead, or the data set a __len__"
        )
    if settings.lr_schedule.kind not in ("constant", "step"):
        raise JobError(
            f"lr_schedule.kind: found {settings.lr_schedule.kind!r}, {unknown}; give steps instead of "
            f"epochs, or the data set a __len__"
        )


def check_test_split(settings: TrainSettings) -> None:
    """Refuse settings that need a test split, for data without one."""
    for key, wanted in (
        ("evaluate.every_steps", settings.evaluate.every_steps),
        ("checkpoint.keep_best", settings.checkpoint.keep_best),
        ("early_stop.patience", settings.early_stop and settings.early_stop.patience),
    ):
        if wanted is not None:
            raise JobError(
                f"{key}: found {wanted}, but {settings.data.kind} has no test split (it returned None for "
                f"'test'); leave the key out, or return a data set to evaluate on"
            )


def find_local_tensors(settings: TrainSettings, device: torch.device) -> LocalTensors | None:
    """The model on the meta device, where a pipeline's worker cannot hold all of it; else None."""
    if not settings.in_stages or settings.sync.kind != "all-reduce":
        return None
    try:
        local_tensors = make_local_tensors(settings, device)
    except NotInPiecesError as failure:
        log.info("%s; every worker builds it whole and keeps its stages", failure)
        return None
    return local_tensors if local_tensors.weight_bytes() * WHOLE_COPIES > free_bytes(device) else None


def has_room_for_whole(components: Components) -> bool:
    """Whether this worker has memory for training a second copy of the whole model."""
    whole = sum(p.numel() * p.element_size() for p in components.model.parameters())
    return whole * WHOLE_COPIES < free_bytes(components.device)


def make_local_tensors(settings: TrainSettings, device: torch.device) -> LocalTensors:
    """The model of the settings on the meta device."""
    local_tensors = LocalTensors(
        lambda: build_model(settings.model, settings.seed), dtype_of(settings), device
    )
    if has_extra_state(local_tensors.model):
        raise NotInPiecesError(
            "the model has extra state (get_extra_state), which cannot be split over workers"
        )
    return local_tensors


def free_bytes(device: torch.device) -> float:
    """The memory that this worker may use on `device`."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    # The workers of a host share its memory. In an elastic job more may join, up to a number that may be far
    # beyond the cores.
    most, now = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    free = psutil.virtual_memory().available / min(most, max(now, os.cpu_count() or 1))
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            used = psutil.Process().memory_info()
            free = min(free, limit - (used.data if kind == resource.RLIMIT_DATA else used.vms))
    return free


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
        model, warned = _placed(code.model, settings, device)
    for source in (train_set, test_set):
        if source is not None:
            check_vocabulary(settings, code.model, model, source.dataset)
            check_length(settings, code.model, model, source.dataset)
    check_continued(settings, train_set.dataset, model)
    return _with_optimizer(settings, code, device, model, (train_set, test_set), local_tensors, warned)


def build_without_data(settings: TrainSettings, device: torch.device) -> Components:
    """The components of a run that gets its batches from the caller: no data are read."""
    code = resolve_names(settings)
    model, warned = _placed(code.model, settings, device)
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
        autocast=_autocast(settings.precision, device),
        local_tensors=local_tensors,
        warnings=warnings,
    )


def with_fresh_model(components: Components, settings: TrainSettings, keep_scale: bool = True) -> Components:
    """The components with a newly built, untrained model and optimizer."""
    fresh = build(settings, components.device, (components.train_set, components.test_set))
    return replace(fresh, scaler=components.scaler) if keep_scale else fresh


def total_steps(settings: TrainSettings, samples: int | None, step: int, position: Position) -> int:
    """How many steps the run has in all, when `step` steps have brought it to `position`.

    An epoch that yields no batch at all is refused. `samples` are those of an epoch; where they are not known
    and epochs are asked for, the answer is UNKNOWN_STEPS.
    """
    if samples is None:
        return UNKNOWN_STEPS if settings.steps is None else settings.steps
    size, keep = settings.data.batch_size, settings.data.last_batch == "keep"
    per_epoch = steps_per_epoch(samples, size, keep)
    if per_epoch == 0:
        raise JobError(
            f"data.batch_size: found {size}, but there are only {samples} samples and "
            f"data.last_batch is 'drop', so no batch is left; use a smaller batch or last_batch: keep"
        )
    if settings.epochs is None:
        assert settings.steps is not None
        return settings.steps
    whole_epochs = settings.epochs - position.epoch - 1
    rest = steps_per_epoch(samples - position.sample, size, keep)
    return step + max(0, whole_epochs * per_epoch + rest)


def present_steps(trial: Trial, samples: int | None) -> int:
    """How many steps a trial has in all, from its present position with its present batch size."""
    settings = trial.settings
    data = replace(settings.data, batch_size=trial.batch.size)
    return total_steps(replace(settings, data=data), samples, trial.step, trial.position)


def _autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    if precision not in AUTOCAST:
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, AUTOCAST[precision])


def emulated(precision: str, device: torch.device) -> str | None:
    """The warning for a user whose processor computes `precision` in software; None where it does not."""
    if precision != "bf16" or device.type != "cpu" or _has_bf16():
        return None
    # Torch warns too, but without saying what to do.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    return "precision: this processor has no bf16 arithmetic, so it is emulated; float32 is faster here"


def _has_bf16() -> bool:
    """Whether the processor has bf16 instructions; True where the system does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(text.split())
