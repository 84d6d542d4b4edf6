"""Tables from run folders: what is read, what is left out and named, and the names of rows."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import made_up_runs
import numpy as np
import pytest
import torch
import yaml
from made_up_runs import FIGURES, change_json, write_run
from PIL import Image
from small_runs import methods_that_differ, small_config

from incseg.cli import main
from incseg.cli.settings import parse_run
from incseg.config import usual_settings
from incseg.data.ade20k import ADE20K_INFO
from incseg.engine.evaluator import Counts, figures
from incseg.engine.rundir import RunDir, flatten
from incseg.io import write_array
from incseg.presets import PRESETS
from incseg.protocol import Protocol
from incseg.report.published import PUBLISHED
from incseg.report.runs import RunRecord, collected_warnings, read_runs, shown_command
from incseg.report.tables import Group, average_orders, compare, group, spread
from incseg.report.writers import FORMATS, to_csv, to_latex, to_markdown
from incseg.run import train
from incseg.types import UserError


def read(*folders: Path, warned: list[str] | None = None) -> list[RunRecord]:
    """Read records. Without `warned` there must be no warnings."""
    with collected_warnings() as lines:
        records = read_runs(folders, usual_settings)
    if warned is None:
        assert lines == []
    else:
        warned += lines
    return records


def grouped(records: list[RunRecord]) -> tuple[list[Group], list[str]]:
    with collected_warnings() as warned:
        return group(records), warned


@pytest.fixture(autouse=True)
def no_warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Require that every warning is collected, by the command or by the test."""
    yield
    assert [record.getMessage() for record in caplog.records if record.name == "incseg"] == []


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# --- reading -------------------------------------------------------------------------------------------------


