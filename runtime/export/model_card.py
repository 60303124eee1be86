"""The README.md of an exported model: what it is, how to use it, its losses, data and settings."""

import os

from runtime.data.dataset import DatasetError, dataset_dirs, read_meta
from runtime.weights import PRETRAINED

TOLD = (  # settings that make a model what it is
    "init_from", "dataset", "batch_size", "gradient_accumulation_steps", "block_size", "dropout", "learning_rate",
    "lr_schedule", "decay_lr", "warmup_iters", "lr_decay_iters", "min_lr", "max_iters", "weight_decay", "beta1",
    "beta2", "grad_clip", "seed", "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- gpt2
{base}---
# {name}

GPT-2 with {parameters:,} parameters: {n_layer} layers, {n_head} heads, a width of {n_embd:,}, {block_size:,} positions,
{vocab_size:,} tokens. Trained with DeepSpeed ZeRO for {iter_num:,} iterations.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("{name}"), AutoTokenizer.from_pretrained("{name}")
print(tokenizer.decode(model.generate(**tokenizer({prompt!r}, return_tensors="pt"), max_new_tokens={new})[0]))
```

## Losses

{losses}The best validation loss was {best_val_loss:.4f}.

## Data

{data}

## Settings

{settings}
## Export

{export}
"""


def card(name, model, manifest, history, root, prompt, export):
    """The model card as text, from a tag's manifest, its run's history (records), and the data's own folders, below
    data/ in `root`. prompt: a text that the tokenizer knows; export: sentences on how the folder was made."""
    state = manifest["state"]
    settings = {key: value for key, value in state["settings"].items() if key in TOLD}
    settings["init_from"] = last_name(settings["init_from"])
    settings["dataset"] = ", ".join(data_names(settings["dataset"]))
    run = {"ranks": manifest["world_size"], "ZeRO stage": manifest["stage"], "precision": manifest["dtype"],
           **manifest.get("versions", {}),
           **{f"earlier stage {number}": f"{stage['iter_num']} iterations on {', '.join(data_names(stage['dataset']))}"
              for number, stage in enumerate(state["lineage"], 1)}}
    evals = [(r["iter"], f"{r['train_loss']:.4f}", f"{r['val_loss']:.4f}", f"{r['perplexity']:.2f}")
             for r in history if "val_loss" in r and r["iter"] == state["iter_num"]]
    base = settings.get("init_from")
    return CARD.format(
        base=f"base_model: openai-community/{base}\n" if base in PRETRAINED else "", name=name,
        parameters=model.num_params(), iter_num=state["iter_num"], **vars(model.config), prompt=prompt,
        new=min(50, model.config.block_size // 2),
        losses=table(("iteration", "training loss", "validation loss", "perplexity"), evals) + "\n" if evals else "",
        best_val_loss=state["best_val_loss"], data="\n".join(data_lines(state["settings"]["dataset"], root)),
        settings=table(("setting", "value"), [*settings.items(), *run.items()]), export=export)


def last_name(path):
    return os.path.basename(os.path.normpath(path))


def data_names(dataset):
    """The names in a setting: one, or each of a mixture with its weight."""
    return ([last_name(dataset)] if isinstance(dataset, str) else
            [f"{last_name(name)} (weight {weight})" for name, weight in dataset.items()])


def data_lines(dataset, root):
    """The data sets as a list in Markdown: names, and what their meta.json says where they are here."""
    lines = []
    for name, folder in zip(data_names(dataset), dataset_dirs(dataset, root)):
        try:
            meta = read_meta(folder)
        except DatasetError:
            lines.append(f"- {name}")
            continue
        source = meta["source"]
        lines.append(f"- {name}: {meta['train_tokens']:,} tokens to train on, {meta['val_tokens']:,} held out; from "
                     + source["name"] + (f", sha256 {source['sha256']}" if source["sha256"] else ""))
    return lines


def table(head, rows):
    """Rows as a table in Markdown, with a line's end after it."""
    return "".join("| " + " | ".join(map(str, row)) + " |\n" for row in (head, ["---"] * len(head), *rows))
