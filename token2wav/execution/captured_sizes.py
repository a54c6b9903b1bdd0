"""Batch sizes that CUDA graphs are captured for. A batch runs in the next larger size, and a batch
above the largest size is split.
"""

from __future__ import annotations

# Batches of the flow and the encoder on kernels, in blocks.
CAPTURED_BLOCKS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
# Largest batch of the flow with one CUDA graph for all ODE steps, in blocks. A larger batch has one
# for each step, so that a first chunk need not wait for the whole batch.
ONE_GRAPH_BLOCKS = 16
# Past pages of a block: room for a history of 34 minutes, in one width for all graphs. Kernels read
# only the pages of a block. So unused room costs 8 KB for each of the 423 rows, and a copy of at
# most 1 MB for each batch.
PAST_PAGES = 2047
# Largest batch of provisional chunks, in blocks. It is small, because the number of streams with
# such chunks is limited.
PROVISIONAL_BLOCKS = 32
# Batches of a flow or a codec that computes windows, in windows.
CAPTURED_WINDOWS = (1, 2, 4, 8, 16, 32)
# Longest window of a codec that is captured, in frames. One activation of NeuCodec (4,096 channels)
# has 157 MB in a batch of 32 such windows, and would have 16 GB in one of 32 windows of 10 minutes.
CAPTURED_WINDOW_FRAMES = 300
# Largest batch of a vocoder or a codec decoder on torch, in streams.
CAPTURED_STREAMS = 64
