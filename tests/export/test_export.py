"""export_hf.py: what transformers loads from the folder is the model and the tokenizer that were trained."""

import hashlib
import inspect
import json
import os
import re
import shutil

import pytest
import tiktoken_ext.openai_public
import torch
from conftest import CHARS, NO_SHAPE, ROOT, SOURCE, at_once, done, launch, planted, stage
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from model import GPT, GPTConfig
from runtime.checkpoint.load import load_model
from runtime.data.dataset import write_dataset
from runtime.data.tokenizer import tokenizer_file_meta, tokenizer_of
from runtime.errors import UserError
from runtime.export import hf

TAG = "iter_4"  # neither the newest nor the best
TEXT = "the quick fox's 12345 hats — naïve 😀\n\n\t  don't <|endoftext|> {x: [1, 2]}  "


def export(*args, **options):
    return launch(ROOT / "export_hf.py", *args, **options)


def difference(told):
    """The largest difference of logits that an export states."""
    return float(re.search(r"differ from those of the training code by at most (\S+)\.", told)[1])


@pytest.fixture(scope="module")
def exported(whole, tmp_path_factory):
    """(the run's out_dir, the folder, what was printed): characters, trained at ZeRO-3 by two ranks."""
    out_dir, folder = whole(3).out_dir, tmp_path_factory.mktemp("export") / "letters"
    return out_dir, folder, done(export("--out_dir", out_dir, f"--tag={TAG}", "--to", folder)).stdout


def test_a_folder_of_the_users_is_left_alone(whole, tmp_path):
    (tmp_path / "mine.saving").mkdir()
    (tmp_path / "mine.saving" / "notes.txt").write_text("mine")
    done(export("--out_dir", whole(3).out_dir, "--to", tmp_path / "mine"))
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "mine.saving"}
    assert (tmp_path / "mine.saving" / "notes.txt").read_text() == "mine"


def test_transformers_loads_the_model_that_was_trained(exported):
    out_dir, folder, told = exported
    ours, theirs = load_model(out_dir, TAG)[0], AutoModelForCausalLM.from_pretrained(folder)
    idx = torch.randint(28, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (theirs(idx).logits - ours(idx)).abs().max() < 1e-5 and theirs(idx).logits.shape == (4, 32, 28)
    assert difference(told) < 1e-5 and "its logits for 32 tokens differ" in told  # which may be 0
    assert sorted(p.name for p in folder.parent.iterdir()) == ["letters"]
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert len({p.stat().st_mode for p in folder.iterdir()}) == 1
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["n_ctx"], config["n_positions"], config["vocab_size"]) == (
        ["GPT2LMHeadModel"], 32, 32, 28)
    assert (config["activation_function"], config["eos_token_id"], config["attn_pdrop"]) == ("gelu_new", None, 0.1)


def test_its_tokenizer_and_generate_give_our_text(exported):
    _, folder, _ = exported
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "the fox\n\n sat  on a mat \n"
    ids = [CHARS.index(char) for char in text]
    assert tokenizer(text)["input_ids"] == ids and tokenizer.decode(ids) == text
    with pytest.raises(Exception, match="WordLevel error"):  # as ours refuses it
        tokenizer("É")
    refused = launch(ROOT / "sample.py", f"--init_from={folder}", "--start=É")
    assert refused.returncode == 2 and refused.stderr.startswith("the tokenizer knows no tokens for 'É' (WordLevel e")


