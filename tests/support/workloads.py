"""Every workload as a tiny job; such a job in two stages on two ranks; and its stashed weights, simulated."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import plait
from plait.data.call_model import as_arguments
from plait.data.loader import to_device
from plait.data.sampler import Position, batches
from plait.planner.partition.partitioner import Settings
from plait.planner.schedules.in_flight import Schedule
from plait.profiler import profile
from plait.profiler.profile import Profile, profile_model
from plait.profiler.traced_model import TracedModel
from plait.schema.results import RunResult
from plait.schema.settings import (
    UNVERIFIED,
    CheckpointSettings,
    EvaluateSettings,
    PipelineSettings,
    TrainSettings,
)
from plait.training import components
from plait.training.components import Components
from plait.training.engines import pipeline_setup
from plait.training.optimizers.lr_schedule import build_lr_factor, set_lr
from support.training import PlainWorker, train_with

EXAMPLES = Path(__file__).parents[2] / "examples"
MICROBATCHES, STEPS = 2, 3
CPU = torch.device("cpu")

# Dropout is off: pipelines, sweeps and one process draw other random numbers.
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGES = {"data.synthetic": {"shape": [1, 8, 8], "samples": 12}, "data.batch_size": 6}
GREY = {**IMAGES, "model_args.channels": 1}
TEXTS = {"data.synthetic": {"shape": [6], "vocabulary": 16, "samples": 12}, "data.batch_size": 4}
NUMBERS = {"kind": "translation.number_words:number_words", "samples": 24, "test_samples": 6, "merges": 60}
GPT2 = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
GPT2 |= {
    "bos_token_id": 0,
    "eos_token_id": 0,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
VIT = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 1}
VIT |= {**NO_DROPOUT, "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}


def _made(kind: str, **options: Any) -> dict[str, Any]:
    """Batches of four of what a function makes up."""
    return {"data.synthetic": {"kind": kind, **options}, "data.batch_size": 4}


# What `--set` puts over the example of that name to make it tiny. An example without an entry fails a test.
TINY: Mapping[str, Mapping[str, Any]] = {
    "mlp": IMAGES,
    "alexnet": GREY,
    "vgg": GREY,
    "digits": GREY,
    "mobilenet": GREY,
    "pointnet": {"data.shape": [3, 8], "data.samples": 12, "data.batch_size": 6},
    "dcgan": {"data.samples": 12, "data.batch_size": 6},
    "lstm": {**TEXTS, "model_args.vocabulary": 16},
    "transformer": TEXTS,
    "bert": TEXTS,
    "awd-lstm": {
        **_made(
            "plait.workloads.data.continued_text:synthetic_text",
            streams=4,
            length=5,
            vocabulary=12,
            windows=2,
        ),
        "model_args": {"vocabulary": 12, "streams": 4, "dropout": 0.0},
    },
    "gnmt": {
        "data.synthetic": NUMBERS,
        "data.batch_size": 4,
        "model_args": {"vocabulary": 100, "width": 8},
    },
    "gnmt-catalogues": {
        "data.synthetic": {**NUMBERS, "tokens": 30},
        "data.batch_size": 3,
        "model_args": {"vocabulary": 100, "width": 8, "layers": 2, "dropout": 0.0},
    },
    "s2vt": {
        **_made("captions:synthetic_captions", samples=12, features=5, frames=4),
        "model_args": {"vocabulary": 12, "features": 5},
    },
    "bert-pretraining": {
        **_made("bert.shards:synthetic_shards", samples=12, length=16, vocabulary=64),
        "model_args": {"size": "tiny", "vocabulary": 64, "context": 16, "dropout": 0.0},
    },
    "squad": {
        **_made("bert.squad:synthetic_squad", questions=12, length=48),
        "model_args": {"size": "tiny", "vocabulary": 128, "context": 48, "dropout": 0.0},
    },
    "gpt2": {
        **_made("text_lines:synthetic_lines", samples=12, length=8),
        "model_args.config": GPT2,
    },
    "lora_sweep": _made("text_lines:synthetic_lines", samples=12, length=8),
}
# Further models of transformers, over the example gpt2.
TRANSFORMERS: Mapping[str, Mapping[str, Any]] = {
    "t5": {
        "data": {"kind": "support.workloads:Arguments", "batch_size": 4},
        "model_args": {"architecture": "T5ForConditionalGeneration", "config": T5},
    },
    "vit": {
        "data": {"kind": "support.workloads:Arguments", "batch_size": 4, "images": True},
        "model_args": {"architecture": "ViTForImageClassification", "config": VIT},
    },
}


class Arguments:
    """Samples as dicts of a model's arguments: padded texts with their masks, or images."""

    def __init__(self, split: str, images: bool = False) -> None:
        self.images = images
        self.seed = len(split)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(100 * self.seed + index)
        if self.images:
            return {
                "pixel_values": torch.randn(1, 8, 8, generator=generator),
                "labels": torch.tensor(index % 3),
            }
        tokens = torch.randint(1, 40, (8,), generator=generator)
        mask = (torch.arange(8) < 5 + index % 4).long()
        return {
            "input_ids": tokens * mask,
            "attention_mask": mask,
            "labels": torch.where(mask == 1, tokens, -100),
        }


