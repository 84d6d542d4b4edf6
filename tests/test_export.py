"""ONNX: the graph agrees with the model for every method, network and size, and predicts the same."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import incseg
from incseg.cli import main
from incseg.export import Difference, compare, to_onnx
from incseg.inference import Predictor, load
from incseg.methods import METHODS
from incseg.models.files import save_segmenter
from incseg.models.onnx_file import INPUT, as_input
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.types import Increment

pytest.importorskip("onnx", reason="onnx is not installed: pip install 'incseg[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'incseg[onnx]'")

ROOT = Path(__file__).resolve().parents[1]
TINY = ModelConfig("tiny", output_stride=8, width=16, dilations=(1, 2, 3))
COLOURS = [[0, 0, 0], [200, 30, 30], [30, 200, 30], [30, 30, 200]]


def save_model(path: Path, method: str = "evidential", config: ModelConfig = TINY, size: int = 40) -> Path:
    """Save a random model of the classes 7, 2 and 5, with running statistics that fit its activations."""
    torch.manual_seed(1)
    model = Segmenter(config, METHODS[method].background_output)
    model.grow(Increment(("tree", "dog"), (7, 2), 30))
    model.grow(Increment(("car",), (5,), 10))
    for classifier in model.classifiers:
        torch.nn.init.normal_(classifier.get_parameter("weight"), std=0.7)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(F.interpolate(torch.randn(4, 3, 5, 6), (64, 64), mode="bicubic"))
    about = {"incseg": "0", "method": {"name": method}, "palette": COLOURS, "test_size": size}
    save_segmenter(path, model.eval(), about)
    return path


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model.safetensors")


@pytest.fixture(scope="module")
def predictor(model_file: Path) -> Predictor:
    return load(model_file, device="cpu")


@pytest.fixture(scope="module")
def onnx_file(model_file: Path) -> Path:
    file = model_file.parent / "model.onnx"
    assert main(["export", str(model_file), "--out", str(file)]) == 0
    return file


def assert_agrees(differences: list[Difference]) -> None:
    assert [difference.shape[0] for difference in differences] == [1, 3, 1]
    assert len({difference.shape[1:] for difference in differences}) == 3
    for difference in differences:
        assert max(difference.probabilities, difference.uncertainty) < 1e-4, str(difference)
        assert difference.labels <= 1e-3, str(difference)


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str, tmp_path: Path) -> None:
    predictor = load(save_model(tmp_path / "model.safetensors", method), device="cpu")
    assert_agrees(compare(to_onnx(predictor), predictor))


@pytest.mark.parametrize(
    "options",
    [
        {"balancing": "odds", "prior": 0.3},
        {"balancing": "paper"},
        {"balancing": "exact", "rectifier": "softplus", "decision": "hierarchical"},
        {"decision": "hierarchical", "threshold": 0.3, "rectifier": "relu"},
    ],
    ids=str,
)
def test_inference_options_are_in_the_graph(options: dict[str, Any], predictor: Predictor) -> None:
    chosen = predictor.with_options(**options)
    graph = to_onnx(chosen)
    assert_agrees(compare(graph, chosen))
    assert any(not difference.allowed for difference in compare(graph, predictor))


@pytest.mark.parametrize("method", ["evidential", "lwf_mc"])
@pytest.mark.parametrize("score", [150.0, -150.0])
def test_scores_beyond_the_range_of_exp(method: str, score: float, tmp_path: Path) -> None:
    """The exporter's own log-sigmoid is −∞ for them."""
    predictor = load(save_model(tmp_path / "model.safetensors", method), device="cpu")
    assert isinstance(predictor.model, Segmenter)
    for classifier in predictor.model.classifiers:
        torch.nn.init.constant_(classifier.get_parameter("bias"), score)
    assert_agrees(compare(to_onnx(predictor), predictor))


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig("efficientnet-lite0", output_stride=16, width=16, stages=(1, 2, 3), dilations=(1, 2, 3)),
        dataclasses.replace(TINY, norm="group"),
        dataclasses.replace(TINY, sharpen=4),
    ],
    ids=["SAME padding and stages of several strides", "group norm", "sharpened"],
)
def test_every_size(config: ModelConfig, tmp_path: Path) -> None:
    """Odd and even sides, narrower than the stride, a single pixel."""
    predictor = load(save_model(tmp_path / "model.safetensors", config=config), device="cpu")
    graph = to_onnx(predictor).SerializeToString()
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    for width, height in ((64, 64), (65, 50), (33, 31), (7, 90), (1, 1)):
        image = photo(width, height)
        probabilities, uncertainty, labels, _ = session.run(None, {INPUT: as_input([image])})
        expected = predictor.predict(image, size=0, probabilities=True)
        np.testing.assert_allclose(probabilities[0], expected.probabilities, atol=1e-4)
        np.testing.assert_allclose(uncertainty[0], expected.uncertainty, atol=1e-4)
        assert (labels[0] != expected.labels).mean() < 1e-3
    assert len(np.unique(predictor.predict(photo(64, 64), size=0).labels)) > 1


