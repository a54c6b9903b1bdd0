"""Pictures of attention masks: they show all kinds there are, or those that a model is served with.

Every mask is drawn from the very function that serving uses.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from token2wav.config import StreamConfig, load_server_config
from token2wav.errors import ConfigError, Token2WavError
from token2wav.families import read_config
from token2wav.networks.configs import EstimatorConfig, GuidedAttention
from token2wav.networks.masks import BlockMask, guided_mask
from token2wav_export.errors import MissingPackageError

PROGRAM = "token2wav-masks"

_SIZE = 4  # frames of a block where there is no model
_PROMPT_BLOCKS = 2  # in pictures of windows that keep the prompt
_COLUMNS = 4
_PAPER_DEPTH, _PAPER_BACKWARD = 22, (7, 14)
_PAPER_FORWARD = {"StreamFlow-SR": (1,), "StreamFlow-LR": (1, 22)}

Pictures = dict[str, torch.Tensor]
"""Titles and masks (frames, frames): True where the frame of a row sees that of a column."""


def every_mask(blocks: int) -> tuple[Pictures, int]:
    """Draws up one mask of each kind; returns them and the frames of a block."""
    frames = blocks * _SIZE
    pictures = {
        "full attention: not streaming": torch.ones(frames, frames, dtype=torch.bool),
        "static chunks": BlockMask(_SIZE).whole(frames),
        "2 left chunks": BlockMask(_SIZE, left_blocks=2).whole(frames),
        f"2 left chunks and a prompt of {_PROMPT_BLOCKS}": BlockMask(_SIZE, 2, _PROMPT_BLOCKS).whole(frames),
        "chunks of twice the size": BlockMask(2 * _SIZE).whole(frames),
        "guided: block": guided_mask("block", frames, _SIZE),
        "guided: backward": guided_mask("backward", frames, _SIZE),
        "guided: forward": guided_mask("forward", frames, _SIZE),
    }
    for name, forward in _PAPER_FORWARD.items():
        attention = GuidedAttention.assigned(_PAPER_DEPTH, _PAPER_BACKWARD, forward)
        pictures[f"{name}: all {_PAPER_DEPTH} layers"] = dependence(attention, frames, _SIZE)
    return pictures, _SIZE


def masks_of(estimator: EstimatorConfig, stream: StreamConfig, blocks: int) -> tuple[Pictures, int]:
    """Draws up the masks that a model is served with; returns them and the frames of a block."""
    size = estimator.static_chunk_size
    frames = blocks * size
    if estimator.guided is None:
        left_blocks = -1 if stream.left_blocks is None else stream.left_blocks
        kept = _PROMPT_BLOCKS if left_blocks >= 0 else 0
        prompt = f", a prompt of {kept} blocks" if kept else ""
        return {
            f"streaming{prompt}": BlockMask(size, left_blocks, kept).whole(frames),
            "full: not streaming": torch.ones(frames, frames, dtype=torch.bool),
        }, size
    pictures: Pictures = {}
    for mask in sorted(set(estimator.guided.layers)):
        layers = [number for number, own in enumerate(estimator.guided.layers, start=1) if own == mask]
        pictures[f"{mask}: {_shortened(layers)}"] = guided_mask(mask, frames, size)
    pictures["all layers: one evaluation"] = dependence(estimator.guided, frames, size)
    return pictures, size


def dependence(attention: GuidedAttention, frames: int, block_frames: int) -> torch.Tensor:
    """Computes which input frames (columns) the output of all layers at a frame (rows) depends on."""
    reached = torch.eye(frames)
    for mask in attention.layers:
        reached = (guided_mask(mask, frames, block_frames).float() @ reached).clamp(max=1)
    return reached.bool()


def draw(pictures: Pictures, block_frames: int, path: Path) -> None:
    """Writes all masks side by side, with lines between blocks.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("matplotlib is not installed; run: pip install 'token2wav[masks]'")
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(pictures))
    rows = -(-len(pictures) // columns)
    figure = Figure(figsize=(3.1 * columns, 3.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes[len(pictures) :]:
        axis.remove()
    for axis, (title, mask) in zip(axes, pictures.items(), strict=False):
        axis.imshow(mask.numpy(), cmap="Blues", vmin=0, vmax=1.6, interpolation="nearest")
        edges = [edge - 0.5 for edge in range(0, len(mask) + 1, block_frames)]
        axis.set_xticks(edges, labels=[])
        axis.set_yticks(edges, labels=[])
        axis.grid(color="grey", linewidth=0.5)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("sees frame", fontsize=9)
        axis.set_ylabel("frame", fontsize=9)
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        stream = load_server_config(options.config).stream
        if options.model is None:
            pictures, size = every_mask(options.blocks)
        else:
            estimator = getattr(read_config(options.model).part("flow"), "estimator", None)
            if not isinstance(estimator, EstimatorConfig):
                raise ConfigError(f"{options.model}: masks are drawn of flows of CosyVoice3 and StreamFlow only")
            pictures, size = masks_of(estimator, stream, options.blocks)
        draw(pictures, size, options.save)
    except (Token2WavError, OSError, ValueError) as error:  # matplotlib raises the last for an unknown kind of file
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _shortened(layers: list[int]) -> str:
    """Shortens a list to "layers 1, 7"; those of a long one are counted."""
    if len(layers) > 4:
        return f"{len(layers)} other layers"
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--save", type=Path, required=True, metavar="PNG", help="where the picture goes; also .pdf, .svg"
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="draw those of a model; weights are not needed")
    parser.add_argument("--config", type=Path, metavar="YAML", help="settings that the server has, with --model")
    parser.add_argument("--blocks", type=_blocks, default=8, metavar="N", help="to draw (default: %(default)s)")
    return parser


def _blocks(text: str) -> int:
    if text.isdecimal() and 2 <= int(text) <= 40:
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text}' is not a number from 2 to 40")


if __name__ == "__main__":
    sys.exit(main())
