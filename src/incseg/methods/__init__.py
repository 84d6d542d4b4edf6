"""The methods by name. To add one, write a file here and a line in METHODS, or pass `package.module:Class`."""

from __future__ import annotations

from typing import Any

from incseg.io import find_class
from incseg.methods.analytic import Analytic
from incseg.methods.base import Method
from incseg.methods.dkd import DKD
from incseg.methods.evidential import Evidential
from incseg.methods.ewc import EWC
from incseg.methods.finetune import Finetune
from incseg.methods.ilt import ILT
from incseg.methods.joint import Joint
from incseg.methods.lwf import LwF
from incseg.methods.lwf_mc import LwFMC
from incseg.methods.mib import MiB
from incseg.methods.pi import PI
from incseg.methods.plop import PLOP
from incseg.methods.recall import Recall
from incseg.methods.rw import RW
from incseg.methods.sdr import SDR
from incseg.methods.ssul import SSUL
from incseg.types import UserError

METHODS: dict[str, type[Method]] = {
    "evidential": Evidential,
    "analytic": Analytic,
    "finetune": Finetune,
    "joint": Joint,
    "lwf": LwF,
    "lwf_mc": LwFMC,
    "ilt": ILT,
    "mib": MiB,
    "plop": PLOP,
    "recall": Recall,
    "ewc": EWC,
    "pi": PI,
    "rw": RW,
    "sdr": SDR,
    "ssul": SSUL,
    "dkd": DKD,
}


def find_method(name: str) -> type[Method]:
    """Return the class behind a name of METHODS or behind `package.module:Class`."""
    return find_class("method", name, METHODS, Method)


def build_method(settings: dict[str, Any]) -> Method:
    """Return a method from its name and options."""
    options = dict(settings)
    kind = find_method(options.pop("name"))
    try:
        return kind(kind.Config(**options))
    except TypeError as error:
        raise UserError(f"method '{settings['name']}': {error}; see its options with incseg train --help") from error
