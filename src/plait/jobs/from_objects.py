"""A job from the objects of a script: its model, data sets, loss, optimizer and metric."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from plait.api.data_parallel import check_unwrapped
from plait.api.joined_workers import start_in_process
from plait.api.objects import KeptObjects, keep
from plait.core.errors import JobError
from plait.core.names import did_you_mean
from plait.core.shown import shown
from plait.jobs.train_on import train_on, train_on_hosts
from plait.launcher.display import Display
from plait.schema.hosts import LOCAL
from plait.schema.job import Job, make_job
from plait.schema.results import RunResult
from plait.training.optimizers.build import optimizer_kinds
from plait.verification import unchanged_random_numbers
from plait.workloads.losses import describe
from plait.workloads.metrics import name_of

BATCH_SIZE = 32
_SETS = "(train_set, test_set), the second None where there is none"


@dataclass(frozen=True)
class Copies:
    """Makes copies of a model, with the weights that it had."""

    model: nn.Module

    @property
    def __name__(self) -> str:
        return type(self.model).__name__

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self.model)


@dataclass(frozen=True, eq=False)
class Splits:
    """Gives the data set of a split."""

    train: Any
    test: Any

    def __call__(self, split: str) -> Any:
        return self.train if split == "train" else self.test


def train_objects(
    given: Mapping[str, Any], resume: bool, run_folder: str | None, display: Display
) -> RunResult:
    """Run the job that has the keys `given`; see `plait.train`. One worker runs in this process."""
    job, kept = job_of_objects(given)
    if not _fits_here(job):
        with kept.in_use():
            return train_on_hosts(job, resume, run_folder, display, kept.files)
    with kept.in_use(), unchanged_random_numbers(), torch.enable_grad():
        return train_on(job, resume, run_folder, display, start_in_process, kept.files)


def _fits_here(job: Job) -> bool:
    """Whether the job has one worker, as which this process will do."""
    parallel = job.parallel
    has_one = job.placement.workers == 1 and not job.hosts and not parallel.elastic
    is_plain = parallel.plan == "data-parallel" and parallel.threads is None
    return has_one and is_plain and not torch.distributed.is_initialized()


def job_of_objects(given: Mapping[str, Any]) -> tuple[Job, KeptObjects]:
    """The job with the keys `given`, of which some are objects, and the objects that its run must keep."""
    keys = {key: value for key, value in given.items() if value is not None}
    _check_keys(keys)
    code: dict[str, object] = {}
    model, data, loss, metric = (keys.pop(key, None) for key in ("model", "data", "loss", "metric"))
    tree: dict[str, Any] = {"name": _name_of(model), **_sections(keys), **keys}
    for key, value in (("loss", loss), ("metric", metric)):
        if value is not None and not isinstance(value, str):
            code[key] = _checked_function(key, value)
    code |= _model_code(model, tree)
    code |= _data_code(data, tree)
    code |= _optimizer_code(tree)
    lists = {"callback": calls_of(keys, "callbacks"), "metric": calls_of(keys, "metrics")}
    tree = {key: value for key, value in tree.items() if key not in ("callbacks", "metrics")}
    code |= {f"{key}_{n}": each["call"] for key, calls in lists.items() for n, each in enumerate(calls)}
    code = {key: each for key, each in code.items() if not isinstance(each, str)}
    for each in lists["metric"]:
        if not isinstance(each["call"], str):
            each.setdefault("name", name_of(each["call"]))
    kept = keep(code)
    names = {"model": model, "loss": loss, "metric": metric, **kept.names}
    tree |= {key: names[key] for key in ("model", "loss") if names[key] is not None}
    if names["metric"] is not None:
        tree["evaluate"] = {**tree.get("evaluate", {}), "metric": names["metric"]}
    for key, calls in lists.items():
        for number, each in enumerate(calls):
            each["call"] = kept.names.get(f"{key}_{number}", each["call"])
    if lists["metric"]:
        tree["evaluate"] = {**tree.get("evaluate", {}), "metrics": lists["metric"]}
    if lists["callback"]:
        tree["callbacks"] = lists["callback"]
    for key in ("data", "optimizer"):
        if key in kept.names:
            tree[key] = {**tree.get(key, {}), "kind": kept.names[key]}
    job = make_job(tree)
    _check_hosts(job, kept)
    return job, kept


def _check_keys(keys: Mapping[str, Any]) -> None:
    known = {each.name for each in fields(Job)} - {"content", "folder", "taken"}
    known |= {"batch_size", "workers", "metric", "metrics"}
    for key in keys:
        if key not in known:
            raise JobError(f"{key}: plait.train takes no {key!r}{did_you_mean(key, known)}")
    for key in ("model", "data"):
        if key not in keys:
            raise JobError(f"{key}: found none; plait.train needs model and data, or a job")


def _check_hosts(job: Job, kept: KeptObjects) -> None:
    others = [host.name for host in job.hosts if host.name != LOCAL]
    if kept.files and others:
        raise JobError(
            f"cluster.hosts: found {', '.join(others)}, but objects of a script are kept on this machine; "
            f"put model, data and loss into a module that the hosts have, and name them 'module:name'"
        )


def _name_of(model: Any) -> str:
    """The name of a run that was given none: the model's."""
    if isinstance(model, str):
        return model.rpartition(":")[2].lower()
    name = getattr(model, "__name__", type(model).__name__).lower()
    return name if name.isidentifier() else "run"


