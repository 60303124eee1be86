"""DeepSpeed's stages and our repairs to them against plain PyTorch, on 1 and 2 ranks (see zero_worker.py).

Weights are compared by their largest difference (`furthest`; they move by up to 0.017) and, in half precision, where
an element of nearly no gradient may go anywhere, by their distance in units of the way gone (`apart`)."""

import json

import pytest
import torch
from conftest import long, run_worker

from runtime.engine import reduce


@pytest.fixture(scope="module", params=[long(1), 2], ids=["1 rank", "2 ranks"])
def report(request, tmp_path_factory):
    """What zero_worker.py found on so many ranks, {way: results}; all ways in one launch."""
    out = tmp_path_factory.mktemp("zero") / "report.json"
    run_worker("zero_worker.py", out, request.param)
    return {"ranks": request.param, **json.loads(out.read_text())}


@pytest.mark.parametrize("way", ["stage 2", "stage 2 buckets", "own",
                                 "stage 3", "stage 3 released", "stage 3 recomputed", "stage 3 compiled",
                                 "stage 3 compiled recomputed", "stage 2 offload", "zero3 offload"])
def test_float32_is_plain_pytorch(report, way):
    """Seen: 8e-7 at most. Clipping bites in each step: leaving it out moves the weights further than any bound here."""
    result = report[f"float32 {way}"]
    assert all(norm > 1.8 * 0.3 for norm in report["plain"]["norms"])
    assert result["furthest"]["plain"] < 5e-6 and result["furthest"]["plain unclipped"] > 0.01
    assert result["applied"] == [report["ranks"]] * 3
    assert result["norms"] == pytest.approx(report["plain"]["norms"], rel=1e-5)


def test_the_keys_bias_does_not_move(report):
    """Its exact gradient is 0. At every stage, also on DeepSpeed's own path, with offload, and by the kernels."""
    assert not any(result["keys_moved"] for way, result in report.items() if way != "ranks" and "plain" not in way)


def test_stage_3_gathers_blocks_again_in_backward(report):
    """With buffers for fewer blocks than there are."""
    for way in ("deep stage 3", "deep stage 3 three"):
        assert report[way]["furthest"]["deep plain"] < 5e-6 and report[way]["shortened"]
        assert report[way]["norms"] == pytest.approx(report["deep plain"]["norms"], rel=1e-5)


def test_stage_3_has_released_its_parameters_where_it_is_told_to(report):
    """All 28; left alone it keeps every one of so small a model, and would test little. Ours releases all of them after
    each step, if there are several ranks."""
    for way in ("float32 stage 3 released", "float32 zero3 offload", "bfloat16 stage 3 released"):
        assert report[way]["released"] == 28
    assert report["float32 stage 3"]["released"] == 28 * (report["ranks"] > 1)


@pytest.mark.parametrize("way", ["stage 2", "stage 2 buckets", "stage 2 local", "stage 3",
                                 "stage 3 released", "own"])
def test_bfloat16_is_plain_pytorch_to_its_rounding(report, way):
    """Seen: 2.9% of the way; norms to 0.15%."""
    result = report[f"bfloat16 {way}"]
    assert result["apart"]["plain"] < 0.05
    assert result["norms"] == pytest.approx(report["plain"]["norms"], rel=3e-3)


def test_our_gradient_path_is_taken_where_it_fits(report):
    taken = {way for way, result in report.items() if way != "ranks" and result.get("shortened")}
    assert taken == {way for way in report if (" stage 2" in way or " stage 3" in way) and "released" not in way
                     and way != "float32 stage 3 compiled recomputed"} | {"small fused nan", "small fused local"}
    assert len(taken) == 29


def test_our_gradient_path_without_clipping_is_deepspeeds_own_to_the_last_bit(report):
    result, own = report["bfloat16 stage 2 unclipped"], report["bfloat16 own unclipped"]
    assert result["furthest"]["bfloat16 own unclipped"] == 0
    assert result["norms"] == pytest.approx(own["norms"], rel=1e-6)
    assert report["bfloat16 stage 2 buckets"]["furthest"]["bfloat16 stage 2"] == 0  # for buckets of any size


