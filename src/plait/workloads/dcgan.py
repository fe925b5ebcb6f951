"""DCGAN (Radford et al., 2016): a generator and a discriminator of images."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn


def generator(noise: int = 100, width: int = 64, channels: int = 3, doublings: int = 3) -> nn.Sequential:
    """Noise (batch, noise, 1, 1) in, images in (-1, 1) out; 64x64 by default: 3,576,704 parameters."""
    top = width * 2**doublings
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.ConvTranspose2d(noise, top, 4, 1, 0, bias=False), norm1=nn.BatchNorm2d(top), relu1=nn.ReLU()
    )
    for number in range(2, doublings + 2):
        layers[f"conv{number}"] = nn.ConvTranspose2d(top, top // 2, 4, 2, 1, bias=False)
        layers[f"norm{number}"] = nn.BatchNorm2d(top // 2)
        layers[f"relu{number}"] = nn.ReLU()
        top //= 2
    layers["image"] = nn.ConvTranspose2d(top, channels, 4, 2, 1, bias=False)
    layers["tanh"] = nn.Tanh()
    return _initialised(nn.Sequential(layers))


def discriminator(width: int = 64, channels: int = 3, doublings: int = 3) -> nn.Sequential:
    """Images in, one logit each (batch,) out; the defaults take 64x64: 2,765,568 parameters."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, width, 4, 2, 1, bias=False), relu1=nn.LeakyReLU(0.2)
    )
    for number in range(2, doublings + 2):
        layers[f"conv{number}"] = nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False)
        layers[f"norm{number}"] = nn.BatchNorm2d(2 * width)
        layers[f"relu{number}"] = nn.LeakyReLU(0.2)
        width *= 2
    layers["score"] = nn.Conv2d(width, 1, 4, 1, 0, bias=False)
    layers["flatten"] = Flatten()
    return _initialised(nn.Sequential(layers))


def generator_tiny() -> nn.Sequential:
    """A generator of 16x16 images of one channel, width 8."""
    return generator(noise=8, width=8, channels=1, doublings=1)


def discriminator_tiny() -> nn.Sequential:
    """A discriminator of 16x16 images of one channel, width 8."""
    return discriminator(width=8, channels=1, doublings=1)


class Flatten(nn.Module):
    """(batch, 1, 1, 1) to (batch,)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten()


def _initialised(model: nn.Sequential) -> nn.Sequential:
    """Initialize weights as published: N(0, 0.02), those of batch norms N(1, 0.02)."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(module.weight, 0.0, 0.02)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
    return model
