"""Planted faults: bugs that a refactoring could bring in, and the test that catches each.

    python tests/faults.py                       plant each fault in a copy of the project, and run its test there
    python tests/faults.py --only clipping LoRA  those of some subjects
    python tests/faults.py --check               first see that all of these tests pass without a fault
    python tests/faults.py --gpus=1              those of gpu/gpu_faults.py; with --gpus=2, those that take two GPUs
    python tests/faults.py --table               print the table of tests/README.md

A fault is one replacement in one file, and a run that has it works and looks plausible. It counts as caught if its test
fails. An error in a fixture, a collection error and a test that no longer exists don't count. The exit code is 0 if all
faults were caught."""

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

ROOT = Path(__file__).resolve().parent.parent
MARKS = "<!-- tests/faults.py table -->", "<!-- end -->"  # in tests/README.md
AT_ONCE = 8  # tests that share a GPU
HOSTILE = "hostile/test_hostile.py::test_a_hostile_file_does_no_harm"
EDITED = "kernels/test_fused_fit.py::test_an_edited_model_trains_and_decodes_as_edited"
ZIP_PICKLE = "a pickle in torch's zip format"


class Fault(NamedTuple):
    subject: str
    description: str
    file: str
    old: str  # occurs exactly once in the file
    new: str
    test: str  # pytest's id, without "tests/"
    gpus: int = 0  # that the test needs


