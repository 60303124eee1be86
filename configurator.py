"""Settings: a script's defaults <- config files <- --key=value, checked.

    python train_deepspeed.py config/xl_shakespeare.py --learning_rate=1e-5 --max_iters 40

A script's settings are its top-level names. Their types are those of the defaults, or the
annotations if one type is not enough (`lr_decay_iters: int | None = None`,
`lr_schedule: Literal["cosine", "linear"] = "cosine"`).

Config files are Python. They run in a namespace of their own that holds the settings so far. They
may compute, import modules and functions, and use other names that begin with an underscore.
`--help` prints the settings' comments."""

import ast
import contextlib
import dataclasses
import difflib
import glob
import os
import re
import signal
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.other_guides import instead_of
from runtime.output import exit_with_error
from runtime.paths import PATH_SETTINGS, expand_path, expand_setting
from runtime.version import version_line

Allowed = tuple[set[type], tuple]  # the types that a setting may have, and the choices
FLAG: Allowed = ({bool}, ())
NAMES_OF_VALUES = {bool: ("True", "False"), type(None): ("None",)}
COMMAND_LINE = "command line"


# -----------------------------------------------------------------------------
# Defaults <- config files <- command line


def configure(
    defaults: dict[str, Any],
    argv: list[str],
    annotations: dict[str, Any] | None = None,
    root: str = ".",
    script: str | None = None,
) -> Any:
    """Return the settings that argv makes of `defaults`: a frozen dataclass with these fields.

    Its attribute `requested` has the values that "auto" replaced, for init_from=auto and
    batch_size=auto, and `changed` the names that are not at their defaults. script: its path.
    Config files are searched for in the working directory, then in `root`. Raises UserError with
    all problems.
    """
    # All problems are collected, so that a user sees them at once
    settings = Assignments(defaults, annotations or {}, root)
    settings.parse(argv)
    if settings.problems:
        raise UserError("\n".join(settings.problems))

    # The result is frozen, so that no part of a run changes it for another
    values = settings.values
    changed = tuple(name for name, value in values.items() if value != defaults[name])
    namespace = {"requested": settings.requested, "changed": changed, "script": script}
    kind = dataclasses.make_dataclass("Settings", values, namespace=namespace, frozen=True)
    return kind(**values)


class Assignments:
    """The values of settings so far, and all problems with what was assigned to them.

    root: where config files are searched for after the working directory.
    """

    def __init__(self, defaults: dict[str, Any], annotations: dict[str, Any], root: str) -> None:
        self.defaults = defaults
        self.values = dict(defaults)
        self.root = root
        self.requested: dict[str, Any] = {}  # what "auto" has replaced
        self.problems: list[str] = []
        self.allowed: dict[str, Allowed] = {}
        for name, value in defaults.items():
            self.allowed[name] = allowed_values(value, annotations.get(name))

    def parse(self, argv: list[str]) -> None:
        """Assign what config files and arguments say, in this order."""
        chosen = {}  # on the command line
        args = list(argv)
        while args:
            arg = args.pop(0)
            if not arg.startswith("--"):
                self.assign_config(arg)
                continue
            name, value = self.split_argument(arg, args)
            # The deepspeed launcher adds --local_rank for every script. We use LOCAL_RANK
            if value is None or name == "local_rank":
                continue
            self.assign(name, value, COMMAND_LINE, parse_value)
            chosen[name] = self.values.get(name)

        # A config file that follows doesn't change what was chosen
        for name in chosen.keys() & self.values.keys():
            self.assign(name, chosen[name], COMMAND_LINE, validate)

    def split_argument(self, arg: str, following: list[str]) -> tuple[str, str | None]:
        """Return the name and the value of --name=value, --name value or a flag, --name.

        following: the arguments after this one; a value is removed from it. The value is None if a
        problem was added.
        """
        name, equals, value = arg[2:].partition("=")
        name = name.replace("-", "_")
        if equals:
            return name, value

        # The value may be the next argument, unless that is an option itself
        is_flag = self.allowed.get(name) == FLAG
        if following and not following[0].startswith("--"):
            if not is_flag or following[0].isalnum():  # after a flag, it may be a config file
                return name, following.pop(0)
        if is_flag:
            return name, "True"
        if name in self.allowed and str in self.allowed[name][0]:  # other types don't take ""
            self.problems.append(f"{COMMAND_LINE}: {name} has no value: write --{name}=VALUE")
            return name, None
        return name, ""

    def assign_config(self, path: str) -> None:
        """Run a config file, and assign what it says."""
        try:
            assigned = run_config_file(path, self.values, self.root)
        except UserError as error:
            self.problems.append(str(error))
            return
        for name, value in assigned.items():
            self.assign(name, value, path, validate)

    def assign(self, name: str, value: Any, where: str, convert: Callable) -> None:
        """Assign a value, or add a problem. where: COMMAND_LINE, or a config file's path."""
        if name not in self.defaults:
            fix = fix_of_name(name, value, where, self.defaults)
            self.problems.append(f"{where}: there is no setting '{name}': {fix}")
            return
        try:
            value = convert(value, *self.allowed[name])
            if name in PATH_SETTINGS:
                value = expand_setting(value)
        except ValueError as error:
            self.problems.append(f"{where}: {name} {error}")
            return
        except UserError as error:  # a path
            self.problems.append(f"{where}: {name}={error}")
            return

        # Keep what "auto" replaces: a script may need both
        if value == "auto" and self.values[name] != "auto":
            self.requested[name] = self.values[name]
        self.values[name] = value


