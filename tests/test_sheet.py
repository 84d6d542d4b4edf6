"""The contact sheet: the choice of photographs, broken ones, and the files that it may replace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_meaning import OBJECTS, make_folder, object_masks

from incseg.cli import main
from incseg.data import sheet as sheets
from incseg.data.extended import Extended
from incseg.data.folder import Folder
from incseg.data.presence import PixelCounts, Presence, pixel_counts, presence_of
from incseg.data.shapes import Shapes
from incseg.data.sheet import contact_sheet, save_sheet
from incseg.data.source import SPLITS, Source, Split, voc_palette
from incseg.types import Increment, UserError


def chosen(shown: dict[Split, Presence | PixelCounts], most: int = 12) -> list[tuple[Split, int]]:
    found, choice = [], sheets._choice(shown, most)
    try:
        found.append(next(choice))
        while True:
            found.append(choice.send(True))
    except StopIteration:
        return found


def pixels_of(source: Source) -> dict[Split, PixelCounts]:
    return pixel_counts(source)[0]


def test_every_class_is_on_the_sheet_where_possible() -> None:
    classes = tuple(((1,), (1, 2), (1, 2, 3), (i % 20 + 4,))[i % 4] for i in range(400))
    presence = Presence(tuple(f"{i}" for i in range(400)), (*classes[:-1], (1, 30, 31)))
    found = chosen({"train": presence}, most=12)
    assert len(found) == len(set(found)) == 12
    shown = {i for _, index in found for i in presence.classes[index]}
    assert shown >= {1, 2, 3, 30, 31}
    assert len(shown) == len({i for ids in classes for i in ids} | {30, 31})
    assert chosen({"train": presence}) == found


def test_the_rarest_come_first_where_there_are_too_many() -> None:
    presence = Presence(tuple(f"{i}" for i in range(100)), tuple((i // 4 + 1,) for i in range(97)) + ((90,),) * 3)
    assert [index for _, index in chosen({"val": presence}, most=1)] == [96]
    assert chosen({"val": Presence((), ())}) == []


def test_photographs_that_show_a_class_well_are_preferred() -> None:
    masks = [np.zeros((40, 40), dtype=np.uint8) for _ in range(3)]
    masks[0][0, 0], masks[1][5:20, 5:20], masks[2][0, :2] = 1, 1, 1
    pixels = PixelCounts.of_histograms("abc", [np.bincount(m.ravel(), minlength=256) for m in masks])
    assert chosen({"train": pixels}, most=1) == [("train", 1)]


def test_colours_are_those_of_the_masks(tmp_path: Path) -> None:
    mask = np.zeros((40, 40), dtype=np.uint8)
    mask[:, 20:] = 2
    source = Folder(make_folder(tmp_path / "d", [mask] * 2, "cat\ndog\n"))
    cell = sheets._cell(source, "train", 0)
    assert cell is not None
    assert cell.labels == [2]
    drawn = np.asarray(cell.picture)
    assert drawn.shape == (320, 320, 3)
    photograph = np.asarray(source.image("train", 0))[0, 0].astype(float)
    mixed = photograph * (1 - sheets._OPACITY) + voc_palette()[2] * sheets._OPACITY
    np.testing.assert_array_equal(drawn[100, 80], photograph)
    np.testing.assert_allclose(drawn[100, 240], mixed, atol=1)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_turned_photographs_fit_their_masks(tmp_path: Path, kind: str) -> None:
    root = make_folder(tmp_path / "d", [np.ones((600, 400), dtype=np.uint8)] * 2, "cat\n")
    for file in (root / "images").iterdir():
        image = Image.new("RGB", (600, 400), "red")
        exif = image.getexif()
        exif[0x0112] = 6
        file.unlink()
        image.save(file.with_suffix(f".{kind.lower()}"), format=kind, exif=exif)
    source = Folder(root)
    preview, size = source.preview("train", 0, 100)
    assert size == source.image("train", 0).size == (400, 600)
    assert preview.size == (67, 100)
    cell = sheets._cell(source, "train", 0)
    assert cell is not None
    assert cell.picture.size == (213, 320)


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1), (30, 40), (319, 321), (700, 1000), (2000, 30)])
def test_cells_are_bounded(tmp_path: Path, size: tuple[int, int]) -> None:
    source = Folder(make_folder(tmp_path / "d", [np.ones(size, dtype=np.uint8)] * 2, "cat\n"))
    cell = sheets._cell(source, "train", 0)
    assert cell is not None
    assert 24 <= min(cell.picture.size) <= max(cell.picture.size) <= 320
    assert max(cell.picture.size) > 160


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "d", object_masks((1, 2), 8), "cat\ndog\n")
    pixels = pixels_of(Folder(root))
    names = Folder(root).names("train")
    (root / "images" / f"{names[0]}.png").write_bytes(b"broken")
    Image.new("RGB", (3, 3)).save(root / "images" / f"{names[1]}.png")
    (root / "masks" / f"{names[2]}.png").unlink()
    source = Folder(root)
    assert [sheets._cell(source, "train", index) is None for index in range(4)] == [True, True, True, False]
    assert contact_sheet(source, pixels).width > 500
    for file in (root / "images").iterdir():
        file.write_bytes(b"broken")
    assert contact_sheet(source, pixels).size[0] < 500


def test_any_names_and_numbers_of_classes(tmp_path: Path) -> None:
    names = ["x" * 5000, "каска", "安全帽", "خوذة", "😀", "a\tb", *(f"class number {i}" for i in range(7, 151))]
    masks = [np.arange(25 * i, 25 * i + 400, dtype=np.uint16).reshape(20, 20) % 151 for i in range(6)]
    source = Folder(make_folder(tmp_path / "d", [m.astype(np.uint8) for m in masks], "\n".join(names)))
    assert contact_sheet(source, pixels_of(source), title="any").width < 1500
    only = Folder(make_folder(tmp_path / "one", object_masks((1,), 1), "cat\n"))
    assert contact_sheet(only, pixels_of(only)).width < 600


def test_every_kind_of_source_by_presence_alone(tmp_path: Path) -> None:
    shapes = Shapes(train_size=6, val_size=2, image_size=48)
    presence = {split: presence_of(shapes, split) for split in SPLITS}
    first = contact_sheet(shapes, presence, most=4)
    assert first.tobytes() == contact_sheet(shapes, presence, most=4).tobytes()
    folder = Folder(make_folder(tmp_path / "d", object_masks((4, 6)), "\n".join(OBJECTS)))
    extended = Extended(folder, [Increment(("cat",), (1,))], "d,f", voc_palette()[:2])
    sheet = contact_sheet(extended, {"train": presence_of(extended, "train")})
    assert sheet.width > 900
    assert sheets._own_ids(extended) == list(range(2, 28)), "without what only the model knows"


def test_only_our_own_file_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "d", object_masks((1, 2)), "cat\ndog\n")
    argv = ["data", "check", "--data", "folder", "--root", "d"]
    assert main(argv) == main(argv) == 0
    ours = Path("d-sheet.png").read_bytes()
    with Image.open("d-sheet.png") as sheet:
        assert sheet.info["Software"] == "incseg contact sheet"
    for content in (b"a text", _png(tmp_path / "p.png")):
        Path("d-sheet.png").write_bytes(content)
        capsys.readouterr()
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert "error: 'd-sheet.png' exists and was not written as a contact sheet; " in error
        assert "--sheet FILE" in error
        assert error.count("\n") == 1
        assert Path("d-sheet.png").read_bytes() == content
        with pytest.raises(UserError, match="was not written as a contact sheet"):
            save_sheet(Image.new("RGB", (3, 3)), Path("d-sheet.png"))
    assert main([*argv, "--sheet", "new/other.png"]) == 0
    assert Path("new/other.png").read_bytes() == ours
    assert "contact sheet: new/other.png" in capsys.readouterr().out
    assert main([*argv, "--sheet", "d"]) == 2
    assert "'d' is a folder" in capsys.readouterr().err
    assert main([*argv, "--sheet", "none"]) == 0
    assert "contact sheet" not in capsys.readouterr().out


def _png(path: Path) -> bytes:
    Image.new("RGB", (4, 4)).save(path)
    return path.read_bytes()


def test_real_photographs(shared: Path) -> None:
    source = Folder(shared / "ccp")
    pixels = pixels_of(source)
    shown = {i for split, index in chosen(pixels) for i in pixels[split].presence.classes[index]}
    assert shown == set(range(1, 27))
