"""Where sample.py's model comes from, and the tokenizer that goes with it."""

import json
import os
from collections.abc import Callable
from typing import NamedTuple

from model import GPT, GPTConfig
from runtime.checkpoint.shards import load_model
from runtime.checkpoint.tags import TagStore
from runtime.data.dataset import GPT2_VOCAB, DatasetError, dataset_dirs, read_meta, same_tokenizer
from runtime.data.tokenizer import tokenizer_file_meta
from runtime.weights import PRETRAINED, read_nanogpt

PADDED_GPT2_VOCAB = 50304  # what nanoGPT makes of it where a data set has no meta.pkl


class Source(NamedTuple):
    """What sample.py samples from, before it is loaded."""

    name: str
    description: str  # what follows the name and the size when they are printed
    data: dict  # {"tokenizer", "vocab_size"} as in meta.json
    load: Callable  # load(device, dtype) -> GPT


def resolve(init_from, out_dir, tag, dataset, root):
    """Return the Source that the settings name.

    init_from: "resume" for a tag of out_dir, else as for GPT.from_pretrained. dataset: the name or path of a data set
    with this tokenizer, or None. Raises CheckpointError, WeightsError, DatasetError, or ValueError.
    """
    given = read_meta(dataset_dirs(dataset, root)[0]) if dataset else None
    if init_from == "resume":
        tag, manifest = TagStore(out_dir).find(tag)
        data = manifest["state"]["data"]
        if given and not same_tokenizer(given, data):
            raise ValueError(f"dataset={dataset} has another tokenizer than {out_dir}/{tag} was trained with")
        name, description = f"{out_dir}/{tag}", f" after {manifest['iter_num']} iterations"
    else:
        name, description, data = init_from, "", given or data_of_weights(init_from, root)
        if given and os.path.exists(init_from) and given["vocab_size"] > GPTConfig.from_weights(init_from).vocab_size:
            raise ValueError(f"dataset={dataset} has a vocabulary of {given['vocab_size']}, beyond that of {init_from}")

    def load(device, dtype):
        model = (load_model(out_dir, tag)[0].to(device, dtype) if init_from == "resume" else
                 GPT.from_pretrained(init_from, device=device, dtype=dtype))
        model.crop_vocab_size(data["vocab_size"])
        return model.eval()

    return Source(name, description, data, load)


def data_of_weights(source, root):
    """Return {"tokenizer", "vocab_size"} of a hub's name, a folder of weights, perhaps with a tokenizer, or nanoGPT's
    ckpt.pt. The last names its data set, which is searched in data/ next to its out_dir, and in `root`."""
    gpt2 = {"tokenizer": {"kind": "gpt2"}, "vocab_size": GPT2_VOCAB}
    if source in PRETRAINED and not os.path.exists(source):
        return gpt2
    vocab_size = GPTConfig.from_weights(source).vocab_size
    is_gpt2 = vocab_size in (GPT2_VOCAB, PADDED_GPT2_VOCAB)
    trained_on = read_nanogpt(source)[2].get("dataset") if os.path.isfile(source) else None
    if trained_on:
        nanogpt_root = os.path.dirname(os.path.dirname(os.path.abspath(source)))
        for folder in (os.path.join(nanogpt_root, "data", trained_on), *dataset_dirs(trained_on, root)):
            if os.path.isdir(folder):
                try:
                    return read_meta(folder)
                except DatasetError:
                    if not is_gpt2:  # GPT-2's tokens are known without the data
                        raise
    if is_gpt2:
        return gpt2
    file = os.path.join(source, "tokenizer.json")
    if os.path.exists(file):
        with open(os.path.join(source, "config.json"), encoding="utf-8") as f:
            end = json.load(f).get("eos_token_id")
        return {"tokenizer": tokenizer_file_meta(file, end), "vocab_size": vocab_size}
    raise ValueError(f"the {vocab_size} tokens of {source} are not GPT-2's: name the data set that they come from"
                     f"{f', {trained_on},' if trained_on else ''} with --dataset=NAME or a path")
