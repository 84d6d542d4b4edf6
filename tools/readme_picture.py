"""Make README's first picture from what `make demo` wrote: photographs with the ready model, and an added class."""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

SHOWN = (("before", "chelsea"), ("before", "astronaut"), ("before", "coffee"), ("after", "coffee"))
HEIGHT, GAP = 300, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"), help="what make demo wrote")
    parser.add_argument("--out", type=Path, default=Path("docs/images/photographs.jpg"))
    args = parser.parse_args()
    panels = [Image.open(args.demo / folder / f"{name}_overlay.png").convert("RGB") for folder, name in SHOWN]
    panels = [panel.resize((round(panel.width * HEIGHT / panel.height), HEIGHT)) for panel in panels]
    width = sum(panel.width for panel in panels) + GAP * (len(panels) - 1)
    picture, left = Image.new("RGB", (width, HEIGHT), "white"), 0
    for panel in panels:
        picture.paste(panel, (left, 0))
        left += panel.width + GAP
    picture.save(args.out, quality=88)
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
