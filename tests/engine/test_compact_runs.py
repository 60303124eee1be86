"""Whole runs with compact optimizer state, in bfloat16 on CPU ranks."""

import shutil

import pytest
import torch
from conftest import EIGHT, done, edited_script, stage
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from runtime.checkpoint.manifest import read_manifest
from runtime.checkpoint.tag_reader import TagReader

PLAIN = (*EIGHT, stage(2), "--dtype=bfloat16")
COMPACT = (*PLAIN, "--compact_optimizer=True")
KINDS = {"adamw": (), "muon": ("--optimizer=muon", "--learning_rate=1e-2")}
NO_MEMORY = "from runtime.checkpoint import staging; staging.available_memory = lambda: 0"


def content(out_dir, tag):
    """{(name, field): fp32 tensor} of a tag."""
    folder = out_dir / tag
    reader = TagReader(folder, read_manifest(str(folder / "manifest.json")))
    return {(name, field): reader.get(name, field) for name in reader.shapes for field in reader.fields(name)}


def assert_same_bits(tag, other):
    assert tag.keys() == other.keys()
    for key, values in tag.items():
        assert torch.equal(values.contiguous().view(torch.int32), other[key].contiguous().view(torch.int32)), key


@pytest.fixture(scope="module")
def straight(train):
    """straight(kind, ranks): 8 iterations."""
    runs = {}

    def run(kind, ranks):
        if (kind, ranks) not in runs:
            runs[kind, ranks] = done(train(*COMPACT, *KINDS[kind], ranks=ranks))
        return runs[kind, ranks]

    return run


@pytest.fixture
def resumed(train, tmp_path):
    """resumed(run, *args): a run that goes on after iteration 4 of another one."""

    def resume(run, *args, **options):
        out_dir = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(run.out_dir, out_dir, symlinks=True)
        begin = ("--init_from=resume", "--resume_tag=iter_4", "--overwrite=True")
        return done(train(*args, *begin, out_dir=out_dir, **options))

    return resume


@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_are_those_of_fp32_state_and_a_resume_is_exact(train, straight, resumed, kind):
    run = straight(kind, 2)
    assert "compact optimizer state" in run.stdout
    plain = done(train(*PLAIN, *KINDS[kind], ranks=2))
    for iteration, loss in plain.losses.items():
        assert run.losses[iteration] == pytest.approx(loss, abs=0.01), iteration
    assert run.losses != plain.losses

    # What a tag holds has more digits than bfloat16, and is all that a run needs
    tag = content(run.out_dir, "iter_8")
    weights = tag["transformer.wte.weight", "weight"]
    assert not torch.equal(weights, weights.bfloat16().float())
    again = resumed(run, *COMPACT, *KINDS[kind], ranks=2)
    assert again.losses == run.losses
    assert_same_bits(content(again.out_dir, "iter_8"), tag)


def test_without_host_memory_a_tag_is_decoded_on_the_disk(train, straight):
    run = done(train(*COMPACT, ranks=2, plant=NO_MEMORY))
    assert "too little host memory" in run.stdout
    assert_same_bits(content(run.out_dir, "iter_8"), content(straight("adamw", 2).out_dir, "iter_8"))


# A gate of one element in each block, and all gates in a group of their own
GATES = """
import torch, model
init, forward, groups = model.Block.__init__, model.Block.forward, model.GPT.parameter_groups
def init_with_gate(self, *args, **named):
    init(self, *args, **named)
    self.gate = torch.nn.Parameter(torch.ones(1))
def groups_with_gates(self, *args):
    kept = groups(self, *args)
    for group in kept:
        group["params"] = [p for p in group["params"] if p.numel() > 1]
    gates = [block.gate for block in self.transformer.h]
    return [*kept, {"params": gates, "weight_decay": 0.0}]
model.Block.__init__ = init_with_gate
model.Block.forward = lambda self, *args, **named: forward(self, *args, **named) * self.gate
model.GPT.parameter_groups = groups_with_gates
"""


@pytest.mark.parametrize("memory", ["", NO_MEMORY], ids=["in memory", "on the disk"])
def test_a_rank_without_an_element_of_a_group_saves(train, memory):
    """Two gates are padded to four elements, which are all on the first of two ranks."""
    run = done(train(*COMPACT, ranks=2, plant=GATES + memory))
    tag = content(run.out_dir, "iter_8")
    gates = [values for (name, field), values in tag.items() if name.endswith(".gate") and field == "weight"]
    assert [values.numel() for values in gates] == [1, 1]
    assert all(0.5 < values.item() < 1.5 and values.item() != 1 for values in gates)
    plain = done(train(*PLAIN, ranks=2, plant=GATES))
    for iteration, loss in plain.losses.items():
        assert run.losses[iteration] == pytest.approx(loss, abs=0.01), iteration


def test_deepspeeds_own_tool_reads_a_tag(straight):
    run = straight("adamw", 2)
    tag = content(run.out_dir, "iter_8")
    weights = get_fp32_state_dict_from_zero_checkpoint(str(run.out_dir), "iter_8")
    named = {name for name, field in tag if field == "weight"}
    assert named <= weights.keys()
    for name in named:
        assert torch.equal(weights[name], tag[name, "weight"]), name


