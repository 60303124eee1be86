"""Export a checkpoint as a Hugging Face folder, for transformers and the tools that read its files.

    python export_hf.py --out_dir=out-shakespeare-xl-deepspeed --tag=best --to=shakespeare-xl
    python export_hf.py --out_dir=out-shakespeare-xl-deepspeed --dtype=bfloat16
    python export_hf.py --out_dir=out-shakespeare-xl-lora --peft --to=adapter      LoRA's adapter alone, for PEFT

The folder is written under a temporary name and loaded with transformers. It gets its name only if both models give
the same logits, up to float32's rounding, and both tokenizers the same tokens."""

from typing import Literal

import configurator

out_dir = "out-shakespeare-xl-deepspeed"  # folder of the run
tag: str | None = None  # best, final, iter_20, ... or latest; None: best, or the newest if there is no best
to: str | None = None  # the folder to write; None: hf-TAG in out_dir
dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # the weights' precision
peft = False  # write LoRA's adapter for PEFT instead of a model

globals().update(vars(configurator.settings_of_script(__file__)))

import os
import secrets
import shutil

os.environ.setdefault("DS_ACCELERATOR", "cpu")

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

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
work = None
with exit_on_error("interrupted"):
    try:
        if peft and dtype != "float32":
            raise UserError(f"peft=True writes float32, but dtype={dtype}: drop one of the two")
        tag, manifest = TagStore(out_dir).find(tag)
        state = manifest["state"]
        kind, vocab_size = state["data"]["tokenizer"], state["data"]["vocab_size"]
        encode, decode = tokenizer_of(kind)
        to = os.path.normpath(to or os.path.join(out_dir, f"hf-{tag}"))
        refuse_broken_link(to, "--to")
        if os.path.exists(to) and not (os.path.isdir(to) and not os.listdir(to)):
            raise UserError(f"to={to} exists: choose another folder with --to=DIR, or delete it")
        work = f"{to}.{secrets.token_hex(4)}.saving"
        os.makedirs(work)
        if peft:
            reader, _ = open_tag(out_dir, tag)
            hf.write_peft_adapter(work, state["lora"], {name: reader.get(name) for name in reader.shapes})
        else:
            model, _ = load_model(out_dir, tag)
            model.crop_vocab_size(vocab_size)
            print(f"{out_dir}/{tag}: {model.num_params():,} parameters after {counted(state['iter_num'], 'iteration')}")
            model.to(getattr(torch, dtype)).float()  # the rounded weights
            ids = [i % vocab_size for i in range(model.config.block_size)]
            left_out = hf.write_model(model, work, end_of_text(kind), dtype)
            hf.write_tokenizer(work, kind, model.config.block_size, state["data"]["template"])
            tokenizer, text = transformers.AutoTokenizer.from_pretrained(work, local_files_only=True), decode(ids)
            wanted = encode(text)
            if tokenizer(text, add_special_tokens=False)["input_ids"] != wanted:
                raise UserError("the exported tokenizer encodes a text differently: nothing was exported")
            if tokenizer.decode(wanted) != decode(wanted):
                raise UserError("the exported tokenizer decodes tokens differently: nothing was exported")
            difference = hf.check_model(model, work, torch.tensor([ids]))
            print(f"Loaded with transformers {transformers.__version__} in float32, its logits for {len(ids):,} tokens "
                  f"differ from those of the training code by at most {difference:.1e}.")
            if left_out:
                print(f"note: transformers' GPT-2 has no buffers, so the export has no {', '.join(left_out)}")
        os.rename(work, to)
        print(f"written to {to}")
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"to={to} can't be written ({why}): choose another folder with --to=DIR") from None
    finally:
        if work:
            shutil.rmtree(work, ignore_errors=True)
