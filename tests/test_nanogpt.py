"""nanoGPT's files work as they are: its ckpt.pt, its configuration, its prepared data."""

import json
import pickle
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CHARS, NO_SHAPE, ROOT, Payload, done, launch, random_gpt2, read_history
from torch.torch_version import TorchVersion

from configurator import settings_of_script
from model import GPT, GPTConfig
from runtime.data.sequences import TokenStream
from runtime.errors import UserError
from runtime.sample.source import data_of_weights, find_model

SETTINGS = """
# train a miniature model
import time

out_dir = {out_dir!r}
eval_interval = 2
eval_iters = 2
log_interval = 1
eval_only = False
always_save_checkpoint = False
wandb_log = False # override via command line if you like
wandb_project = 'letters'
wandb_run_name = 'mini-gpt-' + str(time.time())
dataset = {dataset!r}
gradient_accumulation_steps = 2
batch_size = 2
block_size = 32
n_layer = 2
n_head = 2
n_embd = 32
dropout = 0.1
learning_rate = 1e-3
max_iters = 4
lr_decay_iters = 4
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 2
weight_decay = 1e-1
decay_lr = True
grad_clip = 1.0
backend = 'gloo'
device = 'cpu'
dtype = 'float32'
compile = False
"""


def reference(bias=True, vocab_size=28, n_embd=32):
    """transformers' GPT-2 with nanoGPT's exact GELU; without biases they are zero."""
    theirs = random_gpt2(0.2, vocab_size=vocab_size, n_positions=32, n_embd=n_embd, activation_function="gelu",
                         bos_token_id=0, eos_token_id=None)
    for name, p in theirs.named_parameters():
        if not bias and name.endswith("bias"):
            p.data.zero_()
    return theirs


def write_checkpoint(path, theirs, bias=True, prefix="_orig_mod.", change=lambda checkpoint: None):
    """What nanoGPT's train.py saves of this model: its names, linear layers as torch.nn.Linear has them (transformers'
    are transposed), model_args, the optimizer's state, and its settings."""
    tensors, c = {}, theirs.config
    for name, w in theirs.state_dict().items():
        if bias or not name.endswith("bias"):
            transposed = name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight"))
            tensors[prefix + name] = w.t().contiguous() if transposed else w
    checkpoint = {
        "model": tensors, "optimizer": torch.optim.AdamW(theirs.parameters()).state_dict(),
        "model_args": {"n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "block_size": c.n_positions,
                       "bias": bias, "vocab_size": c.vocab_size, "dropout": 0.0},
        "iter_num": 7, "best_val_loss": torch.tensor(3.25), "config": {"dataset": "letters", "learning_rate": 1e-3}}
    change(checkpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint, path)
    return path


@pytest.fixture(scope="module")
def nanogpt(tmp_path_factory, characters):
    """A folder as nanoGPT's, with data/letters as its prepare.py leaves it, and out-letters/ckpt.pt of reference()."""
    root = tmp_path_factory.mktemp("nanoGPT")
    data = root / "data" / "letters"
    data.mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        shutil.copy(characters / name, data / name)
    (data / "meta.pkl").write_bytes(pickle.dumps({
        "vocab_size": len(CHARS), "itos": dict(enumerate(CHARS)), "stoi": {c: i for i, c in enumerate(CHARS)}}))
    write_checkpoint(root / "out-letters" / "ckpt.pt", reference(bias=False), bias=False)
    return root


