"""From settings to objects and a run: `train` and `evaluate`. All objects are built here, once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import incseg
from incseg.config import (
    DataConfig,
    RunConfig,
    load_run_config,
    open_run,
    training_recipe,
)
from incseg.data import build_source
from incseg.data.check import Meaning, check_meaning
from incseg.data.features import StoreUnwritable
from incseg.data.loaders import FeatureLoaders, Loaders, PixelLoaders
from incseg.data.presence import PixelCounts, Presence, presence_of
from incseg.data.sheet import write_sheet
from incseg.data.source import Source, Split
from incseg.data.transforms import Mirrored, TrainTransform, frame_for, shown_at, size_for
from incseg.engine.checkpoint import load_step
from incseg.engine.curves import Curves, open_curves
from incseg.engine.evaluator import EvalConfig, Evaluator
from incseg.engine.features import Wanted, feature_store, fill
from incseg.engine.forgetting import measure_forgetting
from incseg.engine.progress import counting, log, log_file, log_rows, showing
from incseg.engine.rundir import RunDir
from incseg.engine.runtime import Runtime, seed_everything, started
from incseg.engine.step_cache import StepCache
from incseg.engine.trainer import TrainConfig, Trainer
from incseg.engine.warm_start import WarmStart
from incseg.io import cache_path, counted, tensors_digest, write_json
from incseg.methods import build_method
from incseg.methods.analytic import Analytic
from incseg.methods.base import Method
from incseg.models.pretrained import build_segmenter
from incseg.models.segmenter import Segmenter
from incseg.protocol import Protocol
from incseg.protocol.images import evenly, held_out
from incseg.settings import names_affecting
from incseg.types import UserError

FEW_IMAGES = 10
"""A new class with fewer training images gets a warning."""


def open_source(config: DataConfig) -> Source:
    options: dict[str, Any] = {}
    if config.name == "shapes":
        if config.root is not None:
            raise UserError(
                f"root is {config.root}, but the dataset is shapes, which is embedded; for your own images set --data "
                "folder, or leave --root out"
            )
        options = {name: getattr(config, name) for name in ("seed", "train_size", "val_size", "image_size")}
    if config.is_own and config.classes_file:
        options = {"classes_file": config.classes_file}
    return build_source(config.name, config.root, **options)


def read_meaning(source: Source) -> Meaning:
    """Check what the values of the masks mean. Raise a UserError if it is not what incseg assumes."""
    with counting("reading the masks once") as progress:
        meaning = check_meaning(source, progress=progress)
    meaning.require_sound()
    return meaning


def read_presence(source: Source, split: Split, file: str | None = None) -> Presence:
    """Return which classes each image shows. Show progress if masks must be read."""
    with counting(f"reading the {split} masks once") as progress:
        return presence_of(source, split, file, progress=progress)


def test_images_of(source: Source, config: DataConfig) -> tuple[Split, tuple[int, ...]]:
    """Return the split and the numbers of the images that models are tested on."""
    if config.holdout is None:
        return "val", evenly(range(len(source.names("val"))), config.val_limit)
    return "train", evenly(held_out(len(source.names("train")), config.holdout), config.val_limit)


def fit_size(config: RunConfig) -> str:
    """Choose the input size of a run on one's own photographs by the size of their objects, and return a line on it.

    An interrupted run resumes with its own size.
    """
    if RunDir(config.folder).started:
        saved = load_run_config(config.folder)
        config.train.crop, config.eval.size = saved.train.crop, saved.eval.size
        return f"input: shorter side {config.train.crop}, as the run began"
    source = open_source(config.data)
    with showing():
        chosen = size_for(source, read_meaning(source).pixels["train"])
    config.train.crop = config.eval.size = chosen.size
    return str(chosen)


@dataclass
class Setup:
    """The part that training and evaluation share: data, protocol, and the images of each step.

    counted:      for each step, whether each test image counts in its confusion matrix.
    warm_start:   the model that the run starts from; None if it starts from scratch.
    class_images: for each class, the number of training and of test images that show it.
    pixels:       for one's own photographs, the pixels of each class in each mask.
    """

    source: Source
    protocol: Protocol
    train_images: list[tuple[int, ...]]
    test_images: tuple[int, ...]
    counted: list[list[bool]]
    summary: dict[str, Any]
    notes: list[str]
    test_split: Split = "val"
    warm_start: WarmStart | None = None
    class_images: dict[str, tuple[int, int]] = field(default_factory=dict)
    pixels: dict[Split, PixelCounts] = field(default_factory=dict)
    meaning_notes: Sequence[str] = ()

    @staticmethod
    def of(config: RunConfig, method: Method) -> Setup:
        source = open_source(config.data)
        task: str | list[tuple[str, ...]] = config.task
        warm_start = _warm_start(config, method)
        if warm_start is not None:
            extended = warm_start.extended(source, config.task)
            source, task = extended, [extended.known, extended.new]
        meaning = read_meaning(source) if config.data.is_own else None
        setting = "joint" if method.single_step else config.setting
        protocol = Protocol(source.info, task, setting, config.rules, config.order)
        train = read_presence(source, "train", config.data.presence)
        split, test_images = test_images_of(source, config.data)
        test = train if split == "train" else read_presence(source, "val")
        train_images = _train_images(config.data, protocol, train)
        if warm_start is not None:
            train_images[0] = ()
        counted = []
        for step in protocol.steps:
            allowed = set(protocol.test_images(step, test.classes))
            counted.append([image in allowed or config.data.empty == "learn" for image in test_images])
        summary = protocol.as_dict()
        for row, images, flags in zip(summary["steps"], train_images, counted, strict=True):
            row |= {"train_images": len(images), "test_images": sum(flags)}
        class_images = {
            name: (
                sum(i in train.classes[image] for image in images),
                sum(i in test.classes[image] for image in test_images),
            )
            for step, images in zip(protocol.steps, train_images, strict=True)
            for name, i in zip(step.names, step.new, strict=True)
        }
        return Setup(
            source=source,
            protocol=protocol,
            train_images=train_images,
            test_images=test_images,
            counted=counted,
            summary=summary,
            notes=_notes(config, source, protocol),
            test_split=split,
            warm_start=warm_start,
            class_images=class_images,
            pixels=meaning.pixels if meaning else {},
            meaning_notes=meaning.notes if meaning else (),
        )

    def announce(self) -> list[str]:
        """Return lines on the classes that the model knows and will learn, with warnings."""
        assert self.warm_start is not None
        improved = self.warm_start.improved
        known = [*self.warm_start.classes, *improved]
        lines = [f"{self.warm_start.file} knows {counted(len(known), 'class')}: {', '.join(known)}"]
        new = {name: self.class_images[name] for name in self.protocol.steps[-1].names}
        for what, names in (("improves", improved), ("adds", [name for name in new if name not in improved])):
            counts = [
                f"{name} ({counted(new[name][0], 'image')} to learn from, {new[name][1]} held back)" for name in names
            ]
            lines += [f"{what}: {', '.join(counts)}"] if counts else []
        for name, (train, _) in new.items():
            if train == 0:
                raise UserError(f"no training image shows '{name}'; add some, or leave the class out")
            if train < FEW_IMAGES:
                lines.append(f"warning: only {train} training images show {name}; {FEW_IMAGES} or more would be better")
        return [*lines, *(note for note in self.source.notes if note.startswith("warning"))]

    def remarks(self) -> list[str]:
        """Return notes and warnings on one's own photographs."""
        never = [name for name, (train, _) in self.class_images.items() if not train]
        known = () if self.warm_start is None else self.warm_start.classes
        unshown = [name for name in never if name not in known]
        warning = [f"warning: no photograph to learn from shows {', '.join(unshown)}"] if unshown else []
        return [*self.meaning_notes, *warning]

    def loaders(self, config: RunConfig, model: Segmenter, runtime: Runtime, train: bool) -> Loaders:
        """Return the source of batches: pixels, or features on disk if no part before the head can change."""
        images = (self.train_images, self.test_images, config.seed)
        stride = config.train.label_stride
        train_workers = _workers(config.train.workers, self.source, runtime)
        test_workers = _workers(config.eval.workers, self.source, runtime)
        mean, std = model.backbone.mean, model.backbone.std
        crop, scale, flip, size = config.train.crop, config.train.scale, config.train.flip, config.eval.size
        sizes = self.source.sizes("train") if config.data.fit == "whole" else None
        frame, test_frame = (None if sizes is None or not side else frame_for(sizes, side) for side in (crop, size))
        plain = shown_at(crop, frame, mean, std)
        if _features_can_be_cached(config):
            root = cache_path("features")
            store = feature_store(root, model, self.source, "train", crop, frame, flip)
            test_store = feature_store(root, model, self.source, self.test_split, size, test_frame, flip)
            needed = {i for step in self.train_images for i in step} if train else set()
            if test_store.folder == store.folder:  # held-out training images: one store, one lock
                test_store = store
                needed |= set(self.test_images)
            wanted = [Wanted(store, needed, train_workers)]
            if test_store is not store:
                wanted.insert(0, Wanted(test_store, self.test_images, test_workers))
            try:
                fill(wanted, model, self.source, runtime)
                return FeatureLoaders(*images, store, test_store, plain, flip, stride)
            except StoreUnwritable as error:
                log.info(f"{error}; continuing without it, which takes longer; set INCSEG_CACHE to another folder")
        return PixelLoaders(
            *images,
            source=self.source,
            test_split=self.test_split,
            train_transform=TrainTransform(crop, mean, std, scale, flip) if scale else Mirrored(plain, flip),
            plain_transform=plain,
            test_transform=shown_at(size or None, test_frame, mean, std),
            label_stride=stride,
            train_workers=train_workers,
            test_workers=test_workers,
            pin=runtime.device.type == "cuda",
        )

    def evaluator(self, loaders: Loaders, config: EvalConfig, runtime: Runtime) -> Evaluator:
        return Evaluator(self.protocol, loaders, self.counted, config, runtime, unshown_is_zero=not self.pixels)


