"""Scores that follow the edges of the image: identities, a naive reference, and every way to predict."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from incseg.engine.runtime import Runtime
from incseg.inference import predictor_of
from incseg.models.segmenter import ModelConfig, Segmenter
from incseg.models.sharpen import guide_of, sharpened
from incseg.types import Increment, UserError

CONFIG = ModelConfig("tiny", output_stride=16, width=16, dilations=(1, 2, 3), sharpen=3)


def model_of(config: ModelConfig = CONFIG, classes: int = 3) -> Segmenter:
    torch.manual_seed(0)
    model = Segmenter(config, background_output=False)
    model.grow(Increment(tuple(f"class{i}" for i in range(classes)), tuple(range(1, classes + 1))))
    torch.nn.init.normal_(model.classifiers[0].get_parameter("weight"))
    return model.eval()


def pixels(height: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(seed))


def naive_round(scores: np.ndarray, guide: np.ndarray, axis: int) -> np.ndarray:
    """Return one pass along an axis, position by position: reach 3, deviations 1.8 positions and 0.04 of colour."""
    found = np.zeros_like(scores)
    _, height, width = scores.shape
    for y in range(height):
        for x in range(width):
            total, norm = np.zeros(len(scores)), 0.0
            for offset in range(-3, 4):
                other_y = min(max(y + (offset if axis == 1 else 0), 0), height - 1)
                other_x = min(max(x + (offset if axis == 2 else 0), 0), width - 1)
                colour = ((guide[:, other_y, other_x] - guide[:, y, x]) ** 2).sum()
                weight = math.exp(-colour / (2 * 0.04**2) - offset**2 / (2 * 1.8**2))
                total += weight * scores[:, other_y, other_x]
                norm += weight
            found[:, y, x] = total / norm
    return found


def test_it_is_the_bilateral_filter_of_a_naive_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 2, 3, 4, generator=generator, dtype=torch.float64)
    guide = 0.1 * torch.rand(1, 3, 9, 11, generator=generator, dtype=torch.float64)
    wanted = F.interpolate(scores, (9, 11), mode="bilinear")[0].numpy()
    for _ in range(2):
        wanted = naive_round(naive_round(wanted, guide[0].numpy(), 2), guide[0].numpy(), 1)
    torch.testing.assert_close(sharpened(scores, guide, 2)[0], torch.from_numpy(wanted))


def test_without_rounds_it_interpolates() -> None:
    scores, guide = torch.randn(2, 3, 4, 5), torch.rand(2, 3, 16, 20)
    assert torch.equal(sharpened(scores, guide, 0), F.interpolate(scores, (16, 20), mode="bilinear"))


def test_every_class_is_filtered_by_itself_and_sums_do_not_change() -> None:
    guide = torch.rand(1, 3, 16, 20)
    probabilities = torch.randn(1, 4, 4, 5).softmax(1)
    refined = sharpened(probabilities, guide, 4)
    assert torch.allclose(refined.sum(1), torch.ones(1, 16, 20), atol=1e-5)
    assert bool((refined >= 0).all())
    assert torch.equal(sharpened(probabilities[:, :2], guide, 4), refined[:, :2])


def test_an_edge_moves_to_the_edge_of_the_image() -> None:
    """The scores change sign at column 12 of 32, the colour of the image at column 16."""
    guide = torch.zeros(1, 3, 16, 32)
    guide[..., 16:] = 1.0
    scores = (torch.arange(8) - 2.7).view(1, 1, 1, 8).expand(1, 1, 4, 8)
    plain, found = sharpened(scores, guide, 0), sharpened(scores, guide, 8)
    assert bool((plain[..., 14:16] > 0).all())
    jump = found[..., 16] - found[..., 15]
    assert bool((jump > 3 * (plain[..., 16] - plain[..., 15])).all())


def test_scores_of_images_and_of_their_features_are_the_same() -> None:
    model, images = model_of(), pixels(50, 70)
    scores = model.scores(images)
    assert scores.shape[-2:] == (13, 18)
    torch.testing.assert_close(model.scores(model.features(images)), scores)
    assert model(images).logits.shape[-2:] == (4, 5), "training sees the network's own grid"
    plain = model_of(dataclasses.replace(CONFIG, sharpen=0))
    torch.testing.assert_close(plain(images).logits, model(images).logits)
    assert torch.equal(plain.scores(images), plain(images).logits)


def test_new_classes_change_no_score_of_the_old() -> None:
    """Classes with a head of their own; tests/test_analytic.py tests those of a closed form."""
    model, images = model_of(), pixels(64, 96)
    before = model.scores(images)
    model.grow(Increment(("own",), (4,), head=1))
    assert torch.equal(model.eval().scores(images)[:, :3], before)


def test_heads_that_see_images_of_different_sizes_meet_on_the_finest_grid() -> None:
    model = model_of()
    model.enlarge(2)
    model.grow(Increment(("own",), (4,), head=1))
    large = pixels(128, 192)
    scores = model.eval().scores(large)
    assert scores.shape == (1, 4, 32, 48)
    assert model.stride == 4
    small = model_of().scores(F.avg_pool2d(large, 2))
    torch.testing.assert_close(scores[:, :3], F.interpolate(small, (32, 48), mode="bilinear"))


def test_tiles_join_without_seams() -> None:
    model = model_of()
    about = {"method": {"name": "evidential"}, "test_size": 0}
    predictor = predictor_of(model, about, Runtime("cpu", threads=1), __file__, None)  # type: ignore[arg-type]
    noise = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((480, 320), Image.Resampling.BICUBIC)
    whole, tiled = (predictor._logits(image, tile) for tile in (1536, 256))
    assert tiled.shape == whole.shape == (1, 3, 80, 120)
    # the mean over the image is that of a tile; what a seam would add is a jump between neighbours
    jumps = (tiled[..., 1:] - tiled[..., :-1]).abs().amax((0, 1, 2))
    assert float(jumps.max()) < 2 * float((whole[..., 1:] - whole[..., :-1]).abs().max())


def test_the_guide_is_the_mean_colour_of_each_position() -> None:
    image = torch.rand(1, 3, 9, 6)
    guide = guide_of(image)
    assert guide.shape == (1, 3, 3, 2)
    assert torch.allclose(guide[0, :, 0, 0], image[0, :, :4, :4].mean((1, 2)))
    assert torch.allclose(guide[0, :, 2, 1], image[0, :, 8:, 4:].mean((1, 2)))


def test_impossible_numbers_of_rounds_are_refused() -> None:
    with pytest.raises(UserError, match=r"model.sharpen is 21; give a number of rounds from 0 to 20"):
        dataclasses.replace(CONFIG, sharpen=21)
