"""The feature cache: a run with it equals one without, whatever happens to its files; and `incseg cache`."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import assert_same_run, listening, reevaluated_row, rows_of, small_config, write_config
from torch import nn

import incseg.data.features as features_module
from incseg.cli import main
from incseg.config import RunConfig
from incseg.data.features import FeatureStore, StoredCache, StoreUnwritable, clear, stored_caches
from incseg.data.loaders import EpochOrder, FeatureLoaders, Loaders, PixelLoaders, _ahead, thinned
from incseg.data.shapes import Shapes
from incseg.data.source import Source
from incseg.data.transforms import TestTransform
from incseg.engine.features import Wanted, feature_store, fill
from incseg.engine.rundir import RunDir
from incseg.engine.runtime import Runtime, seed_everything
from incseg.io import cache_path, read_tensors
from incseg.methods import build_method
from incseg.models.aspp import Neck, activate
from incseg.models.files import load_segmenter, save_segmenter
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.run import Setup, train
from incseg.types import Increment, UserError

SIZE = 48
IMAGES = 32
SMALL_BLOCK = 8


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use four blocks instead of one."""
    monkeypatch.setattr(features_module, "BLOCK", SMALL_BLOCK)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record (split, block) of every block that is written."""
    blocks: list[tuple[str, int]] = []
    write = FeatureStore.write

    def recorded(self: FeatureStore, block: int, maps: np.ndarray, masks: np.ndarray) -> None:
        blocks.append((self.key["split"], block))
        write(self, block, maps, masks)

    monkeypatch.setattr(FeatureStore, "write", recorded)
    return blocks


@pytest.fixture
def weights(tmp_path: Path) -> str:
    """Write weights of a backbone, so that it does not depend on a run's seed."""
    torch.manual_seed(0)
    torch.save(Segmenter(ModelConfig("tiny", output_stride=8, width=4), True).backbone.state_dict(), tmp_path / "w.pth")
    return str(tmp_path / "w.pth")


def frozen_config(out: Path, **changes: Any) -> RunConfig:
    changes["model"] = {"freeze_backbone": True, **changes.get("model", {})}
    changes["train"] = {"scale": None, **changes.get("train", {})}
    return small_config(out, **changes)


def frozen_model(**changes: Any) -> Segmenter:
    torch.manual_seed(1)
    settings = {"output_stride": 8, "width": 8, "freeze_backbone": True, "dilations": (1, 2, 3), **changes}
    model = Segmenter(ModelConfig("tiny", **settings), True)
    torch.manual_seed(2)  # whatever the head drew
    for layer in model.backbone.modules():  # statistics that evaluation must use
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.uniform_(-0.2, 0.2)  # type: ignore[union-attr]
            layer.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return model.eval()


def shapes(**changes: Any) -> Source:
    return Shapes(**{"seed": 0, "train_size": IMAGES, "val_size": 8, "image_size": SIZE, **changes})


def filled(root: Path, model: Segmenter, source: Source, images: Any = range(IMAGES)) -> FeatureStore:
    store = feature_store(root, model, source, "train", SIZE)
    fill([Wanted(store, images, 0)], model, source, Runtime("cpu"))
    return store


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("block-*.bin"))}


def cache_of(split: str) -> StoredCache:
    """Return the only cache of a split."""
    [cache] = [cache for cache in stored_caches(cache_path("features")) if cache.about["split"] == split]
    return cache


def spoken(config: RunConfig) -> str:
    """Run and return the printed text."""
    with listening() as shown:
        train(config)
    return shown.getvalue()


# --- the same run --------------------------------------------------------------------------------------------


def both_loaders(config: RunConfig) -> tuple[Setup, list[Loaders]]:
    """Return the loaders of a configuration with the cache and without."""
    method = build_method(config.method)
    setup = Setup.of(config, method)
    seed_everything(config.seed)
    model = Segmenter(config.model, method.background_output).eval()
    made: list[Loaders] = []
    for cache in ("auto", "off"):
        config.data.cache = cache  # type: ignore[assignment]
        made.append(setup.loaders(config, model, Runtime("cpu"), train=True))
    pixels = made[1].training

    def encoded(step: Any, keys: Any) -> Iterator[Any]:
        for images, labels, indices in pixels(step, keys):
            yield model.features(images), labels, indices

    made[1].training = encoded  # type: ignore[method-assign]
    return setup, made


