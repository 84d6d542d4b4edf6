"""Replay of old classes: the origin of replay images, which are drawn when, RECALL, and replay in whole runs."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from small_runs import listening, reevaluated_row, rows_of, small_config, write_config
from torch import Tensor

from incseg.cli import main
from incseg.data.shapes import Shapes
from incseg.data.unlabelled import Generator, ImageFolders
from incseg.engine.rundir import RunDir
from incseg.io import read_tensors
from incseg.losses.labels import fill_background, shifted
from incseg.losses.means import normalised
from incseg.methods import build_method
from incseg.methods.base import Alone, StepContext, StepImages
from incseg.methods.evidential import Evidential
from incseg.methods.finetune import Finetune
from incseg.methods.recall import Recall, build_helper, decoder_tensors, fit_helper
from incseg.methods.replay import Replay, Scores, open_replay
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.protocol import Protocol, Step
from incseg.run import train
from incseg.types import IGNORE, Batch, DatasetInfo, Increment, Inputs, Output, UserError

ROOT = Path(__file__).resolve().parents[1]
INFO = DatasetInfo("toy", ("ant", "bee", "cow", "doe"))
STEPS = Protocol(INFO, "ant,bee/cow/doe", "overlapped").steps


def photograph(path: Path, colour: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (colour, 0, 0)).save(path)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Write ant: 10 20 30, bee: 40 (the red of each image), cow: 50 60."""
    for name, colours in (("ant", (10, 20, 30)), ("bee", (40,)), ("cow", (50, 60))):
        for colour in colours:
            photograph(tmp_path / "web" / name / f"{colour}.png", colour)
    return tmp_path / "web"


def reds(pictures: Any) -> list[int]:
    return [picture().getpixel((0, 0))[0] for picture in pictures]


# --- folders ------------------------------------------------------------------------------------------------------


