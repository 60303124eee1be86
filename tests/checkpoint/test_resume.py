"""What a resumed run takes from its checkpoint, what it may change, and which checkpoint is the best one then."""

import json
import pickle
import shutil
from unittest.mock import Mock

import pytest
from conftest import CHARS, EIGHT, FLOAT16, ROOT, SMALL, done, stage, write_characters

from configurator import settings_of_script
from runtime.checkpoint.tags import TagStore
from runtime.cluster.ranks import Ranks
from runtime.plan.run_plan import Problems, make_plan


def mixture(folder, **weights):
    return f"--dataset={ {f'{folder}/{name}': weight for name, weight in weights.items()} }"


@pytest.fixture(scope="module")
def resume(train, tmp_path_factory):
    """resume(*args, data="moved", a=1, b=3) -> (problems, notes) of a run that resumes one on this mixture; {data} and
    {out_dir} in them are folders."""
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate("abc"):
        write_characters(folder / "first" / name, seed)
    for copy in ("moved", "coded", "nanogpt"):
        shutil.copytree(folder / "first", folder / copy)
    for file in folder.glob("coded/*/meta.json"):  # as many tokens
        file.write_text(file.read_text().replace(json.dumps(CHARS), json.dumps(CHARS[::-1])))
    for file in folder.glob("nanogpt/*/meta.json"):  # without hashes
        file.unlink()
        file.with_suffix(".pkl").write_bytes(pickle.dumps({"vocab_size": len(CHARS), "itos": dict(enumerate(CHARS))}))
    out_dir = done(train(mixture(folder / "first", a=1, b=3), "--max_iters=2")).out_dir

    def run(*args, data="first", **weights):
        argv = [*SMALL, "--max_iters=2", mixture(folder / data, **weights or {"a": 1, "b": 3}), "--init_from=resume",
                f"--out_dir={out_dir}", *args]
        problems, notes = Problems(), []
        make_plan(settings_of_script(str(ROOT / "train_deepspeed.py"), argv), Ranks(0, 0, 1, 1), problems, notes)
        return [[text.replace(str(out_dir), "OUT").replace(str(folder), "DATA") for text in texts]
                for texts in (problems, notes)]

    return run


@pytest.mark.parametrize("change", [{"c": 3, "b": 1}, {"b": 3, "a": 1}, {"a": 1, "b": 2}, {"a": 1}], ids=str)
def test_a_resume_with_other_data_is_refused(resume, change):
    """Another dataset, order or share of a mixture. An evaluation alone may take it."""
    (problem,), _ = resume(**change)
    assert problem.endswith("""} is not the data of OUT/iter_2: use --dataset='{"DATA/first/a": 1, "DATA/first/b": """
                            "3}', or start a new stage with --init_from=OUT/iter_2 --out_dir=DIR")
    assert resume("--eval_only=True", **change)[0] == []


def test_a_resume_with_another_seed_or_tokenizer_is_refused(resume):
    assert resume("--seed=7")[0] == ["seed=7 is not the seed of OUT/iter_2: use --seed=1337, or start a new stage with "
                                     "--init_from=OUT/iter_2 --out_dir=DIR"]
    for args in ((), ("--eval_only=True",)):
        (problem,), _ = resume(*args, data="coded")
        assert "} has another tokenizer than OUT/iter_2: use --dataset='{" in problem


@pytest.mark.parametrize("n, old, new, message", [
    (2, "4 * config.n_embd", "9", "another model than this program (transformer.h.0.mlp.c_fc.weight, transformer.h.0."
     "mlp.c_fc.bias, transformer.h.0.mlp.c_proj.weight): restore model.py, which was edited since (MLP.__init__)"),
    (3, ".c_fc", ".c_i", "another model than this program (transformer.h.0.mlp.c_i.weight, transformer.h.0.mlp.c_i."
     "bias, transformer.h.1.mlp.c_i.weight): restore model.py, which was edited since (MLP.__init__, MLP.forward)"),
    (2, "gelu: str", "gelu", "iter_8 was trained with a GPTConfig that has gelu, and the present one has no such "
     "field: restore model.py")])
def test_another_model_py_is_refused(train, whole, tmp_path, n, old, new, message):
    """A narrower MLP would take the beginning of the saved one, and a renamed layer would stay random."""
    before = shutil.copytree(whole(n).out_dir, tmp_path / "out")
    (tmp_path / "model.py").write_text((ROOT / "model.py").read_text().replace(old, new))
    for out_dir, start in ((before, "resume"), (tmp_path / "new", f"{before}/iter_8")):
        run = train(*EIGHT, stage(n), f"--init_from={start}", "--max_iters=9", out_dir=out_dir,
                    plant=f"sys.path.insert(0, {str(tmp_path)!r})")
        assert run.returncode == 2 and "Traceback" not in run.stderr and len(run.history) in (0, len(whole(n).history))
        assert run.stderr.splitlines()[-1].endswith(message)


