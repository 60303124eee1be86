"""Write a GPT and its tokenizer in transformers' format, and check what transformers loads."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tiktoken._educational import bpe_encode
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from runtime.data.tokenizer import (
    END_OF_TEXT,
    end_of_text,
    gpt2_ranks,
    hf_tokenizer,
    tokenizer_errors,
)
from runtime.errors import UserError
from runtime.lora import LORA_A, LORA_B
from runtime.weights import CONV1D, HEAD

MAX_LOGIT_DIFFERENCE = 1e-5  # relative to the largest logit, or to 10 if all are smaller


def write_model(model: nn.Module, folder: str, end: int | None, dtype: str) -> list[str]:
    """Write config.json, generation_config.json and model.safetensors.

    Transpose linear layers for Conv1D, leave out the vocabulary's padding, and add zeros if the
    model has no biases. end: the id of <|endoftext|>, or None. dtype: of the weights. Return the
    names of the model's persistent buffers, which transformers' GPT-2 has no place for. Raises
    UserError if the model isn't that GPT-2.
    """
    # A model without weights knows their names and shapes
    with torch.device("meta"):
        hf_model = GPT2LMHeadModel(hf_config_of(model, end, dtype))
    check_names(model, hf_model)
    # Each of its weights, in transformers' shape
    params = model.state_dict()
    weights = {}
    written = set()  # addresses
    for name, like in hf_model.state_dict().items():
        w = weight_like(name, like, params).to(getattr(torch, dtype)).contiguous()
        if w.data_ptr() in written and name != HEAD:  # blocks share it here, and not in GPT-2
            w = w.clone()
        written.add(w.data_ptr())
        weights[name] = w
    # transformers writes them, so that its own versions can read them
    hf_model.load_state_dict(weights, assign=True)
    hf_model.tie_weights()
    hf_model.save_pretrained(folder, max_shard_size="100GB")

    # safetensors lets only the owner read its file
    shutil.copymode(Path(folder, "config.json"), Path(folder, "model.safetensors"))
    return [name for name, _ in model.named_buffers() if name in params and name not in weights]


def hf_config_of(model: nn.Module, end: int | None, dtype: str) -> GPT2Config:
    """Return transformers' configuration of a GPT. end, dtype: as for write_model()."""
    # The names of the two forms of GELU in transformers
    c = model.config
    activation = "gelu"  # exact, as nanoGPT's. check_model() compares logits
    if getattr(c, "gelu", "none") == "tanh":
        activation = "gelu_new"
    return GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.block_size,
        n_ctx=c.block_size,  # for llama.cpp
        n_embd=c.n_embd,
        n_layer=c.n_layer,
        n_head=c.n_head,
        activation_function=activation,
        resid_pdrop=c.dropout,
        embd_pdrop=c.dropout,
        attn_pdrop=c.dropout,
        bos_token_id=end,
        eos_token_id=end,
        dtype=dtype,
        tie_word_embeddings=model.lm_head.weight is model.transformer.wte.weight,
    )


def weight_like(name: str, like: Tensor, params: dict[str, Tensor]) -> Tensor:
    """Return a weight in the shape in which transformers has it.

    like: a tensor of that shape. params: the model's. Raises UserError.
    """
    # A bias that the model doesn't have is zero
    if name in params:
        w = params[name]
    else:
        w = torch.zeros(like.shape)
    if name.endswith(CONV1D):
        w = w.t()
    # Rows beyond the vocabulary are padding
    w = w[: len(like)]
    if w.shape != like.shape:
        raise UserError(f"the model can't be exported: {name} has shape "
                        f"{tuple(params[name].shape)}, which is not that of a GPT-2 in "
                        "transformers; model.py loads and samples it")
    return w


def check_names(model: nn.Module, hf_model: nn.Module) -> None:
    """Raise UserError if a GPT has a parameter that transformers' GPT-2 hasn't."""
    theirs = hf_model.state_dict()
    for name, _ in model.named_parameters():
        if name not in theirs:
            raise UserError("the model can't be exported: a GPT-2 in transformers has no parameter "
                            f"{name}; model.py loads and samples it")


@torch.no_grad()
def check_model(model: nn.Module, folder: str, idx: Tensor) -> float:
    """Return the largest difference between both models' logits for idx (1, T).

    Raises UserError if it is too large.
    """
    # In float32, because the weights are rounded already
    logits = model(idx)
    hf_model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    hf_model.eval()
    difference = (hf_model(idx).logits - logits).abs().max().item()
    limit = MAX_LOGIT_DIFFERENCE * max(10, logits.abs().max().item())
    if not difference <= limit:  # or NaN
        raise UserError(f"the exported model's logits differ by {difference:.1e}, more than "
                        f"{limit:.0e}: transformers only has GPT-2, so restore model.py if you "
                        "edited it")
    return difference


