"""GPT-2's weights from elsewhere: the Hugging Face hub, a folder in transformers' format, nanoGPT's ckpt.pt."""

import contextlib
import json
import os
import pickle
import zipfile

import torch

from runtime.files import UserError, file_digest, write_atomic

PRETRAINED = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280),
              "gpt2-xl": (48, 25, 1600)}  # layers, heads, width
HUB = {  # of openai-community/NAME on the Hugging Face hub: the revision, and its model.safetensors' sha256
    "gpt2": ("607a30d783dfa663caf39e06633721c8d4cfcd7e",
             "248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707"),
    "gpt2-medium": ("6dcaa7a952f72f9298047fd5137cd6e4f05f41da",
                    "fc5a354a19255ad494f3d71549390baca1ccf61d1d822b9408971705c687c9cd"),
    "gpt2-large": ("32b71b12589c2f8d625668d2335a01cac3249519",
                   "5f47f3e12f91cd33b662ce7e433b6150ad5512b5884a2cee961b50e9c3bbebce"),
    "gpt2-xl": ("15ea56dee5df4983c59b2538573817e1667135e2",
                "0f8b28eb05a8075f48b61b6f35332978c74fc7763fa9fb4051a1c30511736a6a"),
}  # fmt: skip
GPT2_KEYS = {  # of transformers' config.json: the values that model.py implements, the default first
    "model_type": ("gpt2",), "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
    "layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
}  # fmt: skip
CONV1D = "c_attn.weight", "c_fc.weight", "c_proj.weight"  # transformers stores them transposed


class WeightsError(UserError):
    """Pretrained weights that cannot be had or do not fit; the message says what to do."""


@contextlib.contextmanager
def weights_errors(path):
    """Turn whatever safetensors, torch.load and JSON raise for a truncated or foreign file into a WeightsError."""
    try:
        yield
    except WeightsError:
        raise
    except Exception as error:
        why = (str(error).splitlines() or [""])[0]
        raise WeightsError(f"{path} cannot be read ({type(error).__name__}: {why}); fetch it again, or name other "
                           "weights with --init_from=PATH") from None


def fetch_from_hub(name):
    """Return the local folder of a GPT-2 on the Hugging Face hub, downloaded if it is not cached, with the hash of its
    weights checked. Raises WeightsError."""
    if name not in PRETRAINED:
        raise WeightsError(f"'{name}' is neither a folder, a file nor one of {', '.join(PRETRAINED)}")
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    repo, files, (revision, sha256) = f"openai-community/{name}", ("config.json", "model.safetensors"), HUB[name]
    try:
        if not all(isinstance(try_to_load_from_cache(repo, file, revision=revision), str) for file in files):
            HfApi().model_info(repo, revision=revision)  # without a network fails at once; a download retries for 30 s
        for file in files:
            path = hf_hub_download(repo, file, revision=revision)
        weights = os.path.realpath(path)  # the cache has links in its folders of revisions
        found = cached_sha256(weights, path + ".sha256")
    except Exception as error:  # httpx, hub and OS errors have no common base, and all mean the same to the user
        raise WeightsError(f"the weights of {name} could not be fetched ({type(error).__name__}); fetch config.json "
                           "and model.safetensors elsewhere and give their folder as --init_from=DIR, or set "
                           "HF_ENDPOINT to a mirror") from None
    if found != sha256:
        raise WeightsError(f"{weights} has the sha256 {found}, but {name}'s is {sha256}: delete it and start again to "
                           "fetch it anew, or give a folder of weights as --init_from=DIR")
    return os.path.dirname(path)


def cached_sha256(path, cache):
    """Return a file's sha256. The file `cache` keeps it, with the size and time of modification that it is for: so
    gigabytes are hashed once after their download, and not at every start by every rank."""
    stat = os.stat(path)
    key = f"{stat.st_size} {stat.st_mtime_ns} "
    with contextlib.suppress(OSError, ValueError), open(cache, encoding="utf-8") as f:
        if (cached := f.read()).startswith(key):
            return cached.removeprefix(key)
    sha256 = file_digest(path)["sha256"]
    with contextlib.suppress(OSError):
        write_atomic(cache, key + sha256)
    return sha256


