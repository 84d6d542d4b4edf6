"""The types of the public API, as a type checker sees them. mypy reads this file in `make lint`; nothing runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image
    from typing_extensions import assert_type

    import incseg

    assert_type(incseg.train(data="shapes", train={"lr": 0.1}), incseg.Run)
    assert_type(incseg.extend("x", root="x", out="y", classes=["a"]).table(), str)
    model = incseg.load("x")
    assert_type(model, incseg.Predictor)
    assert_type(model.predict("a.png"), incseg.Result)
    assert_type(model.predict(["a.png"]), list[incseg.Result])
    assert_type(model.predict(Path("x").iterdir()), Iterator[incseg.Result])
    assert_type(model.predict("a.png").overlay(), Image.Image)
    incseg.load(3)  # type: ignore[arg-type]
    incseg.trian  # type: ignore[attr-defined]  # noqa: B018