def test_a_resume_prints_each_setting_that_differs(resume):
    """The same data elsewhere, or without hashes, is one more. Where a run writes says nothing."""
    assert resume("--log_interval=7", "--keep_last=9") == [[], []]
    problems, notes = resume("--learning_rate=2e-3", "--max_iters=9")
    assert not problems and notes[-1].splitlines() == [
        "settings that differ from those of OUT/iter_2:", "           learning_rate=0.002, was 0.001",
        "           max_iters=9, was 2"]
    for data in ("moved", "nanogpt"):
        problems, notes = resume(data=data)
        assert not problems and f"dataset={{'DATA/{data}/a': 1, 'DATA/{data}/b': 3}}, was " in notes[-1]


def test_a_resume_notes_that_it_is_evaluated_on_other_windows(resume):
    """The run had eval_iters=2 and batch_size=2. How a step is split changes nothing else."""
    problems, notes = resume("--batch_size=1", "--gradient_accumulation_steps=4")
    assert not problems and notes == [
        "this run is evaluated on 2 windows of each split (eval_iters x batch_size), and OUT/iter_2 on 4: its losses "
        "differ from earlier ones, also from the best one; --eval_iters=4 takes the same"]
    _, (note,) = resume("--batch_size=4", "--gradient_accumulation_steps=1", "--eval_iters=1")
    assert note.splitlines()[1:] == ["           eval_iters=1, was 2"]
    _, notes = resume("--batch_size=8", "--gradient_accumulation_steps=1")
    assert notes[-1].endswith("also from the best one") and "evaluated on 16 windows" in notes[-1]


@pytest.fixture(scope="module")
def improved(train):
    """The out_dir of a run whose best tag is its newest, iter_6, and before that was iter_2."""
    flat = done(train("--n_layer=1", "--decay_lr=False", "--learning_rate=0")).out_dir
    return done(train("--n_layer=1", "--max_iters=6", "--init_from=resume", out_dir=flat)).out_dir


@pytest.mark.parametrize("lost, args, best", [
    ((), ["--resume_tag=iter_4", "--overwrite=True"], 2), (("iter_6", "best", "final"), [], 2),
    (("iter_2",), ["--resume_tag=iter_4", "--overwrite=True"], 8)], ids=str)
def test_a_run_that_lost_its_best_tag_has_one_again(train, improved, tmp_path, lost, args, best):
    """The best one of those that are left, or else the next one. Here no later loss is better."""
    out_dir = shutil.copytree(improved, tmp_path / "out")
    assert TagStore(out_dir).iteration("best") == 6
    for tag in lost:
        next((out_dir / tag).glob("*optim*")).write_bytes(b"")
        if tag == "iter_2":
            shutil.rmtree(out_dir / tag)
    (out_dir / "iter_4").symlink_to((out_dir / "iter_4").rename(tmp_path / "disk"))  # as a user may move a tag
    done(train("--n_layer=1", "--decay_lr=False", "--learning_rate=0", "--max_iters=10", "--eval_interval=4",
               "--init_from=resume", "--keep_last=1", "--always_save_checkpoint=False", *args, out_dir=out_dir))
    store = TagStore(out_dir)
    assert store.list() == ["iter_10", "best", "final"] and store.iteration("best") == best
    assert store.find(None).name == "best" and not [*out_dir.glob("iter_4*")]  # what is sampled from and exported
    shutil.rmtree(out_dir / "best")
    assert store.find(None).name == "iter_10"


def test_a_best_tag_whose_link_failed_is_linked_before_others_go(improved, tmp_path, monkeypatch):
    store = TagStore(shutil.copytree(improved, tmp_path / "out"))
    for tag in ("iter_6", "final"):
        store.delete(tag)
    store.alias("iter_4", "best")  # out of date: iter_2 is the best of what is left
    with monkeypatch.context() as full:
        full.setattr(store, "alias", Mock(side_effect=OSError))
        with pytest.raises(OSError):
            store.prune(1)
    assert store.delete_oldest() is False and store.list() == ["iter_2", "iter_4", "best"]
    shutil.copytree(store.path("iter_2"), store.path("iter_100"))  # a user's copy: its name says more than it is
    store.prune(1)
    assert store.list() == ["iter_4", "best"] and store.iteration("best") == 2


