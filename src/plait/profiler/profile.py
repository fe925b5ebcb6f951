"""Profiles: a model and example inputs in, a costed graph with details of the measurement out."""

from __future__ import annotations

import inspect
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.core import artefact
from plait.core.errors import ArtefactError, InputError
from plait.core.shown import shown
from plait.core.units import show_seconds
from plait.profiler.layer_memory import Weights, weigh
from plait.profiler.link_bandwidth import Link, Sum
from plait.profiler.timing import Clock, LayeredModel, Loss, StepTimes, Timed, time_layers, time_whole
from plait.profiler.trace import Inputs, trace
from plait.profiler.traced_model import TracedModel
from plait.schema.plans.graph import MOST, Edge, Graph, GraphError, Node, Tie

KIND, VERSION = "profile", 2
# The plausible range of the sum over layers, as a share of the step, and the largest plausible spread of
# steps.
_PLAUSIBLE = (0.7, 1.5)
_UNSTEADY = 0.5


@dataclass(frozen=True)
class LayerSpread:
    """The interquartile range of a layer's measurements."""

    id: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several layers use. The first counts its bytes; other stages have a copy."""

    name: str
    bytes: int
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Profile:
    """The measurements of a model. `step` is the whole step of the unmodified model, measured in between.

    `sums` is the speed of all-reduce, if several workers were measured together. `loading_s` is the time to
    load a microbatch, if the computing worker does that, and `overhead_s` the time of a pipeline worker per
    microbatch besides its layers. `verified_s` is the duration of the verification of the layers, 0 if there
    was none, and `notes` say which modules must stay in one stage, and why. `data_parallel_s` is the measured
    time of a data-parallel step of all workers on the job's batch, if it was measured.

    Examples:
        ```py
        profile = plait.profile(model, inputs)
        print(profile.step, profile.doubts())
        ```
    """

    model: str
    graph: Graph
    device: str
    dtype: str
    batch: int
    torch_version: str
    threads: int
    repeats: int
    step: Timed
    spreads: tuple[LayerSpread, ...]
    shared: tuple[SharedParameter, ...] = ()
    links: tuple[Link, ...] = ()
    sums: tuple[Sum, ...] = ()
    loading_s: float = 0.0
    overhead_s: float = 0.0
    verified_s: float = 0.0
    notes: tuple[str, ...] = ()
    data_parallel_s: float | None = None

    @property
    def coverage(self) -> float:
        """The sum over layers as a share of the whole step."""
        return self.graph.compute_s() / self.step.seconds

    def doubts(self) -> str:
        """Why the profile is unreliable, as text; empty if the numbers are consistent."""
        step, covered = self.step, self.coverage
        reasons = []
        if not _PLAUSIBLE[0] <= covered <= _PLAUSIBLE[1]:
            reasons.append(f"the layers add up to {covered:.0%} of the step that was measured as a whole")
        if step.spread_s > _UNSTEADY * step.seconds:
            reasons.append(
                f"measured steps of {show_seconds(step.seconds)} spread {show_seconds(step.spread_s)}"
            )
        if not reasons:
            return ""
        return (
            f"{' and '.join(reasons)}: the machine was busy with something else, so a plan from this is a "
            f"guess; measure again when it is quiet, with more repeats (--repeats 20)"
        )

    def loaded_graph(self) -> Graph:
        """The graph with the loading time added to the first layer, as in the first stage."""
        first, *rest = self.graph.nodes
        first = replace(first, forward_s=first.forward_s + self.loading_s)
        return replace(self.graph, nodes=(first, *rest))

    def with_links(self, links: tuple[Link, ...], sums: tuple[Sum, ...] = ()) -> Profile:
        return replace(self, links=links, sums=sums)


def save_profile(profile: Profile, path: Path) -> None:
    """Write `profile` as a versioned JSON file."""
    artefact.save(profile, path, KIND, VERSION)


def load_profile(path: Path) -> Profile:
    """Load the profile at `path`; raises if it contains impossible numbers."""
    try:
        profile = artefact.load(Profile, path, KIND, VERSION)
    except GraphError as failure:
        raise GraphError(f"{path}: {failure}") from None
    _check(profile, path)
    return profile


def _check(profile: Profile, path: Path) -> None:
    def expect(holds: bool, name: str, found: Any, expected: str) -> None:
        if not holds:
            raise ArtefactError(f"{path}: {name}: found {shown(found)}, expected {expected}")

    expect(bool(profile.graph.nodes), "graph.nodes", [], "at least one layer")
    for name in ("batch", "threads", "repeats"):
        expect(1 <= getattr(profile, name) < 1 << 53, name, getattr(profile, name), "at least 1")
    expect(0 < profile.step.seconds <= MOST, "step.seconds", profile.step.seconds, "more than 0")
    for spread in profile.spreads:
        seconds = (spread.forward_s, spread.backward_s)
        expect(0 <= min(seconds) <= max(seconds) <= MOST, "spreads", seconds, "seconds, 0 or more")
    for name in ("loading_s", "overhead_s", "verified_s"):
        expect(0 <= getattr(profile, name) <= MOST, name, getattr(profile, name), "seconds, 0 or more")
    tried_s = profile.data_parallel_s
    expect(tried_s is None or 0 < tried_s <= MOST, "data_parallel_s", tried_s, "more than 0, or null")
    for number, link in enumerate(profile.links):
        ends = (link.source, link.target)
        expect(min(ends) >= 0 and max(ends) < 1 << 20, f"links[{number}]", ends, "two workers, from 0 on")
    speeds = [(f"links[{i}]", link.bytes_per_s, link.latency_s) for i, link in enumerate(profile.links)]
    speeds += [(f"sums[{i}]", each.bytes_per_s, each.latency_s) for i, each in enumerate(profile.sums)]
    for where, bytes_per_s, latency_s in speeds:
        expect(1e-9 <= bytes_per_s <= MOST, f"{where}.bytes_per_s", bytes_per_s, "more than 0")
        expect(0 <= latency_s <= MOST, f"{where}.latency_s", latency_s, "seconds, 0 or more")


def profile_model(
    model: nn.Module,
    inputs: Inputs | Tensor,
    loss: Loss | None = None,
    *,
    device: torch.device | str | None = None,
    warmup: int = 2,
    repeats: int = 5,
    least_s: float = 0.0,
    name: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Times and bytes of each layer of `model`, in its current mode, for the batch `inputs`.

    `inputs` are the arguments of the model's forward: a tuple, a dict for keywords, or one tensor. `loss`
    maps the model's output to a scalar; the default is the output's `loss`, or the mean of its tensors. The
    model runs on `device` (default: its current device), and its buffers, gradients, device and random state
    are restored. Steps by layers and whole steps alternate, so that changes of the machine's speed affect
    both: `warmup` steps that are not counted, then `repeats`, or more until `least_s` seconds have passed.
    `name` is the model's in the profile; `on_progress` is called with the steps done and their number.

    Examples:
        ```python
        profile = plait.profile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8), repeats=2)
        profile.graph
        ```
    """
    if warmup < 0 or repeats < 1:
        raise InputError(f"found {warmup} warm-up steps and {repeats} repeats; expected at least 0 and 1")
    if not isinstance(model, nn.Module):
        raise InputError(f"profile: found {shown(model)} as the model, expected a torch.nn.Module")
    total, done = 1 + warmup + repeats, 0

    def progress() -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, total)

    arguments = _arguments(inputs)
    loss = _scalar_loss(loss) if loss is not None else default_loss
    with _at_home(model, device) as target:
        arguments = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(target), arguments)
        traced = trace(model, arguments, evaluation=False)
        session = _Session(traced, arguments, loss, target)
        if target.type == "cuda":
            session.measure()  # one-time allocations of libraries would count for the first layer
        weights = weigh(traced, session.layered, session.tensors, session.loss, target)
        progress()
        steps: list[tuple[StepTimes, float]] = []
        end = time.perf_counter() + least_s
        while len(steps) < warmup + repeats or time.perf_counter() < end:
            steps.append(session.measure())
            progress()
    return _profile(traced, session, weights, steps[warmup:], name or type(model).__name__)


