"""Profiling a job: its model on batches of its data, and the links between its workers."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.api.world import choose_device
from plait.core.codec import decode, encode
from plait.core.errors import InputError
from plait.data.call_model import as_arguments, explaining_type_errors
from plait.data.loader import Batch, to_device
from plait.data.sampler import Position, share
from plait.launcher.display import Silent
from plait.launcher.messages import Launch
from plait.launcher.run import TRACING
from plait.launcher.supervisor import Supervisor
from plait.launcher.worker_process import Worker
from plait.measure.allreduce_cost import measure_sums
from plait.measure.overhead import measure_overhead
from plait.pipeline.cpu.layers import plain_forwards, use_fast_layers
from plait.pipeline.cutting.check_model import StageError
from plait.pipeline.cutting.trace_job import trace_inputs
from plait.pipeline.updates.weight_stash import WeightVersions
from plait.pipeline.verify.in_process import Choices
from plait.pipeline.verify.verify_stages import Example, find_mismatch
from plait.profiler.link_bandwidth import measure_links
from plait.profiler.profile import Profile, profile_model
from plait.profiler.trace import trace
from plait.profiler.traced_model import TracedModel
from plait.schema.placement import Placement
from plait.schema.plans.graph import Graph
from plait.schema.settings import OptimizerSettings, TrainSettings
from plait.training import components
from plait.training.engines.train_step import TrainStep
from plait.training.optimizers.build import build_optimizer
from plait.training.process import begin_process, use_device
from plait.training.setup.data import build_train_data
from plait.training.setup.model import build_model
from plait.training.setup.precision import AUTOCAST, dtype_of
from plait.training.worker_group import group_of_world
from plait.verification import same_random_numbers
from plait.verification.verify import Mismatch, verify
from plait.workloads.losses import build_loss

# Steps that data parallelism is tried out for, at least and at most.
_STEPS = (4, 30)
# Samples of a microbatch: more would fill any memory, and take minutes to put together.
MOST_SAMPLES = 1 << 20


@dataclass(frozen=True)
class ProfileRequest:
    """What is measured of a job: a profile for each of `batch_sizes`, sizes of microbatches.

    With `verify` the layers are first compared with the model, see `verify_layers`. With `data_parallel` some
    steps are taken in which every worker holds the whole model, see `time_data_parallel`.
    """

    settings: TrainSettings
    batch_sizes: tuple[int, ...]
    repeats: int = 5
    least_s: float = 0.0
    verify: bool = False
    data_parallel: bool = False

    def __post_init__(self) -> None:
        if max(self.batch_sizes) > MOST_SAMPLES:
            raise InputError(
                f"--batch: found microbatches of {max(self.batch_sizes):,} samples, expected "
                f"{MOST_SAMPLES:,} at most; if it is not given, data.batch_size counts"
            )


def profile_job(
    settings: TrainSettings,
    batch_size: int | None = None,
    *,
    threads: int | None = 1,
    repeats: int = 5,
    on_progress: Callable[[int, int], None] | None = None,
    verify: bool = False,
) -> Profile:
    """The job's model measured layer by layer on `batch_size` samples of its data (a microbatch).

    `threads` is what one worker will have; the job's whole batch serves where no size is given. With `verify`
    the layers are compared with the model first, see `verify_layers`.
    """
    request = ProfileRequest(settings, (batch_size or settings.data.batch_size,), repeats)
    components.check(settings)
    device = choose_device(settings.device, 0)
    verified = verify_layers(settings, device) if verify else Verification()
    (profile,) = _profile_sizes(request, device, threads, on_progress)
    return verified.noted_in(profile)


def _profile_sizes(
    request: ProfileRequest,
    device: torch.device,
    threads: int | None,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[Profile, ...]:
    """The job's model measured on microbatches of each size, one size after the other."""
    settings, repeats = request.settings, request.repeats
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    profiles = []
    try:
        for size in request.batch_sizes:
            model, inputs, target = _example(settings, size, device)
            with explaining_type_errors(model, inputs), _autocast(settings, device):
                profile = profile_model(
                    model,
                    inputs,
                    _loss_of(settings, target),
                    device=device,
                    repeats=repeats,
                    least_s=request.least_s,
                    name=settings.model.factory,
                    on_progress=on_progress,
                )
            if settings.precision in AUTOCAST:
                profile = replace(profile, dtype=str(AUTOCAST[settings.precision]).removeprefix("torch."))
            profiles.append(replace(profile, loading_s=_loading_s(settings, profile.batch, device)))
        if device.type == "cpu":
            # Stages may store weights transposed, which changes the time of updates.
            plain_forwards(use_fast_layers(model, add=False))
        # The time of an update does not depend on the microbatch size.
        updates = time_updates(
            model.to(device), trace_inputs(model, inputs, False), settings.optimizer, max(repeats, 9)
        )
    finally:
        torch.set_num_threads(before)
    return tuple(replace(each, graph=_with_updates(each.graph, updates)) for each in profiles)


