"""Training with DeepSpeed's ZeRO.

    engine.py       Engine: micro_step, step, evaluate, checkpoint_files, load
    setup.py        the device, compiled blocks, the optimizer, DeepSpeed's engine
    fast_paths.py   which fast paths a run takes, and why
    forward_backward.py  forward and backward of a micro-step, also as a CUDA graph, with guards.py
    layout.py       DeepSpeed's internals that are read or replaced, with their table
    grad_sink.py    where a kernel or a hook puts a gradient
    reduce.py       ZeRO-2: from gradients to shards
    zero3_blocks.py ZeRO-3: the same, and how weights are gathered
    step.py         norm, clipping, and a stepper for each kind of parameter group:
                    adamw.py, compact_adamw.py, muon.py, offload.py, any_optimizer.py
    compact.py      formats of weights and moments that take 6 bytes instead of 14
    state.py        copies a checkpoint into a Layout

They pass a Shard (shard.py), and a Clip (clip.py) for the scale of a step. Small parts:
lockstep.py, untouched.py and hidden_grads.py watch the training loop, local_timer.py measures a
rank's own work, ds_config.py reads DeepSpeed's JSON, and fixes.py repairs what the installed
DeepSpeed does wrong.
"""
