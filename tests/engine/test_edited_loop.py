"""What a training loop does to the weights by itself: one sentence, because ZeRO would overwrite it."""

import pytest
import torch
from conftest import done, edited_script, every, stage

from runtime.engine.hidden_grads import HiddenGrads
from runtime.engine.untouched import PIECE, check_values
from runtime.errors import UserError

AFTER_STEP = "    loss /= micro_steps  # as the gradients: the mean over the step\n"
STEP = "    iter_num += 1\n"  # between the micro-steps and the optimizer's step
WEIGHT = "model.transformer.wpe.weight"
OUTSIDE = "were changed outside of the optimizer"
FLAG = "requires_grad of transformer.wpe.weight has changed while training"
EDITS = {  # name: (code after the third step's micro-steps, what stderr says)
    "clamped": (f"with torch.no_grad(): {WEIGHT}.clamp_(-0.01, 0.01)", OUTSIDE),
    "frozen": (f"{WEIGHT}.requires_grad_(False)", FLAG),
}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("edit", EDITS)
def test_a_loop_that_changes_parameters_is_refused(train, tmp_path, edit, n):
    code, told = EDITS[edit]
    script = edited_script(tmp_path, (STEP, f"{STEP}    if iter_num == 3:\n        {code}\n"))
    run = train("--max_iters=6", stage(n), ranks=2, script=script)
    assert run.returncode == 2
    assert told in run.stderr
    assert "Traceback" not in run.stderr
    assert max(run.losses) == 2


@pytest.mark.parametrize("n", [2, every(3)])
def test_a_change_of_data_is_found_in_the_first_steps(train, tmp_path, n):
    """PyTorch doesn't count changes of param.data, so all weights are compared in two steps."""
    code = f"    {WEIGHT}.data.clamp_(-0.01, 0.01)\n"
    script = edited_script(tmp_path, (STEP, f"{STEP}{code}"))
    run = train("--max_iters=6", stage(n), ranks=2, script=script)
    assert run.returncode == 2
    assert OUTSIDE in run.stderr
    assert "Traceback" not in run.stderr
    assert not run.losses


def test_a_late_change_of_data_is_found_in_a_sample(train, tmp_path):
    """All weights are compared now and then, and a sample in each step: this change is of all."""
    code = f"    if iter_num == 4:\n        {WEIGHT}.data.mul_(2)\n"
    script = edited_script(tmp_path, (STEP, f"{STEP}{code}"))
    run = train("--max_iters=6", script=script)
    assert run.returncode == 2
    assert OUTSIDE in run.stderr
    assert "Traceback" not in run.stderr
    assert max(run.losses) == 3


PARAMS = "for p in model.parameters():\n            "
GRADS = {  # name: (code between the third step's micro-steps and the optimizer's step, what stderr says)
    "scaled": (f"{PARAMS}if p.grad is not None: p.grad.mul_(2)", "uses param.grad, and ZeRO keeps"),
    "clipped": ("torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)", "use --grad_clip to clip them"),
    "set": (f"{PARAMS}p.grad = torch.ones_like(p)", "sets the gradient of transformer.wte.weight"),
    "cleared": ("model.zero_grad()", "use engine.step(skip_above=0)"),
    "cleared by the optimizer": ("adamw.zero_grad()", "optimizer.zero_grad() between"),
    "own backward": ("model(*micro_batch).backward()", "backward outside of engine.micro_step()"),
    "a backward": ("sum((p**2).sum() for p in model.parameters()).backward()", "backward outside of engine"),
    "late hook": (f"{WEIGHT}.register_post_accumulate_grad_hook(print)", "wpe.weight has got a gradient hook"),
    "its backward": ("engine.micro_step(*micro_batch).backward()", "leave loss.backward() out"),
    "saved": ("save(improved=False)", "save after engine.step()"),
    "a term": (
        "loss = loss + sum((p**2).sum() for p in model.parameters())",
        "adds a term with a gradient to the loss",
    ),
    "a new group": ("adamw.add_param_group({'params': [torch.nn.Parameter(torch.ones(2))]})", "got a parameter group"),
    "a new block": (
        "model.transformer.h.append(type(model.transformer.h[0])(model.config))",
        "the parameter transformer.h.2.",
    ),
    "another block": (
        "model.transformer.h[1] = type(model.transformer.h[0])(model.config)",
        "the parameter transformer.h.1.ln_1.weight was added, replaced or taken out",
    ),
}


OFFLOAD = "--deepspeed_config=config/ds/zero3_offload.json"  # DeepSpeed's own path


