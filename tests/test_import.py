"""A DeepLabv3 checkpoint in torchvision's naming becomes a model that decides alike and can be extended.

torchvision is not installed. The network below is written again with its names, and is trained, saved and compared.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import incseg
from incseg.cli import main
from incseg.data.shapes import Shapes
from incseg.data.transforms import IMAGENET_MEAN, IMAGENET_STD, TestTransform
from incseg.methods.evidential import Evidential
from incseg.models.files import load_segmenter
from incseg.models.pretrained import evidential_from_softmax, read_deeplab
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.outputs.evidential import Rectifier, deciding_evidence, deciding_score, log_probabilities
from incseg.types import Increment, UserError

SIZE = 48
SOURCE = Shapes(seed=1, train_size=12, val_size=4, image_size=SIZE)
CLASSES = ("disc", "square", "triangle", "ring")


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, inputs: int, width: int, stride: int, dilation: int, later: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, dilation, dilation, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, 1, later, later, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        if stride > 1 or inputs != width:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (self.downsample(x) if hasattr(self, "downsample") else x))


class ResNet(nn.Module):
    """ResNet-18 whose last two stages are dilated, as torchvision's segmentation networks are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(64, 64, 1, 1, 1), Block(64, 64, 1, 1, 1))
        self.layer2 = nn.Sequential(Block(64, 128, 2, 1, 1), Block(128, 128, 1, 1, 1))
        self.layer3 = nn.Sequential(Block(128, 256, 1, 1, 2), Block(256, 256, 1, 2, 2))
        self.layer4 = nn.Sequential(Block(256, 512, 1, 2, 4), Block(512, 512, 1, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


class Pooling(nn.Sequential):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(super().forward(x), x.shape[-2:], mode="bilinear", align_corners=False)


class ASPP(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()

        def branch(kernel: int, rate: int) -> nn.Sequential:
            conv = nn.Conv2d(inputs, width, kernel, padding=rate if kernel > 1 else 0, dilation=rate, bias=False)
            return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU())

        self.convs = nn.ModuleList([branch(1, 1), *(branch(3, rate) for rate in (12, 24, 36)), Pooling(inputs, width)])
        project = nn.Conv2d(5 * width, width, 1, bias=False)
        self.project = nn.Sequential(project, nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(torch.cat([conv(x) for conv in self.convs], dim=1))


class DeepLab(nn.Module):
    """torchvision's deeplabv3 on a ResNet-18, with its names and wiring; the widths are free."""

    def __init__(self, outputs: int, width: int = 16) -> None:
        super().__init__()
        self.backbone = ResNet()
        self.classifier = nn.Sequential(
            ASPP(512, width),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1),
        )
        self.aux_classifier = nn.Sequential(nn.Conv2d(256, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.classifier(self.backbone(x))
        return F.interpolate(scores, x.shape[-2:], mode="bilinear", align_corners=False)


def examples(split: Any, count: int) -> tuple[Tensor, Tensor]:
    transform = TestTransform(SIZE, IMAGENET_MEAN, IMAGENET_STD)
    images, masks = zip(*(transform(*SOURCE.pair(split, i)) for i in range(count)), strict=True)
    labels = torch.stack(masks).long()
    return torch.stack(images), torch.where(labels <= len(CLASSES), labels, 0)


@pytest.fixture(scope="module")
def trained() -> DeepLab:
    """Train the head with softmax on features of a random backbone, computed once: seconds, not minutes."""
    torch.manual_seed(0)
    network = DeepLab(len(CLASSES) + 1)
    images, labels = examples("train", 12)
    for module in network.backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the mean over all it sees
    with torch.no_grad():
        network.backbone(images)
        features = network.backbone.eval()(images)
    weights = torch.tensor([0.5, 1, 1, 1, 1])  # or it would say background for long
    optimizer = torch.optim.Adam(network.classifier.parameters(), lr=5e-3)
    for _ in range(45):
        scores = F.interpolate(network.classifier(features), (SIZE, SIZE), mode="bilinear")
        loss = F.cross_entropy(scores, labels, weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval()


@pytest.fixture(scope="module")
def checkpoint(trained: DeepLab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "deeplab.pth"
    torch.save({"model": trained.state_dict()}, path)
    return path


def scores_of(network: DeepLab, images: Tensor) -> Tensor:
    with torch.no_grad():
        return network(images)


def test_the_imported_model_decides_as_the_checkpoint(
    checkpoint: Path, trained: DeepLab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command line and the file, at the images' own size."""
    names = tmp_path / "classes.txt"
    names.write_text("__background__\n" + "\n".join(CLASSES))
    out = tmp_path / "imported"
    assert main(["import", str(checkpoint), "--classes", str(names), "--size", "0", "--out", str(out)]) == 0
    assert f"resnet18, 4 classes: {', '.join(CLASSES)}" in capsys.readouterr().out
    model = incseg.load(out)
    assert model.classes == ("background", *CLASSES)
    images, _ = examples("train", 12)
    theirs = scores_of(trained, images)
    found = torch.stack([torch.from_numpy(model.predict(SOURCE.image("train", i)).labels).long() for i in range(12)])
    expected = theirs.argmax(1)
    lead = theirs[:, 0] - theirs[:, 1:].amax(1)
    margin = math.log(deciding_evidence(4) / 4)
    near = lead.abs() < 1e-4  # rounding
    says_class = (expected > 0) & ~near
    assert len(expected.unique()) == 5
    assert says_class.float().mean() > 0.05
    assert torch.equal(found[says_class], expected[says_class])
    assert (found[lead > margin + 1e-4] == 0).all()
    assert (found == expected).float().mean() > 0.99


def test_with_a_softmax_method_the_scores_are_the_checkpoints(
    checkpoint: Path, trained: DeepLab, tmp_path: Path
) -> None:
    flags = ["--classes", ",".join(CLASSES), "--method", "mib", "--out", str(tmp_path)]
    assert main(["import", str(checkpoint), *flags]) == 0
    model, about = load_segmenter(tmp_path / "model.safetensors")
    assert about["test_size"] == 520
    images, _ = examples("val", 4)
    with torch.no_grad():
        ours = F.interpolate(model(images).logits, (SIZE, SIZE), mode="bilinear", align_corners=False)
    torch.testing.assert_close(ours, scores_of(trained, images), rtol=1e-4, atol=1e-4)


def test_odds_against_background_do_not_change(checkpoint: Path) -> None:
    softmax = read_deeplab(checkpoint, CLASSES)
    evidential = evidential_from_softmax(softmax, "exp")
    images, _ = examples("val", 2)
    with torch.no_grad():
        z, relative = softmax(images).logits, evidential(images).logits
    shift = deciding_score(4, "exp")
    torch.testing.assert_close(relative - shift, z[:, 1:] - z[:, :1], rtol=1e-4, atol=1e-4)


def test_several_increments_of_a_softmax_model_become_one() -> None:
    """A model of any softmax method that was grown in steps decides alike when it becomes evidential."""
    torch.manual_seed(1)
    config = ModelConfig("tiny", output_stride=8, width=8, dilations=(1, 2, 3))
    model = Segmenter(config, background_output=True)
    for increment in (Increment(("a", "b"), (4, 2), 7), Increment(("c",), (1,), 5)):
        model.grow(increment)
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        for classifier in model.eval().classifiers:
            nn.init.normal_(classifier.weight, std=3)
        mean = model(images).logits.mean(dim=(0, 2, 3))
        for classifier, part in zip(model.classifiers, mean.split([3, 1]), strict=True):
            classifier.bias -= part
        converted = evidential_from_softmax(model, "exp_sigmoid")
        z, relative = model(images).logits, converted(images).logits
    assert converted.increments == [Increment(("a", "b", "c"), (4, 2, 1), 12)]
    expected, found = z.argmax(1), Evidential().predict(relative, converted.increments).labels.long()
    assert len(expected.unique()) == 4
    says_class = expected > 0
    assert torch.equal(found[says_class], expected[says_class])


@pytest.mark.parametrize("rectifier", ["exp_sigmoid", "exp"])
@given(
    scores=st.lists(st.floats(-12, 12), min_size=1, max_size=12),
    lead=st.one_of(st.floats(-8, -1e-3), st.floats(1e-3, 8)),
)
def test_where_the_decision_is_softmaxs(rectifier: Rectifier, scores: list[float], lead: float) -> None:
    """The decisions agree wherever a class leads. Where background leads, they agree always for one class, and
    otherwise from a margin on."""
    d = torch.tensor(scores, dtype=torch.float64)
    d = d - d.max() - lead  # the strongest class is `lead` below background
    size = len(scores)
    p = log_probabilities((d + deciding_score(size, rectifier)).view(1, -1, 1), rectifier).flatten()
    found, strongest = int(p.argmax()), d.max()
    if lead < 0:
        assert found > 0
        assert d[found - 1] == strongest
    elif size == 1 or lead > math.log(deciding_evidence(size) / size) + 1e-9:
        assert found == 0


def test_the_margin_is_sharp_and_bounded() -> None:
    """With equal classes the decision changes at the margin, and below it softmax would predict background."""
    for size in (2, 20, 150):
        margin = math.log(deciding_evidence(size) / size)
        assert 0 < margin < 0.482
        for lead, background in ((margin - 1e-6, False), (margin + 1e-6, True)):
            d = torch.full((1, size, 1), -lead, dtype=torch.float64) + deciding_score(size, "exp")
            assert bool(log_probabilities(d, "exp").argmax(1) == 0) is background
    assert deciding_evidence(1) == 1


def test_wrong_files_get_one_line(checkpoint: Path, tmp_path: Path) -> None:
    state = torch.load(checkpoint, weights_only=True)["model"]
    path = tmp_path / "net.safetensors"
    save_file({f"module.{name}": value for name, value in state.items()}, path)
    assert read_deeplab(path, CLASSES).num_classes == 4

    def refusal(changed: dict[str, Tensor], names: tuple[str, ...] = CLASSES) -> str:
        save_file(changed, path)
        with pytest.raises(UserError) as caught:
            read_deeplab(path, names)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def without(*names: str) -> dict[str, Tensor]:
        return {name: value for name, value in state.items() if not name.startswith(names)}

    said = refusal({**without("backbone.bn1.weight"), "backbone.extra": torch.zeros(1)})
    assert "misses backbone.bn1.weight (1 in all), has unexpected backbone.extra (1 in all)" in said
    assert "has no convolution classifier.4.weight" in refusal(without("classifier."))
    wrong = {"classifier.1.weight": torch.zeros(3, 3, 1, 1), "backbone.bn1.bias": torch.full((64,), torch.nan)}
    said = refusal({**state, **wrong})
    assert "has misshapen classifier.1.weight [3, 3, 1, 1] instead of [16, 16, 3, 3]" in said
    assert "has NaN in backbone.bn1.bias" in said
    assert "5 outputs, background and 4 classes, but 2 names were given (disc, ring)" in refusal(
        state, ("disc", "ring")
    )


def test_a_pickle_with_code_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"state_dict": Harmful()}, tmp_path / "x.pth")
    assert main(["import", str(tmp_path / "x.pth"), "--classes", "a", "--out", str(tmp_path / "m")]) == 2
    assert "never run" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--classes", "a,a,b,c"], "names 'a' twice"),
        (["--classes", ",".join(CLASSES), "--method", "joint"], "Allowed: evidential, finetune"),
        (["--classes", ",".join(CLASSES), "--size", "-1"], "--size is -1"),
    ],
)
def test_wrong_flags(
    flags: list[str], message: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(checkpoint), *flags, "--out", str(tmp_path / "m")]) == 2
    assert message in capsys.readouterr().err


def test_resnet50_has_torchvisions_names() -> None:
    """Checked by number and sample: 50 layers with dilation, ASPP at 12, 24, 36, one more convolution."""
    from incseg.models.pretrained import _their_name

    with torch.device("meta"):
        model = Segmenter(ModelConfig("resnet50", output_stride=8, head="torchvision"), background_output=True)
    names = {_their_name(name) for name in model.state_dict()}
    assert {"backbone.layer4.2.conv3.weight", "classifier.0.convs.4.2.running_var", "classifier.2.bias"} <= names
    assert {"classifier.0.convs.3.0.weight", "classifier.0.project.1.weight", "classifier.1.weight"} <= names
    assert [branch[0].dilation[0] for branch in model.aspp.branches] == [1, 12, 24, 36]
    assert model.backbone.get_submodule("layer4.2.conv2").dilation == (4, 4)


def test_imported_models_train(checkpoint: Path) -> None:
    """The head's dropout is on in training and off in evaluation; gradients reach every part."""
    model = evidential_from_softmax(read_deeplab(checkpoint, CLASSES), "exp_sigmoid")
    images, _ = examples("val", 2)
    with torch.no_grad():
        assert torch.equal(model(images).logits, model(images).logits)
    model.train()
    one, two = model(images).logits, model(images).logits
    assert not torch.equal(one, two)
    one.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_an_imported_model_is_extended(checkpoint: Path, tmp_path: Path) -> None:
    from incseg.data.folder import export

    export(SOURCE, tmp_path / "mine")
    start, out = tmp_path / "start", tmp_path / "run"
    assert main(["import", str(checkpoint), "--classes", ",".join(CLASSES), "--out", str(start)]) == 0
    flags = ["--root", str(tmp_path / "mine"), "--classes", "star,cross", "--out", str(out), "--threads", "1"]
    small = (
        "--train.epochs 1 --train.batch_size 2 --train.crop 32 --eval.size 32 --train.workers 0 --eval.workers 0 "
        "--data.train_limit 2 --data.val_limit 2"
    )
    assert main(["extend", str(start), *flags, *small.split()]) == 0
    model = incseg.load(out)
    assert model.classes == ("background", *CLASSES, "star", "cross")
    assert model.model.config.head == "torchvision"
