"""Planted faults in settings, the plan, checks, reports and the installation."""

from fault_places import MODULE, Fault

FAULTS = [
    Fault(
        subject="tokenizer",
        description="a resume accepts another tokenizer with as many tokens",
        file="runtime/plan/compare.py",
        function="check_compatible",
        old="""\
if data and not same_tokenizer(data, state["data"]):
    raise CheckpointError(
        f"dataset={settings.dataset} has another tokenizer than {where}: {fix}"
    )""",
        new="""\
if False and not same_tokenizer(data, state["data"]):
    raise CheckpointError(
        f"dataset={settings.dataset} has another tokenizer than {where}: {fix}"
    )""",
        test="checkpoint/test_resume.py::test_a_resume_with_another_seed_or_tokenizer_is_refused",
    ),
    Fault(
        subject="stragglers, again",
        description="a straggler that had caught up isn't reported again",
        file="runtime/monitor/health.py",
        function="StragglerDetector.check",
        old=(
            "if own <= max(SLOW_FACTOR * others, others + SLOW_S):\n"
            "    self.reported = None\n"
            "    return None"
        ),
        new="if own <= max(SLOW_FACTOR * others, others + SLOW_S):\n    return None",
        test=(
            "monitor/test_health.py::test_a_straggler_is_reported_once_until_it_has_caught_up"
        ),
        quick=True,
    ),
    Fault(
        subject="batch ramp, figures",
        description="tokens/s are those of the planned number of micro-steps",
        file="runtime/monitor/runlog.py",
        function="RunLog.step",
        old="sequences * self.settings.block_size",
        new=(
            "steps * self.settings.batch_size * self.settings.gradient_accumulation_steps * "
            "self.settings.block_size"
        ),
        test="engine/test_edited_script.py::test_figures_of_several_steps_are_of_their_sequences",
    ),
    Fault(
        subject="shape, unread",
        description="a setting that nothing reads is accepted",
        file="runtime/plan/run_plan.py",
        function="make_plan",
        old="unread_settings(s)",
        new="()",
        test="checkpoint/test_edited_tags.py::test_a_setting_that_nothing_reads_is_refused",
    ),
    Fault(
        subject="LoRA, no rank",
        description="lora_target_modules without a rank is ignored",
        file="runtime/plan/rules.py",
        function=MODULE,
        old='"lora_target_modules" in s.changed',
        new="False",
        test=(
            "plan/test_refusals.py::test_what_cannot_be_meant[--"
            "lora_target_modules=attn.c_attn-lora_target_modules=attn.c_attn needs LoRA: add "
            "--lora_rank=64, or drop it]"
        ),
        quick=True,
    ),
    Fault(
        subject="other scripts' options",
        description="they get no hint",
        file="configurator.py",
        function="fix_of_name",
        old="ours = instead_of(name, value)",
        new="ours = None",
        test=(
            "test_guides.py::test_an_option_of_other_scripts_is_refused_with_ours[--fp16-"
            "write --dtype=float16]"
        ),
        quick=True,
    ),
    Fault(
        subject="paths",
        description="~ and variables in settings are taken as they are",
        file="configurator.py",
        function="Assignments.assign",
        old="value = expand_setting(value)",
        new="pass",
        test="test_configurator.py::test_paths_in_a_config_and_in_a_mixture",
        quick=True,
    ),
    Fault(
        subject="wandb, going back",
        description="wandb continues the run whose later steps were discarded",
        file="runtime/monitor/loggers.py",
        function="Loggers.start_wandb",
        old="self.wandb_id = None",
        new="pass",
        test="test_run.py::test_wandb_after_going_back_is_a_new_run_that_drops_nothing",
    ),
    Fault(
        subject="loss mask, a model.py of others",
        description="whether its loss leaves out targets that don't count isn't checked",
        file="runtime/check/short.py",
        function="check_before_training",
        old="masked and isinstance(model, Adapter)",
        new="False",
        test=(
            "test_bring.py::test_data_with_a_loss_mask_needs_a_mean_over_the_targets[-1 is a token]"
        ),
    ),
    Fault(
        subject="evaluations, resume",
        description="a resume doesn't say that it evaluates other windows than before",
        file="runtime/plan/compare.py",
        function="note_evaluations",
        old="before in (None, windows)",
        new="before is None or windows",
        test="checkpoint/test_resume.py::test_a_resume_notes_that_it_is_evaluated_on_other_windows",
    ),
    Fault(
        subject="local accumulation, reason",
        description="too little memory is given as the reason for what a setting has said",
        file="runtime/plan/run_plan.py",
        function="local_accumulation",
        old="s.accumulate_locally is False",
        new="False",
        test=(
            "engine/test_fast_paths.py::"
            "test_the_plan_says_why_there_is_no_local_accumulation[arguments1-"
            "accumulate_locally=False]"
        ),
        quick=True,
    ),
    Fault(
        subject="optimizers, name",
        description="any optimizer is printed as adamw",
        file="runtime/plan/report.py",
        function="optimizer_line",
        old="name = optimizer_name(optimizer)",
        new="pass",
        test="engine/test_any_optimizer.py::test_its_class_is_named_and_deepspeed_warns_of_nothing",
    ),
    Fault(
        subject="a model.py of others, memory",
        description="the plan takes its logits for chunks",
        file="runtime/plan/run_plan.py",
        function="memory_inputs",
        old="issubclass(GPT, Adapter)",
        new="False",
        test="test_bring.py::test_a_plan_knows_that_the_logits_are_whole",
    ),
    Fault(
        subject="configurator",
        description="a config file sees the defaults, not the settings given before it",
        file="configurator.py",
        function="Assignments.assign_config",
        old="run_config_file(path, self.values, self.root)",
        new="run_config_file(path, self.defaults, self.root)",
        test=(
            "test_configurator.py::"
            "test_config_files_see_the_settings_so_far_and_nothing_of_the_configurator"
        ),
        quick=True,
    ),
    Fault(
        subject="doctor, cache",
        description="it compares the prompt's logits alone",
        file="runtime/check/logits.py",
        function="cached_logits",
        old="range(PROMPT, T)",
        new="range(T, T)",
        test=(
            "test_doctor_model.py::test_a_planted_fault_is_found[positions off by one in decoding]"
        ),
    ),
    Fault(
        subject="doctor, chunks",
        description="it compares the loss in one chunk, of all rows",
        file="runtime/check/loss.py",
        function="small_chunks",
        old="CHUNK",
        new="ROWS",
        test="test_doctor_model.py::test_a_planted_fault_is_found[a loss that looks at other rows]",
    ),
    Fault(
        subject="doctor, before a run",
        description="a difference is printed, and the run goes on",
        file="runtime/check/short.py",
        function="check_before_training",
        old='raise UserError(f"{result.name} ({what}): {result.sentence}; {LONG_FORM}")',
        new='print0(f"{result.name} ({what}): {result.sentence}; {LONG_FORM}")',
        test="test_doctor_model.py::test_a_run_of_a_faulty_model_ends_before_its_first_step[1]",
    ),
    Fault(
        subject="state in attributes",
        description="a run doesn't say that no checkpoint has what a model keeps in attributes",
        file="runtime/check/attributes.py",
        function="kept_attributes",
        old="lost.names",
        new="False",
        test=(
            "test_attributes.py::test_a_run_says_that_an_attribute_is_lost_and_its_fix_keeps_it"
        ),
    ),
    Fault(
        subject="doctor, random numbers",
        description="the checks before a run draw from the run's generator",
        file="runtime/check/tiny.py",
        function="own_randomness",
        old="torch.default_generator.set_state(of_torch)",
        new="pass",
        test="test_doctor_model.py::test_the_checks_of_a_run_leave_its_random_numbers",
    ),
    Fault(
        subject="set-up, imports",
        description="what was installed is not imported before .venv counts as ready",
        file="runtime/install.py",
        function="main",
        old="check_imports(text)",
        new="pass",
        test="test_install.py::test_what_does_not_import_is_not_ready",
    ),
    Fault(
        subject="set-up, another place",
        description="PIP_TARGET is handed on to pip",
        file="runtime/install.py",
        function=MODULE,
        old='"PIP_TARGET"',
        new='"PIP_ANOTHER"',
        test="test_install.py::test_pip_installs_into_venv_wherever_its_variables_point",
    ),
    Fault(
        subject="set-up, login node",
        description="a machine with Slurm and without a GPU takes PyTorch for CPUs",
        file="runtime/install.py",
        function="cpu_wheels",
        old='has_gpu() or shutil.which("sbatch")',
        new="has_gpu()",
        test="test_install.py::test_pytorchs_index_is_not_asked_where_pip_or_slurm_says_so",
        quick=True,
    ),
    Fault(
        subject="set-up, build",
        description="PyTorch for CPUs stays where a GPU needs the other build",
        file="runtime/install.py",
        function="remove_other_torch",
        old='info.name.endswith("+cpu.dist-info") != is_cpu_build',
        new='info.name.endswith("+cpu.dist-info") < is_cpu_build',
        test="test_install.py::test_the_build_for_cpus_and_back",
    ),
    Fault(
        subject="set-up, temporary files",
        description="pip keeps 2.9 GB in /tmp, which may be in memory",
        file="runtime/install.py",
        function="install",
        old="str(temporary)",
        new='"/tmp"',
        test="test_install.py::test_uv_is_taken_with_pips_configuration",
        quick=True,
    ),
    Fault(
        subject="plan",
        description=(
            "the second communication bucket of overlap_comm is missing from the memory plan"
        ),
        file="runtime/plan/memory.py",
        function="buckets",
        old="size *= 2",
        new="size *= 1",
        test="plan/test_fit.py::test_the_plan_of_a_billion_parameters_on_4_gpus_by_hand",
        quick=True,
    ),
    Fault(
        subject="history, NaN",
        description="a loss that is not finite makes history.jsonl no JSON",
        file="runtime/monitor/history.py",
        function="json_line",
        old="json.dumps(without_nan(record), allow_nan=False)",
        new="json.dumps(record)",
        test="monitor/test_history.py::test_what_is_not_finite_is_null",
        quick=True,
    ),
    Fault(
        subject="a step of several epochs",
        description="it isn't printed",
        file="runtime/plan/run_plan.py",
        function="repeats_in_a_step",
        old="per_step > per_epoch",
        new="False",
        test="plan/test_notes.py::test_a_step_of_several_epochs_is_told_of",
    ),
    Fault(
        subject="evaluation, standard error",
        description="windows count as if all had the same number of targets",
        file="runtime/monitor/estimate.py",
        function="LossSums.estimate",
        old="2 * mean * total.counts_times_loss",
        new="2 * mean * total.loss",
        test="monitor/test_estimate.py::test_an_estimate_is_that_of_plain_sums[2]",
    ),
    Fault(
        subject="set-up, mirrors",
        description="uv asks PyPI although pip.conf names a mirror",
        file="runtime/install.py",
        function="uv_variables",
        old='None if "UV_INDEX_URL" in env else config.get("index-url")',
        new="None",
        test="test_install.py::test_pips_files_and_variables",
    ),
    Fault(
        subject="set-up, repair",
        description="an environment whose Python has gone is installed into",
        file="runtime/venv.sh",
        function=None,
        old="venv_exists || venv_create",
        new="[[ -e $venv/bin ]] || venv_create",
        test="test_shell.py::test_an_environment_whose_python_has_gone_is_made_anew",
    ),
    Fault(
        subject="results, a loss that is not finite",
        description="it is compared with numbers, or missing among the spikes",
        file="results/long_run.py",
        function="spikes",
        old="""\
if loss is None or (i >= 100 and before and loss > 1.5 * statistics.median(before) + 0.1):
    found.append(step["iter"])""",
        new="""\
if (i >= 100 and before and loss > 1.5 * statistics.median(before) + 0.1):
    found.append(step["iter"])""",
        test="test_results.py::test_a_long_run_with_a_loss_that_is_not_finite_is_recorded",
    ),
    Fault(
        subject="skipped steps",
        description="those with good steps between them count as consecutive",
        file="runtime/monitor/health.py",
        function="StepHealth.check",
        old=("self.skipped_in_a_row = 0\nself.warn(iter_num, spike)"),
        new="self.warn(iter_num, spike)",
        test="monitor/test_health.py::test_bad_steps_with_good_ones_between_end_no_run",
    ),
    Fault(
        subject="overwrite, history",
        description="a fresh run with overwrite=True keeps iteration 0 of the one before",
        file="runtime/monitor/runlog.py",
        function="RunLog.open_files",
        old="self.iter_num if self.resumes else -1",
        new="self.iter_num",
        test="test_run.py::test_a_fresh_run_with_overwrite_leaves_nothing_of_the_one_before",
    ),
    Fault(
        subject="figures, several steps",
        description="the time of a step is that of all steps since the last line",
        file="runtime/monitor/runlog.py",
        function="RunLog.step",
        old="1000 * seconds / steps",
        new="1000 * seconds",
        test="monitor/test_figures.py::test_speed_is_that_of_all_ranks_without_evaluations",
    ),
    Fault(
        subject="figures, MFU",
        description="it is that of one GPU which does the work of all ranks",
        file="runtime/monitor/runlog.py",
        function="RunLog.step",
        old="peak * len(losses)",
        new="peak",
        test="monitor/test_figures.py::test_speed_is_that_of_all_ranks_without_evaluations",
    ),
    Fault(
        subject="length ramp, MFU",
        description="the FLOPs of short sequences are those of whole ones",
        file="runtime/monitor/runlog.py",
        function="RunLog.flops_of",
        old="self.flops_per_token[length]",
        new="self.flops_per_token[self.settings.block_size]",
        test="monitor/test_figures.py::test_speed_and_time_left_follow_the_length_of_sequences",
    ),
    Fault(
        subject="figures, time left",
        description="it counts the first step, which is slow",
        file="runtime/monitor/runlog.py",
        function="RunLog.step",
        old="self.second_step = self.second_step or (self.clock, self.clock_flops)",
        new="self.second_step = self.second_step or (self.process_start, 0)",
        test="monitor/test_figures.py::test_speed_is_that_of_all_ranks_without_evaluations",
    ),
    Fault(
        subject="figures, standard error",
        description="windows that pad a batch count as windows",
        file="runtime/monitor/estimate.py",
        function="LossSums.add",
        old="counts > 0",
        new="counts > -1",
        test="monitor/test_figures.py::test_an_evaluation_is_that_of_plain_pytorch",
    ),
    Fault(
        subject="skipped steps, ranks",
        description="a loss that is not finite on another rank is not named",
        file="runtime/monitor/health.py",
        function="StepHealth.check",
        old="all_gather_scalars(loss)",
        new="[[float(loss)]]",
        test="monitor/test_health.py::test_all_ranks_with_a_nan_are_named",
    ),
]
