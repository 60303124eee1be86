"""A GPT as a Hugging Face folder: what GPT2LMHeadModel.save_pretrained would write, and whether it gives our logits."""

import os
import shutil

import torch

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
