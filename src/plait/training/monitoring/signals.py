"""The signals of one step of a run, as all engines report them."""

from __future__ import annotations

from plait.core.codec import finite
from plait.core.run_events import Signals
from plait.training.run import Run


def step_signals(run: Run, step: int, loss: float, samples: int, step_s: float | None) -> Signals:
    """The signals of a step of `samples` samples with the run's settings; `step_s` is None if not timed.

    The noise of the gradients is that of all steps so far. What else an engine measures it adds itself.
    """
    noise = run.noise
    return Signals(
        step=step,
        loss=finite(loss),
        batch_size=run.batch_size,
        lr_factor=run.trial.batch.lr_factor,
        workers=run.worker.world_size,
        sync=run.settings.sync.kind,
        topology=run.settings.topology.name,
        step_s=step_s,
        samples_per_s=samples / step_s if step_s else None,
        noise_scale=noise.noise_scale,
        variance=noise.variance,
        squared_norm=noise.squared_norm,
        note=noise.note,
    )
