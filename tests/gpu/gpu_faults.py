"""Planted faults: bugs that later work on kernels and engine could bring in, and the GPU test that catches each.

    python tests/gpu/gpu_faults.py             plant each fault in a copy of the project, and run its test there
    python tests/gpu/gpu_faults.py --gpus=2    only the faults that two ranks alone show

A fault is one replacement in one file, and a run that has it works and looks plausible. It counts as caught if its test
fails; an error in a fixture or a test that no longer exists don't count. The exit code is 0 if all faults were caught.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 8  # each takes some 5 GB of a GPU, and a core or two


class Fault(NamedTuple):
    subject: str
    description: str
    file: str
    old: str  # occurs exactly once in the file
    new: str
    test: str  # pytest's id, without "tests/gpu/test_gpu_"
    gpus: int = 1


FAULTS = [Fault(*row) for row in (
    ("kernels", "the layer norm's backward leaves out the mean of the gradient",
     "runtime/fused.py", " / C) - tl.sum(d) / C) * scale", " / C)) * scale",
     "kernels.py::test_residual_sum_with_layer_norm"),
    ("kernels", "GELU's gradient lacks the factor 3 of its cubic term",
     "runtime/fused.py", "0.134145", "0.044715",
     "kernels.py::test_linear_with_gelu_and_linear"),
    ("kernels", "the values get the keys' gradient",
     "runtime/fused.py", "source = dv", "source = dk",
     "kernels.py::test_queries_keys_and_values"),
    ("kernels", "partial sums that don't fill a tile are not added up",
     "runtime/fused.py", "range(0, shares, ROWS)", "range(0, shares - ROWS + 1, ROWS)",
     "kernels.py::test_queries_keys_and_values"),
    ("kernels", "one column of the vocabulary's padding takes part in the softmax",
     "model.py", "columns >= vocab_size", "columns > vocab_size",
     "kernels.py::test_loss_of_the_output_layer"),
    ("cuBLASLt", "a product is always added to what its output holds",
     "runtime/products.py", "c_float(add)", "c_float(1)",
     "kernels.py::test_every_algorithm_of_cublaslt_gives_the_product"),
    ("cuBLASLt", "the first call, which times the algorithms, adds its product to the sum each time",
     "runtime/products.py", "torch.empty_like(out) if add else out", "out",
     "kernels.py::test_linear_with_gelu_and_linear"),
    ("compiled", "every block runs the first one's forward",
     "model.py", "torch.compile(block.forward, **options)", "torch.compile(self.transformer.h[0].forward, **options)",
     "model.py::test_loss_and_gradients_in_bfloat16[xl-compiled]"),
    ("CUDA graph", "a replayed micro-step keeps the targets that it was captured with",
     "runtime/replay.py", "inputs[1].copy_(y)", "pass",
     "model.py::test_loss_and_gradients_in_bfloat16[xl-kernels captured]"),
    ("ZeRO, accumulation", "each micro-step's gradients of the embeddings replace the sum of those before",
     "runtime/gradients.py", "param.grad_sum().add_(grad)", "param.grad_sum().copy_(grad)",
     "zero.py::test_bfloat16_is_plain_pytorch_to_its_rounding[1 rank-stage 2]"),
    ("ZeRO-3", "all parameters are stepped with the first group's weight decay",
     "runtime/adamw.py", "param_groups[optimizer.sub_group_to_group_id[i]]", "param_groups[0]",
     "zero.py::test_our_paths_are_deepspeeds_own_and_each_other[1 rank]"),
    ("ZeRO, sums over ranks", "gradients are summed over the ranks, not averaged",
     "runtime/gradients.py", "alpha=1 / world_size", "alpha=1",
     "zero.py::test_bfloat16_is_plain_pytorch_to_its_rounding[2 ranks-stage 2 buckets]", 2),
    ("ZeRO, local accumulation", "gradients that each rank has summed are not averaged over the ranks",
     "runtime/gradients.py", "            mine.div_(dist.get_world_size(group))\n", "",
     "zero.py::test_bfloat16_is_plain_pytorch_to_its_rounding[2 ranks-stage 2 local]", 2),
    ("AdamW", "the second moment's bias correction uses beta1",
     "runtime/adamw.py", "tl.log2(beta2)", "tl.log2(beta1)",
     "kernels.py::test_adamw_in_one_pass"),
    ("float16", "DeepSpeed grows the loss scale itself, and so halves the gradient",
     "runtime/ds_config.py", "POSTPONED = 2**20", "POSTPONED = 1",
     "zero.py::test_float16_with_overflows_and_a_growing_scale[1 rank-2]"),
    ("float16", "the loss scale grows a step early",
     "runtime/ds_config.py", "scaler.cur_iter - 1 - scaler.last", "scaler.cur_iter - scaler.last",
     "runs.py::test_float16_survives_overflows_and_grows_its_scale"),
    ("fp8", "scales leave no room, and large values are cut off",
     "runtime/fp8.py", "(2 * table.amax)", "(0.1 * table.amax)",
     "model.py::test_fp8_is_within_its_bounds"),
    ("fp8", "E5M2 is cut off where E4M3 ends",
     "runtime/fp8.py", "else 57344.0", "else 448.0",
     "kernels.py::test_casts_to_fp8_are_pytorchs"),
    ("dropout", "each replay draws the same numbers",
     "runtime/replay.py", "graph.replay()\n        ret", "torch.cuda.manual_seed(0) or graph.replay()\n        ret",
     "model.py::test_dropout_in_captured_steps[eager]"),
    ("dropout", "its random numbers start again after a resume",
     "train_deepspeed.py", "mixed_seed(seed, iter_num, rank)", "mixed_seed(seed, iter_num - first_iter, rank)",
     "runs.py::test_dropout_repeats_after_a_resume[1 rank]"),
    ("resume", "the optimizer starts afresh",
     "runtime/checkpoint.py", "load_checkpoint(out_dir, tag=tag)",
     "load_checkpoint(out_dir, tag=tag, load_optimizer_states=False)",
     "runs.py::test_a_resumed_run_is_the_same_to_the_last_bit[1 rank]"),
    ("decode", "what a program has seen so far is not scaled down when it sees a larger score",
     "runtime/decode.py", "mixed = mixed * fade +", "mixed = mixed +",
     "decode.py::test_logits_with_a_cache_are_those_without[768-500-160-1]"),
    ("decode", "in a batch, a token does not see itself",
     "model.py", "device=q.device) > position", "device=q.device) >= position",
     "decode.py::test_logits_with_a_cache_are_those_without[768-500-160-4]"),
    ("decode", "beyond the context, the window stays at the beginning",
     "model.py", "self.hidden(idx[:, -block_size:])", "self.hidden(idx[:, :block_size])",
     "decode.py::test_logits_with_a_cache_are_those_without[768-500-160-1]"),
    ("background save", "what is written are the engine's tensors, while training changes them",
     "runtime/save.py", "seen[key] = mine.view(tensor.shape).copy_(tensor, non_blocking=True)", "seen[key] = tensor",
     "runs.py::test_a_checkpoint_saved_in_the_background_is_that_of_its_step[1 rank]"),
    ("out of memory", "settings are suggested that fit an empty GPU only",
     "runtime/fit.py", "run.room = min(run.room, taken - 1)", "pass",
     "runs.py::test_out_of_memory_ends_in_settings_that_fit"),
)]


def caught(fault):
    """Plant a fault in a copy of the project. Return whether its test fails, the seconds, and pytest's output."""
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "out-*", "__pycache__"))
        path = copy / fault.file
        source = path.read_text(encoding="utf-8")
        if source.count(fault.old) != 1:
            return False, 0, f"{fault.file} holds {fault.old!r} {source.count(fault.old)} times, not once"
        path.write_text(source.replace(fault.old, fault.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-o", "addopts=-q -rf", "-x", "-p", "no:cacheprovider",
                   f"tests/gpu/test_gpu_{fault.test}"]
        done = subprocess.run(command, cwd=copy, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env={**os.environ, "TEST_GPU": "1", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"})
    failed = done.returncode == 1 and re.search(r"^FAILED ", done.stdout, re.M) is not None
    return failed, time.time() - began, done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="1: the faults that one rank shows")
    args, missed = parser.parse_args(), 0
    print("| subject | fault | test | caught |\n|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        faults = [fault for fault in FAULTS if fault.gpus == args.gpus]
        for fault, (found, seconds, output) in zip(faults, pool.map(caught, faults)):
            missed += not found
            print(f"| {fault.subject} | {fault.description} | `test_gpu_{fault.test}` | {'yes' if found else 'no'} |",
                  flush=True)
            shown = [line for line in output.splitlines() if line.startswith("E  ")] if found else output.splitlines()
            print("\n".join([f"  ({seconds:.0f} s)", *shown[-40:]]), file=sys.stderr, flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