def test_the_file_describes_itself(onnx_file: Path) -> None:
    session = onnxruntime.InferenceSession(str(onnx_file), providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    assert about["incseg"] == incseg.__version__
    assert json.loads(about["classes"]) == ["background", "tree", "dog", "car"]
    assert json.loads(about["ids"]) == [0, 7, 2, 5]
    assert json.loads(about["palette"]) == COLOURS
    assert json.loads(about["test_size"]) == 40
    assert json.loads(about["method"])["name"] == "evidential"
    (image,) = session.get_inputs()
    assert (image.name, image.type, image.shape) == ("image", "tensor(uint8)", ["batch", 3, "height", "width"])
    assert session.get_outputs()[0].shape == ["batch", 4, "height", "width"]


def predictions(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "predictions.json").read_text())


def test_predict_gives_the_same_by_either_backend(model_file: Path, onnx_file: Path, tmp_path: Path) -> None:
    """Resized, enlarged and tiled images; an .onnx file alone, and one exported by the command."""
    (tmp_path / "in").mkdir()
    for index, size in enumerate(((61, 83), (30, 20), (300, 120))):
        photo(*size, seed=index).save(tmp_path / f"in/{index}.png")
    ways = {"torch": [model_file], "file": [onnx_file], "made": [model_file, "--backend", "onnx"]}
    for name, (model, *flags) in ways.items():
        images = [str(tmp_path / "in"), "--out", str(tmp_path / name), "--tile", "64", "--device", "cpu"]
        assert main(["predict", str(model), *images, *map(str, flags)]) == 0
    for name in ("file", "made"):
        assert predictions(tmp_path / name)["classes"] == predictions(tmp_path / "torch")["classes"]
        for index in range(3):
            masks = [np.asarray(Image.open(tmp_path / way / f"{index}_mask.png")) for way in ("torch", name)]
            levels = [np.asarray(Image.open(tmp_path / way / f"{index}_uncertainty.png")) for way in ("torch", name)]
            assert (masks[0] != masks[1]).mean() < 1e-3
            assert np.abs(levels[0].astype(int) - levels[1]).max() <= 1
    assert len(np.unique(masks[0])) > 1


def test_options_of_the_method_hold_for_an_onnx_file(model_file: Path, onnx_file: Path, tmp_path: Path) -> None:
    photo(60, 50).save(tmp_path / "a.png")
    for name, model in (("torch", model_file), ("onnx", onnx_file)):
        flags = ["--method.decision=hierarchical", "--method.threshold=0.9", "--out", str(tmp_path / name)]
        assert main(["predict", str(model), str(tmp_path / "a.png"), *flags]) == 0
    masks = [np.asarray(Image.open(tmp_path / way / "a_mask.png")) for way in ("torch", "onnx")]
    assert (masks[0] != masks[1]).mean() < 1e-3