FAULTS = [Fault(*row) for row in (
    ("data order", "every epoch repeats the shuffled order of the first one",
     "runtime/data/loader.py", "feistel_permute(index, windows, key) *",
     "feistel_permute(index, windows, splitmix64(splitmix64(seed))) *",
     "data/test_batches.py::test_epochs_and_seeds_differ"),
    ("gradients, ZeRO-0", "stage 0 doesn't run as stage 2, so gradients are summed in bfloat16",
     "runtime/engine/fixes.py", 'zero["stage"] = stage = 2', 'stage = 2',
     "test_configurator.py::test_jsons_of_the_project_resolve[bfloat16-zero0]"),
    ("gradients, ZeRO-2", "gradients are summed over the ranks, not averaged",
     "runtime/engine/reduce.py", "            shard.grads.div_(layout.world_size)\n", "",
     "test_run.py::test_one_and_two_ranks_give_the_same_losses"),
    ("gradients, ZeRO-2 buckets", "of a gradient that two ranks share, each rank adds the first part to its sums",
     "runtime/engine/reduce.py", "place.offset + piece.start, piece", "place.offset, piece",
     "engine/test_zero.py::test_float32_is_plain_pytorch[2 ranks-stage 2 buckets]"),
    ("gradients, ZeRO-3", "the second sub-group of a parameter group is stepped with the first one's gradients",
     "runtime/engine/layout.py", "                grads=grads[i],\n",
     "                grads=grads[zero3.sub_group_to_group_id[i]][: master.numel()],\n",
     "engine/test_zero.py::test_float32_is_plain_pytorch[2 ranks-stage 3]"),
    ("Muon's momentum", "it decays twice as fast",
     "runtime/engine/muon.py", "is_applied * (1 - MOMENTUM)", "is_applied * (1 - MOMENTUM**2)",
     "engine/test_muon.py::test_muon_is_pytorchs[2 ranks-muon]"),
    ("Muon, Nesterov", "the update is the momentum alone",
     "runtime/engine/muon.py", "clipped.lerp(momentum, MOMENTUM)", "momentum",
     "engine/test_muon.py::test_muon_is_pytorchs[2 ranks-muon]"),
    ("Muon, scale", "tall matrices get the learning rate of square ones",
     "runtime/engine/muon.py", "max(1, batch.rows / batch.columns) ** 0.5", "1",
     "engine/test_muon.py::test_muon_is_pytorchs[2 ranks-muon]"),
    ("Muon, learning rate", "Muon's matrices get AdamW's",
     "train_deepspeed.py", 'lr * group.get("lr_ratio", 1)', "lr",
     "engine/test_muon.py::test_golden_loss"),
    ("Muon, borders", "a rank takes the first rows of a matrix that it shares, whichever are its own",
     "runtime/engine/muon.py", "update[first - batch.start : end - batch.start]", "update[: end - first]",
     "engine/test_muon.py::test_muon_is_pytorchs[2 ranks-muon]"),
    ("Muon, skipped step", "a skipped step decays the weights",
     "runtime/engine/muon.py", "decay = lr *", 'decay = shard.options["lr"] *',
     "engine/test_muon.py::test_muon_is_pytorchs[2 ranks-nan]"),
    ("attention's precision", "a bfloat16 model's attention is in bfloat16",
     "runtime/kernels/fused.py", "torch.float16 if residual.dtype == torch.bfloat16 else residual.dtype",
     "residual.dtype",
     "kernels/test_kernels.py::test_attention_in_a_bfloat16_model_is_as_exact_as_float16[2]"),
    ("offload", "each piece is stepped with the first one's gradients",
     "runtime/engine/offload.py", "masters[i], host_grads[i],", "masters[i], host_grads[0][: len(masters[i])],",
     "engine/test_zero.py::test_offload_in_pieces_gives_the_same_weights[2 ranks]"),
    ("accumulation", "each micro-step's gradients replace the sum of those before",
     "runtime/engine/grad_sink.py", "self.total.add_(grad)", "self.total.copy_(grad)",
     "test_run.py::test_golden_losses"),
    ("ZeRO-3, blocks", "a block's gradients are summed over the ranks, not averaged",
     "runtime/engine/zero3_blocks.py", "alpha=1 / self.world_size", "alpha=1",
     "engine/test_zero.py::test_float32_is_plain_pytorch[2 ranks-stage 3]"),
    ("clipping", "each rank clips by the norm of its own share of the gradients",
     "runtime/engine/reduce.py", "dist.all_reduce(squared, group=group)\n    return squared.sq",
     "pass\n    return squared.sq",
     "test_run.py::test_one_and_two_ranks_give_the_same_losses"),
    ("loss scale", "the gradients keep the loss scale",
     "runtime/engine/clip.py", "clamp(max=1) * self.inverse_scale", "clamp(max=1)",
     "engine/test_zero.py::test_float16_is_plain_pytorch_while_the_loss_scale_grows[2 ranks-stage 2-scales0-applied0]"),
    ("loss scale, re-shard", "a resume at another ZeRO stage starts with the JSON's loss scale",
     "runtime/engine/state.py", "            setattr(scaler, name, getattr(saved_scaler, name))\n",
     "            pass\n",
     "checkpoint/test_resume.py::test_a_resume_in_float16_continues_with_the_loss_scale_and_this_runs_json"),
    ("tokenizer", "a resume accepts another tokenizer with as many tokens",
     "runtime/plan/start.py", 'raise CheckpointError(f"dataset={settings.dataset} has another tokenizer', '(f"',
     "checkpoint/test_resume.py::test_a_resume_with_another_seed_or_tokenizer_is_refused"),
    ("resume", "after a resume, dropout repeats the random numbers of the run's beginning",
     "train_deepspeed.py", "mixed_seed(seed, iter_num, ranks", "mixed_seed(seed, iter_num - first_iter, ranks",
     "test_run.py::test_a_run_that_stopped_and_went_on_is_the_run_that_did_not_stop"),
    ("re-shard", "parameters after a padded one are read from the wrong place in ZeRO-3 checkpoints",
     "runtime/checkpoint/shards.py", "size = math.ceil(self.shapes[name].numel() / parts)",
     "size = self.shapes[name].numel() // parts",
     "checkpoint/test_tag_files.py::test_pieces_of_stage_3_are_put_together_without_their_padding"),
    ("save", "training changes the state while a thread writes it",
     "runtime/checkpoint/saver.py", "            files = self._copy_to_staging(files)\n", "",
     "checkpoint/test_checkpoints.py::test_a_save_has_the_state_of_its_step[written after the next step]"),
    ("commit order", "a checkpoint gets its name before its files are flushed to the disk",
     "runtime/checkpoint/saver.py", "] = file_digest(path, flush=True)", "] = file_digest(path)",
     "checkpoint/test_tag_files.py::test_a_tag_is_on_the_disk_before_it_has_its_name_and_an_older_one_goes_last"),
    ("full disk", "the checkpoint that is deleted to make room may be the best one",
     "runtime/checkpoint/tags.py", ", self.find_best()[0]}", "}",
     "plan/test_disk.py::test_the_oldest_tag_that_is_neither_newest_nor_best_goes"),
    ("hashes", "every rank hashes the same files, so those of the other ranks' shares are not checked",
     "runtime/checkpoint/tags.py", "number % world_size == rank for", "number % world_size == 0 for",
     "checkpoint/test_tag_files.py::test_a_changed_file_is_found_by_one_of_the_ranks"),
    ("allow-list", "only model files are searched for names that are not allowed; optimizer files are not",
     "runtime/checkpoint/tags.py", "    if unsafe:", '    if unsafe and file.endswith("model_states.pt"):',
     "checkpoint/test_tag_files.py::test_no_file_of_a_tag_may_name_what_is_not_allowed"),
    ("code in a checkpoint", "a file of a checkpoint is unpickled with whatever it names",
     "runtime/checkpoint/shards.py", "mmap=True, weights_only=True", "mmap=True, weights_only=False",
     f"{HOSTILE}[resume without a check-run/iter_2/mp_rank_00_model_states.pt-{ZIP_PICKLE}]"),
    ("code in weights", "pytorch_model.bin and nanoGPT's ckpt.pt are unpickled with whatever they name",
     "runtime/weights.py", "mmap=is_zip, weights_only=True", "mmap=is_zip, weights_only=False",
     f"{HOSTILE}[train from a .bin without a check-weights_bin/pytorch_model.bin-{ZIP_PICKLE}]"),
    ("slow pickles", "a dict of a checkpoint may have any key, such as tuples that are hashed for years",
     "runtime/torch_files.py", "isinstance(key, Opaque | Name | tuple | list)", "isinstance(key, Opaque | Name)",
     f"{HOSTILE}[resume-run/iter_2/mp_rank_00_model_states.pt-a key that is hashed for years]"),
    ("code in meta.pkl", "nanoGPT's meta.pkl is unpickled with whatever it names",
     "runtime/data/meta.py", "PlainUnpickler(io.BytesIO(pickled))", "pickle.Unpickler(io.BytesIO(pickled))",
     f"{HOSTILE}[train on nanoGPT's data-nanogpt/data/meta.pkl-a plain pickle]"),
    ("pipes", "opening a pipe waits until somebody writes to it",
     "runtime/untrusted.py", "    flags |= os.O_NONBLOCK  #", "    #",
     f"{HOSTILE}[sample a run-run/iter_2/manifest.json-a pipe]"),
    ("links", "the lock of an out_dir is written through a link",
     "runtime/files.py", 'open_no_follow(os.path.join(folder, ".lock"), os.O_WRONLY | os.O_CREAT)',
     'os.open(os.path.join(folder, ".lock"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)',
     f"{HOSTILE}[train into a folder-out/.lock-a private file]"),
    ("optimizers", "another optimizer than AdamW trains as AdamW",
     "runtime/engine/any_optimizer.py", "if kind is not torch.optim.AdamW and not is_cpu_adam:", "if kind is None:",
     "engine/test_any_optimizer.py::test_losses_are_plain_pytorchs[2-SGD]"),
    ("optimizers, clipping", "the gradients of other optimizers are not clipped",
     "runtime/engine/any_optimizer.py", "factor = clip.factor()", "factor = clip.inverse_scale",
     "engine/test_any_optimizer.py::test_losses_are_plain_pytorchs[2-SGD]"),
    ("Muon's matrices", "a block with more matrices than the others loses them",
     "runtime/engine/muon.py", "itertools.zip_longest(*share)", "zip(*share)",
     "engine/test_edited_model.py::test_muon_trains_the_same_matrices_on_any_number_of_ranks[a matrix in every second "
     "block]"),
    ("micro-steps", "ranks with different numbers of micro-steps are not noticed",
     "runtime/engine/engine.py", "if any(other != ranks[0] for other in ranks):", "if not ranks:",
     "engine/test_edited_script.py::test_ranks_make_the_same_number_of_micro_steps[one less on rank 1]"),
    ("batch ramp, read ahead", "what was read ahead for another number of micro-steps is taken",
     "runtime/data/loader.py", "        if micro_steps != self.micro_steps_ahead:\n", "        if False:\n",
     "data/test_steps.py::test_a_ramp_takes_each_sequence_once_and_in_order[2]"),
    ("batch ramp, loss mask", "a target weighs as in a step of the planned number of micro-steps",
     "runtime/data/loader.py", "weight = micro_steps * batch", "weight = batch.accumulation * batch",
     "data/test_conversations.py::test_a_ramp_is_the_mean_over_the_counted_tokens_of_each_step[2]"),
    ("batch ramp, resume", "a resume starts where steps of the planned size would have ended",
     "train_deepspeed.py", 'state.get("sequences", 0), batch,',
     'state.get("iter_num", 0) * batch.sequences, batch,',
     "engine/test_edited_script.py::test_a_batch_ramp_trains_as_plain_pytorch[up-2]"),
    ("batch ramp, figures", "tokens/s are those of the planned number of micro-steps",
     "runtime/monitor/runlog.py", "        tokens_per_s = sequences *",
     "        sequences = steps * self.settings.batch_size * self.settings.gradient_accumulation_steps\n"
     "        tokens_per_s = sequences *",
     "engine/test_edited_script.py::test_figures_of_several_steps_are_of_their_sequences"),
    ("batch ramp, epochs", "max_epochs counts steps of the planned size",
     "train_deepspeed.py", "return steps_done(max_epochs) >=", "return iter_num >=",
     "engine/test_edited_script.py::test_epochs_are_of_sequences_in_a_ramp"),
    ("micro-batches, ranks", "each rank takes a run of sequences of the whole step, as before",
     "runtime/data/loader.py", "by_rank[:, self.rank].ravel()",
     "ids.reshape(batch.world_size, -1)[self.rank].ravel()",
     "data/test_steps.py::test_a_micro_step_is_a_run_of_sequences_and_each_rank_has_its_part"),
    ("any graph, ZeRO-2", "a bucket's gradients that a rank doesn't have keep what was in the buffer",
     "runtime/engine/reduce.py", "if place.param not in self.filled:", "if False:",
     "engine/test_any_graph.py::test_training_is_plain_pytorchs[experts-2-ZeRO-2]"),
    ("any graph, ZeRO-2, order", "buckets are filled in the order in which gradients come",
     "runtime/engine/reduce.py", "        if i > self.current:\n            early",
     "        self.offset_of[param] = sum(p.numel() for p in self.filled)\n        if False:\n            early",
     "engine/test_any_graph.py::test_training_is_plain_pytorchs[a block skipped per rank-2-ZeRO-2]"),
    ("loop, weights", "what a training loop does to the weights is overwritten without a word",
     "runtime/engine/untouched.py", "            if param._version != version:", "            if False:",
     "engine/test_edited_loop.py::test_a_loop_that_changes_parameters_is_refused[clamped-2]"),
    ("loop, frozen", "a parameter that a training loop has frozen still gets steps",
     "runtime/engine/untouched.py", "            if param.requires_grad != was_trained:", "            if False:",
     "engine/test_edited_loop.py::test_a_loop_that_changes_parameters_is_refused[frozen-2]"),
    ("optimizers, attributes", "an optimizer finds nothing of what the user has set on parameters",
     "runtime/engine/any_optimizer.py", "        check_attributes(name, matrix.read | whole.read, params)\n", "",
     "engine/test_any_optimizer.py::test_what_zero_cannot_give_an_optimizer_is_refused[ReadsAttribute-"
     "reads lr_scale of the parameters]"),
    ("any graph, no backward", "a block without a backward keeps the gradients of the one after it from being reduced",
     "runtime/engine/zero3_blocks.py", "        while self.last > i:\n            self.last -= 1\n",
     "        if self.last > i:\n            self.last = i\n",
     "engine/test_any_graph.py::test_training_is_plain_pytorchs[a block without gradients-2-ZeRO-3]"),
    ("any graph, a forward alone", "after a forward without a backward, blocks run with the weights of others",
     "runtime/engine/zero3_blocks.py", "        self.holds_first = not self.blocks\n", "",
     "engine/test_any_graph.py::test_training_is_plain_pytorchs[a block without gradients-2-ZeRO-3, peeking]"),
    ("any graph, ZeRO-3", "blocks are gathered one by one whatever GPT.forward does",
     "runtime/engine/zero3_blocks.py", "    reason = why_not_our_forward(model)\n", "    reason = None\n",
     "engine/test_any_graph.py::test_training_is_plain_pytorchs[blocks twice-2-ZeRO-3]"),
    ("any graph, ZeRO-3, experts", "the gradient of an expert without tokens is that of another block",
     "runtime/engine/grad_sink.py", "            self.total.zero_()\n", "            pass\n",
     "engine/test_any_graph.py::test_training_is_plain_pytorchs[experts without an auxiliary loss-2-ZeRO-3]"),
    ("any graph, DeepSpeed's path", "the gradients of the last step stay in those of the next one",
     "runtime/engine/layout.py", "        self.grad_partitions_flat_buffer.zero_()\n", "",
     "engine/test_any_graph.py::test_training_is_plain_pytorchs[a random block skipped-2-ZeRO-3, DeepSpeed's]"),
    ("ties", "a tag's ties are not compared with those of the model",
     "runtime/model_parts.py", "for group in self.ties ^ other.ties]", "for group in ()]",
     "checkpoint/test_edited_tags.py::test_other_ties_of_the_same_shapes_are_refused"),
    ("ties, pretrained weights", "each name of a parameter gets a tensor of its own",
     "runtime/model_parts.py", "            if param not in made:\n", "            if True:\n",
     "test_model_parts.py::test_a_model_without_memory_has_all_but_parameters"),
    ("ties, vocabulary", "the head is cropped with the embedding only",
     "model.py", "{self.transformer.wte.weight, *self.lm_head.parameters()}", "{self.transformer.wte.weight}",
     "test_model_parts.py::test_cropping_keeps_ties"),
    ("buffers, resume", "persistent buffers start anew",
     "runtime/engine/state.py", "    reader.copy_buffers(layout.module)\n", "",
     "checkpoint/test_edited_tags.py::test_a_run_goes_on[running statistics-2]"),
    ("buffers, sampling", "persistent buffers start anew in a sample, an evaluation and a new run",
     "runtime/checkpoint/shards.py", "    reader.copy_buffers(model)\n", "",
     "checkpoint/test_edited_tags.py::test_a_new_run_starts_from_a_tag[running statistics]"),
    ("buffers, no memory", "buffers are on the meta device, as parameters are",
     "runtime/model_parts.py", "    if model is None or any(tensor.is_meta for tensor in other_tensors(model)):\n",
     "    model = model.to(\"meta\") if model else model\n    if model is None:\n",
     "test_model_parts.py::test_a_model_without_memory_has_all_but_parameters"),
    ("padded groups", "the optimizer's state is expected without DeepSpeed's padding",
     "runtime/checkpoint/shards.py", "flat.numel() + 2 * ranks)", "flat.numel() + 1)",
     "checkpoint/test_edited_tags.py::test_a_script_that_adds_to_the_model_is_told_who_cannot_load_it"),
    ("shape", "only GPT-2's settings are passed to GPTConfig",
     "runtime/checkpoint/model_config.py", "if field.name not in OF_THE_RUN)",
     'if field.name in ("n_layer", "n_head", "n_embd", "bias"))',
     "checkpoint/test_edited_tags.py::test_a_setting_with_the_name_of_a_field_is_passed"),
    ("shape, unread", "a setting that nothing reads is accepted",
     "runtime/plan/run_plan.py", ", *unread_settings(s))", ")",
     "checkpoint/test_edited_tags.py::test_a_setting_that_nothing_reads_is_refused"),
    ("source", "methods of the model are not compared with those of a tag",
     "runtime/checkpoint/model_source.py",
     'parts.setdefault(f"{statement.name}.{inner.name}", []).append(inner)', "pass",
     "checkpoint/test_edited_tags.py::test_a_note_says_that_the_source_was_edited[an edit]"),
    ("source, another file", "a tag of another file's model is sampled",
     "runtime/checkpoint/model_source.py", "    if edited_parts(saved, model):\n", "    if False:\n",
     "checkpoint/test_edited_tags.py::test_a_model_of_another_file_is_named"),
    ("CUDA graph", "it is captured whatever the model is",
     "runtime/engine/fast_paths.py", '            facts.varies,\n', "            False,\n",
     "kernels/test_kernels.py::test_a_cuda_graph_needs_a_model_whose_micro_steps_are_all_the_same"),
    ("CUDA graph, proof", "an `if` on a tensor counts as fixed",
     "runtime/kernels/steady_expressions.py", "        if value is DATA:\n            raise NotSteady(f\"{what} on",
     "        if False:\n            raise NotSteady(f\"{what} on",
     "kernels/test_steady.py::test_not_steady[a loss that is large]"),
    ("CUDA graph, counters", "a list that a forward appends to counts as fixed",
     "runtime/kernels/steady_values.py", "        if not self.is_own:\n", "        if False:\n",
     "kernels/test_steady.py::test_not_steady[a counter in a list]"),
    ("CUDA graph, random numbers", "numbers drawn on the CPU count as fixed",
     "runtime/kernels/steady_calls.py", 'if name in names.NEED_DEVICE and "device" not in named:', "if False:",
     "kernels/test_steady.py::test_not_steady[stochastic depth on the CPU]"),
    ("CUDA graph, guards", "a graph keeps the attributes that it was captured with",
     "runtime/engine/launch.py", "            changed = self.guards.changed()\n", "            changed = None\n",
     "engine/test_guards.py::test_a_changed_attribute_drops_the_graph_with_one_note"),
    ("CUDA graph, metrics", "a metric stays that of the last evaluation",
     "runtime/engine/launch.py", "            owner[name] = tensor\n", "            pass\n",
     "engine/test_guards.py::test_a_changed_attribute_drops_the_graph_with_one_note"),
    ("kernels, classes", "the kernels run an attention class that was swapped",
     "runtime/kernels/fit.py", "        reason = edits.why_not_module(part, kind)\n", "        reason = None\n",
     f"{EDITED}[another attention class in one block]"),
    ("kernels, layer norms", "the kernels compute another eps than the layer norm's",
     "runtime/kernels/fit.py", "if block.get_submodule(name).eps != EPS:", "if False:",
     f"{EDITED}[another eps]"),
    ("kernels, hooks", "the kernels run a block with a hook on its MLP, which they don't call",
     "runtime/kernels/fit.py", "    if edits.has_hooks(part):", "    if False:",
     f"{EDITED}[a hook on mlp]"),
    ("kernels, hooks of blocks", "a hook on a block gets the parts of a sum",
     "runtime/kernels/fit.py", "if any(edits.has_hooks(block) for block in blocks_of(model)):", "if False:",
     f"{EDITED}[a hook on a block]"),
    ("kernels, GPT.forward", "blocks pass the parts of a sum to each other in any GPT.forward",
     "runtime/kernels/fit.py", "    reason = edits.why_not_our_forward(model)\n    if reason:",
     "    reason = None\n    if reason:",
     f"{EDITED}[a skip connection]"),
    ("kernels, wrappers", "a method in a wrapper counts as the wrapped one",
     "runtime/source_hash.py", 'if hasattr(function, "__wrapped__"):', "if False:",
     f"{EDITED}[a method in a wrapper]"),
    ("kernels, closed blocks", "the bias that a closed block adds at its end gets no gradient",
     "runtime/kernels/fused.py", "self.fused_attn_and_mlp(x, out_bias=bias)", "self.fused_attn_and_mlp(x)",
     f"{EDITED}[an auxiliary loss]"),
    ("kernels, memory order", "a closed block reads an input as if it were contiguous",
     "runtime/kernels/fused.py", "        residual = residual.contiguous()\n", "",
     f"{EDITED}[a residual in another order of memory]"),
    ("decoding kernels", "they decode a model whose head caps its logits",
     "runtime/kernels/fit.py", ' or edits.why_not_module(model.lm_head, "LMHead")', "",
     f"{EDITED}[a head that changes logits]"),
    ("launcher's ports", "torchrun's own store, on all interfaces, is kept",
     "launch_deepspeed.py", '    args.rdzv_backend = "one-node"', '    args.standalone = True',
     "cluster/test_ports.py::test_no_other_user_reaches_a_run[launch_deepspeed.py]"),
    ("links, lock", "the lock follows a link and truncates its target",
     "runtime/files.py", 'open_no_follow(os.path.join(folder, ".lock"), os.O_WRONLY | os.O_CREAT)',
     'os.open(os.path.join(folder, ".lock"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)',
     "test_untrusted.py::test_the_lock_truncates_nothing_and_follows_no_link"),
    ("manifests", "their types are not checked",
     "runtime/checkpoint/tags.py", "            check_manifest(manifest)\n", "",
     "test_untrusted.py::test_a_manifest_of_others_is_checked"),
    ("escapes", "what a run prints keeps the control characters of others",
     "runtime/cluster/ranks.py", "text = printable(str(text))", "text = str(text)",
     "test_untrusted.py::test_escapes_of_others_do_not_reach_the_terminal"),
    ("CPU quota", "the cores that a container's quota leaves out are used, too", "runtime/cores.py",
     "max(1, min(cores, int(quota)))", "cores", "test_cores.py::test_usable_cores[v2]"),
    ("OMP_NUM_THREADS", "a single thread that the user has chosen is raised", "runtime/cluster/join.py",
     'return "OMP_NUM_THREADS" in psutil.Process().parent().environ()', "return False",
     "cluster/test_launch.py::test_ranks_share_the_cores_of_a_node[torchrun-1-None-1]"),
    ("launchers, accelerate", "its end is not noticed", "runtime/cluster/store.py", '    "accelerate",\n', "",
     "cluster/test_launch.py::test_launchers_are_known_by_their_commands[accelerate]"),
    ("Slurm script", "each task of a node starts a launcher", "examples/slurm/train_xl.sbatch",
     '--ntasks="$SLURM_NNODES" --ntasks-per-node=1 ', "",
     "cluster/test_nodes.py::test_a_job_starts_one_launcher_on_each_node_with_all_of_its_cpus[two tasks]"),
    ("hidden GPUs", "a name that no GPU has is taken for a fault of the driver", "runtime/hardware.py",
     "return wrong_gpu_names(listed) or unsupported_gpu() or (", "return unsupported_gpu() or (",
     "plan/test_refusals.py::test_gpus_that_are_not_there_are_named[8-CUDA_VISIBLE_DEVICES=8 names 8, but nvidia-smi "
     "lists GPUs 0 to 1: change it, or set]"),
    ("links to nowhere", "a folder is made in place of a disk that isn't mounted, or its name said to exist",
     "runtime/files.py", "    refuse_broken_link(folder, option)\n", "",
     "checkpoint/test_save_failures.py::test_a_link_to_nowhere_is_named[out/run]"),
    ("moved out_dir", "it is made again without its lock", "runtime/checkpoint/tags.py",
     '        self._lock = lock_folder(self.out_dir, "--out_dir")\n',
     "        os.makedirs(self.out_dir, exist_ok=True)\n",
     "checkpoint/test_save_failures.py::test_a_folder_that_is_made_again_is_locked"),
    ("moved out_dir, another run", "checkpoints of another run in its place are overwritten",
     "runtime/checkpoint/tags.py", "if is_other and self.list():", "if is_other and not self.list():",
     "checkpoint/test_save_failures.py::test_another_run_in_the_place_of_an_out_dir_is_left_alone"),
    ("failed saves", "the system's error is lost behind torch.save's", "runtime/checkpoint/saver.py",
     "        cause = first_os_error(error)\n", "        cause = None\n",
     "checkpoint/test_save_failures.py::test_a_limit_on_the_size_of_files_is_named"),
    ("many tags", "each save reads all manifests again", "runtime/checkpoint/tags.py",
     "if version is None or SUMMARIES", "if True or SUMMARIES",
     "checkpoint/test_many_tags.py::test_each_manifest_is_read_once"),
    ("many tags, changes", "a manifest that has changed is not read again", "runtime/checkpoint/tags.py",
     "SUMMARIES.get(path, (None, None))[0] != version", "path not in SUMMARIES",
     "checkpoint/test_many_tags.py::test_a_manifest_that_has_changed_is_read_again"),
    ("LoRA, no rank", "lora_target_modules without a rank is ignored", "runtime/plan/rules.py",
     '"lora_target_modules" in s.changed', "False",
     "plan/test_refusals.py::test_what_cannot_be_meant[--lora_target_modules=attn.c_attn-"
     "lora_target_modules=attn.c_attn needs LoRA: add --lora_rank=64, or drop it]"),
    ("other scripts' options", "they get no hint", "configurator.py",
     'instead_of(name, value) if "max_iters" in known else None', "None",
     "test_guides.py::test_an_option_of_other_scripts_is_refused_with_ours[--fp16-write --dtype=float16]"),
    ("stops, evaluation", "an evaluation goes on to its end after a stop is requested",
     "train_deepspeed.py", "                if stop_check.is_requested():", "                if False:",
     "cluster/test_stops.py::test_a_stop_in_an_evaluation_saves_and_the_resume_makes_it_up[2]"),
    ("stops, made up", "a resume doesn't make up the evaluation that a stop has ended",
     "train_deepspeed.py", 'state.get("evaluation_is_due", False)', "False",
     "cluster/test_stops.py::test_a_stop_in_the_last_evaluation_is_made_up_too"),
    ("stops, announcement", "the line comes when the ranks agree, not when the signal comes",
     "runtime/cluster/shutdown.py", "        if self.signals:\n            self", "        if False:\n            self",
     "cluster/test_stops.py::test_a_stop_is_announced_while_the_main_thread_waits"),
    ("stops, DeepSpeed's prints", "the line is dropped with what DeepSpeed prints meanwhile",
     "runtime/cluster/ranks.py", "if threading.get_ident() == self.thread:", "if True:",
     "cluster/test_stops.py::test_a_signal_before_the_first_step_ends_the_run_with_one_line"
     "[SIGINT-deepspeed-initialize]"),
    ("stops, STOP", "a STOP that was meant for an earlier run stops this one",
     "runtime/cluster/requests.py", "self.earlier = self.identity()", "self.earlier = None",
     "cluster/test_stops.py::test_a_stop_file_that_is_touched_again_counts"),
    ("launchers, mpirun", "Slurm's variables win over those of mpirun, which starts its daemons by srun",
     "runtime/cluster/launchers.py", "found = [launcher for launcher in LAUNCHERS if",
     "found = [launcher for launcher in LAUNCHERS[::-1] if",
     "cluster/test_stops.py::test_variables_of_other_launchers_become_torchruns[environ3-3 1 4 2 None]"),
    ("launchers, unknown ranks", "processes that don't know their rank train alone, each the whole run",
     "runtime/cluster/ranks.py", 'if STARTED_BY is not None and "RANK" not in os.environ:', "if False:",
     "cluster/test_stops.py::test_processes_that_do_not_know_their_rank_are_refused"),
    ("launchers, several", "srun starts several launchers on a node, each a run of its own",
     "launch_deepspeed.py", "    if count > nodes:", "    if False:",
     "cluster/test_launch.py::test_one_launcher_for_each_node_is_right[4-2-True]"),
    ("paths", "~ and variables in settings are taken as they are",
     "configurator.py", "value = expand_setting(value)", "pass",
     "test_configurator.py::test_paths_in_a_config_and_in_a_mixture"),
    ("wandb, going back", "wandb continues the run whose later steps were discarded",
     "runtime/monitor/loggers.py", "            self.wandb_id = None\n", "            pass\n",
     "test_run.py::test_wandb_after_going_back_is_a_new_run_that_drops_nothing"),
    ("signals", "SIGHUP is never handled, so a closed terminal ends the run without a checkpoint",
     "runtime/cluster/requests.py", "SIGHUP or not is_ignored", "SIGHUP and not is_ignored",
     "cluster/test_shutdown.py::test_a_signal_saves_and_ends[fork-1-SIGHUP]"),
    ("evaluation weights", "windows that only pad a rank's last batch count in the mean loss",
     "train_deepspeed.py", "counts = (y >= 0).double()", "counts = torch.ones_like(y).double()",
     "test_run.py::test_estimate_loss_is_the_same_on_one_and_two_ranks_at_stage_3"),
    ("loss mask", "a step takes the mean of its micro-steps' means, however few tokens count in one of them",
     "runtime/engine/launch.py", " * (count * weight)", "",
     "data/test_conversations.py::test_a_step_is_the_mean_over_all_counted_tokens[2-2-3-2]"),
    ("loss mask, auxiliary loss", "it counts once per micro-batch, and the others once per target",
     "runtime/engine/launch.py", "model(x, targets) * (count * weight)", 'model(x, targets, "sum") * weight',
     "data/test_conversations.py::test_an_auxiliary_loss_counts_as_often_as_its_micro_batch_has_targets[2-2-3-2]"),
    ("loss mask, no target", "a micro-batch without a target makes the gradients not a number",
     "runtime/engine/launch.py", "torch.where(count > 0, y, y.clamp(min=0))", "y",
     "data/test_conversations.py::test_a_micro_batch_without_targets_counts_nothing"),
    ("loss mask, a model.py of others", "whether its loss leaves out targets that don't count isn't checked",
     "runtime/check/short.py", "masked and isinstance(model, Adapter)", "False",
     "test_bring.py::test_data_with_a_loss_mask_needs_a_mean_over_the_targets[-1 is a token]"),
    ("evaluations, resume", "a resume doesn't say that it evaluates other windows than before",
     "runtime/plan/start.py", "    if before in (None, windows):\n", "    if before is None or windows:\n",
     "checkpoint/test_resume.py::test_a_resume_notes_that_it_is_evaluated_on_other_windows"),
    ("local accumulation, reason", "too little memory is given as the reason for what a setting has said",
     "runtime/plan/run_plan.py", '        (s.accumulate_locally is False, "accumulate_locally=False"),\n', "",
     "engine/test_fast_paths.py::test_the_plan_says_why_there_is_no_local_accumulation[arguments1-"
     "accumulate_locally=False]"),
    ("optimizers, name", "any optimizer is printed as adamw",
     "runtime/plan/report.py", "        name = optimizer_name(optimizer)\n", "        pass\n",
     "engine/test_any_optimizer.py::test_its_class_is_named_and_deepspeed_warns_of_nothing"),
    ("optimizers, DeepSpeed's warning", "it says to proceed with caution",
     "runtime/engine/setup.py", "    logger.addFilter(is_other)\n", "",
     "engine/test_any_optimizer.py::test_other_warnings_of_deepspeed_are_kept"),
    ("manifests, edited models", "a model with many experts can't be resumed: its files are too large for its sizes",
     "runtime/checkpoint/manifest.py", 'max(elements, manifest["state"].get("elements", 0))', "elements",
     "test_untrusted.py::test_a_tag_has_a_size_that_fits_its_model"),
    ("extra state", "a module's get_extra_state is saved, and no reader takes the checkpoint",
     "runtime/model_parts.py", "type(module).get_extra_state is not nn.Module.get_extra_state", "False",
     "test_bring.py::test_what_is_missing_is_one_sentence[a state of its own]"),
    ("LoRA, layers", "a block without a layer of GPT-2's name ends the run with an AttributeError",
     "runtime/lora.py", '    check_targets(model, lora["target_modules"])\n', "",
     "test_bring.py::test_lora_needs_gpt2s_layers"),
    ("a model.py of others, ranks", "each rank prints why it can't be trained",
     "runtime/chosen_model.py", "    exit_on_all_ranks(error)\n", "    raise\n",
     "test_bring.py::test_all_ranks_refuse_it_in_one_sentence"),
    ("a model.py of others, memory", "the plan takes its logits for chunks",
     "runtime/plan/run_plan.py", "whole_logits=issubclass(GPT, Adapter)", "whole_logits=False",
     "test_bring.py::test_a_plan_knows_that_the_logits_are_whole"),
    ("export, head", "a head that isn't tied is written as tied",
     "runtime/export/hf.py", "tie_word_embeddings=model.lm_head.weight is model.transformer.wte.weight",
     "tie_word_embeddings=True", "export/test_export.py::test_a_head_of_its_own_is_written_as_one"),
    ("schedule", "the cosine decay is stretched by the length of the warmup",
     "train_deepspeed.py", "max(1, decay_iters - warmup_iters))", "max(1, decay_iters))",
     "test_run.py::test_learning_rates"),
    ("configurator", "a config file sees the defaults, not the settings given before it",
     "configurator.py", "run_config_file(arg, values, root)", "run_config_file(arg, defaults, root)",
     "test_configurator.py::test_config_files_see_the_settings_so_far_and_nothing_of_the_configurator"),
    ("JSON checks", "a ZeRO stage of true or 2.0 is accepted",
     "runtime/engine/ds_config.py", "json.dumps(value) not in map(json.dumps, rule)", "value not in rule",
     "test_configurator.py::test_jsons_are_refused"),
    ("ZeRO-3, prefetch", "the fast path is taken although a prefetch key of the JSON has another value",
     "runtime/engine/ds_config.py", "zero.get(key, value) == value for", "zero.get(key, value) >= 0 for",
     "test_configurator.py::test_another_prefetch_needs_deepspeeds_own_stage_3"),
    ("export", "the newest checkpoint is exported, not the one that --tag names",
     "export_hf.py", "load_model(out_dir, tag)", "load_model(out_dir)",
     "export/test_export.py::test_transformers_loads_the_model_that_was_trained"),
    ("LoRA", "LoRA's dropout acts on the output of lora_A, not on its input",
     "runtime/lora.py", "F.linear(self.dropout(x), self.lora_A)", "self.dropout(F.linear(x, self.lora_A))",
     "test_lora.py::test_loss_and_gradients_are_pefts"),
    ("sampling cache", "the token at position 128 or 256 does not attend to itself",
     "runtime/decoder.py", "2 ** self.cached.bit_length()", "2 ** (self.cached.bit_length() - 1)",
     "test_model.py::test_text_by_captured_steps_is_the_same_text"),
    ("sampling, blocks that run twice", "a block that runs twice overwrites its keys",
     "runtime/decoder.py", "        self.runs += 1\n", "",
     "test_edited_shapes.py::test_logits_with_a_cache_are_those_without[blocks twice]"),
    ("edited loss", "a soft cap keeps the gradient that is written for plain cross-entropy",
     "runtime/loss.py", "            return False\n    check_by_hand", "            pass\n    check_by_hand",
     "test_loss.py::test_loss_and_gradients_are_those_over_full_logits[Softcapped-mean-7]"),
    ("edited loss, runs", "a soft cap keeps the gradient that is written for plain cross-entropy",
     "runtime/loss.py", "            return False\n    check_by_hand", "            pass\n    check_by_hand",
     "test_edits.py::test_a_run_goes_on_on_one_rank[softcap_in_the_loss]"),
    ("a model.py of others, groups", "its biases and layer norms decay",
     "runtime/bring.py", '{"params": vectors, "weight_decay": 0.0}',
     '{"params": vectors, "weight_decay": weight_decay}',
     "test_bring.py::test_it_may_have_another_name"),
    ("a model.py of others, context", "block_size is not that of the run",
     "runtime/bring.py", "        own(block_size)\n", "",
     "test_bring.py::test_its_context_is_cropped_by_its_own_method"),
    ("initial weights", "what a module has set is drawn again",
     "model.py", "    if param._version > changes:\n        return False\n", "",
     "test_init.py::test_what_a_module_set_stays_and_its_layers_are_gpt2s"),
    ("save, ZeRO-3", "a save that training waits for writes DeepSpeed's attributes of the parameters",
     "runtime/checkpoint/saver.py", "            files = without_attributes(files)\n", "",
     "checkpoint/test_checkpoints.py::test_a_save_has_the_state_of_its_step[training waits at stage 3]"),
    ("doctor, cache", "it compares the prompt's logits alone",
     "runtime/check/logits.py", "for at in range(PROMPT, T):", "for at in range(T, T):",
     "test_doctor_model.py::test_a_planted_fault_is_found[positions off by one in decoding]"),
    ("doctor, chunks", "it compares the loss in one chunk, of all rows",
     "runtime/check/loss.py", "EAGER_LOSS_CHUNK = CHUNK", "EAGER_LOSS_CHUNK = ROWS",
     "test_doctor_model.py::test_a_planted_fault_is_found[a loss that looks at other rows]"),
    ("doctor, before a run", "a difference is printed, and the run goes on",
     "runtime/check/short.py", "            raise UserError(f", "            print0(f",
     "test_doctor_model.py::test_a_run_of_a_faulty_model_ends_before_its_first_step[1]"),
    ("doctor, random numbers", "the checks before a run draw from the run's generator",
     "runtime/check/tiny.py", "        torch.default_generator.set_state(of_torch)\n", "",
     "test_doctor_model.py::test_the_checks_of_a_run_leave_its_random_numbers"),
    ("plan", "the second communication bucket of overlap_comm is missing from the memory plan",
     "runtime/plan/memory.py", "size *= 2  # one", "size *= 1  # one",
     "plan/test_fit.py::test_the_plan_of_a_billion_parameters_on_4_gpus_by_hand"),
    ("GPU support", "a GPU counts as supported if PyTorch has binaries for any older one",
     "runtime/hardware.py", ' and (kind == "compute" or arch[0] == gpu[0])', "",
     "plan/test_refusals.py::test_a_card_needs_a_pytorch_that_has_its_kernels"),
    ("animals90, code in a checkpoint", "a file of a checkpoint is unpickled with whatever it names",
     "examples/animals90/src/resuming.py", 'map_location="cpu", weights_only=True',
     'map_location="cpu", weights_only=False',
     f"{HOSTILE}[resume on pictures without a check-animals/best_model/best/mp_rank_00_model_states.pt-{ZIP_PICKLE}]"),
    *((f"animals90, {subject}", description, f"examples/animals90/src/{file}.py", old, new,
       f"test_animals90.py::{test}") for subject, description, file, old, new, test in (
        ("ranks", "each rank ends with its own batch norm statistics", "train_deepspeed", 'if "running" in name)',
         'if "none" in name)', "test_all_ranks_end_with_the_same_statistics"),
        ("recomputing", "recomputed activations move the statistics twice", "model",
         "0.0 if recomputing else self.momentum", "self.momentum",
         "test_recomputed_activations_move_the_statistics_once"),
        ("skipped steps", "a skipped step counts in the schedule", "train_deepspeed",
         "steps += engine.was_step_applied()", "steps += 1",
         "test_a_skipped_step_is_none_of_the_schedule_and_statistics_stay_float32"),
        ("Adam", "Adam decays the weights as AdamW does", "train_deepspeed", '"weight_decay": 0.0 if',
         '"weight_decay": 0.01 if', "test_the_json_says_which_adam_and_whether_there_is_a_warmup"),
        ("steps", "an epoch ends in the middle of a step", "data", "* accumulation))", "))",
         "test_each_picture_is_there_once_and_all_ranks_have_as_many_batches"),
        ("last batch", "the last batch of an epoch is missing", "data", "* stride, stride)", "* stride - size, stride)",
         "test_each_picture_is_there_once_and_all_ranks_have_as_many_batches"),
        ("half precision", "the statistics are rounded to bfloat16", "model", "t.to(fn(t).device)", "fn(t)",
         "test_statistics_stay_in_float32_in_half_precision"),
        ("other ranks", "Adam's moments of another number of ranks are read from the wrong places", "train_deepspeed",
         'if state["saved_by"] != new["saved_by"]:', "if False:",
         "test_another_number_of_ranks_takes_the_weights_of_the_newest_epoch"))))]


