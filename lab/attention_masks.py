"""Pictures of attention masks: this program draws all kinds of masks, or the masks of one model.

    python -m lab.attention_masks --save masks.png --model path/to/model --config server.yaml

Every mask comes from the function that the server uses. The program needs matplotlib, but not the
weights of the model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

from token2wav.config import load_server_config
from token2wav.config.block_grid import BlockGrid
from token2wav.config.values import number
from token2wav.errors import ConfigError, Token2WavError
from token2wav.networks.masks import block_mask, guided_mask
from token2wav.published.registry import read_config
from token2wav.published.sizes import EstimatorConfig, GuidedAttention

SIZE = 4  # frames of a block, without a model
PROMPT_BLOCKS = 2  # in pictures of windows that keep the prompt

# Masks (frames, frames) by title. An element is True if the frame of its row attends to the frame
# of its column.
Pictures = dict[str, torch.Tensor]


def every_mask(blocks: int) -> Pictures:
    """Computes one mask of each kind, in blocks of `SIZE` frames."""
    frames = blocks * SIZE
    pictures = {
        "full attention: not streaming": torch.ones(frames, frames, dtype=torch.bool),
        "static chunks": block_mask(BlockGrid(SIZE), frames),
        "2 left chunks": block_mask(BlockGrid(SIZE, left_blocks=2), frames),
        f"2 left chunks and a prompt of {PROMPT_BLOCKS}": block_mask(
            BlockGrid(SIZE, prefix=SIZE * PROMPT_BLOCKS, left_blocks=2), frames
        ),
        "chunks of twice the size": block_mask(BlockGrid(2 * SIZE), frames),
        "guided: block": guided_mask("block", frames, SIZE),
        "guided: backward": guided_mask("backward", frames, SIZE),
        "guided: forward": guided_mask("forward", frames, SIZE),
    }
    for name, forward in {"StreamFlow-SR": (1,), "StreamFlow-LR": (1, 22)}.items():
        attention = GuidedAttention.assigned(22, (7, 14), forward)  # as published
        pictures[f"{name}: all 22 layers"] = dependence(attention, frames, SIZE)
    return pictures


def masks_of(estimator: EstimatorConfig, left_blocks: int, blocks: int) -> Pictures:
    """Computes the masks that the server uses for a model, in blocks of the model's own size."""
    size, guided = estimator.static_chunk_size, estimator.guided
    frames = blocks * size
    if guided is None:
        prompt_blocks = PROMPT_BLOCKS if left_blocks >= 0 else 0
        grid = BlockGrid(size, prefix=size * prompt_blocks, left_blocks=left_blocks)
        title = f"streaming, a prompt of {prompt_blocks} blocks" if prompt_blocks else "streaming"
        return {title: block_mask(grid, frames)}
    counts = {mask: guided.layers.count(mask) for mask in sorted(set(guided.layers))}
    pictures = {
        f"{mask}: {count} of the layers": guided_mask(mask, frames, size)
        for mask, count in counts.items()
    }
    return pictures | {"all layers: one evaluation": dependence(guided, frames, size)}


def dependence(attention: GuidedAttention, frames: int, block_frames: int) -> torch.Tensor:
    """Computes the input frames (columns) that the output at a frame (rows) depends on."""
    reached = torch.eye(frames)
    for mask in attention.layers:
        reached = (guided_mask(mask, frames, block_frames).float() @ reached).clamp(max=1)
    return reached.bool()


def draw(pictures: Pictures, block_frames: int, path: Path) -> None:
    """Writes all masks side by side, with lines between blocks."""
    columns = min(4, len(pictures))
    rows = -(-len(pictures) // columns)
    figure = Figure(figsize=(3.1 * columns, 3.4 * rows), layout="constrained")
    for position, (title, mask) in enumerate(pictures.items(), start=1):
        axis = figure.add_subplot(
            rows, columns, position, title=title, xlabel="sees frame", ylabel="frame"
        )
        axis.imshow(mask.numpy(), cmap="Blues", vmin=0, vmax=1.6, interpolation="nearest")
        edges = [edge - 0.5 for edge in range(0, len(mask) + 1, block_frames)]
        axis.set_xticks(edges, labels=[])
        axis.set_yticks(edges, labels=[])
        axis.grid(color="grey", linewidth=0.5)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Runs the program; exits with status 1 and a message if a mask cannot be drawn."""
    parser = argparse.ArgumentParser(
        description="Draw attention masks: all kinds, or the masks of one model."
    )
    parser.add_argument(
        "--save",
        type=Path,
        required=True,
        metavar="PNG",
        help="picture file to write: .png, .pdf or .svg",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="model folder; all kinds of masks are drawn if it is absent",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="YAML",
        help="settings file of the server, for use with --model",
    )
    parser.add_argument(
        "--blocks", type=number(int, 2, 40), default=8, metavar="N", help="default: %(default)s"
    )
    options = parser.parse_args()
    try:
        if options.model is None:
            return draw(every_mask(options.blocks), SIZE, options.save)
        config = read_config(options.model)
        estimator = getattr(config.stage_config("flow"), "estimator", None)
        if not isinstance(estimator, EstimatorConfig):
            raise ConfigError(
                f"{options.model}: only the masks of CosyVoice3 and StreamFlow flows can be drawn"
            )
        left_blocks = config.window(load_server_config(options.config).stream)
        draw(
            masks_of(estimator, left_blocks, options.blocks),
            estimator.static_chunk_size,
            options.save,
        )
    # matplotlib raises ValueError for an unknown file type
    except (Token2WavError, OSError, ValueError) as error:
        sys.exit(f"attention_masks: {error}")


if __name__ == "__main__":
    main()
