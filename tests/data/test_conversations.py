"""Conversations: prepared, packed into rows, and trained on with the mean over the answers' tokens, as in transformers.

Tests with `index` in their name may fetch GPT-2's tokenizer."""

import hashlib
import json
import math
import random
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import NO_SHAPE, ROOT, done, ramp, stage
from transformers import GPT2Config, GPT2LMHeadModel

from model import GPT, GPTConfig
from runtime.checkpoint.tag_reader import TagReader
from runtime.checkpoint.tags import TagStore
from runtime.data.chat import TEMPLATE
from runtime.data.dataset import BEGINS, COUNTS, Dataset, check_dataset, open_tokens, write_dataset
from runtime.data.loader import BatchSizes, TrainBatches, eval_batches
from runtime.data.mixture import open_datasets
from runtime.data.sequences import Conversations, TokenStream, open_sequences
from runtime.engine.forward_backward import loss_of_targets
from runtime.errors import UserError

BLOCK, SHARE, N = 72, 0.2, 120
STEPS = (f"--block_size={BLOCK}", "--max_iters=3", "--eval_interval=1", "--eval_iters=2", "--decay_lr=False",
         "--learning_rate=1e-2", "--grad_clip=0.4")


def conversation(rng, number):
    """A made-up conversation: its line in one of three forms, and its messages [(role, text)]."""
    prompt, answer, again = ("".join(rng.choices("abcde 0", k=rng.randint(1, 12))).strip() or "x" for _ in range(3))
    prompt = f"{prompt}{number}"
    messages = [("user", prompt), ("assistant", answer)]
    if number % 4 == 0:
        return {"prompt": f" {prompt}\n", "completion": f" {answer} "}, messages
    if number % 4 == 1:
        return {"instruction": prompt, "input": "", "output": answer}, messages
    if number % 4 == 2:
        return {"instruction": prompt, "input": "on", "output": answer}, [("user", f"{prompt}\n\non"), messages[1]]
    messages = [("system", "be"), *messages, ("user", "e"), ("assistant", again)]
    return {"messages": [{"role": role, "content": text} for role, text in [*messages, ("user", "?")]]}, messages


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A prepared data set: its folder, and {split: the messages of each conversation}."""
    folder, rng = tmp_path_factory.mktemp("chat"), random.Random(0)
    lines, messages = zip(*(conversation(rng, number) for number in range(N)))
    (folder / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    subprocess.run([sys.executable, ROOT / "data" / "prepare.py", folder / "chat.jsonl", f"--name={folder}/chat",
                    "--format=chat", "--tokenizer=char", f"--val_fraction={SHARE}", "--workers=2"], check=True)
    meta, splits = check_dataset(folder / "chat"), {"train": [], "val": []}
    for own in messages:
        hashed = json.dumps([{"role": role, "content": text} for role, text in own])
        number = int.from_bytes(hashlib.blake2b(hashed.encode(), digest_size=8).digest(), "little")
        splits["val" if number < SHARE * 2**64 else "train"].append(own)
    return SimpleNamespace(folder=folder / "chat", data=Dataset("chat", 1, folder / "chat", meta), **splits)


def as_text(messages):
    """A conversation as docs/chat.md says it: [(character, whether it counts)]."""
    parts = [part for role, text in messages for part in (
        (f"{role.capitalize()}:\n", False), (text + ("\x03" if role == "assistant" else "\n\n"), role == "assistant"))]
    return [(char, counts) for text, counts in parts for char in text]


def test_preparation_writes_the_template_the_answers_and_the_beginnings(chat):
    chars = chat.data.meta["tokenizer"]["chars"]
    assert chars[chat.data.meta["tokenizer"]["end_of_text"]] == "\x03"
    for split in ("train", "val"):
        wanted, begins = [], []
        for messages in getattr(chat, split):
            begins.append(len(wanted))
            wanted += as_text(messages)
        mask = np.fromfile(chat.folder / f"{split}_mask.bin", np.uint8)
        assert [chars[i] for i in open_tokens(chat.data, split)] == [char for char, _ in wanted]
        assert ((mask & COUNTS) > 0).tolist() == [counts for _, counts in wanted]
        assert np.flatnonzero(mask & BEGINS).tolist() == begins and len(begins) > 10
    assert chat.data.meta["documents"]["train"] + chat.data.meta["documents"]["val"] == N


def epoch(chat, steps=None):
    """(rows, batches [(x, y, weight)] of 12 rows, an epoch of them by default)."""
    rows = open_sequences(chat.data, "train", BLOCK)
    batches = TrainBatches([(rows, 1)], 0, BatchSizes(12, 1, 1, BLOCK), 0, 7, 256, "cpu")
    return rows, [batches.next_step(1)[0] for _ in range(steps or len(rows.counts) // 12 + 1)]


def test_an_epoch_has_every_conversation_once_in_rows_of_whole_ones(chat):
    rows, batches = epoch(chat)
    x, y = (torch.cat([batch[i] for batch in batches])[: len(rows.counts)] for i in (0, 1))
    chars = chat.data.meta["tokenizer"]["chars"]
    short = [as_text(messages) for messages in chat.train if len(as_text(messages)) <= BLOCK + 1]
    wanted = {"".join(char for char, _ in text): text for text in short}
    packed, lengths = [], []
    for i in range(len(x)):
        text = "".join(chars[token] for token in [*x[i].tolist(), 0])
        at, row = 0, []
        while at < BLOCK and (here := next((key for key in wanted if text.startswith(key[: BLOCK - at], at)), None)):
            row.append(here)
            for place, (char, counts) in enumerate(wanted[here]):  # the target of the token before it
                if at + place > 0:
                    assert y[i, at + place - 1] == (chars.index(char) if counts else -1)
            at += len(here)
        assert at <= BLOCK + 1 and (y[i, max(0, at - 1) :] == -1).all() or not row
        packed += row
        lengths += [at] if row else []
    assert sorted(packed) == sorted(wanted) and len(wanted) > 60
    assert rows.cut == len(chat.train) - len(short) > 3 and rows.dropped == 0
    assert len(rows.counts) < 0.8 * len(chat.train)  # packed
    assert rows.counts.sum() == (y >= 0).sum()
    again = epoch(chat, steps=2 * (len(rows.counts) // 12 + 1))[1]
    second = torch.cat([batch[0] for batch in again])[len(x) : 2 * len(x)]
    assert not torch.equal(second, x) and sorted(second.tolist()) == sorted(x.tolist())


def test_every_token_of_other_text_counts_in_a_mixture(chat):
    """Of 12 sequences 8 are text of 72 targets each."""
    rows = open_sequences(chat.data, "train", BLOCK)
    text = TokenStream(np.zeros(5000, np.uint16), BLOCK)
    sources, batch = [(rows, 1), (text, 2)], BatchSizes(3, 2, 2, BLOCK)
    ranks = [TrainBatches(sources, 36, batch, rank, 7, 256, "cpu").next_step(2) for rank in (0, 1)]
    counted = torch.cat([(y >= 0).sum(dim=1) for batches in ranks for _, y, _ in batches])
    assert sorted(counted.tolist())[4:] == [72] * 8 and 0 < counted.min() and counted[counted < 72].numel() == 4
    assert {weight.item() for batches in ranks for *_, weight in batches} == {
        torch.tensor(4 / counted.sum().item()).item()}


def test_what_does_not_fit_is_cut_and_what_has_no_answer_left_is_dropped():
    """Four conversations of 3 + 2, 6 + 1, 2 + 7 and 1 + 1 tokens, in rows of 5 + 1."""
    mask = np.array([2, 0, 0, 1, 1, 2, 0, 0, 0, 0, 0, 1, 2, 0, 1, 1, 1, 1, 1, 1, 1, 2, 1], np.uint8)
    rows = Conversations("chat", np.arange(23), mask, 5)
    assert (rows.cut, rows.dropped, sorted(rows.counts)) == (2, 1, [1, 2, 4]) or sorted(rows.counts) == [3, 4]
    packed = {tuple(rows.row(i).tolist()) for i in range(len(rows.counts))}
    assert (~12, ~13, 14, 15, 16, 17) in packed
    with pytest.raises(UserError, match=r"chat has no answer within block_size=1 \(2 conversations\): use a larger -"):
        Conversations("chat", np.arange(12), mask[:12], 1)
    for empty in (mask & 0, mask & 2, mask & 1):
        with pytest.raises(UserError, match=r"chat has no answer within block_size=5 \("):
            Conversations("chat", np.arange(23), empty, 5)


@pytest.fixture(scope="module")
def weights(tmp_path_factory, chat):
    """A GPT-2 of transformers' for the characters of the data, and one position more than the rows."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights") / "tiny"
    GPT2LMHeadModel(GPT2Config(vocab_size=chat.data.meta["vocab_size"], n_positions=96, n_embd=32, n_layer=2, n_head=2,
                               resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).save_pretrained(folder)
    return folder


def steps_of_transformers(chat, weights, sizes):
    """Steps by transformers in plain PyTorch, each one batch of so many rows with labels of -100: losses, norms, and
    the first step's gradients after clipping. sizes: the rows of each step, one after another in the order of an epoch.
    """
    batches = epoch(chat, steps=-(-sum(sizes) // 12))[1]
    all_x, all_y = (torch.cat([batch[i] for batch in batches])[: sum(sizes)] for i in (0, 1))
    model = GPT2LMHeadModel.from_pretrained(weights)
    groups = [{"params": [p for p in model.parameters() if (p.dim() >= 2) == decays], "weight_decay": 0.1 * decays}
              for decays in (True, False)]
    optimizer, losses, norms = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)), [], []
    for x, y in zip(all_x.split(sizes), all_y.split(sizes)):
        rows = torch.cat([x, y[:, -1:].clamp(min=0)], dim=1)
        labels = torch.cat([torch.full_like(y[:, :1], -100), torch.where(y < 0, -100, y)], dim=1)
        loss = model(input_ids=rows, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4).item())
        if not losses:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, gradients


