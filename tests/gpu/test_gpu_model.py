"""The loss and every gradient of GPT-2 small, and of two layers of GPT-2 XL's width, against plain PyTorch in float64:
eager, compiled, by our kernels, captured in a CUDA graph, and with fp8. Dropout in captured steps."""

from types import SimpleNamespace

import pytest
import torch
from reference import GPT2, XL_2_LAYERS, build, check, errors, plain_gradients, random_weights

from model import GPTConfig
from runtime.engine.forward_backward import ForwardBackward
from runtime.engine.grad_sink import GradSink, set_sink
from runtime.engine.setup import choose_attention_backends
from runtime.kernels import fused
from runtime.kernels.fp8 import Mode

B, T = 2, 1024
WAYS = ["eager", "compiled", "kernels", "kernels recomputed", "kernels captured", "kernels captured sums",
        "kernels closed", "kernels closed recomputed", "kernels closed captured sums",
        "compiled captured"]


class Engine:
    """What ForwardBackward uses of DeepSpeed's engine. sums: gradients go to float32 sinks, as at ZeRO-2 on 1 rank."""

    device = torch.device("cuda")
    tput_timer = SimpleNamespace(config=SimpleNamespace(enabled=True))

    def __init__(self, module, scale=1.0, sums=False):
        self.module, self.scale = module, scale
        self.sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in module.named_parameters()} \
            if sums else {}
        for name, p in module.named_parameters() if sums else ():
            set_sink(p, GradSink(self.sums[name]))

    def __call__(self, *batch):
        return self.module(*batch)

    def backward(self, loss):
        (loss * self.scale).backward()

    def gradient_accumulation_steps(self):
        return 1

    def zero_optimization_stage(self):
        return 2

    def zero(self):
        for tensor in (*self.sums.values(), *(p.grad for p in self.module.parameters() if p.grad is not None)):
            tensor.zero_()

    def gradients(self):
        return {name: ((0 if p.grad is None else p.grad.float()) + self.sums.get(name, 0)) / self.scale
                for name, p in self.module.named_parameters()}


@pytest.fixture(autouse=True)
def own_stream():
    """The default stream cannot be captured."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
        torch.cuda.synchronize()


@pytest.fixture(scope="module", params=[GPT2, XL_2_LAYERS], ids=["small", "xl"])
def case(request):
    """Return a model's configuration, weights and tokens, and its exact loss and gradients."""
    weights = random_weights(request.param)
    generator = torch.Generator("cuda").manual_seed(1)
    tokens = [torch.randint(50257, (B, T), device="cuda", generator=generator) for _ in range(4)]
    exact = plain_gradients(weights, request.param, *tokens[:2], torch.float64)
    found = {"config": request.param, "weights": weights, "batch": tokens[:2], "other": tokens[2:], "exact": exact}
    yield found
    found.clear()
    torch.cuda.empty_cache()


def begin(case, way, dtype=torch.bfloat16, scale=4096.0, fp8=False):
    """Return an Engine with the model, as setup makes it, and its ForwardBackward."""
    model = build(case["config"], case["weights"], dtype)
    model.gradient_checkpointing = "recomputed" in way
    choose_attention_backends(model)  # as in setup: otherwise the captured step would compile
    if "compiled" in way:
        model.compile_blocks()
    elif "kernels" in way:
        if "closed" in way:  # each block takes and returns a tensor, as its hook wants
            model.transformer.h[0].register_forward_hook(lambda module, given, made: None)
        fused.use_fused_blocks(model, fp8)
    engine = Engine(model, scale, "sums" in way)
    return engine, ForwardBackward(engine, "captured" in way, is_local=True)


def steps(case, way, dtype=torch.bfloat16, scale=4096.0, fp8=False, batches=None):
    """Return the loss and gradients of a third micro-step, and the model. The two before it are on other tokens, and
    the second is captured if the way is. batches: of other micro-steps, of which the last one counts."""
    engine, launch = begin(case, way, dtype, scale, fp8)
    for batch in batches or (case["other"], case["other"], case["batch"]):
        engine.zero()
        loss = launch(*batch)
        launch.after_step()
    assert (launch.graph is not None) == ("captured" in way)
    loss = loss.item()
    launch.close()
    return loss, engine.gradients(), engine.module


def check_all(case, loss, gradients, dtype, scale, loss_bound):
    """Losses were seen to be off by 2e-4 in bfloat16, 4e-5 in float16 and 7e-7 in float32, plain PyTorch's the same."""
    exact_loss, exact = case["exact"]
    plain_loss, plain = plain_gradients(case["weights"], case["config"], *case["batch"], dtype, scale)
    assert abs(plain_loss - exact_loss) < loss_bound and abs(loss - exact_loss) < loss_bound, (loss, exact_loss)
    assert gradients.keys() == exact.keys()
    for name in exact:
        check(name, gradients[name], plain[name], exact[name])


@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradients_in_bfloat16(case, way):
    loss, gradients, _ = steps(case, way)
    check_all(case, loss, gradients, torch.bfloat16, 4096.0, 1e-3)


