"""Models from existing weights: pretrained backbones, torchvision's DeepLabv3 checkpoints, softmax to evidential.

Foreign tensors are matched by name and shape, reported, and refused where they do not fit. torchvision is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from incseg.io import first_few
from incseg.models.backbones.base import Backbone
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.outputs.evidential import Rectifier, deciding_score
from incseg.types import MAX_CLASSES, Increment, UserError

IMAGENET = "imagenet"
WRAPPERS = ("state_dict", "model_state_dict", "model")
PREFIXES = ("", "module.", "backbone.", "encoder.", "module.backbone.", "module.encoder.")
COUNTER = "num_batches_tracked"
MIN_MATCHED = 0.9


def build_segmenter(config: ModelConfig, background_output: bool, log: Callable[[str], None] = print) -> Segmenter:
    """Return a new model with its pretrained backbone; what the weights matched, or that there are none, is logged."""
    model = Segmenter(config, background_output)
    backbone = model.backbone
    file = "a file (.pth, .pt or .safetensors)"
    remedy = f"give --model.weights {f'imagenet or {file}' if backbone.offers_imagenet() else file}"
    if config.weights is not None:
        log(str(load_weights(backbone, config.weights)))
    elif config.freeze_backbone or config.norm.startswith("frozen"):
        log(f"note: {config.backbone} is frozen but has no pretrained weights; {remedy}")
    elif not backbone.from_nothing:
        log(f"note: {config.backbone} has no pretrained weights and learns from random ones; {remedy}")
    return model


@dataclass(frozen=True)
class WeightReport:
    """Which tensors of a file and a backbone matched; str() is the summary for the log."""

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
    """Return the tensors of a .safetensors, .pth or .pt file; code in a pickle is never run."""
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
    """Return the state dict less the prefix that makes most names match, the shortest among equals."""

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


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


OUTPUT_STRIDE = 8
"""torchvision's DeepLabv3 dilates the last two stages; the head's rates are then 12, 24, 36."""
_DEPTHS = {2: 18, 6: 50, 23: 101}
"""ResNet by the blocks of its third stage; torchvision itself offers the 50 and the 101."""
_OURS = (
    (r"aspp\.branches\.(\d)\.", r"classifier.0.convs.\1."),
    (r"aspp\.pool\.0\.", "classifier.0.convs.4.1."),  # number 0 is the pooling itself
    (r"aspp\.pool\.1\.", "classifier.0.convs.4.2."),
    (r"aspp\.mix\.", "classifier.0.project.0."),
    (r"aspp\.mix_norm\.", "classifier.0.project.1."),
    (r"aspp\.last\.", "classifier.1."),
    (r"aspp\.last_norm\.", "classifier.2."),
    (r"classifiers\.0\.", "classifier.4."),
)
"""How our names begin, and torchvision's. Those of the backbone are the same."""
_IGNORED = ("aux_classifier.",)


def read_deeplab(path: Path, classes: Sequence[str]) -> Segmenter:
    """Read a softmax network from a .pth, .pt or .safetensors file; output 0 is background, `classes` follow."""
    if not path.is_file():
        raise UserError(f"checkpoint '{path}': no such file; give the .pth, .pt or .safetensors of a DeepLabv3")
    state = {name.removeprefix("module."): value for name, value in read_state_dict(path).items()}
    given = {name: value for name, value in state.items() if not name.startswith(_IGNORED)}
    outputs = _length(path, given, "classifier.4.weight")
    if not 2 <= outputs <= MAX_CLASSES + 1:
        raise UserError(f"checkpoint '{path}' has {outputs} outputs; 2 to {MAX_CLASSES + 1} are possible")
    if len(classes) != outputs - 1:
        raise UserError(
            f"checkpoint '{path}' has {outputs} outputs, background and {outputs - 1} classes, but {len(classes)} "
            f"names were given ({first_few(classes)}); name every class but background, in the order of the outputs"
        )
    blocks = {match[1] for name in given if (match := re.match(r"backbone\.layer3\.(\d+)\.", name))}
    config = ModelConfig(
        backbone=f"resnet{_DEPTHS.get(len(blocks), 50)}",
        output_stride=OUTPUT_STRIDE,
        width=_length(path, given, "classifier.0.project.0.weight"),
        head="torchvision",
    )
    with torch.random.fork_rng(devices=[]):  # building draws weights that are overwritten at once
        model = Segmenter(config, background_output=True)
        model.grow(Increment(tuple(classes), tuple(range(1, outputs))))
    _fill(path, model, given)
    return model.eval()


def _length(path: Path, given: Mapping[str, Tensor], name: str) -> int:
    if name not in given or given[name].dim() != 4:
        raise UserError(
            f"checkpoint '{path}' is not a DeepLabv3 in torchvision's naming: it has no convolution {name}, but "
            f"{first_few(given)}; save the state_dict() of deeplabv3_resnet50 or deeplabv3_resnet101"
        )
    return given[name].shape[0]


def _fill(path: Path, model: Segmenter, given: Mapping[str, Tensor]) -> None:
    # state_dict() gives the live tensors, so writing into them fills the model.
    wanted = {_their_name(name): tensor for name, tensor in model.state_dict().items()}
    missing = [name for name in wanted if name not in given and not name.endswith(COUNTER)]
    unexpected = [name for name in given if name not in wanted]
    misshapen = [
        f"{name} {list(given[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in given and given[name].shape != tensor.shape
    ]
    broken = [name for name in wanted if name in given and not torch.isfinite(given[name]).all()]
    kinds = (("misses", missing), ("has unexpected", unexpected), ("has misshapen", misshapen), ("has NaN in", broken))
    if faults := [f"{what} {first_few(names)} ({len(names)} in all)" for what, names in kinds if names]:
        raise UserError(
            f"checkpoint '{path}' does not fit torchvision's DeepLabv3 with {model.config.backbone}: it "
            f"{', '.join(faults)}; save the state_dict() of deeplabv3_resnet50 or deeplabv3_resnet101"
        )
    with torch.no_grad():
        for name in wanted.keys() & given.keys():
            wanted[name].copy_(given[name])


def _their_name(name: str) -> str:
    for ours, theirs in _OURS:
        if re.match(ours, name):
            return re.sub(ours, theirs, name, count=1)
    return name


@torch.no_grad()
def evidential_from_softmax(model: Segmenter, rectifier: Rectifier) -> Segmenter:
    """Return the same network without background output: w_i − w_0 and b_i − b_0.

    The odds of every class against background are unchanged. One shift of all biases makes evidence decide as the
    arg-max did; `deciding_score` says how closely. All classes become one increment, because they shared one softmax.
    """
    weight = torch.cat([classifier.get_parameter("weight") for classifier in model.classifiers])
    bias = torch.cat([classifier.get_parameter("bias") for classifier in model.classifiers])
    known = Increment(
        classes=tuple(name for increment in model.increments for name in increment.classes),
        ids=tuple(i for increment in model.increments for i in increment.ids),
        train_images=sum(increment.train_images for increment in model.increments),
    )
    with torch.random.fork_rng(devices=[]):  # building draws weights that are overwritten at once
        converted = Segmenter(model.config, background_output=False)
        converted.grow(known)
    shared = {name: value for name, value in model.state_dict().items() if not name.startswith("classifiers.")}
    converted.load_state_dict(shared, strict=False)
    classifier = converted.classifiers[0]
    classifier.get_parameter("weight").copy_(weight[1:] - weight[:1])
    classifier.get_parameter("bias").copy_(bias[1:] - bias[0] + deciding_score(len(known.classes), rectifier))
    return converted.to(weight.device).eval()
