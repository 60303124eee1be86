"""Any optimizer that works element by element: the losses of the same optimizer in plain PyTorch."""

import json
import logging
import math
import random
import types

import deepspeed
import numpy as np
import pytest
import torch
from conftest import CHARS, done, edited_script, stage

from model import GPT, GPTConfig
from runtime.data.loader import locate_sequences, read_sequences
from runtime.data.sequences import TokenStream
from runtime.engine.any_optimizer import check_elementwise, check_state, is_adamw, step_by_itself
from runtime.engine.clip import Clip
from runtime.engine.setup import without_warning
from runtime.engine.shard import Shard
from runtime.errors import UserError

STEPS = 8
# Its learning rate is that of the script. Adam's eps keeps elements of nearly no gradient from taking full steps
MADE = {
    "Adam": "torch.optim.Adam(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-5)",
    "AdamW+amsgrad": "torch.optim.AdamW(groups, lr=1e-3, eps=1e-5, amsgrad=True)",
    "RAdam": "torch.optim.RAdam(groups, lr=1e-3, eps=1e-5)",
    "NAdam": "torch.optim.NAdam(groups, lr=1e-3, eps=1e-5)",
    "SGD": "torch.optim.SGD(groups, lr=1e-3, momentum=0.9)",
    "Lion": "Lion(groups)",
}
LION = '''
import torch
class Lion(torch.optim.Optimizer):
    """Chen et al., 2023. By hand, as a user would."""
    def __init__(self, groups, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(groups, dict(lr=lr, betas=betas))
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                m = state["momentum"]
                update = m * beta1 + p.grad * (1 - beta1)
                # tanh for sign: rounding must not turn elements of no gradient into full steps
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(torch.tanh(1e3 * update), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)
'''


def plant(made):
    return f"""{LION}
from runtime.engine import setup
setup.make_adamw = lambda groups, config, **options: {made}
"""


def plain_losses(made, characters, clip=1.0, ratios=(1, 1)):
    """The losses of the same steps in plain PyTorch, on all data of a step at once.

    ratios: of the groups' learning rates to that of the schedule.
    """
    tokens = np.memmap(characters / "train.bin", np.uint16, mode="r")
    torch.manual_seed(1337)
    config = GPTConfig(block_size=32, vocab_size=len(CHARS), n_layer=2, n_head=2, n_embd=32)
    model = GPT(config)
    names = {"torch": torch, "groups": model.parameter_groups(0.1)}
    exec(LION, names)
    optimizer = eval(made, names)
    losses = []
    for it in range(STEPS):
        ids = np.arange(8 * it, 8 * it + 8)
        located = locate_sequences(ids, [(TokenStream(tokens, 32), 1)], 1337)
        x, y = read_sequences(located, len(CHARS))
        rate = 1e-4 + 0.5 * (1 + math.cos(math.pi * it / STEPS)) * 9e-4
        for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
            group["lr"] = rate * ratio
        loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


ARGUMENTS = (f"--max_iters={STEPS}", "--eval_interval=4", "--grad_clip=1.0", "--keep_last=10")


def per_rank(ranks, accumulation=2):
    """8 sequences per step."""
    return (f"--batch_size={8 // ranks // accumulation}", f"--gradient_accumulation_steps={accumulation}")


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("n", [2, 3])
def test_losses_are_plain_pytorchs(train, characters, name, n):
    """On 2 ranks, and from the middle on one: its state is re-sharded. AdamW's losses are others."""
    expected = plain_losses(MADE[name], characters)
    options = {"plant": plant(MADE[name])}
    whole = done(train(*ARGUMENTS, *per_rank(2), stage(n), ranks=2, **options))
    assert [*whole.losses.values()] == pytest.approx(expected, abs=2e-6)
    assert f"the optimizer {name} is stepped by its own step()" in whole.stdout

    first = ("--max_iters=4", f"--lr_decay_iters={STEPS}")
    half = done(train(*ARGUMENTS, *per_rank(2), stage(n), *first, ranks=2, **options))
    resumed = done(train(*ARGUMENTS, *per_rank(1), stage(5 - n), f"--lr_decay_iters={STEPS}", "--init_from=resume",
                         out_dir=half.out_dir, **options))
    assert [*resumed.losses.values()] == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_a_group_keeps_its_own_learning_rate(train, characters, kind):
    """Four times the others', also after a resume. Before, all groups had the schedule's."""
    made = f'torch.optim.{kind}([{{**groups[0], "lr": 4e-3}}, groups[1]], lr=1e-3)'
    expected = plain_losses(made, characters, ratios=(4, 1))
    first = ("--max_iters=4", f"--lr_decay_iters={STEPS}")
    half = done(train(*ARGUMENTS, *per_rank(2), *first, ranks=2, plant=plant(made)))
    resumed = done(
        train(
            *ARGUMENTS,
            *per_rank(1),
            f"--lr_decay_iters={STEPS}",
            "--init_from=resume",
            out_dir=half.out_dir,
            plant=plant(made),
        )
    )
    assert [*resumed.losses.values()] == pytest.approx(expected, abs=2e-6)


