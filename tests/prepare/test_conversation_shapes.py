"""Conversations in the shapes of others: their tokens and masks are those of transformers.

Tests with `index` in their name may fetch GPT-2's tokenizer."""

import json
import random
import runpy
import sys

import numpy as np
import pytest
from conftest import ROOT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from runtime.data.chat import TEMPLATE
from runtime.data.dataset import BEGINS, COUNTS, SPLITS, Dataset, check_dataset, open_tokens
from runtime.data.tokenizer import tokenizer_of
from runtime.export.hf import write_tokenizer

MAIN = runpy.run_path(str(ROOT / "data" / "prepare.py"))["main"]
N = 300
WORDS = [
    "the",
    "càt",
    "漢字",
    "🙂",
    "it's",
    "1,000",
    "\n",
    "\n\n",
    "  ",
    "\t",
    "User:",
    "Assistant:\n",
    "System:",
    "\u3000",
    "\x85",
    "don't",
    "{% if %}",
    "{{ x }}",
    "</s",
    "'ll",
    "...",
    "e\u0301",
    "\r\n",
    "[]",
]


def some_text(rng, least=0):
    """Up to 8 words, perhaps none or white space alone. least: 1 if there must be a letter."""
    text = "".join(rng.choices(WORDS, k=rng.randint(0, 8)))
    return text if text.strip() or not least else f"{text}x"


def turns(rng, number):
    """A conversation of 1 to 3 turns, [{"role", "content"}]. Its first question is unique."""
    messages = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": some_text(rng)})
    for turn in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": some_text(rng) + f"{number}" * (turn == 0)})
        messages.append({"role": "assistant", "content": some_text(rng, least=1)})
    if rng.random() < 0.2:  # what follows the last answer has no loss
        messages.append({"role": "user", "content": some_text(rng)})
    return messages


def plain(rng, number):
    messages = turns(rng, number)
    return {
        "messages": messages,
        "id": number,
        "tools": rng.choice([None, [], "[]", " "]),
    }, messages


def weighted(rng, number):
    """Weights of 0 and 1 at answers, of which at least one has none."""
    messages = turns(rng, number)
    answers = [message for message in messages if message["role"] == "assistant"]
    rng.shuffle(answers)
    for message in answers[1:]:
        message["weight"] = rng.choice([0, 1, 0.0, 1.0])
    return {"messages": messages}, messages


def with_train(rng, number):
    """The last answer counts, the others perhaps not."""
    messages = turns(rng, number)
    answers = [message for message in messages if message["role"] == "assistant"]
    for message in answers:
        message["train"] = rng.random() < 0.5 or message is answers[-1]
    return {"messages": messages}, messages


def with_system(rng, number):
    messages = [message for message in turns(rng, number) if message["role"] != "system"]
    system = some_text(rng)
    added = [{"role": "system", "content": system}] if system.strip() else []
    return {"messages": messages, "system": system}, added + messages


def in_parts(rng, number):
    messages = turns(rng, number)
    for message in messages:
        text = message["content"]
        at = rng.randint(0, len(text))
        message["content"] = [{"type": "text", "text": part} for part in (text[:at], text[at:])]
    return {"messages": messages}, messages


def bare(rng, number):
    messages = turns(rng, number)
    return messages, messages


def sharegpt(rng, number):
    messages = turns(rng, number)
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    lines = [{"from": names[message["role"]], "value": message["content"]} for message in messages]
    return {"conversations": lines, "source": "made up"}, messages


INPUTS = [
    (None, ""),
    ("", ""),
    (" \n", ""),
    ("seven", "seven"),
    (7, "7"),
    (0, "0"),
    (-0.5, "-0.5"),
    (True, "true"),
    (False, "false"),
    ([], "[]"),
    ({"é": [1, None]}, '{"é": [1, null]}'),
]


def alpaca(rng, number):
    """With an input of any kind, a system text and a history, whose answers count."""
    given, text = rng.choice(INPUTS)
    question, answer = f"{some_text(rng)}{number}", some_text(rng, least=1)
    record = {"instruction": question, "output": answer}
    if given is not None or rng.random() < 0.5:
        record["input"] = given
    messages = []
    if rng.random() < 0.5:
        record["system"] = "Be brief."
        messages.append({"role": "system", "content": "Be brief."})
    if rng.random() < 0.5:
        record["history"] = [
            [some_text(rng), some_text(rng, least=1)] for _ in range(rng.randint(0, 2))
        ]
        for asked, said in record["history"]:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    asked = f"{question}\n\n{text}" if text else question
    return record, [
        *messages,
        {"role": "user", "content": asked},
        {"role": "assistant", "content": answer},
    ]


