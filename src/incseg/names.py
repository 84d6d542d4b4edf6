"""Names that a user typed: refuse the unknown ones and say which was probably meant; import what is the user's own."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
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
