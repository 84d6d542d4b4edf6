"""A trained model as one ONNX file that runs without incseg: raw pixels in, the method's decision out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import incseg
from incseg.inference import Predictor, predictor_of
from incseg.io import replacing
from incseg.methods.base import Method
from incseg.models.onnx_file import FORMAT, FORMAT_VERSION, INPUT, OUTPUTS, OnnxNetwork, as_input, onnx_packages
from incseg.models.segmenter import Segmenter
from incseg.types import UserError

TOLERANCE = 1e-4
"""Largest allowed difference of a probability or of u between the graph and the model."""
_MOST_TIES = 1e-3  # share of pixels whose label may differ, because two classes are equally probable there
_NEVER_TILED = 2**15
_OPSET = 17  # onnxruntime supports it since 2022
_DOCUMENT = {
    "image": "uint8 (batch, 3, height, width), RGB from 0 to 255; the graph normalises. Any size; the model was tested "
    "on images whose shorter side is test_size pixels (0: as they are).",
    "probabilities": "float32 (batch, classes, height, width), background first, in the order of the names in classes.",
    "uncertainty": "float32 (batch, height, width) in [0, 1], by the method's own rule.",
    "labels": "uint8 (batch, height, width), indices into classes and ids, by the method's rule of decision.",
    "logits": "float32 (batch, outputs, height / stride, width / stride), before the method's rule.",
}


def _log_sigmoid(g: Any, x: Any) -> Any:
    return g.op("Neg", g.op("Softplus", g.op("Neg", x)))


def _logaddexp(g: Any, x: Any, y: Any) -> Any:
    distance = g.op("Abs", g.op("Sub", x, y))
    return g.op("Add", g.op("Max", x, y), g.op("Softplus", g.op("Neg", distance)))


def _xlogy(g: Any, x: Any, y: Any) -> Any:
    zero = g.op("Sub", x, x)
    return g.op("Where", g.op("Equal", x, zero), zero, g.op("Mul", x, g.op("Log", y)))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "aten::log_sigmoid": _log_sigmoid,
    "aten::logaddexp": _logaddexp,
    "aten::xlogy": _xlogy,
}
"""Operations that the exporter lacks, or writes as log(σ(x)), which is −∞ for scores below −104."""


@contextlib.contextmanager
def _own_operations() -> Iterator[None]:
    for name, operation in _OPERATIONS.items():
        torch.onnx.register_custom_op_symbolic(name, operation, _OPSET)
    try:
        yield
    finally:
        for name in _OPERATIONS:
            torch.onnx.unregister_custom_op_symbolic(name, _OPSET)


class _Graph(nn.Module):
    """The graph of the file: normalisation, network, upsampling to the input's size, the method's rule."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Segmenter, method: Method) -> None:
        super().__init__()
        self.model, self.method = model, method
        self.register_buffer("mean", torch.tensor(model.backbone.mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(model.backbone.std).view(3, 1, 1))

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        logits = self.model.scores((image.float() / 255 - self.mean) / self.std)
        size = (image.shape[-2], image.shape[-1])
        enlarged = F.interpolate(logits, size, mode="bilinear", align_corners=False)
        prediction = self.method.predict(enlarged, self.model.increments)
        return prediction.probabilities, prediction.uncertainty, prediction.labels, logits


def to_onnx(predictor: Predictor) -> Any:
    """Return the predictor as an ONNX model with dynamic batch, height and width, described in its metadata."""
    onnx, _ = onnx_packages()
    if not isinstance(predictor.model, Segmenter):
        raise UserError(f"'{predictor.info['file']}' is an ONNX file already; give the model that it was exported from")
    graph = _Graph(predictor.model.frozen_copy().cpu(), predictor.method)
    # Odd sides and two images, so that the exporter confuses no size with another or with a constant.
    example = torch.zeros(2, 3, 97, 131, dtype=torch.uint8)
    axes = {0: "batch", 2: "height", 3: "width"}
    plain = {0: "batch", 1: "height", 2: "width"}
    dynamic = {INPUT: axes, "probabilities": axes, "uncertainty": plain, "labels": plain}
    dynamic["logits"] = {0: "batch", 2: "rows", 3: "columns"}
    with warnings.catch_warnings(), torch.no_grad(), _own_operations(), tempfile.TemporaryDirectory() as folder:
        # The exporter warns of every size that Python reads, and that it is deprecated. The newer one needs two more
        # packages and refuses branches on values. `compare` checks that no size became a constant.
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                graph, (example,), f"{folder}/model.onnx", dynamo=False, opset_version=_OPSET,
                input_names=[INPUT], output_names=list(OUTPUTS), dynamic_axes=dynamic,
            )  # fmt: skip
        except torch.onnx.errors.OnnxExporterError as error:
            raise UserError(
                f"ONNX cannot express this model or its method's predict ({str(error).splitlines()[0]}); "
                "write that part with simpler operations"
            ) from error
        model = onnx.load(f"{folder}/model.onnx")
    model.producer_name, model.producer_version = "incseg", incseg.__version__
    for value in (*model.graph.input, *model.graph.output):
        value.doc_string = _DOCUMENT[value.name]
        if channels := {"probabilities": len(predictor.classes), "logits": predictor.model.num_outputs}.get(value.name):
            value.type.tensor_type.shape.dim[1].dim_value = channels  # the exporter leaves it open
    for key, text in _metadata(predictor, predictor.model).items():
        model.metadata_props.add(key=key, value=text)
    onnx.checker.check_model(model)
    return model