def fix_of_name(name: str, value: Any, where: str, known: Collection[str]) -> str:
    """Return what to do about a name that is no setting.

    where: COMMAND_LINE, or a config file's path. known: the settings' names. An option of other
    training scripts is one only where train_deepspeed.py's settings are known.
    """
    if "max_iters" in known:
        ours = instead_of(name, value)
        if ours is not None:
            return ours

    # Perhaps a typing error
    nearest = did_you_mean(name, known).removeprefix(": ")
    if nearest:
        return nearest
    if where == COMMAND_LINE:
        return "docs/guides.md has those of other guides"
    return "begin your own with _"


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return ": did you mean ...?" with the known name closest to `name`, or ""."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not matches:
        return ""
    return f": did you mean '{matches[0]}'?"


# -----------------------------------------------------------------------------
# Types and values


def allowed_values(default: Any, annotation: Any) -> Allowed:
    """Return what a setting may be, from its annotation or else from its default."""
    if annotation is None:
        return {type(default)}, ()

    # int | Literal["auto"] is made of int and "auto"
    parts: list[Any] = []
    for part in typing.get_args(annotation) or [annotation]:
        parts += typing.get_args(part) or [part]
    allowed_types = {part for part in parts if isinstance(part, type)}
    choices = tuple(part for part in parts if not isinstance(part, type))
    return allowed_types, choices


def value_names(allowed_types: set[type], choices: tuple) -> list[str]:
    """Return the values as a user writes them: ["auto", "True", "False"], or ["int", "None"]."""
    names = [*choices]
    for kind in sorted(allowed_types, key=lambda kind: (kind is type(None), kind.__name__)):
        names += NAMES_OF_VALUES.get(kind, (kind.__name__,))
    return names


def validate(value: Any, allowed_types: set[type], choices: tuple) -> Any:
    """Return `value` if it has one of the types or is a choice. Raises ValueError.

    Numbers may be written as the other type: 1, 1e3.
    """
    if (type(value) in allowed_types) or value in choices:
        return value

    # Larger whole numbers don't fit into a float
    if float in allowed_types and type(value) is int and abs(value) < 2**1023:
        return float(value)
    if int in allowed_types and type(value) is float and value.is_integer():
        return int(value)
    raise ValueError(f"takes {' or '.join(value_names(allowed_types, choices))}, not {value!r}")


def parse_value(text: str, allowed_types: set[type], choices: tuple) -> Any:
    """Return the value of a command line's text for a setting of these types. Raises ValueError."""
    if text in choices or allowed_types == {str}:
        return validate(text, allowed_types, choices)
    python = text
    if text in ("true", "false"):
        python = text.capitalize()
    with contextlib.suppress(ValueError, TypeError, SyntaxError, OverflowError):
        value = ast.literal_eval(python)
        return validate(value, allowed_types, choices)
    return validate(text, allowed_types, choices)


# -----------------------------------------------------------------------------
# Config files


def find_config_file(path: str, root: str) -> str | None:
    """Return the config file of this path in the working directory or in `root`, or None.

    Raises UserError if there are two: a config is code, and the one in the working directory may be
    somebody else's.
    """
    in_root = os.path.join(root, path)
    found = [place for place in (path, in_root) if os.path.isfile(place)]
    is_explicit = path.startswith((os.curdir + os.sep, os.pardir + os.sep)) or os.path.isabs(path)
    if len(found) == 2 and not is_explicit and not os.path.samefile(*found):
        raise UserError(
            f"config file {path} is in the working directory and in the project: write ./{path} or "
            f"{in_root}"
        )
    if not found:
        return None
    return found[0]


