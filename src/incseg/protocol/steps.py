"""Steps: what is old, new and future in each, and how masks become labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from incseg.io import require_known
from incseg.protocol import images
from incseg.protocol.rules import RULES, LabelRules
from incseg.protocol.tasks import JOINT, Groups, all_ids, parse_task
from incseg.types import BACKGROUND, IGNORE, MAX_CLASSES, UNSEEN, DatasetInfo, UserError

SETTINGS = ("overlapped", "disjoint", "pseudo-disjoint", JOINT)
ORDERS = ("a", "b")


@dataclass(frozen=True)
class Step:
    """One increment. Classes are dataset ids in the order of learning.

    A learnt label is 0 for background, then 1, 2, … in the order of learning. The tables are (256,) uint8
    from dataset ids to learnt labels, so that `table[mask]` relabels a mask:

    train_table: new classes get their learnt label, everything else is background; void by the rules.
    test_table:  seen classes get their learnt label and future ones UNSEEN; void is ignored.
    """

    index: int
    old: tuple[int, ...]
    new: tuple[int, ...]
    future: tuple[int, ...]
    names: tuple[str, ...]
    train_table: np.ndarray = field(compare=False, repr=False)
    test_table: np.ndarray = field(compare=False, repr=False)

    @property
    def seen(self) -> tuple[int, ...]:
        return self.old + self.new


@final
class Protocol:
    """A dataset learnt step by step.

    task:    "15-1" and the like, "joint", or own groups of class names: [["cat", "dog"], ["bird"]], the same
             as JSON, or "cat,dog/bird". Classes that no group names are never learnt.
    setting: which training images a step gets: "overlapped", "disjoint", or "pseudo-disjoint" (ADE20k).
             "joint" makes one step of all the task's classes.
    rules:   what void, unlabelled and unseen pixels count as: a name of RULES or a LabelRules.
    order:   "a" natural; "b" the second class order of ADE20k.

    Attributes beside these: `steps`; `classes_in_order` and `names_in_order`, the dataset ids and names of
    the classes learnt, so that learnt label i is `classes_in_order[i - 1]`; `groups`, the task's classes per
    step, which in setting "joint" still tell the base classes from the later ones; `prediction_table`,
    (256,) uint8 from learnt labels to dataset ids.

    Example:
        >>> from incseg.data.shapes import Shapes
        >>> protocol = incseg.Protocol(Shapes().info, "6-2", "overlapped")
        >>> [step.names for step in protocol.steps[1:]]
        [('hexagon', 'arrow'), ('crescent', 'flower')]
    """

    def __init__(
        self,
        dataset: DatasetInfo,
        task: str | Sequence[Sequence[str]],
        setting: str,
        rules: str | LabelRules = "plop",
        order: str = "a",
    ) -> None:
        _check_dataset(dataset)
        require_known("setting", setting, SETTINGS)
        require_known("order", order, ORDERS)
        if order != "a" and dataset.name != "ade20k":
            raise UserError(f"order '{order}' exists for ade20k only; use order a for {dataset.name}")
        if setting == "pseudo-disjoint" and dataset.name != "ade20k":
            raise UserError(f"setting '{setting}' exists for ade20k only; {dataset.name} has overlapped and disjoint")
        if isinstance(rules, str):
            require_known("label rules", rules, RULES)
            rules = RULES[rules]
        self.dataset = dataset
        self.task, self.groups = parse_task(dataset, task, order)
        self.setting = setting
        self.rules = rules
        self.order = order
        self.steps = _make_steps(dataset, (sum(self.groups, ()),) if setting == JOINT else self.groups, rules)
        self.classes_in_order = self.steps[-1].seen
        self.names_in_order = tuple(dataset.classes[i - 1] for i in self.classes_in_order)
        self.prediction_table = _table({BACKGROUND: BACKGROUND} | dict(enumerate(self.classes_in_order, start=1)))

    def train_images(self, presence: images.Presence) -> tuple[tuple[int, ...], ...]:
        """Return, for each step, the indices of its training images; `presence[i]` are the ids, from 1, in image i."""
        shown = images.presence_matrix(presence, len(self.dataset.classes))
        groups = [step.new for step in self.steps]
        if self.setting == "disjoint":
            chosen = images.disjoint(shown, groups)
        elif self.setting == "pseudo-disjoint":
            chosen = self._pseudo_disjoint(shown)
        else:
            chosen = images.overlapped(shown, groups)
        return tuple(_indices(mask) for mask in chosen)

    def test_images(self, step: Step, presence: images.Presence) -> tuple[int, ...]:
        """Return the indices of the images that the model of `step` is tested on."""
        if self.rules.test_images == "all":
            return tuple(range(len(presence)))
        shown = images.presence_matrix(presence, len(self.dataset.classes))
        return _indices(images.overlapped(shown, [step.seen])[0])

    def describe_rules(self) -> list[str]:
        """Return the label rules in plain English, to be printed under every table."""
        return self.rules.describe(self.dataset)

    def as_dict(
        self, presence: images.Presence | None = None, test_presence: images.Presence | None = None
    ) -> dict[str, Any]:
        """Return a dict for JSON. With the presence of training (test) images, each step has their number."""
        steps: list[dict[str, Any]] = [
            {"index": step.index, "classes": list(step.names), "ids": list(step.new)} for step in self.steps
        ]
        if presence is not None:
            for row, chosen in zip(steps, self.train_images(presence), strict=True):
                row["train_images"] = len(chosen)
        if test_presence is not None:
            for row, step in zip(steps, self.steps, strict=True):
                row["test_images"] = len(self.test_images(step, test_presence))
        return {
            "dataset": self.dataset.name,
            "task": self.task,
            "setting": self.setting,
            "order": self.order,
            "rules": self.rules.as_dict(),
            "steps": steps,
        }

    def _pseudo_disjoint(self, shown: np.ndarray) -> list[np.ndarray]:
        if self.task != "100-50":
            return images.pseudo_disjoint(shown, self.groups)
        # The published lists of 100-50 are those of 100-10 with the five increments put together.
        _, finer = parse_task(self.dataset, "100-10", self.order)
        base, *increments = images.pseudo_disjoint(shown, finer)
        return [base, np.logical_or.reduce(increments)]


def _check_dataset(dataset: DatasetInfo) -> None:
    if not 1 <= len(dataset.classes) <= MAX_CLASSES:
        raise UserError(f"{dataset.name} has {len(dataset.classes)} classes; 1 to {MAX_CLASSES} are possible")
    twice = sorted({name for name in dataset.classes if dataset.classes.count(name) > 1})
    if twice:
        raise UserError(f"{dataset.name} has more than one class '{twice[0]}'; give each class its own name")


def _make_steps(dataset: DatasetInfo, groups: Groups, rules: LabelRules) -> tuple[Step, ...]:
    order = sum(groups, ())
    order += tuple(i for i in all_ids(dataset) if i not in order)
    label_of = {dataset_id: label for label, dataset_id in enumerate(order, start=1)}
    void_in_training = BACKGROUND if rules.void_in_training == "background" else IGNORE
    zero_at_test = BACKGROUND
    if not dataset.has_background and rules.unlabelled_at_test == "ignore":
        zero_at_test = IGNORE
    steps = []
    learnt = 0
    for index, new in enumerate(groups):
        old, future = order[:learnt], order[learnt + len(new) :]
        not_new = dict.fromkeys((BACKGROUND, *old, *future), BACKGROUND)
        train = not_new | {i: label_of[i] for i in new} | {IGNORE: void_in_training}
        test = {i: label_of[i] for i in old + new} | dict.fromkeys(future, UNSEEN) | {BACKGROUND: zero_at_test}
        names = tuple(dataset.classes[i - 1] for i in new)
        steps.append(Step(index, old, new, future, names, _table(train), _table(test)))
        learnt += len(new)
    return tuple(steps)


def _table(entries: dict[int, int]) -> np.ndarray:
    """Return a read-only look-up table; what has no entry is ignored."""
    table = np.full(256, IGNORE, dtype=np.uint8)
    table[list(entries)] = list(entries.values())
    table.flags.writeable = False
    return table


def _indices(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(np.flatnonzero(mask).tolist())
