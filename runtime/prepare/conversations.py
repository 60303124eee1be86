"""Conversations in the shapes in which others write them, as messages.

docs/chat.md has the table of shapes and fields. What can't be said with our chat template, and what
may change the meaning, is refused by name and counted.
"""

import collections
import json
from collections.abc import Collection
from typing import Any

from runtime.data.chat import END_OF_ANSWER, ROLES
from runtime.data.tokenizer import check_spaces
from runtime.errors import UserError
from runtime.output import counted
from runtime.prepare.fields import METADATA, Fields
from runtime.prepare.json_records import json_value

LISTS = ("messages", "conversations", "conversation")  # fields that hold a list of messages
PAIRS = (("instruction", "output"), ("prompt", "completion"))
ROLE_OF = {role: role for role in ROLES} | {"human": "user", "gpt": "assistant"}
NO_CONVERSATION = (
    "no conversation: give messages, conversations, prompt and completion, or instruction and "
    "output, as docs/chat.md says")
SHAPE = "one object per line, or an array of objects"  # of a file
ALPACA_BEGINS = "Below is an instruction that describes a task"  # of "text" in Stanford's Alpaca
ALPACA_ENDS = "### Response:\n"
MOST_PROBLEMS = 20  # different ones that are printed


class Conversations:
    """Turns records into messages. Afterwards, `unused` and `problems` say what was left out.

    ignored: names of fields that are left out, of conversations and of messages.
    """

    def __init__(self, ignored: Collection[str] = ()) -> None:
        self.ignored = frozenset(ignored)
        self.total = 0
        self.unused: collections.Counter[str] = collections.Counter()  # {field: conversations}
        self.problems: collections.Counter[str] = collections.Counter()  # {problem: conversations}
        self.first: dict[str, str] = {}  # {problem: where it is first}

    def read(self, record: bytes, place: str) -> bytes:
        """Return the messages of a conversation in JSON, as UTF-8, or b"" if it can't be used.

        record: the conversation in JSON. place: where it is, for the user.
        """
        self.total += 1
        conversation = Conversation(self.ignored)

        # Whatever is wrong is a problem of this conversation alone
        content = b""
        try:
            messages = conversation.messages_of(json_value(record, SHAPE))
            content = json.dumps(messages, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            conversation.refuse("half a character, such as \\ud83d alone: correct it")
        except RecursionError:
            conversation.refuse("it is nested too deeply: correct it")
        except ValueError as error:
            conversation.refuse(str(error))

        # Count it, and remember where it was first
        self.unused.update(conversation.unused)
        for problem, number in conversation.problems.items():
            self.problems[problem] += 1
            where = place
            if number is not None:
                where = f"{place}, message {number}"
            self.first.setdefault(problem, where)
        if conversation.problems:
            return b""
        return content

    def report(self) -> list[str]:
        """Return a line for each problem, the most frequent one first."""
        told = self.problems.most_common(MOST_PROBLEMS)
        lines = []
        for problem, count in told:
            lines.append(f"{count:,} of {self.total:,} conversations can't be used, "
                         f"the first is {self.first[problem]}: {problem}")
        more = len(self.problems) - len(told)
        if more:
            lines.append(f"and {counted(more, 'other problem')}: correct these first")
        return lines


class Conversation:
    """Reads one conversation, and notes all that is wrong with it.

    problems: {sentence: the number of its message, or None}. unused: names of ignored fields.
    """

    def __init__(self, ignored: Collection[str]) -> None:
        self.ignored = ignored
        self.unused: set[str] = set()
        self.problems: dict[str, int | None] = {}
        self.number: int | None = None  # of the message that is read

    def refuse(self, problem: str) -> None:
        """Note a problem of the message that is read, or of the whole conversation."""
        self.problems.setdefault(problem, self.number)

    def messages_of(self, value: Any) -> list[dict[str, Any]]:
        """Return [{"role", "content"}], with "weight": 0 where an answer isn't trained on.

        They end with the last answer that is. If there are problems, they aren't complete. Raises
        ValueError.
        """
        # The outermost value is one object, or only its list
        if isinstance(value, list):  # as nanochat writes conversations
            value = {"messages": value}
        if not isinstance(value, dict):
            raise ValueError(NO_CONVERSATION)
        # A list of messages, or a question and its answer
        fields = Fields(value, self.ignored)
        system = self.take_text(fields, "system")
        name = next((name for name in LISTS if name in fields), None)
        if name is None:
            messages = self.read_pair(fields)
        else:
            messages = self.read_list(fields.take(name), name)
        # Whatever is left of the fields may change the meaning
        drop_copies(fields, messages)
        self.finish(fields)

        # A system message in a field of its own goes first
        if system.strip():
            if messages and messages[0]["role"] == "system":
                self.refuse("both a field 'system' and a system message: keep one of them")
            messages.insert(0, self.message("system", system))
        return self.up_to_last_answer(messages)

    def up_to_last_answer(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages up to the last answer that is trained on.

        So what is trained on equally is equal, and one of the two is a duplicate.
        """
        # Answers with weight 0 are context
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        trained = [i for i in answers if "weight" not in messages[i]]
        if trained:
            return messages[: trained[-1] + 1]
        if not self.problems:
            if answers:
                self.refuse("no answer that is trained on: remove the conversation, or give an "
                            "answer the weight 1")
            else:
                self.refuse("no answer: add a message of the role assistant")
        return []

    def read_pair(self, fields: Fields) -> list[dict[str, Any]]:
        """Return the messages of a prompt and its answer, after those of "history"."""
        # The first shape whose two fields are there
        for names in PAIRS:
            if names[0] in fields and names[1] in fields:
                question = fields.take(names[0])
                answer = fields.take(names[1])
                break
        else:
            raise ValueError(NO_CONVERSATION)
        messages = self.read_history(fields.take("history"))

        # The question may be a list of messages. Its answers are context, as in TRL
        if isinstance(question, list):
            messages += self.read_list(question, "prompt", weight=0)
        else:
            text = fields.take("input")
            if isinstance(question, str):
                question = self.with_input(question, text)
            messages.append(self.message("user", question))

        # So may be the answer
        if not isinstance(answer, list):
            return [*messages, self.message("assistant", answer)]
        answers = self.read_list(answer, "completion")
        if any(message["role"] != "assistant" for message in answers):
            self.refuse("the completion has messages of other roles than assistant: use the shape "
                        "messages")
        return messages + answers

    def read_history(self, history: Any) -> list[dict[str, Any]]:
        """Return the messages of [[question, answer], ...]. The answers count, as elsewhere."""
        pairs = history or []
        if not isinstance(pairs, list) or any(
                not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
            self.refuse("the field 'history' isn't a list of [question, answer]: correct it")
            return []

        # Each pair is a question and its answer
        messages = []
        for question, answer in pairs:
            messages.append(self.message("user", question))
            messages.append(self.message("assistant", answer))
        return messages

    def read_list(self, values: Any, name: str, weight: int = 1) -> list[dict[str, Any]]:
        """Return the messages of a list. weight: of answers that have none of their own."""
        if not isinstance(values, list):
            self.refuse(f"the field {name!r} isn't a list of messages: correct it")
            return []
        messages = []
        for self.number, value in enumerate(values, 1):
            messages.append(self.read_message(value, weight))
        self.number = None
        return messages

    def read_message(self, value: Any, weight: int) -> dict[str, Any]:
        """Return the message of {"role", "content"}, or of ShareGPT's {"from", "value"}."""
        if isinstance(value, list):
            self.refuse("a list in the place of a message: write one conversation per line or "
                        "element, as docs/chat.md says")
            return {"role": None, "content": ""}
        if not isinstance(value, dict):
            self.refuse("a message without a role: write it as an object with a role and a content")
            return {"role": None, "content": ""}

        # What of the object is used; finish() refuses the rest
        fields = Fields(value, self.ignored)
        role = self.take_role(fields)
        content_name = "value"
        if "content" in fields:
            content_name = "content"
        content = fields.take(content_name)
        weight = self.take_weight(fields, role, weight)
        self.finish(fields)
        return self.message(role, content, weight)

    def take_role(self, fields: Fields) -> str | None:
        """Return the role of a message, or None if it has none that is known."""
        # OpenAI's messages have "role", and ShareGPT's "from"
        name = "from"
        if "role" in fields:
            name = "role"
        said = fields.take(name)
        if isinstance(said, str) and said in ROLE_OF:
            return ROLE_OF[said]
        # A short value is shown, of which Python's form can be printed
        shown = "of another type"
        if isinstance(said, str | int | None):
            shown = repr(said)[:40]
        self.refuse(f"the role {shown}: use system, user or assistant")
        return None

    def message(self, role: str | None, content: Any, weight: int = 1) -> dict[str, Any]:
        """Return a message without the white space around it, which the template leaves out."""
        # Content is a text, or a list of parts as in multimodal data
        if isinstance(content, list):
            content = self.text_of_parts(content)
        if not isinstance(content, str):
            self.refuse(f"no text in a message of the role {role}: correct its content")
            content = ""
        elif role == "assistant" and not content.strip():
            self.refuse("an empty answer: complete or remove it")
        # What the tokens of a conversation can't have in them
        if END_OF_ANSWER in content:
            self.refuse("U+0003 in a message, which ends answers: remove it")
        try:
            check_spaces(content)
        except UserError as error:
            self.refuse(str(error))

        # The template needs no weight where the answer counts
        message = {"role": role, "content": content.strip()}
        if role == "assistant" and weight == 0:
            message["weight"] = 0
        return message

    def text_of_parts(self, parts: list[Any]) -> str | None:
        """Return the text of [{"type": "text", "text"}, ...], joined as transformers joins it."""
        texts = []
        for part in parts:
            # A part that is no object is refused by its type
            values = part
            if not isinstance(part, dict):
                values = {"type": type(part).__name__}
            fields = Fields(values, self.ignored)
            kind = fields.take("type")
            text = fields.take("text")
            if kind != "text" or not isinstance(text, str):
                self.refuse(f"a part of the type {str(kind)[:40]!r}: the model reads text alone, "
                            "so remove it")
                return ""
            self.finish(fields, metadata=())
            texts.append(text)
        if not texts:
            return None
        return "".join(texts)

    def take_weight(self, fields: Fields, role: str | None, default: int) -> int:
        """Return 1 if a message is trained on, else 0, by its "weight" or "train"."""
        given = set()
        for name in ("weight", "train"):
            value = fields.take(name)
            if value is None:
                continue
            shown = f"{name} {json.dumps(value)[:40]}"
            if not isinstance(value, int | float) or value not in (0, 1):
                self.refuse(f"the {shown}: use 0 or 1, or true or false")
                continue
            if value and role in ("system", "user"):
                self.refuse(f"the {shown} of a {role} message: only answers are trained on, so "
                            "remove it")
            given.add(int(value))
        # Both may be there, and say the same
        if len(given) > 1:
            self.refuse("a weight and a train that contradict each other: keep one of them")
        if not given:
            return default
        return given.pop()

    def take_text(self, fields: Fields, name: str) -> str:
        """Return the text of a field, or an empty one."""
        value = fields.take(name)
        if value is not None and not isinstance(value, str):
            self.refuse(f"the field {name!r} isn't a text: correct it")
            return ""
        return value or ""

    def with_input(self, question: str, value: Any) -> str:
        """Return Alpaca's instruction with its input below it, as JSON if it isn't text."""
        if value is None:
            return question

        # A value of another type is shown as the JSON that it was
        text = value
        if not isinstance(value, str):
            try:
                text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            except ValueError:
                self.refuse("NaN or Infinity in the field 'input', which JSON doesn't have: "
                            "correct it")
                return question
        if not text.strip():
            return question
        return f"{question}\n\n{text}"

    def finish(self, fields: Fields, metadata: Collection[str] = METADATA) -> None:
        """Refuse what is left of an object's fields, and note what was ignored of them."""
        for problem in fields.refusals(metadata):
            self.refuse(problem)
        self.unused |= fields.unused


def drop_copies(fields: Fields, messages: list[dict[str, Any]]) -> None:
    """Drop fields that repeat the messages: their first question, and Alpaca's text of them."""
    # A prompt that repeats the first question, as in UltraChat
    prompt = fields.left.get("prompt")
    questions = [message["content"] for message in messages if message["role"] == "user"]
    if isinstance(prompt, str) and questions and prompt.strip() == questions[0]:
        fields.drop("prompt")
    # Stanford's Alpaca has the whole text beside its parts
    text = fields.left.get("text")
    if isinstance(text, str) and messages and text.startswith(ALPACA_BEGINS):
        if text.rstrip().endswith(ALPACA_ENDS + messages[-1]["content"]):
            fields.drop("text")
