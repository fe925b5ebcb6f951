"""The models of the fusion experiment, and a training step of each in every mode.

A step of all modes does the same work: forward, loss, backward and Adam, in bfloat16 on a GPU and in float32
on a CPU. It is written once, for one trial and for many: see `Trials`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.fusion import FusedOptimizer, fuse
from plait.workloads.bert import bert_medium
from plait.workloads.dcgan import discriminator, discriminator_tiny, generator, generator_tiny
from plait.workloads.mlp import mlp, mlp_tiny
from plait.workloads.mobilenet import mobilenet_v3_large
from plait.workloads.pointnet import pointnet_classifier, pointnet_segmenter, pointnet_tiny
from plait.workloads.resnet import resnet18, resnet18_tiny
from plait.workloads.transformer import transformer, transformer_tiny

Step = Callable[[], Any]
# A step as a function of its inputs, such inputs, and what clears its gradients.
StepParts = tuple[Callable[..., Any], list[Tensor], Step]
Loss = Callable[[Tensor, Any], Tensor]
DCGAN = "dcgan"


class Trials:
    """The models of one trial, or of several at once, with an optimizer and the parameters of each."""

    def __init__(
        self, models: Sequence[Any], optimizers: Sequence[Any], parameters: Sequence[Iterable[Tensor]]
    ) -> None:
        self.models, self.optimizers = models, optimizers
        self.parameters = [list(each) for each in parameters]

    def loss_of(self, which: int, loss: Loss, x: Tensor, target: Any) -> Tensor:
        """The loss of each trial, of the model in the place `which`."""
        return loss(self.models[which](x), target)

    def backward(self, losses: Tensor) -> None:
        losses.sum().backward()


def _classification_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2).float(), target.flatten())


def _classify(trials: Trials, x: Tensor, y: Tensor) -> Tensor:
    (optimizer,) = trials.optimizers
    optimizer.zero_grad()
    with precision(x.device):
        losses = trials.loss_of(0, _classification_loss, x, y)
    trials.backward(losses)
    optimizer.step()
    return losses


def _gan_loss(scores: Tensor, target: float) -> Tensor:
    wanted = torch.full_like(scores, target, dtype=torch.float32)
    return F.binary_cross_entropy_with_logits(scores.float(), wanted)


def _imitate(trials: Trials, real: Tensor, z: Tensor) -> Tensor:
    """A step of a GAN: the discriminator on real and made images, then the generator."""
    maker, judge = trials.optimizers
    judge.zero_grad()
    with precision(real.device):
        made = trials.models[0](z)
        losses = trials.loss_of(1, _gan_loss, real, 1.0) + trials.loss_of(1, _gan_loss, made.detach(), 0.0)
    trials.backward(losses)
    judge.step()
    maker.zero_grad()
    with precision(real.device), _without_gradients(trials.parameters[1]):
        trials.backward(trials.loss_of(1, _gan_loss, made, 1.0))
    maker.step()
    return losses


@contextmanager
def _without_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Within, nothing computes gradients of `parameters`: the generator's step needs none of its judge."""
    held = list(parameters)
    for parameter in held:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)


@dataclass(frozen=True)
class Case:
    """The models of a trial, its batch, its step, and the options of Adam."""

    makes: tuple[Callable[[], nn.Module], ...]
    data: Callable[[], tuple[Tensor, ...]]
    train: Callable[..., Tensor] = _classify
    adam: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    # Whether each of several fused trials has a learning rate of its own.
    own_rates: bool = True

    @property
    def is_gan(self) -> bool:
        return len(self.makes) > 1

    def rates(self, width: int) -> Any:
        """The learning rate of all of `width` trials, or of each."""
        rate = self.adam["lr"]
        return [rate * (1 + number) for number in range(width)] if self.own_rates else rate


def _of(make: Callable[[], nn.Module], data: Callable[[], tuple[Tensor, ...]]) -> Case:
    return Case((make,), data)


