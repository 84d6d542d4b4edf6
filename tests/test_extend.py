"""A model made by incseg learns the classes of a folder with the same engine, without its old data."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import Interrupting, assert_same_run, listening, reevaluated_row, rows_of, small_config

import incseg
from incseg.cli import main
from incseg.cli.extend import add_arguments, request
from incseg.config import RunConfig
from incseg.data.extended import Extended
from incseg.data.folder import Folder, export
from incseg.data.shapes import Shapes
from incseg.engine.forgetting import MARGIN, compare_models
from incseg.engine.progress import showing
from incseg.engine.rundir import RunDir
from incseg.engine.runtime import Runtime
from incseg.extension import AS_TRAINED, LADDER, Outcome, Plan, Try, choose, extend
from incseg.io import cache_path, read_tensors, write_json
from incseg.methods.finetune import Finetune
from incseg.metrics import agreement, mean_new_iou
from incseg.models.files import load_segmenter, save_segmenter
from incseg.models.segmenter import FINER, ModelConfig, Segmenter
from incseg.report.extension import class_rows, in_words
from incseg.run import train
from incseg.types import Increment, UserError

OLD = ("triangle", "disc")  # not in the order of the dataset, whose ids they keep: 3 and 1
HERE = ("--train.workers", "0", "--eval.workers", "0")


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a user's dataset: 28 scenes for training, 6 for the test, ten classes."""
    root = tmp_path_factory.mktemp("mine")
    export(Shapes(seed=5, train_size=28, val_size=6, image_size=48), root)
    return root


def first_run(mine: Path, out: Path, task: str, method: str, **changes: Any) -> Path:
    data = {"name": "folder", "root": str(mine)}
    config = small_config(out, task=task, method={"name": method}, data=data, **changes)
    train(config)
    return out


