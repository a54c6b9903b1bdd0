"""CUDA graphs of the whole ODE loop on Triton-language kernels (`fused_steps.py`), for every size of batch."""

from __future__ import annotations

from token2wav.engines.cuda_graphs import GraphPool
from token2wav.engines.fused_steps import FusedEstimator, FusedSteps
from token2wav.engines.packed import Batch, BatchShape
from token2wav.engines.packed_solver import PackedChunkSolver, Steps
from token2wav.engines.paged_batch import PagedBatch, room_for_contexts
from token2wav.flow.cache import KeyValueStore
from token2wav.flow.flow import Flow
from token2wav.flow.solver import OdeTables

# A batch runs in the next larger of these and larger batches in parts: at most half of a graph's rows are padding.
_STREAMS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
# Pages that a table has room for, 8.5 minutes with all history: room costs nothing, since kernels read what is there.
_PAST = 512


def fused_solver(
    flow: Flow,
    tables: OdeTables,
    store: KeyValueStore,
    left_blocks: int,
    longest_hop: int,
    graphs: GraphPool | None,
) -> PackedChunkSolver:
    """A solver of chunks on kernels, whose shapes are captured where the device can.

    Args:
        flow: on the device.
        tables: of the schedule.
        store: memory of all pages.
        left_blocks, longest_hop: see `CachedFlowEngine`.
        graphs: where shapes are captured; None runs without.
    """
    device, config = flow.spk_embed_affine_layer.weight.device, flow.config.estimator
    shared = FusedEstimator(flow.estimator, tables, store, left_blocks)

    longest = longest_hop // flow.config.block_tokens
    # A first chunk has up to two blocks of the prompt beside its hop, a last one the look-ahead.
    blocks = sorted({1, 2, 4, longest, longest + 2})
    shapes = [BatchShape(streams, new, _PAST) for streams in _STREAMS for new in blocks] if graphs else []
    # Batches run one at a time, so all that are prepared share what is large: 10 MB a stream of the public model.
    shared_contexts = room_for_contexts(max(_STREAMS) if graphs else 0, config, store.layout, device)

    def prepare(shape: BatchShape) -> tuple[Batch, Steps]:
        contexts = shared_contexts
        if shape.streams > contexts.shape[1]:
            contexts = room_for_contexts(shape.streams, config, store.layout, device)
        batch = PagedBatch(shape, config, store.layout, contexts)
        return batch, FusedSteps(batch, shared)

    return PackedChunkSolver(prepare, tables, shapes=shapes, graphs=graphs, apart=True)
