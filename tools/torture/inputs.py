"""Hostile and broken inputs: each must end in success or in one clear line, and no pickle may be loaded."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import os
import random
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from tools.torture.case import Case, Ended, Kind, Lost, incseg
from tools.torture.hostile import (
    any_image,
    damaged,
    encoded,
    pickled,
    picture,
    png_bomb,
    safetensors_with_header,
    text_bomb_png,
    thin_png,
)
from tools.torture.runs import copy_of_finished, finished

MUST = {
    "images": "predict and data check answer for each file: a mask of its size, or a line that names it",
    "masks": "data check and train name the mask and what is wrong with it",
    "class files": "taken as they are or refused with the line at fault",
    "lists": "presence files and image lists: taken or refused with the line at fault",
    "configs": "unknown keys with the nearest known one, wrong types with what is allowed",
    "command lines": "one line that names the flag, the value or the command",
    "model files": "never opened as a pickle; what does not fit is named",
    "ONNX files": "a file that cannot be run is named",
    "run folders": "folders of other versions or half eaten: read or refused by name",
    "file names": "blanks, quotes, newlines, other alphabets, no UTF-8: written inside the folder for results only",
    "pickled payloads": "the file that unpickling would make is not there",
}
_BATCH = 10


def cases(seed: int, quick: bool) -> list[Case]:
    draw = random.Random(seed)
    share = 0.02 if quick else 1.0

    def some(most: int) -> range:
        return range(max(1, round(most * share)))

    found = [
        *_named("images", _images_by_hand(), _predict_and_check),
        *(_damaged_images(draw.randrange(2**32)) for _ in some(60)),
        *_named("masks", _masks_by_hand(), _check_mask),
        *(_damaged_masks(draw.randrange(2**32)) for _ in some(30)),
        *_named("class files", _class_files(), _check_classes),
        *(_random_classes(draw.randrange(2**32)) for _ in some(100)),
        *_named("lists", _lists(), _check_list),
        *(_random_list(draw.randrange(2**32)) for _ in some(100)),
        *_named("configs", _configs(), _check_config),
        *(_random_config(draw.randrange(2**32)) for _ in some(350)),
        *_named("command lines", _command_lines(), _check_command),
        *(_random_command(draw.randrange(2**32)) for _ in some(200)),
        *_named("model files", _model_files(), _check_model),
        *(_random_model(draw.randrange(2**32)) for _ in some(200)),
        *(_random_onnx(draw.randrange(2**32)) for _ in (some(40) if _onnx() else ())),
        *_named("run folders", _run_folders(), _check_run),
        *(_random_run(draw.randrange(2**32)) for _ in some(100)),
        *_named("file names", _file_names(), _check_name),
        *_named("pickled payloads", _payloads(), _check_payload),
    ]
    return found[::13] if quick else found


def _named(group: str, faults: dict[str, Any], check: Callable[..., None]) -> Iterator[Case]:
    for name, fault in faults.items():
        yield Case(group, name, functools.partial(check, fault))


# --- images --------------------------------------------------------------------------------------------------

GOOD, BAD, ANY = "good", "bad", "any"


def _images_by_hand() -> dict[str, tuple[str, Callable[[], bytes], str]]:
    """Return name -> (file name, content, whether it must be read)."""
    draw = random.Random(0)

    def drawn(suffix: str, mode: str = "RGB", width: int = 20, height: int = 15, **options: Any) -> Callable[[], bytes]:
        return lambda: encoded(picture(draw, width, height, mode), suffix, **options)

    def animation() -> bytes:
        frames = [picture(draw, 9, 7).convert("P") for _ in range(3)]
        return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])

    def turned() -> bytes:
        exif = Image.Exif()
        exif[0x0112] = 6
        return encoded(picture(draw, 12, 8), "jpg", exif=exif)

    whole = drawn("jpg", width=64, height=64)
    return {
        "one pixel": ("a.png", drawn("png", width=1, height=1), GOOD),
        "30000 × 10": ("a.png", drawn("png", width=30000, height=10), GOOD),
        "10 × 30000": ("a.png", drawn("png", width=10, height=30000), GOOD),
        "100000 × 20": ("a.png", lambda: thin_png(100_000, 20), GOOD),
        "1 × 60000": ("a.png", drawn("png", width=1, height=60000), BAD),
        "10⁷ × 1": ("a.png", lambda: thin_png(10**7, 1), BAD),
        "1 × 10⁷": ("a.png", lambda: thin_png(1, 10**7), BAD),
        "64 million × 1": ("a.png", lambda: thin_png(64 * 10**6, 1), BAD),
        "300000 × 100": ("a.png", lambda: thin_png(300_000, 100), BAD),
        "CMYK JPEG": ("a.jpg", drawn("jpg", "CMYK"), GOOD),
        "16-bit grey PNG": ("a.png", drawn("png", "I;16"), GOOD),
        "1-bit PNG": ("a.png", drawn("png", "1"), GOOD),
        "palette PNG": ("a.png", drawn("png", "P"), GOOD),
        "palette PNG with transparency": ("a.png", drawn("png", "P", transparency=3), GOOD),
        "grey with alpha": ("a.png", drawn("png", "LA"), GOOD),
        "floating-point TIFF": ("a.tif", drawn("tif", "F"), BAD),
        "animated GIF called PNG": ("a.png", animation, GOOD),
        "JPEG called PNG": ("a.png", drawn("jpg"), GOOD),
        "PNG called JPG": ("a.jpg", drawn("png"), GOOD),
        "turned by EXIF": ("a.jpg", turned, GOOD),
        "text called PNG": ("a.png", lambda: b"not an image", BAD),
        "nothing called PNG": ("a.png", lambda: b"", BAD),
        "random bytes": ("a.jpg", lambda: random.Random(1).randbytes(5000), BAD),
        "half a JPEG": ("a.jpg", lambda: whole()[: len(whole()) // 2], BAD),
        "a JPEG's first 20 bytes": ("a.jpg", lambda: whole()[:20], BAD),
        "decompression bomb, 60000²": ("a.png", lambda: png_bomb(60000), BAD),
        "decompression bomb, 2³¹−1 squared": ("a.png", lambda: png_bomb(2**31 - 1), BAD),
        "large PNG that ends early, 12000²": ("a.png", lambda: png_bomb(12000), BAD),
        "comment bomb": ("a.png", text_bomb_png, ANY),
        "a pickle called PNG": ("a.png", lambda: pickled(Path("/nowhere/made")), BAD),
        "SVG called PNG": ("a.png", lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", BAD),
        "EPS called PNG": ("a.png", lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", BAD),
    }


def _predict_and_check(fault: tuple[str, Callable[[], bytes], str], folder: Path) -> None:
    name, make, verdict = fault
    content = make()
    _predict([(name, content)], verdict, folder)
    _check_dataset({"a" + Path(name).suffix: content}, verdict, folder)


def _damaged_images(seed: int) -> Case:
    def run(folder: Path) -> None:
        draw = random.Random(seed)
        files = []
        for number in range(_BATCH):
            suffix, content = any_image(draw)
            suffix = draw.choice((suffix, suffix, "png", "jpg"))
            files.append((f"{number}.{suffix}", damaged(content, draw) if draw.random() < 0.9 else content))
        _predict(files, ANY, folder)

    return Case("images", f"ten damaged files, seed {seed}", run, _BATCH)


def _predict(files: Sequence[tuple[str, bytes]], verdict: str, folder: Path) -> None:
    """Predict files. Each must be in predictions.json with a mask of its size, or skipped with a line that names it."""
    (folder / "in").mkdir()
    for name, content in files:
        (folder / "in" / name).write_bytes(content)
    given = [folder / "in" / name for name, _ in files]
    ended = incseg(
        ["predict", _model(), *given, "--out", folder / "out", "--size", 32, "--tile", 512], folder / "cache"
    )
    ended.ended_clearly()
    if not (folder / "out" / "predictions.json").is_file():
        raise Lost(f"no predictions.json: {ended.err.strip()[-200:]}")
    report = json.loads((folder / "out" / "predictions.json").read_text())
    if len(report["images"]) + len(report["skipped"]) != len(files):
        raise Lost("a file is neither predicted nor skipped")
    if bool(report["skipped"]) != (ended.code == 1):
        raise Lost(f"exit {ended.code} with {len(report['skipped'])} files skipped")
    if verdict in (GOOD, BAD) and bool(report["images"]) != (verdict == GOOD):
        raise Lost(f"a {verdict} file was {'read' if report['images'] else 'refused'}: {ended.err.strip()[-200:]}")
    for one in report["images"]:
        with Image.open(folder / "out" / f"{one['name']}_mask.png") as mask, Image.open(one["file"]) as image:
            sides = {image.size, image.size[::-1]}  # EXIF may rotate it
            if mask.size not in sides or np.asarray(mask).max() > 10:
                raise Lost(f"{one['file']} has {image.size} pixels and its mask {mask.size}")


def _dataset(
    folder: Path,
    images: dict[str, bytes],
    masks: dict[str, bytes] | None = None,
    classes: bytes = b"cat\ndog\n",
    size: tuple[int, int] = (20, 15),
) -> Path:
    """Write a dataset of two valid pairs and these files."""
    draw, root = random.Random(5), folder / "data"
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    (root / "classes.txt").write_bytes(classes)
    sound = {f"sound{i}.png": encoded(picture(draw, *size), "png") for i in range(2)}
    grey = encoded(Image.fromarray(np.tile(np.uint8([0, 1]), (size[1], size[0] // 2))), "png")
    for name, content in {**sound, **images}.items():
        (root / "images" / name).write_bytes(content)
        (root / "masks" / f"{Path(name).stem}.png").write_bytes(grey)
    for name, content in (masks or {}).items():
        (root / "masks" / name).write_bytes(content)
    return root


def _check_of(root: Path) -> list[object]:
    """Return the command that checks a dataset, with the contact sheet beside it."""
    return ["data", "check", "--data", "folder", "--root", root, "--sheet", root.parent / "sheet.png"]


def _check_dataset(images: dict[str, bytes], verdict: str, folder: Path) -> None:
    root = _dataset(folder, images)
    ended = incseg(_check_of(root), folder / "cache").ended_clearly()
    name = next(iter(images))
    if verdict == BAD and (ended.code != 1 or f"{name}: " not in ended.out):
        raise Lost(f"data check did not name {name}: exit {ended.code}, {ended.out[-300:]}")


# --- masks ---------------------------------------------------------------------------------------------------


def _masks_by_hand() -> dict[str, tuple[Callable[[], bytes], str]]:
    """Return name -> (mask of a 20 × 15 image with two classes, expected output of data check; empty if valid)."""

    def mask(values: Any, suffix: str = "png", mode: str | None = None, **options: Any) -> Callable[[], bytes]:
        def make() -> bytes:
            image = Image.fromarray(np.resize(np.asarray(values), (15, 20)))
            return encoded(image if mode is None else image.convert(mode), suffix, **options)

        return make

    labels = np.uint8([0, 1, 2, 255])
    wrong_size = encoded(Image.new("L", (15, 20), 1), "png")
    palette = Image.fromarray(np.resize(labels, (15, 20)))
    return {
        "grey": (mask(labels), ""),
        "palette": (lambda: encoded(palette.convert("L").convert("P"), "png"), ""),
        "16-bit": (mask(np.uint16([0, 1, 2])), ""),
        "1-bit": (mask(np.uint8([0, 255]), mode="1"), ""),
        "RGB": (mask(labels, mode="RGB"), "mode RGB, so it holds colours"),
        "RGBA": (mask(labels, mode="RGBA"), "mode RGBA, so it holds colours"),
        "grey with alpha": (mask(labels, mode="LA"), "mode LA, so it holds colours"),
        "CMYK JPEG called PNG": (mask(labels, "jpg", "CMYK"), "mode CMYK, so it holds colours"),
        "values above the classes": (mask(np.uint8([0, 3])), "the mask holds 3, but classes are 0 to 2"),
        "all values of a byte": (mask(np.arange(256, dtype=np.uint8)), "the mask holds 3, 4, 5, 6, 7, …"),
        "16-bit values above a byte": (mask(np.uint16([256, 257])), "the mask holds 256, 257"),
        "32-bit negative values": (mask(np.int32([-1, 1]), "tif"), "the mask holds -1"),
        "another size": (lambda: wrong_size, "the image is 20×15 but its mask 15×20"),
        "one pixel": (lambda: encoded(Image.new("L", (1, 1), 1), "png"), "but its mask 1×1"),
        "nothing": (lambda: b"", "cannot be read as an image"),
        "random bytes": (lambda: random.Random(2).randbytes(999), "cannot be read as an image"),
        "cut": (lambda: mask(labels)()[:45], "cannot be read as an image"),
        "decompression bomb": (lambda: png_bomb(60000), "more than 178,956,970 pixels"),
        "10⁷ × 1": (lambda: thin_png(10**7, 1), "it is 10000000×1 pixels"),
    }


def _check_mask(fault: tuple[Callable[[], bytes], str], folder: Path) -> None:
    make, said = fault
    root = _dataset(folder, {"a.png": encoded(picture(random.Random(3), 20, 15), "png")}, {"a.png": make()})
    ended = incseg(_check_of(root), folder / "cache").ended_clearly()
    if said and (ended.code != 1 or said not in ended.out or "1 faults" not in ended.out):
        raise Lost(f"data check did not say '{said}': exit {ended.code}, {ended.out[-300:]}")
    if not said and ended.code != 0:
        raise Lost(f"a sound mask was refused: {ended.out[-300:]}")
    if said:
        (root / "train.txt").write_text("a\nsound0\n")
        train = [
            "train",
            "--data",
            "folder",
            "--root",
            root,
            "--task",
            "joint",
            "--out",
            folder / "run",
            "--device",
            "cpu",
        ]
        tiny = ["--preset=shapes", "--train.epochs=1", "--train.batch_size=2", "--train.crop=16", "--model.width=8"]
        incseg([*train, *tiny, "--train.workers=0", "--eval.workers=0"], folder / "cache").refused(r"a\.png|'a'")


def _damaged_masks(seed: int) -> Case:
    def run(folder: Path) -> None:
        draw = random.Random(seed)
        sound = encoded(Image.fromarray(np.resize(np.uint8([0, 1, 2, 255]), (15, 20))), "png")
        names = [f"m{number}.png" for number in range(_BATCH)]
        image = encoded(picture(draw, 20, 15), "png")
        root = _dataset(folder, dict.fromkeys(names, image), {name: damaged(sound, draw) for name in names})
        ended = incseg(_check_of(root), folder / "cache").ended_clearly()
        if ended.code not in (0, 1):
            raise Lost(f"exit {ended.code}")

    return Case("masks", f"ten damaged masks, seed {seed}", run, _BATCH)


# --- class files and lists -----------------------------------------------------------------------------------


def _class_files() -> dict[str, tuple[bytes, str]]:
    """Return name -> (content, expected error; empty if the file is valid)."""
    return {
        "plain": (b"cat\ndog\n", ""),
        "byte order mark": (b"\xef\xbb\xbfcat\ndog\n", ""),
        "Windows line ends": (b"cat\r\ndog\r\n", ""),
        "no newline at the end": (b"cat\ndog", ""),
        "other alphabets": ("猫\nсобака\n".encode(), ""),
        "emoji": ("🐈\n🐕\n".encode(), ""),
        "right to left": ("קצ\u202eabc\nكلب\n".encode(), ""),
        "names like paths": (b"../../etc/passwd\n/dev/null\n", ""),
        "names like flags": (b"--task\n-1\n", ""),
        "names like markup": (b"[red]cat[/red]\n[/]\n", ""),
        "names like formats": (b"{0}%s\n{cat!r}\n", ""),
        "a name of 5000 letters": (b"c" * 5000 + b"\ndog\n", ""),
        "twice": (b"cat\ncat\n", "'cat' is listed twice"),
        "twice but for blanks": (b"cat\n cat \n", "'cat' is listed twice"),
        "empty": (b"", "it has 0 classes"),
        "only background": (b"background\n", "it has 0 classes"),
        "background in the middle": (b"cat\nbackground\ndog\n", "not on the first line"),
        "blank line": (b"cat\n\ndog\n", "line 2 is blank"),
        "only blank lines": (b"\n\n\n", "it has 0 classes"),
        "not UTF-8": (b"cat\n\xff\xfe\n", "is not UTF-8"),
        "UTF-16": ("cat\ndog\n".encode("utf-16"), "is not UTF-8"),
        "300 classes": ("\n".join(f"class{i}" for i in range(300)).encode(), "it has 300 classes"),
        "a NUL in a name": (b"cat\0\ndog\n", ""),
        "a megabyte of one name": (b"x" * 10**6, ""),
    }


def _check_classes(fault: tuple[bytes, str], folder: Path) -> None:
    content, said = fault
    root = _dataset(folder, {}, classes=content)
    for argv in (
        ["protocol", "--data", "folder", "--root", root, "--task", "joint"],
        _check_of(root),
    ):
        ended = incseg(argv, folder / "cache")
        if said:
            ended.refused(said)
        else:
            ended.succeeded()


def _random_classes(seed: int) -> Case:
    def run(folder: Path) -> None:
        draw = random.Random(seed)
        letters = string.printable + "äß猫\u200b\u202e\ufeff\x85\u2028\0"
        lines = ["".join(draw.choices(letters, k=draw.randint(0, 12))) for _ in range(draw.randint(0, 6))]
        content = "\n".join(lines).encode()
        root = _dataset(folder, {}, classes=damaged(content or b"\n", draw) if draw.random() < 0.3 else content)
        task = draw.choice(["joint", "1-1", "2-1", ",".join(lines[:2]) or "a", "/".join(lines) or "/"])
        incseg(["protocol", "--data", "folder", "--root", root, f"--task={task}"], folder / "cache").ended_clearly()

    return Case("class files", f"random names, seed {seed}", run)


def _lists() -> dict[str, tuple[str, bytes, str]]:
    """Return name -> (file, content, expected error)."""
    return {
        "train.txt with a path": ("train.txt", b"../../etc/passwd\n", "is a path"),
        "train.txt with an absolute path": ("train.txt", b"/etc/passwd\n", "is a path"),
        "train.txt with an unknown name": ("train.txt", b"nobody\n", "1 of 1 names have no image"),
        "train.txt with a name twice": ("train.txt", b"sound0\nsound0.png\n", "is listed twice"),
        "train.txt empty": ("train.txt", b"", "no image left for training"),
        "train.txt not UTF-8": ("train.txt", b"\xff", "is not UTF-8"),
        "val.txt with all images": ("val.txt", b"sound0\nsound1\n", "no image left for training"),
        "presence of an unknown image": ("presence", b"nobody 0\n", "has no line for"),
        "presence with an id too large": ("presence", b"sound0 7\n", "'7' is not a class"),
        "presence with a negative id": ("presence", b"sound0 -1\n", "'-1' is not a class"),
        "presence with Arabic digits": ("presence", "sound0 ٣\n".encode(), "is not a class"),
        "presence with a number of 5000 digits": ("presence", b"sound0 " + b"9" * 5000 + b"\n", "is not a class"),
        "presence twice": ("presence", b"sound0 0\nsound0 1\n", "is listed twice"),
        "presence empty": ("presence", b"", "it is empty"),
        "presence not UTF-8": ("presence", b"sound0 0\n\xff\n", "is not UTF-8"),
    }


def _check_list(fault: tuple[str, bytes, str], folder: Path) -> None:
    name, content, said = fault
    root = _dataset(folder, {})
    (root / name).write_bytes(content)
    more = ["--presence", root / name] if name == "presence" else []
    argv = ["protocol", "--data", "folder", "--root", root, "--task", "joint", *more]
    incseg(argv, folder / "cache").refused(said)


def _random_list(seed: int) -> Case:
    def run(folder: Path) -> None:
        draw = random.Random(seed)
        root, name = _dataset(folder, {}), draw.choice(["train.txt", "val.txt", "presence"])
        words = ["sound0", "sound1", "sound0.png", "0", "1", "2", "-1", "\t", "\0", "é", "..", "/", "*", "²", "9" * 30]
        lines = [draw.choice(" \t").join(draw.choices(words, k=draw.randint(1, 4))) for _ in range(draw.randint(0, 4))]
        content = "\n".join(lines).encode() or b"\n"
        (root / name).write_bytes(damaged(content, draw) if draw.random() < 0.4 else content)
        more = ["--presence", root / name] if name == "presence" else []
        argv = ["protocol", "--data", "folder", "--root", root, "--task", "joint", *more]
        incseg(argv, folder / "cache").ended_clearly()

    return Case("lists", f"random lines, seed {seed}", run)


# --- configurations and command lines ------------------------------------------------------------------------


def _plain_config() -> dict[str, Any]:
    """Return valid settings with a dataset that does not exist, so that nothing is trained."""
    config = yaml.safe_load((finished() / "config.yaml").read_text())
    config["data"] |= {"name": "folder", "root": "/nowhere/at/all"}
    return config


def _configs() -> dict[str, tuple[bytes, str]]:
    laughs = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(12)
    )
    merges = "m0: &m0 {a: 1}\n" + "".join(f"m{i + 1}: &m{i + 1} {{<<: [*m{i}, *m{i}, *m{i}]}}\n" for i in range(20))
    return {
        "as it is": (yaml.safe_dump(_plain_config()).encode(), "does not exist"),
        "unknown key": (b"train: {epochz: 3}\n", r"unknown setting 'train\.epochz'; did you mean train\.epochs"),
        "unknown group": (b"trian: {epochs: 3}\n", "unknown setting 'trian.epochs'; did you mean"),
        "unknown option of a method": (b"method: {name: mib, lamda: 3}\n", "unknown setting 'method.lamda'"),
        "unknown method": (b"method: mibb\n", "mibb.*did you mean 'mib'"),
        "unknown data": (b"data: vocc\n", "vocc.*did you mean 'voc'"),
        "words for a number": (b"train: {epochs: many}\n", r"train\.epochs is 'many'; it must be a whole number"),
        "a list for a number": (b"train: {lr: [1, 2]}\n", r"train\.lr is .*; it must be a number"),
        "a number for a group": (b"train: 3\n", "'train' holds 3"),
        "a half for a whole number": (b"train: {epochs: 1.5}\n", r"train\.epochs is '1\.5'; it must be a whole number"),
        "a number of 5000 digits": (b"seed: " + b"9" * 5000, "seed|digits"),
        "not a number": (b"train: {lr: .nan}\n", r"train\.lr is 'NaN'"),
        "infinite": (b"train: {lr: .inf}\n", r"train\.lr is 'Infinity'|train\.lr is inf"),
        "a date": (b"task: 2020-01-01\n", "task"),
        "bytes": (b"task: !!binary aGVsbG8=\n", "task"),
        "a set": (b"task: !!set {a, b}\n", "task"),
        "keys that are numbers": (b"1: 2\n", "unknown setting '1'"),
        "a key that is nothing": (b"~: 2\n", "unknown setting 'None'"),
        "a list as key": (b"? [a, b]\n: 2\n", "not valid YAML"),
        "a list in place of settings": (b"- a\n- b\n", "holds list, not settings"),
        "a word in place of settings": (b"hello\n", "holds str, not settings"),
        "nothing": (b"", "holds NoneType, not settings"),
        "tabs": (b"train:\n\tepochs: 3\n", "not valid YAML"),
        "not UTF-8": (b"task: \xff\xfe\n", "not valid YAML"),
        "control characters": (b"task: \x01\n", "not valid YAML"),
        "a NUL in a path": (b'data: {name: folder, root: "a\\0b"}\n', "root|no such|null|NUL"),
        "a NUL in the run folder": (b'out: "a\\0b"\n', "out|run folder|null|NUL"),
        "half a surrogate in a path": (
            b'data: {name: folder, root: "a\\ud800b"}\n',
            "root|no such|not valid YAML|no folder",
        ),
        "billion laughs": (laughs.encode(), "it has aliases"),
        "laughing merges": (merges.encode(), "it has aliases"),
        "a list in itself": (b"train: &a {epochs: *a}\n", "it has aliases"),
        "a hundred thousand brackets": (b"task: " + b"[" * 100_000, "not valid YAML|nested"),
        "a hundred thousand closed brackets": (b"task: " + b"[" * 100_000 + b"]" * 100_000, "not valid YAML|nested"),
        "two documents": (b"task: joint\n---\ntask: 15-1\n", "not valid YAML"),
        "python/object/apply": (b"task: !!python/object/apply:os.system ['touch made']\n", "not valid YAML"),
        "python/name": (b"task: !!python/name:os.system\n", "not valid YAML"),
        "python/object/new": (b"task: !!python/object/new:os.system ['touch made']\n", "not valid YAML"),
        "python/module": (b"task: !!python/module:os\n", "not valid YAML"),
        "a negative seed": (b"seed: -1\n", "seed is -1"),
        "a key twice": (
            b"seed: 1\nseed: 2\ndata: {name: folder, root: /nowhere}\n",
            "seed|does not exist",
        ),
    }


def _check_config(fault: tuple[bytes, str], folder: Path) -> None:
    content, said = fault
    (folder / "settings.yaml").write_bytes(content)
    ended = incseg(["train", "--config", folder / "settings.yaml"], folder / "cache", lambda: os.chdir(folder), 120)
    ended.refused(said)
    argv = ["sweep", "--spec", folder / "settings.yaml", "--out", folder / "sweep", "--list"]
    incseg(argv, folder / "cache", lambda: os.chdir(folder), 120).ended_clearly()
    if (folder / "made").exists():
        raise Lost("a command in the file was run")


def _random_config(seed: int) -> Case:
    def run(folder: Path) -> None:
        draw = random.Random(seed)
        config = copy.deepcopy(_plain_config())
        for _ in range(draw.randint(1, 3)):
            group = config[draw.choice([key for key, value in config.items() if isinstance(value, dict)])]
            place = draw.choice([config, group, group])
            key = draw.choice([k for k in place if k not in ("root",)] or ["name"])
            if draw.random() < 0.15:
                place[key + draw.choice(["s", "_", ".x", " "])] = place[key]
            elif draw.random() < 0.1:
                del place[key]
            else:
                place[key] = draw.choice(_VALUES)
        config["data"] = (
            {**config["data"], "root": "/nowhere/at/all"} if isinstance(config.get("data"), dict) else "folder"
        )
        if isinstance(config["data"], dict) and config["data"].get("name") in ("shapes", None):
            config["data"]["name"] = "folder"
        (folder / "settings.yaml").write_text(yaml.dump(config, allow_unicode=True))
        argv = ["train", "--config", folder / "settings.yaml", "--out", folder / "run"]
        incseg(argv, folder / "cache", lambda: os.chdir(folder), 120).refused(".")

    return Case("configs", f"random values, seed {seed}", run)


_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    10**30,
    -(10**30),
    1.5,
    -0.5,
    1e308,
    float("inf"),
    float("nan"),
    "",
    " ",
    "joint",
    "15-1",
    "auto",
    "mib",
    "nowhere:Nothing",
    "../..",
    "/etc/passwd",
    "~",
    "\n",
    "\0",
    "é",
    "%s{0}",
    "a" * 1000,
    "--out",
    [],
    [1],
    [1, 2, 3],
    ["a"],
    [None],
    {},
    {"name": "mib"},
    {"a": {"b": 1}},
    [[1]],
    "1e3",
    "0x10",
    "null",
    "true",
    "[1, 2]",
]


def _command_lines() -> dict[str, tuple[list[str], str]]:
    return {
        "no such command": (["trian"], "'trian'.*did you mean 'train'"),
        "a flag in place of a command": (["--data", "voc"], "--data"),
        "a flag twice, the second without a value": (["train", "--task", "15-1", "--task"], "task"),
        "--config without a file": (["train", "--config"], "--config needs a value"),
        "--config of a folder": (["train", "--config", "/"], "is a folder"),
        "--config of a device": (["train", "--config", "/dev/null"], "config|YAML|settings|regular"),
        "a mistyped flag": (["train", "--train.epoch", "3"], r"--train\.epoch'; did you mean --train\.epochs"),
        "a nested key given a value": (["train", "--train", "3"], "train"),
        "JSON for a group": (["train", '--train={"epochs": 0}'], "epochs"),
        "a step that is no number": (["eval", "/nowhere", "--step", "x"], "step"),
        "an image that is not there": (["predict", "MODEL", "/nowhere.png", "--out", "out"], "no image"),
        "no image": (["predict", "MODEL", "--out", "out"], "IMAGE"),
        "no model": (["predict"], "MODEL"),
        "a folder without images": (["predict", "MODEL", "empty", "--out", "out"], "holds no image"),
        "a pattern that finds nothing": (["predict", "MODEL", "*.xyz", "--out", "out"], "holds no image"),
        "a huge step": (["predict", "RUN", "a.png", "--out", "out", "--step", "9" * 30], "no image|no finished step"),
        "a negative tile": (["predict", "MODEL", "one.png", "--out", "out", "--tile", "-5"], "tile is -5"),
        "a negative size": (["predict", "MODEL", "one.png", "--out", "out", "--size", "-5"], "size is -5"),
        "a huge size": (["predict", "MODEL", "one.png", "--out", "out", "--size", "1000000"], "memory|size"),
        "no threads": (["predict", "MODEL", "one.png", "--out", "out", "--threads", "0"], "threads is 0"),
        "a device of another world": (
            ["predict", "MODEL", "one.png", "--out", "out", "--device", "tpu"],
            "device 'tpu'",
        ),
        "results into a file": (["predict", "MODEL", "one.png", "--out", "one.png"], "one.png"),
        "results beside the image": (
            ["predict", "MODEL", "one.png", "--out", "."],
            "lies in the folder for the results",
        ),
        "an option of another method": (["predict", "MODEL", "one.png", "--out", "out", "--method.lamda=1"], "lamda"),
        "a task with nothing in it": (["protocol", "--data", "shapes", "--task", ""], "task|''"),
        "a task of slashes": (["protocol", "--data", "shapes", "--task", "////"], "task|empty|class"),
        "a task of zero classes": (["protocol", "--data", "shapes", "--task", "0-0"], "0-0"),
        "a task too large": (["protocol", "--data", "shapes", "--task", "99999999999999999999-1"], "99999"),
        "a task with a class twice": (["protocol", "--data", "shapes", "--task", "disk,disk"], "disk"),
        "a rule that is none": (["protocol", "--data", "shapes", "--task", "joint", "--rules", "plopp"], "plop"),
        "a setting that is none": (["protocol", "--data", "shapes", "--task", "joint", "--setting", "x"], "overlapped"),
        "compare of nothing": (["compare", "/nowhere"], "does not exist"),
        "compare of a file": (["compare", "one.png"], "is a file"),
        "compare of an empty folder": (["compare", "."], "no finished run|holds no run"),
        "compare as something": (["compare", ".", "--format", "docx"], "docx"),
        "data of another kind": (["data", "check", "--data", "coco"], "coco"),
        "data without a root": (["data", "check", "--data", "voc"], "root"),
        "data in a file": (["data", "check", "--data", "folder", "--root", "one.png"], "one.png"),
        "export of nothing": (["data", "export", "--data", "shapes", "--out", "out", "--limit", "0"], "limit"),
        "cache of another name": (["cache", "clear", "nothing"], "nothing"),
        "cache with too much said": (["cache", "list", "--all"], "all"),
        "list of something": (["list", "things"], "things"),
        "a method that is a module": (["train", "--method", "os:system"], "os:system"),
        "a method in a module that is not there": (["train", "--method", "no.where:Method"], "no.where"),
        "a method without a class": (["train", "--method", "os:"], "os:"),
        "a backbone of nowhere": (["train", "--model.backbone", "timm:"], "timm"),
        "weights that are not there": (["train", "--model.weights", "/nowhere.pth"], "no such file"),
        "an empty run folder name": (["eval", ""], "no run folder|config.yaml"),
        "report of nothing": (["report", "/nowhere"], "does not exist"),
        "report of an empty folder": (["report", "empty"], "no finished run|holds no run"),
        "an ONNX file of nothing": (["export", "/nowhere", "--out", "a.onnx"], "does not exist"),
        "export of an image": (["export", "one.png", "--out", "a.onnx"], "not a safetensors"),
        "import of nothing": (["import", "/nowhere", "--classes", "cat", "--out", "out"], "no such file"),
        "import of an image": (["import", "one.png", "--classes", "cat", "--out", "out"], "one.png"),
        "extend of nothing": (["extend", "/nowhere", "--out", "out"], "does not exist"),
        "extend without data": (
            ["extend", "MODEL", "--root", "/nowhere", "--out", "out"],
            "does not exist",
        ),
        "a sweep of nothing": (["sweep", "--out", "out", "--spec", "/nowhere"], "cannot be read"),
        "a sweep of an image": (["sweep", "--out", "out", "--spec", "one.png"], "not valid YAML"),
        "a sweep of what is not": (["sweep", "--out", "out", "--method", "mib,nothing", "--list"], "nothing"),
        "the state of no sweep": (["sweep", "status", "/nowhere"], "/nowhere"),
        "doctor with a word too many": (["doctor", "please"], "please"),
        "completion for no shell": (["completion", "cmd"], "cmd"),
        "the demo of nothing": (["demo", "/nowhere"], "does not exist"),
        "the demo on a wrong port": (["demo", "MODEL", "--port", "99999999"], "port"),
    }


def _check_command(fault: tuple[list[str], str], folder: Path) -> None:
    argv, said = fault
    (folder / "one.png").write_bytes(encoded(Image.new("RGB", (9, 9)), "png"))
    (folder / "empty").mkdir()
    names = {"MODEL": str(_model()), "RUN": str(finished())}
    argv = [names.get(word, word) for word in argv]
    incseg(argv, folder / "cache", lambda: os.chdir(folder), 120).refused(said)


def _random_command(seed: int) -> Case:
    """Run a command of random words, real and invented. It cannot train, because its data do not exist."""

    def run(folder: Path) -> None:
        draw = random.Random(seed)
        (folder / "one.png").write_bytes(encoded(Image.new("RGB", (9, 9)), "png"))
        words = [
            "--data",
            "--task",
            "--root",
            "--out",
            "--json",
            "--step",
            "--size",
            "--tile",
            "--method.balancing=odds",
            "--save",
            "--threads",
            "--method",
            "--rules=mib",
            "--order",
            "b",
            "one.png",
            str(_model()),
            "0",
            "-1",
            "joint",
            "2-2",
            "",
            "--",
            "-",
            "é",
            "--x",
            "--format",
            "json",
            "list",
            "clear",
            "check",
            "*",
            "..",
            "/dev/null",
            "=",
            "--train.lr=x",
            "--seed=1",
            "--method.",
            "--preset",
            "voc",
            "ade20k",
            "folder",
        ]
        command = draw.choice(["predict", "eval", "protocol", "compare", "data", "cache", "list", "train"])
        argv = [command, *draw.choices(words, k=draw.randint(0, 6))]
        if command == "train":
            argv += ["--data", draw.choice(["voc", "ade20k", "folder"]), "--root", "/nowhere/at/all"]
        if command in ("protocol", "data"):
            argv += ["--limit=1"] * (command == "data")
        incseg(argv, folder / "cache", lambda: os.chdir(folder), 120).ended_clearly()

    return Case("command lines", f"random words, seed {seed}", run)


# --- model files ---------------------------------------------------------------------------------------------


def _model() -> Path:
    return finished() / "steps" / "2" / "model.safetensors"


def _changed_model(tensors: Callable[[dict], object] = lambda t: t, **metadata: Any) -> Callable[[], bytes]:
    """Return the model with other tensors or metadata; a metadata value of None removes the key."""

    def make() -> bytes:
        with safe_open(_model(), framework="pt") as file:
            loaded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = dict(file.metadata())
        tensors(loaded)
        for key, change in metadata.items():
            about[key] = change(about[key]) if callable(change) else change
            if about[key] is None:
                del about[key]
        about.pop("checksum", None)  # this file was made by someone, not damaged
        target = finished().parent / "changed.safetensors"
        save_file(loaded, target, about)
        return target.read_bytes()

    return make


def _edit(change: Callable[[Any], Any]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        value = json.loads(text)
        changed = change(value)
        return json.dumps(value if changed is None else changed)

    return edit


def _model_files() -> dict[str, tuple[Callable[[], bytes], str]]:
    whole = _model().read_bytes
    first = next(iter(json.loads(whole()[8 : 8 + int.from_bytes(whole()[:8], "little")]).keys() - {"__metadata__"}))

    def reshape(tensors: dict) -> None:
        tensors[first] = torch.zeros(3, 1)

    def poison(tensors: dict) -> None:
        for tensor in tensors.values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))

    def overflow(tensors: dict) -> None:
        for name in ("aspp.mix.weight", "aspp.norm.weight"):
            tensors[name] *= 1e38

    return {
        "nothing": (lambda: b"", "not a safetensors file"),
        "seven bytes": (lambda: b"1234567", "not a safetensors file"),
        "text": (lambda: b"hello " * 100, "not a safetensors file"),
        "cut in the header": (lambda: whole()[:100], "not a safetensors file"),
        "cut in the tensors": (lambda: whole()[:-100], "not a safetensors file"),
        "bytes behind its end": (lambda: whole() + b"more", "not a safetensors file"),
        "a pickle": (lambda: pickled(Path("/nowhere/made")), "is a pickle"),
        "a header of 2⁶³ bytes": (lambda: safetensors_with_header({}, length=2**63), "not a safetensors file"),
        "a header of 200 MB": (lambda: safetensors_with_header({}, bytes(10), 200 * 10**6), "not a safetensors file"),
        "a header that is a list": (lambda: safetensors_with_header([1, 2]), "not a safetensors file"),
        "tensors that overlap": (
            lambda: safetensors_with_header(
                {n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"}, bytes(8)
            ),
            "not a safetensors file|not an incseg model",
        ),
        "a tensor of 2⁶⁰ numbers": (
            lambda: safetensors_with_header(
                {"a": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 8]}}, bytes(8)
            ),
            "not a safetensors file",
        ),
        "someone else's tensors": (lambda: safetensors_with_header({}), "not an incseg model"),
        "a future version": (_changed_model(format_version="99"), "newer incseg"),
        "a version of 5000 digits": (_changed_model(format_version="9" * 5000), "version|newer"),
        "a version that is no number": (_changed_model(format_version="²"), "version"),
        "no format": (_changed_model(format=None), "not an incseg model"),
        "no description": (_changed_model(config=None), "description is damaged"),
        "a description that is no JSON": (_changed_model(config="{"), "description is damaged"),
        "a description of 100000 brackets": (_changed_model(config="[" * 100_000), "description is damaged"),
        "a description that is a list": (_changed_model(config="[1]"), "description is damaged"),
        "an unknown key in the description": (_changed_model(config=_edit(lambda c: {**c, "x": 1})), "damaged"),
        "an unknown backbone": (_changed_model(config=_edit(lambda c: {**c, "backbone": "tinny"})), "tinny"),
        "a backbone that is a number": (
            _changed_model(config=_edit(lambda c: {**c, "backbone": 7})),
            "backbone|damaged|7",
        ),
        "a width of a billion": (
            _changed_model(config=_edit(lambda c: {**c, "width": 10**9})),
            "misshapen|memory|width|fit",
        ),
        "a negative width": (_changed_model(config=_edit(lambda c: {**c, "width": -8})), "width|damaged|fit"),
        "an output stride of zero": (
            _changed_model(config=_edit(lambda c: {**c, "output_stride": 0})),
            "stride|damaged",
        ),
        "weights to fetch": (_changed_model(config=_edit(lambda c: {**c, "weights": "/etc/passwd"})), ""),
        "no increments": (_changed_model(increments="[]"), "misses|unknown tensor|no class"),
        "increments that are text": (_changed_model(increments='"abc"'), "description is damaged"),
        "an increment without names": (
            _changed_model(increments=_edit(lambda i: i[0].pop("classes") and i)),
            "damaged",
        ),
        "names that are numbers": (
            _changed_model(increments=_edit(lambda i: i[0].update(classes=[1] * 6))),
            "damaged|names|class",
        ),
        "ids above a byte": (
            _changed_model(increments=_edit(lambda i: i[0].update(ids=[300, 2, 3, 4, 5, 6]))),
            "id|damaged",
        ),
        "negative ids": (
            _changed_model(increments=_edit(lambda i: i[0].update(ids=[-1, 2, 3, 4, 5, 6]))),
            "id|damaged",
        ),
        "fewer ids than names": (_changed_model(increments=_edit(lambda i: i[0].update(ids=[1]))), "id|damaged"),
        "ids twice": (_changed_model(increments=_edit(lambda i: i[0].update(ids=[1] * 6))), "id|damaged"),
        "a million classes": (
            _changed_model(increments=_edit(lambda i: i[0].update(classes=["c"] * 10**6, ids=[1] * 10**6))),
            "misshapen|id|damaged|classes",
        ),
        "no method": (_changed_model(extra=_edit(lambda e: e.pop("method") and e)), "does not name its method"),
        "a method from outside": (
            _changed_model(extra=_edit(lambda e: {**e, "method": {"name": "os:system"}})),
            "trust",
        ),
        "a method that is a list": (
            _changed_model(extra=_edit(lambda e: {**e, "method": {"name": ["x"]}})),
            "method|trust",
        ),
        "a method with an unknown option": (
            _changed_model(extra=_edit(lambda e: {**e, "method": {**e["method"], "zzz": 1}})),
            "zzz",
        ),
        "a method with a wrong option": (
            _changed_model(extra=_edit(lambda e: {**e, "method": {**e["method"], "balancing": 7}})),
            "unknown balancing",
        ),
        "a palette of text": (_changed_model(extra=_edit(lambda e: {**e, "palette": "red"})), "palette"),
        "a palette of large numbers": (
            _changed_model(extra=_edit(lambda e: {**e, "palette": [[999, 0, 0]] * 11})),
            "palette|colours",
        ),
        "a ragged palette": (_changed_model(extra=_edit(lambda e: {**e, "palette": [[1], [1, 2]]})), "palette|colours"),
        "a test size of text": (_changed_model(extra=_edit(lambda e: {**e, "test_size": "big"})), "test_size|size"),
        "a negative test size": (_changed_model(extra=_edit(lambda e: {**e, "test_size": -5})), "size"),
        "a test size of a million": (_changed_model(extra=_edit(lambda e: {**e, "test_size": 10**6})), "test size"),
        "a test size of 10¹⁸": (_changed_model(extra=_edit(lambda e: {**e, "test_size": 10**18})), "test size"),
        "a width of 30000": (_changed_model(config=_edit(lambda c: {**c, "width": 30_000})), "misshapen"),
        "dilations of a billion": (
            _changed_model(config=_edit(lambda c: {**c, "dilations": [10**9] * 3})),
            "dilations",
        ),
        "a larger backbone": (
            _changed_model(config=_edit(lambda c: {**c, "backbone": "resnet101"})),
            "misses|misshapen",
        ),
        "100000 empty increments": (
            _changed_model(
                increments=_edit(lambda i: i + [{"classes": [], "ids": [], "train_images": 0, "head": 0}] * 10**5)
            ),
            "no classes",
        ),
        "a head for every increment": (
            _changed_model(increments=_edit(lambda i: [{**one, "head": n} for n, one in enumerate(i)])),
            "shrunk|misses|damaged",
        ),
        "a lone surrogate in a name": (
            _changed_model(increments=_edit(lambda i: i[0]["classes"].__setitem__(0, "\ud800"))),
            "characters",
        ),
        "a background of text": (_changed_model(background_output='"no"'), "background output"),
        "a protocol that is a list": (_changed_model(extra=_edit(lambda e: {**e, "protocol": [1]})), "protocol"),
        "weights that overflow": (_changed_model(overflow), "not finite"),
        "float8": (_changed_model(lambda t: t.update({first: t[first].to(torch.float8_e5m2)})), "misshapen"),
        "a header of 20 MB": (
            lambda: safetensors_with_header({"__metadata__": {"format": "x" * (20 << 20)}}),
            "header has",
        ),
        "a missing tensor": (_changed_model(lambda t: t.pop(first)), "misses tensor"),
        "a tensor too many": (_changed_model(lambda t: t.update(more=torch.zeros(1))), "unknown tensor"),
        "a misshapen tensor": (_changed_model(reshape), "misshapen tensor"),
        "a tensor of whole numbers": (_changed_model(lambda t: t.update({first: t[first].int()})), "misshapen tensor"),
        "weights that are not numbers": (_changed_model(poison), "NaN|finite"),
    }


def _check_model(fault: tuple[Callable[[], bytes], str], folder: Path) -> None:
    make, said = fault
    ended = _predict_with(make(), folder)
    if said:
        ended.refused(said)
    else:
        ended.succeeded()


def _predict_with(model: bytes, folder: Path) -> Ended:
    (folder / "model.safetensors").write_bytes(model)
    (folder / "one.png").write_bytes(encoded(Image.new("RGB", (9, 9)), "png"))
    return incseg(
        ["predict", folder / "model.safetensors", folder / "one.png", "--out", folder / "out"], folder / "cache"
    )


def _random_model(seed: int) -> Case:
    """Damage the model anywhere. It must be detected or have no effect on the prediction."""

    def run(folder: Path) -> None:
        draw = random.Random(seed)
        ended = _predict_with(damaged(_model().read_bytes(), draw), folder)
        if ended.code:
            ended.refused("model file")
        elif (folder / "out/one_uncertainty.png").read_bytes() != _sound_answer():
            raise Lost("a damaged model was accepted and gives another answer")

    return Case("model files", f"damaged, seed {seed}", run)


@functools.cache
def _sound_answer() -> bytes:
    folder = finished().parent / "sound"
    folder.mkdir()
    _predict_with(_model().read_bytes(), folder).succeeded()
    return (folder / "out/one_uncertainty.png").read_bytes()


@functools.cache
def _onnx() -> Path | None:
    """Return the model as an ONNX file; None if onnx is not installed."""
    if importlib.util.find_spec("onnx") is None or importlib.util.find_spec("onnxruntime") is None:
        return None
    file = finished().parent / "model.onnx"
    incseg(["export", _model(), "--out", file, "--no-check"], finished().parent / "cache")
    return file if file.exists() else None


def _random_onnx(seed: int) -> Case:
    """Damage the ONNX file. ONNX has no checksum, so a changed weight is not detected; only the exit is checked."""

    def run(folder: Path) -> None:
        draw = random.Random(seed)
        whole = _onnx()
        assert whole is not None
        (folder / "model.onnx").write_bytes(damaged(whole.read_bytes(), draw))
        (folder / "one.png").write_bytes(encoded(Image.new("RGB", (9, 9)), "png"))
        argv = ["predict", folder / "model.onnx", folder / "one.png", "--out", folder / "out"]
        incseg(argv, folder / "cache").ended_clearly()

    return Case("ONNX files", f"damaged, seed {seed}", run)


# --- run folders ---------------------------------------------------------------------------------------------


def _remove(key: str, *path: str) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for part in path:
            value = value[part]
        del value[key]

    return change


def _put(content: Any, key: str, *path: str) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for part in path:
            value = value[part]
        value[key] = content

    return change


def _run_folders() -> dict[str, tuple[str, Callable[[Any], None] | bytes | None, str]]:
    """Return name -> (file, a change of its values, new bytes, or None to delete it; expected error of eval)."""
    return {
        "config.yaml of a later version": ("config.yaml", _put(1, "compile", "train"), "config.yaml.*compile"),
        "config.yaml of an earlier version": ("config.yaml", _remove("label_stride", "train"), ""),
        "config.yaml without a group": ("config.yaml", _remove("train"), "config.yaml"),
        "config.yaml without a method": ("config.yaml", _remove("method"), "config.yaml|method"),
        "config.yaml with a method of text": ("config.yaml", _put("evidential", "method"), "config.yaml|method"),
        "config.yaml with another method": ("config.yaml", _put("nothing", "name", "method"), "nothing"),
        "config.yaml with code to import": ("config.yaml", _put("os:system", "name", "method"), "os:system"),
        "config.yaml with a method to import": ("config.yaml", _put("helper:M", "name", "method"), "helper:M"),
        "config.yaml with a generator to import": ("config.yaml", _put("helper:f", "generator", "method"), "helper:f"),
        "config.yaml with a dataset to import": ("config.yaml", _put("helper:D", "name", "data"), "helper:D"),
        "config.yaml with text for a number": ("config.yaml", _put("many", "epochs", "train"), "config.yaml|epochs"),
        "config.yaml with a list for a number": ("config.yaml", _put([1], "size", "eval"), "config.yaml|size"),
        "config.yaml with text for a seed": ("config.yaml", _put("x", "seed"), "seed"),
        "config.yaml with a number for a task": ("config.yaml", _put(7, "task"), "task|config.yaml"),
        "config.yaml with a list for a group": ("config.yaml", _put([1], "data"), "config.yaml|data"),
        "config.yaml with text for threads": ("config.yaml", _put("two", "threads"), "threads|config.yaml"),
        "config.yaml with another task": ("config.yaml", _put("joint", "task"), "step|fit"),
        "config.yaml empty": ("config.yaml", b"", "holds NoneType"),
        "config.yaml cut": ("config.yaml", b"train: {epochs", "not valid YAML"),
        "config.yaml gone": ("config.yaml", None, "is not a run folder"),
        "config.yaml with a tag": ("config.yaml", b"!!python/object/apply:os.system ['touch made']", "not valid YAML"),
        "row.json gone": ("steps/0/row.json", None, "no finished step"),
        "model gone": ("steps/2/model.safetensors", None, "model.safetensors"),
        "model empty": ("steps/2/model.safetensors", b"", "model.safetensors"),
        "state gone": ("steps/2/state.safetensors", None, "state.safetensors"),
        "state empty": ("steps/2/state.safetensors", b"", "state.safetensors"),
    }


def _check_run(fault: tuple[str, Callable[[Any], None] | bytes | None, str], folder: Path) -> None:
    name, change, said = fault
    run = copy_of_finished(folder)
    _apply(run / name, change)
    (folder / "helper.py").write_text("open('made', 'w')\n")
    where = functools.partial(_into, folder)
    ended = incseg(["eval", run], folder / "cache", where)
    if said:
        ended.refused(said)
    else:
        ended.succeeded()
    (folder / "one.png").write_bytes(encoded(Image.new("RGB", (9, 9)), "png"))
    for argv in (
        ["compare", run],
        ["predict", run, "one.png", "--out", "out"],
        ["train", "--config", run / "config.yaml"],
    ):
        incseg(argv, folder / "cache", where).ended_clearly()
    if (folder / "made").exists():
        raise Lost("a command in the file was run")


def _into(folder: Path) -> None:
    """Change to a folder, and let its modules be imported."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))


