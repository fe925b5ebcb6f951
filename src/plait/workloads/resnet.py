"""Residual networks (He et al., 2015), for ImageNet and for CIFAR.

Convolutions are initialized with He's method, the head of the published sizes with N(0, 0.01).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from plait.workloads.initial import he_normal, small_linears

# (input channels, width, stride) -> a block; its output has `width * expansion` channels.
Block = Callable[[int, int, int], nn.Module]


def resnet18(classes: int = 1000, channels: int = 3) -> nn.Sequential:
    """ResNet-18 for 224x224 images, projection shortcuts (option B): 11,689,512 parameters."""
    layers = _imagenet_stem(channels)
    _add_stages(layers, _basic, 64, (2, 2, 2, 2), (64, 128, 256, 512), (1, 2, 2, 2))
    return small_linears(_with_head(layers, 512, classes))


def resnet50(classes: int = 1000, channels: int = 3) -> nn.Sequential:
    """ResNet-50 for 224x224 images, projection shortcuts (option B): 25,557,032 parameters.

    A block that halves the image does so in its 3x3 convolution, as most implementations do today; the
    paper strides the 1x1 before it. The count is the same.
    """
    layers = _imagenet_stem(channels)
    _add_stages(layers, _bottleneck, 64, (3, 4, 6, 3), (64, 128, 256, 512), (1, 2, 2, 2), expansion=4)
    return small_linears(_with_head(layers, 2048, classes))


def resnet56(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """ResNet-56 for 32x32 CIFAR images: 853,018 parameters.

    As published, shortcuts that change shape have no weights (option A: every second pixel, zeros for
    the new channels). The paper rounds the count to 0.85M.
    """
    layers = _cifar_stem(channels, 16)
    _add_stages(layers, _basic_without_projection, 16, (9, 9, 9), (16, 32, 64), (1, 2, 2))
    return small_linears(_with_head(layers, 64, classes))


def resnet18_tiny(classes: int = 10, channels: int = 1) -> nn.Sequential:
    """ResNet-18's blocks with a 3x3 stem and widths of 8 to 32, for images from 8x8."""
    layers = _cifar_stem(channels, 8)
    _add_stages(layers, _basic, 8, (2, 2, 2, 2), (8, 16, 24, 32), _TINY_STRIDES)
    return _with_head(layers, 32, classes)


def resnet50_tiny(classes: int = 10, channels: int = 1) -> nn.Sequential:
    """Bottleneck blocks, seven of ResNet-50's sixteen, with a 3x3 stem, for images from 8x8."""
    layers = _cifar_stem(channels, 8)
    _add_stages(layers, _bottleneck, 8, (1, 2, 2, 2), (4, 4, 8, 8), _TINY_STRIDES, expansion=4)
    return _with_head(layers, 32, classes)


def resnet56_tiny(classes: int = 10, channels: int = 1) -> nn.Sequential:
    """ResNet-56's blocks, six of its twenty-seven, with widths of 4 to 16, for images from 8x8."""
    layers = _cifar_stem(channels, 4)
    _add_stages(layers, _basic_without_projection, 4, (2, 2, 2), (4, 8, 16), (1, 2, 2))
    return _with_head(layers, 16, classes)


# An 8x8 image becomes 2x2, so that batch normalisation has several values even in a batch of one.
_TINY_STRIDES = (1, 2, 2, 1)


class Residual(nn.Module):
    """relu(residual(x) + shortcut(x))."""

    def __init__(self, residual: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.residual = residual
        self.shortcut = shortcut
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.residual(x) + self.shortcut(x))
        return y


class ZeroPadded(nn.Module):
    """A shortcut without weights: every `stride`-th pixel, then `extra` channels of zeros."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.extra = extra
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))


def _imagenet_stem(channels: int) -> OrderedDict[str, nn.Module]:
    return OrderedDict(
        conv1=nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False),
        norm1=nn.BatchNorm2d(64),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )


def _cifar_stem(channels: int, width: int) -> OrderedDict[str, nn.Module]:
    return OrderedDict(conv1=_conv(channels, width, 3), norm1=nn.BatchNorm2d(width), relu1=nn.ReLU())


def _add_stages(
    layers: OrderedDict[str, nn.Module],
    block: Block,
    channels: int,
    counts: Sequence[int],
    widths: Sequence[int],
    strides: Sequence[int],
    expansion: int = 1,
) -> None:
    """Append `counts[i]` blocks of `widths[i]` for each stage; its first block strides by `strides[i]`."""
    for stage, (count, width, stride) in enumerate(zip(counts, widths, strides), 2):
        for number in range(1, count + 1):
            layers[f"block{stage}_{number}"] = block(channels, width, stride if number == 1 else 1)
            channels = width * expansion


def _with_head(layers: OrderedDict[str, nn.Module], channels: int, classes: int) -> nn.Sequential:
    layers["average"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(channels, classes)
    return he_normal(nn.Sequential(layers))


def _basic(channels: int, width: int, stride: int) -> nn.Module:
    return Residual(_two_convolutions(channels, width, stride), _projection(channels, width, stride))


def _basic_without_projection(channels: int, width: int, stride: int) -> nn.Module:
    same = channels == width and stride == 1
    shortcut = nn.Identity() if same else ZeroPadded(width - channels, stride)
    return Residual(_two_convolutions(channels, width, stride), shortcut)


def _bottleneck(channels: int, width: int, stride: int) -> nn.Module:
    residual = nn.Sequential(
        OrderedDict(
            conv1=_conv(channels, width, 1),
            norm1=nn.BatchNorm2d(width),
            relu1=nn.ReLU(),
            conv2=_conv(width, width, 3, stride),
            norm2=nn.BatchNorm2d(width),
            relu2=nn.ReLU(),
            conv3=_conv(width, 4 * width, 1),
            norm3=nn.BatchNorm2d(4 * width),
        )
    )
    return Residual(residual, _projection(channels, 4 * width, stride))


def _two_convolutions(channels: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=_conv(channels, width, 3, stride),
            norm1=nn.BatchNorm2d(width),
            relu1=nn.ReLU(),
            conv2=_conv(width, width, 3),
            norm2=nn.BatchNorm2d(width),
        )
    )


def _projection(channels: int, width: int, stride: int) -> nn.Module:
    if channels == width and stride == 1:
        return nn.Identity()
    return nn.Sequential(OrderedDict(conv=_conv(channels, width, 1, stride), norm=nn.BatchNorm2d(width)))


def _conv(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
