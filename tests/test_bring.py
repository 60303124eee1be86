"""A model.py of others, brought/model.py with nanoGPT's interface: in the place of ours, or named in
runtime/chosen_model.py. It trains as in plain PyTorch, or one sentence says what is missing.
"""

import importlib.util
import json
import math
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CHARS, ROOT, SMALL, done, every, launch, read_history, stage
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import GPT, GPTConfig
from runtime import lora
from runtime.bring import adapted
from runtime.check.short import check_before_training
from runtime.data.loader import BatchSizes, locate_sequences, read_sequences
from runtime.data.sequences import TokenStream
from runtime.errors import UserError
from runtime.hardware import Execution
from runtime.plan.memory import MemoryInputs, ParamCount, loss_bytes

STEPS = 6
SEQUENCES = 8  # of a step, over all ranks
BROUGHT = ROOT / "tests" / "brought" / "model.py"
PROMPT = "the cat"
NEW_TOKENS = 40  # with the prompt more than block_size
IMPORT = "from model import GPT, GPTConfig"


@pytest.fixture
def project(tmp_path) -> Callable[..., Path]:
    """project(*edits): a copy of the programs with this model.py in the place of ours, and edits."""

    def copy(*edits: tuple[str, str]) -> Path:
        for name in ("runtime", "config"):
            shutil.copytree(ROOT / name, tmp_path / name)
        for path in [*ROOT.glob("*.py"), *ROOT.glob("*.json")]:
            shutil.copy2(path, tmp_path)
        text = BROUGHT.read_text(encoding="utf-8")
        for old, new in edits:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (tmp_path / "model.py").write_text(text, encoding="utf-8")
        return tmp_path

    return copy


def train_in(folder: Path, characters: Path, *args: str, ranks: int = 1, accumulation: int = 2):
    """Run the training script of a folder. Return (how it ended, the losses of its steps)."""
    out_dir = folder / "out"
    ended = launch(
        folder / "train_deepspeed.py",
        *SMALL,
        f"--dataset={characters}",
        f"--out_dir={out_dir}",
        f"--batch_size={SEQUENCES // ranks // accumulation}",
        f"--gradient_accumulation_steps={accumulation}",
        f"--max_iters={STEPS}",
        f"--lr_decay_iters={STEPS}",
        "--eval_interval=3",
        *args,
        ranks=ranks,
        timeout=100,
    )
    losses = [record["loss"] for record in read_history(out_dir) if "loss" in record]
    return ended, losses


