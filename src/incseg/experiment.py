"""From a configuration to objects and a run: the only place where names become things."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

import incseg
from incseg.data import build_source
from incseg.data.features import StoreUnwritable
from incseg.data.feeds import FeatureFeed, Feed, PixelFeed
from incseg.data.meaning import Meaning, check_meaning
from incseg.data.pixels import PixelCounts
from incseg.data.presence import Presence, presence_of
from incseg.data.sheet import contact_sheet, save_sheet
from incseg.data.sizing import choose_size, object_sides
from incseg.data.source import Source, Split
from incseg.data.transforms import Mirrored, TrainTransform, frame_for, shown_at
from incseg.engine.board import Board
from incseg.engine.evaluator import EvalConfig, Evaluator
from incseg.engine.features import Wanted, feature_store, fill
from incseg.engine.forgetting import measure_forgetting
from incseg.engine.progress import Reporter, Screen, Silent
from incseg.engine.queue import Job
from incseg.engine.rundir import RunDir, read_config
from incseg.engine.runtime import Precision, Runtime, seed_everything, started
from incseg.engine.start import Start
from incseg.engine.steps import StepStore
from incseg.engine.trainer import TrainConfig, Trainer
from incseg.files import cache_path, read_tensors, tensors_digest, write_json
from incseg.methods import build_method
from incseg.methods.analytic import Analytic
from incseg.methods.base import Method
from incseg.models.files import load_segmenter
from incseg.models.segmenter import ModelConfig, Segmenter, build_segmenter
from incseg.names import require_named_by_user
from incseg.protocol import Protocol
from incseg.types import UserError

FEW_IMAGES = 10
"""A new class with fewer training images is warned of."""
OWN_PHOTOGRAPHS = "folder"
"""The kind of dataset that people make themselves: its masks are checked, and its tables are for people."""
OWN_SIZES = (224, 320, 448)
"""Shorter sides that photographs may be trained at."""
CELL = 16
"""Pixels per cell of the feature map of the preset for own photographs."""
SHEET = "photographs.png"
_OF_THE_MACHINE = ("workers", "checkpoint_seconds")
"""Settings of training that no other run should take over."""


@dataclass
class DataConfig:
    """Where images come from.

    Args:
        name: shapes, voc, ade20k, folder, or package.module:Class.
        root: folder of the dataset; shapes needs none.
        presence: file of the classes in each training image, instead of reading all masks once.
        classes_file: of folder, where it is not classes.txt in the root.
        seed: of shapes.
        train_size: number of training scenes of shapes.
        val_size: number of test scenes of shapes.
        image_size: side of the scenes of shapes.
        train_limit: use at most so many images in each step, evenly chosen; a try-out, not the protocol.
        val_limit: test on at most so many images, evenly chosen.
        holdout: keep every so many-th training image out of every step and test on these instead of the test set;
            settings are chosen so, never on the test set.
        cache: auto keeps the features of a frozen backbone on disk where the input is deterministic up to a flip
            (train.scale empty); off computes them every time.
        fit: crop shows the centre of an image, as the benchmarks do; whole shows all of it, on a frame that suits most
            images of the dataset.
        empty: leave_out, as the benchmarks do, or learn: images whose masks show no class at all are learnt from too,
            as examples of what the classes are not, and all test images are tested on.
    """

    name: str = "shapes"
    root: str | None = None
    presence: str | None = None
    classes_file: str | None = None
    seed: int = 0
    train_size: int = 600
    val_size: int = 120
    image_size: int = 96
    train_limit: int | None = None
    val_limit: int | None = None
    holdout: int | None = None
    cache: Literal["auto", "off"] = "auto"
    fit: Literal["crop", "whole"] = "crop"
    empty: Literal["leave_out", "learn"] = "leave_out"


@dataclass
class RunConfig:
    """Everything a run depends on; saved with it as config.yaml.

    Args:
        preset: named settings the others start from; empty for the dataset's own.
        task: such as 15-1, joint, or own groups of class names, cat,dog/bird.
        setting: which images a step gets: overlapped, disjoint, pseudo-disjoint (ade20k) or joint.
        rules: label rules, mib or plop; printed under every table.
        order: class order of ade20k, a or b.
        start: run folder or model file to begin with: what it knows is step 0, taken as learnt, and the task names the
            classes of this dataset that come to it, joint for all others (incseg extend sets all this).
        seed: of everything random.
        out: run folder; empty for runs/ and a name made of the settings.
        device: cpu, cuda, cuda:N or auto.
        precision: auto, float32, bfloat16 or float16; auto is float32 on the CPU.
        threads: of torch on the CPU; empty for its own choice.
        reuse: take a step that was trained before by the same recipe (data, model, method, schedule, seed) from the
            cache instead of training it again, and keep the steps of this run for others.
        table: classes prints one row per class, steps Base / New / All / Inc and the label rules; auto takes classes
            for one's own photographs and steps for benchmarks.
        data: where images come from.
        method: how classes are learnt.
        model: the network.
        train: how a step is trained.
        eval: how models are tested.
    """

    preset: str | None = None
    task: str = "joint"
    setting: str = "overlapped"
    rules: str = "plop"
    order: str = "a"
    start: str | None = None
    seed: int = 42
    out: str | None = None
    device: str = "auto"
    precision: Precision = "auto"
    threads: int | None = None
    reuse: bool = False
    table: Literal["auto", "classes", "steps"] = "auto"
    data: DataConfig = field(default_factory=DataConfig)
    method: dict[str, Any] = field(default_factory=lambda: {"name": "evidential"})
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UserError(f"seed is {self.seed}; give a number from 0")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as config.yaml holds them."""
        return _plain(dataclasses.asdict(self))

    @property
    def shows_classes(self) -> bool:
        return self.table == "classes" or (self.table == "auto" and self.data.name == OWN_PHOTOGRAPHS)

    @property
    def folder(self) -> Path:
        """The run folder: `out`, or a name that tells the settings."""
        if self.out:
            return Path(self.out)
        method = str(self.method["name"]).replace(":", ".")
        task = "".join(c if c.isalnum() or c in "-_." else "_" for c in self.task)[:60]
        return Path("runs") / f"{self.data.name.replace(':', '.')}-{task}-{self.setting}-{method}-s{self.seed}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def open_source(config: DataConfig) -> Source:
    options: dict[str, Any] = {}
    if config.name == "shapes":
        options = {name: getattr(config, name) for name in ("seed", "train_size", "val_size", "image_size")}
    if config.name == "folder" and config.classes_file:
        options = {"classes_file": config.classes_file}
    return build_source(config.name, config.root, **options)


