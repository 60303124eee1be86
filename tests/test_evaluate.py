"""evaluate.py against transformers, row by row and without padding; bits per byte against the bytes of the text.

Tests with `index` in their name may fetch GPT-2's tokenizer."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CHARS, ROOT, at_once, done, launch, planted, random_gpt2, write_characters
from edited_model import edited_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

from runtime.checkpoint.load import load_model
from runtime.data.sequences import TokenStream
from runtime.data.tokenizer import gpt2_encoding, token_bytes, tokenizer_file_meta
from runtime.errors import UserError
from runtime.monitor.lines import loss_record
from runtime.sample.benchmarks import read_rows

TEXT = "Café résumé: ½ of 日本語 🙂.<|endoftext|>\n\nA second document, " + "which goes on and on; " * 30


def evaluate(*args, **options):
    run = launch(ROOT / "evaluate.py", "--json", *args, **options)
    assert run.returncode == 0, run.stdout + run.stderr
    assert all(line.endswith("has no tokenizer: its 50,257 tokens are taken for GPT-2's")
               for line in run.stderr.splitlines())
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """(transformers' GPT-2 with random weights, GPT-2's vocabulary and 64 positions, its folder)."""
    model, folder = random_gpt2(0.15, n_positions=64, n_embd=32), tmp_path_factory.mktemp("theirs")
    model.save_pretrained(folder)
    return model, folder


@torch.no_grad()
def losses_of(model, ids):
    """(losses, greedy hits) of the ids after the first, each given all before it."""
    chances, targets = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1), torch.tensor(ids[1:])
    return -chances.gather(1, targets[:, None])[:, 0].double().numpy(), (chances.argmax(-1) == targets).numpy()


@torch.no_grad()
def made_up(model):
    """Lines of HellaSwag, and of LAMBADA: of these, many last words are the model's own guesses or end with one."""
    generator, encoding = np.random.default_rng(0), gpt2_encoding()
    words = [word for word in (encoding.decode([i]) for i in range(2000, 6000)) if re.fullmatch(" [a-z]+", word)]

    def text(longest, shortest=1):
        return "A" + "".join(generator.choice(words, generator.integers(shortest, longest)))

    swag = [{"ctx": text(30), "endings": [text(12) for _ in range(4)], "label": i % 4} for i in range(20)]
    swag[7]["ctx"] = text(120, 100)  # is cut
    lambada = []
    for first in [False, True] * 30:
        context, word = text(40), "".join(generator.choice(words, int(first)))
        ids = encoding.encode(context + word)
        ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        word += encoding.decode(ids[-1:])
        if re.fullmatch(" [A-Za-z]+", word) and encoding.encode(context + word) == ids:
            lambada += [{"text": context + word}, {"text": context + word + "ly"}]
    return swag, lambada