def _apply(file: Path, change: Callable[[Any], None] | bytes | None) -> None:
    if change is None:
        file.unlink()
    elif isinstance(change, bytes):
        file.write_bytes(change)
    else:
        value = yaml.safe_load(file.read_text())
        change(value)
        file.write_text(yaml.safe_dump(value) if file.suffix == ".yaml" else json.dumps(value))


def _random_run(seed: int) -> Case:
    """Damage a file of a run folder, or change or delete one of its values. Commands that read it must end clearly."""

    def run(folder: Path) -> None:
        draw = random.Random(seed)
        place = copy_of_finished(folder)
        names = [
            "config.yaml",
            "protocol.json",
            "environment.json",
            "results.json",
            *(f"steps/{k}/row.json" for k in range(3)),
        ]
        file = place / draw.choice(names)
        if draw.random() < 0.3:
            file.write_bytes(damaged(file.read_bytes(), draw))
        else:
            _apply(file, functools.partial(_scramble, draw))
        where = functools.partial(os.chdir, folder)
        argv: list[object] = draw.choice([["compare", place], ["compare", place, "--format", "json"], ["eval", place]])
        if argv[0] == "eval" and file.name == "config.yaml":
            _without_work(file)
        incseg(argv, folder / "cache", where, 120).ended_clearly()

    return Case("run folders", f"a random change, seed {seed}", run)


