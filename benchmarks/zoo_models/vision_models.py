"""Image models in the manner of torchvision, small: what their code does is what stages must repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.workloads import alexnet, mobilenet, resnet, vgg


class StochasticDepth(nn.Module):
    """Leaves the whole branch of a sample out, in training."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        noise = torch.empty([x.shape[0]] + [1] * (x.ndim - 1), dtype=x.dtype, device=x.device)
        return x * noise.bernoulli_(0.8).div_(0.8)


class DenseNet(nn.Module):
    """Each layer takes all that came before, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(_DenseLayer(8 + 4 * i) for i in range(4))
        self.norm, self.head = nn.BatchNorm2d(24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(features))
        x = F.relu(self.norm(torch.cat(features, 1)), inplace=True)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class _DenseLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, features: list[Tensor]) -> Tensor:
        y = self.conv(F.relu(self.norm(torch.cat(features, 1))))
        return F.dropout(y, 0.2, training=self.training)


class GoogLeNet(nn.Module):
    """Branches, and auxiliary heads in training: another structure is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.first, self.second = _Inception(8), _Inception(12)
        self.aux = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5))
        self.drop, self.head = nn.Dropout(0.4), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.first(F.relu(self.stem(x)))
        side = self.aux(x) if self.training else None
        x = self.head(self.drop(self.second(x).mean((2, 3))))
        return (x, side) if self.training else x


class _Inception(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.three = nn.Conv2d(width, 4, 1), nn.Conv2d(width, 4, 3, padding=1)
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(width, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.relu(branch(x)) for branch in (self.one, self.three, self.pool)], 1)


class ShuffleNet(nn.Module):
    """Splits channels, and shuffles them by views that read sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.units = nn.Sequential(*(_ShuffleUnit(4) for _ in range(3)))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.units(self.stem(x)).mean([2, 3]))


class _ShuffleUnit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, groups=width), nn.BatchNorm2d(width), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        out = torch.cat((left, self.branch(right)), 1)
        b, c, h, w = out.size()
        return out.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, c, h, w)


class EfficientNet(nn.Module):
    """Squeeze and excitation, and stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.blocks = nn.Sequential(*(_MBConv(8) for _ in range(3)))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.silu(self.stem(x), inplace=True)))


class _MBConv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand, self.norm = nn.Conv2d(width, 2 * width, 1), nn.BatchNorm2d(2 * width)
        self.squeeze, self.excite = nn.Conv2d(2 * width, 4, 1), nn.Conv2d(4, 2 * width, 1)
        self.project, self.depth = nn.Conv2d(2 * width, width, 1), StochasticDepth()

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.expand(x)))
        scale = torch.sigmoid(self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        y = self.depth(self.project(y * scale))
        y += x
        return y


class ConvNeXt(nn.Module):
    """Channels last in the middle, a scale for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.ModuleList(_NextBlock(8) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean([-2, -1])))


class _NextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale, self.depth = nn.Parameter(torch.full((width, 1, 1), 0.1)), StochasticDepth()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)
        return x + self.depth(self.scale * y)


class VisionTransformer(nn.Module):
    """Patches, a class token that is expanded to the batch, torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.token, self.place = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class Swin(nn.Module):
    """Windows of attention that are rolled in every second block, with a table of relative places."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 2, 2)
        self.blocks = nn.ModuleList(_SwinBlock(8, 4, shift) for shift in (0, 2, 0))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class _SwinBlock(nn.Module):
    def __init__(self, width: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.depth = nn.Linear(width, width), StochasticDepth()
        self.table = nn.Parameter(torch.zeros((2 * window - 1) ** 2))
        places = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij"))
        apart = (places.flatten(1)[:, :, None] - places.flatten(1)[:, None, :]) + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1])

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = self.norm(x)
        if self.shift > 0:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        n = self.window
        y = y.view(b, h // n, n, w // n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, n * n, c)
        q, k, v = self.qkv(y).chunk(3, -1)
        bias = self.table[self.index.view(-1)].view(n * n, n * n)
        weights = (q @ k.transpose(-2, -1) / c**0.5 + bias).softmax(-1)
        y = self.out(F.dropout(weights, 0.1, self.training) @ v)
        y = y.view(b, h // n, w // n, n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        if self.shift > 0:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + self.depth(y)


class UNet(nn.Module):
    """Skips over the whole model, sizes for interpolation read from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, 1)])
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU())
        self.up = nn.ModuleList([nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(12, 4, 3, padding=1)])
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = F.relu(self.down[0](x))
        second = F.relu(self.down[1](first))
        x = self.middle(second)
        for skip, layer in zip((second, first), self.up):
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
            x = F.relu(layer(torch.cat([x, skip], 1)))
        return {"out": self.head(x)}


def images(size: int, channels: int = 3) -> Callable[[], Any]:
    return lambda: tuple((torch.randn(count, channels, size, size),) for count in (4, 3))


# Each: the model, and two batches.
VISION: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "alexnet": (alexnet.alexnet_tiny, images(32, 1)),
    "vgg16": (vgg.vgg16_tiny, images(32, 1)),
    "resnet18": (resnet.resnet18_tiny, images(32, 1)),
    "mobilenet-v2": (mobilenet.mobilenet_v2_tiny, images(32, 1)),
    "mobilenet-v3": (mobilenet.mobilenet_v3_small_tiny, images(32, 1)),
    "densenet": (DenseNet, images(8)),
    "googlenet": (GoogLeNet, images(8)),
    "shufflenet": (ShuffleNet, images(8)),
    "efficientnet": (EfficientNet, images(8)),
    "convnext": (ConvNeXt, images(16)),
    "vit": (VisionTransformer, images(16)),
    "swin": (Swin, images(16)),
    "unet": (UNet, images(8)),
}
