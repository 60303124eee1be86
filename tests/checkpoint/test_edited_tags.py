"""Tags of an edited model.py: ties, buffers, fields of GPTConfig, and the source that they record.

Each run is resumed from two ranks on one. Its losses are those of a run that never stopped.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import CHARS, ROOT, done, edited_script, launch, planted, stage
from edited_model import GRAPHS, HEAD, edited_model

from runtime.checkpoint.load import load_model
from runtime.checkpoint.manifest import sign_manifest
from runtime.checkpoint.tag_reader import TagReader
from runtime.checkpoint.tags import TagStore

# Tables of rotary positions (Su et al., 2021). persistent: whether a state_dict has them
ROPE = """        self.backends = None  # chosen at the first forward on CUDA
        head_size = config.n_embd // config.n_head
        rates = 10000.0 ** (-torch.arange(0, head_size, 2).float() / head_size)
        angles = torch.outer(torch.arange(config.block_size).float(), rates)
        self.register_buffer("cos", angles.cos(), persistent=PERSISTENT)
        self.register_buffer("sin", angles.sin(), persistent=PERSISTENT)

    def rope(self, x, positions):
        cos = self.cos[positions]
        sin = self.sin[positions]
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).type_as(x)
"""
BACKENDS = "        self.backends = None  # chosen at the first forward on CUDA\n"
CONTEXT = "        backends = contextlib.nullcontext()\n"
ROTATE = f"""        if positions is None:
            positions = torch.arange(T, device=x.device)
        q = self.rope(q, positions)
        k = self.rope(k, positions)
{CONTEXT}"""
LN_F = "        x = self.transformer.ln_f(x)\n"

EDITS = {
    "an untied head": [
        (HEAD, f"{HEAD}        self.lm_head.weight = nn.Parameter(torch.empty_like(self.lm_head.weight))\n")
    ],
    "one MLP": GRAPHS["one MLP"],
    "blocks shared in pairs": GRAPHS["blocks shared in pairs"],
    # The position embeddings are used a second time, before the last layer norm
    "positions twice": [
        (HEAD, f"{HEAD}        self.last_positions = nn.Embedding(config.block_size, config.n_embd)\n"
               "        self.last_positions.weight = self.transformer.wpe.weight\n"),
        (LN_F, "        x = self.transformer.ln_f(x + self.last_positions(positions))\n"),
    ],
    "RoPE": [(BACKENDS, ROPE.replace("PERSISTENT", "False")), (CONTEXT, ROTATE)],
    "RoPE, persistent": [(BACKENDS, ROPE.replace("PERSISTENT", "True")), (CONTEXT, ROTATE)],
    # A table that a module has as a plain attribute
    "slopes": [
        (BACKENDS, f"{BACKENDS}        self.slopes = 0.5 ** torch.arange(1.0, config.n_head + 1)\n"),
        (CONTEXT, f"        q = q * self.slopes[:, None, None]\n{CONTEXT}"),
    ],
    # The mean square of the residual stream in training, by which the head's input is divided
    "running statistics": [
        (HEAD, f'{HEAD}        self.register_buffer("mean_square", torch.ones(()))\n'),
        (LN_F, "        if self.training:\n"
               "            self.mean_square.lerp_(x.detach().float().square().mean(), 0.1)\n"
               f"{LN_F}        x = x * self.mean_square.rsqrt()\n"),
    ],
}
LENGTHS = ("--n_layer=4", "--lr_decay_iters=6", "--eval_interval=3", "--keep_last=10")
HALF = ("--max_iters=3",)
WHOLE = ("--max_iters=6",)
SPLIT = {2: ("--gradient_accumulation_steps=2",), 1: ("--gradient_accumulation_steps=4",)}  # by ranks


def ranks_of(edit: str) -> int:
    """Return how many ranks train an edit. Each rank has statistics of its own, and a tag those of rank 0."""
    return 1 if edit == "running statistics" else 2


@pytest.fixture(scope="module")
def module_of(tmp_path_factory):
    """module_of(edit): the model.py of this edit, as a module."""
    modules = {}

    def module(edit):
        if edit not in modules:
            modules[edit] = edited_model(tmp_path_factory.mktemp("edited"), EDITS[edit])
        return modules[edit]

    return module


@pytest.fixture(scope="module")
def folder_of(module_of):
    """folder_of(edit): a folder with the model.py of this edit."""
    return lambda edit: Path(module_of(edit).__file__).parent


@pytest.fixture(scope="module")
def trained(train, folder_of):
    """trained(edit): a run of this edit on two ranks, or one."""
    runs = {}

    def run(edit):
        if edit not in runs:
            n = 2 + list(EDITS).index(edit) % 2
            ranks = ranks_of(edit)
            options = {"ranks": ranks, "plant": plant(folder_of(edit)), "timeout": 100}
            runs[edit] = done(train(*LENGTHS, *WHOLE, *SPLIT[ranks], stage(n), **options))
        return runs[edit]

    return run


def plant(folder: Path) -> str:
    """Return the code that lets a script take the model.py of a folder."""
    return f"sys.path.insert(0, {str(folder)!r})"


def run_script(name: str, folder: Path, tmp_path: Path, *args: str) -> subprocess.CompletedProcess:
    """Run a script of the project that takes the model.py of a folder."""
    place = tmp_path / Path(name).stem
    place.mkdir(exist_ok=True)
    return launch(planted(place, plant(folder), ROOT / name), *args, timeout=100)


def reader_of(out_dir, tag: str) -> TagReader:
    return TagReader(out_dir / tag, TagStore(out_dir).find(tag).manifest)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("edit", EDITS)
def test_a_run_goes_on(train, folder_of, tmp_path, edit, n):
    options = {"plant": plant(folder_of(edit)), "timeout": 100}
    ranks = ranks_of(edit)
    whole = done(train(*LENGTHS, *WHOLE, *SPLIT[ranks], stage(n), ranks=ranks, **options))
    half = done(train(*LENGTHS, *HALF, *SPLIT[ranks], stage(n), ranks=ranks, **options))
    before = shutil.copytree(half.out_dir, tmp_path / "half")

    # On as many ranks, to the last bit
    again = done(train(*LENGTHS, *WHOLE, *SPLIT[ranks], "--init_from=resume", stage(n), ranks=ranks,
                       out_dir=half.out_dir, **options))
    assert again.losses == whole.losses
    ours = reader_of(again.out_dir, "iter_6")
    theirs = reader_of(whole.out_dir, "iter_6")
    for name in theirs.tensors().params:
        for field in theirs.fields(name):
            assert torch.equal(ours.get(name, field), theirs.get(name, field)), (name, field)
    for name, buffer in theirs.buffers.items():
        assert torch.equal(ours.buffers[name], buffer), name

    # On one rank, at the other stage
    one = done(train(*LENGTHS, *WHOLE, *SPLIT[1], "--init_from=resume", stage(5 - n), out_dir=before, **options))
    assert [*one.losses.values()] == pytest.approx([*whole.losses.values()], abs=2e-6)


@pytest.mark.parametrize("edit", EDITS)
def test_a_new_run_starts_from_a_tag(train, trained, folder_of, edit):
    """On one rank: the losses of its first evaluation are those that the tag was saved with."""
    run = trained(edit)
    new = done(train("--n_layer=4", "--max_iters=0", f"--init_from={run.out_dir}/iter_6",
                     plant=plant(folder_of(edit)), timeout=100))
    assert new.evals[0] == pytest.approx(run.evals[6], abs=1e-6)


@pytest.mark.parametrize("edit, notes", [("running statistics", 1), ("RoPE, persistent", 0)])
def test_ranks_with_other_buffers_are_said_once(train, folder_of, edit, notes):
    """Each rank has seen other windows. Two saves."""
    run = done(train(*LENGTHS, *WHOLE, *SPLIT[2], ranks=2, plant=plant(folder_of(edit)), timeout=100))
    assert run.stdout.count("saving checkpoint to") == 2
    said = ("note: the ranks have different buffers (mean_square): checkpoints hold those of rank 0, "
            "which all ranks get at a resume")
    assert run.stdout.count(said) == run.stdout.count("different buffers") == notes


@pytest.mark.parametrize("edit", EDITS)
def test_load_model_has_all_tensors_of_the_tag(trained, module_of, edit):
    """Weights, ties and buffers: those that the tag has, and those that it hasn't."""
    run = trained(edit)
    reader = reader_of(run.out_dir, "iter_6")
    model, _ = load_model(run.out_dir, "iter_6", model_class=module_of(edit).GPT)
    fresh = module_of(edit).GPT(model.config)
    names = dict(fresh.named_parameters(remove_duplicate=False))
    params = dict(model.named_parameters(remove_duplicate=False))
    assert params.keys() == names.keys() == reader.tensors().params.keys()
    for name, param in params.items():
        assert torch.equal(param, reader.get(name)), name
        for other in params:  # shared as in a new model
            assert (param is params[other]) == (names[name] is names[other]), (name, other)
    buffers = dict(model.named_buffers())
    for name, buffer in fresh.named_buffers():
        if "mean_square" in name:
            assert buffers[name] == reader.buffers[name] != 1
        else:
            assert torch.equal(buffers[name], buffer)
    kept = [name for name in model.state_dict() if name not in params]
    assert [*reader.buffers] == kept
    assert (len(kept), len(buffers)) == {
        "RoPE": (0, 8), "RoPE, persistent": (8, 8), "running statistics": (1, 1)}.get(edit, (0, 0))


