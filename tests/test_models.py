"""The segmenter: head, growing, freezing, teachers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incseg.models.aspp import ASPP, default_dilations
from incseg.models.pretrained import build_segmenter
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.types import Increment, UserError

SMALL = ModelConfig(backbone="tiny", output_stride=8, width=16, dilations=(1, 2, 3))
FIRST = Increment(("cat", "dog", "cow"), (1, 2, 3), train_images=7)
SECOND = Increment(("car",), (4,))


def small(background_output: bool = False, **changes: Any) -> Segmenter:
    torch.manual_seed(0)
    model = Segmenter(replace(SMALL, **changes), background_output)
    model.grow(FIRST)
    return model


def images(size: tuple[int, int] = (32, 40)) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


def train_once(model: Segmenter) -> None:
    model.train()
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    model(images()).logits.square().sum().backward()
    optimiser.step()


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def changed(before: dict[str, Tensor], module: nn.Module) -> set[str]:
    return {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}


def test_dilations_reach_equally_far_in_pixels() -> None:
    assert default_dilations(16) == (6, 12, 18)
    assert default_dilations(8) == (12, 24, 36)
    assert default_dilations(32) == (3, 6, 9)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_aspp_is_the_wiring_of_the_field(norm: Any) -> None:
    torch.manual_seed(0)
    head = ASPP(inputs=5, width=8, dilations=(1, 2, 3), norm=norm).eval()
    convolutions = [m for m in head.modules() if isinstance(m, nn.Conv2d)]
    assert all(conv.bias is None for conv in convolutions)
    assert len(convolutions) == 7
    x = torch.randn(2, 5, 9, 7)
    with torch.no_grad():
        for module in (head.branch_norm, head.pool_norm, head.norm):
            for p in module.parameters():
                nn.init.normal_(p)
        branches = [F.conv2d(x, head.branches[0].weight)]
        branches += [
            F.conv2d(x, head.branches[i].weight, padding=rate, dilation=rate) for i, rate in enumerate((1, 2, 3), 1)
        ]
        mixed = head.mix(F.leaky_relu(head.branch_norm(torch.cat(branches, 1)), 0.01))
        mean = F.adaptive_avg_pool2d(x, 1)
        pooled = head.pool_mix(F.leaky_relu(head.pool_norm(head.pool_conv(mean)), 0.01))
        expected = F.leaky_relu(head.norm(mixed + pooled.expand_as(mixed)), 0.01)
        torch.testing.assert_close(head(x), expected)


def test_aspp_refuses_what_cannot_be_trained() -> None:
    with pytest.raises(UserError, match="two or more, or norm 'group'"):
        ASPP(5, 8, (1, 2, 3), "batch")(torch.randn(1, 5, 4, 4))
    assert ASPP(5, 8, (1, 2, 3), "group")(torch.randn(1, 5, 4, 4)).abs().sum() > 0
    with pytest.raises(UserError, match="width is 0"):
        ASPP(5, 0, (1, 2, 3), "batch")
    with pytest.raises(UserError, match=r"dilations are \[0, 1, 2\]"):
        ASPP(5, 8, (0, 1, 2), "batch")


@pytest.mark.parametrize("stride", [8, 16])
@pytest.mark.parametrize("size", [(32, 48), (33, 50)])
def test_outputs_have_the_resolution_of_the_output_stride(stride: int, size: tuple[int, int]) -> None:
    model = small(output_stride=stride).eval()
    out = model(images(size))
    h, w = (-(-n // stride) for n in size)
    assert out.logits.shape == (2, 3, h, w)
    assert out.embedding.shape == (2, 16, h, w)
    assert len(out.stages) == 4
    assert out.stages[-1].shape == (2, model.backbone.channels[-1], h, w)


@pytest.mark.parametrize("background_output", [False, True])
def test_growing_adds_outputs_and_keeps_the_old_ones(background_output: bool) -> None:
    model = small(background_output).eval()
    with torch.no_grad():
        nn.init.normal_(model.classifiers[0].bias)
        before, state = model(images()), snapshot(model)
        model.grow(SECOND)
        after = model(images())
    old = 3 + background_output
    assert (model.num_classes, model.num_outputs) == (4, old + 1)
    assert model.increments == [FIRST, SECOND]
    assert {k for k in model.state_dict() if k not in state} == {"classifiers.1.weight", "classifiers.1.bias"}
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())
    assert torch.equal(before.embedding, after.embedding)
    # Equal to the bit where measured; another processor may sum a wider convolution in another order.
    torch.testing.assert_close(after.logits[:, :old], before.logits, rtol=0, atol=1e-6)


def test_new_classifiers_are_small_and_unbiased() -> None:
    model = small(width=256)
    model.grow(Increment(tuple(f"c{i}" for i in range(50)), tuple(range(4, 54))))
    new = model.classifiers[1]
    assert new.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert torch.count_nonzero(new.bias) == 0


def test_new_classifiers_follow_the_type_of_the_model() -> None:
    model = small().double()
    model.grow(SECOND)
    assert model(images().double()).logits.dtype == torch.float64


def test_one_convolution_equals_separate_classifiers() -> None:
    model = small(background_output=True).eval()
    model.grow(SECOND)
    with torch.no_grad():
        for p in model.classifiers.parameters():
            nn.init.normal_(p)
        out = model(images())
        separate = torch.cat([classifier(out.embedding) for classifier in model.classifiers], dim=1)
    torch.testing.assert_close(out.logits, separate)


def test_a_model_without_classes_is_refused() -> None:
    model = Segmenter(SMALL, background_output=True)
    assert (model.num_classes, model.num_outputs) == (0, 0)
    with pytest.raises(RuntimeError, match="call grow first"):
        model(images())


def test_frozen_copy_is_untouched_by_later_training() -> None:
    model = small()
    teacher = model.frozen_copy()
    assert not teacher.training
    assert not any(p.requires_grad for p in teacher.parameters())
    before, state = teacher(images()).logits, snapshot(teacher)
    model.grow(SECOND)
    train_once(model)
    assert changed(state, teacher) == set()
    assert torch.equal(teacher(images()).logits, before)
    assert teacher.increments == [FIRST]
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


def test_training_changes_everything_that_is_not_frozen() -> None:
    model = small()
    state = snapshot(model)
    train_once(model)
    assert changed(state, model) == set(state)


def test_frozen_backbone_keeps_parameters_and_statistics() -> None:
    model = small(freeze_backbone=True)
    backbone, head = snapshot(model.backbone), snapshot(model.aspp)
    assert not any(module.training for module in model.backbone.modules())
    train_once(model)
    assert changed(backbone, model.backbone) == set()
    assert changed(head, model.aspp) == set(head)
    assert model.training
    assert not any(module.training for module in model.backbone.modules())
    assert not model(images()).stages[-1].requires_grad


def test_frozen_norm_keeps_statistics_and_trains_its_parameters() -> None:
    model = small(norm="frozen")
    state = snapshot(model.backbone)
    train_once(model)
    statistics = {name for name in state if "running" in name}
    assert statistics
    assert changed(state, model.backbone) == set(state) - statistics


def test_group_norm_has_no_statistics_and_trains_on_one_image() -> None:
    model = small(norm="group")
    assert not list(model.buffers())
    model(images()[:1]).logits.sum().backward()


def test_building_loads_the_weights_and_logs_the_report(tmp_path: Path) -> None:
    source = small()
    torch.save(source.backbone.state_dict(), tmp_path / "w.pth")
    torch.manual_seed(5)
    lines: list[str] = []
    model = build_segmenter(replace(SMALL, weights=str(tmp_path / "w.pth")), False, lines.append)
    assert changed(snapshot(source.backbone), model.backbone) == set()
    assert len(lines) == 1
    assert "60 of 60 tensors loaded" in lines[0]


def test_building_warns_of_a_frozen_random_backbone() -> None:
    lines: list[str] = []
    build_segmenter(replace(SMALL, freeze_backbone=True), False, lines.append)
    assert len(lines) == 1
    assert "frozen but has no pretrained weights" in lines[0]
    build_segmenter(SMALL, False, lines.append)
    assert len(lines) == 1


def test_building_warns_about_a_random_backbone() -> None:
    lines: list[str] = []
    for backbone in ("resnet18", "efficientnet-lite0", "tiny"):
        build_segmenter(replace(SMALL, backbone=backbone), False, lines.append)
    text = "has no pretrained weights and learns from random ones; give --model.weights"
    assert lines == [
        f"note: resnet18 {text} a file (.pth, .pt or .safetensors)",
        f"note: efficientnet-lite0 {text} imagenet or a file (.pth, .pt or .safetensors)",
    ]
