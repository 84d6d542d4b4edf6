"""Predictions on a few test images: the part of a report that needs models and data.

Test images are chosen evenly, and those that are shown are chosen by rules (report/pictures.py). If data or models are
missing, the report has a line about it instead.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from incseg.config import DataConfig
from incseg.data.source import Source, Split
from incseg.engine.rundir import RunDir
from incseg.engine.warm_start import WarmStart
from incseg.inference import Predictor, Result, load
from incseg.metrics import BINS, score_counts
from incseg.models.files import load_segmenter
from incseg.protocol.images import evenly
from incseg.report.figures import Reliability, Unknown, reliability, unknown_curves
from incseg.report.page import Block, caption
from incseg.report.pictures import (
    Classes,
    Row,
    Tile,
    each_once,
    extremes,
    image_score,
    largest_fall,
    leads,
    sheet,
    shown_classes,
    with_two_classes,
)
from incseg.report.runs import BROKEN, RunRecord, one_line
from incseg.report.sections import MAIN, MethodRuns, Section, differing_names
from incseg.report.style import Drawn, save_figure
from incseg.run import open_source, test_images_of
from incseg.types import BACKGROUND, IGNORE, UserError

log = logging.getLogger("incseg")

MOST_METHODS = 6
"""Methods whose models predict: the main one, then the best by All."""
LONGEST_SIDE = 512
"""Larger test images are reduced to this size: they are shown, not measured."""
_CONFIDENCE_BINS = 15
_SCORE_STRIDE = 2  # every N-th pixel in both directions is ranked, as in tests
_MOST_MAPS = 3
_STEPS_A_ROW = 6
_SHOWN_OF_EACH = 2
_MOST_LOOKED_AT = 40
"""Of an extension: photographs of each kind that are shown, and that are looked at for new classes."""
_FAILURES = (*BROKEN, RuntimeError)
"""Errors of data or models that are missing, incomplete or of another version. The rest of the report is still made."""
Models = Callable[[Path, int], Predictor]
"""Function from a run folder and a step to the model."""


@dataclass(frozen=True)
class Photo:
    """A test image with its ground truth in dataset ids; 255 is not counted."""

    name: str
    image: Image.Image
    truth: np.ndarray


@dataclass
class Predictions:
    """The predictions of one model on the photos.

    classes:     dataset ids that the model has learnt.
    predicted:   (H, W) dataset ids of each photo.
    scores:      scores of the photos that show a learnt class.
    reliability: reliability of the labels over all photos.
    unknown:     {"seen" or "background": histograms}, if the task has further classes.
    """

    classes: tuple[int, ...]
    predicted: list[np.ndarray] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)
    reliability: Reliability = field(default_factory=lambda: Reliability(*np.zeros((3, _CONFIDENCE_BINS))))
    unknown: dict[str, Unknown] = field(default_factory=dict)


@dataclass
class Gallery:
    """The photos of one section, and the predictions of its models."""

    section: Section
    source: Source
    photos: list[Photo]
    of_all: int
    loaded: Models
    folder: Path
    missing: list[str] = field(default_factory=list)
    predictions: dict[str, list[Predictions]] = field(default_factory=dict)
    """By the label of a method: the main one after every step, the others after the first and the last."""

    @property
    def classes(self) -> Classes:
        info = self.source.info
        zero = "background" if info.has_background else "unlabelled"
        return Classes({BACKGROUND: zero, **dict(enumerate(info.classes, start=1))}, self.source.palette)

    def truth(self, photo: int, learnt: Sequence[int], unseen: int) -> np.ndarray:
        """Return the ground truth for a model that has learnt these classes. Later classes become `unseen`."""
        table = np.full(256, unseen, dtype=np.uint8)
        table[list(learnt)] = learnt
        table[IGNORE] = IGNORE
        table[BACKGROUND] = BACKGROUND if self.source.info.has_background else IGNORE
        return table[self.photos[photo].truth]

    def predict(self, record: RunRecord, step: int) -> Predictions:
        """Predict all photos with the model of a step."""
        predictor = self.loaded(record.folder, step)
        learnt = predictor.ids[1:]
        found = Predictions(learnt)
        unseen = IGNORE if record.rules.get("unseen_at_test") == "ignore" else BACKGROUND
        future = step < record.num_steps - 1
        histograms = {other: torch.zeros(2, BINS, dtype=torch.int64) for other in ("seen", "background")}
        for index, photo in enumerate(self.photos):
            result = predictor.predict(photo.image, probabilities=True)
            truth = self.truth(index, learnt, unseen)
            found.predicted.append(result.ids)
            if shown_classes(truth, learnt):
                found.scores[index] = image_score(result.ids, truth)
            _count_confidence(found.reliability, result, truth)
            if future:
                self._count_unknown(histograms, result, photo.truth, learnt)
        if future:
            found.unknown = {other: Unknown(*counts) for other, counts in histograms.items()}
        return found

    def _count_unknown(
        self, histograms: dict[str, torch.Tensor], result: Result, truth: np.ndarray, learnt: Sequence[int]
    ) -> None:
        assert result.probabilities is not None
        some = (slice(None, None, _SCORE_STRIDE),) * 2
        truth = truth[some]
        seen, background = np.isin(truth, learnt), truth == BACKGROUND
        unseen = ~seen & ~background & (truth != IGNORE)
        scores = {"seen": result.uncertainty[some], "background": 1 - result.probabilities[0][some]}
        for other, pixels in (("seen", seen), ("background", background)):
            for row, chosen in enumerate((unseen, pixels)):
                histograms[other][row] += score_counts(torch.from_numpy(scores[other][chosen]))

    def save(self, name: str, text: str, rows: Sequence[Row]) -> Drawn:
        return save_figure(sheet(rows, self.classes), self.folder, f"{self.section.key}-{name}", text)


def _count_confidence(counts: Reliability, result: Result, truth: np.ndarray) -> None:
    assert result.probabilities is not None
    counted = truth != IGNORE
    sure = np.take_along_axis(result.probabilities, result.labels[None].astype(np.int64), axis=0)[0][counted]
    right = (result.ids == truth)[counted]
    bins = np.clip((sure * _CONFIDENCE_BINS).astype(int), 0, _CONFIDENCE_BINS - 1)
    for row, weights in ((counts.pixels, None), (counts.confidence, sure), (counts.right, right)):
        row += np.bincount(bins, weights, minlength=_CONFIDENCE_BINS)


# --- opening -------------------------------------------------------------------------------------------------


def open_gallery(section: Section, images: int, root: str | None, folder: Path, loaded: Models) -> Gallery:
    """Return `images` test images of a section's main run, evenly chosen."""
    source, data = _source_of(section.main.longest, root)
    split, numbers = test_images_of(source, data)
    photos = [_photo(source, split, number) for number in evenly(numbers, images)]
    if not photos:
        raise UserError("it has no test images")
    return Gallery(section, source, photos, len(numbers), loaded, folder)


