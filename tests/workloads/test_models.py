"""The models: published sizes, reproducible weights, and tiny variants that train in milliseconds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from plait.core.errors import InputError
from plait.workloads.alexnet import alexnet, alexnet_tiny
from plait.workloads.losses import cross_entropy
from plait.workloads.lstm import lstm, lstm_large, lstm_tiny
from plait.workloads.mlp import mlp, mlp_tiny
from plait.workloads.mobilenet import (
    Skip,
    mobilenet_v2,
    mobilenet_v2_tiny,
    mobilenet_v3_large,
    mobilenet_v3_large_tiny,
    mobilenet_v3_small,
    mobilenet_v3_small_tiny,
)
from plait.workloads.resnet import (
    ZeroPadded,
    resnet18,
    resnet18_tiny,
    resnet50,
    resnet50_tiny,
    resnet56,
    resnet56_tiny,
)
from plait.workloads.transformer import Attention, transformer, transformer_tiny
from plait.workloads.vgg import vgg16, vgg16_tiny
from support.further import but_further

Factory = Callable[..., nn.Module]

# Parameters; billions of multiply-adds for one image, as torchvision's table and He et al. round them.
IMAGE_MODELS: list[tuple[Factory, int, float]] = [
    (alexnet, 61_100_840, 0.71),
    (vgg16, 138_357_544, 15.47),
    (resnet18, 11_689_512, 1.81),
    (resnet50, 25_557_032, 4.09),
    (resnet56, 853_018, 0.125),
    (mobilenet_v2, 3_504_872, 0.30),
    (mobilenet_v3_small, 2_542_856, 0.06),
    (mobilenet_v3_large, 5_483_032, 0.22),
]
TINY_IMAGE_MODELS: list[Factory] = [
    mlp_tiny,
    alexnet_tiny,
    vgg16_tiny,
    resnet18_tiny,
    resnet50_tiny,
    resnet56_tiny,
    mobilenet_v2_tiny,
    mobilenet_v3_small_tiny,
    mobilenet_v3_large_tiny,
]
TINY_LANGUAGE_MODELS: list[Factory] = [transformer_tiny, lstm_tiny]
TINY_MODELS = TINY_IMAGE_MODELS + TINY_LANGUAGE_MODELS


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def batch_for(factory: Factory, size: int = 8) -> tuple[Tensor, Tensor]:
    if factory in TINY_LANGUAGE_MODELS:
        tokens = torch.randint(16, (size, 13))
        return tokens[:, :-1], tokens[:, 1:]
    return torch.randn(size, 1, 8, 8), torch.arange(size) % 10


# The others of a family differ in numbers of layers and widths.
FURTHER = (resnet18, mobilenet_v3_small)


@pytest.mark.parametrize(
    ("factory", "count", "billions"),
    [pytest.param(*each, marks=[pytest.mark.extended] * (each[0] in FURTHER)) for each in IMAGE_MODELS],
)
def test_an_image_model_has_the_published_size_and_does_the_published_work(factory, count, billions):
    pixels, classes = (32, 10) if factory is resnet56 else (224, 1000)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = factory()
        assert parameters(model) == count
        assert model(torch.empty(1, 3, pixels, pixels)).shape == (1, classes)
    assert counter.get_total_flops() / 2e9 == pytest.approx(billions, abs=0.0051 if billions > 0.2 else 0.004)


@pytest.mark.parametrize(
    ("factory", "skips"), [(mobilenet_v2, 10), (mobilenet_v3_large, 10), (mobilenet_v3_small, 6)]
)
def test_a_mobilenet_skips_where_a_block_keeps_its_shape(factory, skips):
    with torch.device("meta"):
        assert sum(isinstance(module, Skip) for module in factory().modules()) == skips
    x = torch.randn(2, 3)
    assert torch.equal(Skip(nn.ReLU())(x), x + x.relu())


def test_the_perceptron_has_the_size_of_lenet_300_100():
    assert parameters(mlp()) == 266_610


def test_the_transformer_has_the_size_of_gpt2_small_and_an_untied_head_adds_its_weight():
    with torch.device("meta"):
        assert parameters(transformer()) == 124_439_808
        assert parameters(transformer(tied=False)) == 124_439_808 + 50257 * 768


def test_the_lstm_has_the_sizes_of_the_published_language_models():
    with torch.device("meta"):
        assert parameters(lstm()) == 19_780_400
        assert parameters(lstm_large()) == 66_034_000
        assert parameters(lstm(vocabulary=33_278, tied=True)) == 28_434_378


@pytest.mark.parametrize("factory", TINY_MODELS)
def test_the_same_seed_gives_the_same_weights(factory):
    torch.manual_seed(3)
    first = factory().state_dict()
    torch.manual_seed(3)
    again = factory().state_dict()
    torch.manual_seed(4)
    other = factory().state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("factory", TINY_IMAGE_MODELS)
def test_an_image_model_begins_with_he_weights_and_no_biases(factory):
    torch.manual_seed(0)
    layers = [m for m in factory().modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    scaled = [m.weight.flatten() * math.sqrt(m.weight[0].numel() / 2) for m in layers]
    assert torch.cat(scaled).std().item() == pytest.approx(1, abs=0.05)
    assert all(m.bias is None or not m.bias.any() for m in layers)


@pytest.mark.parametrize(("factory", "classes"), [(resnet56, 10), (mobilenet_v3_small, 1000)])
def test_a_published_image_model_begins_near_the_loss_of_guessing(factory, classes):
    torch.manual_seed(0)
    model = factory()
    assert list(model.children())[-1].weight.std().item() == pytest.approx(0.01, rel=0.1)
    loss = cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4))
    assert loss.item() == pytest.approx(math.log(classes), rel=0.1)


def test_a_transformer_begins_as_gpt2_does():
    torch.manual_seed(0)
    weights = dict(transformer(vocabulary=100, context=50, layers=8, heads=2, width=64).named_parameters())
    stds = {name: w.std().item() for name, w in weights.items() if w.dim() == 2}
    for name, std in stds.items():
        into_residual = name.endswith("project.weight")
        assert std == pytest.approx(0.02 / (4 if into_residual else 1), rel=0.1), name
    assert sum(name.endswith("project.weight") for name in stds) == 16
    assert not any(w.any() for name, w in weights.items() if name.endswith("bias"))


def test_an_lstm_begins_uniform_in_its_range():
    weights = torch.cat([w.flatten() for w in lstm(vocabulary=50, width=40, initial_range=0.05).parameters()])
    assert 0.049 < weights.max() <= 0.05
    assert -0.05 <= weights.min() < -0.049


@pytest.mark.parametrize(
    "factory", but_further(TINY_MODELS, resnet50_tiny, mobilenet_v2_tiny, mobilenet_v3_small_tiny)
)
def test_a_tiny_model_learns_one_batch_and_every_weight_gets_a_gradient(factory):
    torch.manual_seed(0)
    model = factory()
    inputs, targets = batch_for(factory)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("factory", TINY_IMAGE_MODELS[1:])
def test_a_tiny_image_model_takes_larger_coloured_images_and_a_batch_of_one(factory):
    model = factory(classes=7, channels=3)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    assert factory(classes=7)(torch.randn(1, 1, 8, 8)).shape == (1, 7)


@pytest.mark.parametrize("factory", but_further(TINY_MODELS, *TINY_IMAGE_MODELS[:-2], TINY_IMAGE_MODELS[-1]))
def test_a_tiny_model_can_be_exported_and_computes_the_same(factory):
    model = factory().eval()
    inputs, _ = batch_for(factory)
    with warnings.catch_warnings():
        # Export mistakes the LSTM's list of its own weights for assigned attributes.
        warnings.simplefilter("ignore")
        exported = torch.export.export(model, (inputs,)).module()
    torch.testing.assert_close(exported(inputs), model(inputs))


@pytest.mark.parametrize("factory", TINY_MODELS)
def test_no_model_works_in_place(factory):
    assert not any(getattr(module, "inplace", False) for module in factory().modules())


@pytest.mark.parametrize("factory", TINY_LANGUAGE_MODELS)
def test_a_language_model_does_not_see_the_tokens_to_come(factory):
    model = factory().eval()
    tokens = torch.randint(256, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("factory", TINY_LANGUAGE_MODELS)
def test_a_tied_language_model_holds_one_weight_at_both_ends(factory):
    model, untied = factory(tied=True), factory(tied=False)
    first, last = next(model.parameters()), list(model.children())[-1].weight
    assert first is last
    assert parameters(untied) == parameters(model) + last.numel()


def test_attention_equals_the_formula_written_out_for_each_head():
    torch.manual_seed(1)
    attention = Attention(width=6, heads=2, dropout=0.0)
    x_btc = torch.randn(2, 5, 6)
    query, key, value = attention.query_key_value(x_btc).split(6, dim=-1)
    future = torch.ones(5, 5).triu(1).bool()
    heads = []
    for h in (slice(0, 3), slice(3, 6)):
        scores = query[..., h] @ key[..., h].transpose(1, 2) / 3**0.5
        heads.append(F.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ value[..., h])
    expected = attention.project(torch.cat(heads, dim=-1))
    torch.testing.assert_close(attention(x_btc), expected)


def test_a_transformer_computes_what_gpt2_computes():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    ours = transformer(vocabulary=40, context=16, layers=2, heads=3, width=12).eval()
    # Both list their weights in the order of use; GPT-2 keeps its linear weights transposed.
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    with torch.no_grad():
        for mine, other in pairs:
            other.normal_(std=0.3)
            mine.copy_(other if mine.shape == other.shape and mine.shape != (12, 12) else other.T)
    tokens = torch.randint(40, (2, 10))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-4)


def test_attention_drops_out_while_training_only():
    attention = Attention(width=8, heads=2, dropout=0.5)
    x_btc = torch.randn(1, 6, 8)
    assert not torch.equal(attention(x_btc), attention(x_btc))
    attention.eval()
    assert torch.equal(attention(x_btc), attention(x_btc))


def test_a_shortcut_without_weights_takes_every_second_pixel_and_adds_empty_channels():
    x = torch.arange(32.0).reshape(1, 2, 4, 4)
    y = ZeroPadded(extra=2, stride=2)(x)
    assert y.shape == (1, 4, 2, 2)
    assert torch.equal(y[0, 0], torch.tensor([[0.0, 2.0], [8.0, 10.0]]))
    assert y[:, 2:].abs().sum() == 0


def test_a_sequence_longer_than_the_context_is_refused_with_both_numbers():
    model = transformer_tiny(context=8)
    with pytest.raises(InputError, match="found 9 tokens in a sequence, expected at most 8"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_a_width_that_the_heads_cannot_share_is_refused():
    with pytest.raises(InputError, match="width 10 cannot be shared by 4 heads"):
        transformer(width=10, heads=4)