def test_training_takes_the_folder_and_refuses_half_of_it(exported, train, tmp_path):
    """Its characters are the data's. Weights of which a download brought half, or none, are refused at the start."""
    _, folder, _ = exported
    args = (*NO_SHAPE, "--dropout=0", "--max_iters=1")
    assert "what they learned about words is lost" not in done(train(*args, f"--init_from={folder}")).stdout
    half = shutil.copytree(folder, tmp_path / "half")
    os.truncate(half / "model.safetensors", (half / "model.safetensors").stat().st_size // 2)
    none = shutil.copytree(folder, tmp_path / "none", ignore=lambda *_: ["model.safetensors"])
    refusals = ((half, f"{half} cannot be read (SafetensorError"), (none, f"{none} has neither"))
    for broken, words in refusals:
        run = train(*args, f"--init_from={broken}", "--dry_run=True")
        assert run.returncode == 2 and run.stderr.startswith(words) and run.stdout == "", run.stderr


def test_a_tokenizer_of_the_datas_own_goes_along(tmp_path, train):
    """A BPE that begins each text with a token of its own when transformers is asked to."""
    tokenizer, data = Tokenizer(models.BPE()), tmp_path / "data"
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([(ROOT / "README.md").read_text()], trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<end>", "<s>"],
        show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    ids = tokenizer.encode((ROOT / "README.md").read_text(), add_special_tokens=False).ids
    data.mkdir()
    tokenizer.save(str(data / "tokenizer.json"))
    write_dataset(data, ids[:-400], ids[-400:], tokenizer_file_meta(data / "tokenizer.json", 0), 320, SOURCE)
    run = done(train(f"--dataset={data}", "--max_iters=1"))
    exported = export(f"--out_dir={run.out_dir}", f"--to={tmp_path}/folder")
    assert exported.returncode == 0 and difference(exported.stdout) < 1e-5, exported.stderr
    theirs = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert theirs(TEXT)["input_ids"] == [0, *tokenizer.encode(TEXT, add_special_tokens=False).ids]
    assert (theirs.eos_token, theirs.eos_token_id, theirs.model_max_length) == ("<end>", 0, 32)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "folder").generation_config.eos_token_id == 0
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(data / "tokenizer.json"))
    hf.write_tokenizer(data, tokenizer_file_meta(data / "tokenizer.json", 0), 32)  # without <s>, which is not trained
    assert AutoTokenizer.from_pretrained(data)(TEXT)["input_ids"] == theirs(TEXT)["input_ids"][1:]


