"""What `DataLoader` refuses, and its errors in the words of a loop."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Never

from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler, default_collate

from plait.core.errors import DataError, InputError
from plait.core.names import did_you_mean
from plait.workloads.data import is_stream

# Arguments of torch's DataLoader that this one does not take, and why.
_REFUSED = {
    "batch_sampler": "batches are cut from one order of samples, so that any number of workers can share "
    "them; use batch_size=, with sampler= for an order of your own",
    "generator": "the order follows seed and epoch alone; use seed=",
    "worker_init_fn": "each sample has its own seed, whichever process reads it, so that no process has "
    "to be seeded; open files in the data set where they are first read",
    "prefetch_factor": "each loader process prepares two batches in advance",
    "multiprocessing_context": "loader processes are forked",
    "timeout": "loader processes that end are noticed at once",
    "pin_memory_device": "memory is pinned for the device of this worker",
    "in_order": "batches always come in order",
}
_KNOWN = ("shuffle", "seed", "drop_last", "sampler", "num_workers", "collate_fn", "pin_memory", "world")
# The words of job files in messages of the data package, and what they are called here.
_WORDS = (
    ("data.kind: ", "DataLoader: "),
    ("data.loaders", "num_workers"),
    ("loaders: 0", "num_workers=0"),
    ("data.batch_size", "batch_size"),
    ("last_batch: drop", "drop_last=True"),
)


def refuse(name: str) -> Never:
    """Refuse a keyword argument that `DataLoader` does not have."""
    if name in _REFUSED:
        raise InputError(f"DataLoader: {name} is not taken: {_REFUSED[name]}")
    hint = did_you_mean(name, _KNOWN)
    raise TypeError(f"DataLoader() got an unexpected keyword argument {name!r}{hint}")


def check_counts(batch_size: int, num_workers: int, seed: object) -> None:
    """Refuse what is not a count."""
    # True is an int, and comes second if batch_size was left out before shuffle.
    for name, count, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
        if not isinstance(count, int) or isinstance(count, bool) or count < least:
            raise InputError(f"DataLoader: {name}: found {count!r}, expected a number of at least {least}")
    if not isinstance(seed, Integral):
        raise InputError(f"DataLoader: seed: found {seed!r}, expected a whole number")


def check_dataset(dataset: object) -> None:
    """Refuse what is not a data set."""
    if isinstance(dataset, TorchDataLoader):
        raise InputError("DataLoader: found a torch DataLoader, expected a data set: use loader.dataset")
    if isinstance(dataset, tuple) and dataset and all(isinstance(each, Tensor) for each in dataset):
        raise InputError(
            f"DataLoader: found a tuple of {len(dataset)} tensors, each of which would be a sample; tensors "
            "together are a data set: torch.utils.data.TensorDataset(inputs, targets)"
        )
    if not is_stream(dataset) and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise InputError(
            f"DataLoader: found {dataset!r}, expected a data set with __getitem__ and __len__, or __iter__"
        )


def check_sampler(sampler: object) -> None:
    """Refuse samplers whose order depends on the worker, or cannot be drawn again."""
    if isinstance(sampler, DistributedSampler):
        raise InputError(
            "DataLoader: found a DistributedSampler, expected no sampler: every worker gets its share of "
            "each batch without one; use shuffle= and seed="
        )
    if getattr(sampler, "generator", None) is not None:
        raise InputError(
            f"DataLoader: the {type(sampler).__name__} has its own generator, whose draws a resumed run "
            "cannot repeat; leave it out, and the order follows seed= and the epoch"
        )


def collate(samples: list[Any]) -> Any:
    """torch's `default_collate`, with advice where it fails."""
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, ValueError, KeyError) as failure:
        lines = str(failure).strip().splitlines()
        why = f"{type(failure).__name__}: {lines[0]}" if lines else type(failure).__name__
        raise DataError(
            f"DataLoader: the samples of a batch cannot be stacked ({why}); use collate_fn=, a function that "
            "makes a batch of a list of samples, padding where it must"
        ) from failure


def in_words_of_a_loop(message: str) -> str:
    """A message about a job's data with the names of `DataLoader`'s arguments."""
    for job_word, word in _WORDS:
        message = message.replace(job_word, word)
    return message