def _warm_start(config: RunConfig, method: Method) -> WarmStart | None:
    if config.start is None:
        return None
    if config.data.presence is not None:
        raise UserError("data.presence uses the class numbers of the dataset, not those of the model; leave it out")
    warm_start = WarmStart.open(config.start, method, config.method["name"])
    if isinstance(method, Analytic):
        warm_start.learn_further(config.task)
    return warm_start


def _train_images(config: DataConfig, protocol: Protocol, shown: Presence) -> list[tuple[int, ...]]:
    """Return the training images of each step."""
    excluded = held_out(len(shown.names), config.holdout)
    empty = [image for image, classes in enumerate(shown.classes) if not classes] if config.empty == "learn" else []
    return [
        evenly([image for image in sorted({*images, *empty}) if image not in excluded], config.train_limit)
        for images in protocol.train_images(shown.classes)
    ]


def _notes(config: RunConfig, source: Source, protocol: Protocol) -> list[str]:
    """Return the lines under the table of steps."""
    data = config.data
    notes = [*source.notes, *([] if config.shows_classes else protocol.describe_rules())]
    if data.holdout is not None:
        images = len(held_out(len(source.names("train")), data.holdout))
        notes.append(f"tested on {images} held-out training images, not on the test set")
    if data.train_limit or data.val_limit:
        notes.append(
            f"a quick test, not the full protocol: at most {data.train_limit or 'all'} training images per step, "
            f"{data.val_limit or 'all'} test images"
        )
    return notes