@dataclass
class Setup:
    """What training and evaluation share: data, protocol and which images belong where.

    start:      the model that the run begins with, None where it begins from nothing.
    class_images: for each class, the training and test images that show it.
    pixels:       of one's own photographs, the pixels of each class in each mask.
    """

    source: Source
    protocol: Protocol
    train_images: list[tuple[int, ...]]
    test_images: tuple[int, ...]
    counted: list[list[bool]]
    summary: dict[str, Any]
    notes: list[str]
    test_split: Split = "val"
    start: Start | None = None
    class_images: dict[str, tuple[int, int]] = field(default_factory=dict)
    pixels: dict[Split, PixelCounts] = field(default_factory=dict)
    meaning_notes: Sequence[str] = ()

    @staticmethod
    def of(config: RunConfig, method: Method, reporter: Reporter) -> Setup:
        source = open_source(config.data)
        setting = "joint" if method.single_step else config.setting
        task: str | list[tuple[str, ...]] = config.task
        start = None
        if config.start is not None:
            if config.data.presence is not None:
                raise UserError(
                    "data.presence counts classes as the dataset does, not as a model to begin with; leave it out"
                )
            start = Start.open(config.start, method, config.method["name"])
            if isinstance(method, Analytic):
                start.learn_further(config.task, method.config.ridge)
            extended = start.extended(source, config.task)
            source, task = extended, [extended.known, extended.new]
        meaning = read_meaning(source, reporter) if config.data.name == OWN_PHOTOGRAPHS else None
        protocol = Protocol(source.info, task, setting, config.rules, config.order)
        train = read_presence_of(source, "train", config.data.presence, reporter)
        held_out = _held_out(len(train.names), config.data.holdout)
        split, test_images = test_images_of(source, config.data)
        test = train if split == "train" else read_presence_of(source, "val", None, reporter)
        of_steps: Sequence[Sequence[int]] = protocol.train_images(train.classes)
        if config.data.empty == "learn":
            empty = [image for image, classes in enumerate(train.classes) if not classes]
            of_steps = [sorted({*images, *empty}) for images in of_steps]
        train_images = [
            evenly([image for image in images if image not in held_out], config.data.train_limit) for images in of_steps
        ]
        if start is not None:
            train_images[0] = ()
        counted = []
        for step in protocol.steps:
            allowed = set(protocol.test_images(step, test.classes))
            counted.append([image in allowed or config.data.empty == "learn" for image in test_images])
        notes = [*source.notes, *([] if config.shows_classes else protocol.describe_rules())]
        if held_out:
            notes.append(f"tested on {len(held_out)} held-out training images, not on the test set")
        if config.data.train_limit or config.data.val_limit:
            notes.append(
                f"a try-out, not the full protocol: at most {config.data.train_limit or 'all'} training images a step, "
                f"{config.data.val_limit or 'all'} test images"
            )
        summary = protocol.as_dict()
        for row, images, flags in zip(summary["steps"], train_images, counted, strict=True):
            row |= {"train_images": len(images), "test_images": sum(flags)}
        setup = Setup(source, protocol, train_images, test_images, counted, summary, notes, split, start)
        if meaning is not None:
            setup.pixels, setup.meaning_notes = meaning.pixels, meaning.notes
        for step, images in zip(protocol.steps, train_images, strict=True):
            for name, i in zip(step.names, step.new, strict=True):
                setup.class_images[name] = (
                    sum(i in train.classes[image] for image in images),
                    sum(i in test.classes[image] for image in test_images),
                )
        return setup

    def announce(self) -> list[str]:
        """What the model knows before and what it is about to learn, with what the user should think of."""
        assert self.start is not None
        known = self.start.classes
        lines = [f"{self.start.file} knows {len(known)} classes: {', '.join(known)}"]
        new = {name: self.class_images[name] for name in self.protocol.steps[-1].names}
        counts = [f"{name} ({train} images to learn from, {test} held back)" for name, (train, test) in new.items()]
        lines.append(f"new: {', '.join(counts)}")
        for name, (train, _) in new.items():
            if train == 0:
                raise UserError(f"no training image shows the new class '{name}'; add some, or leave it out")
            if train < FEW_IMAGES:
                lines.append(f"warning: only {train} training images show {name}; {FEW_IMAGES} or more would be better")
        return [*lines, *(note for note in self.source.notes if note.startswith("warning"))]

    def remarks(self) -> list[str]:
        """What to think of before one's own photographs are learnt from."""
        never = [name for name, (train, _) in self.class_images.items() if not train]
        known = () if self.start is None else self.start.classes
        unshown = [name for name in never if name not in known]
        warning = [f"warning: no photograph to learn from shows {', '.join(unshown)}"] if unshown else []
        return [*self.meaning_notes, *warning]

    def feed(self, config: RunConfig, model: Segmenter, runtime: Runtime, reporter: Reporter, train: bool) -> Feed:
        """Where batches come from: pixels, or, where nothing before the head can change, features on disk."""
        images = (self.train_images, self.test_images, config.seed)
        stride = config.train.label_stride
        train_workers = _workers(config.train.workers, self.source, runtime)
        test_workers = _workers(config.eval.workers, self.source, runtime)
        mean, std = model.backbone.mean, model.backbone.std
        crop, scale, flip, size = config.train.crop, config.train.scale, config.train.flip, config.eval.size
        sizes = self.source.sizes("train") if config.data.fit == "whole" else None
        frame, test_frame = (None if sizes is None or not side else frame_for(sizes, side) for side in (crop, size))
        plain = shown_at(crop, frame, mean, std)
        if _features_can_be_kept(config):
            root = cache_path("features")
            kept = feature_store(root, model, self.source, "train", crop, frame, flip)
            kept_for_test = feature_store(root, model, self.source, self.test_split, size, test_frame, flip)
            needed = {i for step in self.train_images for i in step} if train else set()
            if kept_for_test.folder == kept.folder:  # held-out training images: one store, one lock
                kept_for_test = kept
                needed |= set(self.test_images)
            wanted = [Wanted(kept, needed, train_workers)]
            if kept_for_test is not kept:
                wanted.insert(0, Wanted(kept_for_test, self.test_images, test_workers))
            try:
                fill(wanted, model, self.source, runtime, reporter)
                return FeatureFeed(*images, kept, kept_for_test, plain, flip, stride)
            except StoreUnwritable as error:
                reporter.say(f"{error}; going on without it, which takes longer; INCSEG_CACHE names another place")
        return PixelFeed(
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

    def evaluator(self, feed: Feed, config: EvalConfig, runtime: Runtime, reporter: Reporter) -> Evaluator:
        return Evaluator(self.protocol, feed, self.counted, config, runtime, reporter, unshown_is_zero=not self.pixels)


def _features_can_be_kept(config: RunConfig) -> bool:
    deterministic = config.train.scale is None and config.eval.size > 0
    return config.data.cache == "auto" and config.model.freeze_backbone and deterministic


def _workers(asked: int | None, source: Source, runtime: Runtime) -> int:
    return source.default_workers(runtime.world) if asked is None else asked


def read_meaning(source: Source, reporter: Reporter) -> Meaning:
    """What the masks mean; a UserError where they mean something else than incseg takes them for."""
    with _counting(reporter, "reading the masks once") as progress:
        meaning = check_meaning(source, progress=progress)
    if meaning.faults:
        more = f" (and {len(meaning.faults) - 1} more faults)" if len(meaning.faults) > 1 else ""
        raise UserError(f"{meaning.faults[0]}{more}; incseg data check shows what the masks mean")
    return meaning


def write_sheet(source: Source, pixels: Mapping[Split, PixelCounts], file: Path) -> list[str]:
    """A contact sheet of one's own photographs, once; returns what to say of it."""
    if not pixels or file.exists():
        return []
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_sheet(contact_sheet(source, pixels), file)
    except (UserError, OSError) as error:  # a picture to look at, not a reason to stop
        return [f"no contact sheet was written ({error})"]
    return [f"{file}: some photographs with their masks; look whether names and colours are right"]


def fit_size(config: RunConfig) -> str:
    """Set the input size of a run on one's own photographs by the size of their objects; says what was chosen.

    A run that was begun goes on with its own size.
    """
    run = RunDir(config.folder)
    if run.started:
        there = load_run_config(config.folder)
        config.train.crop, config.eval.size = there.train.crop, there.eval.size
        return f"input: shorter side {config.train.crop}, as the run began"
    source = open_source(config.data)
    with contextlib.closing(Screen()) as reporter:
        pixels = read_meaning(source, reporter).pixels["train"]
    sizes = source.sizes("train")
    sides = object_sides(pixels, sizes, dict(enumerate(source.info.classes, start=1)))
    chosen = choose_size(sides, OWN_SIZES, [*sizes, *source.sizes("val")], CELL)
    config.train.crop = config.eval.size = chosen.size
    return str(chosen)


@contextlib.contextmanager
def _counting(reporter: Reporter, what: str) -> Iterator[Callable[[int, int], None]]:
    """A callback for progress; nothing is shown where there was nothing to do."""
    begun = False

    def progress(done: int, total: int) -> None:
        nonlocal begun
        if not begun:
            reporter.begin(what, total)
            begun = True
        reporter.advance()

    try:
        yield progress
    finally:
        if begun:
            reporter.end()


def read_presence_of(source: Source, split: Split, file: str | None, reporter: Reporter) -> Presence:
    """The presence index, with progress where masks must be read."""
    with _counting(reporter, f"reading the {split} masks once") as progress:
        return presence_of(source, split, file, progress=progress)


def _held_out(count: int, every: int | None) -> range:
    """The training images that are tested on instead of trained with: every so many-th, from the middle."""
    if every is None:
        return range(0)
    if not 2 <= every <= count:
        raise UserError(f"data.holdout is {every}; it keeps back every so many-th of {count} images: give 2 to {count}")
    return range(every // 2, count, every)


def test_images_of(source: Source, config: DataConfig) -> tuple[Split, tuple[int, ...]]:
    """The images that models are tested on, and the split they are of."""
    if config.holdout is None:
        return "val", evenly(range(len(source.names("val"))), config.val_limit)
    return "train", evenly(_held_out(len(source.names("train")), config.holdout), config.val_limit)


def evenly(images: Sequence[int], most: int | None) -> tuple[int, ...]:
    """At most so many of the images, evenly spread."""
    if most is None or len(images) <= most:
        return tuple(images)
    if most < 1:
        raise UserError(f"a limit of {most} images leaves none; give at least 1")
    return tuple(images[i] for i in np.linspace(0, len(images) - 1, most).round().astype(int))


def train(config: RunConfig, screen: Callable[[], Screen] = Screen) -> dict[str, Any]:
    """Run an experiment from wherever its folder stands to the end; returns what results.json holds."""
    with started(config.device, config.precision, config.threads) as runtime:
        reporter: Reporter = screen() if runtime.is_main else Silent()
        with contextlib.closing(RunDir(config.folder)) as folder, contextlib.closing(reporter):
            return _train(config, runtime, reporter, folder)


def _train(config: RunConfig, runtime: Runtime, reporter: Reporter, folder: RunDir) -> dict[str, Any]:
    method = build_method(config.method)

    def prepare() -> tuple[Setup, Segmenter]:
        """All that can fail for a wrong setting, before there is a folder that remembers it."""
        setup = Setup.of(config, method, reporter)
        seed_everything(config.seed)
        said: list[str] = []
        if setup.start is None:
            model = build_segmenter(config.model, method.background_output, said.append)
        else:
            grows = config.train.frozen_later == "model"
            model = setup.start.network(config.model, config.eval.size if grows else 0)
            said += setup.announce()
        if runtime.is_main:
            folder.open(config.as_dict())
            folder.write_environment(runtime.describe())
            write_json(folder.protocol, setup.summary)
            if setup.start is None:  # incseg extend writes its own, once for all tries
                said += write_sheet(setup.source, setup.pixels, folder.root / SHEET)
            if isinstance(reporter, Screen):
                reporter.log_to(folder.log)
        if setup.pixels:
            said += setup.remarks()
        for line in said:
            reporter.say(line)
        return setup, model

    setup, model = runtime.main_first(prepare)
    protocol = setup.protocol
    feed = setup.feed(config, model.to(runtime.device), runtime, reporter, train=True)
    board = Board(folder.tensorboard if runtime.is_main else None)
    trainer = Trainer(
        protocol=protocol,
        feed=feed,
        evaluator=setup.evaluator(feed, config.eval, runtime, reporter),
        method=method,
        model=model,
        train=config.train,
        seed=config.seed,
        runtime=runtime,
        folder=folder,
        reporter=reporter,
        board=board,
        steps=StepStore(cache_path("steps") if config.reuse else None, _recipe(config, setup, model, method, runtime)),
        about={
            "incseg": incseg.__version__,
            "method": config.method,
            "protocol": {key: value for key, value in protocol.as_dict().items() if key != "steps"},
            "palette": setup.source.palette[[0, *protocol.classes_in_order]].tolist(),
            "test_size": config.eval.size,
            "train": {key: value for key, value in config.as_dict()["train"].items() if key not in _OF_THE_MACHINE},
        },
        title=f"{config.method['name']} on {protocol.dataset.name} {protocol.task}, {protocol.setting}, "
        f"seed {config.seed}",
        notes=setup.notes,
        class_images=setup.class_images if config.shows_classes else None,
        start=setup.start.as_step(method, config.method["name"], reporter.say) if setup.start else None,
    )
    with contextlib.closing(board):
        results = trainer.run()
    if setup.start is not None and runtime.is_main:
        measure_forgetting(folder, protocol.steps[-1], feed, config.method, config.eval, runtime, reporter)
    runtime.barrier()
    return results


def _recipe(
    config: RunConfig, setup: Setup, model: Segmenter, method: Method, runtime: Runtime
) -> Callable[[int], dict[str, Any]]:
    """What decides how step k is trained, beside its classes and images."""
    settings = config.as_dict()
    fixed = {
        "incseg": incseg.__version__,
        "seed": config.seed,
        "data": [setup.source.info.name, setup.source.fingerprint("train")],
        "model": {
            key: value
            for key, value in settings["model"].items()
            # the head came later than steps that are kept
            if key != "weights" and not (key == "head" and value is None)
        },
        "initial": tensors_digest(model.state_dict()),
        "runtime": [runtime.world, runtime.device.type, str(runtime.precision)],
    }
    return lambda k: {**fixed, **_training_recipe(config, method, k)}


def _training_recipe(config: RunConfig, method: Method, step: int) -> dict[str, Any]:
    """The part of a step's recipe that the settings of training and method decide."""
    of_step = {"epochs", "epochs_later", "lr", "lr_later", "frozen_later", "fusion", "clip", "clip_later"}
    of_no_step = {"workers", "checkpoint_seconds"}
    newer = {
        "accumulate",
        "fast",
        "own_head",
    }  # named where they are set, so that steps kept before there were such settings count
    apart = of_step | of_no_step | newer
    training = {key: value for key, value in config.as_dict()["train"].items() if key not in apart}
    training["clip"] = config.train.clip_of(step)
    if config.train.fast:
        training["fast"] = config.train.fast
    if (config.train.accumulate or 1) > 1:  # batch norms see micro-batches
        training["accumulate"] = config.train.accumulate
    if config.train.own_head and step:
        training |= {"own_head": True, "calibrate": config.train.calibrate}
    if config.train.fusion and step:
        training["fusion"] = config.train.fusion
    return {**training, "schedule": config.train.for_step(step), **method.recipe(step)}


def job_of(config: RunConfig, name: str) -> Job:
    """A run as a queue takes it, under `name` in the queue's folder.

    What its step 0 depends on is told from the settings alone, without a look at the data: where two runs agree but
    their images differ, one has waited for the other in vain, no more.
    """
    settings = {key: value for key, value in config.as_dict().items() if key != "out"}
    if not config.reuse:
        return Job(name, settings)
    method = build_method(config.method)
    joint = method.single_step or config.setting == "joint"
    base = {
        **{key: settings[key] for key in ("data", "model", "setting", "rules", "order", "seed", "device", "precision")},
        **_training_recipe(config, method, 0),
        "classes": "all" if joint else config.task.split("/" if "/" in config.task else "-")[0],
    }
    if joint:
        base["setting"] = "joint"
    return Job(name, settings, hashlib.sha256(json.dumps(base, sort_keys=True).encode()).hexdigest()[:16])


def load_run_config(folder: Path) -> RunConfig:
    """The configuration a run was made with."""
    groups = {"data": DataConfig, "model": ModelConfig, "train": TrainConfig, "eval": EvalConfig}
    values = read_config(RunDir(folder).config, "method", *groups)
    if not isinstance(values["method"].get("name"), str):
        raise UserError(f"{folder}/config.yaml lacks 'method.name', which every run has; restore it or start a new run")
    code = {
        "dataset": values["data"].get("name"),
        **{key: values["model"].get(key) for key in ("backbone", "classifier")},
    }
    require_named_by_user(f"{folder}/config.yaml", code)
    try:
        for name, kind in groups.items():
            _require_types(kind, values[name])
        _require_types(RunConfig, {key: value for key, value in values.items() if key not in groups})
        return RunConfig(**{**values, **{name: kind(**values[name]) for name, kind in groups.items()}})
    except UserError as error:
        raise UserError(f"{folder}/config.yaml: {error}") from error
    except TypeError as error:
        raise UserError(f"{folder}/config.yaml does not fit this version of incseg ({error})") from error


def _require_types(kind: type, values: dict[str, Any]) -> None:
    """A file that someone edited, or another version wrote, may hold anything."""
    hints = get_type_hints(kind)
    for name, value in values.items():
        if name in hints and not _is_a(value, hints[name]):
            raise TypeError(f"'{name}' holds {value!r}")


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value from YAML, which has lists only, can stand where a dataclass says this."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_is_a(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        kinds = parts[:1] * len(value) if isinstance(value, list) and parts[-1] is ... else parts
        return isinstance(value, list) and len(value) == len(kinds) and all(map(_is_a, value, kinds))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def evaluate(
    folder: Path, step_index: int | None = None, method_options: dict[str, Any] | None = None,
    overrides: dict[str, Any] | None = None, screen: Callable[[], Screen] = Screen,
) -> dict[str, Any]:  # fmt: skip
    """Test a saved step again, with other inference options if given: the row that training printed."""
    config = dataclasses.replace(load_run_config(folder), **(overrides or {}))
    config.method = {**config.method, **(method_options or {})}
    run = RunDir(folder)
    done = run.steps_done()
    if not done:
        raise UserError(f"{folder} has no finished step yet; let incseg train go on")
    if config.start is not None:
        config.start = str(run.model(0))  # its own copy: the original may be gone
    index = done[-1] if step_index is None else step_index
    if index not in done:
        raise UserError(f"{folder} has no step {index}; its finished steps are 0 to {done[-1]}")
    with started(config.device, config.precision, config.threads) as runtime:
        reporter: Reporter = screen() if runtime.is_main else Silent()
        try:
            method = build_method(config.method)
            setup = Setup.of(config, method, reporter)
            state, _ = read_tensors(run.state(index))
            method.load_state({name: tensor.to(runtime.device) for name, tensor in state.items()})
            model, _ = load_segmenter(run.model(index), runtime.device)
            step = setup.protocol.steps[min(index, len(setup.protocol.steps) - 1)]
            if index != step.index or model.num_classes != len(step.seen):
                raise UserError(
                    f"{run.model(index)} knows {model.num_classes} classes, which is not step {index} of task "
                    f"'{config.task}' in {run.config}; restore the configuration that it was trained with"
                )
            feed = setup.feed(config, model, runtime, reporter, train=False)
            evaluator = setup.evaluator(feed, config.eval, runtime, reporter)
            counts = evaluator.count(model, method, step)
            row = {**setup.summary["steps"][index], **evaluator.figures(counts, step)}
            notes = [*setup.notes, *_other_images(run.rows()[index], row)]
            title = f"{config.method['name']} on {setup.protocol.dataset.name} {setup.protocol.task}, step {index}"
            reporter.rows(title, [row], notes, setup.class_images if config.shows_classes else None)
            return row
        finally:
            reporter.close()


def _other_images(trained: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """A warning where a model is tested on another number of images than after its training."""
    was, now = trained.get("test_images"), row["test_images"]
    if was in (None, now):
        return []
    return [f"warning: this test has {now} images, that after training had {was}: their figures cannot be compared"]
