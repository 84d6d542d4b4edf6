"""Load a trained model and predict labels and uncertainty of images of any size."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from incseg.data.files import FileError, as_rgb, read_image, require_size
from incseg.data.folder import IMAGE_SUFFIXES
from incseg.data.source import voc_palette
from incseg.data.transforms import normalise
from incseg.engine.rundir import model_file
from incseg.engine.runtime import Runtime
from incseg.io import replacing, trust_named, trusted_names, write_array
from incseg.losses.pixelwise import row_strips
from incseg.methods import METHODS, build_method, find_method
from incseg.methods.base import Method
from incseg.models.files import load_segmenter
from incseg.models.onnx_file import OnnxNetwork, read_onnx
from incseg.models.segmenter import Segmenter
from incseg.models.segmenter import resized as resize_map
from incseg.report.draw import label_counts, overlay, palette_image, uncertainty_image
from incseg.types import BACKGROUND, Increment, UserError

TILE = 1536
"""Side of a tile. An image with more pixels than a tile is predicted in tiles."""
LONGEST_ENLARGED = 8
"""Longest side of an enlarged image, in test sizes. So a strip of 30000 × 10 pixels is not enlarged."""

MOST_BYTES = 4 << 30
"""Limit on the bytes of the pixels of an image, of its scores, and of its probabilities."""

SCALES = (0.25, 4.0)
"""Smallest and largest factor of the input size of a view."""
MOST_SCALES = 8

ONNX_SUFFIX = ".onnx"

_LONGEST_NAME = 180
"""Limit on the bytes of a name. Names of files have at most 255, and suffixes are added."""
_FAST = 1
"""Compression level of overlays: photographs in PNG take a third of the time, and a tenth more of the disk."""

ImageLike = Image.Image | np.ndarray | Tensor | str | os.PathLike[str]
"""A file, a Pillow image, an array (H, W), (H, W, 3) or (H, W, 4) of uint8, or a tensor (H, W) or (C, H, W) with 1, 3
or 4 channels, of uint8 or of floats from 0 to 1."""


@dataclass
class Result:
    """The prediction for one image, all of it at one size.

    image:         the image before resizing: RGB, oriented as viewers show it.
    labels:        (H, W) uint8 learnt labels: 0 background, then the classes in the order of learning.
    uncertainty:   (H, W) float32 in [0, 1], by the method's own rule.
    probabilities: (C+1, H, W) float32, background first; None unless requested, as they are large.
    classes, class_ids, palette: name, dataset id and colour of each learnt label.
    name:          beginning of the names of saved files: the stem of the image's file, or "image".

    Example:
        >>> result = model.predict("street.jpg")
        >>> result.shares
        {'background': 0.81, 'car': 0.19}
        >>> result.overlay().show()
        >>> result.save("predictions")  # street_mask.png, street_uncertainty.png, street_overlay.png
    """

    image: Image.Image
    labels: np.ndarray
    uncertainty: np.ndarray
    probabilities: np.ndarray | None
    classes: tuple[str, ...]
    class_ids: tuple[int, ...]
    palette: np.ndarray
    name: str = "image"

    @property
    def ids(self) -> np.ndarray:
        """(H, W) uint8 dataset ids, as in the dataset's own masks."""
        return np.array(self.class_ids, dtype=np.uint8)[self.labels]

    @property
    def shares(self) -> dict[str, float]:
        """The share of the image that each class covers, without classes that it does not show."""
        counts = label_counts(self.labels, len(self.classes))
        shares = {name: count / self.labels.size for name, count in zip(self.classes, counts, strict=True)}
        return {name: round(share, 6) for name, share in shares.items() if share > 0}

    def mask(self) -> Image.Image:
        """Return the dataset ids as an indexed image in the colours of the classes."""
        return palette_image(self.ids, _by_id(self.class_ids, self.palette))

    def overlay(self) -> Image.Image:
        """Return the image with each class coloured and outlined, above a legend of the classes shown."""
        return overlay(self.image, self.labels, self.palette, self.classes)

    def save(self, path: str | os.PathLike[str]) -> list[Path]:
        """Write the same files as `incseg predict` for an image, and return them.

        These are NAME_mask.png (indexed, dataset ids), NAME_uncertainty.png (viridis, index = 255 u), NAME_overlay.png
        and, if there are probabilities, NAME_probabilities.npy (float16).

        path: a folder, created if it does not exist; or the name of an image, whose stem is then NAME:
              "predictions/street.jpg" gives predictions/street_mask.png and so on.
        """
        folder, name = Path(path).expanduser(), self.name
        if folder.suffix.lower() in IMAGE_SUFFIXES and not folder.is_dir():
            folder, name = folder.parent, folder.stem
        if folder.exists() and not folder.is_dir():
            raise UserError(f"'{folder}' is a file; give a folder to save in")
        kinds = ("mask.png", "uncertainty.png", "overlay.png", "probabilities.npy")
        files = [folder / f"{name}_{kind}" for kind in kinds]
        _save_png(self.mask(), files[0])
        _save_png(uncertainty_image(self.uncertainty), files[1])
        _save_png(self.overlay(), files[2], _FAST)
        if self.probabilities is None:
            return files[:3]
        write_array(files[3], self.probabilities.astype(np.float16))
        return files


