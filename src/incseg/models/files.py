"""Model files: safetensors with the whole description of the model in its metadata. Never a pickle."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor

from incseg.io import load_tensors, require_named_by_user, require_plain, tensors_header, write_tensors
from incseg.models.backbones import BACKBONES
from incseg.models.closed_form import ClosedForm
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.outputs.evidential import Rectifier
from incseg.settings import is_a, require_types
from incseg.types import MAX_CLASSES, Increment, UserError

FORMAT = "incseg-model"
FORMAT_VERSION = 3
"""2 has heads of later classes, 3 a closed form; a model without them is written as 1, which older versions read."""
_LATER_FIELDS = ("classifier", "sharpen", "dilate_first")
PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""A torch.save archive, and plain pickles of protocols 2 to 5."""
MOST_TEST_SIZE = 10_000
MOST_WIDTH = 2**16
MOST_DILATION = 512
"""Of the head's convolutions: an image is padded by as much."""


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
    """Return the model in evaluation mode, and the `extra` it was saved with. The global random state is unchanged.

    A file may be made up. So its description is checked first, the network is made on the meta device, which takes no
    memory, and compared with the shapes in the file's header; only then are tensors read and made.
    """
    path = Path(path)
    header, metadata = _read(path, tensors_header)
    _check_format(path, metadata)
    try:
        described = _Description.read(metadata)
        require_named_by_user("it", {"backbone": described.config.backbone, "classifier": described.config.classifier})
        with torch.random.fork_rng(devices=[]):  # building draws weights that are overwritten at once
            _require_fit(path, described.sketch(header), header)
            tensors, _ = _read(path, load_tensors)
            model = described.build(header)
    except _Misfit:
        raise
    except UserError as error:
        raise UserError(f"model file '{path}': {error}") from error
    except Exception as error:  # building a network from a forged description can raise nearly anything
        raise _damaged(path, error) from error
    if unusable := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise UserError(f"model file '{path}' holds NaN or infinity in {unusable[0]}; give the model of another step")
    model.load_state_dict(tensors)
    return model.to(device).eval(), described.extra


def carries_sums(path: Path) -> bool:
    """Return whether a model file holds the sums of the closed form, from its header alone."""
    try:
        return "closed_form" in tensors_header(path)[1]
    except (OSError, SafetensorError):
        return False


class _Misfit(UserError):
    """A message that names the file."""


def _damaged(path: Path, error: Exception) -> UserError:
    cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return UserError(f"model file '{path}': its description is damaged ({cause}); save or copy it again")


