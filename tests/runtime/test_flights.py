"""What a microbatch in flight holds between its forward and its backward."""

import weakref

import torch
from torch import nn

from plait.runtime.stage_runner import Flight


def test_outputs_that_autograd_does_not_keep_are_freed_once_they_are_sent():
    x = torch.randn(3, 4, requires_grad=True)
    linear = nn.Linear(4, 4)
    flight = Flight({"x": x}, 0, (), outputs={"y": linear(x), "count": torch.ones(3)})
    alive = weakref.ref(flight.outputs["y"])
    flight.let_go_of_outputs()
    assert alive() is None
    assert list(flight.edges) == ["y"]
    torch.autograd.backward([flight.edges["y"]], [torch.ones(3, 4)])
    assert torch.allclose(x.grad, torch.ones(3, 4) @ linear.weight.detach())