def test_options_on_the_command_line_become_part_of_the_file(model_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "odds.onnx"
    assert main(["export", str(model_file), "--out", str(file), "--no-check", "--method.balancing=odds"]) == 0
    assert load(file).info["method"]["balancing"] == "odds"


def test_a_graph_that_differs_is_not_written(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Difference((1, 40, 40), 0.2, 0.0, 0.0)
    monkeypatch.setattr("incseg.export.compare", lambda *_: [wrong])
    arguments = ["export", str(model_file), "--out", str(tmp_path / "x.onnx")]
    assert main(arguments) == 2
    assert "probabilities 2.0e-01" in capsys.readouterr().err
    assert not (tmp_path / "x.onnx").exists()
    assert main([*arguments, "--no-check"]) == 0
    assert (tmp_path / "x.onnx").exists()


def test_mistakes_give_one_line(
    model_file: Path, onnx_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "foreign.onnx").write_bytes(b"")
    (tmp_path / "broken.onnx").write_bytes(b"\xff\xff no protobuf")
    photo(20, 20).save(tmp_path / "a.png")
    images = [str(tmp_path / "a.png"), "--out", str(tmp_path / "out")]
    for arguments, expected in (
        (["export", str(model_file), "--out", str(tmp_path / "x.pt")], "ends in .onnx"),
        (["export", str(model_file), "--out", str(tmp_path / "x.onnx"), "--stepp=1"], "did you mean --step?"),
        (["export", str(onnx_file), "--out", str(tmp_path / "x.onnx")], "is an ONNX file already"),
        (["predict", str(onnx_file), *images, "--backend", "torch"], "leave --backend out"),
        (["predict", str(onnx_file), *images, "--device", "cuda"], "runs on the CPU here"),
        (["predict", str(tmp_path / "foreign.onnx"), *images], "was not exported by incseg"),
        (["predict", str(tmp_path / "broken.onnx"), *images], "is damaged or not an ONNX file"),
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert expected in said


def test_without_the_packages(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["export", str(model_file), "--out", str(tmp_path / "x.onnx")]) == 2
    assert "pip install 'incseg[onnx]'" in capsys.readouterr().err


def test_the_guides_example_runs(onnx_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/how-to/predict-and-export.md, as printed, gives the mask that incseg predict writes."""
    code = re.search(
        r"```python\n(.*?)```", (ROOT / "docs/how-to/predict-and-export.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert code is not None
    assert len(code[1].strip().splitlines()) <= 10
    (tmp_path / "model.onnx").write_bytes(onnx_file.read_bytes())
    photo(60, 40).save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    exec(code[1], {})
    expected = load(onnx_file).predict("photo.jpg").ids
    assert (np.asarray(Image.open("mask.png")) != expected).mean() < 1e-3
    assert len(np.unique(expected)) > 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stride": "0"}, "its stride is 0"), ({"stride": "-8"}, "stride is -8"), ({"stride": "3"}, "stride is 3"),
        ({"unit": "100000000"}, "its unit is 100000000|its stride is"), ({"finer": "0"}, "0 times finer"),
        ({"finer": "2"}, "do not fit its description"), ({"num_outputs": "1000000000"}, "1000000000 outputs for 3"),
        ({"num_outputs": "4"}, "do not fit its description"), ({"increments": "[]"}, "outputs for 0 classes"),
        ({"test_size": "1000000000000000000"}, "its test size is"), ({"palette": "[[0,0,0]," * 9}, "is damaged"),
        ({"method": '{"name": "planted:M"}'}, "name it yourself"), ({"increments": '[{"classes": 1}]'}, "is damaged"),
    ],
    ids=str,
)  # fmt: skip
def test_a_description_that_does_not_fit_is_refused(
    onnx_file: Path, tmp_path: Path, change: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import onnx

    model = onnx.load(onnx_file)
    for entry in model.metadata_props:
        entry.value = change.get(entry.key, entry.value)
    onnx.save(model, tmp_path / "changed.onnx")
    photo(40, 30).save(tmp_path / "a.png")
    argv = ["predict", str(tmp_path / "changed.onnx"), str(tmp_path / "a.png"), "--out", str(tmp_path / "out")]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert error.count("\n") == 1
