"""Everything that touches DeepSpeed's objects. These attributes of DeepSpeed 0.19.8 are replaced, all by override():

    attribute                                     in               why                               test
    process_gradients                             zero2_gradients  one pass per gradient, not four   test_zero
    reduce_ipg_grads                              zero2_gradients  one reduction per step or bucket  test_zero
    overlap_comm                                  zero2_gradients  it would wait for the GPU         test_gpu_zero
    _use_compact_grad_partition_buffer            zero2_gradients  it is False for float32 weights   test_zero
    independent_gradient_partition_epilogue       zero3_blocks     reduces by block                  test_zero
    step                                          fused_adamw      clipping and AdamW in one pass    test_zero
    param_buffer_of_bit16_for_cpu_offload_groups  fused_adamw      pinned memory of its own step     test_zero
    temp_grad_buffer_for_gpu_offload              fused_adamw      GPU memory of its own step        test_gpu_zero
    save                                          engine           the saver writes the files        test_checkpoints
    _copy_recovery_script                         engine           a full disk must not end the save test_save_failures
    _get_param_fragment_func                      engine           doesn't copy frozen weights       test_lora

The first eight are the optimizer's, the others the engine's and its checkpoint engine's. zero3_blocks.py also removes
stage 3's hooks. tests/engine/test_overrides.py compares the table with the calls."""


def override(owner, **attributes):
    """Replace attributes of one of DeepSpeed's objects. Each of them is in the table above."""
    for name, value in attributes.items():
        setattr(owner, name, value)
