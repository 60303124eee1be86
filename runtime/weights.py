"""Read pretrained weights from the Hugging Face hub, a folder in transformers' format, or nanoGPT's ckpt.pt."""

import contextlib
import functools
import json
import os
import pickle
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from runtime.errors import UserError

PRETRAINED = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280),
              "gpt2-xl": (48, 25, 1600)}  # layers, heads, width
REVISIONS = {  # commits of openai-community/NAME on the Hugging Face hub
    "gpt2": "607a30d783dfa663caf39e06633721c8d4cfcd7e",
    "gpt2-medium": "6dcaa7a952f72f9298047fd5137cd6e4f05f41da",
    "gpt2-large": "32b71b12589c2f8d625668d2335a01cac3249519",
    "gpt2-xl": "15ea56dee5df4983c59b2538573817e1667135e2"}
GPT2_KEYS = {  # keys of transformers' config.json, and the values that model.py implements, the default first
    "model_type": ("gpt2",), "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
    "layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,), "quantization_config": (None,)}
CONV1D = "c_attn.weight", "c_fc.weight", "c_proj.weight"  # which transformers stores transposed
SAFE_GLOBALS = {  # the classes in DeepSpeed's files; a file that names anything else could run code when it is read
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum", "deepspeed.utils.tensor_fragment.fragment_address"}


@contextlib.contextmanager
def weights_errors(path):
    """Turn any exception that reading a damaged file raises into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if isinstance(error, pickle.UnpicklingError):  # its message advises to let the file run code
            why = "it is damaged, or contains what could run code"
        raise UserError(f"{path} cannot be read ({why}): fetch it again, or choose "
                        "other weights with --init_from=PATH") from None


def fetch_from_hub(name, download=True):
    """Return the local folder of a GPT-2 on the Hugging Face hub. Download it if it isn't cached. Raises UserError.
    download=False: only check that it is cached or that the hub answers."""
    if name not in PRETRAINED:
        raise UserError(f"'{name}' is not a folder, a file or one of {', '.join(PRETRAINED)}")
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    repo, revision, files = f"openai-community/{name}", REVISIONS[name], ("config.json", "model.safetensors")
    try:
        if not all(isinstance(try_to_load_from_cache(repo, file, revision=revision), str) for file in files):
            HfApi().model_info(repo, revision=revision)  # fails at once without a network; a download retries for 30 s
        if download:
            paths = [hf_hub_download(repo, file, revision=revision) for file in files]
            return os.path.dirname(paths[0])
    except Exception as error:  # httpx, hub and OS errors have no common base
        raise UserError(f"the weights of {name} could not be fetched ({type(error).__name__}): download config.json "
                        "and model.safetensors elsewhere and give their folder with --init_from=DIR, or set "
                        "HF_ENDPOINT to a mirror") from None


def read_config(source):
    """Return GPTConfig's arguments from a folder's config.json or a ckpt.pt. Raises UserError if it isn't a GPT-2."""
    if os.path.isfile(source):
        return read_nanogpt(source)[0]
    path = os.path.join(source, "config.json")
    with weights_errors(path):
        hf = json.loads(Path(path).read_text(encoding="utf-8"))
        n_embd = hf.get("n_embd", 768)
    for key, values in {**GPT2_KEYS, "n_inner": (None, 4 * n_embd if isinstance(n_embd, int) else None)}.items():
        if hf.get(key, values[0]) not in values:
            raise UserError(f"{source}: config.json has {key}={hf[key]!r}, which is not GPT-2's {values[0]!r}")
    return {"block_size": hf.get("n_positions", 1024), "vocab_size": hf.get("vocab_size", 50257),
            "n_layer": hf.get("n_layer", 12), "n_head": hf.get("n_head", 12), "n_embd": n_embd,
            "gelu": "none" if hf.get("activation_function") == "gelu" else "tanh"}


def load_untrusted(path):
    """Return what torch.save wrote to a file, memory-mapped if its format allows that. The file can't run code: only
    tensors and plain containers are unpickled. Raises UserError."""
    with weights_errors(path):
        return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)


@functools.lru_cache(maxsize=1)  # configuration and weights are in one file
def read_nanogpt(path):
    """Return (GPTConfig's arguments, {name: tensor}) of nanoGPT's ckpt.pt. Raises UserError."""
    checkpoint = load_untrusted(path)
    try:
        args = {"bias": True, **checkpoint["model_args"]}  # the first versions of nanoGPT have no such key
        config = {name: args[name] for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "bias")}
        tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in checkpoint["model"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a nanoGPT ckpt.pt ({type(error).__name__}: {error})") from None
    head = tensors.get("lm_head.weight")
    if head is not None and head.data_ptr() != tensors.get("transformer.wte.weight", head).data_ptr():
        raise UserError(f"{path}: lm_head.weight is not tied to the token embedding, as GPT-2's is")
    return config | {"gelu": "none"}, tensors


def open_weights(source):
    """Return {name: tensor} of nanoGPT's ckpt.pt, or of a folder's model.safetensors or pytorch_model.bin, which may be
    in shards. Tensors are memory-mapped if the format allows that. Raises UserError."""
    if os.path.isfile(source):
        return read_nanogpt(source)[1]
    for file, load in (("model.safetensors", load_file), ("pytorch_model.bin", load_untrusted)):
        index, shards = Path(source, file + ".index.json"), [file]
        with weights_errors(source):
            if index.exists():
                shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if index.exists() or os.path.exists(os.path.join(source, file)):
                return {name: w for shard in shards for name, w in load(os.path.join(source, shard)).items()}
    raise UserError(f"{source} has neither model.safetensors nor pytorch_model.bin")


@torch.no_grad()
def read_weights(model, source):
    """Copy the weights of a folder or a ckpt.pt into the model. Fill the vocabulary's padding with zeros."""
    tensors, params = open_weights(source), dict(model.named_parameters())
    if os.path.isfile(source):  # a modified nanoGPT may have more
        for name in tensors:
            if name not in params and not name.endswith((".attn.bias", "lm_head.weight")):
                raise UserError(f"{source}: GPT-2 has no tensor {name}")
    for name, p in params.items():  # the names of gpt2 on the hub have no "transformer." prefix
        w = tensors.get(name, tensors.get(name.removeprefix("transformer.")))
        if not torch.is_tensor(w) or not w.is_floating_point():
            raise UserError(f"{source}: the tensor {name} is missing, or is not one of floating-point numbers")
        w = w.t() if os.path.isdir(source) and name.endswith(CONV1D) else w
        rows = model.config.vocab_size if name == "transformer.wte.weight" else len(p)
        if w.shape != p[:rows].shape:
            raise UserError(f"{source}: {name} has shape {tuple(w.shape)}, not {tuple(p[:rows].shape)}")
        p[:rows].copy_(w)
        p[rows:] = 0
