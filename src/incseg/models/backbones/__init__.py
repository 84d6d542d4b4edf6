"""Backbones by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial

from incseg.models.backbones.base import Backbone
from incseg.models.backbones.efficientnet_lite import EfficientNetLite0
from incseg.models.backbones.resnet import ResNet
from incseg.models.backbones.timm_backbone import PREFIX as TIMM_PREFIX
from incseg.models.backbones.timm_backbone import TimmBackbone
from incseg.models.backbones.tiny import TinyNet
from incseg.models.norms import NormKind
from incseg.types import UserError

__all__ = ["BACKBONES", "Backbone", "build_backbone"]

BACKBONES: dict[str, Callable[[int, NormKind], Backbone]] = {
    "tiny": TinyNet,
    "efficientnet-lite0": EfficientNetLite0,
    "resnet18": partial(ResNet, 18),
    "resnet50": partial(ResNet, 50),
    "resnet101": partial(ResNet, 101),
}


def build_backbone(name: str, output_stride: int, norm: NormKind) -> Backbone:
    """A backbone of `BACKBONES`, or 'timm:NAME', without pretrained weights."""
    if name.startswith(TIMM_PREFIX):
        return TimmBackbone(name.removeprefix(TIMM_PREFIX), output_stride, norm)
    if name not in BACKBONES:
        close = difflib.get_close_matches(name.lower(), BACKBONES, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise UserError(f"unknown backbone '{name}'; {hint}choose one of {', '.join(BACKBONES)}, timm:NAME")
    return BACKBONES[name](output_stride, norm)
