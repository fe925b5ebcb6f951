"""Weight initialization that several model families share."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def he_normal(model: Model) -> Model:
    """`model`, with convolutions and linear layers initialized as in He et al. (2015), with zero biases.

    The standard deviation is sqrt(2 / fan-in); the fan-in of a grouped convolution counts one group.
    Normalisation layers keep PyTorch's ones and zeros.
    """
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def small_linears(model: Model) -> Model:
    """`model`, with its linear weights initialized from N(0, 0.01), as in the ImageNet papers.

    Pools and dropout enlarge the inputs of the last layers of a wide model; with He's method there, VGG-16
    would start with a loss five times that of guessing.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
    return model
