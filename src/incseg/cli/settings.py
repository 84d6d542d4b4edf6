"""Make a RunConfig of flags, a configuration file and a preset. Flags win over the file, the file over the preset."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import textwrap
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
from jsonargparse import ArgumentParser, Namespace

from incseg.cli.main import explain, nearest
from incseg.config import GROUPS, RunConfig, named_code
from incseg.engine.rundir import flatten, read_config
from incseg.io import require_named_by_user, unknown
from incseg.methods import find_method
from incseg.presets import DEFAULT_METHOD, default_preset, preset_for
from incseg.types import UserError

SHORT = {
    "--data": "--data.name",
    "--method": "--method.name",
    "--root": "--data.root",
    "--presence": "--data.presence",
}
_FREQUENT = (
    "--data.name", "--data.root", "--task", "--method.name", "--preset", "--setting", "--rules", "--out", "--seed",
    "--device", "--threads", "--reuse", "--model.backbone", "--model.weights", "--model.freeze_backbone",
    "--train.epochs", "--train.batch_size", "--train.lr", "--train.crop", "--eval.size",
)  # fmt: skip
"""What --help shows; --help-all shows everything."""


def parse_run(prog: str, description: str, argv: Sequence[str]) -> RunConfig:
    """Return the configuration of a command line."""
    tokens = [lengthen(token) for token in argv]
    file, tokens = _take_option("--config", tokens)
    config = _from_file(file) if file is not None else {}
    data = _last("--data.name", tokens) or config.get("data", {}).get("name")
    preset = _last("--preset", tokens) or config.get("preset")
    method = _last("--method.name", tokens) or config.get("method", {}).get("name")
    preset, method = _usual(data, preset, method)
    if method != config.get("method", {}).get("name", method):
        config["method"] = {"name": method}  # the file has options of another method
    parser = run_parser(prog, description, method)
    parser.set_defaults(flatten({**preset_for(preset, method), "preset": preset}))
    if "-h" in tokens or "--help" in tokens:
        print(short_help(parser, description))
        raise SystemExit(0)
    if file is not None:
        _require_known_settings(parser, config, file)
    return _run_config(_parse(parser, [*_as_tokens(config), *tokens]))


def _usual(data: str | None, preset: str | None, method: str | None) -> tuple[str, str]:
    """Return preset and method of a run, by default those of its dataset."""
    preset = preset or default_preset(data or "shapes")
    return preset, method or DEFAULT_METHOD.get(preset, "evidential")


def resolve(settings: Mapping[str, Any], defaults: dict[str, Any] | None = None) -> RunConfig:
    """Return the configuration for settings by dotted names, as for the same flags.

    defaults: defaults of all settings, nested as in config.yaml; None for those of dataset, preset and method.
    """
    if defaults is None:
        chosen = [settings.get(name) for name in ("data.name", "preset", "method.name")]
        for name, value in zip(("data", "preset", "method"), chosen, strict=True):
            if not isinstance(value, str | None):
                raise UserError(f"{name} is {value!r}; give a name from incseg list")
        preset, method = _usual(*chosen)
        defaults = {**preset_for(preset, method), "preset": preset}
    else:
        method = defaults["method"]["name"]
    parser = run_parser("incseg", "", method)
    parser.set_defaults(flatten(defaults))
    known = [action.dest for action in parser._actions if action.option_strings]
    for name in settings:
        if name in (*GROUPS, "method"):
            raise UserError(f"{name} is {settings[name]!r}; give its settings as a dict")
        if name not in known:
            raise UserError(f"unknown setting '{name}'{nearest(name, known)}")
    return _run_config(_parse(parser, settings))


def by_dotted_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings from Python under the dotted names that `resolve` takes.

    They may be nested as in config.yaml, short as on the command line, and contain paths and NumPy numbers.
    """
    short = {flag.removeprefix("--"): name.removeprefix("--") for flag, name in SHORT.items()}
    flat = flatten(dict(settings))
    return {
        short.get(name, name): os.fspath(value)
        if isinstance(value, os.PathLike)
        else value.item()
        if isinstance(value, np.generic)
        else value
        for name, value in flat.items()
    }


