"""Products of matrices that are known to be symmetric: only the lower half is computed."""

from runtime.kernels import jit, tl, triton

# the fastest of those tried on an H200
TILE = {"BLOCK": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


@jit
def lower_half(
    x,
    y,
    out,
    M,
    K,
    x_row,
    x_column,
    y_row,
    y_column,
    alpha,
    beta,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute one tile of out = alpha * x @ y.T, and the same tile of the upper half. ADD: add beta
    * x, for x (M, M). program_id(0): number of the tile, row by row: (0, 0), (1, 0), (1, 1), ...;
    program_id(1): matrix of the batch."""
    tile, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    rows = i * BLOCK + tl.arange(0, BLOCK)
    columns = (tile - i * (i + 1) // 2) * BLOCK + tl.arange(0, BLOCK)
    x += matrix * M * K + rows[:, None] * x_row
    y += matrix * M * K + columns[:, None] * y_row
    out += matrix * M * M
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        a = tl.load(
            x + k[None, :] * x_column, mask=(rows < M)[:, None] & (k < K)[None, :], other=0.0
        )
        b = tl.load(
            y + k[None, :] * y_column, mask=(columns < M)[:, None] & (k < K)[None, :], other=0.0
        )
        total = tl.dot(a, tl.trans(b), total)
    total *= alpha
    mask = (rows < M)[:, None] & (columns < M)[None, :]
    if ADD:
        total += beta * tl.load(x + columns[None, :] * x_column, mask=mask, other=0.0).to(
            tl.float32
        )
    value = total.to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * M + columns[None, :], value, mask=mask)
    tl.store(out + columns[:, None] * M + rows[None, :], tl.trans(value), mask=tl.trans(mask))


def symmetric_product(x, y, alpha=1.0, beta=0.0):
    """Return alpha * x @ y.mT + beta * x of x and y (n, M, K), if the result is symmetric. With
    beta, K is M."""
    (n, M, K), out = x.shape, x.new_empty(len(x), x.size(1), x.size(1))
    tiles = triton.cdiv(M, TILE["BLOCK"])
    lower_half[(tiles * (tiles + 1) // 2, n)](
        x, y, out, M, K, *x.stride()[1:], *y.stride()[1:], alpha, beta, beta != 0, **TILE
    )
    return out