def _save_png(image: Image.Image, path: Path, compress_level: int = 6) -> None:
    with replacing(path) as temporary:
        image.save(temporary, format="PNG", compress_level=compress_level)


def _by_id(ids: Sequence[int], palette: np.ndarray) -> np.ndarray:
    """Return (256, 3) uint8 colours by dataset id, black for ids without a class."""
    colours = np.zeros((256, 3), dtype=np.uint8)
    colours[list(ids)] = palette
    return colours


@dataclass
class Predictor:
    """A trained model with the decision rule of its method.

    classes, ids, palette: name, dataset id and (N+1, 3) colour of each learnt label, background first.
    increments:            the classes of each step.
    info:                  metadata of the model: file, step, network, method, protocol, test size.
    deadline:              time.monotonic() at which a prediction in progress is aborted; None for no limit.
    flip, scales:          the views of an image whose scores are averaged; see `averaging`.

    Example:
        >>> model = incseg.load("runs/mine")
        >>> model.classes
        ('background', 'helmet', 'vest')
        >>> result = model.predict("site.jpg")
        >>> for result in model.predict_folder("photographs"):
        ...     result.save("predictions")
    """

    model: Segmenter | OnnxNetwork = field(repr=False)
    method: Method = field(repr=False)
    runtime: Runtime = field(repr=False)
    classes: tuple[str, ...]
    ids: tuple[int, ...]
    palette: np.ndarray = field(repr=False)
    info: dict[str, Any] = field(repr=False)
    deadline: float | None = field(default=None, repr=False)
    flip: bool = field(default=False, repr=False)
    scales: tuple[float, ...] = field(default=(1.0,), repr=False)

    @property
    def increments(self) -> Sequence[Increment]:
        return self.model.increments

    @property
    def test_size(self) -> int:
        """Shorter side of the images that the model was tested on; 0 if they had their own sizes."""
        return int(self.info["test_size"])

    @property
    def palette_by_id(self) -> np.ndarray:
        """(256, 3) uint8 colours by dataset id, black for ids that the model does not know."""
        return _by_id(self.ids, self.palette)

    def with_options(self, **options: Any) -> Predictor:
        """Return the same network with other options of its method, such as balancing="odds"."""
        settings = {**self.info["method"], **options}
        return replace(self, method=build_method(settings), info={**self.info, "method": settings})

    def averaging(self, flip: bool = True, scales: Sequence[float] = (1.0,)) -> Predictor:
        """Return the same network that averages its scores over several views of an image: better, and slower.

        flip:   also show the image mirrored.
        scales: factors of the input size, such as (1, 1.5); each takes a pass, with `flip` two.
        """
        if not 1 <= len(scales) <= MOST_SCALES or not all(SCALES[0] <= scale <= SCALES[1] for scale in scales):
            raise UserError(
                f"scales are {', '.join(f'{scale:g}' for scale in scales) or 'none'}; give 1 to {MOST_SCALES} factors "
                f"from {SCALES[0]:g} to {SCALES[1]:g}, such as 1,1.5"
            )
        return replace(self, flip=flip, scales=tuple(scales))

    @overload
    def predict(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
        self, image: ImageLike,
        size: int | None = None, tile: int | None = None, probabilities: bool = False, longest: int | None = None,
    ) -> Result: ...  # fmt: skip

    @overload
    def predict(  # type: ignore[overload-overlap]  # a sequence is an iterable, too
        self, image: Sequence[ImageLike],
        size: int | None = None, tile: int | None = None, probabilities: bool = False, longest: int | None = None,
    ) -> list[Result]: ...  # fmt: skip

    @overload
    def predict(
        self, image: Iterable[ImageLike],
        size: int | None = None, tile: int | None = None, probabilities: bool = False, longest: int | None = None,
    ) -> Iterator[Result]: ...  # fmt: skip

    def predict(
        self, image: ImageLike | Iterable[ImageLike],
        size: int | None = None, tile: int | None = None, probabilities: bool = False, longest: int | None = None,
    ) -> Result | list[Result] | Iterator[Result]:  # fmt: skip
        """Return labels and uncertainty of an image of any size and mode. Transparency is dropped, as in training.

        A list of images gives a list of results. Any other iterable gives an iterator, which predicts each image when
        its result is requested.

        The shorter side becomes `size` pixels (by default the test size; 0 does not resize), but a long strip is not
        enlarged beyond LONGEST_ENLARGED sizes. If the image then has more than tile × tile pixels, it is predicted in
        overlapping tiles whose logits are blended. The head adds a mean over its whole input to every position, which
        in a tile is a mean over the tile. For large tiles the difference is small; if tiles are small, a smaller `size`
        is better.

        The result has the image's size, or a longer side of `longest` if the image is larger. This does not change the
        input of the network.
        """
        if isinstance(image, Image.Image | np.ndarray | Tensor | str | os.PathLike):
            return self._predict(image, name_of(image), size, tile, probabilities, longest)
        if not isinstance(image, Iterable):
            raise UserError(f"cannot predict {_kind_of(image)}; {_IMAGES}")
        results = self._predict_each(image, size, tile, probabilities, longest)
        return list(results) if isinstance(image, Sequence) else results

    def predict_folder(
        self, folder: str | os.PathLike[str],
        size: int | None = None, tile: int | None = None, probabilities: bool = False, longest: int | None = None,
    ) -> Iterator[Result]:  # fmt: skip
        """Return an iterator over the predictions for the images in a folder, in the order of their names."""
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise UserError(f"'{folder}' is not a folder; give a folder of images, or a file to predict()")
        return self._predict_each(
            images_among(path.iterdir(), f"the folder '{folder}'"), size, tile, probabilities, longest
        )

    def _predict_each(self, images: Iterable[ImageLike], *options: Any) -> Iterator[Result]:
        """Yield results with different names, so that they can be saved in one folder."""
        taken: set[str] = set()
        frames = 0  # images without a file are numbered: a video may have endless frames
        for image in images:
            name = distinct_name(name_of(image), taken) if _file_of(image) else ""
            if not name:
                frames += 1
                name = "image" if frames == 1 else f"image_{frames}"
            yield self._predict(image, name, *options)

    def _predict(
        self, image: ImageLike, name: str, size: int | None, tile: int | None, probabilities: bool, longest: int | None
    ) -> Result:
        size = self.test_size if size is None else size
        if size < 0:
            raise UserError(f"size is {size}; give the shorter side in pixels, or 0 for the image as it is")
        rgb = open_image(image)
        sizes = [_network_size(*rgb.size, size and max(1, round(scale * size)), scale) for scale in self.scales]
        width, height = max(sizes)
        shown = min(1.0, (longest or math.inf) / max(rgb.size))  # the share of each side that the result has
        pixels = rgb.width * rgb.height * shown**2
        self._require_memory(size, width, height, int(pixels * len(self.classes)) if probabilities else 0)
        logits = self._mean_logits(rgb, sorted(sizes, reverse=True), TILE if tile is None else tile)
        self._require_finite(logits)
        if longest is not None and longest < max(rgb.size):
            rgb.thumbnail((longest, longest))
        result = self._decide(rgb, logits, probabilities)
        result.name = name
        return result

    def _require_memory(self, size: int, width: int, height: int, probabilities: int) -> None:
        """Refuse a prediction that would need too much memory, before it is allocated. A small image can be enlarged,
        and each of its pixels gets as many values as there are classes."""
        stride = self.model.stride
        scores = math.ceil(width / stride) * math.ceil(height / stride) * self.model.num_outputs
        for what, values, remedy in (
            (f"at size {size} its pixels", 3 * width * height, "give a smaller size"),
            (f"at size {size} its scores", scores, "give a smaller size"),
            ("its probabilities", probabilities, "shrink it, or do without probabilities"),
        ):
            if 4 * values > MOST_BYTES:
                fault = f"{what} would take {values / 2**28:.1f} GB; at most {MOST_BYTES >> 30} GB are allowed"
                raise FileError("the image", fault, remedy)

    def _require_finite(self, values: Tensor) -> None:
        if not bool(values.isfinite().all()):
            raise UserError(
                f"what the model '{self.info['file']}' makes of an image is not finite, so its training has diverged "
                "or its file was changed; give the model of another step, or train it again"
            )

    def _check_deadline(self) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise FileError("the image", "its prediction takes too long", "shrink or cut it")

    @torch.inference_mode()
    def _mean_logits(self, rgb: Image.Image, sizes: Sequence[tuple[int, int]], tile: int) -> Tensor:
        """Return the mean of the (1, C, h, w) logits over all views, on the grid of the first of these sizes."""
        mean: Tensor | None = None
        for width, height in sizes:
            resized = rgb if (width, height) == rgb.size else rgb.resize((width, height), Image.Resampling.BILINEAR)
            for mirrored in (False, True) if self.flip else (False,):
                view = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else resized
                logits = self._logits(view, tile)
                logits = logits.flip(-1) if mirrored else logits
                mean = logits if mean is None else mean.add_(resize_map(logits, mean.shape[-2:]))
        assert mean is not None
        views = len(sizes) * (1 + self.flip)
        return mean if views == 1 else mean.div_(views)

    @torch.inference_mode()
    def _logits(self, image: Image.Image, tile: int) -> Tensor:
        """Return the (1, C, h, w) logits of an RGB image, blended from tiles if it is large."""
        unit = self.model.unit
        fine = unit // self.model.stride  # positions per unit, more than one if the head reads shallower stages
        window = tile // unit
        if window < 4:
            raise UserError(f"tile is {tile}; this model needs tiles of at least {4 * unit} pixels")
        if image.width * image.height <= tile * tile:
            return self._run(image)
        finer = self.model.finer
        height, width = (finer * math.ceil(side / self.model.stride / finer) for side in (image.height, image.width))
        overlap = window // 4
        total = torch.zeros(1, self.model.num_outputs, height, width, device=self.runtime.device)
        weights = torch.zeros(height, width, device=self.runtime.device)
        for top in _tile_starts(math.ceil(image.height / unit), window, overlap):
            for left in _tile_starts(math.ceil(image.width / unit), window, overlap):
                self._check_deadline()
                # Starts are multiples of the stride, so the positions of a tile are positions of the whole image.
                right, bottom = min((left + window) * unit, image.width), min((top + window) * unit, image.height)
                logits = self._run(image.crop((left * unit, top * unit, right, bottom)))
                rows = slice(top * fine, top * fine + logits.shape[-2])
                columns = slice(left * fine, left * fine + logits.shape[-1])
                down = _blend_weights(rows.start, rows.stop, height, overlap * fine)
                along = _blend_weights(columns.start, columns.stop, width, overlap * fine)
                weight = torch.outer(down, along).to(self.runtime.device)
                total[..., rows, columns] += weight * logits
                weights[rows, columns] += weight
        return total.div_(weights)

    def _run(self, image: Image.Image) -> Tensor:
        if isinstance(self.model, OnnxNetwork):
            return self.model.logits(image)
        backbone = self.model.backbone
        pixels = normalise(image, backbone.mean, backbone.std).unsqueeze(0).to(self.runtime.device)
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        with self.runtime.autocast():
            return self.model.scores(pixels).float()

    @torch.inference_mode()
    def _decide(self, rgb: Image.Image, logits: Tensor, with_probabilities: bool) -> Result:
        """Apply the method's decision rule at the image's own size."""
        height, width = rgb.height, rgb.width
        labels = np.empty((height, width), dtype=np.uint8)
        uncertainty = np.empty((height, width), dtype=np.float32)
        shape = (len(self.classes), height, width)
        probabilities = np.empty(shape, dtype=np.float32) if with_probabilities else None
        for rows, strip in row_strips(logits, (height, width)):
            self._check_deadline()
            prediction = self.method.predict(strip, self.model.increments)
            labels[rows] = prediction.labels[0].cpu().numpy()
            self._require_finite(prediction.uncertainty)
            uncertainty[rows] = prediction.uncertainty[0].cpu().numpy()
            if probabilities is not None:
                probabilities[:, rows] = prediction.probabilities[0].cpu().numpy()
        return Result(rgb, labels, uncertainty, probabilities, self.classes, self.ids, self.palette)