@pytest.fixture(scope="module")
def theirs(chat, weights):
    return steps_of_transformers(chat, weights, [12, 12, 12])


@pytest.mark.parametrize("zero, ranks, batch_size, accumulation", [
    (2, 2, 3, 2), (3, 2, 3, 2), (2, 1, 12, 1), (3, 1, 2, 6)])
def test_a_step_is_the_mean_over_all_counted_tokens(train, chat, weights, theirs, zero, ranks, batch_size,
                                                    accumulation):
    """Seen: losses to 3e-7, norms to 1e-6, gradients to 1e-7 of up to 0.07. The mean of the micro-steps' means is off
    by up to 0.04."""
    losses, norms, gradients = theirs
    run = done(train(stage(zero), *NO_SHAPE, *STEPS, f"--init_from={weights}", f"--dataset={chat.folder}", "--seed=7",
                     f"--batch_size={batch_size}", f"--gradient_accumulation_steps={accumulation}", ranks=ranks))
    assert list(run.losses.values()) == pytest.approx(losses, rel=2e-6)
    assert [r["grad_norm"] for r in run.history if "loss" in r] == pytest.approx(norms, rel=1e-5)
    reader = TagReader(run.out_dir / "iter_1", TagStore(run.out_dir).find("iter_1").manifest)
    for name in reader.shapes:
        mine, wanted = reader.get(name, "exp_avg") / 0.1, gradients[name]
        wanted = wanted.t() if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else wanted
        n = min(len(mine), len(wanted))  # without the vocabulary's padding, and the position that only theirs has
        assert (mine[:n] - wanted[:n]).abs().max() < 1e-6, name