def _gan(
    makes: tuple[Callable[[], nn.Module], ...], batch: int, image: tuple[int, int, int], noise: int
) -> Case:
    adam = {"lr": 2e-4, "betas": (0.5, 0.999)}
    data = lambda: (torch.randn(batch, *image), torch.randn(batch, noise, 1, 1))  # noqa: E731
    return Case(makes, data, _imitate, adam, own_rates=False)


def _points(batch: int, points: int, classes: int, each: bool = False) -> Callable[[], tuple[Tensor, Tensor]]:
    target = (batch, points) if each else (batch,)
    return lambda: (torch.randn(batch, 3, points), torch.randint(0, classes, target))


def _images(batch: int, channels: int, size: int, classes: int = 10) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(batch, channels, size, size), torch.randint(0, classes, (batch,)))


def _tokens(batch: int, length: int, vocabulary: int) -> Callable[[], tuple[Tensor, Tensor]]:
    shape = (batch, length)
    return lambda: (torch.randint(0, vocabulary, shape), torch.randint(0, vocabulary, shape))


def _small_cnn() -> nn.Module:
    """Three convolutions with batch norm, as small as the models people sweep on a CPU."""
    layers: list[nn.Module] = []
    for channels, width in ((1, 8), (8, 16), (16, 16)):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))


CPU_CASES = {
    "mlp": _of(mlp_tiny, _images(32, 1, 8)),
    "lenet-300-100": _of(mlp, _images(32, 1, 28)),
    "transformer": _of(lambda: transformer_tiny(64), _tokens(4, 8, 64)),
    "cnn": _of(_small_cnn, _images(8, 1, 8)),
    "resnet18-tiny": _of(resnet18_tiny, _images(8, 1, 8)),
    "pointnet-tiny": _of(pointnet_tiny, _points(4, 32, 10)),
    DCGAN: _gan((generator_tiny, discriminator_tiny), 8, (1, 16, 16), 8),
}

GPU_CASES = {
    "pointnet-cls": _of(lambda: pointnet_classifier(40), _points(32, 2500, 40)),
    "pointnet-seg": _of(lambda: pointnet_segmenter(50), _points(32, 2500, 50, each=True)),
    "resnet18": _of(lambda: resnet18(10), _images(128, 3, 32)),
    "mobilenet-v3-large": _of(lambda: mobilenet_v3_large(10), _images(128, 3, 32)),
    "transformer": _of(lambda: transformer(10_000, 256, 6, 8, 512, dropout=0.0), _tokens(16, 64, 10_000)),
    "bert-medium": _of(lambda: bert_medium(dropout=0.0), _tokens(8, 128, 30_522)),
    DCGAN: _gan((generator, discriminator), 64, (3, 64, 64), 100),
}


def cases_on(device: torch.device) -> Mapping[str, Case]:
    """The models that are measured there, by name."""
    return GPU_CASES if device.type == "cuda" else CPU_CASES


def precision(device: torch.device) -> AbstractContextManager[None]:
    """bfloat16 by autocast on a GPU, nothing on a CPU."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU all modes get one thread: a fused step could use more where single trials cannot."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds_of(step: Step, device: torch.device, inner: int = 5) -> float:
    """Seconds a step takes, the mean of a few after one that warms up."""
    step()
    finish(device)
    start = time.perf_counter()
    for _ in range(inner):
        step()
    finish(device)
    return (time.perf_counter() - start) / inner


def finish(device: torch.device) -> None:
    """Wait for the device to have done all it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Lone(Trials):
    """One trial, as a plain loop has it."""

    def __init__(
        self, case: Case, device: torch.device, compiled: bool, channels_last: bool, mode: str = "default"
    ) -> None:
        on_gpu = device.type == "cuda"
        modules = [make().to(device) for make in case.makes]
        if channels_last:
            modules = [each.to(memory_format=torch.channels_last) for each in modules]  # type: ignore[call-overload]
        # Torch's one-kernel Adam is the fastest plain one on a GPU; on a CPU its default is what people run.
        options = {**case.adam, "fused": on_gpu, "capturable": on_gpu and compiled}
        optimizers = [torch.optim.Adam(each.parameters(), **options) for each in modules]
        called = [torch.compile(each, mode=mode) if compiled else each for each in modules]
        super().__init__(called, optimizers, [each.parameters() for each in modules])

    def backward(self, losses: Tensor) -> None:
        losses.backward()


