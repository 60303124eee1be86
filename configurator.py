"""Settings: a script's defaults <- config files <- --key=value, checked.

A script's settings are its top-level names. Their types are those of the defaults, or the annotations where one
type is not enough (`lr_decay_iters: int | None = None`, `lr_schedule: Literal["cosine", "linear"] = "cosine"`).

    python train_deepspeed.py config/xl_shakespeare.py --learning_rate=1e-5 --max_iters 40

Config files are Python and run in a namespace of their own, which holds the settings so far: they may compute,
import, and use names of their own if these begin with an underscore. `--help` shows every setting with its comment,
`--print_settings` the settings in force as JSON.
"""

import ast
import dataclasses
import difflib
import json
import os
import re
import signal
import sys
import traceback
import types
import typing
from pathlib import Path

from runtime.files import UserError
from runtime.output import exit_with_error, explain_uncaught

SETTING_TYPES = (bool, int, float, str, type(None), dict, list, tuple)
BOOLS = ("True", "False", "true", "false")


def configure(defaults, argv, annotations=None, root="."):
    """Return the settings that argv makes of the dict `defaults`: a frozen dataclass with its keys as fields.

    Its attribute before_auto holds what "auto" overwrote, by name: init_from=auto and batch_size=auto need it.
    Config files are looked for in the working directory, then in `root`. Raises UserError with all problems.
    """
    settings, before_auto, problems = dict(defaults), {}, []
    allowed = {name: allowed_values(value, (annotations or {}).get(name)) for name, value in defaults.items()}

    def assign(name, value, where, parse=False):
        if name not in defaults:
            hint = did_you_mean(name, defaults) or ("" if parse else "; names of a file's own begin with an underscore")
            problems.append(f"{where}: there is no setting '{name}'{hint}")
            return
        try:
            value = (parse_value if parse else validate)(value, *allowed[name])
            if value == "auto" and settings[name] != "auto":
                before_auto[name] = settings[name]
            settings[name] = value
        except ValueError as error:
            problems.append(f"{where}: {name} {error}")

    args = list(argv)
    while args:
        arg = args.pop(0)
        if not arg.startswith("--"):
            try:
                for name, value in run_config_file(arg, settings, root).items():
                    assign(name, value, arg)
            except UserError as error:
                problems.append(str(error))
            continue
        name, equals, value = arg[2:].partition("=")
        if not equals:
            is_flag = allowed.get(name) == ({bool}, ())
            if args and not args[0].startswith("--") and (not is_flag or args[0] in BOOLS):
                value = args.pop(0)
            elif is_flag:
                value = "True"
            elif name in defaults:
                problems.append(f"--{name} needs a value: --{name}={defaults[name]}")
                continue
        if name != "local_rank":  # the deepspeed launcher gives it to every script; LOCAL_RANK says the same
            assign(name, value, "command line", parse=True)
    if problems:
        raise UserError("\n".join(problems))
    namespace = {"before_auto": before_auto}
    return dataclasses.make_dataclass("Settings", settings, frozen=True, namespace=namespace)(**settings)


def did_you_mean(name, known):
    """', did you mean ...?' with the known name most like `name`, or nothing."""
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f": did you mean '{match[0]}'?" if match else ""


def allowed_values(default, annotation):
    """(types, choices) that a setting may take, from its annotation or else from its default."""
    if annotation is None:
        return {type(default)}, ()
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)  # with a Literal in it, it is the latter
    parts = typing.get_args(annotation) if union else (annotation,)
    choices = tuple(choice for p in parts if typing.get_origin(p) is typing.Literal for choice in typing.get_args(p))
    return {p for p in parts if isinstance(p, type)} | ({type(None)} if None in parts else set()), choices


def validate(value, types_, choices):
    """`value` if it is of one of the types or choices; an int becomes a float where only a float will do."""
    if (type(value) in types_) or value in choices:
        return value
    if float in types_ and type(value) is int:
        return float(value)
    names = [kind.__name__ if kind is not type(None) else "None" for kind in sorted(types_, key=str)]
    raise ValueError(f"takes {' or '.join([*map(repr, choices), *names])}, not {value!r}")


def parse_value(text, types_, choices):
    """The value that a command line's text means for a setting of these types."""
    if text in choices or types_ == {str}:
        return validate(text, types_, choices)
    try:
        return validate(ast.literal_eval(text.capitalize() if text in BOOLS else text), types_, choices)
    except (ValueError, SyntaxError):
        return validate(text, types_, choices)


