"""The models of the page: list them, predict an image, teach a class."""

from __future__ import annotations

import io
import json
import math
import struct
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from incseg.data.files import decode_image
from incseg.data.shapes import Shapes
from incseg.demo.teach import Lesson, LessonError, extend
from incseg.engine.rundir import RunDir, model_file
from incseg.inference import ONNX_SUFFIX, Predictor, Result, load
from incseg.models.files import carries_sums

FORMATS = {"image/jpeg": "JPEG", "image/png": "PNG", "image/webp": "WEBP", "image/bmp": "BMP", "image/gif": "GIF"}
"""Allowed content types with Pillow's decoder of each. No other decoder is tried."""
MOST_PIXELS = 64_000_000
"""Limit on the pixels of an image: about 200 MB decoded."""
LONGEST_SIDE = 800
"""Longest side of an answer, more than a panel of the page shows."""
MOST_ANSWER_BYTES = 32 << 20
"""Limit on an answer. With many classes its sides are shorter."""
_LONGEST_SEEN = 2048  # longest side of an image for a model that was tested on images at their own size
_MOST_LOADED = 4  # steps in memory
_SAMPLES = 6
_PHOTOGRAPHS = {
    "chelsea.jpg": {"cat"}, "coffee.jpg": {"cup", "diningtable"}, "astronaut.jpg": {"person"},
}  # fmt: skip
"""Sample photographs of the package, and classes that they show."""
MOST_TAUGHT = 8
"""Most classes that are taught while a server runs. Each model takes some tens of MB in a temporary folder."""
_NO_SUMS = "This model has no sums, so it cannot be taught here; incseg extend adds classes to it."


@dataclass
class DemoModel:
    """A model as the page shows it: a run folder has all its finished steps, a model file is one step."""

    path: Path
    name: str
    method: str
    dataset: str
    task: str
    test_size: int
    steps: dict[int, tuple[str, ...]]
    """The classes that each step added, of the steps that can be chosen."""
    from_run: bool
    """Whether `path` is a run folder, so a step must be named."""
    can_learn: dict[int, bool]
    """Whether each step has the sums from which a class can be taught."""
    taught: dict[int, Path] = field(default_factory=dict)
    """The files of steps that were taught in the page, in a temporary folder. They follow the model's own steps."""

    def file(self, step: int) -> Path:
        if step in self.taught:
            return self.taught[step]
        return model_file(self.path, step if self.from_run else None)


