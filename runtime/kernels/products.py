"""Matrix products on NVIDIA's GPUs, by the fastest of the algorithms that cuBLASLt ranks for them.

PyTorch takes the one that is ranked first. Which is the fastest is measured at a product's first call, beside PyTorch's
way, so two runs may choose differently and round differently; with deterministic algorithms PyTorch's way is taken.
A call from Python takes some 10 us longer than PyTorch's: nothing where micro-steps are recorded, too much elsewhere.
"""

import ctypes
import functools
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

import torch
import torch.nn.functional as F

from model import addmm_fp32

RANKED, WORKSPACE = 16, 64 << 20  # algorithms that are asked for; bytes that one may use
FINALISTS, ROUNDS = 4, 9  # algorithms that are timed to the end, and how often
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
# cublasLt.h: attributes of a product, its epilogues, preferences, and arithmetic in float32
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_WIDTH = 3, 4, 7, 8, 11, 12
NOTHING, BIAS, GELU_AUX_BIAS = 1, 4, 164
MOST_WORKSPACE, REDUCTIONS, SUMS_IN_FLOAT32 = 1, 3, 3
COMPUTE_32F = 68
CHOSEN = {}  # the way of each kind of product
USED = [True]  # False: all are PyTorch's


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
                ("reserved", c_int * 4)]


@functools.cache
def library():
    """(cuBLASLt as PyTorch has loaded it, a handle), or None where that cannot be had."""
    if not torch.version.cuda:
        return None
    try:
        lt, handle = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"), c_void_p()
    except OSError:
        return None
    lt.cublasLtMatmul.argtypes = [c_void_p] * 12 + [c_void_p, c_void_p, c_size_t, c_void_p]
    return None if lt.cublasLtCreate(byref(handle)) else (lt, handle)


@functools.cache
def workspace(device):
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def need(status):
    if status:
        raise RuntimeError(f"cuBLASLt: status {status}")


def fits(*matrices):
    """Whether cuBLASLt can be handed these as they lie: halves on a GPU, without gaps, at multiples of 16 bytes."""
    return (USED[0] and matrices[0].is_cuda and matrices[0].dtype in (torch.float16, torch.bfloat16)
            and not torch.are_deterministic_algorithms_enabled() and library() is not None
            and all(m.data_ptr() % 16 == 0 and not any(size % 8 for size in m.shape)
                    and (m.is_contiguous() or m.t().is_contiguous()) for m in matrices))


def ranked(a, b, out, bias, aux, add):
    """Functions (a, b, out, bias, aux) that make the product by cuBLASLt, one for each algorithm, in its order.

    cuBLAS counts by columns: what lies in memory as a row-major out is its transpose, b^T a^T.
    """
    lt, handle = library()
    description, preference, found, results = c_void_p(), c_void_p(), c_int(), (Algorithm * RANKED)()
    need(lt.cublasLtMatmulDescCreate(byref(description), COMPUTE_32F, TYPES[torch.float32]))

    def say(attribute, value):
        need(lt.cublasLtMatmulDescSetAttribute(description, attribute, byref(value), c_size_t(ctypes.sizeof(value))))

    def layout(matrix):
        rows, columns = matrix.shape if matrix.is_contiguous() else matrix.t().shape
        it = c_void_p()
        need(lt.cublasLtMatrixLayoutCreate(byref(it), TYPES[matrix.dtype], c_uint64(columns), c_uint64(rows),
                                           c_int64(columns)))
        return it

    say(TRANSPOSE_A, c_int(not b.is_contiguous()))
    say(TRANSPOSE_B, c_int(not a.is_contiguous()))
    say(EPILOGUE, c_uint32(NOTHING if bias is None else BIAS if aux is None else GELU_AUX_BIAS))
    if aux is not None:
        say(AUX_WIDTH, c_int64(aux.size(1)))
    left, right, to = layout(b), layout(a), layout(out)
    need(lt.cublasLtMatmulPreferenceCreate(byref(preference)))
    for attribute, value in ((MOST_WORKSPACE, c_uint64(WORKSPACE)), (REDUCTIONS, c_uint32(SUMS_IN_FLOAT32))):
        need(lt.cublasLtMatmulPreferenceSetAttribute(preference, attribute, byref(value),
                                                     c_size_t(ctypes.sizeof(value))))
    need(lt.cublasLtMatmulAlgoGetHeuristic(handle, description, left, right, to, to, preference, RANKED, results,
                                           byref(found)))
    one, before, space = c_float(1), c_float(add), workspace(a.device)

    def way(result):
        def run(a, b, out, bias, aux):
            if bias is not None:
                say(BIAS_POINTER, c_uint64(bias.data_ptr()))
            if aux is not None:
                say(AUX_POINTER, c_uint64(aux.data_ptr()))
            need(lt.cublasLtMatmul(
                handle, description, ctypes.addressof(one), b.data_ptr(), left, a.data_ptr(), right,
                ctypes.addressof(before), out.data_ptr(), to, out.data_ptr(), to, ctypes.addressof(result.algorithm),
                space.data_ptr(), WORKSPACE, torch.cuda.current_stream().cuda_stream))
        return run

    return [way(results[i]) for i in range(found.value)]