def _source_of(record: RunRecord, root: str | None) -> tuple[Source, DataConfig]:
    """Return the dataset of a run, in the ids of its model, and its settings."""
    settings = record.settings
    names = [option.name for option in dataclasses.fields(DataConfig) if f"data.{option.name}" in settings]
    data = DataConfig(**{name: settings[f"data.{name}"] for name in names})
    if root is not None:
        data.root = root
    source = open_source(data)
    if settings.get("start") is not None:  # the run's own copy of the model that it extended
        file = RunDir(record.folder).model(0)
        source = WarmStart(file, *load_segmenter(file)).extended(source, settings["task"])
    return source, data


def _photo(source: Source, split: Split, number: int) -> Photo:
    image, mask = source.pair(split, number)
    factor = min(1.0, LONGEST_SIDE / max(image.size))
    size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    truth = np.asarray(Image.fromarray(mask).resize(size, Image.Resampling.NEAREST))
    return Photo(source.names(split)[number], image.resize(size, Image.Resampling.BILINEAR), truth)


def extension_block(record: RunRecord, root: str | None, folder: Path, loaded: Models) -> Block:
    """Draw photographs with the models before and after an extension: held-back ones, and ones to learn from. Those
    that show a new class come first."""
    title = "Before and after"
    try:
        source, data = _source_of(record, root)
        before, after = loaded(record.folder, 0), loaded(record.folder, record.num_steps - 1)
        new, photos = set(after.ids) - set(before.ids), list[tuple[str, Photo]]()
        split, held_back = test_images_of(source, data)
        left = set(range(len(source.names("train")))) - (set(held_back) if split == "train" else set())
        places: list[tuple[str, Split, Sequence[int]]] = [
            ("held back", split, held_back), ("learnt from", "train", sorted(left)),
        ]  # fmt: skip
        for kind, of_split, numbers in places:
            some = [_photo(source, of_split, number) for number in evenly(numbers, _MOST_LOOKED_AT)]
            some.sort(key=lambda photo: not np.isin(photo.truth, list(new)).any())
            photos += [(kind, photo) for photo in some[:_SHOWN_OF_EACH]]
        rows = []
        for kind, photo in photos:
            tiles = [Tile("image", np.asarray(photo.image)), Tile("masks", photo.truth)]
            tiles += [Tile(name, one.predict(photo.image).ids) for name, one in (("before", before), ("after", after))]
            rows.append(Row(tiles, kind))
        info = source.info
        classes = Classes({BACKGROUND: "background", **dict(enumerate(info.classes, start=1))}, source.palette)
        text = caption("extension", sorted(info.classes[i - 1] for i in new))
        return Block(
            title, figures=[save_figure(sheet(rows, classes), folder, f"{record.folder.name}-photographs", text)]
        )
    except _FAILURES as error:
        why = f"Pictures are left out: {one_line(error)}."
        log.warning(f"{record.folder}: {why}")
        return Block(title, [why])