@pytest.mark.parametrize(("stages", "label_stride", "flip"), [(None, 1, True), ((1, 3), 4, True), ((1, 3), 3, False)])
def test_training_batches_are_those_of_pixels_to_half_precision(
    tmp_path: Path, stages: tuple[int, ...] | None, label_stride: int, flip: bool
) -> None:
    config = frozen_config(
        tmp_path / "run", model={"stages": stages}, train={"label_stride": label_stride, "flip": flip}
    )
    setup, (kept, pixels) = both_loaders(config)
    assert isinstance(kept, FeatureLoaders)
    assert isinstance(pixels, PixelLoaders)
    step = setup.protocol.steps[1]
    order = EpochOrder(len(kept.train_images[1]), 4, 2, (config.seed, 1))
    mine, theirs = (list(loaders.training(step, order)) for loaders in (kept, pixels))
    assert len(mine) == len(theirs) == len(order) > 2
    for (features, labels, indices), (expected, their_labels, their_indices) in zip(mine, theirs, strict=True):
        assert indices == their_indices
        assert torch.equal(labels, their_labels)
        assert labels.shape[-1] == SIZE // label_stride
        assert len(features) == len(expected) == len(stages or (3,))
        for got, wanted in zip(features, expected, strict=True):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, wanted, rtol=2**-10, atol=1e-5 * float(wanted.abs().max()))
            assert not torch.equal(got, wanted), "the cache was not read"


def test_test_batches_and_plain_ones_are_those_of_pixels(tmp_path: Path) -> None:
    setup, (kept, pixels) = both_loaders(frozen_config(tmp_path / "run", train={"label_stride": 4}))
    step = setup.protocol.steps[0]
    for name, arguments in (("testing", ([5, 0, 3], 2)), ("plain", (5,))):
        mine, theirs = (list(getattr(loaders, name)(step, *arguments)) for loaders in (kept, pixels))
        assert [indices for _, _, indices in mine] == [indices for _, _, indices in theirs]
        for (features, labels, _), (images, their_labels, _) in zip(mine, theirs, strict=True):
            assert torch.equal(labels, their_labels)
            assert features[0].shape[0] == images.shape[0]
            assert images.shape[-2:] == labels.shape[-2:] == (SIZE, SIZE)


@pytest.mark.parametrize("stages", [None, (1, 3)])
def test_a_run_from_the_cache_ends_where_one_from_pixels_does(tmp_path: Path, stages: tuple[int, ...] | None) -> None:
    for name, cache in (("kept", "auto"), ("pixels", "off")):
        train(frozen_config(tmp_path / name, data={"cache": cache}, model={"stages": stages}))
    assert len(list(stored_caches(cache_path("features")))) == 2
    for step in (0, 1, 2):
        mine, theirs = (read_tensors(RunDir(tmp_path / name).model(step))[0] for name in ("kept", "pixels"))
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=0.02, atol=0.02)
        counts = [np.load(RunDir(tmp_path / name).confusion(step)) for name in ("kept", "pixels")]
        assert np.abs(counts[0] - counts[1]).sum() / 2 <= 0.02 * counts[0].sum()
    for row, other in zip(rows_of(tmp_path / "kept"), rows_of(tmp_path / "pixels"), strict=True):
        assert row["losses"] == pytest.approx(other["losses"], rel=0.01)


def test_evaluating_again_reads_the_cache_and_gives_the_row(tmp_path: Path, written: list[tuple[str, int]]) -> None:
    config = frozen_config(tmp_path / "run", model={"stages": (2, 3)})
    train(config)
    assert written == [("val", 0), *(("train", block) for block in range(4))]
    written.clear()
    trained = rows_of(config.folder)[-1]
    assert {**trained, **reevaluated_row(config.folder)} == trained
    assert written == []


def test_the_flipped_view_has_the_features_of_the_mirrored_image(tmp_path: Path) -> None:
    model, source = frozen_model(stages=(1, 3)), shapes()
    store = filled(tmp_path, model, source)
    for index in (0, 9, 31):
        image, mask = source.pair("train", index)
        pixels, labels = TestTransform(SIZE, model.backbone.mean, model.backbone.std)(image, mask)
        for flipped in (False, True):
            values, kept = store.read(index, flipped)
            shown = pixels.flip(-1) if flipped else pixels
            for got, wanted in zip(store.layout.split(values), model.features(shown[None]), strict=True):
                np.testing.assert_allclose(got, wanted[0].numpy(), rtol=2**-10, atol=1e-4)
            np.testing.assert_array_equal(kept, labels.flip(-1) if flipped else labels)
    straight, mirrored = store.read(3, False)[0], store.read(3, True)[0]
    assert not np.allclose(store.layout.split(straight)[1][..., ::-1], store.layout.split(mirrored)[1], atol=1e-3)


