"""The command line: one file per command, each with HELP, add_arguments(parser) and run(args)."""

from incseg.cli.main import main

__all__ = ["main"]
