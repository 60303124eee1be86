"""Write a GPT and its tokenizer in transformers' format, and check that transformers loads the same."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save
from tiktoken._educational import bpe_encode
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
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


def write_model(model, folder, end, dtype):
    """Write config.json, generation_config.json and model.safetensors.

    Transpose linear layers for Conv1D, leave out the vocabulary's padding, and add zeros if the model has no biases.
    end: the id of <|endoftext|>, or None. Return the names of the model's persistent buffers, which transformers'
    GPT-2 has no place for. Raises UserError if the model isn't that GPT-2.
    """
    c = model.config
    gelu = getattr(c, "gelu", "none")  # nanoGPT's is exact. check_model() compares logits
    hf_config = GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.block_size, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head,
        activation_function="gelu_new" if gelu == "tanh" else "gelu", resid_pdrop=c.dropout, embd_pdrop=c.dropout,
        attn_pdrop=c.dropout, bos_token_id=end, eos_token_id=end, dtype=dtype, n_ctx=c.block_size,  # for llama.cpp
        tie_word_embeddings=model.lm_head.weight is model.transformer.wte.weight)
    with torch.device("meta"):
        hf_model = GPT2LMHeadModel(hf_config)
    check_names(model, hf_model)
    params = model.state_dict()
    weights = {}
    written = set()
    for name, like in hf_model.state_dict().items():
        w = params[name] if name in params else torch.zeros(like.shape)
        w = w.t() if name.endswith(CONV1D) else w
        w = w[: len(like)]
        if w.shape != like.shape:
            raise UserError(f"the model can't be exported: {name} has shape {tuple(params[name].shape)}, which is not "
                            "that of a GPT-2 in transformers; model.py loads and samples it")
        w = w.to(getattr(torch, dtype)).contiguous()
        if w.data_ptr() in written and name != HEAD:  # blocks share it here, and not in GPT-2
            w = w.clone()
        written.add(w.data_ptr())
        weights[name] = w
    hf_model.load_state_dict(weights, assign=True)
    hf_model.tie_weights()
    hf_model.save_pretrained(folder, max_shard_size="100GB")
    # safetensors lets only the owner read its file
    shutil.copymode(os.path.join(folder, "config.json"), os.path.join(folder, "model.safetensors"))
    return [name for name, _ in model.named_buffers() if name in params and name not in weights]


def check_names(model, hf_model):
    """Raise UserError if a GPT has a parameter that transformers' GPT-2 hasn't."""
    theirs = hf_model.state_dict()
    for name, _ in model.named_parameters():
        if name not in theirs:
            raise UserError(f"the model can't be exported: a GPT-2 in transformers has no parameter {name}; model.py "
                            "loads and samples it")


@torch.no_grad()
def check_model(model, folder, idx):
    """Return the largest difference between both models' logits for idx (1, T). Raises UserError if it is too large."""
    logits = model(idx)
    hf_model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    difference = (hf_model(idx).logits - logits).abs().max().item()
    limit = MAX_LOGIT_DIFFERENCE * max(10, logits.abs().max().item())
    if not difference <= limit:  # or NaN
        raise UserError(f"the exported model's logits differ by {difference:.1e}, more than {limit:.0e}: transformers "
                        "only has GPT-2, so restore model.py if you edited it")
    return difference


def write_tokenizer(folder, meta, block_size, template=None):
    """Write the tokenizer of a meta.json's "tokenizer" entry, with a chat template or None; for GPT-2 also vocab.json
    and merges.txt, with the content of OpenAI's encoder.json and vocab.bpe. Raises UserError."""
    options = {"model_max_length": block_size, "chat_template": template, "clean_up_tokenization_spaces": False}
    if meta["kind"] == "gpt2":
        vocab, merges = gpt2_vocab_and_merges()
        tokenizer = GPT2Tokenizer(vocab=vocab, merges=merges, **options)
        tokenizer.backend_tokenizer.model.save(folder)
    else:
        own = char_tokenizer(meta["chars"]) if meta["kind"] == "char" else hf_tokenizer(meta)
        end = end_of_text(meta)
        with tokenizer_errors("the tokenizer can't encode an empty text (", "): restore it"):
            added = own.encode("").ids
        if not {end}.issuperset(added):  # it adds tokens to a text that no document had in training
            own.post_processor = None
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=own, eos_token=None if end is None else own.id_to_token(end),
            model_input_names=["input_ids", "attention_mask"], **options)  # no token types
    tokenizer.save_pretrained(folder, save_jinja_files=False)  # the template is in tokenizer_config.json
    write_for_all_versions(Path(folder, "tokenizer_config.json"))


def write_for_all_versions(file):
    """Make a tokenizer_config.json of transformers 5 one that transformers 4 reads, too.

    4 has no TokenizersBackend, which is 5's name for PreTrainedTokenizerFast, and takes its other new keys for
    attributes of the tokenizer.
    """
    config = json.loads(file.read_text(encoding="utf-8"))
    if config["tokenizer_class"] == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name in ("backend", "is_local", "local_files_only", "extra_special_tokens"):
        config.pop(name, None)
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def char_tokenizer(chars):
    """Return a tokenizers.Tokenizer with one token per character. An unknown character raises an error."""
    tokenizer = Tokenizer(models.WordLevel({char: i for i, char in enumerate(chars)}, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def write_peft_adapter(folder, lora, weights):
    """Write a LoRA adapter in PEFT's format. lora: of the tag; weights: {name: tensor}, all of the tag. fan_in_fan_out:
    transformers' GPT-2 stores its matrices transposed. Raises UserError."""
    if not lora or not lora["base"]:
        raise UserError("peft=True needs LoRA, and weights that PEFT can load instead of an earlier run's: drop it")
    adapter = {f"base_model.model.{name}.weight": w.contiguous() for name, w in weights.items()
               if name.endswith((LORA_A, LORA_B))}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": lora["base"],
              "r": lora["rank"], "lora_alpha": lora["alpha"], "lora_dropout": lora["dropout"],
              "target_modules": lora["target_modules"], "fan_in_fan_out": True, "bias": "none", "inference_mode": True}
    Path(folder, "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    Path(folder, "adapter_model.safetensors").write_bytes(save(adapter, {"format": "pt"}))


def gpt2_vocab_and_merges():
    """Return GPT-2's {token: id}, and its merges as pairs of tokens, in order. Both have a letter for each byte."""
    ranks, letters, earlier, merges = gpt2_ranks(), bytes_to_unicode(), {}, []
    names = [token.decode("latin-1").translate(letters) for token in ranks]  # latin-1: a character for each byte
    for token, rank in ranks.items():
        if len(token) > 1:
            first, second = bpe_encode(earlier, token, visualise=None)  # what earlier merges make of it
            merges.append((names[first], names[second]))
        earlier[token] = rank
    return {name: i for i, name in enumerate([*names, END_OF_TEXT])}, merges
