"""The model card of a model on the hub: what it knows, how good it is, how it was trained, where it fails.

Everything is read from the model file and, if the file is in a run folder, from the rows of that run.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import incseg
from incseg.engine.rundir import RunDir
from incseg.io import read_record
from incseg.metrics import FIGURES, percent
from incseg.report.extension import CLASS_HEADS, class_rows, where
from incseg.report.writers import markdown_table
from incseg.types import Increment

WEAK = 30.0
"""A class with a lower IoU, in percent, is named among the limits."""
_SHOWN = ("epochs", "batch_size", "lr", "lr_later", "crop")


def model_card(
    address: str, file: Path, about: Mapping[str, Any], network: Mapping[str, Any], increments: Sequence[Increment],
    licence: str,
) -> str:  # fmt: skip
    """Return the README.md of a model: YAML for the hub, then Markdown.

    about, network, increments: the method, network and classes of the model file.
    """
    rows = _rows(file)
    metadata = {
        "license": licence,
        "library_name": "incseg",
        "pipeline_tag": "image-segmentation",
        "tags": ["semantic-segmentation", "class-incremental-learning", "uncertainty"],
    }
    repo = address.removeprefix("hf://").partition("@")[0]
    number = sum(len(increment.classes) for increment in increments)
    lines = ["---", yaml.safe_dump(metadata, sort_keys=False).rstrip(), "---", "", f"# {repo.partition('/')[2]}", ""]
    lines += [f"A model for semantic segmentation with {number} classes and background, made with incseg.", ""]
    lines += [*_use(address, about), "", "## Classes", "", *_classes(increments, rows)]
    if forgetting := _forgetting(file):
        lines += ["", "## What the last extension changed", "", f"Measured on {where(forgetting)}.", ""]
        lines += markdown_table(CLASS_HEADS, [[_plain(row[0]), *row[1:]] for row in class_rows(forgetting)], 2)
    lines += ["", "## Training", "", *_training(about, network, increments)]
    lines += ["", "## Limits", "", *_limits(about, increments, rows)]
    return "\n".join([*lines, ""])


def _rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of the run up to the step of a model file; none if the file is not in a run folder."""
    if not file.with_name("row.json").is_file():
        return []
    folders = sorted((f for f in file.parent.parent.iterdir() if f.name.isdecimal()), key=lambda f: int(f.name))
    up_to = [folder / "row.json" for folder in folders if int(folder.name) <= int(file.parent.name)]
    return [read_record(row) for row in up_to]


def _forgetting(file: Path) -> dict[str, Any] | None:
    run = RunDir(file.parent.parent.parent)
    is_last = file.parent.parent.name == "steps" and run.steps_done()[-1:] == [int(file.parent.name)]
    return read_record(run.forgetting) if is_last and run.forgetting.is_file() else None


def _use(address: str, about: Mapping[str, Any]) -> list[str]:
    method = str(about["method"]["name"])
    own = f', method="{method}"' if ":" in method else ""
    flag = f" --method {method}" if own else ""
    lines = ["```python", "# pip install 'incseg[hub]'", "import incseg", ""]
    lines += [f'model = incseg.load("{address}"{own})', 'result = model.predict("photo.jpg")']
    lines += ["result.labels, result.uncertainty    # (H, W) each; model.classes names the labels", "```", "", "```"]
    lines += [f"incseg predict {address} photo.jpg --out out{flag}"]
    return [*lines, f'incseg extend {address} --root photographs --classes "new class" --out runs/more{flag}', "```"]


def _classes(increments: Sequence[Increment], rows: Sequence[dict[str, Any]]) -> list[str]:
    ious = rows[-1]["iou"] if rows else {}
    cells = [["0", "background", "", percent(ious.get("background")) if rows else ""]]
    for step, increment in enumerate(increments):
        for number, name in zip(increment.ids, increment.classes, strict=True):
            cells.append([str(number), _plain(name), str(step), percent(ious.get(name)) if rows else ""])
    heads = ["id", "class", "learnt in step", "IoU"]
    lines = markdown_table(heads, cells, 2)
    if not rows:
        lines = markdown_table(heads[:3], [row[:3] for row in cells], 2)
        return [*lines, "", "How good it is, is not known: its file was uploaded without the run that trained it."]
    lines += ["", f"IoU in percent, on {rows[-1]['test_images']} test images."]
    if len(rows) > 1:
        heads = ["after step", *(name.capitalize() for name in FIGURES)]
        steps = [[str(row["index"]), *(percent(row[name]) for name in FIGURES)] for row in rows]
        lines += ["", *markdown_table(heads, steps)]
        lines += ["", "Mean IoU of the classes of step 0, of later ones, of all; in Inc every step counts alike."]
    return lines


def _training(about: Mapping[str, Any], network: Mapping[str, Any], increments: Sequence[Increment]) -> list[str]:
    protocol, train = about.get("protocol") or {}, about.get("train") or {}
    options = ", ".join(f"{key} {value}" for key, value in about["method"].items() if key != "name" and value)
    counts = [str(increment.train_images) for increment in increments]
    facts = {
        "method": about["method"]["name"] + (f" ({options})" if options else ""),
        "network": f"{network['backbone']}{', frozen' if network['freeze_backbone'] else ''}",
        "dataset": protocol.get("dataset"),
        "task": ", ".join(str(protocol[key]) for key in ("task", "setting") if key in protocol),
        "training images of each step": ", ".join(counts),
        "schedule": ", ".join(f"{key} {train[key]}" for key in _SHOWN if train.get(key) is not None),
        "version": f"incseg {about.get('incseg', incseg.__version__)}",
    }
    return [f"- {what}: {_plain(str(text))}" for what, text in facts.items() if text]


def _limits(about: Mapping[str, Any], increments: Sequence[Increment], rows: Sequence[dict[str, Any]]) -> list[str]:
    dataset = (about.get("protocol") or {}).get("dataset")
    own = f" ({_plain(str(dataset))})" if dataset else ""
    lines = [
        f"- It was tested on images of its own dataset{own} only, and can be worse on others. `incseg eval --data` "
        "measures it on yours.",
        "- Everything that is not one of its classes is labelled background. A high uncertainty is a hint at unknown "
        "objects and no more.",
    ]
    if size := about.get("test_size"):
        lines.append(f"- It sees images at a shorter side of {size} pixels; smaller objects than it can see are lost.")
    shown = rows[-1]["iou"] if rows else {}
    if weak := [f"{_plain(name)} ({iou:.1f})" for name, iou in shown.items() if iou is not None and iou < WEAK]:
        lines.append(f"- Weak classes, with an IoU below {WEAK:.0f}: {', '.join(weak)}.")
    if any(increment.solved for increment in increments) or about["method"]["name"] == "analytic":
        lines.append(
            "- The file holds sums over features of the training images, which `incseg extend` uses. It holds no image."
        )
    return lines


def _plain(text: str) -> str:
    """Return text of others on one line, without a meaning in HTML or Markdown."""
    escaped = html.escape(" ".join(text.split()), quote=False)
    return "".join(f"\\{c}" if c in "*_`[]#" else c for c in escaped)
