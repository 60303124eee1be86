"""What conversations of others have beside their messages: taken, ignored, or refused by name."""

import json

import pytest

from runtime.prepare.conversations import Conversations


def messages_of(record, ignored=()):
    """The messages of a record that can be used."""
    chats = Conversations(ignored)
    content = chats.read(json.dumps(record).encode(), "a line")
    assert chats.report() == []
    return json.loads(content)


def problems_of(record, ignored=()):
    """What is wrong with a record, {problem: the message it is in, or ""}."""
    chats = Conversations(ignored)
    content = chats.read(
        record if isinstance(record, bytes) else json.dumps(record).encode(), "a line"
    )
    assert content == b""
    return {
        problem: chats.first[problem].removeprefix("a line").removeprefix(", ")
        for problem in chats.problems
    }


def said(*contents, **more):
    """Messages of user and assistant in turn. more: fields of the last one."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    messages[-1] |= more
    return messages


ALPACA = ("Below is an instruction that describes a task. Write a response that appropriately "
          "completes the request.\n\n### Instruction:\nq\n\n### Response:\na\n")
TOOL = {"type": "function", "function": {"name": "f"}}
REFUSED = {
    "tools": (
        {"messages": said("q", "a"), "tools": [TOOL]},
        "the field 'tools': the chat template has no place for "
        "tools: write them into a system message, or leave it out with --ignore_fields=tools",
    ),
    "tools in JSON": (
        {"conversations": said("q", "a"), "tools": json.dumps([TOOL])},
        "the field 'tools': the chat",
    ),
    "tool calls": (
        {"messages": said("q", "a", tool_calls=[TOOL])},
        "the field 'tool_calls': the chat template has "
        "no place for tool calls: write them into the text of the answer, or leave it out with",
    ),
    "a name": (
        {"messages": [{"role": "user", "content": "q", "name": "Ann"}, *said("q", "a")]},
        "the field 'name': ",
    ),
    "images": (
        {"messages": said("q", "a"), "images": ["a.jpg"]},
        "the field 'images': the model reads text alone",
    ),
    "an image": (
        {"messages": [*said([{"type": "image_url", "image_url": {"url": "a"}}], "a")]},
        "a part of the type 'image_url': the model reads text alone, so remove it",
    ),
    "a part with more": (
        {"messages": said([{"type": "text", "text": "q", "style": "bold"}], "a")},
        "the field 'style' isn't known",
    ),
    "no part": (
        {"messages": said([], "a")},
        "no text in a message of the role user: correct its content",
    ),
    "parts of text": (
        {"messages": said(["q"], "a")},
        "a part of the type 'str': the model reads text alone",
    ),
    "a tool's role": (
        {"messages": [*said("q"), {"role": "tool", "content": "x"}, *said("q", "a")]},
        "the role 'tool': use system, user or assistant",
    ),
    "another role": (
        {"conversations": [{"from": "bing", "value": "x"}, *said("q", "a")]},
        "the role 'bing': use",
    ),
    "no role": ({"messages": [{"content": "x"}, *said("q", "a")]}, "the role None: use"),
    "texts as messages": (
        {"conversations": ["q", "a"]},
        "a message without a role: write it as an object with",
    ),
    "no list": ({"messages": "q"}, "the field 'messages' isn't a list of messages: correct it"),
    "no content": (
        {"messages": [{"role": "user"}, *said("q", "a")]},
        "no text in a message of the role user: correct",
    ),
    "an empty answer": ({"messages": said("q", " \n")}, "an empty answer: complete or remove it"),
    "an empty completion": (
        {"prompt": "q", "completion": ""},
        "an empty answer: complete or remove it",
    ),
    "no answer": ({"messages": said("q")}, "no answer: add a message of the role assistant"),
    "no messages": ({"messages": []}, "no answer: add a message of the role assistant"),
    "no answer counts": (
        {"messages": said("q", "a", weight=0)},
        "no answer that is trained on: remove the conver",
    ),
    "half a weight": (
        {"messages": said("q", "a", weight=0.5)},
        "the weight 0.5: use 0 or 1, or true or false",
    ),
    "a weight in words": (
        {"messages": said("q", "a", weight="0")},
        'the weight "0": use 0 or 1, or true or false',
    ),
    "a weight in a list": (
        {"messages": said("q", "a", train=[])},
        "the train []: use 0 or 1, or true or false",
    ),
    "a contradiction": (
        {"messages": said("q", "a", weight=0, train=True)},
        "a weight and a train that contradict",
    ),
    "a question's weight": (
        {"messages": [*said("q", weight=1), *said("q", "a")]},
        "the weight 1 of a user message: only answers are trained on, so remove it",
    ),
    "a loss mask": (
        {"messages": said("q", "a", loss_mask=0)},
        "the field 'loss_mask' isn't known, and may change the "
        "meaning: leave it out with --ignore_fields=loss_mask",
    ),
    "a preference": (
        {"prompt": "q", "completion": "a", "label": False},
        "the field 'label' isn't known, and may",
    ),
    "context": (
        {"instruction": "q", "output": "a", "the context": "x"},
        "the field 'the context' isn't known, and "
        "may change the meaning: leave it out with --ignore_fields='the context'",
    ),
    "text of its own": (
        {"instruction": "q", "output": "a", "text": "a poem"},
        "the field 'text' isn't known",
    ),
    "text with the messages in it": (
        {"instruction": "q", "output": "a", "text": "a quarter of a day"},
        "the field 'text' isn't known",
    ),
    "text of another answer": (
        {"instruction": "q", "output": "b", "text": ALPACA},
        "the field 'text' isn't known",
    ),
    "a prompt of its own": (
        {"messages": said("q", "a"), "prompt": "be"},
        "the field 'prompt' isn't known",
    ),
    "two lists": (
        {"messages": said("q", "a"), "conversations": said("q", "b")},
        "the field 'conversations' isn't kn",
    ),
    "input of a list": (
        {"prompt": said("q"), "completion": "a", "input": "x"},
        "the field 'input' isn't known",
    ),
    "two systems": (
        {"messages": [{"role": "system", "content": "x"}, *said("q", "a")], "system": "y"},
        "both a field 'system' and a system message: keep one of them",
    ),
    "no system text": (
        {"messages": said("q", "a"), "system": 5},
        "the field 'system' isn't a text: correct it",
    ),
    "a flat history": (
        {"instruction": "q", "output": "a", "history": ["q", "a"]},
        "the field 'history' isn't a list of [question, answer]: correct it",
    ),
    "half a history": (
        {"instruction": "q", "output": "a", "history": [["q", None]]},
        "no text in a message of the ",
    ),
    "a number as answer": (
        {"instruction": "q", "output": 14},
        "no text in a message of the role assistant: correct",
    ),
    "ids as prompt": (
        {"prompt": 3, "completion": "x"},
        "no text in a message of the role user: correct its content",
    ),
    "a completion that asks": (
        {"prompt": "q", "completion": said("q", "a")},
        "the completion has messages of other roles than assistant: use the shape messages",
    ),
    "no completion": (
        {"prompt": "q", "completion": None},
        "no conversation: give messages, conversations, prompt and",
    ),
    "no output": ({"instruction": "x", "input": "y"}, "no conversation: give messages"),
    "chosen": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "no conversation: give messages"),
    "a number": (5, "no conversation: give messages"),
    "end of an answer": (
        {"messages": said("q\3", "a")},
        "U+0003 in a message, which ends answers: remove it",
    ),
    "no JSON": (
        b"[",
        "invalid JSON (Expecting value): write one object per line, or an array of objects",
    ),
    "a long number": (
        b'{"prompt": "q", "completion": "a", "input": 1' + b"0" * 5000 + b"}",
        "a number of more than 4,300 digits: write it as text",
    ),
    "a long name": (
        {"messages": said("q", "a"), "x" * 5000: 1},
        f"the field '{'x' * 60}' isn't known",
    ),
    "Infinity as input": (
        b'{"instruction": "x", "output": "y", "input": -Infinity}',
        "NaN or Infinity in the field 'input', which JSON doesn't have: correct it",
    ),
    "NaN inside of an object as input": (
        b'{"instruction": "x", "output": "y", "input": {"a": [NaN]}}',
        "NaN or Infinity in the field 'input', which JSON doesn't have: correct it",
    ),
    "two weights": (
        b'{"messages": [{"role": "assistant", "content": "a", "weight": 0, "weight": 1}]}',
        "the field 'weight' twice in an object: keep one of the two",
    ),
    "no UTF-8": (b'{"prompt": "\xe9"}', "invalid UTF-8: save the file as UTF-8"),
    "half a character": (
        b'{"prompt": "x", "completion": "\\ud83e"}',
        "half a character, such as \\ud83d alone: ",
    ),
    "deep nesting": (
        # Python 3.14 parses 5,000 levels
        b'{"messages": [' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"]}",
        "it is nested too deeply",
    ),
    "a deep field": (
        b'{"prompt": "x", "completion": "y", "z": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
        "the field 'z' isn't known|it is nested too deeply",
    ),
    "spaces": (
        {"prompt": "x" + " " * 600_000 + "y", "completion": "a"},
        "over 500,000 spaces or line ends in a row",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name):
    record, words = REFUSED[name]
    problems = problems_of(record)
    assert len(problems) == 1, problems
    problem = next(iter(problems))
    assert any(problem.startswith(start) for start in words.split("|")), problem
    assert "\n" not in problem and len(problem) < 250


def test_all_problems_of_a_conversation_are_told_at_once():
    messages = [{"role": "tool", "content": "x"}, *said("q", "", tool_calls=[TOOL])]
    problems = problems_of({"messages": messages, "tools": [TOOL], "topic": "x"})
    assert [(problem[:18], where) for problem, where in problems.items()] == [
        ("the role 'tool': u", "message 1"),
        ("the field 'tool_ca", "message 3"),
        ("an empty answer: c", "message 3"),
        ("the field 'tools':", ""),
        ("the field 'topic' ", ""),
    ]


def test_what_says_nothing_is_no_problem_and_what_is_not_used_is_counted():
    """As Parquet fills the fields that other rows have, and as published sets have them."""
    empty = {
        "tool_calls": None,
        "name": "",
        "function_call": {"name": None, "arguments": None},
        "weight": None,
    }
    record = {
        "messages": [message | empty for message in said("q", "a")],
        "conversations": None,
        "images": [],
        "tools": " [] ",
        "system": None,
        "topic": float("nan"),
    }
    assert messages_of(record) == said("q", "a")
    chats = Conversations({"topic", "score"})
    for extra in (
        {"id": 1, "topic": "x"},
        {"id": 2, "prompt": " q "},
        {"text": ALPACA},
        {"score": None},
    ):
        assert json.loads(
            chats.read(json.dumps({"messages": said("q", "a")} | extra).encode(), "")
        ) == said("q", "a")
    assert chats.unused == {"id": 2, "topic": 1, "prompt": 1, "text": 1} and not chats.problems


def test_fields_that_are_ignored_are_left_out_of_conversations_and_messages():
    record = {"messages": said("q", "a", weight=0, mood="x"), "tools": [TOOL], "system": "be"}
    assert messages_of(record, {"weight", "mood", "tools", "system"}) == said("q", "a")


def test_what_follows_the_last_answer_that_counts_is_left_out():
    """So that conversations which are trained on equally are equal, and one of them is dropped."""
    same = [
        said("q", "a"),
        said("q", "a", weight=1),
        said(" q", "a\n", "more"),
        said("q", "a", "more", "no", weight=0),
    ]
    assert [messages_of({"messages": messages}) for messages in same] == [said("q", "a")] * 4
    context = said("q", "a", "more", "yes")
    context[1]["weight"] = 0
    assert messages_of(context) == context