def cached_models(device: str, threads: int | None, method: str | None) -> Models:
    """Return a function that loads the model of a step of a run folder, with a cache of the last four."""

    @functools.lru_cache(maxsize=4)  # a few hundred megabytes each, at worst
    def loaded(folder: Path, step: int) -> Predictor:
        return load(folder, step, device=device, threads=threads, method=method)

    return loaded


def report_blocks(
    sections: Sequence[Section], images: int, root: str | None, folder: Path, loaded: Models
) -> tuple[list[list[Block]], list[Block]]:
    """Return the blocks of each section, and those that compare sections. If the data of a section is missing, it gets
    a line about it."""
    found, galleries = [], []
    for section in sections:
        try:
            gallery = open_gallery(section, images, root, folder, loaded)
        except _FAILURES as error:
            why = f"Pictures, reliability and the curves of unknown classes are left out: {one_line(error)}."
            log.warning(f"{section.title}: {why}")
            found.append([Block("Test images", [why])])
            continue
        found.append(blocks(gallery))
        galleries.append(gallery)
    try:
        return found, _tasks(galleries)
    except _FAILURES as error:
        return found, [Block("Tasks and class orders", [f"Left out: {one_line(error)}."])]


# --- what is shown -------------------------------------------------------------------------------------------


def asked_methods(section: Section) -> list[MethodRuns]:
    """Return the main method, then the others by All, best first."""

    def last_all(method: MethodRuns) -> float:
        found = method.figure("all", method.num_steps - 1)
        return found.mean if found else 0.0

    others = sorted(section.methods[1:], key=last_all, reverse=True)
    return [section.main, *others[: MOST_METHODS - 1]]


def blocks(gallery: Gallery) -> list[Block]:
    """Return reliability, unknown classes and pictures of a section."""
    section = gallery.section
    methods = []
    for method in asked_methods(section):
        last = len(method.longest.rows) - 1
        steps = range(last + 1) if method is section.main else sorted({0, last})
        log.info(f"{section.title}: {method.label}, {len(gallery.photos)} images, {len(steps)} models")
        try:
            gallery.predictions[method.label] = [gallery.predict(method.longest, step) for step in steps]
            methods.append(method)
        except _FAILURES as error:
            gallery.missing.append(f"No pictures of {method.label}: {one_line(error)}.")
    if not methods:
        return [Block("Test images", gallery.missing)]
    certainty = _made("Certainty and unknown classes", lambda: _certainty(gallery, methods))
    chosen = _chosen(gallery, methods)
    pictures = [
        _made(title, lambda make=make: make(gallery, methods, chosen))  # type: ignore[misc]
        for title, make in (("Probabilities", _probabilities), ("Predictions", _methods), ("Every step", _steps))
    ]
    rule = caption("rule", len(gallery.photos), gallery.of_all, methods[0].label)
    return [
        certainty,
        Block("Which images are shown", [rule, *gallery.missing]),
        *(block for block in pictures if block.figures or block.texts),
    ]


