"""Files of datasets: read images, masks and lists, and name the file that is wrong."""

from __future__ import annotations

import hashlib
import io
import os
import re
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile

from incseg.data.source import Source, Split
from incseg.io import cache_path, counted, first_few, write_text
from incseg.types import IGNORE, UserError

PathLike = str | os.PathLike[str]

# Pillow stretches grey samples of two and four bits to the range of a byte; a mask needs them as stored.
_STRETCH = {"L;2": 85, "L;4": 17}


MISSING, UNREADABLE, COLOURS, VALUES, SIZES, BOXES, UNNAMED = (
    "missing", "unreadable", "colours", "values", "sizes", "boxes", "unnamed",
)  # fmt: skip
"""Kinds of faults that can come in many files at once. SIZES: a photograph and its mask differ in size; BOXES: objects
have boxes instead of outlines; UNNAMED: colours or values of masks that a list of names lacks."""
_MOST_COLOURS, _MOST_VALUES = 8, 256
_COLOUR_SAMPLE = 256
"""Longer side to which a colour mask is reduced before its colours are counted."""
LONGEST_SIDE = 100_000
LARGEST_RATIO = 5_000
"""Largest ratio of the longer side to the shorter. Memory and time grow with the length of a strip even if it has few
pixels. These limits and the limit on pixels bound them. Photographs, panoramas and line scans stay far below."""


class FileError(UserError):
    """A faulty file of the user: its path, what is wrong, and the remedy.

    kind:  one of the kinds of faults above; empty for a fault of a single file.
    found: the values or colours that are wrong.
    """

    def __init__(
        self, file: PathLike, fault: str, remedy: str, kind: str = "", found: tuple[int | str, ...] = ()
    ) -> None:
        super().__init__(str(file), fault, remedy, kind, found)  # with all arguments, so that it can be pickled
        self.file, self.fault, self.remedy, self.kind, self.found = str(file), fault, remedy, kind, found

    def __str__(self) -> str:
        return f"{self.file}: {self.fault}" + (f"; {self.remedy}" if self.remedy else "")


def as_file_error(error: UserError, where: str) -> FileError:
    """Return the error as a FileError; `where` names the image if the error does not name a file."""
    return error if isinstance(error, FileError) else FileError(where, str(error), "")


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert any Pillow image to RGB, oriented as viewers show it. Transparency is dropped, 16 bits become 8.

    The EXIF orientation is applied, because annotation tools apply it: a mask fits the image as shown.
    """
    return _made_rgb(image.copy())


def _made_rgb(image: Image.Image) -> Image.Image:
    """Convert an image like `as_rgb`, but without a copy: the image itself changes."""
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = Image.fromarray(np.clip(np.asarray(image) >> 8, 0, 255).astype(np.uint8))
    elif image.mode == "F":
        raise UserError("an image with floating-point pixels has no known range; save it with 8 bits per channel")
    elif "transparency" in image.info:
        image = image.convert("RGBA")
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def require_size(where: PathLike, width: int, height: int, most_pixels: int | None = None) -> None:
    """Refuse an image that could take unbounded memory or time. `where` is its file, or a name for the error.

    most_pixels: by default Pillow's limit against decompression bombs, which PIL.Image.MAX_IMAGE_PIXELS sets.
    """
    most = most_pixels or 2 * (Image.MAX_IMAGE_PIXELS or 0)
    if most and width * height > most:
        raise _too_many_pixels(where, most_pixels)
    short, long = sorted((width, height))
    if long > LONGEST_SIDE or long > LARGEST_RATIO * short:
        raise FileError(
            where,
            f"it is {width}×{height} pixels; the longer side may have at most {LONGEST_SIDE:,}, and at most "
            f"{LARGEST_RATIO:,} times as many as the shorter",
            "cut it into pieces",
        )


def _too_many_pixels(where: PathLike, most_pixels: int | None) -> FileError:
    most = most_pixels or 2 * (Image.MAX_IMAGE_PIXELS or 0)
    remedy = "shrink or cut it" if most_pixels else "shrink or cut it, or raise PIL.Image.MAX_IMAGE_PIXELS in Python"
    return FileError(where, f"it has more than {most:,} pixels, which is the limit", remedy)


def read_image(path: PathLike) -> Image.Image:
    """Return the image as RGB, see `as_rgb`."""
    with _opened(path) as image:
        return _made_rgb(image)


def image_size(path: PathLike) -> tuple[int, int]:
    """Return (width, height) of what `read_image` gives, from the file's header alone."""
    with _opened(path) as image:
        return image.size[::-1] if _is_sideways(image) else image.size


def stored_size(path: PathLike) -> tuple[tuple[int, int], bool]:
    """Return (width, height) of the stored pixels, and whether `read_image` swaps width and height."""
    with _opened(path) as image:
        return image.size, _is_sideways(image)


