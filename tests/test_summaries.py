"""Summaries of runs: a small file gives the same tables as the run folders."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import made_up_runs
import numpy as np
import pytest
from made_up_runs import ROOT, write_run
from PIL import Image

from incseg.cli import main
from incseg.config import usual_settings
from incseg.engine.rundir import RunDir
from incseg.inference import load
from incseg.io import with_checksum, write_array, write_compact_json, write_record
from incseg.report.runs import RunRecord, Usual, collected_warnings, optional_settings, read_runs, write_summaries
from incseg.types import UserError


def read(place: Path, usual: Usual = usual_settings) -> list[RunRecord]:
    with collected_warnings() as warned:
        records = read_runs([place], usual)
    assert warned == []
    return records


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["incseg", "eval", "runs/s/e42", "--save"])


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return made_up_runs.script("results")


@pytest.fixture
def runs() -> Path:
    """Write two seeds of a method, one of them tested again, and an ablation, with confusion matrices."""
    runs = Path("runs/s")
    for name, seed in (("e42", 42), ("e1337", 1337), ("ablations/scope", 42)):
        settings = {"method.scope": "seen"} if name.startswith("ablations") else None
        folder = write_run(runs / name, (50, 20, 40 + seed / 1000, 30), seed=seed, settings=settings)
        write_array(folder / "steps/0/confusion.npy", np.array([[90, 10, 0], [20, 80, 0], [0, 0, 100]]))
        last = np.array([[60, 0, 0, 40], [30, 50, 0, 20], [0, 0, 100, 0], [0, 50, 0, 50 + seed]])
        write_array(folder / "steps/1/confusion.npy", last)
    run = RunDir(runs / "e42")
    run.write_retest({"balancing": "odds"}, {**run.rows()[1], "all": 41.0}, 12.0)
    return runs


def summaries_of(runs: Path) -> Path:
    file = Path("saved/runs.jsonl")
    write_summaries(read(runs), runs, file)
    return file


def change(file: Path, name: str, edit: Callable[[dict[str, Any]], object] | bytes) -> None:
    """Edit the values of a run in a file of summaries, with a correct checksum; or replace its line."""
    lines = file.read_bytes().splitlines()
    index = next(i for i, line in enumerate(lines) if json.loads(line)["name"] == name)
    if isinstance(edit, bytes):
        lines[index] = edit
    else:
        saved = {key: value for key, value in json.loads(lines[index]).items() if key != "checksum"}
        edit(saved)
        lines[index] = json.dumps(with_checksum(saved)).encode()
    file.write_bytes(b"\n".join([*lines, b""]))


def without_place(record: RunRecord) -> RunRecord:
    """Return what a summary has of a run."""
    rows = [{key: row[key] for key in ("index", "classes", "unseen")} for row in record.rows]
    rows = rows if record.retest is None else []
    settings = optional_settings(record.settings)
    return replace(record, folder=Path(), is_summary=False, classes=None, settings=settings, rows=rows)


def test_a_summary_is_the_run_without_its_place(runs: Path) -> None:
    there, saved = (
        sorted(read(place), key=lambda r: (r.folder.as_posix(), r.retest is not None))
        for place in (runs, summaries_of(runs))
    )
    assert len(there) == 4
    assert [without_place(record) for record in saved] == [without_place(record) for record in there]
    assert all(record.is_summary and record.finished for record in saved)
    for mine, theirs in zip(saved, there, strict=True):
        if mine.retest is None:
            for one, other in zip(mine.class_statistics, theirs.class_statistics, strict=True):
                assert one[:2] == other[:2]
                assert one[2:7] == pytest.approx(other[2:7], abs=1e-7)
                assert one.lost_to == pytest.approx(other.lost_to, abs=1e-7)
                assert one.taken_from == pytest.approx(other.taken_from, abs=1e-7)
    assert [record.folder.relative_to("saved/runs.jsonl").as_posix() for record in saved] == [
        "ablations/scope", "e1337", "e42", "e42",
    ]  # fmt: skip


def test_a_summary_of_version_0_1_is_still_read(runs: Path) -> None:
    """It was one file per run, with whole rows, and with another name for class statistics."""
    names = (
        "name",
        "step",
        "iou_learnt",
        "iou_end",
        "recall_learnt",
        "recall_end",
        "precision",
        "lost_to",
        "taken_from",
    )
    expected = read(summaries_of(runs))
    for line in Path("saved/runs.jsonl").read_text().splitlines():
        saved = json.loads(line)
        run = saved["run"]
        fates = [dict(zip(names, one, strict=True)) for one in run.pop("classes")]
        retests = [{**run, **retest, "fates": None} for retest in saved["retests"]]
        for retest in retests:
            retest.pop("classes")
        record = {"run": {**run, "fates": fates}, "retests": retests}
        write_record(Path("old") / f"{saved['name']}.run.json", record)
    found = read(Path("old"))
    by_name = {(r.folder.name.removesuffix(".run.json"), r.retest is None): r for r in found}
    for record in expected:
        mine = by_name.pop((record.folder.name, record.retest is None))
        assert mine == replace(record, folder=mine.folder)
    assert by_name == {}
    assert main(["compare", "old/e1337.run.json"]) == 0


def test_numbers_are_rounded_and_settings_are_not(runs: Path) -> None:
    write_run(runs / "long", (1 / 3, 20, 40, 30), seed=7, settings={"method.lambda_kd": 1e-9})
    (record,) = (r for r in read(summaries_of(runs)) if r.seed == 7)
    assert record.base == 0.3333333
    assert record.settings["method.lambda_kd"] == 1e-9


def test_the_presets_of_today_tell_what_is_an_option(runs: Path) -> None:
    saved = summaries_of(runs)

    def usual_tomorrow(config: dict[str, Any]) -> dict[str, Any]:
        usual = usual_settings(config)
        return {**usual, "method": {**usual["method"], "scope": "seen", "lambda_kd": 3.0}}

    lambda_now = usual_settings({"method": {"name": "evidential"}, "data": {"name": "voc"}, "preset": "voc-laptop"})
    distills = {"lambda_kd": lambda_now["method"]["lambda_kd"]}
    named = {(r.folder.name, r.retest is not None): r.options for r in read(saved, usual_tomorrow)}
    assert named == {
        ("scope", False): distills,
        ("e42", False): {"scope": "increment", **distills},
        ("e42", True): {"scope": "increment", "balancing": "odds", **distills},
        ("e1337", False): {"scope": "increment", **distills},
    }


def test_no_path_of_the_machine_is_saved(tmp_path: Path) -> None:
    folder = write_run(Path("runs/s/e42"), settings={"method.replay": "/somewhere/web", "model.weights": "/x/w.pth"})
    results = json.loads((folder / "results.json").read_text())
    results["steps"][0]["reused_from"] = str(tmp_path / "runs/other")
    results.pop("checksum", None)
    (folder / "results.json").write_text(json.dumps(results))
    text = summaries_of(Path("runs/s")).read_text()
    assert str(tmp_path) not in text
    assert "/somewhere" not in text
    assert "/x/" not in text


def test_class_statistics_are_counts_by_hand(runs: Path) -> None:
    (record,) = (r for r in read(runs / "e42") if r.retest is None)
    _, cat, _, sheep = record.class_statistics
    assert (cat.recall_learnt, cat.recall_end) == (0.8, 0.5)
    assert cat.lost_to == pytest.approx({"background": 0.1, "sheep": 0.2})
    assert sheep.recall_end == 92 / 142
    assert sheep.precision == 92 / 152
    assert sheep.taken_from == pytest.approx({"background": 40 / 152, "cat": 20 / 152})


def test_pages_do_not_change_when_the_run_folders_are_gone(script: ModuleType, runs: Path) -> None:
    assert script.main(["runs/s"]) == 0
    files = [file for file in Path("results/s").iterdir() if file.name != "runs.jsonl"]
    before = {file: file.read_bytes() for file in files}
    shutil.rmtree("runs")
    for file in files:
        file.unlink()
    assert script.main(["runs/s"]) == 0
    assert {file: file.read_bytes() for file in files} == before


def test_a_table_grows_from_machine_to_machine(script: ModuleType, runs: Path) -> None:
    script.main(["runs/s"])
    shutil.rmtree("runs")
    write_run(Path("runs/s/e2001"), (50, 20, 45, 30), seed=2001)
    write_run(Path("runs/s/e42"), (50, 20, 39, 30), seed=42)  # made again: it takes the place of the old one
    script.main(["runs/s"])
    records = [r for r in read(Path("results/s/runs.jsonl")) if r.folder.parent.name != "ablations"]
    assert {r.seed: r.all for r in records} == {42: 39, 1337: 41.337, 2001: 45}
    lines = Path("results/s/runs.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["ablations/scope", "e1337", "e2001", "e42"]


def test_a_damaged_file_of_summaries_is_not_written_over(
    script: ModuleType, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(["runs/s"])
    file = Path("results/s/runs.jsonl")
    whole = file.read_bytes()
    for line, said in ((b"<<<<<<< HEAD", "line 2 is damaged ("), (b"{}", "line 2 lacks 'name'")):
        file.write_bytes(whole)
        change(file, "e1337", line)
        before = file.read_bytes()
        capsys.readouterr()
        assert script.main(["runs/s"]) == 2
        assert capsys.readouterr().err.startswith(f"error: {file} {said}")
        assert file.read_bytes() == before


def test_compare_takes_summaries_beside_ones_own(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = summaries_of(runs)
    write_run(Path("mine"), (60, 30, 50, 40), method="finetune")
    assert main(["compare", "mine", f"{file}/e1337"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "| `finetune` | 1 |" in shown.out
    assert "| `evidential` | 1 |" in shown.out
    note = "note: 1 run below ablations/ and 1 test with other inference options left out; --everything shows all\n"
    for given in (str(file), "saved"):
        assert main(["compare", given]) == 0
        shown = capsys.readouterr()
        assert "| `evidential` | 2 |" in shown.out
        assert shown.err == note
    assert main(["compare", str(file), f"{file}/e42", f"{file}/ablations"]) == 0  # each once
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "| `evidential` (balancing odds) | 1 |" in shown.out
    assert "| `evidential` (scope seen) | 1 |" in shown.out
    assert main(["compare", f"{file}/e43"]) == 2
    assert capsys.readouterr().err == f"error: nothing to show: {file} holds no run e43; incseg train makes runs\n"


def test_a_report_has_summaries_in_its_tables_only(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = summaries_of(runs)
    shutil.rmtree(runs / "ablations")
    shutil.rmtree(runs / "e1337")
    assert main(["report", str(runs), f"{file}/e1337", "--images", "0", "--out", "page"]) == 0
    assert "warning" not in capsys.readouterr().err
    text = Path("page/index.html").read_text()
    assert "seeds 42, 1337" in text
    assert "All / Inc after" in text
    assert "Lines are means" not in text  # one seed is drawn
    assert main(["report", str(file), "--images", "0", "--out", "tables"]) == 0
    assert "All / Inc after" not in Path("tables/index.html").read_text()
    capsys.readouterr()
    for given in (str(file), f"{file}/e1337"):
        assert main(["report", given, "--images", "0"]) == 2
        assert capsys.readouterr().err == f"error: {given} is a file; set the folder of its page with --out DIR\n"


def test_summaries_are_drawn_against_the_number_of_increments(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(runs / "long", (50, 20, 35, 30), task="10-1", groups=(("cat",), ("cow",), ("sheep",)))
    file = summaries_of(runs)
    shutil.rmtree(runs)
    assert main(["report", str(file), "--images", "0", "--out", "page"]) == 0
    assert "warning" not in capsys.readouterr().err
    text = Path("page/index.html").read_text()
    assert "<th>15-1: 1 increment</th><th>10-1: 2 increments</th>" in text
    assert "<th>evidential</th><td>40.7 ± 0.9</td><td>35.0</td>" in text


BROKEN: dict[str, Callable[[dict[str, Any]], object] | bytes] = {
    "not JSON": b"{",
    "not text": b"\xff",
    "not a record": b"[]",
    "something else": b'{"name": "e42", "rows": []}',
    "no retests": lambda saved: saved.pop("retests"),
    "no figure": lambda saved: saved["run"].pop("all"),
    "a figure that is text": lambda saved: saved["run"].update(all="much"),
    "a figure that is infinite": lambda saved: saved["run"].update(all=float("inf")),
    "rules without a name": lambda saved: saved["run"].update(rules={}),
    "a seed that is text": lambda saved: saved["run"].update(seed="42"),
    "a class that is text": lambda saved: saved["run"].update(classes=["cat"]),
    "one field too many": lambda saved: saved["run"].update(more=1),
    "a bit that turned": b"",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_summary_is_reported_and_left_out(name: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, broken = summaries_of(runs), BROKEN[name]
    line = next(line for line in file.read_bytes().splitlines() if b'"name":"e42"' in line)
    turned = line.replace(b'"all":40.042', b'"all":48.042')
    assert turned != line
    change(file, "e42", turned if name == "a bit that turned" else broken)
    assert main(["compare", str(file)]) == 1
    shown = capsys.readouterr()
    warning, note = shown.err.splitlines()
    assert note == "note: 1 run below ablations/ left out; --everything shows all"
    assert warning.startswith(f"warning: {file} line 3 is left out: ")
    assert warning.endswith("; restore it (git checkout), or make it again from the run folder with make results")
    assert ("its checksum is wrong" in warning) == (name == "a bit that turned")
    assert "| `evidential` | 1 |" in shown.out


@pytest.mark.parametrize(
    "argv",
    [
        ["eval", "SUMMARY"],
        ["eval", "SUMMARY", "--save"],
        ["predict", "SUMMARY", "a.png", "--out", "out"],
        ["export", "SUMMARY", "--out", "a.onnx"],
        ["demo", "SUMMARY"],
        ["extend", "SUMMARY", "--out", "out"],
        ["train", "--start", "SUMMARY"],
    ],
)
def test_a_summary_has_no_models(argv: list[str], runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = summaries_of(runs)
    Image.new("RGB", (9, 9)).save("a.png")
    assert main([str(file) if word == "SUMMARY" else word for word in argv]) == 2
    assert capsys.readouterr().err == (
        f"error: '{file}' is a summary, which has figures but no models; give a run folder, or train the run again "
        "with the command that the summary holds\n"
    )
    with pytest.raises(UserError, match="is a summary"):
        load(file)
    assert sorted(path.name for path in Path().iterdir()) == ["a.png", "runs", "saved"]


def test_compact_json_has_short_values_on_one_line() -> None:
    value = {"rows": [{"name": "é", "all": 40.5}, {"name": "b" * 99, "more": ["c" * 30, None, {}]}], "empty": []}
    write_compact_json(Path("a.json"), value)
    text = Path("a.json").read_text(encoding="utf-8")
    assert json.loads(text) == value
    assert ' {"name": "é", "all": 40.5},\n' in text
    assert max(map(len, text.splitlines())) <= 120
    assert len(text.splitlines()) == 10


STUDY = ROOT / "results/voc-laptop"
IN_CHECKOUT = pytest.mark.skipif(not STUDY.is_dir(), reason="results/ is in a checkout only")


@IN_CHECKOUT
def test_a_run_of_the_study_has_each_class_once() -> None:
    records = read(STUDY / "runs.jsonl")
    assert len(records) > 189
    for record in records:
        names = [one.name for one in record.class_statistics]
        assert len(names) == len(set(names)), record.folder.name


@IN_CHECKOUT
def test_the_pages_of_the_study_are_what_its_runs_say(script: ModuleType) -> None:
    """No figure of results/voc-laptop was written by hand, and none is of a run that is missing in its file."""
    Path("results/voc-laptop").mkdir(parents=True)
    shutil.copy(STUDY / "runs.jsonl", "results/voc-laptop")
    assert script.main(["runs/voc-laptop"]) == 0
    for file in Path("results/voc-laptop").iterdir():
        assert file.read_text() == (STUDY / file.name).read_text(), file.name


@IN_CHECKOUT
def test_the_tables_of_readme_and_docs_are_what_the_runs_say(capsys: pytest.CaptureFixture[str]) -> None:
    module = made_up_runs.script("doc_tables")
    assert module.main(["--check"]) == 0, capsys.readouterr().err
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    *_, row = re.findall(r"^\| \*\*evidential\*\* \|.*$", readme, re.MULTILINE)
    spoilt = readme.replace(row, row.replace("5", "6"))
    assert spoilt != readme
    assert module.with_tables(spoilt, module.Study(module.RUNS)) == readme
    with pytest.raises(UserError, match="there is no table 'mine'; choose from headline"):
        module.with_tables("<!-- table mine -->\n<!-- end -->", module.Study(module.RUNS))
