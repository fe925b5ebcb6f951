"""The arithmetic of the pipeline bench, without workers."""

import pytest

from plait.pipeline.op_timings import OpTiming
from plait.planner.schedules.in_flight import Schedule
from plait.planner.schedules.orders import operations
from plait.planner.schedules.simulator import SimulatedLink, StageCosts, simulate
from plait.schema.plans.plan import Layout
from plait_bench.harness import Row
from plait_bench.pipeline import bench, convergence, idle, memory, prediction
from plait_bench.pipeline.idle import PIECES, SLEEP_S


def replayed(schedule: Schedule, workers: int, slower: float = 1.0) -> list[list[OpTiming]]:
    """What workers would note if messages took no time; operations take `slower` times what they should."""
    chunks = 2 if schedule is Schedule.INTERLEAVED else 1
    layout = Layout(tuple((stage % workers,) for stage in range(workers * chunks)))
    pieces = PIECES if schedule.synchronous else 5 * PIECES
    cost = StageCosts(SLEEP_S * slower, 2 * SLEEP_S * slower, 0.0)
    done = simulate(
        layout,
        operations(schedule, layout, pieces),
        [cost] * len(layout.stages),
        lambda a, b: SimulatedLink(1e18),
    )
    ops = sorted(done.ops, key=lambda s: s.start_s)
    return [[OpTiming(s.op, s.start_s, s.end_s) for s in ops if s.worker == w] for w in range(workers)]


@pytest.mark.parametrize("schedule", idle.SCHEDULES)
@pytest.mark.parametrize("workers", [2, 8])
def test_a_run_without_any_overhead_has_the_exact_idle_share(schedule, workers):
    found = idle.idle_share(schedule, replayed(schedule, workers), SLEEP_S)
    assert found == pytest.approx(idle.exact_idle_share(schedule, workers), abs=1e-9)


def test_time_beyond_the_sleeps_is_idle_time():
    slower = replayed(Schedule.STASH, 4, 1.25)
    assert idle.idle_share(Schedule.STASH, slower, SLEEP_S) == pytest.approx(0.2)


def test_predictions_far_off_either_way_do_not_hold():
    spreads = [(0.8, 1.0), (0.9, 1.0), (0.9, 1.1), (1.0, 1.2)]
    rows = [{"case": "m", "ratio_min": low, "ratio_max": high} for low, high in spreads]
    assert [claim.holds for claim in prediction.claims_of(rows)] == [False, True, True, False]
    stage = {"case": "m", "schedule": "stash", "stage": 0, "worker": 0, "predicted_bytes": 100.0}
    found = [{**stage, "bytes": size} for size in (80.0, 90.0, 110.0, 120.0)]
    assert [claim.holds for claim in memory.claims_of(found)] == [False, True, True, False]


def test_convergence_compares_means_over_the_seeds():
    rows = [
        {"case": "m", "side": side, "seed": seed, "accuracy": accuracy + 0.02 * seed}
        for seed in (0, 1)
        for side, accuracy in (("plain", 0.9), ("stash", 0.895), ("2bw", 0.88))
    ]
    claims = {claim.claim.split(", ")[1].split(":")[0]: claim for claim in convergence.claims_of(rows)}
    assert claims["stash"].value == pytest.approx(0.5)
    assert claims["stash"].holds
    assert not claims["2bw"].holds


def sides(**speedups: float) -> list[Row]:
    ends = {
        name: {"speedup": of, "speedup_min": of - 0.01, "speedup_max": of + 0.01}
        for name, of in speedups.items()
    }
    return [{"case": "mlp", "side": name.replace("_", " "), **row} for name, row in ends.items()]


def test_a_pipeline_that_is_slow_on_busy_cores_is_not_resolved():
    measured = sides(one_worker=1.0, DDP=1.0, stash=1.3, two_workers_apart=1.35, flush=1.3, torch_flush=1.2)
    speedup, *others = bench._claims(measured)
    assert not speedup.holds
    assert speedup.unresolved == "two workers apart come to 1.35, so two cores were not free"
    assert [claim.claim for claim in others] == [
        "mlp: stash over DDP",
        "mlp: stash over two workers apart",
        "mlp: flush over torch's",
    ]
    assert all(claim.holds and not claim.unresolved for claim in others)
    slow, *_ = bench._claims(sides(one_worker=1.0, DDP=1.0, stash=1.3, two_workers_apart=1.9))
    assert (slow.holds, slow.unresolved) == (False, "")
