"""The ways of test_zero.py to train a tiny model, a group of ways for each of its questions.

zero_worker.py trains all ways of a group in one launch, and in plain PyTorch over the same
sequences.
"""

from dataclasses import dataclass, field, replace

CLIP = 0.3  # norms are 0.5 to 0.8
# ZeRO-3 releases each parameter after its use. So small a model else keeps all, and tests little
RELEASED = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
}
# c_attn has 3,072 elements and c_fc 4,096: their gradients have buckets of their own
BUCKETS = {"reduce_bucket_size": 2500, "allgather_bucket_size": 2500}
# c_attn, c_proj, c_fc and c_proj have 12,288 elements: 2 and 3 of the 5 blocks stay gathered
TWO_BLOCKS = {"stage3_max_live_parameters": 0}
THREE_BLOCKS = {"stage3_max_live_parameters": 3 * 12288}
# As config/ds/zero2_offload.json and zero3_offload.json, but with PyTorch's AdamW, which needs no
# compiler
ON_HOST = {"zero_force_ds_cpu_optimizer": False}
OFFLOAD_2 = {
    **BUCKETS,
    "overlap_comm": True,
    "offload_optimizer": {"device": "cpu", "pin_memory": False},
}
OFFLOAD_3 = {
    **RELEASED,
    "overlap_comm": False,
    "sub_group_size": 5000,
    "memory_efficient_linear": False,
    "offload_optimizer": {"device": "cpu"},
    "offload_param": {"device": "cpu", "pin_memory": False},
}


@dataclass(frozen=True)
class Way:
    """A way to train, in an engine of its own.

    name: unique in its group. stage: ZeRO's. zero, config: what else the DeepSpeed JSON has, in its
    "zero_optimization" and beside it. clip: the largest norm; 0: no clipping.

    ours: whether our gradients and step are to take the place of DeepSpeed's. forced: take
    DeepSpeed's in spite of a JSON with which ours fit. local: each rank sums its micro-steps first.
    kernels: the blocks run on our kernels, "chained" or, with a hook, "closed".

    recomputed: activations are recomputed in backward. compiled: by dynamo and autograd as with
    inductor, which would need a compiler. masked: the loss scale is that of data in which few
    tokens are targets. planned: how many times as many micro-steps as are made the JSON has.

    poison: after the first step there is one more, in which one element of one gradient is that, on
    the last rank alone and in the middle micro-step alone.
    """

    name: str
    stage: int
    dtype: str
    zero: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    clip: float = CLIP
    ours: bool = True
    forced: bool = False
    local: bool = False
    kernels: str | None = None
    recomputed: bool = False
    compiled: bool = False
    masked: bool = False
    planned: int = 1
    poison: str | None = None


@dataclass(frozen=True)
class Group:
    """Ways that train the same model over the same data. layers, steps, tokens: their number."""

    ways: tuple[Way, ...]
    layers: int = 2
    steps: int = 3
    tokens: int = 16

    def named(self, name: str) -> Way:
        (way,) = [way for way in self.ways if way.name == name]
        return way


def poisoned(way: Way, value: str) -> Way:
    return replace(way, name=f"{way.name} {value}", poison=value)


# Each is plain PyTorch to the roundings of float32
stage_2 = Way("stage 2", 2, "float32")
stage_2_offload = Way("stage 2 offload", 2, "float32", zero=OFFLOAD_2, config=ON_HOST)
stage_3 = Way("stage 3", 3, "float32")
FLOAT32 = Group(
    (
        stage_2,
        poisoned(stage_2, "inf"),
        replace(stage_2, name="stage 2 buckets", zero=BUCKETS),
        replace(stage_2, name="own", ours=False, forced=True),
        replace(stage_2_offload, config={**ON_HOST, "steps_per_print": 1}),
        poisoned(stage_2_offload, "inf"),
        stage_3,
        replace(stage_3, name="stage 3 recomputed", recomputed=True),
        replace(stage_3, name="stage 3 compiled", compiled=True),
        # Their prefetching or offload isn't ours
        replace(stage_3, name="stage 3 released", zero=RELEASED, ours=False),
        replace(
            stage_3,
            name="stage 3 compiled recomputed",
            zero=RELEASED,
            ours=False,
            compiled=True,
            recomputed=True,
        ),
        replace(stage_3, name="zero3 offload", zero=OFFLOAD_3, config=ON_HOST, ours=False),
    )
)

