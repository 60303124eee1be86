"""Settings, case by case (configurator.py), and the DeepSpeed JSON (runtime/engine/ds_config.py)."""

import ast
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args

import pytest
from conftest import ROOT, STAGES, launch
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from monitor.test_profiler import MEASURED
from zero_ways import GROUPS

from configurator import configure, settings_of_script
from runtime.data.loader import BatchSizes
from runtime.engine import ds_config
from runtime.errors import UserError
from runtime.paths import PATH_SETTINGS

SCRIPT = ROOT / "train_deepspeed.py"
CONFIGS = [*sorted((ROOT / "config").glob("*.py")), ROOT / "examples" / "instructions" / "config.py"]
JSONS = sorted([*ROOT.glob("ds_config_*.json"), *ROOT.glob("config/ds/*.json")])
DEFAULTS = {"out_dir": "out", "max_iters": 20, "learning_rate": 3e-5, "eval_only": False, "n_layer": None,
            "min_lr": None, "schedule": "cosine", "compile": "auto"}
ANNOTATIONS = {"n_layer": int | None, "min_lr": float | None, "schedule": Literal["cosine", "linear"],
               "compile": bool | Literal["auto"]}


def parse(*argv, root="."):
    """What the command line changes of DEFAULTS."""
    settings = vars(configure(DEFAULTS, [str(arg) for arg in argv], ANNOTATIONS, root))
    assert list(settings) == list(DEFAULTS)
    return {name: value for name, value in settings.items() if value != DEFAULTS[name]}


def refused(*argv, root="."):
    """The problems of a command line, one string each."""
    with pytest.raises(UserError) as error:
        configure(DEFAULTS, [str(arg) for arg in argv], ANNOTATIONS, root)
    return str(error.value).splitlines()


@pytest.fixture
def config(tmp_path):
    """config(text) -> the path of a config file with this text."""

    def write(text, name="mine.py"):
        (tmp_path / name).write_text(text, "latin-1")
        return tmp_path / name

    return write


@pytest.mark.parametrize("argv, changed", [
    ([], {}), (["--max_iters=5"], {"max_iters": 5}), (["--max_iters", "5"], {"max_iters": 5}),
    (["--max_iters=600_000"], {"max_iters": 600000}), (["--max_iters=1e3"], {"max_iters": 1000}),
    (["--learning_rate=1"], {"learning_rate": 1.0}), (["--min_lr=0.5", "--min_lr=None"], {}),
    (["--out_dir=runs/a=b"], {"out_dir": "runs/a=b"}), (["--out_dir=7"], {"out_dir": "7"}),
    (["--out_dir=None"], {"out_dir": "None"}), (["--compile=false"], {"compile": False}),
    (["--compile=True", "--compile=auto"], {}), (["--eval_only", "true"], {"eval_only": True}),
    (["--eval_only", "--max_iters=5"], {"eval_only": True, "max_iters": 5}), (["--eval_only", "False"], {}),
    (["--local_rank", "3", "--max_iters=5"], {"max_iters": 5}),
    (["--max-iters=5", "--eval-only", "--learning-rate", "1e-4"],
     {"max_iters": 5, "eval_only": True, "learning_rate": 1e-4}),
], ids=" ".join)
def test_command_line_gives_values_of_the_settings_types(argv, changed):
    got = parse(*argv)
    assert got == changed
    assert {name: type(got[name]) for name in got} == {name: type(changed[name]) for name in changed}