def parse_extension(prog: str, defaults: dict[str, Any], tokens: Sequence[str]) -> RunConfig:
    """Return the configuration of `defaults`, nested as in config.yaml, changed by flags."""
    parser = run_parser(prog, "", defaults["method"]["name"])
    parser.set_defaults(flatten(defaults))
    return _run_config(_parse(parser, list(tokens)))


def _run_config(values: dict[str, Any]) -> RunConfig:
    return RunConfig(
        **{key: value for key, value in values.items() if key not in (*GROUPS, "method")},
        method=dict(values["method"]),
        **{key: kind(**values[key]) for key, kind in GROUPS.items()},
    )


def method_overrides(prog: str, method: str, tokens: Sequence[str]) -> dict[str, Any]:
    """Return the options of a method that were given as `--method.NAME VALUE`."""
    parser = ArgumentParser(prog=prog, exit_on_error=False, add_help=False, allow_abbrev=False)
    parser.add_class_arguments(find_method(method).Config, "method", as_group=False)
    given = {token.split("=")[0].removeprefix("--method.") for token in tokens if token.startswith("--method.")}
    values = _parse(parser, list(tokens))
    return {name: value for name, value in (values.get("method") or {}).items() if name in given}


def check_method_options(args: argparse.Namespace) -> None:
    """Refuse arguments that are not options of a method, before the model is loaded. `args.unknown` has them."""
    tokens = iter(args.unknown)
    for token in tokens:
        if token.startswith("--method."):
            # in front of a file, argparse would take the value for a file
            if "=" not in token and next(tokens, "--").startswith("--"):
                raise UserError(f"{token} has no value; write {token}=VALUE")
        elif token.startswith("-"):
            flags = [f"--{name}" for name in vars(args) if name not in ("model", "images", "unknown")]
            raise UserError(unknown("option", token.split("=")[0], [*flags, "--method.NAME"]))
        elif "images" in args:
            raise UserError(f"unexpected '{token}'; put all images directly after the model")
        else:
            raise UserError(f"unexpected '{token}'; options of the method are written --method.NAME=VALUE")


def run_parser(prog: str, description: str, method: str) -> ArgumentParser:
    parser = ArgumentParser(
        prog=prog,
        description=f"{description} --data, --method, --root and --presence are short for --data.name, --method.name, "
        "--data.root and --data.presence; --config FILE reads settings from a run's config.yaml.",
        usage=f"{prog} [--data NAME] [--root DIR] [--task TASK] [--method NAME] [--out DIR] [options]",
        exit_on_error=False,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--help-all", action="help", help="this list; --help shows the settings that people change")
    parser.add_class_arguments(RunConfig, as_group=False, skip={*GROUPS, "method"})
    parser.add_argument(
        "--method.name", type=str, default=method, help="a method of incseg list, or package.module:Class"
    )
    parser.add_class_arguments(find_method(method).Config, "method")
    for group, kind in GROUPS.items():
        parser.add_class_arguments(kind, group)
    return parser


def short_help(parser: ArgumentParser, description: str) -> str:
    """Return the help on frequent settings, with the defaults that follow from the other flags."""
    width = min(shutil.get_terminal_size().columns, 100)
    short = {long: flag for flag, long in SHORT.items()}
    actions = {action.option_strings[-1]: action for action in parser._actions if action.option_strings}
    defaults = flatten(parser.get_defaults().as_dict())
    lines = [f"usage: {parser.usage}", "", *textwrap.wrap(description, width), ""]
    rows = [("--config FILE", "settings from a run's config.yaml; flags win over it")]
    for long in _FREQUENT:
        action = actions[long]
        value = defaults[action.dest]
        default = "" if value is None else f" (default: {str(value).lower() if isinstance(value, bool) else value})"
        text = str(action.help).split(" (type:")[0].rstrip(".")
        rows.append((short.get(long, long), text + default))
    column = max(len(flag) for flag, _ in rows) + 4
    for flag, text in rows:
        first, rest = f"  {flag}".ljust(column), " " * column
        lines += textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False)
    others = " ".join(f"--{group}.*" for group in ("method", *GROUPS))
    return "\n".join([*lines, "", f"All settings, {others}, by group: {parser.prog} --help-all"])


