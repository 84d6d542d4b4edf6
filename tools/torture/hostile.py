"""Make hostile files: damaged images, decompression bombs, pickles with a payload, safetensors with a false header."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

FORMATS = {"png": "PNG", "jpg": "JPEG", "bmp": "BMP", "tif": "TIFF", "webp": "WEBP"}
_MODES = {
    "png": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "jpg": ("L", "RGB", "CMYK"),
    "bmp": ("1", "L", "P", "RGB"),
    "tif": ("1", "L", "P", "RGB", "RGBA", "CMYK", "I;16", "F"),
    "webp": ("RGB", "RGBA"),
}


def picture(draw: random.Random, width: int, height: int, mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(draw.randrange(2**32)).integers(0, 256, (height, width, 3), np.uint8)
    if mode == "I;16":
        return Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    return Image.fromarray(noise).convert(mode)


def encoded(image: Image.Image, suffix: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, FORMATS.get(suffix, suffix), **options)
    return stream.getvalue()


def any_image(draw: random.Random) -> tuple[str, bytes]:
    """Return a valid image file of a random format and mode: (suffix, content)."""
    suffix = draw.choice(list(FORMATS))
    mode = draw.choice(_MODES[suffix])
    options: dict[str, object] = {}
    if suffix == "tif" and draw.random() < 0.5:
        options["compression"] = "tiff_lzw" if mode != "F" else "tiff_deflate"
    return suffix, encoded(picture(draw, draw.randint(1, 40), draw.randint(1, 40), mode), suffix, **options)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Return the content with one to three random damages."""
    for _ in range(draw.randint(1, 3)):
        at, other = sorted((draw.randrange(len(content) + 1), draw.randrange(len(content) + 1)))
        damage = draw.randrange(5)
        if damage == 0:
            content = content[:other]
        elif damage == 1:
            content = content[:at] + draw.randbytes(min(other - at, 8)) + content[at + min(other - at, 8) :]
        elif damage == 2:
            content = content[:at] + content[other:]
        elif damage == 3:
            content = content[:other] + content[at:]
        elif content:
            bit = draw.randrange(len(content) * 8)
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            content = bytes(changed)
        content = content or b"\0"
    return content


def png_bomb(side: int) -> bytes:
    """Return a small PNG whose header claims side × side pixels."""
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    body = zlib.compress(bytes(min(side * (1 + side // 8), 10 * 10**6)), 9)  # enough for the decoder to start
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    parts = (struct.pack(">I", len(c)) + n + c + struct.pack(">I", zlib.crc32(n + c)) for n, c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def thin_png(width: int, height: int) -> bytes:
    """Return a valid black PNG of this size; it compresses to a thousandth."""
    return encoded(Image.new("L", (width, height)), "png")


def text_bomb_png() -> bytes:
    """Return a PNG whose comment decompresses to 200 MB."""
    whole = encoded(Image.new("RGB", (8, 8)), "png")
    comment = b"Comment\0\0" + zlib.compress(bytes(200 * 10**6), 9)
    chunk = struct.pack(">I", len(comment)) + b"zTXt" + comment + struct.pack(">I", zlib.crc32(b"zTXt" + comment))
    return whole[:33] + chunk + whole[33:]


class _Payload:
    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._file), "w")


def pickled(file: Path, protocol: int = 4) -> bytes:
    """Return a pickle that creates `file` when it is loaded."""
    return pickle.dumps({"state_dict": _Payload(file), "model": _Payload(file)}, protocol=protocol)


def safetensors_with_header(header: object, body: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with any header, and with a false length of it if given."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body
