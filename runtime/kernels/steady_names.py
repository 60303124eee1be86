"""What of PyTorch and Python may be part of a micro-step that a CUDA graph repeats.

Left out is what waits for the GPU (item, nonzero, unique), what makes a tensor on the CPU, and what
draws random numbers there. A name that isn't here isn't known, so a model that uses it gets no
graph."""

from torch import nn

# Functions of torch and torch.nn.functional, and methods of tensors: one tensor per tensor
ELEMENTWISE = """
abs add addcdiv addcmul clamp clamp_max clamp_min clip cos cosh cumprod cumsum div eq erf exp exp2
expm1 ge gelu gt hardswish hardtanh isfinite isinf isnan le leaky_relu lerp log log1p log2
logical_and logical_not logical_or logsigmoid lt masked_fill maximum minimum mish mul nan_to_num ne
neg pow reciprocal relu relu6 round rsqrt rsub selu sigmoid sign silu sin sinh softplus softsign
sqrt square sub tanh tril triu true_divide
"""
OTHERS = """
addmm all alpha_dropout amax amin any argmax argmin argsort baddbmm binary_cross_entropy_with_logits
bmm cat concat contiguous conv1d cosine_similarity cross_entropy cummax detach dot dropout einsum
elu embedding flip gather glu group_norm index_add index_select kl_div l1_loss layer_norm linear
log_softmax logsumexp matmul max mean min mm mse_loss nll_loss norm normalize outer prod rms_norm
scaled_dot_product_attention scatter scatter_add softmax sort stack std sum take_along_dim topk
unbind var vector_norm
"""
# The other arguments are sizes, dimensions or dtypes: they have to be fixed numbers
SHAPING = """
broadcast_to chunk diagonal expand flatten movedim narrow pad permute repeat repeat_interleave
reshape roll select split squeeze swapaxes tile transpose unflatten unfold unsqueeze view
"""
METHODS = """
add_ bfloat16 bool clamp_ clone copy_ div_ double expand_as fill_ float half int long masked_fill_
mul_ new_empty new_full new_ones new_zeros requires_grad_ reshape_as sub_ t to type_as view_as zero_
"""
LIKE = "bernoulli empty_like full_like ones_like rand_like randn_like zeros_like"
# They are on the CPU without a device
CREATED = "arange empty eye full linspace ones rand randn zeros"

FUNCTIONS = frozenset(f"{ELEMENTWISE} {OTHERS} {SHAPING} {LIKE} {CREATED} clone where".split())
TENSOR_METHODS = frozenset(f"{ELEMENTWISE} {OTHERS} {SHAPING} {METHODS} where".split())
FIXED_ARGUMENTS = frozenset(f"{SHAPING} {CREATED} new_full new_ones new_zeros".split())
NEED_DEVICE = frozenset(CREATED.split())

# What depends on the kind of a tensor, but not on its numbers
FIXED_FUNCTIONS = frozenset({"is_grad_enabled", "is_autocast_enabled", "is_tensor"})
FIXED_METHODS = frozenset(
    "dim element_size is_contiguous is_floating_point ndimension nelement numel size stride".split()
)
FIXED_ATTRIBUTES = frozenset("is_cuda ndim requires_grad shape".split())
TENSOR_ATTRIBUTES = frozenset({"T", "mT"})

# Modules of PyTorch. nn.Sequential calls its parts
LAYERS = frozenset({
    nn.Bilinear, nn.Conv1d, nn.Dropout, nn.ELU, nn.Embedding, nn.GELU, nn.GLU, nn.GroupNorm,
    nn.Hardswish, nn.Identity, nn.LayerNorm, nn.LeakyReLU, nn.Linear, nn.LogSoftmax, nn.Mish,
    nn.ReLU, nn.ReLU6, nn.RMSNorm, nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softmax, nn.Softplus, nn.Tanh,
})  # fmt: skip

# Builtins that return fixed numbers for fixed numbers
BUILTINS = frozenset({abs, bool, float, int, len, max, min, round, str})
