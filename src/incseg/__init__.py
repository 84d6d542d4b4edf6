"""incseg: learn new segmentation classes without forgetting the old ones.

Example:
    >>> import incseg
    >>> run = incseg.train(data="folder", root="photographs", out="runs/mine")
    >>> print(run.table())
    >>> run.model().predict("new.jpg").save("predictions")
    >>> more = incseg.extend(run, root="more-photographs", classes=["helmet"], out="runs/more")
    >>> incseg.load("runs/more").classes
    ('background', 'person', 'helmet')
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from incseg.api import Run, evaluate, extend, push, remove, to_onnx, train
    from incseg.inference import Predictor, Result, load
    from incseg.methods.base import Method
    from incseg.protocol import Protocol
    from incseg.types import UserError

__version__ = "0.2.0"
__all__ = [
    "Method", "Predictor", "Protocol", "Result", "Run", "UserError", "__version__",
    "evaluate", "extend", "load", "push", "remove", "to_onnx", "train",
]  # fmt: skip

_MODULES = {
    "Method": "incseg.methods.base",
    "Predictor": "incseg.inference",
    "Protocol": "incseg.protocol",
    "Result": "incseg.inference",
    "Run": "incseg.api",
    "UserError": "incseg.types",
    "evaluate": "incseg.api",
    "extend": "incseg.api",
    "load": "incseg.inference",
    "push": "incseg.api",
    "remove": "incseg.api",
    "to_onnx": "incseg.api",
    "train": "incseg.api",
}


if not TYPE_CHECKING:  # otherwise a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Import a public name on first use: importing torch takes seconds, and a version look-up does not need it."""
        if name not in _MODULES:
            raise AttributeError(f"module 'incseg' has no attribute '{name}'")
        from importlib import import_module

        globals()[name] = getattr(import_module(_MODULES[name]), name)
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