def _scramble(draw: random.Random, value: Any) -> None:
    while isinstance(value, dict | list) and value:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = draw.choice(list(keys))
        if not isinstance(value[key], dict | list) or not value[key] or draw.random() < 0.3:
            if draw.random() < 0.3:
                del value[key]
            else:
                value[key] = draw.choice([one for one in _VALUES if not isinstance(one, float) or one == one])
            return
        value = value[key]


def _without_work(config: Path) -> None:
    """Limit the number and size of scenes: large values are valid and would only take time."""
    try:
        values = yaml.safe_load(config.read_text())
        for key in ("train_size", "val_size", "image_size"):
            if isinstance(values["data"].get(key), int | float):
                values["data"][key] = min(values["data"][key], 64)
        config.write_text(yaml.safe_dump(values))
    except (yaml.YAMLError, TypeError, KeyError, AttributeError, ValueError):
        pass


# --- file names ----------------------------------------------------------------------------------------------


def _file_names() -> dict[str, bytes]:
    return {
        "blanks": b"my cat  1 .png",
        "quotes": b'it\'s "a" `cat`.png',
        "a newline": b"two\nlines.png",
        "a tab and a bell": b"tab\tbell\a.png",
        "a dollar and semicolons": b"$(touch made);&|.png",
        "no UTF-8": b"\xff\xfe latin \xe9.png",
        "other alphabets": "猫 собака كلب.png".encode(),
        "letters with loose accents": "cafe\u0301.png".encode(),
        "an arrow that turns the line": "\u202egnp.exe.png".encode(),
        "a leading dash": b"--out.png",
        "dots": b"a...png.png",
        "a dot at the front": b".hidden.png",
        "a percent and braces": b"%s{0}[red].png",
        "a pattern": b"[ab]*?.png",
        "a backslash": b"..\\..\\up.png",
        "250 letters": b"n" * 250 + b".png",
        "only a suffix with blanks": b" .png",
    }


