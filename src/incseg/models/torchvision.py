"""A plain segmentation checkpoint in torchvision's DeepLabv3 naming as a model of ours. torchvision is not needed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.models.weights import COUNTER, first_few, read_state_dict
from incseg.types import MAX_CLASSES, Increment, UserError

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
    """The softmax network of a .pth, .pt or .safetensors file, background at output 0 and `classes` behind it."""
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
            f"names came ({first_few(classes)}); name every class but background, in the order of the outputs"
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
            f"checkpoint '{path}' is no DeepLabv3 in torchvision's naming: it has no convolution {name}, but "
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