HALF = LION.replace("class Lion", "class Half")
HALF = HALF.replace("torch.zeros_like(p)", "torch.zeros_like(p, dtype=torch.bfloat16)")


@pytest.mark.parametrize("n", [2, 3])
def test_a_state_keeps_its_dtype(train, n):
    """Momentum in bfloat16: a resumed run rounds it as the run that never stopped does."""
    options = {"plant": HALF + plant("Half(groups)").replace(LION, "")}
    whole = done(train(*ARGUMENTS, *per_rank(1), stage(n), **options))
    half = done(train(*ARGUMENTS, *per_rank(1), stage(n), "--max_iters=4", f"--lr_decay_iters={STEPS}", **options))
    resumed = done(train(*ARGUMENTS, *per_rank(1), stage(n), f"--lr_decay_iters={STEPS}", "--init_from=resume",
                         out_dir=half.out_dir, **options))
    assert resumed.losses == whole.losses


def test_an_optimizer_is_not_resumed_as_another(train):
    run = done(train("--max_iters=2", plant=plant(MADE["Adam"])))
    other = train("--max_iters=4", "--init_from=resume", out_dir=run.out_dir)
    assert other.returncode == 2
    assert "iter_2 was trained with the optimizer Adam, and this run has AdamW: use the same" in other.stderr


@pytest.mark.parametrize(
    "made, why",
    [
        ("torch.optim.Adafactor(groups)", "the optimizer Adafactor needs whole tensors"),
        ("torch.optim.LBFGS([p for g in groups for p in g['params']])", "the optimizer LBFGS can't be stepped"),
    ],
)
def test_an_optimizer_that_needs_whole_tensors_is_refused(train, made, why):
    run = train("--max_iters=2", ranks=2, plant=plant(made))
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert why in run.stderr
    assert "choose one that works element by element" in run.stderr


SGLD = """
import torch
class SGLD(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p), alpha=group["lr"] ** 0.5)
        return super().step(closure)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_that_draws_random_numbers_is_refused_as_such(train, ranks):
    """Before, it "needs whole tensors"."""
    run = train("--max_iters=2", ranks=ranks, plant=SGLD + plant("SGLD(groups, lr=1e-3)").replace(LION, ""))
    assert run.returncode == 2
    assert run.stderr.splitlines() == [
        "the optimizer SGLD draws random numbers in its step(), and each rank would draw its own for ZeRO's pieces of "
        "the weights, so no resume on other ranks could repeat them: leave that out, or give it a stepper of its own "
        "as runtime/engine/muon.py is one"
    ]


def test_a_step_sees_scaled_gradients_and_rounds_the_weights():
    weights = torch.nn.Parameter(torch.linspace(-1, 1, 9))
    optimizer = torch.optim.SGD([weights], lr=0.5)
    half = weights.detach().to(torch.bfloat16)
    shard = Shard(weights, half, torch.ones(9), optimizer, group_index=0)
    optimizer.param_groups[0]["params"] = []  # as DeepSpeed leaves it at ZeRO-3
    step_by_itself(optimizer, [shard], Clip(torch.tensor(1.0), 0.25, math.inf, math.inf))
    assert torch.equal(weights, torch.linspace(-1, 1, 9) - 0.125)
    assert torch.equal(shard.half, weights.to(torch.bfloat16))
    assert not shard.grads.any()
    assert weights.grad is None and optimizer.param_groups[0]["params"] == []


def test_what_is_adamw_and_what_is_not():
    p = torch.nn.Parameter(torch.zeros(3))
    assert is_adamw(torch.optim.AdamW([p], lr=1e-3, fused=True))
    for other in (torch.optim.AdamW([p], amsgrad=True), torch.optim.AdamW([p], maximize=True), torch.optim.Adam([p]),
                  type("AdamW", (torch.optim.AdamW,), {})([p])):
        assert not is_adamw(other)
    coupled = torch.optim.AdamW([p])
    coupled.param_groups[0]["decoupled_weight_decay"] = False
    assert not is_adamw(coupled)
    hooked = torch.optim.AdamW([p])
    hooked.register_step_post_hook(lambda *_: None)
    assert not is_adamw(hooked)
    for usual in (torch.optim.RMSprop([p]), torch.optim.Adamax([p]), torch.optim.ASGD([p])):
        check_elementwise(usual)

    # It creates its state for the parameters that it is made with, and ZeRO's are others
    with pytest.raises(UserError, match="the optimizer Adagrad has a state before the first step"):
        check_state(torch.optim.Adagrad([p]))

    class Normed(torch.optim.SGD):
        """Divides each tensor's gradient by its norm."""

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad /= p.grad.norm()
            return super().step(closure)

    with pytest.raises(UserError, match="the optimizer Normed needs whole tensors"):
        check_elementwise(Normed([p], lr=0.1))