def load(
    path: str | os.PathLike[str],
    step: int | None = None,
    device: str = "auto",
    threads: int | None = None,
    method: str | None = None,
) -> Predictor:
    """Return a model, ready to predict, from a model file, a folder steps/K, an .onnx file, a run folder, the name of a
    model that comes with incseg, or the Hugging Face Hub (hf://owner/name or hf://owner/name@revision).

    step:    step of a run folder; None for the last finished step.
    device:  cpu, cuda, cuda:N, mps or auto; an .onnx file runs on the CPU.
    threads: CPU threads; None for torch's own choice.
    method:  package.module:Class of a method from outside incseg. You must name it, because no code is imported only
             because a model file names it.

    Example:
        >>> import incseg
        >>> model = incseg.load("runs/mine")
        >>> result = model.predict("photograph.jpg")
        >>> result.save("predictions")
    """
    file = model_file(Path(path).expanduser(), step)
    if file.suffix == ONNX_SUFFIX:
        if not device.startswith(("auto", "cpu")):
            raise UserError(f"device is '{device}', but an ONNX file runs on the CPU here; give --device cpu")
        runtime = Runtime("cpu", threads=threads)
        model_proto = read_onnx(file)
        try:
            network = OnnxNetwork(model_proto, threads)
        except UserError:
            raise
        except Exception as error:  # onnxruntime can raise anything for a changed graph or description
            raise UserError(f"ONNX file '{file}' is damaged ({_one_line(error)}); export the model again") from error
        return predictor_of(network, network.about, runtime, file, method)
    runtime = Runtime(device, threads=threads)
    model, about = load_segmenter(file, runtime.device)
    if not model.increments:
        raise UserError(f"model file '{file}' has learnt no class yet; give the model of a finished step")
    model.eval().backbone.fold_norms()
    # with folded norms this saves a quarter of the backbone's time on a CPU
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return predictor_of(model, about, runtime, file, method)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def predictor_of(
    model: Segmenter | OnnxNetwork, about: dict[str, Any], runtime: Runtime, file: Path, named_by_user: str | None
) -> Predictor:
    """Return the predictor of a network and the metadata of its file."""
    settings = about.get("method")
    if not (isinstance(settings, dict) and "name" in settings):
        raise UserError(f"model file '{file}' does not name its method; give the model of a step that incseg trained")
    require_trusted(file, settings["name"], named_by_user)
    settings = _without_lost_options(settings)
    ids = (BACKGROUND, *(i for increment in model.increments for i in increment.ids))
    return Predictor(
        model=model,
        method=build_method(settings),
        runtime=runtime,
        classes=("background", *(name for increment in model.increments for name in increment.classes)),
        ids=ids,
        palette=_palette(about, ids),
        info={
            "test_size": 0,
            **{key: value for key, value in about.items() if key != "palette"},
            "method": settings,
            "file": str(file),
            "step": len(model.increments) - 1,
            "model": asdict(model.config),
        },
    )