@pytest.fixture(scope="module")
def first(mine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that has learnt two classes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INCSEG_CACHE", str(tmp_path_factory.mktemp("cache")))
        return first_run(mine, tmp_path_factory.mktemp("runs") / "first", ",".join(OLD), "evidential")


def config_of(model: Path, mine: Path, out: Path, classes: str | None = "star,ring", *flags: str) -> RunConfig:
    """Return the configuration of a command line with the model's own recipe."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    named = [] if classes is None else ["--classes", classes]
    tokens = [
        str(model),
        "--root",
        str(mine),
        *named,
        "--out",
        str(out),
        "--seed",
        "3",
        "--threads",
        "1",
        "--recipe",
        "as-trained",
        *HERE,
        *flags,
    ]
    args, args.unknown = parser.parse_known_args(tokens)
    return Plan.read(request(args)).config(AS_TRAINED)


def extended(model: Path, mine: Path, out: Path, classes: str | None = "star,ring", *flags: str) -> str:
    """Run the extension and return its output."""
    with listening() as shown:
        train(config_of(model, mine, out, classes, *flags))
    return shown.getvalue()


def without_ids(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("ids", "reused_from")}


@pytest.mark.parametrize("method", ["evidential", "ewc"])
def test_extending_is_the_next_step_of_a_run(method: str, mine: Path, tmp_path: Path) -> None:
    """Two steps in one run, or a run of the first and an extension, give bit-identical weights. Methods with a state of
    step 0 find it beside the model."""
    first_run(mine, tmp_path / "whole", "triangle,disc/star,ring", method, train={"epochs": 1})
    start = first_run(mine, tmp_path / "start", "triangle,disc", method, train={"epochs": 1})
    extended(start, mine, tmp_path / "more")
    mine_, theirs = (RunDir(tmp_path / name) for name in ("more", "whole"))
    for step in (0, 1):
        ours, _ = load_segmenter(mine_.model(step))
        for name, tensor in load_segmenter(theirs.model(step))[0].state_dict().items():
            assert torch.equal(tensor, ours.state_dict()[name]), f"step {step}, {name}"
        assert read_tensors(mine_.state(step))[0].keys() == read_tensors(theirs.state(step))[0].keys()
    assert without_ids(rows_of(mine_.root)[1]) == without_ids(rows_of(theirs.root)[1])


QUICK = ("--train.epochs_later", "2", "--threads", "1", *HERE)


def test_the_command(first: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It tries recipes, and prints what it tried and the result. The result is an ordinary run and does not need the
    model that was extended. The flag makes own-head and strong alike, and the model has no sums, so three recipes are
    tried."""
    start, out = tmp_path / "start", tmp_path / "more"
    shutil.copytree(first, start)
    flags = ["--root", str(mine), "--classes", "star,ring", "--out", str(out), *QUICK]
    assert main(["extend", str(start), *flags]) == 0
    said = " ".join(capsys.readouterr().out.split())
    counts = [sum(i in np.unique(Folder(mine).mask("train", n)) for n in range(28)) for i in (5, 4)]
    assert "model.safetensors knows 2 classes: triangle, disc" in said
    assert f"star ({counts[0]} images to learn from" in said
    assert f"ring ({counts[1]} images to learn from" in said
    for name, count in zip(("star", "ring"), counts, strict=True):
        assert (f"only {count} training images show {name}" in said) is (count < 10)
    assert "input: shorter side" in said
    for number, name in enumerate(("closed-form", "gentle", "own-head"), start=1):
        assert f"try {number} of 3, {name}" in said
    assert "the model file has no sums" in said
    assert said.count("knows 2 classes") == 1
    assert "On 6 held-back photographs" in said
    assert "Inc" not in said
    assert f"{out}/steps/1/model.safetensors knows 4 classes: triangle, disc, star, ring" in said
    report = json.loads(RunDir(out).forgetting.read_text())
    assert {one["recipe"] for one in report["tries"]} == {"closed-form", "gentle", "own-head"}
    assert (out / "tries" / report["recipe"] / "results.json").exists()
    shutil.rmtree(start)
    row = reevaluated_row(out)
    assert row == rows_of(out)[1]
    assert row["iou"].keys() == {"background", "triangle", "disc", "star", "ring"}
    image = str(min((mine / "images").iterdir()))
    assert main(["predict", str(out), image, "--out", str(tmp_path / "seen"), "--threads", "1"]) == 0
    about = json.loads((tmp_path / "seen" / "predictions.json").read_text())
    assert {c["name"]: c["id"] for c in about["classes"]} == {
        "background": 0, "triangle": 3, "disc": 1, "star": 4, "ring": 5,
    }  # fmt: skip
    assert len({tuple(c["colour"]) for c in about["classes"]}) == 5
    assert main(["extend", str(out), *flags, "--protect", "discs"]) == 2
    assert "unknown class of the model 'discs'; did you mean 'disc'?" in capsys.readouterr().err
    other = ["extend", str(out), *flags[:2], "--classes", "cross", *flags[4:]]
    assert main(other) == 2  # its own folder, other settings
    assert "choose another --out" in capsys.readouterr().err


def test_with_a_head_of_their_own_the_old_scores_do_not_change(first: Path, mine: Path, tmp_path: Path) -> None:
    """The new model gives the old classes the scores of the old model, also if its input is larger. Then both scores
    are interpolated on one more grid, which moves a few borders."""
    for size, largest in ((48, 0.0), (96, 0.05)):
        out = tmp_path / str(size)
        flags = ["--root", str(mine), "--classes", "star", "--out", str(out), "--recipe", "own-head", *QUICK]
        assert main(["extend", str(first), *flags, "--size", str(size)]) == 0
        before, after = (load_segmenter(path)[0] for path in (RunDir(first).model(0), RunDir(out).model(1)))
        assert after.shrinks == [size // 48, 1]
        assert after.stride == (8 if size == 48 else 8 // FINER)
        for name, tensor in before.state_dict().items():
            assert torch.equal(tensor, after.state_dict()[name]), name
        old, new = (incseg.load(path) for path in (first, out))
        assert new.test_size == size
        images = [np.asarray(Image.open(file)) for file in sorted((mine / "images").iterdir())[:6]]
        differing = []
        for image in images:
            labels = [model.predict(image).labels for model in (old, new)]
            differing.append(float(((labels[0] != labels[1]) & (labels[1] < 3)).mean()))
        assert np.mean(differing) <= largest + 0.01


def test_tries_resume_where_they_were_interrupted(
    first: Path, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)

    def tries(out: Path) -> list[Try]:
        tokens = [str(first), "--root", str(mine), "--classes", "star", "--out", str(out), *QUICK]
        args, args.unknown = parser.parse_known_args(tokens)
        return Plan.read(request(args)).tries()

    for moment in ("step 1/1", "begin calibrating", "begin before and after"):
        with pytest.raises(KeyboardInterrupt), showing(Interrupting(moment)):
            extend(tries(tmp_path / "a"), tmp_path / "a")
        assert not (tmp_path / "a" / "config.yaml").exists()
    reports = [extend(tries(tmp_path / name), tmp_path / name) for name in "ab"]
    assert reports[0]["new"] == reports[1]["new"]
    assert_same_run(tmp_path / "a", tmp_path / "b")
    trained = []
    monkeypatch.setattr("incseg.engine.trainer.Trainer._fit", lambda *args: trained.append(args))
    again = extend(tries(tmp_path / "a"), tmp_path / "a")
    assert again == reports[0]
    assert not trained


def outcome(iou: float, kept: int, recipe: int = 0) -> Outcome:
    counts = {"pixels": 1000, "kept": kept, "became_new": 1000 - kept, "became_other": 0}
    new = {"bag": {"images": 3, "labelled": 9, "predicted": 9, "iou": iou}}
    classes = {"road": {**counts, "taken_by": {}, "iou": None}}
    found = {"images": 5, "held_out": True, **counts, "classes": classes, "new": new}
    return Outcome(LADDER[recipe], small_config(Path("unused")), found, 1.0)


def test_the_rule_of_choice() -> None:
    """The best new classes among recipes that change at most a point of the old; of equals the gentlest; if all change
    more, the one that changes least."""
    assert choose([outcome(10, 1000), outcome(30, 991), outcome(40, 989)]).score == 30
    assert choose([outcome(10, 1000, 0), outcome(10, 1000, 1)]).recipe is LADDER[0]
    assert choose([outcome(50, 900), outcome(20, 950)]).score == 20


def test_an_extension_can_be_extended_from_a_lone_file(first: Path, mine: Path, tmp_path: Path) -> None:
    extended(first, mine, tmp_path / "more", "star", "--train.epochs", "1", "--train.lr_later", "0.01")
    alone = tmp_path / "alone.safetensors"
    shutil.copy(RunDir(tmp_path / "more").model(1), alone)
    config = config_of(alone, mine, tmp_path / "again", "ring,cross")
    assert (config.train.epochs, config.train.lr_later, config.train.crop) == (1, 0.01, 48)
    assert config.train.scale == [0.7, 1.0]
    assert config.eval.size == 48
    train(config)
    model = incseg.load(tmp_path / "again")
    assert [i.classes for i in model.increments] == [OLD, ("star",), ("ring", "cross")]
    assert [i.ids for i in model.increments] == [(3, 1), (4,), (5, 6)]
    before = incseg.load(first)
    assert np.array_equal(model.palette[:3], before.palette)
    row = rows_of(tmp_path / "again")[1]
    assert (row["classes"], row["iou"].keys()) == (
        ["ring", "cross"], {"background", "triangle", "disc", "star", "ring", "cross"},
    )  # fmt: skip


def test_a_chain_of_extensions(first: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second extension does not change the first. A class that is learnt further keeps its number and colour."""
    flags = ["--root", str(mine), "--recipe", "closed-form", "--size", "48", *QUICK]
    for model, classes, name in ((first, "star", "a"), (tmp_path / "a", "ring", "b"), (tmp_path / "b", "star", "c")):
        assert main(["extend", str(model), "--classes", classes, "--out", str(tmp_path / name), *flags]) == 0
    assert "the model knows star already" in " ".join(capsys.readouterr().out.split())
    a, b, c = (incseg.load(tmp_path / name) for name in "abc")
    images = torch.randn(1, 3, 48, 48)
    with torch.no_grad():
        scores = [predictor.model(images).logits for predictor in (a, b)]
    assert torch.equal(scores[1][:, :3], scores[0])
    assert b.classes == (*a.classes, "ring")
    assert set(c.classes) == set(b.classes)
    numbered = [dict(zip(p.classes, zip(p.ids, p.palette.tolist(), strict=True), strict=True)) for p in (b, c)]
    assert numbered[0] == numbered[1]
    old = json.loads(RunDir(tmp_path / "b").forgetting.read_text())["classes"]
    assert list(old) == ["triangle", "disc", "star"]


def test_a_model_file_without_settings_gets_those_of_its_run(first: Path, mine: Path, tmp_path: Path) -> None:
    """For files of earlier versions: the run folder's settings, else a recipe for folders at the model's size."""
    run = tmp_path / "run"
    shutil.copytree(first, run)
    model, about = load_segmenter(RunDir(run).model(0))
    del about["train"]
    save_segmenter(RunDir(run).model(0), model, about)
    assert config_of(run, mine, tmp_path / "a").train.lr_later == 0.05
    alone = tmp_path / "m.safetensors"
    shutil.copy(RunDir(run).model(0), alone)
    config = config_of(alone, mine, tmp_path / "b")
    assert (config.train.lr_later, config.train.crop, config.eval.size) == (0.004, 48, 48)


def test_interrupted_and_resumed(first: Path, mine: Path, tmp_path: Path) -> None:
    """Interrupted after the test of the old classes, during training, and before the comparison. Then the comparison is
    outdated and made again."""
    config, other = (config_of(first, mine, tmp_path / name, "star", "--train.epochs", "1") for name in "ab")
    for moment in ("row 0", "step 1/1", "begin before and after"):
        with pytest.raises(KeyboardInterrupt), showing(Interrupting(moment)):
            train(config)
    for one in (config, other):
        train(one)
    assert_same_run(config.folder, other.folder)
    run = RunDir(config.folder)
    found = json.loads(run.forgetting.read_text())
    assert found["classes"] == json.loads(RunDir(other.folder).forgetting.read_text())["classes"]
    write_json(run.forgetting, {**found, "row_digest": "other", "pixels": -1})
    train(config)
    assert json.loads(run.forgetting.read_text()) == found


def test_a_frozen_backbone_is_run_once_per_image(first: Path, mine: Path, tmp_path: Path) -> None:
    flags = ("--model.freeze_backbone", "true", "--train.scale", "null", "--train.epochs", "1")
    extended(first, mine, tmp_path / "run", "star", *flags)
    assert list(cache_path("features").rglob("block-*.bin"))
    before, after = (load_segmenter(RunDir(tmp_path / "run").model(step))[0] for step in (0, 1))
    assert after.config.freeze_backbone
    for name, tensor in before.backbone.state_dict().items():
        assert torch.equal(tensor, after.backbone.state_dict()[name])
    assert not torch.equal(before.aspp.mix.weight, after.aspp.mix.weight)


def test_a_softmax_model_is_extended_as_evidential_or_by_another_method(mine: Path, tmp_path: Path) -> None:
    start = first_run(mine, tmp_path / "start", "triangle,disc/cross", "mib", train={"epochs": 1})
    extended(start, mine, tmp_path / "evidential", "star", "--method", "evidential", "--train.epochs", "1")
    model = incseg.load(tmp_path / "evidential")
    assert [i.classes for i in model.increments] == [("triangle", "disc", "cross"), ("star",)]
    assert not model.model.background_output
    said = extended(start, mine, tmp_path / "ewc", "star", "--method", "ewc", "--train.epochs", "1")
    assert "the state of ewc (state.safetensors) is not beside the model; it starts without it" in said
    assert incseg.load(tmp_path / "ewc").model.num_outputs == 5


def test_without_held_out_images_training_images_are_compared(first: Path, mine: Path, tmp_path: Path) -> None:
    """If no class is named, all classes that the model does not know are learnt."""
    root = tmp_path / "mine"
    shutil.copytree(mine, root)
    (root / "val.txt").unlink()
    names = [path.stem for path in (root / "images").iterdir()]
    (root / "train.txt").write_text("\n".join(names))
    (root / "classes.txt").write_text("\n".join(["disc", "square", "triangle", *"defghij"]))
    extended(first, root, tmp_path / "run", None, "--train.epochs", "1")
    assert len(incseg.load(tmp_path / "run").classes) == 11
    assert rows_of(tmp_path / "run")[1]["all"] is None
    changes = json.loads(RunDir(tmp_path / "run").forgetting.read_text())
    assert changes["classes"]["disc"]["iou"] is not None
    assert not changes["held_out"]
    assert changes["images"] == rows_of(tmp_path / "run")[1]["train_images"]


@pytest.mark.parametrize(
    ("classes", "flags", "message"),
    [
        ("star,disc", (), "knows a class 'disc' already.*classes.txt or a file for --data.classes_file"),
        ("sta,ring", (), "unknown class 'sta'; did you mean 'star'"),
        (" , ", (), "no class was named"),
        ("star", ("--method", "mib"), "needs a background output"),
        ("star", ("--method", "joint"), "learns all classes at once"),
        ("star", ("--method", "dkd"), "only dkd extends models of dkd"),
        ("star", ("--model.width", "8"), "model.width is 8.*has 16"),
        ("star", ("--train.epoch", "8"), "did you mean --train.epochs"),
        ("star", ("--step", "4"), "no finished step 4"),
    ],
)
def test_refusals(first: Path, mine: Path, tmp_path: Path, classes: str, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(config_of(first, mine, tmp_path / "run", classes, *flags))
    assert not (tmp_path / "run" / "steps").exists()


def test_a_run_without_its_settings_of_training_is_refused(first: Path, mine: Path, tmp_path: Path) -> None:
    """Models of older versions do not have their training settings; config.yaml beside them has."""
    run = RunDir(shutil.copytree(first, tmp_path / "first"))
    model, about = load_segmenter(run.model(0))
    save_segmenter(run.model(0), model, {key: value for key, value in about.items() if key != "train"})
    trained = config_of(run.root, mine, tmp_path / "run").train
    assert trained == config_of(first, mine, tmp_path / "run").train
    run.config.write_text("data: {name: folder}\n")
    with pytest.raises(UserError, match=r"config\.yaml lacks 'train', which every run has; restore it"):
        config_of(run.root, mine, tmp_path / "run")


def test_sizes_at_which_old_classes_would_see_something_else_are_refused(
    first: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--root", str(mine), "--classes", "star", "--out", str(tmp_path / "more"), *QUICK]
    assert main(["extend", str(first), *flags, "--size", "-48"]) == 2
    capsys.readouterr()
    for size in ("0", "50", "47", "384"):
        assert main(["extend", str(first), *flags, "--size", size]) == 2
        assert "give one of 48, 96, 192" in capsys.readouterr().err
    assert not (tmp_path / "more" / "tries").exists()


def test_a_class_without_images_is_refused(first: Path, mine: Path, tmp_path: Path) -> None:
    shutil.copytree(mine, tmp_path / "mine")
    with (tmp_path / "mine" / "classes.txt").open("a") as file:
        file.write("unicorn\n")
    with pytest.raises(UserError, match="no training image shows 'unicorn'"):
        train(config_of(first, tmp_path / "mine", tmp_path / "run", "star,unicorn"))


def test_methods_from_outside_must_be_named(mine: Path, tmp_path: Path) -> None:
    start = first_run(mine, tmp_path / "start", "triangle", "small_runs:Remembering", train={"epochs": 1})
    with pytest.raises(UserError, match="name it yourself: --method small_runs:Remembering"):
        config_of(start, mine, tmp_path / "run")
    flags = ("--method", "small_runs:Remembering", "--train.epochs", "1")
    extended(start, mine, tmp_path / "run", "star", *flags)
    assert rows_of(tmp_path / "run")[1] == reevaluated_row(tmp_path / "run")


class Masks(Shapes):
    """A source with one mask that shows ids 0 to 4 and void."""

    def mask(self, split: Any, index: int) -> np.ndarray:
        return np.array([[0, 1, 2, 3, 4, 255]], dtype=np.uint8)


def test_ids_of_old_classes_do_not_change_and_similar_names_are_reported() -> None:
    inner = Masks(train_size=1, val_size=1)
    inner.info = type(inner.info)("mine", ("Hard-Hat", "vest", "dog", "glove"))
    known = [Increment(("hard hat", "cat"), (7, 2)), Increment(("Glove",), (9,))]
    colours = np.array([[0, 0, 0], [1, 1, 1], [2, 2, 2], [128, 0, 0]])
    source = Extended(inner, known, "vest,glove", colours)
    assert source.info.classes[6] == "hard hat"
    assert source.info.classes[9:] == ("vest", "glove", "dog")
    assert source.mask("train", 0).tolist() == [[0, 7, 10, 12, 11, 255]]
    assert any("'glove' is nearly the same as the known 'Glove'" in note for note in source.notes)
    assert "'Hard-Hat' in the masks is tested as the known class 'hard hat'" in source.notes
    assert source.palette[[0, 7, 2, 9]].tolist() == colours.tolist()
    assert len({tuple(source.palette[i]) for i in (0, 7, 2, 9, 10, 11, 12)}) == 7
    assert Extended(inner, known, "joint", colours).new == ("vest", "dog")
    assert Extended(inner, known, "vest", colours).fingerprint("train") != source.fingerprint("train")
    again = Extended(inner, known, "vest,glove", colours, {"vest": (5, [9, 9, 9])})  # which the model knew as 5
    assert again.mask("train", 0).tolist() == [[0, 7, 5, 11, 10, 255]]
    assert (again.info.classes[4], again.info.classes[9:]) == ("vest", ("glove", "dog"))
    assert again.palette[[5, 7]].tolist() == [[9, 9, 9], [1, 1, 1]]
    with pytest.raises(UserError, match="253 is the limit"):
        Extended(inner, [Increment(("x",), (251,))], "vest", colours[:2])
    with pytest.raises(UserError, match="knows all classes of mine already"):
        Extended(inner, [Increment(inner.info.classes, (1, 2, 3, 4))], "joint", np.zeros((5, 3)))


def constant_model(increments: list[Increment], bias: dict[int, float]) -> Segmenter:
    """Return a model that predicts at every pixel the output with the largest bias."""
    model = Segmenter(ModelConfig("tiny", output_stride=8, width=8, dilations=(1, 2, 3)), background_output=True)
    for increment in increments:
        model.grow(increment)
    flat = torch.cat([classifier.bias.data for classifier in model.classifiers])
    for label, value in bias.items():
        flat[label] = value
    for classifier, part in zip(model.classifiers, flat.split([len(c.bias) for c in model.classifiers]), strict=True):
        torch.nn.init.zeros_(classifier.weight)
        classifier.bias.data.copy_(part)
    return model


CPU = Runtime("cpu")


def test_changes_are_counted_outside_the_new_masks() -> None:
    old, new = Increment(("a", "b"), (1, 2)), Increment(("c",), (3,))
    before, same = constant_model([old], {2: 1.0}), constant_model([old, new], {2: 1.0})
    labels = torch.zeros(1, 64, 8, dtype=torch.uint8)
    labels[:, :2], labels[:, 20:22], labels[:, 30], labels[:, 40] = 3, 2, 255, 254  # new, b, void, a class of neither
    batch = (torch.zeros(1, 3, 64, 8), labels, [0])
    rows = 64 - 2 - MARGIN - 1  # those of the new class, around it, and void do not count

    def compared(after: Segmenter) -> dict[str, Any]:
        models = [(before, Finetune()), (after, Finetune())]
        return {"held_out": True, **compare_models(models, [batch], CPU)}

    kept = compared(same)
    assert (kept["images"], kept["pixels"], kept["kept"]) == (1, 8 * rows, 8 * rows)
    assert kept["classes"]["a"] == {
        "pixels": 0, "kept": 0, "became_new": 0, "became_other": 0, "taken_by": {}, "iou": None,
    }  # fmt: skip
    assert kept["classes"]["b"]["iou"] == [3.17, 3.17]  # 16 of 504 pixels
    assert kept["new"] == {"c": {"images": 1, "labelled": 16, "predicted": 0, "iou": 0.0, "lies_on": "b"}}
    nothing_there = compare_models([(constant_model([old], {0: 1.0}), Finetune()), (same, Finetune())], [batch], CPU)
    assert nothing_there["new"]["c"]["lies_on"] is None
    assert agreement(kept) == 100
    first, second, third = in_words({**kept, "train_images": {"c": 5}})
    assert first == "old classes: all their pixels are labelled as before"
    assert second == "warning: c is never predicted; 5 photographs to learn from is little, so add some"
    assert third.startswith("note: few held-back photographs show a new class (c 1), so its IoU here is rough")
    swallowed = compared(constant_model([old, new], {3: 1.0}))
    assert (swallowed["became_new"], swallowed["became_other"]) == (8 * rows, 0)
    assert mean_new_iou(swallowed) == pytest.approx(100 * 16 / 504, abs=0.01)
    lines = in_words({**swallowed, "train_images": {"c": 5}})
    (gave_way,) = (line for line in lines if "lies on b" in line)
    assert gave_way.startswith("c lies on b, which gave way and lost 100.0 % of its other pixels, of at most 10 %")
    elsewhere = {"c": {**swallowed["new"]["c"], "lies_on": None}}
    assert "b lost 100.0 % of its pixels to c" in in_words({**swallowed, "new": elsewhere, "train_images": {"c": 5}})
    assert "b lost 100.0 % of its pixels to c" in in_words({**swallowed, "protected": ["b"], "train_images": {"c": 5}})
    assert "b lost 3.2 points of IoU (3.2 → 0.0)" in lines
    assert "warning: this is more than the rule allows; --recipe gentle changes less" in lines
    # a model that knew b and c, in another order, and said c everywhere: c is improved
    extended = constant_model([Increment(("c", "b"), (3, 2))], {1: 1.0}), Finetune()
    report = compare_models([(before, Finetune()), (same, Finetune())], [batch], Runtime("cpu"), extended)
    assert report["new"]["c"] == {**kept["new"]["c"], "iou_before": pytest.approx(100 * 16 / 504, abs=0.01)}
    report |= {"held_out": True, "train_images": {"c": 5}}
    assert ["c", "improved", "5 + 1", "", "3.2", "0.0"] in class_rows(report)
    assert "c: IoU 3.2 → 0.0" in in_words(report)
    lost = compared(constant_model([old, new], {0: 1.0}))
    assert (lost["became_new"], lost["became_other"]) == (0, 8 * rows)


def test_the_lines_on_old_and_new_classes() -> None:
    counts = {"pixels": 1000, "kept": 800, "became_new": 150, "became_other": 50}
    of_class = {**counts, "taken_by": {"bag": 150}, "iou": None}
    bag = {"images": 10, "labelled": 90, "predicted": 80, "iou": 40.0}
    found = {"images": 3, "held_out": True, **counts, "classes": {"road": of_class}, "new": {"bag": bag}}
    lines = in_words({**found, "train_images": {"bag": 50}})
    assert lines[:2] == [
        "old classes: 80.0 % of their pixels are labelled as before", "road lost 20.0 % of its pixels to bag",
    ]  # fmt: skip
    nothing = {**found, "pixels": 0, "kept": 0, "classes": {}}
    assert "forgetting cannot be measured" in in_words({**nothing, "train_images": {"bag": 50}})[0]
    almost = {**found, "kept": 996, "classes": {}}
    assert in_words({**almost, "train_images": {"bag": 50}}) == [
        "old classes: 99.6 % of their pixels are labelled as before, and none got noticeably worse"
    ]
    unseen = {**found, "kept": 1000, "classes": {}, "new": {"bag": {**bag, "images": 0, "iou": None}}}
    assert "no held-back photograph shows it" in in_words({**unseen, "train_images": {"bag": 50}})[1]
    weak = {**found, "kept": 1000, "classes": {}, "new": {"bag": {**bag, "iou": 2.0}}}
    assert "bag is hardly found (IoU 2.0)" in in_words({**weak, "train_images": {"bag": 50}})[1]
    never = {**found, "kept": 1000, "classes": {}, "new": {"bag": {**bag, "predicted": 0, "iou": 0.0}}}
    assert "look at the contact sheet" in in_words({**never, "train_images": {"bag": 50}})[1]
    rarely = {**never, "new": {"bag": {**bag, "images": 4, "predicted": 0, "iou": 0.0}}}
    _, warning, note = in_words({**rarely, "train_images": {"bag": 50}})
    assert warning == "warning: bag is never predicted; test it on other photographs (incseg eval)"
    assert "(bag 4), so its IoU here is rough" in note


def test_a_much_better_recipe_that_was_not_allowed_is_named() -> None:
    found = {**outcome(10, 1000).found, "train_images": {"bag": 50}, "recipe": "gentle"}
    tries = [
        {"recipe": "gentle", "agreement": 99.5, "iou": {"bag": 10.0}, "seconds": 1},
        {"recipe": "strong", "agreement": 98.5, "iou": {"bag": 40.0}, "seconds": 1},
    ]
    (line,) = (line for line in in_words({**found, "tries": tries}) if line.startswith("note: strong"))
    assert "strong finds the new classes better, mean IoU 40.0 instead of 10.0" in line
    assert "changes 1.5 % of the old pixels; --recipe strong takes it" in line
    tries[1]["iou"] = {"bag": 12.0}
    assert not any(line.startswith("note: strong") for line in in_words({**found, "tries": tries}))


def test_a_softmax_model_uses_its_own_recipe(mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = first_run(mine, tmp_path / "start", "triangle,disc", "mib", train={"epochs": 1})
    flags = ["--root", str(mine), "--classes", "star", "--out", str(tmp_path / "more"), *QUICK]
    assert main(["extend", str(start), *flags]) == 0
    assert json.loads(RunDir(tmp_path / "more").forgetting.read_text())["recipe"] == "as-trained"
    assert main(["extend", str(start), *flags, "--recipe", "gentle"]) == 2
    assert "--recipe gentle is not for models of mib" in capsys.readouterr().err
