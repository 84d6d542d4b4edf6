"""What a run does beside the protocol: parts that later steps do not change, images held out for choosing settings."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from small_runs import reevaluated_row, rows_of, small_config

from incseg.engine.checkpoint import Progress, load_checkpoint, save_checkpoint
from incseg.engine.rundir import RunDir
from incseg.engine.runtime import Runtime
from incseg.engine.trainer import TrainConfig, build_optimizer
from incseg.io import read_tensors, write_tensors
from incseg.methods import build_method
from incseg.methods.base import Method
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.run import Setup, train
from incseg.types import Increment, UserError


def changed(folder: Path, frozen: str) -> set[str]:
    """Return the names of the tensors that step 1 changed."""
    train(small_config(folder, train={"frozen_later": frozen, "epochs": 1}))
    before, _ = read_tensors(RunDir(folder).model(0))
    after, _ = read_tensors(RunDir(folder).model(1))
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def test_later_steps_leave_alone_what_is_frozen(tmp_path: Path) -> None:
    everything = changed(tmp_path / "nothing", "nothing")
    statistics = {name for name in everything if "running_" in name or "num_batches" in name}
    assert any(name.startswith("aspp") for name in statistics)
    assert changed(tmp_path / "statistics", "statistics") == everything - statistics
    assert changed(tmp_path / "head", "head") == {name for name in everything if name.startswith("classifiers")}
    norms = {name for name in everything if "norm" in name or ".bn" in name or "downsample.1" in name}
    assert statistics < norms
    assert changed(tmp_path / "norms", "norms") == everything - norms


def test_the_head_may_learn_faster_and_old_parameters_be_free_of_decay() -> None:
    """As DKD is trained: ten times the rate outside the backbone; in later steps decay on the new classifier alone."""
    model = Segmenter(ModelConfig("tiny", output_stride=8, width=8, dilations=(1, 1, 1)), True)
    names = {parameter: name for name, parameter in model.named_parameters()}
    config = TrainConfig(lr=0.1, lr_later=0.01, head_rate=10.0, decay_later="new")
    for step, lr in ((0, 0.1), (1, 0.01)):
        model.grow(Increment((f"class {step}",), (step,)))
        names |= {parameter: name for name, parameter in model.named_parameters()}
        newest, seen = set(model.classifiers[-1].parameters()), set()
        for group in build_optimizer(model, config, step).param_groups:
            for parameter in group["params"]:
                seen.add(names[parameter])
                assert group["lr"] == lr * (1 if names[parameter].startswith("backbone.") else 10)
                assert group["weight_decay"] == (1e-4 if step == 0 or parameter in newest else 0)
        assert seen == set(names.values())
    plain = build_optimizer(model, TrainConfig(lr_later=0.01), 1).param_groups
    assert [(group["lr"], group["weight_decay"], len(group["params"])) for group in plain] == [(0.01, 1e-4, len(names))]


def test_a_limit_of_later_gradients_is_for_later_steps_alone(tmp_path: Path) -> None:
    """Step 0 does not change. Step 1, whose gradients are clipped to nothing, changes by weight decay only."""
    common = {"epochs": 1, "momentum": 0.0, "weight_decay": 0.0, "frozen_later": "statistics"}
    for name, limits in {"free": {}, "later": {"clip_later": 1e-9}, "first": {"clip": 1e-9, "clip_later": 1e9}}.items():
        train(small_config(tmp_path / name, train={**common, **limits}))
    models = {
        (name, step): read_tensors(RunDir(tmp_path / name).model(step))[0]
        for name in ("free", "later", "first")
        for step in (0, 1)
    }

    def moved(name: str) -> float:
        before, after = models[name, 0], models[name, 1]
        return max(float((after[key].float() - before[key].float()).abs().max()) for key in before)

    assert all(torch.equal(models["free", 0][key], models["later", 0][key]) for key in models["free", 0])
    assert moved("later") < 1e-8 < 1e-4 < moved("free")
    assert moved("first") > 1e-4


def test_a_spike_is_a_gradient_far_above_those_before_it() -> None:
    progress = Progress()
    for norm in [50.0, *[1.0] * 19, 15.0, 20.0]:  # a step begins with large ones
        progress.add({"new": 1.0}, norm, starts_epoch=False)
    before = (50 + 19 + 15) / 21
    assert progress.gradient == {"mean_norm": (50 + 19 + 15 + 20) / 22, "spike": 20 / before, "spike_at": 21}
    assert Progress().gradient == {"mean_norm": 0.0, "spike": 0.0, "spike_at": None}
    resumed = Progress(iteration=50)  # from a checkpoint that had no norms yet
    for _ in range(12):
        resumed.add({}, 1.0, starts_epoch=False)
    assert resumed.gradient == {"mean_norm": 1.0, "spike": 1.0, "spike_at": 60}
    still = Progress()
    for _ in range(20):  # a method that has nothing to learn
        still.add({}, 0.0, starts_epoch=False)
    assert still.gradient["spike"] == 0.0
    passed_over = Progress()
    for norm in [1.0] * 11 + [math.inf] * 11 + [2.0]:
        passed_over.add({}, norm, starts_epoch=False)
    assert passed_over.gradient == {"mean_norm": 13 / 12, "spike": 2.0, "spike_at": 22}


def test_a_checkpoint_of_version_0_1_is_read(tmp_path: Path) -> None:
    """Its gradient spike has another name."""
    model, method, path = torch.nn.Linear(1, 1), Method(), tmp_path / "checkpoint.safetensors"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    runtime = Runtime("cpu")
    save_checkpoint(path, 1, Progress(7, spike=3.0, spike_at=5), model, optimizer, runtime.grad_scaler(), method)
    tensors, metadata = read_tensors(path)
    write_tensors(path, tensors, {"checkpoint": metadata["checkpoint"].replace("spike", "jolt")})
    resumed = load_checkpoint(path, 1, model, optimizer, runtime.grad_scaler(), method, runtime)
    assert (resumed.iteration, resumed.spike, resumed.spike_at) == (7, 3.0, 5)


def test_a_gradient_spike_of_a_later_step_is_reported_unless_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("incseg.engine.trainer._SPIKE", 0.1)
    for name, limits in {"free": {}, "limited": {"clip_later": 100.0}}.items():
        train(small_config(tmp_path / name, train={"epochs": 1, "epochs_later": 12, **limits}))
    logged = {name: RunDir(tmp_path / name).log.read_text() for name in ("free", "limited")}
    row = rows_of(tmp_path / "free")[1]
    assert f"step 1: the gradient of update {row['gradient']['spike_at']} was " in logged["free"]
    assert "step 0: the gradient" not in logged["free"]
    assert "the gradient of update" not in logged["limited"]


def test_held_out_images_are_tested_on_and_never_trained_with(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", data={"holdout": 4})
    setup = Setup.of(config, build_method(config.method))
    assert setup.test_images == tuple(range(2, 32, 4))
    assert not set(setup.test_images) & {image for step in setup.train_images for image in step}
    whole = Setup.of(small_config(tmp_path / "run"), build_method(config.method))
    for some, images in zip(setup.train_images, whole.train_images, strict=True):
        assert set(images) - set(some) <= set(setup.test_images)
    assert any("held-out" in note for note in setup.notes)
    train(config)
    rows = rows_of(tmp_path / "run")
    assert rows[-1]["test_images"] <= 8
    assert reevaluated_row(tmp_path / "run", 2) == rows[2]


def test_held_out_features_come_from_the_same_store(tmp_path: Path) -> None:
    """One folder, one lock: training and test images of a run are in one store."""
    frozen = {"freeze_backbone": True}
    config = small_config(tmp_path / "kept", data={"holdout": 4}, model=frozen, train={"scale": None})
    train(config)
    pixels = small_config(tmp_path / "pixels", data={"holdout": 4, "cache": "off"}, model=frozen, train={"scale": None})
    train(pixels)
    kept, plain = rows_of(tmp_path / "kept")[-1], rows_of(tmp_path / "pixels")[-1]
    assert kept["test_images"] == plain["test_images"]
    assert kept["all"] == pytest.approx(plain["all"], abs=3)


@pytest.mark.parametrize("every", [0, 1, -3, 33])
def test_a_holdout_that_leaves_nothing_is_refused(tmp_path: Path, every: int) -> None:
    config = small_config(tmp_path / "run", data={"holdout": every})
    with pytest.raises(UserError, match=r"data\.holdout is"):
        Setup.of(config, build_method(config.method))


def test_uncertainty_of_the_evidential_method_is_its_background_probability(tmp_path: Path) -> None:
    """So both must rank unseen against seen classes alike. A softmax model has only the second score."""
    train(small_config(tmp_path / "run"))
    unseen = rows_of(tmp_path / "run")[0]["unseen"]
    assert unseen["from_seen_by"]["background"] == pytest.approx(unseen["from_seen"], abs=5e-3)
    assert unseen["from_seen_by"]["entropy"] != pytest.approx(unseen["from_seen"], abs=5e-3)