class ByHand(torch.optim.Optimizer):
    """SGD with momentum, as users write optimizers. Subclasses change one thing each."""

    def __init__(self, params, scale=1.0):
        super().__init__(params, {"lr": 0.1})
        self.scale = scale

    def rate(self, group, p):
        return group["lr"] * self.scale

    def momentum(self, p):
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        return state["momentum"]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.momentum(p)
                momentum.mul_(0.9).add_(p.grad)
                p.sub_(momentum, alpha=self.rate(group, p))


class ReadsAttribute(ByHand):
    def rate(self, group, p):
        return group["lr"] * getattr(p, "lr_scale", 1.0)


class ScalesMatrices(ByHand):
    def rate(self, group, p):
        return group["lr"] * (0.1 if p.ndim >= 2 else 1.0)


class Counts(ByHand):
    steps = 0

    def rate(self, group, p):
        self.steps += 1
        return group["lr"] / self.steps


class CountsInGroup(ByHand):
    def rate(self, group, p):
        group["steps"] = group.get("steps", 0) + 1
        return group["lr"] / group["steps"]


class HasDict(ByHand):
    def __init__(self, params):
        super().__init__(params)
        self.momenta = {}

    def momentum(self, p):
        return self.momenta.setdefault(p, torch.zeros_like(p))


class OwnList(ByHand):
    """Steps the parameters that it was made with."""

    def __init__(self, params):
        super().__init__(params)
        self.own = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.own:
            if p.grad is not None:
                p.sub_(p.grad)


class OneGroupNormed(ByHand):
    """Needs whole tensors for its second group only."""

    def rate(self, group, p):
        return group["lr"] / (p.norm() if group.get("normed") else 1)


class JointlyNormed(ByHand):
    """Divides all gradients of a group by their joint norm: each rank has another one."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                p.sub_(p.grad / norm, alpha=group["lr"])


class Noisy(ByHand):
    def rate(self, group, p):
        return group["lr"] * (1 + torch.rand_like(p).mean().item())


class OwnGenerator(ByHand):
    def __init__(self, params):
        super().__init__(params)
        self.generator = torch.Generator()

    def rate(self, group, p):
        return group["lr"] * torch.rand((), generator=self.generator).item()


class PythonsNoise(ByHand):
    def rate(self, group, p):
        return group["lr"] * random.random()


class Later(ByHand):
    """Centers gradients from the twelfth step on, as one that warms up might."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                mean = p.grad.mean() if state["steps"] > 11 else 0
                p.sub_(p.grad - mean, alpha=group["lr"])


class HasIds(ByHand):
    """Knows the parameters by their ids."""

    def __init__(self, params):
        super().__init__(params)
        self.slow = {id(p) for group in self.param_groups for p in group["params"]}

    def rate(self, group, p):
        return group["lr"] * (0.5 if id(p) in self.slow else 1)


class HasScales(ByHand):
    """Looks up each parameter's own rate."""

    def __init__(self, params):
        super().__init__(params)
        self.scales = {p: 0.5 for group in self.param_groups for p in group["params"]}

    def rate(self, group, p):
        return group["lr"] * self.scales.get(p, 1.0)


class CountsInDict(ByHand):
    def __init__(self, params):
        super().__init__(params)
        self.counts = {"steps": 0}

    def rate(self, group, p):
        self.counts["steps"] += 1
        return group["lr"] / self.counts["steps"]


