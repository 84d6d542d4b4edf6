"""The file-based sources on small datasets written here, all their errors, and `check`."""

from __future__ import annotations

import pickle
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from incseg.data.ade20k import ADE20K_INFO, ADE20k
from incseg.data.check import check
from incseg.data.files import FileError, as_rgb, list_file, read_image, read_mask
from incseg.data.folder import Folder, export, hash_split, read_classes
from incseg.data.source import Source, voc_palette
from incseg.data.voc import VOC, VOC_INFO
from incseg.io import cache_path
from incseg.types import UserError

REAL_VOC = Path(__file__).resolve().parents[2] / "shared" / "data" / "voc224"
MASK = np.array([[0, 1, 2], [3, 255, 0]], dtype=np.uint8)


def write_image(path: Path, size: tuple[int, int] = (3, 2), colour: str = "red") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def write_mask(path: Path, mask: np.ndarray = MASK) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(mask)
    image.putpalette(voc_palette().tobytes())
    image.save(path)


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def grey_png(bits: int, row: bytes, width: int) -> bytes:
    """Return a one-row grey PNG of any bit depth, which Pillow cannot write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, 1, bits, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")
    )


# --- reading ---------------------------------------------------------------------------------------------


def test_palette_masks_give_indices(tmp_path: Path) -> None:
    write_mask(tmp_path / "m.png")
    mask = read_mask(tmp_path / "m.png", 3)
    assert mask.dtype == np.uint8
    np.testing.assert_array_equal(mask, MASK)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_single_channel_masks_of_any_depth(tmp_path: Path, dtype: type) -> None:
    Image.fromarray(MASK.astype(dtype)).save(tmp_path / "m.tif")
    mask = read_mask(tmp_path / "m.tif", 3)
    assert mask.dtype == np.uint8
    np.testing.assert_array_equal(mask, MASK)


@pytest.mark.parametrize(("bits", "row"), [(1, 0b01000000), (2, 0b00011000), (4, 0x01)])
def test_grey_masks_below_eight_bits_keep_their_stored_values(tmp_path: Path, bits: int, row: int) -> None:
    (tmp_path / "m.png").write_bytes(grey_png(bits, bytes([row]), width=2))
    assert read_mask(tmp_path / "m.png", 3).tolist() == [[0, 1]]


def test_own_void_value_becomes_255(tmp_path: Path) -> None:
    write_mask(tmp_path / "m.png", np.array([[0, 3, 99]], dtype=np.uint8))
    assert read_mask(tmp_path / "m.png", 3, void=99).tolist() == [[0, 3, 255]]
    with pytest.raises(FileError, match=r"holds 99, but classes are 0 to 3 and void is 255"):
        read_mask(tmp_path / "m.png", 3)


@pytest.mark.parametrize("value", [4, 254])
def test_a_label_out_of_range_is_named(tmp_path: Path, value: int) -> None:
    write_mask(tmp_path / "m.png", np.array([[0, value, 255]], dtype=np.uint8))
    with pytest.raises(FileError, match=rf"m\.png: the mask holds {value}, .* 0 to 3 .*; add the class"):
        read_mask(tmp_path / "m.png", 3)


def test_wide_masks_are_not_cut_to_bytes(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 257]], dtype=np.uint16)).save(tmp_path / "m.png")
    with pytest.raises(FileError, match="holds 257"):
        read_mask(tmp_path / "m.png", 3)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA"])
def test_colour_masks_are_refused(tmp_path: Path, mode: str) -> None:
    Image.new(mode, (3, 2)).save(tmp_path / "m.png")
    with pytest.raises(FileError, match=rf"m\.png: .*mode {mode}.*single-channel or palette PNG"):
        read_mask(tmp_path / "m.png", 3)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"gone\.png: no such file; restore it"):
        read_mask(tmp_path / "gone.png", 3)
    (tmp_path / "text.jpg").write_text("no image")
    with pytest.raises(FileError, match=r"text\.jpg: cannot be read as an image"):
        read_image(tmp_path / "text.jpg")
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "cut.jpg")
    whole = (tmp_path / "cut.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match=r"cut\.jpg: cannot be read .*truncated"):
        read_image(tmp_path / "cut.jpg")


def test_errors_are_one_line_and_survive_processes(tmp_path: Path) -> None:
    error = FileError(tmp_path / "m.png", "is bad", "mend it")
    assert str(error) == f"{tmp_path / 'm.png'}: is bad; mend it"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.fault) == (str(error), "is bad")


def test_images_of_every_mode_become_rgb(tmp_path: Path) -> None:
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "I;16"):
        image = as_rgb(Image.new(mode, (3, 2)))
        assert (image.mode, image.size) == ("RGB", (3, 2))
    assert as_rgb(Image.fromarray(np.array([[0, 0x8012]], dtype=np.uint16))).getpixel((1, 0)) == (128,) * 3
    with pytest.raises(UserError, match="8 bits per channel"):
        as_rgb(Image.new("F", (3, 2)))
    palette = Image.new("P", (3, 2))
    palette.putpalette([9, 8, 7] * 256)
    palette.save(tmp_path / "p.png", transparency=bytes([0, 128]))
    assert read_image(tmp_path / "p.png").getpixel((0, 0)) == (9, 8, 7)


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90°
    Image.new("RGB", (30, 20)).save(tmp_path / "i.jpg", exif=exif)
    assert read_image(tmp_path / "i.jpg").size == (20, 30)


def test_list_file(tmp_path: Path) -> None:
    write_text(tmp_path / "l.txt", "\ufeffa\r\n\n  b c \nd\n")
    assert list_file(tmp_path / "l.txt") == ["a", "b c", "d"]
    write_text(tmp_path / "l.txt", "a\nb\na\n")
    with pytest.raises(FileError, match="'a' is listed twice"):
        list_file(tmp_path / "l.txt")
    with pytest.raises(FileError, match="no such file"):
        list_file(tmp_path / "none.txt")
    (tmp_path / "l.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(FileError, match="not UTF-8"):
        list_file(tmp_path / "l.txt")


# --- VOC -------------------------------------------------------------------------------------------------


def make_voc(root: Path, masks: str = "SegmentationClassAug") -> Path:
    voc = root / "VOCdevkit" / "VOC2012"
    for name in ("a", "b", "c"):
        write_image(voc / "JPEGImages" / f"{name}.jpg")
        write_mask(voc / masks / f"{name}.png")
    write_text(voc / "ImageSets/Segmentation/train.txt", "a\n")
    write_text(voc / "ImageSets/Segmentation/val.txt", "c\n")
    return voc


def test_voc_finds_its_folder_from_every_level(tmp_path: Path) -> None:
    voc = make_voc(tmp_path)
    write_text(voc / "ImageSets/Segmentation/train_aug.txt", "a\nb\n")
    for root in (tmp_path, tmp_path / "VOCdevkit", voc, str(voc)):
        source = VOC(root)
        assert list(source.names("train")) == ["a", "b"]
        assert list(source.names("val")) == ["c"]
    image, mask = source.pair("train", 1)
    assert image.size == (3, 2)
    np.testing.assert_array_equal(mask, MASK)
    with pytest.raises(UserError, match="no VOC2012"):
        VOC(tmp_path / "VOCdevkit" / "elsewhere")


@pytest.mark.parametrize("place", ["ImageSets/Segmentation", "ImageSets/SegmentationAug"])
def test_voc_reads_lists_of_paths(tmp_path: Path, place: str) -> None:
    voc = make_voc(tmp_path)
    lines = "".join(f"/JPEGImages/{n}.jpg /SegmentationClassAug/{n}.png\n" for n in "ab")
    write_text(voc / place / "train_aug.txt", lines)
    source = VOC(tmp_path)
    assert list(source.names("train")) == ["a", "b"]
    assert source.mask("train", 0).shape == (2, 3)
    assert ["lists 2 images; published results use 10582" in note for note in source.notes] == [True]


def test_voc_without_augmented_masks_has_a_note(tmp_path: Path) -> None:
    voc = make_voc(tmp_path, masks="SegmentationClass")
    source = VOC(tmp_path)
    assert list(source.names("train")) == ["a"]
    assert len(source.notes) == 1
    assert "official train list of 1 images" in source.notes[0]
    assert source.mask("val", 0).shape == (2, 3)
    write_text(voc / "ImageSets/Segmentation/train_aug.txt", "a\nb\n")
    assert "no SegmentationClassAug" in VOC(tmp_path).notes[0]


def test_voc_takes_val_masks_from_either_folder(tmp_path: Path) -> None:
    voc = make_voc(tmp_path)
    write_text(voc / "ImageSets/Segmentation/train_aug.txt", "a\nb\n")
    (voc / "SegmentationClassAug/c.png").unlink()
    write_mask(voc / "SegmentationClass/c.png", np.full((2, 3), 7, dtype=np.uint8))
    assert VOC(voc).mask("val", 0).tolist() == [[7] * 3] * 2


def test_voc_reports_images_in_both_splits(tmp_path: Path) -> None:
    voc = make_voc(tmp_path)
    write_text(voc / "ImageSets/Segmentation/train_aug.txt", "a\nc\n")
    assert any("1 image both in train and in val" in note for note in VOC(voc).notes)


def test_a_size_mismatch_names_both_sizes(tmp_path: Path) -> None:
    voc = make_voc(tmp_path, masks="SegmentationClass")
    write_image(voc / "JPEGImages/a.jpg", size=(5, 4))
    with pytest.raises(UserError, match="'a': the image is 5×4 but its mask 3×2"):
        VOC(voc).pair("train", 0)


@pytest.mark.skipif(not REAL_VOC.is_dir(), reason="needs ../shared/data/voc224")
def test_real_voc() -> None:
    source = VOC(REAL_VOC)
    assert (len(source.names("train")), len(source.names("val"))) == (10582, 1449)
    assert source.notes == []
    assert len(VOC_INFO.classes) == len(set(VOC_INFO.classes)) == 20
    image, mask = source.pair("val", 0)
    assert image.size == mask.shape[::-1]
    assert source.fingerprint("train") != source.fingerprint("val")


# --- ADE20k ----------------------------------------------------------------------------------------------


def make_ade(root: Path) -> Path:
    ade = root / "ADEChallengeData2016"
    for folder, names in (("training", ("t2", "t1")), ("validation", ("v1",))):
        for name in names:
            write_image(ade / "images" / folder / f"{name}.jpg")
            write_mask(ade / "annotations" / folder / f"{name}.png", np.array([[0, 150, 1]] * 2, dtype=np.uint8))
    return ade


def test_ade_layout(tmp_path: Path) -> None:
    ade = make_ade(tmp_path)
    for root in (tmp_path, ade):
        source = ADE20k(root)
        assert list(source.names("train")) == ["t1", "t2"]
        assert list(source.names("val")) == ["v1"]
        assert source.pair("val", 0)[1].tolist() == [[0, 150, 1]] * 2
    assert not source.info.has_background
    with pytest.raises(UserError, match="no ADEChallengeData2016"):
        ADE20k(ade / "images")
    (ade / "images/validation/v1.jpg").unlink()
    with pytest.raises(UserError, match=r"no \.jpg images in .*validation"):
        ADE20k(ade)


def test_ade_class_names() -> None:
    names = ADE20K_INFO.classes
    assert len(names) == len(set(names)) == 150
    assert all(name and name == name.strip() and "\n" not in name for name in names)
    # Ids of the benchmark, so that a name lost or doubled in the list shows.
    known = {1: "wall", 13: "person", 21: "car", 59: "screen door", 90: "television", 131: "screen", 150: "flag"}
    assert {i: names[i - 1] for i in known} == known


# --- folder ----------------------------------------------------------------------------------------------


def make_folder(root: Path, names: tuple[str, ...] = ("a", "b", "c"), classes: str = "cat\ndog\nbird\n") -> Path:
    for name in names:
        write_image(root / "images" / f"{name}.png")
        write_mask(root / "masks" / f"{name}.png")
    write_text(root / "classes.txt", classes)
    return root


def test_folder_with_lists(tmp_path: Path) -> None:
    root = make_folder(tmp_path, ("a", "b", "bär 1", "x.y"))
    write_text(root / "train.txt", "x.y\na.png\n")
    write_text(root / "val.txt", "bär 1\nb\n")
    source = Folder(root)
    assert list(source.names("train")) == ["x.y", "a"]
    assert list(source.names("val")) == ["bär 1", "b"]
    assert source.info.classes == ("cat", "dog", "bird")
    assert source.notes == []
    np.testing.assert_array_equal(source.pair("val", 0)[1], MASK)


def test_folder_lists_match_names_in_either_unicode_form(tmp_path: Path) -> None:
    root = make_folder(tmp_path, ("ba\u0308r", "b"))  # decomposed, as macOS writes it
    write_text(root / "train.txt", "b\u00e4r\n")
    assert list(Folder(root).names("train")) == ["b\u00e4r"]
    assert Folder(root).pair("train", 0)[0].size == (3, 2)


def test_folder_with_one_list_takes_the_rest(tmp_path: Path) -> None:
    root = make_folder(tmp_path)
    write_text(root / "val.txt", "b\n")
    source = Folder(root)
    assert (list(source.names("train")), list(source.names("val"))) == (["a", "c"], ["b"])
    assert "no train.txt" in source.notes[0]


def test_folder_reads_many_image_formats(tmp_path: Path) -> None:
    suffixes = (".jpg", ".JPEG", ".png", ".bmp", ".tif", ".tiff", ".webp")
    for i, suffix in enumerate(suffixes):
        write_image(tmp_path / "images" / f"{i}{suffix}")
        write_mask(tmp_path / "masks" / f"{i}.png")
    write_text(tmp_path / "images" / ".DS_Store", "")
    write_text(tmp_path / "classes.txt", "cat\ndog\nbird")
    source = Folder(tmp_path)
    assert len(source.names("train")) + len(source.names("val")) == len(suffixes)
    assert check(source).ok


def test_hash_split_is_stable_and_leaves_no_side_empty() -> None:
    names = [f"img{i}" for i in range(1000)]
    train, val = hash_split(names)
    assert 150 < len(val) < 250
    assert sorted(train + val) == sorted(names)
    more_train, more_val = hash_split(reversed([*names, "new1", "new2"]))
    assert set(train) <= set(more_train)
    assert set(val) <= set(more_val)
    for few in range(2, 8):
        for start in range(50):
            train, val = hash_split(f"{start}-{i}" for i in range(few))
            assert train
            assert val
    assert hash_split(["a"]) == (["a"], [])


def test_folder_without_lists_has_a_note_on_its_split(tmp_path: Path) -> None:
    source = Folder(make_folder(tmp_path))
    assert len(source.names("train")) + len(source.names("val")) == 3
    assert "no train.txt or val.txt" in source.notes[0]


def test_class_list(tmp_path: Path) -> None:
    file = tmp_path / "classes.txt"
    write_text(file, "Background\n cat \nDog\n\n\n")
    assert read_classes(file) == ("cat", "Dog")
    for text, message in (
        ("cat\n\ndog\n", "line 2 is blank"),
        ("cat\ndog\ncat\n", "'cat' is listed twice"),
        ("cat\nbackground\n", "not on the first line"),
        ("", "it has 0 classes"),
        ("background\n", "it has 0 classes"),
        ("".join(f"c{i}\n" for i in range(254)), "it has 254 classes"),
    ):
        write_text(file, text)
        with pytest.raises(FileError, match=message):
            read_classes(file)
    write_text(file, "".join(f"c{i}\n" for i in range(253)))
    assert len(read_classes(file)) == 253


def test_folder_errors(tmp_path: Path) -> None:
    root = make_folder(tmp_path, tuple("abcdef"))
    for name in "abcd":
        (root / "masks" / f"{name}.png").rename(root / "masks" / f"{name}_mask.png")
    write_text(root / "train.txt", "a\nb\nc\nd\ne\n")
    source = Folder(root)
    assert any("4 of 5 train images have no mask ('a', 'b', 'c', …); add masks/NAME.png" in n for n in source.notes)
    with pytest.raises(UserError, match=r"masks/a\.png: no such file"):
        source.pair("train", 0)
    assert source.mask("train", 4).shape == (2, 3)
    assert len(check(source).faults) == 4
    write_text(root / "train.txt", "e\n../../secret\n")
    with pytest.raises(UserError, match=r"train\.txt: '\.\./\.\./secret' is a path"):
        Folder(root)
    write_text(root / "train.txt", "e\nzebra\n")
    with pytest.raises(UserError, match=r"1 of 2 names have no image \('zebra'\)"):
        Folder(root)
    write_text(root / "train.txt", "e\ne.png\n")
    with pytest.raises(UserError, match="'e' is listed twice"):
        Folder(root)
    write_text(root / "train.txt", "e\n")
    write_text(root / "val.txt", "f\n")
    assert any("4 masks without an image" in note for note in Folder(root).notes)
    with pytest.raises(UserError, match="void=3 is not free"):
        Folder(root, void=3)
    write_image(root / "images" / "e.jpg")
    with pytest.raises(UserError, match=r"'e\.jpg' and 'e\.png' .* share the name 'e'"):
        Folder(root)


def test_folder_without_images_or_classes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"classes\.txt: no such file"):
        Folder(tmp_path)
    write_text(tmp_path / "names.txt", "cat\n")
    with pytest.raises(UserError, match=r"no folder .*images"):
        Folder(tmp_path, classes_file=tmp_path / "names.txt")
    (tmp_path / "images").mkdir()
    with pytest.raises(UserError, match=r"has no files of type \.jpg"):
        Folder(tmp_path, classes_file=tmp_path / "names.txt")


def test_a_missing_dataset_folder_is_named_with_the_flag_that_helps(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"folder '.*moved' does not exist; .*--root DIR"):
        Folder(tmp_path / "moved")
    write_text(tmp_path / "file", "")
    with pytest.raises(UserError, match="is a file"):
        Folder(tmp_path / "file")


def test_photographs_of_other_formats_are_reported(tmp_path: Path) -> None:
    root = make_folder(tmp_path)
    write_text(root / "images" / "IMG_1.HEIC", "")
    write_text(root / "images" / "Thumbs.db", "")
    notes = [note for note in Folder(root).notes if "left out" in note]
    assert len(notes) == 1
    assert "1 file left out ('IMG_1.HEIC'): convert to JPEG or PNG" in notes[0]


def test_a_dataset_is_not_exported_onto_itself(tmp_path: Path) -> None:
    """The export writes PNGs. Beside photographs of other formats, every name would exist twice."""
    root = make_folder(tmp_path / "mine")
    before = {file: file.read_bytes() for file in sorted(root.rglob("*.png"))}
    (tmp_path / "link").symlink_to(root)
    for out in (root, tmp_path / "link", root / ".." / "mine"):
        with pytest.raises(UserError, match=r"images', and the export would replace it; choose another --out"):
            export(Folder(root), out)
    assert {file: file.read_bytes() for file in sorted(root.rglob("*.png"))} == before
    assert export(Folder(root), tmp_path / "copy") == 3


# --- all of them -----------------------------------------------------------------------------------------


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    root = make_folder(tmp_path)
    write_text(root / "train.txt", "a\n")
    first = Folder(root).fingerprint("train")
    assert Folder(root).fingerprint("train") == first
    write_mask(root / "masks" / "b.png", np.zeros((20, 30), dtype=np.uint8))
    assert Folder(root).fingerprint("train") == first, "a file of another split"
    write_mask(root / "masks" / "a.png", np.zeros((20, 30), dtype=np.uint8))
    second = Folder(root).fingerprint("train")
    (root / "images" / "a.png").unlink()
    write_image(root / "images" / "a.png", size=(300, 200))
    third = Folder(root).fingerprint("train")
    fourth = Folder(root, void=200).fingerprint("train")
    assert len({first, second, third, fourth}) == 4


def test_a_copy_of_a_dataset_has_its_fingerprint(tmp_path: Path) -> None:
    root = make_folder(tmp_path)
    shutil.copytree(root, tmp_path / "copy", copy_function=shutil.copyfile)
    copied = Folder(tmp_path / "copy")
    assert (
        copied.files("train").images[0].stat().st_mtime_ns != Folder(root).files("train").images[0].stat().st_mtime_ns
    )
    assert copied.fingerprint("train") == Folder(root).fingerprint("train")


def test_a_damaged_note_of_the_contents_is_made_again(tmp_path: Path) -> None:
    source = Folder(make_folder(tmp_path))
    first = source.fingerprint("train")
    [note] = cache_path("contents").iterdir()
    note.write_text("half")
    assert source.fingerprint("train") == first
    assert len(note.read_text()) == 64


def test_a_source_can_go_to_another_process(tmp_path: Path) -> None:
    source: Source = pickle.loads(pickle.dumps(Folder(make_folder(tmp_path))))
    assert source.pair("train", 0)[1].shape == (2, 3)


def test_check_lists_every_fault_and_counts(tmp_path: Path) -> None:
    root = make_folder(tmp_path, tuple("abcdef"), classes="cat\ndog\nbird\nfish\n")
    write_text(root / "train.txt", "a\nb\nc\nd\n")
    write_mask(root / "masks" / "b.png", np.full((2, 3), 9, dtype=np.uint8))
    write_image(root / "images" / "b.png", size=(7, 7))
    (root / "images" / "c.png").write_bytes(b"broken")
    Image.new("RGB", (3, 2)).save(root / "masks" / "c.png")
    write_image(root / "images" / "d.png", size=(4, 4))
    write_mask(root / "masks" / "e.png", np.array([[0, 255, 0]] * 2, dtype=np.uint8))
    calls: list[tuple[int, int]] = []
    report = check(Folder(root), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(i, 6) for i in range(1, 7)]
    assert not report.ok
    found = [(Path(fault.file).parent.name, Path(fault.file).name, fault.fault) for fault in report.faults]
    assert [(folder, name) for folder, name, _ in found[:3]] == [
        ("masks", "b.png"),
        ("images", "c.png"),
        ("masks", "c.png"),
    ]
    assert "holds 9" in found[0][2]
    assert "mode RGB" in found[2][2]
    assert str(report.faults[3]) == ("folder train 'd': the image is 4×4 but its mask 3×2; export both at one size")
    assert len(report.faults) == 4
    assert all(fault.remedy for fault in report.faults)
    assert report.counts["train"].images == 4
    assert report.counts["train"].images_per_class == {"cat": 2, "dog": 2, "bird": 2, "fish": 0}
    assert report.counts["val"].images_per_class == {"cat": 1, "dog": 1, "bird": 1, "fish": 0}
    assert report.counts["val"].unlabelled == ["e"]
    assert report.classes_without_image == ["fish"]
