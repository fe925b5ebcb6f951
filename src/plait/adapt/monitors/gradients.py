"""Gradient noise scale and variance in a user's training loop.

Each step must provide the gradient of a part of the batch besides that of the whole. Three kinds of loops do:

- Gradient accumulation, also on one worker: call `after_microbatch` after each backward pass but the last,
  and `update` before `optimizer.step()`. Each microbatch's loss is weighted by its share of the batch.
- Several workers that average gradients: `before_average` gives three numbers to be summed over the workers
  along with the gradients, and `update` takes the sums.
- torch's DistributedDataParallel or fully_shard, or plait's DataParallel: pass it as the model. The numbers
  are sent with the gradients, or after them, and only `update` must be called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from plait.adapt.monitors.gradient_noise import DECAY, GradientAverages, GradientNorms
from plait.adapt.monitors.sharded_norms import ShardedNorms, ShardsGradients
from plait.adapt.monitors.squared_norms import gradients, squared_norm
from plait.core.errors import InputError
from plait.data.call_model import fused_parts


class PartNorms(Protocol):
    """The squared norms of the gradients of the parts of a batch, which a model sums over the workers."""

    def take(self, samples: int) -> Tensor:
        """The sums of `before_average` for the last backward pass, of a batch of `samples`."""


@runtime_checkable
class MeasuresParts(Protocol):
    """A model whose backward pass sums gradients over the workers, and the squared norms of their parts."""

    def measure_parts(self) -> PartNorms: ...


class GradientVariance:
    """The variance of one sample's gradient (the trace of its covariance), as a moving average over steps.

    `model` is a module, also one in `plait.DataParallel`, DistributedDataParallel or after `fully_shard`, or
    parameters; `decay` is that of the moving average.

    Examples:
        ```py
        variance = plait.GradientVariance(model)  # a plait.DataParallel
        ...
        variance.update(samples)  # of all workers, before optimizer.step()
        variance.value
        ```
    """

    def __init__(self, model: nn.Module | Iterable[Tensor], decay: float = DECAY) -> None:
        if isinstance(model, torch.optim.Optimizer):
            raise InputError(f"{type(self).__name__}: found an optimizer, expected a model or its parameters")
        if isinstance(model, nn.Module) and fused_parts(model):
            raise InputError(
                f"{type(self).__name__}: found a fused module, expected one model: its trials have separate "
                f"gradients, which a sweep measures where its job has `adapt`"
            )
        parameters = model.parameters() if isinstance(model, nn.Module) else model
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.averages = GradientAverages(decay)
        # In the current step: the squared norm of the first microbatches' gradient, and their samples.
        self._part: tuple[Tensor, int] | None = None
        self._sent = _norms_of(model)
        # On GPUs, the numbers of the previous step, which have been copied to the host by now.
        self._arriving: list[Any] | None = None

    @property
    def value(self) -> float | None:
        """The moving average; None before the first complete step."""
        return self.averages.variance

    @property
    def note(self) -> str | None:
        """A remark on `value`, or None."""
        return self.averages.note

    def after_microbatch(self, samples: int) -> None:
        """Measure the gradient so far, after the backward pass of a microbatch of `samples` samples.

        Only the first call in a step matters: its gradient is available without a copy.
        """
        if self._part is None:
            self._part = squared_norm(gradients(self._parameters)), samples

    def before_average(self, samples: int) -> Tensor:
        """Three numbers to sum over all workers; `.grad` is the mean over this worker's `samples`."""
        norm = squared_norm(gradients(self._parameters)) * samples
        rest = torch.tensor([float(samples), float(samples > 0)], dtype=torch.float64, device=norm.device)
        return torch.cat([norm.reshape(1), rest])

    def update(self, samples: int, sums: Tensor | None = None) -> None:
        """Add a step, whose whole gradient is in `.grad`, of a batch of `samples` over all workers.

        `sums` are those of `before_average`. On GPUs the numbers are used one step later, to avoid waiting.
        """
        whole = squared_norm(gradients(self._parameters))
        if self._sent is not None:
            sums = self._sent.take(samples)
        if sums is not None:
            numbers: list[Any] = [sums[0] / samples, sums[1] / samples, sums[2], whole]
        elif self._part is not None:
            share = self._part[1] / samples
            numbers = [self._part[0] / share, share, 1.0, whole]
        else:
            raise InputError(
                f"{type(self).__name__}.update: no part of this step's gradient was seen; call "
                f"after_microbatch after the first of at least two backward passes, or give the sums of "
                f"before_average"
            )
        self._part = None
        self._take([*numbers, float(samples)])

    def _take(self, numbers: list[Any]) -> None:
        if isinstance(numbers[3], Tensor) and numbers[3].is_cuda:
            numbers, self._arriving = self._arriving or [], numbers
        if numbers:
            self.averages.update(GradientNorms(*(float(number) for number in numbers)))


