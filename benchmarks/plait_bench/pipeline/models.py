"""Models for the pipeline's experiments: small enough for slow cores, in the proportions of the large."""

from __future__ import annotations

from torch import nn

from plait.schema.settings import DataSettings, ModelSettings, OptimizerSettings, TrainSettings
from plait.workloads.initial import he_normal

_BLOCKS = ((16, 16), (32, 32), (64, 64, 64), (128, 128, 128), (128, 128, 128))
_TOKENS = 4000


def vgg16_quarter(classes: int = 250) -> nn.Sequential:
    """VGG-16 with a quarter of its widths everywhere: 8.7M parameters, 89% of them in dense layers.

    Takes images of 64x64, averaged to 7x7 before the dense layers as in the original.
    """
    layers: list[nn.Module] = []
    channels = 3
    for widths in _BLOCKS:
        for width in widths:
            layers += [nn.Conv2d(channels, width, kernel_size=3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(channels * 49, 1024), nn.ReLU()]
    layers += [nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, classes)]
    model = nn.Sequential(*layers)
    he_normal(model)
    return model


def job(name: str, batch_size: int) -> TrainSettings:
    """A job on made-up data: `vgg16`, `lstm` or `transformer`, with batches of `batch` samples."""
    tokens = {"shape": [32], "vocabulary": _TOKENS, "samples": 256}
    short = {**tokens, "shape": [8]}
    models = {
        "vgg16": (
            ModelSettings("plait_bench.pipeline.models:vgg16_quarter"),
            {"shape": [3, 64, 64], "classes": 250, "samples": 256},
        ),
        # GNMT's shape at half its layers: an embedding, LSTMs, a projection onto the vocabulary.
        "lstm": (
            ModelSettings(
                "plait.workloads.lstm:lstm",
                {"vocabulary": _TOKENS, "width": 128, "layers": 4, "dropout": 0.0},
            ),
            short,
        ),
        "transformer": (
            ModelSettings(
                "plait.workloads.transformer:transformer",
                {
                    "vocabulary": _TOKENS,
                    "context": 32,
                    "layers": 4,
                    "heads": 4,
                    "width": 128,
                    "dropout": 0.0,
                    "tied": False,
                },
            ),
            tokens,
        ),
    }
    model, options = models[name]
    return TrainSettings(
        name,
        model,
        DataSettings("synthetic", batch_size, options),
        optimizer=OptimizerSettings("sgd", {"lr": 0.01, "momentum": 0.9}),
        steps=1,
        device="cpu",
    )
