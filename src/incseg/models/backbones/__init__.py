"""Backbones by name. A new one is a file here and a line in BACKBONES; from outside, `package.module:Class`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from incseg.io import find_class
from incseg.models.backbones.base import Backbone
from incseg.models.backbones.efficientnet_lite import EfficientNetLite
from incseg.models.backbones.resnet import ResNet
from incseg.models.backbones.timm_backbone import PREFIX as TIMM_PREFIX
from incseg.models.backbones.timm_backbone import TimmBackbone
from incseg.models.backbones.tiny import TinyNet
from incseg.models.norms import NormKind

__all__ = ["BACKBONES", "Backbone", "build_backbone"]

BACKBONES: dict[str, Callable[[int, NormKind], Backbone]] = {
    "tiny": TinyNet,
    **{f"efficientnet-lite{version}": partial(EfficientNetLite, version) for version in range(3)},
    "resnet18": partial(ResNet, 18),
    "resnet50": partial(ResNet, 50),
    "resnet101": partial(ResNet, 101),
}


def build_backbone(name: str, output_stride: int, norm: NormKind) -> Backbone:
    """Return a backbone of `BACKBONES`, timm:NAME or package.module:Class, without pretrained weights."""
    if name.startswith(TIMM_PREFIX):
        return TimmBackbone(name.removeprefix(TIMM_PREFIX), output_stride, norm)
    return find_class("backbone", name, BACKBONES, Backbone)(output_stride, norm)
