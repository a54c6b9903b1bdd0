"""Pictures of the lab, as small PNG files."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image


def save_picture(figure: Figure, path: Path, dpi: int) -> None:
    """Writes a figure as a PNG file with 64 colours, a third of the size of all colours.

    Args:
        dpi: pixels for each inch of the figure.
    """
    png = BytesIO()
    figure.savefig(png, dpi=dpi)
    picture = Image.open(png).convert("RGB")
    picture.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