class _Fused(Trials):
    """Trials as fused arrays, one of each model."""

    def __init__(self, case: Case, device: torch.device, width: int, unfused: Sequence[str]) -> None:
        with device:  # where their first weights are drawn fastest
            arrays = [
                fuse([make() for _ in range(width)], unfused=unfused, verify=False) for make in case.makes
            ]
        if device.type == "cuda":
            for fused in arrays:
                fused.channels_last()
        options = {**case.adam, "lr": case.rates(width)}
        optimizers = [FusedOptimizer(each, "adam", **options) for each in arrays]
        super().__init__(arrays, optimizers, [each.parameters() for each in arrays])

    def loss_of(self, which: int, loss: Loss, x: Tensor, target: Any) -> Tensor:
        fused = self.models[which]
        losses: Tensor = fused.map(loss, fused(x), target)
        return losses


class _Mapped(Trials):
    """Trials by torch.func.vmap over stacked weights."""

    def __init__(self, case: Case, device: torch.device, width: int) -> None:
        made = [[make().to(device) for _ in range(width)] for make in case.makes]
        self._stacked = [torch.func.stack_module_state(each) for each in made]
        self._called = [functools.partial(torch.func.functional_call, each[0]) for each in made]
        parameters = [list(own.values()) for own, _ in self._stacked]
        optimizers = [torch.optim.Adam(own, **case.adam, fused=device.type == "cuda") for own in parameters]
        mapped = [
            functools.partial(torch.func.vmap(call), weights)
            for call, weights in zip(self._called, self._stacked)
        ]
        super().__init__(mapped, optimizers, parameters)

    def loss_of(self, which: int, loss: Loss, x: Tensor, target: Any) -> Tensor:
        def one(weights: Any, own: Tensor, wanted: Any) -> Tensor:
            return loss(self._called[which](weights, own), wanted)

        dims = (0, 0, 0 if isinstance(target, Tensor) else None)
        mapped = torch.func.vmap(one, dims, randomness="different")
        losses: Tensor = mapped(self._stacked[which], x, target)
        return losses


def serial_step(case: Case, device: torch.device, channels_last: bool = False) -> Step:
    """One step of one trial, as a plain loop has it."""
    trials, inputs = _Lone(case, device, False, channels_last), _lone_data(case, device, channels_last)
    return lambda: case.train(trials, *inputs)


def compiled_step(
    case: Case, device: torch.device, channels_last: bool = False, mode: str = "default"
) -> StepParts:
    """The same step by torch.compile in one of its modes."""
    trials = _Lone(case, device, True, channels_last, mode)
    return step_parts(case, trials, _lone_data(case, device, channels_last))


def _lone_data(case: Case, device: torch.device, channels_last: bool) -> list[Tensor]:
    inputs = [part.to(device) for part in case.data()]
    if channels_last:
        inputs[0] = inputs[0].contiguous(memory_format=torch.channels_last)
    return inputs


def fused_step(case: Case, device: torch.device, width: int, unfused: Sequence[str] = ()) -> StepParts:
    """A step of the fused array, whose modules named in `unfused` run trial by trial."""
    return step_parts(case, _Fused(case, device, width, unfused), stacked_data(case, device, width))


def vmap_step(case: Case, device: torch.device, width: int) -> Step:
    """The same trials by torch.func.vmap over stacked weights."""
    trials, inputs = _Mapped(case, device, width), stacked_data(case, device, width)
    return lambda: case.train(trials, *inputs)


def step_parts(case: Case, trials: Trials, inputs: list[Tensor]) -> StepParts:
    """A step of `trials` as a function of `inputs`."""

    def clear() -> None:
        for optimizer in trials.optimizers:
            optimizer.zero_grad()

    return lambda *given: case.train(trials, *given).detach(), inputs, clear


def stacked_data(case: Case, device: torch.device, width: int) -> list[Tensor]:
    """A batch of each trial, trials first."""
    return [torch.stack(parts).to(device) for parts in zip(*(case.data() for _ in range(width)))]
