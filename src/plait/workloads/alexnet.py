"""AlexNet as in "One weird trick for parallelizing convolutional neural networks" (Krizhevsky, 2014)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from plait.workloads.initial import he_normal, small_linears


def alexnet(classes: int = 1000, channels: int = 3, dropout: float = 0.5) -> nn.Sequential:
    """AlexNet with one tower and no response normalisation: 61,100,840 parameters, as in torchvision.

    Takes images of 224x224, or any of at least 63x63. Linear layers are initialized with the published
    N(0, 0.01), convolutions with He's method: the paper's were tuned for the response normalisation that is
    absent here.
    """
    stem = nn.Conv2d(channels, 64, kernel_size=11, stride=4, padding=2)
    return small_linears(_alexnet(stem, (192, 384, 256, 256), 6, 4096, classes, dropout, ceil_mode=False))


def alexnet_tiny(classes: int = 10, channels: int = 1, dropout: float = 0.0) -> nn.Sequential:
    """AlexNet's layers with a 3x3 stem and widths of 8 to 24, for images from 8x8."""
    stem = nn.Conv2d(channels, 8, kernel_size=3, padding=1)
    # With ceil_mode, an 8x8 image passes all three pools.
    return _alexnet(stem, (16, 24, 16, 16), 1, 32, classes, dropout, ceil_mode=True)


def _alexnet(
    stem: nn.Conv2d,
    widths: Sequence[int],
    pooled: int,
    hidden: int,
    classes: int,
    dropout: float,
    ceil_mode: bool,
) -> nn.Sequential:
    second, third, fourth, fifth = widths
    model = nn.Sequential(
        OrderedDict(
            conv1=stem,
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(kernel_size=3, stride=2, ceil_mode=ceil_mode),
            conv2=nn.Conv2d(stem.out_channels, second, kernel_size=5, padding=2),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(kernel_size=3, stride=2, ceil_mode=ceil_mode),
            conv3=nn.Conv2d(second, third, kernel_size=3, padding=1),
            relu3=nn.ReLU(),
            conv4=nn.Conv2d(third, fourth, kernel_size=3, padding=1),
            relu4=nn.ReLU(),
            conv5=nn.Conv2d(fourth, fifth, kernel_size=3, padding=1),
            relu5=nn.ReLU(),
            pool5=nn.MaxPool2d(kernel_size=3, stride=2, ceil_mode=ceil_mode),
            average=nn.AdaptiveAvgPool2d(pooled),
            flatten=nn.Flatten(),
            dropout6=nn.Dropout(dropout),
            fc6=nn.Linear(fifth * pooled**2, hidden),
            relu6=nn.ReLU(),
            dropout7=nn.Dropout(dropout),
            fc7=nn.Linear(hidden, hidden),
            relu7=nn.ReLU(),
            head=nn.Linear(hidden, classes),
        )
    )
    return he_normal(model)