@pytest.mark.parametrize("arg, problem", [
    ("--max_iters=1.5", "max_iters takes int, not '1.5'"),
    ("--max_iters=True", "max_iters takes int, not 'True'"),
    ("--max_iters=__import__('os')", "max_iters takes int, not \"__import__('os')\""),
    ("--learning_rate=auto", "learning_rate takes float, not 'auto'"),
    ("--eval_only=1", "eval_only takes True or False, not '1'"),
    ("--schedule=cosinus", "schedule takes cosine or linear, not 'cosinus'"),
    ("--compile=1", "compile takes auto or True or False, not '1'"),
    ("--zzz-z", "there is no setting 'zzz_z': docs/guides.md has those of other guides"),
    ("--compile --eval_only", "compile takes auto or True or False, not ''"),
    ("--max_iters", "max_iters takes int, not ''"), ("--out_dir", "out_dir has no value: write --out_dir=VALUE")])
def test_wrong_types_and_names_are_refused(arg, problem):
    assert refused(*arg.split()) == [f"command line: {problem}"]


def test_all_problems_are_told_at_once(config):
    path = config("max_iter = 3\nlearning_rate = 'high'\n")
    assert refused("--learing_rate=1", "--max_iters=x", path, "nowhere.py", "--schedule=1") == [
        "command line: there is no setting 'learing_rate': did you mean 'learning_rate'?",
        "command line: max_iters takes int, not 'x'", f"{path}: learning_rate takes float, not 'high'",
        f"{path}: there is no setting 'max_iter': did you mean 'max_iters'?",
        "config file nowhere.py does not exist: name a .py file, or write --key=value",
        "command line: schedule takes cosine or linear, not '1'"]


def test_what_looks_like_a_config_is_named_as_the_option_that_was_meant(tmp_path):
    assert refused("max_iters=3", "-max_iters=3", str(tmp_path)) == [
        "config file max_iters=3 does not exist: name a .py file, or write --max_iters=3",
        "config file -max_iters=3 does not exist: name a .py file, or write --max_iters=3",
        f"config file {tmp_path} is not a .py file: name a .py file, or write --key=value"]


@pytest.mark.parametrize("name, hint", [("zero.json", "--deepspeed_config={}"), ("notes.txt", "--key=value")])
def test_only_python_files_are_configs(config, name, hint):
    """Much JSON is Python too: run as a config file it would change nothing, without a word."""
    path = config('{"zero_optimization": {"stage": 1}}', name)
    run = launch(SCRIPT, path)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"config file {path} is not a .py file: name a .py file, or write {hint.format(path)}\n"


def test_the_defaults_are_left_alone_and_settings_are_frozen():
    before, settings = dict(DEFAULTS), configure(DEFAULTS, ["--max_iters=5"], ANNOTATIONS)
    assert before == DEFAULTS and settings.max_iters == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.max_iters = 6


def test_config_files_may_compute_and_import(config):
    path = config("import math\nfrom os.path import join\nfrom math import ceil, pi as _pi\n_tokens = 4 * 8\n"
                  "max_iters = ceil(math.floor(1000 / _tokens + _pi - 2)) / 1\n"
                  "def _half(x):\n    return x / 2\nlearning_rate = _half(learning_rate)\nout_dir = join('a', 'b')\n")
    assert parse(path) == {"max_iters": 32, "learning_rate": 1.5e-5, "out_dir": "a/b"}


def test_config_files_see_the_settings_so_far_and_nothing_of_the_configurator(config):
    path = config("learning_rate = max_iters * 2\nout_dir = str([name in globals() for name in ('problems', 'os')])\n")
    assert parse("--max_iters=7", path) == {"max_iters": 7, "learning_rate": 14.0, "out_dir": "[False, False]"}


def test_later_files_win_and_the_command_line_wins_over_files(config):
    first = config("max_iters = 1\nlearning_rate = 1\n", "first.py")
    second = config("max_iters = 2\n", "second.py")
    assert parse(first, second) == {"max_iters": 2, "learning_rate": 1.0}
    assert parse(second, first) == {"max_iters": 1, "learning_rate": 1.0}
    assert parse(first, "--max_iters=3") == {"max_iters": 3, "learning_rate": 1.0}
    assert parse("--max_iters=3", first) == {"max_iters": 3, "learning_rate": 1.0}
    settings = configure({"size": 1}, ["--size=auto", str(config("size = 2\n"))], {"size": int | str})
    assert settings.size == "auto" and settings.requested == {"size": 2}
    assert configure(DEFAULTS, ["--compile=auto"], ANNOTATIONS).requested == {}  # it was before


