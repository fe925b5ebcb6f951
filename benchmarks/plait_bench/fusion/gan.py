"""DCGAN's step in every mode: a generator and a discriminator, each with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.fusion import FusedOptimizer, fuse
from plait.workloads.dcgan import discriminator, discriminator_tiny, generator, generator_tiny
from plait_bench.fusion.cases import Step, precision


def gan_parts(tiny: bool) -> tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...], int]:
    """Makers of generator and discriminator, the shape of images, and how much noise they begin with."""
    if tiny:
        return generator_tiny, discriminator_tiny, (8, 1, 16, 16), 8
    return generator, discriminator, (64, 3, 64, 64), 100


def gan_loss(scores: Tensor, target: float) -> Tensor:
    wanted = torch.full_like(scores, target, dtype=torch.float32)
    return F.binary_cross_entropy_with_logits(scores.float(), wanted)


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


def gan_serial_step(device: torch.device, tiny: bool = False) -> Step:
    """One step of one DCGAN: the discriminator on real and made images, then the generator."""
    step, inputs, _ = _lone_step(device, tiny, compiled=False)
    return lambda: step(*inputs)


def gan_compiled_step(
    device: torch.device, tiny: bool = False
) -> tuple[Callable[..., Any], list[Tensor], Step]:
    """The same step by torch.compile, as a function of its inputs, and what clears its gradients."""
    return _lone_step(device, tiny, compiled=True)


def _lone_step(
    device: torch.device, tiny: bool, compiled: bool
) -> tuple[Callable[..., Any], list[Tensor], Step]:
    make_generator, make_discriminator, shape, noise = gan_parts(tiny)
    on_gpu = device.type == "cuda"
    modules = [make().to(device) for make in (make_generator, make_discriminator)]
    optimizers = [
        torch.optim.Adam(
            m.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=on_gpu, capturable=on_gpu and compiled
        )
        for m in modules
    ]
    maker, judge = (torch.compile(module) if compiled else module for module in modules)

    def step(real: Tensor, z: Tensor) -> Tensor:
        optimizers[1].zero_grad()
        with precision(device):
            made = maker(z)
            loss = gan_loss(judge(real), 1.0) + gan_loss(judge(made.detach()), 0.0)
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        with precision(device), _without_gradients(modules[1].parameters()):
            loss = gan_loss(judge(made), 1.0)
        loss.backward()
        optimizers[0].step()
        return loss.detach()

    def clear() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()

    inputs = [torch.randn(shape, device=device), torch.randn(shape[0], noise, 1, 1, device=device)]
    return step, inputs, clear


def gan_fused_step(
    device: torch.device, width: int, tiny: bool = False
) -> tuple[Callable[..., Any], list[Tensor], Step]:
    """The same step for a fused array of generators and one of discriminators."""
    make_generator, make_discriminator, shape, noise = gan_parts(tiny)
    with device:
        makers = fuse([make_generator() for _ in range(width)], verify=False)
        judges = fuse([make_discriminator() for _ in range(width)], verify=False)
    if device.type == "cuda":
        makers.channels_last()
        judges.channels_last()
    maker_optimizer, judge_optimizer = (
        FusedOptimizer(fused, "adam", lr=2e-4, betas=(0.5, 0.999)) for fused in (makers, judges)
    )

    def step(real: Tensor, z: Tensor) -> Tensor:
        judge_optimizer.zero_grad()
        with precision(device):
            made = makers(z)
            losses: Tensor = judges.map(gan_loss, judges(real), 1.0)
            losses = losses + judges.map(gan_loss, judges(made.detach()), 0.0)
        losses.sum().backward()
        judge_optimizer.step()
        maker_optimizer.zero_grad()
        with precision(device), _without_gradients(judges.parameters()):
            judges.map(gan_loss, judges(made), 1.0).sum().backward()
        maker_optimizer.step()
        return losses.detach()

    def clear() -> None:
        maker_optimizer.zero_grad()
        judge_optimizer.zero_grad()

    inputs = [
        torch.randn(width, *shape, device=device),
        torch.randn(width, shape[0], noise, 1, 1, device=device),
    ]
    return step, inputs, clear


def gan_vmap_step(device: torch.device, width: int, tiny: bool = False) -> Step:
    """The same step by torch.func.vmap over stacked weights."""
    make_generator, make_discriminator, shape, noise = gan_parts(tiny)
    sides = [[make().to(device) for _ in range(width)] for make in (make_generator, make_discriminator)]
    stacked = [torch.func.stack_module_state(models) for models in sides]
    optimizers = [
        torch.optim.Adam(list(parameters.values()), lr=2e-4, betas=(0.5, 0.999), fused=device.type == "cuda")
        for parameters, _ in stacked
    ]
    real = torch.randn(width, *shape, device=device)
    z = torch.randn(width, shape[0], noise, 1, 1, device=device)

    def run(side: int, x: Tensor) -> Tensor:
        def one(parameters: Any, buffers: Any, own: Tensor) -> Tensor:
            found: Tensor = torch.func.functional_call(sides[side][0], (parameters, buffers), (own,))
            return found

        found: Tensor = torch.func.vmap(one)(*stacked[side], x)
        return found

    def losses(scores: Tensor, target: float) -> Tensor:
        found: Tensor = torch.func.vmap(lambda own: gan_loss(own, target))(scores)
        return found.sum()

    def step() -> None:
        optimizers[1].zero_grad()
        with precision(device):
            made = run(0, z)
            loss = losses(run(1, real), 1.0) + losses(run(1, made.detach()), 0.0)
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        with precision(device), _without_gradients(stacked[1][0].values()):
            loss = losses(run(1, made), 1.0)
        loss.backward()
        optimizers[0].step()

    return step