@pytest.mark.parametrize("edit", EDITS)
def test_a_tag_is_sampled_and_exported_or_refused(trained, module_of, folder_of, tmp_path, edit):
    run = trained(edit)
    model, _ = load_model(run.out_dir, "iter_6", model_class=module_of(edit).GPT)
    ids = [CHARS.index(char) for char in "the "]
    for _ in range(12):  # the likeliest characters, by full logits
        logits = model(torch.tensor([ids]))[0, -1, : len(CHARS)]
        ids.append(int(logits.argmax()))
    options = ("--start=the ", "--temperature=0", "--num_samples=1", "--max_new_tokens=12", "--json")
    sampled = done(run_script("sample.py", folder_of(edit), tmp_path, f"--out_dir={run.out_dir}", "--tag=iter_6",
                              *options))
    assert json.loads(sampled.stdout)["text"] == "".join(CHARS[i] for i in ids[4:])

    exported = run_script("export_hf.py", folder_of(edit), tmp_path, f"--out_dir={run.out_dir}",
                          "--tag=iter_6", f"--to={tmp_path / 'hf'}")
    assert "Traceback" not in exported.stderr
    if edit in ("one MLP", "blocks shared in pairs", "an untied head"):  # transformers' GPT-2 can hold these weights
        assert exported.returncode == 0, exported.stderr
    else:
        assert exported.returncode == 2
        assert len(exported.stderr.strip().splitlines()) == 1, exported.stderr


