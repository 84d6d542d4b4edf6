"""Presets: named settings, of published recipes and of small ones. They only change defaults; explicit flags win.

Keys are those of config.yaml; `for_method` has the settings of single methods.
"""

from __future__ import annotations

from typing import Any

from incseg.data import find_source
from incseg.io import require_known
from incseg.types import UserError

_LITE0: dict[str, Any] = {
    "backbone": "efficientnet-lite0", "weights": "imagenet", "output_stride": 16, "stages": [2, 3], "width": 96,
    "dilations": [1, 3, 6],
}  # fmt: skip
_LITE2: dict[str, Any] = {
    **_LITE0, "backbone": "efficientnet-lite2", "width": 160, "sharpen": 5, "freeze_backbone": True,
}  # fmt: skip

# Own photographs in minutes on two cores: a frozen backbone, run once on each whole photograph.
_PHOTOGRAPHS: dict[str, Any] = {
    "data": {"fit": "whole", "empty": "learn"},
    "train": {
        "epochs": 30, "batch_size": 16, "lr": 0.15, "lr_later": 0.01, "frozen_later": "statistics",
        "crop": 320, "scale": None, "label_stride": 4,
    },
    "eval": {"size": 320, "batch_size": 8},
    "for_method": {
        "evidential": {
            "method": {"class_weight": 0.5, "start_score": -2.0},
            "train": {"lr": 0.3, "lr_later": 0.02, "clip": 1.0},
        },
        "analytic": {"method": {"class_weight": 0.5}, "train": {"lr": 0.3, "lr_later": 0.02, "clip": 1.0}},
    },
}  # fmt: skip

# How the authors of DKD train, in every setting that differs from the paper's.
_DKD: dict[str, Any] = {"head_rate": 10.0, "frozen_later": "norms", "decay_later": "new"}

