"""A GPT as a Hugging Face folder: model and tokenizer as transformers saves them, and the check that both are ours.

GPT-2's tokenizer also gets vocab.json and merges.txt, which are OpenAI's encoder.json and vocab.bpe to the byte.
"""

import contextlib
import fcntl
import glob
import json
import math
import os
import re
import secrets
import shutil

import torch

from runtime.data.tokenizer import END_OF_TEXT, end_of_text, gpt2_ranks, hf_tokenizer
from runtime.files import UserError
from runtime.weights import CONV1D

MAX_LOGIT_DIFFERENCE = 1e-4


class ExportError(UserError):
    """What was written does not read back as it should; the message says by how much."""


def make_temporary(to):
    """Make and return the folder in which an export to `to` is written, and remove those of exports that were killed:
    a running one holds a lock on its folder."""
    for folder in glob.glob(f"{glob.escape(to)}.*.saving"):
        if re.fullmatch(r"\.[0-9a-f]{8}\.saving", folder.removeprefix(to)):
            with contextlib.suppress(OSError):
                lock(folder)
                shutil.rmtree(folder)
    folder = f"{to}.{secrets.token_hex(4)}.saving"
    os.makedirs(folder)
    with contextlib.suppress(OSError):  # a file system without locks
        lock(folder)
    return folder


def lock(folder):
    """Lock a folder for as long as this process lives. Raises OSError where another process has locked it."""
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_model(model, folder, end, dtype):
    """Write config.json, generation_config.json and model.safetensors. Linear layers become Conv1D, which is
    transposed. The vocabulary's padding is left out. Where the model has no biases, they are zero. end: the id of
    <|endoftext|>, or None."""
    from transformers import GPT2Config, GPT2LMHeadModel

    c = model.config
    hf_config = GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.block_size, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head,
        activation_function="gelu_new" if c.gelu == "tanh" else "gelu", resid_pdrop=c.dropout, embd_pdrop=c.dropout,
        attn_pdrop=c.dropout, bos_token_id=end, eos_token_id=end, dtype=dtype)
    hf_config.n_ctx = c.block_size  # n_positions by another name, which OpenAI's files have and llama.cpp asks for
    with torch.device("meta"):
        hf_model = GPT2LMHeadModel(hf_config)
    params, weights = model.state_dict(), {}
    for name, like in hf_model.state_dict().items():
        w = params[name] if name in params else torch.zeros(like.shape)
        w = w.t() if name.endswith(CONV1D) else w
        weights[name] = w[: len(like)].to(getattr(torch, dtype)).contiguous()
    hf_model.load_state_dict(weights, assign=True)
    hf_model.tie_weights()
    hf_model.save_pretrained(folder, max_shard_size="100GB")
    shutil.copymode(os.path.join(folder, "config.json"), os.path.join(folder, "model.safetensors"))  # was for us alone


@torch.no_grad()
def check_model(model, folder, idx):
    """Return (the largest difference between our logits for idx (1, T) and those of the folder, the precision's name):
    float32 or, where that differs by more than MAX_LOGIT_DIFFERENCE, float64, which tells a mistake from rounding.
    Raises ExportError if the difference is still larger."""
    from transformers import AutoModelForCausalLM

    for dtype in (torch.float32, torch.float64):
        hf_model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
        difference = (hf_model(idx).logits - model.to(dtype)(idx)).abs().max().item()
        if difference <= MAX_LOGIT_DIFFERENCE:
            return difference, str(dtype).removeprefix("torch.")
    raise ExportError(f"the exported model's logits are {difference:.1e} away from ours, more than "
                      f"{MAX_LOGIT_DIFFERENCE:.0e}: nothing was exported")


def write_tokenizer(folder, meta, block_size):
    """Write the tokenizer of a meta.json's "tokenizer" entry into `folder`. Raises UserError where GPT-2's ranks, or a
    tokenizer in Hugging Face's form, are not available."""
    from transformers import GPT2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if meta["kind"] != "gpt2":
        tokenizer = char_tokenizer(meta["chars"]) if meta["kind"] == "char" else hf_tokenizer(meta)
        tokenizer.save(os.path.join(folder, "tokenizer.json"))
        end = end_of_text(meta)
        with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
            json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size,
                       "eos_token": None if end is None else tokenizer.id_to_token(end),
                       "model_input_names": ["input_ids", "attention_mask"],  # no token types, which GPT-2 would add
                       "clean_up_tokenization_spaces": False}, f, indent=1)
        return
    # bytes as letters: latin-1 makes one character of each byte, translate() the letter that stands for it
    ranks, letters = gpt2_ranks(), bytes_to_unicode()
    vocab = {token.decode("latin-1").translate(letters): rank for token, rank in ranks.items()}
    vocab[END_OF_TEXT] = len(ranks)
    merges = [tuple(part.decode("latin-1").translate(letters) for part in pair) for pair in bpe_merges(ranks)]
    GPT2Tokenizer(vocab=vocab, merges=merges, model_max_length=block_size).save_pretrained(folder)
    with open(os.path.join(folder, "vocab.json"), "w", encoding="utf-8") as f:
        json.dump(vocab, f)
    with open(os.path.join(folder, "merges.txt"), "w", encoding="utf-8") as f:
        f.writelines(["#version: 0.2\n", *(f"{left} {right}\n" for left, right in merges)])


def char_tokenizer(chars):
    """Return a tokenizers.Tokenizer with one token per character. An unknown character is an error, as with ours."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({char: i for i, char in enumerate(chars)}, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def bpe_merges(ranks):
    """Return the pairs that BPE merges, in order, from its tokens {bytes: rank}: for each token, the two parts that the
    merges before its own leave of its bytes."""
    merges = []
    for token in sorted((token for token in ranks if len(token) > 1), key=ranks.get):
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            first = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], math.inf))
            parts[first:first + 2] = [parts[first] + parts[first + 1]]
        merges.append(tuple(parts))
    return merges


def check_tokenizer(folder, encode, text):
    """Raise ExportError unless the folder's tokenizer gives a text the ids that ours gives it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer(text, add_special_tokens=False)["input_ids"] != encode(text):
        raise ExportError("the exported tokenizer gives other ids than ours: nothing was exported")
