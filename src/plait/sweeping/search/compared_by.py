"""What the trials of a sweep are compared by."""

from __future__ import annotations

from plait.core.errors import InputError
from plait.sweeping.settings import SweepSettings
from plait.workloads.metrics import find_metrics, find_modes, modes_of, unknown_mode


def choose_metric(settings: SweepSettings) -> str:
    """The metric that trials are compared by; InputError if evaluation does not give it."""
    train, name = settings.train, settings.search.metric
    metrics = find_metrics(train.evaluate, train.loss)
    known = ["loss", *(metric.name for metric in metrics)]
    if name == "auto":
        name = known[min(1, len(metrics))]
    if name not in known:
        raise InputError(f"--metric: found {name!r}, but evaluation gives {' and '.join(known)}")
    if name not in modes_of(metrics):
        raise InputError(f"--metric: {unknown_mode(name)}, or compare by the loss: --metric loss")
    return name


def check_comparable(settings: SweepSettings, metric: str, has_test_split: bool = True) -> None:
    """Refuse to compare trials by losses that are computed differently, unless the user asks for it."""
    swept = [d.key for d in settings.over if d.key == "loss" or d.key.startswith("loss_args.")]
    by_loss = metric == "loss" or not has_test_split
    mode = find_modes(settings.train.evaluate, settings.train.loss)[metric]
    if settings.search.kind == "study" and not has_test_split and mode == "max":
        raise InputError(
            f"--study: trials would be compared by their training loss, since there is no test split, but "
            f"the study maximizes {metric}; give the data a test split, or compare by the loss: --metric loss"
        )
    if swept and by_loss and settings.search.metric != "loss":
        where = "" if has_test_split else ", since there is no test split"
        raise InputError(
            f"--over {swept[0]}: trials would be compared by their losses{where}, which are then computed "
            f"differently; name a metric to compare them by (evaluate.metric in the job, or --metric), or "
            f"give --metric loss to compare them all the same"
        )
