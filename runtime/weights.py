"""GPT-2's weights from elsewhere: the Hugging Face hub, a folder in transformers' format, nanoGPT's ckpt.pt."""

import contextlib
import hashlib
import json
import os
import pickle
import zipfile

import torch

from runtime.files import UserError

PRETRAINED = {  # layers, heads, width
    "gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600),
}  # fmt: skip
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


class WeightsError(UserError):
    """Pretrained weights that cannot be had or do not fit; the message says what to do."""


def fetch_from_hub(name):
    """Return the local folder of a GPT-2 on the Hugging Face hub, downloaded if it is not in the cache, with the hash
    of its weights checked. Raises WeightsError."""
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
        found = sha256_of(weights, path + ".sha256")
    except Exception as error:  # httpx, hub and OS errors have no common base, and all mean the same to the user
        raise WeightsError(
            f"the weights of {name} could not be fetched ({type(error).__name__}); fetch config.json and "
            "model.safetensors elsewhere and give their folder as --init_from=DIR, or set HF_ENDPOINT to a mirror"
        ) from None
    if found != sha256:
        raise WeightsError(f"{weights} has the sha256 {found}, but {name}'s is {sha256}: delete it and start again to "
                           "fetch it anew, or give a folder of weights as --init_from=DIR")
    return os.path.dirname(path)


def sha256_of(path, note):
    """Return a file's sha256, and keep it in the file `note` with the size and the time that it holds for: gigabytes
    are hashed after their download, and not at every start by every rank. Where `note` cannot be written they are."""
    stat = os.stat(path)
    state = f"{stat.st_size} {stat.st_mtime_ns} "
    with contextlib.suppress(OSError, ValueError), open(note, encoding="utf-8") as f:
        kept = f.read()
        if kept.startswith(state) and len(kept) == len(state) + 64:
            return kept[len(state):]
    with open(path, "rb") as f:
        sha256 = hashlib.file_digest(f, "sha256").hexdigest()
    with contextlib.suppress(OSError), open(note, "w", encoding="utf-8") as f:
        f.write(state + sha256)
    return sha256


