"""Many distinct voices from clients take bounded memory, and harm no stream.
`tests/serving/door/test_voices.py` shows which voices are kept.

Other numbers of voices: `VOICES=10000 pytest tests/served/test_many_voices.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.golden import TINY, GoldenSet
from testkit.rigs.serve_command import speaking_beside
from testkit.rigs.server_rig import Rig
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY
from token2wav import Voice
from token2wav_client import ClientVoice

VOICES = int(os.environ.get("VOICES", "250"))
AT_ONCE = 8
STREAMS = 16
KEPT = 4 * STREAMS  # voices that this server remembers: at most 26 MB of the large ones
PROMPT_TOKENS = 625  # 25 s, in a voice of 400 kB
UNKNOWN_TOKEN = 100_000
# Growth of the engine after the first voices. All of the others would be over 90 MiB.
WARM, GROWTH_MIB = 2 * KEPT, 60.0


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    settings = f"limits: {{streams: {STREAMS}, idle_seconds: 600}}\nruntime: {{cache_mib: 96}}"
    with Rig.start(TINY, tmp_path_factory.mktemp("voices"), settings) as rig:
        yield rig


@pytest.fixture(autouse=True)
def _another_stream_keeps_every_sample(
    narrow: Rig, golden: GoldenSet, voice: ClientVoice, whole: NDArray[np.float32]
) -> Iterator[None]:
    with speaking_beside(narrow.server.grpc_url, voice, golden.tokens) as ended:
        yield
        assert np.abs(ended() - whole).max() <= SERVER_EQUALS_LIBRARY


def test_memory_is_bounded(narrow: Rig, golden: GoldenSet) -> None:
    """Large voices, each with an utterance that is refused: to compute their prompts would take
    minutes.
    """
    process = narrow.server.engine_pid
    before = 0.0
    with narrow.connect() as connection:
        for numbers in batches(range(WARM + VOICES)):
            for number in numbers:
                connection.send([UNKNOWN_TOKEN], large(golden.voice, number))
            errors = connection.answers(len(numbers)).errors
            assert len(errors) == len(numbers)
            assert all("is outside the vocabulary" in error for error in errors)
            if numbers.stop == WARM:
                before = resident_mib(process)
    grown = resident_mib(process) - before
    assert grown <= GROWTH_MIB


def batches(numbers: range) -> Iterator[range]:
    for first in range(0, len(numbers), AT_ONCE):
        yield numbers[first : first + AT_ONCE]


def large(like: Voice, number: int) -> Voice:
    """Returns a voice with a long prompt, a different one for each number."""
    mel = np.resize(like.prompt_mel, (2 * PROMPT_TOKENS, like.prompt_mel.shape[1]))
    return Voice(
        np.resize(like.prompt_tokens, PROMPT_TOKENS),
        mel,
        like.speaker_embedding + np.float32(number / 64),
    )


def resident_mib(process: int) -> float:
    """Returns the memory of a process without file-backed and shared memory."""
    status = Path(f"/proc/{process}/status").read_text()
    match = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    assert match
    return int(match[1]) / 1024
