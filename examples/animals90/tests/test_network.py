"""The network is transformers' ResNet-18, and its batch norms keep their statistics in float32."""

import functools

import pytest
import torch
from animals90_runs import assert_same_tensors, model
from transformers import ResNetConfig, ResNetForImageClassification

pytest_plugins = ["animals90_runs"]  # fixtures


def test_the_network_is_transformers_resnet_18(weights, tmp_path):
    assert (
        sum(p.numel() for p in model.ResNet18Animals90(pretrained=False).parameters())
        == 11_176_512 + 513 * 90
    )
    x = torch.randn(2, 3, 48, 48)
    theirs = ResNetForImageClassification.from_pretrained(weights).eval()
    torch.testing.assert_close(
        model.ResNet18Animals90(3, weights).eval()(x), theirs(x).logits, rtol=0, atol=1e-6
    )
    other_head = model.ResNet18Animals90(7, weights).eval()
    torch.testing.assert_close(
        other_head.resnet(x).pooler_output, theirs.resnet(x).pooler_output, rtol=0, atol=1e-6
    )
    assert other_head(x).shape == (2, 7)
    torch.save({"module": theirs.state_dict()}, tmp_path / "deepspeed.pt")
    ours = model.ResNet18Animals90(3, tmp_path / "deepspeed.pt").train()
    torch.testing.assert_close(ours(x), theirs.train()(x).logits)
    assert_same_tensors(
        ours.state_dict(), theirs.state_dict(), 1e-6
    )  # with the statistics that training moves


def test_weights_that_do_not_fit_or_could_run_code_are_refused(tmp_path):
    small = ResNetConfig(layer_type="basic", depths=[1, 1, 1, 1], hidden_sizes=[64, 128, 256, 512])
    ResNetForImageClassification(small).save_pretrained(tmp_path)
    torch.save({"module": functools.partial(print)}, tmp_path / "code.pt")
    (tmp_path / "cut.safetensors").write_bytes(b"1234567890")
    for source in (
        tmp_path,
        tmp_path / "code.pt",
        tmp_path / "cut.safetensors",
        tmp_path / "nothing",
    ):
        with pytest.raises(OSError, match=r"--pretrained PATH, .* or --pretrained none"):
            model.ResNet18Animals90(3, str(source))


def test_recomputed_activations_move_the_statistics_once():
    states = []
    for recompute in (False, True):
        torch.manual_seed(1)
        ours = model.ResNet18Animals90(3, pretrained=False)
        if recompute:
            ours.recompute_activations()
        for _ in range(2):
            ours(torch.randn(4, 3, 32, 32)).square().sum().backward()
        states.append(ours.state_dict() | {name: p.grad for name, p in ours.named_parameters()})
    assert_same_tensors(*states)
    assert (
        states[1]["resnet.encoder.stages.0.layers.0.layer.0.normalization.num_batches_tracked"] == 2
    )


def test_statistics_stay_in_float32_in_half_precision():
    torch.manual_seed(1)
    single = model.ResNet18Animals90(3, pretrained=False)
    half = model.ResNet18Animals90(3, pretrained=False)
    half.load_state_dict(single.state_dict())
    half.bfloat16()
    for _ in range(30):
        x = torch.randn(4, 3, 32, 32)
        single(x)
        half(x.bfloat16())
    name = "resnet.embedder.embedder.normalization.running_var"
    assert half.state_dict()[name].dtype == torch.float32 != half.classifier[1].weight.dtype
    torch.testing.assert_close(
        half.state_dict()[name], single.state_dict()[name], rtol=5e-3, atol=0
    )
