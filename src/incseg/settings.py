"""What each setting affects, declared where the setting is defined; and the types of settings that come from a file.

A field of a config dataclass affects training unless it is declared otherwise. Resuming a run, reusing a trained step,
`eval`, `sweep` and the report use these functions, so no second list of settings is needed.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, field, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Affects = Literal["training", "later", "inference", "machine"]
"""What a setting changes:

training:  the training of all steps.
later:     the training of the steps after the first; step 0 does not use the setting.
inference: the predictions of a trained model; no step has to be trained again.
machine:   only speed, memory and output; results are the same.
"""


def setting(default: Any, *, affects: Affects) -> Any:
    """Return a dataclass field that declares what it affects."""
    return field(default=default, metadata={"affects": affects})


def names_affecting(kind: Any, *what: Affects) -> frozenset[str]:
    """Return the names of a config dataclass's fields that affect one of `what`."""
    unknown = set(what) - set(get_args(Affects))
    assert not unknown, f"nothing affects {unknown}"
    return frozenset(each.name for each in fields(kind) if each.metadata.get("affects", "training") in what)


def changed_values(config: Any, *what: Affects) -> dict[str, Any]:
    """Return the settings that affect one of `what` and differ from their defaults.

    Hashes and comparisons use these values, so older runs stay valid when an option is added.
    """
    wanted, found = names_affecting(config, *what), {}
    for each in fields(config):
        value = listed(getattr(config, each.name))
        if each.name in wanted and value != _default(each):
            found[each.name] = value
    return found


def _default(each: Any) -> Any:
    return listed(each.default_factory() if each.default_factory is not MISSING else each.default)


def listed(value: Any) -> Any:
    """Return a tuple as the list that YAML and JSON make of it."""
    return list(value) if isinstance(value, tuple) else value


def require_types(kind: type, values: Mapping[str, Any]) -> None:
    """Raise a TypeError unless values from a file have the types of a config dataclass's fields.

    A file that someone edited, or another version wrote, may hold anything.
    """
    hints = get_type_hints(kind)
    for name, value in values.items():
        if name in hints and not is_a(value, hints[name]):
            raise TypeError(f"'{name}' holds {value!r}")


def is_a(value: Any, hint: Any) -> bool:
    """Return whether a value from YAML, which has lists only, can stand where a dataclass has this type."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(is_a(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        kinds = parts[:1] * len(value) if isinstance(value, list) and parts[-1] is ... else parts
        return isinstance(value, list) and len(value) == len(kinds) and all(map(is_a, value, kinds))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)
