"""HFTA's own operations and optimizer (Wang et al., MLSys 2021) on the models of the fusion experiment.

HFTA's users write a model again with its operations. Here the layers of the models are exchanged for them, in
the layouts of HFTA's examples: images (batch, trials, channels, height, width), all else trials first.
HFTA itself is not part of this project; a clone of it on PYTHONPATH is imported.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.core.errors import InputError
from plait.workloads import dcgan, pointnet, transformer
from plait_bench.fusion.cases import Case, Loss, StepParts, Trials, stacked_data, step_parts

HOW_TO_GET = "needs github.com/UofT-EcoSystem/hfta: git clone it, add it to PYTHONPATH"
_LAYERS = (
    nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.Embedding,
)  # fmt: skip


def hfta_step(case: Case, device: torch.device, width: int, channels_last: bool = False) -> StepParts:
    """A step of `width` trials by HFTA's operations and its Adam; cuDNN searches, as HFTA's examples let it.

    That Adam counts steps on the host: replays of a CUDA graph all have the bias correction of one step.
    """
    try:
        ops, optim = (importlib.import_module(f"hfta.{name}") for name in ("ops", "optim"))
    except ImportError:
        raise InputError(HOW_TO_GET) from None
    trials = _HftaTrials(ops, optim, case, device, width, channels_last)
    inputs = [trials.arranged(each) for each in stacked_data(case, device, width)]
    step, inputs, clear = step_parts(case, trials, inputs)

    def searched(*given: Tensor) -> Any:
        cudnn: Any = torch.backends.cudnn
        before, cudnn.benchmark = cudnn.benchmark, True
        try:
            return step(*given)
        finally:
            cudnn.benchmark = before

    return searched, inputs, clear


class _HftaTrials(Trials):
    """Trials as HFTA's arrays, one of each model."""

    def __init__(
        self, ops: Any, optim: Any, case: Case, device: torch.device, width: int, channels_last: bool
    ) -> None:
        with device:
            made = [[make() for _ in range(width)] for make in case.makes]
        self._is_image = any(isinstance(each, nn.Conv2d) for each in made[-1][0].modules())
        self._channels_last, self._width = channels_last, width
        with torch.random.fork_rng(), device:  # HFTA's layers draw weights that those of `made` replace
            arrays = [_Converter(ops, width, self._is_image).array_of(each) for each in made]
        if channels_last:
            for weight in (each for array in arrays for each in array.parameters() if each.dim() == 5):
                weight.data = _channels_last(weight.data, 0)
        options = {**case.adam, "lr": case.rates(width)}
        optimizers = [optim.Adam(each.parameters(), **options, B=width) for each in arrays]
        super().__init__(arrays, optimizers, [each.parameters() for each in arrays])

    def arranged(self, stacked: Tensor) -> Tensor:
        """Data of all trials, trials first, in the layout of HFTA's examples."""
        if stacked.dim() == 4:  # clouds: their points are rows
            return stacked.transpose(2, 3).contiguous()
        if stacked.dim() != 5 or not self._is_image:
            return stacked
        images = stacked.transpose(0, 1).contiguous()
        return _channels_last(images, 1) if self._channels_last else images

    def loss_of(self, which: int, loss: Loss, x: Tensor, target: Any) -> Tensor:
        output = self.models[which](x).float()  # trials first
        if isinstance(target, Tensor):
            losses = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none")
        else:
            wanted = torch.full_like(output, target)
            losses = F.binary_cross_entropy_with_logits(output, wanted, reduction="none")
        return losses.view(self._width, -1).mean(1)


def _channels_last(x: Tensor, dim: int) -> Tensor:
    """The same values; where the axes `dim` and the one after are one, their memory is channels last."""
    joined = x.flatten(dim, dim + 1).contiguous(memory_format=torch.channels_last)
    split: Tensor = joined.unflatten(dim, x.shape[dim : dim + 2])
    return split