def test_thinned_labels_lie_in_the_middle_of_their_cells() -> None:
    labels = torch.arange(48 * 48).view(1, 48, 48)
    for stride in (1, 2, 3, 4):
        expected = [
            [int(labels[0, y, x]) for x in range(stride // 2, 48, stride)] for y in range(stride // 2, 48, stride)
        ]
        assert thinned(labels, stride)[0].tolist() == expected
        assert thinned(labels, stride).shape == (1, 48 // stride, 48 // stride)


# --- what a cache depends on, and who shares it --------------------------------------------------------------


def test_the_key_has_what_the_maps_depend_on_and_nothing_else(tmp_path: Path) -> None:
    def folder(source: Source | None = None, size: int = SIZE, split: Any = "train", **changes: Any) -> Path:
        return feature_store(tmp_path, frozen_model(**changes), source or shapes(), split, size).folder

    same = folder()
    assert {folder(), folder(width=16), folder(dilations=(2, 3, 4)), folder(stages=(3,))} == {same}
    nudged = frozen_model()
    nudged.backbone.get_parameter("stem.weight").data[0, 0, 0, 0] += 1e-6
    statistics = frozen_model()
    statistics.backbone.get_buffer("stem_norm.running_var")[0] += 1e-6
    head = frozen_model()
    head.grow(Increment(("a",), (1,)))
    head.aspp.mix.weight.data.zero_()
    other_mean = frozen_model()
    other_mean.backbone.mean = (0.5, 0.5, 0.4)
    nudged_folder, statistics_folder, head_folder, mean_folder = (
        feature_store(tmp_path, model, shapes(), "train", SIZE).folder
        for model in (nudged, statistics, head, other_mean)
    )
    assert head_folder == same
    others = [
        nudged_folder,
        statistics_folder,
        mean_folder,
        folder(size=40),
        folder(stages=(2, 3)),
        folder(output_stride=16),
        folder(shapes(seed=1)),
        folder(shapes(train_size=33)),
        folder(split="val"),
    ]
    assert len({same, *others}) == 1 + len(others)
    assert folder(size=8) != folder(size=8, output_stride=16), "though both maps are 1×1"
    assert not any(path.exists() for path in (same, *others)), "asking for a store makes nothing"


def test_runs_of_other_seeds_tasks_and_methods_build_nothing(
    tmp_path: Path, weights: str, written: list[tuple[str, int]]
) -> None:
    model, changes = {"weights": weights}, {"epochs": 1}
    first = frozen_config(tmp_path / "first", model=model, train=changes)
    train(first)
    assert len(written) == 5
    written.clear()
    for name, other in (
        ("seed", {"seed": 7}),
        ("task", {"task": "8-2", "setting": "disjoint"}),
        ("method", {"method": {"name": "finetune"}, "rules": "mib"}),
        ("again", {}),
    ):
        train(frozen_config(tmp_path / name, model=model, train=changes, **other))
        assert written == [], name
    assert_same_run(first.folder, tmp_path / "again")


def test_a_limit_builds_only_the_blocks_it_needs(tmp_path: Path, written: list[tuple[str, int]]) -> None:
    model, source = frozen_model(), shapes(train_size=30)
    filled(tmp_path, model, source, [9, 12, 29])
    assert written == [("train", 1), ("train", 3)]
    store = filled(tmp_path, model, source, [0, 9, 29])
    assert written == [("train", 1), ("train", 3), ("train", 0)]
    assert len(store.images_of(3)) == 6
    with pytest.raises(UserError, match=r"block-00002.bin cannot be used .*No such file.*; start the run again"):
        store.read(17, False)


# --- accidents -----------------------------------------------------------------------------------------------


def test_a_builder_killed_within_a_block_leaves_whole_blocks_and_the_next_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[tuple[str, int]]
) -> None:
    config = frozen_config(tmp_path / "run")
    script = f"""
import sys, time, zlib
from pathlib import Path
import incseg.data.features as features
from incseg.cli import main
features.BLOCK = {SMALL_BLOCK}
class Slow:
    calls = 0
    def crc32(self, body):
        self.calls += 1
        if self.calls == 4:  # the maps are in the temporary file, the checksum is not
            Path({str(tmp_path / "amid")!r}).touch()
            time.sleep(60)
        return zlib.crc32(body)
features.zlib = Slow()
main(["train", "--config", {write_config(config, tmp_path / "settings.yaml")!r}])
"""
    builder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (tmp_path / "amid").exists() and time.monotonic() < deadline and builder.poll() is None:
        time.sleep(0.02)
    builder.kill()
    errors = builder.communicate()[1].decode()
    assert builder.returncode == -signal.SIGKILL, errors
    cache = cache_of("train")
    assert list(contents(cache.folder)) == ["block-00000.bin", "block-00001.bin"]
    assert cache.images_done == 2 * SMALL_BLOCK
    [left] = cache.folder.glob(".block-00002.bin.*.tmp")

    train(config)
    assert written == [("train", 2), ("train", 3)]
    assert not left.exists()
    monkeypatch.setenv("INCSEG_CACHE", str(tmp_path / "undisturbed"))
    undisturbed = frozen_config(tmp_path / "undisturbed-run")
    train(undisturbed)
    assert contents(cache.folder) == contents(cache_path("features") / cache.folder.name) != {}
    assert_same_run(config.folder, undisturbed.folder)


@pytest.mark.parametrize("damage", ["bit", "checksum", "truncated", "longer", "empty"])
def test_a_damaged_block_is_made_again_and_named(tmp_path: Path, written: list[tuple[str, int]], damage: str) -> None:
    model, source = frozen_model(), shapes()
    folder = filled(tmp_path, model, source).folder
    sound = contents(folder)
    broken, body = folder / "block-00002.bin", bytearray(sound["block-00002.bin"])
    if damage in ("bit", "checksum"):
        body[1234 if damage == "bit" else -2] ^= 4
    broken.write_bytes({"truncated": body[:-100], "longer": body + b"\0", "empty": b""}.get(damage, bytes(body)))
    store = feature_store(tmp_path, model, source, "train", SIZE)
    with pytest.raises(UserError, match=r"block-00002.bin cannot be used \(it is (damaged|empty)\); start the run"):
        store.read(16, False)

    written.clear()
    with listening() as out:
        fill([Wanted(store, range(IMAGES), 0)], model, source, Runtime("cpu"))
    assert out.getvalue() == f"damaged in the feature cache and made again: {broken}\n"
    assert written == [("train", 2)]
    assert contents(folder) == sound


def test_a_run_over_a_damaged_cache_equals_one_over_a_sound_one(tmp_path: Path) -> None:
    train(frozen_config(tmp_path / "first"))
    broken = cache_of("train").folder / "block-00002.bin"
    broken.write_bytes(broken.read_bytes()[::-1])
    assert spoken(frozen_config(tmp_path / "second")).count("made again: ") == 1
    assert_same_run(tmp_path / "first", tmp_path / "second")


def test_several_damaged_blocks_are_one_line(tmp_path: Path, written: list[tuple[str, int]]) -> None:
    model, source = frozen_model(), shapes()
    folder = filled(tmp_path, model, source).folder
    for block in (0, 2, 3):
        (folder / f"block-{block:05d}.bin").write_bytes(b"xyz")
    written.clear()
    store = feature_store(tmp_path, model, source, "train", SIZE)
    with listening() as out:
        fill([Wanted(store, range(IMAGES), 0)], model, source, Runtime("cpu"))
    assert out.getvalue() == f"damaged in the feature cache and made again: {folder}/block-00000.bin and 2 more\n"
    assert [block for _, block in written] == [0, 2, 3]


def test_a_disk_too_small_for_both_splits_is_reported_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[tuple[str, int]]
) -> None:
    usage, each = namedtuple("usage", "total used free"), 96 * 6 * 6 * 2
    needed = IMAGES * (2 * each + SIZE * SIZE) + 8 * (each + SIZE * SIZE)
    enough = needed + needed // 100 + 1
    monkeypatch.setattr(features_module.shutil, "disk_usage", lambda path: usage(0, 0, enough - 2))
    monkeypatch.setattr("incseg.engine.features._computed", lambda *arguments: pytest.fail("work began"))
    with pytest.raises(
        UserError, match=r"needs 0\.0 GB and .* has 0\.0 GB free; set INCSEG_CACHE .*--data.cache off"
    ) as said:
        train(frozen_config(tmp_path / "run"))
    assert "\n" not in str(said.value)
    monkeypatch.undo()
    monkeypatch.setattr(features_module.shutil, "disk_usage", lambda path: usage(0, 0, enough))
    train(frozen_config(tmp_path / "run"))


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("INCSEG_CACHE", str(tmp_path / "file" / "cache"))
    said = spoken(frozen_config(tmp_path / "run"))
    assert (
        len(re.findall(r"the feature cache cannot be written \(.*Not a directory.*\); continuing without", said)) == 1
    )
    assert "damaged" not in said
    train(frozen_config(tmp_path / "pixels", data={"cache": "off"}))
    assert_same_run(tmp_path / "run", tmp_path / "pixels")


def test_on_a_disk_that_fills_up_the_run_continues_without_the_cache_and_its_blocks_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, full = FeatureStore.write, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def until_full(self: FeatureStore, block: int, maps: np.ndarray, masks: np.ndarray) -> None:
        if block == 2:
            raise full
        write(self, block, maps, masks)

    monkeypatch.setattr(FeatureStore, "write", until_full)
    said = spoken(frozen_config(tmp_path / "run"))
    assert said.count("(No space left on device)".replace("(", "([Errno 28] ")) == 1
    assert cache_of("train").images_done == 2 * SMALL_BLOCK
    assert cache_of("val").images_done == 8
    assert len(rows_of(tmp_path / "run")) == 3


def test_a_complete_cache_that_others_own_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[tuple[str, int]]
) -> None:
    model, source = frozen_model(), shapes()
    filled(tmp_path, model, source)
    written.clear()

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "read only")

    for name in ("utime", "replace", "mkdir"):
        monkeypatch.setattr(os, name, refuse)
    store = filled(tmp_path, model, source)
    assert written == []
    assert store.read(31, True)[0].shape == (96 * 6 * 6,)