def _is_sideways(image: Image.Image) -> bool:
    """Return whether the EXIF orientation swaps width and height."""
    return _orientation(image) in range(5, 9)


def _orientation(image: Image.Image) -> int:
    return int(image.getexif().get(ExifTags.Base.Orientation, 1))


_TURNS = {
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def turn_of(path: PathLike) -> Image.Transpose:
    """Return how `read_image` transposes the stored pixels of an image if it swaps width and height."""
    with _opened(path) as image:
        return _TURNS[_orientation(image)]


def read_preview(path: PathLike, side: int) -> tuple[Image.Image, tuple[int, int]]:
    """Return an image with the longer side reduced to at most `side`, and its full size; see `Source.preview`."""
    with _opened(path) as image:
        full = image.size
        image.draft("RGB", (side, side))  # a JPEG is decoded at a fraction of its size, which takes less memory
        turned = _is_sideways(image)
        preview = _made_rgb(image)
    preview.thumbnail((side, side))
    return preview, full[::-1] if turned else full


def decode_image(content: bytes, name: str, formats: tuple[str, ...], most_pixels: int) -> Image.Image:
    """Decode bytes as an RGB image with Pillow's decoders `formats`. Errors call the image `name`."""
    with _opened(name, io.BytesIO(content), formats, most_pixels) as image:
        return _made_rgb(image)


def read_mask(path: PathLike, num_classes: int, void: int = IGNORE) -> np.ndarray:
    """Return the class numbers of an index mask, (H, W) uint8. The value `void` becomes 255.

    Palette images give their indices, never their colours; a 1-bit image gives 0 and 1. The EXIF
    orientation is applied as to the image, so that both are read as a viewer shows them.
    """
    with _opened(path) as image:
        stretch = _STRETCH.get(str(image.tile[0][3]), 1) if isinstance(image, PngImageFile) else 1
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode not in ("1", "L", "P", "I") and not image.mode.startswith("I;16"):
            colours = _colours(image)
            some = first_few(colours, 5)
            raise FileError(
                path,
                f"the mask has mode {image.mode}, so it holds colours instead of class numbers ({some})",
                "save it as a single-channel or palette PNG with class numbers",
                COLOURS,
                colours,
            )
        values = np.array(image)
    if stretch > 1:
        values //= stretch
    wrong = ((values < 0) | (values > num_classes)) & (values != void)
    if wrong.any():
        found = tuple(np.unique(values[wrong]).tolist())
        raise FileError(
            path,
            f"the mask holds {first_few(found, 5)}, but classes are 0 to {num_classes} and void is {void}",
            f"add the class to the list of names, or set these pixels to {void}",
            VALUES,
            found[:_MOST_VALUES],
        )
    if void != IGNORE:
        values[values == void] = IGNORE
    return values.astype(np.uint8, copy=False)


def read_stored(path: PathLike, sizes: Sequence[tuple[int, int]]) -> Image.Image:
    """Return an image as it is stored, such as a mask in colours. Refuse any size not in `sizes` before decoding."""
    with _opened(path) as image:
        if image.size not in sizes:
            (width, height), (shown_width, shown_height) = image.size, sizes[0]
            fault = f"the mask is {width}×{height} but its image {shown_width}×{shown_height}"
            raise FileError(path, fault, "export both at one size", SIZES)
        image.load()
        return image.copy()


def _colours(image: Image.Image) -> tuple[str, ...]:
    """Return the most frequent colours of an image as #rrggbb."""
    factor = min(1.0, _COLOUR_SAMPLE / max(image.size))
    size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    pixels = np.asarray(image.resize(size, Image.Resampling.NEAREST).convert("RGB")).astype(np.int64)
    colours, counts = np.unique(pixels @ (1 << 16, 1 << 8, 1), return_counts=True)
    frequent = np.argsort(-counts, kind="stable")[:_MOST_COLOURS]
    return tuple(f"#{colours[i]:06x}" for i in frequent)


def list_file(path: PathLike) -> list[str]:
    """Return the lines of a text file, stripped, without blank lines. A duplicate line is an error."""
    return without_duplicates([line.strip() for line in text_lines(path) if line.strip()], path)


def text_lines(path: PathLike) -> list[str]:
    """Return all lines of a UTF-8 file, unchanged."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise FileError(path, "no such file", "create it or correct the path") from None
    except UnicodeDecodeError as error:
        raise FileError(path, f"byte {error.start} is not UTF-8", "save the file as UTF-8 text") from None
    except OSError as error:
        raise FileError(path, f"cannot be read ({error.strerror})", "correct the path or its permissions") from None
    return text.splitlines()


def without_duplicates(names: list[str], path: PathLike) -> list[str]:
    """Return the names unchanged. Raise a FileError for the file `path` if a name is a duplicate."""
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise FileError(path, f"'{twice}' is listed twice", "delete one of the two lines")
    return names


@dataclass(frozen=True)
class PairFiles:
    """The files of a split: `names[i]` has the image `images[i]` and the mask `masks[i]`.

    If labels are not masks, `masks` are the files that contain the labels.
    """

    names: tuple[str, ...]
    images: tuple[Path, ...]
    masks: tuple[Path, ...]

    def fingerprint(self) -> str:
        """Return a digest of the bytes of every file: a copy of a dataset has the same one.

        Files are read once: the digest is cached by the names, sizes and modification times of the files.
        """
        known = cache_path("contents") / self._stats()
        with suppress(OSError, UnicodeDecodeError):
            cached = known.read_text(encoding="ascii")
            if len(cached) == hashlib.sha256().digest_size * 2:
                return cached
        digest = hashlib.sha256()
        files = (*self.masks, *self.images)
        with ThreadPoolExecutor() as pool:
            for file, content in zip(files, pool.map(_content, files), strict=True):
                digest.update(f"{file.name}\t{content}\n".encode("utf-8", "surrogateescape"))
        with suppress(OSError):  # without a cache, files are read again next time
            write_text(known, digest.hexdigest())
        return digest.hexdigest()

    def _stats(self) -> str:
        digest = hashlib.sha256()
        for file in (*self.masks, *self.images):
            try:
                stat = os.stat(file)
                line = f"{file.name}\t{stat.st_size}\t{stat.st_mtime_ns}\n"
            except OSError:  # reading it gives a better error
                line = f"{file.name}\tmissing\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def _content(file: Path) -> str:
    try:
        digest = hashlib.blake2b(digest_size=16)
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
        return digest.hexdigest()
    except OSError:  # reading it as an image gives a better error
        return "missing"


class FileSource(Source):
    """A source whose images and masks are files. A subclass finds the files."""

    void: int = IGNORE
    """The value that means void in the mask files."""

    @abstractmethod
    def files(self, split: Split) -> PairFiles:
        """Return the files of a split, found once."""

    def names(self, split: Split) -> Sequence[str]:
        return self.files(split).names

    def image(self, split: Split, index: int) -> Image.Image:
        return read_image(self.files(split).images[index])

    def sizes(self, split: Split) -> Sequence[tuple[int, int]]:
        return [image_size(file) for file in self.files(split).images]

    def preview(self, split: Split, index: int, side: int) -> tuple[Image.Image, tuple[int, int]]:
        return read_preview(self.files(split).images[index], side)

    def mask(self, split: Split, index: int) -> np.ndarray:
        return read_mask(self.files(split).masks[index], len(self.info.classes), self.void)

    def fingerprint(self, split: Split) -> str:
        reading = f"{len(self.info.classes)} {self.void} {self.files(split).fingerprint()}"
        return hashlib.sha256(reading.encode()).hexdigest()


def overlap_note(name: str, train: Sequence[str], val: Sequence[str]) -> list[str]:
    """Return a note if some images are in both train and val, else an empty list."""
    both = sorted(set(train) & set(val))
    if not both:
        return []
    shared = counted(len(both), "image")
    return [f"{name}: {shared} both in train and in val ('{both[0]}' …), so test results are too good"]


@contextmanager
def _opened(
    path: PathLike,
    stream: IO[bytes] | None = None,
    formats: tuple[str, ...] | None = None,
    most_pixels: int | None = None,
) -> Iterator[Image.Image]:
    """Open an image file. Every error of opening and decoding becomes a FileError.

    If a stream is given, it is read instead, and `path` is only a name. The size is read from the header and checked
    before anything is decoded, see `require_size`.
    """
    try:
        with warnings.catch_warnings():
            # Pillow warns above half of its limit. Images between half and the limit are large but allowed.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(path if stream is None else stream, formats=formats)
        with opened as image:
            require_size(path, image.width, image.height, most_pixels)
            yield image
    except FileError:
        raise
    except Image.DecompressionBombError as error:
        raise _too_many_pixels(path, most_pixels) from error
    except FileNotFoundError:
        raise FileError(path, "no such file", "restore it, or take its name off the list", MISSING) from None
    except UnidentifiedImageError as error:  # Pillow's message repeats the path, or has the address of a stream
        allowed = f"; allowed are {', '.join(formats)}" if formats else ""
        cause = f"its format is not known{allowed}"
        raise FileError(path, f"cannot be read as an image ({cause})", "export or copy it again") from error
    except Exception as error:  # the decoder of a damaged file can raise nearly anything
        said = re.sub(r"<_io\.[^>]*>", "the file", str(error))  # a stream is an address in Pillow's message
        cause = " ".join(said.split()) or type(error).__name__
        fault = f"cannot be read as an image ({cause})"
        raise FileError(path, fault, "export or copy it again", UNREADABLE) from error