def _autocast(settings: TrainSettings, device: torch.device) -> AbstractContextManager[Any]:
    """The autocast context of the job; weights are cast in every step, as in a run."""
    if settings.precision not in AUTOCAST:
        return contextlib.nullcontext()
    return torch.autocast(device.type, AUTOCAST[settings.precision], cache_enabled=False)


def _loss_of(settings: TrainSettings, target: Any) -> Callable[[Any], torch.Tensor]:
    loss = build_loss(settings.loss, settings.loss_args)
    return lambda output: loss(output, target)


@dataclass(frozen=True)
class UpdateTimes:
    """Seconds of an update that writes over the weights, and of one that leaves the version before."""

    in_place_s: float
    kept_s: float


def time_updates(
    model: nn.Module, traced: TracedModel, optimizer: OptimizerSettings, repeats: int
) -> dict[str, UpdateTimes]:
    """The time of the optimizer to write the next version of each layer's weights.

    The time of the whole model's update is divided in proportion to the times of single layers, since an
    optimizer has fixed costs. A parameter that several layers use counts for the first. The updates change
    the model, with zero gradients.
    """
    named = dict(model.named_parameters())
    alone: dict[str, UpdateTimes] = {}
    for layer in traced.layers:
        parameters = [p for name in layer.parameters if (p := named.pop(name, None)) is not None]
        parameters = [p for p in parameters if p.requires_grad]
        if parameters:
            alone[layer.id] = _update_times(model, parameters, optimizer, repeats)
    whole = _update_times(model, [p for p in model.parameters() if p.requires_grad], optimizer, repeats)
    in_place = whole.in_place_s / sum(times.in_place_s for times in alone.values())
    kept = whole.kept_s / sum(times.kept_s for times in alone.values())
    return {id: UpdateTimes(t.in_place_s * in_place, t.kept_s * kept) for id, t in alone.items()}


def _update_times(
    model: nn.Module, parameters: list[Any], settings: OptimizerSettings, repeats: int
) -> UpdateTimes:
    """One update, with all that a pipeline does for it; both kinds take turns."""
    optimizer = build_optimizer(settings, parameters)
    versions = WeightVersions(model, parameters)
    samples: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeats + 2):
        for kept, times in samples.items():
            for leaf in versions.leaves(versions.newest):
                leaf.grad = torch.zeros_like(leaf)
            _synchronize(parameters[0])
            started = time.perf_counter()
            versions.collect()
            versions.update(optimizer.step, versions.newest if kept else versions.newest + 1)
            versions.put(versions.newest)
            optimizer.zero_grad(set_to_none=True)
            _synchronize(parameters[0])
            times.append(time.perf_counter() - started)
    versions.restore_masters()
    # The first makes the optimizer's state, the second the last buffer.
    return UpdateTimes(statistics.median(samples[False][2:]), statistics.median(samples[True][2:]))


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _with_updates(graph: Graph, updates: dict[str, UpdateTimes]) -> Graph:
    nodes = []
    for node in graph.nodes:
        times = updates.get(node.id, UpdateTimes(0.0, 0.0))
        more = max(0.0, times.kept_s - times.in_place_s)
        nodes.append(replace(node, update_s=times.in_place_s, version_s=more))
    return replace(graph, nodes=tuple(nodes))


def trace_job(settings: TrainSettings) -> TracedModel:
    """The job's model as its layers, traced on a few samples of its data."""
    model, inputs, _ = _example(settings, 4, torch.device("cpu"))
    return trace_inputs(model, inputs)


def verify_job(settings: TrainSettings, traced: TracedModel, stages: Sequence[Sequence[str]]) -> None:
    """Refuse stages of the job's model, traced by `trace_job`, that do not compute what it computes."""
    loss, batches = build_loss(settings.loss, settings.loss_args), _batches(settings, torch.device("cpu"))
    mismatch = find_mismatch(traced, stages, Example(batches, loss, Choices(quick=False)))
    if mismatch is not None:
        raise StageError(f"the stages do not compute what the model computes: {mismatch}")