def test_config_files_are_checked_as_the_command_line_is(config):
    assert parse(config("learning_rate = 1\nn_layer = None\ncompile = 'auto'\n")) == {"learning_rate": 1.0}
    path = config("learning_rat = 1\nmax_iters = '5'\neval_only = 1\nn_layer = True\nmin_lr = 10**400\nzzz = 1")
    assert refused(path) == [
        f"{path}: max_iters takes int, not '5'", f"{path}: eval_only takes True or False, not 1",
        f"{path}: n_layer takes int or None, not True", f"{path}: min_lr takes float or None, not {10**400}",
        f"{path}: there is no setting 'learning_rat': did you mean 'learning_rate'?",
        f"{path}: there is no setting 'zzz': begin your own with _"]


@pytest.mark.parametrize("text, problem", [
    ("max_iters = 3\nlearning_rate = 1 / 0\n", "line 2: ZeroDivisionError: division by zero"),
    ("max_iters = 3\n\nif max_iters\n    pass\n", "line 3: SyntaxError: "),
    ("def _f():\n    return unheard\n\n_f()\n", "line 2: NameError: name 'unheard' is not defined"),
    ("import json\njson.loads('{')\n", "line 2: JSONDecodeError: "), ("\n'\xe9'", "line 2: SyntaxError: "),
], ids=["run", "syntax", "function", "library", "latin-1"])
def test_errors_in_config_files_are_told_with_file_and_line(config, text, problem):
    path = config(text)
    (line,) = refused(path)
    assert line.startswith(f"{path}, {problem}")


def test_config_files_are_found_here_and_then_in_the_root(tmp_path, monkeypatch):
    root, here = tmp_path / "root", tmp_path / "here"
    for folder, n in ((root, 1), (here, 2)):
        (folder / "config").mkdir(parents=True)
        (folder / "config" / "both.py").write_text(f"max_iters = {n}\n")
    (root / "config" / "root.py").write_text("max_iters = 3\n")
    monkeypatch.chdir(here)
    told = "in the working directory and in the project: write ./config/both.py"
    with pytest.raises(UserError, match=told):
        parse("config/both.py", root=root)
    assert parse("./config/both.py", root=root) == {"max_iters": 2}
    assert parse(f"{root}/config/both.py", root=root) == {"max_iters": 1}
    assert parse("config/root.py", root=root) == {"max_iters": 3}
    for wrong in ("config/rot.py", "root.py", "configs/root"):
        with pytest.raises(UserError, match=rf"^config file {wrong} does not exist: did you mean 'config/root.py'\?$"):
            parse(wrong, root=root)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_of_the_project_resolve(path):
    settings = vars(settings_of_script(str(SCRIPT), [str(path)]))
    json_file = ROOT / settings["deepspeed_config"]
    batch = BatchSizes(settings["batch_size"], settings["gradient_accumulation_steps"], 8, settings["block_size"])
    assert ds_config.complete_config(json_file, batch, 1.0, "bfloat16")[0]["train_batch_size"] == batch.sequences


def resolved(content, tmp_path, dtype="float32", world_size=4):
    """(config, notes) of a JSON with this content: an object, or the text itself."""
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return ds_config.complete_config(str(path), BatchSizes(2, 3, world_size, 32), 1.0, dtype)


def problems_of(content, tmp_path):
    """The lines with which a JSON is refused."""
    with pytest.raises(UserError) as error:
        resolved(content, tmp_path)
    lines = str(error.value).splitlines()
    assert all(line.startswith(f"{tmp_path}/ds.json") for line in lines)
    return lines


def zero(stage=2, **rest):
    return {"zero_optimization": {"stage": stage, **rest}}


