"""ADE20k as ADEChallengeData2016, the scene-parsing benchmark with 150 classes."""

from __future__ import annotations

from pathlib import Path

from incseg.data.files import FileSource, PairFiles, PathLike
from incseg.data.source import Split
from incseg.types import DatasetInfo, UserError

# The first name of each line of objectInfo150.txt, in its order.
_CLASSES = """
wall, building, sky, floor, tree, ceiling, road, bed, windowpane, grass, cabinet, sidewalk, person,
earth, door, table, mountain, plant, curtain, chair, car, water, painting, sofa, shelf, house, sea,
mirror, rug, field, armchair, seat, fence, desk, rock, wardrobe, lamp, bathtub, railing, cushion,
base, box, column, signboard, chest of drawers, counter, sand, sink, skyscraper, fireplace,
refrigerator, grandstand, path, stairs, runway, case, pool table, pillow, screen door, stairway,
river, bridge, bookcase, blind, coffee table, toilet, flower, book, hill, bench, countertop, stove,
palm, kitchen island, computer, swivel chair, boat, bar, arcade machine, hovel, bus, towel, light,
truck, tower, chandelier, awning, streetlight, booth, television, airplane, dirt track, apparel,
pole, land, bannister, escalator, ottoman, bottle, buffet, poster, stage, van, ship, fountain,
conveyer belt, canopy, washer, plaything, swimming pool, stool, barrel, basket, waterfall, tent,
bag, minibike, cradle, oven, ball, food, step, tank, trade name, microwave, pot, animal, bicycle,
lake, dishwasher, screen, blanket, sculpture, hood, sconce, vase, traffic light, tray, ashcan, fan,
pier, crt screen, plate, monitor, bulletin board, shower, radiator, glass, clock, flag
"""

ADE20K_INFO = DatasetInfo(
    "ade20k", tuple(name.strip() for name in _CLASSES.replace("\n", " ").split(",")), has_background=False
)

_FOLDERS: dict[Split, str] = {"train": "training", "val": "validation"}


class ADE20k(FileSource):
    """`root` is ADEChallengeData2016 or the folder around it. Label 0 is "unlabelled", not background."""

    info = ADE20K_INFO
    preset = "paper-ade"

    def __init__(self, root: PathLike) -> None:
        self.root = _find(Path(root).expanduser())
        self._files = {split: self._pairs(folder) for split, folder in _FOLDERS.items()}

    def files(self, split: Split) -> PairFiles:
        return self._files[split]

    def _pairs(self, folder: str) -> PairFiles:
        images, masks = self.root / "images" / folder, self.root / "annotations" / folder
        names = tuple(sorted(file.stem for file in images.glob("[!.]*.jpg")))
        if not names:
            raise UserError(f"no .jpg images in '{images}'; unpack ADEChallengeData2016 again")
        return PairFiles(
            names,
            tuple(images / f"{name}.jpg" for name in names),
            tuple(masks / f"{name}.png" for name in names),
        )


def _find(root: Path) -> Path:
    for candidate in (root, root / "ADEChallengeData2016"):
        if (candidate / "images").is_dir() and (candidate / "annotations").is_dir():
            return candidate
    raise UserError(
        f"no ADEChallengeData2016 with images and annotations in '{root}'; give the folder into which "
        "ADEChallengeData2016.zip was unpacked (the full ADE20k release has another layout)"
    )
