"""Names that a user typed: refuse the unknown ones and say which was probably meant; import what is the user's own.

No file makes us import code by itself: what a model file or a config.yaml names as `package.module:name` is imported
only if the user named it too, on the command line, in Python or in INCSEG_TRUST."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from incseg.errors import UserError

# A longer list hides the nearest match that stands before it.
_MOST_NAMES_IN_AN_ERROR = 24


def require_known(kind: str, name: object, allowed: Iterable[str]) -> None:
    """Raise a UserError with the nearest match unless `name` is one of `allowed`."""
    if name not in (allowed := tuple(allowed)):
        raise UserError(unknown(kind, name, allowed))


def unknown(kind: str, name: object, allowed: Iterable[str]) -> str:
    """The message for an unknown name: what came, the nearest match, what is allowed."""
    allowed = tuple(allowed)
    by_folded = {a.casefold(): a for a in allowed}
    nearest = difflib.get_close_matches(str(name).casefold(), by_folded, n=1)
    hint = f"did you mean '{by_folded[nearest[0]]}'? " if nearest else ""
    listed = ", ".join(allowed[:_MOST_NAMES_IN_AN_ERROR])
    left_out = len(allowed) - _MOST_NAMES_IN_AN_ERROR
    more = f" and {left_out} more" if left_out > 0 else ""
    return f"unknown {kind} '{name}'; {hint}Allowed: {listed}{more}"


def import_named(kind: str, name: str, form: str) -> Any:
    """What `package.module:name` leads to; `form` says how it should have been written."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{kind} '{name}' cannot be imported ({error}); write {form} and see that it is on PYTHONPATH"
        ) from error


def find_class(kind: str, name: str, known: Mapping[str, Any], base: type) -> Any:
    """Return what `known` has under a name, or the subclass of `base` that `package.module:Class` leads to."""
    if name in known:
        return known[name]
    if ":" not in name:
        raise UserError(unknown(kind, name, known) + ", or package.module:Class of your own")
    found = import_named(kind, name, "package.module:Class")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(
            f"{kind} '{name}' is not a subclass of {base.__module__}.{base.__name__}; derive it from that class"
        )
    return found


TRUSTED = "INCSEG_TRUST"
"""Environment variable: names that the user gave, separated by commas. Child processes inherit it."""


def trust_named(tokens: Iterable[str]) -> None:
    """Remember what a command line names as `package.module:name`."""
    values = [token.rpartition("=")[2] for token in tokens]
    named = [value for value in values if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value)]
    if named:
        os.environ[TRUSTED] = ",".join(sorted({*os.environ.get(TRUSTED, "").split(","), *named} - {""}))


def require_named_by_user(file: object, settings: Mapping[str, object]) -> None:
    """Refuse names of code that only a file gives, as {kind: name}; what is loaded already may be named."""
    for kind, name in settings.items():
        if not isinstance(name, str) or ":" not in name or name.startswith("timm:"):
            continue
        if name.partition(":")[0] not in sys.modules and name not in os.environ.get(TRUSTED, "").split(","):
            raise UserError(
                f"{file} names the {kind} '{name}', which is not part of incseg and would be imported; "
                f"if you trust it, set {TRUSTED}={name}"
            )