@pytest.mark.parametrize("path", JSONS, ids=lambda path: path.stem)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_jsons_of_the_project_resolve(path, dtype):
    config, _ = ds_config.complete_config(str(path), BatchSizes(2, 3, 4, 32), 1.0, dtype)
    assert config["train_batch_size"] == 24
    named = int(re.search(r"zero(\d)", path.stem)[1])
    assert config["zero_optimization"]["stage"] == max(named, 2)
    assert ds_config.uses_offload(config) == ("offload" in path.stem)
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (dtype == "bfloat16", dtype == "float16")


def test_auto_is_resolved_in_the_keys_that_the_script_owns(tmp_path):
    autos = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
                           "gradient_clipping"), "auto")
    config, notes = resolved({**autos, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, **zero()}, tmp_path)
    assert {key: config[key] for key in autos} == {
        "train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0}
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"], notes) == (False, False, [])
    assert resolved({"train_batch_size": 24, **zero()}, tmp_path)[0]["train_batch_size"] == 24


@pytest.mark.parametrize("content, problem", [
    ({"zero_optimisation": {}}, "\"zero_optimisation\" is not supported: did you mean 'zero_optimization'?"),
    (zero(overlapp_comm=True), "\"zero_optimization.overlapp_comm\" is not supported: did you mean 'overlap_comm'?"),
    (zero(offload_optimizer={"device": "cpu", "pin": True}),
     '"zero_optimization.offload_optimizer.pin" is not supported: remove it'),
    ({"data_types": {"grad_accum_dtype": "bf17"}}, '"data_types.grad_accum_dtype" is "bf17"'),
    ({"train_batch_size": 32}, '"train_batch_size" is 32, but the script sets it to 24: remove it, or write "auto"'),
    ({"gradient_clipping": 0.5}, '"gradient_clipping" is 0.5, but the script sets it to 1.0'),
    (zero(True), '"zero_optimization.stage" is true: write 0 or 1 or 2 or 3'),
    (zero(2.0), '"zero_optimization.stage" is 2.0: write 0 or 1 or 2 or 3'),
    (zero(reduce_bucket_size=2.5), '"zero_optimization.reduce_bucket_size" is 2.5: write a whole number of at least 1'),
    (zero(overlap_comm="yes"), '"zero_optimization.overlap_comm" is "yes": write true or false'),
    (zero(offload_optimizer={"device": []}), '"zero_optimization.offload_optimizer.device" is []: write "cpu" or'),
    ({"steps_per_print": 0}, '"steps_per_print" is 0: write a whole number of at least 1'),
    (zero(reduce_bucket_size=1e30), "is 1e+30: write a whole number of at least 1, below 2**63"),
    (5000 * "[", " is not valid JSON: "),  # as deep as some versions of Python go
    ({"optimizer": {"type": "AdamW"}}, '"optimizer" is not supported: remove it, and see docs/memory.md'),
    (zero(offload_param={"device": "cpu"}), "offload_param\" has no effect below stage 3: use stage 3, or remove it"),
    ('{"bf16": {}, "bf16": {}}', " is not valid JSON: these keys come twice: bf16"),
    ("{", " is not valid JSON: "),
    ("[]", " must contain a JSON object"),
], ids=lambda value: None if isinstance(value, dict) else re.sub(r"\W+", "-", value)[:40])
def test_jsons_are_refused(content, problem, tmp_path):
    (line,) = problems_of(content, tmp_path)
    assert problem in line


@pytest.mark.parametrize("key", ds_config.STAGE3_DEFAULTS)
def test_another_prefetch_needs_deepspeeds_own_stage_3(key, tmp_path):
    for value, ours in ((ds_config.STAGE3_DEFAULTS[key], True), (0, False)):
        assert ds_config.takes_our_gradients(resolved(zero(3, **{key: value}), tmp_path)[0]) is ours


def names_of_problems(content, tmp_path):
    """What each line of the refusal of a JSON names."""
    return [re.match(rf'{tmp_path}/ds.json: .*?"(.+?)"', line)[1] for line in problems_of(content, tmp_path)]


def test_all_problems_of_a_json_are_reported_in_one_round(tmp_path):
    """Each once, whatever its kind; and blocks of a wrong type hide no other problem."""
    assert names_of_problems({
        "foo": 1, "train_batch_size": 7, "scheduler": {"lr": "auto"}, "fp16": [], "data_types": {"a": 1},
        "bf16": {"enabled": True, "foo": 1, "bf16_optimizer_states": True}, "steps_per_print": "auto",
        **zero(0, reduce_bucket_size=-1, overlap_comm="auto", cpu_offload=True, zero_quantized_weights="lots",
               offload_optimizer={"device": "nvme", "ratio": 0.5, "pin_memory": 7}, offload_param={"device": "cpu"}),
    }, tmp_path) == [
        "train_batch_size", "bf16.enabled", "foo", "scheduler", "fp16", "data_types.a", "bf16.foo",
        "bf16.bf16_optimizer_states", "steps_per_print",
        *(f"zero_optimization.{key}" for key in (
            "reduce_bucket_size", "overlap_comm", "cpu_offload", "zero_quantized_weights", "offload_optimizer.device",
            "offload_optimizer.ratio", "offload_optimizer.pin_memory", "offload_param"))]
    assert names_of_problems({"zero_optimization": 2, "bf16": None, "fp16": 1, "data_types": "x", "foo": 1}, tmp_path) \
        == ["zero_optimization", "bf16", "fp16", "data_types", "foo"]


def fields_of(model, path):
    """Map the dotted name of each field of a model of DeepSpeed, and of the models inside it, to its default."""
    fields = {}
    for name, field in model.model_fields.items():
        here = f"{path}.{field.alias or name}"
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if hasattr(kind, "model_fields")]
        fields |= fields_of(inner[0], here) if inner else {here: field.get_default(call_default_factory=True)}
    return fields


