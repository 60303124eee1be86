"""LoRA against PEFT: the gradients, a run at each ZeRO stage, its adapter, and going on elsewhere."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import NO_SHAPE, ROOT, done, launch, random_gpt2, stage
from transformers import AutoTokenizer, GPT2LMHeadModel

from model import GPT
from runtime import lora
from runtime.checkpoint.load import load_model
from runtime.lora import TARGET_MODULES, lora_config

LORA = ("--lora_rank=4", "--lora_alpha=8.0", *NO_SHAPE)
SETTINGS = {"lora_rank": 4, "lora_alpha": 8.0, "lora_dropout": 0.0, "lora_target_modules": ", ".join(TARGET_MODULES)}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A GPT-2 of transformers' with random weights, over the test's characters."""
    path = tmp_path_factory.mktemp("base")
    random_gpt2(0.1, vocab_size=28, n_positions=32, n_embd=32, bos_token_id=0, eos_token_id=0).save_pretrained(path)
    return path


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_loss_and_gradients_are_pefts(folder, dropout):
    """With LoRA's dropout too, of the same random numbers."""
    from peft import LoraConfig, get_peft_model

    ours, x = GPT.from_pretrained(str(folder)), torch.randint(28, (3, 16))
    lora.apply(ours, lora_config(SimpleNamespace(**{**SETTINGS, "lora_dropout": dropout})))
    plain = GPT2LMHeadModel.from_pretrained(folder, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    theirs = get_peft_model(plain, LoraConfig(
        r=4, lora_alpha=8, lora_dropout=dropout, target_modules=list(TARGET_MODULES), fan_in_fan_out=True)).train()
    thin = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        if "lora" in name:
            p.data.normal_(std=0.1)
            thin[f"base_model.model.{name}.default.weight"].data.copy_(p.data)
    assert sum(p.requires_grad for p in ours.parameters()) == 2 * 4 * 2 == sum(p.requires_grad for p in thin.values())
    y = x.roll(-1, 1)
    torch.manual_seed(1)
    loss = ours(x, y)
    loss.backward()
    torch.manual_seed(1)
    reference = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())
    reference.backward()
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    for name, p in ours.named_parameters():
        if "lora" in name:
            grad = thin[f"base_model.model.{name}.default.weight"].grad
            torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-6)
        else:
            assert p.grad is None


@pytest.mark.parametrize("zero, ranks, others", [
    (2, 1, ()), (2, 2, ("--dtype=bfloat16",)), (2, 2, ("--gradient_checkpointing=True",)),
    (3, 2, ("--gradient_checkpointing=True", "--accumulate_locally=False"))])
def test_an_adapter_of_each_stage_is_pefts_and_goes_on_at_another(train, folder, zero, ranks, others):
    from peft import PeftModel

    args = (*LORA, f"--init_from={folder}", *others, "--lr_decay_iters=6", "--learning_rate=1e-2", "--keep_last=9")
    run = done(train(*args, stage(zero), "--max_iters=4", ranks=ranks))
    assert "LoRA of rank 4: 4,096 trainable" in run.stdout and run.losses[4] < run.losses[1] - 0.01
    model, manifest = load_model(str(run.out_dir), "final")
    adapter = run.out_dir / "adapter"
    done(launch(ROOT / "export_hf.py", f"--out_dir={run.out_dir}", "--tag=final", "--peft", f"--to={adapter}"))
    base = GPT.from_pretrained(str(folder))
    theirs = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(folder), adapter).eval()
    x = torch.randint(28, (2, 32))
    with torch.no_grad():
        apart = (model(x) - theirs(x).logits).abs().max()
        learnt = (model(x) - base(x)).abs().max()
    assert apart < (0.02 if "--dtype=bfloat16" in others else 1e-4) and learnt > 0.05  # bfloat16 rounds the base
    assert manifest["state"]["lora"] == {"rank": 4, "alpha": 8.0, "dropout": 0.0, "base": str(folder),
                                         "target_modules": list(TARGET_MODULES)}
    assert len({path.stat().st_mode for path in adapter.iterdir()}) == 1  # whoever may read one may read both
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    if "--dtype=bfloat16" in others:
        return
    whole = done(train(*args, stage(2), "--max_iters=6", ranks=ranks))
    on = done(train(*args, f"--gradient_accumulation_steps={2 * ranks}", stage({2: 3, 3: 0}[zero]), "--max_iters=6",
                    "--init_from=resume", out_dir=run.out_dir))
    assert f"re-sharding {run.out_dir}/iter_4" in on.stdout
    assert [on.losses[i] for i in (5, 6)] == pytest.approx([whole.losses[i] for i in (5, 6)], rel=2e-5)


def test_the_recipe_saves_each_epoch_resumes_there_and_ends_as_a_folder_of_transformers(
        train, folder, characters, tmp_path):
    """The recipe of docs/lora.md on 561 windows, in steps of 64: 8.77 steps per epoch. Its second command writes the
    folder, and transformers continues a text in it as sample.py does."""
    page = (ROOT / "docs" / "lora.md").read_text().replace("\\\n", "")
    recipe, export = re.search(r"^python train_deepspeed.py (.+) &&\n +python export_hf.py (.+)$", page, re.M).groups()
    options = [f"--init_from={folder}", f"--dataset={characters}", "--block_size=32", "--learning_rate=1e-2", *NO_SHAPE]

    def run(out_dir, *args):
        return done(train(*recipe.split(), *options, f"--out_dir={out_dir}", *args, out_dir=out_dir))

    whole = run(tmp_path / "out")
    ends = sorted(whole.evals)[1:]
    assert ends == [9, 18, 27] and all(64 * (it - 1) < 561 * epoch <= 64 * it for epoch, it in enumerate(ends, 1))
    assert "eval_epochs=1 is 8.77 iterations; eval_interval is ignored" in whole.stdout
    assert {path.name for path in whole.out_dir.iterdir() if path.is_dir()} == {*(f"iter_{n}" for n in ends), "best",
                                                                                "final"}
    shutil.copytree(whole.out_dir, tmp_path / "again")
    again = run(tmp_path / "again", "--init_from=resume", "--resume_tag=iter_9", "--overwrite=True")
    assert {it: loss for it, loss in whole.losses.items() if it > 9} == {it: again.losses[it] for it in range(10, 28)}
    assert whole.evals == again.evals

    words = export.replace("out-lora", str(whole.out_dir)).replace("final_model", str(tmp_path / "final"))
    done(launch(ROOT / "export_hf.py", *words.split()))
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "final")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "final")
    prompt = tokenizer("the cat ", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)[0])
    ours = done(launch(ROOT / "sample.py", f"--out_dir={whole.out_dir}", "--tag=final", "--start=the cat ",
                       "--temperature=0", "--max_new_tokens=20", "--num_samples=1", "--json=True"))
    assert "the cat " + json.loads(ours.stdout)["text"] == text and len(text) == 28


def test_other_lora_than_the_tags_is_refused(train, folder):
    run = done(train(*LORA, f"--init_from={folder}", "--max_iters=2"))
    again = train(*NO_SHAPE, "--init_from=resume", "--resume_tag=final", out_dir=run.out_dir)
    matrices = "attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj"
    assert again.returncode == 2 and again.stderr.strip().endswith(
        "final was trained with --lora_rank=4 --lora_alpha=8.0 --lora_dropout=0.0 "
        f"--lora_target_modules='{matrices}', and this run has no LoRA: use the same, or start a new stage with "
        f"--init_from={run.out_dir}/final --out_dir=DIR")
