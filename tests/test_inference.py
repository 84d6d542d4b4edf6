"""Prediction: images of every kind and size, tiles, model paths, drawings, and the command."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw

from incseg.cli import predict as command
from incseg.data.files import FileError, image_size, read_image, read_mask
from incseg.data.transforms import normalise
from incseg.engine.rundir import RunDir
from incseg.inference import Predictor, Result, _network_size, _tile_starts, distinct_name, load, open_image
from incseg.io import write_json
from incseg.models.files import load_segmenter, save_segmenter
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.report.draw import OVERLAY_SIDES, overlay, palette_image, uncertainty_image
from incseg.types import Increment, UserError

SIZE = 48
STRIDE = 8
IDS = (0, 7, 2, 5)
COLOURS = [[0, 0, 0], [200, 30, 30], [30, 200, 30], [30, 30, 200], [9, 9, 9]]


def save_model(path: Path, method: str = "evidential", steps: int = 2) -> Path:
    """Save a random model with classes learnt in the order 7 2, 5, which predicts several of them."""
    torch.manual_seed(3)
    config = ModelConfig("tiny", output_stride=STRIDE, width=16, dilations=(1, 2, 3))
    model = Segmenter(config, background_output=method != "evidential")
    for increment in (Increment(("tree", "dog"), IDS[1:3], 30), Increment(("car",), IDS[3:], 10))[:steps]:
        model.grow(increment)
    for classifier in model.classifiers:
        torch.nn.init.normal_(classifier.get_parameter("weight"), std=0.7)
    about = {
        "incseg": "0",
        "method": {"name": method},
        "protocol": {"dataset": "folder", "task": "2-1"},
        "palette": COLOURS,
        "test_size": SIZE,
    }
    save_segmenter(path, model.eval(), about)
    return path


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model.safetensors")


@pytest.fixture(scope="module")
def predictor(model_file: Path) -> Predictor:
    return load(model_file, device="cpu")


def picture(width: int = 64, height: int = 48, seed: int = 0) -> Image.Image:
    """Return smooth random colours."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (max(2, height // 12), max(2, width // 12), 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


# What a predictor knows and gives


def test_predictor_describes_itself(predictor):
    assert predictor.classes == ("background", "tree", "dog", "car")
    assert predictor.ids == IDS
    assert predictor.palette.tolist() == COLOURS[:4]
    assert predictor.palette_by_id[5].tolist() == COLOURS[3]
    assert [i.classes for i in predictor.increments] == [("tree", "dog"), ("car",)]
    assert predictor.info["step"] == 1
    assert predictor.test_size == SIZE
    assert "Conv2d" not in repr(predictor)


@pytest.mark.parametrize("method", ["evidential", "finetune"])
def test_result_is_the_methods_rule_on_upsampled_logits(tmp_path, method):
    predictor = load(save_model(tmp_path / "m.safetensors", method), device="cpu")
    image = picture(120, 90)
    result = predictor.predict(image, probabilities=True)
    seen = image.resize((64, 48), Image.Resampling.BILINEAR)
    backbone = predictor.model.backbone
    with torch.no_grad():
        logits = predictor.model(normalise(seen, backbone.mean, backbone.std)[None]).logits
        expected = predictor.method.predict(F.interpolate(logits, (90, 120), mode="bilinear"), predictor.increments)
    assert result.labels.dtype == np.uint8
    assert result.uncertainty.dtype == result.probabilities.dtype == np.float32
    np.testing.assert_allclose(result.probabilities, expected.probabilities[0], atol=1e-5)
    np.testing.assert_allclose(result.uncertainty, expected.uncertainty[0], atol=1e-5)
    assert (result.labels == expected.labels[0].numpy()).mean() > 0.999
    assert len(np.unique(result.labels)) > 1
    assert (result.ids == np.array(IDS)[result.labels]).all()
    assert predictor.predict(image).probabilities is None


def test_code_is_imported_only_when_the_user_names_it(tmp_path, monkeypatch):
    """Opening a model file that names a module must not import it."""
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    model, about = load_segmenter(save_model(tmp_path / "m.safetensors"))
    file = tmp_path / "planted.safetensors"
    save_segmenter(file, model, {**about, "method": {"name": "planted:Method"}})
    with pytest.raises(UserError, match="name it yourself: --method planted:Method"):
        load(file)
    with pytest.raises(SystemExit, match="imported"):
        load(file, method="planted:Method")


def test_an_option_of_another_version_counts_only_where_it_was_on(tmp_path):
    model, about = load_segmenter(save_model(tmp_path / "a.safetensors"))
    for name, value in (("off", None), ("on", 0.3)):
        method = {**about["method"], "reject": value, "balancing": "odds"}
        save_segmenter(tmp_path / f"{name}.safetensors", model, {**about, "method": method})
    assert load(tmp_path / "off.safetensors").method.config.balancing == "odds"
    with pytest.raises(UserError, match="reject"):
        load(tmp_path / "on.safetensors")


