"""A data set's tokenizer as the files that transformers reads: tokenizer.json, and for GPT-2's also vocab.json and
merges.txt, OpenAI's encoder.json and vocab.bpe to the byte."""

import json
import math
import os

from runtime.data.tokenizer import END_OF_TEXT, end_of_text, gpt2_ranks, hf_tokenizer


def write_tokenizer(folder, meta, block_size):
    """Write the tokenizer of a meta.json's "tokenizer" entry into `folder`. Raises FetchError where GPT-2's ranks, or a
    tokenizer in Hugging Face's form, can't be had."""
    from transformers import GPT2Tokenizer

    if meta["kind"] != "gpt2":
        tokenizer = of_characters(meta["chars"]) if meta["kind"] == "char" else hf_tokenizer(meta)
        tokenizer.save(os.path.join(folder, "tokenizer.json"))
        end = end_of_text(meta)
        with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
            json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size,
                       "eos_token": None if end is None else tokenizer.id_to_token(end),
                       "model_input_names": ["input_ids", "attention_mask"],  # no token types, which GPT-2 would add
                       "clean_up_tokenization_spaces": False}, f, indent=1)
        return
    ranks, letters = gpt2_ranks(), letters_of_bytes()

    def written(token):
        return "".join(letters[byte] for byte in token)

    vocab = {written(token): rank for token, rank in ranks.items()} | {END_OF_TEXT: len(ranks)}
    merges = [tuple(map(written, pair)) for pair in merges_of(ranks)]
    GPT2Tokenizer(vocab=vocab, merges=merges, model_max_length=block_size).save_pretrained(folder)
    with open(os.path.join(folder, "vocab.json"), "w", encoding="utf-8") as f:
        json.dump(vocab, f)
    with open(os.path.join(folder, "merges.txt"), "w", encoding="utf-8") as f:
        f.writelines(["#version: 0.2\n", *(f"{left} {right}\n" for left, right in merges)])


def of_characters(chars):
    """A tokenizers.Tokenizer with one token a character; one that it does not know is an error, as with ours."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({char: i for i, char in enumerate(chars)}, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def letters_of_bytes():
    """The letters by which GPT-2's files write the 256 bytes: those that can be seen stand for themselves, the others
    for the letters from U+0100 on (encoder.py of the gpt-2 repository)."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 0x100 + hidden.index(byte)) for byte in range(256)]


def merges_of(ranks):
    """The pairs that BPE joins, in order, from its tokens {bytes: rank}: the halves to which the joins before a token's
    own bring its bytes."""
    merges = []
    for token in sorted((token for token in ranks if len(token) > 1), key=ranks.get):
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            first = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], math.inf))
            parts[first:first + 2] = [parts[first] + parts[first + 1]]
        merges.append(tuple(parts))
    return merges
