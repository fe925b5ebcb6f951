"""Linear layers computed faster: gradients equal autograd's, wherever the weights lie in memory."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from plait.pipeline.cpu.layers import plain_forwards, use_fast_layers
from plait.pipeline.cpu.linear import add_weight_gradients, transpose_weights, with_same_strides


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10, bias=False)]
    layers += [nn.ReLU(inplace=True), nn.Linear(10, 3)]
    return nn.Sequential(*layers).double()


def gradients(model: nn.Module, microbatches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of the inputs and the parameters, when all microbatches add up."""
    leaves = [x.clone().requires_grad_() for x in microbatches]
    for x in leaves:
        model(x).square().mean().backward()
    found = [leaf.grad for leaf in (*leaves, *model.parameters())]
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6), (100, 6)])
@pytest.mark.parametrize("turned", [False, True])
def test_gradients_of_several_microbatches_equal_autograds(shape: tuple[int, ...], turned: bool) -> None:
    plain, faster = net(), net()
    add_weight_gradients(faster)
    if turned:
        transpose_weights(faster)
    microbatches = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    expected, found = gradients(plain, microbatches), gradients(faster, microbatches)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert all(p.grad is not None and p.grad.stride() == p.stride() for p in faster.parameters())


def test_turned_weights_keep_their_values_and_shared_ones_stay() -> None:
    model = net()
    model.append(nn.Linear(3, 3).double()).append(nn.Linear(3, 3).double())
    model[6].weight = model[5].weight
    before = copy.deepcopy(model.state_dict())
    transpose_weights(model, shared=[model[0].weight])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    assert [layer.weight.is_contiguous() for layer in layers] == [True, False, False, True, True]


def test_frozen_weights_and_evaluation_are_computed_as_ever() -> None:
    model = net()
    add_weight_gradients(model)
    model[0].weight.requires_grad_(False)
    x = torch.randn(4, 6, dtype=torch.float64)
    model(x).sum().backward()
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(model(x), net()(x))


def test_weights_written_over_between_forward_and_backward_are_noticed() -> None:
    model = net()
    add_weight_gradients(model)
    loss = model(torch.randn(4, 6, dtype=torch.float64)).sum()
    with torch.no_grad():
        model[4].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_on_a_weight_see_its_gradient() -> None:
    plain, faster = net(), net()
    add_weight_gradients(faster)
    for model in (plain, faster):
        model[2].weight.register_hook(lambda grad: grad.tril())
    microbatches = [torch.randn(4, 6, dtype=torch.float64)]
    for ours, theirs in zip(gradients(faster, microbatches), gradients(plain, microbatches), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_layers_get_their_own_forwards_back_and_are_freed_without_a_collection() -> None:
    layer = nn.Linear(2, 2)
    plain_forwards(use_fast_layers(layer))
    assert "forward" not in layer.__dict__
    seen = weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert seen() is None
    finally:
        gc.enable()


def test_a_layer_whose_forward_someone_replaced_keeps_it() -> None:
    layer = nn.Linear(2, 2)
    own = layer.forward = lambda x: x  # type: ignore[method-assign,assignment]
    assert use_fast_layers(layer) == []
    assert layer.forward is own


def test_an_optimizers_state_comes_to_lie_as_its_parameter_does() -> None:
    weight = torch.randn(3, 4).t()
    momentum = torch.randn(4, 3)
    found = with_same_strides(weight, momentum)
    assert torch.equal(found, momentum)
    assert found.stride() == weight.stride()
    assert with_same_strides(weight, 7) == 7
