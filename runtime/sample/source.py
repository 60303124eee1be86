"""Find the model that sample.py or evaluate.py loads, and its tokenizer."""

import os
from pathlib import Path

from runtime.bring import no_weights
from runtime.checkpoint.load import load_model
from runtime.checkpoint.tags import TagStore, parse_run_path
from runtime.chosen_model import GPT, GPTConfig
from runtime.data.dataset import read_meta
from runtime.data.folder_tokenizer import assumed_tokenizer, check_ids, tokenizer_of_weights
from runtime.data.folders import dataset_dir
from runtime.data.meta import MAX_TEMPLATE_CHARS
from runtime.errors import UserError
from runtime.output import counted
from runtime.untrusted import read_regular
from runtime.weights import print_note, read_json_of_weights, weights_errors


def find_model(init_from, out_dir, tag, dataset):
    """Return (name, description, data, load(device, dtype) -> GPT) of the model that the settings name. data:
    {"tokenizer", "vocab_size", "template" or None, "block_size"}. init_from: "resume" for a tag of out_dir, otherwise
    as for GPT.from_pretrained. dataset: what other weights were trained on, or None. Raises UserError."""
    if init_from == "resume":
        tag, manifest = TagStore(out_dir).find(tag)
        name, description = f"{out_dir}/{tag}", f" after {counted(manifest['iter_num'], 'iteration')}"
        data = {**manifest["state"]["data"], "block_size": manifest["state"]["model"]["block_size"]}
    elif run := parse_run_path(init_from):
        raise UserError(f"init_from={init_from} has checkpoints of train_deepspeed.py: use --out_dir={run[0]} "
                        f"--tag={run[1]}")
    else:
        name, description, folder = init_from, "", Path(init_from)
        if not hasattr(GPTConfig, "from_weights"):  # a model.py of others
            raise UserError(no_weights(init_from, GPTConfig.__module__))
        config = GPTConfig.from_weights(init_from) if os.path.exists(init_from) else GPTConfig()  # a GPT-2 on the hub
        if dataset:
            data = read_meta(dataset_dir(dataset))
            check_ids(dataset, data, init_from, config.vocab_size)
        else:
            data = data_of_weights(init_from, config.vocab_size)
        data = {"template": template_of_weights(folder), "block_size": config.block_size, **data}

    def load(device, dtype):
        if init_from == "resume":
            model, _ = load_model(out_dir, tag, device=device)
            model.to(dtype)
        else:
            model = GPT.from_pretrained(init_from, device=device, dtype=dtype)
        model.crop_vocab_size(data["vocab_size"])
        return model.eval()

    return name, description, data, load


def template_of_weights(folder):
    """Return the chat template in a folder of transformers, or None. Raises UserError."""
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        with weights_errors(jinja):
            return read_regular(jinja, MAX_TEMPLATE_CHARS).decode("utf-8")
    file = folder / "tokenizer_config.json"
    if not file.exists():
        return None
    template = read_json_of_weights(file).get("chat_template")
    if isinstance(template, list):  # of templates with names
        with weights_errors(file):
            template = {each["name"]: each["template"] for each in template}.get("default")
    return template if isinstance(template, str) else None


def data_of_weights(source, vocab_size):
    """Return {"tokenizer", "vocab_size"} of a name on the hub, a folder of weights or a ckpt.pt.

    Raises UserError.
    """
    data = tokenizer_of_weights(source, vocab_size)
    if data is None:
        data, note = assumed_tokenizer(source, vocab_size)
        if data is None:
            raise UserError(f"the tokenizer of {source} is unknown ({vocab_size} tokens): name the dataset that it was "
                            "trained on with --dataset=NAME or a path")
        print_note(note)
    return data
