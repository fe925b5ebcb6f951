"""In which order tests run: slow modules first, shared out over the workers, so that none is the last."""

from __future__ import annotations

import os
from itertools import groupby

import pytest

# The modules with tests of nine seconds and more on a busy machine, the slowest first.
SLOW = (
    "test_documents.py",
    "launch/test_launch_faults.py",
    "cli/test_commands.py",
    "faults/test_elastic.py",
    "test_tutorials.py",
    "test_engines.py",
    "sweep/test_sweep_elastic_launch.py",
    "training/test_silent_cases.py",
    "cli/test_sweep_command.py",
    "sweep/test_sweep_elastic.py",
    "workloads/test_examples.py",
    "sweep/test_sweep_arrays.py",
    "training/test_audit.py",
    "pipeline/test_pipeline_exact.py",
    "training/test_model_loss.py",
    "sweep/test_sweep_failed.py",
    "workloads/test_awd_lstm.py",
    "pipeline/test_meta_device.py",
    "training/test_unused_parameters.py",
    "launch/test_launchers.py",
    "api/test_pipeline_wishes.py",
    "training/test_decentralized.py",
)

# Modules whose tests start no process, but train, trace or plan whole workloads: a second and more each.
WORKLOADS = (
    "adapt/test_trial_policies.py",
    "benches/test_fusion_experiment.py",
    "benches/test_planner_bench.py",
    "data/test_seeded_factories.py",
    "data/test_streams.py",
    "faults/test_elastic.py",
    "fusion/test_fused_fuzz.py",
    "fusion/test_fused_training.py",
    "pipeline/test_model_zoo.py",
    "pipeline/test_stage_verification.py",
    "pipeline/test_to_code.py",
    "profiler/test_profile.py",
    "profiler/test_trace.py",
    "profiler/test_trace_transformers.py",
    "sweep/test_sweep.py",
    "sweep/test_sweep_arrays.py",
    "sweep/test_sweep_audit.py",
    "sweep/test_sweep_failed.py",
    "sweep/test_sweep_resume.py",
    "sweep/test_sweep_stages_verified.py",
    "sweep/test_sweep_verified.py",
    "training/test_decentralized.py",
    "training/test_evaluation_faults.py",
    "training/test_model_loss.py",
    "training/test_resume_and_divergence.py",
    "workloads/test_examples.py",
    "workloads/test_models.py",
    "workloads/test_transformers_jobs.py",
)


def is_slow(item: pytest.Item) -> bool:
    """Whether the test belongs to a module that `make quick` leaves out, whatever it starts."""
    return item.path.as_posix().endswith(tuple(f"/{end}" for end in WORKLOADS))


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """`items` by module: each worker begins with a share of them at the front of which are slow modules.

    pytest-xdist gives each worker a run of the list, all of one length; one that is done takes from the end
    of another's.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    modules = [list(group) for _, group in groupby(items, key=lambda item: item.path)]
    modules.sort(key=lambda group: _rank(group[0]))
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for number, module in enumerate(modules):
        slow = number < len(SLOW)
        share = shares[number % workers] if slow else min(shares, key=len)
        share += module
    return [item for share in shares for item in share]


def _rank(item: pytest.Item) -> int:
    name = item.path.as_posix()
    return next((rank for rank, end in enumerate(SLOW) if name.endswith(f"/{end}")), len(SLOW))
