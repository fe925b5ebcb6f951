"""The models of the fusion experiments: shapes, published sizes, what they are invariant to."""

from __future__ import annotations

import pytest
import torch

from plait.core.errors import InputError
from plait.workloads import bert, dcgan, pointnet


def size(model):
    return sum(p.numel() for p in model.parameters())


def test_a_cloud_has_the_same_class_in_whatever_order_its_points_come():
    torch.manual_seed(0)
    model = pointnet.pointnet_tiny().eval()
    clouds = torch.randn(2, 3, 20)
    torch.testing.assert_close(model(clouds[:, :, torch.randperm(20)]), model(clouds))
    assert model(clouds).shape == (2, 10)


def test_each_point_is_classified_and_moves_with_its_point():
    torch.manual_seed(0)
    model = pointnet.pointnet_segmenter_tiny().eval()
    clouds = torch.randn(2, 3, 20)
    order = torch.randperm(20)
    logits = model(clouds)
    assert logits.shape == (2, 20, 4)
    torch.testing.assert_close(model(clouds[:, :, order]), logits[:, order])


def test_pointnet_has_the_published_layers():
    with torch.device("meta"):
        model = pointnet.pointnet_classifier(40)
    # 803,081 in the input transform, 3-64-128-1024 with biases and batch norms, 1024-512-256-40.
    transform = size(model.features.transform)
    assert transform == 803_081
    assert size(model) == transform + (3 * 64 + 64) + (64 * 128 + 128) + (128 * 1024 + 1024) + 2 * (
        64 + 128 + 1024
    ) + (1024 * 512 + 512) + (512 * 256 + 256) + 2 * (512 + 256) + (256 * 40 + 40)


def test_dcgan_has_the_published_sizes_and_shapes():
    with torch.device("meta"):
        generator, discriminator = dcgan.generator(), dcgan.discriminator()
        images = generator(torch.empty(2, 100, 1, 1))
    assert (size(generator), size(discriminator)) == (3_576_704, 2_765_568)
    assert images.shape == (2, 3, 64, 64)
    assert discriminator(images).shape == (2,)


def test_the_tiny_discriminator_takes_what_the_tiny_generator_makes():
    images = dcgan.generator_tiny()(torch.randn(3, 8, 1, 1))
    assert images.shape == (3, 1, 16, 16)
    assert images.abs().max() <= 1
    assert dcgan.discriminator_tiny()(images).shape == (3,)


def test_bert_medium_has_as_many_parameters_as_transformers_has():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048
    )
    with torch.device("meta"):
        ours, theirs = bert.bert_medium(), transformers.BertForMaskedLM(config)
    assert size(ours) == size(theirs)


def test_every_place_of_a_bert_sees_every_other():
    torch.manual_seed(0)
    model = bert.bert_tiny().eval()
    tokens = torch.randint(0, 256, (1, 8))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    assert (model(tokens)[0, 0] - model(changed)[0, 0]).abs().max() > 1e-6


def test_a_width_that_heads_cannot_share_is_refused():
    with pytest.raises(InputError, match="width 33.*2 heads"):
        bert.bert(width=33, heads=2)
