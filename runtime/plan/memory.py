"""How much memory may be taken, and how much a run takes."""

from model import LOSS_CHUNK

OWN = (1.3e9, 1.6e9)  # what CUDA, cuBLAS, cuDNN and NCCL take beside PyTorch's tensors on one H200, and on each of two
def plan(model, config, dtype, world_size, n_params, batch_size, compiled=False, recompute=False,
         accumulate_locally=False, n_trained=None):
    """Bytes on each GPU, by what they hold, at the peak of a step: {"weights": ..., "activations": ..., ...}.

    model: GPTConfig; config: DeepSpeed's, resolved; n_params with the vocabulary's padding; accumulate_locally: see
    zero2_gradients.py; n_trained: parameters that learn, None for all. Against what was measured with GPT-2 XL on
    H200 see RESULTS.md.
    """
    zero = config["zero_optimization"]
    stage, half = zero["stage"], dtype != "float32"
    value, n_trained = 2 if half else 4, n_params if n_trained is None else n_trained
    split = [world_size if stage >= lowest else 1 for lowest in (3, 2, 1)]  # what weights, gradients, states are over
    moved = {key for key in ("offload_optimizer", "offload_param")
             if (zero.get(key) or {}).get("device", "none") != "none"}
    bucket = min(n_trained, int(zero.get("reduce_bucket_size", 5e8))) * value
    buckets = 0 if stage == 0 or (stage < 3 and world_size == 1) else bucket
    if stage in (1, 2) and zero.get("overlap_comm", True):
        buckets *= 2
    if accumulate_locally:
        buckets = n_trained * 4
    if stage == 3:  # weights of the blocks at hand, and of those fetched ahead
        buckets += min(n_params, int(zero.get("stage3_max_live_parameters", 1e9))) * value
    tokens, C, L = batch_size * model.block_size, model.n_embd, model.n_layer
    # Values that a block keeps of each token for its backward, in units of C: input, layer norms, q, k, v, attention,
    # middle and both sides of GELU (4 each). Compiled, 15.9 were measured; eager, dropout's masks come on top
    kept = 16 if compiled else 18 + 2 * (model.dropout > 0)
    kept += 5 * (n_trained < n_params)  # LoRA's share, measured at rank 64
    token_values = tokens * C * value
    loss = min(tokens, LOSS_CHUNK) * model.padded_vocab_size * 8
    if n_trained == n_params:
        loss += model.padded_vocab_size * C * 4
    activations = token_values * L * (1 if recompute else kept)
    bfloat16_too = 0  # of gradients: stage 1 keeps them beside the float32 ones, and its step copies as many again
    if stage == 1 and dtype == "bfloat16" and "offload_optimizer" not in moved:
        bfloat16_too = n_trained * 2
        activations = max(activations, bfloat16_too - loss)
    return {
        "weights": n_params * value // split[0] if "offload_param" not in moved else 0,
        # with offload, too, the float32 sums stay on the GPU, but at stage 3
        "gradients": n_trained * 4 // split[1] + bfloat16_too if stage < 3 or "offload_optimizer" not in moved else 0,
        "optimizer": (n_trained * (8 if stage == 0 else 12) // split[2]) if "offload_optimizer" not in moved else 0,
        "buckets": buckets,
        "activations": activations,
        "loss": max(loss, token_values * kept) if recompute else loss,  # or a block that is computed again
    }


def evaluation(model, dtype, batch_size):
    """Bytes that an evaluation takes beside a recorded micro-step, which keeps the memory of its activations; reckoned,
    not measured: what a block has at one time, 11 values of each token in units of C, and the loss's."""
    value = 4 if dtype == "float32" else 2
    tokens = batch_size * model.block_size
    return tokens * model.n_embd * value * 11 + min(tokens, LOSS_CHUNK) * model.padded_vocab_size * 8


def largest_batch(sequences, room, planned):
    """The largest micro-batch that divides `sequences` and of which planned(batch_size), bytes, is within `room`; 1 if
    none is."""
    return max((b for b in range(1, sequences + 1) if sequences % b == 0 and planned(b) <= room), default=1)