FIELDS = (fields_of(DeepSpeedZeroConfig, "zero_optimization") | fields_of(DeepSpeedBF16Config, "bf16")
          | fields_of(DeepSpeedFP16Config, "fp16"))


def leaves(node, path=""):
    """List (dotted name, value) of all that is in a JSON."""
    if not isinstance(node, dict):
        return [(path, node)]
    return [leaf for key, value in node.items() for leaf in leaves(value, f"{path}.{key}" if path else key)]


def trained_with():
    """Return the dotted names that tests train with in a value other than DeepSpeed's default.

    Read from what they run: the ways of zero_ways.py, and the JSONs of conftest.py and test_profiler.py."""
    settings = leaves(MEASURED)
    for path in STAGES.values():
        settings += leaves(json.loads((ROOT / path).read_text()))
    for way in [way for group in GROUPS.values() for way in group.ways]:
        settings += leaves({**way.config, **zero(way.stage, **way.zero)})
        if way.dtype in ds_config.DTYPE_BLOCK:
            settings.append((f"{ds_config.DTYPE_BLOCK[way.dtype]}.enabled", True))
    return {name for name, value in settings if name not in FIELDS or value != FIELDS[name]}


def test_what_is_not_refused_is_tested():
    """The keys that may be changed have none that no test trains with. The others may have DeepSpeed's default."""
    rules = dict(leaves(ds_config.allowed_keys("bfloat16")))
    fixed = {name: rule[0] for name, rule in rules.items() if isinstance(rule, tuple) and len(rule) == 1}
    assert rules.keys() - fixed == trained_with() - fixed.keys()
    ours = {"data_types.grad_accum_dtype": "fp32", "communication_data_type": "bf16"}  # DeepSpeed's are others, or None
    assert fixed == {name: ours.get(name, FIELDS.get(name)) for name in fixed}