_ALL_THE_SAME = "measure its layers all the same with --set verify=off"


@dataclass(frozen=True)
class Verification:
    """How long the layers of a model were compared with it, and what a run has to keep in one stage."""

    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def noted_in(self, profile: Profile) -> Profile:
        return replace(profile, verified_s=self.seconds, notes=self.notes)


def verify_layers(settings: TrainSettings, device: torch.device) -> Verification:
    """Compare the job's model with all its layers, run one after the other, on batches of its data.

    A module whose code a trace cannot repeat is noted: a run keeps it in one stage. Raises StageError where
    that is the code of the model itself.
    """
    started = time.perf_counter()

    def make_model() -> nn.Module:
        return build_model(settings.model, settings.seed).to(device, dtype_of(settings))

    batches, model = _batches(settings, device), make_model()
    choices = Choices(lambda: _autocast(settings, device), quick=False)
    example = Example(batches, build_loss(settings.loss, settings.loss_args), choices, make_model)
    whole, notes = set[str](), list[str]()

    def mend(mismatch: Mismatch) -> bool:
        if not mismatch.module or mismatch.module in whole:
            return False
        notes.append(f"{mismatch}; so a run keeps the layers of {mismatch.module} in one stage")
        whole.add(mismatch.module)
        return True

    attempts = 1 + sum(1 for _ in model.modules())
    left = verify(lambda: _layer_mismatch(model, example, frozenset(whole)), mend, attempts)
    if left is not None:
        raise StageError(
            f"{left}; so no plan can cut it: train it without one (parallel.plan: data-parallel), or "
            f"{_ALL_THE_SAME}"
        )
    return Verification(time.perf_counter() - started, tuple(notes))


def _layer_mismatch(model: nn.Module, example: Example, whole: frozenset[str]) -> Mismatch | None:
    """The first difference between the layers and the model; modules in `whole` are called as a whole."""
    inputs, others = (as_arguments(inputs) for inputs, _ in example.batches)
    with explaining_type_errors(model, inputs), example.choices.autocast():
        traced = trace(model, inputs, others=[others], whole=whole)
    for concern in traced.concerns or (traced.evaluation.concerns if traced.evaluation is not None else ()):
        return Mismatch(concern.message, concern.path)
    try:
        mismatch = find_mismatch(traced, [[layer.id for layer in traced.layers]], example)
    except InputError as failure:
        raise StageError(f"{failure} ({_ALL_THE_SAME})") from failure
    if mismatch is not None:
        mismatch = replace(mismatch, why=f"its layers do not compute what the model computes: {mismatch}")
    return mismatch


def _batches(settings: TrainSettings, device: torch.device) -> list[Any]:
    """Two batches of a few samples of the job's data, as pairs of inputs and target."""
    with same_random_numbers(settings.seed):
        contents = build_train_data(settings).example_batches((4, 3), settings.seed)
    return [to_device(content, device, dtype_of(settings)) for content in contents]


def _example(settings: TrainSettings, batch_size: int, device: torch.device) -> tuple[Any, Any, Any]:
    """The model, its inputs as a tuple or dict, and the target, for one batch of training data."""
    dtype = dtype_of(settings)
    # A set with fewer samples than a microbatch begins again: what they hold costs no time.
    content = build_train_data(settings).first_batch(batch_size, settings.seed)
    inputs, target = to_device(content, device, dtype)
    model = build_model(settings.model, settings.seed).to(dtype=dtype)
    return model, as_arguments(inputs), target


def profile_together(request: ProfileRequest, placement: Placement) -> tuple[Profile, ...]:
    """The job measured on all of its workers at once, with the links between them and their sums.

    Neighbours share memory and caches, so layers take longer next to busy workers than alone; and what is
    measured where the job will run has its threads, its libraries and its processors.
    """
    launch = Launch(
        placement,
        f"{__name__}:profile_worker",
        encode(request),
        check=f"{__name__}:check_profile",
        preload=TRACING,
        saves=False,
    )
    results = Supervisor(launch, Silent()).run()
    return tuple(decode(Profile, values, "profile") for values in results[0]["profiles"])


def check_profile(order: Mapping[str, Any]) -> None:
    """Refuse a job that cannot run, before any worker starts; each host's agent calls it."""
    components.check(begin_process(ProfileRequest, order).settings)


