"""MobileNetV2 (Sandler et al., 2018) and MobileNetV3 (Howard et al., 2019).

Convolutions are initialized with He's method, linear layers of the published sizes with N(0, 0.01).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from plait.workloads.initial import he_normal, small_linears

Activation = Callable[[], nn.Module]
Norm = Callable[[int], nn.Module]


class Group(NamedTuple):
    """One row of MobileNetV2's table: `repeats` blocks, of which the first strides."""

    expansion: int
    width: int
    repeats: int
    stride: int


class Bottleneck(NamedTuple):
    """One row of MobileNetV3's tables: one block."""

    kernel: int
    expanded: int
    width: int
    squeeze: bool
    activation: Activation
    stride: int


_V2 = (
    Group(1, 16, 1, 1),
    Group(6, 24, 2, 2),
    Group(6, 32, 3, 2),
    Group(6, 64, 4, 2),
    Group(6, 96, 3, 1),
    Group(6, 160, 3, 2),
    Group(6, 320, 1, 1),
)
_V2_TINY = (Group(1, 8, 1, 1), Group(4, 8, 2, 2), Group(4, 12, 2, 2), Group(4, 16, 1, 1))

_V3_LARGE = (
    Bottleneck(3, 16, 16, False, nn.ReLU, 1),
    Bottleneck(3, 64, 24, False, nn.ReLU, 2),
    Bottleneck(3, 72, 24, False, nn.ReLU, 1),
    Bottleneck(5, 72, 40, True, nn.ReLU, 2),
    Bottleneck(5, 120, 40, True, nn.ReLU, 1),
    Bottleneck(5, 120, 40, True, nn.ReLU, 1),
    Bottleneck(3, 240, 80, False, nn.Hardswish, 2),
    Bottleneck(3, 200, 80, False, nn.Hardswish, 1),
    Bottleneck(3, 184, 80, False, nn.Hardswish, 1),
    Bottleneck(3, 184, 80, False, nn.Hardswish, 1),
    Bottleneck(3, 480, 112, True, nn.Hardswish, 1),
    Bottleneck(3, 672, 112, True, nn.Hardswish, 1),
    Bottleneck(5, 672, 160, True, nn.Hardswish, 2),
    Bottleneck(5, 960, 160, True, nn.Hardswish, 1),
    Bottleneck(5, 960, 160, True, nn.Hardswish, 1),
)
_V3_SMALL = (
    Bottleneck(3, 16, 16, True, nn.ReLU, 2),
    Bottleneck(3, 72, 24, False, nn.ReLU, 2),
    Bottleneck(3, 88, 24, False, nn.ReLU, 1),
    Bottleneck(5, 96, 40, True, nn.Hardswish, 2),
    Bottleneck(5, 240, 40, True, nn.Hardswish, 1),
    Bottleneck(5, 240, 40, True, nn.Hardswish, 1),
    Bottleneck(5, 120, 48, True, nn.Hardswish, 1),
    Bottleneck(5, 144, 48, True, nn.Hardswish, 1),
    Bottleneck(5, 288, 96, True, nn.Hardswish, 2),
    Bottleneck(5, 576, 96, True, nn.Hardswish, 1),
    Bottleneck(5, 576, 96, True, nn.Hardswish, 1),
)
_V3_LARGE_TINY = (
    Bottleneck(3, 8, 8, False, nn.ReLU, 1),
    Bottleneck(3, 24, 12, False, nn.ReLU, 2),
    Bottleneck(5, 32, 12, True, nn.ReLU, 1),
    Bottleneck(3, 40, 16, False, nn.Hardswish, 2),
    Bottleneck(5, 48, 16, True, nn.Hardswish, 1),
)
_V3_SMALL_TINY = (
    Bottleneck(3, 8, 8, True, nn.ReLU, 2),
    Bottleneck(3, 24, 12, False, nn.ReLU, 2),
    Bottleneck(5, 40, 16, True, nn.Hardswish, 1),
    Bottleneck(5, 48, 16, True, nn.Hardswish, 1),
)

# The paper's momentum is too slow for the short training of a tiny model.
_V3_NORM: Norm = partial(nn.BatchNorm2d, eps=1e-3, momentum=0.01)
_V3_TINY_NORM: Norm = partial(nn.BatchNorm2d, eps=1e-3)


def mobilenet_v2(classes: int = 1000, channels: int = 3, dropout: float = 0.2) -> nn.Sequential:
    """MobileNetV2 of width 1.0 for 224x224 images: 3,504,872 parameters."""
    stem = _unit(channels, 32, nn.BatchNorm2d, nn.ReLU6, kernel=3, stride=2)
    return small_linears(_mobilenet_v2(stem, 32, _V2, 1280, classes, dropout))


def mobilenet_v2_tiny(classes: int = 10, channels: int = 1, dropout: float = 0.0) -> nn.Sequential:
    """MobileNetV2's kinds of blocks, six of its seventeen, with a stem of stride 1, for images from 8x8."""
    stem = _unit(channels, 8, nn.BatchNorm2d, nn.ReLU6, kernel=3)
    return _mobilenet_v2(stem, 8, _V2_TINY, 64, classes, dropout)


