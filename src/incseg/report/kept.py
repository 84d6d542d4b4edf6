"""A finished run as one small file: all that tables are made of, without its models.

Run folders hold gigabytes and stay on the machine that made them. What is kept of them here can be committed, so that a
table grows from machine to machine, and a method of one's own is compared with ours without training ours again:
`incseg compare runs/mine results/voc-laptop/runs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from incseg.files import write_record
from incseg.report.fates import fates_as_dicts
from incseg.report.records import KEPT_SUFFIX, RunRecord, Warn, optional_settings

_NOT_KEPT = {"folder", "finished", "kept"}


def keep_runs(records: Sequence[RunRecord], runs: Path, kept: Path, warn: Warn) -> list[Path]:
    """Write the finished runs among these, each with its retests, as kept/NAME.run.json; NAME is the folder's below
    `runs`."""
    written = []
    for run in records:
        if run.finished and run.retest is None:
            name = run.folder.relative_to(runs)
            retests = [other for other in records if other.folder == run.folder and other.retest is not None]
            whole = replace(run, fates=fates_as_dicts(run, warn))
            file = kept / name.parent / f"{name.name}{KEPT_SUFFIX}"
            write_record(file, {"run": _values(whole), "retests": [_values(retest) for retest in retests]})
            written.append(file)
    return written


def _values(record: RunRecord) -> dict[str, Any]:
    """Plain values that name no place of this machine; of the settings those that change a figure."""
    values = {one.name: getattr(record, one.name) for one in fields(record) if one.name not in _NOT_KEPT}
    rows = [
        {**row, "reused_from": Path(origin).name if (origin := row.get("reused_from")) else None} for row in record.rows
    ]
    return {**values, "settings": optional_settings(record.settings), "rows": rows}
