"""Model files: round trip, and one clear line for every fault of a file."""

from __future__ import annotations

import json
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from incseg.models.backbones import BACKBONES
from incseg.models.closed_form import Design
from incseg.models.files import _Description, load_segmenter, save_segmenter
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.types import Increment, UserError

EXTRA = {"method": {"name": "evidential", "balancing": "odds"}, "palette": [[0, 0, 0], [128, 0, 0]], "step": 1}


@pytest.fixture
def model() -> Segmenter:
    torch.manual_seed(0)
    config = ModelConfig("tiny", weights="elsewhere.pth", output_stride=8, width=16, dilations=(1, 2, 3))
    model = Segmenter(config, background_output=True)
    model.grow(Increment(("Bäume", "dog"), (1, 2), train_images=9))
    model.grow(Increment(("car",), (3,), train_images=4))
    model(torch.randn(2, 3, 32, 32))  # moves the running statistics off their start
    return model.eval()


@pytest.fixture
def path(model: Segmenter, tmp_path: Path) -> Path:
    save_segmenter(tmp_path / "step-1.safetensors", model, EXTRA)
    return tmp_path / "step-1.safetensors"


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_segmenter(path)
    line = str(caught.value)
    assert "\n" not in line
    assert f"'{path}'" in line
    return line


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def rewrite(path: Path, drop: str | None = None, add: dict[str, Any] | None = None, **metadata: str) -> Path:
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != drop}
    changed = path.with_name("changed.safetensors")
    kept = {name: text for name, text in metadata_of(path).items() if name != "checksum"}
    save_file(tensors | (add or {}), changed, metadata=kept | metadata)
    return changed


def test_round_trip_is_bit_identical(model: Segmenter, path: Path) -> None:
    loaded, extra = load_segmenter(path)
    assert extra == EXTRA
    assert loaded.config == model.config
    assert loaded.increments == model.increments
    assert loaded.background_output is True
    assert not loaded.training
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )
    x = torch.randn(1, 3, 40, 32)
    assert torch.equal(loaded(x).logits, model(x).logits)


@pytest.mark.parametrize("norm", ["group", "frozen"])
def test_round_trip_of_other_norms_and_no_classes(norm: Any, tmp_path: Path) -> None:
    model = Segmenter(ModelConfig("tiny", output_stride=8, width=16, norm=norm, freeze_backbone=True), False)
    save_segmenter(tmp_path / "new" / "m.safetensors", model, {})
    loaded, extra = load_segmenter(tmp_path / "new" / "m.safetensors")
    assert (extra, loaded.increments, loaded.config) == ({}, [], model.config)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert not any(p.requires_grad for p in loaded.backbone.parameters())


