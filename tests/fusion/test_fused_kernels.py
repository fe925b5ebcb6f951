"""The kernels for GPUs compute what torch computes in float64; skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fused_checks import fuse
from torch import nn

from plait.fusion import FusedOptimizer
from plait.fusion.dispatch.random import Streams
from plait.workloads.dcgan import discriminator, generator
from plait.workloads.resnet import resnet18

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TRIALS, BATCH = 3, 5
# Sums in float32, then one rounding to bfloat16.
ROUNDING = 4e-3


def apart(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def images(channels, height, width):
    made = torch.randn(BATCH, height, width, TRIALS, channels, device="cuda", dtype=torch.bfloat16)
    return made.permute(3, 0, 4, 1, 2)


def folded(images):
    """The channels of all trials as those of one image, as torch's grouped convolutions take them."""
    return images.movedim(0, 1).flatten(1, 2)


# Channels, outs, size, kernel, stride, padding: boxes with and without a stride, a kernel of one point,
# channels that fill no block, few channels, and what only gathering can do.
SHAPES = [
    (64, 128, (16, 16), 4, 2, 1),
    (64, 96, (10, 12), 3, 1, 1),
    (128, 64, (14, 6), 5, 2, 2),
    (64, 256, (9, 7), 1, 1, 0),
    (24, 40, (8, 8), 1, 1, 0),
    (64, 128, (2, 2), 2, 2, 0),
    (64, 128, (2, 2), 1, 2, 0),
    (40, 72, (6, 6), 3, 1, 1),
    (3, 64, (16, 12), 4, 2, 1),
    (1, 24, (11, 9), 7, 2, 3),
    (64, 32, (15, 15), 3, 2, 1),
    (10, 7, (8, 8), 3, 1, 1),
    (48, 1, (4, 4), 4, 1, 0),
]


