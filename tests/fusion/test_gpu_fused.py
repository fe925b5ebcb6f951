"""Fused trials on a GPU are what the same trials are alone there, in float32, with TF32 and under autocast.

How far apart two right computations may be is measured: by how far the plain model is from itself in float64,
and moves when its weights are rounded otherwise.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fused_checks import fuse
from torch import nn

import plait
from plait.core import events as core_events
from plait.core import run_events
from plait.fusion import FusedOptimizer
from plait.fusion.dispatch.random import Streams
from plait.fusion.speed import whole_layers
from plait.fusion.verify.plain_run import drawing_as
from plait.schema.settings import ModelSettings, OptimizerSettings
from plait.verification import perturb
from plait.workloads.transformer import transformer
from support.sweeping import sweep_here, sweep_of, trial_alone
from support.training import digits_job

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda"
# How many times as far from the exact values as the plain model.
FACTOR = 16.0
BF16, TF32 = 2.0**-8, 2.0**-10


def autocast(kind):
    return nullcontext() if kind is None else torch.autocast(DEVICE, kind)


def models_of(make, count=3):
    torch.manual_seed(0)
    return [make().to(DEVICE) for _ in range(count)]


def step_alone(model, x, kind=None):
    """What a plain model returns, and the gradients of its mean square."""
    with autocast(kind):
        output = model(x)
        output.float().square().mean().backward() if kind else output.square().mean().backward()
    return [output, *(p.grad for p in model.parameters())]


def assert_as_near_as_alone(make, x, step, kind=None):
    """Outputs and gradients of fused trials are about as near to the exact ones as those of trials alone."""
    models = models_of(make)
    fused = fuse(models)
    with autocast(kind):
        outputs = fused(x)
        losses = fused.map(lambda y: y.float().square().mean(), outputs)
    losses.sum().backward()
    for trial, model in enumerate(models):
        found = [outputs[trial], *(p.grad[trial] for p in fused.module.parameters())]
        exact = step_alone(copy.deepcopy(model).double(), x[trial].double())
        alone = [step_alone(copy.deepcopy(model), x[trial], kind)]
        for seed in range(2):
            other = copy.deepcopy(model)
            with torch.no_grad():
                for number, parameter in enumerate(other.parameters()):
                    parameter.copy_(perturb(parameter, 1000 * seed + number, step))
            alone.append(step_alone(other, x[trial], kind))
        for place, (own, true) in enumerate(zip(found, exact)):
            allowed = FACTOR * max((one[place].double() - true).abs().max().item() for one in alone)
            assert (own.double() - true).abs().max().item() <= allowed + 1e-7, (trial, place)


class Last(nn.Module):
    def __init__(self, layers=1):
        super().__init__()
        self.gru, self.head = nn.GRU(8, 16, layers, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.gru(x)[0][:, -1])


@pytest.mark.parametrize("layers", [1, 2])
def test_a_gru_under_bf16_autocast_trains_fused_as_alone(layers):
    x = torch.randn(3, 5, 6, 8, device=DEVICE)
    assert_as_near_as_alone(lambda: Last(layers), x, BF16, torch.bfloat16)


@pytest.mark.parametrize("kind", [None, torch.bfloat16])
def test_recurrent_layers_are_verified_and_moved_on_a_gpu(kind):
    models = models_of(lambda: Last(2))
    fused = plait.fuse(models).to("cpu").to(DEVICE)  # compared at the first call
    fused.module.gru.flatten_parameters()
    with autocast(kind):
        fused(torch.randn(3, 5, 6, 8, device=DEVICE))
    assert fused.unfused == {}
    assert "flatten_parameters" not in vars(fused.trial(0).gru)


def test_a_model_whose_bias_is_rounded_under_autocast_is_found_right():
    """The gradient of the bias is a sum of the weights of the comparison, which bfloat16 rounds."""
    fused = plait.fuse(models_of(lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 10))))
    with autocast(torch.bfloat16):
        fused(torch.randn(3, 32, 16, device=DEVICE))
    assert fused.unfused == {}


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(), nn.Flatten(), nn.Linear(32 * 9, 64), nn.Tanh(), nn.Linear(64, 4),
    )  # fmt: skip


@pytest.fixture
def tf32():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_products_in_tf32_are_as_near_to_exact_ones_as_those_of_a_trial_alone(tf32):
    assert_as_near_as_alone(conv_net, torch.randn(3, 8, 3, 8, 8, device=DEVICE), TF32)


def test_verification_takes_the_rounding_of_tf32_for_what_it_is(tf32):
    batches = [torch.randn(8, 3, 8, 8, device=DEVICE) for _ in range(2)]
    assert fuse(models_of(conv_net), verify=batches).unfused == {}


def tiny_gpt2():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def test_gpt2_with_its_usual_settings_trains_fused_as_alone():
    models = [model.double() for model in models_of(tiny_gpt2)]
    assert models[0].config.use_cache
    ids = torch.randint(0, 64, (3, 4, 16), device=DEVICE)
    fused = fuse(models)
    optimizer = FusedOptimizer(fused, "adamw", lr=1e-2)
    others = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for _ in range(3):
        optimizer.zero_grad()
        losses = fused.map(lambda logits: logits.square().mean(), fused(input_ids=ids).logits)
        losses.sum().backward()
        optimizer.step()
        for trial, (model, other) in enumerate(zip(models, others)):
            other.zero_grad()
            loss = model.train()(input_ids=ids[trial]).logits.square().mean()
            loss.backward()
            other.step()
            torch.testing.assert_close(losses[trial], loss, rtol=1e-9, atol=1e-9)
    fused.eval()
    for trial, model in enumerate(models):
        found, expected = fused(input_ids=ids).logits[trial], model.eval()(input_ids=ids[trial]).logits
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def two_matrices():
    return nn.Sequential(nn.Linear(16, 24, bias=False), nn.Tanh(), nn.Linear(24, 8, bias=False)).double()


@pytest.mark.parametrize("name", ["NAdam", "Lion", "Adafactor", "Muon"])
def test_optimizers_for_adapters_update_trials_as_alone(name):
    make, rates = plait.Lion if name == "Lion" else getattr(torch.optim, name), [1e-3, 3e-3, 1e-2]
    models = models_of(two_matrices)
    fused = fuse(copy.deepcopy(models))
    optimizer = FusedOptimizer(fused, name.lower(), lr=rates)
    others = [make(model.parameters(), lr=rate) for model, rate in zip(models, rates)]
    for _ in range(5):
        x = torch.randn(3, 4, 16, device=DEVICE, dtype=torch.float64)
        fused(x).square().mean((1, 2)).sum().backward()
        for model, own in zip(models, x):
            model(own).square().mean().backward()
        for each in (optimizer, *others):
            each.step()
            each.zero_grad()
    # Muon's products are in bfloat16, which a batch of matrices may round otherwise.
    near = 0.05 if name == "Muon" else 1e-9
    for found, model, rate in zip(fused.split(), models, rates):
        for own, expected in zip(found.parameters(), model.parameters()):
            torch.testing.assert_close(own, expected, rtol=0.0, atol=5 * rate * near)


@pytest.mark.parametrize(("precision", "near"), [("float32", 0.01), ("bf16", 0.1)])
def test_a_verified_sweep_of_three_trials_comes_to_what_they_come_to_alone(precision, near, tmp_path: Path):
    job = digits_job(
        steps=8,
        model=ModelSettings("support.sweeping:norm_net"),
        optimizer=OptimizerSettings("sgd", {"lr": 0.1}),
        precision=precision,
        device=DEVICE,
    )
    settings = sweep_of("optimizer.lr=0.01,0.03,0.1", job=job, width=3)
    found = sweep_here(settings, tmp_path / "sweep")
    reported = core_events.read(tmp_path / "sweep" / "events" / "rank0.jsonl")
    (event,) = [one.event for one in reported if isinstance(one.event, run_events.ArrayVerified)]
    assert (event.unfused, event.refused) == ({}, None)
    on_cpu = replace(settings, train=replace(job, device="cpu"))
    for row in found["trials"]:
        alone, _ = trial_alone(on_cpu, row["values"], tmp_path / f"alone-{row['trial']}")
        assert row["metrics"]["loss"] == pytest.approx(alone.test["loss"], abs=near)


def near(found, expected, error):
    assert (found.double() - expected).abs().max() <= error * expected.abs().max()


@pytest.mark.parametrize("rank", [4, 20, 128])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_adapter", [torch.float32, None])
@pytest.mark.parametrize("chances", [None, (0.1, 0.0, 0.75)])
def test_a_linear_layer_with_adapters_is_that_of_float64_but_for_the_rounding_of_its_output(
    rank, kind, of_adapter, chances
):
    from plait.fusion.kernels.low_rank import adapted_linear

    rows, inputs, outputs = (3, 2, 50), 200, 136
    x = torch.randn(*rows, inputs, device=DEVICE).to(kind)
    weight, bias = (torch.randn(size, device=DEVICE).to(kind) / 8 for size in ((outputs, inputs), (outputs,)))
    a = torch.randn(3, rank, inputs, device=DEVICE).to(of_adapter or kind) / 16
    b = torch.randn(3, outputs, rank, device=DEVICE).to(of_adapter or kind) / 8
    scale = torch.tensor([0.5, 1.0, 2.0], device=DEVICE)
    leaves = [each.requires_grad_() for each in (x, a, b)]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    keys, kept = None, torch.ones(3, 1, inputs, device=DEVICE, dtype=torch.float64)
    if chances is not None:
        seeds, steps = (torch.tensor(each, device=DEVICE) for each in ([3, 1, 4], [5, 9, 2]))
        keys = Streams(seeds, steps).dropout_keys(chances)
        kept = Streams(seeds, steps).keep((*rows[1:], inputs), chances, torch.float64).flatten(1, 2).sign()
    y = adapted_linear(x, weight, bias, a, b, scale, keys)
    own = ((exact[0].flatten(1, 2) * kept) @ exact[1].mT) @ exact[2].mT * scale.view(3, 1, 1)
    expected = exact[0] @ weight.double().T + bias.double() + own.view(*rows, outputs)
    gradient = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, gradient)
    wanted = torch.autograd.grad(expected, exact, gradient.double())
    half = 0.01 if kind == torch.bfloat16 else 0.002
    near(y, expected, half)
    near(found[0], wanted[0], half)
    for own, right in zip(found[1:], wanted[1:]):
        near(own, right, 3e-6 if of_adapter else half)


# A row takes several programs, or is one of many of a program.
@pytest.mark.parametrize(("rows", "classes"), [(40, 9001), (1000, 10), (130, 50)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_cross_entropy_of_rows_is_torchs(kind, rows, classes):
    from plait.fusion.kernels.cross_entropy import row_losses

    logits = (5 * torch.randn(rows, classes, device=DEVICE)).to(kind)
    logits[1, 7] = float("-inf")
    target = torch.randint(classes, (rows,), device=DEVICE)
    target[3], target[1] = -100, 8
    given, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = row_losses(given, target, -100)
    expected = nn.functional.cross_entropy(exact, target, reduction="none")
    near(found, expected, 1e-6)
    weights = torch.rand(rows, device=DEVICE)
    (own,) = torch.autograd.grad(found, given, weights)
    (right,) = torch.autograd.grad(expected, exact, weights.double())
    near(own, right, 1e-5 if kind == torch.float32 else 0.01)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_lora_adapters_on_a_base_in_bf16_train_fused_as_alone(dropout, monkeypatch):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 20_000}
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)
    )
    base = base.to(DEVICE, torch.bfloat16)
    models = []
    for rank, alpha in ((4, 8), (8, 8), (8, 32)):
        options = {"lora_dropout": dropout, "target_modules": "all-linear"}
        config = peft.LoraConfig("CAUSAL_LM", r=rank, lora_alpha=alpha, **options)
        models.append(peft.get_peft_model(copy.deepcopy(base), config))
        models[-1].train()
    rates = [1e-3, 3e-3, 1e-2]
    fused = fuse(copy.deepcopy(models))
    monkeypatch.setattr(whole_layers, "_own_forward", None)  # all layers are computed at once
    optimizer = FusedOptimizer(fused, "adamw", lr=rates)
    others = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
        for model, rate in zip(models, rates)
    ]
    ids = torch.randint(20_000, (3, 4, 48), device=DEVICE)
    for step in range(5):
        losses = fused(input_ids=ids, labels=ids).loss
        losses.sum().backward()
        alone = []
        for number, (model, own) in enumerate(zip(models, ids)):
            with drawing_as(model, number, step, {}):
                alone.append(model(input_ids=own, labels=own).loss)
                alone[-1].backward()
        for each in (optimizer, *others):
            each.step()
            each.zero_grad()
        near(losses.detach(), torch.stack(alone).detach().double(), 0.01)
    assert fused.unfused == {}


ROWS = [(3, 37, 50), (2, 300, 512), (2, 5, 5000), (1, 1, 7)]


@pytest.mark.parametrize("kinds", [(), (torch.float32,), (torch.bfloat16,), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("is_sum", [True, False])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("shape", ROWS)
def test_sums_of_rows_and_their_norms_with_weights_of_each_trial_are_those_of_float64(
    shape, centred, is_sum, kinds
):
    from plait.fusion.kernels.sum_norm import Norm, sum_norm

    own = (shape[0], shape[2])
    sizes = {"x": shape} | ({"y": shape, "add": own} if is_sum else {})
    sizes |= ({"weight": own} | ({"bias": own} if centred else {})) if kinds else {}
    leaves = {name: torch.randn(size, device=DEVICE) for name, size in sizes.items()}
    leaves = {name: leaf.to(torch.bfloat16 if name == "y" else leaf.dtype) for name, leaf in leaves.items()}
    exact = {name: leaf.double().requires_grad_() for name, leaf in leaves.items()}
    given = {"y": None, "add": None} | {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    made = sum_norm(norm=Norm(1e-5, centred, kinds) if kinds else None, **given)
    total = exact["x"] + (exact["y"] + exact["add"].unsqueeze(1) if is_sum else 0.0)
    wanted = [total] if is_sum else []
    if kinds:
        normed = nn.functional.layer_norm if centred else nn.functional.rms_norm
        n = normed(total, shape[2:], eps=1e-5) * exact["weight"].unsqueeze(1)
        wanted += [n + exact["bias"].unsqueeze(1) if centred else n] * len(kinds)
    assert len(made) == len(wanted)
    if not made:
        return
    gradients = [torch.randn_like(own) for own in made]
    rights = torch.autograd.grad(wanted, [*exact.values()], [own.double() for own in gradients])
    for own, right in zip(made, wanted):
        near(own, right, 1e-5 if own.dtype == torch.float32 else 0.01)
    for again in (False, True):
        found = torch.autograd.grad(
            made, [*leaves.values()], gradients, create_graph=again, retain_graph=True
        )
        for name, own, right in zip(exact, found, rights):
            near(own, right, 0.01 if name == "y" else 2e-5)


@pytest.mark.parametrize("kind", ["none", "relu", "silu", "gelu", "gelu tanh"])
@pytest.mark.parametrize("shape", ROWS)
def test_an_activation_of_a_sum_with_a_bias_is_that_of_float64(shape, kind):
    from plait.fusion.kernels.activation import ACTIVATIONS, activated, biased

    leaves = [torch.randn(size, device=DEVICE) for size in (shape, (shape[0], shape[2]))]
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    y, bias = (leaf.requires_grad_() for leaf in leaves)
    out = biased(y * 1.0, bias) if kind == "none" else activated(y, bias, kind)
    expected = ACTIVATIONS[kind](exact[0] + exact[1].unsqueeze(1))
    gradient = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, exact, gradient.double())
    near(out, expected, 1e-5)
    for again in (False, True):
        found = torch.autograd.grad(out, (y, bias), gradient, create_graph=again, retain_graph=True)
        for own, right in zip(found, wanted):
            near(own, right, 2e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "shape", [(6, 3, 20, 20, 16), (64, 8, 64, 64, 64), (8, 2, 5, 33, 32), (8, 8, 128, 128, 64)]
)
def test_attention_within_short_sequences_is_that_of_float64(causal, shape):
    from plait.fusion.kernels.short_attention import short_attention, supports

    batch, heads, queries, keys, width = shape
    sizes = [(batch, heads, length, width) for length in (queries, keys, keys)]
    leaves = [torch.randn(size, device=DEVICE).bfloat16().requires_grad_() for size in sizes]
    assert supports(*leaves)
    exact = [each.detach().double().requires_grad_() for each in leaves]
    o = short_attention(*leaves, None, causal)
    expected = nn.functional.scaled_dot_product_attention(*exact, is_causal=causal)
    gradient = torch.randn_like(o)
    wanted = torch.autograd.grad(expected, exact, gradient.double())
    near(o, expected, 0.01)
    for again in (False, True):
        found = torch.autograd.grad(o, leaves, gradient, create_graph=again, retain_graph=True)
        for own, right in zip(found, wanted):
            near(own, right, 0.01)


class PostNorm(nn.Module):
    """Two layers as BERT has them: a norm follows each sum, and is read by a layer and by the next sum."""

    def __init__(self, vocabulary: int, width: int = 128) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.mix = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for number in (0, 2):
            x = self.norms[number](x + self.mix(x.roll(1, 1)))
            x = self.norms[number + 1](self.down(nn.functional.gelu(self.up(x))) + x)
        return self.head(x)


MAKES = {
    "pre-norm": lambda: transformer(4096, 64, 2, 4, 128, dropout=0.0),
    "padded vocabulary": lambda: transformer(4099, 64, 2, 4, 128, dropout=0.0),
    "post-norm": lambda: PostNorm(4096),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_transformer_under_autocast_trains_fused_as_alone(make):
    """A vocabulary that is no multiple of 8 is padded, gradients of attention are put together in place."""

    def gradients(model, tokens, kind):
        with autocast(kind):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    models = models_of(make)
    tokens = torch.randint(4096, (3, 16, 48), device=DEVICE)
    fused = fuse(models)
    for _ in range(2):  # in the second forward it is known what reads the norms
        fused.zero_grad()
        with autocast(torch.bfloat16):
            score = lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1).float(), t.flatten())  # noqa: E731
            losses = fused.map(score, fused(tokens), tokens)
        losses.sum().backward()
        for trial, model in enumerate(models):
            found = [losses[trial].detach(), *(p.grad[trial] for p in fused.module.parameters())]
            exact = gradients(copy.deepcopy(model).double(), tokens[trial], None)
            alone = gradients(copy.deepcopy(model), tokens[trial], torch.bfloat16)
            for place, (own, one, right) in enumerate(zip(found, alone, exact)):
                allowed = FACTOR * (one.double() - right).norm().item() + 1e-6
                assert (own.double() - right).norm().item() <= allowed, (trial, place)
