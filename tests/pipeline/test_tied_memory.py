"""What shared weights take in a run, compared with what plans say of them."""

import pytest
import torch
from torch import nn

from plait.pipeline.layout import PipelineLayout, stream
from plait.pipeline.updates.tied_weights import TiedWeights
from plait.planner.partition.ties import find_tied
from plait.planner.schedules.in_flight import Schedule, in_flight
from plait.planner.schedules.operations import Backward, Forward
from plait.planner.stage_memory import versions
from plait.schema.plans.graph import Tie
from plait.schema.plans.plan import Layout


class ManyMicrobatches:
    total = 24

    def admits(self, pipeline, microbatch):
        return microbatch < self.total

    def set_rate(self, update):
        pass


def most_copies(pipeline_layout, stage):
    """Buffers of the shared weight, and gradients of it, that the worker of `stage` has at most."""
    module = nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    # Each worker takes its own gradients for the sum: how many there are at once does not depend on them.
    tied = TiedWeights(
        pipeline_layout, (0, pipeline_layout.last), {stage: module}, [module.weight], optimizer.step, None
    )
    work, used, most = ManyMicrobatches(), {}, [0, 0]
    ops = list(stream(pipeline_layout, pipeline_layout.layout.stages[stage][0], work))
    last = max(place for place, op in enumerate(ops) if isinstance(op, Forward))
    # Behind the last forward gradients take the place of microbatches, which become fewer.
    for op in ops[: last + 1]:
        gradients = len(tied._rounds)
        if isinstance(op, Forward):
            used[op.microbatch] = tied.bring(op, work)
            tied.versions.use(used[op.microbatch])
        elif isinstance(op, Backward):
            version = used.pop(op.microbatch)
            tied.versions.leaves(version)[0].grad = torch.ones(3, 3)
            tied.keep(stage, version)
            tied.versions.done(version)
            gradients += 1
        else:
            tied.give(op, 1.0)
        most = [max(most[0], tied.versions.buffers), max(most[1], gradients)]
    return most


@pytest.mark.parametrize("replicas", [(1, 1), (1, 1, 1, 1), (2, 1, 2)])
@pytest.mark.parametrize("schedule", [Schedule.STASH, Schedule.TWO_BUFFERED])
def test_a_run_holds_as_many_versions_and_gradients_of_a_shared_weight_as_planned(schedule, replicas):
    starts = [sum(replicas[:s]) for s in range(len(replicas))]
    layout = Layout(tuple(tuple(range(start, start + n)) for start, n in zip(starts, replicas)))
    layers = tuple((f"n{s}",) for s in range(len(replicas)))
    pipeline_layout = PipelineLayout(layers, (layout,), schedule, 8)
    planned = find_tied([Tie(1.0, ("n0", layers[-1][0]))], layers, layout)
    copies, each = versions(schedule)
    for stage in (0, pipeline_layout.last):
        deep = in_flight(schedule, layout, stage, 1 << 20)
        more = planned[stage].waiting_bytes if schedule is Schedule.STASH else planned[stage].shared_bytes
        held, gradients = most_copies(pipeline_layout, stage)
        assert gradients == 1 + more
        assert held <= copies + each * deep
        assert stage > 0 or held == copies + each * deep