def test_options_change_the_outcome(predictor):
    image = picture()
    changed = predictor.with_options(decision="hierarchical", threshold=0.0)
    assert (changed.predict(image).labels == 0).all()
    assert (predictor.predict(image).labels != 0).any()
    assert changed.info["method"]["threshold"] == 0.0
    other = predictor.with_options(balancing="none").predict(image).uncertainty
    assert not np.allclose(other, predictor.predict(image).uncertainty)
    with pytest.raises(UserError, match="treshold"):
        predictor.with_options(treshold=0.5)


# Images of every kind


def same(a: Any, b: Any) -> bool:
    return bool((a.labels == b.labels).all()) and np.array_equal(a.uncertainty, b.uncertainty)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I;16", "I"])
def test_every_mode(predictor, tmp_path, mode):
    grey = picture().convert("L")
    if mode in ("I;16", "I"):
        wide = np.asarray(grey).astype(np.uint16) * 257
        image = Image.fromarray(wide if mode == "I;16" else wide.astype(np.int32))
        assert image.mode == mode
        assert same(predictor.predict(image), predictor.predict(grey))
    else:
        image = picture().convert(mode)
        assert same(predictor.predict(image), predictor.predict(image.convert("RGB")))
    path = tmp_path / "image.tif"
    if mode != "YCbCr":
        image.save(path)
        assert same(predictor.predict(str(path)), predictor.predict(image))


def test_arrays(predictor):
    rgb = np.asarray(picture())
    expected = predictor.predict(picture())
    assert same(predictor.predict(rgb), expected)
    assert same(predictor.predict(rgb[::-1][::-1]), expected)
    alpha = np.zeros_like(rgb[..., :1])
    assert same(predictor.predict(np.concatenate([rgb, alpha], axis=2)), expected)  # transparency is dropped
    grey = rgb[..., 0]
    assert same(predictor.predict(grey), predictor.predict(np.stack([grey] * 3, axis=2)))


@pytest.mark.parametrize(
    "array", [np.zeros((4, 4)), np.zeros((4, 4, 2), np.uint8), np.zeros((0, 4), np.uint8), np.zeros(4, np.uint8)]
)
def test_wrong_arrays(predictor, array):
    with pytest.raises(UserError, match="the image is an array"):
        predictor.predict(array)


def test_exif_orientation(predictor, tmp_path):
    path = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(64, 48).save(path, exif=exif)
    result = predictor.predict(path)
    assert result.labels.shape == (64, 48)
    assert result.image.size == (48, 64)
    with Image.open(path) as stored:
        assert same(result, predictor.predict(np.rot90(np.asarray(stored), k=-1)))


def test_first_frame_of_an_animation(predictor, tmp_path):
    path = tmp_path / "moving.gif"
    frames = [picture(seed=1).convert("P"), picture(seed=2).convert("P")]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    with Image.open(path) as moving:
        assert moving.n_frames == 2
        assert same(predictor.predict(path), predictor.predict(moving.convert("RGB")))


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (3000, 10), (10, 3000)])
@pytest.mark.parametrize("asked", [None, 0])
def test_tiny_and_extreme(predictor, size, asked):
    result = predictor.predict(picture(*size), size=asked)
    assert result.labels.shape == size[::-1]
    assert np.isfinite(result.uncertainty).all()
    assert overlay(result.image, result.labels, result.palette, result.classes).width >= OVERLAY_SIDES[0]


def test_network_size():
    assert _network_size(640, 480, 512) == (682, 512)
    assert _network_size(480, 640, 512) == (512, 682)
    assert _network_size(1, 1, 512) == (512, 512)
    assert _network_size(30000, 10, 512) == (30000, 10)
    assert _network_size(10, 1000, 512) == (40, 4096)
    assert _network_size(6000, 600, 512) == (5120, 512)
    assert _network_size(30, 20, 0) == (30, 20)


def test_size_overrides(predictor):
    image = picture(96, 72)
    assert not np.array_equal(predictor.predict(image, size=24).uncertainty, predictor.predict(image).uncertainty)
    assert same(predictor.predict(image, size=72), predictor.predict(image, size=0))
    with pytest.raises(UserError, match="size is -1"):
        predictor.predict(image, size=-1)


def test_bad_files_in_one_line(predictor, tmp_path, monkeypatch):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    with pytest.raises(UserError, match=r"broken\.png: cannot be read as an image"):
        predictor.predict(broken)
    with pytest.raises(UserError, match=r"gone\.png: no such file"):
        predictor.predict(tmp_path / "gone.png")
    with pytest.raises(UserError, match=r"is a folder; give predict_folder\(\)"):
        predictor.predict(tmp_path)
    truncated = tmp_path / "truncated.jpg"
    picture(300, 300).save(truncated)
    truncated.write_bytes(truncated.read_bytes()[:2000])
    with pytest.raises(UserError, match="truncated"):
        predictor.predict(truncated)
    with pytest.raises(UserError, match="cannot be decoded"), Image.open(truncated) as image:
        predictor.predict(image)
    with pytest.raises(UserError, match="no pixels"):
        predictor.predict(Image.new("RGB", (0, 5)))