def _made(title: str, make: Callable[[], Block]) -> Block:
    """Return a block, or one with the reason if it cannot be made: the rest of the page is still useful."""
    try:
        return make()
    except _FAILURES as error:
        return Block(title, [f"Left out: {one_line(error)}."])


def _certainty(gallery: Gallery, methods: Sequence[MethodRuns]) -> Block:
    """Draw the reliability diagram and the curves of unknown classes."""
    section, predictions = gallery.section, gallery.predictions
    index_of = {method.label: index for index, method in enumerate(section.methods)}
    by_method = {m.label: (index_of[m.label], predictions[m.label][-1].reliability) for m in methods}
    text = caption("reliability", len(gallery.photos))
    figures = [save_figure(reliability(by_method), gallery.folder, f"{section.key}-reliability", text)]
    counts: dict[str, dict[str, tuple[int, Unknown]]] = {"seen": {}, "background": {}}
    for method in methods:
        for other, found in predictions[method.label][0].unknown.items():
            if found.can_be_drawn:
                counts[other][method.label] = (index_of[method.label], found)
    if not gallery.source.info.has_background:
        del counts["background"]
    counts = {other: by_method for other, by_method in counts.items() if by_method}  # no panel without a curve
    texts: list[str] = []
    if counts:
        text = caption("unknown", len(gallery.photos))
        figures.append(save_figure(unknown_curves(counts), gallery.folder, f"{section.key}-unknown", text))
    elif section.main.longest.num_steps > 1:
        texts = ["None of these images shows a class of a later step, so there are no curves of unknown classes."]
    return Block("Certainty and unknown classes", texts, figures=figures)


def _chosen(gallery: Gallery, methods: Sequence[MethodRuns]) -> dict[str, int]:
    """Return the photos to show, by the names of the rules that choose them."""
    main = gallery.predictions[methods[0].label]
    chosen = largest_fall([one.scores for one in main]) | extremes(main[-1].scores)
    if len(methods) > 1:
        chosen |= leads(main[-1].scores, gallery.predictions[methods[1].label][-1].scores)
    return each_once(chosen)


def _photo_tiles(gallery: Gallery, photo: int) -> tuple[Tile, Tile]:
    one = gallery.photos[photo]
    return Tile("image", np.asarray(one.image)), Tile("truth", one.truth)


def _score_text(one: Predictions, photo: int) -> str:
    return f" {one.scores[photo]:.0f} %" if photo in one.scores else ""


def _probabilities(gallery: Gallery, methods: Sequence[MethodRuns], chosen: dict[str, int]) -> Block:
    """Draw the paper's figure 2."""
    predictions = gallery.predictions
    main = predictions[methods[0].label][-1]
    classes = {i: shown_classes(gallery.photos[i].truth, main.classes) for i in main.scores}
    photo = with_two_classes(main.scores, classes)
    if photo is None:
        return Block("Probabilities", ["None of these images shows a learnt class."])
    rows = []
    for number, method in enumerate(methods[:2]):
        result = gallery.loaded(method.longest.folder, len(method.longest.rows) - 1).predict(
            gallery.photos[photo].image, probabilities=True
        )
        assert result.probabilities is not None
        is_u = method.runs.first.method == MAIN
        tiles = [_photo_tiles(gallery, photo)[number], Tile("P(background)" + " = u" * is_u, result.probabilities[0])]
        for label in classes[photo][:_MOST_MAPS]:
            if label not in result.class_ids:
                continue  # an unfinished run that has not learnt this class
            shown = result.probabilities[result.class_ids.index(label)]
            tiles.append(Tile(f"P({gallery.classes.name(label)})", shown))
        tiles.append(Tile("prediction" + _score_text(predictions[method.label][-1], photo), result.ids))
        rows.append(Row(tiles, method.label))
    if len(rows) == 1:
        rows[0] = Row([*_photo_tiles(gallery, photo), *rows[0].tiles[1:]], rows[0].label)
    other = methods[1].label if len(methods) > 1 else None
    text = caption("probabilities", gallery.photos[photo].name, methods[0].label, other)
    return Block("Probabilities", figures=[gallery.save("probabilities", text, rows)])


