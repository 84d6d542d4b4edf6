"""What settings affect: which may change when a run is resumed, and which steps are shared."""

from __future__ import annotations

from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_runs import Interrupting, assert_same_run, small_config
from test_steps import reused

from incseg.cli import main
from incseg.config import RunConfig, differing_settings, settings_affecting, training_recipe
from incseg.engine.progress import showing
from incseg.engine.rundir import RunDir, flatten
from incseg.engine.trainer import TrainConfig
from incseg.methods import METHODS
from incseg.run import train
from incseg.types import UserError


def test_every_setting_affects_one_thing() -> None:
    kinds = [settings_affecting(what) for what in ("training", "later", "inference", "machine")]
    every = {key for key in flatten(RunConfig().as_dict()) if not key.startswith("method.")}
    assert set().union(*kinds) == every
    assert sum(map(len, kinds)) == len(every)
    assert settings_affecting("machine") == {
        "out", "preset", "threads", "reuse", "table", "log", "data.cache", "train.workers", "train.checkpoint_seconds",
        "eval.workers", "eval.batch_size",
    }  # fmt: skip


def test_a_setting_that_is_absent_counts_as_its_default() -> None:
    here = small_config(Path("x"), method={"name": "evidential", "class_weight": 0.0}).as_dict()
    there = {**here, "method": {"name": "evidential"}, "train": {**here["train"]}, "data": {**here["data"]}}
    del there["train"]["own_head"], there["data"]["fit"], there["order"]
    assert differing_settings(there, here) == differing_settings(here, there) == ""
    here["method"]["class_weight"] = 0.5
    assert differing_settings(there, here) == "method.class_weight was 0.0, now 0.5"
    assert differing_settings(here, there) == "method.class_weight was 0.5, now 0.0"


def test_settings_of_the_machine_may_differ() -> None:
    here = small_config(Path("x")).as_dict()
    there = small_config(
        Path("y"), preset="shapes", reuse=True, table="steps", data={"cache": "off"}, eval={"batch_size": 1}
    ).as_dict()
    assert differing_settings(there, here) == ""


def test_a_run_that_is_older_than_a_setting_is_resumed(tmp_path: Path) -> None:
    whole, begun = small_config(tmp_path / "whole"), small_config(tmp_path / "begun")
    with pytest.raises(KeyboardInterrupt), showing(Interrupting("row 0")):
        train(begun)
    file = RunDir(begun.folder).config
    there = yaml.safe_load(file.read_text())
    del there["train"]["accumulate"], there["data"]["empty"], there["table"]
    file.write_text(yaml.safe_dump(there))
    changed = small_config(begun.folder, data={"empty": "learn"})
    with pytest.raises(UserError, match=r"other settings \(data.empty was 'leave_out', now 'learn'\)"):
        train(changed)
    train(begun)
    train(whole)
    assert_same_run(whole.folder, begun.folder)


def test_a_new_option_leaves_trained_steps_valid() -> None:
    config = small_config(Path("x"))
    method = METHODS["mib"]()
    before = [training_recipe(config, method, step) for step in (0, 1)]
    later: Any = make_dataclass("Later", [("new_option", int, 7)], bases=(TrainConfig,))
    config.train = later(**vars(config.train))
    assert [training_recipe(config, method, step) for step in (0, 1)] == before
    config.train.new_option = 8
    assert all(training_recipe(config, method, step) != before[step] for step in (0, 1))


def test_a_step_that_was_calibrated_depends_on_the_test(tmp_path: Path) -> None:
    frozen = {"frozen_later": "model", "own_head": True, "calibrate": True}
    for name, size in (("first", 48), ("second", 48), ("third", 32)):
        train(small_config(tmp_path / name, task="6-4", reuse=True, train=frozen, eval={"size": size}))
    assert reused(tmp_path / "second") == [True, True]
    assert reused(tmp_path / "third") == [True, False]


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"data": {"fit": "whole"}}, [False, False]),
        ({"eval": {"size": 32}}, [True, True]),
        ({"data": {"val_limit": 4}}, [True, True]),
        ({"train": {"fusion": "ewf"}}, [True, False]),
    ],
    ids=str,
)
def test_steps_are_shared_by_what_settings_affect(tmp_path: Path, changes: dict[str, Any], shared: list[bool]) -> None:
    common: dict[str, Any] = {"task": "6-4", "reuse": True, "method": {"name": "finetune"}}
    train(small_config(tmp_path / "first", **common))
    train(small_config(tmp_path / "second", **common, **changes))
    assert reused(tmp_path / "second") == shared


def test_a_root_for_the_embedded_dataset_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A newcomer who leaves out --data folder must not train on shapes for minutes."""
    assert main(["train", "--root", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    assert "set --data folder" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
