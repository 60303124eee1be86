"""The table of what is used of DeepSpeed is complete, and fits the installed version."""

import ast
import importlib
import inspect
import re

import pytest
from conftest import ROOT

from runtime.engine import layout

ENGINE = ROOT / "runtime" / "engine"
# Where an owner's attributes come from in DeepSpeed
SOURCES = {
    "engine": ("deepspeed.runtime.engine",),
    "zero": ("deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3"),
    "zero2": ("deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.base_optimizer"),
    "zero3": ("deepspeed.runtime.zero.stage3", "deepspeed.runtime.base_optimizer"),
    "param": ("deepspeed.runtime.zero.partition_parameters", "deepspeed.utils.mixed_precision_linkage"),
    "adam": ("deepspeed.ops.adam.cpu_adam",),
    "scaler": ("deepspeed.runtime.fp16.loss_scaler",),
    "ops": ("deepspeed.ops",),
}
SUBCLASSES = {
    layout.QuietEngine: "engine",
    layout.OurStage2: "zero2",
    layout.ExactStage2: "zero2",
    layout.OurStage3: "zero3",
    layout.ExactStage3: "zero3",
}
OURS = {"hooks", "__class__"}  # what is not DeepSpeed's
# Names of the table that our own objects, PyTorch's, or DeepSpeed's documented engine have, too
COMMON = {
    "checkpoint_engine", "config", "dtype", "dynamic", "global_steps", "loss_scale", "loss_scaler", "module",
    "optimizer", "save_checkpoint", "set_gradient_accumulation_boundary", "step", "zero_optimization_stage",
    "zero_use_cpu_optimizer",
}


def table():
    """The rows of the table, {(owner, name)}."""
    return {(row.owner, name) for row in layout.INTERNALS for name in row.names.split()}


def used():
    """What the file uses, {(owner, name)}: attributes of the variables of OWNERS, of `self` in the subclasses, and
    methods that these replace."""
    found = {("scaler", name) for name in layout.SCALER_FIELDS}
    tree = ast.parse((ENGINE / "layout.py").read_text(encoding="utf-8"))
    owner_of_class = {cls.__name__: owner for cls, owner in SUBCLASSES.items()}
    for top in tree.body:
        owner_of_self = owner_of_class.get(getattr(top, "name", ""))
        for node in ast.walk(top):
            if isinstance(node, ast.FunctionDef) and owner_of_self:
                found.add((owner_of_self, node.name))
            if not isinstance(node, ast.Attribute):
                continue
            base = node.value
            name = base.id if isinstance(base, ast.Name) else getattr(base, "attr", "")
            if name == "self" and owner_of_self:
                found.add((owner_of_self, node.attr))
            elif name == "param" and node.attr.startswith(("ds_", "_hp_")):
                found.add(("param", node.attr))
            elif name in layout.OWNERS and name != "param" and (name == "engine" or isinstance(base, ast.Name)):
                found.add((name, node.attr))
    return {(owner, name) for owner, name in found if name not in OURS}


def test_the_table_is_what_the_file_uses():
    listed = table()
    any_stage = {name for owner, name in listed if owner == "zero"}
    without = {(owner, name) for owner, name in used() - listed if not (owner[:4] == "zero" and name in any_stage)}
    assert not without, "used, but not in the table"
    names = {name for _, name in used()}
    assert not {name for _, name in listed if name not in names}, "in the table, but not used"
    assert len(listed) > 50


@pytest.mark.parametrize("owner", SOURCES)
def test_the_installed_version_has_what_the_table_names(owner):
    source = "".join(inspect.getsource(importlib.import_module(name)) for name in SOURCES[owner])
    names = [name for row, name in table() if row == owner]
    assert names
    for name in names:
        pattern = rf"\.{name}\b|def {name}\b|\"{name}\"|'{name}'"
        assert re.search(pattern, source), f"DeepSpeed has no {name} in {SOURCES[owner]}"


def undecorated(function):
    """The function that DeepSpeed's instrument_w_nvtx has wrapped, without functools.wraps."""
    cells = function.__closure__ or ()
    inner = [cell.cell_contents for cell in cells if inspect.isfunction(cell.cell_contents)]
    return inner[0] if inner and list(inspect.signature(function).parameters) == ["args", "kwargs"] else function


@pytest.mark.parametrize("ours", [*SUBCLASSES, layout.Collector])
def test_methods_are_replaced_by_ones_that_are_called_alike(ours):
    base = ours.__mro__[1]
    methods = [name for name, value in vars(ours).items() if inspect.isfunction(value)]
    # Python 3.14 gives each class with annotations a function of its own for them
    methods = [name for name in methods if not name.startswith("__annotate")]
    assert methods
    for name in methods:
        theirs = list(inspect.signature(undecorated(getattr(base, name))).parameters)
        assert list(inspect.signature(getattr(ours, name)).parameters) == theirs, f"{ours.__name__}.{name}"


def test_only_this_file_uses_internals_of_deepspeed():
    """ds_config is our own name. _optimizer_step_pre_hooks and the like are PyTorch's."""
    ours = re.compile(r"(\w\.|engine\.|engine import .*|, )ds_config\b|optimizer\._optimizer_step_\w+")
    found = []
    for path in (ROOT / "runtime").rglob("*.py"):
        if path.name == "layout.py":
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(r"optimizer\._|engine\._|\.ds_[a-z]+", ours.sub("", line)):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found


def internals_in(source):
    """[line: what a source uses of DeepSpeed's internals]: names of the table, also as a text, what begins with `ds_`
    or with `_` of an object of DeepSpeed's, parts of engine.optimizer, and modules that are not documented."""
    names = {name for _, name in table()} - COMMON
    found = []
    for node in ast.walk(ast.parse(source)):
        used = None
        if isinstance(node, ast.Attribute):
            base = node.value
            holder = getattr(base, "id", getattr(base, "attr", ""))
            above = getattr(base, "value", None)
            of_engine = getattr(above, "id", getattr(above, "attr", "")) in ("engine", "deepspeed")
            if node.attr in names or holder == "optimizer" and of_engine:
                used = node.attr
            elif node.attr.startswith("_") and holder in ("deepspeed", "engine", "ops", "zero"):
                used = node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            text = getattr(node.args[1], "value", None)
            if text in names or str(text).startswith("ds_"):
                used = text
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepspeed"):
            if node.module not in ("deepspeed.runtime.engine", "deepspeed.utils"):
                used = node.module
        if used:
            found.append(f"{node.lineno}: {used}")
    return found


def test_no_other_file_reads_them_under_any_name():
    found = {}
    for path in (ROOT / "runtime").rglob("*.py"):
        lines = internals_in(path.read_text(encoding="utf-8"))
        if lines and path.name != "layout.py":
            found[str(path.relative_to(ROOT))] = lines
    # The estimate of FLOPs, which DeepSpeed documents
    assert found.keys() <= {"runtime/monitor/profiler.py"}, found


@pytest.mark.parametrize("line", [
    "engine.optimizer.loss_scaler.raise_error_at_min_scale = False", "deepspeed.ops.__compatible_ops__['a'] = False",
    "getattr(scaler, 'min_scale', math.inf)", "scale = scaler.cur_scale", "getattr(param, 'ds_shape', param.shape)",
    "engine.optimizer.loss_scale = 2.0", "from deepspeed.runtime.config_utils import f"])
def test_each_way_to_read_them_is_seen(line):
    assert internals_in(line)
