"""Chat templates of others: what loops, fills the memory or is no template is one sentence within 10 seconds."""

import subprocess
import sys
import time

import pytest
from conftest import CHARS, ROOT, patience, random_gpt2

from runtime.data.chat import TEMPLATE, Chat, render
from runtime.errors import UserError
from runtime.export.hf import char_tokenizer

pytestmark = pytest.mark.timeout(60)
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
DOUBLED = "{% set ns = namespace(x='a') %}{% for i in range(N) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
TEMPLATES = {
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
              "it takes too much time or memory"),
    "fills the memory": (DOUBLED.replace("N", "60"), "it takes too much time or memory"),
    "fills it when it is compiled": ("{{ 'a' * 10**12 }}", "it takes too much time or memory"),
    "has a long text": (DOUBLED.replace("N", "26"), "its text has more than 5,000,000 bytes"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: "),
    "is nested": ("{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}", "RecursionError: "),
    "adds a text": ("{{ 1 + 'a' }}", "TypeError: unsupported operand"),
    "takes what isn't there": ("{{ nothing.at_all }}", "UndefinedError: 'nothing' is undefined"),
    "takes another message": ("{{ messages[5].content }}", "UndefinedError: list object has no element 5"),
    "divides by zero": ("{{ 1 // 0 }}", "ZeroDivisionError: "),
    "raises": ("{{ raise_exception('no\n\x1b[2J') }}", "TemplateError: no"),
    "is no template": ("{% for %}", "TemplateSyntaxError: "),
    "reaches for code": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError: access to attribute")}


@pytest.mark.parametrize("template, words", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_that_cannot_be_rendered_is_a_sentence_within_10_seconds(template, words):
    start = time.monotonic()
    with pytest.raises(UserError) as error:
        render(MESSAGES, template, "")
    assert time.monotonic() - start < patience(5)
    message = str(error.value)
    assert message.startswith("the chat template can't be used (") and words in message and "\n" not in message
    assert message.endswith("): correct the template of these weights, or drop --chat")


def test_anothers_template_gives_the_same_as_ours_where_it_is_the_same():
    theirs = render(MESSAGES, TEMPLATE + "{# theirs #}", "</s>")
    assert theirs == render(MESSAGES, TEMPLATE, "</s>") == "User:\nhi\n\nAssistant:\nho</s>Assistant:\n"
    assert render(MESSAGES, "{{ messages[0].content }}\ud83d\U0001f642é", "") == "hi\ud83d\U0001f642é"


def test_a_chat_keeps_within_the_context_with_anothers_template():
    template = "{% for message in messages %}{{ message.content }}|{% endfor %}"
    chat = Chat({"template": template, "block_size": 16}, list, "", 8)
    assert "".join(chat.encode("one")) == "one|"
    chat.add_answer("two")
    assert "".join(chat.encode("three")) == "three|"  # "one|two|three|" leaves 2 of the 4 tokens for an answer


def test_sample_py_says_it_and_nothing_else(tmp_path):
    """With a tokenizer of the library that prints a warning in forks."""
    random_gpt2(0.1, vocab_size=28, n_positions=24, n_embd=32, bos_token_id=0, eos_token_id=0).save_pretrained(tmp_path)
    char_tokenizer(CHARS).save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, ROOT / "sample.py", f"--init_from={tmp_path}", "--device=cpu", "--chat",
               "--max_new_tokens=3", "--start=the"]
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    good = subprocess.run(command, capture_output=True, text=True)
    assert (good.returncode, good.stderr) == (0, "") and "\nthe\n" in good.stdout
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('\x1b[2J') }}")
    bad = subprocess.run(command, capture_output=True, text=True)
    assert (bad.returncode, bad.stdout) == (2, "") and bad.stderr == (
        "the chat template can't be used (TemplateError: \\x1b[2J): correct the template of these weights, or drop "
        "--chat\n")
