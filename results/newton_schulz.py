"""How exact Muon's Newton-Schulz is, by dtype and by how often it starts anew from the matrix. Needs no GPU.

    python results/newton_schulz.py cpu_newton_schulz.json

Products are summed in float32 and rounded once, as a GPU does. The errors are relative to float64, of matrices with
eight directions, and noise of a thousandth of them, which the five iterations raise to 0.4. Mean of three seeds.
direct: each iteration on the matrix itself, as torch.optim.Muon does, in bfloat16.
"""

import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch
from muon_reference import by_singular_values

from runtime.engine import muon
from runtime.hardware import git_commit, machine_record

SHAPES = (256, 256), (256, 1024), (1024, 256)


def product(x, y, alpha=1.0, beta=0.0):
    """What kernels.gram.symmetric_product computes: the lower half, twice."""
    result = alpha * (x.float() @ y.float().mT) + beta * (x.float() if beta else 0)
    return (result.tril() + result.tril(-1).mT).to(x.dtype)


def direct(x):
    a, b, c = muon.COEFFICIENTS
    is_tall = x.size(1) > x.size(2)
    x = x.mT if is_tall else x
    for _ in range(5):
        gram = product(x, x)
        factor = product(gram, gram, c, b)
        x = (a * x.float() + factor.float() @ x.float()).to(x.dtype)
    return x.mT if is_tall else x


def in_rounds(rounds):
    def orthogonalize(x):
        muon.ROUNDS = rounds
        return muon.orthogonalize(x, product)

    return orthogonalize


def main():
    ways = {"direct": direct, **{f"rounds of {' and '.join(map(str, rounds))}": in_rounds(rounds)
                                 for rounds in ((5,), (3, 2), (2, 2, 1), (1, 1, 1, 1, 1))}}
    errors = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name, way in ways.items():
            found = []
            for rows, columns in SHAPES:
                for seed in range(3):
                    generator = torch.Generator().manual_seed(seed)
                    matrix = torch.randn(rows, 8, generator=generator) @ torch.randn(8, columns, generator=generator)
                    matrix += 0.01 * torch.randn(rows, columns, generator=generator)
                    exact, x = by_singular_values(matrix), muon.normalize(matrix[None]).to(dtype)
                    found.append(((way(x)[0].float() - exact).norm() / exact.norm()).item())
            errors[f"{str(dtype).removeprefix('torch.')}, {name}"] = statistics.fmean(found)
            print(f"{dtype}, {name}: {statistics.fmean(found):.1e}", flush=True)
    record = {"command": " ".join(sys.argv), "commit": git_commit(), **machine_record("cpu"), "errors": errors}
    Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