def test_photographs_of_a_class(folders: Path) -> None:
    (folders / "ant" / "note.txt").write_text("no image")
    (folders / "ant" / ".hidden.png").write_bytes(b"")
    source = ImageFolders(folders)
    source.require(["ant", "bee", "cow"])
    assert reds(source.pictures("ant", 9, 0)) == [10, 20, 30]
    assert reds(source.pictures("ant", 2, 0)) == [10, 30], "evenly from all of them"
    assert reds(source.pictures("ant", 1, 0)) == [10]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("doe", r"web' has no folder for the class 'doe', but ant, bee, cow, empty; make one folder of images per"),
        ("empty", r"empty' has no image; put some of type \.jpg, "),
    ],
)
def test_what_is_missing_is_named_in_one_line(folders: Path, name: str, message: str) -> None:
    (folders / "empty").mkdir()
    with pytest.raises(UserError, match=message) as raised:
        ImageFolders(folders).require(["ant", name])
    assert "\n" not in str(raised.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no folder '.*absent' to replay from; give one"):
        ImageFolders(tmp_path / "absent").require(["ant"])


def test_the_fingerprint_follows_bytes_and_classes(folders: Path, tmp_path: Path) -> None:
    before = ImageFolders(folders).fingerprint()
    copy = shutil.copytree(folders, tmp_path / "copy")
    assert ImageFolders(copy).fingerprint() == before
    (copy / "bee" / "30.png").write_bytes((copy / "ant" / "30.png").read_bytes())
    (copy / "ant" / "30.png").unlink()
    moved = ImageFolders(copy).fingerprint()
    photograph(folders / "cow" / "60.png", 61)
    assert len({before, moved, ImageFolders(folders).fingerprint()}) == 3


# --- generators ---------------------------------------------------------------------------------------------------

MADE = """
from PIL import Image

def paint(class_name, count, seed):
    return [Image.new("L", (12, 10), (seed + len(class_name) + number) % 256) for number in range(count)]

def arrays(class_name, count, seed):
    return [1, "a"]

def nothing(class_name, count, seed):
    return []

constant = 3
"""


@pytest.fixture
def generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made.py").write_text(MADE)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("made:paint", "made:absent", "absent:paint", "made:constant", "made:arrays", "made:nothing")
    monkeypatch.setenv("INCSEG_TRUST", ",".join(names))
    monkeypatch.delitem(sys.modules, "made", raising=False)


def test_generated_photographs(generators: None) -> None:
    source = Generator("made:paint")
    source.require(["anything"])
    assert reds(source.pictures("ant", 3, 7)) == [10, 11, 12]
    assert source.pictures("ant", 1, 7)[0]().mode == "RGB"
    assert source.fingerprint() == "made:paint"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("made:absent", r"generator 'made:absent' cannot be imported .*; write package\.module:callable"),
        ("absent:paint", "cannot be imported .*No module named 'absent'"),
        ("made:constant", "generator 'made:constant' is int, not callable"),
        ("made:arrays", "generator 'made:arrays' gave int and str for the class 'ant'; it must return a list of 2"),
        ("made:nothing", "gave nothing for the class 'ant'"),
    ],
)
def test_generators_that_do_not_generate(generators: None, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Generator(name).pictures("ant", 2, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replay": "a", "generator": "b:c"}, "replay is 'a' and generator 'b:c'; give one of the two"),
        ({"replay": "a", "replay_images": 0}, "replay_images is 0; it must be at least 1"),
        ({"helper_epochs": -1}, "helper_epochs is -1 and helper_lr 0.01; both must be at least 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_method({"name": "recall", **options})


def test_nothing_is_touched_before_a_step_begins() -> None:
    """Otherwise a model could not predict on a machine without its replay images."""
    assert open_replay(None, None, 5) is None
    Recall(Recall.Config(replay="/absent"))
    Recall(Recall.Config(generator="absent:paint"))


# --- the pool and its order ---------------------------------------------------------------------------------------


def red_pixels(images: Any) -> Tensor:
    """Return (B, 3, 2, 2) with the red of an image."""
    return torch.stack([torch.full((3, 2, 2), float(image.getpixel((0, 0))[0])) for image in images])


def model_of(number_of_steps: int) -> Segmenter:
    torch.manual_seed(0)
    model = Segmenter(ModelConfig("tiny", output_stride=8, width=16, dilations=(1, 1, 1)), True)
    for step in STEPS[:number_of_steps]:
        model.grow(Increment(step.names, step.new, 5))
        torch.nn.init.normal_(model.classifiers[-1].get_parameter("weight"), std=0.5)
    return model


def context_of(index: int, inputs: Any = red_pixels, **changes: Any) -> StepContext:
    torch.manual_seed(100 + index)
    model = model_of(index + 1)
    teacher = model_of(index).eval() if index else None
    return StepContext(STEPS[index], model, teacher, StepImages(lambda: iter([]), inputs=inputs), **changes)


def batch_of(images: int, size: tuple[int, int] = (2, 2)) -> Batch:
    labels = torch.full((images, *size), 4, dtype=torch.uint8)
    return Batch(torch.zeros(images, 3, 2, 2), labels, torch.bincount(labels.flatten(), minlength=256).float())


def drawn_reds(replay: Replay, images: int, batches: int) -> list[int]:
    """Return the replay images after `images` own images in each batch, identified by their red."""
    found = []
    for _ in range(batches):
        inputs = replay.extend(batch_of(images)).inputs
        assert isinstance(inputs, Tensor)
        assert inputs.shape == (2 * images, 3, 2, 2)
        assert (inputs[:images] == 0).all(), "the step's own images come first, as they were"
        found += inputs[images:, 0, 0, 0].int().tolist()
    return found


def started(folders: Path, index: int = 2, most: int = 9, **changes: Any) -> Replay:
    replay = Replay(ImageFolders(folders), most)
    replay.begin_step(context_of(index, **changes))
    return replay


def test_step_0_has_nothing_to_replay_but_asks_for_its_folders(folders: Path) -> None:
    replay = started(folders, 0)
    batch = batch_of(2)
    assert replay.extend(batch) is batch
    (folders / "bee" / "40.png").unlink()
    with pytest.raises(UserError, match="bee' has no image"):
        started(folders, 0)


def test_every_class_has_its_share_in_every_round(folders: Path) -> None:
    seen = Counter(drawn_reds(started(folders), 3, 6))  # two rounds of 3 classes x 3 photographs
    by_class = {"ant": (10, 20, 30), "bee": (40,), "cow": (50, 60)}
    assert {name: sum(seen[red] for red in own) for name, own in by_class.items()} == {"ant": 6, "bee": 6, "cow": 6}
    assert [seen[red] for red in by_class["ant"]] == [2, 2, 2]
    assert set(drawn_reds(started(folders, most=1), 3, 6)) == {10, 40, 50}
    assert set(drawn_reds(started(folders, index=1), 3, 6)) == {10, 20, 30, 40}, "cow is new, not old"


def test_the_order_is_the_seeds_and_the_count_continues(folders: Path) -> None:
    whole = drawn_reds(started(folders), 4, 9)
    assert drawn_reds(started(folders), 4, 9) == whole
    first, second = started(folders), started(folders)
    drawn_reds(first, 4, 5)
    second.load_state({name: value.clone() for name, value in first.state().items()})
    assert drawn_reds(second, 4, 4) == whole[20:]
    torch.manual_seed(1)
    other = Replay(ImageFolders(folders), 9)
    context = context_of(2)
    torch.manual_seed(1)
    other.begin_step(context)
    assert drawn_reds(other, 4, 9) != whole


@dataclass
class One(Alone):
    """One of two processes that have this number of images together."""

    rank: int
    images: int

    def share(self, rows: Sequence[int]) -> list[int]:
        return list(rows[self.rank :: 2])

    def sum(self, tensor: Tensor) -> Tensor:
        return torch.tensor(float(self.images))


@pytest.mark.parametrize("images", [4, 5])
def test_two_processes_draw_what_one_draws(folders: Path, images: int) -> None:
    alone = drawn_reds(started(folders), images, 3)
    parts = []
    for rank in range(2):
        mine = images // 2 + (rank == 0 and images % 2)
        replay = started(
            folders,
            processes=One(rank, images),
        )
        parts.append(drawn_reds(replay, mine, 3))
    assert sorted(parts[0] + parts[1]) == sorted(alone)
    assert parts[0][:1] + parts[1][:1] == alone[:2]


def test_cached_features_are_used_in_the_next_steps_too(folders: Path) -> None:
    asked: list[int] = []

    def features(images: Any) -> Inputs:
        asked.extend(int(red) for red in red_pixels(images)[:, 0, 0, 0])
        return (red_pixels(images),)

    replay = started(folders, index=1, inputs=features)
    assert sorted(asked) == [10, 20, 30, 40]
    replay.begin_step(context_of(2, features))
    assert sorted(asked) == [10, 20, 30, 40, 50, 60], "the step brings photographs of cow, the others are there"
    batch = Batch((torch.zeros(18, 3, 2, 2),), torch.zeros(18, 2, 2, dtype=torch.uint8), torch.zeros(256))
    (inputs,) = replay.extend(batch).inputs
    (anew,) = started(folders, index=2, inputs=features).extend(batch).inputs
    assert torch.equal(inputs, anew), "the same photographs in the same order as of a run that was interrupted"


def test_pixels_are_read_again_in_every_step(folders: Path) -> None:
    replay = started(folders, index=1)
    photograph(folders / "bee" / "40.png", 41)
    replay.begin_step(context_of(2))
    assert 41 in drawn_reds(replay, 9, 1)


def test_labels_are_the_arg_max_of_the_scores_at_the_size_of_the_batch(folders: Path) -> None:
    """Features remain features, in half precision. Labels of increment k follow those of the earlier increments."""
    asked = []

    def features(images: Any) -> Inputs:
        pixels = red_pixels(images)
        return pixels[:, :1] + 0.0001, pixels.repeat(1, 2, 2, 2)

    def scores(number: int, inputs: Inputs) -> Tensor:
        asked.append(number)
        generator = torch.Generator().manual_seed(int(inputs[0].sum()))
        return torch.randn(len(inputs[0]), 1 + len(STEPS[number].new), 2, 3, generator=generator)

    replay = Replay(ImageFolders(folders), 1)
    replay.begin_step(context_of(2, inputs=features), scores)
    assert asked == [0, 0, 1], "once a class, by the helper of its increment"
    own = batch_of(3, (5, 7))
    own.inputs = (torch.zeros(3, 1, 2, 2), torch.zeros(3, 6, 4, 4))
    batch = replay.extend(own)
    assert isinstance(batch.inputs, tuple)
    assert [part.shape[0] for part in batch.inputs] == [6, 6]
    assert batch.inputs[0].dtype == torch.float32
    assert set(batch.inputs[0][3:, 0, 0, 0].tolist()) == {10.0, 40.0, 50.0}, "half precision drops the 0.0001"
    found = set()
    for row in range(3, 6):
        number, first = (1, 2) if batch.inputs[0][row, 0, 0, 0] == 50 else (0, 0)
        inputs = features([Image.new("RGB", (1, 1), (int(batch.inputs[0][row, 0, 0, 0]), 0, 0))])
        said = scores(number, inputs).half().float()
        best = F.interpolate(said, (5, 7), mode="bilinear").argmax(1)[0]
        expected = torch.where(best == 0, 0, best + first)
        assert torch.equal(batch.labels[row].long(), expected)
        found |= set(expected.unique().tolist())
    assert found >= {0, 3}
    assert torch.equal(batch.labels[:3], own.labels)
    assert torch.equal(batch.counts, torch.bincount(batch.labels.flatten(), minlength=256).float())


def test_without_scores_all_is_background(folders: Path) -> None:
    batch = started(folders).extend(batch_of(2))
    assert (batch.labels[2:] == 0).all()
    assert batch.counts[0] == 8
    assert batch.counts[4] == 8


# --- the losses of RECALL -----------------------------------------------------------------------------------------


def example(step: Step) -> tuple[Batch, Output, Output]:
    generator = torch.Generator().manual_seed(3)
    allowed = torch.tensor([0, 0, *range(len(step.old) + 1, len(step.seen) + 1), IGNORE], dtype=torch.uint8)
    labels = allowed[torch.randint(len(allowed), (2, 6, 8), generator=generator)]
    logits = torch.randn(2, 1 + len(step.seen), 3, 4, dtype=torch.float64, generator=generator).requires_grad_()
    teacher = torch.randn(2, 1 + len(step.old), 3, 4, dtype=torch.float64, generator=generator)
    batch = Batch(torch.zeros(2, 3, 6, 8), labels, torch.bincount(labels.flatten(), minlength=256).double())
    return batch, Output(logits, logits), Output(teacher, teacher)


def test_background_is_painted_by_the_teacher_pixel_by_pixel() -> None:
    batch, out, teacher = example(STEPS[2])
    up, old = (F.interpolate(z.detach(), (6, 8), mode="bilinear") for z in (out.logits, teacher.logits))
    total, valid, changed = 0.0, 0, 0
    for image in range(2):
        for y in range(6):
            for x in range(8):
                label = int(batch.labels[image, y, x])
                if label == IGNORE:
                    continue
                if label == 0:
                    label = int(old[image, :, y, x].argmax())
                    changed += label > 0
                total -= float(up[image, :, y, x].log_softmax(0)[label])
                valid += 1
    assert changed > 5
    (value,) = Recall().losses(batch, out, teacher, STEPS[2]).values()
    assert float(value.detach()) == pytest.approx(total / valid)


def test_in_painting_as_in_the_authors_code() -> None:
    """Void of the new images too, and no replay image; every pixel counts."""
    batch, out, teacher = example(STEPS[2])
    batch = replace(batch, images=[7, *[-1] * (len(batch.labels) - 1)])
    guess = F.interpolate(teacher.logits, batch.size, mode="bilinear").argmax(1)
    labels = batch.labels.long()
    labels[0] = torch.where((labels[0] == 0) | (labels[0] == IGNORE), guess[0], labels[0])
    labels[1:][labels[1:] == IGNORE] = 0  # replay images have no void
    batch.labels[1:][batch.labels[1:] == IGNORE] = 0
    batch = replace(batch, counts=torch.bincount(batch.labels.flatten(), minlength=256).to(batch.counts))
    wanted = F.cross_entropy(F.interpolate(out.logits, batch.size, mode="bilinear"), labels)
    (found,) = normalised(Recall(Recall.Config(fill="new")).losses(batch, out, teacher, STEPS[2]), batch).values()
    torch.testing.assert_close(found, wanted)


def test_where_the_teacher_sees_nothing_it_is_fine_tuning() -> None:
    batch, out, teacher = example(STEPS[2])
    teacher.logits[:, 0] += 100
    mine, plain = (m.losses(batch, out, teacher, STEPS[2])["ce"] for m in (Recall(), Finetune()))
    torch.testing.assert_close(mine, plain)
    first = Recall().losses(batch, out, None, STEPS[0])["ce"]
    torch.testing.assert_close(first, plain)


def test_labels_seen_otherwise() -> None:
    labels = torch.tensor([0, 3, 4, IGNORE], dtype=torch.uint8)
    assert shifted(labels, 2).tolist() == [0, 1, 2, IGNORE]
    assert shifted(labels, 0) is labels
    assert fill_background(labels, torch.tensor([2, 1, 1, 1])).tolist() == [2, 3, 4, IGNORE]
    assert fill_background(labels, torch.zeros(4, dtype=torch.int64)).tolist() == labels.tolist()


# --- helper decoders ----------------------------------------------------------------------------------------------


def scene(index: int) -> StepContext:
    """Return a step whose images show its class in the bright half."""
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 0.1
    images[:, :, :, 8:] += 2
    labels = torch.zeros(4, 16, 16, dtype=torch.uint8)
    labels[:, :, 8:] = len(STEPS[index].old) + 1
    labels[:, 0] = IGNORE
    batch = Batch(images, labels, torch.bincount(labels.flatten(), minlength=256).float())
    context = context_of(index)
    context = replace(context, images=StepImages(lambda: iter([batch, batch])))
    context.model.backbone.eval().requires_grad_(False)
    return context


def test_an_untrained_helper_is_the_model_restricted_to_its_classes() -> None:
    context = scene(2)
    images = next(iter(context.images.batches())).inputs
    helper = fit_helper(context, 0, 0.1)
    with torch.no_grad():
        whole = context.model.frozen_copy()(images).logits
        torch.testing.assert_close(helper(images).logits, whole[:, [0, 4]])
    assert helper.increments == context.model.increments[-1:]


def test_a_helper_learns_its_step_and_leaves_the_model_alone() -> None:
    context = scene(1)
    before = {name: tensor.clone() for name, tensor in context.model.state_dict().items()}
    (batch, _) = context.images.batches()
    helper = fit_helper(context, 20, 0.05)
    after = context.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in context.model.parameters())
    with torch.no_grad():
        found = F.interpolate(helper(batch.inputs).logits, (16, 16), mode="bilinear").argmax(1)
    truth = shifted(batch.labels, 2)
    assert (found[truth != IGNORE] == truth[truth != IGNORE]).float().mean() > 0.9
    kept, again = (decoder_tensors(one) for one in (helper, fit_helper(context, 20, 0.05)))
    assert all(torch.equal(again[name], tensor) for name, tensor in kept.items())
    assert not any(name.startswith("backbone.") for name in kept)
    rebuilt = build_helper(context.model, context.model.increments[-1], kept)
    with torch.no_grad():
        assert torch.equal(rebuilt(batch.inputs).logits, helper(batch.inputs).logits)


def test_the_helper_of_the_base_is_the_base(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In step 2, replay images of step 0 still have the labels that step 0 predicted, though its decoder has changed
    since."""
    asked: list[Scores] = []

    def begin_step(self: Replay, context: StepContext, scores: Scores | None = None) -> None:
        asked.append(scores)  # type: ignore[arg-type]

    monkeypatch.setattr(Replay, "begin_step", begin_step)
    method = Recall(Recall.Config(replay=str(folders), helper_epochs=1))
    images = torch.randn(2, 3, 16, 16)
    contexts = [scene(0), scene(1), scene(2)]
    base, _, last = (context.model for context in contexts)
    contexts[1] = replace(contexts[1], teacher=base.frozen_copy())
    for context in contexts:
        if context.step.index == 2:
            assert context.teacher is not None
            torch.nn.init.normal_(context.teacher.aspp.mix.weight)
        method.begin_step(context)
        method.end_step(context)
    with torch.no_grad():
        assert torch.equal(asked[2](0, images), base.frozen_copy()(images).logits)
        assert asked[2](1, images).shape[1] == 2
    assert not any(parameter.requires_grad for parameter in last.backbone.parameters())
    assert not last.backbone.training
    assert {name.split(".")[1] for name in method.state() if name.startswith("helper")} == {"0", "1", "2"}


# --- whole runs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write three scenes of shapes for each class."""
    root, source = tmp_path_factory.mktemp("web"), Shapes(train_size=60, val_size=1, image_size=48)
    for number, name in enumerate(source.info.classes, start=1):
        shown = [i for i, ids in enumerate(source.known_presence("train") or ()) if number in ids][:3]
        for image in shown:
            (root / name).mkdir(exist_ok=True)
            source.image("train", image).save(root / name / f"{image}.png")
    return str(root)


def config_of(out: Path, name: str, web: str, **changes: Any) -> Any:
    options = {"replay": web, "replay_images": 2, **changes.pop("options", {})}
    if name == "recall":
        options["helper_epochs"] = 1
    return small_config(out, **{"method": {"name": name, **options}, **changes})


def tensors_of(folder: Path, step: int) -> dict[str, Tensor]:
    return read_tensors(RunDir(folder).model(step))[0]


@pytest.mark.parametrize("name", ["recall", "evidential"])
def test_a_run_with_replay(name: str, web: str, tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", name, web)
    with listening() as shown:
        train(config)
    assert "replay: 12 images of 6 old classes, 0 MB in memory" in shown.getvalue()
    assert "replay: 16 images of 8 old classes" in shown.getvalue()
    assert reevaluated_row(config.folder) == rows_of(config.folder)[-1]
    base, last = tensors_of(config.folder, 0), tensors_of(config.folder, 2)
    frozen = [torch.equal(base[key], tensor) for key, tensor in last.items() if key.startswith("backbone.")]
    assert frozen
    assert all(frozen) if name == "recall" else not any(frozen)


def test_replay_matters(web: str, tmp_path: Path) -> None:
    losses = []
    for name in ("recall", "evidential"):
        for source in (web, None):
            config = config_of(tmp_path / f"{name}{source is None}", name, web, options={"replay": source})
            with listening() as shown:
                train(config)
            losses.append(rows_of(config.folder)[-1]["losses"])
            noted = "recall has no replay images and only fills in background" in shown.getvalue()
            assert noted == (name == "recall" and source is None)
    assert losses[0] != losses[1]
    assert losses[2] != losses[3]


def test_a_base_is_shared_and_the_photographs_are_part_of_the_recipe(web: str, tmp_path: Path) -> None:
    def reused(out: str, method: dict[str, Any]) -> list[bool]:
        train(small_config(tmp_path / out, method=method, reuse=True))
        return [row["reused_from"] is not None for row in RunDir(tmp_path / out).rows()]

    copy = shutil.copytree(web, tmp_path / "copy")
    assert reused("base", {"name": "finetune"}) == [False] * 3
    recall = {"name": "recall", "replay_images": 2, "helper_epochs": 1}
    assert reused("first", {**recall, "replay": web}) == [True, False, False]
    assert reused("again", {**recall, "replay": str(copy)}) == [True] * 3
    photograph(copy / "disc" / "0.png", 9)
    assert reused("changed", {**recall, "replay": str(copy)}) == [True, False, False]
    assert reused("evidential", {"name": "evidential"}) == [False] * 3
    assert reused("evidential+", {"name": "evidential", "replay": web, "pod": 0.1}) == [True, False, False]


@pytest.mark.parametrize("name", ["recall", "evidential"])
def test_cached_features_and_pixels_replay_alike(name: str, web: str, tmp_path: Path) -> None:
    """Pixels of a frozen backbone against its features in half precision."""
    rows = []
    for cache in ("auto", "off"):
        config = config_of(
            tmp_path / cache, name, web,
            model={"freeze_backbone": True, "output_stride": 8, "stages": (0, 1, 2)},
            train={"scale": None, "epochs": 1}, data={"cache": cache},
            options={"pod": 0.01} if name == "evidential" else {},
        )  # fmt: skip
        with listening() as shown:
            train(config)
        assert ("replay: 16 images of 8 old classes, 0 MB" in shown.getvalue()) == (cache == "off")
        rows.append([row["losses"] for row in rows_of(config.folder)])
    for kept, pixels in zip(*rows, strict=True):
        assert kept == pytest.approx(pixels, rel=0.02)


def test_a_run_with_a_generator(generators: None, tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "run", "recall", "", options={"replay": None, "generator": "made:paint"}, train={"epochs": 1}
    )
    train(config)
    assert len(rows_of(config.folder)) == 3


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: (root / "disc" / "a.png").write_bytes(b"\x89PNG broken"), r"a\.png: cannot be read as an image"),
        (lambda root: [f.unlink() for f in (root / "disc").iterdir()], "disc' has no image; put some"),
        (lambda root: (root / "disc").rename(root / "Disc"), "has no folder for the class 'disc', but Disc, arrow"),
    ],
    ids=["broken", "empty", "misspelt"],
)
def test_a_fault_in_the_folders_is_one_line(
    web: str, tmp_path: Path, spoil: Callable[[Path], Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(web, tmp_path / "copy")
    spoil(copy)
    config = config_of(tmp_path / "run", "recall", str(copy), train={"epochs": 1}, options={"replay_images": 9})
    assert main(["train", "--config", write_config(config, tmp_path / "c.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(message, error)
    done = RunDir(tmp_path / "run").steps_done()
    assert done == ([0] if "a.png" in error else []), "a mistake visible in a name is reported before step 0"


def test_photographs_leave_what_own_pixels_count_to_evidence(folders: Path) -> None:
    method = Evidential(Evidential.Config(replay=str(folders)))
    method.begin_step(context_of(2))
    own = batch_of(3)
    longer = method.extend(own)
    assert len(longer.labels) == 6
    torch.manual_seed(0)
    logits, teacher = torch.randn(6, 4, 2, 2, requires_grad=True), torch.randn(6, 3, 2, 2)

    def gradient(batch: Batch, images: int) -> Tensor:
        out, old = (Output(z[:images], torch.zeros(images, 1, 2, 2)) for z in (logits, teacher))
        (found,) = torch.autograd.grad(sum(method.losses(batch, out, old, STEPS[2]).values()), logits)
        return found

    with_photographs, without = gradient(longer, 6), gradient(own, 3)
    torch.testing.assert_close(with_photographs[:3], without[:3])
    assert with_photographs[3:].abs().min() > 0, "and the photographs count as well"


# --- the script that makes folders --------------------------------------------------------------------------------


def make_folders(*arguments: str) -> None:
    found = importlib.util.spec_from_file_location("web_images", ROOT / "tools" / "web_images.py")
    assert found is not None
    assert found.loader is not None
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    script.main(arguments)


def test_folders_from_the_images_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They show their class, belong to its step and to no later one, and none is held out."""
    flags = ["--data.train_size", "60", "--data.image_size", "48", "--data.holdout", "5", "--task", "6-2"]
    make_folders(str(tmp_path / "web"), "--per-class", "4", *flags)
    printed = capsys.readouterr().out
    source = Shapes(train_size=60, val_size=1, image_size=48)
    presence = source.known_presence("train") or ()
    steps = Protocol(source.info, "6-2", "overlapped").steps
    assert sorted(folder.name for folder in (tmp_path / "web").iterdir()) == sorted(source.info.classes[:8])
    for step in steps[:-1]:
        for class_id, name in zip(step.new, step.names, strict=True):
            files = sorted((tmp_path / "web" / name).iterdir())
            assert 1 <= len(files) <= 4
            assert f"{name}: {len(files)} images" in printed
            for file in files:
                index = list(source.names("train")).index(file.stem)
                assert class_id in presence[index]
                assert not set(presence[index]) & set(step.future), "a later step would train on it"
                assert index % 5 != 2, "held out"
                assert Image.open(file).tobytes() == source.image("train", index).tobytes()
    with pytest.raises(UserError, match=r"web is not empty, .*; give a new folder"):
        make_folders(str(tmp_path / "web"), *flags)


def test_a_class_whose_images_all_come_later(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"every image of '\w+' is used by a later step too; choose another"):
        make_folders(str(tmp_path / "web"), "--data.train_size", "12", "--task", "1-1")
    assert not (tmp_path / "web").exists()


def test_files_are_copied_as_they_are(tmp_path: Path) -> None:
    """A folder dataset with JPEG images. 'a' shows both classes, so it belongs to the later step."""
    data = tmp_path / "data"
    for name, ids in (("a", (1, 2)), ("b", (1,)), ("c", (2,)), ("d", (1,))):
        mask = np.zeros((8, 8), dtype=np.uint8)
        mask[: len(ids), 0] = ids
        for folder in ("images", "masks"):
            (data / folder).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), "red").save(data / "images" / f"{name}.jpg")
        Image.fromarray(mask).save(data / "masks" / f"{name}.png")
    (data / "classes.txt").write_text("cat\ndog\n")
    (data / "train.txt").write_text("a\nb\nc\nd\n")
    (data / "val.txt").write_text("c\n")
    make_folders(str(tmp_path / "web"), "--data", "folder", "--root", str(data), "--task", "cat/dog")
    assert sorted(file.name for file in (tmp_path / "web").rglob("*.*")) == ["b.jpg", "d.jpg"]
    assert (tmp_path / "web" / "cat" / "b.jpg").read_bytes() == (data / "images" / "b.jpg").read_bytes()
