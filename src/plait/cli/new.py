"""`plait new`: a model, a data set and a job file to start from."""

from __future__ import annotations

import importlib.util
import json
import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.os_errors import os_errors_as_messages
from plait.cli.train import JsonFlag
from plait.core.errors import InputError
from plait.core.shown import shown

CODE = '''\
"""A model and a data set for {name}.yaml; replace both with your own."""

import torch
from torch import nn


class Net(nn.Module):
    """A perceptron with one hidden layer."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.layers(points)


def make_data(split: str) -> torch.utils.data.Dataset:
    """Points inside and outside of a circle; called with "train" and "test" on every worker.

    Every worker must get the same samples, so they are drawn from a seed.
    """
    generator = torch.Generator().manual_seed(1 if split == "train" else 2)
    points = 2 * torch.rand(2000 if split == "train" else 500, 2, generator=generator) - 1
    labels = (points.square().sum(1) < 2 / torch.pi).long()
    return torch.utils.data.TensorDataset(points, labels)
'''
JOB = """\
# All keys: docs/jobs.md. Override one with: plait train {name}.yaml --set optimizer.lr=0.001
name: {name}
model: {name}:Net
model_args: {{hidden: 64}}
data: {{kind: "{name}:make_data", batch_size: 50}}
loss: cross-entropy
optimizer: {{kind: adam, lr: 0.01}}
epochs: 10
evaluate: {{every_steps: 100}}
parallel: {{workers: 1}}
"""


def new(
    name: Annotated[str, typer.Argument(help="Name of the files and the job.", show_default=False)],
    json_: JsonFlag = False,
) -> None:
    """Write NAME.py, with a small model and data set, and NAME.yaml, a job that trains it at once.

    Example: plait new circles
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,59}", name) or keyword.iskeyword(name):
        raise InputError(
            f"NAME: found {shown(name)}, expected a name that Python can import: letters, digits and '_'"
        )
    files = {Path(f"{name}.py"): CODE, Path(f"{name}.yaml"): JOB}
    for path in files:
        if path.is_symlink() or path.exists():
            raise InputError(f"{path}: exists already; choose another name, or move it away")
    if importlib.util.find_spec(name) is not None:
        raise InputError(f"NAME: found {name!r}, but Python has a module of this name; choose another one")
    with os_errors_as_messages():
        for path, text in files.items():
            with path.open("x") as file:  # fails if it has been made meanwhile
                file.write(text.format(name=name))
    if json_:
        print(json.dumps({"files": [str(path) for path in files]}))
    else:
        print(f"wrote {' and '.join(map(str, files))}; next: plait train {name}.yaml")