@pytest.mark.parametrize(
    "kind, why",
    [
        (Later, "needs whole tensors"),
        (HasIds, "has parameters of the model in its attribute 'slow'"),
        (HasScales, "has parameters of the model in its attribute 'scales'"),
        (CountsInDict, "keeps what it has learned in the attribute 'counts'"),
        (JointlyNormed, "needs whole tensors"),
        (Noisy, r"draws random numbers in its step\(\)"),
        (OwnGenerator, "steps the same weights with the same gradients differently each time"),
        (PythonsNoise, "steps the same weights with the same gradients differently each time"),
        (ReadsAttribute, "reads lr_scale of the parameters"),
        (ScalesMatrices, "treats matrices differently from vectors"),
        (Counts, "keeps what it has learned in the attribute 'steps'"),
        (CountsInGroup, "keeps what it has learned in the parameter group's 'steps'"),
        (HasDict, "keeps what it has learned in the attribute 'momenta'"),
        (OwnList, "doesn't change the parameters in its param_groups"),
        (OneGroupNormed, "needs whole tensors"),
    ],
)
def test_what_zero_cannot_give_an_optimizer_is_refused(kind, why):
    """Each of them would train without a word, and otherwise than in plain PyTorch."""
    params = [torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(3))]
    params[0].lr_scale = 0.1
    groups = [{"params": params[:1]}, {"params": params[1:], "normed": True}]
    with pytest.raises(UserError, match=f"the optimizer {kind.__name__} .*{why}|step.. of .*{why}"):
        check_elementwise(kind(groups), params)


def test_attributes_of_an_optimizer_and_of_parameters_may_be_there():
    """If nothing reads those of the parameters. The trial leaves no traces."""
    param = torch.nn.Parameter(torch.ones(3, 3))
    param.lr_scale = 0.1
    optimizer = ByHand([param], scale=0.5)
    check_elementwise(optimizer, [param])
    assert optimizer.scale == 0.5
    assert not optimizer.state
    assert torch.equal(param, torch.ones(3, 3))
    assert param.grad is None


def test_another_optimizer_is_not_given_muons_groups(train):
    """Their learning rate is 30 times AdamW's in config/shakespeare_char_cpu.py."""
    run = train("--max_iters=2", "--optimizer=muon", plant=plant(MADE["Lion"]))
    assert run.returncode == 2
    assert "the optimizer is Lion: add --optimizer=adamw" in run.stderr
    assert not run.losses


def test_its_class_is_named_and_deepspeed_warns_of_nothing(train, characters, tmp_path):
    run = done(train("--max_iters=1", plant=plant(MADE["Lion"])))
    assert "optimizer  Lion (learning rate 0.001)\n" in run.stdout
    assert "note       the optimizer Lion is stepped by its own step()" in run.stdout
    assert "untested" not in run.stdout + run.stderr
    run = done(train("--max_iters=1", "--optimizer=muon"))
    assert "optimizer  muon (learning rate 0.02), adamw (learning rate 0.001)\n" in run.stdout

    line = "adamw = setup.make_adamw(groups, plan.ds_config, lr=learning_rate, betas=(beta1, beta2))"
    script = edited_script(tmp_path, (line, f"adamw = {MADE['SGD']}"))
    planned = done(train("--dry_run=True", script=script))
    assert "optimizer  as train_edited.py makes it (learning rate 0.001)\n" in planned.stdout
    planned = done(train("--dry_run=True"))
    assert "optimizer  adamw (learning rate 0.001)\n" in planned.stdout


def test_other_warnings_of_deepspeed_are_kept():
    """By a handler of the same logger."""
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger = deepspeed.utils.logger
    logger.addHandler(handler)
    try:
        with without_warning("untested optimizer"):
            logger.warning("You are using ZeRO with an untested optimizer")
            logger.warning("another")
        logger.warning("an untested optimizer, later")
    finally:
        logger.removeHandler(handler)
    assert seen == ["another", "an untested optimizer, later"]


SOME = {
    "momentum in one group": "SGD([{**groups[0], 'momentum': 0.9}, {**groups[1], 'momentum': 0.0}], lr=1e-3)",
    "momentum in the other group": "SGD([{**groups[0], 'momentum': 0.0}, {**groups[1], 'momentum': 0.9}], lr=1e-3)",
}


@pytest.mark.parametrize("n, name", [(2, "momentum in one group"), (3, "momentum in the other group")])
def test_a_field_that_one_group_has_is_resumed(train, characters, n, name):
    made = f"torch.optim.{SOME[name]}"
    expected = plain_losses(made, characters)
    options = {"plant": plant(made)}
    first = ("--max_iters=4", f"--lr_decay_iters={STEPS}")
    half = done(train(*ARGUMENTS, *per_rank(2), stage(n), *first, ranks=2, **options))
    resumed = done(train(*ARGUMENTS, *per_rank(1), stage(5 - n), f"--lr_decay_iters={STEPS}", "--init_from=resume",
                         out_dir=half.out_dir, **options))
    assert [*resumed.losses.values()] == pytest.approx(expected, abs=2e-6)