@pytest.mark.parametrize("zero", [2, 3])
def test_a_ramp_is_the_mean_over_the_counted_tokens_of_each_step(train, chat, weights, tmp_path, zero):
    """1, 2 and 3 micro-steps of 6 rows where 2 are planned, on two ranks, then on one. With the planned number in the
    weight, the first loss would be twice as large."""
    losses, norms, _ = steps_of_transformers(chat, weights, [6, 12, 18])
    script = ramp(tmp_path, "iter_num + 1")
    options = (*NO_SHAPE, *STEPS, f"--dataset={chat.folder}", "--seed=7", "--gradient_accumulation_steps=2")
    first = done(train(stage(zero), *options, f"--init_from={weights}", "--batch_size=3", "--max_iters=1", ranks=2,
                       script=script))
    run = done(train(stage(5 - zero), *options, "--init_from=resume", "--batch_size=6", script=script,
                     out_dir=first.out_dir))
    assert list(run.losses.values()) == pytest.approx(losses, rel=2e-6)
    assert [r["grad_norm"] for r in run.history if "loss" in r] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_small_stage_is_the_mean_over_the_counted_tokens_of_each_step(train, chat, weights, zero):
    """Steps of 6, 6 and 12 rows, where 12 are a micro-step. First on two ranks, and after the first step again on
    three at the other ZeRO stage."""
    losses, norms, _ = steps_of_transformers(chat, weights, [6, 6, 12])
    options = (*NO_SHAPE, *STEPS, f"--dataset={chat.folder}", "--seed=7", "--gradient_accumulation_steps=1",
               "--batch_ramp=6@0, 12@0.5")
    first = done(train(stage(zero), *options, f"--init_from={weights}", "--batch_size=6", ranks=2))
    assert list(first.losses.values()) == pytest.approx(losses, rel=2e-6)
    assert [r["grad_norm"] for r in first.history if "loss" in r] == pytest.approx(norms, rel=1e-5)
    run = done(train(stage(5 - zero), *options, "--init_from=resume", "--resume_tag=iter_1", "--overwrite",
                     "--batch_size=4", ranks=3, out_dir=first.out_dir))
    assert list(run.losses.values()) == pytest.approx(losses, rel=2e-6)
    assert [r["grad_norm"] for r in run.history if "loss" in r] == pytest.approx(norms, rel=1e-5)