def require_trusted(file: Path, name: str, named_by_user: str | None) -> None:
    """Refuse a method from outside that the user did not name: a model file alone must not import code."""
    trust_named([named_by_user or ""])
    if name not in METHODS and name not in trusted_names():
        raise UserError(
            f"model file '{file}' was trained by '{name}', which is not part of incseg and would be imported; "
            f"if you trust it, name it yourself: --method {name}"
        )


def _without_lost_options(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without unknown options that are off: another version had them, and they change nothing."""
    known = {"name", *(option.name for option in fields(find_method(settings["name"]).Config))}
    return {key: value for key, value in settings.items() if key in known or value}


_IMAGES = "give a file, a Pillow image, an array, a tensor, or several of them"


def open_image(image: ImageLike) -> Image.Image:
    """Return any image as RGB, oriented as viewers show it; of an animation the first frame."""
    if isinstance(image, Tensor):
        image = _from_tensor(image)
    elif isinstance(image, np.ndarray):
        image = _from_array(image)
    if isinstance(image, str | os.PathLike):
        return _read(Path(image).expanduser())
    if not isinstance(image, Image.Image):
        raise UserError(f"cannot predict {_kind_of(image)}; {_IMAGES}")
    if 0 in image.size:
        raise UserError(f"the image is {image.width}×{image.height} and so has no pixels; give one that has")
    require_size("the image", image.width, image.height)
    try:
        return as_rgb(image)
    except OSError as error:  # Pillow decodes late
        raise UserError(f"the image cannot be decoded ({error}); export or copy it again") from error


def _kind_of(value: object) -> str:
    return f"an object of type {type(value).__name__}"


def name_of(image: ImageLike) -> str:
    """Return the stem of an image's file, or "image" for one without."""
    return Path(_file_of(image)).stem or "image"


def _file_of(image: ImageLike) -> str | os.PathLike[str]:
    return image if isinstance(image, str | os.PathLike) else getattr(image, "filename", "")


def distinct_name(name: str, taken: set[str]) -> str:
    """Return the name, with a number if `taken` has it in upper or lower case, and add it to `taken`."""
    stem = name = os.fsdecode(os.fsencode(name)[:_LONGEST_NAME])
    number = 2
    while name.casefold() in taken:
        name, number = f"{stem}_{number}", number + 1
    taken.add(name.casefold())
    return name


def images_among(paths: Iterable[Path], where: str) -> list[Path]:
    """Return the images among some files, sorted. `where` describes the files in the error."""
    files = sorted(p for p in paths if p.suffix.lower() in IMAGE_SUFFIXES and p.name[0] != "." and p.is_file())
    if not files:
        raise UserError(f"{where} holds no image; known are {', '.join(IMAGE_SUFFIXES)}")
    return files


def _from_tensor(tensor: Tensor) -> Image.Image:
    of_floats = tensor.is_floating_point()
    channels = tensor.shape[0] if tensor.ndim == 3 else 1
    if not (of_floats or tensor.dtype == torch.uint8) or tensor.ndim not in (2, 3) or channels not in (1, 3, 4):
        raise UserError(
            f"the image is a tensor of {tensor.dtype} and shape {tuple(tensor.shape)}; give uint8, or floats from 0 to "
            "1, of shape (H, W) or (C, H, W) with 1, 3 or 4 channels, and several images as a list"
        )
    pixels = tensor.detach().cpu()
    if of_floats:
        pixels = pixels.float()
        if not bool(((pixels >= 0) & (pixels <= 1)).all()):
            raise UserError("the image is a tensor with values outside 0 to 1; give it as it was before normalisation")
        pixels = (pixels * 255).round().to(torch.uint8)
    if pixels.ndim == 3:
        pixels = pixels[0] if channels == 1 else pixels.movedim(0, -1)
    return _from_array(pixels.numpy())


def _from_array(array: np.ndarray) -> Image.Image:
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))):
        raise UserError(
            f"the image is an array of {array.dtype} and shape {array.shape}; "
            "give uint8 of shape (H, W), (H, W, 3) or (H, W, 4)"
        )
    if 0 in array.shape:
        raise UserError(f"the image is an array of shape {array.shape} and so has no pixels; give one that has")
    return Image.fromarray(np.ascontiguousarray(array))


