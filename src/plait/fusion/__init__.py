"""Fusion: K models of one shape in, one module that trains them all at once out.

The model's forward runs on tensors with a trials axis (`dispatch/tensor.py`); common operations have a rule
for such tensors (`rules/`). Hyperparameters are vectors with one entry per trial. Nothing here starts a
process.
"""

from plait.fusion.check import group_by_shape
from plait.fusion.errors import FusionError
from plait.fusion.fusing import fuse
from plait.fusion.join_leave import add_trials, keep_trials, replace_trial
from plait.fusion.module import FusedModule
from plait.fusion.optim.conversion import fuse_optimizers, split_optimizer
from plait.fusion.optim.optimizer import FusedOptimizer
from plait.fusion.optim.trial_gradients import clip_gradients
from plait.fusion.optim.trial_loss_scales import LossScales
from plait.fusion.shared_input import Shared
from plait.fusion.speed.cuda_graph import CapturedStep

__all__ = [
    "CapturedStep",
    "FusedModule",
    "FusedOptimizer",
    "FusionError",
    "LossScales",
    "Shared",
    "add_trials",
    "clip_gradients",
    "fuse",
    "fuse_optimizers",
    "group_by_shape",
    "keep_trials",
    "replace_trial",
    "split_optimizer",
]