@pytest.mark.parametrize("options", [stage(2), every(stage(3)), every(OFFLOAD)], ids=["zero2", "zero3", "offload"])
@pytest.mark.parametrize("edit", GRADS)
def test_a_loop_that_changes_gradients_or_parts_is_refused(train, tmp_path, edit, options):
    code, told = GRADS[edit]
    script = edited_script(tmp_path, (STEP, f"{STEP}    if iter_num == 3:\n        {code}\n"))
    run = train("--max_iters=6", options, ranks=2, script=script)
    assert run.returncode == 2
    assert told in run.stderr
    assert "Traceback" not in run.stderr
    assert max(run.losses) == 2


@pytest.mark.parametrize("change", [f"{PARAMS}p.data = p.data.clamp(-0.01, 0.01)", "model.half().float()"])
def test_a_loop_that_sets_other_tensors_as_weights_is_refused(train, tmp_path, change):
    """At ZeRO-2. At ZeRO-3 on several ranks, there is nothing in param.data between steps."""
    script = edited_script(tmp_path, (AFTER_STEP, f"    if iter_num == 2:\n        {change}\n{AFTER_STEP}"))
    run = train("--max_iters=6", ranks=2, script=script)
    assert run.returncode == 2
    assert "param.data of transformer.wte.weight was set to another tensor" in run.stderr
    assert "Traceback" not in run.stderr
    assert max(run.losses) == 2


def test_a_step_that_can_not_be_discarded_is_refused(train, tmp_path):
    script = edited_script(tmp_path, ("engine.step(skip_above=health.skip_above())", "engine.step(skip_above=0)"))
    run = train("--max_iters=2", OFFLOAD, script=script)
    assert run.returncode == 2
    assert "can't skip a step on DeepSpeed's own path" in run.stderr and "Traceback" not in run.stderr


@pytest.mark.parametrize("n", [2, 3])
def test_a_backward_before_the_first_micro_step_is_refused(train, tmp_path, n):
    code = "    x, y = (torch.zeros(2, 8, dtype=torch.int64) for _ in 'xy')\n    model(x, y).backward()\n"
    script = edited_script(tmp_path, ("    # one optimizer step\n", f"{code}    # one optimizer step\n"))
    run = train("--max_iters=2", stage(n), script=script)
    assert run.returncode == 2
    assert "backward outside of engine.micro_step()" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_step_can_be_discarded_and_zero_grad_after_a_step_is_harmless(train, tmp_path):
    """A micro-step on other tokens comes before each step, and is discarded."""
    discarded = """
    tokens = torch.arange(64).view(2, 32) % vocab_size
    engine.micro_step(tokens, tokens)
    assert not engine.step(skip_above=0).applied
    adamw.zero_grad()
    model.zero_grad()
"""
    zeros = "    loss = torch.zeros((), device=device)\n"
    script = edited_script(tmp_path, (zeros, f"{discarded}{zeros}"))
    plain = done(train("--max_iters=4", ranks=2))
    edited = done(train("--max_iters=4", ranks=2, script=script))
    assert edited.losses == plain.losses
    assert "OVERFLOW" not in edited.stdout + edited.stderr  # DeepSpeed's word, which would be wrong


def test_a_gradient_hook_counts_early_and_late(train, tmp_path):
    """Registered above the engine, or in the loop where no kernel and no graph would miss it."""
    sgd = ("adamw = setup.make_adamw(groups, plan.ds_config, lr=learning_rate, betas=(beta1, beta2))\n",
           "adamw = torch.optim.SGD(groups, lr=learning_rate)\n{hook}")
    hook = "model.transformer.h[0].mlp.c_proj.bias.register_hook(lambda grad: 3 * grad)\n"
    late = f"    if iter_num == 0:\n        {hook}    # one optimizer step\n"
    options = ("--max_iters=4", "--optimizer=adamw", "--learning_rate=0.5", "--grad_clip=0")
    runs = []
    for above, loop in (("", ""), (hook, ""), ("", late)):
        edits = [(sgd[0], sgd[1].format(hook=above))]
        if loop:
            edits.append(("    # one optimizer step\n", loop))
        script = edited_script(tmp_path, *edits)
        runs.append(done(train(*options, ranks=2, script=script)).losses)
    plain, hooked, hooked_late = runs
    assert hooked == hooked_late
    assert hooked[1] == plain[1] and abs(hooked[4] - plain[4]) > 1e-5


def test_a_late_hook_that_a_kernel_or_a_graph_would_miss_is_refused():
    weights = torch.nn.Linear(2, 2)
    grads = HiddenGrads(weights)
    weights.bias.register_hook(lambda grad: grad)
    grads.check()  # nothing is fixed
    grads.accept_hooks({weights.weight})
    weights.bias.register_hook(lambda grad: grad)
    grads.check()
    weights.weight.register_hook(lambda grad: grad)
    with pytest.raises(UserError, match="^weight has got a gradient hook while training, which would not run"):
        grads.check()