def test_decompression_bomb(predictor, tmp_path, monkeypatch):
    path = tmp_path / "bomb.png"
    picture(60, 50).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    assert open_image(path).size == (60, 50)  # up to twice the limit Pillow only warns, and we do not
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UserError, match=r"more than 2,000 pixels.*MAX_IMAGE_PIXELS"):
        predictor.predict(path)


THIN = Image.new("L", (10**6, 1))


@pytest.mark.parametrize(
    "image",
    [THIN, np.asarray(THIN), torch.from_numpy(np.asarray(THIN).copy()).T, Image.new("L", (100_001, 30)),
     Image.new("L", (2, 10_001))],
    ids=["Pillow", "array", "tensor", "long", "thin"],
)  # fmt: skip
def test_strips_that_are_too_long_or_thin(predictor, image, tmp_path):
    with pytest.raises(FileError, match=r"at most 100,000, and at most 5,000 times as many as the shorter; cut it"):
        predictor.predict(image)
    if isinstance(image, Image.Image):
        image.save(tmp_path / "thin.png")
        for read in (predictor.predict, read_image, image_size, lambda file: read_mask(file, 2)):
            with pytest.raises(FileError, match=r"thin\.png: it is .* pixels; the longer side"):
                read(tmp_path / "thin.png")


def test_what_would_take_too_much_memory_is_refused_before_it_is_taken(predictor, monkeypatch):
    said = "at size 40000 its pixels would take 17.9 GB; at most 4 GB are allowed; give a smaller size"
    with pytest.raises(FileError, match=said):
        predictor.predict(picture(9, 9), 40_000)
    with pytest.raises(FileError, match="give a smaller size"):
        predictor.predict(picture(9, 9), 10**18)
    monkeypatch.setattr("incseg.inference.MOST_BYTES", 4 * 4 * 640 * 480 - 1)
    with pytest.raises(FileError, match=r"its probabilities would take .* do without probabilities"):
        predictor.predict(picture(640, 480), 32, probabilities=True)
    assert predictor.predict(picture(640, 480), 32, probabilities=True, longest=639).probabilities.shape[2] == 639


def test_scores_count_as_memory_too(predictor, monkeypatch):
    monkeypatch.setattr("incseg.inference.MOST_BYTES", 4 * 3 * 640 * 480)
    monkeypatch.setattr(predictor.model, "increments", [Increment(tuple("abcdefghij" * 25), tuple(range(1, 251)))])
    with pytest.raises(FileError, match="at size 480 its scores would take"):
        predictor.predict(picture(64, 48), 480)


def test_a_prediction_is_given_up_at_its_deadline(predictor):
    for tile in (32, 1536):
        with pytest.raises(FileError, match="takes too long; shrink or cut it"):
            replace(predictor, deadline=time.monotonic()).predict(picture(96, 64), 64, tile)
    assert replace(predictor, deadline=time.monotonic() + 60).predict(picture()).labels.shape == (48, 64)