@pytest.fixture(scope="module")
def in_float16(train, tmp_path_factory):
    """in_float16(out_dir, stage, the JSON's "fp16"): a run of 4 iterations at stage 2, resumed for two more."""
    file = tmp_path_factory.mktemp("json") / "ds.json"

    def run(n, fp16, *args, **options):
        file.write_text(json.dumps({"zero_optimization": {"stage": n}, "fp16": fp16}))
        return done(train("--dtype=float16", "--n_layer=1", f"--deepspeed_config={file}", *args, plant=FLOAT16,
                          **options))

    first = run(2, {"initial_scale_power": 8, "loss_scale_window": 2}).out_dir
    return lambda out_dir, *args: run(*args, "--max_iters=6", "--init_from=resume",
                                      out_dir=shutil.copytree(first, out_dir))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("fp16, scales", [
    ({"initial_scale_power": 4, "loss_scale_window": 1}, [1024, 2048]), ({"loss_scale": 64}, [64, 64])], ids=str)
def test_a_resume_in_float16_continues_with_the_loss_scale_and_this_runs_json(in_float16, tmp_path, n, fp16, scales):
    """At the same stage, where DeepSpeed restores all of the loss scaler, and at another one."""
    history = in_float16(tmp_path / "out", n, fp16).history
    assert [r["loss_scale"] for r in history if "loss" in r] == [256, 256, 512, 512, *scales]


# In float16, the gradients of these training forwards of a process overflow, of which the first is 1
OVERFLOWS = FLOAT16 + """
import model
plain = model.GPT.forward
forwards = 0
def forward(self, *args):
    global forwards
    loss = plain(self, *args)
    if not self.training:
        return loss
    forwards += 1
    return loss * 1e9 if forwards in {bad} else loss
model.GPT.forward = forward
"""


@pytest.mark.parametrize("n", [2, 3])
def test_a_resume_knows_that_float16_has_forgiven_an_overflow(train, tmp_path, n):
    """A hysteresis of 2 forgives one. That was step 2, before the tag. So step 5 halves the scale at once."""
    fp16 = {"initial_scale_power": 8, "loss_scale_window": 1000, "hysteresis": 2}
    out_dir = tmp_path / "out"

    def run(stage, bad, *args):
        file = tmp_path / f"{stage}.json"
        file.write_text(json.dumps({"zero_optimization": {"stage": stage}, "fp16": fp16}))
        args = ("--dtype=float16", "--gradient_accumulation_steps=1", f"--deepspeed_config={file}", *args)
        return done(train(*args, out_dir=out_dir, plant=OVERFLOWS.format(bad=bad)))

    run(2, [2], "--max_iters=3")
    resumed = run(n, [2], "--max_iters=6", "--init_from=resume")
    scales = {record["iter"]: record["loss_scale"] for record in resumed.history if "loss" in record}
    assert scales == {1: 256, 2: 256, 3: 256, 4: 256, 5: 128, 6: 128}
    skipped = [record["iter"] for record in resumed.history if "overflow" in record.get("warning", "")]
    assert skipped == [2, 5]


def test_a_longer_resume_tells_of_the_learning_rate_that_goes_up(train, tmp_path):
    """By the cosine from 1e-3 to 1e-4: of 4 iterations, the last one has 2.32e-4; of 8, the fifth has 5.50e-4."""
    run = done(train("--max_iters=4", "--eval_interval=2"))
    assert "had the learning rate" not in run.stdout
    copies = [shutil.copytree(run.out_dir, tmp_path / str(number)) for number in range(3)]
    note = ("note       step 4 had the learning rate 2.32e-04, and step 5 has 5.50e-04: by the schedule of this run's "
            "settings, step 4 has 7.22e-04. --lr_decay_iters and --learning_rate change it\n")
    longer = done(train("--max_iters=8", "--init_from=resume", out_dir=copies[0]))
    assert note in longer.stdout
    assert [round(record["lr"], 6) for record in longer.history if "loss" in record][3:5] == [0.000232, 0.00055]
    kept = done(train("--max_iters=8", "--lr_decay_iters=4", "--init_from=resume", out_dir=copies[1]))
    assert "had the learning rate" not in kept.stdout
    again = done(train("--max_iters=4", "--init_from=resume", "--resume_tag=iter_2", "--overwrite=True",
                       out_dir=copies[2]))
    assert "had the learning rate" not in again.stdout


def test_a_resume_at_another_rate_tells_of_it_too(train):
    run = done(train("--max_iters=2", "--decay_lr=False"))
    on = done(train("--max_iters=3", "--decay_lr=False", "--learning_rate=5e-4", "--init_from=resume",
                    out_dir=run.out_dir))
    assert ("step 2 had the learning rate 1.00e-03, and step 3 has 5.00e-04: by the schedule of this run's settings, "
            "step 2 has 5.00e-04. ") in on.stdout