def job_of(workload: str) -> TrainSettings:
    """The workload's job with few steps of a tiny model in float64, evaluated and saved at the end."""
    changes = {"precision": "float64", "device": "cpu"}
    if workload in TINY:
        changes |= {"data.kind": "synthetic"} | TINY[workload]
    else:
        changes |= TRANSFORMERS[workload]
    example = EXAMPLES / f"{workload if workload in TINY else 'gpt2'}.yaml"
    over = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    found: TrainSettings = plait.read_job(example, over).settings()
    optimizer = found.optimizer
    if optimizer.kind != "sgd":
        # A large epsilon keeps the rounding of gradients that are truly zero from being blown up.
        optimizer = replace(optimizer, options={**optimizer.options, "eps": 1e-3})
    return replace(
        found,
        optimizer=optimizer,
        lr_schedule=replace(found.lr_schedule, warmup_steps=0),
        epochs=None,
        steps=STEPS,
        evaluate=EvaluateSettings(metric=found.evaluate.metric, batch_size=found.evaluate.batch_size),
        checkpoint=CheckpointSettings(),
        verify=UNVERIFIED,
    )


def profiled(settings: TrainSettings) -> Profile:
    """The job's model measured on a batch of its data; its trace, made first, serves its stages, too."""
    parts = components.build(settings, CPU)
    pipeline_setup.trace_components(settings, parts, evaluation=False)
    contents = parts.train_set.example_batches((4, 3), settings.seed)
    inputs, target = to_device(contents[0], CPU, parts.dtype)
    return profile_model(
        parts.model, as_arguments(inputs), lambda out: parts.loss(out, target), warmup=0, repeats=1
    )


def planned(settings: TrainSettings, profile: Profile, schedule: Schedule) -> TrainSettings:
    """The job in the two stages that a plan of its profile gives it, wherever they are cut."""
    count = 1 if schedule is Schedule.STASH else MICROBATCHES
    plan = plait.plan(profile, plait.machines(2, 1e12), Settings(schedule, count, straight=True))
    assert len(plan.stages) == 2
    assert sum(len(stage.layers) for stage in plan.stages) == len(profile.graph.nodes)
    return replace(settings, pipeline=PipelineSettings(plan))


class StageRun(NamedTuple):
    """A job on two workers as one of them saw it: `held` are the parameters of its stage."""

    settings: TrainSettings
    result: RunResult
    held: tuple[str, ...]