@pytest.mark.parametrize("scale", [1e38, 1e30])
def test_a_model_whose_scores_are_not_finite_is_refused(tmp_path, scale, capsys):
    """Its weights are finite, and the command used to end with exit code 0."""
    model, about = load_segmenter(save_model(tmp_path / "m.safetensors"))
    with torch.no_grad():
        model.aspp.mix.weight.mul_(scale)
        model.aspp.norm.weight.mul_(scale)
    save_segmenter(tmp_path / "m.safetensors", model, about)
    picture().save(tmp_path / "a.png")
    with pytest.raises(UserError, match="makes of an image is not finite"):
        run(tmp_path / "m.safetensors", tmp_path / "a.png", "--out", tmp_path / "out")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_memory_is_bounded_for_thin_images(model_file, tmp_path):
    """Measured in its own process: 64 million pixels in one row took 20 GB."""
    Image.new("L", (64_000_000, 1)).save(tmp_path / "refused.png")
    Image.new("L", (100_000, 20)).save(tmp_path / "taken.png")
    code = (  # the peak of this process alone: ru_maxrss begins with that of the process that started it
        "import re, sys; from incseg.cli import main; code = main(sys.argv[1:]); "
        "print(code, int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024)"
    )
    argv = ["predict", str(model_file), str(tmp_path / "refused.png"), str(tmp_path / "taken.png")]
    done = subprocess.run(
        [sys.executable, "-c", code, *argv, "--out", str(tmp_path / "out"), "--device", "cpu"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    code, megabytes = done.stdout.splitlines()[-1].split()
    assert (code, done.stderr.count("skipped: ")) == ("1", 1)
    assert "refused.png: it is 64000000×1 pixels" in done.stderr
    assert (tmp_path / "out" / "taken_mask.png").is_file()
    assert int(megabytes) < 1000


def test_a_fault_of_an_image_names_its_file_and_leaves_the_others(model_file, tmp_path, capsys):
    picture(1000, 800).save(tmp_path / "large.png")
    picture().save(tmp_path / "small.png")
    images = [tmp_path / "large.png", tmp_path / "small.png"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("incseg.inference.MOST_BYTES", 4 * 3 * 800 * 600)
        assert run(model_file, *images, "--size", 0, "--out", tmp_path / "out") == 1
    assert f"skipped: {images[0]}: at size 0 its pixels would take" in capsys.readouterr().err
    assert (tmp_path / "out" / "small_mask.png").is_file()


def test_large_images_are_in_memory_one_at_a_time(model_file, tmp_path, monkeypatch):
    for index in range(4):
        picture(40, 30, seed=index).save(tmp_path / f"{index}.png")
    monkeypatch.setattr(command, "_LARGE", 1000)
    opened, predicted = [], []
    read, predict = command.open_image, Predictor.predict
    monkeypatch.setattr(command, "open_image", lambda file: opened.append(file) or read(file))

    def counted(self: Predictor, *arguments: Any) -> Any:
        predicted.append(len(opened) - len(predicted))
        return predict(self, *arguments)

    monkeypatch.setattr(Predictor, "predict", counted)
    assert run(model_file, tmp_path, "--out", tmp_path / "out") == 0
    assert predicted == [1, 1, 1, 1]


# Tiles


@pytest.fixture
def local_predictor(model_file: Path) -> Predictor:
    """Return a predictor without the head's mean over the image: the backbone sees 6 positions around, the head 3
    more."""
    predictor = load(model_file, device="cpu")
    torch.nn.init.zeros_(predictor.model.aspp.pool_mix.weight)
    return predictor


def test_tiles_agree_with_the_whole(local_predictor):
    image = picture(700, 150)
    whole, tiled = (local_predictor._logits(image, tile) for tile in (2000, 320))
    assert _tile_starts(whole.shape[-1], 320 // STRIDE, 10) == [0, 24, 48]
    alone = slice(0, 24)  # these positions only the first tile sees, far from its edge at 40
    torch.testing.assert_close(tiled[..., alone], whole[..., alone], atol=1e-4, rtol=1e-4)
    assert (tiled - whole).abs().max() > 1e-3  # elsewhere some saw the padding of an edge
    image = picture(411, 333)
    labels = [local_predictor.predict(image, size=0, tile=tile).labels for tile in (2000, 320)]
    assert (labels[0] == labels[1]).mean() > 0.98
    assert len(np.unique(labels[0])) > 1


def test_tiles_are_exact_where_edges_are_out_of_sight(local_predictor):
    """If the outer 6 positions of the overlap, as wide as the receptive field, have no weight, tiles change nothing."""
    for branch in local_predictor.model.aspp.branches[1:]:
        torch.nn.init.zeros_(branch.weight)
    image = picture(1000, 600)
    whole, tiled = (local_predictor._logits(image, tile) for tile in (2000, 768))
    assert whole.std() > 0.01
    torch.testing.assert_close(tiled, whole, atol=1e-4, rtol=1e-4)


def test_tiles_cover_and_overlap():
    for length in range(1, 200):
        starts = _tile_starts(length, 16, 4)
        covered = {cell for start in starts for cell in range(start, min(start + 16, length))}
        assert covered == set(range(length))
        assert all(b - a <= 12 for a, b in pairwise(starts))
        assert starts[-1] + 16 == length or starts == [0]


def test_too_small_tile(predictor):
    with pytest.raises(UserError, match="at least 32 pixels"):
        predictor.predict(picture(), tile=31)


# Several images


def test_many_images_are_predicted_as_each_alone(predictor, tmp_path):
    """Images of several sizes, as files, Pillow images, arrays and tensors, in a list, a folder and an iterator."""
    pictures = [picture(64, 48, seed=1), picture(50, 70, seed=2), picture(31, 90, seed=3)]
    files = [tmp_path / f"{name}.png" for name in "abc"]
    for file, image in zip(files, pictures, strict=True):
        image.save(file)
    (tmp_path / "notes.txt").write_text("not an image")
    arrays = [np.asarray(image) for image in pictures]
    tensors = [torch.tensor(array).movedim(2, 0) for array in arrays]
    expected = [predictor.predict(file) for file in files]
    several = [
        predictor.predict(files),
        predictor.predict(tuple(map(str, files))),
        predictor.predict(pictures),
        predictor.predict(arrays),
        predictor.predict(tensors),
        predictor.predict([tensor / 255 for tensor in tensors]),
        list(predictor.predict(iter(files))),
        list(predictor.predict_folder(tmp_path)),
    ]
    for results in several:
        assert isinstance(results, list)
        assert len(results) == 3
        assert all(map(same, results, expected))
    assert predictor.predict([]) == []
    assert [result.name for result in several[-1]] == ["a", "b", "c"]
    assert [result.name for result in several[3]] == ["image", "image_2", "image_3"]


def test_an_iterator_is_asked_for_one_image_at_a_time(predictor):
    asked = []

    def endless():
        while True:
            asked.append(len(asked))
            yield picture(seed=len(asked))

    results = predictor.predict(endless())
    assert asked == []
    next(results)
    next(results)
    assert asked == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tensors_of_one_channel_or_none(predictor, dtype):
    grey = torch.tensor(np.asarray(picture().convert("L")) // 128 * 255)  # 0 and 1 are the same in any precision
    expected = predictor.predict(grey.numpy())
    for tensor in (grey, grey[None], (grey / 255).to(dtype), grey.expand(3, -1, -1), (grey / 255).requires_grad_()):
        assert same(predictor.predict(tensor), expected)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.zeros(2, 3, 8, 8), r"shape \(2, 3, 8, 8\).* several images as a list"),
        (torch.zeros(8, 8, 3), r"shape \(8, 8, 3\); give .*\(C, H, W\)"),
        (torch.zeros(3, 8, 8, dtype=torch.int64), r"torch\.int64"),
        (torch.full((3, 8, 8), 1.01), "before normalisation"),
        (torch.full((3, 8, 8), torch.nan), "before normalisation"),
        (torch.zeros(3, 0, 8), "no pixels"),
        (7, "cannot predict an object of type int; give a file"),
        ([picture(), None], "cannot predict an object of type NoneType"),
    ],
)
def test_wrong_images(predictor, image, message):
    with pytest.raises(UserError, match=message):
        predictor.predict(image)


def test_a_folder_without_images_or_none_at_all(predictor, tmp_path):
    with pytest.raises(UserError, match="holds no image; known are"):
        predictor.predict_folder(tmp_path)
    with pytest.raises(UserError, match="'gone' is not a folder"):
        predictor.predict_folder("gone")


def test_a_result_is_saved_as_the_command_writes_it(model_file, predictor, tmp_path):
    picture(64, 48, seed=1).save(tmp_path / "a.png")
    assert run(model_file, tmp_path / "a.png", "--out", tmp_path / "command", "--probabilities") == 0
    result = predictor.predict(tmp_path / "a.png", probabilities=True)
    files = result.save(tmp_path / "new" / "python")
    assert [file.name for file in files] == ["a_mask.png", "a_uncertainty.png", "a_overlay.png", "a_probabilities.npy"]
    for file in files:
        assert file.read_bytes() == (tmp_path / "command" / file.name).read_bytes()
    with Image.open(files[2]) as drawn:
        assert (np.asarray(drawn) == np.asarray(result.overlay())).all()
    about = json.loads((tmp_path / "command" / "predictions.json").read_text())
    assert about["images"][0]["classes"] == result.shares
    named = predictor.predict(picture(64, 48, seed=1)).save(str(tmp_path / "other" / "b.jpg"))
    assert [file.name for file in named] == ["b_mask.png", "b_uncertainty.png", "b_overlay.png"]
    assert named[0].read_bytes() == files[0].read_bytes()
    with pytest.raises(UserError, match="is a file; give a folder"):
        result.save(files[3])


# Where a model lies


def run_folder(root: Path, finished: int = 2) -> Path:
    run = RunDir(root)
    root.mkdir()
    run.config.write_text("task: 2-1\n")
    for step in range(2):
        save_model(run.model(step), steps=step + 1)
        if step < finished:
            write_json(run.row(step), {"index": step})
    return root


def test_load_from_a_run(tmp_path):
    run = run_folder(tmp_path / "run")
    assert load(run, device="cpu").classes == ("background", "tree", "dog", "car")
    assert load(run, step=0, device="cpu").classes == ("background", "tree", "dog")
    assert load(run / "steps" / "0", device="cpu").palette.tolist() == COLOURS[:3]
    assert load(str(run / "steps" / "1" / "model.safetensors"), device="cpu").info["step"] == 1
    with pytest.raises(UserError, match="no finished step 2; choose from 0 to 1"):
        load(run, step=2)
    with pytest.raises(UserError, match="is one step already"):
        load(run / "steps" / "0", step=1)


def test_wrong_model_paths(tmp_path):
    with pytest.raises(UserError, match="does not exist; give a run folder"):
        load(tmp_path / "nothing")
    with pytest.raises(UserError, match="is not a run folder"):
        load(tmp_path)
    with pytest.raises(UserError, match="no finished step yet"):
        load(run_folder(tmp_path / "young", finished=0))
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(UserError, match="not a safetensors file"):
        load(tmp_path / "text.safetensors")
    with pytest.raises(UserError, match="device 'gpu' is unknown"):
        load(save_model(tmp_path / "good.safetensors"), device="gpu")


def test_foreign_model_files(tmp_path):
    model = Segmenter(ModelConfig("tiny", output_stride=16, width=8), background_output=False)
    save_segmenter(tmp_path / "empty.safetensors", model, {"method": {"name": "evidential"}})
    with pytest.raises(UserError, match="has learnt no class yet"):
        load(tmp_path / "empty.safetensors")
    model.grow(Increment(("cat",), (3,)))
    save_segmenter(tmp_path / "nameless.safetensors", model, {})
    with pytest.raises(UserError, match="does not name its method"):
        load(tmp_path / "nameless.safetensors")
    save_segmenter(tmp_path / "bare.safetensors", model, {"method": {"name": "evidential"}})
    bare = load(tmp_path / "bare.safetensors", device="cpu")
    assert bare.palette.tolist() == [[0, 0, 0], [128, 128, 0]]  # Pascal VOC's third colour
    assert bare.test_size == 0


# Drawings


def test_palette_image_keeps_values(tmp_path):
    values = np.array([[0, 7, 255], [3, 3, 1]], dtype=np.uint8)
    palette = np.arange(768).reshape(256, 3) % 256
    palette_image(values, palette).save(tmp_path / "mask.png")
    with Image.open(tmp_path / "mask.png") as image:
        assert image.mode == "P"
        assert (np.asarray(image) == values).all()
        assert image.convert("RGB").getpixel((1, 0)) == (21, 22, 23)


def test_uncertainty_image():
    ramp = np.linspace(0, 1, 256, dtype=np.float32)[None]
    image = uncertainty_image(ramp)
    assert (np.asarray(image) == np.arange(256)).all()
    lightness = np.asarray(image.convert("RGB").convert("L"), dtype=int)[0]
    assert lightness[0] < 40
    assert lightness[-1] > 200
    assert (np.diff(lightness) >= -1).all()
    assert np.asarray(uncertainty_image(np.array([[-1.0, 2.0]]))).tolist() == [[0, 255]]


def test_overlay_colours_the_classes_and_names_those_present(monkeypatch):
    image = Image.new("RGB", (96, 60), (100, 100, 100))
    labels = np.zeros((60, 96), dtype=np.uint8)
    labels[20:40, 30:70] = 2
    written: list[str] = []
    draw_text = ImageDraw.ImageDraw.text

    def noted(self: ImageDraw.ImageDraw, xy: Any, text: str, *rest: Any, **options: Any) -> None:
        written.append(text)
        draw_text(self, xy, text, *rest, **options)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", noted)
    drawn = overlay(image, labels, np.array(COLOURS), ["background", "tree", "dog", "car"])
    assert written == ["dog", "14 %", "background", "86 %"]
    assert drawn.width == 480
    assert drawn.height > 300
    assert drawn.getpixel((5, 5)) == (100, 100, 100)
    assert drawn.getpixel((250, 150)) == (65, 150, 65)
    assert drawn.getpixel((150, 150)) == tuple(COLOURS[2])


def test_overlay_of_a_large_image_and_long_names():
    labels = np.ones((700, 3000), dtype=np.uint8)
    drawn = overlay(Image.new("RGB", (3000, 700)), labels, np.array(COLOURS), ["background", "x" * 3000])
    assert drawn.width == OVERLAY_SIDES[1]
    assert drawn.height < 800


# The command


def run(model: Path, *arguments: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args, args_unknown = parser.parse_known_args([str(model), *map(str, arguments), "--device=cpu"])
    args.unknown = args_unknown
    return command.run(args)


def test_command_writes_everything(model_file, predictor, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    picture(64, 48, seed=1).save(tmp_path / "in" / "one two.png")
    picture(50, 70, seed=2).save(tmp_path / "in" / "b'\"\n.png")
    (tmp_path / "in" / "notes.txt").write_text("no image")
    out = tmp_path / "deep" / "out"
    assert run(model_file, tmp_path / "in", "--out", out, "--probabilities") == 0
    expected = {f"{stem}_{kind}" for stem in ("one two", "b'\"\n") for kind in
                ("mask.png", "uncertainty.png", "overlay.png", "probabilities.npy")}  # fmt: skip
    assert set(os.listdir(out)) == expected | {"predictions.json"}
    result = predictor.predict(tmp_path / "in" / "one two.png", probabilities=True)
    with Image.open(out / "one two_mask.png") as mask:
        assert (np.asarray(mask) == result.ids).all()
        assert set(np.unique(np.asarray(mask))) <= set(IDS)
        assert (np.asarray(mask.convert("RGB")) == np.array(COLOURS)[result.labels]).all()
    with Image.open(out / "one two_uncertainty.png") as image:
        assert np.abs(np.asarray(image) / 255 - result.uncertainty).max() < 0.5 / 255 + 1e-6
    stored = np.load(out / "one two_probabilities.npy")
    assert stored.dtype == np.float16
    np.testing.assert_allclose(stored, result.probabilities, atol=1e-3)
    about = json.loads((out / "predictions.json").read_text())
    assert {row["id"]: row["name"] for row in about["classes"]} == {0: "background", 7: "tree", 2: "dog", 5: "car"}
    assert [row["name"] for row in about["images"]] == ["b'\"\n", "one two"]
    assert sum(about["images"][0]["classes"].values()) == pytest.approx(1, abs=1e-4)
    assert capsys.readouterr().out.startswith("2 images in ")


def test_a_folder_has_the_predictions_of_one_model_alone(model_file, tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for place, seed in (("a/x.png", 1), ("b/x.png", 2)):
        picture(seed=seed).save(tmp_path / place)
    out = tmp_path / "out"

    def listed() -> list[tuple[str, str]]:
        images = json.loads((out / "predictions.json").read_text())["images"]
        return [(Path(one["file"]).parent.name, one["name"]) for one in images]

    assert run(model_file, tmp_path / "a" / "x.png", "--out", out) == 0
    first = (out / "x_mask.png").read_bytes()
    assert run(model_file, tmp_path / "b" / "x.png", "--out", out) == 0
    assert listed() == [("a", "x"), ("b", "x_2")]
    assert (out / "x_mask.png").read_bytes() == first
    assert run(model_file, tmp_path / "a" / "x.png", "--out", out) == 0  # again, with the same name
    assert listed() == [("b", "x_2"), ("a", "x")]
    assert len(list(out.glob("*_mask.png"))) == 2
    before = (out / "predictions.json").read_text()
    with pytest.raises(UserError, match="predictions of 1 other image by another model or with other options"):
        run(model_file, tmp_path / "a" / "x.png", "--out", out, "--method.prior", "-0.5")
    assert (out / "predictions.json").read_text() == before
    assert run(model_file, tmp_path / "a", tmp_path / "b", "--out", out, "--method.prior", "-0.5") == 0  # all anew


def test_files_of_others_are_not_overwritten(model_file, tmp_path):
    picture().save(tmp_path / "a.png")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a_mask.png").write_text("drawn by hand")
    with pytest.raises(UserError, match=r"a_mask\.png' exists and is not of incseg predict; choose another --out"):
        run(model_file, tmp_path / "a.png", "--out", tmp_path / "out")
    assert (tmp_path / "out" / "a_mask.png").read_text() == "drawn by hand"
    assert os.listdir(tmp_path / "out") == ["a_mask.png"]


def test_broken_images_are_skipped(model_file, tmp_path, capsys):
    (tmp_path / "a\nb.jpg").write_bytes(b"no image")
    picture().save(tmp_path / "good.jpg")
    out = tmp_path / "out"
    assert run(model_file, tmp_path / "a\nb.jpg", tmp_path / "good.jpg", "--out", out) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "a\\nb.jpg: cannot be read as an image" in said.err
    assert said.out.rstrip().endswith("1 skipped")
    assert (out / "good_mask.png").exists()
    about = json.loads((out / "predictions.json").read_text())
    assert len(about["images"]) == len(about["skipped"]) == 1


def test_out_of_memory_skips_the_image(model_file, tmp_path, capsys, monkeypatch):
    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError

    picture().save(tmp_path / "a.png")
    monkeypatch.setattr(Predictor, "predict", exhausted)
    assert run(model_file, tmp_path / "a.png", "--out", tmp_path / "out") == 1
    assert "smaller --tile" in capsys.readouterr().err


def test_results_keep_the_order_of_the_files(model_file, tmp_path, monkeypatch):
    """Also if the first one takes longest to write and another one is broken."""
    (tmp_path / "in").mkdir()
    for index in range(7):
        picture(seed=index).save(tmp_path / "in" / f"{index}.png")
    (tmp_path / "in" / "3.png").write_bytes(b"no image")
    later = threading.Event()

    def slow_first(result: Any, folder: Path) -> None:
        if result.name == "0":
            assert later.wait(60)
        else:
            later.set()

    monkeypatch.setattr(Result, "save", slow_first)
    assert run(model_file, tmp_path / "in", "--out", tmp_path / "out") == 1
    about = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert [image["name"] for image in about["images"]] == ["0", "1", "2", "4", "5", "6"]
    assert [Path(image["file"]).name for image in about["skipped"]] == ["3.png"]


@pytest.mark.parametrize("flags", [[], ["--probabilities"]])
def test_few_images_are_in_memory_at_once(model_file, tmp_path, monkeypatch, flags):
    (tmp_path / "in").mkdir()
    for index in range(12):
        picture(16, 16, seed=index).save(tmp_path / "in" / f"{index:02}.png")
    opened, unwritten, most = [], [], []
    read, write = command.open_image, Result.save

    def counted_read(file: Path) -> Image.Image:
        opened.append(file)
        return read(file)

    def counted_predict(self: Predictor, *arguments: Any) -> Any:
        result = predict(self, *arguments)
        unwritten.append(result)
        most.append((len(opened) - len(most), len(unwritten)))
        return result

    def counted_write(result: Any, *arguments: Any) -> None:
        write(result, *arguments)
        unwritten.pop()

    predict = Predictor.predict
    monkeypatch.setattr(command, "open_image", counted_read)
    monkeypatch.setattr(Predictor, "predict", counted_predict)
    monkeypatch.setattr(Result, "save", counted_write)
    assert run(model_file, tmp_path / "in", "--out", tmp_path / "out", *flags) == 0
    assert max(ahead for ahead, _ in most) <= command._AHEAD + 1
    assert max(waiting for _, waiting in most) <= (1 if flags else command._AHEAD + 1)


def test_names_are_distinct_and_inside_the_folder(tmp_path):
    long = "é" * 120
    files = [Path("a/x.png"), Path("b/x.png"), Path("b/X.jpg"), Path("x_2.png"), Path("...png"), Path(f"{long}.png")]
    taken: set[str] = set()
    stems = [distinct_name(file.stem, taken) for file in files]
    assert stems[:5] == ["x", "x_2", "X_3", "x_2_2", ".."]
    assert len(os.fsencode(stems[5])) == 180
    assert len({stem.casefold() for stem in stems}) == len(stems)


def test_finding_images(tmp_path):
    for name in ("b.png", "a.JPG", ".hidden.png", "notes.txt", "odd[1].png"):
        (tmp_path / name).touch()
    out = tmp_path / "out"

    def names(*given: str) -> list[str]:
        return [file.name for file in command.find_images([str(tmp_path / item) for item in given], out)]

    assert names("") == ["a.JPG", "b.png", "odd[1].png"]
    assert names("*.png", "b.png") == ["b.png", "odd[1].png"]
    assert names("odd[1].png") == ["odd[1].png"]
    assert names("notes.txt") == ["notes.txt"]
    with pytest.raises(UserError, match=r"no image '.*c\.png'"):
        names("c.png")
    with pytest.raises(UserError, match=r"pattern '.*\*\.bmp' holds no image"):
        names("*.bmp")
    with pytest.raises(UserError, match="choose another --out"):
        command.find_images([str(tmp_path)], tmp_path)
    with pytest.raises(UserError, match="is a file; choose a folder"):
        command.find_images([str(tmp_path / "b.png")], tmp_path / "notes.txt")


def test_method_options_on_the_command_line(model_file, tmp_path):
    picture().save(tmp_path / "a.png")
    arguments = (tmp_path / "a.png", "--out", tmp_path / "out", "--method.decision", "hierarchical")
    assert run(model_file, *arguments, "--method.threshold=0") == 0
    with Image.open(tmp_path / "out" / "a_mask.png") as mask:
        assert (np.asarray(mask) == 0).all()
    about = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert about["method"] == {"name": "evidential", "decision": "hierarchical", "threshold": 0.0}
    assert run(model_file, tmp_path / "a.png", "--out", tmp_path / "out", "--method.prior", "-0.5") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method.balancng", "odds"], "unknown argument '--method.balancng'; did you mean --method.balancing"),
        (["--method.balancing", "oods"], "balancing"),
        (["--method.balancing"], "--method.balancing has no value; write --method.balancing=VALUE"),
        (["--method.prior", "--method.balancing=odds"], "--method.prior has no value"),
        (["--tils", "99"], "unknown option '--tils'; did you mean '--tile'"),
        (["stray.png"], r"unexpected 'stray\.png'"),
        (["--tile", "3"], "tile is 3"),
    ],
)
def test_wrong_options(model_file, tmp_path, capsys, arguments, message):
    picture().save(tmp_path / "a.png")
    with pytest.raises(UserError, match=message):
        run(model_file, tmp_path / "a.png", "--out", tmp_path / "out", *arguments)


@pytest.fixture
def photograph() -> Image.Image:
    return picture(90, 70, seed=5)


def test_views_are_averaged(predictor, photograph):
    """A mirrored image gives mirrored scores, so the mean over both views is the same for both."""
    both = predictor.averaging(flip=True, scales=(1, 1.5))
    found = both.predict(photograph, probabilities=True)
    mirrored = both.predict(photograph.transpose(Image.Transpose.FLIP_LEFT_RIGHT), probabilities=True)
    np.testing.assert_allclose(found.probabilities, mirrored.probabilities[..., ::-1], atol=1e-5)
    np.testing.assert_allclose(found.probabilities.sum(0), 1, atol=1e-5)
    assert found.labels.shape == (70, 90)
    alone = predictor.predict(photograph, probabilities=True)
    assert np.abs(alone.probabilities - found.probabilities).max() > 1e-3
    one = predictor.averaging(flip=False, scales=(1,)).predict(photograph, probabilities=True)
    np.testing.assert_array_equal(one.probabilities, alone.probabilities)


def test_the_scores_of_views_are_averaged(predictor, photograph):
    logits = [
        predictor._logits(photograph.resize(size, Image.Resampling.BILINEAR), 1536) for size in ((90, 70), (180, 140))
    ]
    small = torch.nn.functional.interpolate(logits[0], logits[1].shape[-2:], mode="bilinear", align_corners=False)
    found = predictor.averaging(flip=False, scales=(1, 2))._mean_logits(photograph, [(180, 140), (90, 70)], 1536)
    torch.testing.assert_close(found, (small + logits[1]) / 2)


@pytest.mark.parametrize(
    ("scales", "fault"), [((), "none"), ((0.1,), "0.1"), ((1, 5), "1, 5"), ((math.nan,), "nan"), ((1,) * 9, "1, 1, 1")]
)
def test_scales_are_bounded(predictor, scales, fault):
    with pytest.raises(UserError, match=rf"scales are {fault}.*; give 1 to 8 factors from 0.25 to 4, such as 1,1.5"):
        predictor.averaging(scales=scales)


def test_views_on_the_command_line(model_file, tmp_path, predictor, photograph, capsys):
    photograph.save(tmp_path / "a.png")
    arguments = (tmp_path / "a.png", "--out", tmp_path / "out")
    assert run(model_file, *arguments, "--flip", "--scales", "1,1.5") == 0
    expected = predictor.averaging(scales=(1, 1.5)).predict(tmp_path / "a.png")
    with Image.open(tmp_path / "out" / "a_mask.png") as mask:
        assert (np.asarray(mask) == expected.ids).all()
    about = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert about["views"] == {"flip": True, "scales": [1, 1.5]}
    with pytest.raises(SystemExit):
        run(model_file, *arguments, "--scales", "big")
    assert "'big' is not a list of factors, such as 1,1.5" in capsys.readouterr().err
