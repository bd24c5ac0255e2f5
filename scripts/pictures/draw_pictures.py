"""Draw the pictures that explain the course, into docs/images. Each is computed by the code that it explains.

python scripts/pictures/draw_pictures.py                      draws all
python scripts/pictures/draw_pictures.py --only causal-mask   draws one
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import common_pictures

from common.errors import UsageError
from common.launch.command_line import Checked, parse
from common.launch.program import run_program

import dp_pictures
import ep_pictures
import hybrid_pictures
import pp_pictures
import sp_pictures
import tp_pictures

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PICTURES = {
    **common_pictures.PICTURES,
    **dp_pictures.PICTURES,
    **pp_pictures.PICTURES,
    **tp_pictures.PICTURES,
    **sp_pictures.PICTURES,
    **ep_pictures.PICTURES,
    **hybrid_pictures.PICTURES,
}


@dataclass
class DrawOptions(Checked):
    """Options: the pictures to draw."""

    only: tuple[str, ...] = ()
    """Names of pictures; default: all."""
    output: Path = IMAGES
    """Folder for the files NAME.svg."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.only:
            if name not in PICTURES:
                raise UsageError(f"no picture is named {name!r}; choose from {', '.join(PICTURES)}")


def main() -> int:
    """Draw; return the exit status."""
    o = parse(DrawOptions, __doc__)
    for name in o.only or PICTURES:
        PICTURES[name](o.output / f"{name}.svg")
    return 0


if __name__ == "__main__":
    run_program(main)
