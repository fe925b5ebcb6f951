"""A traced model computes what the model computes, however it is cut and whatever the batch."""

from __future__ import annotations

import copy
import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from plait.core.errors import InputError
from plait.pipeline.cutting.check_model import StageError
from plait.pipeline.cutting.cut import cut
from plait.profiler.trace import trace
from plait.profiler.trace_errors import TraceError
from plait.verification.python_state import changed, state_of
from support import silent_cases
from support.further import but_further
from support.stages import cut_all
from support.traced_models import MODELS, Branches, as_double, make, staged_step, whole_step


# A stage for each layer, 1000 at most. In three stages they run in pipeline/test_to_code.py.
@pytest.mark.parametrize("count", [pytest.param(3, marks=pytest.mark.extended), 1000])
# One with a mask has all that the encoder has.
@pytest.mark.parametrize("name", but_further(MODELS, "encoder"))
def test_stages_chained_compute_what_the_model_computes_for_another_batch_size(name: str, count: int) -> None:
    model, example = make(name, batch=4)
    _, inputs = make(name, batch=3)
    staged_step(model, inputs, example, count).assert_equals(whole_step(model, inputs))


def test_a_trace_changes_nothing_of_the_model() -> None:
    model, inputs = make("in-place", batch=4)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    trace(model, inputs)
    torch.testing.assert_close(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(type(buffer) is Tensor for buffer in model.buffers())


@pytest.mark.parametrize("name", ["CountsInDict", "Anneals", "Window", "OwnNumbers", "CountsInClass", "lora"])
def test_a_trace_changes_nothing_in_python_in_depth(name: str) -> None:
    model = getattr(silent_cases, name)()
    state = state_of(model)
    before, weights = state.tokens(same_tensors=True), copy.deepcopy(model.state_dict())
    trace(model, (torch.randn(4, 4),))
    assert changed(before, state.tokens(same_tensors=True)) == []
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)


def test_a_count_that_forward_does_not_go_by_is_no_concern() -> None:
    class Counts(nn.Module):
        def __init__(self, reads: bool) -> None:
            super().__init__()
            self.a, self.calls, self.reads = nn.Linear(4, 4), 0, reads

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.a(x) * (2 if self.reads and self.calls > 1000 else 1)

    assert trace(Counts(reads=False), (torch.randn(4, 4),)).concerns == ()
    (concern,) = trace(Counts(reads=True), (torch.randn(4, 4),)).concerns
    assert "forward of Counts changes self.calls, on which its next one depends" in concern.message


class TakesNumbers(nn.Module):
    def forward(self, x: Tensor, a: float, b: float, name: str) -> Tensor:
        return x * a + b * 2 if name == "" else x * a + math.exp(b)


@pytest.mark.parametrize(
    ("values", "fixed"), [((2.0, 3.0, "unlooked"), {"[1]", "[2]", "[3]"}), ((2.0, 3.0, ""), {"[2]", "[3]"})]
)
def test_numbers_and_text_that_code_goes_by_are_fixed_also_where_code_in_c_reads_them(
    values: tuple[Any, ...], fixed: set[str]
) -> None:
    found = trace(TakesNumbers(), (torch.randn(4, 4), *values))
    assert set(found.fixed_values) == fixed
    with pytest.raises(InputError, match=r"found 4.0 at \[2\] of a batch's inputs, where the trace had 3.0"):
        found.order_inputs((torch.ones(2, 4), 2.0, 4.0, values[2]))


def test_a_model_traced_with_a_batch_of_one_takes_any_batch() -> None:
    model, example = make("branches", batch=1)
    _, inputs = make("branches", batch=5)
    staged_step(model, inputs, example, 4).assert_equals(whole_step(model, inputs))


def test_a_stage_cut_from_an_unordered_set_of_branches_computes_the_same() -> None:
    """The planner may put the second of two branches before the first."""
    model, inputs = make("branches", batch=4)
    traced = trace(model, inputs)
    ids = [layer.id for layer in traced.layers]
    right = [i for i in ids if i.startswith("right")]
    left = [i for i in ids if i.startswith("left")]
    rest = ids[ids.index("cat") :]
    stages = cut_all(traced, [["stem", "relu", *right], left, rest])
    values = {"x": inputs[0]}
    for stage in stages:
        given = stage.module(*(values[value.name] for value in stage.inputs))
        values |= {value.name: tensor for value, tensor in zip(stage.outputs, given)}
    (output,) = [values[name] for name in traced.outputs]
    torch.testing.assert_close(output, copy.deepcopy(model)(*inputs))


