"""Measure `incseg extend` on real photographs with default flags: IoU of new classes, losses of old ones.

    python tools/extend_evidence.py --ccp CCP --voc VOC2012 --work runs/extend

CCP is Clothing Co-Parsing as a folder dataset. One photograph of CCP in six is only for the test; neither training nor
choices use it. Every command runs once with default flags and its own cache, so its time includes the features. Writes
results/extend.json and results/extend.md. --only measures some parts, --again forgets what was measured of them: the
seconds of `few` mean something on a quiet machine only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from incseg.io import write_compact_json

RESULTS = Path(__file__).resolve().parents[1] / "results"
BOX = "voc20"
OLD, NEW, NEW_VOC = ("skin", "hair", "shoes", "pants", "dress", "coat"), ("bag", "sunglasses"), ("bag", "hat")
FIRST = ("skin", "hair", "shoes", "jeans", "blouse", "skirt")
CHAIN = (("pants", "coat"), ("dress", "bag"), ("hat", "sunglasses"))
FEW = 200
CLOTHES = (("bag", "hat"), ("dress", "coat"), ("pants", "sunglasses"))
CLOTHES_IMAGES = 80


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("ccp", "voc", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    make_folders(args.ccp, args.work)
    lab = Lab(args.work, args.voc.resolve())
    for name in args.only:
        letter, part = PARTS[name]
        if args.again:
            lab.forget(letter)
        part(lab)
        lab.write()
    return 0


class Lab:
    """Run commands in `work`, each once, and save their results."""

    def __init__(self, work: Path, voc: Path) -> None:
        self.work, self.voc = work, voc
        self.file = work / "measured.json"
        self.measured: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def forget(self, letter: str) -> None:
        """Remove the runs and figures of a part. All have its letter in front."""
        self.measured = {key: found for key, found in self.measured.items() if not key.startswith(letter)}
        for found in self.work.glob(f"{letter}*/config.yaml"):
            shutil.rmtree(found.parent)

    def run(self, key: str, *words: str | Path) -> dict[str, Any]:
        """Run `incseg WORDS`. Return its seconds, and for eval its figures."""
        if key not in self.measured:
            command = ["incseg", *map(str, words)]
            print(" ".join(command), flush=True)
            started = time.monotonic()
            with tempfile.TemporaryDirectory(dir=self.work) as cache:
                done = subprocess.run(
                    [sys.executable, "-m", *command], cwd=self.work, capture_output=True, text=True, check=False,
                    env={**os.environ, "INCSEG_CACHE": cache},
                )  # fmt: skip
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
            shown = " ".join(command).replace(str(self.voc), "VOC2012")
            found: dict[str, Any] = {"command": shown, "seconds": round(time.monotonic() - started, 1)}
            if words[0] == "eval":
                found |= json.loads(done.stdout)
            if words[0] == "extend":
                report = json.loads((self.work / str(words[words.index("--out") + 1]) / "forgetting.json").read_text())
                found |= {key: report[key] for key in ("recipe", "tries")}
                found["said"] = [
                    line
                    for line in done.stdout.splitlines()
                    if re.match(r"input:|old classes:|.* lies? on |.* lost ", line)
                ]
            self.measured[key] = found
            self.file.write_text(json.dumps(self.measured, indent=1))
        return self.measured[key]

    def write(self) -> None:
        write_compact_json(RESULTS / "extend.json", self.measured)
        RESULTS.joinpath("extend.md").write_text(page(self.measured))


def own_photographs(lab: Lab) -> None:
    lab.run("a train", "train", "--data", "folder", "--root", "a-base", "--out", "a")
    lab.run("a extend", "extend", "a", "--root", "a-new", "--classes", ",".join(NEW), "--out", "a-more")
    lab.run("a joint", "train", "--data", "folder", "--root", "a-joint", "--out", "a-joint-run")
    for key, model in (("before", "a"), ("after", "a-more"), ("joint", "a-joint-run")):
        lab.run(f"a eval {key}", "eval", model, "--data", "folder", "--root", "a-test", "--json")


def voc_and_more(lab: Lab) -> None:
    lab.run("b extend", "extend", BOX, "--root", "b-new", "--classes", ",".join(NEW_VOC), "--out", "b-more")
    lab.run("b joint", "train", "--data", "folder", "--root", "b-new", "--out", "b-joint-run")
    for key, model in (("after", "b-more"), ("joint", "b-joint-run")):
        lab.run(f"b eval {key}", "eval", model, "--data", "folder", "--root", "b-test", "--json")
    for key, model in (("before", BOX), ("after", "b-more")):
        lab.run(f"b voc {key}", "eval", model, "--data", "voc", "--root", lab.voc, "--json")


def few_photographs(lab: Lab) -> None:
    """Measure the time with few photographs."""
    lab.run("c train", "train", "--data", "folder", "--root", "c-base", "--out", "c")
    lab.run("c extend", "extend", "c", "--root", "c-new", "--classes", ",".join(NEW), "--out", "c-more")
    lab.run("c eval after", "eval", "c-more", "--data", "folder", "--root", "a-test", "--json")


def one_after_another(lab: Lab) -> None:
    """Three extensions of one model, and the later two of the first model for comparison."""
    lab.run("d train", "train", "--data", "folder", "--root", "d-base", "--out", "d")
    lab.run("d eval", "eval", "d", "--data", "folder", "--root", "d-test", "--json")
    for start, number in (("d", 1), ("d-1", 2), ("d-1-2", 3), ("d", 2), ("d", 3)):
        out, classes = f"{start}-{number}", ",".join(CHAIN[number - 1])
        lab.run(f"{out} extend", "extend", start, "--root", f"d-more{number}", "--classes", classes, "--out", out)
        lab.run(f"{out} eval", "eval", out, "--data", "folder", "--root", "d-test", "--json")


def on_a_person(lab: Lab) -> None:
    """Classes that lie on a class of the model, a person: with the person giving way, and without."""
    for number, pair in enumerate(CLOTHES, start=1):
        for out, flags in ((f"e-{number}", ()), (f"e-{number}-strict", ("--protect", "all"))):
            root = f"e-more{number}"
            lab.run(f"{out} extend", "extend", BOX, "--root", root, "--classes", ",".join(pair), "--out", out, *flags)
            lab.run(f"{out} eval", "eval", out, "--data", "folder", "--root", "e-test", "--json")
            if not flags:
                lab.run(f"{out} voc", "eval", out, "--data", "voc", "--root", lab.voc, "--json")


PARTS = {
    "own": ("a", own_photographs), "voc": ("b", voc_and_more), "few": ("c", few_photographs),
    "chain": ("d", one_after_another), "person": ("e", on_a_person),
}  # fmt: skip
"""The parts, with the first letter of their runs."""

# --- the photographs -----------------------------------------------------------------------------------------


def make_folders(ccp: Path, work: Path) -> None:
    """Make folders that label only some classes, like those of users. Photographs are linked, masks written."""
    names = sorted(path.stem for path in (ccp / "images").iterdir())
    test = [name for name in names if _hash(name) % 5 == 0 and not settings_were_chosen_on(name)]
    rest = [name for name in names if _hash(name) % 5]
    first = [name for name in rest if _hash(name) // 5 % 2 == 0]
    second = [name for name in rest if _hash(name) // 5 % 2]
    for folder, photographs, classes in (
        ("a-base", first, OLD), ("a-new", second, NEW), ("a-joint", rest, (*OLD, *NEW)), ("b-new", rest, NEW_VOC),
        ("c-base", first[:FEW], OLD), ("c-new", second[:FEW], NEW),
        ("d-base", [name for name in rest if _hash(name) // 5 % 5 < 2], FIRST),
        *((f"d-more{i}", [name for name in rest if _hash(name) // 5 % 5 == i + 1], CHAIN[i - 1]) for i in (1, 2, 3)),
    ):  # fmt: skip
        _write(ccp, work / folder, photographs, classes)
    show = {name: set(np.unique(np.array(Image.open(ccp / "masks" / f"{name}.png")))) for name in rest}
    numbers = {name: i for i, name in enumerate((ccp / "classes.txt").read_text().split(), start=1)}
    for i, pair in enumerate(CLOTHES):
        third = [name for name in rest if _hash(name) // 5 % 3 == i and show[name] & {numbers[one] for one in pair}]
        _write(ccp, work / f"e-more{i + 1}", third[:CLOTHES_IMAGES], pair)
    of_tests = {
        "a-test": (*OLD, *NEW), "b-test": NEW_VOC, "d-test": (*FIRST, *sum(CHAIN, ())), "e-test": sum(CLOTHES, ()),
    }  # fmt: skip
    for folder, classes in of_tests.items():
        _write(ccp, work / folder, [*test, rest[0]], classes)
        (work / folder / "val.txt").write_text("\n".join(test) + "\n")


def settings_were_chosen_on(name: str) -> bool:
    """Return whether the settings of the recipes were chosen on a photograph (docs/lab-log.md); it is not in a test."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 5 == 0


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[8:16], "big")