@pytest.mark.parametrize("edit", ["one MLP", "blocks shared in pairs"])
def test_lora_on_shared_modules(train, trained, module_of, tmp_path, edit):
    """An adapter of a module that blocks share is shared, in training, a resume and a sample."""
    run = trained(edit)
    folder = Path(module_of(edit).__file__).parent
    options = {"plant": plant(folder), "timeout": 100}
    lora = (*LENGTHS, f"--init_from={run.out_dir}/iter_6", "--lora_rank=2", "--learning_rate=1e-2")
    whole = done(train(*lora, *WHOLE, *SPLIT[2], ranks=2, **options))
    half = done(train(*lora, *HALF, *SPLIT[2], ranks=2, **options))
    resumed = done(train(*lora, *WHOLE, *SPLIT[1], stage(3), "--init_from=resume", out_dir=half.out_dir, **options))
    assert [*resumed.losses.values()] == pytest.approx([*whole.losses.values()], abs=2e-6)
    assert whole.losses[6] < whole.losses[1] - 1e-3
    model, _ = load_model(whole.out_dir, "iter_6", model_class=module_of(edit).GPT)
    mlps = [block.mlp.c_fc.weight for block in model.transformer.h]
    assert len(set(mlps)) == (1 if edit == "one MLP" else 2)
    new = done(train("--n_layer=4", "--max_iters=0", f"--init_from={whole.out_dir}/iter_6", **options))
    assert new.evals[0] == pytest.approx(whole.evals[6], abs=2e-6)