def test_layers_are_named_by_their_module_path_and_a_second_call_by_its_number() -> None:
    model, inputs = make("called-twice", batch=2)
    ids = [layer.id for layer in trace(model, inputs).layers]
    assert ids == ["embed", "mean", "shared", "tanh", "shared@2", "sub", "norm", "head"]


def test_a_call_that_returns_its_argument_does_not_come_between_the_argument_and_its_later_uses() -> None:
    class Normed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.contiguous().to(x.dtype).exp()

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.normed = Normed()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.normed(x) + x

    traced = trace(Residual(), (torch.randn(2, 3),))
    add = traced.boundary([traced.layer_by_id["add"]])
    assert [traced.layer_of[name] for name in add.inputs] == ["first", "normed.exp"]


def test_tied_parameters_have_one_first_name_in_every_stage() -> None:
    model, inputs = make("called-twice", batch=2)
    traced = trace(model, inputs)
    first, last = cut(traced, ["embed"]), cut(traced, ["head"])
    assert first.first_names == {"embed.weight": "embed.weight"}
    assert last.first_names == {"head.weight": "embed.weight"}
    assert dict(last.module.named_parameters())["head.weight"] is model.embed.weight


def test_a_stage_follows_train_and_eval() -> None:
    model, inputs = make("masked", batch=4)
    traced = trace(model, inputs)
    stage = cut(traced, [layer.id for layer in traced.layers])
    stage.module.eval()
    (logits, _) = stage.module(*inputs)
    torch.testing.assert_close(logits, copy.deepcopy(model).eval()(*inputs)["logits"])


def test_a_module_that_was_frozen_by_itself_stays_frozen_in_a_stage() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].eval()
    stage = cut(trace(model, (torch.randn(4, 3),)), ["0", "1"])
    assert stage.module.training
    assert not model[1].training


def test_the_shape_of_a_value_is_known_before_it_is_made() -> None:
    model, example = make("masked", batch=4)
    traced = trace(model, example)
    inputs = (torch.zeros(6, 9, dtype=torch.long), torch.ones(6, dtype=torch.long))
    ids = [layer.id for layer in traced.layers]
    stage = cut(traced, ids[: ids.index("head")])
    sizes = {
        symbol: size
        for name, tensor in zip(traced.inputs, inputs, strict=True)
        for symbol, size in zip(traced.value(name).shape, tensor.shape, strict=True)
    }
    shapes = [
        tuple(size if isinstance(size, int) else int(size.subs(sizes)) for size in value.shape)
        for value in stage.outputs
    ]
    assert shapes == [tuple(tensor.shape) for tensor in stage.module(*inputs)]


def test_dropout_in_a_stage_is_fresh_in_every_pass() -> None:
    stage = cut(trace(nn.Sequential(nn.Dropout(0.5)), (torch.ones(4, 50),)), ["0"])
    first, second = (stage.module(torch.ones(4, 50))[0] for _ in range(2))
    assert not torch.equal(first, second)


def test_a_value_is_copied_before_the_stage_overwrites_it_for_others() -> None:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            side = x.sum(1)
            return self.relu(x).sum(1) + side

    model = Overwriting()
    x = torch.randn(4, 3)
    stages = cut_all(trace(model, (x,)), [["first", "relu"], ["sum", "sum@2"]])
    before, after = stages[0].module(x)
    torch.testing.assert_close(before, model.first(x))
    torch.testing.assert_close(stages[1].module(before, after)[0], model(x))


def test_a_write_through_a_view_reaches_the_layers_after_it() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.last = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            side = x.exp()
            rows = x.view(2, -1)
            rows[0] *= 2
            return self.last(x) + side + rows.view(-1, 4)

    model = Writing().double()
    inputs = as_double((torch.randn(4, 4),))
    staged_step(model, inputs, inputs, 1000).assert_equals(whole_step(model, inputs))


def test_a_stage_holds_intermediate_tensors_no_longer_than_the_model() -> None:
    alive: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            y = x + 1
            alive.append(weakref.ref(y))
            counts.append(sum(ref() is not None for ref in alive))
            return y

    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(5):
                x = Probe.apply(x)
            return x

    traced = trace(Chain(), (torch.ones(3),))
    alive.clear(), counts.clear()
    with torch.no_grad():
        cut(traced, [layer.id for layer in traced.layers]).module(torch.ones(3))
    assert max(counts) <= 2