def test_a_faulty_image_keeps_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(split: Any, index: int) -> Any:
        raise UserError("image 3 is broken")

    model, source = frozen_model(), shapes()
    store = feature_store(tmp_path, model, source, "train", SIZE)
    monkeypatch.setattr(source, "pair", broken)
    with pytest.raises(UserError, match=r"^image 3 is broken$"):
        fill([Wanted(store, range(IMAGES), 0)], model, source, Runtime("cpu"))


# --- several at once -----------------------------------------------------------------------------------------


class Member(Runtime):
    """One of two processes, simulated by a thread."""

    def __init__(self, rank: int, meeting: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.world, self.device, self._meeting, self._slots = rank, 2, torch.device("cpu"), meeting, slots

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self._slots[self.rank] = tensor
        self._meeting.wait(20)
        total = self._slots[0] + self._slots[1]
        self._meeting.wait(20)
        return total


def in_two(work: Any) -> list[Any]:
    """Run work(runtime) in two members at once. Return what each returned or raised."""
    meeting, slots, results = threading.Barrier(2), [None, None], [None, None]

    def run(rank: int) -> None:
        try:
            results[rank] = work(Member(rank, meeting, slots))
        except Exception as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_two_processes_fill_each_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, made = shapes(), []
    write = FeatureStore.write

    def recorded(self: FeatureStore, block: int, maps: np.ndarray, masks: np.ndarray) -> None:
        made.append((threading.current_thread().name, block))
        write(self, block, maps, masks)

    monkeypatch.setattr(FeatureStore, "write", recorded)

    model = frozen_model()

    def work(runtime: Runtime) -> FeatureStore:
        store = feature_store(tmp_path, model, source, "train", SIZE)
        fill([Wanted(store, range(IMAGES), 0)], model, source, runtime)
        return store

    stores = in_two(work)
    assert sorted(block for _, block in made) == [0, 1, 2, 3]
    by_thread = [sorted(block for name, block in made if name == thread) for thread in {name for name, _ in made}]
    assert sorted(by_thread) == [[0, 2], [1, 3]]
    alone = filled(tmp_path / "alone", frozen_model(), source)
    assert contents(stores[0].folder) == contents(alone.folder)
    for store in stores:
        for index in range(IMAGES):
            np.testing.assert_array_equal(store.read(index, True)[0], alone.read(index, True)[0])
    made.clear()
    in_two(work)
    assert made == []
    (alone.folder / "block-00001.bin").unlink()  # only one of them has work
    (stores[0].folder / "block-00001.bin").unlink()
    in_two(work)
    assert [block for _, block in made] == [1]


@pytest.mark.parametrize("failing", [0, 1])
def test_where_one_of_two_cannot_write_both_learn_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    source, write = shapes(), FeatureStore.write

    def refused(self: FeatureStore, block: int, maps: np.ndarray, masks: np.ndarray) -> None:
        if block % 2 == failing:
            raise OSError(errno.ENOSPC, "full")
        write(self, block, maps, masks)

    monkeypatch.setattr(FeatureStore, "write", refused)

    model = frozen_model()

    def work(runtime: Runtime) -> None:
        store = feature_store(tmp_path, model, source, "train", SIZE)
        fill([Wanted(store, range(IMAGES), 0)], model, source, runtime)

    results = in_two(work)
    assert [type(result) for result in results] == [StoreUnwritable, StoreUnwritable]
    assert "full" in str(results[failing])
    assert "another process of this run failed" in str(results[1 - failing])


def test_a_second_run_waits_for_the_one_that_builds_and_then_has_nothing_to_do(
    tmp_path: Path, written: list[tuple[str, int]]
) -> None:
    model, source = frozen_model(), shapes()
    ready = filled(tmp_path / "elsewhere", model, source)
    written.clear()
    store = feature_store(tmp_path, model, source, "train", SIZE)
    wanted = [Wanted(store, range(IMAGES), 0)]
    second = threading.Thread(target=fill, args=(wanted, model, source, Runtime("cpu")))
    with listening() as out, store.building(lambda: pytest.fail("nobody else builds")):
        second.start()
        deadline = time.monotonic() + 20
        while "waiting" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert out.getvalue() == "waiting for another run that is making the features of shapes train\n"
        with pytest.raises(UserError, match=r"a run is building shapes-train-.* right now"):
            clear(list(stored_caches(tmp_path)))
        for name, body in contents(ready.folder).items():
            (store.folder / name).write_bytes(body)
    second.join(20)
    assert not second.is_alive()
    assert written == []
    np.testing.assert_array_equal(store.read(20, False)[0], ready.read(20, False)[0])


def test_a_run_that_reads_is_not_disturbed_by_clearing(tmp_path: Path) -> None:
    model, source = frozen_model(), shapes()
    built = filled(tmp_path, model, source)
    opened = filled(tmp_path, model, source)
    before = [opened.read(index, False)[0].copy() for index in range(IMAGES)]
    assert clear(list(stored_caches(tmp_path))) > IMAGES * built.layout.bytes_per_image
    assert not built.folder.exists()
    for store in (built, opened):
        for index in range(IMAGES):
            np.testing.assert_array_equal(store.read(index, False)[0], before[index])


# --- the reading thread --------------------------------------------------------------------------------------


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "feature-reader"]


