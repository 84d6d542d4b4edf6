"""A dataset in the ids of an existing model: the model's classes first, then the new ones."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from PIL import Image

from incseg.data.source import Source, Split, voc_palette
from incseg.io import require_known
from incseg.protocol.tasks import JOINT
from incseg.types import BACKGROUND, IGNORE, MAX_CLASSES, DatasetInfo, Increment, UserError


class Extended(Source):
    """The images of `inner`, with masks in the ids of a model that will learn some of its classes.

    The ids of the model's classes do not change. New classes get the next ids, and other classes of `inner` the ids
    after these. A class that both have has the model's id in the masks, so it can be tested. Names are compared without
    case, blanks, - and _.

    known:    the steps that the model has learnt.
    task:     the new classes, "helmet,vest", or "joint" for all that the model does not know.
    colours:  (N+1, 3) of background and the known classes.
    improved: new classes that the model knew before, with their ids and colours, which do not change.
    """

    def __init__(
        self, inner: Source, known: Sequence[Increment], task: str, colours: np.ndarray,
        improved: Mapping[str, tuple[int, Sequence[int]]] | None = None,
    ) -> None:  # fmt: skip
        self.inner = inner
        names = {i: name for increment in known for i, name in zip(increment.ids, increment.classes, strict=True)}
        self.known = tuple(names.values())
        self.new = _new_classes(task, inner.info, self.known)
        similar = {folded(name): i for i, name in names.items()}
        self.notes = [
            *inner.notes,
            *(
                f"warning: the new class '{name}' is nearly the same as the known '{names[similar[folded(name)]]}'; "
                "the model will learn two separate classes"
                for name in self.new
                if folded(name) in similar
            ),
        ]
        others = [name for name in inner.info.classes if name not in self.new and folded(name) not in similar]
        known_ids, improved = [*names], improved or {}
        names |= {own: name for name, (own, _) in improved.items()}
        first = max(names) + 1
        names |= dict(enumerate([name for name in [*self.new, *others] if name not in improved], start=first))
        if max(names) > MAX_CLASSES:
            raise UserError(
                f"with the classes of {inner.info.name} the model's ids would reach {max(names)}, and {MAX_CLASSES} is "
                "the limit; leave classes out of classes.txt"
            )
        id_of = {name: i for i, name in names.items()}
        self._table = np.full(256, IGNORE, dtype=np.uint8)
        self._table[BACKGROUND] = BACKGROUND
        for number, name in enumerate(inner.info.classes, start=1):
            self._table[number] = id_of[name] if name in id_of else similar[folded(name)]
            if name not in id_of:
                self.notes.append(f"'{name}' in the masks is tested as the known class '{names[self._table[number]]}'")
        listed = tuple(names.get(i, f"(id {i}, not used)") for i in range(1, max(names) + 1))
        self.info = DatasetInfo(inner.info.name, listed, inner.info.has_background)
        known_colours = np.array([*colours.tolist(), *(colour for _, colour in improved.values())])
        own = [BACKGROUND, *known_ids, *(own for own, _ in improved.values())]
        self._palette = _palette(own, known_colours, range(first, max(names) + 1))

    @property
    def table(self) -> np.ndarray:
        """(256,) uint8, the id in the masks of each id of `inner`."""
        return self._table

    @property
    def palette(self) -> np.ndarray:
        return self._palette

    def names(self, split: Split) -> Sequence[str]:
        return self.inner.names(split)

    def image(self, split: Split, index: int) -> Image.Image:
        return self.inner.image(split, index)

    def preview(self, split: Split, index: int, side: int) -> tuple[Image.Image, tuple[int, int]]:
        return self.inner.preview(split, index, side)

    def mask(self, split: Split, index: int) -> np.ndarray:
        return self._table[self.inner.mask(split, index)]

    def sizes(self, split: Split) -> Sequence[tuple[int, int]]:
        return self.inner.sizes(split)

    def fingerprint(self, split: Split) -> str:
        return hashlib.sha256(self.inner.fingerprint(split).encode() + self._table.tobytes()).hexdigest()

    def known_presence(self, split: Split) -> Sequence[tuple[int, ...]] | None:
        presence = self.inner.known_presence(split)
        if presence is None:
            return None
        return [tuple(sorted({int(self._table[i]) for i in ids})) for ids in presence]

    def default_workers(self, processes: int) -> int:
        return self.inner.default_workers(processes)


def folded(name: str) -> str:
    """Return a name without case, blanks, - and _, for comparison."""
    return "".join(c for c in name.casefold() if not c.isspace() and c not in "-_")


def _new_classes(task: str, dataset: DatasetInfo, known: Collection[str]) -> tuple[str, ...]:
    if task == JOINT:
        similar = {folded(name) for name in known}
        names = [name for name in dataset.classes if folded(name) not in similar]
        if not names:
            raise UserError(f"the model knows all classes of {dataset.name} already ({', '.join(dataset.classes)})")
        return tuple(names)
    names = [task] if task in dataset.classes else [name.strip() for name in task.split(",") if name.strip()]
    if not names:
        raise UserError(f"no class was named; choose from {', '.join(dataset.classes)}")
    for name in names:
        require_known("class", name, dataset.classes)
        if name in known:
            raise UserError(
                f"the model knows a class '{name}' already, and a class is learnt once; leave it out, or, if it is "
                "another thing, give it another name in classes.txt or a file for --data.classes_file"
            )
    return tuple(dict.fromkeys(names))


def _palette(known_ids: Sequence[int], colours: np.ndarray, added: Sequence[int]) -> np.ndarray:
    """Return (256, 3): the model's own colours, and for added ids those of VOC that it does not use."""
    palette = voc_palette()
    taken = {tuple(colour) for colour in colours.tolist()}
    free = [colour for colour in palette.tolist() if tuple(colour) not in taken]
    palette[known_ids] = colours
    palette[added] = free[: len(added)]
    return palette