# With buffers for fewer blocks than there are
DEEP = Group(
    (
        replace(stage_3, name="two blocks", zero=TWO_BLOCKS),
        replace(stage_3, name="three blocks", zero=THREE_BLOCKS, recomputed=True),
    ),
    layers=5,
)

# Each is plain PyTorch in float32 to the roundings of bfloat16, and some are each other to the bit
half_2 = Way("stage 2", 2, "bfloat16")
half_buckets = replace(half_2, name="stage 2 buckets", zero=BUCKETS)
half_local = replace(half_2, name="stage 2 local", local=True)
half_3 = Way("stage 3", 3, "bfloat16")
half_own = replace(half_buckets, name="own", ours=False, forced=True)
BFLOAT16 = Group(
    (
        half_2,
        half_buckets,
        poisoned(half_buckets, "inf"),
        poisoned(half_buckets, "nan"),
        half_local,
        poisoned(half_local, "inf"),
        replace(half_local, name="stage 2 local offload", zero=OFFLOAD_2, config=ON_HOST),
        half_own,
        replace(half_2, name="stage 2 unclipped", clip=0.0),
        replace(half_own, name="own unclipped", clip=0.0),
        half_3,
        replace(half_3, name="stage 3 released", zero=RELEASED, ours=False),
    )
)

# The scale begins at 2^8, and doubles after every second good step. Without clipping, which would
# hide a gradient that is too small
GROWING = {"fp16": {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}}
scaled_2 = Way("stage 2", 2, "float16", config=GROWING, clip=0.0)
scaled_3 = replace(scaled_2, name="stage 3", stage=3)
scaled_own = replace(scaled_3, name="own stage 3", zero=RELEASED, ours=False)
# At the lowest scale
LOWEST = {"fp16": {**GROWING["fp16"], "initial_scale_power": 0}}
FLOAT16 = Group(
    (
        scaled_2,
        poisoned(scaled_2, "inf"),
        replace(scaled_2, name="stage 2 static", config={"fp16": {"loss_scale": 128}}),
        scaled_3,
        poisoned(scaled_3, "inf"),
        scaled_own,
        poisoned(scaled_own, "inf"),
        poisoned(replace(scaled_own, name="own fewer", config=LOWEST, planned=2), "inf"),
        replace(scaled_2, name="own stage 2", ours=False, forced=True, planned=2),
    ),
    steps=5,
)

# In Triton's interpreter, where a row takes milliseconds
fused_2 = Way("stage 2 local", 2, "bfloat16", local=True, kernels="chained")
fused_3 = Way("stage 3", 3, "bfloat16", kernels="chained")
fused_own = replace(fused_3, name="own", zero=RELEASED, ours=False, forced=True)
KERNELS = Group(
    (
        poisoned(replace(fused_2, name="stage 2", local=False), "nan"),
        fused_2,
        replace(fused_3, masked=True),
        replace(fused_3, name="stage 3 local", local=True, recomputed=True),
        replace(fused_3, name="closed stage 3", kernels="closed"),
        fused_own,
        replace(fused_own, name="closed own", kernels="closed"),
    ),
    steps=2,
    tokens=4,
)

GROUPS = {
    "float32": FLOAT32,
    "deep": DEEP,
    "bfloat16": BFLOAT16,
    "float16": FLOAT16,
    "kernels": KERNELS,
}