def _arguments(inputs: Inputs | Tensor) -> Inputs:
    if isinstance(inputs, Tensor):
        return (inputs,)
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return tuple(inputs)
    raise InputError(
        f"profile: found {shown(inputs)} as inputs, expected a tensor, or a tuple or dict of the model's "
        f"arguments"
    )


def _scalar_loss(loss: Loss) -> Loss:
    """`loss`, checked to take only the model's output and to return a scalar."""
    expected = "expected a function of the model's output alone, such as lambda output: loss(output, target)"
    name = getattr(loss, "__name__", type(loss).__name__)
    if not callable(loss):
        raise InputError(f"profile: found {shown(loss)} as the loss, {expected}")
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):  # some builtins have no signature
        signature = None
    try:
        if signature is not None:
            signature.bind(None)
    except TypeError as failure:
        raise InputError(f"profile: the loss {name} cannot be called: {failure}; {expected}") from None

    def checked(output: Any) -> Tensor:
        value = loss(output)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
            raise InputError(f"profile: the loss {name} gave {shape}, expected one number, such as its mean")
        return value

    return checked


def default_loss(output: Any) -> Tensor:
    """A scalar for backward: the output's `loss`, or the mean of its tensors that require a gradient."""
    model_loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(model_loss, Tensor):
        return model_loss
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not tensors:
        raise InputError("the model returned no tensor that requires a gradient; expected one for backward")
    return torch.stack([tensor.float().mean() for tensor in tensors]).sum()