@pytest.mark.parametrize("way", ["kernels captured", "kernels captured sums", "compiled captured"])
def test_a_second_graph_for_shorter_sequences(case, way):
    """As in a length ramp, the other way round: a graph for whole sequences, and then one for a quarter of them. The
    capture is of the fourth micro-step, and a replay is of the fifth."""
    def cut(batch):
        return [tokens.view(4 * B, T // 4) for tokens in batch]

    short, last = cut(case["other"]), cut(case["batch"])
    exact = plain_gradients(case["weights"], case["config"], *last, torch.float64)
    loss, gradients, _ = steps(case, way, batches=(case["other"], case["other"], short, short, last))
    check_all({**case, "batch": last, "exact": exact}, loss, gradients, torch.bfloat16, 4096.0, 1e-3)


@pytest.mark.parametrize("way", ["kernels captured", "kernels captured sums", "compiled captured"])
def test_a_graph_for_each_micro_batch_of_a_ramp(case, way):
    """As in a batch ramp with a stage below the micro-batch: one sequence per micro-step, and then two. Of each, the
    first micro-step is eager, the second captured and the third replayed."""
    whole = [case["other"], case["other"], case["batch"]]
    small = [[tokens[:1] for tokens in batch] for batch in whole]

    def losses_of(way):
        """Return the loss of each micro-step, the shape of what the graph then reads, and the engine."""
        engine, launch = begin(case, way)
        losses, read = [], []
        for batch in small + whole:
            engine.zero()
            losses.append(launch(*batch).item())
            launch.after_step()
            read.append(tuple(launch.inputs[0].shape) if launch.graph else None)
        launch.close()
        return losses, read, engine

    torch.compiler.reset()  # it keeps 8 versions of a block at most, and takes no more of other sizes
    losses, read, engine = losses_of(way)
    without, none, _ = losses_of(way.replace(" captured", ""))
    assert read == [None, (1, T), (1, T), None, (2, T), (2, T)] and none == [None] * 6
    assert losses == pytest.approx(without, abs=1e-3)  # bfloat16's, as in check_all

    # The gradients of the last replay, and the loss of the small one
    check_all(case, losses[5], engine.gradients(), torch.bfloat16, 4096.0, 1e-3)
    exact_loss, _ = plain_gradients(case["weights"], case["config"], *small[2], torch.float64)
    assert losses[2] == pytest.approx(exact_loss, abs=1e-3)


@pytest.mark.parametrize("way", ["eager", "kernels", "kernels captured", "kernels captured sums", "compiled captured"])
def test_a_loss_mask_and_its_weight(case, way):
    """A third of the targets count, others in each batch. A captured step reads both anew."""
    def masked(batch, weight):
        idx, targets = batch
        return idx, targets.masked_fill(idx % 3 > 0, -1), torch.tensor(weight, device="cuda")

    other, (idx, targets, weight) = masked(case["other"], 1.0), masked(case["batch"], 3e-4)
    loss, gradients, _ = steps(case, way, batches=(other, other, (idx, targets, weight)))
    times = (weight * (targets >= 0).sum()).item()  # as often as the mean is in what the step returns
    assert 0.15 < times < 0.25
    exact_loss, exact = plain_gradients(case["weights"], case["config"], idx, targets, torch.float64)
    _, plain = plain_gradients(case["weights"], case["config"], idx, targets, torch.bfloat16)
    assert abs(loss / times - exact_loss) < 2e-3
    for name in exact:
        check(name, gradients[name].float() / times, plain[name], exact[name])


@pytest.mark.parametrize(("way", "dtype", "scale", "loss_bound"), [
    ("eager", torch.float32, 1.0, 3e-6), ("kernels", torch.float32, 1.0, 3e-6),
    ("compiled", torch.float16, 4096.0, 2e-4), ("kernels", torch.float16, 4096.0, 2e-4)], ids=str)
def test_loss_and_gradients_in_other_precisions(case, way, dtype, scale, loss_bound):
    loss, gradients, _ = steps(case, way, dtype, scale)
    check_all(case, loss, gradients, dtype, scale, loss_bound)


@pytest.mark.parametrize("way", ["kernels", "kernels captured", "kernels captured sums"])
def test_fp8_is_within_its_bounds(case, way):
    """E4M3 rounds by up to 1 in 16, E5M2 by 1 in 8; over a sum such errors cancel."""
    if torch.cuda.get_device_capability() < (9, 0):
        # train_deepspeed.py refuses fp8 below compute capability 9.0, so there is nothing to test
        pytest.skip("fp8 needs Hopper")
    loss, gradients, model = steps(case, way, fp8=True)
    exact_loss, exact = case["exact"]
    scales = model.transformer.h[0].casts.c_attn.slot.scales
    assert scales.mode is Mode.ON and (scales.amax > 0).all()
    away = {name: errors(gradients[name], exact[name])[0] for name in exact}
    assert abs(loss - exact_loss) < 5e-3  # seen: 1.8e-3
    assert 0.05 < max(away.values()) < 0.3, away  # seen: 0.18; bfloat16's are 0.012
    with torch.no_grad():  # an evaluation is made in bfloat16
        plain = build(case["config"], case["weights"], torch.bfloat16)
        fused.use_fused_blocks(plain)
        assert torch.equal(model.eval()(case["batch"][0]), plain.eval()(case["batch"][0]))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_dropout_in_captured_steps(compiled):
    """Each replay draws new numbers, the same ones that an eager step draws with its seed."""
    config = GPTConfig(block_size=256, vocab_size=512, n_layer=2, n_head=4, n_embd=256, dropout=0.2)
    weights = random_weights(config)
    idx, targets = (torch.randint(512, (4, 256), device="cuda") for _ in range(2))

    def losses(captured):
        model = build(config, weights, torch.bfloat16)
        if compiled:
            model.compile_blocks()
        launch = ForwardBackward(Engine(model), captured, is_local=True)
        found = []
        for seed in (0, 1, 2, None, 1):  # None: whatever comes next
            if seed is not None:
                torch.manual_seed(seed)
            found.append(launch(idx, targets).item())
            launch.after_step()
        assert (launch.graph is not None) == captured
        launch.close()
        return found

    eager, captured = losses(False), losses(True)
    assert captured == eager
    assert len(set(captured)) == 4 and captured[1] == captured[4]