def _check_name(name: bytes, folder: Path) -> None:
    place = os.fsencode(folder) + b"/in"
    os.mkdir(place)
    image = encoded(picture(random.Random(4), 20, 15), "png")
    path = os.path.join(place, name)
    with open(path, "wb") as file:
        file.write(image)
    where = functools.partial(os.chdir, folder)
    argv = ["predict", _model(), os.fsdecode(path), "--out", folder / "out"]
    incseg(argv, folder / "cache", where).succeeded()
    whole = incseg(["predict", _model(), folder / "in", "--out", folder / "out2"], folder / "cache", where)
    if name.startswith(b"."):
        whole.refused("holds no image")  # hidden files are ignored
        return
    whole.succeeded()
    if len(list((folder / "out").iterdir())) != 4 or len(list((folder / "out2").iterdir())) != 4:
        raise Lost("the results are not one mask, uncertainty, overlay and predictions.json")
    if {entry.name for entry in folder.iterdir()} - {"in", "out", "out2", "cache"}:
        raise Lost("something was written outside the folder for results")
    root = _dataset(folder, {})
    for kind in (b"images", b"masks"):
        with open(os.path.join(os.fsencode(root), kind, name), "wb") as file:
            file.write(image if kind == b"images" else encoded(Image.new("L", (20, 15)), "png"))
    incseg(_check_of(root), folder / "cache", where).ended_clearly()
    incseg(["protocol", "--data", "folder", "--root", root, "--task", "joint"], folder / "cache", where).ended_clearly()