def test_channels_last_models_can_be_saved(model: Segmenter, tmp_path: Path) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    save_segmenter(tmp_path / "m.safetensors", model, {})
    loaded, _ = load_segmenter(tmp_path / "m.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_metadata_can_be_read_without_incseg(path: Path) -> None:
    metadata = metadata_of(path)
    assert metadata["format"] == "incseg-model"
    assert metadata["format_version"] == "1"
    assert json.loads(metadata["increments"])[0]["classes"] == ["Bäume", "dog"]
    assert json.loads(metadata["config"])["backbone"] == "tiny"


def test_loading_leaves_the_random_state_alone(path: Path) -> None:
    state = torch.get_rng_state()
    load_segmenter(path)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failed_write_leaves_the_old_file_and_no_other(
    model: Segmenter, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_segmenter(path, model, {"step": 2})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_writing_leaves_no_temporary_file(path: Path) -> None:
    assert list(path.parent.iterdir()) == [path]


def test_absent_files_and_folders_are_named(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "absent.safetensors")
    assert "is not a file" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_files_are_refused(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    assert "truncated, damaged or not a safetensors file" in refusal(path)


def test_other_files_are_refused(path: Path) -> None:
    path.write_text("a text that is long enough to be anything")
    assert "not a safetensors file" in refusal(path)


@pytest.mark.parametrize("new_format", [True, False])
def test_pickles_in_disguise_are_refused(model: Segmenter, path: Path, new_format: bool) -> None:
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=new_format)
    assert "is a pickle" in refusal(path)


def test_a_file_that_begins_like_a_pickle_is_loaded(model: Segmenter, path: Path) -> None:
    save_segmenter(path, model, {"note": ""})
    length = int.from_bytes(path.read_bytes()[:8], "little")
    pickle_start = 0x0280  # b"\x80\x02", as a length
    save_segmenter(path, model, {"note": "x" * ((pickle_start - length) % 0x10000)})
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert load_segmenter(path)[0].increments == model.increments


def test_safetensors_of_others_are_refused(path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, path)
    assert "not an incseg model" in refusal(path)
    save_file({"weight": torch.zeros(2)}, path, metadata={"format": "pt"})
    assert "not an incseg model" in refusal(path)


def test_files_of_a_newer_version_ask_for_an_update(path: Path) -> None:
    line = refusal(rewrite(path, format_version="4"))
    assert "made by a newer incseg" in line
    assert "format 4" in line
    assert "is not a number" in refusal(rewrite(path, format_version="new"))


@pytest.mark.parametrize(
    "damage",
    [
        {"config": "{"},
        {"config": '{"backbone": "tiny", "colour": 1}'},
        {"increments": '[{"classes": ["a"]}]'},
        {"extra": "3"},
    ],
)
def test_damaged_descriptions_are_refused(path: Path, damage: dict[str, str]) -> None:
    assert "description is damaged" in refusal(rewrite(path, **damage))


def test_tensors_that_do_not_fit_the_description_are_named(path: Path) -> None:
    assert "misses tensor aspp.mix.weight" in refusal(rewrite(path, drop="aspp.mix.weight"))
    assert "has unknown tensor more" in refusal(rewrite(path, add={"more": torch.zeros(1)}))
    misshapen = {"classifiers.1.bias": torch.zeros(2)}
    assert "has misshapen tensor classifiers.1.bias" in refusal(rewrite(path, add=misshapen))


def edited(path: Path, **changes: Any) -> Path:
    """Return the file with other values in its metadata; a callable gets the old value."""
    about = metadata_of(path)
    return rewrite(path, **{key: json.dumps(change(json.loads(about[key]))) for key, change in changes.items()})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config": lambda c: {**c, "width": 30_000}}, "has misshapen tensor"),
        ({"config": lambda c: {**c, "backbone": "resnet101"}}, "misses tensor"),
        ({"config": lambda c: {**c, "dilations": [10**9] * 3}}, "its dilations are .*; they are from 1 to 512"),
        ({"config": lambda c: {**c, "width": "16"}}, "'width' holds '16'"),
        ({"config": lambda c: {**c, "stages": [0.5]}}, "'stages' holds"),
        ({"config": lambda c: {**c, "norm": "none"}}, "'norm' holds 'none'"),
        ({"config": lambda c: {**c, "freeze_backbone": 1}}, "'freeze_backbone' holds 1"),
        ({"extra": lambda e: {**e, "test_size": 10**6}}, "its test size is 1000000; it is from 0 to 10000"),
        ({"extra": lambda e: {**e, "test_size": 10**18}}, "its test size is"),
        ({"extra": lambda e: {**e, "test_size": True}}, "its test size is True"),
        ({"extra": lambda e: {**e, "palette": [[0, 0, 0]] * 257}}, "its palette has 257 colours"),
        ({"extra": lambda e: {**e, "protocol": [1]}}, r"its protocol is \[1\]"),
        ({"extra": lambda e: {**e, "protocol": {"rules": 7}}}, "its label rules are 7"),
        ({"extra": lambda e: {**e, "train": "long"}}, "its train is 'long'"),
        ({"extra": lambda e: {**e, "note": "\ud800"}}, "characters that no setting has"),
        ({"increments": lambda i: [*i, *[{"classes": [], "ids": [], "train_images": 0}] * 100_000]}, "has no classes"),
        ({"increments": lambda i: [{"classes": [], "ids": [], "train_images": 0, "head": 10**9}]}, "its head is"),
        ({"increments": lambda i: [{**i[0], "head": 1}, {**i[1], "head": 2}]}, "unknown tensor|misses tensor|shrunk"),
        ({"increments": lambda i: [{**i[0], "train_images": "9"}, i[1]]}, "has '9' images"),
        ({"increments": lambda i: [{**i[0], "solved": "no"}, i[1]]}, "is solved: 'no'"),
        ({"increments": lambda i: [{**i[0], "classes": ["\ud800", "b"]}, i[1]]}, "characters that no setting has"),
        ({"background_output": lambda b: "false"}, "its background output is 'false'"),
        ({"shrinks": lambda s: [1] * 10**6}, "sizes that its heads look at"),
        ({"shrinks": lambda s: [True]}, "looks? at images shrunk|heads look at"),
    ],
)  # fmt: skip
def test_descriptions_are_checked_before_anything_is_made(path: Path, changes: Any, said: str) -> None:
    """Some of these used to take all memory, or minutes, before they were refused."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    changes = {"shrinks": lambda s: s, **changes} if "shrinks" in metadata_of(path) else changes
    line = refusal(edited(path, **changes))
    assert re.search(said, line), line
    assert len(line) < 1000
    assert time.process_time() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kilobytes


def test_the_shapes_are_compared_before_tensors_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("incseg.models.files.load_tensors", lambda path: pytest.fail("tensors were read"))
    assert "has misshapen tensor" in refusal(edited(path, config=lambda c: {**c, "width": 24}))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64])
def test_tensors_of_other_kinds_are_named(path: Path, kind: torch.dtype) -> None:
    odd = {"classifiers.1.bias": torch.zeros(1).to(kind)}
    assert "has misshapen tensor classifiers.1.bias" in refusal(rewrite(path, add=odd))


def test_a_header_without_end_is_not_read(path: Path) -> None:
    text = json.dumps({"__metadata__": {"format": "x" * (17 << 20)}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    assert "its header has 17 MB; at most 16 are read" in refusal(path)


@pytest.mark.parametrize(
    "change",
    [{"columns": 16_000}, {"widths": [16, 60_000, 60_000]}, {"widths": [16] * 10**5}, {"labels": 10**7}, {"labels": -1},
     {"waiting": ["a"] * 10**5}, {"waiting": "a"}, {"embedding": "x"}, {"rectifier": "none"}, {"columns": "8"}],
    ids=str,
)  # fmt: skip
def test_a_closed_form_is_checked_before_it_is_drawn(tmp_path: Path, change: dict[str, Any]) -> None:
    path, before = tmp_path / "form.safetensors", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = Segmenter(ModelConfig("tiny", output_stride=8, width=16, dilations=(1, 2, 3)), background_output=False)
    model.grow(Increment(("cat",), (1,), 9))
    model.add_closed_form(Design(columns=8), "exp_sigmoid").set_labels(2)
    save_segmenter(path, model.eval(), {})
    assert load_segmenter(path)[0].closed_form is not None
    about = json.loads(metadata_of(path)["closed_form"]) | change
    assert "closed form" in refusal(rewrite(path, closed_form=json.dumps(about))) or "waiting" in change
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


@pytest.mark.parametrize("backbone", [*BACKBONES])
def test_every_network_can_be_sketched_without_memory(backbone: str) -> None:
    description = _Description(
        ModelConfig(backbone, output_stride=16, width=16), True, [Increment(("a",), (1,))], [1], [1], None, {}
    )
    sketch, built = description.sketch({}), description.build({})
    assert {tensor.device.type for tensor in sketch.state_dict().values()} == {"meta"}
    shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in (sketch, built)]
    assert shapes[0] == shapes[1]
