"""The meaning of masks: the decision for made-up counts, real files of every kind, and correct datasets that must
pass."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from incseg.cli import main
from incseg.data.check import check, check_meaning, grouped, meaning_of, values_line
from incseg.data.extended import Extended
from incseg.data.files import FileError
from incseg.data.folder import Folder
from incseg.data.presence import PixelCounts, classes_in, histogram, joined, pixel_counts, presence_of
from incseg.data.source import voc_palette
from incseg.data.voc import VOC
from incseg.io import cache_path
from incseg.types import DatasetInfo, Increment

STREET = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
CITY = ("road", "building", "car", "bus", "person")
OBJECTS = tuple("abcdefghijklmnopqrstuvwxyz")


def counts(*images: dict[int, int]) -> PixelCounts:
    """Return counts from the pixels by value of each image."""
    rows = []
    for image in images:
        one = np.zeros(256, dtype=np.int64)
        one[list(image)] = list(image.values())
        rows.append(one)
    return PixelCounts.of_histograms([f"{i}" for i in range(len(images))], rows)


def street(void: int | None, shift: int = 0, images: int = 12) -> PixelCounts:
    """Return scenes in which every pixel is labelled, 0 = sky … 10 = bicyclist before the shift."""
    scenes = []
    for i in range(images):
        scene = {0: 150 + i, 1: 250, 3: 300, 4: 60, 2: 5, 5 + i % 6: 40, 5 + (i + 1) % 6: 30}
        scenes.append({value + shift: pixels for value, pixels in scene.items()} | ({void: 30} if void else {}))
    return counts(*scenes)


def road() -> PixelCounts:
    """Return street scenes numbered from 0, where 0, the road, is in all and the largest area of most."""
    return counts(*({0: 400, 1: 350 if i % 5 < 3 else 450, 2 + i % 3: 50, 255: 60} for i in range(20)))


def objects(ids: range | tuple[int, ...], images: int = 60, background: int = 800) -> PixelCounts:
    """Return photographs of some objects before a background."""
    return counts(*({0: background, ids[i % len(ids)]: 90, ids[(i * 7 + 1) % len(ids)]: 60} for i in range(images)))


# --- the decision ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pixels", "classes", "message"),
    [
        (street(255), STREET, r"hold 0 to 10 and no mask holds 11 \('bicyclist'\).*numbered from 0.*add 1 to every"),
        (street(None), STREET, r"no mask holds 11 \('bicyclist'\).*write 'background' as a new first line"),
        (street(11), STREET, r"numbered from 0, with 11 for void.*write 255 instead of 11 and add 1"),
        (road(), CITY, r"0 is in 100 % .* largest area of 60 %, like 'road' rather than a background; add 1"),
        (street(11), (*STREET, "void"), r"no mask holds 12 \('void'\).*write 255 for 'void', delete its line"),
        (street(None), ("Unlabelled", *STREET[1:]), r"begins with 'Unlabelled'.*write 'background' instead"),
        (objects(range(1, 27)), ("_background_", *OBJECTS), r"begins with '_background_', which is number 1 here"),
        (objects((4, 6)), ("__background__", *OBJECTS), r"no mask holds 27 \('z'\)"),
        (counts({0: 90, 255: 10}), ("crack",), r"only 0 and 255.*if 255 is 'crack' .*write 1 instead of 255"),
        (counts({0: 90, 255: 10}), ("box", "tri"), r"only 0 and 255.*write its number, 1 to 2, instead of 255"),
        (counts({255: 100}), ("box", "tri"), r"hold only 255, and 255 means 'not annotated'"),
        (counts({0: 100}), ("box",), r"every mask is 0, .*write 1 \('box'\) where"),
    ],
)
def test_masks_that_mean_something_else(pixels: PixelCounts, classes: tuple[str, ...], message: str) -> None:
    faults, notes = meaning_of(pixels, classes)
    assert len(faults) == 1
    assert re.search(message, faults[0]), faults[0]
    assert "\n" not in faults[0]
    assert notes == []


@pytest.mark.parametrize(
    ("pixels", "classes"),
    [
        (objects(range(1, 27)), OBJECTS),
        (objects((4, 6)), OBJECTS),  # only some classes are annotated: the usual way to extend a model
        (objects((1, 2)), OBJECTS),
        (objects((25,)), OBJECTS),
        (objects((1,)), ("crack",)),
        (objects((26,)), OBJECTS),
        (street(255, shift=1), STREET),  # labelled all over, from 1
        (street(None, shift=1), STREET),
        (objects(range(1, 27), background=0), OBJECTS),
        (objects(range(1, 21), background=10), OBJECTS[:20]),  # close-ups
    ],
)
def test_sound_masks_pass(pixels: PixelCounts, classes: tuple[str, ...]) -> None:
    assert meaning_of(pixels, classes) == ([], [])


def test_a_last_class_without_photographs_is_a_note() -> None:
    faults, [note] = meaning_of(objects(range(1, 26)), OBJECTS)
    assert faults == []
    assert "no mask holds 26 ('z'); look at the contact sheet" in note
    faults, [note] = meaning_of(road(), ("car", *CITY[1:]))
    assert faults == []
    assert "if 0 is 'car', add 1" in note
    faults, [note] = meaning_of(counts(*({0: 90, 1: 20, 2 + i % 2: 20} for i in range(9))), ("road", "b", "c", "d"))
    assert faults == [], "0 is the largest everywhere"
    few = counts(*({0: 1, 1: 50, 2: 50} for _ in range(3)))  # too few photographs to tell
    assert meaning_of(few, ("a", "b", "c"))[0] == []
    assert "write 255 for 'void', delete its line" in meaning_of(few, ("a", "b", "void"))[0][0]
    two = counts(*({i % 2: 100} for i in range(9)))  # too few classes
    faults, notes = meaning_of(two, ("cat", "dog"))
    assert faults == []
    assert "if 0 is 'cat', add 1" in notes[0]


def test_a_small_last_class_in_every_photograph_is_a_note() -> None:
    pixels = counts(*({0: 800, 1 + i % 2: 90, 3: 20} for i in range(20)))
    faults, [note] = meaning_of(pixels, ("cat", "dog", "label"))
    assert faults == []
    assert "3 ('label') is in nearly every photograph but never much of it; look at the contact sheet" in note
    named = counts(*({0: 800, 1 + i % 2: 90, 3: 20, 255: 1} for i in range(20)))
    assert meaning_of(named, ("cat", "dog", "label")) == ([], [])


def test_void_as_a_class_is_a_note() -> None:
    faults, [note] = meaning_of(objects((1, 2)), ("cat", "dog", "void"))  # named, but 255 in the masks
    assert faults == []
    assert "no mask holds 3 ('void')" in note
    faults, [note] = meaning_of(objects((1, 2, 3)), ("cat", "dog", "void"))
    assert faults == []
    assert "'void' is class 3 and would be learnt" in note


@pytest.mark.parametrize("pixels", [street(255), street(None), street(11), objects(range(1, 11))])
def test_a_named_background_ends_the_guessing(pixels: PixelCounts) -> None:
    assert meaning_of(pixels, STREET, background_named=True) == ([], [])


def test_few_readable_masks_are_not_judged() -> None:
    blind = PixelCounts.of_histograms("abc", [histogram(np.zeros((2, 2), np.uint8)), None, None])
    assert meaning_of(blind, ("cat",)) == ([], [])


def test_own_void_values_are_named() -> None:
    assert "only 0 and 99, and 99 means" in meaning_of(counts({0: 1, 255: 1}), ("cat",), void=99)[0][0]


@given(
    st.integers(1, 30),
    st.lists(st.dictionaries(st.integers(1, 30), st.integers(1, 99), min_size=1), min_size=1, max_size=20),
    st.integers(0, 99),
)
def test_a_background_behind_all_objects_is_never_a_fault(number: int, images: list[dict[int, int]], void: int) -> None:
    scenes = [{min(i, number): n for i, n in image.items()} for image in images]
    pixels = counts(*({0: 100} | scene | ({255: void} if void else {}) for scene in scenes))
    assert meaning_of(pixels, [f"c{i}" for i in range(number)])[0] == []


@given(st.integers(3, 40), st.integers(4, 30), st.booleans())
def test_classes_numbered_from_0_are_a_fault(number: int, images: int, void: bool) -> None:
    """Each image shows a few classes in all its pixels, and the first class is like any other."""
    scenes = [dict.fromkeys({(i * 3 + k) % number for k in range(3)}, 50) for i in range(max(images, number))]
    scenes = [{v: n + 10 * (v > 0) for v, n in scene.items()} | ({255: 9} if void else {}) for scene in scenes]
    faults, _ = meaning_of(counts(*scenes), [f"c{i}" for i in range(number)])
    assert len(faults) == 1
    assert "numbered from 0" in faults[0]
    shifted = counts(*({v + 1 if v < 255 else v: n for v, n in scene.items()} for scene in scenes))
    assert meaning_of(shifted, [f"c{i}" for i in range(number)]) == ([], [])


def test_the_values_in_one_line() -> None:
    assert values_line(DatasetInfo("d", ("cat", "dog"))) == "0 = background, 1 = cat, 2 = dog, 255 = not annotated"
    line = values_line(DatasetInfo("d", OBJECTS, has_background=False), most=3)
    assert line == "0 = unlabelled, not counted, 1 = a, 2 = b, …, 26 = z, 255 = not annotated"


# --- pixel counts ----------------------------------------------------------------------------------------


def test_pixel_counts() -> None:
    pixels = counts({0: 5, 2: 3}, {1: 4, 255: 4}, {2: 1})
    assert pixels.rows.dtype == np.uint32
    assert pixels.sizes.tolist() == [8, 8, 1]
    assert pixels.totals[[0, 1, 2, 255]].tolist() == [5, 4, 4, 4]
    assert pixels.images[[0, 1, 2, 3]].tolist() == [1, 1, 2, 0]
    assert pixels.of(2).tolist() == [3, 0, 1]
    assert pixels.histogram(1)[[0, 1, 255]].tolist() == [0, 4, 4]
    assert pixels.presence.classes == ((2,), (1,), (2,))
    assert pixels.complete
    both = joined([pixels, pixels])
    assert both.of(2).tolist() == [3, 0, 1] * 2
    table = np.arange(256, dtype=np.uint8)
    table[[1, 2]] = 7
    assert pixels.renamed(table).of(7).tolist() == [3, 4, 1]
    blind = PixelCounts.of_histograms("ab", [None, pixels.histogram(0)])
    assert blind.sizes.tolist() == [0, 8]
    assert not blind.complete
    assert blind.renamed(table).sizes.tolist() == [0, 8]
    assert joined([]).sizes.tolist() == []


def make_folder(root: Path, masks: list[np.ndarray], classes: str) -> Path:
    for kind in ("images", "masks"):
        (root / kind).mkdir(parents=True)
    for number, mask in enumerate(masks):
        Image.new("RGB", mask.shape[1::-1], (90, 10 * number % 255, 60)).save(root / "images" / f"{number:02}.png")
        Image.fromarray(mask).save(root / "masks" / f"{number:02}.png")
    (root / "classes.txt").write_text(classes)
    return root


def street_masks(void: int, images: int = 12) -> list[np.ndarray]:
    masks = []
    for i in range(images):
        mask = np.full((20, 30), 1, dtype=np.uint8)
        mask[:4], mask[12:] = 0, 3
        for at, value in enumerate((2, 4, 5 + i % 6, 5 + (i + 1) % 6)):
            mask[6:9, 6 * at : 6 * at + 4] = value
        mask[10, :8] = void
        masks.append(mask)
    return masks


def object_masks(ids: tuple[int, ...], images: int = 12) -> list[np.ndarray]:
    masks = []
    for i in range(images):
        mask = np.zeros((20, 30), dtype=np.uint8)
        mask[5:12, 8:20] = ids[i % len(ids)]
        masks.append(mask)
    return masks


def test_counts_are_cached_and_presence_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_folder(tmp_path / "d", object_masks((1, 2)), "cat\ndog\n")
    calls: list[tuple[int, int]] = []
    first = check_meaning(Folder(root), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(i, 12) for i in range(1, 13)]
    masks = [Folder(root).mask("train", index) for index in range(len(Folder(root).names("train")))]
    monkeypatch.setattr(Folder, "mask", lambda *_: pytest.fail("masks are read once"))
    again = check_meaning(Folder(root))
    for split in ("train", "val"):
        np.testing.assert_array_equal(again.pixels[split].rows, first.pixels[split].rows)
    assert presence_of(Folder(root), "train") == first.pixels["train"].presence
    assert first.pixels["train"].presence.classes == tuple(classes_in(mask) for mask in masks)


@pytest.mark.parametrize("content", [b"", b"junk", b"\x93NUMPY\x01\x00v"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, content: bytes) -> None:
    root = make_folder(tmp_path / "d", object_masks((1, 2)), "cat\ndog\n")
    expected = pixel_counts(Folder(root))[0]["train"]
    [file] = cache_path("pixels").glob("*-train-*")
    file.write_bytes(content)
    np.testing.assert_array_equal(pixel_counts(Folder(root))[0]["train"].rows, expected.rows)
    assert file.read_bytes() != content
    np.save(file, expected.rows[2:])  # an image is missing
    np.testing.assert_array_equal(pixel_counts(Folder(root))[0]["train"].rows, expected.rows)


def test_an_extended_dataset_is_judged_by_its_own_masks(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "d", street_masks(255), "\n".join(STREET))
    known = [Increment(("cat", "car"), (1, 2))]
    extended = Extended(Folder(root), known, "sky,road", voc_palette()[:3])
    meaning = check_meaning(extended)
    assert ["numbered from 0" in fault for fault in meaning.faults] == [True]
    for split in ("train", "val"):
        found = meaning.pixels[split]
        for index in range(len(found.names)):
            np.testing.assert_array_equal(found.histogram(index), histogram(extended.mask(split, index)))

    sound = Extended(
        Folder(make_folder(tmp_path / "e", object_masks((4, 6)), "\n".join(OBJECTS))), known, "d,f", voc_palette()[:3]
    )
    assert check_meaning(sound).faults == check_meaning(sound).notes == []
    presence = check_meaning(sound).pixels["train"].presence
    assert presence_of(sound, "train") == presence
    assert {i for ids in presence.classes for i in ids} == {3, 4}


# --- files -----------------------------------------------------------------------------------------------


def test_files_of_every_kind(tmp_path: Path) -> None:
    for name, masks, classes, message in (
        ("from0", street_masks(255), "\n".join(STREET), "numbered from 0"),
        ("void11", street_masks(11), "\n".join(STREET), "numbered from 0, with 11 for void"),
        ("bw", object_masks((255,)), "box\ntri\n", "only 0 and 255"),
        ("bw1", object_masks((255,)), "box\n", "write 1 instead of 255"),
    ):
        source = Folder(make_folder(tmp_path / name, masks, classes))
        assert [message in fault for fault in check_meaning(source).faults] == [True]
        report = check(source)
        assert [message in fault for fault in report.meaning] == [True]
        assert not report.ok
    root = make_folder(tmp_path / "named", street_masks(255), "\n".join(("background", *STREET)))
    assert check(Folder(root)).ok


def test_colour_masks_are_one_fault(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "d", object_masks((1, 2)), "box\ntri\n")
    colours = np.array([[0, 0, 0], [255, 0, 0], [0, 128, 255]], dtype=np.uint8)
    for file in (root / "masks").iterdir():
        Image.fromarray(colours[np.asarray(Image.open(file))]).save(file)
    [fault] = check_meaning(Folder(root)).faults
    assert re.match(r"12 masks hold colours instead of class numbers, #000000, #(ff0000|0080ff), #", fault)
    assert re.search(
        r"\(masks/\d+\.png, masks/\d+\.png, masks/\d+\.png, …\); save each mask as a single-channel", fault
    )
    assert len(check(Folder(root)).faults) == 12
    assert not any(cache_path("pixels").glob("*"))


def test_values_beyond_the_classes_are_one_fault(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "d", object_masks(tuple(range(1, 151, 10)), 15), "a\nb\nc\n")
    [fault] = check_meaning(Folder(root)).faults
    values = "11, 21, 31, 41, 51, 61, 71, 81, … 141"
    assert fault.startswith(f"14 masks hold {values}, but classes are 0 to 3 and void is 255 (masks/")
    assert fault.endswith("add the class to the list of names, or set these pixels to 255")


def test_faults_are_grouped_by_kind() -> None:
    missing = [FileError(f"d/masks/{i}.png", "no such file", "restore it", "missing") for i in range(2)]
    broken = [FileError(f"d/images/{i}.png", f"cannot be read ({i})", "copy it", "unreadable") for i in range(4)]
    sizes = [FileError(f"folder val '{i}'", "the image is …", "export both", "sizes") for i in range(2)]
    other = [FileError("x", "odd", ""), FileError("y", "odd", "")]
    assert grouped([missing[0], broken[0]]) == ["d/masks/0.png: no such file; restore it", str(broken[0])]
    assert grouped([*missing, *broken, *sizes, *other]) == [
        "2 files are missing (masks/0.png, masks/1.png); restore them, or take their names off the list",
        "4 files cannot be read as images (images/0.png, images/1.png, images/2.png, …); export or copy them again",
        "2 photographs differ in size from their masks (folder val '0', folder val '1'); export both at one size",
        "x: odd",
        "y: odd",
    ]


def test_the_lines_of_the_tutorial_put_masks_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parents[1] / "docs" / "tutorial.md").read_text(encoding="utf-8")
    script = page[page.index("    from pathlib import Path") :].partition("\n\nIf ")[0]
    lines = [line[4:] for line in script.splitlines() if line.startswith("    ")]
    kept = [line for line in lines if not line.startswith("    mask[")]
    [binary] = [line for line in lines if line.startswith("    mask[mask == 255] = 1 ")]
    void, up = (line for line in lines if line.startswith(("    mask[mask == 11]", "    mask[mask < 255]")))
    for masks, classes, wanted in (
        (object_masks((255,)), "crack\n", [binary]),
        (street_masks(255), "\n".join(STREET), [up]),
        (street_masks(11), "\n".join(STREET), [void, up]),
    ):
        root = make_folder(tmp_path / "photos", masks, classes)
        assert check_meaning(Folder(root)).faults
        exec("\n".join([*kept[:-1], *wanted, kept[-1]]), {})
        assert check_meaning(Folder(root)).faults == check_meaning(Folder(root)).notes == []
        root.rename(tmp_path / f"done {len(classes)} {len(wanted)}")


# --- sound datasets --------------------------------------------------------------------------------------


def test_real_photographs_pass(shared: Path, tmp_path: Path) -> None:
    source = Folder(shared / "ccp")
    meaning = check_meaning(source)
    assert meaning.faults == meaning.notes == []
    pixels = joined([*meaning.pixels.values()])
    only = np.zeros(256, dtype=np.uint8)
    only[[4, 6, 255]] = 4, 6, 255
    assert meaning_of(pixels.renamed(only), source.info.classes) == ([], [])
    without_last = np.arange(256, dtype=np.uint8)
    without_last[26] = 0
    faults, notes = meaning_of(pixels.renamed(without_last), source.info.classes)
    assert faults == []
    assert len(notes) == 1


def test_real_voc_passes(shared: Path) -> None:
    source = VOC(shared / "voc224")
    names = source.names("val")
    pixels = PixelCounts.of_histograms(names, (histogram(source.mask("val", index)) for index in range(len(names))))
    assert meaning_of(pixels, source.info.classes) == ([], [])
    assert meaning_of(pixels, (*source.info.classes, "one more"))[0] == []


# --- the command -----------------------------------------------------------------------------------------


def test_the_command_refuses_and_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    make_folder(tmp_path / "street", street_masks(255), "\n".join(STREET))
    assert main(["data", "check", "--data", "folder", "--root", "street"]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"│ +1 │ sky +│ +\d+ │ +\d+ │ +3\d\.\d % │", shown)
    assert "the masks are read as: 0 = background, 1 = sky, 2 = building" in shown
    assert "255, not annotated, are 1.3 % of all pixels" in shown
    assert "contact sheet: street-sheet.png" in shown
    assert "no mask holds 11 ('bicyclist'), so they look numbered from 0" in shown
    assert shown.rstrip().endswith("1 faults")
    assert Path("street-sheet.png").is_file()


def test_the_command_groups_and_lists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "d", object_masks((1, 9)), "box\ntri\n")
    argv = ["data", "check", "--data", "folder", "--root", "d", "--sheet", "none"]
    assert main(argv) == 1
    shown = capsys.readouterr().out
    assert "6 masks hold 9, but classes are 0 to 2" in shown
    assert shown.rstrip().endswith("--all lists every file\n1 faults")
    assert main([*argv, "--all"]) == 1
    shown = capsys.readouterr().out
    assert len(re.findall(r"^d/masks/\d+\.png: the mask holds 9", shown, re.M)) == 6
    assert shown.rstrip().endswith("6 faults")
    assert not list(tmp_path.glob("*.png"))
