"""The commands of the project that read files of others: one row each.

A command names folders in braces. {new} doesn't exist yet. The others are built by places.py, and a
test puts one hostile file into one of them.

A new reader is one row here. `reads` has the files that it can't do without: where one of them is
hostile, the command ends with exit code 2. Where another file of the same folder is hostile, the
command works, with exit code 0 (or `code`).
"""

from typing import NamedTuple

from conftest import NO_SHAPE, SMALL

TRAIN = "train_deepspeed.py " + " ".join(SMALL) + " --max_iters=2 --async_save=False "
WITH_WEIGHTS = TRAIN + " ".join(NO_SHAPE) + " "
SAMPLE = "sample.py --start=a --num_samples=1 --max_new_tokens=8 --device=cpu --dtype=float32 "
EVALUATE = "evaluate.py --device=cpu --dtype=float32 "
PREPARE = "data/prepare.py --name={new} --workers=1 --val_fraction=0.5 "
ANIMALS = "examples/animals90/src/train_deepspeed.py --epochs=1 --image_size=32 --num_workers=0 "
ANIMALS += "--batch_size=4 --pretrained=none --log_dir={new}/logs "
ANIMALS += "--checkpoint_dir={new}/checkpoints "
PICTURES = "--train_dir={pictures}/train --val_dir={pictures}/val "
PREPARE_PICTURES = "examples/animals90/prepare.py "
TAG = "run/iter_2/manifest.json run/iter_2/*.pt"
TINY = "config/shakespeare_char_cpu.py --dataset={letters} --compile=False --max_iters=2 "

# prepare_hub.py takes OpenAI's tokens, which a test must not download. These are as many
GPT2_TOKENS = """
import itertools
from runtime.data import tokenizer
single = [bytes([i]) for i in range(256)]
double = [a + b for a, b in itertools.product(single, single)]
ranks = {token: i for i, token in enumerate((single + double)[:50256])}
tokenizer.gpt2_ranks = lambda: ranks
"""


# A pickle's operations are checked before it is read. As if that had missed it
NO_CHECK = """
import torch
import runtime.torch_files
torch.serialization.get_unsafe_globals_in_checkpoint = lambda file: []
runtime.torch_files.check_pickle = lambda pickled, classes: None
"""
# The modules of the example, for a plant
EXAMPLE = "sys.path.insert(0, {root!r} + '/examples/animals90/src')\n"


class Reader(NamedTuple):
    name: str
    command: str  # a script of the project and its arguments
    reads: str  # patterns of the files that it can't do without: FOLDER/PATH
    others: str = ""  # folders with hostile files that it can do without
    plant: str = ""  # code that runs first, in place of what would be downloaded
    where: str = ""  # the folder in which it runs, as a process of its own; "": in a fork
    is_long: bool = False  # only with --all: it takes several seconds
    code: int = 0  # the exit code where nothing is hostile
    lists: bool = False  # it prints its findings to stdout


