"""What users of other projects reported about their conversations, with what happens here.

Each test names the report. What is trained on is shown between < and >, and $ ends an answer.
"""

import json
import random

import datasets
import pytest
from transformers import AutoTokenizer

from runtime.data.chat import TEMPLATE, encode_conversation
from runtime.errors import UserError
from runtime.export.hf import write_tokenizer
from runtime.prepare import inputs
from runtime.prepare.conversations import Conversations
from runtime.prepare.pipeline import Reader

OPTIONS = {"format": "chat", "val_fraction": 0.5, "ignore_fields": []}


def shown(record):
    """The text of a conversation, with what is trained on between < and >."""
    chats = Conversations()
    content = chats.read(json.dumps(record).encode(), "a line")
    assert chats.report() == []
    ids, mask = encode_conversation(json.loads(content), lambda text: [*map(ord, text)], ord("$"))
    text = ""
    before = 0
    for number, counts in zip([*ids, ord("\n")], [*(counts & 1 for counts in mask), 0]):
        text += "<" * (counts > before) + ">" * (counts < before) + chr(number)
        before = counts
    return text.removesuffix("\n")


def refusal(tmp_path, name, content):
    """The sentences of a file that can't be used."""
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as refused:
        list(Reader([(str(tmp_path / name), None)], OPTIONS, False).rows())
    return str(refused.value).replace(f"{tmp_path}/", "")


def test_litgpt_1504_follow_up_questions_are_left_out():
    """LIMA's later turns became examples without the turns before, or none."""
    turns = [("human", "q1"), ("gpt", "a1"), ("human", "q2"), ("gpt", "a2")]
    record = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    assert shown(record) == "User:\nq1\n\nAssistant:\n<a1$>User:\nq2\n\nAssistant:\n<a2$>"
    lima = {"conversations": ["q1", "a1", "q2", "a2"], "source": "multi_turn"}
    chats = Conversations()
    assert chats.read(json.dumps(lima).encode(), "line 1") == b""
    assert chats.report() == [
        "1 of 1 conversations can't be used, the first is line 1, message 1: a message without a "
        "role: write it as an object with a role and a content"]


def test_axolotl_1703_an_answer_that_is_wrong_is_context():
    """weight: 0 was needed to learn how to recover from a bad answer, but not the bad answer."""
    messages = [
        {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "5", "weight": 0},
        {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "4", "weight": 1}]
    assert shown({"messages": messages}) == (
        "User:\n2 + 2?\n\nAssistant:\n5$User:\nSure?\n\nAssistant:\n<4$>")


def test_trl_4147_the_header_of_a_completion_is_not_trained_on():
    """The labels of a completion in messages began with its header, "<assistant>"."""
    record = {
        "prompt": [{"role": "system", "content": "SYSTEM"},
                   {"role": "user", "content": "QUESTION"}],
        "completion": [{"role": "assistant", "content": "ANSWER"}]}
    assert shown(record) == "System:\nSYSTEM\n\nUser:\nQUESTION\n\nAssistant:\n<ANSWER$>"


def test_llama_factory_7344_an_input_that_is_not_there():
    """Omitting the optional input ended in an error."""
    assert shown({"instruction": "i", "output": "o"}) == "User:\ni\n\nAssistant:\n<o$>"
    assert shown({"instruction": "i", "input": "", "output": "o"}) == "User:\ni\n\nAssistant:\n<o$>"


def test_llama_factory_7547_tools_that_are_blank():
    """"tools": " " ended in "Invalid JSON format in tool description"."""
    for tools in (" ", "", "[]", [], None):
        record = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
                  "tools": tools, "system": " "}
        assert shown(record) == "User:\nq\n\nAssistant:\n<a$>"


def test_llama_factory_2529_roles_of_tools(tmp_path):
    """A set of function calls ended in a traceback, "Invalid role tag in ..."."""
    calls = [{"from": "human", "value": "q"}, {"from": "function_call", "value": "f()"},
             {"from": "observation", "value": "5"}, {"from": "gpt", "value": "a"}]
    plain = [calls[0], calls[3]]
    rows = [{"conversations": row} for row in (plain, calls, plain, calls)]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    assert refusal(tmp_path, "glaive.jsonl", content).split("\n") == [
        "2 of 4 conversations can't be used, the first is glaive.jsonl, line 2, message 2: the "
        "role 'function_call': use system, user or assistant",
        "2 of 4 conversations can't be used, the first is glaive.jsonl, line 2, message 3: the "
        "role 'observation': use system, user or assistant; or skip such conversations with "
        "--skip_unreadable"]


def test_nanochat_692_a_line_that_is_no_json(tmp_path):
    """A list of messages per line: a broken line, or a wrong role, was reported without its line."""
    good = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert shown(good) == "User:\nq\n\nAssistant:\n<a$>"
    bot = [good[0] | {"role": "bot"}, *good]
    lines = [json.dumps(good), "", json.dumps(good)[:-1], json.dumps(bot)]
    assert refusal(tmp_path, "identity.jsonl", "\n".join(lines)).split("\n") == [
        "1 of 3 conversations can't be used, the first is identity.jsonl, line 3: invalid JSON "
        "(Expecting ',' delimiter): write one object per line, or an array of objects",
        "1 of 3 conversations can't be used, the first is identity.jsonl, line 4, message 1: the "
        "role 'bot': use system, user or assistant; or skip such conversations with "
        "--skip_unreadable"]


def test_transformers_47325_a_short_answer_leaves_the_next_question_out_of_the_mask(tmp_path):
    """All of a user's turn was in the mask if the answer before it was short."""
    messages = [{"role": "assistant", "content": "A"}, {"role": "user", "content": "user message"},
                {"role": "assistant", "content": "B"}]
    assert shown(messages) == "Assistant:\n<A$>User:\nuser message\n\nAssistant:\n<B$>"
    chars = "".join(sorted({*"Assistant:\nUser:\nuser message\n\nAB\3"}))
    described = {"kind": "char", "chars": chars, "end_of_text": chars.index("\3")}
    write_tokenizer(str(tmp_path), described, 64, TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    made = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True)
    counted = [chars[i] for i, counts in zip(made["input_ids"], made["assistant_masks"]) if counts]
    assert "".join(counted) == "A\3B\3"


def test_open_instruct_638_caches_beside_the_data(tmp_path):
    """A set that was loaded and shuffled left a cache-....arrow, which was read as data."""
    answer = {"role": "assistant", "content": "a"}
    rows = [{"messages": [{"role": "user", "content": f"q{i}"}, answer]} for i in range(20)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    loaded.shuffle(seed=0).map(lambda row: row | {"n": random.random()})
    caches = list((tmp_path / "saved").glob("cache-*.arrow"))
    assert caches
    files = inputs.find_files([str(tmp_path / "saved")])
    assert files == [str(tmp_path / "saved" / "data-00000-of-00001.arrow")]
    assert [json.loads(row) for _, row in inputs.read_conversations(files[0])] == rows