def test_a_run_as_a_record(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs/a", (50.0, 20.0, 40.0, 30.0), seed=7)
    (record,) = read(folder)
    assert (record.dataset, record.task, record.setting, record.method) == ("voc", "15-1", "overlapped", "evidential")
    assert (record.seed, record.options, record.preset) == (7, {}, "voc-laptop")
    assert (record.base, record.new, record.all, record.inc, record.avg) == (50, 20, 40, 30, 45)
    assert (record.seconds, record.commit, record.threads, record.finished) == (180, "abc1234", 1, True)
    assert record.rules["name"] == "plop"
    assert [row["index"] for row in record.rows] == [0, 1]
    row = record.as_row()
    schema = ["task", "setting", "method", "seed", "options", "base", "new", "all", "inc", "seconds"]
    assert [key for key in row if key in schema] == schema
    assert row["run"] == "runs/a"


def test_options_are_what_differs_from_preset_and_method(tmp_path: Path) -> None:
    settings = {
        "method.balancing": "none",
        "train.lr": 0.5,
        "train.workers": 7,  # changes no figure
        "eval.batch_size": 3,  # nor does this
        "eval.size": 96,
        "model.weights": "/somewhere/resnet101.pth",
    }
    (record,) = read(write_run(tmp_path / "a", settings=settings))
    assert record.options == {
        "balancing": "none", "train.lr": 0.5, "eval.size": 96, "model.weights": "resnet101.pth",
    }  # fmt: skip


def test_a_setting_that_older_versions_had_not_is_no_option(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    del config["data"]["holdout"], config["method"]["prior"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert read(folder)[0].options == {}


def test_options_of_a_method_from_outside_are_all_shown_and_it_is_not_imported(tmp_path: Path) -> None:
    (record,) = read(write_run(tmp_path / "a", method="no.such.module:Mine", settings={"method.strength": 2}))
    assert (record.method, record.options) == ("no.such.module:Mine", {"strength": 2})


@pytest.mark.parametrize("preset", PRESETS)
def test_usual_settings_are_those_of_the_command_line(preset: str) -> None:
    data = {"voc": "voc", "ade": "ade20k"}.get(preset.split("-")[-1], "shapes")
    for method in methods_that_differ(preset):
        parsed = parse_run("incseg train", "", ["--preset", preset, "--method", method, "--data", data]).as_dict()
        usual = usual_settings(parsed)
        assert {**usual, "data": {**usual["data"], "name": data}} == parsed


def test_folders_are_found_below_parents_and_counted_once(tmp_path: Path) -> None:
    for name in ("b/two", "b/one", "a"):
        write_run(tmp_path / "runs" / name)
    write_run(tmp_path / "runs/b/one/nested")  # part of a run folder, not a run of its own
    write_run(tmp_path / "runs/.hidden/x")
    (tmp_path / "runs/link").symlink_to(tmp_path / "runs/a")
    records = read(tmp_path / "runs/b/two", tmp_path / "runs", tmp_path / "runs/link")
    assert [record.folder.name for record in records] == ["two", "a", "one"]


def truncate(folder: Path) -> None:
    text = (folder / "results.json").read_text()
    (folder / "results.json").write_text(text[: len(text) // 2])


def set_final(folder: Path, **changes: object) -> None:
    results = json.loads((folder / "results.json").read_text())
    results["final"] |= changes
    (folder / "results.json").write_text(json.dumps(results))


def cut_rows(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text())
    change_json(folder / "results.json", steps=results["steps"][:1])


def forget_a_class(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text())
    del results["steps"][1]["iou"]["cow"]
    change_json(folder / "results.json", steps=results["steps"])


def swap_rows(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text())
    change_json(folder / "results.json", steps=results["steps"][::-1])


def foreign(folder: Path) -> None:
    for file in folder.glob("*.json"):
        file.unlink()
    (folder / "config.yaml").write_text("site_name: not ours\n")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "half-written results": (truncate, "results.json is damaged"),
    "no config": (lambda f: (f / "config.yaml").unlink(), "it has no config.yaml"),
    "config is no YAML": (lambda f: (f / "config.yaml").write_text("a: [1"), "not valid YAML"),
    "config is a list": (lambda f: (f / "config.yaml").write_text("[1]"), "holds list, not settings"),
    "method without name": (lambda f: (f / "config.yaml").write_text("method: {}"), "config.yaml lacks 'name'"),
    "no protocol": (lambda f: (f / "protocol.json").unlink(), "protocol.json is missing"),
    "protocol without steps": (lambda f: (f / "protocol.json").write_text("{}"), "protocol.json lacks 'steps'"),
    "no environment": (lambda f: (f / "environment.json").unlink(), "environment.json is missing"),
    "results are a list": (lambda f: (f / "results.json").write_text("[]"), "it does not hold a record"),
    "a step is lacking": (cut_rows, "rows of 1 steps, and protocol.json has 2"),
    "rows in another order": (swap_rows, "the row of step 0 is that of step 1"),
    "a class is lacking": (forget_a_class, "the row of step 1 has no IoU of cow"),
    "text for a figure": (lambda f: set_final(f, all="many"), "results.json holds 'many' as 'all'"),
    "not a number": (lambda f: set_final(f, all=math.nan), "results.json holds nan as 'all'"),
    "no final": (lambda f: change_json(f / "results.json", final=None), "results.json holds None as 'final'"),
    "foreign": (foreign, "protocol.json is missing"),
    "a folder for a file": (lambda f: ((f / "protocol.json").unlink(), (f / "protocol.json").mkdir()), "directory"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_named_and_left_out(name: str, tmp_path: Path) -> None:
    spoil, expected = BROKEN[name]
    spoil(write_run(tmp_path / "runs/broken"))
    write_run(tmp_path / "runs/fine")
    warned: list[str] = []
    records = read(tmp_path / "runs", warned=warned)
    assert [record.folder.name for record in records] == ["fine"]
    (line,) = warned
    assert line.startswith(f"{tmp_path}/runs/broken is left out: ")
    assert expected in line
    assert "\n" not in line


def test_an_unknown_preset_is_named(tmp_path: Path) -> None:
    warned: list[str] = []
    assert read(write_run(tmp_path / "a", preset="voc-laptpo"), warned=warned) == []
    assert "unknown preset 'voc-laptpo'; did you mean 'voc-laptop'?" in warned[0]


def test_an_unfinished_run_tells_how_far_it_is(tmp_path: Path) -> None:
    (record,) = read(write_run(tmp_path / "a", steps_done=1))
    assert not record.finished
    assert record.all is None
    assert record.how_far == f"{tmp_path}/a is not finished (1 of 2 steps) and left out"
    assert compare([record], True) == []


def test_missing_folders_and_empty_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent does not exist"):
        read(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is a file"):
        read(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    warned: list[str] = []
    assert read(tmp_path / "empty", warned=warned) == []
    assert warned == [f"{tmp_path}/empty holds no run folder"]


# --- retests -------------------------------------------------------------------------------------------------


def retest(folder: Path, figures: tuple[float, ...], step: int = 1, **options: object) -> Path:
    row = json.loads((folder / f"steps/{step}/row.json").read_text())
    row |= dict(zip(("base", "new", "all", "inc"), figures, strict=True))
    del row["seconds"]
    return RunDir(folder).write_retest(options, row, 12.5)


def test_a_retest_is_a_record_of_its_own(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", settings={"method.balancing": "odds", "train.lr": 0.5})
    file = retest(folder, (51, 21, 41, 31), balancing="none", prior=0.5)
    assert file == folder / "retests/step1-balancing-none-prior-0.5.json"
    retest(folder, (1, 2, 3, 4), balancing="ratio")
    retest(folder, (1, 2, 3, 4), step=0, balancing="exact")  # of an earlier model: no table shows it
    run, none, usual = read(folder)
    assert run.retest is None
    assert run.options == {"balancing": "odds", "train.lr": 0.5}
    assert none.options == {"balancing": "none", "prior": 0.5, "train.lr": 0.5}
    assert none.retest == {"balancing": "none", "prior": 0.5}
    assert (none.base, none.new, none.all, none.inc, none.avg, none.seconds) == (51, 21, 41, 31, None, 12.5)
    assert usual.options == {"train.lr": 0.5}


def test_a_retest_of_a_replaced_model_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    file = retest(folder, (51, 21, 41, 31), balancing="none")
    change_json(folder / "steps/1/row.json", seconds={"train": 61.0, "eval": 30.0})
    (folder / "retests/half.json").write_text('{"step": 1')
    warned: list[str] = []
    assert len(read(folder, warned=warned)) == 1
    assert "half.json is damaged" in warned[0]
    assert warned[1].startswith(f"{file} is left out: its run was trained again since")


def test_eval_saves_a_retest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    train(small_config(folder, preset="shapes-quick", train={"epochs": 1}))
    for argv, expected in (
        (["--method.lambda_kd", "3"], "lambda_kd is not one; allowed: balancing, decision, prior, threshold"),
        (["--method.balancing", "ratio"], "than the run's own; give one: balancing"),
        ([], "than the run's own; give one: balancing"),
    ):
        assert main(["eval", str(folder), "--save", *argv]) == 2
        assert expected in capsys.readouterr().err
    assert not (folder / "retests").exists()
    assert main(["eval", str(folder), "--save", "--json", "--method.balancing", "none"]) == 0
    shown = capsys.readouterr()
    row = json.loads(shown.out)
    assert f"saved in {folder}/retests/step2-balancing-none.json" in shown.err
    run, again = read(folder)
    assert again.options == {**run.options, "balancing": "none"}
    assert (again.base, again.new, again.all, again.inc) == tuple(row[name] for name in ("base", "new", "all", "inc"))


def test_eval_cannot_save_where_a_method_has_no_such_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", method="finetune")
    assert main(["eval", str(folder), "--save"]) == 2
    assert "finetune has none" in capsys.readouterr().err


# --- over seeds ----------------------------------------------------------------------------------------------


def test_spread() -> None:
    found = spread([1.0, None, 4.0, 7.0])
    assert found is not None
    assert (found.mean, found.deviation, found.variance, found.seeds) == (4.0, 3.0, 9.0, 3)
    one = spread([5.0])
    assert one is not None
    assert (one.mean, one.deviation, one.variance, one.seeds) == (5.0, None, None, 1)
    assert spread([None]) is None


def test_runs_are_grouped_over_seeds_only(tmp_path: Path) -> None:
    for seed in (1337, 42):
        write_run(tmp_path / f"runs/{seed}", seed=seed)
    write_run(tmp_path / "runs/x", seed=2001, settings={"train.lr": 0.5})
    write_run(tmp_path / "runs/y", seed=2001, rules="mib")
    write_run(tmp_path / "runs/z", seed=2001, preset="paper-voc", settings={"method.balancing": "none"})
    write_run(tmp_path / "runs/zz", seed=42)
    groups, warned = grouped(read(tmp_path / "runs"))
    assert sorted(one.seeds for one in groups) == [[42, 1337], [2001], [2001], [2001]]
    assert warned == [
        f"{tmp_path}/runs/zz is left out: the same settings and seed 42 as {tmp_path}/runs/42"
    ]  # fmt: skip


def test_folders_of_different_data_are_different_datasets(tmp_path: Path) -> None:
    """Runs on two folders are not two seeds of one run, and neither is left out as a copy of the other."""
    for name, seed, root in (("a", 42, "/mine/cats"), ("b", 7, "/mine/dogs"), ("c", 42, "/mine/dogs/")):
        changed = {"data.root": root}
        write_run(tmp_path / f"runs/{name}", dataset="folder", preset="folder", seed=seed, settings=changed)
    groups, warned = grouped(read(tmp_path / "runs"))
    assert {one.first.dataset: one.seeds for one in groups} == {"folder cats": [42], "folder dogs": [7, 42]}
    assert warned == []


def test_of_two_extensions_that_only_differ_in_their_model_the_reason_is_given(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = write_run(tmp_path / f"runs/{name}")
        with (folder / "config.yaml").open("a") as config:
            config.write(f"start: runs/first-{name}\n")
    _, warned = grouped(read(tmp_path / "runs"))
    assert len(warned) == 1
    assert "extends another model" in warned[0]


# --- the table -----------------------------------------------------------------------------------------------

GOLDEN = """\
## shapes

|  |  | 6-2 overlapped |  |  |  |
|---|---:|---:|---:|---:|---:|
| method | seeds | Base | New | All | Inc |
| `finetune` | 1 | 5.0 | 6.0 | 5.5 | 5.6 |
| `evidential` | 2 | **51.0 ± 1.4** | 20.0 ± 0.0 | **41.0 ± 1.4** | 30.0 ± 0.0 |
| `evidential` (balancing none) | 1 | 50.0 | **21.0** | 40.0 | **31.0** |
| `joint` | 1 | 70.0 | 50.0 | 60.0 | 55.0 |

- Percent mIoU of the last model. ± is the standard deviation (n − 1) over seeds, var the variance, which is what the \
paper prints after ±. A cell that was not run is empty.
- Best in bold, among ours; not ranked: joint training, replayed images (RECALL) and memories, which use more data.
- Joint training has no setting, and its All is the same for every task.
- Label rules: name plop, void_in_training ignore, unseen_at_test background, test_images seen, unlabelled_at_test \
background.
- 4 runs and 1 test with other inference options, 0.2 hours in all (a step that several runs share counts \
in each), 1 thread; commits COMMITS; incseg 0.1.0, torch 2.13, Python 3.11, Linux, 2 CPUs, device cpu.
- Commands:

```
incseg train --data shapes --root VOC2012 --seed 42 --out joint
incseg train --data shapes --root VOC2012 --seed 42 --out finetune
incseg train --data shapes --root VOC2012 --seed 42 --out evidential-42    # also seeds 1337
incseg eval evidential-42 --method.balancing none --save
```
"""


def test_golden_markdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"dataset": "shapes", "task": "6-2"}
    write_run(tmp_path / "runs/joint", (70, 50, 60, 55), method="joint", **shapes | {"setting": "joint"})
    write_run(tmp_path / "runs/finetune", (5, 6, 5.5, 5.6), method="finetune", **shapes)
    write_run(tmp_path / "runs/evidential-1337", (52, 20, 42, 30), seed=1337, **shapes)
    folder = write_run(tmp_path / "runs/evidential-42", (50, 20, 40, 30), seed=42, **shapes)
    monkeypatch.setattr("sys.argv", ["/bin/incseg", "eval", "evidential-42", "--method.balancing", "none", "--save"])
    retest(folder, (50, 21, 40, 31), balancing="none")
    records = read(tmp_path / "runs")
    (table,) = compare(records, True)
    commits = ", ".join(sorted({record.commit for record in records}))
    assert to_markdown(table) == GOLDEN.replace("COMMITS", commits)


def test_pascal_in_the_papers_layout(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/a", task="15-5", setting="disjoint")
    write_run(tmp_path / "runs/b", (52, 22, 42, 32), method="mib:Mine")
    (table,) = compare(read(tmp_path / "runs"), True)
    layout = [("15-5", "disjoint"), ("15-5", "overlapped"), ("15-1", "disjoint"), ("15-1", "overlapped")]
    assert table.columns == layout
    ours = {line.label: line for line in table.lines if not line.published}
    assert set(ours["`evidential`"].cells) == {("15-5", "disjoint")}  # what was not run is not there
    labels = [line.label for line in table.lines]
    assert labels.index("`evidential`") == labels.index("Evidential (Holmquist, Klasén, Felsberg 2022)") + 1
    published = {line.label: line for line in table.lines if line.published}
    assert published["PLOP (Douillard 2021)"].cells[("15-1", "overlapped")]["all"].mean == 54.6
    write_run(tmp_path / "runs/c", task="10-1")
    (table,) = compare(read(tmp_path / "runs"), False)
    assert table.columns == [*layout, ("10-1", "overlapped")]
    assert not any(line.published for line in table.lines)


def test_best_is_bold_among_its_kind(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/a", (50.04, 20, 40, 30))
    write_run(tmp_path / "runs/b", (50.0, 19, 40, 30), method="finetune")
    write_run(tmp_path / "runs/c", (90, 90, 90, 90), method="joint", setting="joint")
    (table,) = compare(read(tmp_path / "runs"), True)
    column = ("15-1", "overlapped")
    best = {line.label: [name for name in ("base", "new") if table.is_best(line, column, name)] for line in table.lines}
    assert best["`evidential`"] == ["base", "new"]
    assert best["`finetune`"] == ["base"]  # the same as printed
    assert best["`joint`"] == []
    assert best["RECALL, web (Maracani 2021)"] == []  # uses more data
    assert best["Evidential (Holmquist, Klasén, Felsberg 2022)"] == ["base", "new"]
    (alone,) = compare(read(tmp_path / "runs/a"), False)
    assert not alone.is_best(alone.lines[0], column, "base")


def test_joint_fills_every_setting_and_only_all_of_other_tasks(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/a", (60, 50, 57, 55), task="15-5", setting="joint", method="joint")
    write_run(tmp_path / "runs/b", (None, None, 57.5, None), task="15-5", setting="joint")
    (table,) = compare(read(tmp_path / "runs"), False)
    joint = next(line for line in table.lines if line.label == "`joint`")
    for setting in ("disjoint", "overlapped"):
        assert {name: found.mean for name, found in joint.cells[("15-5", setting)].items()} == {
            "base": 60, "new": 50, "all": 57, "inc": 55, "avg": 45,
        }  # fmt: skip
        assert {name: found.mean for name, found in joint.cells[("15-1", setting)].items()} == {"all": 57}
    assert next(line for line in table.lines if line.label == "`evidential` (joint)").family == "joint"


def test_fewer_seeds_in_a_cell_are_marked(tmp_path: Path) -> None:
    for seed in (42, 1337):
        write_run(tmp_path / f"runs/{seed}", seed=seed)
    write_run(tmp_path / "runs/one", task="15-5")
    (table,) = compare(read(tmp_path / "runs"), False)
    (line,) = [line for line in to_markdown(table).splitlines() if line.startswith("| `evidential`")]
    assert line.startswith("| `evidential` | 1–2 |")
    assert "| 40.0 (n=1) |" in line
    assert "| 40.0 ± 0.0 |" in line


# What the papers themselves do not fit: their All is not that of their Base and New.
UNEVEN = {"SDR+MiB (Michieli 2021)", "SDR (Michieli 2021)", "PLOP (Douillard 2021)"}


def test_published_figures_fit_each_other() -> None:
    """This detects misprints: All is the mean over classes, and with two groups of classes Inc is the mean of both."""
    sizes = {"15": (16, 5), "100": (100, 50), "50": (50, 100)}
    checked = 0
    for row in PUBLISHED:
        for (task, _), (base, new, all_, inc) in row.figures.items():
            if base is None or new is None or all_ is None or inc is None:
                continue
            num_base, num_new = sizes[task.split("-")[0]]
            expected = (num_base * base + num_new * new) / (num_base + num_new)
            assert abs(all_ - expected) < (0.8 if row.label in UNEVEN else 0.16), (row.label, task)
            if task in ("15-5", "100-50"):
                assert abs(inc - (base + new) / 2) < 0.16, (row.label, task)
            checked += 1
    assert checked == 7 * 4 + 2 + 5 * 3


# --- ADE20k --------------------------------------------------------------------------------------------------

ADE = {
    "dataset": "ade20k",
    "setting": "pseudo-disjoint",
    "rules": "mib",
    "groups": [[f"class {i}" for i in range(100)], [f"class {i}" for i in range(100, 150)]],
}
SIDE = 32


def test_ade_is_the_mean_of_both_orders(tmp_path: Path) -> None:
    for seed, shift in ((42, 0), (1337, 2)):
        write_run(tmp_path / f"runs/a{seed}", (30 + shift, 20, 27, 25), task="100-50", seed=seed, **ADE)
        write_run(tmp_path / f"runs/b{seed}", (34 + shift, 22, 29, 27), task="100-50", seed=seed, order="b", **ADE)
    write_run(tmp_path / "runs/one", (10, 11, 12, 13), task="100-10", seed=42, **ADE)
    write_run(tmp_path / "runs/other", (91, 92, 93, 94), task="100-50", **{**ADE, "setting": "overlapped"})
    (table,) = compare(read(tmp_path / "runs"), True)
    assert table.columns == [("100-50", ""), ("50-50", ""), ("100-10", "")]
    ours = {line.label: line.cells for line in table.lines if not line.published}
    assert set(ours) == {"`evidential`", "`evidential` (order a)", "`evidential` (overlapped, order a)"}
    base = ours["`evidential`"][("100-50", "")]["base"]
    assert (base.mean, base.seeds) == (33, 2)
    assert base.deviation == pytest.approx(math.sqrt(2))
    assert set(ours["`evidential` (order a)"]) == {("100-10", "")}
    shown = to_markdown(table)
    assert "| `evidential` | 2 | 33.0 ± 1.4 | 21.0 ± 0.0 |" in shown  # the others are not ranked, and alone is not best
    assert "SSUL (overlapped, order a, collected)" in shown
    assert "Label rules: name mib" in shown
    row = next(line for line in to_latex(table).splitlines() if line.startswith(r"\texttt{evidential} &"))
    assert row.count("&") == 1 + 3 * 4


def test_orders_are_averaged_for_the_same_seed_only(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/a", task="100-50", seed=1, **ADE)
    write_run(tmp_path / "runs/b", task="100-50", seed=2, order="b", **ADE)
    assert [record.order for record in average_orders(read(tmp_path / "runs"))] == ["a", "b"]


def test_pixels_predicted_as_unlabelled_count_against_their_class_only() -> None:
    """A third of every class is predicted as label 0, of which no pixel is true."""
    protocol = Protocol(ADE20K_INFO, "100-50", "overlapped")
    counts = Counts.zero(151, torch.device("cpu"))
    labels = torch.arange(1, 151)
    counts.confusion[labels, labels], counts.confusion[labels, 0] = 2, 1
    found = figures(counts, protocol, protocol.steps[1])
    assert [found[name] for name in FIGURES] == pytest.approx([200 / 3] * 4)
    assert list(found["iou"]) == [ADE20K_INFO.classes[i - 1] for i in protocol.steps[1].seen]


def write_ade(root: Path) -> None:
    """Write all 150 classes in ADE20k's layout, in four images: one with the classes that both orders learn first, one
    with those that both learn later, and two with the others. A few classes fill the image, and these are tested."""
    later = [set(Protocol(ADE20K_INFO, "100-50", "overlapped", order=order).steps[1].new) for order in ("a", "b")]
    kinds: dict[tuple[bool, ...], list[int]] = {}
    for i in range(1, 151):
        kinds.setdefault(tuple(i in ids for ids in later), []).append(i)
    colours = np.random.default_rng(0).integers(0, 256, (151, 3), dtype=np.uint8)
    for number, ids in enumerate(kinds.values()):
        large = np.array(ids[: 3 if number == 0 else 2], dtype=np.uint8)
        colours[large] = [np.array([number // 2, number % 2, k / 2]) * 255 for k in range(len(large))]
        tested = np.tile(large.repeat(-(-SIDE // len(large)))[:SIDE], (SIDE, 1))
        trained = tested.copy()
        trained.reshape(-1)[: len(ids)] = ids
        for split, mask in (("training", trained), ("validation", tested)):
            for folder, pixels, kind in (("images", colours[mask], "jpg"), ("annotations", mask, "png")):
                path = root / "ADEChallengeData2016" / folder / split / f"{number}.{kind}"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)


def train_ade(tmp_path: Path, name: str, *flags: str) -> RunDir:
    """Train a small network on the images of `write_ade` below `tmp_path`."""
    settings = {
        "model.backbone": "tiny", "model.output_stride": 8, "model.width": 16, "model.dilations": "[1, 2, 3]",
        "train.epochs": 16, "train.batch_size": 2, "train.crop": SIDE, "train.scale": "null", "train.lr": 0.3,
        "train.lr_later": 0.2, "train.workers": 0, "eval.workers": 0, "eval.size": SIDE, "task": "100-50",
        "device": "cpu", "threads": 1,
    }  # fmt: skip
    given = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    where = ["--data", "ade20k", "--root", str(tmp_path / "data"), "--out", f"runs/{name}"]
    assert main(["train", *where, *given, *flags]) == 0
    return RunDir(f"runs/{name}")


def test_the_table_of_ade_from_its_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained in both orders, and in the table with the mean of their figures, which follow from the counts."""
    write_ade(tmp_path / "data")
    found = {}
    for order in ("a", "b"):
        run = train_ade(tmp_path, order, "--order", order)
        row = run.rows()[-1]
        assert [len(row["classes"]) for row in run.rows()] == [100, 50]
        assert set(row["iou"]) == set(ADE20K_INFO.classes)
        counts = np.load(run.confusion(1))
        hits, unions = np.diag(counts), counts.sum(axis=0) + counts.sum(axis=1) - np.diag(counts)
        shares = np.where(unions > 0, 100 * hits / np.maximum(unions, 1), np.nan)
        base, new = np.nanmean(shares[1:101]), np.nanmean(shares[101:])  # 0 is unlabelled, and no class
        found[order] = np.array([base, new, np.nanmean(shares[1:]), (base + new) / 2])
        assert [row[name] for name in FIGURES] == pytest.approx(found[order])
    assert set(RunDir("runs/a").rows()[1]["classes"]) != set(RunDir("runs/b").rows()[1]["classes"])
    mean = (found["a"] + found["b"]) / 2
    assert (mean > 0).all()
    assert len(set(mean)) == 4
    capsys.readouterr()
    for runs, values, order in (("runs", mean, None), ("runs/b", found["b"], "order b")):
        assert main(["compare", runs]) == 0
        shown = capsys.readouterr().out
        assert "| method | seeds | Base | New | All | Inc |" in shown
        (ours,) = [line for line in shown.splitlines() if line.startswith("| `evidential`")]
        assert ours.endswith(f" | 1 | {' | '.join(f'{figure:.1f}' for figure in values)} |" + "  |" * 8)
        assert order in ours if order else "order" not in ours
        assert "| Evidential (Holmquist, Klasén, Felsberg 2022) |  | 33.3 | **29.1** | 31.9 | 31.2 |" in shown
        assert "Label rules: name mib" in shown


def test_the_figure_of_the_supplement_for_ade(tmp_path: Path) -> None:
    """Order a and b below each other, with and without the weight of foreground side by side."""
    write_ade(tmp_path / "data")
    for order in ("a", "b"):
        for weight in ("true", "false"):
            flags = ("--order", order, "--method.foreground_weight", weight, "--train.epochs", "1")
            train_ade(tmp_path, f"{order}-{weight}", *flags)
    assert main(["report", "runs", "--root", str(tmp_path / "data"), "--out", "page", "--images", "4"]) == 0
    text = Path("page/index.html").read_text()
    assert "ade20k: order a against order b" in text
    drawn = Path("page/figures/ade20k-tasks.svg").read_text()
    for word in ("order a", "order b", "evidential", "foreground_weight false", "truth", "image"):
        assert word in drawn, word


# --- writers -------------------------------------------------------------------------------------------------


def test_latex_rows_are_complete_and_escaped(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/a", method="finetune")
    write_run(tmp_path / "runs/b", settings={"method.lambda_kd": 5.0})
    (table,) = compare(read(tmp_path / "runs"), True)
    text = to_latex(table)
    body = text[text.index(r"\hline") :].splitlines()[1:-1]
    assert len(body) == len(table.lines)
    assert {line.count(" & ") for line in body} == {1 + 4 * 4}
    assert r"\texttt{evidential} (lambda\_kd 5.0)" in text
    assert r"\textbf{53.6 (var 7.4)}" in text
    assert r"\multicolumn{8}{c}{15-5} & \multicolumn{8}{c}{15-1}" in text
    assert "% Label rules: name plop" in text
    assert text.count("{") == text.count("}")


def test_csv_names_deviation_and_variance(tmp_path: Path) -> None:
    for seed, base in ((1, 50.0), (2, 53.0)):
        write_run(tmp_path / f"runs/{seed}", (base, None, 40, 30), seed=seed, settings={"method.balancing": "odds"})
    rows = list(csv.DictReader(io.StringIO(to_csv(compare(read(tmp_path / "runs"), True)))))
    (mine,) = [row for row in rows if row["source"] == "incseg"]
    assert (mine["method"], mine["options"], mine["seeds"]) == ("evidential", "balancing odds", "2")
    assert (mine["base"], mine["base_standard_deviation"], mine["base_variance"]) == ("51.5", "2.121", "4.5")
    assert (mine["new"], mine["new_variance"]) == ("", "")
    theirs = [row for row in rows if row["method"].startswith("Evidential") and row["task"] == "15-5"]
    assert [row["new_variance"] for row in theirs] == ["", "7.4"]
    assert [row["new_standard_deviation"] for row in theirs] == ["", ""]


def test_commands_tell_nothing_of_this_machine() -> None:
    words = ["__main__.py", "train", "--root", "/data/VOC2012/", "--model.weights=../w/r.pth", "--task", "a b/c"]
    assert shown_command(words) == "incseg train --root VOC2012 --model.weights=r.pth --task 'a b/c'"
    assert shown_command(["incseg", "--out", "runs/x/y", "--lr", "-1"]) == "incseg --out runs/x/y --lr -1"


# --- the command ---------------------------------------------------------------------------------------------


def test_compare_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs/a")
    assert main(["compare", "runs"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith("## voc: ours beside the published\n")
    assert main(["compare", "runs/a", "--published", "false", "--out", "new/table.md"]) == 0
    assert capsys.readouterr().out == ""
    assert "MiB" not in Path("new/table.md").read_text()
    assert main(["compare", "runs", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (row,) = data["rows"]
    keys = {"task", "setting", "method", "seed", "options", "base", "new", "all", "inc", "seconds"}
    assert keys <= row.keys()
    assert (row["task"], row["all"], row["options"], row["seed"]) == ("15-1", 40.0, {}, 42)
    assert data["summary"][0]["all"] == {"mean": 40.0, "standard_deviation": None, "variance": None, "seeds": 1}
    assert str(tmp_path) not in json.dumps(data)
    assert main(["compare", "runs", "--format", "latex"]) == 0
    assert r"\begin{tabular}" in capsys.readouterr().out
    assert main(["compare", "runs", "--format", "csv"]) == 0
    assert capsys.readouterr().out.startswith("dataset,source,method,options,task,setting,")


def test_compare_makes_a_table_for_each_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs/a")
    write_run(tmp_path / "runs/b", dataset="shapes", task="6-2")
    assert main(["compare", "runs"]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("## ")] == [
        "## voc: ours beside the published", "## shapes",
    ]  # fmt: skip


def test_compare_names_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs/a")
    write_run(tmp_path / "runs/b", steps_done=1, seed=7)
    assert main(["compare", "runs"]) == 0
    assert capsys.readouterr().err == "warning: runs/b is not finished (1 of 2 steps) and left out\n"
    truncate(write_run(tmp_path / "runs/c", seed=8))
    assert main(["compare", "runs"]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("warning: runs/c is left out: ")
    assert "| `evidential` | 1 |" in shown.out


def test_a_warning_is_shown_once_whoever_handles_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training shows warnings by a handler; the tables print their own, on one line."""
    write_run(tmp_path / "runs/a")
    write_run(tmp_path / "runs/b")
    handler, log = logging.StreamHandler(), logging.getLogger("incseg")
    level = log.level
    log.addHandler(handler)
    try:
        assert main(["compare", "runs"]) == 0
    finally:
        log.removeHandler(handler)
    assert capsys.readouterr().err == "warning: runs/b is left out: the same settings and seed 42 as runs/a\n"
    assert log.level == level


def test_compare_warns_of_mixtures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs/a")
    write_run(tmp_path / "runs/b", rules="mib", preset="paper-voc")
    write_run(tmp_path / "runs/c", settings={"data.holdout": 10})
    assert main(["compare", "runs"]) == 0
    shown = capsys.readouterr()
    for what in (
        "label rules are in one table (mib, plop)",
        "presets are in one table (paper-voc, voc-laptop)",
        "test images are in one table (data.holdout 10, the test set)",
    ):
        assert f"warning: runs with different {what}" in shown.err
        assert f"- **Warning**: runs with different {what}" in shown.out
    assert "| `evidential` (preset paper-voc, rules mib) |" in shown.out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "RUN"),
        (["absent"], "absent does not exist; give run folders"),
        (["empty"], "nothing to show: empty holds no run folder; incseg train makes runs"),
        (["runs", "--fromat", "csv"], "did you mean --format?"),
        (["runs", "--format", "html"], "invalid choice: 'html'"),
        (["runs", "--published", "no"], "invalid choice: 'no'"),
        (["unfinished"], "nothing to show: unfinished/a is not finished (0 of 2 steps) and left out; incseg train"),
        (["broken"], "nothing to show: broken is left out: broken/protocol.json is missing; the run did not get"),
        (["tried"], "nothing to show: 1 run below ablations/ left out; --everything shows all; incseg train"),
        (["absent", "--everything"], "absent does not exist; give run folders"),
    ],
)
def test_a_mistake_gives_one_line(
    argv: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs/a")
    write_run(tmp_path / "unfinished/a", steps_done=0)
    write_run(tmp_path / "tried/ablations/a", steps_done=0)
    (write_run(tmp_path / "broken") / "protocol.json").unlink()
    (tmp_path / "empty").mkdir()
    assert main(["compare", *argv]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (error,) = shown.err.splitlines()
    assert error.startswith("error: ")
    assert expected in error


@pytest.mark.parametrize(
    "given", [["absent"], ["empty"], ["unfinished"], ["broken"], ["empty", "broken", "unfinished"]]
)
def test_report_and_compare_say_the_same_of_nothing(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "unfinished/a", steps_done=0)
    (write_run(tmp_path / "broken") / "protocol.json").unlink()
    (tmp_path / "empty").mkdir()
    said = []
    for command in (["compare"], ["report", "--out", "page", "--images", "0"]):
        assert main([*command, *given]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert said[0].count("\n") == 1
    for name in given:
        assert said[0].count(f"{name} holds") + said[0].count(f"{name}/") + said[0].count(f"{name} does") == 1
    assert not Path("page").exists()


def test_of_many_reasons_a_line_tells_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abcde":
        write_run(tmp_path / "runs" / name, steps_done=0)
    assert main(["compare", "runs"]) == 2
    assert capsys.readouterr().err.endswith("left out; and 2 more; incseg train makes runs\n")


LEFT_OUT = "note: 3 runs below ablations/ and 2 tests with other inference options left out; --everything shows all\n"


def test_compare_leaves_variants_out(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def compared(*argv: str) -> tuple[set[str], str]:
        assert main(["compare", *argv]) == 0
        shown = capsys.readouterr()
        return {line.split(" |")[0] for line in shown.out.splitlines() if line.startswith("| `")}, shown.err

    shutil.rmtree(study / "unfinished")
    methods, tested = {"| `finetune`", "| `evidential`", "| `joint`"}, "| `evidential` (balancing odds)"
    ablations = {"| `evidential` (lambda_kd 5.0)", "| `evidential` (scope seen, train.lr 0.5)"}
    runs = "runs/voc-laptop"
    assert compared(runs) == (methods, LEFT_OUT)
    assert compared(runs, "--everything") == (methods | {tested} | ablations, "")
    assert compared(f"{runs}/ablations") == (ablations, "")
    assert compared(f"{runs}/ablations/lonely", f"{runs}/f42") == (
        {"| `finetune`", "| `evidential` (lambda_kd 5.0)"},
        "",
    )
    assert compared(f"{runs}/e42") == ({"| `evidential`", tested}, "")
    beside, said = compared(runs, f"{runs}/ablations/lonely", f"{runs}/e42", f"{runs}/e1337")
    assert beside == methods | {tested, "| `evidential` (lambda_kd 5.0)"}
    assert said == "note: 2 runs below ablations/ left out; --everything shows all\n"
    assert compared(runs, f"{runs}/ablations")[0] == methods | ablations
    Path("linked").symlink_to(study)
    assert compared("linked") == (methods, LEFT_OUT)


def test_best_is_no_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of many variants one is best by chance: it must not take the bold type from the methods."""
    write_run(tmp_path / "runs/f", (10, 10, 10, 10), method="finetune")
    retest(write_run(tmp_path / "runs/e"), (91, 91, 91, 91), balancing="odds")
    write_run(tmp_path / "runs/ablations/s", (90, 90, 90, 90), settings={"method.scope": "seen"})
    for kind, best in (("markdown", "**40.0**"), ("latex", r"\textbf{40.0}")):
        assert main(["compare", "runs", "--format", kind, "--published", "false"]) == 0
        text = capsys.readouterr().out
        assert best in text
        assert not {"90.0", "91.0"} & set(re.findall(r"\d+\.\d", text))
    assert main(["compare", "runs", "--format", "csv", "--published", "false"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["method"], row["options"]) for row in rows] == [("finetune", ""), ("evidential", "")]
    assert main(["compare", "runs", "--format", "json", "--published", "false"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert sorted(row["all"] for row in data["rows"]) == [10, 40]
    assert sorted(one["all"]["mean"] for one in data["summary"]) == [10, 40]


def test_the_overview_shows_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "\n  compare " in capsys.readouterr().out


# --- pages of results/ ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return made_up_runs.script("results")


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two methods, two seeds, an ablation of both seeds, one without default, and retests."""
    runs = tmp_path / "runs/voc-laptop"
    monkeypatch.setattr("sys.argv", ["incseg", "eval", "runs/voc-laptop/e42", "--save"])
    for seed in (42, 1337):
        extra = 2 * (seed == 1337)
        folder = write_run(runs / f"e{seed}", (50, 20, 40 + extra, 30), seed=seed)
        retest(folder, (50, 20, 41 + 2 * extra, 30), balancing="odds")
        write_run(runs / f"f{seed}", (5, 2, 4, 3), seed=seed, method="finetune")
        scope = {"method.scope": "seen", "train.lr": 0.5}
        write_run(runs / f"ablations/scope-{seed}", (50, 20, 30 + extra, 29), seed=seed, settings=scope)
    write_run(runs / "ablations/lonely", seed=7, settings={"method.lambda_kd": 5.0})
    at_once = [["cat", "cow", "sheep"]]
    write_run(runs / "j", (70, 60, 65, 66), seed=42, method="joint", setting="joint", groups=at_once)
    write_run(runs / "unfinished", seed=9, steps_done=1)
    return runs


def test_results_are_written_from_folders_alone(
    script: ModuleType, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([]) == 0
    shown = capsys.readouterr()
    assert shown.err == "warning: runs/voc-laptop/unfinished is not finished (1 of 2 steps) and left out\n"
    out = Path("results/voc-laptop")
    names = ["ablations", "classes", "main", "unknown"]
    pages = ["paper.csv", "paper.md", "paper.tex", *(f"{name}.md" for name in names)]
    assert sorted(os.listdir(out)) == sorted([*pages, "runs.jsonl"])
    before = {name: (out / name).read_bytes() for name in pages}
    assert script.main(["runs/voc-laptop"]) == 0
    assert {name: (out / name).read_bytes() for name in pages} == before
    for name in names:
        text = before[f"{name}.md"].decode()
        assert "Label rules: name plop" in text
        assert "commits " in text
        assert "abc1234" in text
        assert "hours in all" in text
        assert "2 CPUs" in text
        assert "Made by `python tools/results.py runs/voc-laptop`" in text
        assert "incseg train --data voc --root VOC2012 --seed 42" in text
        assert str(study.parent) not in text


def test_results_hold_the_papers_table(script: ModuleType, study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.main([])
    capsys.readouterr()
    for kind in ("markdown", "latex", "csv"):  # other options of inference and ablations have a page of their own
        main(["compare", "results/voc-laptop/runs.jsonl", "--commands", "--format", kind])
        assert Path(f"results/voc-laptop/paper{FORMATS[kind]}").read_text() == capsys.readouterr().out
    assert "\\begin{tabular}" in Path("results/voc-laptop/paper.tex").read_text()
    assert "evidential,,15-1" in Path("results/voc-laptop/paper.csv").read_text()


def test_replayed_images_are_not_ranked(tmp_path: Path) -> None:
    write_run(tmp_path / "a", (50, 20, 40, 30))
    write_run(tmp_path / "b", (5, 2, 4, 3), method="finetune")
    write_run(tmp_path / "c", (60, 30, 50, 40), settings={"method.replay": "/somewhere/web"})
    write_run(tmp_path / "d", (60, 30, 51, 40), settings={"method.generator": "my:paint"})
    table = compare(read(tmp_path), published=False)[0]
    best = {line.label: table.is_best(line, ("15-1", "overlapped"), "all") for line in table.lines}
    assert best == {"`finetune`": False, "`evidential`": True, "`evidential` (generator my:paint)": False,
                    "`evidential` (replay web)": False}  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        ["train", "--config", "/somewhere/run.yaml"],
        ["train", "--config=/somewhere/run.yaml"],
        ["sweep", "make", "/somewhere", "queued"],
    ],
)
def test_a_run_from_a_file_of_settings_shows_the_flags_that_say_the_same(given: list[str], tmp_path: Path) -> None:
    """Sweeps write such files, and readers of the table do not have them."""
    settings = {"method.scope": "seen", "model.stages": [3]}
    folder = write_run(tmp_path / "queued", preset="voc-laptop", method="evidential", settings=settings)
    environment = json.loads((folder / "environment.json").read_text())
    environment["command"] = ["__main__.py", *given, "--out", str(folder)]
    (folder / "environment.json").write_text(json.dumps(environment))
    (record,) = read(tmp_path)
    assert record.command == (
        "incseg train --preset voc-laptop --data voc --root VOC2012 --task 15-1 --setting overlapped "
        "--method evidential --seed 42 --method.scope seen --model.stages '[3]' --out queued"
    )
    words = shlex.split(record.command)[2:]
    again = flatten(parse_run("incseg train", "", words).as_dict())
    assert {key: again[key] for key in again if key not in ("out", "data.root")} == {
        key: value for key, value in record.settings.items() if key not in ("out", "data.root")
    }


def test_the_main_page(script: ModuleType, study: Path) -> None:
    script.main([])
    text = Path("results/voc-laptop/main.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [
        "| `finetune` | 2 | 5.0 ± 0.0 | 2.0 ± 0.0 | 4.0 ± 0.0 | 3.0 ± 0.0 | **45.0 ± 0.0** | 3 |",
        "| `evidential` | 2 | **50.0 ± 0.0** | **20.0 ± 0.0** | **41.0 ± 1.4** | **30.0 ± 0.0** | **45.0 ± 0.0** | 3 |",
        "| `joint` | 1 | 70.0 | 60.0 | 65.0 | 66.0 | 45.0 | 2 |",
    ]
    assert "| voc 15-1 overlapped | `evidential` | 2 | 0.00 | 0.00 | 2.00 | 0.00 | 0.00 |" in text
    assert "5 runs, " in text


def test_the_ablations_page(script: ModuleType, study: Path) -> None:
    script.main([])
    text = Path("results/voc-laptop/ablations.md").read_text()
    trained, tested = text.split("## The same models, tested otherwise")
    default = "| 2 | 50.0 ± 0.0 | 20.0 ± 0.0 | 41.0 ± 1.4 | 30.0 ± 0.0 |  |  |"
    assert f"| default {default}" in trained
    change = "scope increment → seen, train.lr 0.3 → 0.5"
    figures = "| 2 | 50.0 ± 0.0 | 20.0 ± 0.0 | 31.0 ± 1.4 | 29.0 ± 0.0 | -10.0 ± 0.0 | -1.0 ± 0.0 |"
    assert f"| {change} {figures}" in trained
    lonely = "| lambda_kd 5.0 (no default run of this seed) | 1 | 50.0 | 20.0 | 40.0 | 30.0 |  |  |"
    assert lonely in trained
    assert f"| as trained {default}" in tested
    again = (
        "| balancing ratio → odds | 2 | 50.0 ± 0.0 | 20.0 ± 0.0 | 43.0 ± 2.8 | 30.0 ± 0.0 | +2.0 ± 1.4 | +0.0 ± 0.0 |"
    )
    assert again in tested
    assert "`finetune`" not in text


def test_an_ablation_is_held_against_the_nearest_run_with_fewer_options(script: ModuleType, tmp_path: Path) -> None:
    runs = Path("runs/x")
    write_run(runs / "e", (50, 20, 40, 30))
    write_run(runs / "pod", (50, 20, 39, 30), settings={"method.pod": 0.01})  # not on the way to the others
    write_run(runs / "ablations/scope", (50, 20, 35, 30), settings={"method.scope": "seen"})
    write_run(runs / "ablations/both", (50, 20, 33, 30), settings={"method.scope": "seen", "method.lambda_kd": 5.0})
    assert script.main(["runs/x"]) == 0
    text = Path("results/x/ablations.md").read_text()
    one, other = text.split("### voc 15-1 overlapped, `evidential`")[1:]
    assert "| scope increment → seen | 1 | 50.0 | 20.0 | 35.0 | 30.0 | -5.0 | +0.0 |" in one
    assert other.startswith(" (scope seen)\n")
    assert "| lambda_kd 10.0 → 5.0 | 1 | 50.0 | 20.0 | 33.0 | 30.0 | -2.0 | +0.0 |" in other


def test_the_unknown_page(script: ModuleType, study: Path) -> None:
    script.main([])
    text = Path("results/voc-laptop/unknown.md").read_text()
    assert "## voc 15-1 overlapped: unseen against true background, by 1 − P(background)" in text
    assert "by the entropy of the probabilities" in text
    assert text.count("| `evidential` | 2 | 0.500 / 0.250 / 0.500 |") == 4
    assert "`joint`" not in text
    assert [line.split("unseen against ")[1] for line in text.splitlines() if line.startswith("## ")] == [
        "true background, by 1 − P(background)", "true background, by the entropy of the probabilities",
        "classes learnt before, by the method's own uncertainty",
        "classes learnt before, by the entropy of the probabilities",
    ]  # fmt: skip


def test_the_classes_page(script: ModuleType, study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = np.array([[90, 10, 0], [20, 80, 0], [0, 0, 100]])  # background, cat, cow
    last = np.array([[60, 0, 0, 40], [30, 50, 0, 20], [0, 0, 100, 0], [0, 50, 0, 50]])  # … and sheep
    for seed in (42, 1337):
        write_array(study / f"e{seed}/steps/0/confusion.npy", first)
        write_array(study / f"e{seed}/steps/1/confusion.npy", last)
    script.main([])
    text = Path("results/voc-laptop/classes.md").read_text()
    assert "| class | `finetune` | `evidential` | `joint` |" in text
    assert "| cat | 5.0 → 15.0 | 5.0 → 15.0 | 5.0 → 5.0 |" in text
    assert "| sheep | 15.0 → 15.0 | 15.0 → 15.0 | 5.0 → 5.0 |" in text  # when it was learnt is the end
    mine = text.split("`evidential`: what is called by a new name")[1]
    assert "| sheep | 1 | 50.0 | 45.5 | background 36.4, cat 18.2 |" in mine
    assert "| cat | 80.0 → 50.0 | sheep 20.0, background 10.0 |" in mine
    assert "| cow | 100.0 → 100.0 |  |" in mine
    (study / "e42/steps/1/confusion.npy").write_bytes(b"\x93NUMPY")
    write_array(study / "f42/steps/1/confusion.npy", np.eye(3, dtype=np.int64))
    capsys.readouterr()
    assert script.main([]) == 0
    error = capsys.readouterr().err
    assert "runs/voc-laptop/e42/steps/1/confusion.npy cannot be read" in error
    assert "runs/voc-laptop/f42/steps/1/confusion.npy has shape (3, 3), not 4 × 4" in error


def test_a_study_of_nothing_but_joint_training(script: ModuleType, tmp_path: Path) -> None:
    write_run(tmp_path / "runs/x/j", (70, 60, 65, 66), method="joint", setting="joint", groups=[["cat", "cow"]])
    assert script.main(["runs/x"]) == 0
    assert "## voc 15-1 joint" in Path("results/x/main.md").read_text()
    assert "No step of these runs had an unseen class" in Path("results/x/unknown.md").read_text()
    assert "None was run." in Path("results/x/ablations.md").read_text()


def test_a_study_that_is_not_there(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 2
    assert capsys.readouterr().err.startswith("error: runs/voc-laptop is not a folder of runs; train some first")
    write_run(tmp_path / "runs/voc-laptop/a", steps_done=1)
    assert script.main([]) == 2
    assert "error: runs/voc-laptop holds no finished run yet" in capsys.readouterr().err
    assert not Path("results").exists()