@pytest.mark.parametrize("bias, prefix, vocab_size", [(True, "", 28), (False, "_orig_mod.", 28), (False, "", 50304)])
def test_logits_of_a_checkpoint_are_those_of_transformers(tmp_path, monkeypatch, bias, prefix, vocab_size):
    theirs = reference(bias, vocab_size, n_embd=8 if vocab_size > 28 else 32)
    path, load, loaded = str(write_checkpoint(tmp_path / "ckpt.pt", theirs, bias, prefix)), torch.load, []
    monkeypatch.setattr(torch, "load", lambda *args, **options: loaded.append(args) or load(*args, **options))
    ours = GPT.from_pretrained(path).eval()
    assert len(loaded) == 1
    idx = torch.randint(28, (3, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = theirs(idx).logits
        assert ours(idx).shape == wanted.shape and wanted.std() > 0.5
        torch.testing.assert_close(ours(idx), wanted, atol=1e-5, rtol=1e-5)
        ours.crop_vocab_size(27)
        torch.testing.assert_close(ours(idx % 27), theirs(idx % 27).logits[..., :27], atol=1e-5, rtol=1e-5)
    assert bool([name for name, _ in ours.named_parameters() if name.endswith("bias")]) == bias
    assert data_of_weights(path, 50304) == {"tokenizer": {"kind": "gpt2"}, "vocab_size": 50257}


def test_training_goes_on_from_a_checkpoint_and_it_is_sampled_from(nanogpt, train, monkeypatch):
    """The loss before the first step is that of transformers, and so is the likeliest text."""
    path, theirs = nanogpt / "out-letters" / "ckpt.pt", reference(bias=False)
    run = done(train(f"--init_from={path}", f"--dataset={nanogpt / 'data' / 'letters'}", "--max_iters=2", *NO_SHAPE,
                     "--bias=True"))
    tokens = torch.from_numpy(np.fromfile(nanogpt / "data" / "letters" / "val.bin", np.uint16).astype(np.int64))
    windows = torch.stack([tokens[start:start + 33] for start in TokenStream(tokens, 32).eval_places(4)])
    with torch.no_grad():
        losses = F.cross_entropy(theirs(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten())
        greedy = theirs.generate(torch.tensor([[CHARS.index(c) for c in "the"]]), do_sample=False, max_new_tokens=25,
                                 pad_token_id=0)
    assert run.evals[0][1] == pytest.approx(losses.item(), abs=1e-5)
    assert run.losses[2] < run.losses[1]
    sampled = launch(ROOT / "sample.py", f"--init_from={path}", f"--dataset={nanogpt / 'data' / 'letters'}",
                     "--start=the", "--temperature=0", "--num_samples=1", "--max_new_tokens=25")
    text = "".join(CHARS[i] for i in greedy[0].tolist())
    assert sampled.stdout == f"{path}: 26,656 parameters\n\n{text}\n"
    notes = sampled.stderr.count("CVE-2026-24747")  # of an old PyTorch, and nothing else
    assert notes == len(sampled.stderr.splitlines()) == (TorchVersion(torch.__version__) < "2.10")
    again = done(launch(ROOT / "sample.py", f"--out_dir={run.out_dir}", "--max_new_tokens=5"))
    assert "after 2 iterations" in again.stdout

    # Weights are rounded for sampling. A table is not, as DeepSpeed trains
    build = GPT.__init__
    def with_table(self, config):
        build(self, config)
        self.register_buffer("table", torch.full((3,), 1 / 3), persistent=False)
    monkeypatch.setattr(GPT, "__init__", with_table)
    _, _, _, load = find_model("resume", str(run.out_dir), None, None)
    model = load("cpu", torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.table.dtype == torch.float32 and model.table[0] == torch.tensor(1 / 3)


@pytest.mark.parametrize("change, words", [
    (lambda c: c.pop("model_args"), "is not a nanoGPT ckpt.pt (KeyError: 'model_args')"),
    (lambda c: c["model_args"].update(n_head=3), " cannot be read (ValueError: n_embd=32 is not divisible"),
    (lambda c: c["model"].update({"_orig_mod.transformer.ln_f.weight": torch.ones(32).char()}), "is not one of floati"),
    (lambda c: c["model_args"].update(rope_base=50.0), " was trained with rope_base=50.0, and GPTConfig has no such"),
    (lambda c: c["model_args"].update(ids=torch.ones(2)), "is not a nanoGPT ckpt.pt (TypeError: model_args has a Tens"),
    (lambda c: c["model_args"].update(n_layer=1), ": the model has no tensor transformer.h.1.ln_1.weight"),
    (lambda c: c["model"].update({"_orig_mod.lm_head.weight": torch.zeros(28, 32)}), ": lm_head.weight is not tied"),
], ids=["no args", "heads", "int8", "own field", "no value", "more", "untied"])
def test_another_kind_of_checkpoint_is_refused(tmp_path, change, words):
    path = write_checkpoint(tmp_path / "ckpt.pt", reference(), change=change)
    with pytest.raises(UserError) as error:
        GPT.from_pretrained(str(path))
    assert str(error.value).startswith(str(path)) and words in str(error.value) and "\n" not in str(error.value)


def test_a_field_of_an_edited_nanogpt_is_read(tmp_path):
    """Its default in GPTConfig is not taken."""
    @dataclass
    class Edited(GPTConfig):
        rope_base: float = 10_000.0

    path = write_checkpoint(tmp_path / "ckpt.pt", reference(), change=lambda c: c["model_args"].update(rope_base=50.0))
    config = Edited.from_weights(str(path))
    assert config.rope_base == 50.0 and config.n_embd == 32 and config.gelu == "none"
    assert GPT.from_pretrained(str(path), config=Edited()).config.rope_base == 50.0


def test_buffers_stay_in_float32_when_weights_are_rounded(tmp_path):
    """As DeepSpeed trains."""
    class WithTable(GPT):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("table", torch.full((3,), 1 / 3), persistent=False)

    path = write_checkpoint(tmp_path / "ckpt.pt", reference())
    model = WithTable.from_pretrained(str(path), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.table.dtype == torch.float32 and model.table[0] == torch.tensor(1 / 3)

    # If the file has the table, because the edited nanoGPT saved it, it is taken
    own = torch.tensor([1.0, 2.0, 3.0])
    path = write_checkpoint(tmp_path / "own.pt", reference(), change=lambda c: c["model"].update(table=own))
    assert WithTable.from_pretrained(str(path)).table.equal(own)
    path = write_checkpoint(tmp_path / "bad.pt", reference(), change=lambda c: c["model"].update(table=own[:2]))
    with pytest.raises(UserError, match=r"bad.pt: table has shape \(2,\), not \(3,\)$"):
        WithTable.from_pretrained(str(path))


def test_a_strangers_checkpoint_does_not_run_its_code(nanogpt, train, tmp_path):
    """Nor does pytorch_model.bin, also in the format from before zip, which cannot be looked into."""
    payload = Payload(tmp_path / "mark")
    path = write_checkpoint(tmp_path / "ckpt.pt", reference(), change=lambda c: c.update(config=payload))
    bin_folder = tmp_path / "folder"
    reference().save_pretrained(bin_folder)
    (bin_folder / "model.safetensors").unlink()
    torch.save({"wte": payload}, bin_folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    sampled = launch(ROOT / "sample.py", f"--init_from={path}")
    trained = train(f"--init_from={path}", *NO_SHAPE)
    for run in (sampled, trained):
        assert run.returncode == 2 and run.stderr == (
            f"{path} cannot be read (it is damaged, or contains what could run code): "
            "fetch it again, or choose other weights with --init_from=PATH\n")
    with pytest.raises(UserError, match="is damaged, or contains what could run code"):
        GPT.from_pretrained(str(bin_folder))
    assert not (tmp_path / "mark").exists()
    torch.load(path, weights_only=False)  # it would have
    assert (tmp_path / "mark").exists()


def test_a_config_and_data_of_nanogpt_run_as_they_are(nanogpt, train, tmp_path):
    """From its file alone, without a meta.json: the same losses as by our own settings and data."""
    (tmp_path / "train_letters.py").write_text(SETTINGS.format(out_dir=str(tmp_path / "out-letters"),
                                                               dataset=str(nanogpt / "data" / "letters")))
    run = done(launch(ROOT / "train_deepspeed.py", "config/nanogpt.py", tmp_path / "train_letters.py"))
    assert "letters has no meta.json: assuming the char tokenizer" in run.stdout
    assert "26,656 parameters from scratch" in run.stdout and not (nanogpt / "data" / "letters" / "meta.json").exists()
    ours = done(train("--bias=False", "--dropout=0.1", "--lr_decay_iters=4", "--min_lr=1e-4", "--beta2=0.99",
                      "--warmup_iters=2"))
    history = read_history(tmp_path / "out-letters")
    assert {r["iter"]: r["loss"] for r in history if "loss" in r} == ours.losses and list(ours.losses) == [1, 2, 3, 4]
    sampled = launch(ROOT / "sample.py", "--out_dir", tmp_path / "out-letters", "--num_samples=1", "--json",
                     "--max_new_tokens=20")
    assert set(json.loads(sampled.stdout)["text"]) <= set(CHARS)


@pytest.mark.parametrize("text, changed", [
    ("init_from = 'gpt2-xl'\nbatch_size = 8\neval_iters = 500\neval_only = True\nwandb_log = False\n",
     {"init_from": "gpt2-xl", "eval_only": True, "dataset": "openwebtext"}),  # config/eval_gpt2_xl.py
    ("batch_size = 12\nblock_size = 1024\ngradient_accumulation_steps = 5 * 8\nmax_iters = 600000\n"
     "eval_interval = 1000\nlr_decay_iters = 600000\neval_iters = 200\nlog_interval = 10\nweight_decay = 1e-1\n",
     {"init_from": "scratch", "learning_rate": 6e-4, "warmup_iters": 2000, "min_lr": 6e-5}),  # config/train_gpt2.py
], ids=["eval_gpt2_xl", "train_gpt2"])
def test_nanogpts_defaults_stand_behind_its_files(tmp_path, text, changed):
    (tmp_path / "theirs.py").write_text(text)
    arguments = ["config/nanogpt.py", str(tmp_path / "theirs.py")]
    settings = vars(settings_of_script(str(ROOT / "train_deepspeed.py"), arguments))
    assert {name: settings[name] for name in changed} == changed and settings["bias"] is False