def batch(number: int) -> list[tuple[int, int]]:
    return [(0, number)]


def test_batches_come_in_order_and_a_few_ahead() -> None:
    loaded: list[int] = []

    def load(keys: list[tuple[int, int]]) -> Any:
        loaded.append(keys[0][1])
        return keys

    reading = _ahead(load, [batch(i) for i in range(50)])
    assert next(reading) == batch(0)  # type: ignore[comparison-overlap]
    deadline = time.monotonic() + 10
    while len(loaded) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert 4 <= len(loaded) <= 6, "ahead, but not all of it"
    assert list(reading) == [batch(i) for i in range(1, 50)]  # type: ignore[comparison-overlap]
    assert readers() == []


@pytest.mark.parametrize("error", [UserError("block 7 is damaged"), MemoryError(), KeyError("x")])
def test_an_error_of_the_reader_reaches_the_caller_at_its_place(error: Exception) -> None:
    def load(keys: list[tuple[int, int]]) -> Any:
        if keys == batch(2):
            raise error
        return keys

    seen: list[Any] = []
    with pytest.raises(type(error)) as raised:
        seen.extend(_ahead(load, (batch(i) for i in range(9))))
    assert raised.value is error
    assert readers() == []


def test_an_error_of_the_order_reaches_the_caller_too() -> None:
    def order() -> Iterator[list[tuple[int, int]]]:
        yield batch(0)
        raise UserError("no more")

    reading = _ahead(lambda keys: keys, order())  # type: ignore[arg-type, return-value]
    next(reading)
    with pytest.raises(UserError, match="no more"):
        next(reading)