def _parse(parser: ArgumentParser, given: list[str] | Mapping[str, Any]) -> dict[str, Any]:
    try:
        parsed: Namespace = parser.parse_args(given) if isinstance(given, list) else parser.parse_object(dict(given))
    except argparse.ArgumentError as error:
        raise UserError(_wrong_value(str(error), parser) or explain(str(error), parser)) from error
    return parsed.as_dict()


def _wrong_value(message: str, parser: ArgumentParser) -> str | None:
    """Return jsonargparse's error about the type of a value in plain words; None for any other error."""
    found = re.search(r'"([\w.]+)": .*(?:Got|Given) value: (.*)$', " ".join(message.split()))
    if found is None:
        return None
    setting, value = found.groups()
    kind = next((getattr(a, "_typehint", None) for a in parser._actions if a.dest == setting), None)
    if kind is None:
        return None
    if get_origin(kind) is Literal:
        return unknown(setting, value, get_args(kind))
    return f"{setting} is '{value}'; it must be {_in_words(kind)}"


def _in_words(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_in_words(one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return f"[{', '.join(_in_words(one) for one in get_args(kind))}]"
    plain = {int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
    return plain.get(kind, str(getattr(kind, "__name__", kind)))


def lengthen(token: str) -> str:
    """Replace a short flag by its long form: `--data` and `--data=voc` by `--data.name` and `--data.name=voc`."""
    flag, equals, value = token.partition("=")
    return SHORT.get(flag, flag) + equals + value


def _take_option(flag: str, tokens: list[str]) -> tuple[str | None, list[str]]:
    """Return the last value of a flag, and the tokens without it."""
    others, value, waiting = [], None, False
    for token in tokens:
        if waiting:
            value, waiting = token, False
        elif token == flag:
            waiting = True
        elif token.startswith(f"{flag}="):
            value = token.partition("=")[2]
        else:
            others.append(token)
    if waiting:
        raise UserError(f"{flag} needs a value")
    return value, others


def _last(flag: str, tokens: list[str]) -> str | None:
    return _take_option(flag, tokens)[0]


def _from_file(file: str) -> dict[str, Any]:
    if not Path(file).is_file():
        problem = "is a folder" if Path(file).is_dir() else "does not exist"
        raise UserError(f"--config {file} {problem}; give a YAML file, such as the config.yaml of a run")
    return _normalised(read_config(Path(file)), file)


def _normalised(config: dict[str, Any], file: str) -> dict[str, Any]:
    """Expand `method: evidential` to `method: {name: evidential}`, and `data` likewise."""
    for key in ("method", "data"):
        if isinstance(config.get(key), str):
            config[key] = {"name": config[key]}
    for key in (*GROUPS, "method"):
        if not isinstance(config.setdefault(key, {}), dict):
            raise UserError(f"{file}: '{key}' holds {config[key]!r}; write its settings indented under it")
    for group, key in (("method", "name"), ("data", "name"), (None, "preset")):
        name = (config[group] if group else config).get(key)
        if not isinstance(name, str | None):
            raise UserError(f"{file}: '{f'{group}.' if group else ''}{key}' holds {name!r}; give a name of incseg list")
    require_named_by_user(file, named_code(config))
    return config


def _require_known_settings(parser: ArgumentParser, config: dict[str, Any], file: str) -> None:
    """Refuse unknown keys, with their names in the file, not those of flags."""
    known = [option.removeprefix("--") for action in parser._actions for option in action.option_strings]
    for key in flatten(config):
        if key not in known:
            raise UserError(f"{file}: unknown setting '{key}'{nearest(key, known)}")


def _as_tokens(config: dict[str, Any]) -> list[str]:
    """Return a configuration file as flags, so that both are parsed and checked alike."""
    return [
        f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in flatten(config).items()
    ]