def test_weights_in_half_precision(whole, tmp_path):
    """Half of the bytes; the logits are those of our weights rounded."""
    out_dir = whole(3).out_dir
    run = export(f"--out_dir={out_dir}", "--dtype=bfloat16", f"--to={tmp_path}/half")
    assert run.returncode == 0 and difference(run.stdout) < 1e-5, run.stderr
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32)
    ours, _ = load_model(out_dir)
    with torch.no_grad():
        idx = torch.randint(28, (8, 32))
        assert (theirs(idx).logits - ours(idx)).abs().max() > 1e-4
        rounded = load_model(out_dir)[0].to(torch.bfloat16).float()
        assert (theirs(idx).logits - rounded(idx)).abs().max() < 1e-5
    weights = load_file(tmp_path / "half" / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert torch.equal(weights["transformer.wte.weight"], ours.transformer.wte.weight[:28].to(torch.bfloat16))


@pytest.mark.parametrize("broken", ["weights", "tokenizer"])
def test_an_export_that_is_not_ours_fails_and_leaves_nothing(whole, tmp_path, broken):
    """Made to leave the square matrices as they are, or to give every character the next one's id."""
    script = planted(tmp_path, f"""
if {broken!r} == "weights":
    from transformers import GPT2LMHeadModel
    save = GPT2LMHeadModel.save_pretrained
    def save_others(self, *args, **kwargs):
        for block in self.transformer.h:
            block.attn.c_proj.weight.data = block.attn.c_proj.weight.data.t().contiguous()
        save(self, *args, **kwargs)
    GPT2LMHeadModel.save_pretrained = save_others
else:
    from runtime.export import hf
    right = hf.char_tokenizer
    hf.char_tokenizer = lambda chars: right(chars[1:] + chars[0])
""", ROOT / "export_hf.py")
    run = launch(script, f"--out_dir={whole(3).out_dir}", f"--to={tmp_path}/folder")
    words = {"weights": r"the exported model's logits differ by \S+, more than 1e-04: transformers only has GPT-2.*",
             "tokenizer": "the exported tokenizer encodes a text differently: nothing was exported"}[broken]
    assert run.returncode == 2 and re.fullmatch(words + "\n", run.stderr), run.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["planted.py"]


@pytest.mark.parametrize("plant, code, stderr", [
    ("os.kill(os.getpid(), signal.SIGTERM)", 143, "interrupted\n"),
    ("os.kill(os.getpid(), signal.SIGHUP)", 129, "interrupted\n"),
    ("os.kill(os.getpid(), signal.SIGINT)", 130, "interrupted\n"),
    ("resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))", 2,
     r"to=.*/folder can't be written \(.*File too large.*\): choose another folder with --to=DIR\n"),
])
def test_an_export_that_is_stopped_or_finds_no_room_leaves_nothing(whole, tmp_path, plant, code, stderr):
    script = planted(tmp_path, f"""
import resource, signal
from runtime.export import hf
write_model = hf.write_model
def stopped(*args):
    {plant}
    write_model(*args)
hf.write_model = stopped
""", ROOT / "export_hf.py")
    run = launch(script, f"--out_dir={whole(3).out_dir}", f"--to={tmp_path}/folder")
    assert run.returncode == code and re.fullmatch(stderr, run.stderr), run.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["planted.py"]


def test_refusals(exported):
    out_dir, folder, _ = exported
    for args, words in (([f"--to={folder}"], f"to={folder} exists: choose another folder with --to=DIR"),
                        ([f"--to={folder}/config.json/x"], "x can't be written (Not a directory): choose another"),
                        (["--tag=iter_7"], "has no complete checkpoint 'iter_7': choose from"),
                        (["--peft", "--dtype=bfloat16"], "peft=True writes float32, but dtype=bfloat16: drop one"),
                        (["--dtype=int8"], "dtype takes float32 or bfloat16 or float16, not 'int8'")):
        run = export(f"--out_dir={out_dir}", *args)
        assert run.returncode == 2 and words in run.stderr and len(run.stderr.splitlines()) == 1


def test_models_that_gpt2_has_no_words_for(tmp_path):
    """Without biases, with the exact GELU, and with rows of the embedding that stand for nothing; and a dropout that is
    not transformers' own default."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=70, n_layer=2, n_head=2, n_embd=16, dropout=0.25, bias=False,
                          gelu="none")).eval()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    model.crop_vocab_size(50)
    hf.write_model(model, tmp_path, None, "float32")
    idx = torch.randint(50, (1, 16))
    assert hf.check_model(model, tmp_path, idx) < 1e-5
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {getattr(theirs.config, f"{place}_pdrop") for place in ("attn", "embd", "resid")} == {0.25}
    assert theirs.config.activation_function == "gelu" and theirs(idx).logits.shape == (1, 16, 50)
    assert not any(p.any() for name, p in theirs.named_parameters() if name.endswith("bias"))
    again = GPT.from_pretrained(str(tmp_path)).eval()  # the exact GELU is known again
    assert (again(idx) - model(idx)).abs().max() < 1e-5


def test_a_head_of_its_own_is_written_as_one(tmp_path):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=70, n_layer=2, n_head=2, n_embd=16)).eval()
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    hf.write_model(model, tmp_path, None, "float32")
    idx = torch.randint(70, (1, 16))
    assert hf.check_model(model, tmp_path, idx) < 1e-5
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.config.tie_word_embeddings is False
    assert torch.equal(theirs.lm_head.weight, model.lm_head.weight[:70])
    with pytest.raises(UserError, match="tie_word_embeddings"):  # our GPT has no such head
        GPT.from_pretrained(str(tmp_path))


def test_buffers_that_gpt2_has_no_place_for_are_named(tmp_path):
    """Those that a checkpoint has. A table that is made anew with the model is no loss."""
    model = GPT(GPTConfig(block_size=16, vocab_size=70, n_layer=2, n_head=2, n_embd=16)).eval()
    assert hf.write_model(model, tmp_path, None, "float32") == []
    model.register_buffer("tokens_seen", torch.zeros(()))
    model.transformer.h[1].register_buffer("slopes", torch.ones(2), persistent=False)
    model.transformer.h[1].register_buffer("mean_square", torch.ones(()))
    assert hf.write_model(model, tmp_path, None, "float32") == ["tokens_seen", "transformer.h.1.mean_square"]


def test_rounding_is_told_from_a_mistake(tmp_path):
    """Logits of some millions, which float32 rounds by more than 1e-4."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=70, n_layer=2, n_head=2, n_embd=64)).eval()
    model.transformer.ln_f.weight.data *= 1e6
    hf.write_model(model, tmp_path, None, "float32")
    idx = torch.randint(70, (1, 16))
    assert 1e-4 < hf.check_model(model, tmp_path, idx) < 10
    weights = load_file(tmp_path / "model.safetensors")
    weights["transformer.h.0.mlp.c_fc.bias"][3] = 0.01
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"logits differ by .*, more than \S+: transformers only has GPT-2"):
        hf.check_model(model, tmp_path, idx)