def test_every_ending_and_every_figure_is_that_of_transformers_index(theirs, tmp_path):
    """The losses of all endings; and the figures on one rank and on two, in batches of up to 8 rows."""
    model, weights = theirs
    swag, lambada = made_up(model)
    encode, sums, means, words = gpt2_encoding().encode, [], [], []
    for row in swag:
        for ending in row["endings"]:
            own, scored = encode(row["ctx"]), encode(" " + ending)
            losses = losses_of(model, (own + scored)[-65:])[0][-len(scored):]
            sums.append(losses.sum())
            means.append(losses.mean())
    for row in lambada:
        n = len(encode(" " + row["text"].rsplit(" ", 1)[1]))
        losses, hits = losses_of(model, encode(row["text"]))
        words.append((losses[-n:].sum(), hits[-n:].all(), losses[-1], hits[-1]))
    for name, rows in (("swag", swag), ("lambada", lambada)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    watched = planted(tmp_path, f"""import atexit
import numpy as np
atexit.register(lambda: np.save({str(tmp_path / "totals.npy")!r}, sys.modules["__main__"].scores[0]))
""", ROOT / "evaluate.py")
    args = f"--init_from={weights}", "--batch_tokens=256", f"--hellaswag={tmp_path}/swag"
    done(launch(watched, *args))
    assert np.abs(np.load(tmp_path / "totals.npy") - sums).max() < 1e-4
    word, right, last, last_right = np.array(words, float).T
    assert 0.1 < right.mean() < last_right.mean() < 0.8
    chosen = [np.reshape(values, (-1, 4)).argmin(axis=1) == [row["label"] for row in swag] for values in (sums, means)]
    wanted = [{"acc": np.mean(chosen[0]), "acc_norm": np.mean(chosen[1])},
              {"acc": right.mean(), "last_token_acc": last_right.mean(), "perplexity": np.exp(word.mean()),
               "last_token_perplexity": np.exp(last.mean())}]
    for records in at_once(*(lambda n=n: evaluate(*args, f"--lambada={tmp_path}/lambada", ranks=n) for n in (1, 2))):
        for record, figures in zip(records, wanted, strict=True):
            assert {name: record[name] for name in figures} == pytest.approx(figures, rel=1e-5)
        assert [(record["rows"], record["cut"]) for record in records] == [(20, 4), (len(lambada), 0)]
        assert records[0]["acc_stderr"] == pytest.approx(chosen[0].std(ddof=1) / 20**0.5)  # as in lm_eval
        assert records[1]["perplexity_stderr"] == pytest.approx(
            np.exp(word.mean()) * word.std(ddof=1) / len(word) ** 0.5, rel=1e-4)


def test_bits_per_byte_are_those_of_the_text_index(theirs, tmp_path):
    """Each window of 64 tokens begins with the last token of the one before, and sees nothing else of it."""
    model, weights = theirs
    (tmp_path / "text").write_text(TEXT)
    ids = gpt2_encoding().encode(TEXT, allowed_special="all")
    losses = np.concatenate([losses_of(model, ids[i:i + 65])[0] for i in range(0, len(ids) - 1, 64)])
    n_bytes = len(TEXT.encode()) - len("<|endoftext|>") - len(gpt2_encoding().decode_bytes(ids[:1]))
    for ranks in (2, 1):
        record, = evaluate(f"--init_from={weights}", f"--text={tmp_path}/text", ranks=ranks)
        assert record["tokens"] == len(losses) == len(ids) - 1
        assert record["loss"] == pytest.approx(losses.mean(), abs=1e-5)
        assert record["perplexity"] == pytest.approx(np.exp(losses.mean()), rel=1e-4)
        assert record["bits_per_byte"] == pytest.approx(losses.sum() / np.log(2) / n_bytes, rel=1e-6)


def test_bytes_of_tokens(monkeypatch, tmp_path):
    monkeypatch.setattr("runtime.data.tokenizer.RANKS_FILE", tmp_path / "none")  # training doesn't download it
    assert token_bytes({"tokenizer": {"kind": "gpt2"}, "vocab_size": 50257}, fetch=False).tolist() == [0] * 50258
    assert token_bytes({"tokenizer": {"kind": "char", "chars": "aé日"}, "vocab_size": 3}).tolist() == [1, 2, 3, 0]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    for known, normalizer in ((1, None), (0, normalizers.Lowercase())):
        tokenizer.normalizer = normalizer
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        data = {"tokenizer": tokenizer_file_meta(tmp_path / "tokenizer.json", 256), "vocab_size": 257}
        assert token_bytes(data).tolist() == [known] * 256 + [0, 0]
    Tokenizer(models.WordLevel({"a": 0}, unk_token="")).save(str(tmp_path / "tokenizer.json"))  # as export_hf.py's
    data = {"tokenizer": tokenizer_file_meta(tmp_path / "tokenizer.json", 0), "vocab_size": 1}
    assert token_bytes(data).tolist() == [0, 0]


def test_a_run_and_its_evaluation_agree(train, characters, tmp_path):
    """With é instead of a. The run reads 62 windows, evenly spread, and evaluate.py everything."""
    folder = shutil.copytree(characters, tmp_path / "accents")
    meta = json.loads((folder / "meta.json").read_text())
    meta["tokenizer"]["chars"] = chars = CHARS.replace("a", "é")
    (folder / "meta.json").write_text(json.dumps(meta))
    run = done(train("--max_iters=2", "--eval_iters=40", f"--dataset={folder}"))
    record, = evaluate(f"--out_dir={run.out_dir}", "--tag=final", f"--dataset={folder}", ranks=2)
    ids, model = np.fromfile(folder / "val.bin", np.uint16).astype(int), load_model(run.out_dir, "final")[0]
    with torch.no_grad():
        windows = [[torch.tensor(ids[None, i + j:i + j + 32][:, :1999 - i]) for j in (0, 1)]
                   for i in range(0, 1999, 32)]
        loss = sum(model(x, y, "none").sum().item() for x, y in windows)
    n_bytes = len("".join(chars[i] for i in ids[1:]).encode())
    assert n_bytes > 2100 and record["tokens"] == 1999 and record["loss"] == pytest.approx(loss / 1999, rel=1e-6)
    assert record["bits_per_byte"] == pytest.approx(loss / math.log(2) / n_bytes, rel=1e-6)
    read = [ids[offset + 1:offset + 33] for offset in TokenStream(ids, 32).eval_places(80)]
    per_token = np.mean([len(chars[i].encode()) for window in read for i in window])
    at_end = [r for r in run.history if "val_loss" in r][-1]
    assert at_end["bits_per_byte"] == pytest.approx(at_end["val_loss"] / math.log(2) / per_token, rel=1e-6)
    assert f"perplexity {at_end['perplexity']:.2f}, {at_end['bits_per_byte']:.3f} bits per byte), " in run.stdout
    mixed, unknown = (loss_record({"val": [(3.0, 0.1, 4.0), (1.0, 0.1, size)]}, [3, 1]) for size in (1.0, 0.0))
    assert mixed["bits_per_byte"] == pytest.approx(2.5 / 3.25 / math.log(2)) and "bits_per_byte" not in unknown


def test_more_rows_than_have_logits_at_one_time(train, tmp_path):
    """12,000 tokens are one batch of at most 16,384, and 8,192 rows of it have logits at one time."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_characters(folder, times=6)
    run = done(train("--max_iters=2", f"--dataset={folder}"))
    (record,) = evaluate(f"--out_dir={run.out_dir}", "--tag=final", f"--dataset={folder}")

    ids = torch.from_numpy(np.fromfile(folder / "val.bin", np.uint16).astype(np.int64))
    model, _ = load_model(run.out_dir, "final")
    total = 0.0
    for start in range(0, len(ids) - 1, 32):
        x = ids[None, start : start + 32][:, : len(ids) - 1 - start]
        y = ids[start + 1 : start + 33]
        with torch.no_grad():
            logits = model.eval()(x)[0].double()
        total += F.cross_entropy(logits, y, reduction="sum").item()
    assert record["tokens"] == 11_999
    assert record["loss"] == pytest.approx(total / 11_999, rel=1e-6)


def test_an_edited_head_is_scored_as_edited(train, characters, tmp_path):
    """Its own forward runs: by another head the loss was 3.668 instead of 3.1705."""
    edit = ("        if targets is None:\n            return self.logits(x)\n",
            "        x = x * 4\n        if targets is None:\n            return self.logits(x)\n")
    module = edited_model(tmp_path, [edit])
    plant = f"sys.path.insert(0, {str(tmp_path)!r})"
    run = done(train("--max_iters=2", plant=plant))
    script = planted(tmp_path, plant, ROOT / "evaluate.py")
    args = "--json", f"--out_dir={run.out_dir}", "--tag=final", f"--dataset={characters}"
    record = json.loads(done(launch(script, *args)).stdout)
    saved = load_model(run.out_dir, "final")[0]
    model = module.GPT(module.GPTConfig(**vars(saved.config)))
    model.load_state_dict(saved.state_dict())
    ids = torch.from_numpy(np.fromfile(characters / "val.bin", np.uint16).astype(int))
    with torch.no_grad():
        losses = [F.cross_entropy(model(ids[None, i : i + 32][:, : 1999 - i])[0], ids[i + 1 : i + 33], reduction="sum")
                  for i in range(0, 1999, 32)]
    assert record["loss"] == pytest.approx(sum(losses).item() / 1999, rel=1e-6)
    plain = json.loads(done(launch(ROOT / "evaluate.py", *args)).stdout)
    assert abs(plain["loss"] - record["loss"]) > 0.005


def test_weights_that_are_not_finite_are_refused_index(tmp_path):
    """The lowest of four losses that are NaN would be the first one's, and a quarter of the rows right."""
    model = GPT2LMHeadModel(GPT2Config(n_positions=16, n_layer=1, n_head=1, n_embd=8))
    model.transformer.wpe.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path / "weights")
    (tmp_path / "rows").write_text(json.dumps({"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 0}))
    run = launch(ROOT / "evaluate.py", f"--init_from={tmp_path}/weights", f"--hellaswag={tmp_path}/rows", ranks=2)
    assert run.returncode == 2 and "the model's losses are not finite: check its weights\n" in run.stderr, run.stderr


def test_refusals(train, tmp_path):
    run, good = done(train("--max_iters=1")), {"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1, "text": "a b"}
    (tmp_path / "one").write_text("a")
    cases = [(f"--text={tmp_path}/one", "nothing to score: give"), ("--json", "nothing to score: give"),
             ("--batch_tokens=0", "batch_tokens=0 must be at least 1"),
             ("--batch_tokens=-5", "batch_tokens=-5 must be at least 1")]
    for task, line, words in (
            ("hellaswag", "", "indices must be"), ("hellaswag", {}, "'ctx'"),
            ("hellaswag", good | {"label": 4}, "there are not 4 endings, or the label 4 is none"),
            ("hellaswag", good | {"label": float("inf")}, "cannot convert float infinity"),
            ("hellaswag", good | {"endings": ["b", "c", "", "e"]}, "a text is empty"),
            ("hellaswag", good | {"endings": "bcde"}, "there are not 4 endings"),
            ("hellaswag", good | {"ctx": "É"}, "the character 'É' (U+00C9) is not one of the 28 that this"),
            ("hellaswag", good | {"endings": ["b" * 32] * 4}, "what is to be predicted has over 32 tokens"),
            ("lambada", {"text": "word"}, "a text is empty"), ("lambada", {"text": " b "}, "a text is empty")):
        path = tmp_path / str(len(cases))
        path.write_text(f"{json.dumps(good)}\n{json.dumps(line)}\n")
        cases.append((f"--{task}={path}", re.escape(f"{path}, line 2 can't be scored (") + ".*" + re.escape(words)))
    for name, text, reason in (("nothing", "\n", "Expecting value"), ("deep", "[" * 100_000, "it is nested more")):
        (tmp_path / name).write_text(text)
        cases.append((f"--lambada={tmp_path}/{name}", rf"{tmp_path}/{name}, line 1 can't be scored \({reason}"))
    for i, (arg, words) in enumerate(cases):
        refused = launch(ROOT / "evaluate.py", f"--out_dir={run.out_dir}", arg, ranks=1 + (i == 0))
        assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1), refused.stderr
        assert re.match(words, refused.stderr), refused.stderr
    with pytest.raises(UserError, match="or has no tokens"):  # some tokenizers drop unknown characters
        read_rows("lambada", path, lambda text: [0] * text.count("a"), 32)


@pytest.mark.parametrize("end", ["", "\n", "\r\n", " \n\n", " "],
                         ids=["nothing", "a newline", "Windows", "several", "a space"])
def test_a_line_end_is_no_part_of_the_last_word(tmp_path, end):
    """Of LAMBADA. White space before the word stays: the context ends before the last space, as in lm_eval."""
    (tmp_path / "lambada").write_text(json.dumps({"text": f"one  two\nthree four{end}"}))
    (row,), _ = read_rows("lambada", tmp_path / "lambada", lambda text: list(text.encode()), 32)
    assert bytes(~i for i in row if i < 0) == b"one  two\nthree" and bytes(i for i in row if i >= 0) == b" four"


def test_a_dataset_with_another_tokenizer_than_the_weights_is_refused(characters, tmp_path):
    """With as many tokens."""
    GPT2LMHeadModel(GPT2Config(vocab_size=28, n_positions=32, n_embd=32, n_layer=1, n_head=1)).save_pretrained(tmp_path)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(28)}, "w0")).save(str(tmp_path / "tokenizer.json"))
    run = launch(ROOT / "evaluate.py", f"--init_from={tmp_path}", f"--dataset={characters}")
    problem = (f"dataset={characters} has another tokenizer than {tmp_path}: prepare its texts with "
               f"python data/prepare.py PATH --tokenizer={tmp_path} --name=NAME\n")
    assert (run.returncode, run.stdout, run.stderr) == (2, "", problem)