class GradientNoiseScale(GradientVariance):
    """The gradient noise scale S/|G|² in samples: about the largest batch size that is still efficient.

    `model` and `decay` are as for `plait.GradientVariance`.

    Examples:
        ```python
        model = nn.Linear(8, 1)
        noise = plait.GradientNoiseScale(model)
        for part in range(2):  # two microbatches of 16 samples
            (model(torch.randn(16, 8)).square().mean() / 2).backward()
            if part == 0:
                noise.after_microbatch(16)
        noise.update(32)
        noise.value
        ```
    """

    @property
    def value(self) -> float | None:
        """The noise scale; a lower bound if `note` says so, None before the first complete step."""
        return self.averages.noise_scale

    @property
    def variance(self) -> float | None:
        """The variance of one sample's gradient, as `plait.GradientVariance` has it."""
        return self.averages.variance

    @property
    def squared_norm(self) -> float | None:
        """The squared norm of the true gradient; negative if noise hides it."""
        return self.averages.squared_norm


def _norms_of(model: object) -> PartNorms | None:
    """What measures the parts of a batch in the model's backward pass, if it sums gradients itself."""
    if isinstance(model, DistributedDataParallel):
        return _BucketNorms(model)
    if isinstance(model, ShardsGradients) and isinstance(model, nn.Module):
        return ShardedNorms(model)
    return model.measure_parts() if isinstance(model, MeasuresParts) else None


class _BucketNorms:
    """Computes the squared norms of the buckets of a DistributedDataParallel before they are averaged."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group = model.process_group
        self._size = dist.get_world_size(self._group)
        self._own: list[Tensor] = []
        self._sum: Tensor | None = None
        model.register_comm_hook(None, self._hook())

    def take(self, samples: int) -> Tensor:
        """The sums over the workers of the last backward; each worker has an equal share of `samples`."""
        if self._sum is None:
            raise InputError("update: no backward pass of the DistributedDataParallel was seen before it")
        total, self._sum = self._sum.double() * samples / self._size, None
        return torch.stack([total, torch.full_like(total, samples), torch.full_like(total, self._size)])

    def _hook(self) -> Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]]:
        def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            return self._average(bucket)

        # Torch checks the annotations, which are strings in this module.
        hook.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
        return hook

    def _average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flat = bucket.buffer()
        self._own.append(squared_norm([flat]))
        rides, sent = bucket.is_last(), flat
        if rides:
            sent = torch.cat([flat, torch.stack(self._own).sum().reshape(1).to(flat.dtype)])
            self._own = []
        work = dist.all_reduce(sent, group=self._group, async_op=True)

        def averaged(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            summed = future.value()[0]
            if rides:
                self._sum = summed[-1].clone()
                summed = flat.copy_(summed[:-1])
            return summed.div_(self._size)

        future: torch.futures.Future[Tensor] = work.get_future().then(averaged)
        return future
