"""Time evaluate.py on as many rows as HellaSwag's validation split has, of its lengths: print it and write it as JSON.

    python results/hellaswag.py h200_x1_hellaswag.json h200_x1_bench_auto.json
    python results/hellaswag.py OUT.json TRAINING.json --model=2,2,64 --rows=40    a trial without a GPU

The weights are random, and so are the words. TRAINING.json is of bench.py, with the same model on the same GPU: a third
of a step's FLOPs are the forward's.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from runtime.data.tokenizer import tokenizer_of
from runtime.git import git_commit
from runtime.hardware import machine_record, pick_device

WORDS = ("the a of to and in is he she man woman then starts holding while water around standing his camera several "
         "people grabs carefully demonstrating kitchen ingredients snowboard continues afterwards").split()
LENGTHS = (18, 140), (10, 45)  # fewest and most words of a context and of an ending: 4.4 million tokens, as HellaSwag


def write_rows(path, count):
    """Write rows of random words. Return the number of tokens that the model reads for them."""
    rng, encode, tokens = random.Random(0), tokenizer_of({"kind": "gpt2"})[0], 0
    with open(path, "w", encoding="utf-8") as out:
        for _ in range(count):
            context, *endings = (" ".join(rng.choices(WORDS, k=rng.randint(*LENGTHS[i > 0]))) for i in range(5))
            out.write(json.dumps({"ctx": context, "endings": endings, "label": rng.randrange(4)}) + "\n")
            tokens += sum(len(encode(f"{context} {ending}")) for ending in endings)
    return tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", help="output file")
    parser.add_argument("training", help="JSON file of bench.py")
    parser.add_argument("--model", default="48,25,1600", metavar="LAYERS,HEADS,WIDTH")
    parser.add_argument("--rows", type=int, default=10042)
    args = parser.parse_args()
    (layers, heads, width), device = map(int, args.model.split(",")), pick_device("auto", 1)
    with torch.device(device):
        model = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_head=heads, n_embd=width)).bfloat16()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model  # its memory is evaluate.py's
        seconds = []
        for rows in (1, args.rows):  # the first run tells the time of the start
            tokens, start = write_rows(Path(folder, "rows.jsonl"), rows), time.perf_counter()
            subprocess.run([sys.executable, ROOT / "evaluate.py", f"--init_from={folder}", "--json=True",
                            f"--hellaswag={folder}/rows.jsonl"], check=True)
            seconds.append(time.perf_counter() - start)
    forward = 3 * json.loads(Path(args.training).read_text())["tokens_per_s"]
    record = {"what": "evaluate.py --hellaswag on random words, one process", "command": " ".join(sys.argv),
              "commit": git_commit(), "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
              **machine_record(device), "rows": args.rows, "tokens": tokens, "seconds": seconds[1],
              "start_s": seconds[0], "share_of_forward": tokens / (seconds[1] - seconds[0]) / forward}
    Path(args.json).write_text(json.dumps(record, indent=1))
    print(f"{tokens:,} tokens in {seconds[1]:.1f} s, {seconds[0]:.1f} s of them for the start; "
          f"{record['share_of_forward']:.1%} of the forward speed of training")


if __name__ == "__main__":
    main()
