"""Talk with a model that was trained on conversations."""

from runtime.data.chat import render
from runtime.errors import UserError


class Chat:
    """A conversation within the context of a model. data: find_model()'s. end_token: the text of end-of-text."""

    def __init__(self, data, encode, end_token, max_new_tokens):
        self.template, self.block_size = data["template"], data["block_size"]
        self.encode_text, self.end_token, self.max_new_tokens = encode, end_token, max_new_tokens
        self.messages, self.asked = [], []  # up to the last answer; and with the message after it

    def encode(self, text):
        """Return the tokens of the conversation with one more message, up to where the answer begins. Leave out the
        oldest messages if they don't leave a quarter of the context to the answer. Raises UserError."""
        self.asked = [*self.messages, {"role": "user", "content": text}]
        while True:
            ids = self.encode_text(render(self.asked, self.template, self.end_token, ask=True)[0])
            if self.room(ids) >= min(self.max_new_tokens, self.block_size // 4) or len(self.asked) == 1:
                break
            self.asked = self.asked[2:]
        if len(ids) >= self.block_size:
            raise UserError(f"the message takes {len(ids)} of the {self.block_size} tokens of the context: shorten it")
        return ids

    def room(self, ids):
        """Return how many tokens an answer to the prompt ids may have."""
        return min(self.max_new_tokens, self.block_size - len(ids))

    def add_answer(self, text):
        self.messages = [*self.asked, {"role": "assistant", "content": text}]