PRESETS: dict[str, dict[str, Any]] = {
    # The paper, section 4.3: MiB's recipe with batches of 20 and 8, 30 and 60 epochs. Methods that came after MiB, and
    # details of their authors' code, as docs/reference/methods.md has them.
    "paper-voc": {
        "task": "15-5",
        "rules": "mib",
        "model": {"backbone": "resnet101", "output_stride": 16, "width": 256, "dilate_first": True},
        "train": {"epochs": 30, "batch_size": 20, "lr": 0.01, "lr_later": 0.001, "crop": 512},
        "eval": {"size": 512, "batch_size": 8},
        "for_method": {
            "evidential": {"method": {"balancing": "none"}},
            "plop": {"method": {"median": "authors"}},
            "recall": {"method": {"fill": "new"}},
            "dkd": {
                "method": {"positive_weight": 2.0},
                "train": {**_DKD, "epochs": 60, "batch_size": 32, "lr": 0.001, "lr_later": 0.0001},
            },
        },
    },
    "paper-ade": {
        "task": "100-50",
        "setting": "pseudo-disjoint",
        "rules": "mib",
        "model": {"backbone": "resnet101", "output_stride": 16, "width": 256, "dilate_first": True},
        "train": {"epochs": 60, "batch_size": 8, "lr": 0.01, "lr_later": 0.001, "crop": 512},
        "eval": {"size": 512, "batch_size": 4},
        "for_method": {
            "evidential": {"method": {"balancing": "paper", "foreground_weight": True}},
            "plop": {"method": {"median": "authors"}},
            "recall": {"method": {"fill": "new"}},
            "dkd": {
                "method": {"positive_weight": 35.0, "positive_weight_later": 35.0},
                "train": {**_DKD, "epochs": 100, "batch_size": 24, "lr": 0.0025, "lr_later": 0.00025},
            },
        },
    },
    # VOC on two cores: a frozen backbone, run once per image. Chosen on held-out images (docs/lab-log.md).
    "voc-laptop": {
        "task": "15-1",
        "reuse": True,
        "model": {**_LITE0, "freeze_backbone": True},
        "train": {
            "epochs": 6, "batch_size": 16, "lr": 0.15, "lr_later": 0.01, "frozen_later": "statistics",
            "crop": 224, "scale": None, "label_stride": 4,
        },
        "eval": {"size": 224, "batch_size": 16},
        "for_method": {
            "evidential": {"method": {"start_score": -2.0}, "train": {"lr": 0.3, "lr_later": 0.02, "clip_later": 1.0}},
            "analytic": {"method": {"columns": 4096}, "train": {"lr": 0.3, "lr_later": 0.02, "clip_later": 1.0}},
            "mib": {"method": {"lambda_kd": 30.0}},
            "sdr": {"method": {"lambda_kd": 30.0}},
            "ilt": {"method": {"lambda_features": 10.0}},
            "plop": {"method": {"least_threshold": 0.016}},
            "dkd": {"method": {"positive_weight": 2.0, "lambda_kd": 2.0, "lambda_dkd": 2.0}},
            "recall": {"train": {"lr_later": 0.15}},
            "ewc": {"method": {"weight": 100.0}, "train": {"lr_later": 0.003}},
            "pi": {"method": {"weight": 100.0}, "train": {"lr_later": 0.003}},
            "rw": {"method": {"weight": 100.0}, "train": {"lr_later": 0.003}},
        },
    },
    # The same network with a trained backbone, for a small GPU or many hours.
    "voc-laptop-full": {
        "task": "15-1",
        "reuse": True,
        "model": _LITE0,
        "train": {
            "epochs": 12, "batch_size": 16, "lr": 0.02, "lr_later": 0.002, "crop": 224, "scale": [0.5, 1.0],
            "label_stride": 4,
        },
        "eval": {"size": 224, "batch_size": 16},
        "for_method": {"evidential": {"train": {"lr": 0.06}}, "dkd": {"method": {"positive_weight": 2.0}}},
    },
    # The embedded dataset in minutes on two cores.
    "shapes": {
        "task": "6-2",
        "model": {"backbone": "tiny", "output_stride": 8, "width": 64, "dilations": [1, 2, 3]},
        "train": {"epochs": 12, "batch_size": 8, "lr": 0.1, "lr_later": 0.02, "crop": 96, "scale": [0.7, 1.0]},
        "eval": {"size": 96, "batch_size": 16},
        # evidential reaches the same fit at about three times softmax's rate
        "for_method": {
            "evidential": {"train": {"lr": 0.3, "lr_later": 0.05}},
            "analytic": {"train": {"lr": 0.3, "lr_later": 0.05}},
        },
    },
    # A smoke test.
    "shapes-quick": {
        "task": "6-2",
        "data": {"train_size": 120, "val_size": 30},
        "model": {"backbone": "tiny", "output_stride": 8, "width": 32, "dilations": [1, 2, 3]},
        "train": {"epochs": 2, "batch_size": 8, "lr": 0.1, "lr_later": 0.02, "crop": 64, "scale": [0.7, 1.0]},
        "eval": {"size": 64, "batch_size": 16},
    },
    # The user's own photographs: the best network that two cores can use. Classes and edges are better than with
    # `folder`, and a prediction takes about 1.8 times as long (results/edges.md).
    "laptop": {**_PHOTOGRAPHS, "model": _LITE2},
    "folder": {**_PHOTOGRAPHS, "model": {**_LITE0, "freeze_backbone": True}},
    # The same network on all classes of VOC.
    "voc20": {
        "task": "joint",
        "model": _LITE2,
        "train": {
            "epochs": 10, "batch_size": 16, "lr": 0.15, "lr_later": 0.01, "frozen_later": "statistics",
            "crop": 256, "scale": None, "label_stride": 4,
        },
        "eval": {"size": 256, "batch_size": 16, "boundary": True},
        "for_method": {
            "evidential": {"method": {"start_score": -2.0}, "train": {"lr": 0.3, "lr_later": 0.02, "clip_later": 1.0}},
            "analytic": {"train": {"lr": 0.3, "lr_later": 0.02, "clip_later": 1.0}},
        },
    },
    # The user's photographs with a trained backbone: for a GPU, or for hours.
    "folder-full": {
        "model": {"backbone": "efficientnet-lite0", "weights": "imagenet", "output_stride": 16, "width": 128},
        "train": {"epochs": 30, "batch_size": 8, "lr": 0.02, "lr_later": 0.004, "crop": 320},
        "eval": {"size": 320, "batch_size": 4},
    },
}  # fmt: skip

FITS_OBJECTS = frozenset({"folder", "laptop"})
"""Presets whose input size is chosen by the size of the objects that the masks show."""
DEFAULT_METHOD = {"folder": "analytic", "laptop": "analytic", "voc20": "analytic"}
"""The default method of presets for which it is not evidential. A model of the analytic method is saved with its sums,
so it can be extended in seconds."""


def preset_for(name: str, method: str) -> dict[str, Any]:
    """Return the settings of a preset for a method, nested as in config.yaml."""
    require_known("preset", name, PRESETS)
    settings = {key: value for key, value in PRESETS[name].items() if key != "for_method"}
    for group, values in PRESETS[name].get("for_method", {}).get(method, {}).items():
        settings[group] = {**settings.get(group, {}), **values}
    return settings


def default_preset(data: str) -> str:
    """Return the name of a dataset's default preset."""
    own = find_source(data).preset
    if own is None:
        raise UserError(f"dataset '{data}' has no preset of its own; give --preset, one of {', '.join(PRESETS)}")
    if isinstance(own, str):
        return own
    PRESETS[data] = own
    return data
