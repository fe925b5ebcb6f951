"""PointNet (Qi et al., 2017): classes of point clouds, and classes of their points."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def pointnet_classifier(classes: int = 40, dropout: float = 0.3) -> nn.Module:
    """Clouds (batch, 3, points) in, logits (batch, classes) out; an input transform, no feature transform."""
    return Classifier(classes, (64, 128, 1024), (512, 256), dropout)


def pointnet_segmenter(classes: int = 50) -> nn.Module:
    """Clouds (batch, 3, points) in, logits of each point (batch, points, classes) out."""
    return Segmenter(classes, (64, 128, 1024), (512, 256), (512, 256, 128))


def pointnet_tiny(classes: int = 10, dropout: float = 0.0) -> nn.Module:
    """The classifier with widths of 8 to 32."""
    return Classifier(classes, (8, 16, 32), (16, 8), dropout)


def pointnet_segmenter_tiny(classes: int = 4) -> nn.Module:
    """The segmenter with widths of 8 to 32."""
    return Segmenter(classes, (8, 16, 32), (16, 8), (16, 8))


def _points(widths: Sequence[int], last_relu: bool) -> nn.Sequential:
    """Pointwise layers: 1x1 convolutions, batch norm, ReLU."""
    layers: list[nn.Module] = []
    for number, (channels, width) in enumerate(pairwise(widths), 2):
        layers += [nn.Conv1d(channels, width, 1), nn.BatchNorm1d(width)]
        if last_relu or number < len(widths):
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class InputTransform(nn.Module):
    """A 3x3 matrix for each cloud: the identity plus a learned function of the cloud."""

    def __init__(self, widths: Sequence[int], hidden: Sequence[int]) -> None:
        super().__init__()
        self.points = _points((3, *widths), last_relu=True)
        layers: list[nn.Module] = []
        for channels, width in zip((widths[-1], *hidden), hidden):
            layers += [nn.Linear(channels, width), nn.BatchNorm1d(width), nn.ReLU()]
        self.head = nn.Sequential(*layers, nn.Linear(hidden[-1], 9))

    def forward(self, clouds_bcp: Tensor) -> Tensor:
        offsets = self.head(self.points(clouds_bcp).max(2).values).view(-1, 3, 3)
        eye = torch.eye(3, dtype=offsets.dtype, device=offsets.device)
        moved: Tensor = offsets + eye
        return moved


class Features(nn.Module):
    """Features of each point (batch, first width, points) and of the cloud (batch, last width)."""

    def __init__(self, widths: Sequence[int], hidden: Sequence[int]) -> None:
        super().__init__()
        self.transform = InputTransform(widths, hidden)
        self.first = _points((3, widths[0]), last_relu=True)
        self.rest = _points(widths, last_relu=False)

    def forward(self, clouds_bcp: Tensor) -> tuple[Tensor, Tensor]:
        turned = torch.bmm(clouds_bcp.transpose(1, 2), self.transform(clouds_bcp)).transpose(1, 2)
        local: Tensor = self.first(turned)
        whole: Tensor = self.rest(local).max(2).values
        return local, whole


class Classifier(nn.Module):
    """A class for each cloud."""

    def __init__(self, classes: int, widths: Sequence[int], hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.features = Features(widths, hidden)
        self.head = nn.Sequential(
            nn.Linear(widths[-1], hidden[0]),
            nn.BatchNorm1d(hidden[0]),
            nn.ReLU(),
            nn.Linear(hidden[0], hidden[1]),
            nn.Dropout(dropout),
            nn.BatchNorm1d(hidden[1]),
            nn.ReLU(),
            nn.Linear(hidden[1], classes),
        )

    def forward(self, clouds_bcp: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(clouds_bcp)[1])
        return logits


class Segmenter(nn.Module):
    """A class for each point, from its features and those of its cloud."""

    def __init__(
        self, classes: int, widths: Sequence[int], hidden: Sequence[int], head: Sequence[int]
    ) -> None:
        super().__init__()
        self.features = Features(widths, hidden)
        self.points = _points((widths[0] + widths[-1], *head), last_relu=True)
        self.head = nn.Conv1d(head[-1], classes, 1)

    def forward(self, clouds_bcp: Tensor) -> Tensor:
        local, whole = self.features(clouds_bcp)
        both = torch.cat([whole.unsqueeze(2).expand(-1, -1, local.shape[2]), local], 1)
        logits_bpc: Tensor = self.head(self.points(both)).transpose(1, 2)
        return logits_bpc
