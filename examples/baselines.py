r"""Make the same steps as train_deepspeed.py, with the same tokens, by another implementation, and time them.

    python launch_deepspeed.py --nproc_per_node=2 examples/baselines.py fsdp2 config/xl_shakespeare.py \
        --init_from=scratch --out_dir=out

python bench.py --baseline=NAME runs it and compares. The names: hf, transformers' GPT-2 with
DeepSpeed; hf_compiled, the same, compiled as the Trainer's torch_compile=True does; pytorch, our
GPT in plain PyTorch, with DDP on several GPUs; fsdp2, our GPT in PyTorch's FSDP2. All other
arguments are those of train_deepspeed.py. The times and losses of the steps are written to
out_dir/baseline.json; out_dir has to exist.
"""

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from configurator import settings_of_script
from model import GPT


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("hf", "hf_compiled", "pytorch", "fsdp2"), help="the implementation")
    args, argv = parser.parse_known_args()
    s = settings_of_script(ROOT / "train_deepspeed.py", argv)
    if not torch.cuda.is_available() or s.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported
    from runtime.cluster.join import join_process_group
    from runtime.cluster.ranks import all_reduce_sum, ranks_from_environment, shut_down
    from runtime.data.loader import TrainBatches, switch_threads_quickly
    from runtime.engine.setup import setup_device
    from runtime.hardware import peak_memory
    from runtime.plan.run_plan import plan_run

    ranks = ranks_from_environment()
    join_process_group(s.device, s.backend)
    plan = plan_run(s, ranks)
    device = setup_device(plan.execution, ranks.local_rank, plan.ds_config)
    torch.manual_seed(s.seed)
    steps = {
        "hf": transformers_steps,
        "hf_compiled": partial(transformers_steps, compiled=True),
        "pytorch": pytorch_steps,
        "fsdp2": partial(pytorch_steps, fsdp2=True),
    }
    name, micro_step = steps[args.name](plan, s, device)
    switch_threads_quickly()
    mixture = [(source, one.share) for source, one in zip(plan.sequences["train"], plan.datasets)]
    batches = TrainBatches(mixture, 0, plan.batch, ranks.rank, s.seed, plan.data["vocab_size"], device)
    times, losses = [], []
    for _ in range(s.max_iters):
        start, total = time.perf_counter(), 0.0
        for number, micro_batch in enumerate(batches.next_step(s.gradient_accumulation_steps), start=1):
            total += micro_step(*micro_batch[:2], number == s.gradient_accumulation_steps)
        losses.append(total.item() / s.gradient_accumulation_steps / ranks.world_size)  # item() waits for the step
        times.append(1000 * (time.perf_counter() - start))
    losses = all_reduce_sum(*losses)
    if ranks.rank == 0:
        record = {"name": name, "ms": times, "losses": losses, "peak_gb": peak_memory(device) / 1e9}
        Path(s.out_dir, "baseline.json").write_text(json.dumps(record))
    del micro_step  # frees DDP now: after the process group, it can deadlock with a thread of gloo
    shut_down()


def transformers_steps(plan, s, device, compiled=False):
    """Return (name, micro_step) of transformers' GPT2LMHeadModel in DeepSpeed, with the same JSON.

    compiled compiles the engine, as Accelerate does it for the Trainer's torch_compile=True.
    """
    import deepspeed
    import transformers

    shape = transformers.GPT2Config(n_layer=plan.model.n_layer, n_head=plan.model.n_head, n_embd=plan.model.n_embd,
                                    n_positions=plan.model.block_size, vocab_size=plan.model.vocab_size,
                                    resid_pdrop=s.dropout, embd_pdrop=s.dropout, attn_pdrop=s.dropout, use_cache=False)
    with device:
        model = transformers.GPT2LMHeadModel(shape)
    model.train()
    if s.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.learning_rate, fused=plan.execution.device == "cuda")
    # Our compiled blocks turn this key off; DeepSpeed's default is its own F.linear
    zero = dict(plan.ds_config["zero_optimization"])
    zero.pop("memory_efficient_linear", None)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer,
                                      config={**plan.ds_config, "zero_optimization": zero})
    if compiled:
        engine.compile()

    def micro_step(x, y, last):
        loss = engine(x, labels=x).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    name = f"transformers {transformers.__version__} GPT2LMHeadModel with DeepSpeed"
    if engine.is_compiled:
        name += ", compiled"
    return name, micro_step


def pytorch_steps(plan, s, device, fsdp2=False):
    """Return (name, micro_step) of a GPT in PyTorch without DeepSpeed, clipping and fused AdamW in the last micro-step.

    It is trained as in nanoGPT: float32 parameters, autocast, the whole model compiled. On several GPUs DDP is added,
    and each block is compiled: cutting the whole model at DDP's buckets takes minutes. With fsdp2, as in TorchTitan:
    each block compiled, fully_shard on each block and then on the model, bfloat16 parameters, and gradients reduced in
    float32. Both reduce gradients in the last micro-step only."""
    with device:
        model = net = GPT(plan.model)
    model.gradient_checkpointing = s.gradient_checkpointing
    dtype, compiled, several = plan.execution.torch_dtype, plan.execution.compile, dist.get_world_size() > 1
    if compiled and (fsdp2 or several):
        model.compile_blocks()
    if fsdp2:
        for module in (*model.transformer.h, model):
            fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
        set_sync, name = model.set_requires_gradient_sync, "FSDP2"
    else:
        net, name = torch.compile(model) if compiled and not several else model, "PyTorch"
        if several:
            net, name = DistributedDataParallel(net), "PyTorch DDP"
        set_sync = partial(setattr, net, "require_backward_grad_sync")  # what no_sync() sets
    autocast = torch.autocast(plan.execution.device, dtype, enabled=not fsdp2 and dtype != torch.float32)
    optimizer = torch.optim.AdamW(model.parameter_groups(s.weight_decay), lr=s.learning_rate,
                                  betas=(s.beta1, s.beta2), fused=True)

    def micro_step(x, y, last):
        set_sync(last)
        with autocast:
            loss = cross_entropy(net(x).float().flatten(0, 1), y.flatten(), ignore_index=-1)
        (loss / s.gradient_accumulation_steps).backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return name + " with torch.compile" * compiled, micro_step


if __name__ == "__main__":
    main()