def write_tokenizer(
    folder: str, meta: dict[str, Any], block_size: int, template: str | None = None
) -> None:
    """Write the tokenizer of a meta.json's "tokenizer" entry. Raises UserError.

    template: of chats, or None. For GPT-2 there are also vocab.json and merges.txt, with the
    content of OpenAI's encoder.json and vocab.bpe.
    """
    # What transformers would otherwise choose by itself
    options = {
        "model_max_length": block_size,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }
    if meta["kind"] == "gpt2":
        vocab, merges = gpt2_vocab_and_merges()
        tokenizer = GPT2Tokenizer(vocab=vocab, merges=merges, **options)
        tokenizer.backend_tokenizer.model.save(folder)
    else:
        tokenizer = fast_tokenizer(meta, options)
    # The template is in tokenizer_config.json
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    write_for_all_versions(Path(folder, "tokenizer_config.json"))


def fast_tokenizer(meta: dict[str, Any], options: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return transformers' tokenizer for characters or a tokenizer.json. Raises UserError.

    meta: the "tokenizer" of a meta.json. options: of any tokenizer in transformers.
    """
    # The library's own tokenizer, which transformers wraps
    if meta["kind"] == "char":
        own = char_tokenizer(meta["chars"])
    else:
        own = hf_tokenizer(meta)
    end = end_of_text(meta)
    # It may add tokens to a text, which no document had in training. An end of text does no harm
    with tokenizer_errors("the tokenizer can't encode an empty text (", "): restore it"):
        added = own.encode("").ids
    if not {end}.issuperset(added):
        own.post_processor = None
    eos_token = None
    if end is not None:
        eos_token = own.id_to_token(end)
    return PreTrainedTokenizerFast(
        tokenizer_object=own,
        eos_token=eos_token,
        model_input_names=["input_ids", "attention_mask"],  # no token types
        **options,
    )


def write_for_all_versions(file: Path) -> None:
    """Make a tokenizer_config.json of transformers 5 one that transformers 4 reads, too.

    4 has no TokenizersBackend, which is 5's name for PreTrainedTokenizerFast, and takes its other
    new keys for attributes of the tokenizer.
    """
    config = json.loads(file.read_text(encoding="utf-8"))
    if config["tokenizer_class"] == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name in ("backend", "is_local", "local_files_only", "extra_special_tokens"):
        config.pop(name, None)
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def char_tokenizer(chars: str) -> Tokenizer:
    """Return a tokenizer with one token per character. An unknown character raises an error."""
    # Without a token for unknown ones, the library raises an error for them
    ids = {char: i for i, char in enumerate(chars)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def write_peft_adapter(
    folder: str, lora: dict[str, Any] | None, weights: dict[str, Tensor]
) -> None:
    """Write a LoRA adapter in PEFT's format. Raises UserError.

    lora: of the tag. weights: {name: tensor}, all of the tag.
    """
    if not lora or not lora["base"]:
        raise UserError("peft=True needs LoRA, and weights that PEFT can load instead of an "
                        "earlier run's: drop it")
    # PEFT's names
    adapter = {}
    for name, w in weights.items():
        if name.endswith((LORA_A, LORA_B)):
            adapter[f"base_model.model.{name}.weight"] = w.contiguous()

    # The same settings under PEFT's names
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": lora["base"],
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "target_modules": lora["target_modules"],
        "fan_in_fan_out": True,  # transformers' GPT-2 stores its matrices transposed
        "bias": "none",
        "inference_mode": True,
    }
    Path(folder, "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    Path(folder, "adapter_model.safetensors").write_bytes(save(adapter, {"format": "pt"}))


def gpt2_vocab_and_merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return GPT-2's {token: id}, and its merges as pairs of tokens, in order.

    Both have a letter for each byte. Raises UserError.
    """
    # Tokens are bytes. The files show each byte as a printable letter
    ranks = gpt2_ranks()
    letters = bytes_to_unicode()
    # Latin-1 has a character for each byte
    names = [token.decode("latin-1").translate(letters) for token in ranks]
    merges = []
    earlier: dict[bytes, int] = {}
    for token, rank in ranks.items():
        if len(token) > 1:
            # The two tokens that earlier merges make of it
            first, second = bpe_encode(earlier, token, visualise=None)
            merges.append((names[first], names[second]))
        earlier[token] = rank
    ids = {name: i for i, name in enumerate([*names, END_OF_TEXT])}
    return ids, merges
