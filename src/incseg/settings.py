"""What each setting affects, declared where the setting is defined.

A field of a config dataclass affects training unless it says otherwise. Whoever must know (resuming a run, reusing a
trained step, `eval`, `sweep`, the report) asks here, so that no second list has to be kept.
"""

from __future__ import annotations

from dataclasses import MISSING, field, fields
from typing import Any, Literal, get_args

Affects = Literal["training", "later", "inference", "machine"]
"""What a setting changes:

training:  what a step learns.
later:     what the steps after the first learn; step 0 does not read it.
inference: how a trained model decides; no step has to be trained again.
machine:   speed, memory and output only; the result stays the same.
"""


def setting(default: Any = MISSING, *, affects: Affects, default_factory: Any = MISSING) -> Any:
    """Return a dataclass field that says what it affects."""
    return field(default=default, default_factory=default_factory, metadata={"affects": affects})


def names_affecting(kind: Any, *what: Affects) -> frozenset[str]:
    """Return the names of a config dataclass's fields that affect one of `what`."""
    unknown = set(what) - set(get_args(Affects))
    assert not unknown, f"nothing affects {unknown}"
    return frozenset(each.name for each in fields(kind) if each.metadata.get("affects", "training") in what)


def changed_values(config: Any, *what: Affects) -> dict[str, Any]:
    """Return the settings that affect one of `what` and differ from their defaults.

    Hashes and comparisons are made of these, so that an option that comes later leaves older runs valid.
    """
    wanted, found = names_affecting(config, *what), {}
    for each in fields(config):
        value = _listed(getattr(config, each.name))
        if each.name in wanted and value != _default(each):
            found[each.name] = value
    return found


def _default(each: Any) -> Any:
    return _listed(each.default_factory() if each.default_factory is not MISSING else each.default)


def _listed(value: Any) -> Any:
    """Return a tuple as the list that YAML and JSON make of it."""
    return list(value) if isinstance(value, tuple) else value