def train_in_stages(
    rank: int, jobs: Mapping[str, TrainSettings], schedules: Sequence[Schedule], folder: Path
) -> dict[tuple[str, Schedule], StageRun]:
    """Each workload profiled, planned and trained by each schedule, in a folder named after both.

    A workload's model is traced once for all of that, which takes longest.
    """
    found: dict[tuple[str, Schedule], StageRun] = {}
    for workload, job in jobs.items():
        trace = _Remembered(pipeline_setup.trace)
        with mock.patch.object(pipeline_setup, "trace", trace), mock.patch.object(profile, "trace", trace):
            plans: list[TrainSettings] = [job] * len(schedules)
            if rank == 0:
                measured = profiled(job)
                plans = [planned(job, measured, kind) for kind in schedules]
            dist.broadcast_object_list(plans)
            for kind, settings in zip(schedules, plans):
                result, parts = train_with(PlainWorker(), settings, folder / f"{workload} {kind.value}")
                # A worker frees what only others hold.
                held = (name for name, parameter in parts.model.named_parameters() if parameter.numel())
                found[workload, kind] = StageRun(settings, result, tuple(held))
                dist.barrier()
    return found


class _Remembered:
    """Traces a model once; a trace names tensors by path, so it serves another model of the same kind."""

    def __init__(self, trace: Callable[..., TracedModel]) -> None:
        self._trace = trace
        self._found: dict[Any, TracedModel] = {}

    def __call__(
        self, model: nn.Module, *args: Any, whole: Collection[str] = (), **options: Any
    ) -> TracedModel:
        key = frozenset(whole), options.get("evaluation")
        if key not in self._found:
            self._found[key] = self._trace(model, *args, whole=whole, **options)
        found = self._found[key]
        other = found.evaluation
        return replace(found, model=model, evaluation=None if other is None else replace(other, model=model))


class Stashed:
    """One process that applies the gradients of two stages under stash, one microbatch a batch.

    The first stage has two microbatches in flight, so a batch meets its weights, and those that both stages
    share, as they were before the last update, and the others as they are.
    """

    def __init__(self, settings: TrainSettings, held: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        self._settings, self._held = settings, held
        self.parts: Components = components.build(settings, CPU)
        self.losses: list[float] = []

    def train(self) -> dict[str, Tensor]:
        settings, parts = self._settings, self.parts
        factor = build_lr_factor(settings.lr_schedule, STEPS)
        named = dict(parts.model.named_parameters())
        before = {name: named[name].detach().clone() for name in self._held[0]}
        for step, content in enumerate(self._batches()):
            used = named | {name: value.clone().requires_grad_() for name, value in before.items()}
            loss = self._loss(used, content)
            self.losses.append(loss.item())
            loss.backward()
            for name in before:
                named[name].grad = used[name].grad
                before[name] = named[name].detach().clone()
            self._clip(named)
            set_lr(parts.optimizer, parts.base_lrs, factor(step))
            parts.optimizer.step()
            parts.optimizer.zero_grad()
        return {name: value.clone() for name, value in parts.model.state_dict().items()}

    @torch.no_grad()
    def loss_of_first_batch(self) -> float:
        """The loss of the first batch of training with the weights as they are now."""
        return float(self._loss(dict(self.parts.model.named_parameters()), next(self._batches())))

    def _loss(self, used: Mapping[str, Tensor], content: Any) -> Tensor:
        inputs, target = content
        arguments = as_arguments(inputs)
        args, kwargs = ((), arguments) if isinstance(arguments, Mapping) else (tuple(arguments), {})
        output = torch.func.functional_call(self.parts.model, dict(used), args, kwargs)
        return self.parts.loss(output, target)

    def _clip(self, named: Mapping[str, Tensor]) -> None:
        """Each stage clips what it alone holds; what both hold is clipped apart."""
        if self._settings.clip_norm is None:
            return
        first, second = (set(names) for names in self._held)
        for names in (first - second, second - first, first & second):
            torch.nn.utils.clip_grad_norm_([named[name] for name in names], self._settings.clip_norm)

    def _batches(self) -> Iterator[Any]:
        settings, source = self._settings, self.parts.train_set
        order = batches(
            Position(),
            len(source),
            settings.data.batch_size,
            seed=settings.seed,
            shuffle=settings.data.shuffle,
            keep_last=settings.data.last_batch == "keep",
            own_order=source.own_order(settings.seed, settings.data.batch_size),
        )
        for batch in islice(order, STEPS):
            content = source.batch(batch.epoch, batch.samples, settings.seed)
            yield to_device(content, CPU, self.parts.dtype)