def profile_worker(worker: Worker, order: Mapping[str, Any]) -> dict[str, Any]:
    """Run one worker of a profile; rank 0 returns the result."""
    request = begin_process(ProfileRequest, order)
    settings = request.settings
    device = use_device(settings.device, worker)
    worker.join("gloo")
    verified = Verification()
    if request.verify and worker.rank == 0:
        verified = verify_layers(settings, device)
    profiles = profile_here(worker, request)
    if request.data_parallel:
        seconds = time_data_parallel(worker, settings, device)
        profiles = tuple(replace(each, data_parallel_s=seconds) for each in profiles)
    return {"profiles": [encode(verified.noted_in(each)) for each in profiles]}


def time_data_parallel(
    worker: Worker, settings: TrainSettings, device: torch.device, least_s: float = 1.0
) -> float:
    """Seconds of a step in which every worker holds the whole model and has its share of the batch.

    The median of what the slowest worker took, over steps that go on for about `least_s`, reading included.
    All workers call it together, in a gloo group.
    """
    built = components.build(replace(settings, pipeline=None), device)
    size = settings.data.batch_size
    count = len(share(range(size), worker.rank, worker.world_size))
    step = TrainStep(built, settings, group_of_world(worker), rank=worker.rank)
    content, seconds = None, list[float]()
    while len(seconds) < _STEPS[0] or (sum(seconds[1:]) < least_s and len(seconds) < _STEPS[1]):
        dist.barrier()
        started = time.perf_counter()
        if content is None or (settings.data.loaders == 0 and not built.train_set.is_stream):
            content = built.train_set.first_batch(count, settings.seed)
        step.step([Batch(content, count, size, 0, Position())], [1.0])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        slowest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(slowest.item())
    step.close()
    # The first makes buffers and the optimizer's state.
    return statistics.median(seconds[1:])


def profile_here(worker: Worker, request: ProfileRequest) -> tuple[Profile, ...]:
    """The mean of what all workers measured at once, with links and sums; one profile for each size.

    All workers call it together, in a gloo group.
    """

    def start_together(done: int, _total: int) -> None:
        if done == 1:  # traced and weighed; the timed steps follow
            dist.barrier()

    settings = request.settings
    device = choose_device(settings.device, worker.local_rank)
    profiles = _profile_sizes(request, device, None, start_together)
    profiles = tuple(replace(each, graph=_mean_of_workers(each.graph)) for each in profiles)
    if worker.world_size == 1:
        return profiles
    model = build_model(settings.model, settings.seed)
    links = measure_links(worker.rendezvous, _two_of_each(worker.hosts), device=device)
    overhead_s = measure_overhead(worker.rendezvous)
    sums = measure_sums(model, worker.rendezvous, settings.topology, device=device)
    return tuple(replace(each.with_links(links, sums), overhead_s=overhead_s) for each in profiles)


def _two_of_each(hosts: Sequence[str]) -> list[int]:
    """Ranks whose links represent all: workers of one host are alike, and measuring all pairs takes long."""
    return [rank for rank, host in enumerate(hosts) if hosts[:rank].count(host) < 2]


def _loading_s(settings: TrainSettings, batch_size: int, device: torch.device, repeats: int = 7) -> float:
    """Seconds in which a worker loads a microbatch; 0 if loader processes prefetch it."""
    if settings.data.loaders > 0:
        return 0.0
    source = build_train_data(settings)
    numbers = itertools.count()
    dtype = dtype_of(settings)
    seconds = []
    for _ in range(repeats):
        taken = itertools.islice(numbers, batch_size)
        started = time.perf_counter()
        if source.is_stream:
            content = source.first_batch(batch_size, settings.seed)
        else:
            content = source.batch(0, [i % len(source) for i in taken], settings.seed)
        to_device(content, device, dtype)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _mean_of_workers(graph: Graph) -> Graph:
    """The graph with times that are the mean over all workers; all call it together."""
    columns = ("forward_s", "backward_s", "update_s", "version_s")
    times = torch.tensor([[getattr(n, c) for c in columns] for n in graph.nodes], dtype=torch.float64)
    dist.all_reduce(times)
    means = (times / dist.get_world_size()).tolist()
    nodes = (replace(n, **dict(zip(columns, row))) for n, row in zip(graph.nodes, means))
    return replace(graph, nodes=tuple(nodes))