SHARED_WEIGHT = [(HEAD, f"""        for block in self.transformer.h:
            block.mlp.c_fc.weight = self.transformer.h[0].mlp.c_fc.weight
{HEAD}""")]


def test_lora_on_a_weight_of_several_modules_is_refused(train, tmp_path):
    """Their adapters differ, so the merged weights would."""
    edited_model(tmp_path, SHARED_WEIGHT)
    out = done(train("--max_iters=1", plant=plant(tmp_path))).out_dir
    run = train(f"--init_from={out}", "--lora_rank=2", plant=plant(tmp_path))
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert run.stderr.strip() == (
        "lora_target_modules names mlp.c_fc, whose weight other modules have, too: leave it out, or share the modules")
    done(train(f"--init_from={out}", "--lora_rank=2", "--lora_target_modules=attn.c_attn", "--max_iters=1",
               plant=plant(tmp_path)))


def test_tables_that_are_not_cropped_are_refused_before_training(train, trained, folder_of):
    """Or else no run could resume from the tags. Tables that a tag doesn't hold may be longer."""
    for edit, code in (("RoPE", 0), ("RoPE, persistent", 2)):
        run = train("--n_layer=4", "--block_size=16", "--max_iters=1", f"--init_from={trained(edit).out_dir}",
                    plant=plant(folder_of(edit)), timeout=100)
        assert run.returncode == code, run.stderr
    assert run.stderr.strip().endswith(
        "transformer.h.0.attn.cos, transformer.h.0.attn.sin, transformer.h.1.attn.cos have another shape than GPT "
        "makes them at block_size=16, so no run could resume: crop them in GPT.crop_block_size")


def test_a_script_that_adds_to_the_model_is_told_who_cannot_load_it(train, tmp_path):
    """It can resume itself. With one weight more, DeepSpeed pads the group of vectors, which it also saves."""
    script = edited_script(tmp_path, ("    model.crop_block_size(block_size)\n", (
        "    model.crop_block_size(block_size)\n    model.last = torch.nn.Linear(n_embd, 1, device=device)\n")))
    whole = done(train("--lr_decay_iters=5", "--max_iters=5", script=script))
    run = done(train("--lr_decay_iters=5", script=script))
    assert "note: the script's model differs from what GPT makes (last.weight, last.bias), so only" in run.stderr
    resumed = done(train("--lr_decay_iters=5", "--max_iters=5", "--init_from=resume", script=script,
                         out_dir=run.out_dir))
    assert resumed.losses == whole.losses and len(whole.losses) == 5
    sampled = launch(ROOT / "sample.py", f"--out_dir={run.out_dir}", "--tag=iter_5", timeout=100)
    assert sampled.returncode == 2
    assert "iter_5 has another model than this program (last.weight, last.bias): model.py wasn't edited since" in (
        sampled.stderr)


# ---------------------------------------------------------------------------------------------
# Tags and another model.py


def test_other_ties_of_the_same_shapes_are_refused(train, trained, tmp_path):
    """Blocks 0, 1 and 3 are one, and block 2: the files hold tensors of the same names as for pairs."""
    folder = tmp_path / "other"
    folder.mkdir()
    (old, new), = EDITS["blocks shared in pairs"]
    edited_model(folder, [(old, new.replace("[i - 1]", "[0]"))])
    run = train("--n_layer=4", "--max_iters=7", "--init_from=resume", plant=plant(folder),
                out_dir=shutil.copytree(trained("blocks shared in pairs").out_dir, tmp_path / "out"))
    assert run.returncode == 2 and "Traceback" not in run.stderr
    message = run.stderr.splitlines()[-1]
    assert "has another model than this program (transformer.h." in message
    assert "restore model.py, which was edited since (GPT.__init__)" in message