def test_offload_in_pieces_gives_the_same_weights(report):
    """PyTorch's AdamW for both: to the last bit."""
    result = report["bfloat16 stage 2 local offload"]
    assert result["furthest"]["bfloat16 stage 2 local"] == 0
    assert result["norms"] == report["bfloat16 stage 2 local"]["norms"]


@pytest.mark.parametrize("way, value", [("bfloat16 stage 2 buckets", "inf"), ("bfloat16 stage 2 buckets", "nan"),
                                        ("bfloat16 stage 2 local", "inf"),
                                        ("float32 stage 2", "inf"), ("float32 stage 2 offload", "inf")])
def test_one_bad_element_on_one_rank_skips_the_step_on_all(report, way, value):
    result, ranks = report[f"{way} {value}"], report["ranks"]
    assert result["applied"] == [ranks, 0, ranks, ranks]
    assert result["norms"][1] == float("inf") and result["moved_by_poison"] == 0
    assert result["furthest"][way] == 0  # the steps after it are as if it had never been


def test_kernels_of_our_own_train_as_plain_pytorch(report):
    """Fused blocks, gradients accumulated by the matmuls, fused AdamW, and a step skipped for one NaN; in Triton's
    interpreter, which truncates to bfloat16 instead of rounding. Seen: 2.9% of the way; norms to 0.4%."""
    result, ranks, norms = report["small fused nan"], report["ranks"], report["small plain"]["norms"]
    assert result["applied"] == [ranks, 0, ranks] and result["moved_by_poison"] == 0
    assert result["norms"][1] == float("inf")
    assert result["apart"]["small plain"] < 0.05
    assert result["norms"][:1] + result["norms"][2:] == pytest.approx(norms, rel=1e-2)
    # The third one is recomputed
    for way in ("local", "stage 3", "stage 3 local", "own", "closed stage 3", "closed own"):
        other = report[f"small fused {way}"]
        assert other["apart"]["small plain"] < 0.05 and other["applied"] == [ranks] * 2
        assert other["norms"] == pytest.approx(norms, rel=1e-2)


def test_a_sample_while_training_is_that_of_a_plain_model_with_these_weights(report):
    """In every way: with a KV cache, while weights are gathered for each token, blocks are fused or compiled, and
    activations recomputed. That training goes on as without it is what all others here see."""
    ways = {way: result for way, result in report.items() if way != "ranks" and "plain" not in way}
    assert len(ways) > 30 and all(len(result["sample"]) == 13 for result in ways.values())
    assert {way: r["sample"] for way, r in ways.items()} == {way: r["wanted_sample"] for way, r in ways.items()}


@pytest.mark.parametrize("way, scales, applied", [
    ("stage 2", [256, 256, 512, 512, 1024], [1, 1, 1, 1, 1]),
    ("stage 3", [256, 256, 512, 512, 1024], [1, 1, 1, 1, 1]),
    ("stage 2 static", [128, 128, 128, 128, 128], [1, 1, 1, 1, 1]),
    ("stage 2 inf", [256, 128, 128, 128, 256, 256], [1, 0, 1, 1, 1, 1]),
    ("stage 3 inf", [256, 128, 128, 128, 256, 256], [1, 0, 1, 1, 1, 1])])
def test_float16_is_plain_pytorch_while_the_loss_scale_grows(report, way, scales, applied):
    """The scale after each step: doubled after the third good one and each second one
    from there, halved by a bad one. Seen: 0.4% of the way."""
    result = report[f"float16 {way}"]
    assert result["scales"] == scales
    assert result["applied"] == [report["ranks"] * a for a in applied]
    assert result["moved_by_poison"] == (0 if way.endswith("inf") else None)
    assert result["apart"]["plain unclipped"] < 0.01
    good = [norm for norm, a in zip(result["norms"], applied) if a]
    assert good == pytest.approx(report["plain unclipped"]["norms"], rel=1e-3)
    if way == "stage 2":  # what guards look at has no loss scale in it
        assert result["seen"] == pytest.approx(good, rel=1e-6)


def test_the_norm_of_many_gradients_is_right_on_a_cpu(monkeypatch):
    """PyTorch's own, in float32, of all of them at once is 6e-5 too small."""
    flat = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(reduce.dist, "get_world_size", lambda group: 1)
    right = flat.double().norm().item() * 2**0.5
    assert reduce.global_norm([flat, flat], None).item() == pytest.approx(right, rel=1e-6)