def pair(rng, number):
    question, answer = f"{some_text(rng)}{number}", some_text(rng, least=1)
    return {"prompt": question, "completion": answer}, [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


def lists(rng, number):
    """A prompt and a completion of messages: the answers in the prompt are context, as in TRL."""
    prompt = turns(rng, number)
    completion = [
        {"role": "assistant", "content": some_text(rng, least=1)} for _ in range(rng.randint(1, 2))
    ]
    context = [dict(message) for message in prompt]
    for message in context:
        if message["role"] == "assistant":
            message["weight"] = 0
    return {"prompt": prompt, "completion": completion}, context + completion


SHAPES = {
    "messages": plain,
    "weight": weighted,
    "train": with_train,
    "system": with_system,
    "text parts": in_parts,
    "a list per line": bare,
    "ShareGPT": sharegpt,
    "Alpaca": alpaca,
    "prompt and completion": pair,
    "lists of messages": lists,
}


def prepare(monkeypatch, folder, *args):
    """Run data/prepare.py in this process, and return the folder of the dataset."""
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "prepare.py",
            *map(str, args),
            f"--name={folder}",
            "--overwrite",
            "--format=chat",
            "--val_fraction=0.3",
            "--workers=1",
        ],
    )
    MAIN()
    return folder


def conversations_of(folder):
    """[(ids, whether each counts)] of the conversations of a dataset, and its meta."""
    meta = check_dataset(folder)
    found = []
    for split in SPLITS:
        ids = np.array(open_tokens(Dataset("", 1, folder, meta), split))
        mask = np.fromfile(folder / f"{split}_mask.bin", np.uint8)
        begins = np.flatnonzero(mask & BEGINS)[1:]
        parts = zip(np.split(ids, begins), np.split(mask & COUNTS, begins))
        found += [(own.tolist(), counts.tolist()) for own, counts in parts]
    return found, meta


def by_transformers(tokenizer, messages):
    """(ids, mask) of a conversation up to its last token that counts."""
    made = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    end = len(made["input_ids"]) - made["assistant_masks"][::-1].index(1)
    return made["input_ids"][:end], made["assistant_masks"][:end]


def by_hand(messages, end):
    """(text, mask of its characters) as docs/chat.md says it, up to the last answer that counts."""
    text, mask = "", []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        is_answer = message["role"] == "assistant"
        counts = is_answer and message.get("weight") != 0 and message.get("train") is not False
        header = message["role"].capitalize() + ":\n"
        body = content.strip() + (end if is_answer else "\n\n")
        text += header + body
        mask += [0] * len(header) + [int(counts)] * len(body)
    last = len(mask) - mask[::-1].index(1)
    return text[:last], mask[:last]


def difference(found, wanted):
    """The first pair that differs in two sorted lists, or None: pytest takes long to show all."""
    assert len(found) == len(wanted)
    return next((pair for pair in zip(sorted(found), sorted(wanted)) if pair[0] != pair[1]), None)


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Tokenizers by name: characters, and a BPE of bytes that has learned the template's words."""
    folder = tmp_path_factory.mktemp("bpe")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        ["User:\nAssistant:\nSystem:\n\n the càt 漢字 don't 1,000 \n\n"] * 9,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>").save_pretrained(folder)
    return {"char": "char", "bpe": folder}


def check_shape(monkeypatch, tmp_path, shape, tokenizer):
    """300 conversations of a shape: tokens and masks are transformers', and those of the docs."""
    rng = random.Random(f"{shape} 0")
    records, meant = zip(*(SHAPES[shape](rng, number) for number in range(N)))
    folder = prepare(
        monkeypatch,
        tmp_path / "out",
        write_lines(tmp_path / "a.jsonl", records),
        f"--tokenizer={tokenizer}",
    )
    found, meta = conversations_of(folder)
    assert len(found) == N and meta["problems"] == []
    assert meta["documents"]["train"] + meta["documents"]["val"] == N

    described = meta["tokenizer"]
    if described["kind"] == "hf":
        described = described | {"file": str(folder / "tokenizer.json")}
    (tmp_path / "hf").mkdir()
    write_tokenizer(str(tmp_path / "hf"), described, 1024, meta["template"])
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert "{% generation %}" in theirs.chat_template and theirs.chat_template == TEMPLATE
    assert difference(found, [by_transformers(theirs, messages) for messages in meant]) is None

    decode = tokenizer_of(described)[1]
    texts = [by_hand(messages, theirs.eos_token) for messages in meant]
    assert difference([decode(ids) for ids, _ in found], [text for text, _ in texts]) is None
    if described["kind"] == "char":
        encode = tokenizer_of(described)[0]
        assert difference(found, [(encode(text), mask) for text, mask in texts]) is None
    weights = [sum(mask) for _, mask in found]
    assert min(weights) > 0 and sum(weights) < 0.8 * sum(len(ids) for ids, _ in found)


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
@pytest.mark.parametrize("shape", SHAPES)
def test_300_conversations_are_transformers(monkeypatch, tmp_path, tokenizers, shape, tokenizer):
    check_shape(monkeypatch, tmp_path, shape, tokenizers[tokenizer])


@pytest.mark.parametrize("shape", SHAPES)
def test_index_300_conversations_in_gpt2s_tokens_are_transformers(monkeypatch, tmp_path, shape):
    check_shape(monkeypatch, tmp_path, shape, "gpt2")