def train_plainly(characters: Path, bias: bool = True) -> tuple[list[float], torch.nn.Module]:
    """Train brought/model.py with its own optimizer. Return (the losses, the model)."""
    spec = importlib.util.spec_from_file_location("brought", BROUGHT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(1337)
    config = module.GPTConfig(32, len(CHARS), n_layer=2, n_head=2, n_embd=32, bias=bias)
    model = module.GPT(config)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    tokens = np.memmap(characters / "train.bin", np.uint16, mode="r")
    losses = []
    for step in range(STEPS):
        ids = np.arange(SEQUENCES * step, SEQUENCES * (step + 1))
        located = locate_sequences(ids, [(TokenStream(tokens, 32), 1)], 1337)
        x, y = read_sequences(located, len(CHARS))
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 + 0.5 * (1 + math.cos(math.pi * step / STEPS)) * 9e-4
        _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.eval()


@torch.no_grad()
def likeliest_text(model: torch.nn.Module) -> str:
    """Return what follows PROMPT, by the model's own forward."""
    idx = torch.tensor([[CHARS.index(char) for char in PROMPT]])
    for _ in range(NEW_TOKENS):
        logits, _ = model(idx[:, -32:])
        idx = torch.cat([idx, logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return "".join(CHARS[i] for i in idx[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize("n, other", [(2, 2), every(2, 3), (3, 2), every(3, 3)])
def test_it_trains_resumes_and_is_sampled(project, characters, tmp_path, n, other):
    """On two ranks, then on one, recomputed. Its file is recorded, and what it prints isn't shown."""
    expected, model = train_plainly(characters)
    folder = project()
    half, losses = train_in(folder, characters, stage(n), "--max_iters=3", ranks=2)
    assert losses == pytest.approx(expected[:3], abs=2e-6), half.stderr
    assert "number of parameters" not in half.stdout
    rest = ("--init_from=resume", "--gradient_checkpointing=True")
    resumed, losses = train_in(folder, characters, stage(other), *rest)
    assert losses == pytest.approx(expected, abs=2e-6), resumed.stderr
    assert "note" not in resumed.stderr

    out = f"--out_dir={folder / 'out'}"
    options = ("--temperature=0", "--num_samples=1", f"--max_new_tokens={NEW_TOKENS}", "--json")
    sampled = launch(folder / "sample.py", out, f"--start={PROMPT}", *options, timeout=100)
    assert json.loads(done(sampled).stdout)["text"] == likeliest_text(model)

    (folder / "text").write_text("the cat sat on a mat and saw how seven foxes")
    done(launch(folder / "evaluate.py", out, f"--text={folder / 'text'}", timeout=100))
    done(launch(folder / "export_hf.py", out, f"--to={folder / 'hf'}", timeout=100))
    manifest = json.loads((folder / "out" / "iter_6" / "manifest.json").read_text())
    assert manifest["state"]["model_source"]["file"] == "model.py"


def test_settings_reach_its_configuration(project, characters):
    _, losses = train_in(project(), characters, "--bias=False")
    expected, _ = train_plainly(characters, bias=False)
    assert losses == pytest.approx(expected, abs=2e-6)


def test_it_may_have_another_name(project, characters):
    """The import in runtime/chosen_model.py names it. Our model.py stays where it is."""
    folder = project()
    (folder / "model.py").rename(folder / "model_x.py")
    shutil.copy2(ROOT / "model.py", folder)
    chosen = folder / "runtime" / "chosen_model.py"
    text = chosen.read_text(encoding="utf-8")
    assert text.count(IMPORT) == 1
    chosen.write_text(text.replace(IMPORT, IMPORT.replace("model", "model_x")))
    expected, _ = train_plainly(characters)
    ended, losses = train_in(folder, characters)
    assert losses == pytest.approx(expected, abs=2e-6), ended.stderr


WIDTHS = "config.n_embd, 4 * config.n_embd, bias=config.bias"
FORWARD = "        return logits, F.cross_entropy(logits.flatten(0, 1), targets.view(-1), ignore_index=-1)\n"
MISSING = {  # (edit of the file, or None, settings, the message)
    "weights of GPT-2": (None, ["--init_from=gpt2"], "init_from=gpt2 can't be loaded into model.py"),
    "Muon": (None, ["--optimizer=muon"], "optimizer=muon needs GPT.muon_matrices"),
    "heads": (None, ["--n_head=3"], "AssertionError: assert config.n_embd % config.n_head == 0"),
    "another name": (("class GPTConfig:", "class Config:"), [], "cannot import name 'GPTConfig' from 'model'"),
    "a package": (
        ("@dataclass\n", "import no_such_package\n\n@dataclass\n"),
        [],
        "model.py imports no_such_package, which Python doesn't find",
    ),
    "no dataclass": (("@dataclass\n", ""), [], "GPTConfig of model.py is no dataclass"),
    "a field": (("    dropout: float = 0.0\n", "    drop: float = 0.0\n"), [], "has no GPTConfig.dropout"),
    "no targets": (("idx, targets=None):", "idx):"), [], "has no targets in GPT.forward(idx, targets)"),
    "a state of its own": (
        ("    def crop_block_size(", "    def get_extra_state(self):\n        return 7\n\n    def crop_block_size("),
        [],
        "the model has get_extra_state (GPT), and checkpoints hold parameters and buffers alone",
    ),
    "the loss alone": ((FORWARD, FORWARD.replace("logits, F", "F")), [], "doesn't return the logits of all"),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_one_sentence(project, characters, name):
    edit, arguments, words = MISSING[name]
    folder = project(*[edit] if edit else [])
    ended, losses = train_in(folder, characters, *arguments)
    assert ended.returncode == 2, ended.stderr
    assert not losses
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    (sentence,) = ended.stderr.splitlines()
    assert sentence.count(": ") >= 1


def test_all_ranks_refuse_it_in_one_sentence(project, characters):
    edit, _, words = MISSING["a field"]
    ended, _ = train_in(project(edit), characters, ranks=2)
    assert ended.returncode == 2
    (sentence,) = ended.stderr.splitlines()
    assert words in sentence


def brought_module(folder: Path, *edits: tuple[str, str]):
    """Return brought/model.py with edits as a module."""
    text = BROUGHT.read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "brought_edited.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("brought_edited", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_loss_is_its_own_and_that_of_a_token_is_the_cross_entropy_of_its_logits(tmp_path):
    module = brought_module(tmp_path)
    config = module.GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=16)
    torch.manual_seed(0)
    model = adapted(module.GPT, module.GPTConfig)(config)
    idx = torch.randint(11, (2, 8))
    targets = torch.randint(11, (2, 8))
    targets[0, :5] = -1
    logits = model(idx)
    assert logits.shape == (2, 8, 11)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
    assert torch.allclose(model(idx, targets, "none"), expected)
    assert torch.allclose(model(idx, targets), expected.sum() / 11)  # 11 targets count


AUXILIARY = "F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1) + x.square().mean()"
OTHER_LOSSES = {  # (in the place of the cross-entropy, whether it can be taken over some targets)
    "as it is": (None, True),
    "with an auxiliary loss": (AUXILIARY, True),
    "of capped logits": ("F.cross_entropy(logits.tanh().flatten(0, 1), targets.flatten(), ignore_index=-1)", True),
    "the sum": ("F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction='sum')", False),
    "-1 is an error": ("F.cross_entropy(logits.flatten(0, 1), targets.flatten())", False),
    "-1 is a token": ("F.cross_entropy(logits.flatten(0, 1), targets.flatten() % logits.size(-1))", False),
}


def test_slices_of_longer_sequences_are_taken_as_copies_are(tmp_path):
    """Its loss has targets.view(-1), as nanoGPT's, which a slice of a tensor of several rows refuses."""
    module = brought_module(tmp_path)
    config = module.GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=16)
    torch.manual_seed(0)
    model = adapted(module.GPT, module.GPTConfig)(config).eval()

    # What the doctor trains with
    sequences = torch.randint(11, (2, 9))
    idx, targets = sequences[:, :-1], sequences[:, 1:]
    assert torch.equal(model(idx, targets), model(idx.clone(), targets.clone()))
    # What sampling reads when a prompt is longer than the context
    prompts = torch.randint(11, (2, 12))
    longer = model.generate(prompts, max_new_tokens=2, top_k=1)
    for row in range(2):
        alone = model.generate(prompts[row : row + 1], max_new_tokens=2, top_k=1)
        assert torch.equal(longer[row : row + 1], alone)


@pytest.mark.parametrize("loss", OTHER_LOSSES)
def test_data_with_a_loss_mask_needs_a_mean_over_the_targets(tmp_path, loss):
    text, is_mean = OTHER_LOSSES[loss]
    edits = [(FORWARD, f"        return logits, {text}\n")] if text else []
    module = brought_module(tmp_path, *edits)
    model_class = adapted(module.GPT, module.GPTConfig)
    model = model_class(module.GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=16))
    optimizer = torch.optim.AdamW(model.parameters())
    check_before_training(model, model.config, optimizer, recomputes=False)  # all data is trained without a mask
    if is_mean:
        check_before_training(model, model.config, optimizer, recomputes=False, masked=True)
        return
    with pytest.raises(UserError, match="loss mask .*: give its cross-entropy ignore_index=-1, or train on data"):
        check_before_training(model, model.config, optimizer, recomputes=False, masked=True)


@pytest.mark.parametrize("edit, words", [
    ((f"self.c_fc = nn.Linear({WIDTHS})", f"self.up = nn.Linear({WIDTHS})"),
     "lora_rank needs an nn.Linear mlp.c_fc in each Block, which brought_edited.py doesn't have: name other"),
    ((f"self.c_fc = nn.Linear({WIDTHS})", "self.c_fc = nn.Bilinear(config.n_embd, 1, 4 * config.n_embd)"),
     "lora_rank needs an nn.Linear mlp.c_fc in each Block, but a Bilinear, which brought_edited.py doesn't have"),
    (('"drop": nn', '"dropped": nn'),
     "lora_rank needs transformer.drop, the dropout before its first block, which brought_edited.py doesn't have")])
def test_lora_needs_gpt2s_layers(tmp_path, edit, words):
    module = brought_module(tmp_path, edit)
    model = adapted(module.GPT, module.GPTConfig)(module.GPTConfig(8, 11, n_layer=2, n_head=2, n_embd=16))
    with pytest.raises(UserError, match=words):
        lora.apply(model, {"rank": 2, "alpha": 2.0, "dropout": 0.0, "target_modules": list(lora.TARGET_MODULES)})


def test_ours_is_not_adapted():
    assert adapted(GPT, GPTConfig) is GPT


def test_a_method_that_ours_has_lost_is_named():
    class Lost(nn.Module):
        def forward(self, idx, targets=None, reduction="mean"):
            return idx

    with pytest.raises(UserError, match=r"has no GPT.num_params, GPT.flops_per_token, "):
        adapted(Lost, GPTConfig)


def test_figures_of_a_model_of_others_by_hand(tmp_path):
    """The embedding is tied to the head, so it counts. Positions are only looked up."""
    module = brought_module(tmp_path)
    config = module.GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=16)
    model = adapted(module.GPT, module.GPTConfig)(config)
    body = 12 * 16**2 + 13 * 16 + 2 * 16 + 11 * 16
    assert model.num_params() == body + 8 * 16
    assert model.flops_per_token(4) == 6 * body + 12 * 16 * 4
    decayed, others = model.parameter_groups(0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert sum(p.numel() for p in decayed["params"]) == 12 * 16**2 + 11 * 16 + 8 * 16


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, while they live. peak: the most at one time."""

    def __init__(self):
        super().__init__()
        self.living = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.living:
                    self.living[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.living.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.living.values()))
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_counts_its_whole_logits(tmp_path, dtype):
    """With logits that are nearly all of the memory: 12 bytes each, in forward and backward."""
    module = brought_module(tmp_path)
    config = module.GPTConfig(block_size=64, vocab_size=20_000, n_layer=1, n_head=1, n_embd=4)
    model = adapted(module.GPT, module.GPTConfig)(config).to(dtype)
    idx = torch.randint(20_000, (8, 64))
    with PeakBytes() as measured:
        model(idx, idx).backward()
    execution = Execution("cpu", str(dtype).removeprefix("torch."), False, 0)
    count = ParamCount(model.num_params(), model.num_params(), model.num_params(), 0)
    run = MemoryInputs(config, execution, BatchSizes(8, 1, 1, 64), count, {"zero_optimization": {"stage": 2}},
                       whole_logits=True)
    assert loss_bytes(run) == 8 * 64 * 20_000 * 12
    assert measured.peak == pytest.approx(loss_bytes(run), rel=0.05)


def test_a_plan_knows_that_the_logits_are_whole(project, characters):
    """In a dry run: 2 x 64 positions of 28 characters would be nothing, so the vocabulary is GPT-2's."""
    arguments = ("--dry_run=True", "--device=cpu", "--dtype=float32", "--init_from=scratch", "--dataset=none",
                 "--target_gpu=80", "--batch_size=8", "--block_size=1024")
    told = done(launch(project() / "train_deepspeed.py", *arguments)).stdout
    assert f"{8 * 1024 * 50257 * 12 / 1e9:.2f} GB" in told and " loss\n" in told


@torch.no_grad()
def test_its_context_is_cropped_by_its_own_method(tmp_path):
    """Also its mask, a buffer."""
    module = brought_module(tmp_path)
    config = module.GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=16)
    model = adapted(module.GPT, module.GPTConfig)(config)
    idx = torch.randint(11, (2, 5))
    logits = model(idx)
    with pytest.raises(UserError, match="block_size=9 is above the 8 positions that the model has: use --block_size=8"):
        model.crop_block_size(9)
    model.crop_block_size(5)
    assert model.transformer.wpe.weight.shape == (5, 16)
    assert model.transformer.h[0].attn.bias.shape == (1, 1, 5, 5)
    assert torch.equal(model(idx), logits)
    assert model.generate(idx, 3, temperature=0).shape == (2, 8)


@pytest.mark.every
@pytest.mark.parametrize("arguments", [["--dropout=0.1"], ["--dtype=bfloat16"]])
def test_features_that_need_no_more(project, characters, arguments):
    ended, losses = train_in(project(), characters, *arguments)
    assert len(losses) == STEPS and losses[-1] < losses[0], ended.stderr
