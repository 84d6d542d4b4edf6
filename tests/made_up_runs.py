"""Run folders without a run: all files of a finished one but the models, with chosen figures."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import yaml

from incseg.config import usual_settings
from incseg.io import write_array, write_json
from incseg.protocol import RULES
from incseg.types import UserError

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ("base", "new", "all", "inc")
DEFAULT_PRESETS = {"voc": "voc-laptop", "ade20k": "paper-ade", "shapes": "shapes"}


def script(name: str) -> ModuleType:
    """Return a file of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_tool", ROOT / f"tools/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for the names in annotations
    spec.loader.exec_module(module)
    return module


def ranking(auroc: float) -> dict[str, float]:
    return {"auroc": auroc, "average_precision": auroc / 2, "fpr95": 1 - auroc}


def step_row(
    index: int, groups: Sequence[Sequence[str]], figures: Sequence[float | None], last: bool
) -> dict[str, Any]:
    seen = [name for group in groups[: index + 1] for name in group]
    ranked = None if last else ranking(0.5 + 0.1 * index)
    return {
        "index": index,
        "classes": list(groups[index]),
        "ids": list(range(1, len(groups[index]) + 1)),
        "train_images": 10,
        "test_images": 5,
        **dict(zip(FIGURES, figures, strict=True)),
        "iou": {name: 10.0 * index + 5 for name in ["background", *seen]},
        "unseen": {
            "from_background": ranked,
            "from_seen": ranked,
            "from_background_by": {"entropy": ranked},
            "from_seen_by": {"entropy": ranked},
        },
        "losses": {},
        "reused_from": None,
        "seconds": {"train": 60.0, "eval": 30.0},
    }


def write_run(
    folder: Path,
    figures: Sequence[float | None] = (50.0, 20.0, 40.0, 30.0),
    dataset: str = "voc",
    task: str = "15-1",
    setting: str = "overlapped",
    method: str = "evidential",
    seed: int = 42,
    order: str = "a",
    rules: str = "plop",
    preset: str | None = None,
    groups: Sequence[Sequence[str]] = (("cat", "cow"), ("sheep",)),
    steps_done: int | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """Write a run. `settings` have dotted names, {"method.balancing": "none"}; with `steps_done` it is unfinished."""
    config = {"preset": preset or DEFAULT_PRESETS[dataset], "method": {"name": method}, "data": {"name": dataset}}
    try:
        config = usual_settings(config)
    except UserError:  # an unknown preset, which is the test's point
        config |= {"train": {}, "model": {}, "eval": {}}
    config |= {"task": task, "setting": setting, "rules": rules, "order": order, "seed": seed, "out": str(folder)}
    config["data"]["name"] = dataset
    config["data"]["root"] = "/somewhere/else/VOC2012"
    for key, value in (settings or {}).items():
        part, name = key.split(".")
        config[part][name] = value
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    command = f"incseg train --data {dataset} --root /somewhere/else/VOC2012 --seed {seed} --out {folder}".split()
    write_json(
        folder / "environment.json",
        {
            "incseg": "0.1.0", "commit": "abc1234", "python": "3.11", "torch": "2.13", "numpy": "2",
            "platform": "Linux", "cpus": 2, "command": ["__main__.py", *command[1:]], "device": "cpu",
            "processes": 1, "precision": "float32", "threads": 1,
        },
    )  # fmt: skip
    steps = [{"index": i, "classes": list(names)} for i, names in enumerate(groups)]
    about = {"dataset": dataset, "task": task, "setting": setting, "order": order, "rules": RULES[rules].as_dict()}
    write_json(folder / "protocol.json", {**about, "steps": steps})
    rows = []
    for index in range(len(groups) if steps_done is None else steps_done):
        last = index == len(groups) - 1
        rows.append(step_row(index, groups, figures if last else (60.0, None, 60.0, 60.0), last))
        write_json(folder / f"steps/{index}/row.json", rows[-1])
        num_labels = 1 + sum(len(names) for names in groups[: index + 1])
        write_array(folder / f"steps/{index}/confusion.npy", 100 * np.eye(num_labels, dtype=np.int64))
    if steps_done is None:
        final = {**dict(zip(FIGURES, figures, strict=True)), "avg": 45.0, "iou": rows[-1]["iou"]}
        seconds = 90.0 * len(rows)
        results = {"final": final, "steps": rows, "rules": RULES[rules].as_dict(), "seconds": seconds}
        write_json(folder / "results.json", results)
    return folder


def change_json(file: Path, **changes: Any) -> None:
    write_json(file, {**json.loads(file.read_text()), **changes})
