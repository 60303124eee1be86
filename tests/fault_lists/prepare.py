"""Planted faults in how texts and conversations become tokens."""

from fault_places import MODULE, Fault

FAULTS = [
    Fault(
        subject="chat, unknown fields",
        description="a field that isn't known is dropped without a word",
        file="runtime/prepare/fields.py",
        function="Fields.refusals",
        old="not says_nothing(value)",
        new="name in REASONS and not says_nothing(value)",
        test=(
            "prepare/test_conversation_refusals.py::"
            "test_what_is_not_supported_is_refused_by_name[a loss mask]"
        ),
        quick=True,
    ),
    Fault(
        subject="chat, input",
        description="an input of 0 counts as no input",
        file="runtime/prepare/conversations.py",
        function="Conversation.with_input",
        old="value is None",
        new="not value",
        test=(
            "prepare/test_conversation_shapes.py::test_300_conversations_are_transformers["
            "Alpaca-char]"
        ),
        quick=True,
    ),
    Fault(
        subject="JSON, a field twice",
        description="of two fields of one name, the last one is kept without a word",
        file="runtime/prepare/json_records.py",
        function=MODULE,
        old="json.JSONDecoder(object_pairs_hook=unique_fields)",
        new="json.JSONDecoder()",
        test=(
            "prepare/test_conversation_refusals.py::"
            "test_what_is_not_supported_is_refused_by_name[two weights]"
        ),
        quick=True,
    ),
    Fault(
        subject="chat, context",
        description="answers in a prompt of messages are trained on",
        file="runtime/prepare/conversations.py",
        function="Conversation.read_pair",
        old='self.read_list(question, "prompt", weight=0)',
        new='self.read_list(question, "prompt")',
        test=(
            "prepare/test_conversation_shapes.py::test_300_conversations_are_transformers["
            "lists of messages-char]"
        ),
        quick=True,
    ),
    Fault(
        subject="chat, Parquet's JSON",
        description="a text that datasets stores as JSON keeps its quotation marks",
        file="runtime/prepare/tables.py",
        function="json_text",
        old="return value",
        new="return plain_json(value)",
        test=(
            "prepare/test_conversation_files.py::"
            "test_values_of_mixed_types_in_parquet_and_arrow_are_what_json_lines_say"
        ),
        quick=True,
    ),
    Fault(
        subject="chat, caches",
        description="the caches of load_from_disk are read as data",
        file="runtime/prepare/tables.py",
        function="without_descriptions",
        old="not is_cache and not (is_ours and name in DESCRIPTIONS)",
        new="not (is_ours and name in DESCRIPTIONS)",
        test="prepare/test_conversation_reports.py::test_open_instruct_638_caches_beside_the_data",
        quick=True,
    ),
    Fault(
        subject="chat, refusals",
        description="conversations that can't be used are skipped without --skip_unreadable",
        file="runtime/prepare/pipeline.py",
        function="Reader.is_refused",
        old="self.chats is not None and bool(self.chats.problems) and not self.skip_unreadable",
        new="False",
        test=(
            "prepare/test_conversation_files.py::"
            "test_refused_conversations_are_counted_and_nothing_is_written"
        ),
        quick=True,
    ),
    Fault(
        subject="Arrow's places",
        description="an Arrow file's places aren't checked before they are read",
        file="runtime/prepare/tables.py",
        function="open_arrow.read",
        old="chosen.validate(full=True)",
        new="pass",
        test=(
            "hostile/test_hostile.py::test_a_hostile_file_does_no_harm[prepare chats-"
            "conversations/saved/data.arrow-places outside of it]"
        ),
    ),
    Fault(
        subject="coverage",
        description="a text counts as kept although it decodes to another",
        file="runtime/prepare/coverage.py",
        function="measure",
        old="decoded != text",
        new="not decoded",
        test="prepare/test_coverage.py::test_what_is_lost_is_told[letters]",
        quick=True,
    ),
    Fault(
        subject="role headers",
        description=(
            "conversations are prepared with a tokenizer that makes unknown tokens of who speaks"
        ),
        file="runtime/prepare/coverage.py",
        function="check_headers",
        old="decoded != header",
        new="not decoded",
        test="prepare/test_coverage.py::test_headers_of_roles_are_kept_or_refused",
        quick=True,
    ),
    Fault(
        subject="splits, names",
        description=(
            "a file whose name says that it is for validation is split by hash, and trained on"
        ),
        file="runtime/prepare/splits.py",
        function="choose_splits",
        old="not held_out or not others",
        new="True",
        test="prepare/test_splits.py::test_names_split_the_files[a-train.txt a-valid.txt]",
        quick=True,
    ),
    Fault(
        subject="splits, unclear names",
        description="few files that say validation by name are trained on",
        file="runtime/prepare/splits.py",
        function="choose_splits",
        old='not by_split["train"] or 2 * len(by_split["none"]) > len(files)',
        new="False",
        test=(
            "prepare/test_splits.py::"
            "test_names_that_are_not_clear_are_refused_with_both_ways[a.txt b.txt valid.txt]"
        ),
        quick=True,
    ),
    Fault(
        subject="splits, duplicates",
        description="a document that is validated on is trained on, too",
        file="runtime/prepare/splits.py",
        function="split_as_asked",
        old="""\
ordered: list[tuple[str, str | None]] = [(file, "val") for file in val_files]
ordered += [(file, "train") for file in train_files]""",
        new="""\
ordered = [(file, "train") for file in train_files]
ordered += [(file, "val") for file in val_files]""",
        test="prepare/test_splits.py::test_val_is_validated_on_and_nothing_of_it_is_trained_on",
        quick=True,
    ),
    Fault(
        subject="token files, --dtype",
        description="int64 is copied as twice as many ids if --dtype says uint32",
        file="runtime/prepare/shards.py",
        function="raw_file",
        old='kind.itemsize == 4 and seeming_type(path) == "int64"',
        new="False",
        test=(
            "data/test_token_files.py::test_another_type_than_the_files_have_is_refused["
            "int64 as uint32]"
        ),
        quick=True,
    ),
    Fault(
        subject="CSV, quotes",
        description="a quote that isn't closed swallows the rows after it",
        file="runtime/prepare/delimited.py",
        function="table_texts",
        old="strict=True",
        new="strict=False",
        test=(
            "prepare/test_tables.py::test_a_table_that_is_not_as_it_seems_is_a_sentence[a "
            "quote that closes later]"
        ),
        quick=True,
    ),
    Fault(
        subject="CSV, columns",
        description="a comma in a text without quotes ends the text",
        file="runtime/prepare/delimited.py",
        function="table_texts",
        old="row and len(row) != len(header)",
        new="False",
        test="prepare/test_tables.py::test_a_table_that_is_not_as_it_seems_is_a_sentence[a comma]",
        quick=True,
    ),
    Fault(
        subject="white space",
        description="texts of white space alone are documents in JSON lines, tables and Parquet",
        file="runtime/prepare/inputs.py",
        function="text_of",
        old="not text or text.isspace()",
        new="not text",
        test="prepare/test_tables.py::test_white_space_alone_is_no_document[a.jsonl]",
        quick=True,
    ),
    Fault(
        subject="lines",
        description="each line keeps its line end, so that of characters it ends twice",
        file="runtime/prepare/inputs.py",
        function="text_of",
        old='text = text.removesuffix("\\n")',
        new="pass",
        test="prepare/test_tables.py::test_each_line_is_a_document",
        quick=True,
    ),
    Fault(
        subject="text errors",
        description="the offset of a byte that isn't UTF-8 is that of its piece of the text",
        file="runtime/prepare/pipeline.py",
        function="Reader.classify",
        old="at += error.start",
        new="pass",
        test="prepare/test_prepare.py::test_a_mistake_is_told_in_a_sentence_and_leaves_nothing",
        quick=True,
    ),
    Fault(
        subject="Parquet, columns",
        description="of two columns of one name, one is read without a word",
        file="runtime/prepare/tables.py",
        function="check_unique",
        old="""\
if count > 1:
    raise UserError(f"{name} has several {of} {repeated!r}: rename all but one")""",
        new="""\
if False:
    raise UserError(f"{name} has several {of} {repeated!r}: rename all but one")""",
        test="prepare/test_conversation_files.py::test_two_columns_of_one_name_are_refused[parquet]",
    ),
    Fault(
        subject="preparations, full disk",
        description="a folder that could not be written is left there, with its lock",
        file="runtime/files.py",
        function="new_files_in",
        old="""\
if is_new_lock:
    lock_file.unlink()""",
        new="""\
if is_new_lock:
        pass""",
        test="prepare/test_prepare.py::test_what_cannot_be_written_is_named[a.txt-options0-out]",
    ),
    Fault(
        subject="lines, carriage returns",
        description="only a newline ends a line, so that a file with others is one document",
        file="runtime/prepare/delimited.py",
        function="line_texts",
        old='io.TextIOWrapper(file, encoding="latin-1", newline="")',
        new='io.TextIOWrapper(file, encoding="latin-1", newline="\\n")',
        test="prepare/test_tables.py::test_any_line_end_ends_a_document[\\r]",
    ),
    Fault(
        subject="options, cutting",
        description="--max_document_bytes is accepted and does nothing where no text is cut",
        file="data/prepare.py",
        function="check_fields",
        old="""\
if args.max_document_bytes is not None and not kinds & {"text", "shard"}:
    raise UserError(f"--max_document_bytes={args.max_document_bytes} cuts texts, and these "
                    "files have documents of their own, which are never cut: drop it")""",
        new="""\
if False:
    raise UserError(f"--max_document_bytes={args.max_document_bytes} cuts texts, and these "
                    "files have documents of their own, which are never cut: drop it")""",
        test="prepare/test_conversation_files.py::test_options_that_would_do_nothing_are_refused[cut JSON]",
    ),
    Fault(
        subject="chat, Parquet's JSON, a field twice",
        description="of two fields of one name in it, the last one is kept without a word",
        file="runtime/prepare/tables.py",
        function="json_text",
        old="return value",
        new="return plain_json(json.loads(value))",
        test=(
            "prepare/test_conversation_files.py::"
            "test_a_field_twice_in_parquets_json_is_refused_as_in_json_lines"
        ),
    ),
]