def test_a_length_ramp_would_cut_conversations(train, chat):
    run = train(f"--dataset={chat.folder}", "--length_ramp=8@0, 32@0.5")
    assert run.returncode == 2
    assert f"length_ramp=8@0, 32@0.5 would cut the conversations of dataset={chat.folder}: leave it out" in run.stderr
    assert "Traceback" not in run.stderr


AUXILIARY = """
from model import GPT
def auxiliary_loss(model, idx):
    return (1000 * model.transformer.wte(idx).square().mean(dim=2) * (idx % 3 == 0)).mean()
forward = GPT.forward
def with_auxiliary_loss(self, idx, targets=None, reduction="mean", **options):
    loss = forward(self, idx, targets, reduction, **options)
    if targets is None or reduction != "mean":
        return loss
    return loss + auxiliary_loss(self, idx)
"""


@pytest.mark.parametrize("zero, ranks, batch_size, accumulation", [(2, 2, 3, 2), (3, 2, 3, 2), (2, 1, 3, 4)])
def test_an_auxiliary_loss_counts_as_often_as_its_micro_batch_has_targets(train, chat, weights, zero, ranks, batch_size,
                                                                          accumulation):
    """It is a mean over a micro-batch. Seen: losses to 4e-7, norms to 2e-6."""
    names = {}
    exec(AUXILIARY, names)
    model = GPT.from_pretrained(str(weights))
    model.crop_block_size(BLOCK)
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), lr=1e-2, betas=(0.9, 0.95))
    losses, norms = [], []
    for x, y, _ in epoch(chat, steps=3)[1]:
        total = 0
        for own_x, own_y in zip(x.split(batch_size), y.split(batch_size)):
            count = (own_y >= 0).sum()
            total = total + model(own_x, own_y, "none").sum() + count * names["auxiliary_loss"](model, own_x)
        loss = total / (y >= 0).sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4).item())
        optimizer.step()
        losses.append(loss.item())

    run = done(train(stage(zero), *NO_SHAPE, *STEPS, f"--init_from={weights}", f"--dataset={chat.folder}", "--seed=7",
                     f"--batch_size={batch_size}", f"--gradient_accumulation_steps={accumulation}", ranks=ranks,
                     plant=f"{AUXILIARY}\nGPT.forward = with_auxiliary_loss\n"))
    assert list(run.losses.values()) == pytest.approx(losses, rel=2e-6)
    assert [r["grad_norm"] for r in run.history if "loss" in r] == pytest.approx(norms, rel=1e-5)


def test_a_micro_batch_without_targets_counts_nothing():
    """Its mean is not a number, and neither is that times 0."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=16))
    idx = torch.randint(11, (2, 8))
    loss = loss_of_targets(model, idx, torch.full_like(idx, -1), torch.tensor(0.5))
    loss.backward()
    assert loss.item() == 0
    assert all(not p.grad.any() for p in model.parameters())
    one = torch.full_like(idx, -1)
    one[1, 3] = 7
    assert loss_of_targets(model, idx, one, torch.tensor(0.5)).item() == pytest.approx(0.5 * model(idx, one).item())


def test_an_evaluation_weighs_rows_by_what_counts_and_knows_its_standard_error(train, chat, weights):
    """The mean of all counted tokens, and the standard error of a ratio, by leaving out each row once (jackknife)."""
    options = (f"--init_from={weights}", f"--dataset={chat.folder}", *NO_SHAPE, f"--block_size={BLOCK}",
               "--eval_only=True", "--batch_size=3", "--eval_iters=4")
    first, second = done(train(*options)), done(train(*options, ranks=2))
    model = GPT.from_pretrained(str(weights)).eval()
    model.crop_block_size(BLOCK)
    for split in ("train", "val"):
        rows = open_sequences(chat.data, split, BLOCK)
        sums, counts = [], []
        for x, y in eval_batches(rows, 12, BatchSizes(1, 1, 1, BLOCK), 0, 256, "cpu"):
            with torch.no_grad():
                sums.append(model(x, y, "none").double().sum())
            counts.append((y >= 0).sum().double())
        sums, counts = torch.stack(sums), torch.stack(counts)
        n = len(sums)
        assert n == min(12, len(rows.counts)) and counts.min() < 0.5 * counts.max()
        mean, without = sums.sum() / counts.sum(), (sums.sum() - sums) / (counts.sum() - counts)
        jackknife = ((n - 1) / n * (without - without.mean()).square().sum()).sqrt()
        for run in (first, second):
            shown = re.search(rf"{split} loss ([\d.]+).*standard errors ([\d.]+), ([\d.]+)", run.stdout)
            assert float(shown[1]) == pytest.approx(mean.item(), abs=6e-5)
            assert float(shown[2 if split == "train" else 3]) == pytest.approx(jackknife.item(), rel=0.1)
        assert abs((sums / counts).mean() - mean) > 1e-3  # the mean of means is another number


def test_a_killed_run_resumes_with_the_same_losses_and_lora_and_a_second_stage_work(train, chat, weights):
    common = (*NO_SHAPE, f"--dataset={chat.folder}", f"--block_size={BLOCK}", "--dropout=0.1", "--lora_rank=4",
              f"--init_from={weights}", "--eval_interval=2", "--lr_decay_iters=6")
    whole = done(train(*common, "--max_iters=6", ranks=2))
    killed = train(*common, "--max_iters=6", ranks=2, plant="""
