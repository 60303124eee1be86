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
    datasets = [settings["dataset"]] if isinstance(settings["dataset"], str) else settings["dataset"]  # or a mixture
    settings |= {"init_from": os.path.basename(os.path.normpath(base)), "ranks": manifest["world_size"],
                 "dataset": ", ".join(os.path.basename(os.path.normpath(path)) for path in datasets),
                 "ZeRO stage": manifest["stage"], "precision": manifest["dtype"], **manifest["versions"]}
    return CARD.format(
        base=f"base_model: openai-community/{base}\n" if base in PRETRAINED else "", name=name,
        parameters=model.num_params(), iter_num=state["iter_num"], **vars(model.config),
        best_val_loss=state["best_val_loss"], new=min(50, model.config.block_size // 2), export=export,
        settings="\n".join(f"| {key} | {value} |" for key, value in settings.items()))
