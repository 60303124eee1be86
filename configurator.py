"""Settings: a script's defaults <- config files <- --key=value, checked.

    python train_deepspeed.py config/xl_shakespeare.py --learning_rate=1e-5 --max_iters 40

A script's settings are its top-level names. Their types are those of the defaults, or the annotations if one type is
not enough (`lr_decay_iters: int | None = None`, `lr_schedule: Literal["cosine", "linear"] = "cosine"`).

Config files are Python. They run in a namespace of their own that holds the settings so far. They may compute, import
modules and functions, and use other names that begin with an underscore. `--help` prints the settings' comments."""

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
from pathlib import Path

from runtime.errors import UserError
from runtime.other_guides import instead_of
from runtime.output import exit_with_error
from runtime.paths import PATH_SETTINGS, expand_path, expand_setting

VALUES = {bool: ("True", "False"), type(None): ("None",)}


def configure(defaults, argv, annotations=None, root=".", script=None):
    """Return the settings that argv makes of the dict `defaults`: a frozen dataclass with its keys as fields. Its
    attribute requested has the values that "auto" replaced, for init_from=auto and batch_size=auto, and changed the
    names that are not at their defaults. script: its path. Config files are searched for in the working directory, then
    in `root`. Raises UserError with all problems."""
    values, requested, problems = dict(defaults), {}, []
    allowed = {name: allowed_values(value, (annotations or {}).get(name)) for name, value in defaults.items()}

    def assign(name, value, where, convert=validate):
        if name not in defaults:
            problems.append(f"{where}: there is no setting '{name}': {fix_of_name(name, value, where, defaults)}")
            return
        try:
            value = convert(value, *allowed[name])
            if name in PATH_SETTINGS:
                value = expand_setting(value)
            if value == "auto" and values[name] != "auto":
                requested[name] = values[name]
            values[name] = value
        except ValueError as error:
            problems.append(f"{where}: {name} {error}")
        except UserError as error:  # a path
            problems.append(f"{where}: {name}={error}")

    args, chosen = list(argv), {}  # chosen: on the command line
    while args:
        arg = args.pop(0)
        if not arg.startswith("--"):
            try:
                for name, value in run_config_file(arg, values, root).items():
                    assign(name, value, arg)
            except UserError as error:
                problems.append(str(error))
            continue
        name, equals, value = arg[2:].partition("=")
        name = name.replace("-", "_")
        if not equals:
            is_flag = allowed.get(name) == ({bool}, ())
            if args and not args[0].startswith("--") and (not is_flag or args[0].isalnum()):
                value = args.pop(0)
            elif is_flag:
                value = "True"
            elif str in allowed.get(name, [()])[0]:  # other types don't take ""
                problems.append(f"command line: {name} has no value: write --{name}=VALUE")
                continue
        if name != "local_rank":  # the deepspeed launcher adds it for every script; we use LOCAL_RANK
            assign(name, value, "command line", parse_value)
            chosen[name] = values.get(name)
    for name in chosen.keys() & values.keys():  # a config file that follows doesn't change them
        assign(name, chosen[name], "command line")
    if problems:
        raise UserError("\n".join(problems))
    changed = tuple(name for name, value in values.items() if value != defaults[name])
    namespace = {"requested": requested, "changed": changed, "script": script}
    return dataclasses.make_dataclass("Settings", values, namespace=namespace, frozen=True)(**values)


def fix_of_name(name, value, where, known):
    """Return what to do about a name that is no setting. where: "command line", or a config file's path. known: the
    settings' names. An option of other training scripts is one only where train_deepspeed.py's settings are known."""
    ours = instead_of(name, value) if "max_iters" in known else None
    if ours is not None:
        return ours
    nearest = did_you_mean(name, known).removeprefix(": ")
    if nearest:
        return nearest
    return "docs/guides.md has those of other guides" if where == "command line" else "begin your own with _"


def did_you_mean(name, known):
    """Return ": did you mean ...?" with the known name closest to `name`, or ""."""
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f": did you mean '{match[0]}'?" if match else ""


def allowed_values(default, annotation):
    """Return (types, choices) that a setting may take, from its annotation or else from its default."""
    if annotation is None:
        return {type(default)}, ()
    parts = [value for part in typing.get_args(annotation) or [annotation] for value in typing.get_args(part) or [part]]
    return {part for part in parts if isinstance(part, type)}, tuple(p for p in parts if not isinstance(p, type))


def value_names(types_, choices):
    """Return the allowed values as a user writes them: ["auto", "True", "False"], or ["int", "None"]."""
    ordered = sorted(types_, key=lambda kind: (kind is type(None), kind.__name__))
    return [*choices, *(name for kind in ordered for name in VALUES.get(kind, (kind.__name__,)))]


