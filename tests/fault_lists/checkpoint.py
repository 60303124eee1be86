"""Planted faults in tags, their files, and files that others may have written."""

from fault_places import MODULE, Fault

FAULTS = [
    Fault(
        subject="fields, a new run",
        description="a setting that is no shape is noted, and the model has the tag's value",
        file="runtime/checkpoint/load.py",
        function="load_model",
        old="replace(of_run, block_size=config.block_size)",
        new="replace(config, dropout=of_run.dropout)",
        test=(
            "checkpoint/test_own_fields.py::test_a_setting_that_is_no_shape_counts_in_a_new_run"
        ),
    ),
    Fault(
        subject="fields, shape",
        description="a setting that tensors depend on is taken at a resume",
        file="runtime/plan/own_fields.py",
        function="has_same_tensors",
        old="not own.differences(other)",
        new="True",
        test=(
            "checkpoint/test_edited_tags.py::test_a_setting_with_the_name_of_a_field_is_passed"
        ),
    ),
    Fault(
        subject="re-shard",
        description="parameters after a padded one are read from the wrong place in ZeRO-3 checkpoints",
        file="runtime/checkpoint/tag_reader.py",
        function="TagReader.cut",
        old="size = math.ceil(self.shapes[name].numel() / parts)",
        new="size = self.shapes[name].numel() // parts",
        test=(
            "checkpoint/test_tag_files.py::"
            "test_pieces_of_stage_3_are_put_together_without_their_padding"
        ),
        quick=True,
    ),
    Fault(
        subject="save",
        description="training changes the state while a thread writes it",
        file="runtime/checkpoint/saver.py",
        function="Saver._copy_to_staging",
        old="copies = self.staging.copy(files)",
        new="copies = files",
        test=(
            "checkpoint/test_checkpoints.py::"
            "test_a_save_has_the_state_of_its_step[written after the next step]"
        ),
    ),
    Fault(
        subject="time of a save",
        description="the wait for an earlier save isn't counted as time that training is blocked",
        file="runtime/checkpoint/saver.py",
        function="Saver.save",
        old="blocked_s = time.monotonic() - blocked_since",
        new="blocked_s = time.monotonic() - start",
        test=(
            "checkpoint/test_checkpoints.py::"
            "test_the_time_that_a_save_blocks_includes_the_wait_for_the_one_before"
        ),
    ),
    Fault(
        subject="damaged twice",
        description="a tag that is damaged for the second time can't be renamed",
        file="runtime/checkpoint/tags.py",
        function="TagStore.move_away",
        old="remove_dir(path, ignore_errors=True)",
        new="pass",
        test=(
            "checkpoint/test_many_tags.py::test_a_second_damaged_tag_takes_the_place_of_the_first"
        ),
        quick=True,
    ),
    Fault(
        subject="staging, larger",
        description="a save that is larger than the first one can't be written in the background",
        file="runtime/checkpoint/staging.py",
        function="Staging.allocate",
        old="len(self.buffer) >= size",
        new="len(self.buffer) > 0",
        test=(
            "checkpoint/test_staging.py::"
            "test_a_larger_save_gets_a_larger_buffer_and_a_smaller_one_keeps_it"
        ),
        quick=True,
    ),
    Fault(
        subject="commit order",
        description="a checkpoint gets its name before its files are flushed to the disk",
        file="runtime/checkpoint/tag_writer.py",
        function="write_files",
        old="written[os.path.basename(path)] = file_digest(path, flush=True)",
        new="written[os.path.basename(path)] = file_digest(path)",
        test=(
            "checkpoint/test_tag_files.py::"
            "test_a_tag_is_on_the_disk_before_it_has_its_name_and_an_older_one_goes_last"
        ),
        quick=True,
    ),
    Fault(
        subject="full disk",
        description="the checkpoint that is deleted to make room may be the best one",
        file="runtime/checkpoint/tags.py",
        function="TagStore.delete_oldest",
        old="kept = {self.newest(), best}",
        new="kept = {self.newest()}",
        test="plan/test_disk.py::test_the_oldest_tag_that_is_neither_newest_nor_best_goes",
        quick=True,
    ),
    Fault(
        subject="hashes",
        description=(
            "every rank hashes the same files, so those of the other ranks' shares are not checked"
        ),
        file="runtime/checkpoint/verify.py",
        function="verify_files",
        old="[number % world_size == rank for number in range(len(files))]",
        new="[number % world_size == 0 for number in range(len(files))]",
        test="checkpoint/test_tag_files.py::test_a_changed_file_is_found_by_one_of_the_ranks",
        quick=True,
    ),
    Fault(
        subject="allow-list",
        description=(
            "only model files are searched for names that are not allowed; optimizer files are not"
        ),
        file="runtime/checkpoint/verify.py",
        function="verify_file",
        old="unsafe",
        new='unsafe and file.endswith("model_states.pt")',
        test="checkpoint/test_tag_files.py::test_no_file_of_a_tag_may_name_what_is_not_allowed",
        quick=True,
    ),
    Fault(
        subject="code in a checkpoint",
        description="a file of a checkpoint is unpickled with whatever it names",
        file="runtime/checkpoint/tag_reader.py",
        function="mmap_load",
        old='torch.load(path, map_location="cpu", mmap=True, weights_only=True)',
        new='torch.load(path, map_location="cpu", mmap=True, weights_only=False)',
        test=(
            "hostile/test_hostile.py::"
            "test_a_hostile_file_does_no_harm["
            "resume without a check-run/iter_2/"
            "mp_rank_00_model_states.pt-a pickle in torch's zip format]"
        ),
    ),
    Fault(
        subject="slow pickles",
        description=(
            "a dict of a checkpoint may have any key, such as tuples that are hashed for years"
        ),
        file="runtime/torch_files.py",
        function="PickleChecker.set_items",
        old="Opaque | Name | tuple | list",
        new="Opaque | Name",
        test=(
            "hostile/test_hostile.py::test_a_hostile_file_does_no_harm[resume-"
            "run/iter_2/mp_rank_00_model_states.pt-a key that is hashed for years]"
        ),
    ),
    Fault(
        subject="pipes",
        description="opening a pipe waits until somebody writes to it",
        file="runtime/untrusted.py",
        function="open_regular",
        old="flags |= os.O_NONBLOCK",
        new="pass",
        test=(
            "hostile/test_hostile.py::test_a_hostile_file_does_no_harm[sample a run-"
            "run/iter_2/manifest.json-a pipe]"
        ),
    ),
    Fault(
        subject="links",
        description="the lock of an out_dir is written through a link",
        file="runtime/files.py",
        function="lock_folder",
        old='open_no_follow(os.path.join(folder, ".lock"), os.O_WRONLY | os.O_CREAT)',
        new='os.open(os.path.join(folder, ".lock"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)',
        test=(
            "hostile/test_hostile.py::test_a_hostile_file_does_no_harm[train into a folder-"
            "out/.lock-a private file]"
        ),
    ),
    Fault(
        subject="buffers, sampling",
        description="persistent buffers start anew in a sample, an evaluation and a new run",
        file="runtime/checkpoint/load.py",
        function="load_model",
        old="reader.copy_buffers(model)",
        new="pass",
        test="checkpoint/test_edited_tags.py::test_a_new_run_starts_from_a_tag[running statistics]",
    ),
    Fault(
        subject="padded groups",
        description="the optimizer's state is expected without DeepSpeed's padding",
        file="runtime/checkpoint/tag_reader.py",
        function="TagReader.read_group_states",
        old="range(flat.numel(), flat.numel() + 2 * ranks)",
        new="range(flat.numel(), flat.numel() + 1)",
        test=(
            "checkpoint/test_edited_tags.py::"
            "test_a_script_that_adds_to_the_model_is_told_who_cannot_load_it"
        ),
    ),
    Fault(
        subject="shape",
        description="only GPT-2's settings are passed to GPTConfig",
        file="runtime/checkpoint/model_config.py",
        function=MODULE,
        old="field.name not in OF_THE_RUN",
        new='field.name in ("n_layer", "n_head", "n_embd", "bias")',
        test="checkpoint/test_edited_tags.py::test_a_setting_with_the_name_of_a_field_is_passed",
    ),
    Fault(
        subject="source",
        description="methods of the model are not compared with those of a tag",
        file="runtime/checkpoint/model_source.py",
        function="hashed_parts",
        old='parts.setdefault(f"{statement.name}.{inner.name}", []).append(inner)',
        new="pass",
        test="checkpoint/test_edited_tags.py::test_a_note_says_that_the_source_was_edited[an edit]",
    ),
    Fault(
        subject="source, another file",
        description="a tag of another file's model is sampled",
        file="runtime/checkpoint/model_source.py",
        function="check_file",
        old="edited_parts(saved, model)",
        new="False",
        test="checkpoint/test_edited_tags.py::test_a_model_of_another_file_is_named",
    ),
    Fault(
        subject="links, lock",
        description="the lock follows a link and truncates its target",
        file="runtime/files.py",
        function="lock_folder",
        old='open_no_follow(os.path.join(folder, ".lock"), os.O_WRONLY | os.O_CREAT)',
        new='os.open(os.path.join(folder, ".lock"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)',
        test="test_untrusted.py::test_the_lock_truncates_nothing_and_follows_no_link",
        quick=True,
    ),
    Fault(
        subject="manifests",
        description="their types are not checked",
        file="runtime/checkpoint/manifest.py",
        function="read_manifest",
        old="check_manifest(manifest)",
        new="pass",
        test="test_untrusted.py::test_a_manifest_of_others_is_checked",
        quick=True,
    ),
    Fault(
        subject="links to nowhere",
        description=(
            "a folder is made in place of a disk that isn't mounted, or its name said to exist"
        ),
        file="runtime/files.py",
        function="lock_folder",
        old="refuse_broken_link(folder, option)",
        new="pass",
        test="checkpoint/test_save_failures.py::test_a_link_to_nowhere_is_named[out/run]",
        quick=True,
    ),
    Fault(
        subject="moved out_dir",
        description="it is made again without its lock",
        file="runtime/checkpoint/tags.py",
        function="TagStore.hold_folder",
        old="self.lock()",
        new="os.makedirs(self.out_dir, exist_ok=True)",
        test="checkpoint/test_save_failures.py::test_a_folder_that_is_made_again_is_locked",
        quick=True,
    ),
    Fault(
        subject="moved out_dir, another run",
        description="checkpoints of another run in its place are overwritten",
        file="runtime/checkpoint/tags.py",
        function="TagStore.hold_folder",
        old="self.list()",
        new="not self.list()",
        test=(
            "checkpoint/test_save_failures.py::"
            "test_another_run_in_the_place_of_an_out_dir_is_left_alone"
        ),
    ),
    Fault(
        subject="failed saves",
        description="the system's error is lost behind torch.save's",
        file="runtime/checkpoint/tag_writer.py",
        function="write_file",
        old="cause = first_os_error(error)",
        new="cause = None",
        test="checkpoint/test_save_failures.py::test_a_limit_on_the_size_of_files_is_named",
    ),
    Fault(
        subject="many tags",
        description="each save reads all manifests again",
        file="runtime/checkpoint/summaries.py",
        function="summary_of",
        old="""\
if version is not None and path in SUMMARIES:
    known_version, summary = SUMMARIES[path]
    if known_version == version:
        return summary""",
        new="""\
if False:
    known_version, summary = SUMMARIES[path]
    if known_version == version:
        return summary""",
        test="checkpoint/test_many_tags.py::test_each_manifest_is_read_once",
        quick=True,
    ),
    Fault(
        subject="many tags, changes",
        description="a manifest that has changed is not read again",
        file="runtime/checkpoint/summaries.py",
        function="summary_of",
        old="""\
if known_version == version:
    return summary""",
        new="""\
if True:
    return summary""",
        test="checkpoint/test_many_tags.py::test_a_manifest_that_has_changed_is_read_again",
        quick=True,
    ),
    Fault(
        subject="manifests, edited models",
        description=(
            "a model with many experts can't be resumed: its files are too large for its sizes"
        ),
        file="runtime/checkpoint/manifest.py",
        function="check_bytes",
        old='max(elements, manifest["state"].get("elements", 0))',
        new="elements",
        test="test_untrusted.py::test_a_tag_has_a_size_that_fits_its_model",
        quick=True,
    ),
    Fault(
        subject="save, ZeRO-3",
        description="a save that training waits for writes DeepSpeed's attributes of the parameters",
        file="runtime/checkpoint/saver.py",
        function="Saver.save",
        old="plain = without_attributes(files)",
        new="plain = files",
        test=(
            "checkpoint/test_checkpoints.py::"
            "test_a_save_has_the_state_of_its_step[training waits at stage 3]"
        ),
    ),
    Fault(
        subject="resume, learning rate",
        description="a resume doesn't say that its schedule sends the learning rate up",
        file="runtime/checkpoint/resume.py",
        function="note_another_schedule",
        old="before is None or math.isclose(before, again, rel_tol=1e-9)",
        new="True",
        test=(
            "checkpoint/test_resume.py::"
            "test_a_longer_resume_tells_of_the_learning_rate_that_goes_up"
        ),
    ),
    Fault(
        subject="hashes, large files",
        description="only the first 16 MB of a file are hashed",
        file="runtime/files.py",
        function="file_digest",
        old='hashlib.file_digest(file, "sha256")',
        new="hashlib.sha256(file.read(16_000_000))",
        test="checkpoint/test_tag_files.py::test_all_of_a_large_file_is_hashed",
        quick=True,
    ),
    Fault(
        subject="overwrite, tags",
        description="a fresh run with overwrite=True keeps the tags of the one before",
        file="runtime/checkpoint/tags.py",
        function="TagStore.clean",
        old="overwrite",
        new="overwrite and tag is not None",
        test="test_run.py::test_a_fresh_run_with_overwrite_leaves_nothing_of_the_one_before",
    ),
    Fault(
        subject="hashes, ranks",
        description="only what rank 0 finds counts",
        file="runtime/checkpoint/resume.py",
        function="first_intact",
        old="all_gather_objects(problems)",
        new="all_gather_objects(problems)[:1]",
        test=(
            "checkpoint/test_checkpoints.py::"
            "test_two_damaged_tags_of_which_each_rank_finds_one_are_skipped"
        ),
    ),
    Fault(
        subject="a state that no reader takes",
        description="it is only seen whether it can be written as JSON",
        file="runtime/checkpoint/manifest.py",
        function="check_state",
        old="check_type(written, State)",
        new="pass",
        test="checkpoint/test_save_failures.py::test_a_state_that_no_resume_would_take_is_named",
    ),
    Fault(
        subject="full disk, compact state",
        description="what a save makes on the disk besides the tag gets no room",
        file="runtime/checkpoint/saver.py",
        function="Saver._make_room",
        old="self.tag_bytes + sum(all_gather_objects(on_disk))",
        new="self.tag_bytes",
        test=(
            "plan/test_disk.py::"
            "test_a_save_that_decodes_on_the_disk_makes_room_for_that_too[short]"
        ),
    ),
    Fault(
        subject="full disk, found late",
        description="a file without a name that finds no room ends the run, although a tag could go",
        file="runtime/checkpoint/tag_writer.py",
        function="TagWriter.attempt",
        old="lacks_room(failure) or is_full(self.store.out_dir)",
        new="is_full(self.store.out_dir)",
        test=(
            "plan/test_disk.py::"
            "test_a_save_that_decodes_on_the_disk_makes_room_for_that_too[short, and not foreseen]"
        ),
    ),
]
