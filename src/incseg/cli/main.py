"""Choose and run a command. Errors that a user can cause are printed in one line, without a traceback."""

from __future__ import annotations

import argparse
import ast
import difflib
import errno
import importlib
import os
import sys
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import incseg
from incseg.io import trust_named, unknown
from incseg.types import UserError

COMMANDS = (
    "train", "sweep", "eval", "compare", "report", "predict", "demo", "extend", "remove", "import", "export", "push",
    "protocol", "data", "cache", "list", "doctor", "completion",
)  # fmt: skip
"""Each is a module of this package."""
_OUT_OF_MEMORY = "out of memory; use a smaller --train.batch_size, --train.crop, --eval.batch_size or --eval.size"
_REMEDIES = {
    errno.EEXIST: "a file of this name exists; choose another name",
    errno.ENOTDIR: "a part of this path is a file; correct the path",
    errno.EISDIR: "this is a folder; give the name of a file",
    errno.ENAMETOOLONG: "choose a shorter name",
}
"""Remedies for errors about a path; all other errors of the system are about the disk."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 partly done, 2 not done, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    trust_named(arguments)
    # Must be set before torch is imported. Waiting threads that spin take the cores from each other if anything else
    # runs: on two busy cores a training step took eight times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Pillow warns about unusual files. Files that it cannot read raise an error, and we name them.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        return _dispatch(arguments)
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader of our output has ended, as in `incseg list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MemoryError:
        return _fail(_OUT_OF_MEMORY)
    except RuntimeError as error:
        known = _OUT_OF_MEMORY if is_out_of_memory(error) else _known_failure(str(error))
        if known is None:
            raise
        return _fail(known)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        remedy = _REMEDIES.get(error.errno or 0, "check that the disk has space and the folder is writable")
        return _fail(f"{error.strerror or error}{where}; {remedy}")


def _known_failure(message: str) -> str | None:
    """Return a message for a RuntimeError of torch that is not a fault of the program; None for any other."""
    if "DataLoader worker" in message and "traceback" not in message.lower():
        return (
            f"a loader process has ended ({message.splitlines()[0]}); use fewer --train.workers and --eval.workers "
            "(0 loads in the process itself), or give the container more shared memory"
        )
    if "Connection closed by peer" in message or "Connection reset by peer" in message:
        return "another process of this run has ended; see its own error"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch ran out of memory. It has an exception class for that only on GPUs."""
    known = ("out of memory", "not enough memory", "can't allocate memory")
    return type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in known)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if arguments[0] == "--version":
        print(f"incseg {incseg.__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        raise UserError(unknown("command", name, COMMANDS))
    return importlib.import_module(f"incseg.cli.{name}").run(parse(name, rest))


def parse(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command. `unknown` has those that its PASS_UNKNOWN passes to a later parser."""
    command = importlib.import_module(f"incseg.cli.{name}")
    passed = getattr(command, "PASS_UNKNOWN", ())
    parser = _Parser(
        prog=f"incseg {name}", description=_sentence(command.HELP), allow_abbrev=False, add_help="-" not in passed
    )
    command.add_arguments(parser)
    if not passed:
        return parser.parse_args(arguments)
    args, left_over = parser.parse_known_args(arguments)
    args.unknown = left_over
    for token in left_over:
        if token.startswith("--") and not token.startswith(passed):
            parser.error(f"unrecognized arguments: {token}")
    return args


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _scales(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of factors, such as 1,1.5") from None


_COMMON: dict[str, dict[str, Any]] = {
    "model": {"metavar": "MODEL", "help": "run folder, a folder of its steps/, or a .safetensors model"},
    "runs": {
        "metavar": "RUN",
        "nargs": "+",
        "help": "run folders, folders of run folders, or summaries (runs.jsonl, or runs.jsonl/NAME for one run)",
    },
    "--step": {"metavar": "K", "type": int, "help": "step of the run (default: the last)"},
    "--method": {"metavar": "NAME", "help": "package.module:Class, for models trained by a method of your own"},
    "--device": {"default": "auto", "help": "cpu, cuda, cuda:N, mps or auto (default: auto)"},
    "--threads": {"type": int, "help": "CPU threads of torch (default: torch's own choice)"},
    "--flip": {"action": "store_true", "help": "average with the mirrored image: better, in twice the time"},
    "--scales": {
        "type": _scales,
        "default": (1.0,),
        "metavar": "F,F",
        "help": "average over these factors of the input size, such as 1,1.5: better, and slower",
    },
}


def add_common(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add arguments that several commands share."""
    for name in names:
        parser.add_argument(name, **_COMMON[name])


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest flag for a mistyped one."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(explain(message, self))


def explain(message: str, parser: argparse.ArgumentParser) -> str:
    """Return argparse's error in one line, with the nearest flag for a mistyped one."""
    line = " ".join(message.split())
    if line.startswith("unrecognized arguments:"):
        flag = line.split(":", 1)[1].split()[0].split("=")[0]
        flags = [option for action in parser._actions for option in action.option_strings]
        hint = nearest(flag, flags) if flag.startswith("-") else ""
        return f"unknown argument '{flag}'{hint or ';'} See {parser.prog} --help"
    return f"{line}; see {parser.prog} --help"


def nearest(name: str, known: Sequence[str]) -> str:
    """Return "; did you mean …?" if a name is close to a known one, else an empty string."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _overview() -> str:
    lines = ["incseg: learn new segmentation classes without forgetting the old ones", ""]
    lines.append("usage: incseg COMMAND [options]     (incseg COMMAND --help lists the options)")
    lines.append("")
    for name in COMMANDS:
        lines += textwrap.wrap(one_line_help(name), 100, initial_indent=f"  {name:10}  ", subsequent_indent=" " * 14)
    return "\n".join([*lines, "", "incseg --version prints the version; incseg doctor checks the installation"])


def one_line_help(name: str) -> str:
    """Return the HELP of a command, read from its file: importing all commands would import torch and take seconds."""
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["HELP"]:
            return str(ast.literal_eval(node.value))
    raise AssertionError(f"incseg.cli.{name} has no HELP")


def _fail(message: str, code: int = 2) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code
