"""Which command, and what a person sees when it fails: one line, no traceback."""

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

import incseg
from incseg.io import trust_named, unknown
from incseg.types import UserError

COMMANDS = (
    "train", "sweep", "eval", "compare", "report", "predict", "demo", "extend", "remove", "import", "export",
    "protocol", "data", "cache", "list", "doctor", "completion",
)  # fmt: skip
"""Each is a module of this package."""
_OUT_OF_MEMORY = "out of memory; use a smaller --train.batch_size, --train.crop, --eval.batch_size or --eval.size"
_REMEDIES = {
    errno.EEXIST: "something that is no folder has this name, so choose another",
    errno.ENOTDIR: "a part of this path is a file, so correct it",
    errno.EISDIR: "this is a folder, so give the name of a file",
    errno.ENAMETOOLONG: "choose a shorter name",
}
"""What to do where the system refuses a path for what it is; else the disk is to blame."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 done in part, 2 not done, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    trust_named(arguments)
    # Read when torch is loaded, which is later. Threads that wait by spinning take the cores from each other as soon as
    # anything else runs: on two busy cores a training step took eight times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Pillow's remarks on odd files: what it cannot read, it raises, and we name the file.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        return _dispatch(arguments)
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader of our output has gone, as in `incseg list | head`
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
        remedy = _REMEDIES.get(error.errno or 0, "see that the disk has space and the folder may be written")
        return _fail(f"{error.strerror or error}{where}; {remedy}")


def _known_failure(message: str) -> str | None:
    """What torch reports as a RuntimeError without being a fault of the program."""
    if "DataLoader worker" in message and "traceback" not in message.lower():
        return (
            f"a loader process has ended ({message.splitlines()[0]}); use fewer --train.workers and --eval.workers "
            "(0 loads in the process itself), or give the container more shared memory"
        )
    if "Connection closed by peer" in message or "Connection reset by peer" in message:
        return "another process of this run has ended; its own error tells why"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch means this: it has a class of its own for it on GPUs only."""
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
    command = importlib.import_module(f"incseg.cli.{name}")
    if hasattr(command, "main"):  # commands with a configuration parse for themselves
        return command.main(rest)
    parser = _Parser(prog=f"incseg {name}", description=command.HELP, allow_abbrev=False)
    command.add_arguments(parser)
    if passed := getattr(command, "PASS_UNKNOWN", ()):
        args, unknown_tokens = parser.parse_known_args(rest)
        args.unknown = unknown_tokens
        for token in unknown_tokens:
            if token.startswith("--") and not token.startswith(passed):
                parser.error(f"unrecognized arguments: {token}")
    else:
        args = parser.parse_args(rest)
    return command.run(args)


class _Parser(argparse.ArgumentParser):
    """Errors as one line, with the nearest flag for a mistyped one."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(explain(message, self))


def explain(message: str, parser: argparse.ArgumentParser) -> str:
    """argparse's complaint in one line, with the nearest flag where one was mistyped."""
    line = " ".join(message.split())
    if line.startswith("unrecognized arguments:"):
        flag = line.split(":", 1)[1].split()[0].split("=")[0]
        flags = [option for action in parser._actions for option in action.option_strings]
        hint = nearest(flag, flags) if flag.startswith("-") else ""
        return f"unknown argument '{flag}'{hint or ';'} See {parser.prog} --help"
    return f"{line}; see {parser.prog} --help"


def nearest(name: str, known: Sequence[str]) -> str:
    """ "; did you mean …?" where a name is near one that exists, else nothing."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _overview() -> str:
    lines = ["incseg: learn new segmentation classes without forgetting the old ones", ""]
    lines.append("usage: incseg COMMAND [options]; incseg COMMAND --help shows its options")
    lines.append("")
    for name in COMMANDS:
        lines += textwrap.wrap(one_line_help(name), 100, initial_indent=f"  {name:10}  ", subsequent_indent=" " * 14)
    return "\n".join([*lines, "", "incseg --version; incseg doctor tells what is there and what is missing"])


def one_line_help(name: str) -> str:
    """A command's HELP, read from its file: importing the commands would import torch, two seconds for one screen."""
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["HELP"]:
            return str(ast.literal_eval(node.value))
    raise AssertionError(f"incseg.cli.{name} has no HELP")


def _fail(message: str, code: int = 2) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code
