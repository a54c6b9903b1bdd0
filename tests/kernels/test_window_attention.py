"""Attention over rings on its kernel equals that of torch, and codecs stream on it."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from testkit.batches import spoken_together
from testkit.models.codec_models import drawn_tokens
from testkit.models.folders import write_folder
from tests.kernels.conftest import on_kernels
from token2wav import RuntimeConfig, Token2Wav
from token2wav.cache.states import StateStore
from token2wav.kernels import window_attention as kernel
from token2wav.layers.combine import placed
from token2wav.layers.streaming import StreamStep, state_specs
from token2wav.layers.window_attention import (
    PositionCounter,
    WindowAttention,
    ring_length,
    rotary_angles,
)
from token2wav.stages.stage import as_frames
from token2wav.voice import voice_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Results near 1 are sums in other orders, of weights that another function has rounded. A GPU
# multiplies float32 as three products of TF32.
CLOSE = 2e-6 if DEVICE.type == "cpu" else 1e-5
CLOSE_AUDIO = 1e-5 if DEVICE.type == "cpu" else 5e-5  # relative to the spread
# Streams of each step, and its positions. The streams have different ages, windows fill, rings
# come round, and a step has several parts.
STEPS = [
    ("A", 1),
    ("BC", 40),
    ("A", 2),
    ("CAB", 1),
    ("CAB", 7),
    ("BA", 70),
    ("ACB", 32),
    ("B", 33),
    ("ABC", 1),
    ("CAB", 40),
]
FAR_STEP = 9  # before which the streams move to positions of more than 32 bits


class Layer(nn.Module):
    """Two attention layers, without projections."""

    def __init__(self, heads: int, dim: int, window: int) -> None:
        super().__init__()
        self.positions, self.dim = PositionCounter(window), dim
        self.layers = nn.ModuleList(WindowAttention(heads, dim, window) for _ in range(2))
        placed((self.positions, *self.layers))

    def forward(self, inputs: Any, step: StreamStep) -> list[torch.Tensor]:
        positions = self.positions(inputs[0][0], self.layers[0], step)
        angles = rotary_angles(positions.values, self.dim, 100.0)
        return [
            layer(*qkv, positions, angles, step)
            for layer, qkv in zip(self.layers, inputs, strict=True)
        ]


class Streams:
    """Streams of a layer, with their states in a store that grows."""

    def __init__(self, layer: Layer, *, on_kernel: bool) -> None:
        for attention in layer.layers:
            attention.state_kernel = kernel.window_attention if on_kernel else None  # type: ignore[assignment]
        self.layer = layer
        self.store = StateStore({"layer": state_specs(layer)}, DEVICE, 2, in_place=on_kernel)
        self.slots: dict[str, int] = {}

    def move(self, window: int) -> None:
        """Moves the streams on, by whole rounds of their rings. Empty slots then hold zeros."""
        ring = ring_length(window)
        slots = torch.tensor([*self.slots.values()], device=DEVICE)
        rows = self.store.rows("layer", len(slots))
        self.store.read(slots, rows)
        rows.views[self.layer.positions] += ring * (2**33 // ring)
        in_place = (states.values() for states in self.store._slot_states.values())
        for state in (*rows.views.values(), *chain(*in_place)):
            torch.nan_to_num_(state)
        self.store.write(slots, rows)

    def advance(self, names: str, inputs: Any) -> list[torch.Tensor]:
        first = names[0] not in self.slots
        for name in names if first else "":
            self.slots[name] = self.store.take()
            for state in self.store._slot_states[self.slots[name]].values():
                state.fill_(torch.nan)
        slots = [self.slots[name] for name in names]
        rows, where = self.store.rows("layer", len(slots)), torch.tensor(slots, device=DEVICE)
        self.store.read(where, rows)
        offsets = torch.tensor(self.store.offsets(slots), device=DEVICE)
        states = self.store.states_of(slots, offsets, rows)
        results = self.layer(inputs, StreamStep(states, first=first))
        self.store.write(where, rows)
        return results


# Weights near equal, near one-hot, and between. Scores are 1e30 at most.
@pytest.mark.parametrize("size", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize(
    ("heads", "shared", "dim", "window"),
    [(3, 1, 4, 5), (2, 2, 64, 72), (1, 3, 24, 250), (1, 1, 130, 40)],
)
def test_streams(heads: int, shared: int, dim: int, window: int, size: float) -> None:
    reference, streams = (
        Streams(Layer(heads, dim, window), on_kernel=on_kernel) for on_kernel in (False, True)
    )
    for number, (names, positions) in enumerate(STEPS):
        if number == FAR_STEP:
            for each in (reference, streams):
                each.move(window)
        shape = 2, 3, len(names), positions, heads, dim
        inputs = torch.randn(shape, device=DEVICE)
        inputs[:, :2] *= size
        q = size * torch.randn(2, *shape[2:4], heads * shared, dim, device=DEVICE)
        qkv = [(q[layer], *inputs[layer, 1:]) for layer in range(2)]
        for result, expected in zip(
            *(each.advance(names, qkv) for each in (streams, reference)), strict=True
        ):
            torch.testing.assert_close(result, expected, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("codec", ["moss", "lfm2_audio", "audex"])
def test_codecs_stream_on_the_kernel(
    codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Utterances of different lengths and ages share batches, and slots are used again."""
    runtime, folder = RuntimeConfig(device=DEVICE.type), write_folder(codec, tmp_path)
    launched: list[torch.Size] = []

    def counted(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        launched.append(q.shape)
        return window_attention(q, *rest)

    window_attention = kernel.window_attention
    monkeypatch.setattr(kernel, "window_attention", counted)
    on_kernels(monkeypatch)
    model = Token2Wav.load(folder, runtime=runtime, streams=2)
    utterances = [drawn_tokens(model.config, count) for count in (40, 25, 9, 1)]
    nobody, [decoder] = voice_for(model.config, None), model.pipeline.stages.values()
    checked = [(nobody, model.config.tokens.checked(tokens), 0) for tokens in utterances]
    for _ in range(2):
        audio = spoken_together(model.pipeline, checked, 1)
        assert launched
        for tokens, result in zip(utterances, audio, strict=True):
            whole = decoder.whole(as_frames(tokens)).cpu().numpy()  # type: ignore[attr-defined]
            assert abs(result - whole).max() <= CLOSE_AUDIO * whole.std()
