"""Models that come with incseg and are used by name, such as voc20.

A file in box/ has no backbone, because its weights come with the extra `imagenet`, and half-precision weights of the
head. When the model is first used, the whole model file is put together in the cache. From then on it is an ordinary
model file.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import torch
from torch import Tensor

from incseg.io import cache_path, load_tensors, write_tensors
from incseg.models.backbones import build_backbone
from incseg.models.files import read_config
from incseg.models.pretrained import load_weights
from incseg.models.segmenter import ModelConfig
from incseg.types import UserError

_FOLDER = Path(__file__).parent / "box"
_SUFFIX = ".safetensors"
_BACKBONE = "backbone."
_HALVED = ("neck.", "aspp.", "classifiers.")
"""Parts in half precision. The sums of a closed form need the full one."""


def box_names() -> list[str]:
    """Return the names of the models that come with incseg."""
    return sorted(file.stem for file in _FOLDER.glob(f"*{_SUFFIX}"))


def boxed_model(name: str) -> Path:
    """Return the whole model file of a model in the box; put it together if the cache does not have it."""
    packed = _FOLDER / f"{name}{_SUFFIX}"
    whole = cache_path("models") / f"{name}-{zlib.crc32(packed.read_bytes()):08x}{_SUFFIX}"
    if not whole.is_file():
        tensors, metadata = load_tensors(packed)
        every = {key: value.float() if value.dtype == torch.float16 else value for key, value in tensors.items()}
        try:
            whole.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(whole, every | _pretrained(read_config(json.loads(metadata["config"]))), metadata)
        except OSError as error:
            raise UserError(
                f"the model {name} cannot be written to {whole.parent} ({error.strerror or error}); "
                "set INCSEG_CACHE to a folder that can be written"
            ) from error
    return whole


def pack(source: Path, out: Path) -> None:
    """Write the file for box/ of a model whose backbone is as it came from ImageNet."""
    tensors, metadata = load_tensors(source)
    pretrained = _pretrained(read_config(json.loads(metadata["config"])))
    own = {key: value for key, value in tensors.items() if key.startswith(_BACKBONE)}
    if own.keys() != pretrained.keys() or any(not torch.equal(value, pretrained[key]) for key, value in own.items()):
        raise UserError(f"the backbone of '{source}' was trained, so its weights are not those of ImageNet")
    write_tensors(
        out,
        {
            key: value.half() if key.startswith(_HALVED) and value.dtype == torch.float32 else value
            for key, value in tensors.items()
            if key not in own
        },
        metadata,
    )


def _pretrained(config: ModelConfig) -> dict[str, Tensor]:
    """Return the backbone's ImageNet weights under the names of a model file."""
    with torch.random.fork_rng(devices=[]):
        backbone = build_backbone(config.backbone, config.output_stride, config.norm)  # type: ignore[arg-type]
    load_weights(backbone, "imagenet")
    return {f"{_BACKBONE}{key}": value for key, value in backbone.state_dict().items()}
