"""Find the model that sample.py or evaluate.py loads, and its tokenizer."""

import json
import os
from pathlib import Path

from model import GPT, GPTConfig
from runtime.checkpoint.shards import load_model
from runtime.checkpoint.tags import TagStore, parse_run_path
from runtime.data.dataset import dataset_dir, read_meta
from runtime.data.meta import GPT2_VOCAB
from runtime.data.tokenizer import END_OF_TEXT, hf_tokenizer, tokenizer_file_meta, tokenizer_of
from runtime.errors import UserError
from runtime.weights import weights_errors


def find_model(init_from, out_dir, tag, dataset):
    """Return (name, description, data, load(device, dtype) -> GPT) of the model that the settings name. data:
    {"tokenizer", "vocab_size", "template" or None, "block_size"}. init_from: "resume" for a tag of out_dir, otherwise
    as for GPT.from_pretrained. dataset: what other weights were trained on, or None. Raises UserError."""
    if init_from == "resume":
        tag, manifest = TagStore(out_dir).find(tag)
        name, description = f"{out_dir}/{tag}", f" after {manifest['iter_num']} iterations"
        data = {**manifest["state"]["data"], "block_size": manifest["state"]["model"]["block_size"]}
    elif run := parse_run_path(init_from):
        raise UserError(f"init_from={init_from} has checkpoints of train_deepspeed.py: use --out_dir={run[0]} "
                        f"--tag={run[1]}")
    else:
        name, description, folder = init_from, "", Path(init_from)
        config = GPTConfig.from_weights(init_from) if os.path.exists(init_from) else GPTConfig()  # a GPT-2 on the hub
        data = read_meta(dataset_dir(dataset)) if dataset else data_of_weights(init_from, config.vocab_size)
        comparable = dataset and data["tokenizer"]["kind"] != "gpt2" and (folder / "tokenizer.json").exists()
        both = (data, data_of_weights(init_from, config.vocab_size)) if comparable else ()
        texts = {tokenizer_of(each["tokenizer"])[1](list(range(each["vocab_size"]))) for each in both}  # of all tokens
        if data["vocab_size"] > config.vocab_size or len(texts) > 1:
            raise UserError(f"dataset={dataset} has another tokenizer than {init_from}: prepare it with that one")
        file, jinja = folder / "tokenizer_config.json", folder / "chat_template.jinja"  # of transformers
        with weights_errors(file):
            template = json.loads(file.read_text(encoding="utf-8")).get("chat_template") if file.exists() else None
            if isinstance(template, list):
                template = {each["name"]: each["template"] for each in template}.get("default")
        with weights_errors(jinja):
            template = jinja.read_text(encoding="utf-8") if jinja.exists() else template
        data = {"template": template if isinstance(template, str) else None, "block_size": config.block_size, **data}

    def load(device, dtype):
        model = (load_model(out_dir, tag)[0].to(device, dtype) if init_from == "resume" else
                 GPT.from_pretrained(init_from, device=device, dtype=dtype))
        model.crop_vocab_size(data["vocab_size"])
        return model.eval()

    return name, description, data, load


def data_of_weights(source, vocab_size):
    """Return {"tokenizer", "vocab_size"} of a name on the hub, a folder of weights or nanoGPT's ckpt.pt."""
    file = Path(source, "tokenizer.json")
    if file.exists():
        config = json.loads(file.with_name("config.json").read_text(encoding="utf-8"))
        ids = hf_tokenizer(tokenizer_file_meta(file)).get_vocab()
        end = config.get("eos_token_id")  # an id, a list of ids, or None
        end = next((i for i in (end if isinstance(end, list) else [end]) if type(i) is int), ids.get(END_OF_TEXT))
        return {"tokenizer": tokenizer_file_meta(file, end), "vocab_size": min(vocab_size, max(ids.values()) + 1)}
    if vocab_size in (GPT2_VOCAB, 50304):  # nanoGPT pads it, for a dataset without meta.pkl
        return {"tokenizer": {"kind": "gpt2"}, "vocab_size": GPT2_VOCAB}
    raise UserError(f"the tokenizer of {source} is unknown ({vocab_size} tokens): name the dataset that it was "
                    "trained on with --dataset=NAME or a path")
