"""Planted faults in gradients, optimizers, loss scales, and which path a run takes."""

from fault_places import MODULE, Fault

FAULTS = [
    Fault(
        subject="gradients, ZeRO-0",
        description="stage 0 doesn't run as stage 2, so gradients are summed in bfloat16",
        file="runtime/engine/fixes.py",
        function="repair",
        old='zero["stage"] = stage',
        new="pass",
        test="test_configurator.py::test_jsons_of_the_project_resolve[bfloat16-zero0]",
        quick=True,
    ),
    Fault(
        subject="gradients, ZeRO-2",
        description="gradients are summed over the ranks, not averaged",
        file="runtime/engine/reduce.py",
        function="LocalAccumulation.reduce_at_step",
        old="shard.grads.div_(layout.world_size)",
        new="pass",
        test="test_run.py::test_one_and_two_ranks_give_the_same_losses",
    ),
    Fault(
        subject="gradients, ZeRO-2 buckets",
        description="of a gradient that two ranks share, each rank adds the first part to its sums",
        file="runtime/engine/reduce.py",
        function="BucketedAllReduce.reduce",
        old="place.offset + piece.start",
        new="place.offset",
        test="engine/test_zero.py::test_float32_is_plain_pytorch[2 ranks-stage 2 buckets]",
    ),
    Fault(
        subject="groups, ZeRO-3",
        description="all parameters are stepped with the first group's weight decay",
        file="runtime/engine/layout.py",
        function="zero3_layout",
        old="zero3.sub_group_to_group_id[i]",
        new="0",
        test="engine/test_zero.py::test_float32_is_plain_pytorch[2 ranks-stage 3]",
    ),
    Fault(
        subject="Muon's momentum",
        description="it decays twice as fast",
        file="runtime/engine/muon.py",
        function="next_direction",
        old="1 - MOMENTUM",
        new="1 - MOMENTUM**2",
        test="engine/test_muon.py::test_muon_is_pytorchs[2 ranks-muon]",
    ),
    Fault(
        subject="Muon, Nesterov",
        description="the update is the momentum alone",
        file="runtime/engine/muon.py",
        function="next_direction",
        old="clipped.lerp(momentum, MOMENTUM)",
        new="momentum",
        test="engine/test_muon.py::test_muon_is_pytorchs[2 ranks-muon]",
    ),
    Fault(
        subject="Muon, scale",
        description="tall matrices get the learning rate of square ones",
        file="runtime/engine/muon.py",
        function="Muon.step",
        old="max(1, batch.rows / batch.columns) ** 0.5",
        new="1",
        test="engine/test_muon.py::test_muon_is_pytorchs[2 ranks-muon]",
    ),
    Fault(
        subject="Muon, borders",
        description="a rank takes the first rows of a matrix that it shares, whichever are its own",
        file="runtime/engine/muon.py",
        function="Muon.step",
        old="update[first - batch.start : end - batch.start]",
        new="update[: end - first]",
        test="engine/test_muon.py::test_muon_is_pytorchs[2 ranks-muon]",
    ),
    Fault(
        subject="Muon, skipped step",
        description="a skipped step decays the weights",
        file="runtime/engine/muon.py",
        function="Muon.step",
        old='lr * shard.options["weight_decay"]',
        new='shard.options["lr"] * shard.options["weight_decay"]',
        test="engine/test_muon.py::test_muon_is_pytorchs[2 ranks-nan]",
    ),
    Fault(
        subject="offload",
        description="each piece is stepped with the first one's gradients",
        file="runtime/engine/offload.py",
        function="step_pieces",
        old="host_grads[i]",
        new="host_grads[0][: len(masters[i])]",
        test="engine/test_zero.py::test_offload_in_pieces_gives_the_same_weights[2 ranks]",
    ),
    Fault(
        subject="accumulation",
        description="each micro-step's gradients replace the sum of those before",
        file="runtime/engine/grad_sink.py",
        function="GradSink.add",
        old="self.total.add_(grad)",
        new="self.total.copy_(grad)",
        test="test_run.py::test_golden_losses",
    ),
    Fault(
        subject="ZeRO-3, blocks",
        description="a block's gradients are summed over the ranks, not averaged",
        file="runtime/engine/zero3_blocks.py",
        function="Zero3Blocks.reduce",
        old="1 / self.world_size",
        new="1",
        test="engine/test_zero.py::test_float32_is_plain_pytorch[2 ranks-stage 3]",
    ),
    Fault(
        subject="clipping",
        description="each rank clips by the norm of its own share of the gradients",
        file="runtime/engine/reduce.py",
        function="global_norm",
        old="dist.all_reduce(squared, group=group)",
        new="pass",
        test="test_run.py::test_one_and_two_ranks_give_the_same_losses",
    ),
    Fault(
        subject="loss scale",
        description="the gradients keep the loss scale",
        file="runtime/engine/clip.py",
        function="Clip.factor",
        old="(self.max_norm / (self.norm + 1e-6)).clamp(max=1) * self.inverse_scale",
        new="(self.max_norm / (self.norm + 1e-6)).clamp(max=1)",
        test=(
            "engine/test_zero.py::test_float16_is_plain_pytorch_while_the_loss_scale_grows[2 "
            "ranks-stage 2-scales0-applied0]"
        ),
    ),
    Fault(
        subject="loss scale, DeepSpeed's step",
        description="the scale of a step with fewer micro-steps than planned becomes the next one",
        file="runtime/engine/layout.py",
        function="Layout.step_of_deepspeed",
        old="scaler.cur_scale = scale",
        new="pass",
        test=(
            "engine/test_zero.py::test_float16_is_plain_pytorch_while_the_loss_scale_grows[2 "
            "ranks-own fewer inf-scales7-applied7]"
        ),
    ),
    Fault(
        subject="loss scale, small micro-batches",
        description="the kernels' float16 has the scale of the planned micro-batches",
        file="runtime/engine/engine.py",
        function="Engine.follow_micro_batch",
        old="tokens != self.scaled_tokens",
        new="False",
        test=(
            "engine/test_zero.py::test_kernels_of_our_own_train_as_plain_pytorch[2 ranks-stage 2 "
            "local]"
        ),
    ),
    Fault(
        subject="loss scale, re-shard",
        description="a resume at another ZeRO stage starts with the JSON's loss scale",
        file="runtime/engine/layout.py",
        function="Layout.restore_scale",
        old="setattr(scaler, name, getattr(saved, name))",
        new="pass",
        test=(
            "checkpoint/test_resume.py::"
            "test_a_resume_in_float16_continues_with_the_loss_scale_and_this_runs_json"
        ),
    ),
    Fault(
        subject="optimizers",
        description="another optimizer than AdamW trains as AdamW",
        file="runtime/engine/any_optimizer.py",
        function="is_adamw",
        old="kind is not torch.optim.AdamW and not is_cpu_adam",
        new="kind is None",
        test="engine/test_any_optimizer.py::test_losses_are_plain_pytorchs[2-SGD]",
    ),
    Fault(
        subject="optimizers, clipping",
        description="the gradients of other optimizers are not clipped",
        file="runtime/engine/any_optimizer.py",
        function="step_by_itself",
        old="clip.factor()",
        new="clip.inverse_scale",
        test="engine/test_any_optimizer.py::test_losses_are_plain_pytorchs[2-SGD]",
    ),
    Fault(
        subject="Muon's matrices",
        description="a block with more matrices than the others loses them",
        file="runtime/engine/muon.py",
        function="split_matrices",
        old="itertools.zip_longest(*share)",
        new="zip(*share)",
        test=(
            "engine/test_edited_model.py::"
            "test_muon_trains_the_same_matrices_on_any_number_of_ranks[a matrix in every "
            "second block]"
        ),
    ),
    Fault(
        subject="Muon's groups",
        description="the matrices of a second parameter group get the options of the first",
        file="runtime/engine/muon.py",
        function="split_matrices",
        old="muons.append({**group, **own})",
        new="muons.append({**groups[0], **own})",
        test="engine/test_muon.py::test_groups_of_a_user_keep_their_options[2 ranks]",
    ),
    Fault(
        subject="numbers of a group",
        description="a resume gives a parameter the numbers of the tag's group at its place",
        file="runtime/engine/state.py",
        function="init_state",
        old="reader.group_state_of(names)",
        new="reader.group_states[min(shard.group_index, len(reader.group_states) - 1)]",
        test="engine/test_any_optimizer.py::test_numbers_follow_their_parameters_into_other_groups[2]",
    ),
    Fault(
        subject="micro-steps",
        description="ranks with different numbers of micro-steps are not noticed",
        file="runtime/engine/engine.py",
        function="Engine.check_ranks",
        old="any(other != ranks[0] for other in ranks)",
        new="not ranks",
        test=(
            "engine/test_edited_script.py::test_ranks_make_the_same_number_of_micro_steps["
            "one less on rank 1]"
        ),
    ),
    Fault(
        subject="any graph, ZeRO-2",
        description="a bucket's gradients that a rank doesn't have keep what was in the buffer",
        file="runtime/engine/reduce.py",
        function="BucketedAllReduce.launch_bucket",
        old="place.param not in self.filled",
        new="False",
        test="engine/test_any_graph.py::test_training_is_plain_pytorchs[experts-2-ZeRO-2]",
    ),
    Fault(
        subject="any graph, ZeRO-2, order",
        description="buckets are filled in the order in which gradients come",
        file="runtime/engine/reduce.py",
        function="BucketedAllReduce.on_grad_ready",
        old=(
            "if i > self.current:\n"
            "    early = self.early.get(param)\n"
            "    self.early[param] = grad if early is None else early + grad\n"
            "    return"
        ),
        new=(
            "self.offset_of[param] = sum(p.numel() for p in self.filled)\n"
            "if False:\n"
            "    early = self.early.get(param)\n"
            "    self.early[param] = grad if early is None else early + grad\n"
            "    return"
        ),
        test=(
            "engine/test_any_graph.py::test_training_is_plain_pytorchs[a block skipped per "
            "rank-2-ZeRO-2]"
        ),
    ),
    Fault(
        subject="any graph, ZeRO-2, parts",
        description="of a gradient that comes early in parts, the last part alone is kept",
        file="runtime/engine/reduce.py",
        function="BucketedAllReduce.on_grad_ready",
        old="grad if early is None else early + grad",
        new="grad",
        test="engine/test_reduce.py::test_gradients_that_come_early_in_two_parts_are_added",
        quick=True,
    ),
    Fault(
        subject="loop, weights",
        description="what a training loop does to the weights is overwritten without a word",
        file="runtime/engine/untouched.py",
        function="Untouched.check",
        old="param._version != version",
        new="False",
        test=(
            "engine/test_edited_loop.py::test_a_loop_that_changes_parameters_is_refused[clamped-2]"
        ),
    ),
    Fault(
        subject="loop, frozen",
        description="a parameter that a training loop has frozen still gets steps",
        file="runtime/engine/untouched.py",
        function="Untouched.check",
        old="param.requires_grad != was_trained",
        new="False",
        test="engine/test_edited_loop.py::test_a_loop_that_changes_parameters_is_refused[frozen-2]",
    ),
    Fault(
        subject="optimizers, attributes",
        description="an optimizer finds nothing of what the user has set on parameters",
        file="runtime/engine/any_optimizer.py",
        function="check_elementwise",
        old="check_attributes(name, matrix.read | whole.read, params)",
        new="pass",
        test=(
            "engine/test_any_optimizer.py::"
            "test_what_zero_cannot_give_an_optimizer_is_refused[ReadsAttribute-reads "
            "lr_scale of the parameters]"
        ),
        quick=True,
    ),
    Fault(
        subject="any graph, no backward",
        description=(
            "a block without a backward keeps the gradients of the one after it from being reduced"
        ),
        file="runtime/engine/zero3_blocks.py",
        function="Zero3Blocks.go_back_to",
        old=("while self.in_backward > i:\n    self.in_backward -= 1\n    self.begin_backward(self.in_backward)"),
        new=("if self.in_backward > i:\n    self.in_backward = i\n    self.begin_backward(self.in_backward)"),
        test=(
            "engine/test_any_graph.py::test_training_is_plain_pytorchs[a block without "
            "gradients-2-ZeRO-3]"
        ),
    ),
    Fault(
        subject="any graph, a forward alone",
        description="after a forward without a backward, blocks run with the weights of others",
        file="runtime/engine/zero3_blocks.py",
        function="Zero3Blocks.begin_forward",
        old="self.holds_first = not self.matrices",
        new="pass",
        test=(
            "engine/test_any_graph.py::test_training_is_plain_pytorchs[a block without "
            "gradients-2-ZeRO-3, peeking]"
        ),
    ),
    Fault(
        subject="any graph, ZeRO-3",
        description="blocks are gathered one by one whatever GPT.forward does",
        file="runtime/engine/zero3_blocks.py",
        function="blocks_to_gather",
        old="why_not_our_forward(model)",
        new="None",
        test="engine/test_any_graph.py::test_training_is_plain_pytorchs[blocks twice-2-ZeRO-3]",
    ),
    Fault(
        subject="any graph, ZeRO-3, experts",
        description="the gradient of an expert without tokens is that of another block",
        file="runtime/engine/grad_sink.py",
        function="GradSink.finish_backward",
        old="self.total.zero_()",
        new="pass",
        test=(
            "engine/test_any_graph.py::test_training_is_plain_pytorchs[experts without an "
            "auxiliary loss-2-ZeRO-3]"
        ),
    ),
    Fault(
        subject="any graph, DeepSpeed's path",
        description="the gradients of the last step stay in those of the next one",
        file="runtime/engine/layout.py",
        function="ExactStage3.step",
        old="self.grad_partitions_flat_buffer.zero_()",
        new="pass",
        test=(
            "engine/test_any_graph.py::test_training_is_plain_pytorchs[a random block "
            "skipped-2-ZeRO-3, DeepSpeed's]"
        ),
    ),
    Fault(
        subject="buffers, resume",
        description="persistent buffers start anew",
        file="runtime/engine/state.py",
        function="copy_into",
        old="reader.copy_buffers(layout.module)",
        new="pass",
        test="checkpoint/test_edited_tags.py::test_a_run_goes_on[running statistics-2]",
    ),
    Fault(
        subject="CUDA graph",
        description="it is captured whatever the model is",
        file="runtime/engine/fast_paths.py",
        function="decide_graph",
        old="facts.varies",
        new="False",
        test=(
            "kernels/test_kernels.py::"
            "test_a_cuda_graph_needs_a_model_whose_micro_steps_are_all_the_same"
        ),
        quick=True,
    ),
    Fault(
        subject="CUDA graph, guards",
        description="a graph keeps the attributes that it was captured with",
        file="runtime/engine/forward_backward.py",
        function="ForwardBackward.check",
        old="changed = self.guards.changed()",
        new="changed = None",
        test="engine/test_guards.py::test_a_changed_attribute_drops_the_graph_with_one_note",
    ),
    Fault(
        subject="CUDA graph, metrics",
        description="a metric stays that of the last evaluation",
        file="runtime/engine/forward_backward.py",
        function="ForwardBackward.__call__",
        old="owner[name] = tensor",
        new="pass",
        test="engine/test_guards.py::test_a_changed_attribute_drops_the_graph_with_one_note",
    ),
    Fault(
        subject="loss mask",
        description="a step takes the mean of its micro-steps' means, however few tokens count in one of them",
        file="runtime/engine/forward_backward.py",
        function="loss_of_targets",
        old="model(x, targets) * (count * weight)",
        new="model(x, targets)",
        test="data/test_conversations.py::test_a_step_is_the_mean_over_all_counted_tokens[2-2-3-2]",
    ),
    Fault(
        subject="loss mask, auxiliary loss",
        description="it counts once per micro-batch, and the others once per target",
        file="runtime/engine/forward_backward.py",
        function="loss_of_targets",
        old="model(x, targets) * (count * weight)",
        new='model(x, targets, "sum") * weight',
        test="data/test_conversations.py::test_an_auxiliary_loss_counts_as_often_as_its_micro_batch_has_targets[2-2-3-2]",
    ),
    Fault(
        subject="loss mask, no target",
        description="a micro-batch without a target makes the gradients not a number",
        file="runtime/engine/forward_backward.py",
        function="loss_of_targets",
        old="torch.where(count > 0, y, y.clamp(min=0))",
        new="y",
        test="data/test_conversations.py::test_a_micro_batch_without_targets_counts_nothing",
        quick=True,
    ),
    Fault(
        subject="optimizers, DeepSpeed's warning",
        description="it says to proceed with caution",
        file="runtime/engine/setup.py",
        function="without_warning",
        old="logger.addFilter(is_other)",
        new="pass",
        test="engine/test_any_optimizer.py::test_other_warnings_of_deepspeed_are_kept",
        quick=True,
    ),
    Fault(
        subject="JSON checks",
        description="a ZeRO stage of true or 2.0 is accepted",
        file="runtime/engine/ds_config.py",
        function="keeps_rule",
        old="json.dumps(value) in map(json.dumps, rule)",
        new="value in rule",
        test="test_configurator.py::test_jsons_are_refused",
        quick=True,
    ),
    Fault(
        subject="ZeRO-3, prefetch",
        description="the fast path is taken although a prefetch key of the JSON has another value",
        file="runtime/engine/ds_config.py",
        function="takes_our_gradients",
        old="zero.get(key, value) == value",
        new="zero.get(key, value) >= 0",
        test="test_configurator.py::test_another_prefetch_needs_deepspeeds_own_stage_3",
        quick=True,
    ),
    Fault(
        subject="loss scale, hysteresis",
        description="a resume forgives as many overflows as a fresh run",
        file="runtime/engine/layout.py",
        function=MODULE,
        old='"cur_hysteresis"',
        new='"cur_iter"',
        test=(
            "checkpoint/test_resume.py::"
            "test_a_resume_knows_that_float16_has_forgiven_an_overflow[3]"
        ),
    ),
    Fault(
        subject="evaluation, float16 copies",
        description="an evaluation takes attention's weights of the step before",
        file="runtime/engine/engine.py",
        function="Engine.evaluate",
        old="self.fused.copy_weights()",
        new="pass",
        test=(
            "engine/test_zero.py::"
            "test_every_way_takes_its_path_and_computes_what_its_weights_say[2 ranks-kernels-"
            "stage 2 local]"
        ),
    ),
    Fault(
        subject="figures, gradient norm",
        description="a norm is reported after clipping",
        file="runtime/engine/step.py",
        function="OurStep.step",
        old="Report(norm_on_cpu.item(), applied)",
        new="Report(min(norm_on_cpu.item(), layout.max_norm), applied)",
        test="test_plain.py::test_three_parts_are_one_run_of_plain_pytorch",
    ),
    Fault(
        subject="rates of groups",
        description="a learning rate that a parameter group has of its own is overwritten",
        file="runtime/engine/any_optimizer.py",
        function="keep_rates_of_groups",
        old='group["lr_ratio"] = own_ratio * group.get("lr_ratio", 1)',
        new="pass",
        test="engine/test_any_optimizer.py::test_a_group_keeps_its_own_learning_rate[AdamW]",
    ),
    Fault(
        subject="compact weights, ties",
        description="a tie is rounded to zero, so its remainder has another sign",
        file="runtime/engine/compact.py",
        function="split_weight",
        old="bits + 0x8000",
        new="bits + 0x7FFF",
        test="engine/test_compact.py::test_a_weight_is_its_bfloat16_and_its_remainder",
    ),
    Fault(
        subject="compact first moment, small",
        description="what is too small for a code is always rounded up",
        file="runtime/engine/compact.py",
        function="encode",
        old="values.abs() > limit * smallest",
        new="magnitudes > 0",
        test="engine/test_compact.py::test_the_noise_has_no_bias",
    ),
    Fault(
        subject="compact second moment, small",
        description="what is too small for a code becomes zero",
        file="runtime/engine/compact.py",
        function="encode",
        old="magnitudes > 0",
        new="magnitudes < 0",
        test="engine/test_compact.py::test_8_bits_are_those_of_float64[4]",
    ),
    Fault(
        subject="compact moments, scale",
        description="a block whose largest is a power of two has the scale of half of it",
        file="runtime/engine/compact.py",
        function="encode",
        old="padded.view(n_blocks, BLOCK).amax(dim=1) >> mantissa",
        new="padded.view(n_blocks, BLOCK).amax(dim=1) - 1 >> mantissa",
        test="engine/test_compact.py::test_8_bits_are_those_of_float64[3]",
    ),
    Fault(
        subject="compact momentum of Muon",
        description="it is rounded down",
        file="runtime/engine/compact.py",
        function="round_to_bfloat16",
        old="low_bits(noise, 16)",
        new="0",
        test="engine/test_compact.py::test_the_noise_has_no_bias",
    ),
    Fault(
        subject="compact state, skipped steps",
        description="a step without a finite norm is made",
        file="runtime/engine/compact_adamw.py",
        function="step_by_pytorch",
        old="clip.applies()",
        new="True",
        test="engine/test_compact.py::test_a_skipped_step_changes_nothing_but_the_gradients[nan-nan]",
    ),
    Fault(
        subject="compact state, chunks",
        description="each chunk has the noise of the first one",
        file="runtime/engine/compact_adamw.py",
        function="step_chunk",
        old="noise_of(seed, start, grads.numel())",
        new="noise_of(seed, 0, grads.numel())",
        test="engine/test_compact.py::test_chunks_give_the_same_bits",
    ),
    Fault(
        subject="compact kernel",
        description="it rounds both moments with the same noise",
        file="runtime/engine/compact_adamw.py",
        function="compact_adamw_kernel",
        old="mixed(noise + 0x3C6EF35F)",
        new="noise",
        test="engine/test_compact.py::test_the_kernel_stores_the_same_bits[0.5]",
    ),
    Fault(
        subject="compact state, memory",
        description="views in DeepSpeed keep the fp32 weights in memory",
        file="runtime/engine/layout.py",
        function="Zero2Layout.make_compact",
        old="del param._hp_mapping",
        new="pass",
        test="engine/test_compact_runs.py::test_nothing_but_the_gradients_is_in_float32",
    ),
    Fault(
        subject="compact state, other ranks",
        description="a piece of a parameter is taken from its beginning",
        file="runtime/engine/state.py",
        function="copy_compact",
        old="piece.start + first - piece.offset",
        new="first - piece.offset",
        test="engine/test_compact_runs.py::test_other_ranks_take_all_digits[adamw-1-3]",
    ),
    Fault(
        subject="length ramp, graph",
        description="a CUDA graph stays when the shape of micro-steps changes",
        file="runtime/engine/forward_backward.py",
        function="ForwardBackward.follow_shapes",
        old="shapes != self.shapes",
        new="not self.shapes",
        test="engine/test_guards.py::test_each_length_has_a_graph_of_its_own",
        quick=True,
    ),
    Fault(
        subject="loop, gradients",
        description="a training loop finds no gradients, and goes on",
        file="runtime/engine/hidden_grads.py",
        function="HiddenGrads.micro_step",
        old="param.grad = self.stand_in(param)",
        new="pass",
        test=(
            "engine/test_edited_loop.py::"
            "test_a_loop_that_changes_gradients_or_parts_is_refused[clipped-zero2]"
        ),
    ),
    Fault(
        subject="loop, own backward",
        description="a backward of the loop's own is added to the step",
        file="runtime/engine/hidden_grads.py",
        function="HiddenGrads.check_turn",
        old="not self.in_micro_step",
        new="False",
        test="engine/test_edited_loop.py::test_a_backward_before_the_first_micro_step_is_refused[2]",
    ),
    Fault(
        subject="loop, late change of weights",
        description="weights are compared with the optimizer's in the first steps alone",
        file="runtime/engine/untouched.py",
        function="sample_differs",
        old="return found",
        new="return []",
        test="engine/test_edited_loop.py::test_a_late_change_of_data_is_found_in_a_sample",
    ),
    Fault(
        subject="loop, parts",
        description="blocks that come while training aren't trained",
        file="runtime/engine/untouched.py",
        function="Untouched.check_parts",
        old="not any(map(differ, self.parts, self.held))",
        new="True",
        test=(
            "engine/test_edited_loop.py::"
            "test_a_loop_that_changes_gradients_or_parts_is_refused[a new block-zero2]"
        ),
    ),
    Fault(
        subject="loop, other tensors",
        description="param.data is another tensor than the one that ZeRO steps",
        file="runtime/engine/untouched.py",
        function="Untouched.check",
        old="self.keeps_places and is_moved",
        new="False",
        test=(
            "engine/test_edited_loop.py::"
            "test_a_loop_that_sets_other_tensors_as_weights_is_refused[model.half().float()]"
        ),
    ),
    Fault(
        subject="loss, compiled model",
        description="torch.compile(model) traces the loss, whose gradients are zero then",
        file="runtime/loss.py",
        function="chunked_loss",
        old="torch.compiler.is_compiling()",
        new="False",
        test=(
            "test_loss.py::"
            "test_a_model_that_is_compiled_as_a_whole_has_the_same_gradients[LMHead]"
        ),
    ),
]
