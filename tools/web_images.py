"""Make folders of images per class for --method.replay from the training images of an experiment itself.

    python tools/web_images.py OUT [--per-class 100] --data voc --root VOC --task 15-1

The flags after OUT are those of `incseg train`, so that the steps have the images of the run. For a class learnt in
step s, OUT/CLASS gets images without masks that step s was trained on, that show the class, and that no later step
trains on. This is easier than images from the web: the images come from the same dataset, and the base was trained on
them with labels. Held-out images (--data.holdout) are in no step, so in no folder either. Classes of the last step are
never replayed and get no folder.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from incseg.cli.settings import parse_run
from incseg.data.files import FileSource
from incseg.data.source import Source
from incseg.io import replacing
from incseg.methods import build_method
from incseg.run import Setup, read_presence
from incseg.types import UserError


def choose(
    train_images: Sequence[Sequence[int]], presence: Sequence[Sequence[int]], steps: Sequence[Sequence[int]], most: int
) -> dict[int, list[int]]:
    """Return, for each class id, at most `most` images of its step, evenly chosen, that show it and no later step has.

    train_images: of each step.   presence: the class ids in each image.   steps: the class ids of each step.
    """
    chosen = {}
    for index, classes in enumerate(steps[:-1]):
        later = {image for images in train_images[index + 1 :] for image in images}
        for class_id in classes:
            fit = [i for i in train_images[index] if class_id in presence[i] and i not in later]
            places = np.linspace(0, len(fit) - 1, min(most, len(fit))).round().astype(int)
            chosen[class_id] = [fit[place] for place in places]
    return chosen


def write(source: Source, chosen: dict[int, list[int]], out: Path) -> None:
    for class_id, images in chosen.items():
        name = source.info.classes[class_id - 1]
        for image in images:
            file = source.files("train").images[image] if isinstance(source, FileSource) else None
            file_name = f"{source.names('train')[image]}{file.suffix if file else '.png'}"
            with replacing(out / name / file_name) as temporary:
                if file:
                    shutil.copyfile(file, temporary)
                else:
                    source.image("train", image).save(temporary, format="PNG")
        print(f"{name}: {len(images)} images")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("--per-class", type=int, default=100, metavar="N")
    args, rest = parser.parse_known_args(arguments)
    config = parse_run("web_images.py", "", rest)
    if args.out.exists() and any(args.out.iterdir()):
        raise UserError(f"{args.out} is not empty, and its images would be replayed too; give a new folder")
    setup = Setup.of(config, build_method({"name": "finetune"}))
    presence = read_presence(setup.source, "train", config.data.presence)
    steps = [step.new for step in setup.protocol.steps]
    chosen = choose(setup.train_images, presence.classes, steps, args.per_class)
    for class_id, images in chosen.items():
        if not images:
            raise UserError(
                f"every image of '{setup.source.info.classes[class_id - 1]}' is used by a later step too; "
                "choose another --task or --setting"
            )
    write(setup.source, chosen, args.out)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