class OperationCounts(TorchDispatchMode):
    """Counts the operations of torch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_stage_runs_no_more_operations_than_the_model() -> None:
    model, inputs = make("branches", batch=2)
    traced = trace(model, inputs)
    stage = cut(traced, [layer.id for layer in traced.layers])

    def operations(run: Any) -> Counter[str]:
        with OperationCounts() as counts:
            run(*inputs)
        return counts.found

    assert operations(stage.module) == operations(model)


def test_stages_that_cannot_be_are_refused() -> None:
    traced = trace(Branches(), (torch.randn(2, 2, 6, 6),))
    ids = [layer.id for layer in traced.layers]
    with pytest.raises(StageError, match="'stem' is in stages 0 and 1"):
        cut_all(traced, [ids, ["stem"]])
    with pytest.raises(StageError, match="1 layers are in no stage, the first is 'head'"):
        cut_all(traced, [[i for i in ids if i != "head"]])
    with pytest.raises(StageError, match=r"'relu' of stage 0 needs 'stem' from layer 'stem' of stage 1"):
        cut_all(traced, [[i for i in ids if i != "stem"], ["stem"]])
    with pytest.raises(InputError, match="no layer 'sterm'; did you mean 'stem'"):
        cut(traced, ["sterm"])


class DependsOnValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line that is reported
            return x
        return -x


class ReadsItem(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.max().item()  # the line that is reported


class SelectsByMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        chosen = x[x > 0]
        return chosen if len(chosen) > 3 else x  # the line that is reported


class LoopsOverBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[i] * i for i in range(x.shape[0])])  # the line that is reported


class UsesNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() + 1)  # the line that is reported


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.ones(3, 77))  # the line that is reported


class HooksATensor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda grad: grad * 2)  # the line that is reported
        return y


class WritesThroughAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        part = y[:, :2]
        self.layer(x)
        part.add_(1)
        return y + 1  # the line that is reported


@pytest.mark.parametrize(
    ("model", "what", "change"),
    [
        (DependsOnValue, "reads the value of a tensor", "torch.where"),
        (ReadsItem, "reads the value of a tensor", "torch.where"),
        (SelectsByMask, "shape depend on the values", "product with the mask"),
        (LoopsOverBatch, "fixes the batch size", "on the whole batch at once"),
        (UsesNumpy, "forward failed with", "only torch operations"),
        (Fails, "forward failed with RuntimeError", "inputs fit the model"),
        (HooksATensor, "calls register_hook inside forward", "torch.autograd.Function"),
        (WritesThroughAView, "changed in place through a view", "clone the view"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused_with_the_line_and_what_to_change(
    model: type[nn.Module], what: str, change: str
) -> None:
    with pytest.raises(TraceError) as caught:
        trace(model(), (torch.randn(4, 4),))
    message = str(caught.value)
    assert "test_trace.py:" in message
    assert "# the line that is reported" in message
    assert what in message
    assert change in message


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_model_that_recomputes_activations_is_traced_through(use_reentrant: bool) -> None:
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.last = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(lambda y: self.first(y).tanh(), x, use_reentrant=use_reentrant))

    model = Recomputing().double()
    inputs = as_double((torch.randn(4, 4).requires_grad_(),))
    staged_step(model, inputs, inputs, 3).assert_equals(whole_step(model, inputs))


def test_a_region_with_its_own_autocast_keeps_it() -> None:
    class Precise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.autocast("cpu", enabled=False):
                return x.float() @ self.first.weight

    model, x = Precise(), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        traced = trace(model, (x,))
        (found,) = cut(traced, [layer.id for layer in traced.layers]).module(x)
        assert found.dtype == torch.float32
        assert torch.equal(found, model(x))


def test_layers_that_are_left_out_with_probability_0_are_never_left_out() -> None:
    class MayDrop(nn.Module):
        def __init__(self, probability: float) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.dropout, self.probability = nn.Dropout(0.5), probability

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if torch.rand([]) < self.probability:
                    continue
                x = self.dropout(layer(x))
            return x

    model = MayDrop(0.0).double()
    inputs = as_double((torch.randn(4, 4),))
    staged_step(model, inputs, inputs, 2).assert_equals(whole_step(model, inputs))
    with pytest.raises(TraceError, match="reads the value of a tensor"):
        trace(MayDrop(0.5), (torch.randn(4, 4),))


def test_a_failed_trace_leaves_torch_as_it_was() -> None:
    call, assign = nn.Module.__call__, nn.Module.__setattr__
    apply = torch.autograd.Function.__dict__["apply"]
    with pytest.raises(TraceError):
        trace(DependsOnValue(), (torch.randn(4, 4),))
    assert (nn.Module.__call__, nn.Module.__setattr__) == (call, assign)
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert "apply" not in torch.autograd.function._SingleLevelFunction.__dict__
