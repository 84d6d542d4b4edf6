"""Tasks: which classes are learnt together, and in which order."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from incseg.io import unknown
from incseg.types import DatasetInfo, UserError

Groups = tuple[tuple[int, ...], ...]
"""Dataset ids, one group for each step."""

JOINT = "joint"

TASKS: dict[str, tuple[str, ...]] = {
    "voc": ("19-1", "15-5", "15-1", "10-10", "10-5", "10-1", "5-3", "5-1", "2-2", "2-1", JOINT),
    "ade20k": ("100-50", "100-10", "100-5", "50-50", JOINT),
    "shapes": ("6-2", "6-1", "5-5", "4-2", "4-1", JOINT),
}
"""The named tasks of each dataset; any other "A-B" and own groups of class names work as well."""

# Some code calls 15-1 "15-5 sequential".
_ALIASES = {"15-5s": "15-1"}
_FORMS = 'or "A-B" (A classes, then B in each step), or own groups of class names such as "cat,dog/bird"'

# ADE20k order b as MiB published it. Every step ascends, so two facts give the rest: the base of 100-10 is
# what its five increments leave, and the first two steps of 50-50 divide that base.
_ADE_B_INCREMENTS: Groups = (
    (11, 16, 50, 64, 66, 73, 89, 92, 145, 146),
    (30, 37, 51, 52, 72, 85, 98, 114, 115, 138),
    (2, 35, 65, 97, 110, 111, 112, 118, 124, 141),
    (4, 7, 15, 41, 67, 78, 79, 88, 108, 139),
    (17, 20, 59, 68, 83, 94, 102, 122, 127, 137),
)
# fmt: off
_ADE_B_FIRST_FIFTY = (
    1, 9, 14, 18, 22, 24, 25, 27, 28, 29, 32, 38, 42, 45, 46, 47, 48, 49, 54, 56, 58, 61, 62, 63, 69,
    74, 75, 76, 77, 81, 82, 84, 90, 93, 96, 100, 103, 104, 109, 117, 119, 121, 123, 128, 129,
    130, 134, 135, 136, 144,
)
# fmt: on


def parse_task(dataset: DatasetInfo, task: str | Sequence[Sequence[str]], order: str) -> tuple[str, Groups]:
    """Return the task's name, which gives the same task when parsed again, and its groups of dataset ids."""
    if not isinstance(task, str):
        return _own_task(dataset, task, order)
    task = task.strip()
    task = _ALIASES.get(task, task)
    if task == JOINT:
        return task, (all_ids(dataset),)
    if match := re.fullmatch(r"(\d+)-(\d+)", task):
        task = f"{int(match[1])}-{int(match[2])}"
        in_natural_order = _counted(dataset, task, int(match[1]), int(match[2]))
        return task, in_natural_order if order == "a" else _ade_order_b(task)
    if task.startswith("["):
        return _own_task(dataset, _groups_from_json(task), order)
    if "/" in task or "," in task or task in dataset.classes:
        return _own_task(dataset, [group.split(",") for group in task.split("/")], order)
    raise UserError(f"{unknown('task', task, TASKS.get(dataset.name, (JOINT, *dataset.classes)))}, {_FORMS}")


def all_ids(dataset: DatasetInfo) -> tuple[int, ...]:
    """Return every foreground id, in natural order."""
    return tuple(range(1, len(dataset.classes) + 1))


def _counted(dataset: DatasetInfo, task: str, base: int, increment: int) -> Groups:
    """Return the "A-B" tasks in natural order; the last step takes what is left."""
    ids = all_ids(dataset)
    if not (1 <= base < len(ids) and increment >= 1):
        raise UserError(
            f"task '{task}' does not fit the {len(ids)} classes of {dataset.name}; "
            f"in A-B, A must lie in 1..{len(ids) - 1} and B be at least 1 (all in one step is '{JOINT}')"
        )
    return (ids[:base], *(ids[i : i + increment] for i in range(base, len(ids), increment)))


def _ade_order_b(task: str) -> Groups:
    later = tuple(sorted(sum(_ADE_B_INCREMENTS, ())))
    base = tuple(i for i in range(1, 151) if i not in later)
    groups = {
        "100-50": (base, later),
        "100-10": (base, *_ADE_B_INCREMENTS),
        "50-50": (_ADE_B_FIRST_FIFTY, tuple(i for i in base if i not in _ADE_B_FIRST_FIFTY), later),
    }
    if task not in groups:
        raise UserError(f"task '{task}' has no order b; it is published for {', '.join(groups)}: use order a")
    return groups[task]


def _groups_from_json(text: str) -> Sequence[Sequence[str]]:
    remedy = 'write for example [["cat", "dog"], ["bird"]]'
    try:
        groups = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"task {text} is not valid JSON ({error}); {remedy}") from error
    if not all(isinstance(group, list) and all(isinstance(name, str) for name in group) for group in groups):
        raise UserError(f"task {text} is not a list of lists of class names; {remedy}")
    return groups


def _own_task(dataset: DatasetInfo, groups: Sequence[Sequence[str]], order: str) -> tuple[str, Groups]:
    if order != "a":
        raise UserError(f"order '{order}' does not apply to own groups, which define their own order; use order a")
    if not groups or any(isinstance(group, str) for group in groups):
        raise UserError(f"task {groups!r} is not a sequence of groups; give each step a list of class names")
    numbers = {name: i for i, name in enumerate(dataset.classes, start=1)}
    learnt: dict[str, int] = {}
    for step, group in enumerate(groups):
        names = [name.strip() for name in group]
        if not any(names):
            raise UserError(f"step {step} of the task has no class; name at least one of {dataset.name}")
        for name in names:
            if name not in numbers:
                raise UserError(f"step {step} of the task: {unknown('class', name, numbers)}")
            if name in learnt:
                raise UserError(
                    f"class '{name}' is named in step {learnt[name]} and again in step {step} of the task; "
                    "a class is learnt once"
                )
            learnt[name] = step
    split = [[name for name, of in learnt.items() if of == step] for step in range(len(groups))]
    return _written(split), tuple(tuple(numbers[name] for name in group) for group in split)


def _written(groups: list[list[str]]) -> str:
    """Return one string for the groups: the short form if it cannot be mistaken for another task, else JSON."""
    text = "/".join(",".join(group) for group in groups)
    other_task = text in (JOINT, *_ALIASES) or re.fullmatch(r"\d+-\d+", text) or text.startswith("[")
    if not other_task and [g.split(",") for g in text.split("/")] == groups:
        return text
    return json.dumps(groups, ensure_ascii=False)
