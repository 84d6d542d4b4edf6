"""Label rules: what void, unlabelled and not yet learnt pixels count as. The field forked on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from incseg.io import require_known
from incseg.types import DatasetInfo

_ALLOWED = {
    "void_in_training": ("background", "ignore"),
    "unseen_at_test": ("ignore", "background"),
    "test_images": ("seen", "all"),
    "unlabelled_at_test": ("ignore", "background"),
}


@dataclass(frozen=True)
class LabelRules:
    """How masks become labels, beyond what every project agrees on.

    void_in_training:   label 255 of a training mask.
    unseen_at_test:     test pixels of classes that no step up to now has learnt.
    test_images:        test on images with at least one class learnt so far, or on all.
    unlabelled_at_test: label 0 of a test mask in a dataset without background (ADE20k).
    """

    name: str
    void_in_training: Literal["background", "ignore"]
    unseen_at_test: Literal["ignore", "background"]
    test_images: Literal["seen", "all"]
    unlabelled_at_test: Literal["ignore", "background"]

    def __post_init__(self) -> None:
        for field, allowed in _ALLOWED.items():
            require_known(f"value of the label rule {field}", getattr(self, field), allowed)

    def describe(self, dataset: DatasetInfo) -> list[str]:
        """Return the rules in plain English, a line each, to be printed under a table."""
        counts_as = {"background": "count as background", "ignore": "are ignored"}
        images = {"seen": "images with at least one class learnt so far", "all": "all images"}
        lines = [
            f"label rules: {self.name}",
            "training: pixels of old and future classes count as background; "
            f"void pixels (255) {counts_as[self.void_in_training]}",
            f"test: {images[self.test_images]}; pixels of classes not learnt yet "
            f"{counts_as[self.unseen_at_test]}; void pixels (255) are ignored",
        ]
        if not dataset.has_background:
            lines.append(
                f"unlabelled pixels (0): count as background in training; {counts_as[self.unlabelled_at_test]} at test"
            )
        return lines

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


RULES: dict[str, LabelRules] = {
    "mib": LabelRules(
        "mib",
        void_in_training="background",
        unseen_at_test="ignore",
        test_images="seen",
        unlabelled_at_test="ignore",
    ),
    "plop": LabelRules(
        "plop",
        void_in_training="ignore",
        unseen_at_test="background",
        test_images="seen",
        unlabelled_at_test="background",
    ),
}
"""The rules of MiB and SDR, and those of PLOP and its forks."""