def test_an_abandoned_reader_stops() -> None:
    taken: list[int] = []

    def order() -> Iterator[list[tuple[int, int]]]:
        for i in range(10**9):
            taken.append(i)
            yield batch(i)

    reading = _ahead(lambda keys: keys, order())  # type: ignore[arg-type, return-value]
    next(reading)
    assert len(readers()) == 1
    reading.close()  # type: ignore[attr-defined]
    assert readers() == []
    stopped = len(taken)
    time.sleep(0.05)
    assert len(taken) == stopped < 10


# --- several stages ------------------------------------------------------------------------------------------


def test_the_neck_is_one_convolution_over_the_stages_side_by_side() -> None:
    torch.manual_seed(0)
    neck = Neck([5, 3, 7], 6, "batch").eval()
    nn.init.uniform_(neck.norm.weight)
    stages = tuple(torch.randn(2, channels, 4, 6) for channels in (5, 3, 7))
    weight = torch.cat([conv.weight for conv in neck.convs], dim=1)
    expected = activate(neck.norm(F.conv2d(torch.cat(stages, dim=1), weight)))
    torch.testing.assert_close(neck(stages), expected)


def test_the_neck_brings_deeper_stages_to_the_first_ones_grid() -> None:
    torch.manual_seed(0)
    neck = Neck([5, 3], 6, "batch").eval()
    fine, coarse = torch.randn(2, 5, 7, 9), torch.randn(2, 3, 4, 5)
    resized = F.interpolate(coarse, (7, 9), mode="bilinear", align_corners=False)
    assert neck((fine, coarse)).shape == (2, 6, 7, 9)
    torch.testing.assert_close(neck((fine, coarse)), neck((fine, resized)))


def test_the_necks_output_starts_with_the_variance_that_its_norm_expects() -> None:
    torch.manual_seed(0)
    neck = Neck([40, 60], 64, "batch").requires_grad_(False)
    maps = neck.convs[0](torch.randn(4, 40, 16, 16)) + neck.convs[1](torch.randn(4, 60, 16, 16))
    assert float(maps.var()) == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize(
    ("stages", "stride", "shape"), [(None, 8, 6), ((3,), 8, 6), ((1, 3), 4, 12), ((0, 2), 2, 24), ((2, 3), 8, 6)]
)
def test_a_head_on_named_stages_has_the_first_ones_grid(
    stages: tuple[int, ...] | None, stride: int, shape: int
) -> None:
    model = frozen_model(stages=stages)
    model.grow(Increment(("a", "b"), (1, 2)))
    images = torch.randn(2, 3, SIZE, SIZE)
    out = model(images)
    assert model.stride == stride == SIZE // shape
    assert out.logits.shape == (2, 3, shape, shape)
    assert len(out.stages) == 4
    kept = model.read_by_head(out.stages)
    assert [f.shape[1] for f in kept] == [model.backbone.channels[s] for s in stages or (3,)]
    again = model(kept)
    assert torch.equal(again.logits, out.logits)
    assert again.stages == ()


