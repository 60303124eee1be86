"""Read pretrained weights.

They are on the Hugging Face hub, in a folder in transformers' format, or in nanoGPT's ckpt.pt.
"""

import contextlib
import functools
import ipaddress
import os
import pickle
import sys
import urllib.parse
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NotRequired

import torch
from pydantic import Field, with_config
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from runtime.errors import UserError
from runtime.pretrained import PRETRAINED, REVISIONS
from runtime.torch_files import CouldRunCode, check_torch_file
from runtime.untrusted import (
    STRICT,
    check_regular,
    check_type,
    open_regular,
    parse_json,
    read_regular,
)

HUB_FILES = ("config.json", "model.safetensors")
# Keys of transformers' config.json, and the values that model.py implements, the default first
GPT2_KEYS = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
    "quantization_config": (None,),
}
CONV1D = "c_attn.weight", "c_fc.weight", "c_proj.weight"  # which transformers stores transposed
EMBEDDING = "transformer.wte.weight"  # with rows of padding
HEAD = "lm_head.weight"
BODY = ("wte.", "wpe.", "h.", "ln_f.")  # how the names of a GPT-2's tensors begin
MASKS = (".attn.bias", ".attn.masked_bias")  # of attention, in files of old versions
MAX_WEIGHTS_BYTES = 200_000_000_000  # of a file
MAX_HEADER_BYTES = 20_000_000  # of a safetensors file; GPT-2 XL's has 72 kB
PLAIN_TYPES = (bool, int, float, str, type(None))  # of a configuration's values
SAFE_TORCH = "2.10"  # torch.load(weights_only=True) could run code before: CVE-2026-24747

Layers = Annotated[int, Field(ge=1, le=1000)]
Size = Annotated[int, Field(ge=1, le=2**24)]


@with_config(STRICT)
class HFConfig(TypedDict):
    """The sizes in transformers' config.json, with GPT-2's as defaults."""

    n_layer: NotRequired[Layers]
    n_head: NotRequired[Size]
    n_embd: NotRequired[Size]
    n_positions: NotRequired[Size]
    vocab_size: NotRequired[Size]


@with_config(STRICT)
class ModelArgs(TypedDict):
    """The "model_args" of nanoGPT's ckpt.pt."""

    n_layer: Layers
    n_head: Size
    n_embd: Size
    block_size: Size
    vocab_size: Size
    bias: bool


@with_config(STRICT)
class ShardIndex(TypedDict):
    """What a reader needs of model.safetensors.index.json."""

    weight_map: dict[str, str]


@contextlib.contextmanager
def weights_errors(path: str | os.PathLike) -> Iterator[None]:
    """Turn any exception that reading a damaged file raises into a UserError."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Rust code that panics raises what is no Exception
        first_line, *_ = str(error).splitlines() or [""]
        why = f"{type(error).__name__}: {first_line}"
        if isinstance(error, pickle.UnpicklingError | CouldRunCode):
            # PyTorch's words advise to let it run code
            why = "it is damaged, or contains what could run code"
        raise UserError(f"{path} cannot be read ({why}): fetch it again, or choose "
                        "other weights with --init_from=PATH") from None


def fetch_from_hub(name: str, download: bool = True) -> str | None:
    """Return the local folder of a GPT-2 on the Hugging Face hub.

    Download it if it isn't cached. download=False: only check that it is cached or that the hub
    answers, and return None. Raises UserError.
    """
    # A name only, so that no path reaches the hub
    if name not in PRETRAINED:
        raise UserError(f"'{name}' is not a folder, a file or one of {', '.join(PRETRAINED)}")
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    repo = f"openai-community/{name}"
    revision = REVISIONS[name]
    try:
        cached = [try_to_load_from_cache(repo, file, revision=revision) for file in HUB_FILES]
        if not all(isinstance(path, str) for path in cached):
            # Without a network this fails at once; a download would retry for 30 s
            HfApi().model_info(repo, revision=revision)
            warn_of_http()
        if not download:
            return None
        paths = [hf_hub_download(repo, file, revision=revision) for file in HUB_FILES]
        return os.path.dirname(paths[0])
    except Exception as error:  # httpx, hub and OS errors have no common base
        raise UserError(f"the weights of {name} could not be fetched ({type(error).__name__}): "
                        "download config.json and model.safetensors elsewhere and give their "
                        "folder with --init_from=DIR, or set HF_ENDPOINT to a mirror") from None


@functools.cache
def print_note(note: str) -> None:
    """Print a note to stderr, once per process and on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {note}", file=sys.stderr, flush=True)


