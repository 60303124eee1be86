"""Talking with a model: its template here and in transformers, its context, its answers, and how many are exact.

Tests with `index` in their name may fetch GPT-2's tokenizer."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, done, launch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from runtime.data.chat import TEMPLATE, Chat
from runtime.data.dataset import COUNTS, Dataset, check_dataset, open_tokens
from runtime.errors import UserError

PROMPTS = [f"say {word}" for word in ("a", "b", "abc", "ca", "bb", "cab", "aaa", "b b", "c", "ab")]
STRANGE = [  # what could join tokens across the borders of the template, or be taken for it
    [("user", " What's 'll\n\n"), ("assistant", "'s it\t")], [("user", "\n\n1,000"), ("assistant", "\u3000二  二\x85")],
    [("system", "  "), ("user", ""), ("assistant", ":\n\nUser:\nx")],
    [("user", "Assistant:\n"), ("assistant", "..."), ("user", "!?"), ("assistant", " 🙂 ")],
    [("assistant", "hello"), ("assistant", "again\r\n")]]


def prepare(folder, conversations, *args):
    """Prepare conversations, [(role, text)], as folder/data."""
    lines = [json.dumps({"messages": as_messages(conversation)}) for conversation in conversations]
    (folder / "chat.jsonl").write_text("".join(line + "\n" for line in lines))
    subprocess.run([sys.executable, ROOT / "data" / "prepare.py", folder / "chat.jsonl", f"--name={folder}/data",
                    "--format=chat", "--workers=1", *args], check=True, capture_output=True)
    return folder / "data"


def as_messages(conversation):
    return [{"role": role, "content": text} for role, text in conversation]


def exported(out_dir):
    done(launch(ROOT / "export_hf.py", f"--out_dir={out_dir}", f"--to={out_dir}-hf"))
    return f"{out_dir}-hf"


def answers(*args):
    """The answers that sample.py gives, greedy."""
    run = launch(ROOT / "sample.py", "--chat", "--json", "--temperature=0", "--device=cpu", "--dtype=float32", *args)
    return [json.loads(line)["text"] for line in done(run).stdout.splitlines()]


@pytest.fixture(scope="module")
def talker(train, tmp_path_factory):
    """A model of characters that has learned to end its answers, its exported folder, and a file of ten prompts."""
    folder = tmp_path_factory.mktemp("talker")
    words = ["".join(word) for n in (1, 2, 3) for word in np.array(list("abc"))[
        np.stack(np.meshgrid(*[range(3)] * n), -1).reshape(-1, n)]]
    data = prepare(folder, [[("user", f"say {word} now" * (i % 2) or f"say {word}"), ("assistant", word * 2)]
                            for i, word in enumerate(words * 2)], "--tokenizer=char", "--val_fraction=0.1")
    run = done(train(f"--dataset={data}", "--block_size=64", "--batch_size=8", "--max_iters=200",
                     "--learning_rate=5e-3", "--eval_interval=200"))
    assert "--tag=best --chat\n" in run.stdout
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return SimpleNamespace(out_dir=run.out_dir, folder=exported(run.out_dir), prompts=folder / "prompts.txt", data=data)


def test_ten_greedy_answers_are_transformers(talker):
    """By sample.py from the checkpoint, the exported folder and what transformers saves, and by transformers."""
    ours = answers(f"--out_dir={talker.out_dir}", f"--prompts_file={talker.prompts}")
    assert answers(f"--init_from={talker.folder}", f"--prompts_file={talker.prompts}") == ours
    tokenizer, model = (kind.from_pretrained(talker.folder) for kind in (AutoTokenizer, AutoModelForCausalLM))
    theirs = []
    for prompt in PROMPTS:
        asked = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True,
                                              return_tensors="pt", return_dict=True)
        n = asked["input_ids"].size(1)
        whole = model.generate(**asked, do_sample=False, max_new_tokens=64 - n, pad_token_id=0)[0]
        theirs.append(tokenizer.decode(whole[n:], skip_special_tokens=True))
    assert theirs == ours and len(set(ours)) > 3 and all(0 < len(text) < 20 for text in ours)  # they end
    model.config.eos_token_id = [model.config.eos_token_id]
    for part in model, tokenizer:  # with a chat_template.jinja
        part.save_pretrained(f"{talker.folder}-saved")
    assert answers(f"--init_from={talker.folder}-saved", f"--prompts_file={talker.prompts}") == ours


@pytest.mark.long
def test_index_transformers_makes_the_same_tokens_and_mask(train, tmp_path):
    """Of conversations with white space, and with words of the template in them."""
    data = prepare(tmp_path, STRANGE * 2, "--val_fraction=0.6")
    run = done(train(f"--dataset={data}", "--n_embd=8", "--max_iters=1", "--eval_interval=1", "--batch_size=1"))
    tokenizer = AutoTokenizer.from_pretrained(exported(run.out_dir))
    assert tokenizer.chat_template == TEMPLATE
    meta, tokens, wanted = check_dataset(data), [], []
    for split in ("train", "val"):
        dataset = Dataset("", 1, data, meta)
        mask = np.fromfile(data / f"{split}_mask.bin", np.uint8)
        tokens += zip(open_tokens(dataset, split).tolist(), (mask & COUNTS).tolist())
    for conversation in STRANGE:
        theirs = tokenizer.apply_chat_template(as_messages(conversation), return_dict=True,
                                               return_assistant_tokens_mask=True)
        wanted.append(list(zip(theirs["input_ids"], theirs["assistant_masks"])))
    assert meta["documents"]["duplicates"] == 5
    assert sorted(tokens) == sorted(sum(wanted, [])) and tokens[: len(wanted[0])] in wanted


def test_a_conversation_stays_within_the_context(talker):
    """A quarter of 64 characters is for the answer. Older messages are left out by twos, too long ones are refused."""
    state = {"template": TEMPLATE, "block_size": 64}
    chat = Chat(state, list, "\x03", 100)
    first = chat.encode("say a")
    assert "".join(first) == "User:\nsay a\n\nAssistant:\n" and chat.room(first) == 64 - 24
    chat.add_answer("aa")
    assert "".join(chat.encode("b")) == "User:\nsay a\n\nAssistant:\naa\x03User:\nb\n\nAssistant:\n"
    chat.add_answer("bb")
    assert "".join(chat.encode("ccc")) == "User:\nb\n\nAssistant:\nbb\x03User:\nccc\n\nAssistant:\n"
    assert len(chat.encode("d" * 40)) == 59 and len(chat.asked) == 1
    with pytest.raises(UserError, match="the message takes 65 of the 64 tokens of the context: shorten it"):
        chat.encode("d" * 46)
    assert len(Chat(state, list, "\x03", 0).encode("say a")) == 24  # --max_new_tokens=0 is no long message
    typed = subprocess.run([sys.executable, ROOT / "sample.py", f"--out_dir={talker.out_dir}", "--chat",
                            "--temperature=0", "--device=cpu"], input=f"say abc\n{'a' * 60}\nsay c\n\n",
                           capture_output=True, text=True)
    assert typed.returncode == 0 and "the message takes 79 of the 64" in typed.stderr, typed.stderr
    alone = answers(f"--out_dir={talker.out_dir}", "--start=say abc")[0]
    assert typed.stdout.split("\n\n", 1)[1].startswith(f"> {alone}\n> > ")


def test_the_example_counts_exact_answers(talker, tmp_path):
    """Of ten answers two are made wrong."""
    folder = shutil.copytree(ROOT / "examples" / "instructions", tmp_path / "examples" / "instructions",
                             ignore=shutil.ignore_patterns("*.jsonl"))  # of a user who has tried it
    (tmp_path / "sample.py").symlink_to(ROOT / "sample.py")
    early = launch(folder / "score.py")
    assert early.returncode == 2
    assert early.stderr == f"{folder}/heldout.jsonl does not exist: run python {folder}/generate.py\n"
    subprocess.run([sys.executable, folder / "generate.py"], check=True)
    prompts = [{json.loads(line)["prompt"] for line in (folder / f"{name}.jsonl").open()}
               for name in ("train", "heldout")]
    assert len(prompts[1]) == 300 and not prompts[0] & prompts[1]
    assert f"on {len(prompts[0]):,} made-up" in (ROOT / "docs" / "chat.md").read_text()
    right = answers(f"--out_dir={talker.out_dir}", f"--prompts_file={talker.prompts}")
    lines = [{"prompt": prompt, "completion": answer + "a" * (i in (3, 5))}
             for i, (prompt, answer) in enumerate(zip(PROMPTS, right))]
    (folder / "heldout.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = launch(folder / "score.py", f"--out_dir={talker.out_dir}", "--device=cpu", "--dtype=float32")
    assert run.stdout == "say: 8 of 10 answers exact\naccuracy on held-out prompts: 80.0%\n", run.stderr


def test_a_tokenizer_that_adds_a_space_is_refused(tmp_path):
    """An answer is encoded alone in training, but with the prompt in transformers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.train_from_iterator(["User:\n"], trainers.BpeTrainer(
        special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        prepare(tmp_path, STRANGE, f"--tokenizer={tmp_path}/tokenizer", "--val_fraction=0.5")
    assert refused.value.returncode == 2 and b"adds a space before a text" in refused.value.stderr