# The groups differ in what NAdam keeps as a number, the momenta multiplied
GROUPS = ["{**groups[0], 'momentum_decay': 0.4}", "{**groups[1], 'momentum_decay': 0.0}"]
NADAM = "torch.optim.NAdam([{}, {}], lr=1e-3, eps=1e-5)"


@pytest.mark.parametrize("n", [2, 3])
def test_numbers_follow_their_parameters_into_other_groups(train, characters, tmp_path, n):
    """The groups in the other order, and, at stage 3, in several flat tensors each."""
    made = NADAM.format(*GROUPS)
    expected = plain_losses(made, characters)
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": n, "sub_group_size": 5000}}))
    first = (f"--deepspeed_config={config}", "--max_iters=4", f"--lr_decay_iters={STEPS}")
    half = done(train(*ARGUMENTS, *per_rank(1), *first, plant=plant(made)))
    turned = plant(NADAM.format(*GROUPS[::-1]))
    resumed = done(train(*ARGUMENTS, *per_rank(1), stage(5 - n), f"--lr_decay_iters={STEPS}", "--init_from=resume",
                         out_dir=half.out_dir, plant=turned))
    assert [*resumed.losses.values()] == pytest.approx(expected, abs=2e-6)

    # Numbers that differ can't become those of one group
    if n == 2:
        joined = NADAM.format("{'params': groups[0]['params'] + groups[1]['params']}", "").replace(", ]", "]")
        refused = train(*ARGUMENTS, *per_rank(1), "--init_from=resume", out_dir=half.out_dir, plant=plant(joined))
        assert refused.returncode == 2
        assert "has other numbers of the optimizer for" in refused.stderr
        assert "Traceback" not in refused.stderr


def test_a_hook_that_changes_the_weights_of_the_model_is_refused():
    """ZeRO overwrites what it does, and the short check before training ran it on the model."""
    weight = torch.nn.Parameter(torch.ones(3, 3))
    adamw = torch.optim.AdamW([weight])

    @torch.no_grad()
    def clamp(*_):
        weight.clamp_(-0.03, 0.03)

    adamw.register_step_post_hook(clamp)
    with pytest.raises(UserError, match="or a hook on it, changes the weights of the model"):
        check_elementwise(adamw, [weight])


def test_a_state_of_adamw_before_the_engine_is_refused(train, tmp_path):
    """As that of a nanoGPT ckpt.pt. It was dropped, without a word."""
    line = "adamw = setup.make_adamw(groups, plan.ds_config, lr=learning_rate, betas=(beta1, beta2))\n"
    state = "adamw.state[groups[0]['params'][0]] = {'step': torch.tensor(5.0)}\n"
    run = train("--max_iters=2", script=edited_script(tmp_path, (line, line + state)))
    assert run.returncode == 2
    assert "the optimizer AdamW has a state before the first step" in run.stderr and "Traceback" not in run.stderr


def test_a_step_of_the_object_is_refused_and_that_of_a_scheduler_is_not():
    """A scheduler puts a step() on the object, too, which calls that of the class."""
    weight = torch.nn.Parameter(torch.ones(3, 3))
    adamw = torch.optim.AdamW([weight])
    torch.optim.lr_scheduler.ConstantLR(adamw)
    assert is_adamw(adamw)
    adam = torch.optim.Adam([weight])
    torch.optim.lr_scheduler.ConstantLR(adam)
    check_elementwise(adam, [weight])
    adam.step = types.MethodType(lambda self: None, adam)
    assert not is_adamw(adam)
    with pytest.raises(UserError, match="Adam has a step\\(\\) that was set on the object"):
        check_elementwise(adam, [weight])


def test_a_scheduler_trains_and_is_noted(train, tmp_path):
    """Its rates are those of get_lr() here, so it changes nothing."""
    line = "adamw = setup.make_adamw(groups, plan.ds_config, lr=learning_rate, betas=(beta1, beta2))\n"
    scheduler = "scheduler = torch.optim.lr_scheduler.ConstantLR(adamw, factor=1.0)\n"
    step = "    loss /= micro_steps  # as the gradients: the mean over the step\n"
    script = edited_script(tmp_path, (line, line + scheduler), (step, step + "    scheduler.step()\n"))
    plain = done(train("--max_iters=3"))
    scheduled = done(train("--max_iters=3", script=script))
    assert scheduled.losses == plain.losses
    assert "note       no checkpoint has the state of an lr_scheduler: " in scheduled.stdout
    assert "lr_scheduler.step()` before" not in scheduled.stderr
