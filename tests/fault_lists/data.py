"""Planted faults in the order of the data, tokenizers and token files."""

from fault_places import Fault

FAULTS = [
    Fault(
        subject="data order",
        description="every epoch repeats the shuffled order of the first one",
        file="runtime/data/permutation.py",
        function="shuffle_epochs",
        old="feistel_permute(index, n, keys)",
        new="feistel_permute(index, n, splitmix64(splitmix64(seed)))",
        test="data/test_batches.py::test_epochs_and_seeds_differ",
        quick=True,
    ),
    Fault(
        subject="code in meta.pkl",
        description="nanoGPT's meta.pkl is unpickled with whatever it names",
        file="runtime/data/meta.py",
        function="parse_meta_of_nanogpt",
        old="PlainUnpickler(io.BytesIO(pickled))",
        new="pickle.Unpickler(io.BytesIO(pickled))",
        test=(
            "hostile/test_hostile.py::test_a_hostile_file_does_no_harm[train on nanoGPT's "
            "data-nanogpt/data/meta.pkl-a plain pickle]"
        ),
    ),
    Fault(
        subject="batch ramp, stages",
        description="each stage begins a step late, unlike the totals",
        file="runtime/data/ramp.py",
        function="value_at",
        old="iteration >= start",
        new="iteration > start",
        test="data/test_ramp.py::test_stages_and_totals",
        quick=True,
    ),
    Fault(
        subject="length ramp, cut",
        description="sequences stay whole",
        file="runtime/data/loader.py",
        function="TrainBatches.next_step",
        old="(self.micro_steps_ahead, -1, length)",
        new="(self.micro_steps_ahead, -1, self.batch.block_size)",
        test="data/test_steps.py::test_shorter_sequences_are_parts_of_the_whole_ones[1]",
        quick=True,
    ),
    Fault(
        subject="length ramp, stages",
        description="a stage begins where steps of the whole batch would have its share of tokens",
        file="runtime/data/ramp.py",
        function="iteration_at",
        old="ramp.sizes[stage]",
        new="ramp.sizes[-1]",
        test="data/test_ramp.py::test_the_lengths_stages_begin_at_their_shares_of_the_tokens",
        quick=True,
    ),
    Fault(
        subject="batch ramp, read ahead",
        description="what was read ahead for another number of micro-steps is taken",
        file="runtime/data/loader.py",
        function="TrainBatches.next_step",
        old="micro_steps != self.micro_steps_ahead",
        new="False",
        test="data/test_steps.py::test_a_ramp_takes_each_sequence_once_and_in_order[2]",
        quick=True,
    ),
    Fault(
        subject="batch ramp, read ahead of a small stage",
        description="what was read ahead for another micro-batch is taken",
        file="runtime/data/loader.py",
        function="TrainBatches.next_step",
        old="micro != self.micro_ahead",
        new="False",
        test=(
            "data/test_steps.py::"
            "test_smaller_micro_batches_take_each_sequence_once_and_in_order[2]"
        ),
        quick=True,
    ),
    Fault(
        subject="batch ramp, small stages",
        description="a stage that is smaller than a micro-step takes a whole one",
        file="runtime/data/ramp.py",
        function="Ramp.micro",
        old="min(self.batch.micro, per_gpu)",
        new="self.batch.micro",
        test=(
            "data/test_ramp.py::test_a_stage_below_batch_size_x_gpus_is_one_smaller_micro_step["
            "15@0, 30@0.1, 60@0.4-batch0-split0]"
        ),
        quick=True,
    ),
    Fault(
        subject="batch ramp, loss mask",
        description="a target weighs as in a step of the planned number of micro-steps",
        file="runtime/data/loader.py",
        function="TrainBatches.read_step",
        old="micro_steps * batch.world_size",
        new="batch.accumulation * batch.world_size",
        test=(
            "data/test_conversations.py::"
            "test_a_ramp_is_the_mean_over_the_counted_tokens_of_each_step[2]"
        ),
    ),
    Fault(
        subject="micro-batches, ranks",
        description="each rank takes a run of sequences of the whole step, as before",
        file="runtime/data/loader.py",
        function="TrainBatches.read_step",
        old="by_rank[:, self.rank]",
        new="ids.reshape(batch.world_size, -1)[self.rank]",
        test=(
            "data/test_steps.py::test_a_micro_step_is_a_run_of_sequences_and_each_rank_has_its_part"
        ),
        quick=True,
    ),
    Fault(
        subject="chat, weight",
        description="an answer of weight 0 is trained on",
        file="runtime/data/chat.py",
        function="encode_conversation",
        old="COUNTS * weight",
        new="COUNTS",
        test=(
            "prepare/test_conversation_shapes.py::test_300_conversations_are_transformers["
            "weight-char]"
        ),
        quick=True,
    ),
    Fault(
        subject="chat, exported weight",
        description="the exported template counts an answer with train: false",
        file="runtime/data/chat_template.jinja",
        function=None,
        old="or message.train == false",
        new="",
        test=(
            "prepare/test_conversation_shapes.py::test_300_conversations_are_transformers["
            "train-bpe]"
        ),
        quick=True,
    ),
    Fault(
        subject="tokenizer of weights",
        description="data is trained on with weights that have other ids for its words",
        file="runtime/data/folder_tokenizer.py",
        function="check_ids",
        old='have_same_ids(data["tokenizer"], known["tokenizer"])',
        new="True",
        test=(
            "data/test_folder_tokenizer.py::"
            "test_data_in_other_tokens_is_refused_by_each_script[train_deepspeed.py]"
        ),
    ),
    Fault(
        subject="vocab.json",
        description="weights with vocab.json and merges.txt have GPT-2's tokenizer, by their size",
        file="runtime/data/folder_tokenizer.py",
        function="tokenizer_of_weights",
        old="os.path.isdir(source)",
        new="os.path.exists(os.path.join(source, 'tokenizer.json'))",
        test=(
            "data/test_folder_tokenizer.py::"
            "test_data_in_other_tokens_is_refused_by_each_script[sample.py]"
        ),
    ),
    Fault(
        subject="merges",
        description="tokenizers with the same tokens and other merges count as equal",
        file="runtime/data/same_ids.py",
        function="are_equal",
        old="a.rules != b.rules or a.words != b.words",
        new="a.words != b.words",
        test="data/test_folder_tokenizer.py::test_scores_count_and_where_files_are_does_not",
        quick=True,
    ),
    Fault(
        subject="normalizers",
        description="tokenizers with the same tokens and another normalizer count as equal",
        file="runtime/data/same_ids.py",
        function="are_equal",
        old="a.before is not None and a.before == b.before",
        new="a.before is not None",
        test="data/test_folder_tokenizer.py::test_a_changed_bpe[normalizer]",
        quick=True,
    ),
    Fault(
        subject="end of text",
        description=(
            "config.json's end of text, often GPT-2's default, comes before the tokenizer's own"
        ),
        file="runtime/data/folder_tokenizer.py",
        function="end_of_folder",
        old="token in ids",
        new="token in ids and not is_there(folder, 'config.json')",
        test="data/test_folder_tokenizer.py::test_what_a_folder_says_of_its_end_of_text",
        quick=True,
    ),
    Fault(
        subject="token files, type",
        description="ids of 32 or 64 bits without a meta.json are read as uint16",
        file="runtime/data/token_files.py",
        function="type_problem",
        old="wide",
        new="False",
        test="data/test_token_files.py::test_wider_ids_are_noticed[GPT-2-<u4-uint32]",
        quick=True,
    ),
    Fault(
        subject="token files, small vocabularies",
        description="nanoGPT's own files of few characters count as uint32",
        file="runtime/data/token_files.py",
        function="wide_type",
        old="high.max() > max_high or high.max() >= low.max()",
        new="high.max() > max(max_high, 3)",
        test="data/test_token_files.py::test_nanogpts_own_files_are_not[4-pickled1]",
        quick=True,
    ),
    Fault(
        subject="splits without answers",
        description="it isn't said which split of conversations has none",
        file="runtime/data/sequences.py",
        function="open_sequences",
        old='Conversations(f"{dataset.name}/{split}.bin", tokens, mask, block_size)',
        new="Conversations(dataset.name, tokens, mask, block_size)",
        test="data/test_conversations.py::test_the_split_without_an_answer_is_named[val]",
        quick=True,
    ),
    Fault(
        subject="end of text, no token",
        description="an eos_token that isn't a token gives way to another end of text without a word",
        file="runtime/data/folder_tokenizer.py",
        function="check_end_of_text",
        old="""\
if named is not None and named not in vocabulary_of(tokenizer):
    raise UserError(f"the eos_token {named!r} in {config} is none of the tokenizer's tokens: name "
                    "one of them, or add it to its tokenizer.json with transformers, by "
                    f"{save_line(folder)}")""",
        new="""\
if False:
    raise UserError(f"the eos_token {named!r} in {config} is none of the tokenizer's tokens: name "
                    "one of them, or add it to its tokenizer.json with transformers, by "
                    f"{save_line(folder)}")""",
        test="data/test_folder_tokenizer.py::test_an_eos_token_that_is_no_token_is_refused_with_the_way",
    ),
    Fault(
        subject="token files, places",
        description="only the beginning of a file says its type",
        file="runtime/data/token_files.py",
        function="values_of",
        old="start = (n - piece) * place // (PLACES - 1) // 4 * 4",
        new="start = piece * place",
        test="data/test_token_files.py::test_wider_ids_of_the_described_size_are_noticed[uint32 as uint16-hashes]",
    ),
    Fault(
        subject="token files, described type",
        description=("ids of 32 bits are read as the uint16 of a meta.json whose size they have"),
        file="runtime/data/dataset.py",
        function="_file_problem",
        old='wrong_type = described_type_problem(folder / f"{split}.bin", meta)',
        new="wrong_type = None",
        test=(
            "data/test_token_files.py::"
            "test_wider_ids_of_the_described_size_are_noticed[uint32 as uint16-hashes]"
        ),
    ),
]
