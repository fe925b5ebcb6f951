"""Runs and trials in MLflow."""

from __future__ import annotations

from typing import Any

from plait.callbacks.callback import PackagedCallback, flat
from plait.callbacks.records import EndRecord, EvaluationRecord, StartRecord, StepRecord

# What MLflow takes of a parameter's value, and how many parameters in one call.
_LONGEST, _MOST = 500, 100
_TAG = "plait.run"


class MLflow(PackagedCallback):
    """Logs settings, losses and metrics to MLflow, in the `experiment` of that name or of the job's name.

    A resumed run goes on in the same one there. Trials of a sweep are runs with the tag of their sweep.
    """

    package = "mlflow"

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None) -> None:
        super().__init__()
        from mlflow import entities, tracking

        self._entities: Any = entities
        self._client: Any = tracking.MlflowClient(tracking_uri)
        self._experiment = experiment
        self._run: str | None = None

    def on_start(self, record: StartRecord) -> None:
        if self._run is not None:
            return
        client, tag = self._client, f"{record.folder.absolute()}/{record.label}"
        name = self._experiment or record.name
        known = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if known is None else known.experiment_id
        earlier = client.search_runs([experiment], f"tags.`{_TAG}` = '{tag}'", max_results=1)
        if earlier:
            self._run = earlier[0].info.run_id
            client.update_run(self._run, status="RUNNING")
            return
        tags = {_TAG: tag, "plait.folder": str(record.folder.absolute())}
        self._run = client.create_run(experiment, tags=tags, run_name=record.label).info.run_id
        params = [
            self._entities.Param(key, str(value)[:_LONGEST]) for key, value in flat(record.settings).items()
        ]
        for first in range(0, len(params), _MOST):
            client.log_batch(self._run, params=params[first : first + _MOST])

    def on_step(self, record: StepRecord) -> None:
        self._client.log_metric(self._run, "train/loss", record.loss, step=record.step)
        if record.lr is not None:
            self._client.log_metric(self._run, "train/lr", record.lr, step=record.step)

    def on_evaluate(self, record: EvaluationRecord) -> None:
        for name, value in record.metrics.items():
            self._client.log_metric(self._run, f"test/{name}", value, step=record.step)

    def on_end(self, record: EndRecord) -> None:
        status = {"failed": "FAILED", "diverged": "FAILED", "stopped": "KILLED"}.get(
            record.reason, "FINISHED"
        )
        self._client.set_terminated(self._run, status)
        self._run = None
