"""Pascal VOC 2012 with the augmented masks of SBD, in its own folder layout."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from incseg.data.files import FileSource, PairFiles, PathLike, list_file, overlap_note, without_duplicates
from incseg.data.source import Split
from incseg.types import DatasetInfo, UserError

VOC_INFO = DatasetInfo(
    "voc",
    (
        "aeroplane",
        "bicycle",
        "bird",
        "boat",
        "bottle",
        "bus",
        "car",
        "cat",
        "chair",
        "cow",
        "diningtable",
        "dog",
        "horse",
        "motorbike",
        "person",
        "pottedplant",
        "sheep",
        "sofa",
        "train",
        "tvmonitor",
    ),
    has_background=True,
)

AUGMENTED_LISTS = (
    "ImageSets/Segmentation/train_aug.txt",
    "ImageSets/SegmentationAug/train_aug.txt",
    "ImageSets/Segmentation/trainaug.txt",
)
AUGMENTED_MASKS = "SegmentationClassAug"
OFFICIAL_MASKS = "SegmentationClass"
NUM_TRAIN_AUG = 10582  # the list that every published result uses


class VOC(FileSource):
    """`root` is VOC2012, the VOCdevkit around it, or the folder around that.

    Training uses train_aug with SegmentationClassAug. If one of the two is missing, it uses the official train list
    with SegmentationClass, and `notes` has a line about it.
    """

    info = VOC_INFO
    preset = "paper-voc"

    def __init__(self, root: PathLike) -> None:
        self.root = _find(Path(root).expanduser())
        self.notes: list[str] = []
        augmented = self.root / AUGMENTED_MASKS
        # Some copies of the augmented folder leave the masks of val in the official one.
        in_augmented = {file.name for file in augmented.iterdir()} if augmented.is_dir() else set()
        val = _names(self.root / "ImageSets/Segmentation/val.txt")
        self._files = {
            "train": self._train(augmented),
            "val": self._pairs(
                val, [AUGMENTED_MASKS if f"{name}.png" in in_augmented else OFFICIAL_MASKS for name in val]
            ),
        }
        self.notes += overlap_note("voc", self._files["train"].names, val)

    def files(self, split: Split) -> PairFiles:
        return self._files[split]

    def _train(self, augmented: Path) -> PairFiles:
        lists = [self.root / name for name in AUGMENTED_LISTS if (self.root / name).is_file()]
        if lists and augmented.is_dir():
            names = _names(lists[0])
            if len(names) != NUM_TRAIN_AUG:
                self.notes.append(
                    f"voc: {lists[0].name} lists {len(names)} images; published results use {NUM_TRAIN_AUG}"
                )
            return self._pairs(names, [AUGMENTED_MASKS] * len(names))
        names = _names(self.root / "ImageSets/Segmentation/train.txt")
        missing = AUGMENTED_MASKS if lists else AUGMENTED_LISTS[0]
        self.notes.append(
            f"voc: no {missing}, so training uses the official train list of {len(names)} images; "
            f"published results use train_aug with {NUM_TRAIN_AUG}"
        )
        return self._pairs(names, [OFFICIAL_MASKS] * len(names))

    def _pairs(self, names: list[str], mask_folders: list[str]) -> PairFiles:
        images, root = self.root / "JPEGImages", self.root
        return PairFiles(
            tuple(names),
            tuple(images / f"{name}.jpg" for name in names),
            tuple(root / folder / f"{name}.png" for name, folder in zip(names, mask_folders, strict=True)),
        )


def _find(root: Path) -> Path:
    for candidate in (root, root / "VOC2012", root / "VOCdevkit" / "VOC2012"):
        if (candidate / "JPEGImages").is_dir() and (candidate / "ImageSets").is_dir():
            return candidate
    raise UserError(
        f"no VOC2012 with JPEGImages and ImageSets in '{root}' or its VOCdevkit; "
        "give the folder into which the VOC 2012 archive was unpacked"
    )


def _names(path: Path) -> list[str]:
    """Return the names in a list with lines such as "2007_000032" or "/JPEGImages/2007_000032.jpg /Segm….png"."""
    names = [PurePosixPath(line.split()[0]).stem for line in list_file(path)]
    return without_duplicates(names, path)
