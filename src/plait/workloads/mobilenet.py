"""MobileNetV2 (Sandler et al., 2018) and MobileNetV3 (Howard et al., 2019).

Convolutions are initialized with He's method, linear layers of the published sizes with N(0, 0.01).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
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
    return small_linears(_mobilenet_v2(_V2, channels, 32, 2, 1280, classes, dropout))


def mobilenet_v2_tiny(classes: int = 10, channels: int = 1, dropout: float = 0.0) -> nn.Sequential:
    """MobileNetV2's kinds of blocks, six of its seventeen, with a stem of stride 1, for images from 8x8."""
    return _mobilenet_v2(_V2_TINY, channels, 8, 1, 64, classes, dropout)


def mobilenet_v3_small(classes: int = 1000, channels: int = 3, dropout: float = 0.2) -> nn.Sequential:
    """MobileNetV3-Small of width 1.0 for 224x224 images: 2,542,856 parameters."""
    layers = _features(_numbered(_V3_SMALL), channels, 16, 2, 576, _V3_NORM, nn.Hardswish)
    return small_linears(_with_head(layers, [576, 1024, classes], dropout))


def mobilenet_v3_large(classes: int = 1000, channels: int = 3, dropout: float = 0.2) -> nn.Sequential:
    """MobileNetV3-Large of width 1.0 for 224x224 images: 5,483,032 parameters."""
    layers = _features(_numbered(_V3_LARGE), channels, 16, 2, 960, _V3_NORM, nn.Hardswish)
    return small_linears(_with_head(layers, [960, 1280, classes], dropout))


def mobilenet_v3_small_tiny(classes: int = 10, channels: int = 1, dropout: float = 0.0) -> nn.Sequential:
    """MobileNetV3-Small's kinds of blocks, four of its eleven, for images from 8x8."""
    layers = _features(_numbered(_V3_SMALL_TINY), channels, 8, 1, 48, _V3_TINY_NORM, nn.Hardswish)
    return _with_head(layers, [48, 64, classes], dropout)


def mobilenet_v3_large_tiny(classes: int = 10, channels: int = 1, dropout: float = 0.0) -> nn.Sequential:
    """MobileNetV3-Large's kinds of blocks, five of its fifteen, for images from 8x8."""
    layers = _features(_numbered(_V3_LARGE_TINY), channels, 8, 1, 48, _V3_TINY_NORM, nn.Hardswish)
    return _with_head(layers, [48, 64, classes], dropout)


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


def _numbered(rows: Sequence[Bottleneck]) -> dict[str, Bottleneck]:
    return {f"block{number}": row for number, row in enumerate(rows, 1)}


def _mobilenet_v2(
    groups: Sequence[Group], channels: int, stem: int, stride: int, last: int, classes: int, dropout: float
) -> nn.Sequential:
    rows, width = {}, stem
    for number, group in enumerate(groups, 1):
        for repeat in range(1, group.repeats + 1):
            expanded, first_stride = width * group.expansion, group.stride if repeat == 1 else 1
            row = Bottleneck(3, expanded, group.width, False, nn.ReLU6, first_stride)
            rows[f"block{number}_{repeat}"] = row
            width = group.width
    layers = _features(rows, channels, stem, stride, last, nn.BatchNorm2d, nn.ReLU6)
    return _with_head(layers, [last, classes], dropout)


def _features(
    rows: Mapping[str, Bottleneck],
    channels: int,
    stem: int,
    stride: int,
    last: int,
    norm: Norm,
    activation: Activation,
) -> OrderedDict[str, nn.Module]:
    """A stem, a block for each row, and a last convolution, whose `last` channels are averaged."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["stem"] = _unit(channels, stem, norm, activation, kernel=3, stride=stride)
    channels = stem
    for name, row in rows.items():
        layers[name] = _inverted_residual(channels, row, norm)
        channels = row.width
    layers["last"] = _unit(channels, last, norm, activation)
    layers["average"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    return layers


def _with_head(layers: OrderedDict[str, nn.Module], widths: Sequence[int], dropout: float) -> nn.Sequential:
    """`layers`, a hidden layer if there are three `widths`, and the classifier."""
    if len(widths) == 3:
        layers["hidden"] = nn.Linear(widths[0], widths[1])
        layers["hardswish"] = nn.Hardswish()
    layers["dropout"] = nn.Dropout(dropout)
    layers["head"] = nn.Linear(widths[-2], widths[-1])
    return he_normal(nn.Sequential(layers))


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
