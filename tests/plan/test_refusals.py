"""Bad input: one sentence with what to do, exit code 2, no traceback, and nothing that was there is lost."""

import errno
import hashlib
import itertools
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from conftest import NO_SHAPE, ROOT, SMALL, SOURCE, done, launch, nvidia_smi, planted
from torch.nn.attention import SDPBackend

from configurator import settings_of_script
from runtime import hardware
from runtime.checkpoint import tags as checkpoint
from runtime.checkpoint.manifest import sign_manifest
from runtime.checkpoint.verify import verify_files
from runtime.cluster import nodes
from runtime.cluster.ranks import Ranks
from runtime.data.dataset import write_dataset
from runtime.errors import UserError
from runtime.hardware import attention_backends
from runtime.kernels import device_has_triton
from runtime.plan import out_dir
from runtime.plan.rules import ABOVE_ZERO, AT_LEAST, BELOW_ONE, evaluations_through, plan_iterations
from runtime.plan.run_plan import Problems, make_plan

SCRIPT = str(ROOT / "train_deepspeed.py")


def fingerprint(folder):
    """path -> hash of all files below a folder."""
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def holder(train):
    """The folder of a finished run of one rank."""
    return done(train()).out_dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory, holder, characters):
    """Runs, weights and data with a fault each."""
    folder = tmp_path_factory.mktemp("bad")

    def damaged(name, change):
        change(shutil.copytree(holder, folder / name) / "iter_4" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")

    def flip(path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    (folder / "odd" / "history.jsonl").mkdir(parents=True)
    damaged("bit", flip)
    damaged("barred", lambda path: ((path.parent / "manifest.json").unlink(), (path.parent / "manifest.json").mkdir()))
    manifest = json.loads((holder / "iter_4" / "manifest.json").read_text()) | {"format": 0}
    damaged("format", lambda path: (path.parent / "manifest.json").write_text(sign_manifest(manifest)))
    meta = json.loads((characters / "meta.json").read_text()) | {"tokenizer": {"kind": "char", "chars": "ab"}}
    (shutil.copytree(characters, folder / "characters") / "meta.json").write_text(json.dumps(meta))
    from transformers import GPT2Config, GPT2LMHeadModel
    GPT2LMHeadModel(GPT2Config(vocab_size=28, n_embd=8, n_layer=1, n_head=2, n_positions=16)).save_pretrained(
        folder / "tiny")
    write_dataset(folder / "wide", range(900), range(100), {"kind": "gpt2"}, 50257, SOURCE)
    zero = {"zero3": {"stage": 3}, **{name: {"stage": stage, "offload_optimizer": {"device": "cpu"}}
                                      for name, stage in (("offload", 2), ("offload3", 3))}}
    for name, block in zero.items():
        (folder / f"{name}.json").write_text(json.dumps({"zero_optimization": block}))
    (folder / "bf16sums.json").write_text(json.dumps({"data_types": {"grad_accum_dtype": "bf16"}}))
    (folder / "file").write_text("")
    (folder / "nowhere").symlink_to("/no/such/disk")
    (folder / "locked" / ".lock").mkdir(parents=True)
    return folder


# Whole commands. What make_plan() alone refuses is in test_what_cannot_be_meant, below
REFUSED = {
    "--batch_size=0 --dropout=1.5 --beta1=2": "batch_size=0 must be at least 1|"
    "dropout=1.5 must be at least 0 and below 1|beta1=2.0 must be at least 0 and below 1",
    "{weights}/tiny": "block_size=32 is above the 16 positions of the weights: use --block_size=16",
    "{weights}/bit/iter_4 --out_dir={folder}/second": "bit/iter_4/zero_pp_rank_0_mp_rank_00_optim_states.pt has "
    "changed since it was saved",
    "{weights}/format/iter_4": "format/iter_4/manifest.json was written by another version of this program: ",
    "--dataset={folder}/characters": "characters/meta.json can't be used (ValueError: its 2 characters don't make a "
    "vocabulary of 28)",
    "--deepspeed_config=no-such.json": "no-such.json: No such file or directory: choose another file with "
    "--deepspeed_config=FILE",
    "--out_dir={folder}/locked": "locked/.lock (Is a directory): choose another --out_dir=DIR",
    "--out_dir={folder}/file/out": "file/out cannot be written: choose another with --out_dir=DIR",
    "--overwrite=False": "already holds a run (iter_4): resume it with --init_from=resume, choose another "
    "--out_dir=DIR, or delete it with --overwrite=True",
    "--init_from=resume --resume_tag=../{holder.name}/iter_4": "/iter_4': choose from iter_2, iter_4, best, final",
    "--init_from=resume --out_dir={folder}/nothing": "nothing has no checkpoint: choose another folder with "
    "--out_dir=DIR",
    "{iter_4}/bit": "optim_states.pt has changed since it was saved (its sha256 differs)|nothing to resume from: ",
    "{iter_4}/format": "format/iter_4/manifest.json was written by another version of this program: choose",
    "--init_from=resume --out_dir={folder}/barred": "iter_4/manifest.json cannot be read (Is a directory): fix that, "
    "or choose another checkpoint (--resume_tag or --tag)"}


def words_of(args, holder, folder):
    """The arguments of a row of a table, as words."""
    weights = f"{' '.join(NO_SHAPE)} --init_from={folder}"
    return args.format(holder=holder, folder=folder, weights=weights,
                       iter_4=f"--init_from=resume --resume_tag=iter_4 --out_dir={folder}").split()


@pytest.fixture(scope="module")
def refusals(train, holder, folder):
    """args -> the run of a row, in a folder with a finished run that it may even overwrite; two runs at a time."""
    def refused(args):
        words = words_of(args, holder, folder)
        return train(*["--overwrite=True"] * ("--init_from=resume" not in words), *words, out_dir=holder)

    before = fingerprint(holder)
    with ThreadPoolExecutor(2) as pool:
        runs = dict(zip(REFUSED, pool.map(refused, REFUSED)))
    return runs, before, fingerprint(holder)


@pytest.mark.parametrize("args", REFUSED)
def test_refusals(refusals, args):
    run, expected = refusals[0][args], REFUSED[args].split("|")
    assert "Traceback" not in run.stderr and run.returncode == 2
    lines = [line for line in run.stderr.splitlines() if line.strip()]
    assert len(lines) == len(expected)
    for line, words in zip(lines, expected):
        assert words in line
    assert "iter 1:" not in run.stdout and "saving" not in run.stdout


def test_refusals_leave_everything_as_it_was(refusals, folder):
    _, before, after = refusals
    assert len(before) > 10 and after == before
    assert not (folder / "nothing").exists()


def test_damaged_tags_are_not_sampled_from_either(folder):
    out_dir = folder / "bit"
    for args, words in (([f"--out_dir={out_dir}/iter_4/"], f"give its name as the tag, and --out_dir={out_dir}"),
                        (["--tag=iter_4"], "_optim_states.pt has changed since it was saved (its sha256 differs)"),
                        (["--tag=iter_7"], "no complete checkpoint 'iter_7': choose from iter_2, iter_4, best, final"),
                        (["--tag=best", "--start=É"], "the character 'É' (U+00C9) is not one of the 28")):
        run = launch(ROOT / "sample.py", f"--out_dir={out_dir}", *args)
        assert run.returncode == 2 and words in run.stderr.splitlines()[-1] and "Traceback" not in run.stderr


def test_an_error_of_the_file_system_is_a_problem_like_others(tmp_path):
    """Most often a train.bin of another user, which these tests, run as root, could read."""
    problems = Problems()
    assert problems.attempt(open, tmp_path) is None and problems == [f"[Errno 21] Is a directory: '{tmp_path}'"]


def test_a_single_rank_needs_no_local_rank(train):
    run = train("--max_iters=1", RANK="0", WORLD_SIZE="1")
    assert run.returncode == 0 and list(run.losses) == [1]
    for arg, told in (("--max_iters=1", "RANK= in the environment "), ("--bad=1", "command line: there")):
        run = train(arg, WORLD_SIZE="2")  # for a plan, or without a launcher by mistake
        assert run.returncode == 2 and run.stderr.startswith(told)


@pytest.mark.parametrize("env, name", [
    ({"WORLD_SIZE": "x"}, "WORLD_SIZE=x"), ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"), ({"RANK": ""}, "RANK="),
    ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2"),  # more than WORLD_SIZE, which is 1
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "LOCAL_RANK="),
    ({"RANK": "0", "LOCAL_RANK": "abc", "MASTER_PORT": "1"}, "LOCAL_RANK=abc"),
    ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "MASTER_PORT="),
    ({"RANK": "5", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "RANK=5")])
def test_variables_of_launchers_that_cannot_be_read(train, env, name):
    run = train("--dry_run=True", **env)
    told = (f"{name} in the environment can't be used: run unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE, or start "
            "with torchrun or deepspeed\n")
    assert (run.returncode, run.stdout, run.stderr) == (2, "", told)


def test_a_launcher_without_master_addr(train):
    run = train(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0", MASTER_PORT="29511")
    told = ("MASTER_ADDR is not in the environment: set it to rank 0's host (mpirun -x MASTER_ADDR=HOST), or start "
            "with torchrun\n")
    assert (run.returncode, run.stdout, run.stderr) == (2, "", told)


def test_ranks_whose_machines_differ_part(characters, tmp_path):
    """One is made to believe that it has a millionth of the other's memory; left alone, they would wait for ever."""
    script = planted(tmp_path, """
import runtime.plan.machine
runtime.plan.machine.available_memory = lambda: 2e9 if os.environ["RANK"] == "0" else 2e3
""")
    run = launch(script, *SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/out", "--batch_size=auto", ranks=2)
    told = "the ranks differ in batch_size (4 on rank 0, 1 on rank 1): make it the same on all"
    assert run.returncode == 2 and told in run.stderr.splitlines()


def test_no_room_for_a_tag_is_refused(monkeypatch, characters, tmp_path):
    """27,392 parameters and 1,152 of the vocabulary's padding, 16 bytes each."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=400_000))
    _, problems, _ = check(monkeypatch, characters, tmp_path, 0, None)
    (problem,) = problems
    assert problem.endswith(f"checkpoints of 0.46 MB exist at the same time, but the disk of {tmp_path}/out has room "
                            "for 0: save none with --keep_last=0, make room, or choose another --out_dir=DIR")
    plan, problems, notes = check(monkeypatch, characters, tmp_path, 0, None, "--eval_only=True")
    assert problems == [] and plan.tag_bytes == 16 * 28_544


@pytest.mark.parametrize("memory, tags, fits", [(2**40, 1.1, True), (0, 1.1, False), (0, 2, True)])
def test_no_room_for_what_a_save_makes_on_the_disk_is_refused(monkeypatch, characters, tmp_path, memory, tags, fits):
    """Compact state and one save: a tag has 14 bytes for each parameter, and without host memory 12 are made first."""
    monkeypatch.setattr(out_dir, "available_memory", lambda: memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=tags * 14 * 28_544))
    compact = ("--compact_optimizer=True", "--dtype=bfloat16", "--max_iters=100", "--eval_interval=100")
    _, problems, _ = check(monkeypatch, characters, tmp_path, 0, None, *compact)
    told = ["and a save takes 0.34 MB more, for which host memory is short," in problem for problem in problems]
    assert told == ([] if fits else [True]), problems


# Machines that we don't have here

VOLTA = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"  # the PyTorch 2.7.1 of requirements-volta.txt
TODAY = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"  # the PyTorch 2.11.0 of requirements.txt


def check(monkeypatch, characters, tmp_path, gpus, capability, *args, ranks=1, build=VOLTA, accelerator=""):
    """(plan, problems, notes) on a machine with these GPUs, under a PyTorch built for these architectures."""
    monkeypatch.chdir(tmp_path)  # the project's JSONs are found from any folder
    monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: build, raising=False)
    monkeypatch.setattr(hardware, "missing_compiler", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=2**34))
    argv = [*SMALL, f"--dataset={characters}", f"--out_dir={tmp_path}/out", "--device=auto", "--dtype=auto", *args]
    problems, notes = Problems(), []
    plan = make_plan(settings_of_script(SCRIPT, argv), Ranks(0, 0, ranks, ranks), problems, notes)
    return plan, list(problems), notes


def test_deepspeed_on_another_device_is_refused(monkeypatch, characters, tmp_path):
    """Before, a traceback in the middle of the first evaluation: DeepSpeed had moved the model to the CPU."""
    _, problems, _ = check(monkeypatch, characters, tmp_path, 1, (8, 0), accelerator="cpu")
    assert problems == ["DS_ACCELERATOR=cpu is in the environment, but device=cuda: run unset DS_ACCELERATOR, or add "
                        "--device=cpu"]
    for device in ("cuda", "cpu"):
        _, problems, _ = check(monkeypatch, characters, tmp_path, 1, (8, 0), f"--device={device}", accelerator=device)
        assert problems == []


def test_more_ranks_than_gpus(monkeypatch, characters, tmp_path):
    _, problems, _ = check(monkeypatch, characters, tmp_path, 2, (8, 0), ranks=4)
    assert problems == ["4 ranks, but 2 GPUs on this machine: start 2 ranks, or use --device=cpu"]
    plan, problems, notes = check(monkeypatch, characters, tmp_path, 4, (8, 0), ranks=4)
    assert (problems, plan.execution.device, plan.execution.dtype) == ([], "cuda", "bfloat16")
    plan, problems, notes = check(monkeypatch, characters, tmp_path, 2, (8, 0), "--device=cpu", ranks=4)
    assert (problems, plan.execution.device, plan.execution.dtype) == ([], "cpu", "float32")


@pytest.mark.parametrize("value, told", [
    ("8", "CUDA_VISIBLE_DEVICES=8 names 8, but nvidia-smi lists GPUs 0 to 1: change it, or set"),
    ("0,2", "CUDA_VISIBLE_DEVICES=0,2 names 2, but nvidia-smi lists GPUs 0 to 1: change it, or set"),
    ("cuda:0", "CUDA_VISIBLE_DEVICES=cuda:0 names cuda:0, but nvidia-smi lists GPUs 0 to 1: change it, or set"),
    ("GPU-3", "CUDA_VISIBLE_DEVICES=GPU-3 names GPU-3, but nvidia-smi lists GPUs 0 to 1: change it, or set"),
    ("GPU-", "CUDA_VISIBLE_DEVICES=GPU- names GPU-, but nvidia-smi lists GPUs 0 to 1: change it, or set"),
    ("1,1", "CUDA_VISIBLE_DEVICES=1,1 names a GPU twice, so CUDA finds none: name each once"),
    ("NoDevFiles", "CUDA_VISIBLE_DEVICES=NoDevFiles: this job has no GPU: request one with --gpus-per-node=1, or use"),
    ("0,1", "nvidia-smi lists GPUs, but PyTorch "), ("GPU-2", "nvidia-smi lists GPUs, but PyTorch "),
    ("none", None), ("-1", None), ("", None)])
def test_gpus_that_are_not_there_are_named(monkeypatch, characters, tmp_path, value, told):
    """CUDA ignores the names from the first wrong one on. Two GPUs, GPU-1 and GPU-2, of which PyTorch finds none."""
    nvidia_smi(tmp_path, "8.0", "8.0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    plan, problems, _ = check(monkeypatch, characters, tmp_path, 0, None)
    if told is None:
        assert problems == [] and plan.execution.device == "cpu"
        return
    (problem,) = problems
    assert problem.startswith(told)
    _, (problem,), _ = check(monkeypatch, characters, tmp_path, 0, None, "--device=cuda")
    assert problem.startswith(f"device=cuda, but PyTorch finds no CUDA GPU: {told}")


def test_a_wrong_gpu_among_others_is_why_there_are_too_few(monkeypatch, characters, tmp_path):
    nvidia_smi(tmp_path, "8.0", "8.0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for value, told in (("0,7", "CUDA_VISIBLE_DEVICES=0,7 names 7, but nvidia-smi lists GPUs 0 to 1: change it, or set "
                         "CUDA_VISIBLE_DEVICES=-1 for the CPU"),
                        ("1", "2 ranks, but 1 GPU on CUDA_VISIBLE_DEVICES=1: start 1 rank, or use --device=cpu")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        _, problems, _ = check(monkeypatch, characters, tmp_path, 1, (8, 0), ranks=2)
        assert problems == [told]


@pytest.mark.parametrize("capability, build, fix", [
    ((7, 0), TODAY, "volta"), ((6, 0), TODAY, "volta"), ((10, 0), VOLTA, ""), ((12, 0), VOLTA, ""),
    ((3, 7), TODAY, None), ((9, 0), "sm_80 sm_90a", ""), ((8, 0), "sm_86 compute_90", ""),
    *((gpu, VOLTA, "fits") for gpu in ((6, 0), (6, 1), (7, 0), (8, 9), (9, 0))),
    *((gpu, TODAY, "fits") for gpu in ((7, 5), (8, 9), (9, 0), (10, 3), (12, 1))),
    ((9, 0), "sm_80 compute_80", "fits"), ((9, 0), "", "fits"), ((9, 0), "gfx90a", "fits")])  # CPU builds, ROCm
def test_a_card_needs_a_pytorch_that_has_its_kernels(monkeypatch, characters, tmp_path, capability, build, fix):
    plan, problems, _ = check(monkeypatch, characters, tmp_path, 1, capability, build=build)
    if fix == "fits":
        assert problems == [] and plan.execution.device == "cuda"
        return
    fix = ("use another GPU, or CUDA_VISIBLE_DEVICES=-1 for the CPU" if fix is None else
           f"run python -m pip install -r requirements{'-' * bool(fix)}{fix}.txt")
    assert problems == [f"PyTorch {torch.__version__} has no kernels for GPUs of compute capability "
                        f"{'.'.join(map(str, capability))}: {fix}"]


# Beside a real GPU PyTorch finds it, and the run would train on it. Where there is none, the same PyTorch build meets
# an nvidia-smi that lists one, which is the case to test
@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="needs a machine without a GPU")
def test_a_card_that_pytorch_does_not_find_is_not_replaced_by_the_cpu(train, tmp_path):
    """A K80, whose last driver is too old for this PyTorch: is_available() is False there."""
    path = os.pathsep.join([str(nvidia_smi(tmp_path, "3.7").parent), os.environ["PATH"]])
    run = train("--device=auto", PATH=path, CUDA_VISIBLE_DEVICES="0")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (f"PyTorch {torch.__version__} has no kernels for GPUs of compute capability 3.7: use another "
                          "GPU, or CUDA_VISIBLE_DEVICES=-1 for the CPU\n")
    assert train("--device=auto", "--dry_run=True", PATH=path, CUDA_VISIBLE_DEVICES="-1").returncode == 0


def test_cards_that_no_rank_uses_do_not_matter(monkeypatch, characters, tmp_path):
    """The second of two GPUs is a V100."""
    check(monkeypatch, characters, tmp_path, 2, (9, 0), build=TODAY)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: ((9, 0), (7, 0))[i])
    assert hardware.pick_device("auto") == hardware.pick_device("auto", 1) == "cuda"
    with pytest.raises(UserError, match="no kernels for GPUs of compute capability 7.0"):
        hardware.pick_device("auto", 2)


@pytest.mark.parametrize("capability, compile, compiled", [
    ((6, 0), "auto", False), ((7, 0), "auto", False), ((7, 5), "auto", False), ((8, 0), "auto", True),
    ((7, 0), "True", True), ((6, 0), "True", False), ((9, 0), "False", False)])
def test_blocks_are_compiled_where_that_was_measured(monkeypatch, characters, tmp_path, capability, compile, compiled):
    plan, problems, notes = check(monkeypatch, characters, tmp_path, 1, capability, f"--compile={compile}")
    assert (problems, plan.execution.compile) == ([], compiled)
    lowest = {"auto": "8.0", "True": "7.0", "False": None}[compile]
    told = f"not compiled: compile={compile} needs compute capability {lowest}"
    assert [note for note in notes if "compile" in note] == [told] * (not compiled and compile != "False")


def test_a_v100_trains_in_float16_with_plain_pytorch(monkeypatch, characters, tmp_path):
    """Neither our kernels nor cuDNN's attention, in training and in sampling."""
    plan, problems, notes = check(monkeypatch, characters, tmp_path, 1, (7, 0),
                                  "--deepspeed_config=config/ds/zero0.json")
    assert (problems, plan.execution.dtype, plan.ds_config["fp16"]["enabled"]) == ([], "float16", True)
    assert "loss_scale" not in plan.ds_config["fp16"]  # dynamic
    assert plan.stage == 2 and any("stage 0 runs as stage 2" in note for note in notes)
    on_gpu = SimpleNamespace(is_cuda=True, device="cuda")
    assert not device_has_triton(on_gpu) and SDPBackend.CUDNN_ATTENTION not in attention_backends("cuda")
    assert [*attention_backends("cuda")][-2:] == [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    for arg, words in (("--fp8=True", "fp8=True needs compute capability 9.0"),
                       ("--dtype=bfloat16", "dtype=bfloat16 needs compute capability 8.0, but Tesla V100 has less: use "
                        "--dtype=float16 or --dtype=auto")):
        _, (problem,), _ = check(monkeypatch, characters, tmp_path, 1, (7, 0), arg)
        assert problem.startswith(words)


LORA = "{weights}/tiny --block_size=16 --lora_rank"
TARGETS = "choose from a block's matrices, attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj"


@pytest.mark.parametrize("args, told", [
    ("--max_epochs=0 --eval_epochs=-1.0", "max_epochs=0 must be above 0|eval_epochs=-1 must be above 0"),
    ("--max_epochs=1e308 --n_embd=2e20 --n_layer=4096", "n_embd=200000000000000000000 must be below 1,048,576|"
     "n_layer=4096 must be below 4,096|max_epochs=1e+308 must be below 9,223,372,036,854,775,808"),
    ("--max_epochs=1e999 --batch_size=0", "max_epochs=inf must be a finite number|batch_size=0 must be at least 1"),
    ("--lr_decay_iters=-5", "lr_decay_iters=-5 must be at least 0"),
    ("--min_lr=1", "min_lr=1.0 must be between 0 and learning_rate=0.001"),
    ("--block_size=0", "block_size=0 must be at least 1|block_size=0 must be a positive integer"),
    ("--warmup_iters=3 --lr_decay_iters=2", "warmup_iters=3 is above lr_decay_iters=2: lower the first or "),
    ("--warmup_iters=3 --lr_decay_iters=2 --lr_schedule=constant", ""),
    ("--sample_interval=1 --sample_start=É", "the character 'É' (U+00C9) is not one of the 28 that this character "
     "dataset knows"),
    (f"{LORA}=4 --lora_target_modules=", f"lora_target_modules names nothing: {TARGETS}"),
    (f"{LORA}=4 --lora_target_modules=mlp.c_fc,c_attn", f"lora_target_modules names c_attn: {TARGETS}"),
    (f"{LORA}=-1 --lora_alpha=-2.0 --lora_dropout=1.5", "lora_rank=-1 must be at least 0|"
     "lora_alpha=-2 must be above 0|lora_dropout=1.5 must be at least 0 and below 1"),
    ("--lora_target_modules=attn.c_attn", "lora_target_modules=attn.c_attn needs LoRA: add --lora_rank=64, or drop it"),
    ("--lora_alpha=8.0", "lora_alpha=8.0 and lora_dropout=0.0 need LoRA: add --lora_rank=64, or drop them"),
    ("--lora_rank=4", "lora_rank=4 needs pretrained weights, but init_from=scratch: name some with --init_from"),
    ("--init_from=scratch --init_from=auto --lora_rank=4", "lora_rank=4 needs pretrained weights, but init_from=auto "
     "starts from scratch here: set init_from to some in the config"),
    ("--init_from={holder}/iter_9", "init_from={holder}/iter_9 is unknown: give scratch, resume, auto, gpt2, "
     "gpt2-medium, gpt2-large, gpt2-xl, a folder of weights, the out_dir of an earlier run, or a nanoGPT ckpt.pt"),
    ("--init_from={folder}/tiny --block_size=16", "determines the shape: drop them, or add --init_from=scratch"),
    ("{weights}/tiny --block_size=16 --dataset={folder}/wide", "/tiny has 28: prepare the data with the weights' "
     "tokenizer"),
    ("--skip_grad_spikes=True --dtype=bfloat16 --deepspeed_config={folder}/offload3.json",
     "skip_grad_spikes=True needs bfloat16 or float32, and no offload at ZeRO-3: drop it"),
    ("--dtype=bfloat16 --deepspeed_config={folder}/bf16sums.json",
     '"data_types.grad_accum_dtype" is "bf16": write "fp32"'),
    ("--skip_grad_spikes=True", ""),
    *((f"--optimizer=muon --deepspeed_config={{folder}}/{name}.json", f"{name}.json in float32: use bfloat16 or "
       "float32 with --deepspeed_config=ds_config_zero2.json, or start a run with --optimizer=adamw and")
      for name in ("zero3", "offload")),
    ("--optimizer=muon --learning_rate=0.0", "optimizer=muon needs a learning_rate above 0: muon_learning_rate "),
    (f"{LORA}=4 --optimizer=muon", "optimizer=muon trains whole matrices, but lora_rank=4: drop one of the two"),
    ("--optimizer=muon", ""), ("--dtype=float16", "dtype=float16 needs a GPU: use --dtype=float32 or --dtype=bfloat16"),
    ("--device=cuda", "device=cuda, but PyTorch finds no CUDA GPU: use --device=cpu"),
    ("--fp8=True", "fp8=True needs compute capability 9.0 (H100, H200, B200, ...), bfloat16, compile=auto, a C comp"),
    ("--backend=nccl", "backend=nccl needs GPUs: use --backend=auto"),
    ("--target_gpu=-24 --dry_run=True", "target_gpu=-24 is unknown: give a number of GB, or one of T4,"),
    ("--target_gpu=24", "target_gpu=24.0 only estimates: add --dry_run=True"),
    ("--target_gpu=T4 --dry_run=True --dtype=bfloat16", "dtype=bfloat16 needs compute capability 8.0, but target_gpu="),
    ("--profile=True --max_iters=6", "profile=True traces the 6th and 7th step, but max_iters=6: use --max_iters=7"),
    ("--dataset={{1:0.5}}", "dataset={{1: 0.5}} is not a mixture: write {{'name': 0.3, 'other': 0.7}}, all above 0"),
    ("--out_dir={holder}/iter_4", "iter_4 is a checkpoint of a run: choose another with --out_dir=DIR"),
    ("--out_dir=", "cannot be written: choose another with --out_dir=DIR"),
    ("--out_dir={folder}/nowhere/run", "/nowhere is a link to /no/such/disk, which does not exist: create that folder "
     "or mount its disk, or choose another --out_dir=DIR"),
    ("--out_dir={folder}/run[1]", "run[1] has *, ? or [ in it, which DeepSpeed expands: choose another with "
     "--out_dir=DIR"),
    ("--out_dir={folder}/odd", "odd/history.jsonl cannot be read and written: fix that, or choose another --out_dir"),
    ("--out_dir={holder} --init_from={holder} --overwrite=True", "overwrite=True would delete init_from={holder}: c"),
    ("--init_from=auto --overwrite=True", "overwrite=True deletes nothing if init_from=auto resumes the newest"),
    ("--out_dir={holder} --init_from=resume --resume_tag=", "has no complete checkpoint '': choose from iter_2, ite"),
    ("--out_dir={holder} --init_from=resume --resume_tag=iter_3", "has no complete checkpoint 'iter_3': choose from "
     "iter_2, iter_4, best, final"),
    ("--resume_tag=iter_4", "resume_tag=iter_4 is for resuming: add --init_from=resume, or drop it"),
    ("--init_from=auto --resume_tag=iter_4", "out has no checkpoint: choose another folder with --out_dir=DIR"),
    ("--out_dir={holder} --init_from=resume --n_embd=64", "iter_4 holds a model of another shape: use --n_embd=32")])
def test_what_cannot_be_meant(monkeypatch, characters, tmp_path, folder, holder, args, told):
    _, problems, _ = check(monkeypatch, characters, tmp_path, 0, None, *words_of(args, holder, folder))
    told = told.format(holder=holder).split("|") if told else []
    assert len(problems) == len(told) and all(words in problem for words, problem in zip(told, problems)), problems


@pytest.mark.parametrize("args, note", [
    ("--max_iters=4", None), ("--lr_decay_iters=4", None),
    ("--decay_lr=False --lr_decay_iters=9 --warmup_iters=9", None),
    ("--lr_schedule=constant --lr_decay_iters=9 --warmup_iters=2", None),
    ("--lr_decay_iters=9", "the learning rate reaches min_lr after 9 iterations (lr_decay_iters), but the run has 4"),
    ("--lr_decay_iters=3 --max_epochs=0.1", "the learning rate reaches min_lr after 3 iterations (lr_decay_iters), but "
     "the run has 15"),
    ("--warmup_iters=4", "the run ends after 4 iterations, during warmup: it never reaches learning_rate "
     "(warmup_iters=4)")])
def test_a_learning_rate_that_does_not_end_with_the_run_is_told_of(monkeypatch, characters, tmp_path, args, note):
    """561 windows in steps of 4: 0.1 epochs are 15."""
    plan, problems, notes = check(monkeypatch, characters, tmp_path, 0, None, *args.split())
    assert problems == [] and [n for n in notes if "max_epochs" not in n] == [note] * bool(note)


def test_evaluations_by_epochs_follow_the_iteration_that_completes_the_epochs():
    """Against fractions. 35 steps of 3 are 15 epochs of 7 windows, where 35 / (7 / 3) is below 15."""
    for epochs in ("1", "0.5", "0.1", "2"):
        settings = settings_of_script(SCRIPT, [f"--eval_epochs={float(epochs)}"])
        for windows, sequences in itertools.product((7, 25, 100, 561, 9999), (1, 3, 8, 12, 64, 128)):
            s = plan_iterations(settings, windows, SimpleNamespace(sequences=sequences), [])
            per_eval = Fraction(epochs) * windows / sequences
            assert [evaluations_through(it, s) for it in range(600)] == [it // per_eval for it in range(600)]


def test_a_dataset_may_lie_elsewhere_on_another_node(monkeypatch, characters, tmp_path):
    plan, *_ = check(monkeypatch, characters, tmp_path, 0, None)
    facts = []
    for root, size in (("/a", 1), ("/b", 1), ("/b", 2)):
        meta = {"tokenizer": {"kind": "hf", "sha256": "0", "file": f"{root}/tokenizer.json"}, "train_tokens": size}
        datasets = [plan.datasets[0]._replace(folder=root, meta=meta)]
        facts.append(nodes.fingerprint(replace(plan, datasets=datasets, settings=replace(plan.settings, dataset=root))))
    assert facts[0] == facts[1] != facts[2]


@pytest.mark.parametrize("value", ["1m", "0", "-5", "1.5", "", "100000"])
def test_a_timeout_that_is_none_is_refused(train, monkeypatch, characters, tmp_path, value):
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", value)
    _, problems, _ = check(monkeypatch, characters, tmp_path, 0, None)
    assert problems == ["DEEPSPEED_TIMEOUT in the environment must be 1 to 99999 minutes: export DEEPSPEED_TIMEOUT=10"]
    if value == "1m":
        run = train(DEEPSPEED_TIMEOUT=value)
        assert (run.returncode, run.stderr) == (2, problems[0] + "\n")


def test_problems_of_all_kinds_are_told_together(monkeypatch, characters, tmp_path):
    (tmp_path / "ds.json").write_text('{"foo": 1}')
    _, problems, _ = check(monkeypatch, characters, tmp_path, 0, None, "--block_size=2500", "--n_head=3",
                        f"--deepspeed_config={tmp_path}/ds.json", "--eval_iters=0")
    words = ["eval_iters=0 must be at least 1", '"foo" is not supported: remove it', "val.bin has 2000 tokens",
             "n_embd=32 is not divisible by n_head=3: change one of them"]
    assert [next(w for w in words if w in problem) for problem in problems] == words


NUMBERS = (*itertools.chain(*AT_LEAST.values()), *ABOVE_ZERO, *BELOW_ONE, "n_layer", "n_head", "n_embd", "min_lr")
EPOCHS = ("--max_epochs=1", "--eval_epochs=1")


@pytest.mark.parametrize("others", [(), EPOCHS], ids=["iterations", "epochs"])
@pytest.mark.parametrize("start", ["scratch", "resume", "earlier run"])
def test_a_number_out_of_its_range_is_a_sentence(monkeypatch, characters, tmp_path, holder, start, others):
    """Each setting below its range, from scratch, at a resume and in a new stage, also with epochs."""
    from_where = {
        "scratch": (),
        "resume": ("--init_from=resume", f"--out_dir={holder}"),
        "earlier run": (*NO_SHAPE, f"--init_from={holder}"),
    }
    assert len(NUMBERS) >= 31
    wrong = {}
    for name in NUMBERS:
        if name in ("n_layer", "n_head", "n_embd") and start != "scratch":
            continue  # they have to be those of the weights
        values = ["-5"]
        if name not in AT_LEAST[0] and name not in BELOW_ONE and name != "min_lr":
            values.append("0")
        for value in values:
            setting = f"--{name}={value}"
            words = (*from_where[start], *others, setting)
            try:
                plan, problems, _ = check(monkeypatch, characters, tmp_path, 0, None, *words)
            except Exception as error:
                wrong[setting] = repr(error)
            else:
                told = [problem for problem in problems if name in problem and value in problem]
                if plan is not None or not told or len(set(problems)) != len(problems):
                    wrong[setting] = problems
    assert wrong == {}


# Tags that the system does not let us read: nobody knows whether they are whole

STALE = """
import builtins, errno, io
def stale(function):
    def checked(path, *args, **kwargs):
        if str(path).startswith({bad!r}):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return function(path, *args, **kwargs)
    return checked
os.stat, os.open, builtins.open, io.open = map(stale, (os.stat, os.open, open, io.open))  # pathlib takes io.open
"""


@pytest.mark.parametrize("bad", [["iter_4"], ["iter_2", "iter_4", "best", "final"]], ids=["the newest", "all"])
def test_a_tag_that_cannot_be_read_ends_the_search(holder, characters, tmp_path, bad):
    """A stale file handle, as NFS gives. An older tag is not taken instead, no new run begins, nothing is renamed."""
    out_dir = shutil.copytree(holder, tmp_path / "out")
    script = planted(tmp_path, STALE.format(bad=tuple(str(out_dir / tag) for tag in bad)))
    before = fingerprint(out_dir)
    run = launch(script, *SMALL, f"--dataset={characters}", f"--out_dir={out_dir}", "--init_from=auto", "--max_iters=6")
    (line,) = run.stderr.splitlines()
    assert run.returncode == 2 and line == (f"{out_dir}/iter_4/manifest.json cannot be read (Stale file handle): fix "
                                            "that, or choose another checkpoint (--resume_tag or --tag)"), run.stdout
    assert fingerprint(out_dir) == before


def deny(monkeypatch, function, path):
    """From now on os.`function` refuses this path."""
    allowed = getattr(os, function)

    def denied(where, *args, **kwargs):
        if str(where) == str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(where))
        return allowed(where, *args, **kwargs)

    monkeypatch.setattr(os, function, denied)


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(monkeypatch, characters, tmp_path, holder):
    out_dir = shutil.copytree(holder, tmp_path / "out")
    deny(monkeypatch, "listdir", out_dir)
    plan, problems, notes = check(monkeypatch, characters, tmp_path, 0, None, "--init_from=auto")
    assert problems == [f"{out_dir} cannot be listed (Permission denied): fix that, or choose another --out_dir=DIR"]


def test_a_tag_that_cannot_be_looked_at_is_present_and_not_set_aside(monkeypatch, tmp_path, holder):
    out_dir = shutil.copytree(holder, tmp_path / "out")
    store = checkpoint.TagStore(out_dir)
    deny(monkeypatch, "stat", out_dir / "iter_4" / "manifest.json")
    store.remove_leftovers()
    assert store.list() == ["iter_2", "iter_4", "best", "final"]
    assert checkpoint.parse_run_path(out_dir / "iter_4") == (str(out_dir), "iter_4")


def test_a_file_that_cannot_be_looked_at_is_not_missing(monkeypatch, holder):
    _, manifest = checkpoint.TagStore(holder).find("iter_4")
    deny(monkeypatch, "open", holder / "iter_4" / next(iter(manifest["files"])))
    with pytest.raises(PermissionError):
        verify_files(holder / "iter_4", manifest["files"])
