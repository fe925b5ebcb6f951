"""The planner bench, some of it or, with `make test-all`, run once; and how any bench is shown."""

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from plait_bench import planner
from plait_bench.harness import Bench, BenchClaim
from support.further import but_further

# The bench counts its own processor time; on a busy machine that takes as long as it takes.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def bench() -> Bench:
    # A process of its own: one of the claims is about how much memory it takes.
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
        return fresh.submit(planner.run, repeats=1).result()


# tests/planner/test_solver.py has it.
@pytest.mark.parametrize("profile", but_further(("vgg16", "gnmt", "resnet50"), "gnmt"))
def test_plans_are_as_good_as_pipedreams_and_close_to_the_bound(profile: str):
    rows = planner.plan_profile(profile)
    assert [row["devices"] for row in rows] == ["4", "16", "4x4"]
    assert all(row["lower_bound_s"] <= row["bottleneck_s"] * (1 + 1e-9) for row in rows)
    assert all(0 < planner.ratio(row) <= 1 and row["gap"] <= 0.05 for row in rows), rows


@pytest.mark.extended
def test_the_planner_bench_plans_every_profile_on_every_cluster(bench):
    cases = [(row["profile"], row["devices"]) for row in bench.rows]
    assert len(cases) == len(set(cases)) == 8 * 3 + 1
    assert all(row["lower_bound_s"] <= row["bottleneck_s"] * (1 + 1e-9) for row in bench.rows)


@pytest.mark.extended
def test_the_claims_on_quality_hold(bench):
    quality = [claim for claim in bench.claims if "CPU seconds" not in claim.claim]
    assert len(quality) == 3
    assert all(claim.holds for claim in quality), [claim for claim in quality if not claim.holds]


@pytest.mark.extended
def test_every_claim_says_what_was_found_and_what_was_the_goal(bench):
    assert len(bench.claims) == 7
    for claim in bench.claims:
        assert claim.value is not None
        assert claim.goal.startswith("at most")


def test_a_bench_is_json_with_the_fields_of_the_contract_and_a_picture(tmp_path):
    claims = (
        BenchClaim("fast", 2.0, "at most 1", False),
        BenchClaim("even", 1.0, "at most 1", True, "rough"),
    )
    bench = Bench("x", "plait bench x", planner.plan_profile("alexnet"), claims)
    found = json.loads(json.dumps(bench.as_json()))
    assert list(found) == ["name", "machine", "versions", "command", "seed", "date", "rows", "claims"]
    assert set(found["claims"][0]) == {"claim", "value", "goal", "holds"}
    assert found["claims"][1]["unresolved"] == "rough"
    assert {"cores", "memory_bytes", "load"} <= set(found["machine"])
    planner.write_plot(bench, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_a_claim_that_does_not_hold_is_shown_as_such(tmp_path):
    shown = Bench(
        "x", "plait bench x", ({"case": "a", "seconds": 2.0},), (BenchClaim("fast", 2.0, "at most 1", False),)
    )
    assert not shown.holds
    assert "[DOES NOT HOLD] fast: 2 (goal: at most 1)" in shown.render()
    shown.write_csv(tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text() == "case,seconds\na,2.0\n"
