"""What a pipeline needs of the job, and what its stages are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from plait.comm.rendezvous import Rendezvous
from plait.pipeline.cutting.cut import StageModule, cut
from plait.pipeline.gradient_sync import MembersOf
from plait.pipeline.stage import Autocast, Loss, RandomPosition, ordered_inputs
from plait.pipeline.updates.loss_scale import LossScaling
from plait.profiler.traced_model import TracedModel
from plait.schema.topology_spec import TopologySpec
from plait.verification.observe import RandomState


@dataclass(frozen=True)
class StageKind:
    """What the stages of a pipeline are: slices of a model, or of many `trials`' models that are fused.

    `make` makes the stage of some layers, and `order_inputs` gives the tensors of a microbatch in the order
    of a trace's inputs. `begin` is called with the number of a microbatch before each forward of it.
    `random_state` is what random numbers of a later stage go on from, and `unpacked` reads it where it came.
    """

    make: Callable[[TracedModel, Sequence[str]], StageModule] = cut
    order_inputs: Callable[[TracedModel, Any], list[Tensor]] = ordered_inputs
    trials: int | None = None
    begin: Callable[[int], None] = lambda microbatch: None
    random_state: Callable[[], RandomPosition] = RandomState.now
    unpacked: Callable[[Tensor], RandomPosition] = RandomState.unpacked


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class PipelineParts:
    """What a pipeline needs of the job."""

    loss: Loss
    optimizer: Callable[[Sequence[Parameter]], torch.optim.Optimizer]
    device: torch.device
    autocast: Autocast
    rendezvous: Rendezvous
    clip_norm: float | None = None
    topology: TopologySpec | None = None
    # Around each forward and backward, where a worker is made slower on purpose.
    slowed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    stages: StageKind = StageKind()
    # Those of the host, which its workers share.
    cores: int = field(default_factory=_usable_cores)
    # For fp16, under schedules that drain.
    loss_scale: LossScaling | None = None
    # The process group of all workers of the pipelines, and the replicas with theirs; by default the world,
    # and new groups, which all workers of the world make together.
    everyone: dist.ProcessGroup | None = None
    members_of: MembersOf | None = None
    # Whether stages run compiled, by torch.compile.
    compile: bool = False
