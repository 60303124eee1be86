"""The rounding errors of attention's gradients in a checkpoint, layer by layer, against float64 (docs/pretrain.md).

    python results/attention_errors.py OUT_DIR [--tag=iter_8250] [--sequences=16] [--json=FILE]

The model runs in the precision of training on sequences of its text. Each way of attention then gets the same inputs
and gradient of the output, and rounds q, k and v. The exact way doesn't. A line per layer: errors of the gradients of
q, k and v, and of c_attn's weights for them, each relative to the gradient's norm. repeats: the cosine between the
errors of the weights of q on both halves of the sequences. Random errors have 0, and average out over many steps.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime.checkpoint.load import load_model
from runtime.data.folders import dataset_dir
from runtime.git import git_commit

SCALE = 2.0**14  # of gradients in float16


class ToHalf(torch.autograd.Function):
    """Converts to float16. The gradient comes back scaled."""

    @staticmethod
    def forward(ctx, x):
        ctx.dtype = x.dtype
        return x.to(torch.float16)

    @staticmethod
    def backward(ctx, grad):
        return (grad.float() / SCALE).to(ctx.dtype)


class FromHalf(torch.autograd.Function):
    """Converts from float16. Its gradient is scaled."""

    @staticmethod
    def forward(ctx, x, dtype):
        return x.to(dtype)

    @staticmethod
    def backward(ctx, grad):
        return (grad.float() * SCALE).to(torch.float16), None


attend = F.scaled_dot_product_attention


def attend_in_float16(q, k, v, **options):
    return FromHalf.apply(attend(ToHalf.apply(q), ToHalf.apply(k), ToHalf.apply(v), **options), q.dtype)


CUDNN, FLASH, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
WAYS = {  # kernel, function, over which dimensions of (B, heads, T, size) keys are centered before they are rounded
    "cudnn": (CUDNN, F.scaled_dot_product_attention, None), "flash": (FLASH, F.scaled_dot_product_attention, None),
    "math": (MATH, F.scaled_dot_product_attention, None), "float16": (FLASH, attend_in_float16, None),
    "centered": (FLASH, F.scaled_dot_product_attention, 2),  # per head and sequence
    "shifted": (FLASH, F.scaled_dot_product_attention, (0, 2))}  # by one vector per head, as the key bias could


class Record:
    """Keeps what attention reads, and its gradient, of each layer during one forward and backward pass."""

    def __init__(self, model):
        self.heads = model.config.n_head
        self.inputs, self.qkv, self.grads = [], [], {}  # x; q, k and v in float64
        for block in model.transformer.h:
            block.attn.c_attn.register_forward_hook(self.keep)

    def keep(self, c_attn, args, _):
        self.inputs.append(args[0].detach())
        parts = F.linear(*(t.detach().double() for t in (args[0], c_attn.weight, c_attn.bias))).chunk(3, dim=2)
        self.qkv.append([t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in parts])

    def attend(self, q, k, v, **options):
        layer = len(self.qkv) - 1
        out = attend(q, k, v, **options)
        out.register_hook(lambda grad: self.grads.__setitem__(layer, grad.detach()))
        return out


def exact(q, k, v, grad):
    """Return attention's gradients and the largest logit for q, k and v in float64, one sequence at a time."""
    found, largest = [], 0.0
    for i in range(len(q)):
        parts = [t[i].detach().requires_grad_() for t in (q, k, v)]
        future = torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).triu(1)
        scores = (parts[0] @ parts[1].mT / q.size(3) ** 0.5).masked_fill(future, float("-inf"))
        largest = max(largest, scores.max().item())
        found.append(torch.autograd.grad(torch.softmax(scores, -1) @ parts[2], parts, grad[i].double()))
    return [torch.stack(grads) for grads in zip(*found)], largest


def weight_grad(x, grad):
    """Return the gradient of the rows of c_attn's weight that made q, k or v: (heads x size, C), for each half."""
    x, grad = x.double(), grad.transpose(1, 2).flatten(2).double()
    half = len(x) // 2
    return [torch.einsum("bti,btj->ij", grad[part], x[part]) for part in (slice(half), slice(half, None))]


def errors(way, x, qkv, grad, wanted):
    """qkv: in float64. Return the errors of a way that reads them in the precision of `grad`."""
    (kernel, function, dims), (q, k, v) = WAYS[way], qkv
    k = k if dims is None else k - k.mean(dims, keepdim=True)
    parts = [t.detach().to(grad.dtype).requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(kernel):
        got = torch.autograd.grad(function(*parts, is_causal=True), parts, grad)
    result = {}
    for name, mine, true in zip("qkv", got, wanted):
        error = mine.double() - true
        result[f"d{name}"] = (error.norm() / true.norm()).item()
        first, second = weight_grad(x, error)
        whole = sum(weight_grad(x, true))
        result[f"w{name}"] = ((first + second).norm() / whole.norm()).item()
        if name == "q":
            result["repeats"] = F.cosine_similarity(first.flatten(), second.flatten(), dim=0).item()
    return {key: float(f"{value:.3g}") for key, value in result.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--tag", default="latest")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--json")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, manifest = load_model(args.out_dir, args.tag)
    model, T = model.to(device, torch.bfloat16), model.config.block_size
    settings = json.loads((args.out_dir / "settings.json").read_text(encoding="utf-8"))["settings"]
    tokens = np.memmap(Path(dataset_dir(settings["dataset"]), "train.bin"), "<u2", mode="r")
    places = torch.randint(len(tokens) - T, (args.sequences,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = torch.from_numpy(np.stack([tokens[place : place + T + 1] for place in places]).astype("int64")).to(device)
    record = Record(model)
    F.scaled_dot_product_attention = record.attend
    model(rows[:, :-1], rows[:, 1:]).backward()
    F.scaled_dot_product_attention = attend
    layers = []
    for layer, (x, qkv) in enumerate(zip(record.inputs, record.qkv)):
        grad, k = record.grads[layer], qkv[1]
        wanted, largest = exact(*qkv, grad)
        mean = k.mean((0, 2), keepdim=True)
        offset = (mean.norm(dim=3) / (k - mean).pow(2).sum(3).mean((0, 2)).sqrt()[None, :, None]).flatten()
        ways = {way: errors(way, x, qkv, grad, wanted) for way in WAYS if device == "cuda" or way != "cudnn"}
        layers.append({"largest_logit": round(largest, 1), "ways": ways,
                       "key_offset": [round(value, 2) for value in offset.tolist()]})
        print(f"layer {layer}: largest logit {largest:.1f}, key offset up to {offset.max().item():.1f} deviations")
        for way, found in ways.items():
            print(f"  {way:9}", "  ".join(f"{key} {value:.1e}" for key, value in found.items()), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({
            "command": " ".join(["results/attention_errors.py", *sys.argv[1:]]), "commit": git_commit(),
            "hardware": torch.cuda.get_device_name() if device == "cuda" else "CPU",
            "iter_num": manifest["iter_num"], "layers": layers}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
