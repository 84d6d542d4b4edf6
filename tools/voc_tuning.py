"""Choose the main weight of each method on held-out training images of VOC; results are in docs/reference/methods.md.

    python tools/voc_tuning.py --root VOC2012        then  python tools/voc_tuning.py --table

The runs are the first two later steps of 15-1 overlapped (15 classes, then pottedplant, then sheep) with the recipe of
voc-laptop, but two epochs for the base. Every twentieth training image is in no step; the test uses these images, never
val. Of the values that learn the new classes at all (New above 1), the one with the highest mean of All and Inc is
chosen, also for the evidential method.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from voc_laptop import Run, learn, replay_images

from incseg.data.voc import VOC_INFO

TASK = "/".join([",".join(VOC_INFO.classes[:15]), *VOC_INFO.classes[15:17]])
HELD_OUT = ("--task", TASK, "--data.holdout", "20", "--train.epochs", "2", "--train.epochs_later", "6")
SLOW, SLOWER = {"train.lr_later": "0.003"}, {"train.lr_later": "0.001"}
"""Learning rates; the published weights of ewc, pi and rw are for the second."""
TRIALS: dict[str, list[dict[str, str]]] = {
    "mib": [
        *({"method.lambda_kd": w} for w in ("10", "30", "100")),
        {"train.lr_later": "0.02"},
        {"method.start_from_background": "false"},
        {"train.fusion": "ewf"},
        {"train.fusion": "ewf", "method.freeze_old": "true"},
    ],
    "lwf": [{"method.lambda_kd": w} for w in ("10", "100", "300", "1000")],
    "plop": [
        *({"method.least_threshold": limit} for limit in ("0.001", "0.005", "0.01", "0.016", "0.022")),
        {"method.median": "authors", "method.least_threshold": "0.001"},
        *(
            {"method.lambda_pod": "0.001", "method.lambda_pod_logits": "0.00005", "method.least_threshold": limit}
            for limit in ("0.005", "0.016")
        ),
    ],
    "evidential": [
        *({"method.lambda_kd": w} for w in ("3", "10", "20")),
        *({"method.pseudo_labels": u} for u in ("0.5", "0.3", "0.1")),
        {"method.pseudo_labels": "0.5", "method.lambda_kd": "3"},
        *({"method.pod": w} for w in ("0.01", "0.001", "0.0001")),
        {"method.replay": "WEB", "train.lr_later": "0.15", "method.lambda_kd": "1"},
        {"method.replay": "WEB", "train.lr_later": "0.15", "method.lambda_kd": "1", "method.start_score": "0"},
        {"method.replay": "WEB", "train.lr_later": "0.08", "method.lambda_kd": "3"},
        {"method.replay": "WEB", "train.lr_later": "0.15", "method.lambda_kd": "3"},
        {"train.fusion": "ewf"},
    ],
    "dkd": [
        *({"method.lambda_kd": w, "method.lambda_dkd": w} for w in ("1", "2", "5", "20")),
        *({"train.lr_later": rate} for rate in ("0.005", "0.02", "0.05")),
    ],
    "ssul": [{"train.lr_later": rate} for rate in ("0.005", "0.01", "0.02", "0.05", "0.15")],
    "ilt": [{"method.lambda_features": w} for w in ("3", "10", "30", "100")],
    "sdr": [
        *({"method.output": "kd", "method.lambda_kd": w} for w in ("10", "100")),
        {"method.output": "mib", "method.lambda_kd": "30"},
        *({"method.output": "mib_ce", "method.lambda_kd": w} for w in ("10", "30", "100")),
        {"method.output": "mib", "method.lambda_kd": "30", "method.lambda_matching": "1"},
        {"method.output": "mib", "method.lambda_kd": "30", "method.start_from_background": "true"},
    ],
    "recall": [
        {"method.replay": "WEB", "train.lr_later": rate} for rate in ("0.01", "0.02", "0.04", "0.08", "0.15", "0.3")
    ],
    "lwf_mc": [{"method.lambda_kd": w} for w in ("1", "3", "10", "30")],
    "ewc": [{"method.weight": "50", **SLOW}, {"method.weight": "100", **SLOW}, {"method.weight": "500", **SLOWER}],
    "pi": [{"method.weight": "50", **SLOW}, {"method.weight": "100", **SLOW}, {"method.weight": "500", **SLOWER}],
    "rw": [{"method.weight": "30", **SLOW}, {"method.weight": "100", **SLOW}, {"method.weight": "100", **SLOWER}],
}


def runs(web: Path) -> Iterator[Run]:
    for method, trials in TRIALS.items():
        for trial in trials:
            flags = [w for key, value in trial.items() for w in (f"--{key}", value.replace("WEB", str(web)))]
            yield Run("-".join([method, *tried(trial)]), (*HELD_OUT, "--method", method, *flags))


def tried(trial: dict[str, str]) -> list[str]:
    """Return the parts of a trial's name, as in lambda_kd=10."""
    return [f"{key.split('.')[-1]}={'web' if value == 'WEB' else value}" for key, value in trial.items()]


def table(out: Path) -> str:
    """Return a Markdown table of all finished trials, the best of each method in bold."""
    lines = ["| method | tried | Base | New | All | Inc |", "|---|---|---|---|---|---|"]
    for method, trials in TRIALS.items():
        found = []
        for trial in trials:
            file = out / "-".join([method, *tried(trial)]) / "results.json"
            if file.exists():
                found.append((tried(trial), json.loads(file.read_text())["final"]))
        best = max((row["all"] + row["inc"] for _, row in found if row["new"] > 1), default=0.0)
        for words, row in found:
            name = ", ".join(words)
            name = f"**{name}**" if row["all"] + row["inc"] == best else name
            figures = " | ".join(f"{row[key]:.1f}" for key in ("base", "new", "all", "inc"))
            lines.append(f"| `{method}` | {name} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="VOC2012 or the VOCdevkit around it")
    parser.add_argument("--out", type=Path, default=Path("runs/voc-tuning"))
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, of one thread each")
    parser.add_argument("--only", default=[""], nargs="+", help="runs whose name contains one of these")
    parser.add_argument("--table", action="store_true", help="print the table of finished runs and end")
    args = parser.parse_args()
    if args.table:
        print(table(args.out))
        return
    if args.root is None:
        parser.error("--root is missing: the folder of VOC2012")
    with contextlib.suppress(KeyboardInterrupt):
        chosen = [r for r in runs(args.out / "web") if any(part in r.name for part in args.only)]
        if any(str(args.out / "web") in r.options for r in chosen):
            replay_images(args.out, args.root, HELD_OUT)
        learn(chosen, args.root, args.out, args.workers, threads=1)


if __name__ == "__main__":
    main()
