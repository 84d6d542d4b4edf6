"""`incseg report`: the content of the page, what is left out and named, which images are chosen; the page needs no
other file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml
from made_up_runs import change_json, write_run
from PIL import Image
from small_runs import small_config

from incseg.cli import main
from incseg.config import usual_settings
from incseg.io import write_array
from incseg.metrics import BINS
from incseg.report.figures import Reliability, Unknown, against_increments, class_heat_map, class_table, takings
from incseg.report.page import Block, HtmlTable, PageSection, inline_html, page
from incseg.report.pictures import (
    each_once,
    extremes,
    image_score,
    largest_fall,
    leads,
    shown_classes,
    with_two_classes,
)
from incseg.report.runs import collected_warnings, read_runs
from incseg.report.sections import MOST_LINES, Ladder, Section, ladders_of, sections_of, step_name
from incseg.report.style import INK, Drawn, line_style, save_figure
from incseg.run import train
from incseg.types import IGNORE

GROUPS = (("cat", "cow"), ("sheep",), ("sofa",))


def sections(*folders: Path) -> list[Section]:
    with collected_warnings() as warned:
        found = sections_of(read_runs(folders, usual_settings))
    assert warned == []
    return found


def report(out: Path, *arguments: object) -> str:
    assert main(["report", *map(str, arguments), "--out", str(out), "--threads", "1"]) == 0
    return (out / "index.html").read_text(encoding="utf-8")


def words(page: str) -> str:
    """Return the text of the page, without figures."""
    text = re.sub(r"<(style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


class Checked(HTMLParser):
    """Check that tags are closed in order and ids are unique, and collect the addresses that a browser would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: Sequence[tuple[str, str | None]]) -> None:
        if tag not in ("meta",):
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(str(value))
            elif name == "src" or (name.endswith("href") and tag in ("image", "use", "link")):
                self.fetched.append(str(value))
            elif name == "href":
                self.links.append(str(value))

    def handle_startendtag(self, tag: str, attributes: Sequence[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in ("meta",):
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_alone(page: str, folder: Path) -> None:
    """Assert that nothing is fetched, and that every link leads into the page or to an existing figure."""
    checked = Checked(page)
    assert "http" not in page
    assert "<script" not in page
    assert "@import" not in page
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert [found for found in checked.fetched if not found.startswith(("#", "data:image/"))] == []
    assert len(checked.ids) == len(set(checked.ids))
    for link in checked.links:
        assert link[1:] in checked.ids if link.startswith("#") else (folder / link).is_file()
    used = {found[1:] for found in checked.fetched if found.startswith("#")} | set(re.findall(r"url\(#([^)]+)\)", page))
    assert used <= set(checked.ids)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not write figures, which takes most of a report's time."""

    def named(figure: object, folder: Path, name: str, caption: str) -> Drawn:
        return Drawn(name, caption, "", {})

    for module in ("incseg.report.page", "incseg.gallery"):
        monkeypatch.setattr(f"{module}.save_figure", named)


# --- from run folders alone ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Path]:
    """Write two seeds of evidential, one of fine-tuning, joint training; sheep is predicted on cow."""
    runs, out = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("report")
    for seed, figures in ((42, (50.0, 20.0, 40.0, 30.0)), (1337, (54.0, 24.0, 44.0, 34.0))):
        folder = write_run(runs / f"evidential-{seed}", figures, seed=seed, groups=GROUPS)
        counts = 100 * np.eye(4, dtype=np.int64)
        counts[2, [2, 3]] = 70, 30
        write_array(folder / "steps/1/confusion.npy", counts)
    write_run(runs / "finetune", (5.0, 2.0, 4.0, 3.0), method="finetune", groups=GROUPS)
    write_run(runs / "joint", (60.0, 55.0, 58.0, 57.0), method="joint", setting="joint", groups=(sum(GROUPS, ()),))
    page = report(out, runs, "--images", 0)
    return runs, page, out


def test_the_table_has_seeds_published_figures_rules_and_commands(made_up: tuple[Path, str, Path]) -> None:
    text = words(made_up[1])
    assert "42.0 ± 2.8" in text
    assert "58.0 (var 0.03)" in text
    assert "Label rules: name plop" in text
    assert "incseg train --data voc --root VOC2012 --seed 42" in text
    assert "15-1 overlapped" in text
    assert "15-5" not in text.split("Commands")[0].split("Percent")[0]  # nothing was run there


def test_the_page_needs_no_other_file(made_up: tuple[Path, str, Path]) -> None:
    _, page, out = made_up
    assert_alone(page, out)
    assert len(page) < 2_000_000


def test_figures_are_saved_as_png_and_svg(made_up: tuple[Path, str, Path]) -> None:
    figures = made_up[2] / "figures"
    names = sorted(path.stem.removeprefix("voc_15-1_overlapped-") for path in figures.glob("*.svg"))
    each = [f"{kind}-{i}" for kind in ("classes", "confusion") for i in (0, 1)]
    assert names == sorted([*each, "curves", "forgetting", "unknown-steps"])
    for file in figures.glob("*.svg"):
        assert ElementTree.parse(file).getroot().tag.endswith("svg")
        with Image.open(file.with_suffix(".png")) as picture:
            assert min(picture.size) > 200
            assert picture.convert("L").getextrema() != (255, 255)


def test_figures_in_the_page_follow_its_colours(made_up: tuple[Path, str, Path]) -> None:
    _, page, _ = made_up
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert INK not in drawn
    assert "currentColor" in drawn
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_sheep_took_cow(made_up: tuple[Path, str, Path]) -> None:
    assert "sheep took 30 % of cow , 0 % at the end" in words(made_up[1])


def test_a_method_that_is_not_the_main_one_is_folded_away(made_up: tuple[Path, str, Path]) -> None:
    assert re.findall(r"<summary>(.*?)</summary>", made_up[1]) == ["Class by class: finetune"]


def test_takings_are_of_the_step_that_learnt_the_taker() -> None:
    first, second = np.eye(2), np.eye(3)
    second[1, [1, 2]] = 0.75, 0.25
    third = np.eye(4)
    third[1, [1, 2, 3]] = 0.5, 0.1, 0.4
    third[2, [2, 3]] = 0.99, 0.01  # too little to tell
    found = takings([first, second, third], [["cow"], ["sheep"], ["horse"]])
    assert [(t.taker, t.victim, t.step, t.then, t.now) for t in found] == [
        ("horse", "cow", 2, 0.4, 0.4),
        ("sheep", "cow", 1, 0.25, 0.1),
    ]
    assert takings([first, None, third], [["cow"], ["sheep"], ["horse"]])[0].taker == "horse"


def test_what_each_step_cost_the_classes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", groups=GROUPS)
    results = yaml.safe_load((folder / "results.json").read_text())
    for row, cow in zip(results["steps"], (80.0, 50.0, 55.0), strict=True):
        row["iou"]["cow"] = cow
    change_json(folder / "results.json", steps=results["steps"])
    (section,) = sections(folder)
    table = class_table(section.main)
    assert table.names == ["background", "cat", "cow", "sheep", "sofa"]
    assert table.values[2].tolist() == [80, 50, 55]
    assert table.changes[2].tolist() == [-30, 5, -25]
    assert np.isnan(table.values[4, :2]).all()
    assert np.isnan(table.changes[4]).all()  # nothing has come after the last step's class
    assert table.changes[3, 2] == 10


def test_more_classes_than_rows_are_shown_by_increment(tmp_path: Path) -> None:
    groups = [[f"a{i}" for i in range(50)], ["b"]]
    folder = write_run(tmp_path / "a", dataset="shapes", task="50-1", groups=groups)
    (section,) = sections(folder)
    table = class_table(section.main)
    assert table.names == ["step 0: mean of 51", "step 1: mean of 1"]
    np.testing.assert_allclose(table.values, [[5, 15], [np.nan, 15]])


def test_names_of_steps() -> None:
    assert step_name(0, ["cat"] * 9) == "9 classes"
    assert step_name(2, ["sheep"]) == "+ sheep"
    assert step_name(1, ["hat", "coat"]) == "+ hat, coat"


# --- over several tasks --------------------------------------------------------------------------------------

TWO_STEPS = (("cat", "cow"), ("sheep", "sofa"))


def ladders(*folders: Path) -> list[Ladder]:
    return ladders_of(read_runs(folders, usual_settings))


def all_of(value: float) -> tuple[float, float, float, float]:
    return (50.0, 20.0, value, 30.0)


def write_tasks(folder: Path, *values: float, **about: Any) -> None:
    """Write a run of 15-5 with one increment, and one of 15-1 with two."""
    for task, groups, value in zip(("15-5", "15-1"), (TWO_STEPS, GROUPS), values, strict=False):
        write_run(folder / task, all_of(value), task=task, groups=groups, **about)


def test_the_score_against_the_number_of_increments(tmp_path: Path) -> None:
    write_tasks(tmp_path / "evidential", 60.0, 40.0)
    write_run(tmp_path / "seed", all_of(50.0), seed=1337, groups=GROUPS)
    write_tasks(tmp_path / "mib", 55.0, 30.0, method="mib")
    write_tasks(tmp_path / "finetune", 10.0, method="finetune")  # one task is not a line
    write_run(tmp_path / "joint", all_of(70.0), method="joint", setting="joint", groups=(sum(GROUPS, ()),))
    (ladder,) = ladders(tmp_path)
    assert (ladder.title, ladder.key) == ("voc overlapped", "voc_overlapped")
    assert list(ladder.increments.items()) == [("15-5", 1), ("15-1", 2)]
    means = {line.label: {task: found.mean for task, found in line.scores.items()} for line in ladder.lines}
    assert means == {"evidential": {"15-5": 60.0, "15-1": 45.0}, "mib": {"15-5": 55.0, "15-1": 30.0}}
    assert ladder.lines[0].scores["15-1"].seeds == 2
    assert {label: level.mean for label, level in ladder.ceilings.items()} == {"joint": 70.0}
    (axes,) = against_increments(ladder).axes
    drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in axes.lines}
    assert drawn["evidential"] == [[1, 60], [2, 45]]
    assert drawn["mib"] == [[1, 55], [2, 30]]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1\n15-5", "2\n15-1"]


@pytest.mark.parametrize(
    "other",
    [
        {"setting": "disjoint"},
        {"preset": "paper-voc"},
        {"rules": "mib"},
        {"order": "b"},
        {"method": "mib"},
        {"settings": {"method.lambda_kd": 1.0}},
        {"groups": (("cat", "cow"), ("sheep", "horse"))},
        {"groups": GROUPS},  # as many increments
        {"groups": TWO_STEPS, "steps_done": 1},
    ],
    ids=str,
)
def test_what_cannot_be_joined_by_a_line(tmp_path: Path, other: dict[str, Any]) -> None:
    write_run(tmp_path / "one", groups=GROUPS)
    write_run(tmp_path / "other", task="15-5", **{"groups": TWO_STEPS, **other})
    assert ladders(tmp_path) == []


def test_presets_and_rules_are_named_where_there_are_several(tmp_path: Path) -> None:
    for preset, rules in (("voc-laptop", "plop"), ("paper-voc", "mib")):
        write_tasks(tmp_path / preset, 60.0, 40.0, preset=preset, rules=rules)
    assert [one.title for one in ladders(tmp_path)] == [
        "voc overlapped paper-voc mib",
        "voc overlapped voc-laptop plop",
    ]


def test_tasks_of_the_same_number_of_increments_are_side_by_side(tmp_path: Path) -> None:
    write_tasks(tmp_path / "two", 60.0, 40.0)
    for task, value in (("19-1", 65.0), ("5-15", 55.0)):
        write_run(tmp_path / task, all_of(value), task=task, groups=TWO_STEPS)
    (ladder,) = ladders(tmp_path)
    assert list(ladder.increments) == ["19-1", "15-5", "5-15", "15-1"]
    (axes,) = against_increments(ladder).axes
    (line,) = axes.lines
    places, heights = np.asarray(line.get_xydata()).T.tolist()
    assert places == sorted(set(places))
    assert [round(place) for place in places] == [1, 1, 1, 2]
    assert places[1] == 1
    assert heights == [65, 60, 55, 40]
    assert axes.get_xticklabels()[0].get_text() == "1\n19-1\n15-5\n5-15"


def test_of_too_many_lines_some_are_drawn_by_rule(tmp_path: Path) -> None:
    """First more numbers of increments, then fewer options, then the higher score; drawn in the order of the table."""
    for index in range(MOST_LINES):
        write_tasks(tmp_path / str(index), 60.0, 40.0 + index, settings={"method.lambda_kd": 20.0 + index})
    (ladder,) = ladders(tmp_path)
    assert ladder.drawn == list(ladder.lines)
    write_tasks(tmp_path / "plain", 20.0, 10.0, method="plop")
    write_tasks(tmp_path / "three", 20.0, 10.0, method="mib", settings={"method.lambda_kd": 1.0})
    groups = (("cat",), ("cow",), ("sheep",), ("sofa",))
    settings = {"method.lambda_kd": 1.0}
    write_run(tmp_path / "three/10-1", all_of(5.0), task="10-1", method="mib", groups=groups, settings=settings)
    (ladder,) = ladders(tmp_path)
    left_out = [line.label for line in ladder.lines if line not in ladder.drawn]
    assert left_out == ["evidential (lambda_kd 20.0)", "evidential (lambda_kd 21.0)"]
    assert [line.label for line in ladder.drawn[-2:]] == ["mib", "plop"]


def test_the_page_has_the_number_of_increments(tmp_path: Path) -> None:
    write_tasks(tmp_path / "runs/evidential", 60.0, 40.0)
    write_tasks(tmp_path / "runs/recall", 65.0, 64.0, method="recall", settings={"method.replay": "web"})
    write_tasks(tmp_path / "runs/ablations", 61.0, 41.0, settings={"method.lambda_kd": 1.0})
    page = report(tmp_path / "out", tmp_path / "runs", "--images", 0)
    assert_alone(page, tmp_path / "out")
    text = words(page)
    table = text.split("All 15-5: 1 increment 15-1: 2 increments ")[1]
    assert table.startswith("evidential 60.0 40.0 recall 65.0 64.0 mIoU over all classes")  # ablations are not methods
    assert "With more images than the others: recall." in text
    assert "The figure has" not in text  # all of them are
    with Image.open(tmp_path / "out/figures/voc_overlapped-increments.png") as picture:
        assert picture.convert("L").getextrema() != (255, 255)


def test_curves_differ_in_more_than_colour() -> None:
    styles = [line_style(index) for index in range(20)]
    assert len({(s["color"], s["marker"], str(s["linestyle"])) for s in styles}) == 20
    assert len({s["marker"] for s in styles[:7]}) == len({s["color"] for s in styles[:7]}) == 7


# --- runs that are not whole ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_a_broken_run_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs/good")
    (write_run(tmp_path / "runs/bad", seed=7) / "results.json").write_text('{"final": ')
    half = write_run(tmp_path / "runs/half", method="finetune")
    (half / "steps/1/confusion.npy").write_bytes(b"\x93NUMPY")
    text = words(report(tmp_path / "out", tmp_path / "runs", "--images", 0))
    assert "bad is left out" in text
    assert "confusion.npy cannot be read" in text
    assert "finetune" in text
    shown = capsys.readouterr().err
    assert shown.count("bad is left out") == 1
    assert "Traceback" not in shown


@pytest.mark.usefixtures("undrawn")
def test_a_run_under_way_is_in_the_curves(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/done", groups=GROUPS)
    write_run(tmp_path / "runs/going", method="finetune", groups=GROUPS, steps_done=2)
    write_run(tmp_path / "runs/begun", method="mib", groups=GROUPS, steps_done=0)
    text = words(report(tmp_path / "out", tmp_path / "runs", "--images", 0))
    assert "finetune , seed 42 2 of 3 60.0 – 60.0 60.0" in text
    assert "begun is not finished (0 of 3 steps) and left out" in text
    (section,) = sections(tmp_path / "runs/done", tmp_path / "runs/going")
    assert [(method.label, method.num_steps) for method in section.methods] == [("evidential", 3), ("finetune", 2)]


@pytest.mark.usefixtures("undrawn")
def test_a_run_under_way_alone_makes_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "going", steps_done=1)
    assert main(["report", str(run), "--images", "0"]) == 0
    assert "1 of 2" in words((run / "report/index.html").read_text())
    assert sections(tmp_path)[0].main.num_steps == 1  # its own page is not a run


@pytest.mark.usefixtures("undrawn")
def test_a_run_of_another_version(tmp_path: Path) -> None:
    run = write_run(tmp_path / "old")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["train"]["magic"] = 3
    del config["train"]["momentum"], config["data"]["holdout"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    rows = yaml.safe_load((run / "results.json").read_text())["steps"]
    change_json(run / "results.json", steps=[{**row, "unseen": {}} for row in rows])
    text = words(report(tmp_path / "out", run, "--images", 3))
    assert "train.magic 3" in text
    assert "Classes not learnt yet" not in text


@pytest.mark.usefixtures("undrawn")
def test_odd_names_and_tasks_that_look_alike_in_file_names(tmp_path: Path) -> None:
    write_run(tmp_path / "a", dataset="shapes", task="$x$,<b>/y", groups=(("$x$", "<b>"), ("y",)))
    write_run(tmp_path / "b", dataset="shapes", task="$x$/<b>,y", groups=(("$x$",), ("<b>", "y")))
    page = report(tmp_path / "out", tmp_path / "a", tmp_path / "b", "--images", 0)
    Checked(page)
    assert "shapes $x$,&lt;b&gt;/y overlapped" in page
    assert "<b>" not in page
    first, second = sections(tmp_path / "a", tmp_path / "b")
    assert first.key != second.key
    save_figure(class_heat_map(first.main, first.step_names), tmp_path, "odd", "")  # $ is not mathematics
    assert ElementTree.parse(tmp_path / "odd.svg")


def test_every_text_of_a_page_is_escaped() -> None:
    odd = "<i>&"
    figure = Drawn("figure", odd, "<svg></svg>", {"letter": "<path/>"})
    block = Block(odd, [odd], [HtmlTable([odd], [[odd, odd]], odd)], [odd], [odd], [figure])
    text = page(odd, odd, [odd], [PageSection(odd, [block, replace(block, folded=True)])], odd)
    assert "<i>" not in text
    assert text.count("&lt;i&gt;&amp;") == 7 + 2 * 9  # title twice, about, warning, section twice, footer; each block
    assert "<svg></svg>" in text
    assert inline_html("**a<b** and `c`") == "<strong>a&lt;b</strong> and <code>c</code>"


@pytest.mark.usefixtures("undrawn")
def test_joint_training_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "joint", method="joint", setting="joint", groups=(("cat", "cow"),))
    page = report(tmp_path / "out", run, "--images", 0)
    assert "Class by class: joint" in page
    assert "Forgetting" not in page


@pytest.mark.usefixtures("undrawn")
def test_without_data_a_line_explains_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    text = words(report(tmp_path / "out", run, "--images", 3))
    assert "Pictures, reliability and the curves of unknown classes are left out" in text
    assert "/somewhere/else/VOC2012" in text
    assert "Step by step" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["broken"], "nothing to show: broken is left out: broken/protocol.json is missing"),
        (["nowhere"], "does not exist"),
        (["good", "other"], "--out DIR"),
        (["good", "--out", "file"], "is a file"),
        (["good", "--images", "-1"], "--images is -1"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "good")
    write_run(tmp_path / "other", seed=7)
    (write_run(tmp_path / "broken") / "protocol.json").unlink()
    (tmp_path / "file").touch()
    assert main(["report", *arguments]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error


# --- which images --------------------------------------------------------------------------------------------


def test_the_score_of_an_image() -> None:
    truth = np.array([[0, 0, 5, 5], [0, IGNORE, 5, 7]], dtype=np.uint8)
    predicted = np.array([[0, 5, 5, 5], [0, 9, 5, 5]], dtype=np.uint8)
    assert image_score(predicted, truth) == pytest.approx(100 * (2 / 3 + 3 / 5 + 0) / 3)  # 9 lies in the void
    assert image_score(truth, truth) == 100
    plain, stray = np.zeros((20, 20), dtype=np.uint8), np.zeros((20, 20), dtype=np.uint8)
    stray[0, :3] = 4
    assert image_score(stray, plain) > 99  # three pixels of 400 are no label of it


def test_hardest_median_and_best() -> None:
    scores = {3: 50.0, 5: 10.0, 8: 90.0, 9: 60.0}
    assert extremes(scores) == {"hardest": 5, "median": 3, "best": 8}
    assert extremes({4: 1.0}) == {"hardest": 4, "median": 4, "best": 4}
    assert extremes({}) == {}


def test_the_largest_fall_is_from_the_best_earlier_step() -> None:
    assert largest_fall([{1: 50.0, 2: 80.0}, {1: 90.0, 2: 70.0}, {1: 60.0, 2: 60.0}]) == {"largest fall": 1}
    assert largest_fall([{1: 50.0, 2: 80.0}, {1: 40.0, 2: 10.0}, {1: 30.0}]) == {"largest fall": 1}
    assert largest_fall([{1: 50.0}, {1: 60.0}]) == {}
    assert largest_fall([{1: 50.0}]) == {}


def test_leads_and_lags() -> None:
    mine, theirs = {1: 90.0, 2: 30.0, 3: 50.0}, {1: 10.0, 2: 60.0, 3: 50.0, 4: 0.0}
    assert leads(mine, theirs) == {"largest lead": 1, "largest lag": 2}
    assert leads({3: 50.0}, {3: 50.0}) == {}


def test_an_image_of_several_names_is_shown_once() -> None:
    assert each_once({"hardest": 1, "best": 2, "largest lag": 1}) == {"hardest, largest lag": 1, "best": 2}


def test_images_of_two_classes() -> None:
    scores = {1: 10.0, 2: 20.0, 3: 30.0}
    assert with_two_classes(scores, {1: [1], 2: [1], 3: [1, 2]}) == 3
    assert with_two_classes(scores, {1: [1], 2: [1], 3: [1]}) == 2
    assert with_two_classes({}, {}) is None


def test_classes_that_an_image_shows() -> None:
    truth = np.zeros((20, 20), dtype=np.uint8)
    truth[:2], truth[2:6], truth[6, :3] = 3, 5, 7
    assert shown_classes(truth, [3, 5, 7, 9]) == [5, 3]  # three pixels of 400 are too few
    assert shown_classes(truth, [3]) == [3]


# --- what models were asked ----------------------------------------------------------------------------------


def test_calibration_error() -> None:
    counts = Reliability(np.array([10.0, 0, 30]), np.array([1.0, 0, 27]), np.array([2.0, 0, 21]))
    assert counts.error == pytest.approx((10 * 0.1 + 30 * 0.2) / 40)


def test_curves_need_pixels_of_both_kinds() -> None:
    some, none = torch.ones(BINS, dtype=torch.int64), torch.zeros(BINS, dtype=torch.int64)
    assert Unknown(some, some).can_be_drawn
    assert not Unknown(none, some).can_be_drawn


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two methods on shapes, and the first on another task; two steps each."""
    runs = tmp_path_factory.mktemp("shapes")
    for name, task in (("evidential", "6-4"), ("finetune", "6-4"), ("evidential", "8-2")):
        train(small_config(runs / f"{name}-{task}", method={"name": name}, task=task, train={"epochs": 1}))
    return runs


def test_a_real_run_is_shown_in_pictures(trained: Path, tmp_path: Path) -> None:
    page = report(tmp_path, trained / "evidential-6-4", trained / "finetune-6-4", "--images", 3)
    text = words(page)
    assert_alone(page, tmp_path)
    assert "3 of 8 test images, evenly chosen" in text
    assert "Nothing is chosen by hand" in text
    names = {path.stem.removeprefix("shapes_6-4_overlapped-") for path in (tmp_path / "figures").glob("*.png")}
    assert {"reliability", "unknown", "probabilities", "methods", "curves"} <= names
    assert any(name.startswith("steps-") for name in names)
    for drawing in (tmp_path / "figures").glob("*.svg"):
        assert "mathdefault" not in drawing.read_text(), drawing.name  # ticks are text, not mathematics
    assert "evidential above, finetune, the best of the others by All, below" in text
    assert re.search(r"From above: .*hardest[^:]*: val_\d+", text)


@pytest.mark.usefixtures("undrawn")
def test_two_tasks_are_set_against_each_other(trained: Path, tmp_path: Path) -> None:
    text = words(report(tmp_path, trained / "evidential-6-4", trained / "evidential-8-2", "--images", 2))
    assert "shapes: 8-2 against 6-4" in text


def test_labels_in_figures_have_only_what_differs(tmp_path: Path) -> None:
    lr = {"train.lr": 0.5}
    write_run(tmp_path / "a", settings=lr)
    write_run(tmp_path / "b", settings={**lr, "method.balancing": "none"})
    write_run(tmp_path / "c", method="finetune", settings=lr)
    (section,) = sections(tmp_path)
    assert [method.label for method in section.methods] == ["evidential", "evidential (balancing none)", "finetune"]


def test_a_figure_is_the_same_every_time(tmp_path: Path) -> None:
    (section,) = sections(write_run(tmp_path / "run"))
    for place in ("one", "other"):
        save_figure(class_heat_map(section.main, section.step_names), tmp_path / place, "a", "")
    for kind in ("svg", "png"):
        assert (tmp_path / f"one/a.{kind}").read_bytes() == (tmp_path / f"other/a.{kind}").read_bytes()


@pytest.mark.usefixtures("undrawn")
def test_missing_models_are_named_and_the_rest_is_there(trained: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("evidential-6-4", "finetune-6-4"):
        shutil.copytree(trained / name, runs / name)
    (runs / "finetune-6-4/steps/1/model.safetensors").unlink()
    text = words(report(tmp_path / "out", runs, "--images", 2))
    assert re.search(r"No pictures of finetune: .*model.safetensors", text)
    assert "2 of 8 test images" in text


def test_quality_at_edges_is_shown_where_it_was_measured(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", groups=GROUPS)
    rows = json.loads((folder / "results.json").read_text())["steps"]
    assert "Quality at edges" not in words(report(tmp_path / "plain", folder))
    rows[-1]["boundary"] = {"iou": 31.24, "within_3": 41.5, "within_8": None}
    change_json(folder / "results.json", steps=rows)
    shown = words(report(tmp_path / "measured", folder))
    assert "Quality at edges run step all pixels boundary IoU within 3 pixels within 8 pixels" in shown
    assert "evidential 15-1, seed 42 2 40.0 31.2 41.5 –" in shown
