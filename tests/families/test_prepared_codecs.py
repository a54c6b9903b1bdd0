"""Codecs in batches of prepared shapes, as a GPU runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.codec_models import WRITERS, drawn_tokens
from tests.support.family_golden import FamilyGolden
from tests.support.utterances import chunks_of, off, portions
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.execution.stages import FrameChunk
from token2wav.execution.vocoder import PieceInput, StreamingVocoder, likely_pieces

PARITY = 1e-5  # of the spread of the audio


@pytest.mark.parametrize("family", ["mimi", "moss", "qwen3_tts"])
def test_prepared_batches_equal_the_whole(family: str, tmp_path: Path) -> None:
    """A GPU keeps states in rows, and runs 3 streams in a batch that was prepared for 4."""
    model = Token2Wav.load(
        WRITERS[family](tmp_path, FamilyGolden(family, "tiny")), runtime=RuntimeConfig(device="cpu")
    )
    config = model.config
    [decoder] = model.pipeline.stages.values()
    network = decoder._frames._net  # type: ignore[attr-defined]
    shapes = likely_pieces(network, config, config.hops(StreamConfig()), 4)
    engine = StreamingVocoder(network, None, shapes=shapes)
    assert not engine.store._in_place
    frames = [
        torch.from_numpy(drawn_tokens(config, 33 + index)[:33]).float().T for index in range(3)
    ]
    audio: list[list[torch.Tensor]] = [[] for _ in frames]
    for _ in range(2):  # the second time in slots with the states of earlier streams
        handles, at = [engine.open() for _ in frames], 0
        audio = [[] for _ in frames]
        for length in (1, 2, 4, 8, 16, 2):
            last = at + length == 33
            batch = [FrameChunk(each[:, at : at + length], last) for each in frames]
            for parts, new in zip(
                audio, engine.advance(list(zip(handles, batch, strict=True))), strict=True
            ):
                parts.append(new)
            at += length
        for handle in handles:
            engine.close(handle)
    for given, parts in zip(frames, audio, strict=True):
        whole = engine.whole(given)
        assert off(torch.cat(parts), whole) <= PARITY * float(whole.std())


@pytest.mark.parametrize("hold_frames", [None, 0], ids=["default", "exact"])
@pytest.mark.parametrize("family", WRITERS)
def test_every_chunk_is_made_up_of_prepared_shapes(
    family: str, hold_frames: int | None, tmp_path: Path
) -> None:
    """Also the audio of a chunk that is sent early. So a GPU has a graph for every hop."""
    stream = StreamConfig(hold_frames=hold_frames)
    folder = WRITERS[family](tmp_path, FamilyGolden(family, "tiny"))
    model = Token2Wav.load(folder, stream=stream, runtime=RuntimeConfig(device="cpu"))
    config = model.config
    [decoder] = model.pipeline.stages.values()
    network = decoder._frames._net  # type: ignore[attr-defined]
    shapes = likely_pieces(network, config, config.hops(stream), 1)
    held = config.held_frames(stream)
    engine = decoder._frames = StreamingVocoder(network, shapes=shapes, hold_frames=held)  # type: ignore[attr-defined]
    prepared = set(engine._pieces._buckets)  # type: ignore[attr-defined]
    run, ran = engine._pieces.run, set[tuple[bool, bool, int]]()

    def recorded(items: list[PieceInput]) -> list[torch.Tensor]:
        ran.update((item.shape.first, item.shape.inside, item.shape.frames) for item in items)
        return run(items)

    engine._pieces.run = recorded  # type: ignore[method-assign,assignment]
    for sizes in ([1], [7], [3, 40, 1], [200]):
        chunks_of(model, portions(drawn_tokens(config, 130), sizes))
    assert ran <= {(shape.first, shape.inside, shape.frames) for shape in prepared}
