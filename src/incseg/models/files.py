"""Model files: safetensors with the whole description of the model in its metadata. Never a pickle."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from incseg.io import load_tensors, require_named_by_user, write_tensors
from incseg.models.closed_form import ClosedForm
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.types import MAX_CLASSES, Increment, UserError

FORMAT = "incseg-model"
FORMAT_VERSION = 3
"""2 has heads of later classes, 3 a closed form; a model without them is written as 1, which older versions read."""
_LATER_FIELDS = ("classifier", "sharpen")
PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""A torch.save archive, and plain pickles of protocols 2 to 5."""


def save_segmenter(path: str | Path, model: Segmenter, extra: dict[str, Any]) -> None:
    """Write the model and `extra`, anything JSON can hold; a reader sees the old file or the new, whole."""
    form = model.closed_form
    metadata = {
        "format": FORMAT,
        "format_version": "3" if form is not None else "2" if model.heads or model.shrinks != [1] else "1",
        "config": json.dumps(_described(model.config)),
        "increments": json.dumps([dataclasses.asdict(increment) for increment in model.increments]),
        "background_output": json.dumps(model.background_output),
        "shrinks": json.dumps(model.shrinks),
        "sizes": json.dumps(model.sizes),
        "extra": json.dumps(extra),
    }
    if form is not None:
        metadata["closed_form"] = json.dumps({"head": 1 + list(model.heads).index(form), **form.about()})
    write_tensors(Path(path), model.state_dict(), metadata)


def _described(config: ModelConfig) -> dict[str, Any]:
    """Return a configuration for a file; fields that older versions do not know are left out if not set."""
    return {key: value for key, value in dataclasses.asdict(config).items() if value or key not in _LATER_FIELDS}


def load_segmenter(path: str | Path, device: str | torch.device = "cpu") -> tuple[Segmenter, dict[str, Any]]:
    """Return the model in evaluation mode, and the `extra` it was saved with. The global random state is unchanged."""
    path = Path(path)
    metadata, tensors = _read(path)
    _check_format(path, metadata)
    try:
        config = read_config(json.loads(metadata["config"]))
        require_named_by_user("it", {"backbone": config.backbone, "classifier": config.classifier})
        increments = [read_increment(fields) for fields in json.loads(metadata["increments"])]
        background_output = bool(json.loads(metadata["background_output"]))
        extra = dict(json.loads(metadata["extra"]))
        check_increments(increments)
        check_extra(extra)
        with torch.random.fork_rng(devices=[]):  # building draws weights that are overwritten at once
            model = Segmenter(config, background_output)
            form = json.loads(metadata.get("closed_form", "null"))
            for increment in increments:
                if form is not None and increment.head >= form["head"] > len(model.heads):
                    model.attach(ClosedForm.from_about(form))
                model.grow(increment)
            if form is not None and model.closed_form is None:
                model.attach(ClosedForm.from_about(form))
            model.shrinks = _read_shrinks(metadata.get("shrinks", "[1]"))
            model.sizes = _read_shrinks(metadata.get("sizes", "[1]"))
            if len(model.shrinks) != 1 + len(model.heads) or not set(model.shrinks) <= set(model.sizes):
                raise ValueError(f"its heads look at images shrunk by {model.shrinks}, of {model.sizes}")
    except UserError as error:
        raise UserError(f"model file '{path}': {error}") from error
    except Exception as error:  # building a network from a forged description can raise nearly anything
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"model file '{path}': its description is damaged ({cause}); save or copy it again") from error
    _fill(path, model, tensors)
    return model.to(device).eval(), extra


def carries_sums(path: Path) -> bool:
    """Return whether a model file holds the sums of the closed form, from its header alone."""
    try:
        with safe_open(path, framework="pt") as file:
            return "closed_form" in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        raise UserError(f"model file '{path}' {problem}; give the .safetensors file of a step")
    try:
        tensors, metadata = load_tensors(path)
        return metadata, tensors
    except OSError as error:
        raise UserError(f"model file '{path}' cannot be read ({error}); check its permissions") from error
    except SafetensorError as error:
        # Asked only now: the first bytes of a sound file are a length, which may look like anything.
        with path.open("rb") as file:
            if file.read(4).startswith(PICKLE_STARTS):
                raise UserError(
                    f"model file '{path}' is a pickle (a torch.save checkpoint), which may carry code and is "
                    "never opened; give the .safetensors file of a step"
                ) from None
        raise UserError(
            f"model file '{path}' is truncated, damaged or not a safetensors file ({error}); save or copy it again"
        ) from error