def row(*cells):
    return f"| {' | '.join(cells)} |"


def table(faults):
    """The faults as a Markdown table between the marker comments of tests/README.md."""
    rows = [row(f.subject, f.description, f"`{f.test}`") for f in faults]
    return "\n".join([MARKS[0], row("subject", "fault", "test that catches it"), "|---|---|---|", *rows, MARKS[1]])


def run_tests(*tests, fault=None):
    """Run these tests in a copy of the project, with a fault or without; -> subprocess.CompletedProcess."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "out-*", "__pycache__"))
        if fault:
            path = copy / fault.file
            source = path.read_text(encoding="utf-8")
            assert source.count(fault.old) == 1, f"{fault.file} must hold {fault.old!r} once"
            path.write_text(source.replace(fault.old, fault.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-o", "addopts=-q -rf", "-x", "-p", "no:cacheprovider",
                   *(f"tests/{test}" for test in tests)]
        return subprocess.run(command, cwd=copy, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=1800, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"})


def caught(fault):
    """Plant a fault. Return whether its test fails, the seconds, and pytest's output."""
    began, done = time.time(), run_tests(fault.test, fault=fault)
    failed = done.returncode == 1 and re.search(r"^FAILED ", done.stdout, re.M) is not None
    return failed, time.time() - began, done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="SUBJECT", help="the faults of these subjects alone")
    parser.add_argument("--check", action="store_true", help="first run all tests without a fault")
    parser.add_argument("--table", action="store_true", help="print the table of tests/README.md and end")
    parser.add_argument("--gpus", type=int, default=0, choices=(0, 1, 2), help="those of the GPU suite with so many")
    args = parser.parse_args()
    from gpu.gpu_faults import GPU_FAULTS  # which takes Fault from here

    faults = [f for f in (GPU_FAULTS if args.gpus else FAULTS) if f.gpus == args.gpus]
    subjects = [f.subject for f in faults]
    for subject in args.only or ():
        if subject not in subjects:
            parser.error(f"there is no subject {subject!r}; there are {', '.join(map(repr, dict.fromkeys(subjects)))}")
    chosen = [f for f in faults if not args.only or f.subject in args.only]
    if args.table:
        print(table(chosen))
        return 0
    if args.gpus:
        os.environ["TEST_GPU"] = "1"
    if args.check and (done := run_tests(*dict.fromkeys(f.test for f in chosen))).returncode:
        print(f"without any fault:\n{done.stdout}", file=sys.stderr)
        return 1
    print(row("subject", "fault", "test", "caught") + "\n|---|---|---|---|", flush=True)
    missed = 0
    with ThreadPoolExecutor(AT_ONCE if args.gpus else 1) as pool:
        for fault, (found, seconds, output) in zip(chosen, pool.map(caught, chosen)):
            missed += not found
            print(row(fault.subject, fault.description, f"`{fault.test}`", "yes" if found else "no"), flush=True)
            shown = [line for line in output.splitlines() if not found or line.startswith("E  ")][-40:]
            print("\n".join([f"  {seconds:.0f} s", *shown]), file=sys.stderr, flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
