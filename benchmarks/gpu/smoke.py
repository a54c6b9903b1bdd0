"""Section smoke: the most important facts about a GPU, in one minute.

The full model is loaded once with CUDA graphs. First chunks of one stream are timed. Captured
chunks are compared with a model in float32 without graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks.chunk_batch import chunk, chunk_key
from benchmarks.gpu.chunks import load
from benchmarks.gpu.parity import MEL, check, reference
from benchmarks.gpu.settings import Row, Rows, Settings
from token2wav import Token2Wav


def smoke(folder: Path, settings: Settings, done: Mapping[str, Row]) -> Rows:
    """Measures loading, the first chunk of one stream, and its error against float32."""
    model, loaded = load(folder, settings)
    hop = settings.hops[0]
    yield "the model", lambda: loaded
    yield (
        chunk_key(1, hop, 0.0),
        partial(chunk, model, settings.repeats, 1, hop, 0.0, settings.repeat_s),
    )
    yield "one stream against float32 without graphs", partial(_agreement, model, folder, settings)


def _agreement(model: Token2Wav, folder: Path, settings: Settings) -> Row:
    return check(model, 1, reference(folder, settings, 1), MEL[model.summary.precision])
