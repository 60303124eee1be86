"""Generate greedily with transformers alone: python greedy.py FOLDER PROMPT NEW_TOKENS. Print JSON.

It imports nothing of this project, so it also runs in an environment with another version of transformers.
"""

import json
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def generate(folder, prompt, new_tokens):
    """Return {"version", "prompt_ids", "text"} of the greedy continuation of a prompt, up to end-of-text."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    asked = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    ids = model.generate(**asked, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)[0].tolist()
    prompt_ids = asked["input_ids"][0].tolist()
    if len(ids) < len(prompt_ids) + new_tokens:  # generation ended with end-of-text
        ids.pop()
    text = tokenizer.decode(ids)[len(tokenizer.decode(prompt_ids)) :]
    return {"version": transformers.__version__, "prompt_ids": prompt_ids, "text": text}


if __name__ == "__main__":
    print(json.dumps(generate(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
