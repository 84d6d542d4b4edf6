"""`incseg completion`: print a script that completes commands, flags and choices in a shell without starting Python."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

HELP = "print a script that completes commands, flags and choices in bash, zsh or fish"

_PLACES = {
    "bash": "~/.local/share/bash-completion/completions/incseg",
    "zsh": "~/.zfunc/_incseg   (with fpath+=~/.zfunc before compinit in ~/.zshrc)",
    "fish": "~/.config/fish/completions/incseg.fish",
}
_BASH_EQUALS = r"""
# bash splits `--data=voc` into three words; shtab expects two
_incseg() {
  local word words=()
  for word in "${COMP_WORDS[@]:0:COMP_CWORD}"; do [[ $word == "=" ]] || words+=("$word"); done
  word="${COMP_WORDS[COMP_CWORD]}"
  [[ $word == "=" ]] && word=""
  local COMP_WORDS=("${words[@]}" "$word") COMP_CWORD=${#words[@]}
  _shtab_incseg
}
complete -o default -F _incseg incseg"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=list(_PLACES), help="the shell to write for")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "Write it once, and again after an upgrade:\n" + "\n".join(
        f"  incseg completion {shell} > {place}" for shell, place in _PLACES.items()
    )


def run(args: argparse.Namespace) -> int:
    print(script(args.shell))
    return 0


def script(shell: str) -> str:
    """Return the completion script of a shell."""
    import shtab

    return shtab.complete(_whole_parser(), shell) + (_BASH_EQUALS if shell == "bash" else "")


def _whole_parser() -> argparse.ArgumentParser:
    """Return a parser with all commands, flags and choices. It is used for completion only."""
    import shtab

    from incseg.cli.main import COMMANDS, one_line_help

    names, settings = _names(), _settings()
    parser = argparse.ArgumentParser("incseg")
    parser.add_argument("--version", action="version")
    commands = parser.add_subparsers()
    for name in COMMANDS:
        module = importlib.import_module(f"incseg.cli.{name}")
        command = commands.add_parser(name, help=one_line_help(name))
        module.add_arguments(command)
        passed = getattr(module, "PASS_UNKNOWN", ())
        for flag, choices in settings.items():
            if flag.startswith(passed) and flag not in command._option_string_actions:
                command.add_argument(flag, choices=choices)
        for action in command._actions:
            if action.nargs != 0 and not action.choices:
                action.choices = next((names[flag] for flag in action.option_strings if flag in names), None)
                if not action.choices:
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser


def _settings() -> dict[str, Sequence[str] | None]:
    """Return the flags of a run, including the options of every method, with the values of each."""
    from incseg.cli.settings import SHORT, run_parser
    from incseg.methods import METHODS

    flags: dict[str, Sequence[str] | None] = {"--config": None}
    for action in run_parser("incseg", "", "evidential")._actions:
        for flag in action.option_strings:
            if flag not in ("--model", "--train", "--eval"):  # jsonargparse adds these flags for whole groups
                flags[flag] = _values(getattr(action, "_typehint", None))
    for method in METHODS.values():
        kinds = get_type_hints(method.Config)
        flags |= {f"--method.{field.name}": _values(kinds[field.name]) for field in dataclasses.fields(method.Config)}
    return flags | {short: flags[long] for short, long in SHORT.items()}


def _values(kind: Any) -> Sequence[str] | None:
    """Return the values of a setting of this type; None if they cannot be listed."""
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return ["true", "false"] if kind is bool else None


def _names() -> dict[str, Sequence[str]]:
    """Return the values of flags whose parsers take any text."""
    from incseg.data import AUTO, SOURCES
    from incseg.methods import METHODS
    from incseg.models.backbones import BACKBONES
    from incseg.presets import PRESETS
    from incseg.protocol import ORDERS, RULES, SETTINGS, TASKS

    return {
        "--data": [*SOURCES, AUTO],
        "--data.name": [*SOURCES, AUTO],
        "--method": list(METHODS),
        "--method.name": list(METHODS),
        "--preset": list(PRESETS),
        "--task": list(dict.fromkeys(task for dataset in TASKS.values() for task in dataset)),
        "--setting": list(SETTINGS),
        "--rules": list(RULES),
        "--order": list(ORDERS),
        "--model.backbone": list(BACKBONES),
        "--model.weights": ["imagenet"],
        "--device": ["auto", "cpu", "cuda", "mps"],
    }