@dataclass
class Models:
    """The models of the page. Not thread-safe: the server asks for one prediction and one class to teach at a time.

    device, threads, method: as `incseg.load` takes them.
    """

    paths: Sequence[Path]
    device: str = "auto"
    threads: int | None = None
    method: str | None = None
    _known: list[DemoModel] = field(init=False)
    _loaded: OrderedDict[tuple[int, int], Predictor] = field(init=False, default_factory=OrderedDict)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _folder: tempfile.TemporaryDirectory[str] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._known = [self._open(index, path.expanduser()) for index, path in enumerate(self.paths)]

    def __len__(self) -> int:
        return len(self._known)

    def _open(self, index: int, path: Path) -> DemoModel:
        last = load(path, None, self.device, self.threads, self.method)
        step = int(last.info["step"])
        self._cache((index, step), last)
        from_run = path.is_dir() and not (path / "model.safetensors").is_file()
        steps = RunDir(path).steps_done() if from_run else [step]
        protocol = last.info.get("protocol", {})
        steps = [k for k in steps if k <= step]
        model = DemoModel(
            path=path,
            name=path.resolve().name,
            method=str(last.info["method"]["name"]),
            dataset=str(protocol.get("dataset", "")),
            task=str(protocol.get("task", "")),
            test_size=last.test_size,
            steps={k: last.increments[k].classes for k in steps},
            from_run=from_run,
            can_learn={},
        )
        model.can_learn = {k: model.file(k).suffix != ONNX_SUFFIX and carries_sums(model.file(k)) for k in steps}
        return model

    def about(self) -> list[dict[str, Any]]:
        """Return the facts about each model that the page shows, without paths of this machine."""
        return [
            {
                "name": model.name,
                "method": model.method,
                "dataset": model.dataset,
                "task": model.task,
                "steps": [
                    {
                        "step": step,
                        "new": list(new),
                        "taught": step in model.taught,
                        "cannot_learn": "" if model.can_learn[step] else _NO_SUMS,
                    }
                    for step, new in model.steps.items()
                ],
            }
            for model in self._known
        ]

    @cached_property
    def samples(self) -> dict[str, bytes]:
        """Sample images by file name: scenes if a model was trained on the embedded dataset, or else photographs if a
        model knows what they show."""
        sizes = [model.test_size for model in self._known if model.dataset == Shapes.info.name]
        if not sizes:
            known = {name for model in self._known for new in model.steps.values() for name in new}
            newest = {name for model in self._known for name in [*model.steps.values()][-1]}
            shown = [name for name, classes in _PHOTOGRAPHS.items() if known & classes]
            folder = resources.files(__package__) / "samples"
            return {
                name: (folder / name).read_bytes() for name in sorted(shown, key=lambda n: not _PHOTOGRAPHS[n] & newest)
            }
        side = min(LONGEST_SIDE, max(384, *sizes))  # sharp on the screen
        scenes = Shapes(val_size=_SAMPLES, image_size=side)
        pictures = {}
        for index in range(_SAMPLES):
            stream = io.BytesIO()
            scenes.image("val", index).save(stream, format="PNG")
            pictures[f"{index}.png"] = stream.getvalue()
        return pictures

    def has(self, model: int, step: int) -> bool:
        return 0 <= model < len(self._known) and step in self._known[model].steps

    def taught(self, model: int, step: int) -> Path | None:
        """Return the file of a step that was taught in the page; None for any other step."""
        return self._known[model].taught.get(step) if self.has(model, step) else None

    def teach(self, lesson: Lesson, seconds: float, stopped: Callable[[], bool]) -> dict[str, Any]:
        """Teach a class to a step of a model as a new step, and return the facts that the page shows.

        seconds, stopped: limits of `extend`. Predictions are possible meanwhile.
        """
        if not self.has(lesson.model, lesson.step):
            raise LessonError("there is no such model or step; load the page again")
        known = self._known[lesson.model]
        if not known.can_learn[lesson.step]:
            raise LessonError(_NO_SUMS)
        if sum(len(model.taught) for model in self._known) >= MOST_TAUGHT:
            raise LessonError(f"{MOST_TAUGHT} classes were taught; save the models, then start incseg demo again")
        with self._lock:
            increments = list(self._predictor(lesson.model, lesson.step).increments)
        lesson.require_new_to(increments)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="incseg-taught-", ignore_cleanup_errors=True)
        began = time.perf_counter()
        options = ["--device", self.device]
        options += ["--threads", str(self.threads)] if self.threads else []
        options += ["--method", self.method] if self.method else []
        with tempfile.TemporaryDirectory(dir=self._folder.name, ignore_cleanup_errors=True) as root:
            marked, held_back = lesson.write(Path(root), tuple(FORMATS.values()), MOST_PIXELS)
            file, found = extend(known.file(lesson.step).resolve(), lesson, Path(root), options, seconds, stopped)
            step = max(known.steps) + 1
            known.taught[step] = file.rename(Path(self._folder.name) / f"{lesson.model}-{step}.safetensors")
        known.can_learn[step] = True
        known.steps[step] = (lesson.name,)
        seconds_taken = round(time.perf_counter() - began, 1)
        counts = {"marked": marked, "held_back": held_back, "seconds": seconds_taken}
        return {**found, **counts, "model": lesson.model, "step": step}

    def close(self) -> None:
        """Delete the models that were taught."""
        if self._folder is not None:
            self._folder.cleanup()

    def answer(self, content: bytes, model: int, step: int, seconds: float = math.inf) -> bytes:
        """Return the prediction of a step for an image file, encoded by `encode`. Give up after this many seconds."""
        deadline = time.monotonic() + seconds
        image = decode_image(content, "the image", tuple(FORMATS.values()), MOST_PIXELS)
        size = image.size
        with self._lock:
            predictor = replace(self._predictor(model, step), deadline=deadline)
        if not predictor.test_size:
            image.thumbnail((_LONGEST_SEEN, _LONGEST_SEEN))
        began = time.perf_counter()
        result = predictor.predict(image, probabilities=True, longest=longest_side(len(predictor.classes)))
        return encode(result, size, time.perf_counter() - began)

    def _predictor(self, model: int, step: int) -> Predictor:
        key = (model, step)
        if key not in self._loaded:
            file = self._known[model].file(step)
            self._cache(key, load(file, None, self.device, self.threads, self.method))
        self._loaded.move_to_end(key)
        return self._loaded[key]

    def _cache(self, key: tuple[int, int], predictor: Predictor) -> None:
        self._loaded[key] = predictor
        while len(self._loaded) > _MOST_LOADED:
            self._loaded.popitem(last=False)


def longest_side(num_labels: int) -> int:
    """Return the longest side of an answer with this number of labels."""
    bytes_per_pixel = 2 + 3 + 1 + 1 + num_labels  # the planes of `encode`
    return min(LONGEST_SIDE, math.isqrt(MOST_ANSWER_BYTES // bytes_per_pixel))


def encode(result: Result, image_size: tuple[int, int], seconds: float) -> bytes:
    """Return an answer for the page: the length of a head (uint32), the head (JSON), planes of height × width.

    The planes, all little-endian: uncertainty (uint16, 65535 is 1), the image as the model saw it (RGB), the method's
    own labels (uint8), the strongest label (uint8), and a probability for each label (uint8, 255 is 1).

    The page shows the strongest label at pixels whose u is not above its threshold. If u is the probability of
    background, the strongest label is a class. If u is another measure, it may also be background.
    """
    assert result.probabilities is not None
    height, width = result.labels.shape
    u_is_background = bool(np.array_equal(result.uncertainty, result.probabilities[0]))
    first = int(u_is_background)
    strongest = result.probabilities[first:].argmax(0).astype(np.uint8) + np.uint8(first)
    head = {
        "width": width,
        "height": height,
        "image_size": image_size,
        "classes": result.classes,
        "ids": result.class_ids,
        "colours": result.palette.tolist(),
        "u_is_background": u_is_background,
        "seconds": round(seconds, 3),
    }
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 4)  # aligns the planes of two bytes
    planes = [
        _quantised(result.uncertainty, np.dtype("<u2")),
        np.asarray(result.image),
        result.labels,
        strongest,
        *(_quantised(plane, np.dtype("u1")) for plane in result.probabilities),
    ]
    return b"".join([struct.pack("<I", len(text)), text, *(plane.tobytes() for plane in planes)])


def _quantised(values: np.ndarray, kind: np.dtype) -> np.ndarray:
    return np.rint(np.clip(values, 0, 1) * np.iinfo(kind).max).astype(kind)
