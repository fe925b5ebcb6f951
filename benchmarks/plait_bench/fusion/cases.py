"""The models of the fusion experiment, and a training step of each in every mode.

A step of all modes does the same work: forward, loss, backward and Adam, in bfloat16 on a GPU and in float32
on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.fusion import FusedOptimizer, fuse
from plait.workloads.bert import bert_medium
from plait.workloads.mlp import mlp, mlp_tiny
from plait.workloads.mobilenet import mobilenet_v3_large
from plait.workloads.pointnet import pointnet_classifier, pointnet_segmenter, pointnet_tiny
from plait.workloads.resnet import resnet18, resnet18_tiny
from plait.workloads.transformer import transformer, transformer_tiny

Step = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A model, its batch of inputs and targets for one trial, and its loss."""

    name: str
    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, -2).float(), target.flatten())


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
    "mlp": Case("mlp", mlp_tiny, _images(32, 1, 8)),
    "lenet-300-100": Case("lenet-300-100", mlp, _images(32, 1, 28)),
    "transformer": Case("transformer", lambda: transformer_tiny(64), _tokens(4, 8, 64)),
    "cnn": Case("cnn", _small_cnn, _images(8, 1, 8)),
    "resnet18-tiny": Case("resnet18-tiny", resnet18_tiny, _images(8, 1, 8)),
    "pointnet-tiny": Case(
        "pointnet-tiny", pointnet_tiny, lambda: (torch.randn(4, 3, 32), torch.randint(0, 10, (4,)))
    ),
}

GPU_CASES = {
    "pointnet-cls": Case(
        "pointnet-cls",
        lambda: pointnet_classifier(40),
        lambda: (torch.randn(32, 3, 2500), torch.randint(0, 40, (32,))),
    ),
    "pointnet-seg": Case(
        "pointnet-seg",
        lambda: pointnet_segmenter(50),
        lambda: (torch.randn(32, 3, 2500), torch.randint(0, 50, (32, 2500))),
    ),
    "resnet18": Case("resnet18", lambda: resnet18(10), _images(128, 3, 32)),
    "mobilenet-v3-large": Case("mobilenet-v3-large", lambda: mobilenet_v3_large(10), _images(128, 3, 32)),
    "transformer": Case(
        "transformer",
        lambda: transformer(10_000, 256, 6, 8, 512, dropout=0.0),
        _tokens(16, 64, 10_000),
    ),
    "bert-medium": Case("bert-medium", lambda: bert_medium(dropout=0.0), _tokens(8, 128, 30_522)),
}


def precision(device: torch.device) -> AbstractContextManager[None]:
    """bfloat16 by autocast on a GPU, nothing on a CPU."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()


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


def serial_step(case: Case, device: torch.device, channels_last: bool = False) -> Step:
    """One step of one trial, as a plain loop has it."""
    model = case.make().to(device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # Torch's one-kernel Adam is the fastest plain one on a GPU; on a CPU its default is what people run.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=device.type == "cuda")
    x, y = (part.to(device) for part in case.data())
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x

    def step() -> None:
        optimizer.zero_grad()
        with precision(device):
            loss = case.loss(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def compiled_step(case: Case, device: torch.device) -> tuple[Callable[..., Any], list[Tensor], Step]:
    """One step of one trial by torch.compile: of its inputs, such inputs, and what clears its gradients."""
    model = case.make().to(device)
    compiled = torch.compile(model)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=on_gpu, capturable=on_gpu)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with precision(device):
            loss = case.loss(compiled(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [part.to(device) for part in case.data()], optimizer.zero_grad


def stacked_data(case: Case, device: torch.device, width: int) -> list[Tensor]:
    return [torch.stack(parts).to(device) for parts in zip(*(case.data() for _ in range(width)))]


def fused_step(case: Case, device: torch.device, width: int) -> tuple[Callable[..., Any], list[Tensor], Step]:
    """A step of the fused array as a function of its inputs, such inputs, and what clears its gradients."""
    with device:  # where their first weights are drawn fastest
        fused = fuse([case.make() for _ in range(width)], verify=False)
    if device.type == "cuda":
        fused.channels_last()
    optimizer = FusedOptimizer(fused, "adam", lr=[1e-3 * (1 + number) for number in range(width)])

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with precision(device):
            losses: Tensor = fused.map(case.loss, fused(x), y)
        losses.sum().backward()
        optimizer.step()
        return losses.detach()

    return step, stacked_data(case, device, width), optimizer.zero_grad


def vmap_step(case: Case, device: torch.device, width: int) -> Step:
    """The same trials by torch.func.vmap over stacked weights."""
    models = [case.make().to(device) for _ in range(width)]
    parameters, buffers = torch.func.stack_module_state(models)
    template = models[0]
    optimizer = torch.optim.Adam(list(parameters.values()), lr=1e-3, fused=device.type == "cuda")
    x, y = stacked_data(case, device, width)

    def one(own: Any, own_buffers: Any, inputs: Tensor, target: Tensor) -> Tensor:
        return case.loss(torch.func.functional_call(template, (own, own_buffers), (inputs,)), target)

    def step() -> None:
        optimizer.zero_grad()
        with precision(device):
            losses = torch.func.vmap(one, randomness="different")(parameters, buffers, x, y)
        losses.sum().backward()
        optimizer.step()

    return step