def _check_format(path: Path, metadata: dict[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise UserError(
            f"model file '{path}' is a safetensors file but not an incseg model; "
            "pretrained backbones are given with --model.weights"
        )
    version = metadata.get("format_version", "")
    if not version.isdecimal():
        raise UserError(f"model file '{path}': its format version '{version}' is not a number; save it again")
    if len(version) > 9 or int(version) > FORMAT_VERSION:
        raise UserError(
            f"model file '{path}' was made by a newer incseg (format {version[:9]}, this one reads up to "
            f"{FORMAT_VERSION}); pip install -U incseg"
        )


def read_config(fields: dict[str, Any]) -> ModelConfig:
    """Return a configuration from its JSON form."""
    config = ModelConfig(**fields)
    if config.dilations is not None:
        small, medium, large = config.dilations  # JSON has lists only
        config.dilations = (small, medium, large)
    if config.stages is not None:
        config.stages = tuple(config.stages)
    return config


def read_increment(fields: dict[str, Any]) -> Increment:
    """Return an increment from its JSON form."""
    head = fields.get("head", 0)
    if type(head) is not int or head < 0:
        raise ValueError(f"its head is {head!r}")
    solved, beside = (bool(fields.get(name, False)) for name in ("solved", "beside"))
    return Increment(tuple(fields["classes"]), tuple(fields["ids"]), int(fields["train_images"]), head, solved, beside)


def _read_shrinks(text: str) -> list[int]:
    shrinks = json.loads(text)
    if not (isinstance(shrinks, list) and shrinks and all(shrink in Segmenter.SHRINKS for shrink in shrinks)):
        raise ValueError(f"its heads look at images shrunk by {shrinks!r}")
    return shrinks


def check_increments(increments: Sequence[Increment]) -> None:
    """What masks and legends rely on: a name for every class, an id for every name, each once and in a byte."""
    names = [name for increment in increments for name in increment.classes]
    ids = [id_ for increment in increments for id_ in increment.ids]
    if any(len(increment.classes) != len(increment.ids) for increment in increments) or len(set(ids)) < len(ids):
        raise ValueError("its classes and their ids do not fit together")
    if not all(isinstance(name, str) for name in names) or not all(
        type(i) is int and 0 < i <= MAX_CLASSES for i in ids
    ):
        raise ValueError(f"classes have names, and ids from 1 to {MAX_CLASSES}")


def check_extra(extra: dict[str, Any]) -> None:
    """What prediction reads of it: the method's settings, the colours, and the size of test images."""
    if "method" in extra and not (isinstance(extra["method"], dict) and isinstance(extra["method"].get("name"), str)):
        raise ValueError("its method has no name")
    colours = extra.get("palette", [])
    if not (isinstance(colours, list) and all(isinstance(c, list) and len(c) == 3 for c in colours)):
        raise ValueError("its palette is not a list of colours")
    if not all(type(value) is int and 0 <= value <= 255 for colour in colours for value in colour):
        raise ValueError("its colours are not from 0 to 255")
    size = extra.get("test_size", 0)
    if type(size) is not int or size < 0:
        raise ValueError(f"its test size is {size!r}")


def _fill(path: Path, model: Segmenter, tensors: dict[str, Tensor]) -> None:
    wanted = model.state_dict()
    missing = [name for name in wanted if name not in tensors]
    unexpected = [name for name in tensors if name not in wanted]
    misshapen = [
        name
        for name, tensor in wanted.items()
        if name in tensors
        and (tensors[name].shape, tensors[name].is_floating_point()) != (tensor.shape, tensor.is_floating_point())
    ]
    for what, names in (("misses", missing), ("has unknown", unexpected), ("has misshapen", misshapen)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(
                f"model file '{path}' {what} tensor {names[0]}{more}: it does not fit its own description; "
                "save or copy it again"
            )
    if unusable := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise UserError(f"model file '{path}' holds NaN or infinity in {unusable[0]}; give the model of another step")
    model.load_state_dict(tensors)
