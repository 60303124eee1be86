"""Export a checkpoint as a Hugging Face folder, for transformers and the tools that read its files.

    python export_hf.py --out_dir=out-shakespeare-xl-deepspeed --tag=best --to=shakespeare-xl
    python export_hf.py --out_dir=out-shakespeare-xl-deepspeed --dtype=bfloat16
    python export_hf.py --out_dir=out-shakespeare-xl-lora --peft --to=adapter   LoRA alone, for PEFT

The folder is written under a temporary name and loaded with transformers. It gets its name only if
both models give the same logits, up to float32's rounding, and both tokenizers the same tokens.
"""

from collections.abc import Callable
from typing import Any, Literal

import configurator

out_dir = "out-shakespeare-xl-deepspeed"  # folder of the run
tag: str | None = None  # best, final, iter_20, ... or latest; None: best, or else the newest
to: str | None = None  # the folder to write; None: hf-TAG in out_dir
dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # the weights' precision
peft = False  # write LoRA's adapter for PEFT instead of a model

globals().update(vars(configurator.settings_of_script(__file__)))

# What takes seconds to import comes after the settings are read
import os
import secrets
import shutil

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # deepspeed only reads files

import torch
import transformers
from safetensors import SafetensorError

from runtime.checkpoint.load import load_model, open_tag
from runtime.checkpoint.tags import TagStore
from runtime.data.tokenizer import end_of_text, tokenizer_of
from runtime.errors import UserError
from runtime.export import hf
from runtime.files import refuse_broken_link
from runtime.output import counted, exit_on_error

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


def check_new_folder(folder: str) -> None:
    """Raise UserError unless a folder doesn't exist, or is empty."""
    refuse_broken_link(folder, "--to")
    is_empty = os.path.isdir(folder) and not os.listdir(folder)
    if os.path.exists(folder) and not is_empty:
        raise UserError(f"to={folder} exists: choose another folder with --to=DIR, or delete it")


def write_adapter(folder: str, tag: str, state: dict[str, Any]) -> None:
    """Write the LoRA adapter of a tag. state: the "state" of its manifest. Raises UserError."""
    reader, _ = open_tag(out_dir, tag)
    weights = {name: reader.get(name) for name in reader.shapes}
    hf.write_peft_adapter(folder, state["lora"], weights)


def write_model(folder: str, tag: str, state: dict[str, Any], encode: Encode,
                decode: Decode) -> None:
    """Write the model and the tokenizer of a tag, and compare what transformers reads with them.

    state: the "state" of its manifest. encode, decode: of its tokenizer. Raises UserError.
    """
    # The model, without the rows of its embedding that are padding
    data = state["data"]
    vocab_size = data["vocab_size"]
    model, _ = load_model(out_dir, tag)
    model.crop_vocab_size(vocab_size)
    after = counted(state["iter_num"], "iteration")
    print(f"{out_dir}/{tag}: {model.num_params():,} parameters after {after}")
    model.to(getattr(torch, dtype)).float()  # the rounded weights

    # Its files
    block_size = model.config.block_size
    left_out = hf.write_model(model, folder, end_of_text(data["tokenizer"]), dtype)
    hf.write_tokenizer(folder, data["tokenizer"], block_size, data["template"])

    # Read them as a user does, and compare
    ids = [i % vocab_size for i in range(block_size)]
    check_tokenizer(folder, encode, decode, ids)
    difference = hf.check_model(model, folder, torch.tensor([ids]))
    print(f"Loaded with transformers {transformers.__version__} in float32, its logits for "
          f"{len(ids):,} tokens differ from those of the training code by at most "
          f"{difference:.1e}.")
    if left_out:
        print("note: transformers' GPT-2 has no buffers, so the export has no "
              f"{', '.join(left_out)}")


def check_tokenizer(folder: str, encode: Encode, decode: Decode, ids: list[int]) -> None:
    """Raise UserError if an exported tokenizer encodes or decodes otherwise than that of the data.

    ids: whose text is compared.
    """
    exported = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = decode(ids)
    wanted = encode(text)
    if exported(text, add_special_tokens=False)["input_ids"] != wanted:
        raise UserError("the exported tokenizer encodes a text differently: nothing was exported")
    if exported.decode(wanted) != decode(wanted):
        raise UserError("the exported tokenizer decodes tokens differently: nothing was exported")


def export() -> None:
    """Export what the settings say. Raises UserError and OSError."""
    # Refuse what is wrong before anything is written
    if peft and dtype != "float32":
        raise UserError(f"peft=True writes float32, but dtype={dtype}: drop one of the two")
    name, manifest = TagStore(out_dir).find(tag)
    state = manifest["state"]
    encode, decode = tokenizer_of(state["data"]["tokenizer"])
    folder = os.path.normpath(to or os.path.join(out_dir, f"hf-{name}"))
    check_new_folder(folder)

    # The folder gets its name when it is complete
    work = f"{folder}.{secrets.token_hex(4)}.saving"
    try:
        os.makedirs(work)
        if peft:
            write_adapter(work, name, state)
        else:
            write_model(work, name, state, encode, decode)
        os.rename(work, folder)
        print(f"written to {folder}")
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"to={folder} can't be written ({why}): choose another folder with "
                        "--to=DIR") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
with exit_on_error("interrupted"):
    export()