def run_config_file(path, settings, root):
    """Run a config file; returns what it assigned, by name."""
    found = next((p for p in (path, os.path.join(root, path)) if os.path.isfile(p)), None)
    if found is None:
        hint = f": did you mean --{path.lstrip('-')}?" if "=" in path else "; settings are written --key=value"
        raise UserError(f"there is no config file {path}{hint}")
    if not path.endswith(".py"):  # other files may be Python by accident: much JSON is
        hint = (f"a DeepSpeed configuration is given as --deepspeed_config={path}" if path.endswith(".json")
                and "deepspeed_config" in settings else "config files end in .py, and settings are written --key=value")
        raise UserError(f"{path} is not a config file: {hint}")
    names = dict(settings)
    try:
        exec(compile(Path(found).read_text(encoding="utf-8"), found, "exec"), names)
    except Exception as error:  # whatever the user's own Python raises
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == found]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        raise UserError(f"{path}, line {line}: {type(error).__name__}: {error}") from None
    return {name: value for name, value in names.items()
            if not name.startswith("_") and not isinstance(value, types.ModuleType) and not callable(value)
            and (name not in settings or value is not settings[name])}


def settings_with_comments(source, defaults):
    """(docstring, [(name, its comment) or (None, a group's heading)]) of a script's settings, by its own lines."""
    text = Path(source).read_text(encoding="utf-8")
    found, lines = [], text.splitlines()
    names = [match and match[1] for match in (re.match(r"(\w+)(?:: .+?)? = ", line) for line in lines)]
    first = min(names.index(name) for name in defaults)
    for name, line in zip(names[first - 1:], lines[first - 1:]):
        if name == "settings":
            break
        if name in defaults:
            found.append((name, line.partition("  # ")[2]))
        elif line.startswith("# ") and found and found[-1][0] and not line[2].isupper():
            found[-1] = found[-1][0], f"{found[-1][1]}\n{line[2:]}"  # the comment above goes on
        elif line.startswith("# "):
            found.append((None, line[2:]))
    return ast.get_docstring(ast.parse(text)) or "", found


def help_text(source, defaults):
    """The script's own lines of settings with their comments: the defaults are the manual."""
    docstring, found = settings_with_comments(source, defaults)
    shown = [docstring, "", "Settings, as --key=value:"]
    for name, comment in found:
        first, *others = comment.split("\n")
        setting = f"  --{name}={defaults[name]!r}" if name else ""
        shown += [f"{setting:<42}  {first}".rstrip()] if name else ["", first]
        shown += [f"{'':<42}  {other}" for other in others]
    return "\n".join(shown)


def settings_table(source, defaults):
    """The settings as a table in Markdown: docs/settings.md."""
    _, found = settings_with_comments(source, defaults)
    lines = ["# All settings of train_deepspeed.py", "",
             "Made by `python train_deepspeed.py --settings_table`. On the command line they are written "
             "`--name=value`, in a config file, which is Python, `name = value`."]
    for name, comment in found:
        comment = comment.replace("\n", " ").replace("|", "\\|")
        if name:
            lines.append(f"| `{name}` | `{defaults[name]!r}` | {comment} |")
        else:
            heading, _, more = comment.partition("; ")
            lines += ["", f"## {heading}", *(["", more[:1].upper() + more[1:] + "."] if more else []), "",
                      "| setting | default | what |", "|---|---|---|"]
    return "\n".join(lines)


def exit_quietly_on_broken_pipe():
    """End this program quietly when nobody reads its output any more, as after `| head`. Don't call it while a network
    is in use: a lost connection would end it too."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def explain_missing_package(error):
    """A package that is not installed is the user's to install."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error}: python -m pip install -r requirements.txt; python doctor.py shows what else is wrong"


def from_command_line(script, argv=None):
    """Return the settings of the script whose globals() are given, from its command line: see configure().

    Ends the program for --help, --print_settings, and for a mistake: exit code 2, one line per problem.
    """
    argv = sys.argv[1:] if argv is None else argv
    explain_uncaught(explain_missing_package)
    source = script["__file__"]
    defaults = {k: v for k, v in script.items() if not k.startswith("_") and isinstance(v, SETTING_TYPES)}
    if "--help" in argv or "-h" in argv:
        shown = help_text(source, defaults)
    elif "--settings_table" in argv:
        shown = settings_table(source, defaults)
    else:
        try:
            settings = configure(defaults, [a for a in argv if a != "--print_settings"], script.get("__annotations__"),
                                 os.path.dirname(os.path.abspath(source)))
        except UserError as error:
            exit_with_error(error)
        if "--print_settings" not in argv:
            return settings
        shown = json.dumps(vars(settings))
    exit_quietly_on_broken_pipe()
    print(shown)
    raise SystemExit(0)


def settings_of_script(script, argv):
    """Return the settings that another script takes from these arguments. A mistake ends this program too.

    Runs the assignments at the script's top, as far as its call of from_command_line().
    """
    defaults = {"__file__": script, "Literal": typing.Literal}
    for node in ast.parse(Path(script).read_text(encoding="utf-8")).body:
        target = getattr(node, "target", None) or getattr(node, "targets", [None])[0]
        name = getattr(target, "id", "_")
        if name == "settings":
            break
        if not name.startswith("_"):
            exec(compile(ast.Module([node], []), script, "exec"), defaults)
    return from_command_line(defaults, argv)