ADDED = ("        self.gelu = config.gelu\n", "        self.gelu = config.gelu\n        self.extra = 1\n")
COMMENT = ("        self.gelu = config.gelu\n", "        self.gelu  =  config.gelu  # a comment\n")
NOTE = "note: the model's source differs from the one that {out}/iter_4 was trained with: MLP.__init__"


@pytest.mark.parametrize("edit, noted", [(ADDED, True), (COMMENT, False)], ids=["an edit", "a comment"])
def test_a_note_says_that_the_source_was_edited(train, tmp_path, edit, noted):
    """In a resume, a new run, a sample, an evaluation and an export. Comments don't count."""
    out = done(train("--n_layer=1")).out_dir
    edited_model(tmp_path, [edit])
    (tmp_path / "text").write_text("the cat sat on a mat")
    reads = [
        train("--n_layer=1", f"--init_from={out}/iter_4", "--max_iters=1", plant=plant(tmp_path)),
        *(run_script(name, tmp_path, tmp_path, f"--out_dir={out}", "--tag=iter_4", *args) for name, args in (
            ("sample.py", ["--max_new_tokens=2"]), ("export_hf.py", [f"--to={tmp_path / 'hf'}"]),
            ("evaluate.py", [f"--text={tmp_path / 'text'}"]))),
        train("--n_layer=1", "--init_from=resume", "--max_iters=5", plant=plant(tmp_path), out_dir=out),
    ]
    for read in reads:
        assert read.returncode == 0, read.stderr
        assert read.stderr.count(NOTE.format(out=out)) == noted, read.stderr


def test_a_model_of_another_file_is_named(train, tmp_path):
    """sample.py, evaluate.py and export_hf.py take the file that runtime/chosen_model.py imports."""
    edited_model(tmp_path, EDITS["slopes"])
    (tmp_path / "model.py").rename(tmp_path / "model_slopes.py")
    script = edited_script(tmp_path, ("from runtime.chosen_model import GPT", "from model_slopes import GPT"))
    run = done(train("--n_layer=1", script=script, plant=plant(tmp_path)))
    assert "note: this run trains model_slopes.GPT, and its plan, sample.py, evaluate.py" in run.stderr
    sampled = launch(ROOT / "sample.py", f"--out_dir={run.out_dir}", "--max_new_tokens=2", timeout=100)
    assert sampled.returncode == 2 and not sampled.stdout
    assert sampled.stderr.strip().endswith(
        "was trained with the model of model_slopes.py, and this program takes that of model.py: change the import in "
        "runtime/chosen_model.py to `from model_slopes import GPT, GPTConfig`")


# ---------------------------------------------------------------------------------------------
# Fields of GPTConfig

FIELD = [
    ("    dropout: float = 0.0\n", "    dropout: float = 0.0\n    mlp_ratio: int = 4\n"),
    ("self.c_fc = nn.Linear(config.n_embd, 4 *", "self.c_fc = nn.Linear(config.n_embd, config.mlp_ratio *"),
    ("self.c_proj = nn.Linear(4 *", "self.c_proj = nn.Linear(config.mlp_ratio *"),
]
SETTING = ("bias: bool | None = None", "mlp_ratio: int | None = None  # width\nbias: bool | None = None")


def test_a_setting_with_the_name_of_a_field_is_passed(train, tmp_path):
    """And recorded: a resume needs no setting, and refuses another one."""
    edited_model(tmp_path, FIELD)
    options = {"script": edited_script(tmp_path, SETTING), "plant": plant(tmp_path)}
    run = done(train("--mlp_ratio=2", **options))
    reader = reader_of(run.out_dir, "iter_4")
    assert reader.shapes["transformer.h.1.mlp.c_fc.weight"] == (64, 32)
    assert TagStore(run.out_dir).find("iter_4").manifest["state"]["model"]["mlp_ratio"] == 2
    resumed = done(train("--init_from=resume", "--max_iters=5", out_dir=run.out_dir, **options))
    assert [*resumed.losses] == [1, 2, 3, 4, 5]
    other = train("--init_from=resume", "--mlp_ratio=3", out_dir=run.out_dir, **options)
    assert other.returncode == 2
    assert other.stderr.strip().endswith("iter_5 holds a model of another shape: use --mlp_ratio=2")


