"""The benches at quick sizes: they run, write their figures, and compare them with targets. No test here judges a
time."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from incseg.types import UserError
from tools.bench import BENCHES, measure
from tools.bench.__main__ import main
from tools.bench.loss import FORMS, prepare
from tools.bench.measure import Aim, Figures, Section, Settings, Spread, cost, in_turn, ratios
from tools.bench.page import save_sections
from tools.bench.stage import QUICK_NETWORK, grown

QUICK = Settings(quick=True, repeats=1)


def here(bench: str, case: str, settings: Settings, processes: int) -> Figures:
    """Run a case in this process instead of a new one, which would import torch each time."""
    return importlib.import_module(f"tools.bench.{bench}").measure(case, settings)


def test_quick_benches_write_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "_one_process", here)
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    monkeypatch.setitem(sys.modules, "torchmetrics.functional.classification", None)
    names = [name for name in BENCHES if name != "ddp"]
    out = tmp_path / "made" / "bench"
    assert main([*names, "--quick", "--repeats", "1", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("torchmetrics is not installed") == 1
    kept = json.loads((tmp_path / "made" / "bench.json").read_text())
    assert list(kept) == names
    page = (tmp_path / "made" / "bench.md").read_text()
    sections = [section for bench in kept.values() for section in bench["sections"]]
    for section in sections:
        assert f"## {section['title']}\n" in page
        assert section["rows"]
        assert all(len(row) == len(section["heading"]) for row in section["rows"])
        assert section["figures"]
    aims = [aim for section in sections for aim in section["aims"]]
    met = sum(aim["met"] for aim in aims)
    assert page.splitlines()[2].startswith(f"{met} of {len(aims)} aims met.")
    assert page.count("**no**") == len(aims) - met
    assert page.count("QUICK SIZES") == page.count("; commit ") == len(sections)
    assert str(tmp_path) not in page + json.dumps(kept), "no path of this machine"
    for picture in re.findall(r"\]\((.*?)\)", page):
        assert (tmp_path / "made" / picture).stat().st_size > 1000
    assert (tmp_path / "made" / "bench-growth.svg").exists()


def test_two_processes_send_their_gradients_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = here("ddp", "one", QUICK, 1), measure._one_process("ddp", "two", QUICK, 2)
    monkeypatch.setattr(measure, "_one_process", lambda bench, case, *rest: {"one": one, "two": two}[case])
    (section,) = BENCHES["ddp"](QUICK)
    assert section.aims[1].measured.median == two["sent"] / two["weights"]
    assert one["sent"] == 0
    assert one["weights"] == two["weights"]
    others = two["sent"] - two["weights"]
    assert 256 * 4 <= others <= 256 * 4 + 100, "the gradients once, label counts, three losses and flags"


def test_a_fresh_process_that_fails_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Traceback:\n  somewhere\nMemoryError: no room\n=====\n"
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: failed)
    with pytest.raises(UserError, match=r"^bench loss, case x failed \(MemoryError: no room\); run it alone: .*$"):
        measure._one_process("loss", "x", QUICK, 1)


def test_aims_follow_from_the_figures() -> None:
    spread = ratios([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert spread == Spread(2.0, 1.0, 3.0)
    assert Aim("", "at least", 2.0, spread).met
    assert not Aim("", "at least", 2.1, spread).met
    assert Aim("", "at most", 2.0, spread).met
    assert not Aim("", "at most", 1.9, spread).met


def test_loss_aims_compare_the_right_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"evidential": (2, 10), "direct": (6, 200), "softmax": (1, 25), "mib": (3, 8), "mib-direct": (4, 40)}

    def made_up(bench: str, case: str, settings: Settings, processes: int) -> Figures:
        seconds, extra = costs[case.split("/")[0]]
        return {"seconds": seconds, "extra_bytes": extra}

    monkeypatch.setattr(measure, "_one_process", made_up)
    (section,) = BENCHES["loss"](QUICK)
    assert [round(aim.measured.median, 3) for aim in section.aims] == [3, 0.05, 2, 0.4, 0.75, 0.2]
    assert [aim.met for aim in section.aims] == [True, True, False, False, True, True]


@pytest.mark.parametrize("old", [0, 15])
def test_both_forms_of_a_loss_are_the_same_loss(old: int) -> None:
    """Otherwise a bench would compare different work. MiB's distillation is divided by its outputs in both."""
    for ours, other in (("evidential", "direct"), ("mib", "mib-direct")):
        torch.testing.assert_close(prepare(ours, 20, old, QUICK)(), prepare(other, 20, old, QUICK)(), rtol=1e-4, atol=0)
    assert set(FORMS) == {"evidential", "direct", "mib", "mib-direct", "softmax"}


def test_all_run_in_each_round_and_the_first_round_is_left_out() -> None:
    order: list[str] = []

    def one(name: str) -> float:
        order.append(name)
        return float(len(order))

    assert in_turn({"a": lambda: one("a"), "b": lambda: one("b")}, 2) == {"a": [3, 5], "b": [4, 6]}
    assert order == ["a", "b"] * 3


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is counted by /proc")
def test_extra_memory_is_what_the_work_needs() -> None:
    held = torch.ones(30_000_000)  # before the work, so it does not count

    def work(settings: Settings) -> object:
        return lambda: torch.ones(settings.pick(20_000_000, 10)).sum()

    found = cost(work, Settings())  # type: ignore[arg-type]
    assert held.nbytes > found["extra_bytes"]
    assert 78e6 <= found["extra_bytes"] < 90e6


def test_tables_of_other_benches_do_not_change(tmp_path: Path) -> None:
    missed = Aim("x over y", "at least", 2.0, Spread(1.0, 0.9, 1.1))
    save_sections(tmp_path / "b", "step", [Section("First", ["", "ms"], [["a", "1"]], [missed])], QUICK, tuple(BENCHES))
    save_sections(tmp_path / "b", "loss", [Section("Second", ["", "ms"], [["b", "2"]], [])], Settings(), tuple(BENCHES))
    page = (tmp_path / "b.md").read_text()
    assert page.index("## Second") < page.index("## First")
    assert "0 of 1 aims met. Not met:\n\n- First: x over y, at least 2, 1 (0.9–1.1) measured\n" in page
    assert page.count("QUICK SIZES") == 1


def test_wrong_arguments_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        "los": "did you mean",
        "--repeats 0": "give a number from 1",
        "--quick --out .": "error: --out is '.'; give the name that its files begin with, such as results/bench",
        f"--quick --out {tmp_path / 'out'}": "is a folder; give the name of a file",
    }
    (tmp_path / "out.md").mkdir()
    for arguments, said in wrong.items():
        assert main(arguments.split()) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_fifty_heads_are_one_convolution() -> None:
    class Counting(TorchDispatchMode):
        convolutions = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.convolutions += "convolution" in str(func)
            return func(*args, **(kwargs or {}))

    counted = []
    for steps in (1, 50):
        model = grown(QUICK_NETWORK, (2,) * steps).eval()
        with torch.no_grad(), Counting() as counting:
            logits = model(torch.zeros(1, 3, 16, 16)).logits
        assert logits.shape[1] == 2 * steps
        counted.append(counting.convolutions)
    assert counted[0] == counted[1] > 0
