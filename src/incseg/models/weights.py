"""Foreign weights into a backbone: matched by name and shape, reported, and refused when they do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from incseg.models.backbones.base import Backbone
from incseg.types import UserError

IMAGENET = "imagenet"
WRAPPERS = ("state_dict", "model_state_dict", "model")
PREFIXES = ("", "module.", "backbone.", "encoder.", "module.backbone.", "module.encoder.")
COUNTER = "num_batches_tracked"
MIN_MATCHED = 0.9
SHOWN = 3


@dataclass(frozen=True)
class WeightReport:
    """What became of the tensors of a file and of a backbone; str() is the summary for the log."""

    source: str
    backbone: str
    matched: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    wrong_shape: tuple[str, ...]

    def __str__(self) -> str:
        total = len(self.matched) + len(self.missing) + len(self.wrong_shape)
        parts = [f"weights of {self.backbone} from {self.source}: {len(self.matched)} of {total} tensors loaded"]
        for what, names in (
            ("missing in the file", self.missing),
            ("of another shape", self.wrong_shape),
            ("in the file but not in the backbone", self.unexpected),
        ):
            if names:
                parts.append(f"{len(names)} {what} ({first_few(names)})")
        return "; ".join(parts)


def load_weights(backbone: Backbone, weights: str | Path) -> WeightReport:
    """Fill the backbone from a state dict: a file, or 'imagenet' where the backbone has such weights.

    Prefixes that wrappers leave (`module.`, `backbone.`, `encoder.`) are stripped where that makes names
    match. Classifier tensors and batch counters are left out without complaint. With fewer than 90 % of the
    backbone's tensors matched, nothing is loaded and a UserError shows both sides' names.
    """
    source = str(weights)
    state = backbone.imagenet_weights() if source == IMAGENET else read_state_dict(Path(weights))
    # state_dict() gives the live tensors, so writing into them fills the backbone.
    wanted = {name: tensor for name, tensor in backbone.state_dict().items() if not name.endswith(COUNTER)}
    given = _without_prefix(state, wanted)
    ignored = tuple(name for name in given if name.endswith(COUNTER) or name.startswith(backbone.classifier_keys))
    report = WeightReport(
        source=source,
        backbone=backbone.name,
        matched=tuple(name for name in wanted if _fits(wanted[name], given.get(name))),
        missing=tuple(name for name in wanted if name not in given),
        unexpected=tuple(name for name in given if name not in wanted and name not in ignored),
        wrong_shape=tuple(name for name in wanted if name in given and not _fits(wanted[name], given[name])),
    )
    _refuse_if_wrong(report, wanted, given)
    with torch.no_grad():
        for name in report.matched:
            wanted[name].copy_(given[name])
    return report


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pth or .pt file; code in a pickle is never run."""
    if not path.is_file():
        raise UserError(f"weights '{path}': no such file; give a .pth, .pt or .safetensors file, or '{IMAGENET}'")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise UserError(f"weights '{path}': not a readable safetensors file ({_line(error)})") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever a damaged or hostile file makes it raise
        raise UserError(
            f"weights '{path}': not a file of plain tensors (damaged, or a pickle with code, which is "
            "never run); save the model's state_dict() and give that file"
        ) from error
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
            break
    tensors = (
        {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}
        if isinstance(content, Mapping)
        else {}
    )
    if not tensors:
        raise UserError(
            f"weights '{path}': holds a {type(content).__name__} without named tensors; "
            "save the model's state_dict() and give that file"
        )
    return tensors


def _fits(wanted: Tensor, given: Tensor | None) -> bool:
    return given is not None and given.shape == wanted.shape and given.is_floating_point()


def _without_prefix(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict less the prefix that makes most names match, the shortest among equals."""

    def strip(prefix: str) -> dict[str, Tensor]:
        others = {name: value for name, value in state.items() if not name.startswith(prefix)}
        return others | {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}

    return max(
        (strip(prefix) for prefix in PREFIXES),
        key=lambda given: sum(_fits(tensor, given.get(name)) for name, tensor in wanted.items()),
    )


def _refuse_if_wrong(report: WeightReport, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    if len(report.matched) < MIN_MATCHED * len(wanted):
        raise UserError(
            f"weights '{report.source}' are not of {report.backbone}: only {len(report.matched)} of "
            f"{len(wanted)} tensors match in name and shape; the file has {first_few(given)}; "
            f"the backbone wants {first_few(wanted)}"
        )
    if any(name.endswith("running_mean") for name in report.unexpected):
        # Names and shapes of affine parameters agree, yet the values mean something else.
        raise UserError(
            f"weights '{report.source}' were trained with batch norm, this backbone normalises otherwise; "
            "use norm 'batch' or 'frozen'"
        )
    broken = [name for name in report.matched if not torch.isfinite(given[name]).all()]
    if broken:
        raise UserError(f"weights '{report.source}' hold NaN or infinity in {first_few(broken)}; use another file")


def first_few(names: Iterable[str]) -> str:
    """The first names of a list, for a message."""
    names = list(names)
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