def test_a_field_without_a_setting_keeps_its_default(train, tmp_path):
    edited_model(tmp_path, FIELD)
    run = done(train(plant=plant(tmp_path)))
    assert TagStore(run.out_dir).find("iter_4").manifest["state"]["model"]["mlp_ratio"] == 4


def test_a_setting_that_nothing_reads_is_refused(train, tmp_path):
    run = train("--mlp_ratio=2", script=edited_script(tmp_path, SETTING))
    assert run.returncode == 2 and not run.losses
    assert run.stderr.strip() == (
        "mlp_ratio=2 is read by nothing: use mlp_ratio in the training script, add a field mlp_ratio to GPTConfig, or "
        "read settings.mlp_ratio in runtime/")
    done(train("--max_iters=1", script=edited_script(tmp_path, SETTING)))  # at its default, it may wait


def test_a_tag_from_before_a_field_has_its_default(train, tmp_path):
    """With a note. Without a default, or with a field that is gone or of another type, one sentence."""
    old = done(train()).out_dir
    edited_model(tmp_path, FIELD)
    resumed = done(train("--init_from=resume", "--max_iters=5", out_dir=shutil.copytree(old, tmp_path / "a"),
                         plant=plant(tmp_path)))
    assert "iter_4 doesn't record all fields of GPTConfig: taking the default mlp_ratio=4" in resumed.stdout
    sampled = done(run_script("sample.py", tmp_path, tmp_path, f"--out_dir={old}", "--max_new_tokens=2"))
    assert "taking the default mlp_ratio=4" in sampled.stderr
    refused = train("--init_from=resume", "--mlp_ratio=2", "--max_iters=5", out_dir=old, plant=plant(tmp_path),
                    script=edited_script(tmp_path, SETTING))
    assert refused.stderr.strip().endswith("iter_4 holds a model of another shape: use --mlp_ratio=4")

    (tmp_path / "strict").mkdir()
    no_default = [("    n_layer: int = 12\n", "    mlp_ratio: int\n    n_layer: int = 12\n")]
    no_default += [("class GPTConfig:\n    block_size: int = 1024  # longest context, tokens\n    vocab_size: int = "
                    "50257\n", "class GPTConfig:\n    block_size: int\n    vocab_size: int\n"), *FIELD[1:]]
    edited_model(tmp_path / "strict", no_default)
    refused = train("--init_from=resume", "--max_iters=5", out_dir=old, plant=plant(tmp_path / "strict"))
    assert "iter_4 doesn't record mlp_ratio of GPTConfig, which has no default: give it" in refused.stderr
    assert refused.returncode == 2 and "Traceback" not in refused.stderr


@pytest.mark.parametrize("field, value, words", [
    ("mlp_ratio", 4, "was trained with a GPTConfig that has mlp_ratio, and the present one has no such field"),
    ("gelu", 5, "gelu is 5: Input should be a valid string")])
def test_a_field_that_is_gone_is_one_sentence(train, tmp_path, field, value, words):
    out = done(train("--n_layer=1", "--max_iters=1")).out_dir
    path = out / "iter_1" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["state"]["model"][field] = value
    path.write_text(sign_manifest(manifest))
    for run in (train("--n_layer=1", "--init_from=resume", out_dir=out),
                train("--n_layer=1", f"--init_from={out}/iter_1"),
                launch(ROOT / "sample.py", f"--out_dir={out}", "--tag=iter_1", timeout=100)):
        assert run.returncode == 2 and "Traceback" not in run.stderr
        assert words in run.stderr
