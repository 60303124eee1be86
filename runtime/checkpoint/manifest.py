"""The manifest of a tag: what it must hold, and its own hash.

A tag may come from somebody else, so nothing in its manifest is used before it has been compared
with the types and ranges here.
"""

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, StringConstraints, with_config
from typing_extensions import TypedDict

from runtime.checkpoint.errors import OTHER_TAG, CheckpointError, UnreadableError
from runtime.errors import UserError
from runtime.untrusted import STRICT, UnsafeFileError, check_type, parse_json, read_regular

MANIFEST_FORMAT = 5  # increase it when a key of the manifest changes
MAX_MANIFEST_BYTES = 8_000_000  # all characters of Unicode take 2 MB, 1,000 ranks 0.4 MB
MAX_TEXT = 10_000  # characters of a name or a path, which is printed
MAX_TEMPLATE = 1_000_000
MAX_NAMES = 100_000  # of tied parameters
MAX_PARTS = 10_000  # functions and classes of the model's source
# Of a tag's files. AdamW takes at most 16 bytes per parameter, and each rank writes the buffers
BYTES_PER_ELEMENT = 1024
BYTES_BESIDE = 100_000_000

# The files that DeepSpeed writes into a tag. A name with a separator would lead out of it
FILE_NAME = (
    r"^(zero_pp_rank_[0-9]{1,6}_)?mp_rank_00_model_states\.pt$"
    r"|^(bf16_)?zero_pp_rank_[0-9]{1,6}_mp_rank_00_optim_states\.pt$"
)

Count = Annotated[int, Field(ge=0, le=2**62)]
Positive = Annotated[int, Field(ge=1, le=2**62)]
# Sequences that were trained on, over all ranks: where a resume starts in the data. Floats count up
# to 2**53
Position = Annotated[int, Field(ge=0, le=2**53)]
Loss = Annotated[float, Field(ge=-math.inf)]  # any but NaN: a loss of the user's may be below 0
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, StringConstraints(pattern=FILE_NAME)]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
Template = Annotated[str, StringConstraints(max_length=MAX_TEMPLATE)]
Sources = Annotated[list[Text], Field(max_length=1000)]
PythonFile = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,200}$")]
PartHash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8}$")]
Tie = Annotated[list[Text], Field(min_length=2, max_length=MAX_NAMES)]
Ties = Annotated[list[Tie], Field(max_length=MAX_NAMES)]
WandbId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}$")]


@with_config(STRICT)
class FileEntry(TypedDict):
    bytes: Count
    sha256: Hash


@with_config(STRICT)
class Model(TypedDict):
    """GPTConfig's fields. An edited model.py may have more.

    No tensor of a larger model fits a GPU.
    """

    block_size: Annotated[int, Field(ge=1, le=2**24)]
    vocab_size: Annotated[int, Field(ge=1, le=2**24)]
    n_layer: Annotated[int, Field(ge=1, le=4095)]
    n_head: Annotated[int, Field(ge=1, le=2**17)]
    n_embd: Annotated[int, Field(ge=1, le=2**17)]
    dropout: NotRequired[Annotated[float, Field(ge=0, le=1)]]
    bias: NotRequired[bool]
    gelu: NotRequired[Text]


@with_config(STRICT)
class ModelSource(TypedDict):
    """What model_source.py records. file: None if the model's class has none."""

    file: PythonFile | None
    parts: Annotated[dict[Text, PartHash], Field(max_length=MAX_PARTS)]


@with_config(STRICT)
class Settings(TypedDict):
    """The settings that a resume compares. The others are only printed."""

    dataset: Text | Annotated[dict[Text, float], Field(max_length=1000)]
    seed: int
    optimizer: Text
    batch_size: Positive
    gradient_accumulation_steps: Positive


