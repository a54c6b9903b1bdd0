"""Block tables: rows of integers for the blocks of a chunk, and slots of the states of chunks."""

from __future__ import annotations

import numpy as np
import torch

from token2wav.cache.states import SCRATCH_SLOT
from token2wav.execution.block_table import (
    HEADER,
    ChunkPlace,
    Column,
    frame_positions,
    slots_of,
    write_table,
)

BLOCK = 50
# Two blocks of a stream whose window has moved on: the second one no longer sees page 4.
PLACE = ChunkPlace(start=150, length=80, tables=[[2, 3, 4, 5], [2, 3, 5, 6]], slot=7)


def rows_of(place: ChunkPlace) -> np.ndarray:
    rows = np.zeros((len(place.tables), HEADER + 8), np.int32)
    write_table(rows, place, number=1, block=BLOCK)
    return rows


def test_rows_of_a_chunk() -> None:
    rows = rows_of(PLACE)
    assert rows[:, Column.START].tolist() == [150, 200]
    assert rows[:, Column.VALID].tolist() == [50, 30]
    assert rows[:, Column.BEFORE].tolist() == [0, 50]
    assert rows[:, Column.CHUNK].tolist() == [1, 1]
    assert rows[:, Column.LAST].tolist() == [0, 1]
    assert rows[:, Column.NUM_PAGES].tolist() == rows[:, Column.NUM_CAUSAL_PAGES].tolist() == [4, 4]
    assert rows[:, Column.SHARED_PAGES].tolist() == [2, 2]  # 2 and 3
    assert rows[:, HEADER : HEADER + 5].tolist() == [[2, 3, 4, 5, 0], [2, 3, 5, 6, 0]]
    positions = frame_positions(torch.from_numpy(rows), 3)
    assert positions.tolist() == [[150, 151, 152], [200, 201, 202]]


def test_all_blocks_of_a_prompt_see_each_other() -> None:
    """The own page of the first block is in the middle of its list."""
    place = ChunkPlace(0, 100, [[1], [1, 2]], slot=0, prompt_padding=5, full_prompt_attention=True)
    rows = rows_of(place)
    assert rows[:, Column.NUM_CAUSAL_PAGES].tolist() == [1, 2]
    assert rows[:, Column.NUM_PAGES].tolist() == [2, 2]
    assert rows[:, HEADER : HEADER + 2].tolist() == [[1, 2], [1, 2]]
    assert rows[:, Column.PROMPT_PADDING].tolist() == [5, 5]
    assert place.padding == 5
    assert place.scaled(2).padding == 10


def test_states_of_provisional_chunks_are_dropped() -> None:
    provisional = ChunkPlace(0, 10, [[1]], slot=3, provisional=True)
    scratch = SCRATCH_SLOT
    assert slots_of([PLACE, provisional], 3).tolist() == [[7, 3, scratch], [7, scratch, scratch]]