@pytest.mark.parametrize("stages", [(4,), (-1,), (1, 1), (3, 1), (0, 7)])
def test_stages_that_are_not_there_or_out_of_order(stages: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"model\.stages is \[.*\]; tiny has stages 0 to 3") as said:
        frozen_model(stages=stages)
    assert "\n" not in str(said.value)


def test_a_model_of_several_stages_goes_through_its_file(tmp_path: Path) -> None:
    model = frozen_model(stages=(1, 3))
    model.grow(Increment(("a",), (1,), 5))
    save_segmenter(tmp_path / "model.safetensors", model, {})
    again, _ = load_segmenter(tmp_path / "model.safetensors")
    assert again.config.stages == (1, 3)
    assert again.stride == 4
    images = torch.randn(1, 3, SIZE, SIZE)
    assert torch.equal(again(images).logits, model(images).logits)
    key = feature_store(tmp_path, model, shapes(), "val", SIZE).folder
    assert feature_store(tmp_path, again, shapes(), "val", SIZE).folder == key


# --- incseg cache --------------------------------------------------------------------------------------------


@pytest.fixture
def two_caches() -> tuple[Path, Path, Path]:
    """Write two feature caches, a presence list and a trained step. Return their root first."""
    root, model, source = cache_path("features"), frozen_model(stages=(1, 3)), shapes(train_size=20)
    whole = filled(root, model, source, range(20)).folder
    part = filled(root, frozen_model(), shapes(), range(SMALL_BLOCK)).folder
    (root.parent / "presence").mkdir()
    (root.parent / "presence" / "voc-val-123.txt").write_text("a 1\n")
    step = root.parent / "steps" / "0123"
    step.mkdir(parents=True)
    for name, size in (("step.json", 10), ("model.safetensors", 4_000_000), ("state.safetensors", 100)):
        (step / name).write_bytes(bytes(size))
    return root.parent, whole, part