@with_config(STRICT)
class Lora(TypedDict):
    rank: Annotated[int, Field(ge=1, le=2**17)]
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    dropout: Annotated[float, Field(ge=0, le=1)]
    target_modules: Annotated[list[Text], Field(max_length=100)]
    base: Text | None


@with_config(STRICT)
class Tokenizer(TypedDict):
    kind: Literal["gpt2", "char", "hf"]
    chars: NotRequired[str]
    file: NotRequired[str | None]
    sha256: NotRequired[Hash]
    end_of_text: NotRequired[Count | None]


@with_config(STRICT)
class Dataset(TypedDict):
    share: Positive
    train_tokens: Positive
    val_tokens: Positive
    files: dict[str, FileEntry] | None


@with_config(STRICT)
class Data(TypedDict):
    tokenizer: Tokenizer
    vocab_size: Annotated[int, Field(ge=1, le=2**24)]
    template: Template | None
    datasets: list[Dataset]


@with_config(STRICT)
class State(TypedDict):
    iter_num: Count
    sequences: Position
    best_val_loss: Loss | None  # None before the first evaluation
    lr: NotRequired[Rate | None]  # of the last step
    evals_since_best: Count
    improved: bool
    evaluation_is_due: NotRequired[bool]  # a stop has ended it
    wandb_id: WandbId | None
    grad_norms: Annotated[list[Loss], Field(max_length=10_000)]
    grad_norm_ratios: Annotated[list[Loss], Field(max_length=10_000)]
    settings: Settings
    model: Model
    sources: Sources
    ties: NotRequired[Ties]  # the names of each parameter that has several
    model_source: NotRequired[ModelSource]
    elements: NotRequired[Count]  # numbers in all parameters and persistent buffers
    eval_windows: NotRequired[Positive]  # of each split, in an evaluation
    lora: Lora | None
    data: Data


@with_config(STRICT)
class Manifest(TypedDict):
    format: int
    tag: Annotated[str, StringConstraints(pattern=r"^iter_[0-9]{1,18}$")]
    iter_num: Count
    world_size: Annotated[int, Field(ge=1, le=10**6)]
    stage: Annotated[int, Field(ge=0, le=3)]
    dtype: Literal["float32", "float16", "bfloat16"]
    versions: dict[str, str]
    optimizer: Text  # optimizer_name() of it
    state: State
    files: Annotated[dict[FileName, FileEntry], Field(min_length=1)]
    manifest_sha256: Hash


class ChangedManifestError(ValueError):
    """The manifest's own hash is not that of its content."""


def parse_manifest(text: str | bytes) -> Any:
    """Return a manifest that is as it was signed. Raises ChangedManifestError.

    Its types have not been checked yet, because another version of this program may have others.
    """
    try:
        manifest = parse_json(text)
    except ValueError as error:
        raise ChangedManifestError(str(error)) from None

    # A signed manifest is byte for byte what signing its content gives
    content = text.decode(errors="replace") if isinstance(text, bytes) else text
    if not isinstance(manifest, dict) or content != sign_manifest(manifest):
        raise ChangedManifestError("its sha256 differs")
    return manifest


def read_signed(path: str) -> Any:
    """Return parse_manifest() of a file. Raises ChangedManifestError, UnsafeFileError, OSError."""
    return parse_manifest(read_regular(path, MAX_MANIFEST_BYTES, follow_links=False))


def read_manifest(path: str) -> dict:
    """Return the manifest in a file, whose hash and types have been checked.

    Raises CheckpointError.
    """
    # The format comes before the types, which differ between versions
    try:
        manifest = read_signed(path)
        if manifest.get("format") != MANIFEST_FORMAT:
            raise CheckpointError(
                f"{path} was written by another version of this program: {OTHER_TAG}"
            )
        check_manifest(manifest)
    except OSError as error:
        raise UnreadableError.of(error, path) from None
    except UnsafeFileError as error:
        raise UnreadableError(f"{error}, or choose another checkpoint") from None
    except ChangedManifestError as error:
        raise CheckpointError(
            f"{path} has changed since it was saved ({error}): {OTHER_TAG}"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} can't be used ({error}): {OTHER_TAG}") from None
    return manifest


