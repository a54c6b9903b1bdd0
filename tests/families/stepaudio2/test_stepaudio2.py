"""Step-Audio2 in the library: the published window.

`test_public_mels.py` compares its mel with the public code. `test_streams.py` tests its streams.
"""

from __future__ import annotations

from pathlib import Path

from testkit.batches import WHOLE_BLOCKS
from testkit.models.folders import CPU, golden_of, write_folder
from testkit.models.stepaudio2_model import write_yaml
from testkit.utterances import a_voice, off, some_tokens
from token2wav import StreamConfig, Token2Wav
from token2wav.families.stepaudio2 import read

MEL = 2e-5  # tolerance between float32 results with values up to 7
ALL = StreamConfig(left_blocks=-1)


def test_the_published_window(tmp_path: Path) -> None:
    """Frames attend to the prompt and to the two blocks before their own.

    The first block that misses a block is the fourth.
    """
    folder = write_folder("stepaudio2", tmp_path)
    model, wide = (
        Token2Wav.load(folder, stream=stream, runtime=CPU) for stream in (WHOLE_BLOCKS, ALL)
    )
    voice, tokens = a_voice(30), some_tokens(125)
    mel, unbounded = model.mel(tokens, voice), wide.mel(tokens, voice)
    assert off(mel[:, :150], unbounded[:, :150]) <= MEL
    assert off(mel[:, 150:], unbounded[:, 150:]) > 0.01
    with model.stream(voice) as stream:
        stream.push(some_tokens(50))
        pages = model.pipeline.flow.usage().used
        stream.push(some_tokens(500))
        assert model.pipeline.flow.usage().used == pages


def test_the_published_vocoder_needs_no_description(tmp_path: Path) -> None:
    config = read(write_yaml(tmp_path, golden_of("stepaudio2"), hift=False).parent)
    assert (config.vocoder.base_channels, config.vocoder.f0_channels, config.samples_per_token) == (
        512,
        512,
        960,
    )
    # the state holds the context before a chunk
    assert config.lookahead_tokens == 3
