"""The gradient of a table of embeddings is collected from its lookups and the layers that read it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from fused_checks import fuse
from torch import nn
from torch.utils.checkpoint import checkpoint

from plait.fusion.speed import gpu_matmul, tied_rows
from plait.fusion.speed.gpu_matmul import cast_dense

WORDS, WIDTH = 7, 4


@pytest.fixture(autouse=True)
def collected(monkeypatch):
    """Tables of any size are collected on a CPU, too; counts the totals with rows of lookups."""
    counted = []
    total = tied_rows.Table.total

    def counting(table, gradient):
        counted.extend(map(len, table.looked_up.values()))
        return total(table, gradient)

    monkeypatch.setattr(tied_rows, "can_run_on", lambda x: True)
    monkeypatch.setattr(tied_rows, "_LEAST_ELEMENTS", 1)
    monkeypatch.setattr(tied_rows.Table, "total", counting)
    return counted


class Tied(nn.Module):
    def __init__(self, padding=None, between=nn.Tanh):
        super().__init__()
        self.words, self.between = nn.Embedding(WORDS, WIDTH, padding_idx=padding), between()
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.between(self.words(ids)))


class Alone(Tied):
    """Only looked up."""

    def forward(self, ids):
        return self.words(ids) * self.words(ids.flip(0)).sin()


class Often(Tied):
    """Looked up twice, read by two layers and by a product of its own."""

    def forward(self, ids):
        h = self.words(ids) + self.words(ids.flip(1))
        return self.head(h) + self.head(h.cos()) + h @ self.words.weight.sin().mT


class Recomputed(Tied):
    def forward(self, ids):
        h = checkpoint(lambda own: self.words(own).tanh(), ids, use_reentrant=False)
        return checkpoint(self.head, h, use_reentrant=False)


class Renewed(Tied):
    """With other values, in other memory, between two uses."""

    def forward(self, ids):
        before = self.head(self.words(ids))
        self.words.weight.data = self.words.weight.data * 0.5
        return before + self.head(self.words(ids.flip(1)))


class Frozen(Tied):
    def __init__(self):
        super().__init__()
        self.words.weight.requires_grad_(False)


def loss_of(y):
    return (y * torch.arange(1.0, y.numel() + 1).view_as(y)).square().mean()


@pytest.mark.parametrize(
    ("make", "count"),
    [(Tied, 1), (lambda: Tied(3), 1), (Alone, 2), (Often, 2), (Recomputed, 1), (Frozen, None)],
    ids=["tied", "padded", "alone", "often", "recomputed", "frozen"],
)
def test_trials_with_a_table_train_as_alone(make, count, collected):
    torch.manual_seed(0)
    models = [make() for _ in range(3)]
    fused = fuse(copy.deepcopy(models), verify=False)
    for _ in range(2):  # the second adds to the gradients of the first
        ids = torch.randint(WORDS, (3, 5, 6))
        losses = fused.map(loss_of, fused(ids))
        losses.sum().backward(retain_graph=True)
        losses.sum().backward()
        for model, own in zip(models, ids):
            (2 * loss_of(model(own))).backward()
    assert collected == ([] if count is None else [count] * 4)
    for number, model in enumerate(models):
        for own, right in zip(fused.module.parameters(), model.parameters()):
            assert (own.grad is None) == (right.grad is None)
            if own.grad is not None:
                torch.testing.assert_close(own.grad[number], right.grad, rtol=1e-4, atol=1e-5)


def test_gradients_that_are_asked_for_by_name_and_those_of_gradients_are_whole():
    torch.manual_seed(0)
    models = [Tied() for _ in range(2)]
    fused = fuse(copy.deepcopy(models), verify=False)
    ids = torch.randint(WORDS, (2, 5, 6))
    weight = fused.module.words.weight
    seen = []
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    (first,) = torch.autograd.grad(fused.map(loss_of, fused(ids)).sum(), weight)
    (again,) = torch.autograd.grad(fused.map(loss_of, fused(ids)).sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(again.square().sum(), weight)
    for number, model in enumerate(models):
        (right,) = torch.autograd.grad(loss_of(model(ids[number])), model.words.weight, create_graph=True)
        (of_right,) = torch.autograd.grad(right.square().sum(), model.words.weight)
        for found, wanted in ((first, right), (again, right), (seen[0], right), (second, of_right)):
            torch.testing.assert_close(found[number], wanted, rtol=1e-4, atol=1e-4)


def test_values_that_a_model_sets_between_two_uses_are_those_of_the_second():
    torch.manual_seed(0)
    models = [Renewed() for _ in range(2)]
    fused = fuse(copy.deepcopy(models), verify=False)
    ids = torch.randint(WORDS, (2, 5, 6))
    y = fused(ids)
    y.square().mean().backward()
    for number, model in enumerate(models):
        alone = model(ids[number])
        alone.square().mean().backward()
        torch.testing.assert_close(y[number], alone)
        found = fused.module.words.weight.grad[number] * 2  # the mean is that of two trials
        torch.testing.assert_close(found, model.words.weight.grad)


def test_an_array_is_copied_between_a_forward_and_its_backward():
    fused = fuse([Tied() for _ in range(2)], verify=False)
    ids = torch.randint(WORDS, (2, 5, 6))
    losses = [fused(ids).sin().sum()]
    losses += [one(ids).sin().sum() for one in (copy.deepcopy(fused), fused)]
    copied = pickle.loads(pickle.dumps(fused))
    losses[0].backward()
    losses.append(copied(ids).sin().sum())
    assert len({loss.item() for loss in losses}) == 1


def test_a_backward_that_failed_leaves_nothing_to_the_next_one():
    class Failing(Tied):
        def forward(self, ids):
            y = self.head(self.words(ids))
            y.register_hook(fail_once)
            return y + self.words(ids.flip(1)).sum()  # whose backward comes first

    failures = [RuntimeError("once")]

    def fail_once(gradient):
        if failures:
            raise failures.pop()

    fused = fuse([Failing() for _ in range(2)], verify=False)
    ids = torch.randint(WORDS, (2, 5, 6))
    loss = fused(ids).sin().sum()
    with pytest.raises(RuntimeError, match="once"):
        loss.backward(retain_graph=True)
    (found,) = torch.autograd.grad(loss, fused.module.words.weight)
    (wanted,) = torch.autograd.grad(fused(ids).sin().sum(), fused.module.words.weight)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("least_padded", [1, 4096])
def test_rows_are_added_to_the_gradient_of_a_dense_layer_where_it_lies(least_padded, monkeypatch, collected):
    """Without a copy, unless the layer's gradient has gaps between the trials."""
    monkeypatch.setattr(gpu_matmul, "_LEAST_PADDED", least_padded)
    torch.manual_seed(0)
    weight, ids = torch.randn(2, WORDS, WIDTH, requires_grad=True), torch.randint(WORDS, (2, 5))
    index = ids + WORDS * torch.arange(2).unsqueeze(1)
    tables, places = tied_rows.Tables(), []
    total = tied_rows.Table.total

    def noting(table, gradient):
        outcome = total(table, gradient)
        places.append((gradient.data_ptr(), table.fresh, outcome.data_ptr()))
        return outcome

    monkeypatch.setattr(tied_rows.Table, "total", noting)
    y = cast_dense(tables.look_up(weight, index).sin(), tables.shared(weight), None, torch.float32)
    y.square().sum().backward()
    ((of_layer, _, outcome),) = places
    assert (of_layer == outcome) == (least_padded > WORDS)
    rows = weight.detach().requires_grad_()
    wanted = torch.stack([own[ids[number]].sin() @ own.mT for number, own in enumerate(rows)])
    wanted.square().sum().backward()
    torch.testing.assert_close(weight.grad, rows.grad)
