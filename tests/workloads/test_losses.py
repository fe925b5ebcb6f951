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


@pytest.mark.parametrize("value", [2, -0.1, True, "much", float("nan")])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("cross-entropy", "label_smoothing"),
        ("plait.workloads.translation.loss:label_smoothing", "smoothing"),
    ],
)
def test_only_a_share_is_taken_for_label_smoothing(kind, name, value):
    with pytest.raises(JobError, match=f"loss_args.{name}: found .*, expected a number from 0 to 1"):
        build_loss(kind, {name: value})


def test_accuracy_counts_samples_and_tokens():
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(logits, torch.tensor([1, 1, 1])) == (2, 3)
    assert accuracy(logits, torch.tensor([1, 1, -100])) == (1, 2)
    assert accuracy(logits.expand(2, 3, 2), torch.tensor([[1, 0, 1], [0, 1, 0]])) == (3, 6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_weighs_classes_as_torch_does(smoothing):
    output, target = torch.randn(6, 3), torch.tensor([0, 1, 2, 2, 1, 0])
    weight = [1, 2.5, 0.5]
    loss = build_loss("cross-entropy", {"weight": weight, "label_smoothing": smoothing})
    expected = F.cross_entropy(output, target, weight=torch.tensor(weight), label_smoothing=smoothing)
    assert torch.equal(loss(output, target), expected)
    # In another precision too, with the same loss.
    assert loss(output.double(), target).dtype is torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert loss(output.bfloat16(), target).isfinite()


@pytest.mark.parametrize("weight", ["heavy", [], [1.0, "two"], 3.0, [True, False]])
def test_class_weights_that_are_no_numbers_are_refused(weight):
    with pytest.raises(JobError, match=r"loss_args\.weight: found .* expected a list with a number"):
        build_loss("cross-entropy", {"weight": weight})


def test_class_weights_for_another_number_of_classes_are_refused():
    loss = build_loss("cross-entropy", {"weight": [1.0, 2.0]})
    with pytest.raises(JobError, match="found 2 numbers, but the model has 3 classes; expected one for each"):
        loss(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (["cat", "dog"], r"found a list of 2 str as the target, expected a tensor with the number"),
        (None, "found None as the target"),
        (torch.tensor([0.0, 1.0]), r"a float32 tensor of shape \(2,\) as the target, expected class numbers"),
        (torch.tensor([True, False]), "a bool tensor .* expected class numbers"),
    ],
)
def test_targets_that_are_no_class_numbers_are_refused_with_what_is_expected(target, words):
    with pytest.raises(JobError, match=words):
        build_loss("cross-entropy")(torch.randn(2, 3), target)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32])
def test_class_numbers_of_any_integer_type_serve(kind):
    output, target = torch.randn(3, 4), torch.tensor([3, 0, 1])
    loss = build_loss("cross-entropy")
    assert torch.equal(loss(output, target.to(kind)), loss(output, target))


def test_mse_takes_targets_in_float64_as_numpy_and_python_give_them():
    output = torch.randn(3, requires_grad=True)
    target = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    build_loss("mse")(output, target).backward()
    torch.testing.assert_close(output.grad, 2 / 3 * (output.detach() - target.float()))
    with pytest.raises(JobError, match="mse found a list of 3 float as the target"):
        build_loss("mse")(output, [1.0, 2.0, 3.0])


def vector(output, target):
    return (output - target).square().sum(-1)


def number(output, target):
    return vector(output, target).mean().item()


def one(output, target):
    return vector(output, target).mean(0, keepdim=True)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("vector", r"a float32 tensor of shape \(4,\)"), ("number", "returned a float, expected one number")],
)
def test_a_loss_that_is_not_one_number_is_told_to_be_a_mean(kind, words):
    with pytest.raises(JobError, match=f"loss: test_losses:{kind} .*{words}"):
        build_loss(f"test_losses:{kind}")(torch.zeros(4, 2), torch.ones(4, 2))


def test_a_loss_with_one_element_is_a_number():
    assert build_loss("test_losses:one")(torch.zeros(4, 2), torch.ones(4, 2)).shape == ()


def test_what_a_loss_of_ones_own_raises_says_what_it_was_called_with():
    with pytest.raises(TypeError) as caught:
        build_loss("test_losses:vector")(torch.zeros(2, 3), ["cat", "dog"])
    (note,) = caught.value.__notes__
    assert note == (
        "loss: test_losses:vector was called with a float32 tensor of shape (2, 3) as the output and a list "
        "of 2 str as the target"
    )


def test_an_output_with_a_loss_of_its_own_is_told_of_it():
    with pytest.raises(JobError, match="returned a dict, expected a tensor; .* use loss: model"):
        build_loss("cross-entropy")({"loss": torch.tensor(1.0)}, torch.tensor([0]))