def warn_of_http() -> None:
    """Print a note if files from the hub come by http from another machine."""
    from huggingface_hub.constants import ENDPOINT

    address = urllib.parse.urlsplit(ENDPOINT)
    if address.scheme == "http" and not is_loopback(address.hostname or ""):
        print_note(f"HF_ENDPOINT={ENDPOINT} is not https: weights from it can be changed on the "
                   "way, and are not checked by a hash")


def is_loopback(host: str) -> bool:
    """Return whether an address or a name is this machine's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def read_json_of_weights(path: str | os.PathLike, kind: Any = dict) -> Any:
    """Return the value of a JSON file in a folder of weights. Raises UserError.

    kind: see untrusted.read_json().
    """
    with weights_errors(path):
        value = parse_json(read_regular(path))
        check_type(value, kind)
    return value


def read_config(source: str, config_class: type) -> dict[str, Any]:
    """Return GPTConfig's arguments from a folder's config.json or a ckpt.pt.

    config_class: GPTConfig. A ckpt.pt of an edited nanoGPT may have fields that GPT-2 hasn't.
    Raises UserError if it isn't a GPT-2, or if such a field is missing in GPTConfig.
    """
    # nanoGPT keeps configuration and weights in one file
    if os.path.isfile(source):
        config, _ = read_nanogpt(source)
        known = [field.name for field in fields(config_class)]
        for name, value in config.items():
            if name not in known:
                raise UserError(
                    f"{source} was trained with {name[:80]}={repr(value)[:80]}, and GPTConfig has "
                    "no such field: add it to GPTConfig and to the model, or delete it from the "
                    "file's model_args if it changes nothing"
                )
        return config
    # A key that isn't there has GPT-2's value
    hf = read_json_of_weights(os.path.join(source, "config.json"), HFConfig)
    n_embd = hf.get("n_embd", 768)
    known = {**GPT2_KEYS, "n_inner": (None, 4 * n_embd)}
    for key, values in known.items():
        if hf.get(key, values[0]) not in values:
            raise UserError(f"{source}: config.json has {key}={hf[key]!r}, which is not GPT-2's "
                            f"{values[0]!r}")

    # transformers' "gelu" is the exact one, its "gelu_new" the approximation by tanh
    gelu = "tanh"
    if hf.get("activation_function") == "gelu":
        gelu = "none"
    return {
        "block_size": hf.get("n_positions", 1024),
        "vocab_size": hf.get("vocab_size", 50257),
        "n_layer": hf.get("n_layer", 12),
        "n_head": hf.get("n_head", 12),
        "n_embd": n_embd,
        "gelu": gelu,
    }


def load_untrusted(path: str | os.PathLike) -> Any:
    """Return what torch.save wrote to a file, memory-mapped if its format allows that.

    The file can't run code: only tensors and plain containers are unpickled. Raises UserError.
    """
    with weights_errors(path):
        # Older torch.save formats aren't zip files, and can't be memory-mapped
        with open_regular(path, MAX_WEIGHTS_BYTES) as file:
            is_zip = check_torch_file(file)
        if TorchVersion(torch.__version__) < SAFE_TORCH:
            print_note(
                f"PyTorch {torch.__version__} may run code that is hidden in {path} "
                "(CVE-2026-24747): read only files that you trust, use model.safetensors, or "
                f"install PyTorch {SAFE_TORCH} or newer"
            )
        return torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)


def load_safetensors(path: str | os.PathLike) -> dict[str, Tensor]:
    """Return {name: tensor} of a safetensors file, memory-mapped.

    Raises any exception if it is damaged.
    """
    # A header's length comes first, and decides how much is read for it
    with open_regular(path, MAX_WEIGHTS_BYTES) as file:
        header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > MAX_HEADER_BYTES:
        most = f"{MAX_HEADER_BYTES:,}"
        raise ValueError(f"its header has {header_bytes:,} bytes, and at most {most} are plausible")
    return load_file(path)


@functools.lru_cache(maxsize=1)  # configuration and weights are in one file
def read_nanogpt(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (GPTConfig's arguments, {name: tensor}) of nanoGPT's ckpt.pt.

    The arguments are all "model_args" but the dropout, which is a setting of each run. Raises
    UserError.
    """
    checkpoint = load_untrusted(path)
    try:
        # The first versions of nanoGPT have no "bias"
        args = {"bias": True, **checkpoint["model_args"]}
        check_type(args, ModelArgs)
        config = {name: value for name, value in args.items() if name != "dropout"}
        for name, value in config.items():
            if type(name) is not str or type(value) not in PLAIN_TYPES:
                raise TypeError(f"model_args has a {type(value).__name__}")
        tensors = {}
        for name, tensor in checkpoint["model"].items():
            tensors[name.removeprefix("_orig_mod.")] = tensor  # torch.compile's
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{path} is not a nanoGPT ckpt.pt ({type(error).__name__}: {error})") from None
    # model.py's head is the embedding
    head = tensors.get("lm_head.weight")
    embedding = tensors.get("transformer.wte.weight", head)
    if torch.is_tensor(head) and torch.is_tensor(embedding):
        if head.data_ptr() != embedding.data_ptr():
            raise UserError(
                f"{path}: lm_head.weight is not tied to the token embedding, as GPT-2's is")
    return {"gelu": "none", **config}, tensors


