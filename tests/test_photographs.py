"""Every command that reads a user's images, on photographs: large, of odd and different sizes, of many formats.

Other tests use small pictures that fit into one strip of rows. Here the strips of two models differ, as in practice.
"""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np
import pytest
from demo_runs import demo_until_signal
from PIL import Image, ImageOps

import incseg
from incseg.cli import main
from incseg.data.folder import Folder
from incseg.engine.rundir import RunDir
from incseg.inference import load
from incseg.losses.pixelwise import STRIP_ELEMENTS

TRAIN = {"a.jpg": (640, 480), "b.jpg": (481, 641), "c.webp": (723, 541), "panorama.jpg": (1203, 97)}
TRAIN |= {"grey.jpg": (645, 487), "rgba.png": (480, 640)}
TEST = {"turned.jpg": (481, 640), "cmyk.jpg": (641, 481), "deep.png": (655, 489), "tiny.png": (37, 53)}
"""Files and their (width, height) as a viewer shows them."""
ODD_CROP = 161
TINY = (
    "--model.backbone", "tiny", "--model.weights", "null", "--model.width", "8", "--model.output_stride", "16",
    "--train.epochs", "1", "--train.batch_size", "4", "--train.crop", str(ODD_CROP), "--train.lr", "0.01",
    "--eval.batch_size", "4",
)  # fmt: skip
SEEING = ("--method", "evidential", "--method.start_score", "2")
"""A start score of 2 makes the model see classes from the first iteration on."""
SOLVING = ("--method.columns", "64")
"""For own photographs the default method, smaller."""
HERE = ("--train.workers", "0", "--eval.workers", "0", "--threads", "1")
QUICK = ("--train.epochs_later", "1")
FROZEN = ("--model.freeze_backbone", "true", "--train.scale", "null")


# --- photographs -----------------------------------------------------------------------------------------------


def photograph(size: tuple[int, int], num_classes: int, seed: int) -> tuple[Image.Image, Image.Image]:
    """Return a smooth field of colour with an object of each class, and its mask."""
    generator = np.random.default_rng(seed)
    field = Image.fromarray(generator.integers(40, 200, (4, 5, 3), dtype=np.uint8)).resize(
        size, Image.Resampling.BICUBIC
    )
    width, height = size
    mask = np.zeros((height, width), dtype=np.uint8)
    rows, columns = np.ogrid[:height, :width]
    for number in range(1, num_classes + 1):
        x, y = generator.uniform(0.1, 0.9, 2) * (width, height)
        radius_x, radius_y = generator.uniform(0.08, 0.2, 2) * (width, height)
        mask[((columns - x) / radius_x) ** 2 + ((rows - y) / radius_y) ** 2 <= 1] = number
    for number in range(1, num_classes + 1):  # one may be hidden: each has a corner of its own in the top row
        mask[: max(1, height // 20), (number - 1) * width // num_classes : number * width // num_classes] = number
    pixels = np.asarray(field).astype(np.int16) + generator.integers(-8, 9, (height, width, 3))
    colours = np.random.default_rng(7).integers(-90, 90, (num_classes + 1, 3))
    colours[0] = 0
    return Image.fromarray(np.clip(pixels + colours[mask], 0, 255).astype(np.uint8)), Image.fromarray(mask)


def save_photograph(image: Image.Image, file: Path) -> None:
    """Save in the format of the suffix and in the mode in the name."""
    stem = file.stem
    if stem == "turned":  # the camera was held upright: pixels lie on their side and EXIF says so
        orientation = Image.Exif()
        orientation[0x0112] = 6
        image.transpose(Image.Transpose.ROTATE_90).save(file, exif=orientation)
    elif stem == "deep":
        Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257).save(file)
    elif stem == "rgba":
        image.putalpha(200)
        image.save(file)
    else:
        image.convert({"grey": "L", "cmyk": "CMYK"}.get(stem, "RGB")).save(file)


def make_photographs(root: Path, num_classes: int) -> Path:
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True)
    for seed, (name, size) in enumerate({**TRAIN, **TEST}.items()):
        image, mask = photograph(size, num_classes, seed)
        save_photograph(image, root / "images" / name)
        mask.save(root / "masks" / f"{Path(name).stem}.png")
    (root / "classes.txt").write_text("".join(f"{name}\n" for name in class_names(num_classes)))
    for split, names in (("train", TRAIN), ("val", TEST)):
        (root / f"{split}.txt").write_text("".join(f"{Path(name).stem}\n" for name in names))
    return root


