"""Runs and trials in Weights & Biases."""

from __future__ import annotations

import hashlib
from typing import Any

from plait.callbacks.callback import PackagedCallback, flat
from plait.callbacks.records import ChangeRecord, EndRecord, EvaluationRecord, StartRecord, StepRecord


class WandB(PackagedCallback):
    """Logs losses, metrics and changes to W&B; `options` are those of `wandb.init`, such as `project`.

    A resumed run goes on in the same one there. Trials of a sweep are runs of one group.
    """

    package = "wandb"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        import wandb

        self._init: Any = wandb.init
        self._options = options
        self._run: Any = None

    def on_start(self, record: StartRecord) -> None:
        if self._run is not None:
            return
        path = f"{record.folder.absolute()}/{record.trial}"
        options: dict[str, Any] = {
            "project": record.name,
            "name": record.label,
            "id": hashlib.sha256(path.encode()).hexdigest()[:16],
            "resume": "allow",
            "dir": str(record.folder),
            "config": flat(record.settings),
            # Trials are several runs of one process.
            "reinit": "create_new",
            **({} if record.trial is None else {"group": record.folder.name}),
        }
        self._run = self._init(**options | self._options)

    def on_step(self, record: StepRecord) -> None:
        values = {"train/loss": record.loss, "train/lr": record.lr, "epoch": record.epoch}
        self._run.log({k: v for k, v in values.items() if v is not None}, step=record.step)

    def on_evaluate(self, record: EvaluationRecord) -> None:
        self._run.log({f"test/{name}": value for name, value in record.metrics.items()}, step=record.step)

    def on_change(self, record: ChangeRecord) -> None:
        self._run.log({f"change/{record.kind}": f"{dict(record.values)}: {record.why}"}, step=record.step)

    def on_end(self, record: EndRecord) -> None:
        self._run.finish(exit_code=int(record.reason in ("failed", "diverged")))
        self._run = None
