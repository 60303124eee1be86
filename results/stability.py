"""Train with one thing changed, to find out why a long run becomes unstable (docs/pretrain.md): one process, one GPU.

    python results/stability.py control config/train_gpt2.py --dataset=packages --batch_size=60 ...
    python results/stability.py math config/train_gpt2.py ... --init_from=resume --resume_tag=iter_7000 --overwrite=True

The first argument is one of these, the others are those of train_deepspeed.py, whose history.jsonl has the record:

control    nothing is changed
math       attention by PyTorch's plain kernels, in the precision of the run
flash      attention by flash attention
bfloat16   attention in bfloat16 instead of float16, which is 8 times as exact
shifted    attention with keys whose mean over the micro-batch is zero, which doesn't change its exact result
compiled   torch.compile's blocks instead of our Triton kernels
eps        AdamW with eps=1e-6 instead of 1e-8
"""

import functools
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import model
from runtime.kernels import block

attend = F.scaled_dot_product_attention


def attend_in_bfloat16(q, k, v, **options):
    return attend(*(t.to(torch.bfloat16) for t in (q, k, v)), **options).to(q.dtype)


def attend_with_shifted_keys(q, k, v, **options):
    return attend(q, (k - k.mean((0, 2), keepdim=True, dtype=torch.float32).detach()).to(k.dtype), v, **options)


def change(name):
    """Make the change of a name, for this process."""
    kernels = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
    if name in kernels:
        model.attention_backends = block.attention_backends = lambda device: [kernels[name]]
    elif name == "bfloat16":
        F.scaled_dot_product_attention = attend_in_bfloat16
    elif name == "shifted":
        F.scaled_dot_product_attention = attend_with_shifted_keys
    elif name == "compiled":
        block.model_fits_kernels = lambda *_: False
    elif name == "eps":
        torch.optim.AdamW.__init__ = functools.partialmethod(torch.optim.AdamW.__init__, eps=1e-6)
    elif name != "control":
        sys.exit(__doc__)


if __name__ == "__main__":
    change(sys.argv[1] if len(sys.argv) > 1 else "")
    script = str(ROOT / "train_deepspeed.py")
    sys.argv = [script, *sys.argv[2:]]
    runpy.run_path(script, run_name="__main__")
