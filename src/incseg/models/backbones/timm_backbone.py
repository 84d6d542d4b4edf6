"""Any convolutional timm model as a backbone, when the `timm` extra is installed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from incseg.models.backbones.base import Backbone
from incseg.models.norms import NormKind
from incseg.types import UserError

PREFIX = "timm:"


def import_timm() -> ModuleType:
    try:
        import timm
    except ImportError:
        raise UserError("backbones 'timm:NAME' need timm; pip install 'incseg[timm]'") from None
    return timm


class TimmBackbone(Backbone):
    """The feature maps of a timm model, with its own norm layers.

    Needs maps in (B, C, H, W) order and a last stage at the output stride, which is checked.
    """

    def __init__(self, model_name: str, output_stride: int, norm: NormKind):
        super().__init__(PREFIX + model_name, output_stride)
        if norm != "batch":
            raise UserError(
                f"norm '{norm}' is not possible with {self.name}: timm models keep their own norm layers; "
                "use norm 'batch', or freeze the backbone"
            )
        self.model_name = model_name
        self.model = self._create(pretrained=False)
        self.channels = tuple(self.model.feature_info.channels())
        self.mean = tuple(self.model.pretrained_cfg["mean"])
        self.std = tuple(self.model.pretrained_cfg["std"])
        reached = self.model.feature_info.reduction()[-1]
        if reached != output_stride:
            raise UserError(
                f"{self.name} has output stride {reached}, which timm cannot change to {output_stride}; "
                f"set the output stride to {reached} if allowed, or choose another model"
            )

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(self.model.feature_info.reduction())

    def _create(self, pretrained: bool) -> Any:
        timm = import_timm()
        if not timm.is_model(self.model_name):
            close = difflib.get_close_matches(self.model_name, timm.list_models(), n=3)
            hint = f"did you mean {', '.join(close)}?" if close else "timm.list_models() lists them"
            raise UserError(f"timm has no model '{self.model_name}'; {hint}")
        try:
            return timm.create_model(
                self.model_name, pretrained=pretrained, features_only=True, output_stride=self.output_stride
            )
        except (TypeError, ValueError, RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"timm cannot build '{self.model_name}' as a feature extractor with output stride "
                f"{self.output_stride} ({reason}); choose another model or stride"
            ) from error

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        stages = tuple(self.model(images))
        if any(stage.shape[1] != channels for stage, channels in zip(stages, self.channels, strict=True)):
            raise UserError(f"{self.name} does not give maps in (B, C, H, W) order; choose a convolutional model")
        return stages

    def imagenet_weights(self) -> Mapping[str, Tensor]:
        """Return timm's own pretrained weights, which timm downloads or finds in its cache."""
        return {f"model.{name}": value for name, value in self._create(pretrained=True).state_dict().items()}
