"""Planted faults in whether our kernels and CUDA graphs fit a model."""

from fault_places import Fault

FAULTS = [
    Fault(
        subject="attention's precision",
        description="a bfloat16 model's attention is in bfloat16",
        file="runtime/kernels/fused.py",
        function="FusedBlock.fused_attn_and_mlp",
        old="torch.float16 if residual.dtype == torch.bfloat16 else residual.dtype",
        new="residual.dtype",
        test=(
            "kernels/test_kernels.py::test_attention_in_a_bfloat16_model_is_as_exact_as_float16[2]"
        ),
    ),
    Fault(
        subject="CUDA graph, proof",
        description="an `if` on a tensor counts as fixed",
        file="runtime/kernels/steady_expressions.py",
        function="Expressions.truth",
        old="value is DATA",
        new="False",
        test="kernels/test_steady.py::test_not_steady[a loss that is large]",
        quick=True,
    ),
    Fault(
        subject="CUDA graph, counters",
        description="a list that a forward appends to counts as fixed",
        file="runtime/kernels/steady_values.py",
        function="Items.add",
        old="not self.is_own",
        new="False",
        test="kernels/test_steady.py::test_not_steady[a counter in a list]",
        quick=True,
    ),
    Fault(
        subject="CUDA graph, random numbers",
        description="numbers drawn on the CPU count as fixed",
        file="runtime/kernels/steady_calls.py",
        function="Calls.call_torch",
        old='name in names.NEED_DEVICE and "device" not in named',
        new="False",
        test="kernels/test_steady.py::test_not_steady[stochastic depth on the CPU]",
        quick=True,
    ),
    Fault(
        subject="kernels, classes",
        description="the kernels run an attention class that was swapped",
        file="runtime/kernels/fit.py",
        function="why_not_part",
        old="edits.why_not_module(part, kind)",
        new="None",
        test=(
            "kernels/test_fused_fit.py::test_an_edited_model_trains_and_decodes_as_edited["
            "another attention class in one block]"
        ),
    ),
    Fault(
        subject="kernels, layer norms",
        description="the kernels compute another eps than the layer norm's",
        file="runtime/kernels/fit.py",
        function="why_not_known",
        old="block.get_submodule(name).eps != EPS",
        new="False",
        test=(
            "kernels/test_fused_fit.py::test_an_edited_model_trains_and_decodes_as_edited["
            "another eps]"
        ),
    ),
    Fault(
        subject="kernels, hooks",
        description="the kernels run a block with a hook on its MLP, which they don't call",
        file="runtime/kernels/fit.py",
        function="why_not_part",
        old="edits.has_hooks(part)",
        new="False",
        test=(
            "kernels/test_fused_fit.py::test_an_edited_model_trains_and_decodes_as_edited[a "
            "hook on mlp]"
        ),
    ),
    Fault(
        subject="kernels, hooks of blocks",
        description="a hook on a block gets the parts of a sum",
        file="runtime/kernels/fit.py",
        function="why_not_chained",
        old="any(edits.has_hooks(block) for block in blocks_of(model))",
        new="False",
        test=(
            "kernels/test_fused_fit.py::test_an_edited_model_trains_and_decodes_as_edited[a "
            "hook on a block]"
        ),
    ),
    Fault(
        subject="kernels, GPT.forward",
        description="blocks pass the parts of a sum to each other in any GPT.forward",
        file="runtime/kernels/fit.py",
        function="why_not_chained",
        old="edits.why_not_our_forward(model)",
        new="None",
        test=(
            "kernels/test_fused_fit.py::test_an_edited_model_trains_and_decodes_as_edited[a "
            "skip connection]"
        ),
    ),
    Fault(
        subject="kernels, wrappers",
        description="a method in a wrapper counts as the wrapped one",
        file="runtime/source_hash.py",
        function="function_hash",
        old='hasattr(function, "__wrapped__")',
        new="False",
        test=(
            "kernels/test_fused_fit.py::test_an_edited_model_trains_and_decodes_as_edited[a "
            "method in a wrapper]"
        ),
    ),
    Fault(
        subject="kernels, closed blocks",
        description="the bias that a closed block adds at its end gets no gradient",
        file="runtime/kernels/fused.py",
        function="FusedBlock.closed",
        old="self.fused_attn_and_mlp(x, out_bias=bias)",
        new="self.fused_attn_and_mlp(x)",
        test=(
            "kernels/test_fused_fit.py::test_an_edited_model_trains_and_decodes_as_edited[an "
            "auxiliary loss]"
        ),
    ),
    Fault(
        subject="kernels, memory order",
        description="a closed block reads an input as if it were contiguous",
        file="runtime/kernels/fused.py",
        function="FusedBlock.fused_attn_and_mlp",
        old="residual = residual.contiguous()",
        new="pass",
        test=(
            "kernels/test_fused_fit.py::test_an_edited_model_trains_and_decodes_as_edited[a "
            "residual in another order of memory]"
        ),
    ),
    Fault(
        subject="decoding kernels",
        description="they decode a model whose head caps its logits",
        file="runtime/kernels/fit.py",
        function="why_not_decoded",
        old='edits.why_not_module(model.lm_head, "LMHead")',
        new="None",
        test=(
            "kernels/test_fused_fit.py::test_an_edited_model_trains_and_decodes_as_edited[a "
            "head that changes logits]"
        ),
    ),
    Fault(
        subject="decoding kernels, keys",
        description="the last keys that don't fill a share of each program are not looked at",
        file="runtime/kernels/decode.py",
        function="decode_attention",
        old="tl.cdiv(at, NUM_KV_SPLITS)",
        new="at // NUM_KV_SPLITS",
        test=(
            "kernels/test_kernels.py::"
            "test_one_more_token_by_our_kernels_gives_the_logits_of_the_whole[1-32-16-prompts1]"
        ),
    ),
]
