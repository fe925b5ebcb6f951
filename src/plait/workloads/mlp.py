"""Multilayer perceptrons."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from plait.workloads.initial import he_normal


def mlp(classes: int = 10, inputs: int = 784, hidden: Sequence[int] = (300, 100)) -> nn.Sequential:
    """A perceptron with ReLU between its layers, He initialised; images are flattened to `inputs` values.

    The defaults are LeNet-300-100 (LeCun et al., 1998): 266,610 parameters.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = inputs
    for number, wider in enumerate(hidden, 1):
        layers[f"fc{number}"] = nn.Linear(width, wider)
        layers[f"relu{number}"] = nn.ReLU()
        width = wider
    layers["head"] = nn.Linear(width, classes)
    return he_normal(nn.Sequential(layers))


def mlp_tiny(classes: int = 10, inputs: int = 64) -> nn.Sequential:
    """A perceptron for 8x8 images of one channel: hidden layers of 32 and 16."""
    return mlp(classes, inputs, hidden=(32, 16))