def check_manifest(manifest: Any) -> None:
    """Raise ValueError unless a manifest has the keys, types and ranges of Manifest."""
    check_type(manifest, Manifest)

    # Numbers that contradict each other
    state = manifest["state"]
    if state["iter_num"] != manifest["iter_num"]:
        raise ValueError(f"state.iter_num is {state['iter_num']}, not {manifest['iter_num']}")
    if state["sequences"] < state["iter_num"]:
        raise ValueError(
            f"state.sequences is {state['sequences']}, fewer than one for each of the "
            f"{state['iter_num']} iterations"
        )
    if state["improved"] and state["best_val_loss"] is None:
        raise ValueError("state.best_val_loss is null, and state.improved says that there is one")
    check_bytes(manifest)

    # Characters that aren't as many as the tokens, or no text
    data = state["data"]
    if data["tokenizer"]["kind"] == "char":
        chars = data["tokenizer"].get("chars", "")
        if len(chars) != data["vocab_size"]:
            raise ValueError(f"its {len(chars)} characters are not {data['vocab_size']} tokens")
        if not chars.isascii() and any("\ud800" <= char <= "\udfff" for char in chars):
            raise ValueError("state.data.tokenizer.chars holds half of a character")

    # Files of another ZeRO stage, or none of a kind
    for file in manifest["files"]:
        if manifest["stage"] < 3 and "model_states" in file and file.startswith("zero_pp"):
            raise ValueError(
                f"files has {file}, which ZeRO stage {manifest['stage']} doesn't write"
            )
    if not any("model_states" in file for file in manifest["files"]):
        raise ValueError("files has no model_states.pt")
    if not any("optim_states" in file for file in manifest["files"]):
        raise ValueError("files has no optim_states.pt")


def check_bytes(manifest: dict) -> None:
    """Raise ValueError if a tag's files are far larger than its model: hashing them takes hours."""
    # The parameters of a GPT-2 of these sizes
    model = manifest["state"]["model"]
    width = model["n_embd"]
    elements = (model["vocab_size"] + model["block_size"]) * width
    elements += 12 * model["n_layer"] * width**2
    # An edited model may have more than these sizes say, such as experts
    elements = max(elements, manifest["state"].get("elements", 0))
    most = BYTES_BESIDE + BYTES_PER_ELEMENT * elements

    # What the tag says that its files take
    n_bytes = sum(entry["bytes"] for entry in manifest["files"].values())
    if n_bytes > most:
        raise ValueError(
            f"its files have {n_bytes:,} bytes, and at most {most:,} are plausible for its model"
        )


def check_state(state: Mapping[str, object]) -> None:
    """Raise UserError if a run's state can't be written as JSON, or not be read back from it."""
    written = {}
    for name, value in state.items():
        try:
            written[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{name!r} in the state that save() records can't be written as JSON: {error}; "
                "record numbers and texts there, and tensors as buffers of the model, with "
                "register_buffer"
            ) from None

    # A tag that no reader takes would only be noticed at a resume
    try:
        check_type(written, State)
    except ValueError as error:
        raise UserError(f"no resume would take the state that save() records: {error}") from None


def topology(engine: Any) -> dict:
    """Return what a manifest records of the engine that saved it."""
    return {
        "world_size": engine.world_size,
        "stage": engine.stage,
        "dtype": engine.dtype,
        "optimizer": engine.optimizer,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "deepspeed")},
    }


def sign_manifest(manifest: dict) -> str:
    """Return a manifest as JSON with its own hash in it."""
    # A hash can't cover itself
    unsigned = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    sha256 = hashlib.sha256(json.dumps(unsigned).encode()).hexdigest()
    return json.dumps({**unsigned, "manifest_sha256": sha256}, indent=1)
