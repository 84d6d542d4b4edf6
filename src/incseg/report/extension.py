"""The result of an extension: a row per class, a row per try, and findings in words.

Everything is read from the forgetting.json of a run folder (engine/forgetting.py, incseg/extension.py).
"""

from __future__ import annotations

import shlex
from typing import Any

from incseg.io import counted
from incseg.metrics import MAY_GIVE_WAY, MOST_LOST, agreement, hosts, percent, unchanged

NOTHING_LOST = 0.5
"""Percent of old pixels that may change without a remark."""
NOTICED = 0.001
"""Share of all old pixels that a class must lose to be named: a few pixels mean nothing."""
WORSE_BY = 2.0
"""Points of IoU that an old class must lose to be named."""
FEW = 20
"""Advise more photographs if a class has fewer to learn from."""
FEW_TESTED = 10
"""An IoU is rough if fewer held-back photographs show its class."""
MUCH_BETTER = 5.0
"""Points of mean IoU by which a recipe that the rule excludes must be better to be named."""
MOST_UNSEEN = 3
"""Most old classes that have a row of their own although no photograph shows them."""
HARDLY = 5.0
"""A class with a lower IoU, in percent, counts as hardly found."""

CLASS_HEADS = ("class", "", "photographs", "unchanged", "IoU before", "IoU")


def where(report: dict[str, Any]) -> str:
    kind = "held-back" if report["held_out"] else "training"
    return counted(report["images"], f"{kind} photograph")


def class_rows(report: dict[str, Any]) -> list[list[str]]:
    """Return a row for each class: old ones with their agreement with the model before, new ones with their IoU.

    Photographs are those to learn from + those held back. Many old classes that none of them shows share a row.
    """
    rows = []
    unseen = [name for name, of_class in report["classes"].items() if agreement(of_class) is None]
    folded = set(unseen) if len(unseen) > MOST_UNSEEN else set()
    for name, of_class in report["classes"].items():
        if name in folded:
            continue
        same = agreement(of_class)
        before, after = of_class["iou"] or (None, None)
        rows.append(
            [name, "old", "", "not seen here" if same is None else f"{same:.1f} %", percent(before), percent(after)]
        )
    if folded:
        rows.append([f"{len(folded)} others", "old", "", "not seen here", "–", "–"])
    for name, of_class in report["new"].items():
        counts = f"{report.get('train_images', {}).get(name, 0)} + {of_class['images']}"
        improved = "iou_before" in of_class
        before = percent(of_class["iou_before"]) if improved else ""
        rows.append([name, "improved" if improved else "new", counts, "", before, percent(of_class["iou"])])
    return rows


def try_heads(report: dict[str, Any]) -> list[str]:
    return ["recipe", "old classes unchanged", *(f"IoU {name}" for name in report["new"]), "seconds", ""]


def try_rows(report: dict[str, Any]) -> list[list[str]]:
    """Return a row for each recipe that was tried."""
    rows = []
    for one in report["tries"]:
        notes = ["taken"] * (one["recipe"] == report["recipe"])
        notes += ["changes too much of the old"] * (not _is_allowed(one))
        ious = [percent(one["iou"][name]) for name in report["new"]]
        rows.append([one["recipe"], f"{one['agreement']:.1f} %", *ious, f"{one['seconds']:.0f}", ", ".join(notes)])
    return rows


def _is_allowed(one: dict[str, Any]) -> bool:
    """Return whether the rule allows what a try did to the old classes. Version 0.1 did not save it."""
    return bool(one.get("allowed", 100 - one["agreement"] <= MOST_LOST))


def in_words(report: dict[str, Any]) -> list[str]:
    """Return lines on the old classes, on improved ones, and on new ones that were not learnt."""
    return [*_of_the_old(report), *_of_the_new(report), *_passed_over(report)]


