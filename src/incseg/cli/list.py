"""`incseg list`: print the names of datasets, tasks, methods, backbones and presets."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from incseg.data import AUTO, SOURCES
from incseg.methods import METHODS
from incseg.models.backbones import BACKBONES
from incseg.presets import PRESETS, default_preset
from incseg.protocol import RULES, SETTINGS, TASKS

HELP = "datasets, tasks, methods, backbones, presets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing."""


def run(args: argparse.Namespace) -> int:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold", max_width=24)
    table.add_column(overflow="fold")
    for name, kind in SOURCES.items():
        tasks = ", ".join(TASKS.get(name, ())) or "any A-B, joint, or own groups"
        table.add_row("dataset", name, f"{_first_line(kind)} Tasks: {tasks}")
    table.add_row("dataset", AUTO, "Detects the format of a folder of your own labels.")
    table.add_row("dataset", "package.module:Class", "Your own: see CONTRIBUTING.md.")
    for name, method in METHODS.items():
        table.add_row("method", name, _first_line(sys.modules[method.__module__]))
    table.add_row("method", "package.module:Class", "Your own: see CONTRIBUTING.md.")
    for name in BACKBONES:
        table.add_row("backbone", name, "")
    table.add_row("backbone", "timm:NAME", "Any model of timm; pip install 'incseg\\[timm]'.")
    for name, settings in PRESETS.items():
        used = [data for data in SOURCES if default_preset(data) == name]
        default = f"; default of {used[0]}" if used else ""
        model, training = settings["model"], settings["train"]
        table.add_row(
            "preset", name, f"{model['backbone']}, {training['epochs']} epochs, crop {training['crop']}{default}"
        )
    table.add_row("setting", "", ", ".join(SETTINGS))
    table.add_row("rules", "", ", ".join(RULES))
    Console(highlight=False).print(table)
    return 0


def _first_line(thing: object) -> str:
    return (thing.__doc__ or "").strip().split("\n")[0]