def validate(value, types_, choices):
    """Return `value` if it has one of the types or is a choice. Numbers may be written as the other type: 1, 1e3."""
    if (type(value) in types_) or value in choices:
        return value
    if float in types_ and type(value) is int and abs(value) < 2**1023:
        return float(value)
    if int in types_ and type(value) is float and value.is_integer():
        return int(value)
    raise ValueError(f"takes {' or '.join(value_names(types_, choices))}, not {value!r}")


def parse_value(text, types_, choices):
    """Return the value of a command line's text for a setting of these types."""
    if text not in choices and types_ != {str}:
        with contextlib.suppress(ValueError, TypeError, SyntaxError, OverflowError):
            return validate(ast.literal_eval(text.capitalize() if text in ("true", "false") else text), types_, choices)
    return validate(text, types_, choices)


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
    return found[0] if found else None


def run_config_file(path, values, root):
    """Run a config file on the settings' values so far, by name, and return what it assigned."""
    path = expand_path(path)
    file = find_config_file(path, root)
    if file is None or not path.endswith(".py"):  # JSON is often valid Python, and would change nothing
        problem = "is not a .py file" if file or os.path.isdir(path) else "does not exist"
        hint = f"--{path.lstrip('-')}" if "=" in path else "--key=value"
        hint = f"--deepspeed_config={path}" if path.endswith(".json") else hint
        known = [] if file else glob.glob("config/**/*.py", root_dir=root, recursive=True)
        fix = did_you_mean(path, known) or f": name a .py file, or write {hint}"
        raise UserError(f"config file {path} {problem}{fix}")
    names = dict(values)
    try:
        exec(compile(Path(file).read_bytes(), file, "exec"), names)
    except (Exception, SystemExit) as error:  # the user's own Python
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        raise UserError(f"{path}, line {line}: {type(error).__name__}: {error}") from None
    return {name: value for name, value in names.items() if not name.startswith("_") and not callable(value)
            and not isinstance(value, types.ModuleType) and (name not in values or value is not values[name])}


def help_text(source, defaults, annotations):
    """Return the text of --help, also docs/settings.md: a script's docstring, and its settings with their comments. A
    comment line before settings is their heading. One that begins in lower case continues the setting above it."""
    shown, heading = [ast.get_docstring(ast.parse(source)) or "", "", "Settings, as --key=value:"], None
    for line in re.sub(r"\n# (?![A-Z])", " ", source).splitlines():
        setting = re.match(r"(\w+)(?:: .+?)? = .*?(?:  # (.*))?$", line)
        if line.startswith("# "):
            heading = line[2:]
        elif setting and setting[1] in defaults:
            name, comment = setting[1], setting[2] or ""
            if heading:
                shown += ["", heading, "-" * len(heading), ""]
                heading = None
            if name in annotations:
                comment += f" [{' | '.join(value_names(*allowed_values(None, annotations[name])))}]"
            setting = f"    --{name}={defaults[name]!r}"
            shown += textwrap.wrap(comment, 120, initial_indent=f"{setting:<44} ", subsequent_indent=" " * 45)
    return "\n".join(shown)


def settings_of_script(script, argv=None, on_error=exit_with_error):
    """Return the settings that a script, given by its path, makes of `argv` or of the command line: see configure().
    Only its settings run: its assignments to names in lower case, up to where it calls the configurator. Exits after
    --help. For mistakes, calls on_error(UserError), which prints one line each and exits with code 2."""
    argv = sys.argv[1:] if argv is None else argv
    text = Path(script).read_text(encoding="utf-8")
    source = re.split(r"^.*\bconfigurator\.\w+\(", text, maxsplit=1, flags=re.MULTILINE)[0]
    names = {"Literal": typing.Literal}
    annotations = {}
    for node in ast.parse(source).body:
        if re.match(r"[a-z]\w*(: .+)? = ", ast.unparse(node)):
            exec(compile(ast.Module([node], []), script, "exec"), names)
            # From Python 3.14 on, exec doesn't fill __annotations__
            if isinstance(node, ast.AnnAssign):
                annotation = compile(ast.Expression(node.annotation), script, "eval")
                annotations[node.target.id] = eval(annotation, names)
    defaults = {name: value for name, value in names.items() if name[0].islower()}
    if "--help" in argv or "-h" in argv:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit without a message when nobody reads it, as after `| head`
        print(help_text(source, defaults, annotations))
        raise SystemExit(0)
    try:
        return configure(defaults, argv, annotations, os.path.dirname(os.path.abspath(script)), script)
    except UserError as error:
        on_error(error)
