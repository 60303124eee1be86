"""The folders that the readers of readers.py read, as their owners made them."""

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from conftest import CHARS, ROOT, SMALL, done, launch, random_gpt2, write_characters
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2LMHeadModel

from runtime.data.dataset import write_dataset
from runtime.data.tokenizer import tokenizer_file_meta

TEXTS = [f"{first} {second} and so on" for first in ("one", "two", "the") for second in "abcdefgh"]
SOURCE = {"name": "a test", "sha256": "0" * 64, "bytes": 0}


class Places:
    """Builds each folder once: folder(name) is the original, and copy(name, to) makes a copy."""

    def __init__(self, root: Path):
        self.root = root

    def folder(self, name: str) -> Path:
        folder = self.root / name
        if not folder.exists():
            build = globals()[f"build_{name}"]
            build(folder, self)
        return folder

    def copy(self, name: str, to: Path) -> Path:
        """Copy a folder. Large files are hard links: what changes one must replace it."""
        shutil.copytree(self.folder(name), to, copy_function=copy_or_link, symlinks=True)
        return to


def copy_or_link(source: str, to: str) -> None:
    if os.path.getsize(source) > 2**20:
        os.link(source, to)
    else:
        shutil.copy2(source, to)


def json_lines(values: list) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def chat_lines() -> str:
    conversations = []
    for text in TEXTS:
        messages = [{"role": "user", "content": text[:5]},  # in all at most 32 characters
                    {"role": "assistant", "content": text[:3]}]
        conversations.append({"messages": messages})
    return json_lines(conversations)


# Datasets


def build_letters(folder: Path, places: Places) -> None:
    """Characters."""
    write_characters(folder)


def build_chats(folder: Path, places: Places) -> None:
    """Conversations in characters."""
    source = places.folder("conversations")
    done(launch(ROOT / "data" / "prepare.py", source, f"--name={folder}", "--tokenizer=char",
                "--format=chat", "--workers=1", "--val_fraction=0.5"))


def build_words(folder: Path, places: Places) -> None:
    """Tokens of a tokenizer.json."""
    source = places.folder("tokenizer") / "tokenizer.json"
    ids = np.random.default_rng(0).integers(0, 20, 4000)
    meta = tokenizer_file_meta(source, end_of_text=0)
    write_dataset(folder, ids[:3000], ids[3000:], meta, 28, SOURCE)


def build_nanogpt(folder: Path, places: Places) -> None:
    """nanoGPT's data folder, and its ckpt.pt."""
    data = folder / "data"
    data.mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        shutil.copy(places.folder("letters") / name, data)
    meta = {"vocab_size": len(CHARS), "itos": dict(enumerate(CHARS)),
            "stoi": {char: i for i, char in enumerate(CHARS)}}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))
    theirs = random_gpt2(0.2, vocab_size=len(CHARS), n_positions=32, n_embd=32,
                         activation_function="gelu", bos_token_id=0, eos_token_id=None)
    tensors = {}
    for name, weight in theirs.state_dict().items():
        if name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
            weight = weight.t().contiguous()
        tensors[name] = weight
    args = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "bias": True,
            "vocab_size": len(CHARS), "dropout": 0.0}
    checkpoint = {"model": tensors, "model_args": args, "iter_num": 7, "config": {}}
    torch.save(checkpoint, folder / "ckpt.pt")


# Runs and weights


def build_run(folder: Path, places: Places) -> None:
    """A run of two steps with one checkpoint."""
    done(launch(ROOT / "train_deepspeed.py", *SMALL, f"--dataset={places.folder('chats')}",
                f"--out_dir={folder}", "--max_iters=2"))
    for name in ("best", "final"):  # links to the same files
        shutil.rmtree(folder / name)


def build_weights(folder: Path, places: Places) -> None:
    """The run, exported for transformers."""
    done(launch(ROOT / "export_hf.py", f"--out_dir={places.folder('run')}", f"--to={folder}"))


