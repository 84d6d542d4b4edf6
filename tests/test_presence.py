"""The class-presence index: its text format, its cache, and published lists."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from incseg.data.files import FileError
from incseg.data.presence import (
    Presence,
    cache_path,
    classes_in,
    in_threads,
    presence_of,
    read_presence,
    write_presence,
)
from incseg.data.source import Source, Split
from incseg.data.voc import VOC
from incseg.types import DatasetInfo, UserError

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")


class Masks(Source):
    """A source with masks in memory that counts how many were read."""

    info = DatasetInfo("masks", ("cat", "dog", "bird"))

    def __init__(self, masks: Sequence[Sequence[int]], key: str = "k") -> None:
        self.masks, self.key, self.reads = masks, key, 0

    def names(self, split: Split) -> Sequence[str]:
        return [f"image {i}" for i in range(len(self.masks))]

    def image(self, split: Split, index: int) -> Image.Image:
        raise AssertionError("an index needs no image")

    def mask(self, split: Split, index: int) -> np.ndarray:
        self.reads += 1
        return np.array([self.masks[index]], dtype=np.uint8)

    def fingerprint(self, split: Split) -> str:
        return self.key


class KnownMasks(Masks):
    def known_presence(self, split: Split) -> Sequence[tuple[int, ...]]:
        return [(3,)] * len(self.masks)


MASKS = ([0, 1, 255], [0, 0, 0], [3, 2, 3], [255, 255, 2])
CLASSES = ((1,), (), (2, 3), (2,))


@given(st.lists(st.integers(0, 255), min_size=1))
def test_classes_in(values: list[int]) -> None:
    assert classes_in(np.array([values], dtype=np.uint8)) == tuple(sorted(set(values) - {0, 255}))


def test_text_format_counts_from_zero(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("a 0 2\n\nb\nc 1\n")
    presence = read_presence(file, 3)
    assert presence == Presence(("a", "b", "c"), ((1, 3), (), (2,)))
    write_presence(file, presence)
    assert file.read_text() == "a 0 2\nb\nc 1\n"
    assert [f.name for f in tmp_path.iterdir()] == ["p.txt"]


def test_names_with_blanks_survive(tmp_path: Path) -> None:
    presence = Presence(("my cat 1", "no class 2", "ünï"), ((1, 3), (), (2,)))
    write_presence(tmp_path / "p.txt", presence)
    assert read_presence(tmp_path / "p.txt", 3) == presence


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 0\nb 3\n", r"p\.txt:2: '3' is not a class; ids run from 0.* to 2"),
        ("a -1\n", r"p\.txt:1: '-1' is not a class"),
        ("a cat\n", r"p\.txt:1: 'cat' is not a class"),
        ("a 0\nb 1\na 1\n", r"p\.txt:3: 'a' is listed twice"),
        ("\n", r"p\.txt: it is empty"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.txt").write_text(text)
    with pytest.raises(FileError, match=message):
        read_presence(tmp_path / "p.txt", 3)


def test_computed_once_then_cached(tmp_path: Path) -> None:
    source, calls = Masks(MASKS), []
    first = presence_of(source, "train", progress=lambda *call: calls.append(call))
    assert first == Presence(tuple(source.names("train")), CLASSES)
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert presence_of(source, "train") == first
    assert source.reads == 4
    presence_of(source, "val")
    presence_of(Masks(MASKS[:2], key="other"), "train")
    assert source.reads == 8
    assert len(list(cache_path("presence").iterdir())) == 3


def test_a_damaged_cache_is_computed_again(tmp_path: Path) -> None:
    source = Masks(MASKS)
    first = presence_of(source, "train")
    (cached,) = cache_path("presence").iterdir()
    for damage in ("", "image 0\t0\n", "image 0\t77\n"):
        cached.write_text(damage)
        assert presence_of(source, "train") == first
    assert source.reads == 16
    assert presence_of(source, "train") == first
    assert source.reads == 16


def test_an_unwritable_cache_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("INCSEG_CACHE", str(tmp_path / "file" / "sub"))
    assert presence_of(Masks(MASKS), "train").classes == CLASSES


def test_cache_folder_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INCSEG_CACHE", str(tmp_path))
    assert cache_path("presence") == tmp_path / "presence"
    presence_of(Masks(MASKS), "train")
    assert len(list((tmp_path / "presence").iterdir())) == 1
    monkeypatch.delenv("INCSEG_CACHE")
    assert cache_path("presence").parts[-1] == "presence"
    assert "incseg" in cache_path("presence").parts


def test_a_source_that_knows_its_classes_is_not_decoded(tmp_path: Path) -> None:
    source = KnownMasks(MASKS)
    assert presence_of(source, "train").classes == ((3,),) * 4
    assert source.reads == 0
    assert not cache_path("presence").exists()


def test_a_wrong_mask_stops_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Masks, split: Split, index: int) -> np.ndarray:
        raise UserError(f"mask {index} is bad")

    monkeypatch.setattr(Masks, "mask", broken)
    with pytest.raises(UserError, match="mask 0 is bad"):
        presence_of(Masks(MASKS), "train")
    assert not cache_path("presence").exists()


def test_stopping_does_not_wait_for_the_rest() -> None:
    begun = []

    def read(index: int) -> None:
        begun.append(index)
        time.sleep(0.01)

    results = in_threads(read, 3000, None)
    next(results)
    results.close()
    assert len(begun) < 1500


def test_a_given_file_is_brought_into_order_and_checked(tmp_path: Path) -> None:
    source, file = Masks(MASKS), tmp_path / "p.txt"
    write_presence(file, Presence(tuple(reversed(source.names("train"))), tuple(reversed(CLASSES))))
    presence = presence_of(source, "train", file=file)
    assert presence == Presence(tuple(source.names("train")), CLASSES)
    assert source.reads == 0
    write_presence(file, Presence(("image 0", "image 2"), ((1,), (2,))))
    with pytest.raises(FileError, match=r"has no line for 2 \(image 1, image 3\)"):
        presence_of(source, "train", file=file)
    write_presence(file, Presence((*source.names("train"), "stranger"), (*CLASSES, (1,))))
    with pytest.raises(FileError, match=r"images that are not in it: 1 \(stranger\)"):
        presence_of(source, "train", file=file)


@needs_shared
@pytest.mark.parametrize(
    ("name", "num_classes", "images", "without_class"),
    [
        ("voc_train_aug", 20, 10582, 0),
        ("voc_val", 20, 1449, 0),
        ("ade_train", 150, 20210, 14),
        ("ade_val", 150, 2000, 0),
    ],
)
def test_the_field_s_lists(tmp_path: Path, name: str, num_classes: int, images: int, without_class: int) -> None:
    file = SHARED / "presence" / f"{name}.txt"
    presence = read_presence(file, num_classes)
    assert len(presence.names) == images
    assert presence.classes.count(()) == without_class
    assert {i for ids in presence.classes for i in ids} == set(range(1, num_classes + 1))
    write_presence(tmp_path / "again.txt", presence)
    assert (tmp_path / "again.txt").read_text() == file.read_text()


@needs_shared
@pytest.mark.parametrize(("split", "name"), [("train", "voc_train_aug"), ("val", "voc_val")])
def test_real_voc_masks_give_the_field_s_lists(split: Split, name: str) -> None:
    source = VOC(SHARED / "voc224")
    expected = presence_of(source, split, file=SHARED / "presence" / f"{name}.txt")
    every = len(expected.names) // 150
    for index in range(0, len(expected.names), every):
        assert classes_in(source.mask(split, index)) == expected.classes[index]