class _Session:
    """One model with its inputs on one device, for repeated measurements."""

    def __init__(self, traced: TracedModel, inputs: Inputs, loss: Loss, device: torch.device) -> None:
        self.traced = traced
        self.layered = LayeredModel(traced)
        self.tensors = traced.order_inputs(inputs)
        self.device = device
        self._args, self._kwargs = ((), dict(inputs)) if isinstance(inputs, dict) else (tuple(inputs), {})
        self.loss = loss
        self._clock = Clock(device)
        self._measured = 0
        self._head_start_s = 0.0

    def measure(self) -> tuple[StepTimes, float]:
        self._drop_gradients()
        layers = time_layers(self.layered, self.tensors, self.loss, self._clock, self._head_start_s)
        self._drop_gradients()
        whole_s, host_s = time_whole(self.traced.model, self._args, self._kwargs, self.loss, self._clock)
        self._drop_gradients()
        self._measured += 1
        if self._measured == 2:  # the first is cold; later ones may include waiting for a sleeping GPU
            self._head_start_s = max(0.0, layers.host_s - host_s)
        return layers, whole_s

    def _drop_gradients(self) -> None:
        for parameter in self.traced.model.parameters():
            parameter.grad = None


@contextmanager
def _at_home(model: nn.Module, device: torch.device | str | None) -> Iterator[torch.device]:
    """Context with the model on the device to measure on; afterwards the model is restored."""
    first = next(iter(model.parameters()), None)
    if first is None:
        raise InputError(f"{type(model).__name__} has no parameters; expected a model that can be trained")
    home = first.device
    target = home if device is None else torch.device(device)
    gradients = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None  # it would not be moved with the parameter
    buffers = [buffer.detach().clone() for buffer in model.buffers()]
    devices = [target] if target.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            model.to(target)
            yield target
    finally:
        model.to(home)
        for buffer, before in zip(model.buffers(), buffers):
            buffer.detach().copy_(before)
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.grad = gradient


def _profile(
    traced: TracedModel, session: _Session, weights: Weights, steps: list[tuple[StepTimes, float]], name: str
) -> Profile:
    ids = [layer.id for layer in traced.layers]
    forward = [Timed.of(samples) for samples in zip(*(times.forward_s for times, _ in steps))]
    backward = [Timed.of(samples) for samples in zip(*(times.backward_s for times, _ in steps))]
    floating = [p.dtype for p in traced.model.parameters() if p.is_floating_point()]
    return Profile(
        model=name,
        graph=_graph(traced, weights, forward, backward),
        device=describe_device(session.device),
        dtype=str(floating[0]).removeprefix("torch."),
        batch=session.tensors[0].shape[0] if session.tensors[0].dim() else 1,
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
        repeats=len(steps),
        step=Timed.of([whole for _, whole in steps]),
        spreads=tuple(LayerSpread(id, f.spread_s, b.spread_s) for id, f, b in zip(ids, forward, backward)),
        shared=shared_parameters(traced),
    )


def describe_device(device: torch.device) -> str:
    """A description of the device, such as `cuda: NVIDIA H200`."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"{device.type}: {platform.processor() or platform.machine()}"


def _graph(traced: TracedModel, weights: Weights, forward: list[Timed], backward: list[Timed]) -> Graph:
    parameter_bytes = {name: _size(p) for name, p in traced.model.named_parameters()}
    buffer_bytes = {name: _size(b) for name, b in traced.model.named_buffers()}
    nodes, edges = [], []
    for i, layer in enumerate(traced.layers):
        boundary = traced.boundary([layer])
        nodes.append(
            Node(
                id=layer.id,
                description=layer.description,
                forward_s=forward[i].seconds,
                backward_s=backward[i].seconds,
                output_bytes=sum(weights.value_bytes[value] for value in boundary.outputs),
                # A tied parameter is attributed to the first layer that uses it.
                parameter_bytes=sum(parameter_bytes.pop(key, 0) for key in layer.parameters),
                buffer_bytes=sum(buffer_bytes.pop(key, 0) for key in layer.buffers),
                activation_bytes=weights.kept_bytes[i],
                working_bytes=weights.working_bytes[i],
                adding_bytes=weights.adding_bytes[i],
            )
        )
        sources = [(traced.layer_of.get(value), value) for value in boundary.inputs]
        edges += [
            Edge(source, layer.id, weights.value_bytes[value], value, weights.keepers.get(value) == i)
            for source, value in sources
            if source
        ]
    ties = tuple(Tie(shared.bytes, shared.layers) for shared in shared_parameters(traced))
    return Graph(tuple(nodes), tuple(edges), ties)


def shared_parameters(traced: TracedModel) -> tuple[SharedParameter, ...]:
    """The parameters that several layers use: tied ones, and those of a module called twice."""
    users: dict[str, list[str]] = {}
    for layer in traced.layers:
        for name in layer.parameters:
            users.setdefault(name, []).append(layer.id)
    sizes = {name: _size(parameter) for name, parameter in traced.model.named_parameters()}
    return tuple(SharedParameter(n, sizes[n], tuple(ids)) for n, ids in users.items() if len(ids) > 1)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