def fastest(ways, *operands):
    """The way that takes the least time; the first, unless another takes at least 1% less."""
    able = []
    for way in ways:
        try:
            way(*operands)
            able.append(way)
        except RuntimeError:
            if way is ways[0]:
                raise

    def medians(ways, rounds):
        marks = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)] for _ in ways]
        for turn in range(rounds):  # taking turns, so that all see the same clocks
            for way, of_way in zip(ways, marks, strict=True):
                of_way[turn][0].record()
                way(*operands)
                of_way[turn][1].record()
        torch.cuda.synchronize()
        return [sorted(begin.elapsed_time(end) for begin, end in of_way)[rounds // 2] for of_way in marks]

    times = medians(able, 3)
    best = sorted(range(1, len(able)), key=times.__getitem__)[:FINALISTS]
    finalists = [able[0], *(able[i] for i in best)]
    times = medians(finalists, ROUNDS)
    winner = min(range(len(times)), key=times.__getitem__)
    return finalists[winner if times[winner] < 0.99 * times[0] else 0]


def multiply(plain, a, b, out, bias=None, aux=None, add=False):
    """out = a b + bias; with aux out = gelu(aux), aux = a b + bias; with `add` out += a b. By cuBLASLt, or plain(a, b,
    out, bias, aux), whichever is faster. a (M, K), b (K, N), out and aux (M, N)."""
    key = (plain, a.shape, a.stride(), b.shape, b.stride(), a.dtype, bias is None)
    way = CHOSEN.get(key)
    if way is None and torch.cuda.is_current_stream_capturing():
        way = plain  # nothing can be timed while it is recorded; each product has been made before that, as a rule
    if way is None:
        scratch = torch.empty_like(out) if add else out
        try:
            ways = [plain, *ranked(a, b, out, bias, aux, add)]
        except RuntimeError:  # nothing fits
            ways = [plain]
        way = CHOSEN[key] = fastest(ways, a, b, scratch, bias, aux) if len(ways) > 1 else plain
    way(a, b, out, bias, aux)
    return out


def plain_product(a, b, out, bias, aux):
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def plain_sum(a, b, out, bias, aux):
    torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


def linear(x, weight, bias=None):
    """F.linear: x (..., in) by a weight (out, in), and bias."""
    rows = x.reshape(-1, x.size(-1))
    if not fits(rows, weight):
        return F.linear(x, weight, bias)
    out = x.new_empty((rows.size(0), weight.size(0)))
    return multiply(plain_product, rows, weight.t(), out, bias).view(*x.shape[:-1], -1)


def matmul(a, b):
    """a @ b."""
    if not fits(a, b):
        return a @ b
    return multiply(plain_product, a, b, a.new_empty((a.size(0), b.size(1))))


def linear_gelu(x, weight, bias, gelu):
    """(GELU in the tanh form of F.linear(x, weight, bias), that); gelu(h, g) writes GELU of h to g."""
    rows = x.reshape(-1, x.size(-1))
    if not fits(rows, weight):
        h = F.linear(x, weight, bias)
        g = torch.empty_like(h)
        gelu(h, g)
        return g, h

    g, h = (x.new_empty((rows.size(0), weight.size(0))) for _ in range(2))
    multiply(two_passes(gelu), rows, weight.t(), g, bias, h)
    return (t.view(*x.shape[:-1], -1) for t in (g, h))


@functools.cache
def two_passes(gelu):
    def plain(a, b, out, bias, aux):
        multiply(plain_product, a, b, aux, bias)
        gelu(aux, out)
    return plain


def add_to(total, a, b):
    """total += a @ b, in float32; total (M, N), a (M, K), b (K, N) halves."""
    if fits(a, b) and total.data_ptr() % 16 == 0:
        multiply(plain_sum, a, b, total, add=True)
    else:
        addmm_fp32(total, a, b)