def _methods(gallery: Gallery, methods: Sequence[MethodRuns], chosen: dict[str, int]) -> Block:
    """Draw figure 3 of the paper and that of its supplement; nothing if no image shows a learnt class."""
    title = "Method against method" if len(methods) > 1 else "Hardest and best"
    if not chosen:
        return Block(title, [])
    rows = []
    for name, photo in chosen.items():
        tiles = list(_photo_tiles(gallery, photo))
        for method in methods:
            one = gallery.predictions[method.label][-1]
            tiles.append(Tile(method.label + _score_text(one, photo), one.predicted[photo]))
        rows.append(Row(tiles, name))
    text = caption("methods", [f"{name}: {gallery.photos[photo].name}" for name, photo in chosen.items()])
    return Block(title, figures=[gallery.save("methods", text, rows)])


def _steps(gallery: Gallery, methods: Sequence[MethodRuns], chosen: dict[str, int]) -> Block:
    """Draw the paper's figure 4."""
    main, of_steps = methods[0], gallery.predictions[methods[0].label]
    if len(of_steps) < 2:
        return Block("After every step", [])
    names = gallery.section.step_names
    wanted = [name for name in chosen if not name.startswith(("largest lead", "largest lag"))]
    results: dict[str, list[Result]] = {name: [] for name in wanted}
    for step in range(len(of_steps)):
        predictor = gallery.loaded(main.longest.folder, step)
        for name in wanted:
            results[name].append(predictor.predict(gallery.photos[chosen[name]].image))
    figures = []
    for name in wanted:
        photo, rows = chosen[name], []
        for first in range(0, len(of_steps), _STEPS_A_ROW):
            some = range(first, min(first + _STEPS_A_ROW, len(of_steps)))
            predicted = [Tile(names[k] + _score_text(of_steps[k], photo), results[name][k].ids) for k in some]
            above = [*_photo_tiles(gallery, photo), *predicted] if first == 0 else predicted
            rows.append(Row(above, "prediction", 0 if first == 0 else 2))
            rows.append(Row([Tile("", results[name][k].uncertainty) for k in some], "uncertainty", 2))
        text = caption("steps", name, gallery.photos[photo].name, main.label)
        figures.append(gallery.save(f"steps-{name.split(',')[0].replace(' ', '-')}", text, rows))
    return Block("The same image after every step", figures=figures)


def _tasks(galleries: Sequence[Gallery]) -> list[Block]:
    """Draw the figures of the supplement: an image after the last step of different tasks, settings or class orders on
    the same test images."""
    found = []
    by_photos: dict[tuple[Any, ...], list[Gallery]] = {}
    for gallery in galleries:
        if gallery.section.main.label in gallery.predictions:
            # Extended models number classes differently, so only sections with equal class names are compared.
            classes = tuple(gallery.classes.names.items())
            key = (gallery.section.dataset, classes, *(photo.name for photo in gallery.photos))
            by_photos.setdefault(key, []).append(gallery)
    for (dataset, *_), members in by_photos.items():
        first = members[0]
        main = first.section.main.label
        labels = [label for label in first.predictions if all(label in gallery.predictions for gallery in members)]
        if len(members) < 2 or main not in labels:
            continue
        scores = [gallery.predictions[main][-1].scores for gallery in members]
        gaps = {i: max(s[i] for s in scores) - min(s[i] for s in scores) for i in set.intersection(*map(set, scores))}
        if not gaps:
            continue
        photo = max(gaps, key=lambda i: (gaps[i], -i))
        rows = []
        names = differing_names([gallery.section for gallery in members])
        for number, gallery in enumerate(members):
            predictions = {label: gallery.predictions[label][-1] for label in labels}
            tiles = [Tile(label + _score_text(one, photo), one.predicted[photo]) for label, one in predictions.items()]
            rows.append(Row([*_photo_tiles(gallery, photo)[number : number + 1], *tiles], names[number]))
            rows[-1] = dataclasses.replace(rows[-1], start=0 if number < 2 else 1)
        text = caption("tasks", first.photos[photo].name, main, names)
        drawn = save_figure(sheet(rows, first.classes), first.folder, f"{dataset}-tasks", text)
        found.append(Block(f"{dataset}: {' against '.join(names)}", figures=[drawn]))
    return found
