"""What a microbatch in flight holds between its forward and its backward."""

import contextlib
import weakref

import pytest
import torch
from torch import nn

from plait.pipeline.cutting.cut import cut
from plait.pipeline.stage import InFlight, LossOf, StageRunner
from plait.profiler.trace import trace


def test_outputs_that_autograd_does_not_keep_are_freed_once_they_are_sent():
    x = torch.randn(3, 4, requires_grad=True)
    linear = nn.Linear(4, 4)
    flight = InFlight({"x": x}, 0, (), outputs={"y": linear(x), "count": torch.ones(3)})
    alive = weakref.ref(flight.outputs["y"])
    flight.free_outputs()
    assert alive() is None
    assert list(flight.edges) == ["y"]
    torch.autograd.backward([flight.edges["y"]], [torch.ones(3, 4)])
    assert torch.allclose(x.grad, torch.ones(3, 4) @ linear.weight.detach())


class ZeroBranch(nn.Sequential):
    """Its first mean is exactly zero, so the first forward leaves the running mean as it was."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        nn.init.zeros_(self[0].weight)
        nn.init.zeros_(self[0].bias)


class ReadsItsAverage(nn.Module):
    """Each forward changes the buffer that it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("average", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(torch.sin(x + self.average))


def trained(model: nn.Module, recompute: bool) -> dict[str, torch.Tensor]:
    """The state of `model` after microbatches of which two are in flight at a time."""
    traced = trace(model, (torch.randn(4, 4, dtype=torch.float64),))
    stage = cut(traced, [layer.id for layer in traced.layers])
    loss = LossOf(traced, nn.functional.mse_loss)
    runner = StageRunner(stage, [], loss, contextlib.nullcontext, recompute=recompute)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        flights = []
        for number in (2 * step, 2 * step + 1):
            made = torch.Generator().manual_seed(number)
            x, y = (torch.randn(8, n, generator=made, dtype=torch.float64) for n in (4, 2))
            flight = InFlight({stage.inputs[0].name: x + 1}, number, (), target=y)
            runner.forward(flight)
            flight.free_outputs()
            flights.append(flight)
        for flight in flights:
            runner.backward(flight, {})
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("make", [ZeroBranch, ReadsItsAverage])
def test_recompute_leaves_weights_and_buffers_as_one_forward_does(make: type[nn.Module]) -> None:
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        found.append(trained(make().double(), recompute))
    plain, again = found
    for name, value in plain.items():
        assert torch.equal(value, again[name]), name