def _sections(keys: dict[str, Any]) -> dict[str, Any]:
    """The sections with the keys that have a shorter way; they are removed from `keys`."""
    data, parallel = {"batch_size": keys.pop("batch_size", BATCH_SIZE)}, dict(keys.pop("parallel", {}))
    if "workers" in keys:
        parallel["workers"] = keys.pop("workers")
    return {"data": data, **({"parallel": parallel} if parallel else {})}


def with_callbacks(job: Job, callbacks: Sequence[object]) -> tuple[Job, KeptObjects]:
    """The job with further callbacks, and the objects among them that its run must keep."""
    calls = calls_of({"callbacks": callbacks}, "callbacks")
    objects = {f"callback_{n}": each["call"] for n, each in enumerate(calls)}
    kept = keep({key: each for key, each in objects.items() if not isinstance(each, str)})
    named = [{**each, "call": kept.names.get(f"callback_{n}", each["call"])} for n, each in enumerate(calls)]
    known = job.content.get("callbacks") or []
    made = make_job(job.content, [("callbacks", [*known, *named])])
    job = replace(job, callbacks=made.callbacks, content=made.content)
    _check_hosts(job, kept)
    return job, kept


def calls_of(keys: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The items of a list of code, each a section with its object or name as `call`."""
    given = keys.get(key) or ()
    if not isinstance(given, (list, tuple)):
        raise JobError(f"{key}: found {shown(given)}, expected a list: {key}=[...]")
    for each in given:
        if isinstance(each, Mapping) and "call" not in each:
            raise JobError(f"{key}: found {shown(each)}, expected an object, a name, or a dict with 'call'")
    return [dict(each) if isinstance(each, Mapping) else {"call": each} for each in given]


def _checked_function(key: str, value: object) -> object:
    if not callable(value):
        raise JobError(f"{key}: found {shown(value)}, expected a function of (output, target), or a name")
    return value


def _model_code(model: Any, tree: Mapping[str, Any]) -> dict[str, object]:
    if isinstance(model, str):
        return {}
    check_unwrapped("model", model)
    if isinstance(model, nn.Module):
        if tree.get("model_args"):
            raise JobError(
                f"model_args: found {shown(tree['model_args'])}, but the model is made already; pass its "
                f"class"
            )
        return {"model": Copies(copy.deepcopy(model))}
    if not callable(model):
        raise JobError(f"model: found {describe(model)}, expected a class, a function or a torch.nn.Module")
    return {"model": model}


def _data_code(data: Any, tree: dict[str, Any]) -> dict[str, object]:
    """The data sets as code; a name, or the section of a job file, goes to `tree`."""
    if isinstance(data, (str, Mapping)):
        tree["data"] |= {"kind": data} if isinstance(data, str) else data
        return {}
    if callable(data) and not hasattr(data, "__getitem__"):
        return {"data": data}
    if isinstance(data, (tuple, list)):
        if len(data) != 2 or all(isinstance(each, Tensor) for each in data):
            raise JobError(
                f"data: found {describe(data)}, expected {_SETS}; tensors are a set together: "
                f"((inputs, targets), (test_inputs, test_targets))"
            )
        train, test = data
    else:
        train, test = data, None
    if train is None:
        raise JobError(f"data: found None as the training set, expected {_SETS}")
    return {"data": Splits(as_set(train, "train"), as_set(test, "test"))}


def as_set(value: Any, split: str) -> Any:
    """`value` as a data set: tensors together are one; JobError for what is none."""
    if isinstance(value, DataLoader):
        raise JobError(
            f"data: found a DataLoader as the {split} set, expected the data set: pass loader.dataset, and "
            f"batch_size={value.batch_size}"
        )
    if isinstance(value, (tuple, list)) and value and all(map(_is_array, value)):
        lengths = [str(len(each)) for each in value]
        if len(set(lengths)) > 1:
            raise JobError(
                f"data: found arrays of {' and '.join(lengths)} samples as the {split} set, expected "
                f"one number of inputs and targets: data=((inputs, targets), (test_inputs, test_targets))"
            )
        return TensorDataset(*(torch.as_tensor(each) for each in value))
    if value is not None and not hasattr(value, "__getitem__") and not hasattr(value, "__iter__"):
        raise JobError(f"data: found {describe(value)} as the {split} set, expected a torch Dataset")
    return value


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "__array_interface__")


def _optimizer_code(tree: dict[str, Any]) -> dict[str, object]:
    """The optimizer as code if it is a class or a function; its section of the job, otherwise."""
    optimizer = tree.pop("optimizer", None)
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise JobError(
            f"optimizer: found a {name} that is made already, expected how to make it: each worker has its "
            f"own; pass functools.partial(torch.optim.{name}, lr=...), or a dict with kind and lr"
        )
    section: dict[str, Any] = {}
    kind: Any = optimizer
    if isinstance(optimizer, functools.partial) and not optimizer.args:
        section, kind = dict(optimizer.keywords), optimizer.func
    elif isinstance(optimizer, Mapping):
        section = dict(optimizer)
        kind = section.pop("kind", None)
    named = {cls: name for name, cls in optimizer_kinds().items()}
    kind = named.get(kind, kind) if isinstance(kind, type) else kind
    if isinstance(kind, str):
        section["kind"] = kind
    elif kind is not None and not callable(kind):
        raise JobError(
            f"optimizer: found {shown(kind)}, expected a dict such as {{'kind': 'adamw', 'lr': 0.01}}, a "
            f"name, or functools.partial(torch.optim.AdamW, lr=0.01)"
        )
    if section:
        tree["optimizer"] = section
    return {"optimizer": kind} if callable(kind) else {}
