"""A trial of a running array is rebuilt alone, and takes the array's next step as a plain one."""

from __future__ import annotations

import pytest
import torch

from plait.fusion.verify.plain_run import drawing_as
from plait.schema.settings import GroupSettings, ModelSettings, OptimizerSettings, TrainSettings
from plait.sweeping.datasets import DataSets
from plait.sweeping.trial_settings import with_values
from plait.sweeping.trials.assigned_trials import make_entry
from plait.training.batch_streams import next_batches, open_stream
from plait.training.checkpoint import Checkpoint
from plait.training.engines.train_step import TrainStep, step_alone
from plait.training.fused.fused_components import FusedComponents, rebuild_trial
from plait.training.trial import Trial
from support.training import digits_job

NO_DECAY = GroupSettings("*.bias", {"weight_decay": 0.0})
JOBS = {
    "adamw": {"optimizer": OptimizerSettings("adamw", {"lr": 0.01, "weight_decay": 0.1}, (NO_DECAY,))},
    "sgd": {"optimizer": OptimizerSettings("sgd", {"lr": 0.1, "momentum": 0.9}), "clip_norm": 0.1},
    "accumulate": {"accumulate": 2, "precision": "float64"},
    "norms": {"model": ModelSettings("support.sweeping:norm_net")},
}


@pytest.mark.parametrize("name", JOBS)
def test_a_rebuilt_trial_takes_the_arrays_next_step(name: str):
    base = {"model": ModelSettings("support.training:small_net", {"dropout": 0.3}), "precision": "float64"}
    job: TrainSettings = digits_job(steps=9, **{**base, **JOBS[name]})
    each = [with_values(job, {"optimizer.lr": 0.01 * (1 + n), "seed": n}) for n in range(3)]
    sets, device = DataSets(), torch.device("cpu")
    array = FusedComponents([make_entry(settings, None, device, sets) for settings in each])
    step = TrainStep(array, each[0])
    streams = [open_stream(sets.of(settings)[0], Trial(settings)) for settings in each]
    for _ in range(3):
        step.step(next_batches(streams), [1.0, 0.5, 0.25])
    batches = next_batches(streams)
    rebuilt = rebuild_trial(array, 1)
    before = {key: value.clone() for key, value in array.fused.state_dict().items()}
    fused = array.fused
    with drawing_as(rebuilt.components.model, int(fused.seeds[1]), int(fused.ages[1]), fused.unfused):
        loss = step_alone(rebuilt, batches[1], 0.7)
    assert all(torch.equal(value, before[key]) for key, value in array.fused.state_dict().items())
    losses, _ = step.step(batches, [0.9, 0.7, 0.8])
    torch.testing.assert_close(losses[1], loss, rtol=1e-10, atol=1e-10)
    found, wanted = array.state(1), rebuilt.components.state()
    for own, other in ((found.model, wanted.model), (found.optimizer, wanted.optimizer)):
        assert own.keys() == other.keys()
        for key, value in own.items():
            torch.testing.assert_close(value, other[key].to(value), rtol=1e-9, atol=1e-10, msg=key)


def test_the_first_trial_of_an_array_goes_on_from_a_checkpoint():
    job: TrainSettings = digits_job(steps=9, optimizer=JOBS["sgd"]["optimizer"])
    each = [with_values(job, {"seed": n}) for n in range(2)]
    sets, device = DataSets(), torch.device("cpu")
    arrays = [FusedComponents([make_entry(one, None, device, sets) for one in each]) for _ in range(2)]
    streams = [open_stream(sets.of(settings)[0], Trial(settings)) for settings in each]
    TrainStep(arrays[0], each[0]).step(next_batches(streams), [1.0, 1.0])
    trained, other = arrays[0].state(0), arrays[1].state(1)
    arrays[1].load(Checkpoint(1, trained.model, trained.optimizer, {}))
    for slot, wanted in enumerate((trained, other)):
        found = arrays[1].state(slot)
        assert all(torch.equal(value, wanted.model[name]) for name, value in found.model.items())
    assert all(torch.equal(v, trained.optimizer[k]) for k, v in arrays[1].state(0).optimizer.items())
