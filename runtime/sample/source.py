"""Where sample.py's model comes from, and the tokenizer that goes with it."""

import json
import os
from types import SimpleNamespace

from model import GPT, GPTConfig
from runtime.checkpoint.shards import load_model
from runtime.checkpoint.tags import TagStore
from runtime.data.dataset import GPT2_VOCAB, DatasetError, dataset_dirs, read_meta, same_tokenizer
from runtime.data.tokenizer import tokenizer_file_meta
from runtime.weights import PRETRAINED, read_nanogpt

PADDED_GPT2_VOCAB = 50304  # what nanoGPT makes of it where a data set has no meta.pkl


def find(init_from, out_dir, tag, dataset, root):
    """What there is to load, before it is loaded: name, about (words), data ({"tokenizer", "vocab_size"} as in
    meta.json) and load(device, dtype) -> GPT.

    init_from: "resume" for a tag of out_dir, else as for GPT.from_pretrained. dataset: the name or path of a data set
    with this tokenizer, or None. Raises CheckpointError, WeightsError, DatasetError, or ValueError.
    """
    given = read_meta(dataset_dirs(dataset, root)[0]) if dataset else None
    if init_from == "resume":
        tag, manifest = TagStore(out_dir).find(tag)
        data = manifest["state"]["data"]
        if given and not same_tokenizer(given, data):
            raise ValueError(f"dataset={dataset} has another tokenizer than {out_dir}/{tag} was trained with")
        name, about = f"{out_dir}/{tag}", f" after {manifest['iter_num']} iterations"

        def load():
            return load_model(out_dir, tag)[0]
    else:
        name, about, load = init_from, "", None
        data = given
        if not given:
            data = data_of_weights(init_from, root)
        elif os.path.exists(init_from) and given["vocab_size"] > GPTConfig.from_weights(init_from).vocab_size:
            raise ValueError(f"dataset={dataset} has a vocabulary of {given['vocab_size']}, beyond that of {init_from}")

    def loaded(device, dtype):
        model = load().to(device, dtype) if load else GPT.from_pretrained(init_from, device=device, dtype=dtype)
        model.crop_vocab_size(data["vocab_size"])
        return model.eval()

    return SimpleNamespace(name=name, about=about, data=data, load=loaded)


def read_end(folder):
    """The id of the end-of-text token that a folder's config.json names, or None."""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
        return json.load(f).get("eos_token_id")


def data_of_weights(source, root):
    """{"tokenizer", "vocab_size"} of a hub's name, of a folder of weights, perhaps with a tokenizer, or of nanoGPT's
    ckpt.pt, which names its data set: below our data/, or its own data/ beside its out_dir."""
    gpt2 = {"tokenizer": {"kind": "gpt2"}, "vocab_size": GPT2_VOCAB}
    if source in PRETRAINED and not os.path.exists(source):
        return gpt2
    vocab_size = GPTConfig.from_weights(source).vocab_size
    is_gpt2s = vocab_size in (GPT2_VOCAB, PADDED_GPT2_VOCAB)
    trained_on = read_nanogpt(source)[2].get("dataset") if os.path.isfile(source) else None
    if trained_on:
        beside = os.path.join(os.path.dirname(os.path.abspath(source)), os.pardir, "data", trained_on)
        for folder in (os.path.normpath(beside), *dataset_dirs(trained_on, root)):
            if os.path.isdir(folder):
                try:
                    return read_meta(folder)
                except DatasetError:
                    if not is_gpt2s:  # whose tokens are known without the data
                        raise
    if is_gpt2s:
        return gpt2
    file = os.path.join(source, "tokenizer.json")
    if os.path.exists(file):
        return {"tokenizer": tokenizer_file_meta(file, read_end(source)), "vocab_size": vocab_size}
    raise ValueError(f"the {vocab_size} tokens of {source} are not GPT-2's: name the data set that they come from"
                     f"{f', {trained_on},' if trained_on else ''} with --dataset=NAME or a path")