def mobilenet_v3_small(classes: int = 1000, channels: int = 3, dropout: float = 0.2) -> nn.Sequential:
    """MobileNetV3-Small of width 1.0 for 224x224 images: 2,542,856 parameters."""
    shape = _V3Shape(stem=16, stem_stride=2, rows=_V3_SMALL, last=576, hidden=1024, norm=_V3_NORM)
    return small_linears(_mobilenet_v3(shape, classes, channels, dropout))


def mobilenet_v3_large(classes: int = 1000, channels: int = 3, dropout: float = 0.2) -> nn.Sequential:
    """MobileNetV3-Large of width 1.0 for 224x224 images: 5,483,032 parameters."""
    shape = _V3Shape(stem=16, stem_stride=2, rows=_V3_LARGE, last=960, hidden=1280, norm=_V3_NORM)
    return small_linears(_mobilenet_v3(shape, classes, channels, dropout))


def mobilenet_v3_small_tiny(classes: int = 10, channels: int = 1, dropout: float = 0.0) -> nn.Sequential:
    """MobileNetV3-Small's kinds of blocks, four of its eleven, for images from 8x8."""
    shape = _V3Shape(8, 1, _V3_SMALL_TINY, last=48, hidden=64, norm=_V3_TINY_NORM)
    return _mobilenet_v3(shape, classes, channels, dropout)


def mobilenet_v3_large_tiny(classes: int = 10, channels: int = 1, dropout: float = 0.0) -> nn.Sequential:
    """MobileNetV3-Large's kinds of blocks, five of its fifteen, for images from 8x8."""
    shape = _V3Shape(8, 1, _V3_LARGE_TINY, last=48, hidden=64, norm=_V3_TINY_NORM)
    return _mobilenet_v3(shape, classes, channels, dropout)


class Skip(nn.Module):
    """x + layers(x)."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layers(x)
        return y


class SqueezeExcite(nn.Module):
    """x, each channel scaled by a small perceptron of the channels' means (Hu et al., 2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = _divisible(channels / 4)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Conv2d(channels, squeezed, kernel_size=1)
        self.relu = nn.ReLU()
        self.excite = nn.Conv2d(squeezed, channels, kernel_size=1)
        self.scale = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        weights = self.scale(self.excite(self.relu(self.squeeze(self.average(x)))))
        y: Tensor = x * weights
        return y


@dataclass(frozen=True)
class _V3Shape:
    stem: int
    stem_stride: int
    rows: Sequence[Bottleneck]
    last: int
    hidden: int
    norm: Norm


def _mobilenet_v2(
    stem: nn.Module, channels: int, groups: Sequence[Group], last: int, classes: int, dropout: float
) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    for number, group in enumerate(groups, 1):
        for repeat in range(1, group.repeats + 1):
            row = Bottleneck(
                kernel=3,
                expanded=channels * group.expansion,
                width=group.width,
                squeeze=False,
                activation=nn.ReLU6,
                stride=group.stride if repeat == 1 else 1,
            )
            layers[f"block{number}_{repeat}"] = _inverted_residual(channels, row, nn.BatchNorm2d)
            channels = group.width
    layers["last"] = _unit(channels, last, nn.BatchNorm2d, nn.ReLU6)
    layers["average"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["dropout"] = nn.Dropout(dropout)
    layers["head"] = nn.Linear(last, classes)
    model = nn.Sequential(layers)
    he_normal(model)
    return model


def _mobilenet_v3(shape: _V3Shape, classes: int, channels: int, dropout: float) -> nn.Sequential:
    stem = _unit(channels, shape.stem, shape.norm, nn.Hardswish, kernel=3, stride=shape.stem_stride)
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    channels = shape.stem
    for number, row in enumerate(shape.rows, 1):
        layers[f"block{number}"] = _inverted_residual(channels, row, shape.norm)
        channels = row.width
    layers["last"] = _unit(channels, shape.last, shape.norm, nn.Hardswish)
    layers["average"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["hidden"] = nn.Linear(shape.last, shape.hidden)
    layers["hardswish"] = nn.Hardswish()
    layers["dropout"] = nn.Dropout(dropout)
    layers["head"] = nn.Linear(shape.hidden, classes)
    model = nn.Sequential(layers)
    he_normal(model)
    return model


def _inverted_residual(channels: int, row: Bottleneck, norm: Norm) -> nn.Module:
    """Expand, depthwise convolution, project; with a skip connection if the shape is unchanged."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if row.expanded != channels:
        layers["expand"] = _unit(channels, row.expanded, norm, row.activation)
    layers["depthwise"] = _unit(
        row.expanded, row.expanded, norm, row.activation, row.kernel, row.stride, groups=row.expanded
    )
    if row.squeeze:
        layers["squeeze_excite"] = SqueezeExcite(row.expanded)
    layers["project"] = nn.Conv2d(row.expanded, row.width, kernel_size=1, bias=False)
    layers["norm"] = norm(row.width)
    block = nn.Sequential(layers)
    return Skip(block) if row.stride == 1 and channels == row.width else block


def _unit(
    channels: int,
    width: int,
    norm: Norm,
    activation: Activation,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
) -> nn.Sequential:
    """Convolution, normalisation, activation."""
    conv = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, norm=norm(width), activation=activation()))


def _divisible(channels: float) -> int:
    """The multiple of eight nearest to `channels`, at least 90% of it, as in both papers."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8