def test_a_module_without_parameters_may_change(train, tmp_path):
    code = "    model.transformer.drop = torch.nn.Dropout(0.0)\n"
    script = edited_script(tmp_path, (STEP, f"{STEP}{code}"))
    plain = done(train("--max_iters=4"))
    assert done(train("--max_iters=4", script=script)).losses == plain.losses


def test_reading_and_sampling_between_steps_is_no_change(train, tmp_path):
    code = f"    seen = {WEIGHT}.detach().clone().mul_(2)\n"
    script = edited_script(tmp_path, (STEP, f"{STEP}{code}"))
    done(train("--max_iters=3", "--sample_interval=1", "--sample_tokens=4", script=script))


READ = """
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param
    named = list(model.named_parameters())
    masters = {name: safe_get_full_fp32_param(p).clone() for name, p in named}
    with zero.GatheredParameters([p for _, p in named]):
        late = [name for name, p in named if not torch.equal(p.detach(), masters[name])]
    print0(f"late: {late}")
"""
# An average of the weights, which are those of an evaluation
SWAP = """
def evaluate():
    from deepspeed import zero
    backup = {}
    params = list(model.named_parameters())
    with zero.GatheredParameters([p for _, p in params], modifier_rank=0):
        for name, p in params:
            backup[name] = p.detach().clone()
            p.data.mul_(1 - 0.5 * (iter_num > 0))
    losses = estimate_loss()
    with zero.GatheredParameters([p for _, p in params], modifier_rank=0):
        for name, p in params:
            p.data.copy_(backup[name])
    return log.evaluation(iter_num, losses, 0.0)


def evaluate_plainly():
"""
WITHOUT_BLOCKS = "from model import GPT; f = GPT.forward; GPT.forward = lambda self, *a, **o: f(self, *a, **o)"


@pytest.mark.parametrize("plant", ["", WITHOUT_BLOCKS], ids=["by block", "whole"])
@pytest.mark.parametrize("n", [2, 3])
def test_weights_between_steps_are_the_present_ones(train, tmp_path, n, plant):
    """At ZeRO-3, GatheredParameters took those of the last forward for whole."""
    script = edited_script(tmp_path, (AFTER_STEP, READ + AFTER_STEP))
    run = done(train("--max_iters=3", stage(n), ranks=2, script=script, plant=plant))
    assert run.stdout.count("late: []\n") == 3


@pytest.mark.parametrize("plant", ["", WITHOUT_BLOCKS], ids=["by block", "whole"])
def test_weights_of_an_evaluation_leave_training_as_it_is(train, tmp_path, plant):
    """Halved weights are evaluated, and the steps after it are those of a run that evaluates its own weights."""
    options = ("--max_iters=6", "--eval_interval=2", stage(3))
    plain = done(train(*options, ranks=2, plant=plant))
    script = edited_script(tmp_path, ("\ndef evaluate() -> float | None:\n", SWAP))
    swapped = done(train(*options, ranks=2, script=script, plant=plant))
    assert swapped.losses == pytest.approx(plain.losses, abs=2e-6)
    at_stage_2 = done(train(*options[:2], stage(2), ranks=2, script=script))
    for it, losses in at_stage_2.evals.items():
        assert swapped.evals[it] == pytest.approx(losses, abs=1e-5)
    for it in (2, 4, 6):
        assert abs(swapped.evals[it][1] - plain.evals[it][1]) > 0.01


@pytest.mark.parametrize("place", [0, PIECE + 1])
def test_one_element_is_enough(place):
    master = torch.linspace(-3, 3, PIECE + 3)
    used = master.to(torch.bfloat16)
    check_values([(used, master)])
    used[place] += 0.1
    with pytest.raises(UserError, match=OUTSIDE):
        check_values([(used, master)])


def test_what_is_not_a_number_is_no_change():
    nan = torch.tensor([1.0, float("nan")])
    check_values([(nan.to(torch.float16), nan)])


def test_an_auxiliary_loss_does_not_count_where_nothing_is_evaluated(train, tmp_path):
    """On two ranks, one of the windows of a split pads the last batch. A loss of 100 at each token tells."""
    model = """
from model import GPT
forward = GPT.forward
def with_auxiliary_loss(self, idx, targets=None, *args, **options):
    loss = forward(self, idx, targets, *args, **options)
    return loss if targets is None else loss + 100
GPT.forward = with_auxiliary_loss
"""
    options = ("--eval_iters=1", "--batch_size=1", "--max_iters=1")
    plain = done(train(*options, ranks=2))
    edited = done(train(*options, ranks=2, plant=model))
    assert edited.evals[0] == pytest.approx([loss + 100 for loss in plain.evals[0]], abs=1e-4)
