"""What is kept of runs: small files that tables are made of as if the run folders were still there."""

from __future__ import annotations

import json
import re
import shutil
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
from incseg.files import write_array, write_record
from incseg.inference import load
from incseg.report.fates import fates_of
from incseg.report.kept import keep_runs
from incseg.report.records import KEPT_SUFFIX, RunRecord, optional_settings, read_runs
from incseg.types import UserError


def fail(line: str) -> None:
    pytest.fail(line)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["incseg", "eval", "runs/s/e42", "--save"])


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return made_up_runs.script("results")


@pytest.fixture
def runs() -> Path:
    """Two seeds of a method, one of them tested again, and an ablation, with confusion matrices."""
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


def kept_of(runs: Path) -> Path:
    keep_runs(read_runs([runs], usual_settings, fail), runs, Path("kept"), fail)
    return Path("kept")


def without_place(record: RunRecord) -> RunRecord:
    rows = [{**row, "reused_from": None} for row in record.rows]
    return replace(
        record, folder=Path(), kept=False, fates=None, settings=optional_settings(record.settings), rows=rows
    )


def test_a_kept_run_is_the_run_without_its_place(runs: Path) -> None:
    there, kept = (
        sorted(read_runs([folder], usual_settings, fail), key=lambda r: (r.folder.as_posix(), r.retest is not None))
        for folder in (runs, kept_of(runs))
    )
    assert len(there) == 4
    assert [without_place(record) for record in kept] == [without_place(record) for record in there]
    assert all(record.kept and record.finished for record in kept)
    for mine, theirs in zip(kept, there, strict=True):
        if mine.retest is None:
            assert fates_of(mine, fail) == fates_of(theirs, fail)
    assert kept[0].folder == Path("kept/ablations/scope.run.json")


def test_options_of_a_kept_run_are_told_by_the_presets_of_today(runs: Path) -> None:
    kept = kept_of(runs)

    def usual_tomorrow(config: dict[str, Any]) -> dict[str, Any]:
        usual = usual_settings(config)
        return {**usual, "method": {**usual["method"], "scope": "seen", "lambda_kd": 3.0}}

    lambda_now = usual_settings({"method": {"name": "evidential"}, "data": {"name": "voc"}, "preset": "voc-laptop"})
    distills = {"lambda_kd": lambda_now["method"]["lambda_kd"]}
    named = {(r.folder.name, r.retest is not None): r.options for r in read_runs([kept], usual_tomorrow, fail)}
    assert named == {
        ("scope.run.json", False): distills,
        ("e42.run.json", False): {"scope": "increment", **distills},
        ("e42.run.json", True): {"scope": "increment", "balancing": "odds", **distills},
        ("e1337.run.json", False): {"scope": "increment", **distills},
    }


def test_no_path_of_the_machine_is_kept(tmp_path: Path) -> None:
    folder = write_run(Path("runs/s/e42"), settings={"method.replay": "/somewhere/web", "model.weights": "/x/w.pth"})
    results = json.loads((folder / "results.json").read_text())
    results["steps"][0]["reused_from"] = str(tmp_path / "runs/other")
    results.pop("checksum", None)
    (folder / "results.json").write_text(json.dumps(results))
    (file,) = kept_of(Path("runs/s")).iterdir()
    text = file.read_text()
    assert str(tmp_path) not in text
    assert "/somewhere" not in text
    assert "/x/" not in text
    assert '"reused_from": "other"' in text


def test_fates_are_counts_by_hand(runs: Path) -> None:
    (record,) = (r for r in read_runs([runs / "e42"], usual_settings, fail) if r.retest is None)
    cat, sheep = fates_of(record, fail)[1], fates_of(record, fail)[3]
    assert (cat.recall_learnt, cat.recall_end) == (0.8, 0.5)
    assert cat.lost_to == pytest.approx({"background": 0.1, "sheep": 0.2})
    assert sheep.recall_end == 92 / 142
    assert sheep.precision == 92 / 152
    assert sheep.taken_from == pytest.approx({"background": 40 / 152, "cat": 20 / 152})


def test_pages_do_not_change_when_the_run_folders_are_gone(script: ModuleType, runs: Path) -> None:
    assert script.main(["runs/s"]) == 0
    files = [file for file in Path("results/s").iterdir() if file.is_file()]
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
    write_run(Path("runs/s/e42"), (50, 20, 39, 30), seed=42)  # made again: it takes the place of what was kept
    script.main(["runs/s"])
    rows = json.loads(Path("results/s/main.json").read_text())["rows"]
    assert {row["seed"]: row["all"] for row in rows} == {42: 39, 1337: 41.337, 2001: 45}