@dataclasses.dataclass
class _Description:
    """What the metadata of a file say of its model, checked but for the tensors."""

    config: ModelConfig
    background_output: bool
    increments: list[Increment]
    shrinks: list[int]
    sizes: list[int]
    closed_form: dict[str, Any] | None
    extra: dict[str, Any]

    @staticmethod
    def read(metadata: dict[str, str]) -> _Description:
        values = {
            "shrinks": [1],
            "sizes": [1],
            "closed_form": None,
            **{
                key: json.loads(metadata[key])
                for key in ("config", "background_output", "increments", "shrinks", "sizes", "closed_form", "extra")
                if key in metadata
            },
        }
        require_plain(values, "its description")
        if type(values["background_output"]) is not bool:
            raise ValueError(f"its background output is {values['background_output']!r}")
        increments = [read_increment(fields) for fields in values["increments"]]
        check_increments(increments)
        if increments and not increments[0].classes and not values["background_output"]:
            raise ValueError("its first increment has no classes")
        check_extra(values["extra"])
        for key in ("shrinks", "sizes"):
            _check_shrinks(values[key])
        return _Description(
            read_config(values["config"]),
            values["background_output"],
            increments,
            values["shrinks"],
            values["sizes"],
            values["closed_form"],
            values["extra"],
        )

    def sketch(self, header: _Header) -> Segmenter:
        """Return the network without memory for its weights."""
        try:
            with torch.device("meta"):
                return self.build(header)
        except Exception:
            if self.config.backbone in BACKBONES and self.config.classifier is None:
                raise
            return self.build(header)  # code from outside may compute with its weights

    def build(self, header: _Header) -> Segmenter:
        """Return the network with weights of its own."""
        model, form = Segmenter(self.config, self.background_output), self.closed_form
        for increment in self.increments:
            if form is not None and increment.head >= form["head"] > len(model.heads):
                model.attach(self._closed_form(model, header))
            model.grow(increment)
        if form is not None and model.closed_form is None:
            model.attach(self._closed_form(model, header))
        model.shrinks, model.sizes = list(self.shrinks), list(self.sizes)
        if len(model.shrinks) != 1 + len(model.heads) or not set(model.shrinks) <= set(model.sizes):
            raise ValueError(f"its heads look at images shrunk by {model.shrinks}, of {model.sizes}")
        return model

    def _closed_form(self, model: Segmenter, header: _Header) -> ClosedForm:
        """Its random features are drawn, not read, so that their size is compared with the file first."""
        about = self.closed_form or {}
        for name, kind, least, most in (
            ("head", int, 1, MAX_CLASSES), ("columns", int, 1, 2**14), ("seed", int, 0, 2**32 - 1),
            ("labels", int, 1, MAX_CLASSES + 1), ("embedding", float, 0, 1e6), ("sgd_share", float, 0, 1),
        ):  # fmt: skip
            value = about[name]
            if not is_a(value, kind) or not least <= value <= most:
                raise ValueError(f"the {name} of its closed form is {value!r}; it is from {least} to {most}")
        if about["rectifier"] not in get_args(Rectifier):
            raise ValueError(f"the rectifier of its closed form is {about['rectifier']!r}")
        waiting = about.get("waiting", [])
        if not isinstance(waiting, list) or len(waiting) > MAX_CLASSES:
            raise ValueError("the classes that wait are not a list of names")
        size, gram = about["columns"] + 1, header.get(f"heads.{len(model.heads)}.gram")
        if about["widths"] != model.widths_read or gram is None or gram[1] != (size * (size + 1) // 2,):
            raise ValueError(f"its closed form has {about['columns']} columns, which does not fit its tensors")
        return ClosedForm.from_about(about)


_Header = dict[str, tuple[str, tuple[int, ...]]]
_FLOATS, _WHOLE = ("F64", "F32", "F16", "BF16"), ("I64", "I32", "I16", "I8", "U8")
"""Types of tensors in a file that may stand for one of floats, or of whole numbers."""
_Read = TypeVar("_Read")


def _read(path: Path, how: Callable[[Path], _Read]) -> _Read:
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        raise _Misfit(f"model file '{path}' {problem}; give the .safetensors file of a step")
    try:
        return how(path)
    except OSError as error:
        raise _Misfit(f"model file '{path}' cannot be read ({error}); check its permissions") from error
    except SafetensorError as error:
        # Asked only now: the first bytes of a sound file are a length, which may look like anything.
        with path.open("rb") as file:
            if file.read(4).startswith(PICKLE_STARTS):
                raise _Misfit(
                    f"model file '{path}' is a pickle (a torch.save checkpoint), which may carry code and is "
                    "never opened; give the .safetensors file of a step"
                ) from None
        raise _Misfit(
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
    require_types(ModelConfig, fields)
    config = ModelConfig(**fields)
    if not 1 <= config.width <= MOST_WIDTH:
        raise ValueError(f"its width is {config.width}; it is from 1 to {MOST_WIDTH}")
    if config.dilations is not None:
        small, medium, large = config.dilations  # JSON has lists only
        if not all(1 <= dilation <= MOST_DILATION for dilation in config.dilations):
            raise ValueError(f"its dilations are {list(config.dilations)}; they are from 1 to {MOST_DILATION}")
        config.dilations = (small, medium, large)
    if config.stages is not None:
        config.stages = tuple(config.stages)
    return config


def read_increment(fields: dict[str, Any]) -> Increment:
    """Return an increment from its JSON form."""
    head, images, solved = fields.get("head", 0), fields["train_images"], fields.get("solved", False)
    if type(head) is not int or not 0 <= head <= MAX_CLASSES:
        raise ValueError(f"its head is {head!r}")
    beside = fields.get("beside", False)
    if type(images) is not int or type(solved) is not bool or type(beside) is not bool:
        raise ValueError(f"an increment has {images!r} images, and is solved: {solved!r}, beside: {beside!r}")
    return Increment(tuple(fields["classes"]), tuple(fields["ids"]), images, head, solved, beside)


def _check_shrinks(shrinks: Any) -> None:
    if not (isinstance(shrinks, list) and 1 <= len(shrinks) <= MAX_CLASSES):
        raise ValueError("the sizes that its heads look at are not a list of numbers")
    if not all(type(shrink) is int and shrink in Segmenter.SHRINKS for shrink in shrinks):
        raise ValueError(f"its heads look at images shrunk by {shrinks!r}")


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
    # the first may have lost all its classes and still has the background's output
    if not all(increment.classes for increment in increments[1:]):
        raise ValueError("an increment has no classes")


def check_extra(extra: dict[str, Any]) -> None:
    """What is read of it later: the method's settings, the colours, the size of test images, how it was trained."""
    for key in ("method", "protocol", "train"):
        if not isinstance(extra.get(key, {}), dict):
            raise ValueError(f"its {key} is {extra[key]!r}, not settings by name")
    if "method" in extra and not isinstance(extra["method"].get("name"), str):
        raise ValueError("its method has no name")
    rules = extra.get("protocol", {}).get("rules", {})
    if not (isinstance(rules, dict) and isinstance(rules.get("name", ""), str)):
        raise ValueError(f"its label rules are {rules!r}")
    colours = extra.get("palette", [])
    if not (isinstance(colours, list) and all(isinstance(c, list) and len(c) == 3 for c in colours)):
        raise ValueError("its palette is not a list of colours")
    if len(colours) > 256:
        raise ValueError(f"its palette has {len(colours)} colours; 256 is the most")
    if not all(type(value) is int and 0 <= value <= 255 for colour in colours for value in colour):
        raise ValueError("its colours are not from 0 to 255")
    size = extra.get("test_size", 0)
    if type(size) is not int or not 0 <= size <= MOST_TEST_SIZE:
        raise ValueError(f"its test size is {size!r}; it is from 0 to {MOST_TEST_SIZE}")


def _require_fit(path: Path, sketch: Segmenter, header: _Header) -> None:
    """Compare names, shapes and kinds of numbers of the tensors, before any is read."""
    wanted = sketch.state_dict()
    missing = [name for name in wanted if name not in header]
    unexpected = [name for name in header if name not in wanted]
    misshapen = [
        name
        for name, tensor in wanted.items()
        if name in header and (header[name][1] != tuple(tensor.shape) or header[name][0] not in _kinds_of(tensor))
    ]
    for what, names in (("misses", missing), ("has unknown", unexpected), ("has misshapen", misshapen)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise _Misfit(
                f"model file '{path}' {what} tensor {names[0]}{more}: it does not fit its own description; "
                "save or copy it again"
            )


def _kinds_of(tensor: Tensor) -> tuple[str, ...]:
    return _FLOATS if tensor.is_floating_point() else _WHOLE