@pytest.mark.parametrize("kind, ranks, others", [("adamw", 2, 1), ("adamw", 1, 3), ("muon", 2, 3)])
def test_other_ranks_take_all_digits(straight, resumed, kind, ranks, others):
    """A step with a learning rate of 0 leaves the tag's weights as they are. One with it has the loss of the run."""
    run = straight(kind, ranks)
    batch = {(2, 1): "4", (1, 3): "1", (2, 3): "1"}[ranks, others]
    sizes = ("--batch_size=1", "--gradient_accumulation_steps=" + batch)
    still = ("--learning_rate=0", "--min_lr=0", "--muon_learning_rate=1e-30", "--eval_interval=1", "--max_iters=5")
    if kind == "muon":
        still = ("--learning_rate=1e-30", "--min_lr=0", "--muon_learning_rate=1e-30", *still[3:])
    after = resumed(run, *COMPACT, *KINDS[kind], *sizes, *still, ranks=others)
    before = content(run.out_dir, "iter_4")
    now = content(after.out_dir, "iter_5")
    means = []
    for (name, field), values in before.items():
        if field == "weight":
            assert torch.equal(now[name, field], values), name
        elif field == "exp_avg_sq":  # 0.95 of it and more, but for two roundings to 4 bits
            assert (now[name, field] >= 0.85 * values).all(), name
        else:
            means.append(torch.stack([now[name, field].flatten(), values.flatten()]))
    assert torch.corrcoef(torch.cat(means, dim=1))[0, 1] > 0.7


def test_a_resume_may_change_the_setting(straight, resumed):
    run = straight("adamw", 2)
    off = resumed(run, *PLAIN, ranks=2)
    on = resumed(off, *COMPACT, ranks=2)
    for other in (off, on):
        for iteration in (5, 6, 7, 8):
            assert other.losses[iteration] == pytest.approx(run.losses[iteration], abs=2e-3)


COUNT = """
import atexit, gc, torch
from runtime.engine import step
from runtime.engine.hidden_grads import StandIn
made = []
init = step.OurStep.__init__
step.OurStep.__init__ = lambda self, *args, **named: (made.append(self), init(self, *args, **named))[1]
def count():
    n = made[0].layout.shards[0].half.numel()
    storages = {t.untyped_storage().data_ptr() for t in gc.get_objects() if torch.is_tensor(t)
                and not isinstance(t, StandIn) and t.dtype == torch.float32 and t.untyped_storage().nbytes() >= 4 * n}
    print("of the size of the weights:", len(storages), "tensors in float32")
atexit.register(count)
"""


CHANGES = {  # after the second step
    "zeros on all ranks": "model.transformer.wte.weight.data[5].zero_()",
    "on one rank": "model.transformer.wte.weight.data.mul_(0.9) if ranks.rank == 0 else None",
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_a_loop_changes_are_found(train, tmp_path, change):
    """They have no fp32 copy to compare with. Zeros made NaN of remainders, also in a checkpoint. Ranks differed."""
    after = "    loss /= micro_steps  # as the gradients: the mean over the step\n"
    script = edited_script(tmp_path, (after, f"    if iter_num == 2:\n        {CHANGES[change]}\n{after}"))
    run = train(*COMPACT, "--max_iters=4", "--eval_interval=2", ranks=2, script=script)
    assert run.returncode == 2
    assert "the weights of the model were changed outside of the optimizer" in run.stderr
    assert "Traceback" not in run.stderr
    assert not (run.out_dir / "iter_2").exists()


def test_nothing_but_the_gradients_is_in_float32(train):
    """DeepSpeed has views of the fp32 weights, each of which would keep all of them in memory."""
    args = ("--max_iters=2", "--keep_last=0")
    assert "weights: 1 tensors in float32" in done(train(*COMPACT, *args, plant=COUNT)).stdout
    assert "weights: 4 tensors in float32" in done(train(*PLAIN, *args, plant=COUNT)).stdout


@pytest.mark.parametrize("args, why", [
    (("--dtype=float32",), "compact_optimizer=True splits bfloat16 weights, and this run is in float32"),
    (("--dtype=float16",), "dtype=float16 needs a GPU: use --dtype=float32 or --dtype=bfloat16"),
    ((stage(3),), "compact_optimizer=True is for ZeRO-2, and ds_config_zero3.json has stage 3"),
    (("--deepspeed_config=config/ds/zero2_offload.json",), "compact_optimizer=True keeps the state on the GPU"),
])
def test_what_it_does_not_fit_is_refused(train, args, why):
    run = train(*COMPACT, *args)
    assert run.returncode == 2 and run.stderr.count(why) == 1 and not run.losses
    assert ("splits bfloat16 weights" in run.stderr) == ("splits bfloat16 weights" in why), run.stderr


def test_another_optimizer_is_refused(train, tmp_path):
    edit = ("adamw = setup.make_adamw(groups, plan.ds_config, lr=learning_rate, betas=(beta1, beta2))",
            "adamw = torch.optim.SGD(groups, lr=learning_rate)")
    run = train(*COMPACT, script=edited_script(tmp_path, edit))
    assert run.returncode == 2 and not run.losses
    assert "compact_optimizer=True is for AdamW and Muon, and the optimizer is SGD" in run.stderr


def test_an_option_of_adamw_in_a_group_is_refused_by_its_name(train, tmp_path):
    edit = ("adamw = setup.make_adamw(", "groups[-1]['maximize'] = True\nadamw = setup.make_adamw(")
    run = train(*COMPACT, script=edited_script(tmp_path, edit))
    assert run.returncode == 2 and not run.losses
    told = "compact_optimizer=True is for AdamW and Muon, and the optimizer is AdamW with maximize: drop the setting"
    assert told in run.stderr
