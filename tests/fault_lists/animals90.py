"""Planted faults in examples/animals90."""

from fault_places import MODULE, Fault

FAULTS = [
    Fault(
        subject="animals90, code in a checkpoint",
        description="a file of a checkpoint is unpickled with whatever it names",
        file="examples/animals90/src/resuming.py",
        function="read_states",
        old="weights_only=True",
        new="weights_only=False",
        test=(
            "hostile/test_hostile.py::test_a_hostile_file_does_no_harm[resume on pictures "
            "without a check-animals/best_model/best/mp_rank_00_model_states.pt-a pickle in "
            "torch's zip format]"
        ),
    ),
    Fault(
        subject="animals90, ranks",
        description="each rank ends with its own batch norm statistics",
        file="examples/animals90/src/train_deepspeed.py",
        function=MODULE,
        old='"running" in name',
        new='"none" in name',
        test=(
            "examples/animals90/tests/test_training.py::test_all_ranks_end_with_the_same_statistics"
        ),
    ),
    Fault(
        subject="animals90, recomputing",
        description="recomputed activations move the statistics twice",
        file="examples/animals90/src/model.py",
        function="BatchNorm.forward",
        old="0.0 if recomputing else self.momentum",
        new="self.momentum",
        test=(
            "examples/animals90/tests/test_network.py::"
            "test_recomputed_activations_move_the_statistics_once"
        ),
    ),
    Fault(
        subject="animals90, skipped steps",
        description="a skipped step counts in the schedule",
        file="examples/animals90/src/train_deepspeed.py",
        function="run_epoch",
        old="engine.was_step_applied()",
        new="1",
        test=(
            "examples/animals90/tests/test_training.py::"
            "test_a_skipped_step_is_none_of_the_schedule_and_statistics_stay_float32"
        ),
    ),
    Fault(
        subject="animals90, Adam",
        description="Adam decays the weights as AdamW does",
        file="examples/animals90/src/train_deepspeed.py",
        function="read_recipe",
        old='optimizer.get("type") == "Adam"',
        new="False",
        test=(
            "examples/animals90/tests/test_training.py::"
            "test_the_json_says_which_adam_and_whether_there_is_a_warmup"
        ),
    ),
    Fault(
        subject="animals90, steps",
        description="an epoch ends in the middle of a step",
        file="examples/animals90/src/data.py",
        function="Pictures.__init__",
        old="settings.batch_size * ranks.world_size * accumulation",
        new="settings.batch_size * ranks.world_size",
        test=(
            "examples/animals90/tests/test_pictures.py::"
            "test_each_picture_is_there_once_and_all_ranks_have_as_many_batches"
        ),
    ),
    Fault(
        subject="animals90, last batch",
        description="the last batch of an epoch is missing",
        file="examples/animals90/src/data.py",
        function="Pictures.batches",
        old="self.batches_per_epoch * stride",
        new="self.batches_per_epoch * stride - size",
        test=(
            "examples/animals90/tests/test_pictures.py::"
            "test_each_picture_is_there_once_and_all_ranks_have_as_many_batches"
        ),
    ),
    Fault(
        subject="animals90, half precision",
        description="the statistics are rounded to bfloat16",
        file="examples/animals90/src/model.py",
        function="BatchNorm._apply",
        old="t.to(fn(t).device)",
        new="fn(t)",
        test=(
            "examples/animals90/tests/test_network.py::"
            "test_statistics_stay_in_float32_in_half_precision"
        ),
    ),
    Fault(
        subject="animals90, other ranks",
        description="Adam's moments of another number of ranks are read from the wrong places",
        file="examples/animals90/src/train_deepspeed.py",
        function=MODULE,
        old='state["saved_by"] != new["saved_by"]',
        new="False",
        test=(
            "examples/animals90/tests/test_resuming.py::"
            "test_another_number_of_ranks_takes_the_weights_of_the_newest_epoch"
        ),
    ),
    Fault(
        subject="animals90, NaN",
        description="a loss that is not finite makes its files no JSON",
        file="examples/animals90/src/records.py",
        function="json_text",
        old="json.dumps(without_nan(value), indent=1, allow_nan=False)",
        new="json.dumps(value, indent=1)",
        test="examples/animals90/tests/test_training.py::test_a_loss_that_is_not_finite_is_null_in_the_files",
    ),
]
