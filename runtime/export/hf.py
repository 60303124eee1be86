"""A GPT as a Hugging Face folder: what GPT2LMHeadModel.save_pretrained would write, and whether it gives our logits.
Its tokenizer as the files that transformers reads: tokenizer.json, and for GPT-2's also vocab.json and merges.txt,
OpenAI's encoder.json and vocab.bpe to the byte."""

import json
import math
import os
import shutil

import torch

from runtime.data.tokenizer import END_OF_TEXT, end_of_text, gpt2_ranks, hf_tokenizer
from runtime.files import UserError

LIMIT = 1e-4  # how far apart logits may be


class ExportError(UserError):
    """What was written does not read back as it should; the message says by how much."""


def config_of(config, end, dtype):
    """transformers' GPT2Config of our GPTConfig; end: the id of <|endoftext|>, or None."""
    from transformers import GPT2Config

    hf = GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.block_size, n_embd=config.n_embd, n_layer=config.n_layer,
        n_head=config.n_head, activation_function="gelu_new" if config.gelu == "tanh" else "gelu",
        resid_pdrop=config.dropout, embd_pdrop=config.dropout, attn_pdrop=config.dropout,
        bos_token_id=end, eos_token_id=end, dtype=dtype)
    hf.architectures = ["GPT2LMHeadModel"]
    hf.n_ctx = config.block_size  # n_positions by another name, which OpenAI's files have and llama.cpp asks for
    return hf


def write_model(model, folder, end, dtype):
    """Write config.json, generation_config.json and model.safetensors. Linear layers become Conv1D, which is
    transposed; the vocabulary's padding is left out; where the model has no biases they are zero, as transformers'
    GPT-2 always has them."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig, GPT2LMHeadModel

    config = config_of(model.config, end, dtype)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    with torch.device("meta"):
        theirs = GPT2LMHeadModel(config).state_dict()
    ours, weights = model.state_dict(), {}
    for name, like in theirs.items():
        if name == "lm_head.weight":  # the token embedding once more
            continue
        w = ours[name] if name in ours else torch.zeros(like.shape)
        w = w.t() if name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")) else w
        weights[name] = w[: len(like)].to(getattr(torch, dtype)).contiguous()
    save_file(weights, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    shutil.copymode(os.path.join(folder, "config.json"), os.path.join(folder, "model.safetensors"))  # was for us alone


@torch.no_grad()
def check_model(model, folder, idx):
    """(the largest difference between our logits for idx (1, T) and those of the folder, the precision's name): in
    float32, or where these are further apart than LIMIT in float64, which tells a mistake from rounding. ExportError
    if they are too far apart there, too."""
    from transformers import AutoModelForCausalLM

    for dtype in (torch.float32, torch.float64):
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
        apart = (theirs(idx).logits - model.to(dtype)(idx)).abs().max().item()
        if apart <= LIMIT:
            return apart, str(dtype).removeprefix("torch.")
    raise ExportError(f"the exported model's logits are {apart:.1e} away from ours, more than {LIMIT:.0e}: nothing was "
                      "exported")


def check_tokenizer(folder, encode, text):
    """ExportError unless the folder's tokenizer gives a text the ids that ours gives it."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if theirs(text, add_special_tokens=False)["input_ids"] != encode(text):
        raise ExportError("the exported tokenizer gives other ids than ours: nothing was exported")


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
