"""The README.md of an exported model."""

import os

from runtime.weights import PRETRAINED

CARD_SETTINGS = (
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
{vocab_size:,} tokens. Trained with DeepSpeed ZeRO for {iter_num:,} iterations. The best validation loss was
{best_val_loss:.4f}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("{name}"), AutoTokenizer.from_pretrained("{name}")
print(tokenizer.decode(model.generate(**tokenizer("\\n", return_tensors="pt"), max_new_tokens={new})[0]))
```

{export}

| setting | value |
|---|---|
{settings}
"""


def model_card(name, model, manifest, export):
    """Return the card's text. manifest: the tag's; export: how the export was checked."""
    state = manifest["state"]
    settings = {key: value for key, value in state["settings"].items() if key in CARD_SETTINGS}
    base = settings["init_from"]
    settings |= {"init_from": os.path.basename(os.path.normpath(base)), "ranks": manifest["world_size"],
                 "dataset": dataset_names(settings["dataset"]), "ZeRO stage": manifest["stage"],
                 "precision": manifest["dtype"], **manifest["versions"]}
    settings |= {f"earlier run {i}": f"{run['iter_num']} iterations on {dataset_names(run['dataset'])}"
                 for i, run in enumerate(state["lineage"], 1)}
    return CARD.format(
        base=f"base_model: openai-community/{base}\n" if base in PRETRAINED else "", name=name,
        parameters=model.num_params(), iter_num=state["iter_num"], **vars(model.config),
        best_val_loss=state["best_val_loss"], new=min(50, model.config.block_size // 2), export=export,
        settings="\n".join(f"| {key} | {value} |" for key, value in settings.items()))


def dataset_names(dataset):
    """Return the name of a dataset, or the names and weights of a mixture."""
    if isinstance(dataset, str):
        return os.path.basename(os.path.normpath(dataset))
    return ", ".join(f"{dataset_names(name)} (weight {weight})" for name, weight in dataset.items())