@pytest.fixture(scope="module")
def gpt2_exported(train, tmp_path_factory):
    """As exported(), of a GPT-2 as transformers saves it, trained on GPT-2's tokens at ZeRO-3 by two ranks."""
    folder, data = tmp_path_factory.mktemp("gpt2"), tmp_path_factory.mktemp("words")
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=32)).save_pretrained(folder / "tiny")
    ids = tokenizer_of({"kind": "gpt2"})[0]((ROOT / "README.md").read_text())
    write_dataset(data, ids[:-400], ids[-400:], {"kind": "gpt2"}, 50257, SOURCE)
    run = done(train(f"--init_from={folder}/tiny", *NO_SHAPE, "--max_iters=2", f"--dataset={data}", stage(3), ranks=2))
    return run.out_dir, run.out_dir / "hf-best", done(export(f"--out_dir={run.out_dir}")).stdout


def test_gpt2s_own_shape_and_tokens_index(gpt2_exported):
    """GPT-2's ranks may have to be fetched. vocab.json and merges.txt have the hashes in tiktoken."""
    out_dir, folder, told = gpt2_exported
    assert difference(told) < 1e-5
    source = inspect.getsource(tiktoken_ext.openai_public.gpt2)
    vocab = json.dumps(json.loads((folder / "vocab.json").read_text())).encode()
    for content, published in ((vocab, "encoder_json"), ((folder / "merges.txt").read_bytes(), "vocab_bpe")):
        assert hashlib.sha256(content).hexdigest() == re.search(rf'{published}_hash="(\w+)"', source)[1]
    tokenizer, (encode, decode) = AutoTokenizer.from_pretrained(folder), tokenizer_of({"kind": "gpt2"})
    assert tokenizer(TEXT)["input_ids"] == encode(TEXT) and tokenizer.decode(encode(TEXT)) == TEXT
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.model_max_length) == (50256, 50256, 32)
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder), load_model(out_dir)[0]
    assert theirs.generation_config.eos_token_id == 50256 and theirs.num_parameters() == ours.num_params() == 403_200
    prompt = tokenizer("The model", return_tensors="pt")
    wanted = ours.generate(prompt["input_ids"], 12, temperature=0)
    assert torch.equal(theirs.generate(**prompt, max_new_tokens=12, do_sample=False, pad_token_id=50256), wanted)
    again = launch(ROOT / "sample.py", f"--init_from={folder}", "--start=The model", "--temperature=0",
                   "--num_samples=1", "--max_new_tokens=12")
    assert again.stdout.endswith(f"\n\n{decode(wanted[0].tolist())}\n"), again.stderr


def test_a_mixture_is_exported_and_sampled_from(train, characters, tmp_path):
    (tmp_path / "more").symlink_to(characters)
    run = done(train(f"--dataset={{{str(characters)!r}: 0.25, {str(tmp_path / 'more')!r}: 0.75}}", "--max_iters=1"))
    exported, sampled = at_once(
        lambda: export(f"--out_dir={run.out_dir}", f"--to={tmp_path}/mixed"),
        lambda: launch(ROOT / "sample.py", f"--out_dir={run.out_dir}", "--num_samples=1", "--max_new_tokens=50"))
    for job in (exported, sampled):
        assert job.returncode == 0 and job.stdout.startswith(f"{run.out_dir}/best: "), job.stderr
