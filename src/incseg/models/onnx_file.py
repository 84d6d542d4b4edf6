"""A network from an ONNX file that `incseg export` wrote: the file's metadata describe it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from incseg.io import require_plain
from incseg.models.files import check_extra, check_increments, read_config, read_increment
from incseg.models.segmenter import ModelConfig
from incseg.types import Increment, UserError

FORMAT = "incseg-onnx"
FORMAT_VERSION = 1
INPUT = "image"
OUTPUTS = ("probabilities", "uncertainty", "labels", "logits")
MOST_UNIT = 1024
_DESCRIBED = ("method", "palette", "test_size", "protocol", "model", "increments")


def onnx_packages() -> tuple[Any, Any]:
    """Return (onnx, onnxruntime), which a plain installation does not have."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise UserError(f"ONNX files need {error.name}, which is not installed; pip install 'incseg[onnx]'") from None
    return onnx, onnxruntime


class OnnxNetwork:
    """The network of an ONNX graph up to its logits, run by onnxruntime on the CPU.

    The method's rule, also in the graph, is left out: prediction applies it at the image's own size and in strips.

    A graph is a program: what it computes, and how long it takes, cannot be checked beforehand as a model file can. The
    description beside it is.
    """

    def __init__(self, model: Any, threads: int | None = None) -> None:
        onnx, runtime = onnx_packages()
        about = {entry.key: entry.value for entry in model.metadata_props}
        require_plain({key: json.loads(about[key]) for key in _DESCRIBED if key in about}, "its description")
        self.about: dict[str, Any] = {key: json.loads(about[key]) for key in ("method", "palette", "test_size")}
        self.about |= {key: json.loads(about[key]) for key in ("protocol",) if key in about}
        self.about["incseg"] = about["incseg"]
        self.config: ModelConfig = read_config(json.loads(about["model"]))
        self.increments: list[Increment] = [read_increment(fields) for fields in json.loads(about["increments"])]
        check_increments(self.increments)
        check_extra(self.about)
        self.num_outputs = int(about["num_outputs"])
        self.stride = int(about["stride"])
        self.finer = int(about.get("finer", 1))
        self.unit = int(about.get("unit", self.config.output_stride))
        self._require_sizes()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        network = onnx.utils.Extractor(model).extract_model([INPUT], ["logits"])
        self._session = runtime.InferenceSession(network.SerializeToString(), options, ["CPUExecutionProvider"])

    def _require_sizes(self) -> None:
        """What prediction divides by, and allocates by."""
        classes = sum(len(increment.classes) for increment in self.increments)
        if not self.increments or self.num_outputs not in (classes, classes + 1):
            raise ValueError(f"it has {self.num_outputs} outputs for {classes} classes")
        if not (1 <= self.stride <= self.unit <= MOST_UNIT and self.unit % self.stride == 0):
            raise ValueError(f"its stride is {self.stride} and its unit {self.unit}")
        if not 1 <= self.finer <= MOST_UNIT:
            raise ValueError(f"its logits are {self.finer} times finer")

    def logits(self, image: Image.Image) -> Tensor:
        """Return (1, C, h, w) logits of an RGB image."""
        try:
            found = self._session.run(["logits"], {INPUT: as_input([image])})[0]
        except Exception as error:  # onnxruntime has its own kinds of error; the graph may be anyone's
            cause = " ".join(str(error).split())[:200]
            raise UserError(f"the ONNX graph cannot be run ({cause}); export the model again") from error
        size = [self.finer * math.ceil(side / self.stride / self.finer) for side in (image.height, image.width)]
        if found.dtype != np.float32 or list(found.shape) != [1, self.num_outputs, *size]:
            raise UserError(
                f"the ONNX graph gives logits of {found.dtype} and shape {found.shape}, which do not fit its "
                "description; export the model again"
            )
        return torch.from_numpy(found)


def as_input(images: list[Image.Image]) -> np.ndarray:
    """Return (B, 3, H, W) uint8 of RGB images of one size, as the graph takes them."""
    return np.ascontiguousarray(np.stack([np.asarray(image) for image in images]).transpose(0, 3, 1, 2))


def read_onnx(path: Path) -> Any:
    """Return the model of a file that incseg exported."""
    onnx, _ = onnx_packages()
    try:
        model = onnx.load(path, load_external_data=False)  # an exported model is one file; others are not read
    except OSError as error:
        raise UserError(f"ONNX file '{path}' cannot be read ({error.strerror}); check its permissions") from error
    except Exception as error:  # protobuf has its own kinds of error in every version
        raise UserError(f"'{path}' is damaged or not an ONNX file; export the model again") from error
    _check_format(path, {entry.key: entry.value for entry in model.metadata_props})
    return model


def _check_format(path: Path, about: Mapping[str, str]) -> None:
    if about.get("format") != FORMAT:
        raise UserError(
            f"'{path}' is an ONNX file but was not exported by incseg; write one with incseg export MODEL --out FILE"
        )
    if about.get("format_version") != str(FORMAT_VERSION):
        raise UserError(
            f"'{path}' has format {about.get('format_version')}, this incseg reads {FORMAT_VERSION}; "
            "export the model again, or pip install -U incseg"
        )