def _write(ccp: Path, root: Path, names: Sequence[str], classes: Sequence[str]) -> None:
    if root.exists():
        return
    numbers = {name: i for i, name in enumerate((ccp / "classes.txt").read_text().split(), start=1)}
    table = np.zeros(256, dtype=np.uint8)
    table[255] = 255
    for number, name in enumerate(classes, start=1):
        table[numbers[name]] = number
    unfinished = root.with_name(f".{root.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    for part in ("images", "masks"):
        (unfinished / part).mkdir(parents=True)
    for name in names:
        (unfinished / "images" / f"{name}.jpg").symlink_to((ccp / "images" / f"{name}.jpg").resolve())
        mask = np.array(Image.open(ccp / "masks" / f"{name}.png"))
        Image.fromarray(table[mask]).save(unfinished / "masks" / f"{name}.png")
    (unfinished / "classes.txt").write_text("\n".join(["background", *classes]) + "\n")
    unfinished.rename(root)


# --- the page ------------------------------------------------------------------------------------------------


def page(measured: dict[str, Any]) -> str:
    lines = [
        "# What `incseg extend` does on real photographs",
        "",
        "Made by `tools/extend_evidence.py` (its first lines say how). Clothing Co-Parsing: 1004 photographs of",
        "people, one in six for the test alone. Default flags, two cores, no GPU. IoU in percent, every photograph",
        "whole and at its own size, as `incseg predict` sees it. One seed. Seconds are of a busy machine, except those",
        "of the section with 200 photographs.",
        "",
    ]
    if "a eval joint" in measured:
        lines += ["## Six classes of people, then bag and sunglasses from photographs that label only these", ""]
        before, after, joint = (measured[f"a eval {key}"]["classes"] for key in ("before", "after", "joint"))
        rows = [(name, *(_iou(one, name) for one in (before, after, joint))) for name in (*OLD, *NEW)]
        lines += _table(("class", "before", "after", "all eight at once (ceiling)"), rows)
        lines += [*_summary(measured["a extend"], before, after, joint, OLD, NEW), ""]
    if "b voc after" in measured:
        lines += ["## The 20 classes of VOC, then bag and hat", ""]
        after, joint = (measured[f"b eval {key}"]["classes"] for key in ("after", "joint"))
        rows = [(name, _iou(after, name), _iou(joint, name)) for name in NEW_VOC]
        lines += _table(("new class, photographs of people", "after", "bag and hat alone (ceiling)"), rows)
        was, now = (measured[f"b voc {key}"] for key in ("before", "after"))
        rows = [(name, f"{one['iou']:.1f}", _iou(now["classes"], name)) for name, one in was["classes"].items()]
        rows.append(("**mean**", f"**{was['mean']:.1f}**", f"**{now['mean']:.1f}**"))
        lines += ["", *_table(("old class, VOC val (1449 images)", "before", "after"), rows)]
        lines += [*_summary(measured["b extend"], {}, after, joint, (), NEW_VOC), ""]
    if "c extend" in measured:
        train, extend = measured["c train"], measured["c extend"]
        found = measured["c eval after"]["classes"]
        lines += [
            f"## From nothing, {FEW} photographs each",
            "",
            f"Training the six classes took {train['seconds']:.0f} s, extending by bag and sunglasses "
            f"{extend['seconds']:.0f} s, features included. Then bag {_iou(found, 'bag')}, sunglasses "
            f"{_iou(found, 'sunglasses')}.",
            "",
        ]
    if "d-3 eval" in measured:
        lines += ["## Six classes, then three extensions of two each, on other photographs each time", ""]
        runs = ("d", "d-1", "d-1-2", "d-1-2-3", "d-2", "d-3")
        tested = [measured[f"{run} eval"]["classes"] for run in runs]
        rows = [(name, *(_iou(one, name) for one in tested)) for name in (*FIRST, *sum(CHAIN, ()))]
        heads = ("class", "base", "first", "second", "third", "second alone", "third alone")
        lines += [*_table(heads, rows), ""]
    if "e-3-strict eval" in measured:
        lines += _of_clothes(measured)
    lines += ["## Commands", "", "```", *(one["command"] for one in measured.values()), "```", ""]
    return "\n".join(lines)


def _of_clothes(measured: dict[str, Any]) -> list[str]:
    lines = ["## The 20 classes of VOC, then clothes, which lie on a person", ""]
    lines += [f"{CLOTHES_IMAGES} photographs for each pair. By default the person gives way; with `--protect all` not."]
    rows = []
    for number, pair in enumerate(CLOTHES, start=1):
        for name in pair:
            found = [measured[f"e-{number}{kind} eval"]["classes"] for kind in ("-strict", "")]
            rows.append((f"+ {', '.join(pair)}: {name}", *(_iou(one, name) for one in found)))
        after = measured[f"e-{number} voc"]
        rows.append((f"+ {', '.join(pair)}: person, VOC val", "", _iou(after["classes"], "person")))
        rows.append((f"+ {', '.join(pair)}: mean of VOC val", "", f"{after['mean']:.1f}"))
    lines += ["", *_table(("IoU", "`--protect all`", "default"), rows), "", "The commands said:", "", "```"]
    lines += [line for number in (1, 2, 3) for line in measured[f"e-{number} extend"]["said"]]
    return [*lines, "```", ""]


def _summary(
    extend: dict[str, Any], before: dict[str, Any], after: dict[str, Any], joint: dict[str, Any], old: Sequence[str],
    new: Sequence[str],
) -> list[str]:  # fmt: skip
    lines = [""]
    if old:
        was, now = (np.mean([one[name]["iou"] for name in old]) for one in (before, after))
        lines.append(f"Old classes: mean {was:.1f} before, {now:.1f} after. ")
    reached, most = (np.mean([one[name]["iou"] for name in new]) for one in (after, joint))
    lines.append(f"New classes: mean {reached:.1f}, {reached / most:.2f} of the ceiling's {most:.1f}. ")
    lines += [
        f"The command took {extend['seconds']:.0f} s with its features. It said:",
        "",
        "```",
        *extend["said"],
        "```",
    ]
    rows = [
        (one["recipe"] + (" (taken)" if one["recipe"] == extend["recipe"] else ""), f"{one['agreement']:.1f} %",
         *(f"{iou:.1f}" for iou in one["iou"].values()), f"{one['seconds']:.0f}")
        for one in extend["tries"]
    ]  # fmt: skip
    heads = ("recipe, on held-back photographs", "old pixels unchanged", *extend["tries"][0]["iou"], "seconds")
    return [*lines, "", *_table(heads, rows)]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = "|".join(["---", *["---:"] * (len(heads) - 1)])
    return [f"| {' | '.join(heads)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)]


def _iou(classes: dict[str, Any], name: str) -> str:
    found = classes.get(name, {}).get("iou")
    return "–" if found is None else f"{found:.1f}"


if __name__ == "__main__":
    sys.exit(main())