def read_config(source):
    """What GPTConfig takes, of a folder's config.json or of nanoGPT's ckpt.pt; WeightsError if it describes another
    model than GPT-2."""
    if os.path.isfile(source):
        return read_nanogpt(source)[0]
    try:
        with open(os.path.join(source, "config.json"), encoding="utf-8") as f:
            hf = json.load(f)
        if not isinstance(hf, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        raise WeightsError(f"{source}: config.json cannot be read ({error}); fetch it again, or name another folder "
                           "with --init_from=DIR") from None
    config = {
        "block_size": hf.get("n_positions", 1024),
        "vocab_size": hf.get("vocab_size", 50257),
        "n_layer": hf.get("n_layer", 12),
        "n_head": hf.get("n_head", 12),
        "n_embd": hf.get("n_embd", 768),
        "gelu": "none" if hf.get("activation_function") == "gelu" else "tanh",
    }
    expected = {
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "tie_word_embeddings": (True,),
        "n_inner": (None, 4 * config["n_embd"] if isinstance(config["n_embd"], int) else None),
    }
    for key, values in expected.items():
        if hf.get(key, values[0]) not in values:
            raise WeightsError(f"{source}: config.json has {key}={hf[key]!r}, which is not GPT-2's {values[0]!r}")
    return config


def unpickled(path):
    """What torch.save wrote to a file, its tensors mapped where its format allows that. Only tensors and plain
    containers are made, whatever the file names: a stranger's code does not run. Raises WeightsError."""
    try:
        zipped = zipfile.is_zipfile(path)  # the older format cannot be mapped, nor looked into
        strange = torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipped else []
        if strange:
            raise WeightsError(f"{path} names {', '.join(sorted(strange))}, which no weights need; not read")
        return torch.load(path, map_location="cpu", mmap=zipped, weights_only=True)
    except WeightsError:
        raise
    except pickle.UnpicklingError:  # whose own words advise to let the file run code
        raise WeightsError(f"{path} is no file of weights, or is damaged") from None
    except Exception as error:  # a cut or foreign file: zip and torch each raise their own
        why = (str(error).splitlines() or [""])[0]
        raise WeightsError(f"{path}: the weights cannot be read ({type(error).__name__}: {why})") from None


def read_nanogpt(path):
    """(what GPTConfig takes, {name: tensor}, nanoGPT's own settings) of its ckpt.pt, whose names and layout are
    ours."""
    checkpoint = unpickled(path)
    try:
        args = {"bias": True, **checkpoint["model_args"]}  # its first versions had no other
        tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in checkpoint["model"].items()}
        names = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "bias")
        config = {name: args[name] for name in names} | {"gelu": "none"}
    except (KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is no ckpt.pt of nanoGPT's ({type(error).__name__}: {error})") from None
    wte, head = (tensors.get(name) for name in ("transformer.wte.weight", "lm_head.weight"))
    if wte is not None and head is not None and head.data_ptr() != wte.data_ptr():
        raise WeightsError(f"{path}: lm_head.weight is not the token embedding, as it is in GPT-2")
    return config, tensors, checkpoint.get("config", {})


def open_weights(source):
    """(names, get) of the tensors of a folder, from safetensors or else pickles, whole or in shards, or of nanoGPT's
    ckpt.pt."""
    from safetensors import safe_open

    if os.path.isfile(source):
        tensors = read_nanogpt(source)[1]
        return tensors.keys(), tensors.__getitem__
    found = [(kind, index) for kind in ("model.safetensors", "pytorch_model.bin") for index in (".index.json", "")
             if os.path.exists(os.path.join(source, kind + index))]
    if not found:
        raise WeightsError(f"{source} has neither model.safetensors nor pytorch_model.bin")
    (kind, index), shards = found[0], {found[0][0]}
    if index:
        with open(os.path.join(source, kind + index), encoding="utf-8") as f:
            shards = set(json.load(f)["weight_map"].values())
    paths = [os.path.join(source, shard) for shard in sorted(shards)]
    if kind == "pytorch_model.bin":
        tensors = {name: tensor for path in paths for name, tensor in unpickled(path).items()}
        return tensors.keys(), tensors.__getitem__
    where = {name: reader for path in paths for reader in [safe_open(path, framework="pt")]
             for name in reader.keys()}  # noqa: SIM118 (no mapping)
    return where.keys(), lambda name: where[name].get_tensor(name)


@contextlib.contextmanager
def telling(source):
    """A cut or foreign file as a WeightsError: safetensors and JSON each raise their own."""
    try:
        yield
    except WeightsError:
        raise
    except Exception as error:
        raise WeightsError(f"{source}: the weights cannot be read ({type(error).__name__}: {error})") from None


def check_weights(source):
    """Raise WeightsError where a folder or file has no weights, or is cut off; none is read."""
    with telling(source):
        open_weights(source)


@torch.no_grad()
def read_weights(model, source):
    """Fill the model from a folder or a ckpt.pt. transformers keeps linear layers as Conv1D, transposed; neither knows
    of our padding."""
    with telling(source):
        names, get = open_weights(source)
        ours = dict(model.named_parameters())
        strange = [name for name in names if name not in ours and not name.endswith((".attn.bias", "lm_head.weight"))]
        if os.path.isfile(source) and strange:  # nanoGPT with something built in
            raise WeightsError(f"{source}: GPT-2 has no place for the tensor {strange[0]}")
        for name, p in ours.items():
            # gpt2 on the hub has no "transformer." before its names, later saves have
            theirs = name if name in names else name.removeprefix("transformer.")
            if theirs not in names:
                raise WeightsError(f"{source}: the tensor {name} is missing")
            w = get(theirs)
            if os.path.isdir(source) and name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
                w = w.t()
            rows = model.config.vocab_size if name == "transformer.wte.weight" else len(p)
            if w.shape != p[:rows].shape:
                raise WeightsError(
                    f"{source}: {name} has shape {tuple(w.shape)}, its configuration says {tuple(p[:rows].shape)}"
                )
            p[:rows].copy_(w)
            p[rows:] = 0