def _features_can_be_cached(config: RunConfig) -> bool:
    deterministic = config.train.scale is None and config.eval.size > 0
    return config.data.cache == "auto" and config.model.freeze_backbone and deterministic


def _workers(number: int | None, source: Source, runtime: Runtime) -> int:
    return source.default_workers(runtime.world) if number is None else number


def train(config: RunConfig, only_step_0: bool = False) -> dict[str, Any]:
    """Run an experiment, or resume it, and return the content of results.json.

    only_step_0: stop after step 0, return nothing, and leave the rest to a later call.
    """
    with (
        showing(),
        started(config.device, config.precision, config.threads) as runtime,
        contextlib.closing(RunDir(config.folder)) as folder,
        contextlib.ExitStack() as logged,
    ):
        method = build_method(config.method)
        curves = open_curves(config.log, folder.root if runtime.is_main else None, config.as_dict())

        def prepare() -> tuple[Setup, Segmenter]:
            """Do everything that can fail for a wrong setting before the settings are saved in a folder."""
            setup, model, lines = _build(config, method)
            if runtime.is_main:
                open_run(folder, config)
                folder.write_environment(runtime.describe())
                write_json(folder.protocol, setup.summary)
                if setup.warm_start is None:  # incseg extend writes one sheet for all tries
                    lines += write_sheet(setup.source, setup.pixels, folder.sheet)
                logged.enter_context(log_file(folder.log))
            if setup.pixels:
                lines += setup.remarks()
            for line in lines:
                log.info(line)
            return setup, model

        setup, model = runtime.main_first(prepare)
        loaders = setup.loaders(config, model.to(runtime.device), runtime, train=True)
        trainer = _trainer(config, setup, method, model, loaders, runtime, folder, curves)
        with contextlib.closing(curves):
            results = trainer.run(only_step_0)
        if results and setup.warm_start is not None and runtime.is_main:
            improved = setup.warm_start.file if setup.warm_start.improved else None
            last = setup.protocol.steps[-1]
            measure_forgetting(folder, last, loaders, config.method, config.eval, runtime, improved)
        runtime.barrier()
        return results


