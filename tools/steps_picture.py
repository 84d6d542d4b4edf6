"""Draw one picture of a run on shapes: test scenes after every step, prediction above, uncertainty below.

python tools/steps_picture.py runs/demo docs/images/steps.png --scenes 4 11
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import incseg
from incseg.data.shapes import Shapes
from incseg.engine.rundir import RunDir
from incseg.report.draw import uncertainty_image

SIDE, GAP, HEAD = 176, 8, 26
NOTE = "uncertainty u,\nthe background's\nprobability:\ndark = an object,\nbright = background"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scenes", type=int, default=2, metavar="N", help="how many")
    args = parser.parse_args()
    source = Shapes()
    steps = RunDir(args.run).steps_done()
    predictors = [incseg.load(args.run, step=step) for step in steps]
    titles = [
        "image",
        "truth",
        *(f"step {k}: + {', '.join(p.increments[-1].classes)}" for k, p in enumerate(predictors)),
    ]
    titles[2] = f"step 0: {len(predictors[0].classes) - 1} classes"
    width = GAP + len(titles) * (SIDE + GAP)
    scenes = of_every_step(source, [set(increment.ids) for increment in predictors[-1].increments])[: args.scenes]
    height = HEAD + len(scenes) * 2 * (SIDE + GAP) + GAP
    page = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size=13)
    for column, title in enumerate(titles):
        draw.text((GAP + column * (SIDE + GAP), 6), title, fill="black", font=font)
    for number, scene in enumerate(scenes):
        top = HEAD + number * 2 * (SIDE + GAP)
        image, mask = source.pair("val", scene)
        paste(page, image, 0, top)
        paste(page, Image.fromarray(source.palette[mask]), 1, top)
        for column, predictor in enumerate(predictors, start=2):
            result = predictor.predict(image)
            paste(page, Image.fromarray(np.asarray(predictor.palette)[result.labels]), column, top)
            paste(page, uncertainty_image(result.uncertainty).convert("RGB"), column, top + SIDE + GAP)
        draw.text((GAP + SIDE + GAP, top + SIDE + GAP + 8), NOTE, fill="black", font=font)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    page.quantize(256).save(args.out, optimize=True)


def of_every_step(source: Shapes, steps: list[set[int]]) -> list[int]:
    """Return the test scenes that show a class of every step."""
    presence = source.known_presence("val") or ()
    return [i for i, classes in enumerate(presence) if all(step & set(classes) for step in steps)]


def paste(page: Image.Image, picture: Image.Image, column: int, top: int) -> None:
    tile = picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST)
    page.paste(tile, (GAP + column * (SIDE + GAP), top))


if __name__ == "__main__":
    main()
