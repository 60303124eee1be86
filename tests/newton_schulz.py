"""References for Muon's Newton-Schulz (runtime/engine/muon.py)."""

import torch


def by_singular_values(matrix, *_):
    """Newton-Schulz of a matrix in float64: its polynomial, applied five times to the singular values."""
    u, s, v = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return (u * s @ v).float()


def low_rank_and_noise(rows, columns):
    """A matrix of eight directions, and noise of a thousandth of them, which five iterations raise to 0.4."""
    generator = torch.Generator().manual_seed(0)
    low_rank = torch.randn(rows, 8, generator=generator) @ torch.randn(8, columns, generator=generator)
    return low_rank + 0.01 * torch.randn(rows, columns, generator=generator)
