"""The signals of one step of a trial, as all engines report them."""

from __future__ import annotations

from plait.adapt.monitors.gradient_noise import GradientAverages
from plait.core.codec import finite
from plait.core.run_events import Signals
from plait.training.trial import Trial


def step_signals(
    trial: Trial,
    noise: GradientAverages,
    workers: int,
    step: int,
    loss: float,
    samples: int,
    step_s: float | None,
) -> Signals:
    """The signals of a step of `samples` samples with the trial's settings; `step_s` is None if not timed.

    `noise` is that of all steps so far. What else an engine measures it adds itself.
    """
    return Signals(
        step=step,
        loss=finite(loss),
        batch_size=trial.batch.size,
        lr_factor=trial.batch.lr_factor,
        workers=workers,
        sync=trial.settings.sync.kind,
        topology=trial.settings.topology.name,
        step_s=step_s,
        samples_per_s=samples / step_s if step_s else None,
        noise_scale=noise.noise_scale,
        variance=noise.variance,
        squared_norm=noise.squared_norm,
        note=noise.note,
    )