def _metadata(predictor: Predictor, model: Segmenter) -> dict[str, str]:
    about = {
        "classes": predictor.classes,
        "ids": predictor.ids,
        "palette": predictor.palette.tolist(),
        "test_size": predictor.test_size,
        "stride": model.stride,
        "finer": model.finer,
        "unit": model.unit,
        "num_outputs": model.num_outputs,
        "method": predictor.info["method"],
        "model": dataclasses.asdict(model.config),
        "increments": [dataclasses.asdict(increment) for increment in model.increments],
        "mean": model.backbone.mean,
        "std": model.backbone.std,
    }
    if "protocol" in predictor.info:
        about["protocol"] = predictor.info["protocol"]
    texts = {key: json.dumps(value, ensure_ascii=False) for key, value in about.items()}
    return {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "incseg": incseg.__version__,
        **texts,
        "input": _DOCUMENT["image"],
        "outputs": " ".join(f"{name}: {_DOCUMENT[name]}" for name in OUTPUTS),
    }


def with_onnx(predictor: Predictor, threads: int | None = None) -> Predictor:
    """Return the same predictor with its network run by onnxruntime."""
    network = OnnxNetwork(to_onnx(predictor), threads)
    file, method = Path(predictor.info["file"]), predictor.info["method"]["name"]
    converted = predictor_of(network, network.about, predictor.runtime, file, method)
    return converted.averaging(predictor.flip, predictor.scales)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Differences between graph and model over images of one size: largest of probability and u, share of labels."""

    shape: tuple[int, int, int]
    probabilities: float
    uncertainty: float
    labels: float

    @property
    def allowed(self) -> bool:
        return max(self.probabilities, self.uncertainty) <= TOLERANCE and self.labels <= _MOST_TIES

    def __str__(self) -> str:
        batch, height, width = self.shape
        return (
            f"{batch} × {height} × {width}: probabilities {self.probabilities:.1e}, u {self.uncertainty:.1e}, "
            f"other labels {self.labels:.2%}"
        )


def agreement_line(differences: list[Difference]) -> str:
    """Return a line on how closely an exported graph agrees with its model."""
    largest = max(max(one.probabilities, one.uncertainty) for one in differences)
    labels = 1 - max(one.labels for one in differences)
    return (
        f"checked: it agrees with the model at {len(differences)} image sizes; probabilities and uncertainty to within "
        f"{largest:.0e} (allowed: {TOLERANCE:.0e}), labels at {labels:.2%} of the pixels"
    )


def compare(model: Any, predictor: Predictor) -> list[Difference]:
    """Compare graph and predictor at three sizes, also odd ones, with one and three images."""
    _, runtime = onnx_packages()
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    side = predictor.test_size or 224
    shapes = [(1, side, side), (3, side * 3 // 4 | 1, side // 2 | 1), (1, side // 3 | 1, side * 5 // 4 | 1)]
    generator = np.random.default_rng(0)
    return [_difference(session, predictor, shape, generator) for shape in shapes]


def _difference(
    session: Any, predictor: Predictor, shape: tuple[int, int, int], generator: np.random.Generator
) -> Difference:
    batch, height, width = shape
    images = [_blotches(height, width, generator) for _ in range(batch)]
    probabilities, uncertainty, labels, _ = session.run(OUTPUTS, {INPUT: as_input(images)})
    expected = [predictor.predict(image, size=0, tile=_NEVER_TILED, probabilities=True) for image in images]
    return Difference(
        shape,
        float(np.abs(probabilities - np.array([result.probabilities for result in expected])).max()),
        float(np.abs(uncertainty - np.stack([result.uncertainty for result in expected])).max()),
        float((labels != np.stack([result.labels for result in expected])).mean()),
    )


def _blotches(height: int, width: int, generator: np.random.Generator) -> Image.Image:
    """Return a picture with edges and areas, on which predictions vary more than on noise."""
    coarse = generator.integers(0, 256, (4 + height // 24, 4 + width // 24, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def export_onnx(predictor: Predictor, file: Path, check: bool = True) -> list[Difference]:
    """Write the file and return the differences; with `check`, only if the graph agrees with the model."""
    model = to_onnx(predictor)
    differences = compare(model, predictor) if check else []
    if wrong := [difference for difference in differences if not difference.allowed]:
        raise UserError(
            f"the exported graph differs from the model ({wrong[0]}; allowed {TOLERANCE:g}), so {file} is not written; "
            "report it, or write it anyway with --no-check"
        )
    with replacing(file) as temporary:
        temporary.write_bytes(model.SerializeToString())
    return differences
