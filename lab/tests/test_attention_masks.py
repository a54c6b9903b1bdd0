"""Pictures of attention masks: each frame of the drawn masks, and the files that are written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab import attention_masks as masks
from testkit.models.golden import TINY
from token2wav.published.registry import read_config
from token2wav.published.sizes import GuidedAttention

BLOCK_FRAMES = 12
# First and last block that a frame of block q sees, in a sequence of n blocks.
VISIBLE_BLOCKS = {
    "full attention: not streaming": lambda q, n: (0, n - 1),
    "static chunks": lambda q, n: (0, q),
    "2 left chunks": lambda q, n: (max(0, q - 2), q),
    "chunks of twice the size": lambda q, n: (0, q // 2 * 2 + 1),
    "guided: block": lambda q, n: (q, q),
    "guided: backward": lambda q, n: (max(0, q - 1), q),
    "guided: forward": lambda q, n: (q, min(n - 1, q + 1)),
    "StreamFlow-SR: all 22 layers": lambda q, n: (max(0, q - 2), min(n - 1, q + 1)),
    "StreamFlow-LR: all 22 layers": lambda q, n: (max(0, q - 2), min(n - 1, q + 2)),
}


def by_hand(seen: object, blocks: int, size: int) -> torch.Tensor:
    mask = torch.zeros(blocks * size, blocks * size, dtype=torch.bool)
    for row in range(blocks * size):
        first, last = seen(row // size, blocks)  # type: ignore[operator]
        mask[row, first * size : (last + 1) * size] = True
    return mask


def test_every_mask_frame_by_frame() -> None:
    pictures, size = masks.every_mask(8), masks.SIZE
    for title, seen in VISIBLE_BLOCKS.items():
        assert torch.equal(pictures.pop(title), by_hand(seen, 8, size)), title
    [(title, mask)] = pictures.items()
    assert title == "2 left chunks and a prompt of 2"
    expected = by_hand(VISIBLE_BLOCKS["2 left chunks"], 8, size)
    for row in range(2 * size, 8 * size):
        expected[row, : 2 * size] = True
    assert torch.equal(mask, expected)


def test_masks_equal_the_masks_of_the_served_model() -> None:
    estimator = read_config(TINY).stage_config("flow").estimator
    pictures = masks.masks_of(estimator, -1, 4)
    assert torch.equal(pictures["streaming"], by_hand(lambda q, n: (0, q), 4, 50))
    pictures = masks.masks_of(estimator, 0, 4)
    assert pictures["streaming, a prompt of 2 blocks"][-1].nonzero().flatten().tolist() == [
        *range(100),
        *range(150, 200),
    ]


def test_masks_of_guided_attention_count_their_layers() -> None:
    estimator = replace(
        read_config(TINY).stage_config("flow").estimator,
        depth=8,
        static_chunk_size=BLOCK_FRAMES,
        guided=GuidedAttention.assigned(8, (2, 4), (1,)),
    )
    pictures = masks.masks_of(estimator, -1, 6)
    assert list(pictures) == [
        "backward: 2 of the layers",
        "block: 5 of the layers",
        "forward: 1 of the layers",
        "all layers: one evaluation",
    ]
    reach = by_hand(lambda q, n: (max(0, q - 2), min(n - 1, q + 1)), 6, BLOCK_FRAMES)
    assert torch.equal(pictures["all layers: one evaluation"], reach)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["attention_masks.py", *map(str, arguments)])
    masks.main()


def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, arguments in {"all.png": [], "tiny.png": ["--model", TINY, "--blocks", 4]}.items():
        run(monkeypatch, *arguments, "--save", tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    for arguments, words in (
        (["--model", tmp_path], "not a model folder"),
        (["--model", TINY, "--config", tmp_path / "none.yaml"], "cannot be read"),
        (["--save", tmp_path / "none" / "x.png"], "none"),
    ):
        with pytest.raises(SystemExit, match=f"attention_masks: .*{words}"):
            run(monkeypatch, "--save", tmp_path / "x.png", *arguments)
