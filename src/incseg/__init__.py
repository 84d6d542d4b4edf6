"""incseg: learn new segmentation classes without forgetting the old ones."""

from __future__ import annotations

from typing import Any

__version__ = "0.2.0"


def load(path: Any, **options: Any) -> Any:
    """A saved model, ready to predict: `incseg.load("runs/x").predict(image)`. See incseg.inference.load."""
    from incseg.inference import load as load_predictor  # torch is slow to import; a version look-up needs none

    return load_predictor(path, **options)