def build_weights_bin(folder: Path, places: Places) -> None:
    """The same, as a pickle."""
    shutil.copytree(places.folder("weights"), folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def build_weights_shards(folder: Path, places: Places) -> None:
    """The same, in several files."""
    source = places.folder("weights")
    shutil.copytree(source, folder)
    (folder / "model.safetensors").unlink()
    GPT2LMHeadModel.from_pretrained(source).save_pretrained(folder, max_shard_size="60KB")


def build_tokenizer(folder: Path, places: Places) -> None:
    """A tokenizer of 28 characters, of which one ends a text."""
    folder.mkdir(parents=True)
    vocabulary = {"<end>": 0}
    for char in CHARS[1:]:
        vocabulary[char] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


# What is prepared


def build_corpus(folder: Path, places: Places) -> None:
    """Texts in each kind of file, half of the documents of which are for validation."""
    folder.mkdir()
    (folder / "a.txt").write_text("<|endoftext|>".join(TEXTS))
    (folder / "b.jsonl").write_text(json_lines([{"text": "b " + text} for text in TEXTS]))
    table = pyarrow.table({"text": ["c " + text for text in TEXTS]})
    pyarrow.parquet.write_table(table, folder / "c.parquet")
    (folder / "g.csv").write_text("text\n" + "".join(f"g {text}\n" for text in TEXTS))
    for name in ("d.txt.gz", "e.txt.zst"):
        with pyarrow.output_stream(folder / name) as stream:
            stream.write("<|endoftext|>".join(f"{name} {text}" for text in TEXTS).encode())


def build_conversations(folder: Path, places: Places) -> None:
    """Conversations in each kind of file, and in a folder as datasets' save_to_disk writes it."""
    (folder / "saved").mkdir(parents=True)
    (folder / "chats.jsonl").write_text(chat_lines())
    conversations = [json.loads(line) for line in chat_lines().splitlines()]
    (folder / "chats.json").write_text(json.dumps(conversations, indent=1))
    table = pyarrow.Table.from_pylist(conversations)
    pyarrow.parquet.write_table(table, folder / "chats.parquet")
    with pyarrow.ipc.new_stream(folder / "saved" / "data.arrow", table.schema) as stream:
        stream.write_table(table)
    (folder / "saved" / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": "data.arrow"}]}
    (folder / "saved" / "state.json").write_text(json.dumps(state))


def build_tokens(folder: Path, places: Places) -> None:
    """Shards as those of llm.c and build-nanogpt."""
    folder.mkdir()
    ids = np.arange(1000, dtype=np.uint16)
    np.save(folder / "train_0.npy", ids)
    header = np.zeros(256, np.int32)
    header[:3] = [20240520, 1, len(ids)]
    (folder / "val_0.bin").write_bytes(header.tobytes() + ids.tobytes())


def build_hub(folder: Path, places: Places) -> None:
    """A dataset as `hf download` leaves it."""
    folder.mkdir()
    table = pyarrow.table({"text": [f"document {i}" for i in range(2500)]})
    pyarrow.parquet.write_table(table, folder / "train-00000-of-00001.parquet")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")


def build_texts(folder: Path, places: Places) -> None:
    """Prompts, what evaluate.py scores, and a JSON for DeepSpeed."""
    folder.mkdir()
    shutil.copy(ROOT / "ds_config_zero2.json", folder / "ds.json")
    (folder / "prompts.txt").write_text("one\ntwo\n")
    (folder / "text.txt").write_text("one\ntwo")
    endings = ["one", "two", "on", "so"]
    question = {"ctx": "the one", "endings": endings, "label": 1}
    (folder / "hellaswag.jsonl").write_text(json_lines([question]))
    (folder / "lambada.jsonl").write_text(json_lines([{"text": "one two and so on"}]))


def build_out(folder: Path, places: Places) -> None:
    """An empty folder, in which others may have put something."""
    folder.mkdir()


# Pictures


def build_pictures(folder: Path, places: Places) -> None:
    done(launch(ROOT / "examples" / "animals90" / "prepare.py", "--made_up", "--classes=2",
                "--train=4", "--val=2", "--size=40", f"--to={folder}"))


def build_animals(folder: Path, places: Places) -> None:
    """The checkpoints of a run on pictures."""
    pictures = places.folder("pictures")
    done(launch(ROOT / "examples" / "animals90" / "src" / "train_deepspeed.py", "--epochs=1",
                f"--train_dir={pictures}/train", f"--val_dir={pictures}/val", "--pretrained=none",
                "--image_size=32", "--num_workers=0", "--batch_size=4",
                f"--log_dir={folder}-logs", f"--checkpoint_dir={folder}"))
    shutil.rmtree(folder / "epoch_1")


def build_logs(folder: Path, places: Places) -> None:
    """The history of that run."""
    shutil.copytree(str(places.folder("animals")) + "-logs", folder)


def build_resnet(folder: Path, places: Places) -> None:
    """Weights for pictures: in transformers' format, and as a pickle."""
    (file,) = places.folder("animals").glob("best_model/*/mp_rank_00_model_states.pt")
    weights = torch.load(file, weights_only=False)["module"]
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    torch.save(weights, folder / "weights.pt")


# Where commands run


def build_work(folder: Path, places: Places) -> None:
    """A folder in which others can write."""
    folder.mkdir()


def build_project(folder: Path, places: Places) -> None:
    """A copy of the project, with a dataset of others in its data folder."""
    left_out = shutil.ignore_patterns(".*", "out-*", "__pycache__", "results", "tests", "docs",
                                      "*.bin", "*.tiktoken", "input.txt")
    shutil.copytree(ROOT, folder, ignore=left_out)
    shutil.copytree(places.folder("letters"), folder / "data" / "theirs")