@pytest.mark.parametrize("block, enabled, dtype", [
    ("bf16", False, "bfloat16"), ("fp16", False, "float16"), ("fp16", True, "bfloat16"), ("bf16", True, "float16")])
def test_precision_blocks_may_not_contradict_dtype(block, enabled, dtype, tmp_path):
    with pytest.raises(UserError, match=f'"{block}.enabled" is {str(enabled).lower()}, but dtype={dtype}'):
        resolved({block: {"enabled": enabled}, **zero()}, tmp_path, dtype)
    other = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    assert resolved({other: {"enabled": True}, **zero()}, tmp_path, dtype)[0][other]["enabled"] is True


def test_what_deepspeed_gets_wrong_is_mended_and_told(tmp_path):
    for content, stage in ((zero(0), 0), (zero(1), 1), ({}, 0)):
        config, (note,) = resolved(content, tmp_path)
        assert config["zero_optimization"]["stage"] == 2 and f"stage {stage} runs as stage 2" in note
    config, _ = resolved(zero(2), tmp_path)
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}


def test_a_reader_that_goes_away_ends_it_quietly():
    """As after `| head`: by SIGPIPE, and without a word."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        done = subprocess.run([sys.executable, SCRIPT, "--help"], stdout=stdout, stderr=subprocess.PIPE,
                              env={**os.environ, "PYTHONUNBUFFERED": "1"}, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def without(package, words):
    """A script in a Python where the import of one package fails."""
    code = ("import runpy, sys; _, package, *sys.argv = sys.argv; sys.modules[package] = None; "
            "runpy.run_path(sys.argv[0], run_name='__main__')")
    return subprocess.run([sys.executable, "-c", code, package, *words.split()], cwd=ROOT, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("package, words", [
    ("torch", "train_deepspeed.py"), ("torch", "launch_deepspeed.py"), ("matplotlib", "plot.py {folder}"),
    ("numpy", "data/prepare.py README.md --name={folder}/mine"), ("psutil", "doctor.py"),
    ("datasets", "data/prepare_hub.py --dataset=a/b --name={folder}/mine")])
def test_a_package_that_is_missing_is_named_with_the_fix(package, words, tmp_path):
    (tmp_path / "history.jsonl").write_text('{"iter": 1, "loss": 2.0}\n')
    done = without(package, words.format(folder=tmp_path))
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "") and package in line and not (tmp_path / "mine").exists()
    assert line.endswith(": run source .venv/bin/activate, or python -m pip install -r requirements.txt")


@pytest.mark.parametrize("script", ["train_deepspeed.py", "launch_deepspeed.py", "sample.py", "doctor.py", "plot.py"])
def test_a_working_directory_that_is_gone_is_named(script, tmp_path):
    """As after removing the project and cloning it again, in the shell that was there."""
    command = 'cd "$1" && rmdir "$1" && exec "$2" "$3" --dry_run=True'
    done = subprocess.run(["bash", "-c", command, "bash", tmp_path, sys.executable, ROOT / script],
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("the working directory can't be used (No such file or directory): it was removed")


def test_a_module_of_ours_that_is_missing_is_a_bug():
    done = without("runtime.output", "train_deepspeed.py")
    assert done.returncode == 1 and "Traceback" in done.stderr
    assert "runtime.output" in done.stderr.splitlines()[-1]


# Paths


SCRIPTS = ("train_deepspeed.py", "sample.py", "evaluate.py", "export_hf.py",
           "examples/animals90/src/train_deepspeed.py")
NO_PATHS = {"resume_tag", "tag", "sample_start", "start", "wandb_project", "wandb_run_name", "target_gpu", "dtype",
            "lora_target_modules", "device", "backend", "optimizer", "lr_schedule", "on_rising_norms", "batch_ramp",
            "length_ramp"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_setting_that_may_be_a_path_is_expanded(script, monkeypatch):
    """~ and variables, on the command line and in configs. A new setting with text is a path, or in NO_PATHS."""
    monkeypatch.setenv("SCRATCH", "/scratch")
    settings = settings_of_script(ROOT / script, [])
    source = (ROOT / script).read_text(encoding="utf-8")
    texts = set(re.findall(r"^(\w+)(?:: [^=]*\bstr\b[^=]*)? = (?:\"|None)", source, re.M)) & set(vars(settings))
    texts = {name for name in texts
             if isinstance(vars(settings)[name], str) or re.search(rf"^{name}: .*str", source, re.M)}
    paths = texts - NO_PATHS
    assert paths <= PATH_SETTINGS, paths - PATH_SETTINGS
    for name in paths:
        for written, meant in (("~/x", f"{Path.home()}/x"), ("$SCRATCH/x", "/scratch/x"), ("${SCRATCH}", "/scratch")):
            assert vars(settings_of_script(ROOT / script, [f"--{name}={written}"]))[name] == meant


OPTIONS_WITH_PATHS = {
    "data/prepare.py": {"paths", "--name", "--tokenizer", "--val"},
    "data/prepare_hub.py": {"--dataset", "--name"},
    "plot.py": {"out_dirs", "--png"},
    "bench.py": {"--json"},
    "examples/animals90/prepare.py": {"--from", "--to"},
    "examples/animals90/src/utils.py": {"--history", "--output"},
}
# That are no paths. prepare_hub.py's --val is the name of a split
TEXTS = {"--field", "--config", "--column", "--ignore_fields", "--val"}


@pytest.mark.parametrize("script", OPTIONS_WITH_PATHS)
def test_each_option_that_may_be_a_path_is_expanded(script):
    """Those of scripts with argparse. A new option with text is a path, or in TEXTS."""
    texts = set()
    expanded = set()
    for call in ast.walk(ast.parse((ROOT / script).read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] not in ("add", "add_argument"):
            continue
        if not isinstance(call.args[0], ast.Constant):  # what is added to a set, and numbers
            continue
        name = call.args[0].value
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if keywords.get("type") == "expand_path":
            expanded.add(name)
        elif not keywords.keys() & {"type", "action", "choices"}:
            texts.add(name)
    assert texts <= TEXTS and expanded == OPTIONS_WITH_PATHS[script]


def test_paths_in_a_config_and_in_a_mixture(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch")
    (tmp_path / "own.py").write_text('out_dir = "$SCRATCH/run"\ndataset = {"~/a": 0.5, "mine": 0.5}\n')
    settings = settings_of_script(ROOT / "train_deepspeed.py", [f"{tmp_path}/own.py"])
    assert settings.out_dir == "/scratch/run" and settings.dataset == {f"{Path.home()}/a": 0.5, "mine": 0.5}


SHELL = ("of what a shell replaces, only ~, $NAME and ${NAME} are replaced here: write the folder itself, or in a "
         "config compute it in Python")


@pytest.mark.parametrize("argument, problem", [
    ("--out_dir=$NOT_SET/x", "out_dir=$NOT_SET/x: the variable NOT_SET is not set: set it, or write the folder itself"),
    ("--init_from=~nobody-here/x",
     "init_from=~nobody-here/x: there is no such user: write ./~nobody-here/x for a folder of this name"),
    ("--out_dir=${NOT_SET:-/data}/x", f"out_dir=${{NOT_SET:-/data}}/x: {SHELL}"),
    ("--dataset=$(pwd)/x", f"dataset=$(pwd)/x: {SHELL}"),
    ("--dataset=`pwd`/x", f"dataset=`pwd`/x: {SHELL}")])
def test_a_path_that_cannot_be_expanded_is_refused(capsys, argument, problem):
    with pytest.raises(SystemExit, match="2"):
        settings_of_script(ROOT / "train_deepspeed.py", [argument])
    assert capsys.readouterr().err == f"command line: {problem}\n"