def run_config_file(path: str, values: dict[str, Any], root: str) -> dict[str, Any]:
    """Run a config file on the settings' values so far, by name, and return what it assigned.

    Raises UserError.
    """
    path = expand_path(path)
    file = find_config_file(path, root)
    if file is None or not path.endswith(".py"):  # JSON is often valid Python, and changes nothing
        raise no_config(path, file, root)

    names = dict(values)
    try:
        code = compile(Path(file).read_bytes(), file, "exec")
        exec(code, names)
    except (Exception, SystemExit) as error:  # the user's own Python
        line = line_of_error(error, file)
        raise UserError(f"{path}, line {line}: {type(error).__name__}: {error}") from None

    # What it has imported or defined is no setting
    assigned = {}
    for name, value in names.items():
        is_new = name not in values or value is not values[name]
        is_code = callable(value) or isinstance(value, types.ModuleType)
        if is_new and not is_code and not name.startswith("_"):
            assigned[name] = value
    return assigned


def line_of_error(error: BaseException, file: str) -> int | None:
    """Return the line of a file that has raised an error, or that can't be parsed."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    if lines:
        return lines[-1]
    return getattr(error, "lineno", None)


def no_config(path: str, file: str | None, root: str) -> UserError:
    """Return the error for what isn't a config file. file: what was found, or None."""
    problem = "does not exist"
    if file or os.path.isdir(path):
        problem = "is not a .py file"
    if file is None:
        known = glob.glob("config/**/*.py", root_dir=root, recursive=True)
        nearest = did_you_mean(path, known)
        if nearest:
            return UserError(f"config file {path} {problem}{nearest}")

    # Perhaps it is a setting
    hint = "--key=value"
    if path.endswith(".json"):
        hint = f"--deepspeed_config={path}"
    elif "=" in path:
        hint = f"--{path.lstrip('-')}"
    return UserError(f"config file {path} {problem}: name a .py file, or write {hint}")


# -----------------------------------------------------------------------------
# A script's settings


def help_text(source: str, defaults: dict[str, Any], annotations: dict[str, Any]) -> str:
    """Return the text of --help, also docs/settings.md: a script's docstring, and its settings.

    source: the script's lines up to its settings' end. A comment line before settings is their
    heading. One that begins in lower case continues the comment of the setting above it.
    """
    docstring = ast.get_docstring(ast.parse(source)) or ""
    shown = [docstring, "", "Settings, as --key=value:"]
    heading = None
    joined = re.sub(r"\n# (?![A-Z])", " ", source)
    for line in joined.splitlines():
        if line.startswith("# "):
            heading = line[2:]
            continue
        setting = re.match(r"(\w+)(?:: .+?)? = .*?(?:  # (.*))?$", line)
        if not setting or setting[1] not in defaults:
            continue
        if heading:
            shown += ["", heading, "-" * len(heading), ""]
            heading = None
        name = setting[1]
        comment = setting[2] or ""
        if name in annotations:
            names = value_names(*allowed_values(None, annotations[name]))
            comment += f" [{' | '.join(names)}]"

        # The name and the default on the left, the comment on the right
        assignment = f"    --{name}={defaults[name]!r}"
        left = f"{assignment:<44} "
        shown += textwrap.wrap(comment, 120, initial_indent=left, subsequent_indent=" " * 45)
    return "\n".join(shown)


def run_settings(source: str, script: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a script's source and their annotations, both by name.

    Only assignments to names in lower case run.
    """
    names = {"Literal": typing.Literal}
    annotations = {}
    for node in ast.parse(source).body:
        if not re.match(r"[a-z]\w*(: .+)? = ", ast.unparse(node)):
            continue
        exec(compile(ast.Module([node], []), script, "exec"), names)
        # From Python 3.14 on, exec doesn't fill __annotations__
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            annotation = compile(ast.Expression(node.annotation), script, "eval")
            annotations[node.target.id] = eval(annotation, names)
    defaults = {name: value for name, value in names.items() if name[0].islower()}
    return defaults, annotations


def settings_of_script(
    script: str,
    argv: list[str] | None = None,
    on_error: Callable[[UserError], Any] = exit_with_error,
) -> Any:
    """Return the settings that a script, given by its path, makes of `argv`: see configure().

    argv: None for the command line. Only the script's settings run: its assignments to names in
    lower case, up to where it calls the configurator. Exits after --help and --version. For
    mistakes, calls on_error(UserError), which prints one line each and exits with code 2.
    """
    if argv is None:
        argv = sys.argv[1:]
    text = Path(script).read_text(encoding="utf-8")
    source = re.split(r"^.*\bconfigurator\.\w+\(", text, maxsplit=1, flags=re.MULTILINE)[0]
    defaults, annotations = run_settings(source, script)

    if "--help" in argv or "-h" in argv:
        # Exit without a message when nobody reads it, as after `| head`
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        print(help_text(source, defaults, annotations))
        raise SystemExit(0)
    if "--version" in argv:
        print(version_line())
        raise SystemExit(0)
    root = os.path.dirname(os.path.abspath(script))
    try:
        return configure(defaults, argv, annotations, root, script)
    except UserError as error:
        return on_error(error)