class _Converter:
    """Changes the first model of several to HFTA's operations on the weights of all."""

    def __init__(self, ops: Any, width: int, is_image: bool) -> None:
        self._ops, self._width, self._is_image = ops, width, is_image
        self._embeddings: dict[int, nn.Module] = {}

    def array_of(self, models: Sequence[Any]) -> nn.Module:
        first: nn.Module = models[0]
        if isinstance(first, (*_LAYERS, nn.Conv1d)):
            return self._layer(models)
        if isinstance(first, (nn.MaxPool2d, nn.AdaptiveAvgPool2d)):
            return _Pooled(first, self._width)
        if isinstance(first, (nn.Flatten, dcgan.Flatten)):
            return _Flattened(self._is_image, 1 if isinstance(first, dcgan.Flatten) else 2)
        for name, _ in list(first.named_children()):
            setattr(first, name, self.array_of([getattr(each, name) for each in models]))
        self._adapt(first)
        return first

    def _layer(self, layers: Sequence[Any]) -> nn.Module:
        first = layers[0]
        kind = type(first)
        if kind is nn.Linear and id(first.weight) in self._embeddings:
            return _TiedLinear(self._embeddings[id(first.weight)], [each.bias for each in layers])
        if kind is nn.Conv1d:  # of one point each: a linear layer in HFTA's own PointNet
            layers = [_as_linear(each) for each in layers]
            first, kind = layers[0], nn.Linear
        made = self._ops.get_hfta_op_for(kind, B=self._width)
        names = [name for name in inspect.signature(made.func).parameters if hasattr(first, name)]
        options = {name: getattr(first, name) for name in names}
        if isinstance(first, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)):
            options["bias"] = first.bias is not None
        layer: nn.Module = made(**options)
        for index, each in enumerate(layers):
            layer.snatch_parameters(each, index)  # type: ignore[operator]
        if kind is nn.Embedding:
            self._embeddings[id(first.weight)] = layer
        return layer

    def _adapt(self, module: nn.Module) -> None:
        """Let a module whose forward names axes reckon with that of the trials."""
        if isinstance(module, transformer.Attention):
            # Between these two layers sequences of all trials are one batch.
            module.query_key_value = nn.Sequential(module.query_key_value, nn.Flatten(0, 1))  # type: ignore[assignment]
            module.project = nn.Sequential(nn.Unflatten(0, (self._width, -1)), module.project)  # type: ignore[assignment]
        elif isinstance(module, transformer.Embeddings):
            module.places_of = functools.partial(_places, self._width)  # type: ignore[method-assign]
        for kind, forward in _FORWARDS.items():
            if isinstance(module, kind):
                module.forward = functools.partial(forward, module)


def _as_linear(layer: nn.Conv1d) -> nn.Linear:
    linear = nn.Linear(layer.in_channels, layer.out_channels)
    linear.weight.data, linear.bias.data = layer.weight.data.squeeze(2), layer.bias.data  # type: ignore[union-attr]
    return linear


class _Pooled(nn.Module):
    """A pool over the channels of all trials; HFTA's own refuse channels in the last axis of memory."""

    def __init__(self, pool: nn.Module, width: int) -> None:
        super().__init__()
        self.pool, self.width = pool, width

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.pool(x.flatten(1, 2)).unflatten(1, (self.width, -1))
        return pooled


class _Flattened(nn.Module):
    """Trials first and axes from `start` on as one, as HFTA's linear layers expect it."""

    def __init__(self, is_image: bool, start: int) -> None:
        super().__init__()
        self.is_image, self.start = is_image, start

    def forward(self, x: Tensor) -> Tensor:
        return (x.transpose(0, 1) if self.is_image else x).flatten(self.start)


class _TiedLinear(nn.Module):
    """A linear layer that has its weight from an embedding, which HFTA's holds transposed."""

    def __init__(self, embedding: nn.Module, biases: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.embedding = embedding
        stacked = [each.detach() for each in biases if each is not None]
        self.bias = nn.Parameter(torch.stack(stacked).unsqueeze(1)) if stacked else None

    def forward(self, x: Tensor) -> Tensor:
        rows, weight = x.flatten(1, -2), self.embedding.weight.transpose(1, 2)  # type: ignore[operator]
        made = torch.bmm(rows, weight) if self.bias is None else torch.baddbmm(self.bias, rows, weight)
        logits: Tensor = made.unflatten(1, x.shape[1:-1])
        return logits


def _places(width: int, tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[-1], device=tokens.device).expand(width, 1, -1)


def _most(rows: Tensor, clouds: Tensor) -> Tensor:
    """The maximum over the points of each cloud."""
    most: Tensor = rows.unflatten(1, clouds.shape[1:3]).max(2).values
    return most


def _transform(module: Any, clouds: Tensor) -> Tensor:
    offsets: Tensor = module.head(_most(module.points(clouds.flatten(1, 2)), clouds)).unflatten(2, (3, 3))
    return offsets + torch.eye(3, dtype=offsets.dtype, device=offsets.device)


def _features(module: Any, clouds: Tensor) -> tuple[Tensor, Tensor]:
    local: Tensor = module.first(torch.matmul(clouds, module.transform(clouds)).flatten(1, 2))
    return local, _most(module.rest(local), clouds)


def _segments(module: Any, clouds: Tensor) -> Tensor:
    local, whole = module.features(clouds)
    spread = whole.unsqueeze(2).expand(-1, -1, clouds.shape[2], -1).flatten(1, 2)
    logits: Tensor = module.head(module.points(torch.cat([spread, local], -1)))
    return logits


_FORWARDS = {
    pointnet.InputTransform: _transform,
    pointnet.Features: _features,
    pointnet.Segmenter: _segments,
}
