"""The commands as Python functions: train, extend, remove, evaluate, export, push."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from incseg import extension
from incseg.cli.eval import splits_to_test
from incseg.cli.push import push as push_model
from incseg.cli.remove import remove as remove_classes
from incseg.cli.settings import by_dotted_name, resolve
from incseg.config import load_run_config
from incseg.data import build_source
from incseg.engine.rundir import RunDir
from incseg.engine.runtime import is_main_process
from incseg.export import export_onnx
from incseg.inference import ONNX_SUFFIX, Predictor, load
from incseg.io import read_record, trust_named
from incseg.methods.base import Method
from incseg.metrics import FIGURES, percent
from incseg.presets import FITS_OBJECTS
from incseg.report.extension import CLASS_HEADS, class_rows, in_words
from incseg.run import evaluate as evaluate_run
from incseg.run import fit_size
from incseg.run import train as train_run
from incseg.score import score
from incseg.types import UserError

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Run:
    """A finished run in its folder.

    folder: models of all steps, settings and results.
    method: name of the method. A method from outside incseg need not be named again for `model`.

    Example:
        >>> run = incseg.train(data="shapes", preset="shapes-quick", out="runs/quick")
        >>> print(run.table())
        >>> run.rows[-1]["iou"]["disc"]
        71.3
        >>> model = run.model()
    """

    folder: Path
    method: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per step: its classes, the mean IoU of base, new and all classes, and the IoU of each class."""
        return RunDir(self.folder).rows()

    @property
    def forgetting(self) -> dict[str, Any] | None:
        """For a run that extended a model, the change of each old class and the IoU of each new one; else None."""
        file = RunDir(self.folder).forgetting
        return read_record(file) if file.exists() else None

    def table(self) -> str:
        """Return a table to print, with one row per class, or per step if the run has several.

        For an extended model it has old and new classes, and a line on the changes of the old ones.
        """
        if self.forgetting is not None:
            return "\n".join([_aligned(CLASS_HEADS, class_rows(self.forgetting)), *in_words(self.forgetting)])
        rows = self.rows
        if len(rows) == 1:
            return _aligned(("class", "IoU"), [[name, percent(iou)] for name, iou in rows[0]["iou"].items()])
        heads = ("step", "learns", "images", *(name.capitalize() for name in FIGURES))
        figures = [[percent(row[name]) for name in FIGURES] for row in rows]
        return _aligned(
            heads,
            [
                [str(row["index"]), ", ".join(row["classes"]), str(row["train_images"]), *cells]
                for row, cells in zip(rows, figures, strict=True)
            ],
        )

    def model(self, step: int | None = None, device: str = "auto", threads: int | None = None) -> Predictor:
        """Return the model of a step, the last by default, ready to predict."""
        return load(self.folder, step, device, threads, self.method)