# --- payloads ------------------------------------------------------------------------------------------------


def _payloads() -> dict[str, str]:
    """Return name -> the file that is a pickle."""
    return {
        "as a model": "model",
        "as a step's model": "run/steps/2/model.safetensors",
        "as a step's state": "run/steps/2/state.safetensors",
        "as a step's confusion matrix": "run/steps/2/confusion.npy",
        "as a checkpoint": "run/checkpoint.safetensors",
        "as results.json": "run/results.json",
        "as a row": "run/steps/2/row.json",
        "as config.yaml": "run/config.yaml",
        "as weights.pth": "weights.pth",
        "as weights.pt, torch.save": "weights.pt",
        "as weights.safetensors": "weights.safetensors",
        "as an image": "one.png",
        "as a presence file": "presence.txt",
        "in an .npy of objects": "run/steps/1/confusion.npy",
    }


def _check_payload(place: str, folder: Path) -> None:
    made = folder / "made"
    run = copy_of_finished(folder)
    (folder / "one.png").write_bytes(encoded(Image.new("RGB", (9, 9)), "png"))
    target = folder / ("model.safetensors" if place == "model" else place)
    if place.endswith(".pt"):
        import zipfile

        with zipfile.ZipFile(target, "w") as archive:
            archive.writestr("archive/data.pkl", pickled(made, 2))
            archive.writestr("archive/version", "3\n")
    elif place == "run/steps/1/confusion.npy":
        header = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
        target.write_bytes(header.ljust(127) + b"\n" + pickled(made))
    else:
        target.write_bytes(pickled(made, 2 if place.endswith("pth") else 4))
    where, cache = functools.partial(os.chdir, folder), folder / "cache"
    commands: list[list[object]] = [
        ["predict", target if place == "model" else run, "one.png", "--out", "out"],
        ["eval", run],
        ["compare", run],
        ["protocol", "--data", "voc", "--task", "joint", "--presence", target],
    ]
    if place.startswith("weights"):
        commands = [["train", "--data", "shapes", "--model.weights", target, "--out", "new"]]
    if place.startswith("run"):
        commands.append(["train", "--config", folder / "settings.yaml"])
    for argv in commands:
        ended = incseg(argv, cache, where)
        if made.exists():
            raise Lost(f"{argv[0]} loaded the pickle")
        ended.ended_clearly()
    if place in ("model", "weights.pth", "weights.pt", "weights.safetensors"):
        ended.refused("pickle|safetensors|plain tensors|shapes") if place != "model" else None


KIND = Kind("inputs", MUST, cases)
