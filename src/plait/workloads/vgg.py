"""VGG (Simonyan and Zisserman, 2014)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from plait.workloads.initial import he_normal, small_linears

_VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
# An 8x8 image becomes 1x1 after three pools.
_TINY = ((8, 8), (16, 16), (24, 24, 24))


def vgg16(classes: int = 1000, channels: int = 3, dropout: float = 0.5) -> nn.Sequential:
    """VGG-16, configuration D, without batch normalisation: 138,357,544 parameters.

    Takes images of 224x224; those of other sizes, from 32x32, are pooled to 7x7 before the linear layers.
    Convolutions are initialized with He's method, so that it trains without the paper's pre-training of
    shallower nets, linear layers with the paper's N(0, 0.01).
    """
    return small_linears(_vgg(_VGG16, 7, 4096, classes, channels, dropout))


def vgg16_tiny(classes: int = 10, channels: int = 1, dropout: float = 0.0) -> nn.Sequential:
    """VGG-16's first three blocks and its linear layers with widths of 8 to 32, for images from 8x8."""
    return _vgg(_TINY, 1, 32, classes, channels, dropout)


def _vgg(
    blocks: Sequence[Sequence[int]],
    pooled: int,
    hidden: int,
    classes: int,
    channels: int,
    dropout: float,
) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for block, widths in enumerate(blocks, 1):
        for number, width in enumerate(widths, 1):
            layers[f"conv{block}_{number}"] = nn.Conv2d(channels, width, kernel_size=3, padding=1)
            layers[f"relu{block}_{number}"] = nn.ReLU()
            channels = width
        layers[f"pool{block}"] = nn.MaxPool2d(kernel_size=2, stride=2)
    layers["average"] = nn.AdaptiveAvgPool2d(pooled)
    layers["flatten"] = nn.Flatten()
    layers["fc6"] = nn.Linear(channels * pooled**2, hidden)
    layers["relu6"] = nn.ReLU()
    layers["dropout6"] = nn.Dropout(dropout)
    layers["fc7"] = nn.Linear(hidden, hidden)
    layers["relu7"] = nn.ReLU()
    layers["dropout7"] = nn.Dropout(dropout)
    layers["head"] = nn.Linear(hidden, classes)
    return he_normal(nn.Sequential(layers))
