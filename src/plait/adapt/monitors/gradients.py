"""Gradient noise scale and variance in a training loop of one's own.

Each step must show the gradient of a part of the batch besides that of the whole. Three kinds of loops do:

- Gradient accumulation, also on one worker: call `after_microbatch` after each backward pass but the last,
  and `update` before `optimizer.step()`. Each microbatch's loss is weighted by its share of the batch.
- Several workers that average gradients: `before_average` gives three numbers to be summed over the workers
  along with the gradients, and `update` takes the sums.
- torch's DistributedDataParallel: give it as the model. The numbers ride on the all-reduce of its last
  bucket, and only `update` is left to call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from plait.adapt.monitors.gradient_noise import DECAY, GradientAverages, GradientNorms
from plait.adapt.monitors.squared_norms import gradients, squared_norm
from plait.core.errors import InputError


class GradientVariance:
    """The variance of one sample's gradient (the trace of its covariance), as a moving average over steps."""

    def __init__(self, model: nn.Module | Iterable[Tensor], decay: float = DECAY) -> None:
        found = model.parameters() if isinstance(model, nn.Module) else model
        self._parameters = [parameter for parameter in found if parameter.requires_grad]
        self.averages = GradientAverages(decay)
        # Of the step under way: the squared norm of the first microbatches' gradient, and their samples.
        self._part: tuple[Tensor, int] | None = None
        self._in_buckets = _BucketNorms(model) if isinstance(model, DistributedDataParallel) else None
        # On GPUs, the numbers of the step before, which have arrived by now.
        self._arriving: list[Any] | None = None

    @property
    def value(self) -> float | None:
        """The moving average; None before the first step whose parts were seen."""
        return self.averages.variance

    @property
    def note(self) -> str | None:
        """What a reader of `value` must know, in words; None where there is nothing."""
        return self.averages.note

    def after_microbatch(self, samples: int) -> None:
        """Note the gradient so far, after the backward pass of a microbatch of that many samples.

        The first of a step counts: its gradient stands apart from the others' without a copy.
        """
        if self._part is None:
            self._part = squared_norm(gradients(self._parameters)), samples

    def before_average(self, samples: int) -> Tensor:
        """Three numbers to sum over all workers; `.grad` is the mean over this worker's `samples`."""
        norm = squared_norm(gradients(self._parameters)) * samples
        rest = torch.tensor([float(samples), float(samples > 0)], dtype=torch.float64, device=norm.device)
        return torch.cat([norm.reshape(1), rest])

    def update(self, samples: int, sums: Tensor | None = None) -> None:
        """Take in a step, whose whole gradient now is in `.grad`, of a batch of `samples` over all workers.

        `sums` are those of `before_average`. On GPUs the numbers count one step later, so that nobody waits.
        """
        whole = squared_norm(gradients(self._parameters))
        if self._in_buckets is not None:
            sums = self._in_buckets.take(samples)
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
    """The gradient noise scale S/|G|² in samples: up to about this batch size, larger batches pay."""

    @property
    def value(self) -> float | None:
        """The noise scale; a lower bound where `note` says so, None before the first step that was seen."""
        return self.averages.noise_scale

    @property
    def variance(self) -> float | None:
        return self.averages.variance

    @property
    def squared_norm(self) -> float | None:
        """The squared norm of the true gradient; below zero where noise hides it."""
        return self.averages.squared_norm


class _BucketNorms:
    """Takes the squared norms of the buckets of a DistributedDataParallel before they are averaged."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group = model.process_group
        self._size = dist.get_world_size(self._group)
        self._own: list[Tensor] = []
        self._sum: Tensor | None = None
        model.register_comm_hook(None, self._hook())

    def take(self, samples: int) -> Tensor:
        """The sums over the workers, each of which has an equal share of `samples`, of the last backward."""
        if self._sum is None:
            raise InputError("update: no backward pass of the DistributedDataParallel was seen before it")
        found, self._sum = self._sum.double() * samples / self._size, None
        return torch.stack([found, torch.full_like(found, samples), torch.full_like(found, self._size)])

    def _hook(self) -> Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]]:
        def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            return self._average(bucket)

        # Torch compares types, and those of this module are written as text.
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

        found: torch.futures.Future[Tensor] = work.get_future().then(averaged)
        return found