@pytest.mark.parametrize(("channels", "outs", "size", "kernel", "stride", "pad"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_convolution_and_its_gradients_equal_torchs_in_float64(
    channels, outs, size, kernel, stride, pad, has_bias
):
    from plait.fusion.kernels.convolution.trial_convolution import trial_convolution

    torch.manual_seed(0)
    x = images(channels, *size).requires_grad_()
    weight = torch.randn(TRIALS, outs, channels, kernel, kernel, device="cuda", requires_grad=True)
    bias = torch.randn(TRIALS, outs, device="cuda", requires_grad=True) if has_bias else None
    given = [x, weight, *([bias] if has_bias else [])]
    y = trial_convolution(x, weight, bias, stride, (pad, pad))
    exact = [part.detach().double().requires_grad_() for part in given]
    rounded = exact[1] + (weight.detach().bfloat16().double() - exact[1]).detach()
    flat = exact[2].flatten() if has_bias else None
    wanted = F.conv2d(folded(exact[0]), rounded.flatten(0, 1), flat, stride, pad, groups=TRIALS)
    check_gradients(y, given, wanted, exact)


@pytest.mark.parametrize(
    ("channels", "size", "kernel", "stride", "pad", "dilation"),
    [
        (24, (9, 7), (3, 3), (1, 1), (1, 1), (1, 1)),
        (40, (12, 10), (5, 5), (2, 2), (2, 2), (1, 1)),
        (7, (14, 9), (7, 7), (1, 1), (3, 3), (1, 1)),
        (16, (11, 13), (3, 2), (2, 3), (0, 1), (2, 1)),
        (70, (1, 31), (1, 4), (1, 1), (0, 3), (1, 1)),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_depthwise_convolution_and_its_gradients_equal_torchs_in_float64(
    channels, size, kernel, stride, pad, dilation, has_bias
):
    from plait.fusion.kernels.convolution.depthwise import depthwise_convolution

    torch.manual_seed(0)
    x, total = images(channels, *size).requires_grad_(), TRIALS * channels
    filters = torch.randn(TRIALS, channels, 1, *kernel, device="cuda", requires_grad=True)
    bias = torch.randn(TRIALS, channels, device="cuda", requires_grad=True) if has_bias else None
    given = [x, filters, *([bias] if has_bias else [])]
    y = depthwise_convolution(x, filters, bias, stride, pad, dilation)
    exact = [part.detach().double().requires_grad_() for part in given]
    rounded = exact[1] + (filters.detach().bfloat16().double() - exact[1]).detach()
    flat = exact[2].flatten() if has_bias else None
    wanted = F.conv2d(folded(exact[0]), rounded.flatten(0, 1), flat, stride, pad, dilation, groups=total)
    check_gradients(y, given, wanted, exact)


@pytest.mark.parametrize(("channels", "outs", "size", "kernel", "stride", "pad"), SHAPES)
def test_a_transposed_convolution_and_its_gradients_equal_torchs_in_float64(
    channels, outs, size, kernel, stride, pad
):
    from plait.fusion.kernels.convolution.trial_convolution import trial_convolution

    torch.manual_seed(0)
    small = [(length + 2 * pad - kernel) // stride + 1 for length in size]
    x = images(outs, *small).requires_grad_()
    weight = torch.randn(TRIALS, outs, channels, kernel, kernel, device="cuda", requires_grad=True)
    bias = torch.randn(TRIALS, channels, device="cuda", requires_grad=True)
    y = trial_convolution(x, weight, bias, stride, (pad, pad), size)
    exact = [part.detach().double().requires_grad_() for part in (x, weight, bias)]
    rounded = exact[1] + (weight.detach().bfloat16().double() - exact[1]).detach()
    extra = [length - ((less - 1) * stride - 2 * pad + kernel) for length, less in zip(size, small)]
    wanted = F.conv_transpose2d(
        folded(exact[0]), rounded.flatten(0, 1), exact[2].flatten(), stride, pad, extra, groups=TRIALS
    )
    check_gradients(y, [x, weight, bias], wanted, exact)


@pytest.mark.parametrize("shape", [(3, 24, (12, 10), 4, 2, 1), (40, 72, (6, 6), 3, 1, 1)])
def test_a_convolution_of_images_in_another_order_is_that_of_the_same_images(shape):
    from plait.fusion.kernels.convolution.trial_convolution import trial_convolution

    channels, outs, size, kernel, stride, pad = shape
    x = images(channels, *size)
    weight = torch.randn(TRIALS, outs, channels, kernel, kernel, device="cuda")
    wanted = trial_convolution(x, weight, None, stride, (pad, pad))
    for other in (x.contiguous(), x.transpose(3, 4).contiguous().transpose(3, 4)):
        assert torch.equal(trial_convolution(other, weight, None, stride, (pad, pad)), wanted)


# Kernel, stride, padding: with and without overlaps, unlike sides, gaps between windows, windows cut off.
WINDOWS = [
    ((3, 3), (2, 2), (1, 1)),
    ((2, 2), (2, 2), (0, 0)),
    ((3, 2), (1, 3), (1, 0)),
    ((5, 5), (2, 2), (2, 2)),
    ((2, 2), (3, 3), (0, 0)),
]


@pytest.mark.parametrize(("kernel", "stride", "pad"), WINDOWS)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_a_maximum_of_windows_and_its_gradient_are_those_of_torch(kernel, stride, pad, kind):
    from plait.fusion.kernels.max_pool import fits, max_pool

    x = images(40, 9, 7).to(kind)
    x[0] = x[0].round()  # many are equal
    x[1, 0], x[1, 1] = float("-inf"), float("nan")
    x[2, 0, 0, 0, 0] = x[2, 0, 0, 1, 1] = float("nan")
    x.requires_grad_()
    assert fits(x, kernel, stride, pad)
    assert not fits(x.detach().contiguous(), kernel, stride, pad)
    y = max_pool(x, kernel, stride, pad)
    exact = x.detach().float().requires_grad_()
    wanted = F.max_pool2d(exact.flatten(0, 1), kernel, stride, pad).unflatten(0, x.shape[:2])
    torch.testing.assert_close(y.float(), wanted, rtol=0, atol=0, equal_nan=True)
    gradient = torch.randn_like(y)
    (found,), (other,) = (
        torch.autograd.grad(of, to, gradient.to(of.dtype), retain_graph=True)
        for of, to in ((y, x), (wanted, exact))
    )
    torch.testing.assert_close(found.float(), other, rtol=ROUNDING, atol=ROUNDING)
    seed = gradient.clone().requires_grad_()  # second derivatives
    (again,) = torch.autograd.grad(y, x, seed, create_graph=True)
    torch.testing.assert_close(again.float(), other, rtol=ROUNDING, atol=ROUNDING)
    (of_seed,) = torch.autograd.grad(again.float().square().sum(), seed)
    seed = gradient.float().requires_grad_()
    (again,) = torch.autograd.grad(wanted, exact, seed, create_graph=True)
    (wanted_of_seed,) = torch.autograd.grad(again.square().sum(), seed)
    torch.testing.assert_close(of_seed.float(), wanted_of_seed, rtol=3 * ROUNDING, atol=3 * ROUNDING)


@pytest.mark.parametrize(
    "options",
    [{}, {"ceil_mode": True}, {"dilation": 2}, {"return_indices": True}, {"padding": 1, "stride": 1}],
)
def test_a_fused_max_pool_is_torchs_with_each_of_its_options(options):
    fused = fuse([nn.MaxPool2d(2, **options) for _ in range(TRIALS)], verify=False)
    x = images(24, 9, 7)
    found = fused(x)
    for number, one in enumerate(x):
        wanted = F.max_pool2d(one.contiguous(), 2, **options)
        for of, to in zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, wanted))):
            assert torch.equal(of[number], to)


def test_a_bias_that_trials_share_reaches_the_channels_of_each():
    from plait.fusion.kernels.convolution.depthwise import depthwise_convolution
    from plait.fusion.kernels.convolution.trial_convolution import trial_convolution

    x, bias = images(24, 6, 6), torch.randn(24, device="cuda").expand(TRIALS, 24)
    full, filters = (torch.randn(TRIALS, 24, each, 3, 3, device="cuda") for each in (24, 1))
    for found, weight, groups in (
        (trial_convolution(x, full, bias, 1, (1, 1)), full, 1),
        (depthwise_convolution(x, filters, bias, (1, 1), (1, 1), (1, 1)), filters, 24),
    ):
        for own, image, kernel in zip(found, x, weight):
            wanted = F.conv2d(
                image.double(), kernel.bfloat16().double(), bias[0].double(), 1, 1, groups=groups
            )
            assert apart(own, wanted) < ROUNDING


def check_gradients(found, given, wanted, exact):
    assert apart(folded(found), wanted) < ROUNDING
    dy = torch.randn_like(found)
    gradients = torch.autograd.grad(found, given, dy)
    for ours, theirs in zip(gradients, torch.autograd.grad(wanted, exact, folded(dy).double())):
        assert apart(ours, theirs) < ROUNDING


@pytest.mark.parametrize(("channels", "stride"), [(64, 1), (64, 2), (24, 1), (3, 2), (10, 1)])
def test_a_trial_that_is_not_a_number_leaves_its_neighbours(channels, stride):
    from plait.fusion.kernels.convolution.trial_convolution import trial_convolution

    x = images(channels, 8, 8)
    x[1] = float("nan")
    x.requires_grad_()
    weight = torch.randn(TRIALS, 40, channels, 3, 3, device="cuda", requires_grad=True)
    y = trial_convolution(x, weight, None, stride, (1, 1))
    dx, dw = torch.autograd.grad(y, [x, weight], torch.where(y.isnan(), torch.nan, torch.ones_like(y)))
    for part in (y, dx, dw):
        assert [trial.isfinite().all().item() for trial in part] == [True, False, True]


# The maximum of a smooth activation is torch's, which is of rounded numbers.
@pytest.mark.parametrize(
    ("slope", "takes_largest"),
    [*((slope, largest) for slope in (1.0, 0.0, 0.2) for largest in (False, True)),
     ("silu", False), ("hardswish", False)],
)  # fmt: skip
def test_a_norm_with_what_follows_it_equals_torchs_in_float64(slope, takes_largest):
    torch.manual_seed(0)

    def model():
        known = {1.0: nn.Identity, 0.0: nn.ReLU, "silu": nn.SiLU, "hardswish": nn.Hardswish}
        cut = known[slope]() if slope in known else nn.LeakyReLU(slope)
        return nn.Sequential(nn.BatchNorm1d(24), cut)

    models = [model() for _ in range(TRIALS)]
    for one in models:
        nn.init.normal_(one[0].weight)
        nn.init.normal_(one[0].bias)
    x = torch.randn(8, 40, TRIALS, 24, device="cuda", dtype=torch.bfloat16) * 2 + 1
    inner = x.permute(2, 0, 3, 1).detach().requires_grad_()
    fused = fuse(models).to("cuda")
    outcome = fused.call(lambda m, own: m(own).max(2)[0] if takes_largest else m(own), inner)
    dy = torch.randn_like(outcome)
    dx, *gradients = torch.autograd.grad(outcome, [inner, *fused.parameters()], dy)
    for number, one in enumerate(models):
        one = one.to("cuda", torch.float64)
        own = inner[number].detach().double().requires_grad_()
        wanted = one(own).max(2)[0] if takes_largest else one(own)
        assert apart(outcome[number], wanted) < ROUNDING
        exact = torch.autograd.grad(wanted, [own, *one.parameters()], dy[number].double())
        for ours, theirs in zip((dx, *gradients), exact):
            assert apart(ours[number], theirs) < ROUNDING
        for name, buffer in one.named_buffers():
            assert torch.allclose(
                fused.module.get_buffer(name)[number].double(), buffer.double(), rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize("has_largest", [False, True])
def test_the_maximum_of_a_norm_is_that_of_its_weights_then_and_the_index_of_zeros_is_the_first(has_largest):
    from plait.fusion.kernels.batch_norm import statistics, trial_norm_largest

    torch.manual_seed(0)
    x = torch.randn(4, 40, 24, device="cuda", dtype=torch.float16)
    weight = torch.linspace(-1.0, 1.0, 24, device="cuda")
    bias = torch.linspace(1.0, -9.0, 24, device="cuda")
    wanted, index = F.relu(F.batch_norm(x.float().mT, None, None, weight, bias, True)).max(2)
    own = x.mT.unsqueeze(0), weight.unsqueeze(0), bias.unsqueeze(0)
    known = statistics(*own, None, 0.1, 1e-5, has_largest)
    weight.neg_()
    value, found = trial_norm_largest(*own, known, 0.0)
    assert torch.allclose(value.float(), wanted, atol=1e-2)
    assert (wanted == 0).any()
    assert torch.equal(found, index)


def test_adam_in_one_pass_moves_what_had_no_gradient_until_now():
    weight, gradient = torch.ones(2, TRIALS, 40, 33, device="cuda")
    gradient[:, 20:] = 0.0
    plain = [nn.Parameter(own.clone()) for own in weight]
    lone = torch.optim.Adam(plain, lr=0.1, fused=True)
    fused = fuse([nn.Linear(33, 40, bias=False, device="cuda") for _ in range(TRIALS)], verify=False)
    optimizer = FusedOptimizer(fused, "adam", lr=0.1)
    (parameter,) = fused.parameters()
    parameter.detach().copy_(weight)
    for number in range(4):
        if number == 2:
            gradient[:, 10:30] = 0.5
        parameter.grad = gradient.clone()
        for own, its in zip(plain, gradient):
            own.grad = its.clone()
        optimizer.step(), lone.step()
        for own, its in zip(plain, parameter.detach()):
            torch.testing.assert_close(its, own.detach(), rtol=1e-6, atol=1e-7)


def test_a_backward_that_read_a_weight_before_adam_wrote_it_is_refused_by_torch():
    fused = fuse([nn.Linear(16, 16) for _ in range(TRIALS)]).to("cuda")
    optimizer = FusedOptimizer(fused, "adam", lr=0.1)
    loss = fused(torch.randn(TRIALS, 4, 16, device="cuda", requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_adam_in_one_pass_makes_the_steps_of_torchs_adam(kind):
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Conv2d(6, 5, 3), nn.Linear(5, 3)).to("cuda") for _ in range(TRIALS)]
    rates, decays, steps = [1e-3, 1e-2, 0.1], [0.0, 0.1, 0.01], [5, 3, 5]
    fused = fuse(models).channels_last()
    ours = FusedOptimizer(fused, kind, lr=rates, weight_decay=decays, steps=steps)
    lone = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]
    others = [lone(m.parameters(), lr=lr, weight_decay=wd) for m, lr, wd in zip(models, rates, decays)]
    for step in range(5):
        for name, parameter in fused.module.named_parameters():
            parameter.grad = torch.randn(parameter.shape, device="cuda")
            for number, model in enumerate(models):
                model.get_parameter(name).grad = parameter.grad[number].clone()
        ours.step()
        for optimizer, limit in zip(others, steps):
            if step < limit:
                optimizer.step()
    for name, parameter in fused.module.named_parameters():
        for number, model in enumerate(models):
            torch.testing.assert_close(parameter[number], model.get_parameter(name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: discriminator(32), (4, 3, 64, 64)),
        (lambda: generator(16, 32), (4, 16, 1, 1)),
        (lambda: resnet18(10), (16, 3, 32, 32)),
    ],
)
def test_fused_models_in_bfloat16_are_as_near_to_float64_as_lone_ones(make, shape):
    torch.manual_seed(0)
    models = [make() for _ in range(TRIALS)]
    x = torch.randn(TRIALS, *shape, device="cuda")
    fused = fuse(models).to("cuda").channels_last()
    with torch.autocast("cuda", torch.bfloat16):
        outcome = fused(x)
    dy = torch.randn_like(outcome)
    gradients = torch.autograd.grad(outcome, list(fused.parameters()), dy)
    for number, model in enumerate(models):
        lone, exact = model.to("cuda"), make().to("cuda", torch.float64)
        exact.load_state_dict(model.state_dict())
        with torch.autocast("cuda", torch.bfloat16):
            theirs = lone(x[number])
        wanted = exact(x[number].double())
        assert apart(outcome[number], wanted) < 1.5 * apart(theirs, wanted) + ROUNDING
        lone_gradients = torch.autograd.grad(theirs, list(lone.parameters()), dy[number])
        exact_gradients = torch.autograd.grad(wanted, list(exact.parameters()), dy[number].double())
        for own, other, true in zip(gradients, lone_gradients, exact_gradients):
            assert apart(own[number], true) < 1.5 * apart(other, true) + ROUNDING


@pytest.mark.parametrize("chance", [0.3, 1.0, (0.1, 0.5, 0.0)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1300,), (5, 7), (2, 6, 5, 3)])
def test_a_dropout_and_its_gradients_have_the_mask_of_the_streams(chance, kind, shape):
    from plait.fusion.kernels.dropout import dropped

    streams = [Streams(torch.tensor([1, 1 << 40, -5]).cuda(), torch.arange(3).cuda(), 3) for _ in range(2)]
    x = torch.randn(3, *shape, device="cuda").to(kind)
    if len(shape) == 4:  # as convolutions leave them
        x = x.permute(1, 3, 4, 0, 2).contiguous().permute(3, 0, 4, 1, 2)
    x.requires_grad_()
    mask = streams[0].keep(shape, chance, torch.float32)
    found, wanted = dropped(x, streams[1].mask(chance)), (x.float() * mask).to(kind)
    assert streams[0].calls == streams[1].calls
    assert found.equal(wanted)
    assert found.stride() == x.stride()
    gradient = torch.randn(3, *shape, device="cuda").to(kind)
    (of_found,), (of_wanted,) = (torch.autograd.grad(each, x, gradient) for each in (found, wanted))
    assert of_found.equal(of_wanted)


