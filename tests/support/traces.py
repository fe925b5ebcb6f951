"""Traces of the models that most pipelines in test worlds train; importing it makes them.

A worker that traces such a model again finds most of its calls cached.
"""

from functools import partial

import torch

from plait.profiler.trace import trace
from support import sweeping, training
from support.elastic import MortalLayers
from support.pipelines import Case, build, traced_model

for name in ("cnn", "lstm", "transformer", "masked"):
    traced_model(Case(name, ()), build(Case(name, ())))

# As jobs do: on the first four images, and on three others.
_images = [torch.zeros(samples, 1, 8, 8, dtype=torch.float64) for samples in (4, 3)]
for make in (
    training.small_net,
    training.norm_net,
    sweeping.norm_net,
    sweeping.Halves,
    partial(MortalLayers, 0),
):
    trace(make().double(), _images[:1], others=[_images[1:]])
