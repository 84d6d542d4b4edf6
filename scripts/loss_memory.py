"""Time and peak memory of the evidential loss in strips against the direct form: results/loss.md and .json.

    python scripts/loss_memory.py

Forward and backward with both distillation terms at (2, 150, 32² → 512²), 100 old and 50 new classes. Each form runs in
processes of its own, in turn, because peak memory is counted per process.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPEATS = 3


def measure(form: str) -> dict[str, float]:
    import torch
    import torch.nn.functional as F

    from incseg.methods import Evidential
    from incseg.types import Batch, Output

    torch.set_num_threads(1)  # with more, a busy machine decides the figures
    torch.manual_seed(0)
    old, classes, size = 100, 150, 512
    logits = torch.randn(2, classes, 32, 32, requires_grad=True)
    teacher = torch.randn(2, old, 32, 32)
    labels = torch.randint(0, classes + 1, (2, size, size), dtype=torch.uint8)
    labels[(labels > 0) & (labels <= old)] = 0
    batch = Batch(torch.empty(0), labels, torch.bincount(labels.flatten(), minlength=256).float())
    method, step = Evidential(), type("Step", (), {"old": tuple(range(old))})()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def once() -> float:
        logits.grad = None
        began = time.perf_counter()
        if form == "strips":
            terms = method.losses(batch, Output(logits, logits), Output(teacher, teacher), step)
            total = sum(terms.values())
        else:
            total = direct(
                F.interpolate(logits, (size, size), mode="bilinear"),
                F.interpolate(teacher, (size, size), mode="bilinear"),
            )
        total.backward()
        return time.perf_counter() - began

    def upsample(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, (size, size), mode="bilinear")

    def direct(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """PAPER's formulas as they stand: evidence, α, S, u, p, then logarithms."""

        def dirichlet(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            alpha = x.exp() * x.sigmoid() + 1
            strength = alpha.sum(1, keepdim=True)
            return alpha, strength, x.shape[1] / strength

        alpha, strength, u = dirichlet(z[:, old:])
        p = torch.cat([u, (1 - u) * alpha / strength], 1)
        own = torch.where(labels > 0, labels - old, labels).long().unsqueeze(1)
        new = -p.gather(1, own).log().mean()
        alpha, strength, u = dirichlet(z[:, :old])
        alpha_t, strength_t, u_t = dirichlet(t)
        foreground = -(alpha_t / strength_t * (alpha / strength).log()).sum(1).mean() / old
        uncertain = -(u_t * u.log() + (1 - u_t) * (1 - u).log()).mean()
        return new + 10 * (foreground + uncertain)

    seconds = min(once() for _ in range(3))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": seconds, "extra_megabytes": peak / 1024, "gradient": float(logits.grad.abs().sum())}


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    found: dict[str, list[dict[str, float]]] = {"strips": [], "direct": []}
    for _ in range(REPEATS):
        for form, results in found.items():
            out = subprocess.run([sys.executable, __file__, form], capture_output=True, text=True, check=True)
            results.append(json.loads(out.stdout))
    median = {
        form: {key: statistics.median(r[key] for r in results) for key in results[0]} for form, results in found.items()
    }
    ratio = {key: median["direct"][key] / median["strips"][key] for key in ("seconds", "extra_megabytes")}
    lines = [
        "# The evidential loss at 2 × 150 × 512 × 512, forward and backward",
        "",
        "| form | seconds | extra peak memory |",
        "|---|---|---|",
        *(f"| {form} | {m['seconds']:.2f} | {m['extra_megabytes']:.0f} MB |" for form, m in median.items()),
        f"| ratio | {ratio['seconds']:.1f} | {ratio['extra_megabytes']:.1f} |",
        "",
        "From logits at 32², 100 old and 50 new classes, both distillation terms; median of "
        f"{REPEATS} processes each, run in turn, the best of three calls in each, one thread.",
        "Command: `python scripts/loss_memory.py`.",
    ]
    Path("results").mkdir(exist_ok=True)
    Path("results/loss.md").write_text("\n".join(lines) + "\n")
    Path("results/loss.json").write_text(json.dumps({"median": median, "runs": found}, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