def weight_files(source: str) -> list[Path]:
    """Return the paths of the weights in a folder: one, or the shards that its index names.

    Raises UserError.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        # An index names the shards. It may be somebody else's, and names no file elsewhere
        index = Path(source, f"{name}.index.json")
        if index.exists():
            shards = read_json_of_weights(index, ShardIndex)["weight_map"].values()
            for shard in shards:
                if os.path.basename(shard) != shard or not shard.endswith(Path(name).suffix):
                    raise UserError(
                        f"{index} names the file {shard!r}, which is no {Path(name).suffix} file "
                        "of its folder: fetch it again"
                    )
            return [Path(source, shard) for shard in sorted(set(shards))]
        if os.path.exists(os.path.join(source, name)):
            return [Path(source, name)]
    raise UserError(f"{source} has neither model.safetensors nor pytorch_model.bin")


def check_sizes(source: str, config: Any) -> None:
    """Raise UserError if the files of weights are too small for a model of this GPTConfig.

    Call it before the model is allocated. No file takes less than a byte per parameter.
    """
    # The embeddings, and the matrices of each block: the least that this shape has
    width = config.n_embd
    n_params = (config.vocab_size + config.block_size) * width + config.n_layer * 12 * width**2
    # What there is
    files = [Path(source)]
    if not os.path.isfile(source):
        files = weight_files(source)
    n_bytes = 0
    for file in files:
        with weights_errors(source):
            n_bytes += check_regular(file, MAX_WEIGHTS_BYTES)
    if n_params > n_bytes:
        raise UserError(f"{source} cannot be read (its configuration has {n_params:,} parameters, "
                        f"and its weights have {n_bytes:,} bytes): fetch it again, or choose other "
                        "weights with --init_from=PATH")


def open_weights(source: str) -> dict[str, Tensor]:
    """Return {name: tensor} of nanoGPT's ckpt.pt, or of a folder.

    A folder has a model.safetensors or a pytorch_model.bin, which may be in shards. Tensors are
    memory-mapped if the format allows that. Raises UserError.
    """
    # nanoGPT's file has all tensors
    if os.path.isfile(source):
        _, tensors = read_nanogpt(source)
        return tensors
    tensors = {}
    for file in weight_files(source):
        with weights_errors(source):
            if file.suffix == ".safetensors":
                tensors.update(load_safetensors(file))
            else:
                tensors.update(load_untrusted(file))
    return tensors


@torch.no_grad()
def read_weights(model: nn.Module, source: str, tensors: dict[str, Tensor]) -> None:
    """Copy the tensors of a folder or a ckpt.pt, from open_weights(), into the model.

    Fill the vocabulary's padding with zeros. Raises UserError.
    """
    # The names under which a file may have each parameter
    params = dict(model.named_parameters())
    names_of = {param: [name] for name, param in params.items()}  # a shared one has several
    for name, param in model.named_parameters(remove_duplicate=False):
        if name not in names_of[param]:
            names_of[param].append(name)
    is_transformers = os.path.isdir(source)
    if not is_transformers:  # a modified nanoGPT may have more
        buffers = dict(model.named_buffers())
        for name, w in tensors.items():
            if name in buffers:
                copy_buffer(buffers[name], source, name, w)
            elif name not in params and not name.endswith((".attn.bias", "lm_head.weight")):
                raise UserError(f"{source}: the model has no tensor {name}")

    # What GPT-2 has, and the model doesn't take
    unused = {name for name in tensors if name.removeprefix("transformer.").startswith(BODY)}
    unused = {name for name in unused if not name.endswith(MASKS)}
    for p, names in names_of.items():
        name, w = one_tensor(source, names, tensors)
        for other in names:
            unused -= {other, other.removeprefix("transformer.")}

        # transformers' Conv1D stores a matrix as (inputs, outputs)
        if is_transformers and name.endswith(CONV1D):
            w = w.t()
        rows = len(p)

        # The model's vocabulary has rows of padding, which files of others don't
        if name in (EMBEDDING, HEAD):
            rows = model.config.vocab_size
        if w.shape != p[:rows].shape:
            raise UserError(f"{source}: {name} has shape {tuple(w.shape)}, not "
                            f"{tuple(p[:rows].shape)}")
        p[:rows].copy_(w)
        p[rows:] = 0  # the vocabulary's padding
    if unused:
        shown = ", ".join(sorted(unused)[:3])
        raise UserError(f"{source}: this model has no place for {shown}, which GPT-2 has: restore "
                        "model.py, or leave it out in read_weights in runtime/weights.py")


def copy_buffer(buffer: Tensor, source: str, name: str, w: Tensor) -> None:
    """Copy a file's tensor into a buffer of the model. Raises UserError if it has another shape."""
    if not torch.is_tensor(w) or w.shape != buffer.shape:
        shape = tuple(w.shape) if torch.is_tensor(w) else type(w).__name__
        raise UserError(f"{source}: {name} has shape {shape}, not {tuple(buffer.shape)}")
    buffer.copy_(w)


def one_tensor(
    source: str, names: list[str], tensors: dict[str, Tensor]
) -> tuple[str, Tensor]:
    """Return (name, tensor) of a parameter with these names.

    Raises UserError if there is none, or if the tensors of its names differ.
    """
    found = {}
    for name in names:
        # The names of gpt2 on the hub have no "transformer." prefix
        w = tensors.get(name, tensors.get(name.removeprefix("transformer.")))
        if w is None and names == [HEAD]:  # this model's head is untied, and GPT-2's own is tied
            w = tensors.get(EMBEDDING, tensors.get("wte.weight"))
        if w is not None:
            found[name] = w
    if not found or not all(torch.is_tensor(w) and w.is_floating_point() for w in found.values()):
        raise UserError(f"{source}: the tensor {names[0]} is missing, or is not one of "
                        "floating-point numbers")
    # One parameter can't be two tensors
    (first, tensor), *others = found.items()
    for name, other in others:
        if other.data_ptr() != tensor.data_ptr() and not torch.equal(other, tensor):
            raise UserError(f"{source}: {first} and {name} differ, and this model has one "
                            "parameter for both")
    return first, tensor
