"""Fused trials are compared with the same trials alone; modules that part from them run trial by trial."""

from __future__ import annotations

import math
import random

import pytest
import torch
from fused_checks import fuse, make_models
from test_torch_patches import Sign
from test_unfused_modules import assert_trains_as_alone
from torch import nn
from torch.autograd.function import _SingleLevelFunction as Function

from plait.fusion import FusionError
from plait.fusion.dispatch import torch_patches
from plait.fusion.dispatch.registry import RULES
from plait.fusion.dispatch.tensor import TrialTensor
from plait.fusion.verify import FusionReport
from plait.fusion.verify.verifier import log_report
from support.hard_models import WritesReshaped, batches_in_two_layouts

BATCHES = [torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]


class Block(nn.Module):
    """A model with one questionable part between two layers."""

    def __init__(self, part):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(6, 6), part, nn.Linear(6, 6)

    def forward(self, x):
        return self.last(self.part(self.first(x)))


class Looks(nn.Module):
    def forward(self, h):
        return h if h.mean().item() > 0 else h.tanh()


class PythonRandom(nn.Module):
    def forward(self, h):
        return h * random.random() if self.training else h


class OnlyInEvaluation(nn.Module):
    def forward(self, h):
        return h if self.training else h * float(h.abs().max())


class Resets(nn.Module):
    """Differs from a fused form only from the second forward on."""

    def __init__(self):
        super().__init__()
        self.before = 1.0

    def forward(self, h):
        scale, self.before = self.before, h.detach().mean().item()
        return h * scale


def verified(part, **options):
    return fuse(make_models(lambda: Block(part())), verify=BATCHES, **options)


@pytest.mark.parametrize("part", [Looks, PythonRandom, OnlyInEvaluation, Resets])
def test_the_module_that_parts_from_itself_alone_runs_trial_by_trial(part, caplog):
    fused = verified(part)
    assert list(fused.unfused) == ["part"]
    assert "part runs trial by trial" in caplog.text
    fused.eval()(torch.stack([BATCHES[0]] * 3))


def test_what_can_be_fused_stays_fused_with_dropout_and_its_own_probability_too():
    def make():
        probability = 0.1 + 0.1 * next(numbers)
        return nn.Sequential(
            nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(probability), nn.GELU(), nn.Linear(6, 2)
        )

    numbers = iter(range(9))
    fused = fuse(make_models(make), verify=BATCHES)
    assert fused.unfused == {}


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(6, 5, 2, dropout=0.5),
        lambda: nn.GRU(6, 5, 2, dropout=0.5, batch_first=True, bidirectional=True),
        lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True),
    ],
    ids=["lstm", "gru", "transformer"],
)
def test_a_plain_model_draws_the_same_numbers_as_the_fused_one(make):
    batches = [torch.randn(3, 4, 6, dtype=torch.float64) for _ in range(2)]
    assert fuse(make_models(make), verify=batches).unfused == {}


def test_verification_changes_nothing():
    models = make_models(lambda: Block(nn.Sequential(nn.BatchNorm1d(6), Resets())))
    before = [{key: value.clone() for key, value in model.state_dict().items()} for model in models]
    states = torch.get_rng_state(), random.getstate()
    batches = [batch.clone() for batch in BATCHES]
    fuse(models, verify=batches)
    for model, state in zip(models, before):
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert model.part[1].before == 1.0
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert all(torch.equal(one, other) for one, other in zip(batches, BATCHES))


class Shapes(nn.Module):
    def __init__(self, part=None):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        h = self.layer(x)
        return h[h[:, 0] > 0]


def test_models_that_no_way_can_run_together_are_refused_in_one_sentence():
    with pytest.raises(
        FusionError, match="cannot be fused: .*different shapes in different trials.*train each alone"
    ):
        fuse(make_models(Shapes), verify=BATCHES)


def test_verification_takes_named_arguments_and_single_batches():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x, scale):
            return {"logits": self.layer(x) * scale, "size": math.prod(x.shape)}

    fused = fuse(make_models(Named), verify=[{"x": BATCHES[0], "scale": torch.tensor(2.0)}])
    assert fused.unfused == {}


def test_what_verification_leaves_trains_as_it_does_alone():
    models = make_models(lambda: Block(Resets()))
    unfused = fuse(models, verify=BATCHES).unfused
    assert_trains_as_alone(None, unfused, models=models)


def revert_functions(monkeypatch):
    """Apply custom functions of autograd to fused tensors as they are."""
    monkeypatch.setattr(
        torch_patches, "apply_function", lambda cls, *a, **k: super(Function, cls).apply(*a, **k)
    )


def revert_attributes(monkeypatch):
    """Do not see that models differ in functions, dicts and configs."""
    monkeypatch.setattr("plait.fusion.check.different_attributes", lambda first, other: [])