READERS = [
    # Training: from data, from a checkpoint, from weights, into a folder
    Reader("train on text", TRAIN + "--dataset={letters} --out_dir={new}",
           "letters/meta.json letters/*.bin", "letters"),
    Reader("train on chats", TRAIN + "--dataset={chats} --out_dir={new}",
           "chats/meta.json chats/*.bin", "chats"),
    Reader("train on words", TRAIN + "--dataset={words} --out_dir={new}",
           "words/meta.json words/*.bin", "words"),
    Reader("train on nanoGPT's data", TRAIN + "--dataset={nanogpt}/data --out_dir={new}",
           "nanogpt/data/*", "nanogpt"),
    Reader("resume", TRAIN + "--dataset={chats} --out_dir={run} --init_from=resume --max_iters=4",
           TAG + " run/history.jsonl", "run"),
    Reader("resume without a check", TRAIN + "--dataset={chats} --out_dir={run} "
           "--init_from=resume --max_iters=4", "run/iter_2/*.pt", plant=NO_CHECK),
    Reader("dry run of a resume", TRAIN + "--dataset={chats} --out_dir={run} --init_from=resume "
           "--max_iters=4 --dry_run=True", TAG, "run"),
    Reader("train from a run", TRAIN + "--dataset={chats} --out_dir={new} --init_from={run}",
           TAG, "run"),
    Reader("train from weights", WITH_WEIGHTS + "--dataset={chats} --out_dir={new} "
           "--init_from={weights}",
           "weights/config.json weights/model.safetensors weights/tokenizer*.json "
           "weights/chat_template.jinja", "weights"),
    Reader("train from a .bin", WITH_WEIGHTS + "--dataset={chats} --out_dir={new} "
           "--init_from={weights_bin}", "weights_bin/pytorch_model.bin"),
    Reader("train from a .bin without a check", WITH_WEIGHTS + "--dataset={chats} --out_dir={new} "
           "--init_from={weights_bin}", "weights_bin/pytorch_model.bin", plant=NO_CHECK),
    Reader("train from shards", WITH_WEIGHTS + "--dataset={chats} --out_dir={new} "
           "--init_from={weights_shards}", "weights_shards/model*"),
    Reader("train from nanoGPT", WITH_WEIGHTS + "--bias=True --dataset={nanogpt}/data "
           "--out_dir={new} --init_from={nanogpt}/ckpt.pt", "nanogpt/ckpt.pt nanogpt/data/*"),
    Reader("train into a folder", TRAIN + "--dataset={letters} --out_dir={out} --max_iters=2",
           "out/.lock out/history.jsonl", "out"),
    Reader("log and trace", TRAIN.replace("--max_iters=2", "--max_iters=8") + "--dataset={letters} "
           "--out_dir={out} --tensorboard_log=True --profile=True", "out/tensorboard out/profile",
           is_long=True),
    Reader("train by a JSON", TRAIN + "--dataset={letters} --out_dir={new} "
           "--deepspeed_config={texts}/ds.json", "texts/ds.json"),

    # Sampling
    Reader("sample a run", SAMPLE + "--out_dir={run}", TAG, "run"),
    Reader("sample weights", SAMPLE + "--init_from={weights}",
           "weights/config.json weights/model.safetensors weights/tokenizer*.json "
           "weights/chat_template.jinja", "weights"),
    Reader("sample a .bin", SAMPLE + "--init_from={weights_bin}", "weights_bin/pytorch_model.bin"),
    Reader("sample shards", SAMPLE + "--init_from={weights_shards}", "weights_shards/model*"),
    Reader("sample nanoGPT", SAMPLE + "--init_from={nanogpt}/ckpt.pt --dataset={nanogpt}/data",
           "nanogpt/ckpt.pt nanogpt/data/meta.pkl"),
    Reader("chat with a run", SAMPLE + "--out_dir={run} --chat", "run/iter_2/manifest.json"),
    Reader("chat with weights", SAMPLE + "--init_from={weights} --chat",
           "weights/tokenizer_config.json weights/chat_template.jinja"),
    Reader("sample prompts", SAMPLE.replace("--start=a ", "") + "--out_dir={run} "
           "--prompts_file={texts}/prompts.txt", "texts/prompts.txt"),
    Reader("sample after a file", SAMPLE.replace("--start=a ", "--start=FILE:{texts}/text.txt ")
           + "--out_dir={run}", "texts/text.txt"),

    # Scores and exports
    Reader("evaluate a run", EVALUATE + "--out_dir={run} --dataset={chats}", TAG, "run"),
    Reader("evaluate weights", EVALUATE + "--init_from={weights} --text={texts}/text.txt",
           "weights/config.json weights/model.safetensors weights/tokenizer*.json"),
    Reader("evaluate a dataset", EVALUATE + "--out_dir={run} --dataset={chats}",
           "chats/meta.json chats/*.bin"),
    Reader("evaluate a text", EVALUATE + "--out_dir={run} --text={texts}/text.txt",
           "texts/text.txt"),
    Reader("evaluate HellaSwag", EVALUATE + "--out_dir={run} "
           "--hellaswag={texts}/hellaswag.jsonl", "texts/hellaswag.jsonl"),
    Reader("evaluate LAMBADA", EVALUATE + "--out_dir={run} --lambada={texts}/lambada.jsonl",
           "texts/lambada.jsonl"),
    Reader("export", "export_hf.py --out_dir={run} --to={new}", TAG, "run"),
    Reader("export into the run", "export_hf.py --out_dir={run}", "run/hf-iter_2"),
    Reader("plot", "plot.py {run}", "run/history.jsonl", "run"),

    # Preparing data
    Reader("prepare a folder", PREPARE + "{corpus} --tokenizer=char", "corpus/*"),
    Reader("prepare chats", PREPARE + "{conversations} --tokenizer=char --format=chat",
           "conversations/*"),
    Reader("prepare with a tokenizer", PREPARE + "{corpus} --tokenizer={tokenizer}",
           "tokenizer/*"),
    Reader("prepare shards", "data/prepare.py --name={new} {tokens}", "tokens/*"),
    Reader("convert nanoGPT's data", "data/prepare.py --name={new} {nanogpt}/data --dtype=uint16",
           "nanogpt/data/*", "nanogpt"),
    Reader("prepare into a folder", "data/prepare.py --name={out} --workers=1 --val_fraction=0.5 "
           "--tokenizer=char {corpus}", "out/.lock", "out"),
    Reader("prepare from the hub", "data/prepare_hub.py --dataset={hub} --name={new}", "hub/*",
           plant=GPT2_TOKENS),
    Reader("stream from the hub", "data/prepare_hub.py --dataset={hub} --name={new} --streaming",
           "hub/*", plant=GPT2_TOKENS, is_long=True),

    # The example with pictures
    Reader("train on pictures", ANIMALS + PICTURES, "pictures/*"),
    Reader("resume on pictures", ANIMALS + PICTURES + "--resume={animals}/best_model",
           "animals/best_model/*"),
    Reader("resume on pictures without a check", ANIMALS + PICTURES
           + "--resume={animals}/best_model", "animals/best_model/best/*.pt",
           plant=NO_CHECK + EXAMPLE),
    Reader("train in place of a run on pictures", ANIMALS + PICTURES + "--overwrite "
           "--checkpoint_dir={animals} --log_dir={logs}", "", "animals logs"),
    Reader("train from pictures' weights", ANIMALS.replace("--pretrained=none", "")
           + PICTURES + "--pretrained={resnet}", "resnet/*"),
    Reader("train from pictures' .pt", ANIMALS.replace("--pretrained=none", "")
           + PICTURES + "--pretrained={resnet}/weights.pt", "resnet/weights.pt"),
    Reader("train from pictures' .pt without a check", ANIMALS.replace("--pretrained=none", "")
           + PICTURES + "--pretrained={resnet}/weights.pt", "resnet/weights.pt",
           plant=NO_CHECK + EXAMPLE),
    Reader("prepare pictures", PREPARE_PICTURES + "--from={pictures}/train --to={new}", "",
           "pictures"),
    Reader("check pictures", PREPARE_PICTURES + "--check --to={pictures}", "pictures/*",
           lists=True),
    Reader("draw a run on pictures", "examples/animals90/src/utils.py "
           "--history={logs}/training_history.json --output={new}.png", "logs/*"),
    Reader("draw into a folder", "examples/animals90/src/utils.py "
           "--history={logs}/training_history.json --output={out}/curves.png", "out/curves.png"),

    # Modules and configs in the folder where a command runs
    Reader("train in a folder", TRAIN + "--dataset={letters} --out_dir={new} --dry_run=True", "",
           where="work"),
    Reader("train a config in a folder", "train_deepspeed.py " + TINY + "--out_dir={new} "
           "--dry_run=True", "work/config/*", where="work", is_long=True),
    Reader("sample in a folder", SAMPLE + "--out_dir={run}", "", where="work", is_long=True),
    Reader("evaluate in a folder", EVALUATE + "--out_dir={run} --dataset={chats}", "",
           where="work", is_long=True),
    Reader("export in a folder", "export_hf.py --out_dir={run} --to={new}", "", where="work",
           is_long=True),
    Reader("plot in a folder", "plot.py {run}", "", where="work", is_long=True),
    Reader("prepare in a folder", PREPARE + "{corpus} --tokenizer=char", "", where="work",
           is_long=True),
    Reader("doctor in a folder", "doctor.py", "", where="work", is_long=True),
    Reader("bench in a folder", "bench.py --warmup=1 --repeats=1 " + TINY, "", where="work",
           is_long=True),
    Reader("launch in a folder", "launch_deepspeed.py --standalone --nproc_per_node=1 "
           "{root}/train_deepspeed.py " + TINY + "--out_dir={new} --dry_run=True", "",
           where="work", is_long=True),
    Reader("headline in a folder", "launch_deepspeed.py --headline --dataset={letters} "
           "--out_dir={new} --dry_run=True", "", where="work", is_long=True),
    Reader("train on pictures in a folder", ANIMALS + PICTURES, "", where="work", is_long=True),

    # A dataset of others in the project's data folder
    Reader("headline", "{project}/launch_deepspeed.py --headline --dataset=theirs --out_dir={new} "
           "--dry_run=True", "project/data/theirs/*", where="project", is_long=True),
    Reader("headline by the shell", "{project}/run_deepspeed_xl.sh --dataset=theirs "
           "--out_dir={new} --dry_run=True", "project/data/theirs/*", where="project",
           is_long=True),
]
