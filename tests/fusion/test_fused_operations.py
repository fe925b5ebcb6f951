"""Every operation with a rule, and many without: a fused trial computes what the lone module does."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from fused_checks import assert_equals_lone_models, make_models
from torch import nn

from plait.fusion.rules.convolution import _taps_read


class Call(nn.Module):
    """A module around a function, with a weight so that trials differ."""

    def __init__(self, function, *shape):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(*shape)) if shape else None

    def forward(self, *args):
        return self.function(*args) if self.weight is None else self.function(self.weight, *args)


def floats(*shape):
    return lambda: (torch.randn(*shape, dtype=torch.float64),)


def indices(high, *shape):
    return lambda: (torch.randint(0, high, shape),)


LAYERS = {
    "linear": (lambda: nn.Linear(5, 4), floats(3, 5)),
    "linear of three axes": (lambda: nn.Linear(5, 4, bias=False), floats(2, 3, 5)),
    "linear of one axis": (lambda: nn.Linear(5, 4), floats(5)),
    "bilinear": (lambda: nn.Bilinear(3, 4, 5), lambda: (*floats(6, 3)(), *floats(6, 4)())),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), floats(2, 3, 7)),
    "conv1d of one point": (lambda: nn.Conv1d(3, 4, 1), floats(2, 3, 7)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), floats(2, 3, 7, 7)),
    "conv2d of images smaller than its kernel": (lambda: nn.Conv2d(3, 4, 3, padding=1), floats(2, 3, 1, 2)),
    "conv2d dilated in groups": (lambda: nn.Conv2d(4, 6, 3, dilation=2, groups=2), floats(2, 4, 9, 9)),
    "conv2d same": (lambda: nn.Conv2d(3, 4, 3, padding="same"), floats(2, 3, 6, 6)),
    "conv2d same, unlike sides": (
        lambda: nn.Conv2d(3, 4, (2, 3), padding="same", dilation=3),
        floats(2, 3, 6, 6),
    ),
    "conv2d valid": (lambda: nn.Conv2d(3, 4, 3, padding="valid", bias=False), floats(2, 3, 6, 6)),
    "conv2d reflected": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), floats(2, 3, 6, 6)),
    "conv2d circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), floats(2, 3, 6, 6)),
    "conv2d of a lone image": (lambda: nn.Conv2d(3, 4, 3), floats(3, 6, 6)),
    "conv2d of one point": (lambda: nn.Conv2d(3, 4, 1), floats(2, 3, 5, 5)),
    "conv2d of one point with stride": (lambda: nn.Conv2d(3, 4, 1, stride=2), floats(2, 3, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 3, padding=1), floats(2, 2, 4, 4, 4)),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(3, 4, 4, 2, 1), floats(2, 3, 5)),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(4, 6, 4, 2, 1, groups=2), floats(2, 4, 4, 4)),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(2, 3, 2, 2), floats(1, 2, 3, 3, 3)),
    "batch norm of features": (lambda: nn.BatchNorm1d(5), floats(6, 5)),
    "batch norm of sequences": (lambda: nn.BatchNorm1d(5), floats(6, 5, 3)),
    "batch norm": (lambda: nn.BatchNorm2d(3), floats(4, 3, 5, 5)),
    "batch norm without weights": (lambda: nn.BatchNorm2d(3, affine=False), floats(4, 3, 5, 5)),
    "batch norm without statistics": (
        lambda: nn.BatchNorm2d(3, track_running_stats=False),
        floats(4, 3, 2, 2),
    ),
    "batch norm over all batches": (lambda: nn.BatchNorm2d(3, momentum=None), floats(4, 3, 5, 5)),
    "batch norm 3d": (lambda: nn.BatchNorm3d(3), floats(4, 3, 2, 2, 2)),
    "layer norm": (lambda: nn.LayerNorm((3, 4)), floats(2, 5, 3, 4)),
    "layer norm without bias": (lambda: nn.LayerNorm(4, bias=False), floats(2, 3, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 6), floats(2, 6, 3, 3)),
    "instance norm": (
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        floats(2, 3, 4, 4),
    ),
    "rms norm": (lambda: nn.RMSNorm(4), floats(2, 3, 4)),
    "local response norm": (lambda: nn.LocalResponseNorm(2), floats(2, 4, 3, 3)),
    "embedding": (lambda: nn.Embedding(7, 3, padding_idx=2), indices(7, 2, 5)),
    "embedding with a limit": (lambda: nn.Embedding(7, 3, max_norm=0.5), indices(7, 2, 5)),
    "embedding bag": (lambda: nn.EmbeddingBag(7, 3, mode="sum"), indices(7, 2, 5)),
    "embedding bag with offsets": (
        lambda: nn.EmbeddingBag(7, 3),
        lambda: (torch.randint(0, 7, (6,)), torch.tensor([0, 2, 5])),
    ),
    "max pool": (lambda: nn.MaxPool2d(3, 2, 1), floats(2, 3, 7, 7)),
    "max pool 1d": (lambda: nn.MaxPool1d(2), floats(2, 3, 6)),
    "max pool with places": (lambda: nn.MaxPool2d(2, return_indices=True), floats(2, 3, 6, 6)),
    "average pool": (lambda: nn.AvgPool2d(2), floats(2, 3, 6, 6)),
    "average pool 3d": (lambda: nn.AvgPool3d(2), floats(2, 3, 4, 4, 4)),
    "adaptive average pool": (lambda: nn.AdaptiveAvgPool2d((2, 3)), floats(2, 3, 7, 7)),
    "adaptive max pool": (lambda: nn.AdaptiveMaxPool1d(2), floats(2, 3, 7)),
    "power pool": (lambda: nn.LPPool2d(2, 2), floats(2, 3, 6, 6)),
    "prelu": (lambda: nn.PReLU(3), floats(2, 3, 4)),
    "prelu with one slope": (lambda: nn.PReLU(), floats(2, 3)),
    "glu": (lambda: nn.GLU(1), floats(2, 6, 3)),
    "softmax": (lambda: nn.Softmax(1), floats(2, 4, 3)),
    "upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), floats(2, 3, 4, 4)),
    "pixel shuffle": (lambda: nn.PixelShuffle(2), floats(2, 8, 3, 3)),
    "flatten": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 2)),
        floats(2, 2, 6, 6),
    ),
    "lstm": (lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True), floats(2, 5, 3)),
    "lstm with projections": (lambda: nn.LSTM(3, 4, proj_size=2), floats(5, 2, 3)),
    "gru": (lambda: nn.GRU(3, 4, num_layers=2), floats(5, 2, 3)),
    "rnn": (lambda: nn.RNN(3, 4, nonlinearity="relu", bidirectional=True), floats(5, 2, 3)),
    "lstm cell": (lambda: nn.LSTMCell(3, 4), floats(2, 3)),
    "gru cell": (lambda: nn.GRUCell(3, 4), floats(2, 3)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), floats(3, 5)),
    "spectral weights": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), floats(3, 4)),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: floats(2, 4, 8)() * 3,
    ),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), floats(2, 4, 8)),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0),
        lambda: (*floats(4, 2, 8)(), *floats(5, 2, 8)()),
    ),
    "whole transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0),
        lambda: (*floats(4, 2, 8)(), *floats(5, 2, 8)()),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_fused_layer_equals_the_lone_layers(name):
    make, data = LAYERS[name]
    models = make_models(make)
    assert_equals_lone_models(models, [data() for _ in models])


@pytest.mark.parametrize(
    "name", ["batch norm", "batch norm over all batches", "instance norm", "encoder layer"]
)
def test_a_fused_layer_equals_the_lone_layers_in_evaluation(name):
    make, data = LAYERS[name]
    models = make_models(make)
    assert_equals_lone_models(models, [data() for _ in models], training=False)


CALLS = {
    "broadcast": lambda w, x: x + w[0] * 2 - 1 / (w.abs() + 1),
    "in place": lambda w, x: (x * w).add_(1).clamp_(max=2).relu_(),
    "indexing": lambda w, x: (w * x)[1:, ..., ::2] + (w * x)[:1, None, 0].sum(),
    "indexing by a list": lambda w, x: (w * x)[:, [2, 0]],
    "two index tensors": lambda w, x: (w * x)[torch.tensor([0, 1]), torch.tensor([2, 1])],
    "assignment": lambda w, x: _assign(w * x),
    "reductions": lambda w, x: (
        (w * x).mean() + (w * x).sum(0).max() + (w * x).var(1).sum() + (w * x).amax((0, 1))
    ),
    "maximum along an axis": lambda w, x: (w * x).max(1)[0] + (w * x).min(-1).values,
    "views": lambda w, x: (
        (w * x).view(-1).unflatten(0, (2, 3)).t().contiguous().view(2, 3).unsqueeze(0).squeeze()
    ),
    "x.view(x.size(0), -1)": lambda w, x: (w * x).unsqueeze(2).view(x.size(0), -1),
    "joins": lambda w, x: torch.cat([w * x, torch.ones(2, 3, dtype=x.dtype)], 1).chunk(2, 1)[1],
    "stack and unbind": lambda w, x: torch.stack([w, x, w * x]).unbind(1)[0].flip(0),
    "einsum": lambda w, x: torch.einsum("ij,kj->ik", w, x),
    "matmul": lambda w, x: (w.T @ x) @ torch.ones(3, 2, dtype=x.dtype),
    "addmm of a vector": lambda w, x: torch.addmm(w[0], w.T, x),
    "addmm of a row": lambda w, x: torch.addmm(w[:1], w.T, x),
    "addmm of a number": lambda w, x: torch.addmm(w.sum(), w.T, x),
    "vector product": lambda w, x: w[0] @ x[1],
    "where": lambda w, x: torch.where(x > 0, w, -x),
    "padding": lambda w, x: F.pad(w * x, (1, 2), value=3.0),
    "norms": lambda w, x: (w * x).norm() + F.normalize(w * x).sum(0) + torch.linalg.norm(w * x),
    "sorting": lambda w, x: (w * x).sort(1)[0] + (w * x).topk(3, 1)[0],
    "gather": lambda w, x: (w * x).gather(1, torch.tensor([[0, 2], [1, 1]])),
    "types": lambda w, x: (w * x).float().double().to(x.dtype).type_as(x),
    "like": lambda w, x: torch.zeros_like(w) + x.new_ones(3) + torch.full_like(x, 2.0) * w,
    "cumulative": lambda w, x: (w * x).cumsum(1) + (w * x).logsumexp(1, keepdim=True),
    "expand and repeat": lambda w, x: (
        (w * x)[:1].expand(2, -1).repeat(1, 2) + (w * x)[0].expand(2, 3).tile(2)
    ),
    "transposes": lambda w, x: (w * x).permute(1, 0).transpose(0, 1).movedim(0, 1).mT,
    "python sums": lambda w, x: sum(row * 2 for row in w * x),
    "masked fill": lambda w, x: (w * x).masked_fill(x > 0, 0.0),
    "cosine similarity": lambda w, x: F.cosine_similarity(w, x) + F.pairwise_distance(w, x),
    "determinant": lambda w, x: torch.linalg.det(w @ x.T + torch.eye(2, dtype=x.dtype)),
    "own gradient": lambda w, x: _gradient(w, x),
    "attention with a mask": lambda w, x: F.scaled_dot_product_attention(
        w[None], x[None], x[None], attn_mask=torch.tensor([[True, False], [True, True]])
    ),
}


def _assign(y):
    z = y.clone()
    z[:, 1] = y[:, 0] * 2
    z[0] = 1.0
    z[z > 0.5] = 0.25
    return z


def _gradient(w, x):
    (slope,) = torch.autograd.grad((w * x).tanh().sum(), w, create_graph=True)
    return slope.square().sum()


@pytest.mark.parametrize("name", CALLS)
def test_a_fused_function_equals_the_lone_one(name):
    models = make_models(lambda: Call(CALLS[name], 2, 3))
    assert_equals_lone_models(models, [floats(2, 3)() for _ in models])


CLASSES = torch.tensor([0, 2, 1, 3])
LOSSES = {
    "cross entropy": lambda w, x: F.cross_entropy(w * x, CLASSES),
    "smoothed and weighted": lambda w, x: F.cross_entropy(
        w * x, CLASSES, torch.tensor([1.0, 2, 3, 4], dtype=x.dtype), ignore_index=1, label_smoothing=0.2
    ),
    "cross entropy of images": lambda w, x: F.cross_entropy((w * x).view(2, 4, 2), CLASSES.view(2, 2)),
    "cross entropy of chances": lambda w, x: F.cross_entropy(w * x, x.softmax(1).detach()),
    "cross entropy without a class": lambda w, x: F.cross_entropy(w * x, CLASSES, ignore_index=2),
    "sum of cross entropies": lambda w, x: F.cross_entropy(w * x, CLASSES, reduction="sum"),
    "each cross entropy": lambda w, x: F.cross_entropy(w * x, CLASSES, reduction="none"),
    "nll": lambda w, x: F.nll_loss(F.log_softmax(w * x, 1), CLASSES),
    "mse": lambda w, x: F.mse_loss(w, x),
    "mse of a row": lambda w, x: F.mse_loss(w, x[:1].expand_as(w), reduction="sum"),
    "l1": lambda w, x: F.l1_loss(w, x),
    "smooth l1": lambda w, x: F.smooth_l1_loss(w, x, beta=0.5),
    "huber": lambda w, x: F.huber_loss(w, x, delta=0.5),
    "bce": lambda w, x: F.binary_cross_entropy(w.sigmoid(), x.sigmoid()),
    "bce with logits": lambda w, x: F.binary_cross_entropy_with_logits(
        w, x.sigmoid(), pos_weight=x[0].exp().detach()
    ),
    "kl": lambda w, x: F.kl_div(w.log_softmax(1), x.softmax(1), reduction="batchmean"),
    "gaussian nll": lambda w, x: F.gaussian_nll_loss(w, x, x.square() + 1),
    "poisson nll": lambda w, x: F.poisson_nll_loss(w, x.abs()),
    "hinge embedding": lambda w, x: F.hinge_embedding_loss(w, x.sign()),
    "soft margin": lambda w, x: F.soft_margin_loss(w, x.sign().detach()),
    "multi margin": lambda w, x: F.multi_margin_loss(w, CLASSES),
    "triplet": lambda w, x: F.triplet_margin_loss(w, x, x + 1),
    "cosine embedding": lambda w, x: F.cosine_embedding_loss(w, x, x[:, 0].sign()),
    "margin ranking": lambda w, x: F.margin_ranking_loss(w[0], x[0], x[0].sign()),
    "multilabel": lambda w, x: F.multilabel_soft_margin_loss(w, x.sigmoid()),
    "ctc": lambda w, x: F.ctc_loss(
        (w * x).log_softmax(1).unsqueeze(1), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_fused_loss_has_each_trials_own_value(name):
    models = make_models(lambda: Call(LOSSES[name], 4, 4))
    assert_equals_lone_models(models, [floats(4, 4)() for _ in models])


def test_taps_that_read_nothing_but_padding_are_left_out_of_a_convolution():
    left_out = 0
    for size, length, stride, pad, dilation in product(range(1, 5), range(1, 6), (1, 2, 3), range(4), (1, 2)):
        if size + 2 * pad <= dilation * (length - 1):
            continue
        options = (stride,), (pad,), (dilation,)
        found = _taps_read(torch.Size([size]), torch.Size([length]), *options)
        image, kernel = torch.randn(1, 2, size).double(), torch.randn(3, 2, length).double()
        whole = F.conv1d(image, kernel.requires_grad_(), None, stride, pad, dilation)
        (gradient,) = torch.autograd.grad(whole.sum(), kernel)
        read = gradient.any(0).any(0).nonzero().flatten().tolist()  # the only taps with a gradient
        if found is not None:
            (part,), pads = found
            assert (part.start, part.stop - 1) == (min(read), max(read))
            made = F.conv1d(image, kernel[..., part], None, stride, pads, dilation)
            torch.testing.assert_close(made, whole)
            left_out += 1
    assert left_out > 50
    assert _taps_read(torch.Size([1, 1]), torch.Size([3, 3]), *[(1, 1)] * 3)[1] == (0, 0)