def revert_numbers(monkeypatch):
    """Pass a number of each trial's own to torch, beside tensors that all trials share."""
    monkeypatch.setattr("plait.fusion.trials.mode.has_per_trial", lambda values: False)


def revert_data(monkeypatch):
    """Lose what is set as a parameter's data."""
    monkeypatch.setitem(RULES, vars(torch._C.TensorBase)["data"].__set__, lambda f, args, kwargs: None)


def revert_draws(monkeypatch):
    """Draw one tensor of random numbers for all trials."""
    monkeypatch.setattr("plait.fusion.trials.mode._RANDOM", frozenset())


def revert_hooks(monkeypatch):
    """Lose the hooks that gradients of parameters have."""
    monkeypatch.setattr("plait.fusion.module.gradient_hooks", lambda parameter: [])


class Uses(nn.Module):
    """Uses something of its own between two layers."""

    def __init__(self, value, use):
        super().__init__()
        self.first, self.last, self.value, self.use = nn.Linear(6, 6), nn.Linear(6, 6), value, use

    def forward(self, x):
        return self.use(self, x)


def sets_data(model, x):
    model.first.weight.data = model.first.weight.data.sign() * 0.1
    return model.last(model.first(x))


def with_hook(number):
    model = Uses(number, lambda m, x: m.last(m.first(x)))
    model.first.weight.register_hook(lambda g: g * 0.5)
    return model


WITHOUT_A_MEND = {
    "functions": (revert_functions, lambda k: Uses(1, lambda m, x: m.last(Sign.apply(m.first(x))))),
    "attributes": (revert_attributes, lambda k: Uses([torch.relu, torch.tanh, torch.sin][k], acts)),
    "numbers": (revert_numbers, lambda k: Uses(0.5 + k, lambda m, x: m.last(m.first(x * m.value)))),
    "data": (revert_data, lambda k: Uses(1, sets_data)),
    "draws": (revert_draws, lambda k: Uses(1, lambda m, x: m.last(x * torch.empty(x.shape).uniform_()))),
    "hooks": (revert_hooks, lambda k: with_hook(1)),
}


def acts(model, x):
    return model.last(model.value(model.first(x)))


@pytest.mark.parametrize(("revert", "make"), WITHOUT_A_MEND.values(), ids=WITHOUT_A_MEND)
def test_verification_alone_catches_what_a_mend_makes_right(revert, make, monkeypatch):
    torch.manual_seed(0)
    models = [make(number).double() for number in range(3)]
    revert(monkeypatch)
    assert list(fuse(models, verify=BATCHES).unfused) == [""]


class Raises(nn.Module):
    def forward(self, h):
        if isinstance(h, TrialTensor):
            raise FusionError("found this; name that", "do so")
        return h


def test_the_reason_of_a_module_that_runs_trial_by_trial_is_whole_and_without_advice():
    assert verified(Raises).unfused == {"part": "found this; name that"}


class Neighbours(nn.Module):
    """Multiplies with a sparse matrix, which is kept as `keep` says."""

    def __init__(self, keep):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.matrix = None
        keep(self, torch.eye(4, dtype=torch.float64).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(self.matrix, self.layer(x))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(5, 6, sparse=True), nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.table(x.argmax(1) % 5)).to_sparse()


def in_attribute(model, matrix):
    model.matrix = matrix


def in_buffer(model, matrix):
    del model.matrix
    model.register_buffer("matrix", matrix)


def compressed(model, matrix):
    model.matrix = matrix.to_sparse_csr()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_tensors_are_compared_or_refused_in_words():
    assert fuse(make_models(lambda: Neighbours(in_attribute)), verify=BATCHES).unfused == {}
    assert list(fuse(make_models(Sparse), verify=BATCHES).unfused) == ["table"]
    with pytest.raises(FusionError, match="'matrix' of model 0 is a sparse_coo tensor, expected dense"):
        fuse(make_models(lambda: Neighbours(in_buffer)), verify=BATCHES)
    with pytest.raises(FusionError, match="Neighbours cannot be copied"):
        fuse(make_models(lambda: Neighbours(compressed)), verify=BATCHES)


def test_a_plain_model_gets_a_batch_in_the_memory_layout_that_it_has():
    batches = [tuple(x.double() for x in batch) for batch in batches_in_two_layouts()]
    with pytest.raises(FusionError, match="trial 0 differs from its plain model in training: output"):
        fuse(make_models(WritesReshaped), verify=batches)


def test_that_nothing_is_fused_is_said_once_and_parts_that_run_trial_by_trial_by_name(caplog):
    log_report(FusionReport({"": "it writes"}, refused="it writes"), {})
    assert [record.getMessage() for record in caplog.records] == [
        "these trials are not fused, each trains separately: it writes"
    ]
    caplog.clear()
    log_report(FusionReport({"a": "why", "known": "so"}), {"known": "so"})
    assert [record.getMessage() for record in caplog.records] == [
        "a runs trial by trial, which is slower: why"
    ]