def read_config(source):
    """Return GPTConfig's arguments, from a folder's config.json or nanoGPT's ckpt.pt. Raises WeightsError where it
    describes another model than GPT-2."""
    if os.path.isfile(source):
        return read_nanogpt(source)[0]
    path = os.path.join(source, "config.json")
    with weights_errors(path), open(path, encoding="utf-8") as f:
        hf = json.load(f)
        if not isinstance(hf, dict):
            raise ValueError("it is not an object")
    n_embd = hf.get("n_embd", 768)
    for key, values in {**GPT2_KEYS, "n_inner": (None, 4 * n_embd if isinstance(n_embd, int) else None)}.items():
        if hf.get(key, values[0]) not in values:
            raise WeightsError(f"{source}: config.json has {key}={hf[key]!r}, which is not GPT-2's {values[0]!r}")
    return {"block_size": hf.get("n_positions", 1024), "vocab_size": hf.get("vocab_size", 50257),
            "n_layer": hf.get("n_layer", 12), "n_head": hf.get("n_head", 12), "n_embd": n_embd,
            "gelu": "none" if hf.get("activation_function") == "gelu" else "tanh"}


def load_untrusted(path):
    """Return what torch.save wrote to a file, memory-mapped where its format allows it. Only tensors and plain
    containers are made, whatever the file names: no code of its author runs. Raises WeightsError."""
    with weights_errors(path):
        zipped = zipfile.is_zipfile(path)  # the older format cannot be mapped, nor inspected
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipped else []
        if unsafe:
            raise WeightsError(f"{path} names {', '.join(sorted(unsafe))}, which no weights need; not read")
        try:
            return torch.load(path, map_location="cpu", mmap=zipped, weights_only=True)
        except pickle.UnpicklingError:  # whose own message advises to let the file run code
            raise WeightsError(f"{path} is not a file of weights, or is damaged") from None


def read_nanogpt(path):
    """Return (GPTConfig's arguments, {name: tensor}, nanoGPT's settings) of its ckpt.pt. Names and layout are ours."""
    checkpoint = load_untrusted(path)
    try:
        args = {"bias": True, **checkpoint["model_args"]}  # nanoGPT's first versions had no other
        config = {name: args[name] for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "bias")}
        tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in checkpoint["model"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is not a ckpt.pt of nanoGPT's ({type(error).__name__}: {error})") from None
    head = tensors.get("lm_head.weight")
    if head is not None and head.data_ptr() != tensors.get("transformer.wte.weight", head).data_ptr():
        raise WeightsError(f"{path}: lm_head.weight is not the token embedding, as it is in GPT-2")
    return config | {"gelu": "none"}, tensors, checkpoint.get("config", {})


def open_weights(source):
    """Return {name: tensor} of a folder, from safetensors or else pickles, whole or in shards, or of nanoGPT's ckpt.pt.
    Tensors are memory-mapped where the format allows it. Raises WeightsError, for truncated files too."""
    from safetensors.torch import load_file

    if os.path.isfile(source):
        return read_nanogpt(source)[1]
    for file, load in (("model.safetensors", load_file), ("pytorch_model.bin", load_untrusted)):
        index = os.path.join(source, file + ".index.json")
        if not os.path.exists(index) and not os.path.exists(os.path.join(source, file)):
            continue
        with weights_errors(source):
            shards = [file]
            if os.path.exists(index):
                with open(index, encoding="utf-8") as f:
                    shards = sorted(set(json.load(f)["weight_map"].values()))
            return {name: w for shard in shards for name, w in load(os.path.join(source, shard)).items()}
    raise WeightsError(f"{source} has neither model.safetensors nor pytorch_model.bin")


@torch.no_grad()
def read_weights(model, source):
    """Copy the weights of a folder or a ckpt.pt into the model. Rows of the vocabulary's padding become zero."""
    tensors, params = open_weights(source), dict(model.named_parameters())
    if os.path.isfile(source):  # may be an extended nanoGPT's
        for name in tensors:
            if name not in params and not name.endswith((".attn.bias", "lm_head.weight")):
                raise WeightsError(f"{source}: GPT-2 has no place for the tensor {name}")
    for name, p in params.items():
        # gpt2 on the hub has no "transformer." before its names, later saves have
        w = tensors.get(name, tensors.get(name.removeprefix("transformer.")))
        if w is None:
            raise WeightsError(f"{source}: the tensor {name} is missing")
        w = w.t() if os.path.isdir(source) and name.endswith(CONV1D) else w
        rows = model.config.vocab_size if name == "transformer.wte.weight" else len(p)
        if w.shape != p[:rows].shape:
            raise WeightsError(
                f"{source}: {name} has shape {tuple(w.shape)}, its configuration says {tuple(p[:rows].shape)}")
        p[:rows].copy_(w)
        p[rows:] = 0