def _build(config: RunConfig, method: Method) -> tuple[Setup, Segmenter, list[str]]:
    """Return the setup, the initial network of a run, and lines about them."""
    setup, lines = Setup.of(config, method), list[str]()
    seed_everything(config.seed)
    if setup.warm_start is None:
        return setup, build_segmenter(config.model, method.background_output, lines.append), lines
    grows = config.train.frozen_later == "model"
    model = setup.warm_start.network(config.model, config.eval.size if grows else 0)
    return setup, model, [*lines, *setup.announce()]


def _trainer(
    config: RunConfig, setup: Setup, method: Method, model: Segmenter, loaders: Loaders, runtime: Runtime,
    folder: RunDir, curves: Curves,
) -> Trainer:  # fmt: skip
    protocol, name = setup.protocol, config.method["name"]
    of_the_machine = names_affecting(TrainConfig, "machine")
    return Trainer(
        protocol=protocol,
        loaders=loaders,
        evaluator=setup.evaluator(loaders, config.eval, runtime),
        method=method,
        model=model,
        train=config.train,
        seed=config.seed,
        runtime=runtime,
        folder=folder,
        curves=curves,
        cache=StepCache(cache_path("steps") if config.reuse else None, _recipe(config, setup, model, method, runtime)),
        about={
            "incseg": incseg.__version__,
            "method": config.method,
            "protocol": {key: value for key, value in protocol.as_dict().items() if key != "steps"},
            "palette": setup.source.palette[[0, *protocol.classes_in_order]].tolist(),
            "test_size": config.eval.size,
            "train": {key: value for key, value in config.as_dict()["train"].items() if key not in of_the_machine},
        },
        title=f"{name} on {protocol.dataset.name} {protocol.task}, {protocol.setting}, seed {config.seed}",
        notes=setup.notes,
        class_images=setup.class_images if config.shows_classes else None,
        warm_start=setup.warm_start.as_step(method, name) if setup.warm_start else None,
    )


def _recipe(
    config: RunConfig, setup: Setup, model: Segmenter, method: Method, runtime: Runtime
) -> Callable[[int], dict[str, Any]]:
    """Return a function from a step to everything that affects its training besides its classes and images."""
    fixed = {
        "incseg": incseg.__version__,
        "seed": config.seed,
        "data": [setup.source.info.name, setup.source.fingerprint("train"), config.data.fit],
        "initial": tensors_digest(model.state_dict()),
        "runtime": [runtime.world, runtime.device.type, str(runtime.precision)],
    }
    later: dict[str, Any] = {}
    if config.train.frozen_later == "model":  # new classes use images of the test's size, maybe to calibrate
        later["test"] = [config.eval.size, setup.source.fingerprint(setup.test_split), setup.test_images]
    return lambda step: {**fixed, **(later if step else {}), **training_recipe(config, method, step)}


def evaluate(
    folder: Path, step_index: int | None = None, method_options: dict[str, Any] | None = None,
    overrides: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Test a saved step again, with other inference options if given, and return its row."""
    config = dataclasses.replace(load_run_config(folder), **(overrides or {}))
    config.method = {**config.method, **(method_options or {})}
    run = RunDir(folder)
    done = run.steps_done()
    if not done:
        raise UserError(f"{folder} has no finished step yet; resume it with incseg train")
    if config.start is not None:
        config.start = str(run.model(0))  # the run's own copy: the original may have been deleted
    index = done[-1] if step_index is None else step_index
    if index not in done:
        raise UserError(f"{folder} has no step {index}; its finished steps are 0 to {done[-1]}")
    with showing(), started(config.device, config.precision, config.threads) as runtime:
        method = build_method(config.method)
        setup = Setup.of(config, method)
        model = load_step(run.model(index)).restore(method, runtime.device)
        step = setup.protocol.steps[min(index, len(setup.protocol.steps) - 1)]
        if index != step.index or model.num_classes != len(step.seen):
            raise UserError(
                f"{run.model(index)} knows {model.num_classes} classes, which does not fit step {index} of task "
                f"'{config.task}' in {run.config}; restore the configuration of its training"
            )
        loaders = setup.loaders(config, model, runtime, train=False)
        evaluator = setup.evaluator(loaders, config.eval, runtime)
        counts = evaluator.count(model, method, step)
        row = {**setup.summary["steps"][index], **evaluator.figures(counts, step)}
        notes = [*setup.notes, *_other_images(run.rows()[index], row)]
        title = f"{config.method['name']} on {setup.protocol.dataset.name} {setup.protocol.task}, step {index}"
        log_rows(title, [row], notes, setup.class_images if config.shows_classes else None)
        return row


def _other_images(trained: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Return a warning if the number of test images is not that of the test after training."""
    was, now = trained.get("test_images"), row["test_images"]
    if was in (None, now):
        return []
    shown = counted(now, "image")
    return [f"warning: this test has {shown}, that after training had {was}: their figures cannot be compared"]
