"""Losses and metrics by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait.core.errors import JobError
from plait.workloads.losses import build_loss
from plait.workloads.metrics import accuracy


def test_cross_entropy_is_the_mean_surprise_over_samples():
    output = torch.randn(6, 4)
    target = torch.tensor([0, 3, 1, 2, 2, 0])
    surprise = [-output[i].log_softmax(0)[t] for i, t in enumerate(target)]
    torch.testing.assert_close(build_loss("cross-entropy")(output, target), torch.stack(surprise).mean())


def test_cross_entropy_is_the_mean_surprise_over_tokens():
    output = torch.randn(2, 3, 5)
    target = torch.randint(5, (2, 3))
    surprise = [-output[b, t].log_softmax(0)[target[b, t]] for b in range(2) for t in range(3)]
    torch.testing.assert_close(build_loss("cross-entropy")(output, target), torch.stack(surprise).mean())


def test_mse_is_the_mean_squared_difference():
    output, target = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0]])
    assert build_loss("mse")(output, target).item() == (4 + 9) / 2


@pytest.mark.parametrize("kind", ["cross-entropy", "mse"])
def test_shapes_that_do_not_fit_are_refused_with_both_shapes(kind):
    with pytest.raises(JobError, match=r"\(4, 1\).*\(2,\)"):
        build_loss(kind)(torch.randn(4, 1), torch.zeros(2, dtype=torch.long))


def test_a_misspelt_loss_is_answered_with_the_nearest():
    with pytest.raises(JobError, match="'cros-entropy'; did you mean 'cross-entropy'"):
        build_loss("cros-entropy")


def test_a_loss_may_be_any_importable_function_or_class():
    output, target = torch.randn(4, 5), torch.randn(4, 5)
    for kind in ("torch.nn.functional:l1_loss", "torch.nn:L1Loss"):
        assert torch.equal(build_loss(kind)(output, target), nn.functional.l1_loss(output, target))


def test_something_that_is_no_function_is_refused_as_a_loss():
    with pytest.raises(JobError, match="expected a function"):
        build_loss("math:pi")
    with pytest.raises(JobError, match="Linear needs 'in_features'.*add loss_args.in_features"):
        build_loss("torch.nn:Linear")


def test_a_loss_takes_options_and_refuses_those_it_has_not():
    output, target = torch.randn(4, 5), torch.tensor([0, 1, 2, 3])
    smooth = build_loss("cross-entropy", {"label_smoothing": 0.1})
    assert torch.equal(smooth(output, target), F.cross_entropy(output, target, label_smoothing=0.1))
    smooth = build_loss("torch.nn:CrossEntropyLoss", {"label_smoothing": 0.2})
    assert torch.equal(smooth(output, target), F.cross_entropy(output, target, label_smoothing=0.2))
    with pytest.raises(JobError, match="loss_args.label_smothing.*did you mean 'label_smoothing'"):
        build_loss("cross-entropy", {"label_smothing": 0.1})


def test_accuracy_counts_samples_and_tokens():
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(logits, torch.tensor([1, 1, 1])) == (2, 3)
    assert accuracy(logits.expand(2, 3, 2), torch.tensor([[1, 0, 1], [0, 1, 0]])) == (3, 6)