def class_names(count: int) -> list[str]:
    return [f"class {number}" for number in range(1, count + 1)]


def shown_size(file: Path) -> tuple[int, int]:
    with Image.open(file) as image:
        return ImageOps.exif_transpose(image).size


# --- what every chain of commands must hold ----------------------------------------------------------------------


def assert_knows(run: Path, classes: list[str]) -> None:
    assert incseg.load(run, device="cpu", threads=1).classes == ("background", *classes)
    assert len(RunDir(run).rows()) == len(RunDir(run).steps_done())
    assert set(RunDir(run).rows()[-1]["iou"]) == {"background", *classes}


def assert_predicted(out: Path, images: Path, count: int) -> None:
    """Assert a mask, an uncertainty map and an overlay for each photograph, at its size as viewers show it."""
    about = json.loads((out / "predictions.json").read_text())
    assert (len(about["images"]), about["skipped"]) == (count, [])
    ids = {one["id"] for one in about["classes"]}
    for one in about["images"]:
        size = shown_size(images / Path(one["file"]).name)
        with Image.open(out / f"{one['name']}_mask.png") as mask:
            assert mask.size == size
            assert set(np.unique(np.asarray(mask))) <= ids
        assert shown_size(out / f"{one['name']}_uncertainty.png") == size
        assert (out / f"{one['name']}_overlay.png").is_file()


def assert_reported(page: Path) -> None:
    """Assert that the pictures of all models are there and none was left out for an error."""
    text = page.read_text(encoding="utf-8")
    for reason in ("are left out:", "Left out:", "No pictures of"):
        assert reason not in text, text[text.index(reason) :][:300]
    assert "Before and after" in text or "Which images are shown" in text
    assert list((page.parent / "figures").glob("*.png"))