def _of_the_old(report: dict[str, Any]) -> list[str]:
    total = agreement(report)
    if total is None:
        return ["old classes: the model found none of them on these photographs, so forgetting cannot be measured"]
    lines = []
    giving_way = hosts(report) - set(report.get("protected", ()))
    for name, of_class in report["classes"].items():
        same = agreement(of_class)
        lost = of_class["pixels"] - of_class["kept"]
        if same is None or 100 - same <= MOST_LOST or lost < NOTICED * report["pixels"]:
            continue
        if name in giving_way:
            on_it = [new for new, of_new in report["new"].items() if of_new.get("lies_on") == name]
            lines.append(
                f"{', '.join(on_it)} {'lies' if len(on_it) == 1 else 'lie'} on {name}, which gave way and lost "
                f"{100 - same:.1f} % of its other pixels, of at most {MAY_GIVE_WAY:g} %; --protect {shlex.quote(name)} "
                f"allows {MOST_LOST:g} % and finds less"
            )
            continue
        takers = sorted(of_class["taken_by"].items(), key=lambda item: -item[1])
        to = f" to {takers[0][0]}" if takers and 2 * takers[0][1] >= lost else ""
        lines.append(f"{name} lost {100 - same:.1f} % of its pixels{to}")
    for name, of_class in report["classes"].items():
        if of_class["iou"] and of_class["iou"][0] - of_class["iou"][1] > WORSE_BY:
            before, after = of_class["iou"]
            lines.append(f"{name} lost {before - after:.1f} points of IoU ({before:.1f} → {after:.1f})")
    if 100 - total <= NOTHING_LOST and not lines:
        if report["kept"] == report["pixels"]:
            return ["old classes: all their pixels are labelled as before"]
        return [f"old classes: {total:.1f} % of their pixels are labelled as before, and none got noticeably worse"]
    lines.insert(0, f"old classes: {total:.1f} % of their pixels are labelled as before")
    if 100 - unchanged(report, protected=report.get("protected", ())) > MOST_LOST:
        gentler = "" if report.get("recipe") == "closed-form" else "; --recipe gentle changes less"
        lines.append(f"warning: this is more than the rule allows{gentler}")
    return lines


def _passed_over(report: dict[str, Any]) -> list[str]:
    """Return a line on a recipe that the rule excludes but that finds the new classes much better, if there is one."""

    def mean(one: dict[str, Any]) -> float:
        known = [value for value in one["iou"].values() if value is not None]
        return sum(known) / len(known) if known else 0.0

    taken = next((one for one in report.get("tries", []) if one["recipe"] == report["recipe"]), None)
    others = [one for one in report.get("tries", []) if not _is_allowed(one)]
    if taken is None or not others:
        return []
    better = max(others, key=mean)
    if mean(better) - mean(taken) < MUCH_BETTER:
        return []
    name, lost = better["recipe"], 100 - better["agreement"]
    return [
        f"note: {name} finds the new classes better, mean IoU {mean(better):.1f} instead of {mean(taken):.1f}, and "
        f"changes {lost:.1f} % of the old pixels; --recipe {name} takes it"
    ]


def _of_the_new(report: dict[str, Any]) -> list[str]:
    lines = []
    train_images = report.get("train_images", {})
    for name, of_class in report["new"].items():
        if of_class.get("iou_before") is not None:
            lines.append(f"{name}: IoU {of_class['iou_before']:.1f} → {of_class['iou']:.1f}")
        if of_class["images"] == 0:
            lines.append(
                f"{name}: no held-back photograph shows it, so its IoU is not known; add photographs, or val.txt"
            )
        learnt_from = train_images.get(name, 0)
        if learnt_from < FEW:
            advice = f"{counted(learnt_from, 'photograph')} to learn from is little, so add some"
        elif 0 < of_class["images"] < FEW_TESTED:
            advice = "test it on other photographs (incseg eval)"
        else:
            advice = "its objects may be too small or its masks wrong: look at the contact sheet"
        if of_class["predicted"] == 0 and of_class["images"]:
            lines.append(f"warning: {name} is never predicted; {advice}")
        elif of_class["iou"] is not None and of_class["iou"] < HARDLY:
            lines.append(f"warning: {name} is hardly found (IoU {of_class['iou']:.1f}); {advice}")
    rough = {name: of_new["images"] for name, of_new in report["new"].items() if 0 < of_new["images"] < FEW_TESTED}
    if rough and report["held_out"]:
        shown = ", ".join(f"{name} {number}" for name, number in rough.items())
        lines.append(
            f"note: few held-back photographs show a new class ({shown}), so its IoU here is rough; incseg eval tests "
            "it on other photographs"
        )
    return lines
