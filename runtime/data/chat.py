"""Conversations as plain text.

GPT-2 has no tokens for roles, so they are words, and end-of-text ends each answer.
"""

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from runtime.data.dataset import BEGINS, COUNTS
from runtime.data.limited import call_limited
from runtime.errors import UserError
from runtime.untrusted import check_type

# Ends an answer in a dataset of characters, which has no end-of-text: U+0003, END OF TEXT
END_OF_ANSWER = "\x03"
ROLES = ("system", "user", "assistant")
# transformers' renderer can't be used by two threads at once
RENDERER = threading.Lock()
# A Jinja template as in transformers, which also finds the answers between the generation tags
TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")

Messages = list[dict]  # {"role", "content"} each


def render(messages: Messages, template: str, eos_token: str) -> str:
    """Return the text of a conversation, up to where the next answer begins. Raises UserError.

    The template of somebody else is sandboxed by transformers, so it runs no code. But it may loop
    for hours, or double a text until the memory is full: it is rendered in a process with limits.
    """
    # Ours needs no limits
    if template == TEMPLATE:
        text, _ = render_here(messages, TEMPLATE, eos_token)
        return text

    # Import here what the process would import each time
    render_here([], TEMPLATE, "")
    try:
        text = call_limited(lambda: render_here(messages, template, eos_token)[0])
        check_type(text, str)
    except ValueError as error:
        raise UserError(
            f"the chat template can't be used ({error}): correct the template of these weights, "
            "or drop --chat"
        ) from None
    return text


def render_here(
    messages: Messages, template: str, eos_token: str, ask: bool = True
) -> tuple[str, list[tuple[int, int]]]:
    """Return (the text of a conversation, the (begin, end) of its answers).

    Only TEMPLATE marks the answers. ask: end with the header of an answer. Raises any exception if
    the template isn't ours.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    # Our template alone has the tags that mark answers
    is_ours = template == TEMPLATE
    with RENDERER:
        rendered: Any = render_jinja_template(
            [messages],
            chat_template=template,
            return_assistant_tokens_mask=is_ours,
            add_generation_prompt=ask,
            eos_token=eos_token,
            bos_token=eos_token,
        )
    texts, spans = rendered
    if not is_ours:
        return texts[0], []
    return texts[0], spans[0]


def encode_conversation(
    messages: Messages, encode: Callable[[str], Collection[int]], end: int
) -> tuple[list[int], list[int]]:
    """Return (ids, mask) of a conversation, up to its last answer.

    messages: also with "weight": 0 where an answer doesn't count. encode: returns the ids of a text
    in which special tokens are ordinary. end: the id that ends an answer. Each answer is encoded on
    its own. With GPT-2's BPE, the tokens are those of the whole text: it joins none across the
    border, because contents are stripped.
    """
    # Without weights, the template marks all answers
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    text, answers = render_here(plain, TEMPLATE, "", ask=False)
    weights = [message.get("weight", 1) for message in messages if message["role"] == "assistant"]

    # Each answer with what is before it, which isn't trained on
    ids = []
    mask = []
    at = 0
    for (begin, stop), weight in zip(answers, weights, strict=True):
        prompt = encode(text[at:begin])
        answer = encode(text[begin:stop])
        ids += [*prompt, *answer, end]
        mask += [0] * len(prompt)
        mask += [COUNTS * weight] * (len(answer) + 1)
        at = stop
    mask[0] |= BEGINS
    return ids, mask


class Chat:
    """A conversation within the context of a model.

    data: "template" and "block_size" of find_model()'s. encode: returns the ids of a text.
    end_token: the text of end-of-text. max_new_tokens: of an answer.
    """

    def __init__(
        self,
        data: dict,
        encode: Callable[[str], list[int]],
        end_token: str,
        max_new_tokens: int,
    ):
        self.template = data["template"]
        self.block_size = data["block_size"]
        self.encode_text = encode
        self.end_token = end_token
        self.max_new_tokens = max_new_tokens
        self.messages: Messages = []  # up to the last answer
        self.asked: Messages = []  # and with the message after it

    def encode(self, text: str) -> list[int]:
        """Return the tokens of the conversation with one more message, up to its answer.

        Leave out the oldest messages if they don't leave a quarter of the context to the answer.
        Raises UserError.
        """
        # The conversation so far, and the new message
        self.asked = [*self.messages, {"role": "user", "content": text}]
        ids = self.encode_asked()

        # A message is left out with its answer
        least_room = min(self.max_new_tokens, self.block_size // 4)
        while self.room(ids) < least_room and len(self.asked) > 1:
            self.asked = self.asked[2:]
            ids = self.encode_asked()
        if len(ids) >= self.block_size:
            raise UserError(
                f"the message takes {len(ids)} of the {self.block_size} tokens of the context: "
                "shorten it"
            )
        return ids

    def encode_asked(self) -> list[int]:
        """Return the tokens of the messages so far. Raises UserError."""
        return self.encode_text(render(self.asked, self.template, self.end_token))

    def room(self, ids: list[int]) -> int:
        """Return how many tokens an answer to the prompt ids may have."""
        return min(self.max_new_tokens, self.block_size - len(ids))

    def add_answer(self, text: str) -> None:
        """Add an answer to the message that was encoded last."""
        self.messages = [*self.asked, {"role": "assistant", "content": text}]