def test_compare_takes_kept_runs_beside_ones_own(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = kept_of(runs)
    write_run(Path("mine"), (60, 30, 50, 40), method="finetune")
    assert main(["compare", "mine", str(kept / "e1337.run.json")]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "| `finetune` | 1 |" in shown.out
    assert "| `evidential` | 1 |" in shown.out
    assert main(["compare", str(kept)]) == 0
    assert "| `evidential` | 2 |" in capsys.readouterr().out


def test_a_report_has_kept_runs_in_its_tables_only(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = kept_of(runs)
    shutil.rmtree(runs / "ablations")
    shutil.rmtree(runs / "e1337")
    assert main(["report", str(runs), str(kept / "e1337.run.json"), "--images", "0", "--out", "page"]) == 0
    assert "warning" not in capsys.readouterr().err
    text = Path("page/index.html").read_text()
    assert "seeds 42, 1337" in text
    assert "All / Inc after" in text
    assert "Lines are means" not in text  # one seed is drawn
    assert main(["report", str(kept), "--images", "0", "--out", "tables"]) == 0
    assert "All / Inc after" not in Path("tables/index.html").read_text()
    capsys.readouterr()
    assert main(["report", str(kept / "e1337.run.json"), "--images", "0"]) == 2
    assert capsys.readouterr().err == (
        f"error: {kept / 'e1337.run.json'} is a file; say with --out DIR where its page goes\n"
    )


def test_kept_runs_are_drawn_against_the_number_of_increments(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(runs / "long", (50, 20, 35, 30), task="10-1", groups=(("cat",), ("cow",), ("sheep",)))
    kept = kept_of(runs)
    shutil.rmtree(runs)
    assert main(["report", str(kept), "--images", "0", "--out", "page"]) == 0
    assert "warning" not in capsys.readouterr().err
    text = Path("page/index.html").read_text()
    assert "<th>15-1: 1 increment</th><th>10-1: 2 increments</th>" in text
    assert "<th>evidential</th><td>40.7 ± 0.9</td><td>35.0</td>" in text


BROKEN: dict[str, Any] = {
    "not JSON": b"{",
    "not a record": b"[]",
    "something else": b'{"rows": []}',
    "no retests": {"run": {}},
    "no figure": lambda run: run.pop("all"),
    "a figure that is text": lambda run: run.update(all="much"),
    "a figure that is infinite": lambda run: run.update(all=float("inf")),
    "rules without a name": lambda run: run.update(rules={}),
    "a seed that is text": lambda run: run.update(seed="42"),
    "one field too many": lambda run: run.update(more=1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kept_run_is_named_and_left_out(name: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, broken = kept_of(runs), BROKEN[name]
    file = kept / f"e42{KEPT_SUFFIX}"
    if isinstance(broken, bytes):
        file.write_bytes(broken)
    elif isinstance(broken, dict):
        write_record(file, broken)
    else:
        values = {key: value for key, value in json.loads(file.read_text()).items() if key != "checksum"}
        broken(values["run"])
        write_record(file, values)
    assert main(["compare", str(kept)]) == 1
    shown = capsys.readouterr()
    line, note = shown.err.splitlines()
    assert note == "note: 1 run below ablations/ left out; --everything shows all"
    assert line.startswith(f"warning: {file} is left out: ")
    assert line.endswith("; restore it (git checkout), or keep the run again with make results")
    assert "delete" not in line
    assert "| `evidential` | 1 |" in shown.out


def test_a_bit_that_turned_is_found(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = kept_of(runs) / f"e42{KEPT_SUFFIX}"
    file.write_text(file.read_text().replace('"all": 40.042', '"all": 48.042', 1))
    assert main(["compare", "kept"]) == 1
    assert "its checksum does not fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["eval", "KEPT"],
        ["eval", "KEPT", "--save"],
        ["predict", "KEPT", "a.png", "--out", "out"],
        ["export", "KEPT", "--out", "a.onnx"],
        ["demo", "KEPT"],
        ["extend", "KEPT", "--out", "out"],
        ["train", "--start", "KEPT"],
    ],
)
def test_a_kept_run_has_no_models(argv: list[str], runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = kept_of(runs) / "e42.run.json"
    Image.new("RGB", (9, 9)).save("a.png")
    assert main([str(file) if word == "KEPT" else word for word in argv]) == 2
    assert capsys.readouterr().err == (
        f"error: '{file}' is a kept run, which has figures but no models; give its run folder, or train it again with "
        "the command that the file holds\n"
    )
    with pytest.raises(UserError, match="is a kept run"):
        load(file)
    assert sorted(path.name for path in Path().iterdir()) == ["a.png", "kept", "runs"]


KEPT_HERE = pytest.mark.skipif(not (ROOT / "results/voc-laptop/runs").is_dir(), reason="results/ is in a checkout only")


@KEPT_HERE
def test_a_kept_run_of_the_study_tells_of_each_class_once() -> None:
    for file in (ROOT / "results/voc-laptop/runs").rglob("*.run.json"):
        names = [fate["name"] for fate in json.loads(file.read_text())["run"]["fates"] or []]
        assert len(names) == len(set(names)), file.name


@KEPT_HERE
def test_the_pages_of_the_study_are_what_its_kept_runs_say(script: ModuleType) -> None:
    """No figure of results/voc-laptop was written by hand, and none is of a run that is not kept."""
    shutil.copytree(ROOT / "results/voc-laptop/runs", "results/voc-laptop/runs")
    assert script.main(["runs/voc-laptop"]) == 0
    for name in ("main.md", "ablations.md", "unknown.md", "classes.md", "paper.md", "paper.csv"):
        assert (Path("results/voc-laptop") / name).read_text() == (ROOT / "results/voc-laptop" / name).read_text(), name


@KEPT_HERE
def test_the_tables_of_readme_and_docs_are_what_the_kept_runs_say(capsys: pytest.CaptureFixture[str]) -> None:
    module = made_up_runs.script("doc_tables")
    assert module.main(["--check"]) == 0, capsys.readouterr().err
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    *_, row = re.findall(r"^\| \*\*evidential\*\* \|.*$", readme, re.MULTILINE)
    spoilt = readme.replace(row, row.replace("5", "6"))
    assert spoilt != readme
    assert module.with_tables(spoilt, module.Study(module.KEPT)) == readme
    with pytest.raises(UserError, match="there is no table 'mine'; choose from headline"):
        module.with_tables("<!-- table mine -->\n<!-- end -->", module.Study(module.KEPT))
