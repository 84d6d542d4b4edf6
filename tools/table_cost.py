"""What the paper's whole table would cost on 8 GPUs: hours, memory and disk. An estimate on paper, not a measurement.

Counted: the protocol's images, epochs and steps; the floating-point operations, activations and parameters of our own
ResNet-101 DeepLab, on torch's meta device, which computes nothing. Assumed, and open to change by flags: the peak rate
of a GPU and the share of it that such a network reaches. The order in which runs wait for bases and for GPUs is played
through as `incseg sweep` does it.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from incseg.methods import METHODS
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.presets import PRESETS
from incseg.types import Increment

SEEDS = 3
# Training images of each step: docs/reference/protocol.md; order b from `incseg protocol --order b`.
VOC = {
    ("15-5", "disjoint"): (8437, 2145),
    ("15-5", "overlapped"): (9568, 2145),
    ("15-1", "disjoint"): (8437, 378, 299, 420, 500, 548),
    ("15-1", "overlapped"): (9568, 487, 299, 491, 500, 548),
}
ADE = {
    ("100-50", "a"): (13452, 6744),
    ("100-50", "b"): (10375, 9821),
    ("50-50", "a"): (8219, 6384, 5593),
    ("50-50", "b"): (6659, 7483, 6054),
    ("100-10", "a"): (13452, 1130, 1200, 1366, 1550, 1498),
    ("100-10", "b"): (10375, 1362, 1346, 2084, 2609, 2420),
}
TEST_IMAGES = {"voc": 1449, "ade20k": 2000}
JOINT_IMAGES = {"voc": 10582, "ade20k": 20210}
DATA_BYTES = {"voc": 2.6e9, "ade20k": 1.0e9}  # images and masks as they are downloaded and unpacked, about
CLASSES = {"voc": 20, "ade20k": 150}
# The rows of the paper's tables 3 and 4; RECALL stands there twice, with photographs from the web and from a GAN.
ROWS = {
    "voc": ("finetune", "mib", "sdr", "sdr", "plop", "recall", "recall", "evidential"),
    "ade20k": ("finetune", "mib", "sdr", "sdr", "evidential"),
}
JOINT_ROWS = ("joint", "evidential")
BACKWARD = 2.0  # operations of a backward pass per forward pass


@dataclass(frozen=True)
class Network:
    """One image at 512²: operations of a forward pass, bytes that training keeps of it; and the parameters' bytes."""

    operations: float
    activation_bytes: float
    parameter_bytes: float


@dataclass(frozen=True)
class Run:
    """Seconds of step 0 and of the rest, on one GPU; runs of one `base` train step 0 once."""

    base: str
    first: float
    rest: float
    steps: int


def network(dataset: str) -> Network:
    """Counted on the network itself, with activations in half precision."""
    preset = PRESETS["paper-voc"]["model"]
    with torch.device("meta"):
        model = Segmenter(ModelConfig(**preset), background_output=True)
        model.grow(Increment(tuple(map(str, range(CLASSES[dataset]))), tuple(range(CLASSES[dataset]))))
        image = torch.zeros(1, 3, 512, 512)
    kept = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal kept
        kept += output.numel() * 2

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(count)
    model.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(image)
    return Network(counter.get_total_flops(), kept, sum(p.numel() for p in model.parameters()) * 4)


def runs(dataset: str, rate: float) -> Iterator[Run]:
    """All runs of a dataset; `rate` is operations a second."""
    settings = PRESETS["paper-voc" if dataset == "voc" else "paper-ade"]["train"]
    operations, epochs = network(dataset).operations, settings["epochs"]
    test = TEST_IMAGES[dataset] * operations / rate

    def seconds(images: int, teacher: bool, shown: int = 1) -> float:
        return epochs * images * shown * operations * (1 + BACKWARD + teacher) / rate + test

    for seed in range(SEEDS):
        for (task, kind), images in (VOC if dataset == "voc" else ADE).items():
            for method in ROWS[dataset]:
                family = METHODS[method].first_step or method
                shown = 2 if method == "recall" else 1  # as many photographs as images in every batch
                rest = sum(seconds(count, True, shown) for count in images[1:])
                base = f"{dataset} {family} {task.split('-')[0]} {kind} {seed}"
                yield Run(base, seconds(images[0], False), rest, len(images))
        for method in JOINT_ROWS:
            yield Run(f"{dataset} joint {method} {seed}", seconds(JOINT_IMAGES[dataset], False), 0, 1)