@pytest.mark.parametrize("argv", [["cache"], ["cache", "list"]])
def test_the_list_shows_what_is_cached(
    two_caches: tuple[Path, Path, Path], argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    root, whole, part = two_caches
    os.utime(part / "about.json", (0, 86400 * 365.25 * 30))
    assert main(argv) == 0
    shown = capsys.readouterr().out
    [described] = re.findall(rf"{whole.name}\n  (.*)\n  (.*)\n", shown)
    size = sum(file.stat().st_size for file in whole.iterdir()) / 1e9
    assert described[0].startswith(f"shapes train, 20 of 20 images, {size:.3f} GB, last used 20")
    assert described[1] == "tiny at 48 pixels, of each image 48×12×12 + 96×6×6 twice"
    assert re.search(rf"{part.name}\n  shapes train, 8 of 32 images, .* last used (1999-12-31|2000-01-0[12]) ", shown)
    assert "presence\n  1 lists of the classes in each image, 0.000 GB, last made 20" in shown
    assert "steps\n  1 trained steps for --reuse, 0.004 GB, last made 20" in shown
    assert re.search(rf"^\d\.\d\d\d GB in {root}; INCSEG_CACHE sets another folder$", shown, re.M)


@pytest.mark.parametrize("argv", [["cache"], ["cache", "clear", "--all"]])
def test_a_place_for_caches_that_is_not_a_folder(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    for place in (file, file / "below"):
        monkeypatch.setenv("INCSEG_CACHE", str(place))
        assert main(argv) == 2
        said = f"error: the folder of caches is '{place}', but {file} is not a folder; set INCSEG_CACHE to another\n"
        assert capsys.readouterr() == ("", said)
    monkeypatch.setenv("INCSEG_CACHE", str(tmp_path / "new"))
    assert main(argv) == 0


def test_a_run_marks_what_it_uses(tmp_path: Path) -> None:
    model, source = frozen_model(), shapes()
    folder = filled(tmp_path, model, source).folder
    os.utime(folder / "about.json", (0, 0))
    filled(tmp_path, model, source)
    [cache] = stored_caches(tmp_path)
    assert time.time() - cache.last_used < 60


def test_an_empty_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.startswith("0.000 GB in ")
    assert main(["cache", "clear", "--all"]) == 0
    assert capsys.readouterr().out == "cleared nothing, there is none: 0.000 GB\n"
    assert main(["cache", "clear", "voc"]) == 2
    assert capsys.readouterr().err == "error: unknown cache 'voc'; Allowed: none, there is nothing to clear\n"


def test_clearing_by_name(two_caches: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    root, whole, part = two_caches
    size = sum(file.stat().st_size for file in whole.iterdir())
    assert main(["cache", "clear", whole.name[:-10]]) == 0
    assert capsys.readouterr().out == f"cleared {whole.name}: {size / 1e9:.3f} GB\n"
    assert not whole.exists()
    assert part.exists()
    assert main(["cache", "clear", "steps"]) == 0
    assert capsys.readouterr().out == "cleared steps: 0.004 GB\n"
    assert list((root / "steps").iterdir()) == []
    assert main(["cache", "clear", "shapes", "presence"]) == 0
    assert [file for file in root.rglob("*") if file.is_file()] == []


def test_clearing_everything(two_caches: tuple[Path, Path, Path]) -> None:
    root = two_caches[0]
    (root / "features" / "mine.txt").touch()
    assert main(["cache", "clear", "--all"]) == 0
    assert [file.name for file in root.rglob("*") if file.is_file()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["clear"], "incseg cache clear needs either names, as incseg cache lists them, or --all"),
        (["clear", ""], "unknown cache ''"),
        (["clear", "../outside"], "unknown cache '../outside'"),
        (["clear", "shapes-trian"], "unknown cache 'shapes-trian'"),
        (["clear", "presence", "nothing"], "unknown cache 'nothing'"),
        (["clear", "/"], "unknown cache '/'"),
        (["list", "shapes"], "names and --all belong to incseg cache clear"),
        (["--all"], "names and --all belong to incseg cache clear"),
        (["clera"], "invalid choice: 'clera'"),
    ],
)
def test_clearing_needs_a_name_that_exists(
    two_caches: tuple[Path, Path, Path], argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = two_caches[0]
    outside = root / "outside"
    outside.mkdir()
    (outside / "about.json").write_text("{}")
    before = sorted(root.rglob("*"))
    assert main(["cache", *argv]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1
    assert sorted(root.rglob("*")) == before


def test_a_link_is_never_followed(
    two_caches: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, whole, part = two_caches
    moved = tmp_path / "another disk"
    whole.rename(moved)
    whole.symlink_to(moved)
    kept = contents(moved)
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "step.json").touch()
    (root / "steps" / "linked").symlink_to(tmp_path / "step")
    assert main(["cache", "clear", "--all"]) == 2
    assert "is a symbolic link and is not followed" in capsys.readouterr().err
    assert contents(moved) == kept != {}
    assert part.exists()
    assert (root / "presence" / "voc-val-123.txt").exists()
    assert main(["cache", "clear", "steps", part.name]) == 0
    assert [file.name for file in (root / "steps").iterdir()] == ["linked"]
    assert (tmp_path / "step" / "step.json").exists()
    assert not part.exists()


@pytest.mark.parametrize("kind", ["features", "presence", "steps"])
def test_a_kind_of_cache_that_is_a_link_is_left_alone(
    two_caches: tuple[Path, Path, Path], tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = two_caches[0]
    (root / kind).rename(tmp_path / "elsewhere")
    (root / kind).symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.rglob("*"))
    assert main(["cache", "clear", "--all"]) == 2
    assert f"{root / kind} is a link to another folder" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    assert main(["cache"]) == 0


def test_only_files_of_a_cache_are_deleted(two_caches: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, whole, _ = two_caches
    (tmp_path / "precious").write_text("kept")
    (whole / "notes.txt").write_text("kept")
    (whole / "block-00099.bin").symlink_to(tmp_path / "precious")
    assert main(["cache", "clear", whole.name]) == 0
    assert [file.name for file in whole.iterdir()] == ["notes.txt"]
    assert (tmp_path / "precious").read_text() == "kept"


@pytest.mark.parametrize("about", ["", "[1]", "{}", '{"images": "x"}'])
def test_a_cache_with_a_damaged_description_is_listed_and_cleared(
    two_caches: tuple[Path, Path, Path], about: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, whole, _ = two_caches
    (whole / "about.json").write_text(about)
    assert main(["cache"]) == 0
    assert re.search(rf"{whole.name}\n  .* GB, last used .*; its about.json is damaged\n", capsys.readouterr().out)
    assert main(["cache", "clear", whole.name]) == 0
    assert not whole.exists()


def test_the_description_names_what_is_cached(two_caches: tuple[Path, Path, Path]) -> None:
    about = json.loads((two_caches[1] / "about.json").read_text())
    assert (about["dataset"], about["split"], about["backbone"], about["size"]) == ("shapes", "train", "tiny", SIZE)
    assert about["stages"] == [[48, 12, 12], [96, 6, 6]]
    assert about["images"] == 20