def assert_answered(run: Path, photograph: Path, size: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    """Assert that the demo's page answers a photograph with arrays of the right shape."""
    heads = []

    def post(url: str) -> None:
        request = Request(f"{url}predict?model=0&step=1", photograph.read_bytes(), {"Content-Type": "image/jpeg"})
        with build_opener(ProxyHandler({})).open(request, timeout=60) as answer:
            body = answer.read()
        length = int.from_bytes(body[:4], "little")
        heads.append(json.loads(body[4 : 4 + length]))

    code, _ = demo_until_signal([str(run), "--port", "0", "--threads", "1"], signal.SIGINT, capsys, post)
    assert code == 0
    assert heads[0]["image_size"] == list(size)
    assert heads[0]["width"] * size[1] == pytest.approx(heads[0]["height"] * size[0], rel=0.01)


# --- generated photographs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """old: classes of the first model. new: number of classes that each extension adds."""

    old: int
    new: tuple[int, int]
    eval_size: int
    frozen: bool
    recipes: tuple[str, str]
    report: bool = False
    solves: bool = False

    @property
    def classes(self) -> list[str]:
        """The classes in the order of learning: the last of the dataset first, so that model ids differ from dataset
        ids."""
        return class_names(self.old + sum(self.new))[::-1]

    def learnt(self, extensions: int) -> list[str]:
        return self.classes[: self.old + sum(self.new[:extensions])]

    def added(self, extension: int) -> str:
        return ",".join(self.learnt(extension + 1)[len(self.learnt(extension)) :])

    def strips(self, num_classes: int) -> int:
        """Return the height of the strips of rows in which a test image, or a batch of them, is predicted."""
        images, width = (4, self.eval_size) if self.eval_size else (1, 640)
        return STRIP_ELEMENTS // (images * num_classes * width)


CHAINS = [
    Chain(1, (2, 1), 480, frozen=True, recipes=("own-head", "own-head")),
    Chain(6, (1, 2), 0, frozen=False, recipes=("auto", "auto"), report=True),
    Chain(20, (2, 1), 481, frozen=False, recipes=("as-trained", "gentle")),
    Chain(5, (1, 2), 0, frozen=True, recipes=("closed-form", "auto"), report=True, solves=True),
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: f"{chain.old}+{chain.new[0]}+{chain.new[1]}")
def test_from_training_to_the_report(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heights = [chain.strips(len(chain.learnt(extensions))) for extensions in range(3)]
    assert len(set(heights)) == 3, "the strips of the models differ"
    assert heights[1] < 480, "and there are several"
    monkeypatch.chdir(tmp_path)
    photos = make_photographs(tmp_path / "photos", len(chain.classes))
    task = ",".join(chain.learnt(0))
    loader = FROZEN if chain.frozen else ()
    train = ["train", "--data", "folder", "--root", "photos", "--task", task, "--eval.size", str(chain.eval_size)]
    method = SOLVING if chain.solves else SEEING
    assert main([*train, *TINY, *method, *HERE, *loader, "--out", "first"]) == 0
    assert_knows(tmp_path / "first", chain.learnt(0))
    for number, (model, out) in enumerate((("first", "second"), ("second", "third"))):
        arguments = ["extend", model, "--root", "photos", "--classes", chain.added(number), "--out", out, *HERE]
        assert main([*arguments, *QUICK, "--recipe", chain.recipes[number]]) == 0
        assert_knows(tmp_path / out, chain.learnt(number + 1))
    assert main(["eval", "third", "--threads", "1"]) == 0
    solves = load(tmp_path / "third").info["method"]["name"] == "analytic"  # auto may take the closed form
    assert solves or not chain.solves
    option = ("--method.sharpness", "2") if solves else ("--method.balancing", "odds")
    assert main(["eval", "third", *option, "--threads", "1"]) == 0
    assert main(["predict", "third", "photos/images", "--out", "seen", "--threads", "1"]) == 0
    assert_predicted(tmp_path / "seen", photos / "images", len(TRAIN | TEST))
    if chain.report:
        shutil.rmtree(tmp_path / "second")  # an extended run is complete without the model that it began with
        assert main(["report", "third", "--images", "2", "--out", "page", "--threads", "1"]) == 0
        assert_reported(tmp_path / "page" / "index.html")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with photos/, first/ (two classes) and second/ (three)."""
    place = tmp_path_factory.mktemp("made")
    photos = make_photographs(place / "photos", 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INCSEG_CACHE", str(tmp_path_factory.mktemp("cache")))
        train = ["train", "--data", "folder", "--root", str(photos), "--task", "class 1,class 3", "--eval.size", "0"]
        assert main([*train, *TINY, *SEEING, *HERE, "--out", str(place / "first")]) == 0
        extend = ["extend", str(place / "first"), "--root", str(photos), "--classes", "class 2"]
        assert main([*extend, *HERE, *QUICK, "--recipe", "as-trained", "--out", str(place / "second")]) == 0
    return place


def test_the_model_sees_classes(made: Path, tmp_path: Path) -> None:
    """Otherwise the tests here would compare background with background."""
    image = str(made / "photos" / "images" / "a.jpg")
    assert main(["predict", str(made / "second"), image, "--out", str(tmp_path / "seen"), "--threads", "1"]) == 0
    with Image.open(tmp_path / "seen" / "a_mask.png") as mask:
        assert np.asarray(mask).any()


def test_check_and_export_of_photographs(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every format is read, and the exported dataset is the same."""
    monkeypatch.chdir(tmp_path)  # where the contact sheets go
    photos = made / "photos"
    assert main(["data", "check", "--data", "folder", "--root", str(photos)]) == 0
    assert main(["data", "export", "--data", "folder", "--root", str(photos), "--out", str(tmp_path / "copy")]) == 0
    assert main(["data", "check", "--data", "folder", "--root", str(tmp_path / "copy")]) == 0
    before, after = Folder(photos), Folder(tmp_path / "copy")
    for index, size in enumerate(TEST.values()):
        image, mask = after.pair("val", index)
        assert image.size == size == before.image("val", index).size
        np.testing.assert_array_equal(mask, before.mask("val", index))
    protocol = ["protocol", "--data", "folder", "--root", str(photos), "--task", "class 1,class 3/class 2"]
    capsys.readouterr()
    assert main([*protocol, "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [(step["train_images"], step["test_images"]) for step in steps] == [(len(TRAIN), len(TEST))] * 2


def test_the_onnx_file_predicts_the_same_masks(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs pip install 'incseg[onnx]'")
    images, file = made / "photos" / "images", tmp_path / "second.onnx"
    assert main(["export", str(made / "second"), "--out", str(file)]) == 0
    backends = {
        "torch": [str(made / "second")],
        "onnx": [str(made / "second"), "--backend", "onnx"],
        "file": [str(file)],
    }
    masks = {}
    for name, (model, *flags) in backends.items():
        out = tmp_path / name
        assert main(["predict", model, str(images), *flags, "--out", str(out), "--threads", "1"]) == 0
        assert_predicted(out, images, len(TRAIN | TEST))
        masks[name] = np.concatenate([np.array(Image.open(mask)).ravel() for mask in sorted(out.glob("*_mask.png"))])
    for name in ("onnx", "file"):
        assert (masks[name] != masks["torch"]).mean() < 1e-3


@pytest.mark.parametrize(("name", "size"), [("b.jpg", TRAIN["b.jpg"]), ("turned.jpg", TEST["turned.jpg"])])
def test_the_demo_predicts_photographs(
    made: Path, name: str, size: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert_answered(made / "second", made / "photos" / "images" / name, size, capsys)


def test_runs_side_by_side(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(made / name) for name in ("first", "second")]
    assert main(["compare", *runs]) == 0
    assert main(["report", *runs, "--images", "2", "--out", str(tmp_path / "page"), "--threads", "1"]) == 0
    assert_reported(tmp_path / "page" / "index.html")


def test_photographs_that_have_moved(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the remedy, which works; a different number of test images is reported."""
    run, photos = tmp_path / "second", tmp_path / "moved"
    shutil.copytree(made / "second", run)
    shutil.copytree(made / "photos", photos)
    config = RunDir(run).config
    config.write_text(config.read_text().replace(str(made / "photos"), str(tmp_path / "gone")))
    assert main(["eval", str(run), "--threads", "1"]) == 2
    assert "--root DIR" in capsys.readouterr().err
    report = ["report", str(run), "--images", "1", "--threads", "1"]
    assert main([*report, "--out", str(tmp_path / "without")]) == 0
    assert "--root DIR" in capsys.readouterr().err
    assert main(["eval", str(run), "--root", str(photos), "--threads", "1"]) == 0
    assert "warning" not in capsys.readouterr().out
    (photos / "val.txt").write_text("turned\n")
    assert main(["eval", str(run), "--root", str(photos), "--threads", "1"]) == 0
    assert "this test has 1 image" in capsys.readouterr().out


def test_what_is_not_a_photograph_is_skipped_with_a_reason(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    shutil.copy(made / "photos" / "images" / "a.jpg", photos / "good.jpg")
    (photos / "text.jpg").write_text("not an image")
    (photos / "cut.jpg").write_bytes((photos / "good.jpg").read_bytes()[:2000])
    (photos / "phone.heic").write_bytes(b"")
    assert main(["predict", str(made / "second"), str(photos), "--out", str(tmp_path / "seen"), "--threads", "1"]) == 1
    said = capsys.readouterr().err
    assert [name in said for name in ("text.jpg", "cut.jpg", "phone.heic")] == [True] * 3
    about = json.loads((tmp_path / "seen" / "predictions.json").read_text())
    assert [one["name"] for one in about["images"]] == ["good"]


def test_a_photograph_of_twelve_megapixels(made: Path, tmp_path: Path) -> None:
    """At its own size it is predicted in tiles."""
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("RGB", (4000, 3000), (90, 120, 60)).save(photos / "large.jpg")
    predict = ["predict", str(made / "second"), str(photos), "--tile", "1000", "--out", str(tmp_path / "seen")]
    assert main([*predict, "--threads", "1"]) == 0
    assert_predicted(tmp_path / "seen", photos, 1)


# --- real photographs ---------------------------------------------------------------------------------------------


def real_photographs(ccp: Path, root: Path, count: int = 12) -> Path:
    """Return photographs of people and their clothes, each enlarged to the size of another camera."""
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True)
    for index, file in enumerate(sorted((ccp / "images").iterdir())[:count]):
        size = 480 + 7 * index, 640 + 11 * index
        with Image.open(file) as image:
            image.convert("RGB").resize(size).save(root / "images" / f"{file.stem}.jpg")
        with Image.open(ccp / "masks" / f"{file.stem}.png") as mask:
            mask.resize(size, Image.Resampling.NEAREST).save(root / "masks" / f"{file.stem}.png")
    shutil.copy(ccp / "classes.txt", root / "classes.txt")
    return root


def shown_classes(root: Path, least: int) -> list[str]:
    """Return the classes that at least this number of training images show, most frequent first."""
    source = Folder(root)
    ids = [
        i for index in range(len(source.names("train"))) for i in set(np.unique(source.mask("train", index))) - {0, 255}
    ]
    counts = np.bincount(ids, minlength=len(source.info.classes) + 1)
    return [source.info.classes[i - 1] for i in np.argsort(-counts, kind="stable") if counts[i] >= least]


def test_real_photographs(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CCP from end to end; then classes of Pascal VOC are added to the same model."""
    if not (shared / "ccp").is_dir():
        pytest.skip("no ccp in ../shared/data")
    monkeypatch.chdir(tmp_path)
    photos = real_photographs(shared / "ccp", tmp_path / "photos")
    classes = shown_classes(photos, least=3)
    old, new = classes[:6], classes[6:8]
    assert main(["data", "check", "--data", "folder", "--root", "photos"]) == 0
    train = ["train", "--data", "folder", "--root", "photos", "--task", ",".join(old), "--eval.size", "0"]
    assert main([*train, *TINY, *SOLVING, *HERE, "--out", "first"]) == 0
    assert (
        main(["extend", "first", "--root", "photos", "--classes", ",".join(new), "--out", "second", *HERE, *QUICK]) == 0
    )
    assert_knows(tmp_path / "second", old + new)
    voc = ["--data", "voc", "--root", str(shared / "voc224")]
    assert main(["data", "export", *voc, "--limit", "6", "--out", "voc"]) == 0
    more = shown_classes(tmp_path / "voc", least=1)[:2]
    assert (
        main(["extend", "second", "--root", "voc", "--classes", ",".join(more), "--out", "third", *HERE, *QUICK]) == 0
    )
    assert_knows(tmp_path / "third", old + new + more)
    assert main(["eval", "second", "--method.sharpness", "2", "--threads", "1"]) == 0
    for images, count in (("photos", 12), ("voc", 12)):
        assert main(["predict", "third", f"{images}/images", "--out", f"seen-{images}", "--threads", "1"]) == 0
        assert_predicted(tmp_path / f"seen-{images}", tmp_path / images / "images", count)
    assert main(["report", "second", "third", "--images", "2", "--out", "page", "--threads", "1"]) == 0
    assert_reported(tmp_path / "page" / "index.html")
    photo = min((photos / "images").iterdir())
    assert_answered(tmp_path / "third", photo, shown_size(photo), capsys)