def _read(path: Path) -> Image.Image:
    if path.is_dir():
        raise FileError(path, "is a folder", "give predict_folder() the folder, or predict() its files")
    if not path.is_file():
        raise FileError(path, "is not a file" if path.exists() else "no such file", "correct the path")
    return read_image(path)


def _palette(about: dict[str, Any], ids: Sequence[int]) -> np.ndarray:
    """Return the colours in the model file, which also has those of later classes; else the colours of Pascal VOC."""
    colours = np.array(about.get("palette", []), dtype=np.uint8)
    if colours.ndim == 2 and len(colours) >= len(ids) and colours.shape[1] == 3:
        return colours[: len(ids)]
    return voc_palette()[list(ids)]


def _network_size(width: int, height: int, size: int, scale: float = 1.0) -> tuple[int, int]:
    """Return (width, height) of the network's input for an image whose shorter side becomes `size`.

    scale: factor of the image if its size is not changed otherwise, that is if `size` is 0.
    """
    if size == 0:
        size = max(1, round(scale * min(width, height)))
    short, long = sorted((width, height))
    if short == size:
        return width, height
    if size / short > max(1.0, LONGEST_ENLARGED * size / long):
        size, short = max(long, LONGEST_ENLARGED * size), long
    # The long side is rounded down, as in the test transform.
    return max(1, width * size // short), max(1, height * size // short)


def _tile_starts(length: int, window: int, overlap: int) -> list[int]:
    """Return the starts of tiles of `window` that cover `length` evenly and overlap by at least `overlap`."""
    if length <= window:
        return [0]
    gaps = math.ceil((length - window) / (window - overlap))
    return [round(i * (length - window) / gaps) for i in range(gaps + 1)]


def _blend_weights(start: int, stop: int, length: int, overlap: int) -> Tensor:
    """Return the (stop - start,) weights of a tile along one axis: 1 except near edges inside the image.

    At such an edge the outer quarter of the overlap has weight 0, because the padding affects it. Then the weight grows
    linearly to 1 at three quarters. The weights of two overlapping tiles sum to 1.
    """
    cells = torch.arange(start, stop) + 0.5
    distance = torch.full_like(cells, math.inf)
    if start > 0:
        distance = cells - start
    if stop < length:
        distance = torch.minimum(distance, stop - cells)
    return (2 * distance / overlap - 0.5).clamp(0, 1)
