"""Unusual forms of calls: other names of arguments, views that are written, types, ties, empty tensors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from fused_checks import CLOSE, assert_equals_lone_models, fuse, make_models
from torch import nn

from plait.fusion import FusionError, Shared
from plait.fusion.dispatch.one_trial import stack_outcomes
from plait.fusion.dispatch.tensor import Trials, TrialTensor
from plait.fusion.kernels.images import in_16_bits
from plait.fusion.speed.cuda_graph import copy_inputs

ROWS, CHANNELS = 4, 6
APART = (torch.tensor([0, 1, 2]), slice(None), torch.tensor([0, 1, 2]))


class Body(nn.Module):
    """A linear layer and a batch norm, then a function of (module, what the layers make)."""

    def __init__(self, function, norm=False):
        super().__init__()
        self.linear = nn.Linear(CHANNELS, CHANNELS)
        self.norm = nn.BatchNorm1d(CHANNELS) if norm else nn.Identity()
        self.own = nn.Parameter(torch.rand(CHANNELS) * 0.3)
        self.scalar = nn.Parameter(torch.rand(()) * 0.3)
        self.function = function

    def forward(self, x):
        return self.function(self, self.norm(self.linear(x)))


def assign(target, index, value):
    target[index] = value
    return target


def write(x, change):
    """What is left in `x` after `change` wrote into it."""
    change(x)
    return x


def rounded(h):
    """Whole numbers, many of them equal, with the gradient of what was rounded."""
    return h + (h.round() - h).detach()


def pooled(h, **options):
    return F.max_pool2d(h.view(1, 1, ROWS, CHANNELS).to(**options), 2)


CALLS = {
    "softmax without an axis": lambda m, h: F.softmax(h, dim=None),
    "softmax of four axes without an axis": lambda m, h: nn.Softmax()(h.view(2, 2, 3, 2)),
    "log softmax without an axis": lambda m, h: nn.LogSoftmax()(h),
    "softmin without an axis": lambda m, h: nn.Softmin()(h),
    "cat along axis=": lambda m, h: torch.cat((h, h.tanh()), axis=1).mean(0),
    "stack along axis=": lambda m, h: torch.stack((h, h.tanh()), axis=1).mean(0),
    "concatenate along axis=": lambda m, h: torch.concatenate((h, h.tanh()), axis=-1).flatten(),
    "squeeze of axis=": lambda m, h: h[:, None, None].squeeze(axis=1) * torch.ones(ROWS, 3, CHANNELS),
    "maximum along axis=": lambda m, h: h.max(axis=1)[0] + h.min(axis=1).values,
    "place of the maximum along axis=": lambda m, h: h * h.argmax(axis=1, keepdims=True),
    "unsqueeze of axis=": lambda m, h: torch.unsqueeze(h, axis=1),
    "sort along axis=": lambda m, h: torch.sort(h, axis=1)[0],
    "chunk along axis=": lambda m, h: torch.cat(torch.chunk(h, 2, axis=1), 0),
    "topk by name": lambda m, h: torch.topk(h, k=2)[0] + h.topk(k=2, dim=-1)[0],
    "topk of input=": lambda m, h: torch.topk(input=h, k=2, dim=1)[0],
    "matmul of input=": lambda m, h: torch.matmul(input=h, other=m.linear.weight.t()),
    "bmm of input=": lambda m, h: torch.bmm(input=h[None], mat2=m.linear.weight.t()[None]),
    "transpose of input=": lambda m, h: torch.transpose(input=h, dim0=0, dim1=1),
    "reshape of input=": lambda m, h: torch.reshape(input=h, shape=(-1,)),
    "flatten of input=": lambda m, h: torch.flatten(input=h, start_dim=0),
    "split of tensor=": lambda m, h: torch.split(tensor=h, split_size_or_sections=3, dim=1)[0],
    "type of a trial's tensor": lambda m, h: h * torch.arange(CHANNELS).type_as(h),
    "a shared mask as a trial's tensor": lambda m, h: h * torch.ones(ROWS, CHANNELS).tril().to(h),
    "clamp by a parameter": lambda m, h: torch.clamp(h, max=m.own),
    "clamp between parameters": lambda m, h: h.clamp(min=-m.own, max=m.own),
    "clip by a scalar parameter": lambda m, h: torch.clip(h, max=m.scalar),
    "prelu by name": lambda m, h: F.prelu(h, weight=m.own),
    "masked fill with a trial's number": lambda m, h: h.masked_fill(h > 0, m.scalar),
    "fill with a trial's number": lambda m, h: h.clone().fill_(h.mean()) + h,
    "full of a trial's number": lambda m, h: torch.full_like(h, m.scalar.detach()) + h,
    "assignment by tensors apart": lambda m, h: assign(h.view(ROWS, 2, 3).clone(), APART, h[:3, :2]),
    "assignment of shared values apart": lambda m, h: assign(
        h.view(ROWS, 2, 3) * 1, APART, torch.arange(6.0).view(3, 2).double()
    ),
    "reading by tensors apart": lambda m, h: h.view(ROWS, 2, 3)[APART],
    "index by nested lists": lambda m, h: h[[[0, 1], [1, 2]]],
    "assignment of a longer shape": lambda m, h: assign(h * 1, (0,), h[1:2]),
    "maximum of equal values": lambda m, h: rounded(h).max() + rounded(h).min() + h.mean(),
    "median of equal values": lambda m, h: rounded(h).median() + h.mean(),
    "sum over no axes": lambda m, h: h.sum(dim=[]) + h.sum(1).mean(dim=()) + h.amax(dim=[]),
    "mean over no axes left": lambda m, h: h.square().sum(1).mean(dim=list(range(1, 1))),
    "cat with a bare empty tensor": lambda m, h: torch.cat((torch.tensor([]), h), dim=-1),
    "cat with bare empty tensors of trials": lambda m, h: torch.cat((h[0, :0], h, h[0, :0]), dim=0),
    "real part of a spectrum": lambda m, h: torch.fft.fft(torch.fft.fft(h, dim=-1), dim=-2).real,
    "imaginary part of a spectrum": lambda m, h: torch.fft.fft(h).imag,
    "meshgrid": lambda m, h: torch.meshgrid(h[0], h[1], indexing="ij")[0] * h[2],
    "memory format": lambda m, h: pooled(h.contiguous(), memory_format=torch.channels_last),
    "contiguous in a format": lambda m, h: h.view(1, 1, ROWS, CHANNELS).contiguous(
        memory_format=torch.channels_last
    ),
    "text in a branch": lambda m, h: h if h.type() == "torch.DoubleTensor" and f"{h.mean():.3f}" else h * 0,
    "group norm by computed weights": lambda m, h: F.group_norm(h, 2, *(h[:2].cumsum(1) + 1).unbind(0)),
    "batch norm by computed weights": lambda m, h: F.batch_norm(
        h, None, None, *(h.t()[:, :2]).unbind(1), True
    ),
    "nll with old names": lambda m, h: (
        F.nll_loss(h.log_softmax(1), torch.arange(ROWS), size_average=False)
        + F.nll_loss(h.log_softmax(1), torch.arange(ROWS), reduce=False).sum()
    ),
    "a scalar beside float32": lambda m, h: (m.scalar / 3 * torch.ones(3)).double() + h.mean(),
    "a shared float64 scalar beside a float32 one": lambda m, h: (
        h.mean().float() + torch.tensor(0.1, dtype=torch.float64)
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("count", [3, ROWS, CHANNELS])
def test_a_call_in_an_unusual_form_equals_the_lone_one(name, count):
    # As many trials as there are rows, or channels, must not be taken for them.
    models = make_models(lambda: Body(CALLS[name]), count)
    assert_equals_lone_models(models, [(torch.randn(ROWS, CHANNELS).double(),) for _ in models])


WRITES = {
    "part of a view": lambda m, h: write(h, lambda y: y.view(-1)[:5].zero_()),
    "assigned part of a view": lambda m, h: write(h, lambda y: assign(y.view(-1), slice(5), 0.0)),
    "a whole view": lambda m, h: write(h, lambda y: y.view(-1).clamp_(max=0.1)),
    "a flattened tensor": lambda m, h: write(h, lambda y: y.flatten().mul_(2)),
    "a contiguous one": lambda m, h: write(h, lambda y: y.contiguous().mul_(2)),
    "a view of a view": lambda m, h: write(h, lambda y: y.view(2, -1).view(-1).mul_(2)),
    "an inner operation": lambda m, h: write(h, lambda y: F.relu(y.view(-1), inplace=True)),
    "the base of a view": lambda m, h: (lambda v: (h.mul_(2), v * 3)[1])(h.view(-1)),
    "a view of one turned back": lambda m, h: write(
        h, lambda y: (lambda turned: turned.view(-1).mul_(2))(y.t().t())
    ),
    "a view whose base is gone": lambda m, h: m.norm(h).view(-1).relu_(),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_through_a_view_reaches_the_tensor_that_it_views(name):
    # After a batch norm the trials lie between rows and channels, and a view that merges these is a copy.
    models = make_models(lambda: Body(WRITES[name], norm=True))
    assert_equals_lone_models(models, [(torch.randn(ROWS, CHANNELS).double(),) for _ in models])


def test_a_write_into_a_copy_of_a_turned_tensor_stays_there():
    def body(m, h):
        y = h.view(2, 2, CHANNELS).transpose(1, 2).reshape(2, -1)
        y.mul_(2)
        return y.sum() + (h * h).sum()

    models = make_models(lambda: Body(body, norm=True))
    assert_equals_lone_models(models, [(torch.randn(ROWS, CHANNELS).double(),) for _ in models])


def test_autocast_leaves_images_in_float64_as_they_are(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    with pytest.raises(RuntimeError, match="found torch.float64, expected 16 bits"):
        in_16_bits(torch.ones(2, 1, 3, 4, 4).double())


REFUSED = {
    "places of a condition": (lambda m, h: h[torch.where(h[:, 0] > 0)[0]], "value in Python"),
    # Which way a product lies in memory is for the layer to choose.
    "memory past a shape": (
        lambda m, h: h.contiguous().as_strided((ROWS, 3, 4), (CHANNELS, 1, 1)),
        "as_strided",
    ),
    "a product written elsewhere": (
        lambda m, h: torch.mm(h.detach(), h.detach().t(), out=torch.empty(0).double()),
        "out=",
    ),
    "a join written elsewhere": (
        lambda m, h: torch.cat((h.detach(), h.detach()), out=h.new_empty(0)),
        "out=",
    ),
    "a sum written elsewhere": (lambda m, h: torch.sum(h.detach(), 0, out=torch.empty(0).double()), "out="),
    "a random pool": (lambda m, h: nn.FractionalMaxPool2d(2, output_size=2)(h[None]), "torch's generator"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_assigned_to_trials_is_refused_in_a_sentence(name):
    function, words = REFUSED[name]
    fused = fuse(make_models(lambda: Body(function, norm=True)))
    with pytest.raises(FusionError, match=words):
        fused(torch.randn(3, ROWS, CHANNELS).double())


@pytest.mark.parametrize("name", ["places of a condition", "memory past a shape"])
def test_what_is_refused_for_several_trials_works_with_one(name):
    models = make_models(lambda: Body(REFUSED[name][0]), 1)
    assert_equals_lone_models(models, [(torch.randn(ROWS, CHANNELS).double(),)])


def test_both_axes_of_places_can_be_unpacked_with_one_trial():
    def body(m, h):
        row, column = torch.where(h > 0)
        return h[row, column]

    models = make_models(lambda: Body(body), 1)
    assert_equals_lone_models(models, [(torch.randn(ROWS, CHANNELS).double(),)])


def test_a_wrong_call_has_torchs_own_error_about_one_trial():
    fused = fuse(make_models(lambda: Body(lambda m, h: h @ torch.ones(5, 2).double())))
    with pytest.raises(RuntimeError, match="4x6 and 5x2"):
        fused(torch.randn(3, ROWS, CHANNELS).double())


@pytest.mark.parametrize("rows", [3, 4])
def test_a_shared_batch_is_not_taken_for_the_trials(rows):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(5))

        def forward(self, x):
            return F.linear(x, torch.ones(5, CHANNELS).double(), self.bias)

    models = make_models(Layer)
    x = torch.randn(rows, CHANNELS).double()
    found = fuse(models)(Shared(x))
    for number, model in enumerate(models):
        torch.testing.assert_close(found[number], model(x), **CLOSE)


@pytest.mark.parametrize("wrong", [6, -1])
def test_an_embedding_never_reads_its_neighbours_rows(wrong):
    fused = fuse(make_models(lambda: nn.Embedding(5, 2)))
    with pytest.raises(IndexError, match="out of range"):
        fused(torch.tensor([[0, 1], [1, wrong], [2, 3]]))


def test_a_row_that_is_masked_throughout_gets_zeros_from_attention_with_dropout():
    mask = torch.ones(3, 3, dtype=torch.bool).tril(-1)

    def attend(m, h):
        x = h[None, :3]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, dropout_p=0.5)

    fused = fuse(make_models(lambda: Body(attend)))
    found = fused(torch.randn(3, ROWS, CHANNELS).double())
    assert torch.equal(found[:, 0, 0], torch.zeros(3, CHANNELS).double())
    found.sum().backward()
    assert found.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in fused.parameters())


@pytest.mark.parametrize("make", [nn.GRU, nn.RNN, nn.GRUCell, nn.LSTMCell])
def test_recurrent_layers_under_autocast_equal_the_lone_ones(make):
    torch.manual_seed(0)
    models = [make(4, 5) for _ in range(2)]
    x = torch.randn(2, 3, 4) if "Cell" in make.__name__ else torch.randn(2, 6, 3, 4)
    fused = fuse([copy.deepcopy(model) for model in models])
    with torch.autocast("cpu", torch.bfloat16):
        found = fused(x)
        expected = [model(own) for model, own in zip(models, x)]
    first = [found] if isinstance(found, torch.Tensor) else found
    for number, lone in enumerate(expected):
        for a, b in zip(first, [lone] if isinstance(lone, torch.Tensor) else lone):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a[number], b)


def test_a_text_of_a_trials_number_has_those_of_all_trials():
    texts = []
    fused = fuse(make_models(lambda: Body(lambda m, h: (texts.append(f"{h.sum() * 0 + 1:.1f}"), h)[1])))
    fused(torch.randn(3, ROWS, CHANNELS).double())
    assert texts == ["[1.0, 1.0, 1.0]"]


def test_a_branch_that_all_trials_take_is_taken_and_another_refused():
    def branch(m, h, mask):
        # As transformers ask of a mask whether it masks anything.
        return h.masked_fill(mask == 0, 0.0) if not mask.all() else h * 2

    class Masked(Body):
        def forward(self, x, mask):
            return self.function(self, self.linear(x), mask)

    models = make_models(lambda: Masked(branch))
    inputs = [(torch.randn(ROWS, CHANNELS).double(), torch.ones(ROWS, CHANNELS).long()) for _ in models]
    assert_equals_lone_models(copy.deepcopy(models), inputs)
    for number, (_, mask) in enumerate(inputs):
        mask[number, 1:] = 0
    assert_equals_lone_models(models, inputs)
    inputs[0][1].fill_(1)
    with pytest.raises(FusionError, match="3 trials have 3 values"):
        fuse(models)(*(torch.stack(parts) for parts in zip(*inputs)))


def test_an_operation_in_place_that_runs_trial_by_trial_keeps_its_gradient():
    def body(m, h):
        y = h * 1
        y.index_reduce_(0, torch.tensor([1, 0]), h[:2] * 2, "prod")
        return y

    models = make_models(lambda: Body(body))
    assert_equals_lone_models(models, [(torch.randn(ROWS, CHANNELS).double(),) for _ in models])


def test_a_number_of_all_trials_makes_a_range_and_numbers_that_differ_are_refused():
    def body(m, h):
        return h[:, : len(torch.arange((h[0, :3] == h[0, :3]).sum()))]

    models = make_models(lambda: Body(body))
    assert_equals_lone_models(models, [(torch.randn(ROWS, CHANNELS).double(),) for _ in models])
    fused = fuse(make_models(lambda: Body(lambda m, h: h * len(torch.arange(h.mean() * 1000)))))
    with pytest.raises(FusionError, match="3 trials have 3 values"):
        fused(torch.rand(3, ROWS, CHANNELS).double())


def plain_step(models, x):
    """The gradients of each trial alone, with a penalty on what its first layer gives."""
    for number, model in enumerate(models):
        seen = []
        handle = model[0].register_forward_hook(lambda *call, seen=seen: seen.append(call[-1]))
        (model(x[number]).square().mean() + seen[0].square().mean()).backward()
        handle.remove()


def test_what_a_hook_kept_is_refused_outside_of_the_call_and_taken_inside_of_map():
    models = make_models(lambda: nn.Sequential(nn.Linear(CHANNELS, 3), nn.Tanh()))
    fused, x = fuse(copy.deepcopy(models)), torch.randn(3, ROWS, CHANNELS, dtype=torch.float64)
    seen = []
    fused.module[0].register_forward_hook(lambda *call: seen.append(call[-1]))
    losses = fused(x).square().mean((1, 2))
    with pytest.raises(FusionError, match="square .*a fused model kept, after its call.*fused.map"):
        losses + seen[0].square().mean()
    penalized = fused.map(lambda loss, kept: loss + kept.square().mean(), losses, seen[0])
    assert penalized.shape == (3,)
    penalized.sum().backward()
    plain_step(models, x)
    for number, model in enumerate(models):
        for found, wanted in zip(fused.module.parameters(), model.parameters()):
            torch.testing.assert_close(found.grad[number], wanted.grad, **CLOSE)


TRANSFORMS = {
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x))[0],
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x[0]),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("shared", [True, False])
def test_transforms_of_torch_func_are_refused_in_a_fused_module_and_right_in_an_unfused_one(name, shared):
    class Transformed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(CHANNELS, CHANNELS)

        def forward(self, x):
            return TRANSFORMS[name](lambda x: self.layer(x).tanh(), x)

    models, x = make_models(Transformed), torch.randn(3, ROWS, CHANNELS, dtype=torch.float64)
    given = Shared(x[0]) if shared else x
    with pytest.raises(FusionError, match=r"within a transform of torch\.func"):
        fuse(models)(given)
    outputs = fuse(models, unfused=[""])(given)
    for number, model in enumerate(models):
        torch.testing.assert_close(outputs[number], model(x[0 if shared else number]), **CLOSE)


def test_writes_reach_views_and_stay_with_their_trial_in_inference_mode_too():
    def views(m, h):
        flat = h.view(-1)
        flat.mul_(2.0)
        return h

    class Writes(nn.Module):
        def forward(self, x):
            return x.add_(1.0)

    class Both(Body):
        def __init__(self):
            super().__init__(views)
            self.writes = Writes()

        def forward(self, x):
            return super().forward(x) + self.writes(torch.ones(CHANNELS, dtype=torch.float64))

    models, x = make_models(Both), torch.randn(3, ROWS, CHANNELS, dtype=torch.float64)
    fused = fuse(models, unfused=["writes"])
    with torch.inference_mode():
        outputs = fused(x.clone())
        for number, model in enumerate(models):
            torch.testing.assert_close(outputs[number], model(x[number].clone()), **CLOSE)


@pytest.mark.parametrize("count", [1, 3])
def test_tensors_computed_trial_by_trial_have_the_trials_axis_unless_all_are_the_same_one(count):
    one, trials = torch.ones(2), Trials(count)
    assert isinstance(stack_outcomes([one.clone() for _ in range(count)], trials), TrialTensor)
    assert isinstance(stack_outcomes([one] * count, trials), TrialTensor) == (count == 1)


@pytest.mark.parametrize(
    "given", [[torch.zeros(1, 3)], [torch.zeros(2, 3, dtype=torch.float64)], [torch.zeros(2, 3)] * 2]
)
def test_a_captured_step_refuses_a_batch_that_it_was_not_captured_for(given):
    held = torch.ones(2, 3)
    with pytest.raises(FusionError, match="expected those of the capture"):
        copy_inputs([held], given)  # a single row would be broadcast, another type cast
    copy_inputs([held], [torch.full((2, 3), 5.0)])
    assert held.eq(5).all()


ODD = {
    "any of no axes": lambda m, x: torch.any(x > 0, dim=()),
    "all of no axes": lambda m, x: torch.all(x > 0, dim=()),
    "argmax keepdim": lambda m, x: x.argmax(keepdim=True),
    "argmin keepdim": lambda m, x: x.argmin(None, True),
}


@pytest.mark.parametrize("name", ODD)
def test_reductions_with_rare_arguments_are_those_of_torch(name):
    fused = fuse([nn.Linear(4, 4) for _ in range(2)])
    x = torch.randn(2, 3, 4)
    found = fused.call(ODD[name], x)
    for trial in range(2):
        assert torch.equal(found[trial], ODD[name](None, x[trial]))


def train_only_weight(model, x):
    model(x).square().mean().backward(inputs=[model.weight])
    return x


def test_backward_to_some_inputs_gives_those_their_gradients():
    models = [nn.Linear(4, 4) for _ in range(2)]
    fused = fuse(models)
    x = torch.randn(2, 3, 4)
    fused.call(train_only_weight, x)
    for trial, model in enumerate(models):
        train_only_weight(model, x[trial])
        torch.testing.assert_close(fused.module.weight.grad[trial], model.weight.grad)
    assert fused.module.bias.grad is None


def attend(mask, is_causal):
    def attention(model, x):
        q = model(x)[None]
        return F.scaled_dot_product_attention(q, q, q, mask, 0.5, is_causal)

    return attention


@pytest.mark.parametrize("unfused", [(), ("",)], ids=["fused", "trial by trial"])
def test_attention_with_dropout_and_rows_that_are_masked_away_has_gradients_that_are_numbers(unfused):
    class Attending(nn.Linear):
        def forward(self, x):
            return attend(torch.full((3, 3), -torch.inf), False)(super().forward, x)

    fused = fuse([Attending(4, 4) for _ in range(2)], unfused=unfused)
    fused(torch.randn(2, 3, 4)).sum().backward()
    grads = [p.grad for p in fused.parameters()] + [p.grad for t in fused.split() for p in t.parameters()]
    assert all(grad.isfinite().all() for grad in grads if grad is not None)


@pytest.mark.parametrize(
    "function",
    [attend(torch.ones(3, 3, dtype=torch.bool), True), lambda model, x: x.repeat(2)],
    ids=["two masks", "repeats of fewer axes"],
)
def test_what_torch_refuses_is_refused_fused(function):
    fused = fuse([nn.Linear(4, 4) for _ in range(2)])
    with pytest.raises(RuntimeError):
        function(fused.trial(0), torch.randn(3, 4))
    with pytest.raises(RuntimeError):
        fused.call(function, torch.randn(2, 3, 4))