from runtime.monitor.health import StepHealth
check = StepHealth.check
def stop(self, step, loss, iter_num):
    check(self, step, loss, iter_num)
    if iter_num == 5:
        os._exit(9)
StepHealth.check = stop
""")
    assert killed.returncode == 9 and max(killed.losses) == 4, killed.stderr
    resumed = done(train(*common, "--max_iters=6", "--init_from=resume", ranks=2, out_dir=killed.out_dir))
    assert resumed.losses == whole.losses and resumed.evals == whole.evals
    rows = len(open_sequences(chat.data, "train", BLOCK).counts)
    assert f"; {rows / 8:,.1f} steps per epoch" in whole.stdout
    second = done(train(*NO_SHAPE, f"--init_from={whole.out_dir}", f"--dataset={chat.folder}", f"--block_size={BLOCK}",
                        "--max_epochs=0.5"))
    assert max(second.losses) == math.ceil(0.5 * rows / 4) and second.evals[0][1] == pytest.approx(
        whole.evals[max(whole.evals)][1], rel=1e-6)


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_split_without_an_answer_is_named(tmp_path, split):
    """The other one has one in each conversation of 4 tokens."""
    masks = {name: np.array([2, 0, 0, 1] * 5, np.uint8) for name in ("train", "val")}
    masks[split][3::4] = 0
    meta = write_dataset(tmp_path, [1] * 20, [1] * 20, {"kind": "char", "chars": "ab"}, 2,
                         {"name": "made up", "sha256": None, "bytes": 40},
                         {f"{name}_mask.bin": [mask] for name, mask in masks.items()}, template=TEMPLATE)
    data = Dataset("mychat", 1, tmp_path, meta)
    said = rf"^mychat/{split}.bin has no answer within block_size=8 \(5 conversations\): use a larger --block_size, or"
    with pytest.raises(UserError, match=said):
        open_sequences(data, split, 8)
    (other,) = {"train", "val"} - {split}
    assert open_sequences(data, other, 8).counts.sum() == 5


def test_two_chat_templates_are_never_mixed_without_a_word(train, chat, tmp_path):
    """In a mixture and at a resume they are refused, and a new stage names the difference."""
    # The same conversations with another template
    other = shutil.copytree(chat.folder, tmp_path / "other")
    meta = json.loads((other / "meta.json").read_text())
    meta["template"] += " "
    (other / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="^chat and other have different chat templates: prepare both with the same$"):
        open_datasets({str(chat.folder): 1, str(other): 1}, BLOCK)
    open_datasets({str(chat.folder): 1}, BLOCK)

    first = done(train(f"--dataset={chat.folder}", f"--block_size={BLOCK}", "--max_iters=1"))
    theirs = (f"--dataset={other}", f"--block_size={BLOCK}", "--max_iters=2", "--dry_run=True")
    resumed = train(*theirs, "--init_from=resume", out_dir=first.out_dir)
    assert resumed.returncode == 2
    assert f"dataset={other} has another chat template than {first.out_dir}/iter_1: use --dataset=" in resumed.stderr
    words = "has another chat template than"
    staged = done(train(*theirs, *NO_SHAPE, f"--init_from={first.out_dir}/iter_1"))
    assert f"dataset={other} {words} {first.out_dir}/iter_1: from here on, samples and" in staged.stdout
    same = done(train(f"--dataset={chat.folder}", *theirs[1:], *NO_SHAPE, f"--init_from={first.out_dir}/iter_1"))
    assert words not in same.stdout
