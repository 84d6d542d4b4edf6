"""A pixel loss forward and backward from low-resolution logits, in strips or not: time and extra peak memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.losses.background import background_cross_entropy_sum, background_distillation_sum
from incseg.losses.means import normalised
from incseg.methods import Evidential, MiB
from incseg.types import Batch, Output
from tools.bench.measure import Aim, Figures, Section, Settings, Spread, cost, fresh, ratios
from tools.bench.stage import step_of

FORMS = {
    "evidential": "evidential, ours",
    "direct": "evidential, the paper's formulas by autograd",
    "softmax": "softmax cross-entropy in plain PyTorch",
    "mib": "MiB, ours",
    "mib-direct": "MiB, the same functions on upsampled logits",
}
CLASSES = ((20, 0), (20, 15), (150, 0), (150, 100))
"""Number of all classes, and of old ones."""


def run(settings: Settings) -> list[Section]:
    return [_section(total, old, settings) for total, old in settings.pick(CLASSES, CLASSES[1:2])]


def measure(case: str, settings: Settings) -> Figures:
    form, total, old = case.split("/")
    return cost(lambda size: prepare(form, int(total), int(old), size), settings)


def prepare(form: str, total: int, old: int, settings: Settings) -> Callable[[], object]:
    images, low, size = settings.pick((4, 32, 512), (1, 8, 64))
    torch.manual_seed(0)
    extra = 0 if form in ("evidential", "direct") else 1  # the background's output
    logits = torch.randn(images, total + extra, low, low, requires_grad=True)
    teacher = torch.randn(images, old + extra, low, low) if old else None
    labels = torch.randint(old, total + 1, (images, size, size), dtype=torch.uint8)
    labels[labels == old] = 0
    batch = Batch(torch.empty(0), labels, torch.bincount(labels.flatten(), minlength=256).float())
    step = step_of(old, total - old)

    def once() -> Tensor:
        logits.grad = None
        if form in ("evidential", "mib"):
            method = Evidential() if form == "evidential" else MiB()
            taught = Output(teacher, teacher) if teacher is not None else None
            value = torch.stack(
                list(normalised(method.losses(batch, Output(logits, logits), taught, step), batch).values())
            ).sum()
        else:
            value = _PLAIN[form](_upsample(logits, size), labels, None if teacher is None else _upsample(teacher, size))
        value.backward()
        return value

    return once


def _upsample(logits: Tensor, size: int) -> Tensor:
    return F.interpolate(logits, (size, size), mode="bilinear")


def _direct(z: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
    """Return the loss by the paper's formulas without changes: evidence, α, S, u, p, then logarithms."""

    def dirichlet(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        alpha = x.exp() * x.sigmoid() + 1
        strength = alpha.sum(1, keepdim=True)
        return alpha, strength, x.shape[1] / strength

    old = 0 if teacher is None else teacher.shape[1]
    alpha, strength, u = dirichlet(z[:, old:])
    p = torch.cat([u, (1 - u) * alpha / strength], 1)
    own = torch.where(labels > 0, labels - old, labels).long().unsqueeze(1)
    value = -p.gather(1, own).log().mean()
    if teacher is None:
        return value
    alpha, strength, u = dirichlet(z[:, :old])
    alpha_t, strength_t, u_t = dirichlet(teacher)
    foreground = -(alpha_t / strength_t * (alpha / strength).log()).sum(1).mean() / old
    uncertain = -(u_t * u.log() + (1 - u_t) * (1 - u).log()).mean()
    return value + 10 * (foreground + uncertain)


def _softmax(z: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
    value = F.cross_entropy(z, labels.long())
    if teacher is None:
        return value
    return value - 10 * (teacher.softmax(1) * z[:, : teacher.shape[1]].log_softmax(1)).sum(1).mean()


def _mib(z: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
    value = background_cross_entropy_sum(z, labels, 1 if teacher is None else teacher.shape[1]) / labels.numel()
    return value if teacher is None else value + 10 * background_distillation_sum(z, teacher) / labels.numel()


_PLAIN = {"direct": _direct, "softmax": _softmax, "mib-direct": _mib}


def _section(total: int, old: int, settings: Settings) -> Section:
    found = fresh("loss", [f"{form}/{total}/{old}" for form in FORMS], settings)
    runs = {form: found[f"{form}/{total}/{old}"] for form in FORMS}
    time = {form: [run["seconds"] for run in rows] for form, rows in runs.items()}
    memory = {form: [run["extra_bytes"] for run in rows] for form, rows in runs.items()}

    def compared(figures: dict[str, list[float]], form: str) -> str:
        return "1" if form == "evidential" else ratios(figures[form], figures["evidential"]).text()

    rows = [
        [
            name,
            Spread.of(time[form]).text(1e3),
            compared(time, form),
            Spread.of(memory[form]).text(1e-6),
            compared(memory, form),
        ]
        for form, name in FORMS.items()
    ]
    images, low, size = settings.pick((4, 32, 512), (1, 8, 64))
    return Section(
        title=f"Loss at ({images}, {total}, {low}² → {size}²), "
        + (f"{old} old classes, all distillation terms" if old else "step 0, no teacher"),
        heading=["", "ms", "times ours", "extra MB", "times ours"],
        rows=rows,
        aims=[
            Aim("time of the direct form, over ours", "at least", 2.5, ratios(time["direct"], time["evidential"])),
            Aim("our memory, over the direct form's", "at most", 0.1, ratios(memory["evidential"], memory["direct"])),
            Aim("our time, over softmax's", "at most", 1.5, ratios(time["evidential"], time["softmax"])),
            Aim("our memory, over softmax's", "at most", 1 / 3, ratios(memory["evidential"], memory["softmax"])),
            Aim("MiB's time, over its direct form's", "at most", 1.0, ratios(time["mib"], time["mib-direct"])),
            Aim("MiB's memory, over its direct form's", "at most", 1 / 3, ratios(memory["mib"], memory["mib-direct"])),
        ],
        notes=[
            "Forward and backward, each time in a fresh process, the better of two calls; extra memory is the peak "
            "above what logits, labels and the libraries take."
            + (" Softmax has plain output distillation beside it." if old else "")
        ],
        figures=runs,
    )