def train(
    *,
    data: str | Mapping[str, Any] = "shapes",
    root: StrPath | None = None,
    task: str | Sequence[Sequence[str]] | None = None,
    method: str | type[Method] | Mapping[str, Any] | None = None,
    out: StrPath | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Learn a task step by step, like `incseg train`. The same call resumes an interrupted run.

    data:     kind of dataset: shapes, voc, ade20k or folder.
    root:     folder of the dataset; shapes needs none.
    task:     for example "15-1" or "joint", or groups of class names, [["cat", "dog"], ["bird"]].
    method:   a name from `incseg list`, or a class of your own; by default that of the preset.
    out:      run folder; by default a folder in runs/ named by the settings.
    quiet:    print nothing.
    settings: all other settings of `incseg train --help-all`, nested, train={"lr": 0.1}, or by dotted names,
              **{"train.lr": 0.1}. They win over the preset.

    Example:
        >>> run = incseg.train(data="folder", root="photographs", out="runs/mine", train={"epochs": 10})
        >>> run = incseg.train(preset="shapes-quick", method="lwf", seed=3)
        >>> print(run.table())
    """
    named = {"data": data, "root": _path(root), "task": _task(task), "method": _name(method), "out": _path(out)}
    given = by_dotted_name({**settings, **{name: value for name, value in named.items() if value is not None}})
    trust_named(value for value in given.values() if isinstance(value, str))
    with _output(quiet):
        config = resolve(given)
        if config.preset in FITS_OBJECTS and not extension.SIZES & given.keys():
            size = fit_size(config)
            if is_main_process():
                print(size)
        train_run(config)
    return Run(config.folder, config.method["name"])


def extend(
    model: StrPath | Predictor | Run,
    *,
    root: StrPath | None,
    out: StrPath,
    classes: str | Sequence[str] | None = None,
    data: str = "folder",
    recipe: str = extension.AUTO,
    size: int | None = None,
    protect: str | Sequence[str] | None = None,
    images: StrPath | None = None,
    step: int | None = None,
    method: str | type[Method] | None = None,
    seed: int = 42,
    device: str = "auto",
    threads: int | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Add classes to a model without the data that it was trained on, like `incseg extend`.

    model:    a run, a model, a run folder or a model file.
    root:     a labelled folder with the new classes: images/, masks/, classes.txt.
    out:      run folder to write.
    classes:  classes of the folder to add; by default all that the model does not know.
    recipe:   how to learn; auto tries several recipes, from gentle to strong, and takes the best.
    protect:  old classes that must not give way to a new class that lies on them, as a dress lies on a person.
    settings: settings of `incseg train` that win over the recipe. For the others see `incseg extend --help`.

    Example:
        >>> run = incseg.extend("runs/mine", root="more-photographs", classes=["helmet"], out="runs/more")
        >>> print(run.table())  # old classes: the share of pixels that are labelled as before; new ones: IoU
        >>> run.model().classes
        ('background', 'person', 'helmet')
    """
    given = by_dotted_name(settings)
    trust_named(value for value in (*given.values(), data, _name(method)) if isinstance(value, str))
    for name in given:
        if not name.startswith(extension.SETTINGS):
            raise UserError(f"unknown setting '{name}' of an extension; allowed are {', '.join(extension.SETTINGS)}")
    request = extension.Request(
        model=_file(model),
        out=os.path.expanduser(out),
        resolve=lambda defaults: resolve(given, defaults),
        given=frozenset(given),
        data=data,
        root=_path(root),
        classes=classes if isinstance(classes, str | None) else ",".join(classes),
        protect=protect if isinstance(protect, str | None) else ",".join(protect),
        recipe=recipe,
        size=size,
        images=None if images is None else Path(images).expanduser(),
        step=step,
        method=_name(method),
        seed=seed,
        device=device,
        threads=threads,
    )
    with _output(quiet):
        plan = extension.Plan.read(request)
        tries = plan.tries()
        for line in plan.lines if is_main_process() else ():
            print(line)
        report = extension.extend(tries, Path(request.out), train_images=plan.train_images)
    taken = next((one for one in tries if one.recipe.name == report.get("recipe")), tries[0])
    return Run(Path(request.out), taken.config.method["name"])


def remove(model: StrPath | Predictor | Run, classes: str | Sequence[str], out: StrPath) -> Predictor:
    """Write a model without some of its classes, like `incseg remove`, and return it. No images are needed.

    out: the .safetensors file to write.

    Example:
        >>> incseg.remove("runs/more", ["helmet"], "without.safetensors").classes
        ('background', 'person')
    """
    file = Path(out).expanduser()
    remove_classes(_file(model), classes, file)
    return load(file, method=_own_method(model))


def evaluate(
    model: StrPath | Predictor | Run,
    *,
    data: str | None = None,
    root: StrPath | None = None,
    split: Literal["train", "val", "all"] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Test a model on labelled photographs, or a run on its own test images, like `incseg eval`.

    data, root: the dataset; classes are matched by name, photographs are predicted whole. Without `data` the last step
                of a run is tested again, on its own dataset, which may have moved to `root`.
    split:      with `data`: val, train or all; by default val, or all if the dataset does not define val.
    options:    other options of the model's method for this test, such as balancing="odds".

    Example:
        >>> incseg.evaluate("runs/mine", data="folder", root="photographs")["classes"]["helmet"]["iou"]
        61.8
    """
    if data is not None:
        predictor = model if isinstance(model, Predictor) else load(_file(model), method=_own_method(model))
        source = build_source(data, _path(root))
        return score(predictor.with_options(**options) if options else predictor, source, splits_to_test(source, split))
    if split is not None or isinstance(model, Predictor):
        raise UserError("give data and root, the dataset to test on; only a run folder knows its own")
    folder = model.folder if isinstance(model, Run) else Path(model).expanduser()
    overrides = {"data": replace(load_run_config(folder).data, root=_path(root))} if root is not None else {}
    return evaluate_run(folder, None, options, overrides)


def to_onnx(model: StrPath | Predictor | Run, out: StrPath, check: bool = True) -> Path:
    """Write a model as an ONNX file, like `incseg export`, and return the file.

    The options of prediction of a Predictor (`with_options`) become part of the file.
    check: write the file only if onnxruntime and PyTorch agree.

    Example:
        >>> incseg.to_onnx("runs/mine", "mine.onnx")
    """
    file = Path(out).expanduser()
    if file.suffix != ONNX_SUFFIX:
        raise UserError(f"out is '{out}'; give a file name that ends in {ONNX_SUFFIX}")
    on_cpu = load(_file(model), device="cpu", method=_own_method(model))
    export_onnx(replace(on_cpu, method=model.method) if isinstance(model, Predictor) else on_cpu, file, check)
    return file


def push(
    model: StrPath | Predictor | Run,
    repo: str,
    *,
    out: StrPath | None = None,
    private: bool = False,
    revision: str | None = None,
    license: str = "unknown",
) -> str:
    """Upload a model and its card to the Hugging Face Hub, like `incseg push`. Return its address for `load`.

    repo: owner/name, created if it does not exist. `private` creates a private one.
    out:  upload nothing, write the two files to this folder.

    Example:
        >>> incseg.push("runs/mine", "me/helmets", license="apache-2.0")
        'hf://me/helmets'
        >>> incseg.load("hf://me/helmets").predict("new.jpg")
    """
    folder = None if out is None else Path(out).expanduser()
    return push_model(_file(model), repo, folder, private, revision, license, None)


def _file(model: StrPath | Predictor | Run) -> StrPath:
    """Return the run folder or file of a model."""
    return model.folder if isinstance(model, Run) else model.info["file"] if isinstance(model, Predictor) else model


def _own_method(model: StrPath | Predictor | Run) -> str | None:
    """Return the method of a model that is loaded already, so that a method from outside need not be named again."""
    if isinstance(model, Predictor):
        return str(model.info["method"]["name"])
    return model.method if isinstance(model, Run) else None


def _path(path: StrPath | None) -> str | None:
    return None if path is None else os.path.expanduser(path)


def _name(method: Any) -> Any:
    """Return `package.module:Class` for a class, and anything else unchanged."""
    return f"{method.__module__}:{method.__qualname__}" if isinstance(method, type) else method


def _task(task: str | Sequence[Sequence[str]] | None) -> str | None:
    return task if isinstance(task, str | None) else "/".join(",".join(group) for group in task)


def _output(quiet: bool) -> contextlib.AbstractContextManager[Any]:
    return contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext()


def _aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with aligned columns, numbers to the right."""
    columns = list(zip(heads, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numbers = [not any(cell[:1].isalpha() for cell in column[1:]) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, numbers, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(heads), *map(line, rows)])
