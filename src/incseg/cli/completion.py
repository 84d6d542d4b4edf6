"""`incseg completion`: a script that completes commands, flags and choices in a shell, without starting Python."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

HELP = "print a script that completes commands, flags and choices in bash, zsh or fish"

_WHERE = {
    "bash": "~/.local/share/bash-completion/completions/incseg",
    "zsh": "~/.zfunc/_incseg   (with fpath+=~/.zfunc before compinit in ~/.zshrc)",
    "fish": "~/.config/fish/completions/incseg.fish",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=list(_WHERE), help="the shell to write for")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "Write it once, and again after an upgrade:\n" + "\n".join(
        f"  incseg completion {shell} > {place}" for shell, place in _WHERE.items()
    )


def run(args: argparse.Namespace) -> int:
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell](commands()))
    return 0


@dataclasses.dataclass(frozen=True)
class Command:
    """What may stand behind a command: `words` without a flag, and the values of each flag, None where it takes none,
    nothing where any value will do, a file among others."""

    name: str
    help: str
    words: tuple[str, ...]
    flags: dict[str, tuple[str, ...] | None]


def commands() -> list[Command]:
    """All commands, from their own parsers."""
    import importlib

    from incseg.cli.main import COMMANDS, one_line_help

    found = []
    for name in COMMANDS:
        module = importlib.import_module(f"incseg.cli.{name}")
        parser: argparse.ArgumentParser | None
        if hasattr(module, "add_arguments"):
            parser = argparse.ArgumentParser()
            module.add_arguments(parser)
            flags = _flags(parser._actions)
            if passed := getattr(module, "PASS_UNKNOWN", ()):
                flags |= {flag: values for flag, values in _run_flags().items() if flag.startswith(passed)}
        else:
            parser = module.own_parser() if hasattr(module, "own_parser") else None
            flags = {**_run_flags(), "--help": None, "--config": (), **(_flags(parser._actions) if parser else {})}
        positional = [action for action in parser._actions if not action.option_strings] if parser else []
        words = tuple(str(choice) for action in positional for choice in action.choices or ())
        found.append(Command(name, one_line_help(name), words, flags))
    return found


@cache
def _run_flags() -> dict[str, tuple[str, ...] | None]:
    """The settings of a run, with the options of every method."""
    from incseg.cli.settings import SHORT, run_parser
    from incseg.methods import METHODS

    flags = _flags(run_parser("incseg", "", "evidential")._actions)
    for method in METHODS.values():
        kinds = get_type_hints(method.Config)
        flags |= {
            f"--method.{option.name}": _values(kinds[option.name]) for option in dataclasses.fields(method.Config)
        }
    for short, long in SHORT.items():
        flags[short] = flags[long]
    return {flag: values for flag, values in flags.items() if flag not in ("--model", "--train", "--eval")}


def _flags(actions: Iterable[argparse.Action]) -> dict[str, tuple[str, ...] | None]:
    names = _names()
    flags: dict[str, tuple[str, ...] | None] = {}
    for action in actions:
        for flag in action.option_strings:
            if flag.startswith("--"):
                flags[flag] = None if action.nargs == 0 else names.get(flag) or _choices(action)
    return flags


def _choices(action: argparse.Action) -> tuple[str, ...]:
    return _values(getattr(action, "_typehint", None)) or tuple(map(str, action.choices or ()))


def _values(kind: Any) -> tuple[str, ...]:
    """What a setting of this type can be, where that is a list."""
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return ("true", "false") if kind is bool else ()


@cache
def _names() -> dict[str, tuple[str, ...]]:
    """Values of flags whose parsers take any text."""
    from incseg.data import SOURCES
    from incseg.methods import METHODS
    from incseg.models.backbones import BACKBONES
    from incseg.presets import PRESETS
    from incseg.protocol import ORDERS, RULES, SETTINGS, TASKS

    tasks = tuple(dict.fromkeys(task for dataset in TASKS.values() for task in dataset))
    return {
        "--data": tuple(SOURCES),
        "--data.name": tuple(SOURCES),
        "--method": tuple(METHODS),
        "--method.name": tuple(METHODS),
        "--preset": tuple(PRESETS),
        "--task": tasks,
        "--setting": tuple(SETTINGS),
        "--rules": tuple(RULES),
        "--order": tuple(ORDERS),
        "--model.backbone": tuple(BACKBONES),
        "--model.weights": ("imagenet",),
        "--device": ("auto", "cpu", "cuda"),
    }


def _words(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))


def _bash(found: Sequence[Command]) -> str:
    lines = [
        "# bash completion of incseg, made by `incseg completion bash`",
        "_incseg() {",
        '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" flags="" words="" values=""',
        "  COMPREPLY=()",
        # `--data=voc` comes as three words
        '  if [[ $cur == "=" ]]; then cur=""; elif [[ $prev == "=" ]]; then prev="${COMP_WORDS[COMP_CWORD-2]}"; fi',
        "  if (( COMP_CWORD == 1 )); then",
        f'    COMPREPLY=($(compgen -W {_words(["--help", "--version", *(c.name for c in found)])} -- "$cur")); return',
        "  fi",
        '  case "${COMP_WORDS[1]}" in',
    ]
    for command in found:
        lines += [f"  {command.name})", f"    flags={_words(sorted(command.flags))} words={_words(command.words)}"]
        lines.append('    case "$prev" in')
        grouped: dict[tuple[str, ...], list[str]] = {}
        for flag, values in command.flags.items():
            if values is not None:
                grouped.setdefault(values, []).append(flag)
        for values, flags in grouped.items():
            # no choices: bash's own completion of files takes over
            then = f"values={_words(values)}" if values else "return"
            lines.append(f"    {'|'.join(sorted(flags))}) {then} ;;")
        lines += ["    esac ;;"]
    lines += [
        "  esac",
        '  if [[ -n $values ]]; then COMPREPLY=($(compgen -W "$values" -- "$cur"))',
        '  elif [[ $cur == -* ]]; then COMPREPLY=($(compgen -W "$flags" -- "$cur"))',
        '  else COMPREPLY=($(compgen -W "$words" -- "$cur")); fi',
        "}",
        "complete -o default -F _incseg incseg",
    ]
    return "\n".join(lines)


def _zsh(found: Sequence[Command]) -> str:
    """A native function: flags and values by `compadd`, files where there is nothing to choose from."""
    lines = [
        "#compdef incseg",
        "# zsh completion of incseg, made by `incseg completion zsh`",
        "_incseg() {",
        '  local previous="${words[CURRENT-1]}" current="${words[CURRENT]}"',
        "  local -a flags plain values",
        "  if (( CURRENT == 2 )); then",
        f"    compadd -- --help --version {' '.join(command.name for command in found)}; return",
        "  fi",
        '  if [[ $current == --*=* ]]; then previous="${current%%=*}"; compset -P "*="; fi',
        '  case "${words[2]}" in',
    ]
    for command in found:
        flags, plain = " ".join(sorted(command.flags)), " ".join(command.words)
        lines += [f"  {command.name})", f"    flags=({flags}) plain=({plain})", '    case "$previous" in']
        for flag, values in sorted(command.flags.items()):
            if values is not None:
                then = f"values=({' '.join(map(shlex.quote, values))})" if values else "_files; return"
                lines.append(f"    {flag}) {then} ;;")
        lines += ["    esac ;;"]
    lines += [
        "  esac",
        "  if (( $#values )); then compadd -a values; return; fi",
        "  if [[ $current == -* ]]; then compadd -a flags; return; fi",
        "  if (( $#plain )); then compadd -a plain; return; fi",
        "  _files",
        "}",
        'if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _incseg "$@"; else compdef _incseg incseg; fi',
    ]
    return "\n".join(lines)


def _fish(found: Sequence[Command]) -> str:
    lines = ["# fish completion of incseg, made by `incseg completion fish`"]
    for command in found:
        help_text = command.help.replace("\\", "\\\\").replace("'", "\\'")
        lines.append(f"complete -c incseg -f -n __fish_use_subcommand -a {command.name} -d '{help_text}'")
    for command in found:
        seen = f"complete -c incseg -n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            lines.append(f"{seen} -f -a '{' '.join(command.words)}'")
        for flag, values in sorted(command.flags.items()):
            name = flag.removeprefix("--")
            if values is None:
                lines.append(f"{seen} -l {name}")
            elif values:
                lines.append(f"{seen} -l {name} -x -a '{' '.join(values)}'")
            else:
                lines.append(f"{seen} -l {name} -r")
    return "\n".join(lines)