def played(all_runs: list[Run], gpus: int) -> float:
    """Seconds until the last run ends: each GPU takes the first run whose base is there or is trained by nobody."""
    waiting, trained, training = list(all_runs), set[str](), set[str]()
    free = [0.0] * gpus
    ready_at: list[tuple[float, str]] = []
    end = 0.0
    while waiting:
        now = heapq.heappop(free)
        while ready_at and ready_at[0][0] <= now:
            base = heapq.heappop(ready_at)[1]
            training.discard(base)
            trained.add(base)
        run = next((run for run in waiting if run.base not in training), None)
        if run is None:
            heapq.heappush(free, ready_at[0][0])
            continue
        waiting.remove(run)
        took = run.rest
        if run.base not in trained:
            took += run.first
            training.add(run.base)
            heapq.heappush(ready_at, (now + run.first, run.base))
        heapq.heappush(free, now + took)
        end = max(end, now + took)
    return end


def memory(dataset: str, images: int, parts: int) -> float:
    """Bytes on a GPU: weights, gradients and momentum, a teacher, and the activations of a micro-batch."""
    net = network(dataset)
    return 4 * net.parameter_bytes + -(-images // parts) * net.activation_bytes


def disk(dataset: str, all_runs: list[Run]) -> float:
    """Bytes of all models; a shared step 0 is one file with several names."""
    steps = sum(run.steps - 1 for run in all_runs) + len({run.base for run in all_runs})
    return steps * network(dataset).parameter_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--peak", type=float, default=312.0, help="half-precision TFLOP/s of a GPU (default: A100)")
    parser.add_argument("--share", type=float, default=0.1, help="of the peak that training reaches (default: 0.1)")
    args = parser.parse_args()
    rate = args.peak * 1e12 * args.share
    print(f"An estimate: {args.gpus} GPUs of {args.peak:g} TFLOP/s, of which training reaches {args.share:.0%}.\n")
    print("| | runs | bases trained | forward, GFLOP an image | images a second | GPU hours | without sharing |"
          " memory, whole batch | in 4 parts | models on disk | data |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    everything: list[Run] = []
    for dataset in ("voc", "ade20k"):
        own = list(runs(dataset, rate))
        everything += own
        net, batch = network(dataset), PRESETS["paper-voc" if dataset == "voc" else "paper-ade"]["train"]["batch_size"]
        bases = {run.base: run.first for run in own}
        print(
            f"| {dataset} | {len(own)} | {len(bases)} | {net.operations / 1e9:.0f} | "
            f"{rate / net.operations / (2 + BACKWARD):.0f} | {hours(sum(bases.values()) + sum(r.rest for r in own))} | "
            f"{hours(sum(run.first + run.rest for run in own))} | {gigabytes(memory(dataset, batch, 1))} | "
            f"{gigabytes(memory(dataset, batch, 4))} | {gigabytes(disk(dataset, own))} | "
            f"{gigabytes(DATA_BYTES[dataset])} |"
        )
    longest = sorted(everything, key=lambda run: -(run.first + run.rest))
    print(f"\nOn {args.gpus} GPUs, a run on each: {hours(played(everything, args.gpus))} h from first to last; "
          f"{hours(played(longest, args.gpus))} h with the longest runs first.")  # fmt: skip


def hours(seconds: float) -> str:
    return f"{seconds / 3600:.0f}"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


if __name__ == "__main__":
    main()