def test_a_dropout_is_one_launch_and_keeps_no_mask():
    torch.manual_seed(0)
    fused = fuse([nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)) for _ in range(TRIALS)], verify=False)
    fused.cuda()
    x = torch.randn(TRIALS, BATCH, 64, device="cuda")
    fused(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        fused(x).sum().backward()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    assert sum("_drop" in name for name in names) == 2


# As many channels as no block, and as several; more sequences than a program takes.
@pytest.mark.parametrize(("hidden", "batch", "steps"), [(24, 5, 7), (70, 33, 3), (256, 20, 4)])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
@pytest.mark.parametrize("bias", [False, True])
def test_all_steps_of_recurrent_layers_and_their_gradients_equal_torchs_in_float64(
    hidden, batch, steps, kind, bias
):
    """Of whole numbers where the activation has an edge, whose side may depend on the last digit."""
    has_edge = kind == "rnn_relu"

    def draw(*shape):
        if not has_edge:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return torch.randint(-1, 2, shape, device="cuda").to(torch.bfloat16)

    def make():
        more = {"bias": bias, "bidirectional": True, "batch_first": True}
        if kind.startswith("rnn"):
            more["nonlinearity"] = kind.removeprefix("rnn_")
        layer = {"lstm": nn.LSTM, "gru": nn.GRU}.get(kind, nn.RNN)(12, hidden, **more)
        if has_edge:
            for own in layer.parameters():
                own.data = draw(*own.shape).float() * (torch.rand_like(own.cuda()) < 3 / hidden)
        return layer.cuda().bfloat16()

    torch.manual_seed(0)
    models = [make() for _ in range(TRIALS)]
    fused = fuse(models, verify=False)
    x = draw(TRIALS, batch, steps, 12).requires_grad_()
    begin = [draw(TRIALS, 2, batch, hidden).requires_grad_() for _ in range(2 if kind == "lstm" else 1)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        y, last = fused(x, tuple(begin) if kind == "lstm" else begin[0])
        made = y, *(last if kind == "lstm" else [last])
        of_made = [draw(*part.shape) for part in made]
        found = torch.autograd.grad(made, [x, *begin, *fused.parameters()], of_made)
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    assert [sum(kernel in name for name in names) for kernel in ("_steps", "_steps_back")] == [4, 2]
    for trial, model in enumerate(models):
        # Not on the GPU, as cuDNN's slope of an activation's edge is another.
        alone = [part[trial].detach().double().cpu().requires_grad_() for part in (x, *begin)]
        outcome, last = model.double().cpu()(alone[0], tuple(alone[1:]) if kind == "lstm" else alone[1])
        wanted = outcome, *(last if kind == "lstm" else [last])
        of_wanted = [part[trial].double().cpu() for part in of_made]
        exact = torch.autograd.grad(wanted, [*alone, *model.parameters()], of_wanted)
        for ours, true in zip((*made, *found), (*wanted, *exact)):
            # States are rounded at each step.
            assert apart(ours[trial].cpu(), true) < (ROUNDING if has_edge else 4 * ROUNDING)


def test_a_recurrent_layer_trains_where_its_outputs_are_written_to_and_its_gradient_is_differentiated():
    torch.manual_seed(0)
    fused = fuse([nn.GRU(8, 16, batch_first=True).cuda().bfloat16() for _ in range(TRIALS)], verify=False)
    x = torch.randn(TRIALS, 4, 5, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = next(fused.parameters())
    (plain,) = torch.autograd.grad((2 * fused(x)[0]).sum(), weight)
    (written,) = torch.autograd.grad(fused(x)[0].mul_(2).sum(), weight)
    assert written.equal(plain)
    (once,) = torch.autograd.grad(fused(x)[0].square().sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(once.square().sum(), weight)
    assert twice.isfinite().all()
    assert twice.abs().sum() > 0
